"""The budget covers correct kernels of every arithmetic, closely, and no wrong one.

1. Correct kernels are simulated: rounding by rounding, tile by tile, split by split.
2. Every check is also made on a kernel with one small mistake, which it must see.

Source: facts about each arithmetic are those of references/arithmetic.py; numbers of normal errors, of erf.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from harness.case import CONTENTS, Case
from harness.inputs import make_inputs
from references.arithmetic import Arithmetic, Splits
from references.budget import Budget, budget
from references.formats import FORMATS, encode
from references.oracle import oracle
from references.problem import Problem
from tests.problems import exact_problem, random_problem
from tests.simulated import RIGHT, Mistake, errors

SPLIT = Arithmetic(probability="bf16", output="bf16", partial="bf16", splits=Splits(kind="even", count=4))
ARITHMETICS = {
    "bf16 of 4 splits": SPLIT,
    "bf16 whole": Arithmetic(probability="bf16", output="bf16"),
    "bf16, fp32 partials": Arithmetic(
        probability="bf16", output="bf16", tile=16, splits=Splits(kind="even", count=8, tile=16)
    ),
    "fp16 rows": Arithmetic(probability="fp16", output="fp16", pivot="row", tile=0),
    "fp8": Arithmetic(
        probability="e4m3fn", probability_scale=256.0, output="bf16", splits=Splits(kind="even", count=2)
    ),
    "fp8 without a scale": Arithmetic(
        probability="e4m3fnuz", output="bf16", partial="bf16", normaliser="rounded", splits=Splits(kind="even", count=3)
    ),
    "rounded operands": Arithmetic(
        probability="bf16", output="bf16", operand="bf16", query="bf16", normaliser="rounded",
        splits=Splits(kind="even", count=4),
    ),
    "fp32": Arithmetic(probability="fp32", output="fp32", tile=0),
}  # fmt: skip
#: Chance that any of the rows or elements of a whole test goes past a limit by luck, were errors normal.
LUCK = 1e-6


def quantile(count: int) -> float:
    """Find the deviation that the largest of ``count`` normal numbers exceeds with a chance of LUCK."""
    low, high = 0.0, 40.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if count * math.erfc(middle / math.sqrt(2)) / 2 > LUCK else (low, middle)
    return high


def problem_of(content: str, *, length: int = 300, seed: int = 0, **fields: object) -> Problem:
    case = Case(
        heads=6, query_tokens=2, lengths=(length, 1), content=content, cache_format="e4m3fn", cache_scale=0.7,
        query_scale=1.3, seed=seed, **fields,
    )  # fmt: skip
    return make_inputs(case).problem()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One simulated kernel against its budget, rows that see something only."""

    #: Squared row ratios less one over their spread.
    z: Tensor
    #: Row ratios.
    rho: Tensor
    #: Largest error over the bound.
    hard: float
    #: Largest error over the square root of the variance.
    element: float
    #: Largest error of the log-sum-exp over its bound, and over the square root of its variance.
    lse: tuple[float, float]


def measure(problem: Problem, arithmetic: Arithmetic, mistake: Mistake = RIGHT, found: Budget | None = None) -> Measured:
    found = found or budget(problem, arithmetic)
    error = errors(problem, arithmetic, mistake)
    live = oracle(problem).lse > -torch.inf
    square = error.out.square().sum(-1)[live] / found.variance.sum(-1)[live]
    lse = error.lse.abs()[live]
    return Measured(
        z=(square - 1) / found.spread[live],
        rho=square.sqrt(),
        hard=(error.out.abs() / found.hard)[live].max().item(),
        element=(error.out.abs() / found.variance.sqrt())[live].max().item(),
        lse=((lse / found.lse_hard[live]).max().item(), (lse / found.lse_variance[live].sqrt()).max().item()),
    )


