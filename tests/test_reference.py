"""The fp32 reference keeps the laws of its equations and agrees with the oracle to fp32.

1. What rounding allows is worked out from fp32's unit roundoff and the data, not chosen.
2. A law that holds by powers of two or by hiding holds bit for bit.

Source: the equations in references/decode.py.
"""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from references.decode import Answer, mla_decode
from references.formats import FORMATS, as_integers, decode
from references.oracle import oracle
from references.problem import Problem
from tests.problems import exact_problem, random_problem

U32 = 2.0**-24


def fp32_bound(problem: Problem) -> tuple[float, float]:
    """Bound what fp32 may do to an output element and to a log-sum-exp, from sizes: D- and N-term sums, an exponential.

    Source: n u32 sum |terms| for a sum; a score's error e moves the output by at most 2 e max |v|.
    """
    cache = decode(problem.cache, FORMATS[problem.cache_format]).double()[problem.slots // problem.cache.shape[1]]
    query = decode(problem.query, FORMATS[problem.query_format]).double()
    longest = max(problem.lengths)
    rows = cache.nan_to_num(0.0).norm(dim=-1).max().item() * query.norm(dim=-1).max().item()
    score = U32 * (problem.width + 8) * abs(problem.score_scale) * rows
    largest = abs(problem.cache_scale) * cache[..., : problem.latent].nan_to_num(0.0).abs().max().item()
    total = score + U32 * (longest + 16) * (1 + abs(problem.score_scale) * rows)
    return 2 * largest * total, 2 * total


def assert_agrees(problem: Problem, actual: Answer, expected: Answer) -> None:
    out, lse = fp32_bound(problem)
    live = expected.lse > -torch.inf
    assert torch.equal(actual.lse > -torch.inf, live)
    assert (actual.out.double() - expected.out.double()).abs().max().item() <= out
    assert not live.any() or (actual.lse.double() - expected.lse.double())[live].abs().max().item() <= lse


@pytest.mark.parametrize("cache_format", FORMATS)
@pytest.mark.parametrize("piece_bytes", [None, 1])
def test_the_reference_agrees_with_the_oracle(cache_format: str, piece_bytes: int | None) -> None:
    problem = random_problem((300, 1, 0, 65, 2), query_tokens=3, cache_format=cache_format)
    assert_agrees(problem, mla_decode(problem, piece_bytes=piece_bytes), oracle(problem))


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 140), min_size=1, max_size=5),
    query_tokens=st.integers(1, 4),
    heads=st.integers(1, 4),
    page_size=st.sampled_from([1, 3, 16]),
    amplitude=st.sampled_from([0.0, 0.1, 1.0, 10.0, 80.0]),
    cache_format=st.sampled_from(list(FORMATS)),
    seed=st.integers(0, 100),
)
def test_the_reference_agrees_with_the_oracle_anywhere(
    lengths: list[int], query_tokens: int, heads: int, page_size: int, amplitude: float, cache_format: str, seed: int
) -> None:
    problem = random_problem(
        lengths, query_tokens=query_tokens, heads=heads, page_size=page_size, amplitude=amplitude, seed=seed,
        cache_format=cache_format,
    )  # fmt: skip
    if max(lengths):
        assert_agrees(problem, mla_decode(problem, piece_bytes=1), oracle(problem))


@pytest.mark.parametrize("cache_format", ["bf16", "e4m3fn", "fp32"])
def test_working_in_fp64_comes_closer(cache_format: str) -> None:
    problem = random_problem((300, 5), cache_format=cache_format)
    truth = oracle(problem)
    single, double = mla_decode(problem), mla_decode(problem, working=torch.float64)
    assert double.out.dtype == torch.float32
    rounded = (truth.out - truth.out.float().double()).abs().max()
    assert (double.out - truth.out).abs().max() <= 2 * rounded < (single.out - truth.out).abs().max()


def test_the_agreement_can_fail() -> None:
    problem = random_problem((300,))
    wrong = dataclasses.replace(problem, slots=torch.cat([problem.slots[:-1], problem.slots[:1]]))
    with pytest.raises(AssertionError):
        assert_agrees(problem, mla_decode(wrong), oracle(problem))
    with pytest.raises(AssertionError):
        assert_agrees(
            problem, mla_decode(dataclasses.replace(problem, softmax_scale=problem.softmax_scale * 1.001)), oracle(problem)
        )


