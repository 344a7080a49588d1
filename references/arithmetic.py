"""The arithmetic that a kernel declares: where it rounds, to what, and how it cuts the context.

1. A record made from a table (a row of the regimes file); an unknown or missing key is an error that names it.
2. It says what a kernel does by design, never how far it may be off; the budget works that out from the data.

Source: what the kernels' own sources do; ``aiter`` policies are those of ``mla_gluon``'s launcher.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

from references.formats import find

#: What a probability is relative to when it is rounded: the running maximum of its tile, the maximum of its row or split, or
#: nothing more to come (divided by the sum first).
PIVOTS = ("tile", "row", "normalised")
#: Which probabilities the sum adds up: those before rounding, or the rounded ones that multiply V.
NORMALISERS = ("exact", "rounded")


def _ceil_divide(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What a split policy may look at besides the context."""

    #: H.
    heads: int
    #: S.
    query_tokens: int
    #: B.
    batch: int


def _even(splits: Splits, length: int, launch: Launch) -> int:
    return _ceil_divide(_ceil_divide(length, splits.count), splits.tile) * splits.tile


def _floor(splits: Splits, length: int, launch: Launch) -> int:
    return max(splits.tile, length // splits.count)


#: Policies: tokens a split takes, the last one taking the rest, of how many splits a launch has.
_LENGTHS: Mapping[str, Callable[[Splits, int, Launch], int]] = MappingProxyType(
    {
        "single": lambda splits, length, launch: length,
        "even": _even,
        "floor": _floor,
        "aiter": _floor,
        "aiter-bh64": _floor,
    }
)
#: Policies that take the number of splits from the launch: ``count`` is then the number of workgroups to fill.
_COUNTS: Mapping[str, Callable[[Splits, Launch], int]] = MappingProxyType(
    {
        "aiter": lambda splits, launch: max(
            1, splits.count // (launch.batch * launch.query_tokens * _ceil_divide(launch.heads, 16))
        ),
        "aiter-bh64": lambda splits, launch: _next_power_of_two(
            _ceil_divide(splits.count, max(1, 8 * _ceil_divide(launch.heads, 64) * launch.query_tokens * (launch.batch // 8)))
        ),
    }
)


def _next_power_of_two(count: int) -> int:
    return 1 << max(0, count - 1).bit_length()


@dataclass(frozen=True, slots=True, kw_only=True)
class Splits:
    """How the context of a request is cut into parts that are merged at the end."""

    #: Policy: "single"; "even", ceil(N / count) rounded up to tiles; "floor", max(tile, N // count) and the last takes the
    #: rest; "aiter", floor with max(1, count // (B S ceil(H / 16))) splits; "aiter-bh64", floor with enough to fill count.
    kind: str = "single"
    #: Splits; for the aiter policies, workgroups to fill.
    count: int = 1
    #: Tokens that a split is rounded up to, or has at least.
    tile: int = 1

    def __post_init__(self) -> None:
        if self.kind not in _LENGTHS:
            raise ValueError(f"split policy {self.kind!r} is not known; known are {', '.join(_LENGTHS)}")
        if self.count < 1 or self.tile < 1:
            raise ValueError(f"count and tile of splits are 1 or more, not {self.count} and {self.tile}")
        if self.kind == "single" and self.count != 1:
            raise ValueError(f"policy 'single' has one split, not {self.count}; say 'even'")

    def launched(self, *, heads: int, query_tokens: int, batch: int) -> int:
        """Count the splits that a launch has room for."""
        launch = Launch(heads=heads, query_tokens=query_tokens, batch=batch)
        return _COUNTS[self.kind](self, launch) if self.kind in _COUNTS else self.count

    def edges(self, length: int, *, heads: int, query_tokens: int, batch: int) -> list[int]:
        """Cut a context of ``length`` tokens: 0, the inner edges and ``length``; [0] for an empty one. No part is empty."""
        launch = Launch(heads=heads, query_tokens=query_tokens, batch=batch)
        count = self.launched(heads=heads, query_tokens=query_tokens, batch=batch)
        step = _LENGTHS[self.kind](
            Splits(kind=self.kind, count=count, tile=self.tile) if count > 1 else Splits(), length, launch
        )
        return [0, *[edge for edge in range(step, step * count, max(1, step)) if edge < length], length] if length else [0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """Where a kernel rounds. Products of operands are exact and sums are fp32 in all of them."""

    #: Format of the probabilities that multiply V.
    probability: str
    #: Format of the output.
    output: str
    #: Format that K and V are rounded to after their scale is applied; None if they are used exactly.
    operand: str | None = None
    #: Format that the query is rounded to after a scale is applied; None if it is used exactly.
    query: str | None = None
    #: What a probability is multiplied by before it is rounded.
    probability_scale: float = 1.0
    #: What a probability is relative to when it is rounded: see ``PIVOTS``.
    pivot: str = "tile"
    #: Which probabilities the sum adds up: see ``NORMALISERS``.
    normaliser: str = "exact"
    #: Format of the normalised partial outputs that splits write.
    partial: str = "fp32"
    #: How the context is cut.
    splits: Splits = field(default_factory=Splits)
    #: Tokens between two updates of the running maximum; 0 for whole rows at once.
    tile: int = 64
    #: Relative error of an exponential at 0; at an argument x it is (1 + |x|) times as much.
    exponential: float = 2.0**-22

    def __post_init__(self) -> None:
        for name in (self.probability, self.output, self.partial, self.operand, self.query):
            if name is not None:
                find(name)
        if self.pivot not in PIVOTS:
            raise ValueError(f"pivot {self.pivot!r} is not one of {', '.join(PIVOTS)}")
        if self.normaliser not in NORMALISERS:
            raise ValueError(f"normaliser {self.normaliser!r} is not one of {', '.join(NORMALISERS)}")
        largest = find(self.probability).maximum
        if not 0 < self.probability_scale <= largest:
            raise ValueError(
                f"probability_scale {self.probability_scale} would overflow {self.probability}, whose largest value is "
                f"{largest}: probabilities reach 1"
            )
        significand, _ = math.frexp(self.probability_scale)
        if not math.ldexp(significand, find(self.probability).significand).is_integer():
            raise ValueError(
                f"probability_scale {self.probability_scale} is no value of {self.probability}: a probability of 1, which all "
                "others are relative to, would be rounded"
            )
        if self.tile < 0 or self.exponential < 0:
            raise ValueError(f"tile and exponential are 0 or more, not {self.tile} and {self.exponential}")

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> Arithmetic:
        """Make an arithmetic from a table of its fields; ``splits`` is a table too, and ``"exact"`` stands for None.

        Raises:
            ValueError: if a key is unknown or missing, or a value is of the wrong kind or out of range; the message says which.
        """
        values: dict[str, Any] = {
            key: None if key in ("operand", "query") and value == "exact" else value
            for key, value in _checked(cls, table, "arithmetic").items()
        }
        if "splits" in values:
            values["splits"] = Splits(**_checked(Splits, values["splits"], "arithmetic.splits"))
        return cls(**values)


#: What the fields may hold in TOML and what that is called, by their annotation.
_KINDS: Mapping[str, tuple[tuple[type, ...], str]] = MappingProxyType(
    {
        "str": ((str,), "a word"),
        "str | None": ((str,), "a word"),
        "int": ((int,), "a whole number"),
        "float": ((int, float), "a number"),
        "Splits": ((Mapping,), "a table"),
    }
)


def _checked(record: type, table: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Check the keys and types of a table against a record's fields."""
    known = {entry.name: entry for entry in fields(record)}
    if unknown := sorted(set(table) - set(known)):
        raise ValueError(f"{where}: unknown {', '.join(unknown)}; known are {', '.join(known)}")
    required = ("probability", "output") if record is Arithmetic else ()
    if missing := [name for name in required if name not in table]:
        raise ValueError(f"{where}: {', '.join(missing)} missing")
    for name, value in table.items():
        kinds, wanted = _KINDS[str(known[name].type)]
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise ValueError(f"{where}: {name} is {wanted}, not {value!r}")
    return dict(table)