@pytest.mark.parametrize("arithmetic", ARITHMETICS.values(), ids=ARITHMETICS)
@pytest.mark.parametrize("content", CONTENTS)
def test_a_correct_kernel_stays_within_its_budget(arithmetic: Arithmetic, content: str) -> None:
    for amplitude, length in ((1.0, 300), (0.01, 131), (8.0, 66)):
        problem = problem_of(content, length=length, amplitude=amplitude)
        actual = measure(problem, arithmetic)
        assert actual.hard <= 1
        assert actual.z.max().item() <= quantile(len(actual.z))
        assert actual.element <= quantile(len(actual.z) * problem.latent)
        assert actual.lse[0] <= 1
        assert actual.lse[1] <= quantile(len(actual.z))


@pytest.mark.parametrize("length", [130, 1000, 4000])
def test_the_row_ratio_of_a_correct_kernel_is_about_one(length: int) -> None:
    rho = torch.cat([measure(problem_of("gaussian", length=length, seed=seed), SPLIT).rho[:12] for seed in range(2)])
    assert 0.9 <= rho.mean().item() <= 1.05
    assert rho.max().item() <= 1.25


def test_the_spread_is_that_of_correct_kernels() -> None:
    found = [measure(problem_of("decorrelated", length=500, seed=seed), SPLIT) for seed in range(8)]
    z, squares = torch.cat([one.z[:12] for one in found]), torch.cat([one.rho[:12] ** 2 for one in found])
    assert 0.5 <= z.std().item() <= 1.3
    # The budget is a little too large: 5 % for maxima that count as rounded, as they are in another order of tiles, 2 % for
    # a coherence that is never less than 1, 2 % for fp32.
    assert 0.88 <= squares.mean().item() <= 0.96


@pytest.mark.parametrize(
    ("mistake", "content", "length"),
    [
        (Mistake(values=1.002), "gaussian", 1000),
        (Mistake(values=1.002), "gaussian", 4000),
        (Mistake(scores=1.003), "gaussian", 1000),
        (Mistake(dropped=1), "gaussian", 130),
        (Mistake(dropped=1), "gaussian", 4000),
        (Mistake(dropped=1), "newest", 500),
        (Mistake(truncated=True), "gaussian", 300),
        (Mistake(truncated=True), "decorrelated", 1000),
    ],
    ids=str,
)
def test_a_small_mistake_shows_in_the_row_statistic(mistake: Mistake, content: str, length: int) -> None:
    problem = problem_of(content, length=length)
    right, wrong = measure(problem, SPLIT), measure(problem, SPLIT, mistake)
    limit = quantile(len(right.z))
    assert right.z.max().item() <= limit < wrong.z.max().item()


def test_truncation_hides_from_the_hard_bound() -> None:
    wrong = measure(problem_of("gaussian"), SPLIT, Mistake(truncated=True))
    assert wrong.hard <= 1


@pytest.mark.parametrize("name", ["bf16 of 4 splits", "fp8", "rounded operands", "fp32"])
def test_a_gross_mistake_breaks_the_hard_bound(name: str) -> None:
    problem = problem_of("newest", length=200)
    assert measure(problem, ARITHMETICS[name]).hard <= 1 < measure(problem, ARITHMETICS[name], Mistake(dropped=1)).hard


@pytest.mark.parametrize("name", ["bf16 of 4 splits", "fp32"])
def test_a_dropped_token_breaks_the_bound_of_the_lse(name: str) -> None:
    problem = problem_of("gaussian", length=130)
    right, wrong = measure(problem, ARITHMETICS[name]), measure(problem, ARITHMETICS[name], Mistake(dropped=1))
    assert right.lse[0] <= 1 < wrong.lse[0]


# -- one term at a time ----------------------------------------------------------------------------------------------------