@pytest.mark.parametrize("truth", [mla_decode, oracle])
def test_a_case_small_enough_for_paper_comes_out_as_on_paper(truth: object) -> None:
    # Scores are 0, ln 2 and ln 4 up to fp32, so the weights are 1/7, 2/7 and 4/7.
    rows = [[3, 5, 0], [Fraction(-1, 2), 7, 1], [2, Fraction(1, 4), 2]]
    problem = exact_problem([0, 0, 1], rows, latent=2, scale=math.log(2))
    answer = truth(problem)  # type: ignore[operator]
    weights = [Fraction(1, 7), Fraction(2, 7), Fraction(4, 7)]
    expected = [sum(weight * row[i] for weight, row in zip(weights, rows, strict=True)) for i in range(2)]
    out, lse = fp32_bound(problem)
    for value, actual in zip(expected, answer.out.flatten().tolist(), strict=True):
        assert abs(Fraction(actual) - value) <= out
    assert abs(answer.lse.item() - math.log(7)) <= lse


def test_one_token_is_its_own_answer() -> None:
    problem = random_problem((1,), query_tokens=1)
    answer = mla_decode(problem)
    row = decode(problem.cache, FORMATS["e4m3fn"]).view(-1, problem.width)[problem.slots[0], : problem.latent]
    assert torch.equal(answer.out[0, 0], (row * torch.tensor(problem.cache_scale)).expand(problem.heads, -1))


def test_a_token_that_sees_nothing_gives_zeros_and_minus_infinity() -> None:
    problem = random_problem((0, 2), query_tokens=4)
    for answer in (mla_decode(problem), oracle(problem)):
        dead = torch.tensor([[True] * 4, [True, True, False, False]])
        assert torch.equal(answer.lse.isinf(), dead[..., None].expand(-1, -1, problem.heads))
        assert (answer.out[dead] == 0).all() and (answer.out[~dead] != 0).any()
        assert (answer.lse[dead] < 0).all()


def test_a_query_token_sees_its_own_and_nothing_newer() -> None:
    problem = random_problem((40,), query_tokens=3)
    whole = oracle(problem)
    for token in range(3):
        seen = 40 - 2 + token
        alone = dataclasses.replace(
            problem, query=problem.query[:, token : token + 1], slots=problem.slots[:seen], lengths=(seen,)
        )
        assert torch.equal(oracle(alone).out[0, 0], whole.out[0, token])
        assert_agrees(
            problem,
            mla_decode(alone),
            dataclasses.replace(whole, out=whole.out[:, token : token + 1], lse=whole.lse[:, token : token + 1]),
        )


def scaled(problem: Problem, *, query: float = 1.0, cache: float = 1.0, softmax: float = 1.0) -> Problem:
    return dataclasses.replace(
        problem,
        query_scale=problem.query_scale * query,
        cache_scale=problem.cache_scale * cache,
        softmax_scale=problem.softmax_scale * softmax,
    )


@pytest.mark.parametrize("power", [-3, 1, 5])
def test_a_power_of_two_moves_between_scales_bit_for_bit(power: int) -> None:
    problem, factor = random_problem(), 2.0**power
    plain = mla_decode(problem)
    query = mla_decode(scaled(problem, query=factor, softmax=1 / factor))
    cache = mla_decode(scaled(problem, cache=factor, query=1 / factor))
    assert torch.equal(plain.out, query.out) and torch.equal(plain.lse, query.lse)
    assert torch.equal(plain.out * factor, cache.out) and torch.equal(plain.lse, cache.lse)
    assert not torch.equal(plain.lse, mla_decode(scaled(problem, query=factor)).lse)


def shifted(problem: Problem, column: int, value: float) -> Problem:
    """Put one value in a rope column of every row and a one in the query: all scores move alike."""
    query, cache = problem.query.clone(), problem.cache.clone()
    query[..., column], cache[..., column] = 1.0, value
    return dataclasses.replace(problem, query=query, cache=cache)


