"""The asm adaptor asks only for cells that have a kernel, and calls them as AITER documents."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.backends.aiter_asm import AiterAsm, AsmLibrary, load_library
from harness.backends.aiter_asm_cells import read_cells, why_no_cell
from harness.backends.aiter_source import SOURCE_VARIABLE, named_sources, parse_source
from harness.backends.calling import keywords_for
from harness.backends.protocol import NotInstalled, Unsupported
from harness.case import Case
from harness.inputs import make_inputs
from references.oracle import oracle
from tests.aiter_checkout import make_checkout

CUDA = torch.device("cuda")
#: Largest relative error (2-norms of a row) of answers whose probabilities are rounded to bf16 and to e4m3.
WITHIN = {"bf16": 0.005, "e4m3fn": 0.05}
needs_source = pytest.mark.skipif(
    not os.environ.get(SOURCE_VARIABLE), reason=f"needs a checkout of AITER: name one in {SOURCE_VARIABLE}"
)


def test_the_table_has_a_reason_for_every_cell() -> None:
    assert len(read_cells()) > 10 and all(cell.why for cell in read_cells())


@pytest.mark.parametrize(
    ("text", "mode"),
    [
        ("v1:H=16:N=130:end", "plain"),
        ("v1:H=16:S=4:N=130:q=e4m3fn:c=e4m3fn:lse=0:end", "plain"),
        ("v1:H=8:S=4:N=130:q=e4m3fn:c=e4m3fn:lse=0:end", "persistent"),
        ("v1:H=96:S=3:N=130:q=e4m3fn:c=e4m3fn:end", "persistent"),
        ("v1:H=48:S=4:N=130:c=e4m3fn:cscale=0.5:lse=0:end", "persistent"),
    ],
)
def test_cells_with_a_kernel_are_asked(text: str, mode: str) -> None:
    assert why_no_cell(Case.parse(text), arch="gfx950", mode=mode) is None


@pytest.mark.parametrize(
    ("text", "mode", "reason"),
    [
        ("v1:H=12:N=130:lse=0:end", "plain", "the call would abort the process. There is one for 16 heads"),
        ("v1:H=16:N=130:c=e4m3fn:lse=0:end", "plain", "no kernel: plain, bf16 query, fp8 cache"),
        ("v1:H=16:S=5:N=130:q=e4m3fn:c=e4m3fn:lse=0:end", "plain", "no kernel"),
        ("v1:H=16:S=2:N=130:q=e4m3fn:c=e4m3fn:end", "persistent", "no log-sum-exp"),
        ("v1:H=16:S=2:N=130:q=e4m3fn:c=e4m3fn:end", "plain", "no log-sum-exp"),
        ("v1:H=32:N=130:end", "plain", "no log-sum-exp"),
        ("v1:H=16:S=5:N=130:c=e4m3fn:lse=0:end", "persistent", "no kernel"),
        ("v1:H=24:N=130:q=e4m3fn:c=e4m3fn:lse=0:end", "persistent", "no kernel"),
        ("v1:H=16:N=130:tokenpad=64:end", "plain", "contiguous rows"),
        ("v1:H=16:S=4:N=3:lse=0:end", "plain", "empty rows"),
        ("v1:H=16:N=130:c=e4m3fnuz:q=e4m3fnuz:lse=0:end", "plain", "takes bf16 and e4m3fn on gfx950"),
        ("v1:H=16:N=130:cscale=0.5:end", "plain", "applies no scale to a bf16 cache"),
    ],
)
def test_cells_without_a_kernel_are_refused_with_what_is_near(text: str, mode: str, reason: str) -> None:
    said = why_no_cell(Case.parse(text), arch="gfx950", mode=mode)
    assert said is not None and reason in said


def test_another_architecture_is_refused() -> None:
    assert "not cuda" in str(why_no_cell(Case.parse("v1:H=16:N=1:end"), arch="cuda", mode="plain"))


def test_a_refused_cell_is_never_called() -> None:
    def explode(**named: Any) -> None:
        raise AssertionError("called")

    backend = AiterAsm(
        "aiter-asm-np", "plain", AsmLibrary(decode=explode, metadata_info=explode, metadata=explode), lambda d: "gfx950"
    )
    with pytest.raises(Unsupported, match="no kernel"):
        backend.run(make_inputs(Case.parse("v1:H=12:N=130:lse=0:end")))


def test_a_source_that_cannot_be_imported_whole_leaves_nothing_behind(tmp_path: Path) -> None:
    text = "import sys\nsys.path.append('gone')\nimport aiter.beside\nraise RuntimeError('ROCm version file not found')"
    root = make_checkout(tmp_path, {"aiter/__init__.py": text, "aiter/beside.py": ""})
    before = list(sys.path), set(sys.modules)
    with pytest.raises(NotInstalled, match=r"need the whole of AITER with ROCm.*ROCm version file not found"):
        load_library(parse_source(str(root)))
    assert (list(sys.path), set(sys.modules)) == before


def test_a_parameter_that_a_call_rests_on_must_exist() -> None:
    def old(q: Any) -> None: ...

    with pytest.raises(NotInstalled, match="it lacks kv_scale"):
        keywords_for(old, {"q": 1, "kv_scale": 2})


def test_a_required_parameter_that_is_unknown_is_refused() -> None:
    def new(q: Any, window: int) -> None: ...

    with pytest.raises(NotInstalled, match="requires window"):
        keywords_for(new, {"q": 1})


def test_what_a_call_merely_states_may_be_missing() -> None:
    def old(q: Any) -> None: ...

    assert keywords_for(old, {"q": 1}, {"causal": True}) == {"q": 1}


@pytest.fixture(scope="module")
def standing_in() -> Iterator[Any]:
    """AITER's own dispatch from the first named checkout, its compiled entry points stood in."""
    from harness.backends.aiter_modules import AiterModules
    from tests.aiter_standin import stood_in

    modules = AiterModules(named_sources()[0], answered=True)
    if not modules.has("aiter.mla"):
        pytest.skip(f"{named_sources()[0].root} has no aiter/mla.py")
    with stood_in(modules) as made:
        yield made


