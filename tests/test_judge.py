"""The judge: right kernels pass, every check fails where it should, and nothing is said that was not measured."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch

import harness.judge as judging
import harness.measure as measuring
from harness.backends.protocol import EMPTY_ROWS, Output
from harness.case import CONTENTS, Case
from harness.faults.backend import Planted
from harness.faults.variant import VARIANTS
from harness.inputs import Inputs, make_inputs
from harness.judge import judge
from harness.measure import CHECKS, measure, measure_truth
from harness.memory import empty
from harness.regimes import Regime, load
from harness.verdict import KINDS, Verdict
from references import terms
from references.arithmetic import Splits
from references.oracle import oracle
from references.problem import Answer, Problem
from tests.judged import ARITHMETIC, LIMITS, REGIME, answered, regime
from tests.simulated import Mistake

CASE = Case(heads=3, query_tokens=2, lengths=(150, 40), latent=128, rope=32, page_size=16, cache_scale=0.7, seed=3)
#: Two rows that see nothing: a request of one token for two query tokens, and an empty one.
EMPTY = CASE.replace(lengths=(1, 0, 9))


@pytest.mark.parametrize("content", CONTENTS)
def test_a_right_kernel_passes(content: str) -> None:
    verdict = judge(*answered(CASE.replace(content=content)), REGIME)
    assert verdict.kind in ("PASS", "UNTRUSTED"), verdict.message
    assert verdict.measurements.rows == 12
    assert max(verdict.measurements.ratios.values()) <= 1


@pytest.mark.parametrize("content", ["gaussian", "decorrelated", "rising", "falling", "peak-tail", "ties"])
def test_a_right_kernel_passes_though_its_tiles_and_splits_are_not_those_declared(content: str) -> None:
    other = dataclasses.replace(ARITHMETIC, tile=16, splits=Splits(kind="even", count=5, tile=16))
    for amplitude in (1.0, 10.0):
        case = CASE.replace(content=content, amplitude=amplitude, query_tokens=1)
        verdict = judge(*answered(case, regime(arithmetic=other)), REGIME)
        assert verdict.fault is None, verdict.message


@pytest.mark.parametrize("mistake", [Mistake(values=1.01), Mistake(scores=1.01), Mistake(dropped=1), Mistake(truncated=True)])
def test_a_small_mistake_fails(mistake: Mistake) -> None:
    verdict = judge(*answered(CASE, mistake=mistake), REGIME)
    assert (verdict.kind, verdict.fault) == ("FAIL", "mismatch"), verdict.message


def _one_far(inputs: Inputs) -> None:
    inputs.out[0, 1, 2, 5] += 0.3


def _all_a_little(inputs: Inputs) -> None:
    inputs.out.mul_(1.01)


def _one_a_little(inputs: Inputs) -> None:
    yardstick = measure_truth(inputs.problem(), oracle(inputs.problem()), REGIME)
    step = 1.2 * yardstick.element_limit * yardstick.variance[0, 0, 9].sqrt()
    inputs.out[0, 0, 0, 9] = yardstick.out[0, 0, 9] + step


def _lse_off(inputs: Inputs) -> None:
    assert inputs.lse is not None
    inputs.lse[1, 0, 0] += 1e-3


@pytest.mark.parametrize(
    ("check", "spoil"), [("hard", _one_far), ("row", _all_a_little), ("element", _one_a_little), ("lse", _lse_off)]
)
def test_each_check_can_fail(check: str, spoil: Callable[[Inputs], None]) -> None:
    inputs, output = answered(CASE)
    assert judge(inputs, output, REGIME).kind == "PASS"
    spoil(inputs)
    verdict = judge(inputs, output, REGIME)
    assert (verdict.kind, verdict.fault) == ("FAIL", "mismatch")
    assert verdict.measurements.ratios[check] > 1
    assert CHECKS[check] in verdict.message


def test_an_answer_that_conforms_but_is_too_inaccurate_is_called_so() -> None:
    verdict = judge(*answered(CASE), regime(accuracy=1e-4))
    assert (verdict.kind, verdict.fault) == ("FAIL", "inaccurate")
    assert CHECKS["accuracy"] in verdict.message


@pytest.mark.parametrize("latent", [1, 2, 8, 64])
@pytest.mark.parametrize("variant", ["splits", "p-e4m3"])
def test_a_right_kernel_is_accurate_however_narrow_its_rows(variant: str, latent: int) -> None:
    backend, rules = planted_nothing(variant)
    for seed in range(3):
        inputs = make_inputs(CASE.replace(heads=24, latent=latent, seed=seed))
        assert judge(inputs, backend.run(inputs), rules, models=False).fault is None


def test_a_narrow_row_can_be_inaccurate() -> None:
    assert judge(*answered(CASE.replace(latent=8)), regime(accuracy=1e-4)).fault == "inaccurate"
    assert judge(*answered(CASE.replace(latent=7)), regime(accuracy=1e-4)).fault is None


def planted_nothing(variant: str) -> tuple[Planted, Regime]:
    """Make the right model of a variant, and its regime."""
    return Planted(name=f"model:{variant}", variant=VARIANTS[variant]), load().named(f"model-{variant}")


#: fp8 probabilities relative to each split's own maximum: what one split rounds in the subnormals is exact in another.
OWN_MAXIMA = (
    "v1:H=17:S=1:N=17:R=0:T=3:q=e4m3fn:c=e4m3fn:qscale=0.00390625:cscale=0.0371:softmax=1.0:content=edges:amp=3.0:seed=603687:end",
    "v1:H=16:S=1:N=1025:R=0:T=64:q=e4m3fn:c=e4m3fn:qscale=0.00390625:cscale=0.00390625:softmax=1.0:content=edges:amp=30.0:"
    "poison=large:seed=755198:end",
)


@pytest.mark.parametrize("case", OWN_MAXIMA)
@pytest.mark.parametrize("count", [1, 16], ids=["the row's maximum", "each split's maximum"])
def test_splits_may_know_their_own_maximum_only(case: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, rules = planted_nothing("p-e4m3-row")
    splits = Splits(kind="even", count=count, tile=16) if count > 1 else Splits()
    arithmetic = dataclasses.replace(backend.variant.arithmetic, splits=splits)
    backend = dataclasses.replace(backend, variant=dataclasses.replace(backend.variant, arithmetic=arithmetic))
    inputs = make_inputs(Case.parse(case))
    output = backend.run(inputs)
    verdict = judge(inputs, output, rules, models=False)
    assert verdict.kind == "PASS", verdict.message
    if count > 1:  # a budget that takes the row's maximum for everybody's does not cover it
        monkeypatch.setattr(terms.InUse, "find", lambda self, piece: self._softmax.maximum[None])
        narrow = judge(inputs, output, rules, models=False)
        assert narrow.fault == "mismatch" and narrow.measurements.ratios["element"] > 3


def test_accuracy_is_not_asked_of_rows_with_huge_scores() -> None:
    wild = CASE.replace(amplitude=100.0)
    assert judge(*answered(wild), regime(accuracy=1e-4)).fault is None
    strict = regime(accuracy=1e-4, limits=dataclasses.replace(LIMITS, conditioned=1e6))
    assert judge(*answered(wild), strict).fault == "inaccurate"


@pytest.mark.parametrize("where", [(0, 0, 0), (1, 1, 2)])
def test_rows_never_written_are_unwritten(where: tuple[int, int, int]) -> None:
    inputs, output = answered(CASE)
    empty(inputs.out[where])
    verdict = judge(inputs, output, REGIME)
    assert verdict.fault == "unwritten"
    assert f"request {where[0]}, query token {where[1]}, head {where[2]}" in verdict.message


@pytest.mark.parametrize("code", [0x7FC0, 0x7FFF, 0xFFC0, 0xFFFF])
@pytest.mark.parametrize("output_format", ["bf16", "fp16", "fp32"])
def test_a_nan_that_a_kernel_writes_is_no_unwritten_element(code: int, output_format: str) -> None:
    rules = regime(arithmetic=dataclasses.replace(ARITHMETIC, output=output_format))
    inputs, output = answered(CASE, rules)
    inputs.out[0, 0, 0].view(torch.int16).fill_(code - (1 << 16) if code >> 15 else code)
    assert judge(inputs, output, rules).fault == "non-finite"


def test_an_lse_never_written_is_unwritten() -> None:
    inputs, output = answered(CASE)
    assert inputs.lse is not None
    inputs.lse[1, 0, 1] = make_inputs(CASE).lse[1, 0, 1]  # type: ignore[index]
    assert judge(inputs, output, REGIME).fault == "unwritten"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_said_to_be(value: float) -> None:
    inputs, output = answered(CASE)
    inputs.out[0, 0, 0, 0] = value
    assert judge(inputs, output, REGIME).fault == ("non-finite" if math.isnan(value) else "mismatch")
    inputs, output = answered(CASE)
    assert inputs.lse is not None
    inputs.lse[0, 0, 0] = value
    assert judge(inputs, output, REGIME).fault == "non-finite"


def _nothing(inputs: Inputs) -> None:
    """Leave empty rows as the run began: poison."""
    fresh = make_inputs(inputs.case)
    assert inputs.lse is not None and fresh.lse is not None
    for at in ((0, 0), (1, 0), (1, 1)):
        inputs.out[at].view(torch.int16).copy_(fresh.out[at].view(torch.int16))
        inputs.lse[at] = fresh.lse[at]


def _zero(inputs: Inputs) -> None:
    """Leave what the simulated kernel writes to empty rows: zeros and minus infinity."""


def _nonsense(inputs: Inputs) -> None:
    assert inputs.lse is not None
    inputs.out[1] = 1.0
    inputs.lse[1] = math.inf


@pytest.mark.parametrize("policy", EMPTY_ROWS)
@pytest.mark.parametrize("spoil", [_nothing, _zero, _nonsense])
def test_rows_that_see_nothing_are_held_to_the_policy(policy: str, spoil: Callable[[Inputs], None]) -> None:
    inputs, output = answered(EMPTY)
    spoil(inputs)
    verdict = judge(inputs, output, REGIME, empty_rows=policy)
    if policy == "undefined" or (policy, spoil) in (("zeros", _zero), ("untouched", _nothing)):
        assert verdict.kind == "PASS", verdict.message
    else:
        assert verdict.fault == ("unwritten" if (policy, spoil) == ("zeros", _nothing) else "mismatch"), verdict.message


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="empty_rows is one of zeros"):
        judge(*answered(CASE), REGIME, empty_rows="ones")


def test_a_case_in_which_no_row_sees_a_token_is_held_to_the_policy_alone() -> None:
    verdict = judge(*answered(CASE.replace(lengths=(0, 0))), REGIME)
    assert verdict.kind == "PASS" and verdict.measurements.rows == 0


def test_a_changed_input_is_reported_before_anything_else() -> None:
    inputs, output = answered(CASE)
    inputs.cache.view(torch.int16)[int(inputs.slots[0]) // 16, 0, 0] ^= 1
    inputs.out.zero_()
    verdict = judge(inputs, output, REGIME)
    assert verdict.fault == "input-changed" and "cache" in verdict.message


def test_a_touched_guard_is_reported_though_the_answer_is_right() -> None:
    inputs, output = answered(CASE)
    inputs.out.as_strided((1,), (1,), inputs.out.storage_offset() + inputs.out.numel()).zero_()
    assert judge(inputs, output, REGIME).fault == "guard-touched"


def test_a_failure_lists_its_worst_rows_and_elements() -> None:
    inputs, output = answered(CASE)
    inputs.out[1, 0, 2, 7] += 2.0
    verdict = judge(inputs, output, REGIME)
    row, element = verdict.measurements.worst_rows[0], verdict.measurements.worst_elements[0]
    assert row.index == (1, 0, 2) and element.index == (1, 0, 2, 7)
    truth = oracle(inputs.problem()).out[1, 0, 2, 7].item()
    assert element.oracle == truth
    assert element.expected == torch.tensor(truth).to(torch.bfloat16).item()
    assert element.actual == inputs.out[1, 0, 2, 7].item()
    spacing = 2.0 ** (math.frexp(truth)[1] - 8)
    assert element.ulps == (element.actual - element.expected) / spacing
    for said in (str(CASE), "regime tested", str(row), str(element), "ulp"):
        assert said in verdict.message


def test_a_wrong_reference_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(problem: Problem) -> Answer:
        answer = oracle(problem)
        return Answer(out=answer.out * 1.01, lse=answer.lse)

    monkeypatch.setattr(judging, "mla_decode", wrong)
    verdict = judge(*answered(CASE), REGIME)
    assert (verdict.kind, verdict.fault) == ("ERROR", None)
    assert "reference strays from the fp64 oracle" in verdict.message


def test_a_reference_a_little_off_does_not_fail_a_right_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    # Within fp32's own errors of the truth, and beyond a limit that is set to be broken by it.
    def near(problem: Problem) -> Answer:
        answer = oracle(problem)
        return Answer(out=answer.out, lse=answer.lse + 2e-6)

    monkeypatch.setattr(judging, "mla_decode", near)
    inputs, output = answered(CASE)
    assert inputs.lse is not None
    inputs.lse.copy_(oracle(inputs.problem()).lse)
    tight = regime(limits=dataclasses.replace(LIMITS, lse=1e-6 / 4))
    assert judge(inputs, output, tight).fault is None or judge(inputs, output, REGIME).kind == "PASS"


def test_a_budget_without_a_number_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging, "measure_truth", lambda *given: _without_number(measure_truth(*given)))
    verdict = judge(*answered(CASE), REGIME)
    assert verdict.kind == "ERROR" and "no number" in verdict.message


def _without_number(yardstick: judging.Yardstick) -> judging.Yardstick:
    yardstick.variance[0, 0, 0] = math.nan
    return yardstick


def test_an_fp32_answer_is_measured_against_the_oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    def unused(problem: Problem) -> Answer:
        raise AssertionError("the fp32 reference is no truth for an fp32 answer")

    monkeypatch.setattr(judging, "mla_decode", unused)
    fine = regime(arithmetic=dataclasses.replace(ARITHMETIC, output="fp32", partial="fp32"))
    assert judge(*answered(CASE, fine), fine).kind == "PASS"


def test_an_output_of_another_format_than_the_row_says_is_ours() -> None:
    inputs, output = answered(CASE)
    verdict = judge(inputs, Output(out=output.out.float(), lse=output.lse), REGIME)
    assert verdict.kind == "ERROR" and "mend the row" in verdict.message


def test_values_beyond_the_format_may_be_infinite_or_the_largest_but_of_their_sign() -> None:
    narrow = regime(arithmetic=dataclasses.replace(ARITHMETIC, output="fp16", partial="fp32"))
    huge = CASE.replace(lengths=(1,), query_tokens=1, cache_scale=2.0**20)
    inputs, output = answered(huge, narrow)
    over = inputs.out.isinf()
    assert over.any()
    assert judge(inputs, output, narrow).fault is None
    inputs.out.clamp_(-65504, 65504)
    assert judge(inputs, output, narrow).fault is None
    for wrong in (-inputs.out[over], torch.full_like(inputs.out[over], 1.0), -torch.inf * inputs.out[over]):
        inputs.out[over] = wrong
        assert judge(inputs, output, narrow).fault == "mismatch"


def test_a_pass_that_a_wrong_answer_shares_is_untrusted() -> None:
    # Scores this small leave the mean of V within a rounding of the truth.
    verdict = judge(*answered(CASE.replace(amplitude=1e-5, lse=False)), REGIME)
    assert verdict.kind == "UNTRUSTED"
    assert verdict.measurements.nulls["mean"] == "passed"
    assert "the mean of V" in verdict.message


def test_a_wrong_lse_that_no_check_could_tell_apart_is_no_evidence_where_the_output_is_the_truth() -> None:
    # One token: whatever scores are, the output is its V. A score of some 1e-7 is nothing to an fp32 log-sum-exp.
    one = CASE.replace(lengths=(1,), query_tokens=1)
    faint, plain = judge(*answered(one.replace(amplitude=1e-7)), REGIME), judge(*answered(one), REGIME)
    assert faint.kind == "PASS", faint.message
    assert (faint.measurements.nulls["key-scale-dropped"], plain.measurements.nulls["key-scale-dropped"]) == ("same", "seen")


def test_a_wrong_answer_that_is_the_truth_is_no_evidence() -> None:
    verdict = judge(*answered(CASE.replace(lengths=(1,), query_tokens=1)), REGIME)
    assert verdict.kind == "PASS"
    assert verdict.measurements.nulls["mean"] == "same"


def test_a_plain_case_would_have_seen_every_sensitivity() -> None:
    verdict = judge(*answered(CASE), REGIME)
    assert verdict.kind == "PASS"
    assert set(verdict.measurements.nulls.values()) == {"seen"}
    assert set(verdict.measurements.sensitivities.values()) == {True}
    assert "split-edge-dropped" in verdict.measurements.sensitivities


def test_what_the_longest_request_does_not_see_is_asked_of_the_others_that_it_applies_to() -> None:
    # A needle hides every other token; the second request has no page edge.
    unseen = CASE.replace(lengths=(150, 9), content="needle", amplitude=10.0, seed=4)
    verdict = judge(*answered(unseen), REGIME)
    assert verdict.measurements.sensitivities["page-edge-dropped"] is False
    seen = judge(*answered(unseen.replace(lengths=(150, 17))), REGIME)
    assert seen.measurements.sensitivities["page-edge-dropped"] is True


def test_rows_are_measured_one_request_or_all_alike() -> None:
    inputs, output = answered(CASE)
    yardstick = measure_truth(inputs.problem(), oracle(inputs.problem()), REGIME)
    error = output.out.double().reshape(yardstick.out.shape) - yardstick.out
    both, second = measure(yardstick, error, None), measure(yardstick, error[1:], None, [1])
    assert torch.equal(both.z[1:], second.z)
    assert torch.equal(both.worst()[1:], second.worst())


@pytest.mark.parametrize(("kind", "fault"), [("FAIL", None), ("PASS", "mismatch"), ("FAIL", "odd"), ("GOOD", None)])
def test_a_verdict_that_contradicts_itself_is_refused(kind: str, fault: str | None) -> None:
    with pytest.raises(ValueError, match=r"verdict is one of|FAIL has one of"):
        Verdict(kind=kind, fault=fault, message="")
    assert "FAIL" in KINDS


def test_weights_that_do_not_fit_are_worked_out_again(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = judge(*answered(CASE), REGIME).measurements
    monkeypatch.setattr(measuring, "KEPT_BYTES", 0)
    assert judge(*answered(CASE), REGIME).measurements == whole
