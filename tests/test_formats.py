"""Formats: every code, every midpoint, against other people's tables and against fractions.

1. All 8-bit and 16-bit codes are gone through, not sampled.
2. Where a table rounds twice (ml_dtypes goes from fp64 through fp32) the nearest value is worked out in fractions.

Source: ml_dtypes 0.5 for values; Fraction for distances.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from references import formats
from references.formats import FORMATS, Format, as_integers, decode, encode, ulp

TABLES: dict[str, Any] = {
    "bf16": ml_dtypes.bfloat16,
    "fp16": np.float16,
    "e4m3fn": ml_dtypes.float8_e4m3fn,
    "e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "e5m2": ml_dtypes.float8_e5m2,
}
SMALL = [FORMATS[name] for name in TABLES]
EIGHT = [known for known in SMALL if known.bits == 8]


def every_code(known: Format) -> Tensor:
    integers = np.arange(1 << known.bits, dtype=np.uint8 if known.bits == 8 else np.uint16)
    return torch.from_numpy(integers.view(np.int8 if known.bits == 8 else np.int16)).view(known.storage)


def table(codes: Tensor, known: Format) -> NDArray[np.float64]:
    integers = as_integers(codes).numpy()
    with np.errstate(invalid="ignore"):  # ml_dtypes warns of signalling NaNs
        return integers.view(np.uint8 if known.bits == 8 else np.uint16).view(TABLES[known.name]).astype(np.float64)


def finite_values(known: Format) -> NDArray[np.float64]:
    values = decode(every_code(known), known).double().numpy()
    return np.unique(values[np.isfinite(values)])


def edges(known: Format) -> NDArray[np.float64]:
    """Values, midpoints and the fp64 numbers next to midpoints, all of a format's."""
    values = finite_values(known)
    middles = (values[1:] + values[:-1]) / 2
    return np.concatenate([values, middles, np.nextafter(middles, np.inf), np.nextafter(middles, -np.inf)])


def same(expected: NDArray[np.float64], actual: NDArray[np.float64]) -> bool:
    numbers = ~np.isnan(expected)
    signs = np.array_equal(np.signbit(expected[numbers]), np.signbit(actual[numbers]))
    return signs and np.array_equal(expected, actual, equal_nan=True)


@pytest.mark.parametrize("known", SMALL, ids=str)
def test_every_code_decodes_to_its_value(known: Format) -> None:
    codes = every_code(known)
    assert same(table(codes, known), decode(codes, known).double().numpy())


@pytest.mark.parametrize("known", EIGHT, ids=str)
@pytest.mark.parametrize(("start", "stop"), [(0, 256), (0, 255), (1, 256), (1, 255)])
def test_codes_decode_alike_wherever_they_start(known: Format, start: int, stop: int) -> None:
    codes = every_code(known)
    assert same(table(codes[start:stop], known), decode(codes[start:stop], known).double().numpy())
    turned = as_integers(codes).flip(0).view(known.storage)[start:stop]
    assert same(table(turned, known), decode(turned, known).double().numpy())


def test_the_same_byte_is_two_values() -> None:
    integers = torch.tensor([0x40, 0x80, 0x7F, 0xFF], dtype=torch.uint8)
    fn, fnuz = FORMATS["e4m3fn"], FORMATS["e4m3fnuz"]
    plain, unsigned = decode(integers.view(fn.storage), fn), decode(integers.view(fnuz.storage), fnuz)
    assert plain[0] == 2 * unsigned[0]
    assert plain[1] == 0 and plain[1].signbit() and unsigned[1].isnan()
    assert plain[2:].isnan().all() and unsigned[2:].tolist() == [240.0, -240.0]


@pytest.mark.parametrize("known", SMALL, ids=str)
def test_every_number_encodes_to_its_own_code(known: Format) -> None:
    codes = every_code(known)
    values = decode(codes, known)
    numbers = ~values.isnan()
    for width in (torch.float32, torch.float64):
        again = as_integers(encode(values.to(width), known))
        assert torch.equal(again[numbers], as_integers(codes)[numbers])
        assert decode(encode(values.to(width), known), known)[~numbers].isnan().all()


@pytest.mark.parametrize("known", SMALL, ids=str)
def test_fp32_values_round_as_the_tables_do(known: Format) -> None:
    with np.errstate(over="ignore"):
        values = edges(known).astype(np.float32)
        beyond = np.float32(known.maximum) * np.float32([1 + 2**-9, 1.05, 1.5, 4])
        values = np.concatenate([values, beyond, -beyond, np.float32([np.inf, -np.inf, np.nan, -0.0, 1e-45, -1e-45])])
        expected = values.astype(TABLES[known.name]).astype(np.float64)
    actual = decode(encode(torch.from_numpy(values), known), known).double().numpy()
    assert np.array_equal(expected, actual, equal_nan=True)


@pytest.mark.parametrize("known", [*EIGHT, FORMATS["fp16"]], ids=str)
def test_fp64_values_round_once_to_the_nearest_even(known: Format) -> None:
    grid = finite_values(known)
    values = edges(known)
    actual = decode(encode(torch.from_numpy(values), known), known).double().numpy()
    upper = np.minimum(np.searchsorted(grid, values), len(grid) - 1)
    for value, rounded, index in zip(values.tolist(), actual.tolist(), upper.tolist(), strict=True):
        if known.bits > 8 and index % 7:
            continue  # fractions are slow: every seventh of fp16's neighbourhoods
        near = [grid[index], grid[max(index - 1, 0)]]
        distances = [abs(Fraction(value) - Fraction(neighbour)) for neighbour in near]
        assert abs(Fraction(value) - Fraction(rounded)) == min(distances)
        if distances[0] == distances[1] and near[0] != near[1]:
            assert int(as_integers(encode(torch.tensor([rounded]), known)).item()) % 2 == 0


