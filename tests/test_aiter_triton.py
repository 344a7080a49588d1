"""The Triton entry points of AITER: contracts, layouts, signatures; with a checkout also their answers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="AITER's modules import triton, which is not installed here")

from harness.backends.aiter_source import SOURCE_VARIABLE, named_sources, parse_source
from harness.backends.aiter_triton import AiterTriton
from harness.backends.aiter_triton_entries import CUDA_DEPTH, ENTRY_POINTS
from harness.backends.protocol import NotInstalled
from harness.backends.token_rows import padded_rows, page_table, ragged_rows, row_lengths
from harness.case import Case
from harness.inputs import make_inputs
from references.oracle import oracle
from tests.aiter_checkout import MLA, make_checkout

CPU = torch.device("cpu")
#: Largest relative error (2-norms of a row) of the paths that sum in fp32.
WITHIN = 0.005
needs_source = pytest.mark.skipif(
    not os.environ.get(SOURCE_VARIABLE), reason=f"needs a checkout of AITER: name one in {SOURCE_VARIABLE}"
)
_ENTRY = ENTRY_POINTS["aiter-triton-mla"]


def checkout(root: Path, parameters: str) -> AiterTriton:
    """Make a backend over a checkout whose function has some parameters."""
    text = f"def mla_decode_fwd({parameters}):\n    out.fill_(1.0)\n"
    return AiterTriton("aiter-triton-mla", parse_source(str(make_checkout(root, {MLA: text}))), _ENTRY)


def test_a_known_signature_is_taken(tmp_path: Path) -> None:
    for number, known in enumerate(_ENTRY.signatures):
        checkout(tmp_path / str(number), ", ".join(known))


def test_an_unknown_signature_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(NotInstalled, match=r"unknown signature of .*mla_decode_fwd.*it has window in addition.*lacks causal"):
        checkout(tmp_path, ", ".join(_ENTRY.signatures[0]).replace("causal", "window"))


def test_a_version_without_the_entry_point_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotInstalled, match=r"has no mla_decode_fwd: looked for .*mla\.py"):
        AiterTriton("aiter-triton-mla", parse_source(str(make_checkout(tmp_path))), _ENTRY)


def test_a_source_that_changes_stops_the_backend(tmp_path: Path) -> None:
    backend = checkout(tmp_path, ", ".join(_ENTRY.signatures[0]))
    (tmp_path / MLA).write_text("# changed")
    with pytest.raises(RuntimeError, match=r"changed on disk during the run: .*mla\.py"):
        backend.run(make_inputs(Case.parse("v1:H=1:N=16:T=16:end")))


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("mla", "v1:H=1:N=1:end", "a page is a tile"),
        ("mla", "v1:H=1:N=1:T=24:end", "a page is a tile"),
        ("mla", "v1:H=1:N=1:T=16:q=e4m3fn:end", "a cache as narrow or narrower"),
        ("decode", "v1:H=1:N=1:q=e4m3fn:c=e4m3fn:end", "takes bf16 queries"),
        ("decode", "v1:H=1:N=1:cscale=0.5:end", "applies no scale to a bf16 cache"),
        ("rope", "v1:H=1:N=1:c=e4m3fn:end", "of one format"),
        ("rope", "v1:H=1:N=20:T=16:pagepad=64:end", "not evenly spaced"),
    ],
)
def test_cases_outside_a_contract_are_named(name: str, text: str, reason: str) -> None:
    said = ENTRY_POINTS[f"aiter-triton-{name}"].why_not(Case.parse(text))
    assert said is not None and reason in said


def test_fp8_dots_shallower_than_cuda_s_are_refused_there_and_nowhere_else(tmp_path: Path) -> None:
    import triton.backends.amd.compiler as amd
    import triton.backends.nvidia.compiler as nvidia
    import triton.language
    from triton.backends.compiler import GPUTarget

    kinds = [triton.language.block_type(triton.language.float8e4nv, [32, 32])] * 2
    assert nvidia.min_dot_size(GPUTarget("cuda", 90, 32))(*kinds)[2] == CUDA_DEPTH
    assert amd.get_min_dot_size(GPUTarget("hip", "gfx950", 64))(*kinds)[2] == 1
    backend = checkout(tmp_path, ", ".join(_ENTRY.signatures[0]))
    shallow = {"T=16:q=e4m3fn:c=e4m3fn": True, "L=64:R=16:T=32:q=e4m3fn:c=e4m3fn": True, "T=32:q=e4m3fn:c=e4m3fn": False,
               "T=16:c=e4m3fn": False, "T=16": False}  # fmt: skip
    for text, refused in shallow.items():
        case = Case.parse(f"v1:H=1:S=1:N=9:{text}:end")
        said = backend.why_not(case, torch.device("cuda"))
        assert (said is not None and "an fp8 dot on CUDA is 32 deep" in said) == refused, text
        assert backend.why_not(case, CPU) is None


@pytest.mark.parametrize("table", ["padded", "ragged"])
@pytest.mark.parametrize("size", [1, 3, 16])
def test_every_form_of_table_leads_to_the_truths_own_rows(table: str, size: int) -> None:
    inputs = make_inputs(Case.parse(f"v1:H=1:N=5+0+17:T={size}:table={table}:place=permuted:end"))
    ends, rows = ragged_rows(inputs)
    assert ends.tolist() == [0, 5, 5, 22] and rows.tolist() == inputs.slots.tolist()
    pages = page_table(inputs)
    assert [int(pages[2, 16 // size]) * size + 16 % size, int(pages[0, 0]) * size] == [rows[-1], rows[0]]
    if table == "padded":
        expanded = padded_rows(inputs)
        assert expanded[2, :17].tolist() == rows[5:].tolist()
        assert all(entry in (-1, 2**31 - 1) or size == 1 for entry in expanded[0, 5:].tolist())


def test_query_tokens_as_requests_see_what_they_may() -> None:
    inputs = make_inputs(Case.parse("v1:H=1:S=3:N=5+2:end"))
    assert row_lengths(inputs).tolist() == [3, 4, 5, 0, 1, 2]


@needs_source
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("mla", "v1:H=12:S=3:N=128+64:T=16:end"),
        ("mla", "v1:H=5:S=2:N=100+64:T=64:c=e4m3fn:cscale=0.3:table=ragged:poison=large:end"),
        ("grouped", "v1:H=12:S=2:N=130+64:T=16:qscale=0.5:end"),
        ("grouped", "v1:H=3:N=77:c=e4m3fn:cscale=0.3:table=ragged:end"),
        ("rope", "v1:H=12:S=2:N=130+64:layout=fused:end"),
        ("rope", "v1:H=3:N=77:q=fp16:c=fp16:table=ragged:end"),
    ],
)
def test_the_real_entry_points_agree_with_the_oracle(name: str, text: str) -> None:
    entry = f"aiter-triton-{name}"
    try:
        backend = AiterTriton(entry, named_sources()[0], ENTRY_POINTS[entry])
    except NotInstalled as reason:
        pytest.skip(str(reason))
    case = Case.parse(text)
    assert backend.why_not(case, CPU) is None
    inputs = make_inputs(case)
    output, expected = backend.run(inputs), oracle(inputs.problem())
    error = (output.out.double() - expected.out).norm(dim=-1) / expected.out.norm(dim=-1)
    assert error.max() < WITHIN and not inputs.violations()