def test_one_token_is_only_stored() -> None:
    problem = exact_problem([1, 1], [[3.0, 0.25]], latent=2, scale=1.0)
    found = budget(problem, Arithmetic(probability="bf16", output="bf16"))
    # Spacing of bf16 at 3 and at 1/4, and fp32 terms besides that are some 1e-5 of it.
    spacing = torch.tensor([2.0**-6, 2.0**-9], dtype=torch.float64)
    ratio = (found.variance.flatten() / (spacing**2 / 12)).tolist()
    assert all(1 <= value <= 1 + 1e-6 for value in ratio)
    bound = ((found.hard.flatten() - spacing / 2) / torch.tensor([3.0, 0.25])).tolist()
    assert all(2.0**-8 <= value <= 2.0**-8 * 1.1 for value in bound)  # the rounding of p, which kernels need not do exactly


def test_two_tokens_are_weighed_by_hand() -> None:
    # Scores 0 and ln 3: the second is the maximum and exact, the first is 1/3 and rounds by up to 2^-10 of spacing 2^-9.
    problem = exact_problem([1, 0], [[math.log(3), 8.0], [0.0, 2.0]], latent=2, scale=1.0)
    arithmetic = Arithmetic(probability="bf16", output="fp32", exponential=0.0)
    found = budget(problem, arithmetic)
    weight = 2.0**-9 / (4 / 3)  # the spacing, divided by the sum
    expected = (weight * 2.0) ** 2 / 12
    assert abs(found.variance[0, 0, 0, 1].item() / expected - 1) <= 1e-4


def test_what_a_format_flushes_is_a_shift() -> None:
    # Nine of ten tokens weigh e^-8 of the first, and e4m3fn without a scale has nothing between 0 and 2^-9.
    rows = [[8.0, 0.0]] + [[0.0, 1.0]] * 9
    problem = exact_problem([1, 0], rows, latent=2, scale=1.0)
    arithmetic = Arithmetic(probability="e4m3fn", output="fp32", pivot="row", tile=0)
    tail = 9 * math.exp(-8) / (1 + 9 * math.exp(-8))
    found = budget(problem, arithmetic)
    assert abs(found.variance[0, 0, 0, 1].item() / tail**2 - 1) <= 1e-3
    assert found.hard[0, 0, 0, 1].item() >= tail
    assert abs(errors(problem, arithmetic).out[0, 0, 0, 1].item() + tail) <= 1e-6
    kept = budget(problem, dataclasses.replace(arithmetic, probability_scale=256.0))
    assert kept.variance[0, 0, 0, 1].item() < 0.01 * tail**2


#: Three tokens at 0, -1 and -1.5 of the row's maximum, V one column each; the last two are a split of their own.
APART = [[0.0, 8.0, 0.0, 0.0], [-1.0, 0.0, 8.0, 0.0], [-1.5, 0.0, 0.0, 8.0]]


@pytest.mark.parametrize("pivot", ["row", "tile"])
def test_splits_round_relative_to_their_own_maximum(pivot: str) -> None:
    problem = exact_problem([0, 0, 0, 1], [[*row[1:], row[0]] for row in APART], latent=3, scale=1.0)
    arithmetic = Arithmetic(
        probability="e4m3fn", output="fp32", pivot=pivot, tile=1, splits=Splits(kind="floor", count=2, tile=1), exponential=0.0
    )
    assert arithmetic.splits.edges(3, heads=1, query_tokens=1, batch=1) == [0, 1, 3]
    total = 1 + math.exp(-1) + math.exp(-1.5)
    spacings = [
        0.0,  # the row's maximum, and its split's: exact but for the sums in fp32
        2.0**-5,  # 0.368 where the row's maximum is in use; exact where its split's is
        2.0**-4 * math.exp(-1),  # 0.607 of its split's, coarser than 0.223 of the row's, 2^-6
    ]
    actual = budget(problem, arithmetic).variance.flatten().sqrt() * math.sqrt(12) / 8 * total
    assert actual[0] <= 1e-5
    torch.testing.assert_close(actual[1:], torch.tensor(spacings[1:], dtype=torch.float64), rtol=1e-4, atol=0)