@needs_source
@pytest.mark.parametrize(
    ("mode", "text"),
    [
        ("plain", "v1:H=16:N=130+64:end"),
        ("plain", "v1:H=16:N=50x33:end"),
        ("plain", "v1:H=16:S=3:N=130+70:lse=0:end"),
        ("plain", "v1:H=128:S=2:N=130+70:lse=0:end"),
        ("plain", "v1:H=16:S=2:N=130+70:q=e4m3fn:c=e4m3fn:qscale=0.5:cscale=0.25:lse=0:end"),
        ("plain", "v1:H=8:S=2:N=100:T=16:qscale=2.0:lse=0:end"),
        ("persistent", "v1:H=16:N=130+64:end"),
        ("persistent", "v1:H=16:N=40x33:end"),
        ("persistent", "v1:H=96:S=2:N=130+64:q=e4m3fn:c=e4m3fn:qscale=0.5:cscale=0.25:lse=0:end"),
        ("persistent", "v1:H=48:S=3:N=130+64:c=e4m3fn:cscale=0.25:lse=0:end"),
        ("persistent", "v1:H=32:N=130+64:q=e4m3fn:c=e4m3fn:table=ragged:end"),
        ("persistent", "v1:H=80:S=4:N=40+300:q=e4m3fn:c=e4m3fn:layout=transposed:end"),
    ],
)
def test_aiters_dispatch_answers_right_over_the_stand_in(standing_in: Any, mode: str, text: str) -> None:
    library, _ = standing_in
    case = Case.parse(text)
    backend = AiterAsm("aiter-asm", mode, library, lambda device: "gfx950")
    assert backend.why_not(case, CUDA) is None
    inputs = make_inputs(case)
    output = backend.run(inputs)
    expected = oracle(inputs.problem())
    error = (output.out.double() - expected.out).norm(dim=-1) / expected.out.norm(dim=-1)
    assert error.max() < WITHIN[case.query_format] and not inputs.violations()
    if case.lse:
        assert output.lse is not None and (output.lse - expected.lse).abs().max() < 1e-5


@needs_source
def test_omitted_formats_of_the_metadata_are_seen_by_the_stand_in(standing_in: Any) -> None:
    from tests.aiter_standin import Abort

    library, _ = standing_in

    def forgetful(**named: Any) -> None:
        library.metadata(**{name: value for name, value in named.items() if not name.startswith("dtype")})

    functools.update_wrapper(forgetful, library.metadata)
    broken = AsmLibrary(decode=library.decode, metadata_info=library.metadata_info, metadata=forgetful)
    backend = AiterAsm("aiter-asm-ps", "persistent", broken, lambda device: "gfx950")
    with pytest.raises(Abort, match="planned for heads"):
        backend.run(make_inputs(Case.parse("v1:H=48:N=130:q=e4m3fn:c=e4m3fn:end")))


@needs_source
def test_an_lse_that_aiter_leaves_unwritten_is_seen(standing_in: Any) -> None:
    library, _ = standing_in
    case = Case.parse("v1:H=32:N=4x256:end")
    inputs = make_inputs(case)
    backend = AiterAsm("aiter-asm-np", "plain", library, lambda device: "gfx950")
    _, lse = library.decode(**backend.arguments(inputs))
    assert lse.isnan().all(), "with one split the plain kernel writes no lse for 32 heads, so the table must refuse it"