@pytest.mark.parametrize("value", [64.0, -64.0])
def test_shifting_every_score_moves_only_the_log_sum_exp(value: float) -> None:
    problem = shifted(random_problem(cache_format="fp32", query_format="fp32"), -1, 0.0)
    moved = shifted(problem, -1, value)
    before, after = mla_decode(problem), mla_decode(moved)
    out, lse = fp32_bound(moved)
    live = before.lse > -torch.inf
    assert (after.out - before.out).abs().max().item() <= out
    assert ((after.lse - before.lse)[live] - value * problem.score_scale).abs().max().item() <= lse
    assert abs(value * problem.score_scale) > 2 * lse  # so a shift that does nothing would be seen


def test_the_order_of_slots_does_not_matter_and_their_choice_does() -> None:
    problem = random_problem((90,), query_tokens=1)
    order = torch.randperm(90, generator=torch.Generator().manual_seed(3))
    turned = dataclasses.replace(problem, slots=problem.slots[order])
    assert_agrees(problem, mla_decode(turned), oracle(problem))
    with pytest.raises(AssertionError):
        assert_agrees(problem, mla_decode(dataclasses.replace(problem, slots=problem.slots[:1].expand(90))), oracle(problem))


@pytest.mark.parametrize("pages_padded", [False, True])
@pytest.mark.parametrize(("before", "after"), [(0, 3), (1, 0), (0, 2), (2, 2), (4, 4), (8, 8)])
def test_strides_do_not_matter(pages_padded: bool, before: int, after: int) -> None:
    problem = random_problem()
    bits = as_integers(problem.cache)
    pages, tokens, width = bits.shape
    padded = torch.full((pages, tokens + pages_padded, before + width + after), 0x7F, dtype=torch.uint8)
    view = padded[:, :tokens, before : before + width]
    view.copy_(bits)
    moved = dataclasses.replace(problem, cache=view.view(problem.cache.dtype))
    assert not moved.cache.is_contiguous()
    expected = mla_decode(problem)
    for truth, wanted in ((mla_decode, expected), (oracle, oracle(problem))):
        actual = truth(moved)
        assert torch.equal(actual.out, wanted.out) and torch.equal(actual.lse, wanted.lse)


def bits_of(answer: Answer) -> Tensor:
    return torch.cat([answer.out.flatten(), answer.lse.flatten()])


@pytest.mark.parametrize("piece_bytes", [1, 60_000, 400_000, 1 << 30])
def test_the_size_of_pieces_moves_an_answer_by_no_more_than_fp32(piece_bytes: int) -> None:
    problem = random_problem((700, 500, 3), heads=3)
    assert_agrees(problem, mla_decode(problem, piece_bytes=piece_bytes), oracle(problem))


def test_every_request_answers_as_it_does_alone() -> None:
    problem = random_problem((200, 3, 0, 90, 200), query_tokens=1)
    whole = mla_decode(problem)
    for request, length in enumerate(problem.lengths):
        start = problem.starts[request]
        alone = dataclasses.replace(
            problem, query=problem.query[request : request + 1], slots=problem.slots[start : start + length], lengths=(length,)
        )
        part = Answer(out=whole.out[request : request + 1], lse=whole.lse[request : request + 1])
        if length:
            assert_agrees(alone, part, oracle(alone))
        else:
            assert torch.equal(bits_of(part), bits_of(mla_decode(alone)))


def test_the_problem_is_left_as_it_was() -> None:
    problem = random_problem()
    before = [as_integers(problem.query).clone(), as_integers(problem.cache).clone(), problem.slots.clone()]
    mla_decode(problem)
    oracle(problem)
    after = [as_integers(problem.query), as_integers(problem.cache), problem.slots]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("lengths", (130, 1, 0), "4 lengths"),
        ("lengths", (130, 1, 0, 34), "165 int64 slots"),
        ("latent", 65, "does not fit rows of 64"),
        ("cache_format", "e4m3fnuz", "these are torch.float8_e4m3fn"),
        ("query_format", "fp4", "not known"),
        ("slots", torch.zeros(164, dtype=torch.int32), "int64 slots"),
    ],
)
def test_a_problem_that_contradicts_itself_is_refused(field: str, value: object, error: str) -> None:
    with pytest.raises((TypeError, ValueError), match=error):
        dataclasses.replace(random_problem(), **{field: value})
