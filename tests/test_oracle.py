"""The oracle decodes by itself and computes by the book.

1. Its tables are held to other people's, code by code.
2. Its answers are held to fractions: sums of fractions weighted by exponentials from a hundred-digit series.

Source: ml_dtypes 0.5; Python's fractions and decimal.
"""

from __future__ import annotations

import dataclasses
from decimal import Decimal, localcontext
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from references import decode as reference
from references.formats import FORMATS, as_integers
from references.oracle import LAYOUTS, look_up, oracle, values_of
from references.problem import Problem
from tests.problems import random_problem

TABLES: dict[str, Any] = {
    "bf16": ml_dtypes.bfloat16,
    "fp16": np.float16,
    "e4m3fn": ml_dtypes.float8_e4m3fn,
    "e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "e5m2": ml_dtypes.float8_e5m2,
}


@pytest.mark.parametrize("name", TABLES)
def test_every_code_has_the_value_that_others_give_it(name: str) -> None:
    unsigned = np.arange(1 << FORMATS[name].bits, dtype=np.uint8 if FORMATS[name].bits == 8 else np.uint16)
    with np.errstate(invalid="ignore"):
        expected = unsigned.view(TABLES[name]).astype(np.float64)
    codes = torch.from_numpy(unsigned.view(np.int8 if FORMATS[name].bits == 8 else np.int16)).view(FORMATS[name].storage)
    actual = look_up(codes, name).numpy()
    assert np.array_equal(expected, actual, equal_nan=True)
    numbers = ~np.isnan(expected)
    assert np.array_equal(np.signbit(expected[numbers]), np.signbit(actual[numbers]))


def test_fp32_codes_have_their_values() -> None:
    generator = np.random.default_rng(0)
    integers = generator.integers(0, 1 << 32, 20_000, dtype=np.uint32)
    integers = np.concatenate(
        [integers, np.uint32([0, 1, 0x80000000, 0x7F800000, 0xFF800000, 0x7F7FFFFF, 0x00800000, 0x807FFFFF])]
    )
    with np.errstate(invalid="ignore"):
        expected = integers.view(np.float32).astype(np.float64)
    assert np.array_equal(expected, look_up(torch.from_numpy(integers.view(np.float32)), "fp32").numpy(), equal_nan=True)


def test_a_wrong_bias_would_be_seen() -> None:
    codes = np.arange(256, dtype=np.int64)
    assert LAYOUTS["e4m3fn"][2] + 1 == LAYOUTS["e4m3fnuz"][2]
    assert not np.array_equal(values_of(codes, "e4m3fn"), values_of(codes, "e4m3fnuz"), equal_nan=True)


def in_decimal(problem: Problem, head: int) -> tuple[list[Decimal], Decimal]:
    """Compute one head of a one-request, one-token problem in sixty digits."""
    with localcontext() as context:
        context.prec = 60
        cells = values_of(as_integers(problem.cache).long().numpy() & 0xFF, problem.cache_format).reshape(-1, problem.width)
        rows = [[Decimal(value) for value in cells[slot]] for slot in problem.slots.tolist()]
        query = [Decimal(value) for value in problem.query[0, 0, head].double().tolist()]
        scale = Decimal(problem.softmax_scale) * Decimal(problem.query_scale) * Decimal(problem.cache_scale)
        powers = [(scale * sum((q * k for q, k in zip(query, row, strict=True)), Decimal(0))).exp() for row in rows]
        mass = sum(powers, Decimal(0))
        out = [
            Decimal(problem.cache_scale)
            * sum((power * row[i] for power, row in zip(powers, rows, strict=True)), Decimal(0))
            / mass
            for i in range(problem.latent)
        ]
        return out, mass.ln()


@pytest.mark.parametrize("amplitude", [1.0, 30.0])
def test_the_oracle_is_right_to_fp64(amplitude: float) -> None:
    problem = random_problem((23,), query_tokens=1, heads=2, latent=8, rope=4, amplitude=amplitude)
    answer = oracle(problem)
    for head in range(2):
        out, lse = in_decimal(problem, head)
        largest = max(abs(value) for value in out)
        unit = Decimal(2.0**-53) * 64 * (1 + abs(lse))  # the terms of both sums, and the scores' own rounding
        assert max(abs(Decimal(a) - e) for a, e in zip(answer.out[0, 0, head].tolist(), out, strict=True)) <= unit * (
            1 + largest
        )
        assert abs(Decimal(answer.lse[0, 0, head].item()) - lse) <= unit


def test_an_fp32_answer_would_not_pass_for_the_oracles() -> None:
    problem = random_problem((23,), query_tokens=1, heads=1, latent=8, rope=4)
    out, _ = in_decimal(problem, 0)
    actual = reference.mla_decode(problem).out[0, 0, 0].tolist()
    assert max(abs(Decimal(a) - e) for a, e in zip(actual, out, strict=True)) > Decimal(2.0**-53) * 64


def test_the_oracle_does_not_use_the_references_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = random_problem()
    expected = oracle(problem)
    monkeypatch.setattr("references.formats.decode", None)
    monkeypatch.setattr("references.decode.decode", None)
    monkeypatch.setattr("references.problem.gather", None)
    actual = oracle(problem)
    assert torch.equal(expected.out, actual.out) and torch.equal(expected.lse, actual.lse)
    with pytest.raises(TypeError):
        reference.mla_decode(problem)


def test_a_zero_query_gives_the_mean_of_v() -> None:
    problem = random_problem((57,), query_tokens=1, heads=1)
    zero = dataclasses.replace(problem, query=torch.zeros_like(problem.query))
    rows = look_up(problem.cache, "e4m3fn").view(-1, problem.width)[problem.slots, : problem.latent]
    answer = oracle(zero)
    bound = 57 * 2.0**-53 * problem.cache_scale * rows.abs().mean(0)
    assert ((answer.out[0, 0, 0] - problem.cache_scale * rows.mean(0)).abs() <= bound).all()
    assert answer.lse.item() == torch.tensor(57.0, dtype=torch.float64).log().item()
