"""The axes of case space: the values of each field from plain to strange.

1. An axis is a table. Drawing takes an index, shrinking lowers it, so the plainest value stands first.
2. Numbers ascend. Those around page, tile and split edges stand there more than once: likelier to be drawn, and no
   obstacle to shrinking.

Source: boundary lengths find mask faults and regular ones do not (FlashMLA's and FlashInfer's fuzzers draw them too).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.case import CONTENTS, PLACEMENTS, POISONS, QUERY_LAYOUTS, TABLES
from references.formats import FORMATS as KNOWN_FORMATS

#: Lengths up to this are all drawn, so that Hypothesis can walk to the shortest that fails; beyond it only edges are.
DENSE = 136
#: Tile and page sizes whose multiples are edges for any kernel.
TILES = (16, 32, 64, 128, 256)
#: How often an edge among the dense lengths stands in the table: with 13 edges about a fifth of all draws.
EDGE_WEIGHT = 4
#: Lengths that are edges of the query tokens: none cached, fewer, as many, one more.
SHORT = frozenset({0, 1, 2, 3, 4, 5, 8})
#: Heads of a case: small ones, those of production models split over 1 to 16 GPUs, and the neighbours of MFMA tiles.
HEADS = (*range(1, 17), 1, 8, 12, 16, 17, 20, 24, 31, 32, 33, 40, 48, 64, 65, 96, 127, 128, 129, 192, 256)
#: Query tokens of a request: plain decode most often, then the depths of multi-token prediction.
QUERY_TOKENS = (1, 1, 1, 1, 1, 1, 2, 2, 3, 4, 4, 5, 6, 7, 8, 11, 16)
#: Requests of a case: few most often; then the edges of the batches that engines capture graphs for.
BATCHES = (*(1, 2) * 4, *(3, 4) * 3, *range(5, 10), 16, 17, 32, 33, 64, 65, 128, 129, 256, 257)
#: Up to this many requests, one may hold all tokens of a case; more share them.
FEW = 4
#: Rows of large pools: page ids past 2^16; 2^31 bytes of bf16 rows of 576; 2^32 of them, which is 2^31 elements of any and
#: 2^31 bytes of fp8; 2^32 bytes of fp8; page ids past 2^24.
POOLS = (70_000, 1_900_000, 3_800_000, 7_600_000, 17_000_000)
#: Formats, the commonest first.
FORMATS = ("bf16", *(name for name in KNOWN_FORMATS if name != "bf16"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """Fields of a case that are drawn together, and their values from plain to strange."""

    #: Fields of Case.
    fields: tuple[str, ...]
    #: A value for each field, plainest first.
    values: tuple[tuple[Any, ...], ...]
    #: How often the plainest value stands in the table.
    plain: int = 1
    #: Values that stand there three times; every other one stands there once.
    often: tuple[tuple[Any, ...], ...] = ()

    def table(self, kept: Sequence[tuple[Any, ...]]) -> tuple[tuple[Any, ...], ...]:
        """Weigh those of its values that are kept, by repetition."""
        counts = [self.plain, *(3 if value in self.often else 1 for value in kept[1:])]
        return tuple(value for value, count in zip(kept, counts, strict=True) for _ in range(count))


def _axis(field: str, *values: Any, plain: int = 1) -> Axis:
    return Axis(fields=(field,), values=tuple((value,) for value in values), plain=plain)


#: Every axis but requests, lengths, heads, query tokens and seed; drawn in this order.
AXES: tuple[Axis, ...] = (
    Axis(fields=("query_format", "cache_format"), values=tuple(itertools.product(FORMATS, FORMATS))),
    _axis("page_size", 1, 2, 3, 7, 16, 32, 64, 128, 256, 480, plain=3),
    # The large pools span 2^31 and 2^32 bytes, and page ids past 2^16 and 2^24; on a CPU only live pages take memory.
    Axis(
        fields=("placement", "pool_rows"),
        values=(
            *((word, 0) for word in PLACEMENTS if word != "straddling"),
            *(("high", rows) for rows in POOLS),
            ("scattered", POOLS[2]),
            *(("straddling", rows) for rows in POOLS),
        ),
        plain=3,
        often=(("permuted", 0), ("shared", 0)),
    ),
    _axis("table", *TABLES),
    _axis("table_padding", 0, 1, 5, plain=2),
    _axis("query_layout", *QUERY_LAYOUTS),
    _axis("token_padding", 0, 64, 16, 1, plain=4),
    _axis("page_padding", 0, 576, 64, 1, plain=4),
    # A power of two moves through rounding unseen; the others do not.
    _axis("cache_scale", 1.0, 0.5, 1.7, 0.0371, 11.3, 0.00093, 310.0, plain=2),
    _axis("query_scale", 1.0, 2.0, 0.3, 0.0213, 7.9, 0.00071, 130.0, plain=2),
    # 1/sqrt(192), 1/sqrt(576), and DeepSeek's with the YaRN factor 1.3689 squared.
    _axis("softmax_scale", 192**-0.5, 576**-0.5, 192**-0.5 * 1.3689**2, plain=3),
    _axis("lse", True, False, plain=4),
    _axis("content", *CONTENTS, plain=3),
    _axis("amplitude", 1.0, 0.25, 3.0, 10.0, 30.0, 100.0, plain=4),
    _axis("poison", *POISONS),
    # The last three are no powers of two, or have no rope part.
    Axis(
        fields=("latent", "rope"),
        values=((512, 64), (128, 64), (256, 32), (64, 16), (192, 48), (512, 0), (8, 8)),
        plain=20,
    ),
)
#: Seeds that are drawn; the shrunk seed is 0 where the seed does not matter.
SEEDS = 1 << 32


def lengths_table(longest: int, tiles: Iterable[int] = TILES) -> tuple[int, ...]:
    """List lengths from 0 to ``longest``, ascending; edges of pages, tiles and splits stand there more than once."""
    tiles = sorted({*tiles, *TILES})
    table = list(range(min(DENSE, longest) + 1))
    near = {edge + step for tile in tiles for edge in (tile, 2 * tile) for step in (-1, 0, 1) if edge + step <= DENSE}
    near |= SHORT
    table += [edge for edge in near if edge <= longest] * (EDGE_WEIGHT - 1)
    far = set()
    for tile in tiles:
        # Every multiple up to eight tiles, then only by doubling: k tiles ± 1 for a share of k that stays constant.
        count = 1
        while count * tile <= longest + 1:
            far |= {count * tile + step for step in (-1, 0, 1)}
            count = count + 1 if count < 8 else 2 * count
    return tuple(sorted(table + [edge for edge in far if DENSE < edge <= longest]))


def by_distance(ranges: Mapping[str, tuple[Any, ...]], most: int = 4) -> Iterable[dict[str, Any]]:
    """List choices of a value for each field that differ from the first value in no field, in one, … in ``most`` fields."""
    first = {field: values[0] for field, values in ranges.items()}
    for count in range(most + 1):
        for fields in itertools.combinations(ranges, count):
            for values in itertools.product(*(ranges[field][1:] for field in fields)):
                yield {**first, **dict(zip(fields, values, strict=True))}