def test_rounding_twice_would_be_seen() -> None:
    known = FORMATS["bf16"]
    value = torch.tensor([1 + 2.0**-8 + 2.0**-40], dtype=torch.float64)  # just above a tie, on it after fp32
    assert decode(encode(value, known), known).item() == 1 + 2.0**-7
    assert decode(encode(value.to(torch.float32), known), known).item() == 1.0


@pytest.mark.parametrize(
    ("name", "value", "expected", "saturated"),
    [
        ("e4m3fn", 464.0, 448.0, 448.0),  # the tie between 448 and 480 goes to the even one
        ("e4m3fn", 464.1, float("nan"), 448.0),
        ("e4m3fn", float("-inf"), float("nan"), -448.0),
        ("e4m3fnuz", 247.9, 240.0, 240.0),
        ("e4m3fnuz", 248.0, float("nan"), 240.0),  # 256 would be the even one
        ("e5m2", 61439.0, 57344.0, 57344.0),
        ("e5m2", 61440.0, float("inf"), 57344.0),
        ("fp16", 65519.9, 65504.0, 65504.0),
        ("fp16", -65520.0, float("-inf"), -65504.0),
        ("bf16", float("inf"), float("inf"), FORMATS["bf16"].maximum),
        ("fp32", 1e39, float("inf"), FORMATS["fp32"].maximum),
    ],
)
def test_what_is_too_large_overflows_or_saturates(name: str, value: float, expected: float, saturated: float) -> None:
    known, values = FORMATS[name], torch.tensor([value], dtype=torch.float64)
    plain, held = (decode(encode(values, known, saturate=saturate), known).double().numpy() for saturate in (False, True))
    assert np.array_equal(plain, [expected], equal_nan=True)
    assert held.tolist() == [saturated]


@pytest.mark.parametrize("known", FORMATS.values(), ids=str)
@pytest.mark.parametrize("saturate", [False, True])
def test_nan_stays_nan(known: Format, saturate: bool) -> None:
    values = torch.tensor([float("nan")], dtype=torch.float64)
    assert decode(encode(values, known, saturate=saturate), known).isnan().all()


def test_a_format_without_negative_zero_makes_none() -> None:
    known = FORMATS["e4m3fnuz"]
    values = torch.tensor([-0.0, -1e-9, -known.smallest_subnormal / 2], dtype=torch.float64)
    assert as_integers(encode(values, known)).tolist() == [0, 0, 0]
    assert as_integers(encode(values, FORMATS["e4m3fn"])).tolist()[0] == 0x80


@pytest.mark.parametrize("known", FORMATS.values(), ids=str)
def test_the_record_agrees_with_its_codes(known: Format) -> None:
    values = torch.tensor([known.maximum, known.smallest_normal, known.smallest_subnormal], dtype=torch.float64)
    assert torch.equal(formats.round(values, known), values)
    one_up = torch.tensor([1 + 2 * known.unit_roundoff, 1 + known.unit_roundoff], dtype=torch.float64)
    assert formats.round(one_up, known).tolist() == [1 + 2 * known.unit_roundoff, 1.0]
    assert formats.round(values[2:] / 2, known).item() == 0


@pytest.mark.parametrize("known", EIGHT, ids=str)
@pytest.mark.parametrize("width", [torch.float32, torch.float64])
def test_an_ulp_is_the_distance_to_the_next_value_up(known: Format, width: torch.dtype) -> None:
    values = finite_values(known)
    values = values[(values >= 0)]
    actual = ulp(torch.from_numpy(values[:-1]).to(width), known)
    assert actual.double().tolist() == np.diff(values).tolist()
    assert ulp(torch.tensor([torch.nan, torch.inf]), known).isnan().all()


def test_a_wrong_type_is_refused() -> None:
    with pytest.raises(TypeError, match="view them as that type"):
        decode(torch.zeros(1, dtype=torch.uint8), FORMATS["e4m3fn"])
    with pytest.raises(TypeError, match="decode codes first"):
        encode(torch.zeros(1, dtype=torch.bfloat16), FORMATS["e4m3fn"])
    with pytest.raises(ValueError, match="known are fp32"):
        formats.find("fp4")


def test_shapes_and_strides_are_kept() -> None:
    known = FORMATS["e4m3fn"]
    values = torch.arange(12, dtype=torch.float64).view(3, 4).T
    assert torch.equal(decode(encode(values, known), known).double(), values)
    assert encode(torch.zeros(0, 5), known).shape == (0, 5)


@pytest.mark.parametrize("saturate", [False, True])
@pytest.mark.parametrize("known", FORMATS.values(), ids=str)
def test_the_short_way_of_fp32_values_gives_the_codes_of_the_long_one(known: Format, saturate: bool) -> None:
    generator = torch.Generator().manual_seed(7)
    drawn = torch.randint(-(1 << 31), 1 << 31, (1 << 16,), generator=generator).to(torch.int32)
    near = (drawn & ~0x7FFFF) + torch.randint(-1, 2, drawn.shape, generator=generator).to(torch.int32)  # at and beside ties
    ends = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, known.maximum, -known.maximum])
    inside = torch.randn(1 << 16, generator=generator) * min(known.maximum / 3, 1e30)
    small = torch.randn(1 << 14, generator=generator) * known.smallest_normal
    values = torch.cat([drawn.view(torch.float32), near.view(torch.float32), ends, inside, small])
    short = decode(encode(values, known, saturate=saturate), known)
    long = decode(encode(values.to(torch.float64), known, saturate=saturate), known)
    assert torch.equal(short.isnan(), long.isnan())
    assert torch.equal(short.nan_to_num(0).view(torch.int32), long.nan_to_num(0).view(torch.int32))
