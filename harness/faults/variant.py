"""Variants of the correct model: everything two right kernels may do differently.

1. A variant is a value: tile, split plan, formats, exponential, order. It never changes what is computed, only how it
   is rounded, so each variant is right under the regime that declares its arithmetic.
2. The variants are what the false-alarm run gates; one of them (``BASE``) is what most faults are planted in.

Source: how AITER's Gluon, Triton and asm decode kernels, FlashMLA, FlashInfer and CUTLASS differ from each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from references.formats import FORMATS


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One legal way to compute MLA decode."""

    #: What a backend of this variant is called after ``model:``.
    name: str
    #: Tokens that a split walks over at a time.
    tile: int = 32
    #: KV splits that a request is cut into at most; every split but the last holds the same number of whole tiles.
    splits: int = 4
    #: Format that K and V are rounded to after the cache scale is applied; None where the codes enter the product as
    #: they are and the scale is applied to its result.
    operand: str | None = None
    #: Format that the probabilities are rounded to before they meet V.
    probability: str = "bf16"
    #: Factor that the probabilities carry through that rounding.
    probability_scale: float = 1.0
    #: Format of the partial outputs that splits hand to the merge.
    partial: str = "bf16"
    #: Format of the output.
    output: str = "bf16"
    #: Whether the exponential is 2^x of scores in base-2 units, as GPU kernels prefer.
    binary: bool = False
    #: Whether a split walks its tiles from the newest to the oldest.
    backward: bool = False
    #: Whether the softmax denominator sums the rounded probabilities rather than the exact ones.
    rounded_sum: bool = False
    #: Whether each split rounds its probabilities relative to its last maximum (two passes), not the running one.
    two_pass: bool = False

    def __post_init__(self) -> None:
        for field in ("operand", "probability", "partial", "output"):
            name = getattr(self, field)
            if name is not None and name not in FORMATS:
                raise ValueError(f"variant {self.name}: {field} must be one of {', '.join(FORMATS)}, not {name!r}")
        if self.tile < 1 or self.splits < 1:
            raise ValueError(f"variant {self.name}: tile and splits start at 1, not {self.tile} and {self.splits}")

    def plan(self, length: int) -> list[tuple[int, int]]:
        """Cut the tokens 0 … length - 1 into splits of whole tiles, as (start, stop); later splits may be empty."""
        tiles = -(-length // self.tile)
        each = max(1, -(-tiles // self.splits)) * self.tile
        return [(min(k * each, length), min((k + 1) * each, length)) for k in range(self.splits)]


#: The variant that faults are planted in unless they say otherwise.
BASE = "splits"

VARIANTS: Mapping[str, Variant] = {
    variant.name: variant
    for variant in (
        Variant(name="splits"),
        Variant(name="single", splits=1),
        Variant(name="single-wide", splits=1, tile=128),
        Variant(name="exp2", binary=True),
        Variant(name="exp2-single", binary=True, splits=1, tile=64),
        Variant(name="splits-2", splits=2, tile=64),
        Variant(name="splits-16", splits=16, tile=16),
        Variant(name="splits-32", splits=32, tile=16, partial="fp32"),
        Variant(name="fp32-partials", partial="fp32"),
        Variant(name="fp16-partials", partial="fp16"),
        Variant(name="tile-1", tile=1, splits=3),
        Variant(name="tile-48", tile=48, splits=3),
        Variant(name="tile-128", tile=128, splits=8),
        Variant(name="backward", backward=True),
        Variant(name="two-pass", two_pass=True),
        Variant(name="rounded-sum", rounded_sum=True),
        Variant(name="operand-bf16", operand="bf16"),
        Variant(name="p-fp16", probability="fp16"),
        Variant(name="p-fp32", probability="fp32", partial="fp32"),
        Variant(name="p-e4m3", probability="e4m3fn", probability_scale=256.0),
        Variant(name="p-e4m3-448", probability="e4m3fn", probability_scale=448.0, splits=1),
        Variant(name="out-fp16", output="fp16"),
        Variant(name="out-fp32", output="fp32", partial="fp32"),
    )
}
