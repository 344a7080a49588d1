"""An explanation names the mistake, says where it is, and says so when nothing fits."""

from __future__ import annotations

import pytest
import torch

from harness.backends.protocol import Output
from harness.backends.registry import make
from harness.case import Case
from harness.explain import Explanation, explain, explain_crash, explain_violations
from harness.faults.backend import planted
from harness.faults.variant import BASE, VARIANTS
from harness.inputs import make_inputs
from harness.regimes import load
from harness.relations import run_relation
from harness.report.look import look_again
from harness.run import run_case

ARITHMETIC = VARIANTS[BASE].arithmetic
CASE = Case(
    heads=20,
    query_tokens=3,
    lengths=(130, 64),
    page_size=16,
    cache_format="e4m3fn",
    cache_scale=0.37,
    query_scale=1.7,
    placement="permuted",
    query_layout="fused",
)


def explained(*names: str, case: Case = CASE, patience: float = 60.0) -> Explanation:
    """Plant faults in a variant that rounds otherwise than the one they are explained in."""
    backend = planted(*names, variant=VARIANTS["exp2"])
    inputs = make_inputs(case)
    return explain(inputs, backend.run(inputs), ARITHMETIC, rerun=backend.run, patience=patience)


@pytest.mark.parametrize(
    "name",
    [
        "value-scale-dropped",
        "query-scale-dropped",
        "softmax-scale-5-percent",
        "output-truncated",
        "rope-ignored",
        "lse-base-2",
        "heads-swapped",
        "fold-takes-next-cache",
        "causal-one-more",
        "last-split-dropped",
        "merge-without-lse",
        "split-edge-dropped",
        "table-stale-last-page",
        "query-strides-exchanged",
        "first-request-for-all",
    ],
)
def test_the_planted_fault_is_named_first(name: str) -> None:
    found = explained(name)
    assert found.candidates and found.candidates[0].names == (name,), str(found)
    assert found.candidates[0].within_rounding
    assert found.candidates[0].residual < found.residual


@pytest.mark.parametrize(
    ("name", "length"),
    [("merge-by-tokens", 2), ("split-edge-dropped", 33), ("causal-from-the-left", 2), ("length-one-too-long", 1)],
)
def test_a_smallest_case_is_told_from_others_with_the_same_answer_there(name: str, length: int) -> None:
    found = explained(name, case=Case(heads=1, lengths=(length,)))
    alike = [one.names for one in found.candidates if one.within_rounding]
    assert alike[0] == (name,) and len(alike) > 1, str(found)


def test_a_regime_without_tiles_is_explained_too() -> None:
    backend = planted("tile-edge-token-dropped", variant=VARIANTS["splits-2"])
    inputs = make_inputs(Case(heads=1, lengths=(65,)))
    found = explain(inputs, backend.run(inputs), load().named("sdpa-fp32").arithmetic, rerun=backend.run)
    assert found.candidates and found.candidates[0].within_rounding


def test_two_faults_are_named_as_two() -> None:
    found = explained("value-scale-twice", "middle-token-lost")
    assert set(found.candidates[0].names) == {"value-scale-twice", "middle-token-lost"}


def test_nothing_fits_noise() -> None:
    inputs = make_inputs(CASE)
    generator = torch.Generator().manual_seed(1)
    out = torch.randn(inputs.out.shape, generator=generator).to(inputs.out.dtype)
    found = explain(inputs, Output(out=out, lse=None), ARITHMETIC, patience=60.0)
    assert not any(one.within_rounding for one in found.candidates)
    assert "none of" in str(found) or "comes near" in str(found)


def test_it_says_which_rows_are_wrong() -> None:
    found = str(explained("fold-takes-next-cache"))
    assert "heads 16-19 of 20" in found
    assert "query tokens 0-1 of 3" in str(explained("causal-one-more"))


def test_slot_coded_content_tells_which_tokens_are_missing_and_doubled() -> None:
    assert "request 0: tokens 64, 128 missing" in str(explained("split-edge-dropped"))
    assert "request 0: tokens 63, 127 doubled" in str(explained("split-edge-doubled"))
    assert "request 1: tokens 32-63 missing (all of page 2-3, split 1 of 2)" in str(explained("last-split-dropped"))


def test_what_was_not_tried_for_lack_of_time_is_said() -> None:
    found = explained("value-scale-dropped", patience=0.0)
    assert found.untried and "not tried for lack of time" in str(found)


def test_an_explanation_keeps_its_time() -> None:
    case = Case(heads=16, lengths=(1000, 200), page_size=16)
    assert explained("value-tile-zero", case=case, patience=1.0).seconds < 20


def test_a_crash_is_explained_by_what_crashes_too() -> None:
    case = Case(heads=2, lengths=(40, 70), placement="high", pool_rows=3_000_000, page_size=16)  # between 2^31 and 2^32 bytes
    assert "offset-signed-faults" in explain_crash(case, ARITHMETIC)


def test_touched_memory_is_explained_by_what_touches_it_too() -> None:
    assert explain_violations(CASE, ARITHMETIC, [("input-changed", "cache")]) == ("writes-cache",)
    assert explain_violations(CASE, ARITHMETIC, [("guard-touched", "out")]) == ("writes-past-output",)


@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("value-scale-dropped", CASE),
        ("writes-cache", CASE),
        ("writes-past-output", CASE),
        ("offset-signed-faults", Case(heads=2, lengths=(40, 70), placement="high", pool_rows=3_000_000, page_size=16)),
    ],
)
def test_the_gate_says_what_a_failure_of_any_kind_looks_like(name: str, case: Case) -> None:
    backend, regimes = make(f"fault:{name}"), load()
    result = run_case(case, backend, regimes)
    assert result.verdict.kind == "FAIL"
    assert any(name in line for line in look_again(result, regimes, device="cpu", pictures=False, child=False).lines)


def test_the_gate_says_what_outlives_a_call() -> None:
    backend, regimes = make("fault:stale-cache-scale"), load()
    result = run_relation(CASE, "repeat", backend, regimes)
    assert (result.verdict.kind, result.verdict.fault) == ("FAIL", "nondeterministic")
    assert any(
        "stale-cache-scale" in line for line in look_again(result, regimes, device="cpu", pictures=False, child=False).lines
    )