def test_what_another_order_of_tiles_loses_is_a_shift_too() -> None:
    # A tail of less than 2^-10 of a maximum that comes last: in order all of it is kept, backwards e4m3fn loses it.
    scores = -11 * math.log(2) - math.log(2) * torch.rand(960, generator=torch.Generator().manual_seed(0)).double()
    rows = [[1.0, 0.0, score] for score in scores.to(torch.float32).tolist()] + [[0.0, 8.0, 0.0]]
    problem = exact_problem([0, 0, 1], rows, latent=2, scale=1.0)
    arithmetic = Arithmetic(probability="e4m3fn", output="fp32")
    backwards = Arithmetic(probability="e4m3fn", output="fp32", tile=0, pivot="row")
    lost = (scores.exp().sum() / (1 + scores.exp().sum())).item()
    assert abs(errors(problem, arithmetic).out[0, 0, 0, 0].item()) <= 0.02 * lost
    assert abs(errors(problem, backwards).out[0, 0, 0, 0].item() + lost) <= 1e-6
    assert 1 <= budget(problem, arithmetic).variance[0, 0, 0, 0].item() / lost**2 <= 1.1


def test_equal_probabilities_round_alike() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn((200, 32), generator=generator).sign()
    values[:, 0] = 1.0
    scores = torch.full((200, 1), -1.0)
    scores[0] = 0.0
    rows = torch.cat([values, scores], 1)
    query = [0.0] * 32 + [1.0]
    arithmetic = Arithmetic(probability="bf16", output="fp32", pivot="row", tile=0)
    tied = budget(exact_problem(query, rows.tolist(), latent=32, scale=1.0), arithmetic)
    rows[1:, 32] -= torch.rand((199,), generator=generator) / 2
    apart = budget(exact_problem(query, rows.tolist(), latent=32, scale=1.0), arithmetic)
    # One error for 199 tokens, all ones in the first column, against 199 errors.
    assert tied.variance.sum() > 3 * apart.variance.sum()
    assert tied.effective_tokens.item() < 4 < apart.effective_tokens.item()


def test_equal_outputs_round_alike() -> None:
    arithmetic = Arithmetic(probability="bf16", output="bf16")
    equal = budget(problem_of("ones", length=100), arithmetic)
    different = budget(problem_of("gaussian", length=100), arithmetic)
    assert equal.effective_elements[0].max().item() <= 2
    assert different.effective_elements[0].min().item() > 40
    assert equal.spread[0].min().item() > 3 * different.spread[0].max().item()


def test_partial_outputs_are_rounded_only_where_there_are_several() -> None:
    problem = random_problem((400,), query_tokens=1)
    whole = budget(problem, dataclasses.replace(SPLIT, splits=Splits()))
    split = budget(problem, SPLIT)
    single = budget(problem, dataclasses.replace(SPLIT, partial="fp32"))
    assert (split.variance.sum(-1) > 1.2 * whole.variance.sum(-1)).all()
    assert (single.variance.sum(-1) < 1.15 * whole.variance.sum(-1)).all()


def test_exact_operands_cost_nothing() -> None:
    problem = dataclasses.replace(random_problem((100,)), cache_scale=2.0, query_scale=1.0)
    exact = Arithmetic(probability="bf16", output="bf16")
    declared = dataclasses.replace(exact, operand="bf16", query="bf16")
    assert torch.equal(budget(problem, exact).variance, budget(problem, declared).variance)
    scaled = dataclasses.replace(problem, cache_scale=1.3)
    assert budget(scaled, declared).variance.sum() > 1.1 * budget(scaled, exact).variance.sum()


def test_a_budget_scales_with_v_and_not_with_where_scales_are() -> None:
    problem = random_problem((64,))
    before = budget(problem, SPLIT)
    doubled = budget(
        dataclasses.replace(problem, cache_scale=2 * problem.cache_scale, query_scale=problem.query_scale / 2), SPLIT
    )
    moved = budget(
        dataclasses.replace(problem, query_scale=problem.query_scale * 4, softmax_scale=problem.softmax_scale / 4), SPLIT
    )
    assert torch.equal(doubled.hard, 2 * before.hard) and torch.equal(doubled.variance, 4 * before.variance)
    assert torch.equal(moved.hard, before.hard) and torch.equal(moved.variance, before.variance)


