"""AITER's Gluon backend: how a case is laid out, what is refused; with a checkout also what the kernel answers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="AITER's modules import triton, which is not installed here")

from harness.backends.aiter_gluon import AiterGluon
from harness.backends.aiter_modules import modules_of
from harness.backends.aiter_source import SOURCE_VARIABLE, AiterSource, named_sources, parse_source
from harness.backends.protocol import NotInstalled, Unsupported
from harness.case import Case
from harness.inputs import make_inputs
from references.oracle import oracle
from tests.aiter_checkout import GLUON, WRAPPER, make_checkout

CPU = torch.device("cpu")
#: Largest relative error (2-norms of a row) of a kernel with bf16 probabilities, partials and output.
WITHIN = 0.006
needs_source = pytest.mark.skipif(
    not os.environ.get(SOURCE_VARIABLE), reason=f"needs a checkout of AITER: name one in {SOURCE_VARIABLE}"
)


@pytest.fixture
def backend(tmp_path: Path) -> AiterGluon:
    """A backend over a made-up checkout."""
    return AiterGluon("aiter-gluon", parse_source(str(make_checkout(tmp_path, {GLUON: WRAPPER}))))


def test_a_checkout_without_the_kernel_is_named_with_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(NotInstalled, match=r"has no Gluon MLA decode: looked for .*mla_gluon\.py and .*mla_decode_gluon\.py"):
        AiterGluon("aiter-gluon", parse_source(str(make_checkout(tmp_path))))


def test_a_kernel_that_moved_inside_its_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotInstalled, match="defines no mla_gluon"):
        AiterGluon("aiter-gluon", parse_source(str(make_checkout(tmp_path, {GLUON: "x = 1"}))))


def test_one_token_goes_as_three_axes_and_several_as_four(backend: AiterGluon) -> None:
    shapes = {
        text: tuple(backend.arguments(make_inputs(Case.parse(text)))["q_nope"].shape)
        for text in ("v1:H=3:N=5+6:end", "v1:H=3:S=2:N=5+6:end", "v1:H=3:N=5+6:layout=transposed:end")
    }
    assert list(shapes.values()) == [(2, 3, 512), (2, 2, 3, 512), (2, 1, 3, 512)]


def test_the_cache_goes_joint_or_as_two_views(backend: AiterGluon) -> None:
    split = backend.arguments(make_inputs(Case.parse("v1:H=1:N=5:end")))
    joint = backend.arguments(make_inputs(Case.parse("v1:H=1:N=5:layout=fused:end")))
    assert (split["kv_c"].shape[1], split["k_pe"].shape[1], split["kv_pe_offset"]) == (512, 64, 0)
    assert (joint["kv_c"].shape[1], joint["k_pe"], joint["kv_pe_offset"]) == (576, None, 512)


def test_scales_are_python_floats_and_the_query_s_is_folded(backend: AiterGluon) -> None:
    given = backend.arguments(make_inputs(Case.parse("v1:H=1:N=5:c=e4m3fn:cscale=0.3:qscale=2.0:softmax=0.1:end")))
    assert type(given["kv_scale"]) is float and given["kv_scale"] == 0.3 and given["sm_scale"] == 0.2


def test_the_promise_of_a_shortest_length_is_kept(backend: AiterGluon) -> None:
    assert backend.arguments(make_inputs(Case.parse("v1:H=1:N=5+3+9:end")))["min_kv_seq_len"] == 3


def test_a_case_outside_the_contract_is_refused_without_a_call(backend: AiterGluon) -> None:
    with pytest.raises(Unsupported, match="no regime for 97 heads"):
        backend.run(make_inputs(Case.parse("v1:H=97:N=5:end")))


#: What ROCm/aiter #4711 added to stage 2: the output of a split that saw nothing is not multiplied by zero but replaced.
MENDED = 'logits = tl.where(lse[:, None] == -float("inf"), 0.0, logits)'


def source_text(backend: AiterGluon) -> str:
    """Read the module of the wrapper."""
    return modules_of(backend.source, answered=True).path_of(backend._place).read_text()


def sources() -> list[AiterSource]:
    """The checkouts that the environment names, for parameters of tests."""
    return list(named_sources()) if os.environ.get(SOURCE_VARIABLE) else []


@needs_source
@pytest.mark.parametrize("source", sources(), ids=lambda source: source.label)
@pytest.mark.parametrize(
    "text",
    [
        "v1:H=12:N=130+64:end",
        "v1:H=12:N=130:c=e4m3fn:cscale=0.3:end",
        "v1:H=12:S=3:N=130+64:T=16:layout=fused:end",
        "v1:H=96:S=2:N=100:c=e4m3fn:table=ragged:layout=transposed:end",
        "v1:H=2:N=130x130:end",
        "v1:H=2:N=128:place=high:pool=1900000:poison=large:end",
    ],
)
def test_the_real_kernel_agrees_with_the_oracle_inside_its_contract(source: AiterSource, text: str) -> None:
    backend, case = AiterGluon(f"aiter-gluon@{source.label}", source), Case.parse(text)
    reason = backend.why_not(case, CPU)
    if reason is not None:
        pytest.skip(f"outside the contract of {source.label}: {reason}")
    inputs = make_inputs(case)
    output, expected = backend.run(inputs), oracle(inputs.problem())
    error = (output.out.double() - expected.out).norm(dim=-1) / expected.out.norm(dim=-1)
    if "S=3" in text and not backend.contract.promised_splits and MENDED not in source_text(backend):
        assert error.isnan().any(), f"{source.label} lacks what #4711 added and is right all the same: this test is wrong"
        return
    assert error.max() < WITHIN and not inputs.violations()


@needs_source
@pytest.mark.parametrize("source", sources(), ids=lambda source: source.label)
def test_the_sink_is_counted_once_a_split(source: AiterSource) -> None:
    """A finding, pinned: with more than one split the attention sink enters the sum once for each."""
    from harness.emulation import run_all_extremes

    backend = AiterGluon(f"aiter-gluon@{source.label}", source)
    if backend.contract.generation != "0.1.18":
        pytest.skip(f"{source.label} takes no sink")
    modules = modules_of(source, answered=True)
    found = {}
    for text in ("v1:H=4:N=64:end", "v1:H=4:N=256:end"):
        inputs = make_inputs(Case.parse(text))
        expected = oracle(inputs.problem())
        given = backend.arguments(inputs) | {"attn_sink": expected.lse[0, 0].float().contiguous()}
        wrapper = backend._wrapper(modules)
        with modules.entered():
            answer, _ = run_all_extremes(lambda given=given, wrapper=wrapper: wrapper(**given))
        found[text] = (answer[1][0, 0].double() - expected.lse[0, 0]).exp().mean().item()
    # The sink weighs as much as all tokens: the sum doubles. With four splits it grows fivefold.
    assert abs(found["v1:H=4:N=64:end"] - 2) < 0.01
    assert abs(found["v1:H=4:N=256:end"] - 5) < 0.01, "the sink is counted once now: take the finding out of the docs"
