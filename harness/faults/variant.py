"""Variants of the correct model: everything two right kernels may do differently.

1. A variant is a value: an arithmetic as a regime declares it, and how the exponential and the walk are done. It never
   changes what is computed, only how it is rounded, so each variant is right under the regime of its arithmetic.
2. The variants are what the false-alarm run gates; one of them (``BASE``) is what most faults are planted in.

Source: how AITER's Gluon, Triton and asm decode kernels, FlashMLA, FlashInfer and CUTLASS differ from each other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from references.arithmetic import Arithmetic, Splits


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One legal way to compute MLA decode."""

    #: What a backend of this variant is called after ``model:``.
    name: str
    #: Where it rounds and how it cuts the context.
    arithmetic: Arithmetic
    #: Whether the exponential is 2^x of scores in base-2 units, as GPU kernels prefer.
    binary: bool = False
    #: Whether a split walks its tiles from the newest to the oldest.
    backward: bool = False

    @property
    def tile(self) -> int:
        """Tokens that a split walks over at a time; a whole split where the arithmetic knows no tiles."""
        return self.arithmetic.tile

    def plan(self, length: int, *, heads: int, query_tokens: int, batch: int) -> list[tuple[int, int]]:
        """Cut the tokens 0 … length - 1 into the splits of a launch, as (start, stop); later splits may be empty."""
        splits = self.arithmetic.splits
        edges = splits.edges(length, heads=heads, query_tokens=query_tokens, batch=batch)
        plan = list(pairwise(edges))
        launched = splits.launched(heads=heads, query_tokens=query_tokens, batch=batch)
        return plan + [(length, length)] * (launched - len(plan))


#: Tile of the model of a regime whose arithmetic has none: mistakes at the edges of tiles are told of such kernels too.
_TILE = 64


def of_regime(arithmetic: Arithmetic) -> Variant:
    """Make the variant that mistakes are planted in to explain an answer given under a regime."""
    return Variant(name="regime", arithmetic=dataclasses.replace(arithmetic, tile=arithmetic.tile or _TILE))


def _variant(
    name: str,
    *,
    splits: Splits,
    tile: int = 32,
    binary: bool = False,
    backward: bool = False,
    probability: str = "bf16",
    partial: str = "bf16",
    output: str = "bf16",
    **arithmetic: str | float,
) -> Variant:
    return Variant(
        name=name,
        binary=binary,
        backward=backward,
        arithmetic=Arithmetic(
            probability=probability,
            partial=partial,
            output=output,
            splits=splits,
            tile=tile,
            **arithmetic,  # type: ignore[arg-type]
        ),
    )


def _even(count: int, tile: int = 32) -> Splits:
    return Splits(kind="even", count=count, tile=tile)


#: The variant that faults are planted in unless they say otherwise.
BASE = "splits"

VARIANTS: Mapping[str, Variant] = {
    variant.name: variant
    for variant in (
        _variant("splits", splits=_even(4)),
        _variant("single", splits=Splits()),
        _variant("single-wide", splits=Splits(), tile=128),
        _variant("exp2", splits=_even(4), binary=True),
        _variant("exp2-single", splits=Splits(), tile=64, binary=True),
        _variant("splits-2", splits=_even(2, 64), tile=64),
        _variant("splits-16", splits=_even(16, 16), tile=16),
        _variant("splits-32", splits=_even(32, 16), tile=16, partial="fp32"),
        _variant("splits-floor", splits=Splits(kind="floor", count=5, tile=64), tile=64),
        _variant("fp32-partials", splits=_even(4), partial="fp32"),
        _variant("fp16-partials", splits=_even(4), partial="fp16"),
        _variant("tile-1", splits=_even(3, 1), tile=1),
        _variant("tile-48", splits=_even(3, 48), tile=48),
        _variant("tile-128", splits=_even(8, 128), tile=128),
        _variant("backward", splits=_even(4), backward=True),
        _variant("two-pass", splits=_even(4), pivot="row"),
        _variant("rounded-sum", splits=_even(4), normaliser="rounded"),
        _variant("p-fp16", splits=_even(4), probability="fp16"),
        _variant("p-fp32", splits=_even(4), probability="fp32", partial="fp32"),
        _variant("p-e4m3", splits=_even(4), probability="e4m3fn", probability_scale=256.0),
        _variant("p-e4m3-448", splits=Splits(), probability="e4m3fn", probability_scale=448.0),
        _variant("p-e4m3-row", splits=_even(16, 16), probability="e4m3fn", pivot="row", partial="fp32"),
        _variant("out-fp16", splits=_even(4), output="fp16"),
        _variant("out-fp32", splits=_even(4), output="fp32", partial="fp32"),
    )
}