# -- the ends of the range -------------------------------------------------------------------------------------------------


def test_a_query_token_that_sees_nothing_has_no_budget() -> None:
    problem = random_problem((0, 2), query_tokens=4)
    found = budget(problem, SPLIT)
    dead = oracle(problem).lse == -torch.inf
    for values in (found.variance.sum(-1), found.hard.sum(-1), found.lse_hard, found.lse_variance):
        assert (values[dead] == 0).all() and (values[~dead] > 0).all()


def test_outputs_below_the_formats_normal_range_round_by_its_smallest_value() -> None:
    problem = exact_problem([1, 1], [[2.0**-30, 0.0]], latent=2, scale=1.0)
    found = budget(problem, Arithmetic(probability="bf16", output="fp16"))
    smallest = FORMATS["fp16"].smallest_subnormal
    assert (found.hard.flatten() >= smallest / 2).all()
    assert (found.hard.flatten() <= smallest / 2 + 2.0**-30).all()
    assert (found.variance > 0).all()


def test_an_output_that_may_overflow_has_no_bound() -> None:
    problem = exact_problem([0, 0], [[65500.0, 60000.0]], latent=2, scale=1.0)
    found = budget(problem, Arithmetic(probability="bf16", output="fp16"))
    assert found.hard.flatten().isinf().tolist() == [True, False]
    assert found.variance.flatten().isinf().tolist() == [True, False]


@pytest.mark.parametrize("amplitude", [100.0, 1000.0])
def test_scores_beyond_reason_give_a_bound_all_the_same(amplitude: float) -> None:
    problem = random_problem((100, 3), amplitude=amplitude)
    for arithmetic in ARITHMETICS.values():
        found = budget(problem, arithmetic)
        live = oracle(problem).lse > -torch.inf
        assert found.hard[live].isfinite().all() and found.variance[live].isfinite().all()
        assert not found.lse_hard.isnan().any() and not found.spread.isnan().any()


def test_zero_values_have_the_budget_of_zeros() -> None:
    problem = random_problem((50,))
    zero = dataclasses.replace(problem, cache=encode(torch.zeros(problem.cache.shape), FORMATS["e4m3fn"]))
    found = budget(zero, SPLIT)
    assert found.hard.max().item() <= FORMATS["bf16"].smallest_subnormal * 4
    assert (found.variance > 0).all() and not found.spread.isnan().any()


# -- streaming -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arithmetic", ARITHMETICS.values(), ids=ARITHMETICS)
def test_a_budget_hardly_depends_on_how_it_is_cut(arithmetic: Arithmetic, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of("rising", length=500)
    whole = budget(problem, arithmetic)
    monkeypatch.setattr("references.pieces._PIECE_BYTES", 1)
    pieces = budget(problem, arithmetic)
    for field in dataclasses.fields(Budget):
        expected, actual = getattr(whole, field.name), getattr(pieces, field.name)
        # Outputs are sorted into parts of a spacing, where one sum's rounding moves an element or two.
        share = 1e-5 if "hard" in field.name else 1e-3
        assert (actual - expected).abs().max() <= share * expected.abs().max(), field.name


def test_every_request_has_the_budget_it_has_alone() -> None:
    problem = random_problem((70, 0, 200, 3))
    arithmetic = dataclasses.replace(SPLIT, splits=Splits(kind="even", count=3))
    whole = budget(problem, arithmetic)
    for request, length in enumerate(problem.lengths):
        start = problem.starts[request]
        alone = dataclasses.replace(
            problem, query=problem.query[request : request + 1], slots=problem.slots[start : start + length], lengths=(length,)
        )
        found = budget(alone, arithmetic)
        # Side by side, sums are made in another order.
        for field in dataclasses.fields(Budget):
            torch.testing.assert_close(
                getattr(found, field.name)[0], getattr(whole, field.name)[request], rtol=1e-4, atol=1e-12
            )
