"""The emulator's number formats agree with ml_dtypes, code by code and tie by tie."""

import ml_dtypes
import numpy as np
import pytest

from harness.emulation import formats
from harness.emulation.formats import BF16, E4M3FN, E4M3FNUZ, E5M2, E5M2FNUZ, FP16, Kind, decode, encode, overflows, round_to

TWINS = {
    BF16: ml_dtypes.bfloat16,
    FP16: np.float16,
    E4M3FN: ml_dtypes.float8_e4m3fn,
    E4M3FNUZ: ml_dtypes.float8_e4m3fnuz,
    E5M2: ml_dtypes.float8_e5m2,
    E5M2FNUZ: ml_dtypes.float8_e5m2fnuz,
}
EACH = pytest.mark.parametrize("kind", TWINS, ids=lambda kind: kind.name)


def _codes(kind: Kind) -> np.ndarray:
    return np.arange(1 << kind.bits, dtype=np.uint32).astype(f"u{kind.bits // 8}").view(kind.storage)


def _hard_values(kind: Kind) -> np.ndarray:
    """Make fp32 values: all that the format holds, the midpoints between them, their neighbours, and random bits."""
    held = decode(_codes(kind), kind)
    held = np.unique(held[np.isfinite(held)]).astype(np.float64)
    middle = ((held[1:] + held[:-1]) / 2).astype(np.float32)
    bits = np.random.Generator(np.random.Philox(3)).integers(0, 2**32, 1 << 16, dtype=np.uint64).astype(np.uint32)
    parts = [held.astype(np.float32), middle, np.nextafter(middle, np.float32(-9e9)), np.nextafter(middle, np.float32(9e9))]
    return np.concatenate([*parts, bits.view(np.float32), np.array([0.0, -0.0, np.nan, np.inf, -np.inf], np.float32)])


@EACH
def test_every_code_decodes_to_its_value(kind: Kind) -> None:
    codes = _codes(kind)
    expected = codes.view(TWINS[kind]).astype(np.float32)
    np.testing.assert_array_equal(decode(codes, kind), expected)
    destination = np.empty(codes.shape, np.float32)
    formats.decode_into(codes, kind, destination)
    np.testing.assert_array_equal(destination, expected)


@EACH
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_every_value_encodes_to_the_nearest_code(kind: Kind) -> None:
    values = _hard_values(kind)
    if kind.is_fp8():
        # What a format cannot hold has no one answer among targets: such a cast is refused, not encoded.
        values = values[~overflows(values, kind)]
    expected = values.astype(TWINS[kind])
    actual = encode(values, kind)
    number = ~np.isnan(values)
    np.testing.assert_array_equal(actual[number].view(f"u{kind.bits // 8}"), expected[number].view(f"u{kind.bits // 8}"))
    assert np.isnan(decode(actual[~number], kind)).all()


@EACH
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_rounding_is_encoding_and_decoding(kind: Kind) -> None:
    values = _hard_values(kind)
    if kind.is_fp8():
        values = values[~overflows(values, kind)]
    np.testing.assert_array_equal(round_to(values, kind), decode(encode(values, kind), kind))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_fp64_rounds_to_bf16_once() -> None:
    held = decode(_codes(BF16), BF16)
    held = np.unique(held[np.isfinite(held)]).astype(np.float64)
    middle = (held[1:] + held[:-1]) / 2
    # So near to a tie that fp32 would round it onto the tie, and then bf16 the wrong way.
    values = np.concatenate([middle * (1 + 2.0**-40), middle * (1 - 2.0**-40), middle])
    fits = (np.abs(values) < held.max()) & (np.abs(values) > 1e-30)
    values = values[fits]
    nearest = np.searchsorted(held, values)
    low, high = held[nearest - 1], held[nearest]
    rounded = round_to(values, BF16).astype(np.float64)
    best = np.minimum(values - low, high - values)
    np.testing.assert_array_equal(np.abs(rounded - values), best)


@pytest.mark.parametrize("kind", [kind for kind in TWINS if kind.is_fp8()], ids=lambda kind: kind.name)
def test_an_overflow_is_known_exactly_where_saturation_would_begin(kind: Kind) -> None:
    largest = formats.largest(kind)
    assert not overflows(np.array([largest, -largest]), kind).any()
    assert overflows(np.array([largest * 1.5, -np.inf, np.inf]), kind).all()
