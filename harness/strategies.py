"""Hypothesis strategies of cases, shaped so that shrinking reads well.

1. A case is built inside its regime and its backend's contract; it is never drawn anywhere and filtered.
2. Each axis is a table from plain to strange. Hypothesis draws an index and shrinks it, so in a shrunk case every axis
   that does not matter is plain.
3. Numbers ascend in their table. Those around page, tile and split edges stand there more than once: likelier to be drawn,
   and no obstacle to shrinking.
4. What costs most to leave large is drawn first, since Hypothesis shrinks earlier choices harder: requests, lengths,
   heads, query tokens.
5. On a GPU the fields that a backend compiles kernels for are drawn together, from a few sets of them: another kernel costs
   seconds and another case milliseconds. Every value of every such field stands in some set, the plainest in the first one.
6. Axes are probed one at a time from a plain case that the backend accepts. Where two of them cannot stand together, a
   drawn case moves axis by axis towards that plain case until it is accepted.

Source: boundary lengths find mask faults and regular ones do not (FlashMLA's and FlashInfer's fuzzers draw them too).
"""

from __future__ import annotations

import itertools
import random
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

from harness.backends.protocol import Backend
from harness.case import CONTENTS, PLACEMENTS, POISONS, QUERY_LAYOUTS, TABLES, Case, CaseError
from harness.known import covering
from harness.profiles import Profile
from harness.regimes import Regime
from harness.region import Numbers, Region
from references.formats import FORMATS

#: Says whether a case may be asked: it lies in the regime and its backend accepts it.
Accepts = Callable[[Case], bool]

#: Lengths up to this are all drawn, so that Hypothesis can walk to the shortest that fails; beyond it only edges are.
DENSE = 136
#: Tile and page sizes whose multiples are edges for any kernel.
TILES = (16, 32, 64, 128, 256)
#: How often an edge among the dense lengths stands in the table: with 13 edges about a fifth of all draws.
EDGE_WEIGHT = 4
#: Heads of a case: small ones, those of production models split over 1 to 16 GPUs, and the neighbours of MFMA tiles.
HEADS = (*range(1, 17), 1, 8, 12, 16, 17, 20, 24, 31, 32, 33, 40, 48, 64, 65, 96, 127, 128, 129, 192, 256)
#: Query tokens of a request: plain decode most often, then the depths of multi-token prediction.
QUERY_TOKENS = (1, 1, 1, 1, 1, 2, 2, 3, 4, 4, 5, 6, 7, 8, 16)
#: Rows of large pools: page ids past 2^16; 2^31 bytes of bf16 rows of 576; 2^32 of them, which is 2^31 elements of any and
#: 2^31 bytes of fp8; 2^32 bytes of fp8; page ids past 2^24.
POOLS = (70_000, 1_900_000, 3_800_000, 7_600_000, 17_000_000)
#: Formats, the commonest first.
_FORMATS = ("bf16", *(name for name in FORMATS if name != "bf16"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """Fields of a case that are drawn together, and their values from plain to strange."""

    #: Fields of Case.
    fields: tuple[str, ...]
    #: A value for each field, plainest first.
    values: tuple[tuple[Any, ...], ...]
    #: How often the plainest value stands in the table; the others stand there once.
    plain: int = 1


def _axis(field: str, *values: Any, plain: int = 1) -> Axis:
    return Axis(fields=(field,), values=tuple((value,) for value in values), plain=plain)


#: Every axis but requests, lengths, heads, query tokens and seed; drawn in this order.
AXES: tuple[Axis, ...] = (
    Axis(fields=("query_format", "cache_format"), values=tuple(itertools.product(_FORMATS, _FORMATS))),
    _axis("page_size", 1, 2, 3, 7, 16, 32, 64, 128, plain=3),
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
    ),
    _axis("table", *TABLES),
    _axis("table_padding", 0, 1, 5, plain=2),
    _axis("query_layout", *QUERY_LAYOUTS),
    _axis("token_padding", 0, 64, 16, 1, plain=4),
    _axis("page_padding", 0, 576, 64, 1, plain=4),
    # A power of two moves through rounding unseen; the others do not.
    _axis("cache_scale", 1.0, 0.5, 1.7, 0.0371, 11.3, plain=2),
    _axis("query_scale", 1.0, 2.0, 0.3, 0.0213, 7.9, plain=2),
    # 1/sqrt(192), 1/sqrt(576), and DeepSeek's with the YaRN factor 1.3689 squared.
    _axis("softmax_scale", 192**-0.5, 576**-0.5, 192**-0.5 * 1.3689**2, plain=3),
    _axis("lse", True, False, plain=4),
    _axis("content", *CONTENTS, plain=3),
    _axis("amplitude", 1.0, 0.25, 3.0, 10.0, 30.0, 100.0, plain=4),
    _axis("poison", *POISONS),
    Axis(fields=("latent", "rope"), values=((512, 64), (128, 64), (256, 32), (64, 16)), plain=12),
)
#: Where a plain case is looked for, likeliest first; for lengths the length of each request.
_USUAL: Mapping[str, Sequence[Any]] = {
    "query_format": _FORMATS,
    "cache_format": _FORMATS,
    "heads": tuple(dict.fromkeys(sorted(HEADS))),
    "batch": (1, 2, 4, 8, 16, 32, 64, 128, 256),
    "lengths": (64, 65, 128, 256, 512, 1024, 4096, 16384, 1, 0),
    "page_size": (1, 16, 32, 64, 128, 2, 3),
    "query_tokens": tuple(range(1, 17)),
    "table": TABLES,
    "query_layout": QUERY_LAYOUTS,
    "lse": (True, False),
    "content": tuple(CONTENTS),
}
#: Cases tried in looking for it: each costs microseconds, and a region leaves few choices.
_TRIALS = 100_000
#: Seeds that are drawn; the shrunk seed is 0 where the seed does not matter.
SEEDS = 1 << 32


class NoSuchCase(ValueError):
    """No case lies both in a regime and in a backend's contract."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Domain:
    """What may be drawn for one backend and one regime."""

    #: A plain case that is accepted; where axes clash, cases move towards it.
    plain: Case
    #: Numbers of requests that are accepted, ascending.
    batches: tuple[int, ...]
    #: Lengths, ascending, weighted by repetition.
    lengths: tuple[int, ...]
    #: Heads, ascending, weighted.
    heads: tuple[int, ...]
    #: Query tokens, ascending, weighted.
    query_tokens: tuple[int, ...]
    #: The axes with the values that are accepted, weighted.
    axes: tuple[Axis, ...]


def lengths_table(longest: int, tiles: Iterable[int] = TILES) -> tuple[int, ...]:
    """List lengths from 0 to ``longest``, ascending; edges of pages, tiles and splits stand there more than once."""
    tiles = sorted({*tiles, *TILES})
    table = list(range(min(DENSE, longest) + 1))
    near = {edge + step for tile in tiles for edge in (tile, 2 * tile) for step in (-1, 0, 1) if edge + step <= DENSE}
    table += [edge for edge in near if edge <= longest] * (EDGE_WEIGHT - 1)
    far = set()
    for tile in tiles:
        # Every multiple up to eight tiles, then only by doubling: k tiles ± 1 for a share of k that stays constant.
        count = 1
        while count * tile <= longest + 1:
            far |= {count * tile + step for step in (-1, 0, 1)}
            count = count + 1 if count < 8 else 2 * count
    return tuple(sorted(table + [edge for edge in far if DENSE < edge <= longest]))


def acceptance(regime: Regime, backend: Backend, device: torch.device | str = "cpu") -> Accepts:
    """Make the question whether a case may be asked: of the regime, accepted on the device, and not known to fail."""
    device = torch.device(device)
    return lambda case: (
        case in regime.where and backend.why_not(case, device) is None and not covering(backend.name, case, regime.name)
    )


def domain(regime: Regime, profile: Profile, accepts: Accepts) -> Domain:
    """Find what may be drawn.

    Args:
        regime: the row whose cases are wanted.
        profile: how large cases may be.
        accepts: whether a case may be asked.

    Raises:
        NoSuchCase: if no case is accepted.
    """
    plain = _plain_case(accepts, regime.where)
    arithmetic = regime.arithmetic
    tiles = {tile for tile in (arithmetic.tile, arithmetic.splits.tile) if tile > 1}

    def allowed(field: str, table: Iterable[Any]) -> tuple[Any, ...]:
        return tuple(value for value in table if _accepted(accepts, plain, **{field: value}))

    table = lengths_table(profile.longest, tiles)
    fits = {length: _accepted(accepts, plain, lengths=(length,) * plain.batch) for length in dict.fromkeys(table)}
    batches = [count for count in range(1, profile.batch + 1) if _accepted(accepts, plain, lengths=plain.lengths[:1] * count)]
    axes = []
    for axis in AXES:
        kept = [value for value in axis.values if _accepted(accepts, plain, **dict(zip(axis.fields, value, strict=True)))]
        own = tuple(getattr(plain, field) for field in axis.fields)
        kept = kept or [own]
        axes.append(Axis(fields=axis.fields, values=tuple([kept[0]] * (axis.plain - 1) + kept)))
    return Domain(
        plain=plain,
        batches=tuple(batches) or (plain.batch,),
        lengths=tuple(length for length in table if fits[length]) or plain.lengths[:1],
        heads=allowed("heads", sorted(head for head in HEADS if head <= profile.heads)) or (plain.heads,),
        query_tokens=allowed("query_tokens", QUERY_TOKENS) or (plain.query_tokens,),
        axes=tuple(axes),
    )


def kernel_sets(known: Domain, compiled: frozenset[str], count: int, seed: int) -> list[dict[str, Any]]:
    """Make sets of values of the fields that a backend compiles kernels for, the plainest first.

    Args:
        known: what may be drawn.
        compiled: the fields.
        count: sets.
        seed: chooses which values meet.
    """
    draw = random.Random(seed)
    columns: list[list[dict[str, Any]]] = []
    numbers = [Axis(fields=(name,), values=tuple((value,) for value in getattr(known, name)), plain=1)
               for name in ("heads", "query_tokens")]  # fmt: skip
    for axis in (*numbers, *known.axes):
        if not compiled.intersection(axis.fields):
            continue
        # Each value once as far as there are sets, the rest by its weight.
        strange = [value for value in dict.fromkeys(axis.values) if value != axis.values[0]]
        draw.shuffle(strange)
        rest = strange[: count - 1]
        rest += [draw.choice(axis.values) for _ in range(count - 1 - len(rest))]
        draw.shuffle(rest)
        columns.append([dict(zip(axis.fields, value, strict=True)) for value in (axis.values[0], *rest)])
    sets: list[dict[str, Any]] = [{} for _ in range(count)]
    for column in columns:
        for made, values in zip(sets, column, strict=True):
            made.update(values)
    return sets


def cases(
    regime: Regime, profile: Profile, backend: Backend, device: torch.device | str = "cpu", *, seed: int = 0
) -> st.SearchStrategy[Case]:
    """Make the strategy of the cases of a regime that a backend accepts.

    Args:
        regime: the row whose cases are wanted.
        profile: how large cases may be.
        backend: who is asked.
        device: where.
        seed: on a GPU, chooses which values of the fields that kernels are compiled for meet.

    Raises:
        NoSuchCase: if there is none.
    """
    accepts = acceptance(regime, backend, device)
    known = domain(regime, profile, accepts)
    compiled = backend.capabilities.compiled if torch.device(device).type == "cuda" else frozenset()
    sets = kernel_sets(known, compiled, profile.kernels, seed) if compiled else [{}]

    @st.composite
    def build(draw: st.DrawFn) -> Case:
        def upto(table: tuple[int, ...], most: int) -> int:
            return table[draw(st.integers(0, max(bisect_right(table, most), 1) - 1))]

        chosen = sets[draw(st.integers(0, len(sets) - 1))] if compiled else {}
        # Where heads and query tokens are chosen already, the lengths have to fit them.
        scores = profile.scores // (chosen.get("heads", 1) * chosen.get("query_tokens", 1))
        most = min(profile.tokens, max(scores, 1)) if compiled else profile.tokens
        table = known.lengths[: max(bisect_right(known.lengths, most), 1)]
        length = st.integers(0, len(table) - 1).map(table.__getitem__)
        lengths = _draw_lengths(draw, known, length, most)
        tokens = max(sum(lengths), 1)
        fields: dict[str, Any] = {"lengths": lengths}
        fields["heads"] = chosen.get("heads") or upto(known.heads, profile.scores // tokens)
        fields["query_tokens"] = chosen.get("query_tokens") or upto(
            known.query_tokens, profile.scores // (tokens * fields["heads"])
        )
        for axis in known.axes:
            if axis.fields[0] in chosen:
                fields |= {name: chosen[name] for name in axis.fields}
                continue
            value = axis.values[draw(st.integers(0, len(axis.values) - 1))] if len(axis.values) > 1 else axis.values[0]
            fields |= dict(zip(axis.fields, value, strict=True))
        fields["seed"] = draw(st.integers(0, SEEDS - 1))
        return _inside(fields, known.plain, accepts)

    return build()


def _draw_lengths(draw: st.DrawFn, known: Domain, length: st.SearchStrategy[int], tokens: int) -> tuple[int, ...]:
    if known.batches == tuple(range(1, len(known.batches) + 1)):
        lengths = draw(st.lists(length, min_size=1, max_size=len(known.batches)))
        total = list(itertools.accumulate(lengths))
        kept = max(bisect_right(total, tokens), 1)
        return tuple(lengths[:kept])
    # Only some numbers of requests are accepted: all are kept, and each is short enough for its number.
    count = known.batches[draw(st.integers(0, len(known.batches) - 1))]
    most = max(bisect_right(known.lengths, tokens // count), 1)
    return tuple(known.lengths[draw(st.integers(0, most - 1))] for _ in range(count))


def _inside(fields: dict[str, Any], plain: Case, accepts: Accepts) -> Case:
    """Move fields to those of the plain case, the strangest last drawn first, until the case is accepted."""
    names = [name for name in fields if name not in ("seed", "lengths", "heads", "query_tokens")]
    steps = [(name,) for name in (*reversed(names), "query_tokens", "heads", "lengths")]
    own = {name: getattr(plain, name) for name in fields}
    # First one field alone, then more and more of them together.
    trials: list[tuple[str, ...]] = [(), *steps]
    together: tuple[str, ...] = ()
    for step in steps:
        together += step
        trials.append(together)
    for trial in trials:
        try:
            case = Case(**{**fields, **{name: own[name] for name in trial}})
        except CaseError:
            continue
        if accepts(case):
            return case
    return plain


def _accepted(accepts: Accepts, plain: Case, **changes: Any) -> bool:
    try:
        return accepts(plain.replace(**changes))
    except CaseError:
        return False


def _plain_case(accepts: Accepts, where: Region) -> Case:
    """Find the plainest accepted case: no field off its first value, then one, then more, within the region."""
    ranges = {field: _within(where, field, values) for field, values in _USUAL.items()}
    for choice in itertools.islice(_by_distance(ranges), _TRIALS):
        length, batch = choice.pop("lengths"), choice.pop("batch")
        try:
            case = Case(lengths=(length,) * batch, **choice)
        except CaseError:
            continue
        if accepts(case):
            return case
    raise NoSuchCase("no case of this regime lies in the backend's contract: mend the regime's `where`, or leave the backend out")


def _within(where: Region, field: str, values: Sequence[Any]) -> tuple[Any, ...]:
    """Keep the values that a region allows; of a range of numbers that holds none of them, its first."""
    rule = where.allowed.get(field)
    if rule is None:
        return tuple(values)
    parts = rule if isinstance(rule, tuple) else (rule,)
    kept = [value for value in values if any(value in part for part in parts)]
    if not kept:
        first = ((part, -(-part.minimum // part.multiple_of) * part.multiple_of) for part in parts if isinstance(part, Numbers))
        kept = [value for part, value in first if value in part]
    return tuple(kept)


def _by_distance(ranges: Mapping[str, tuple[Any, ...]], most: int = 4) -> Iterable[dict[str, Any]]:
    """List choices that differ from the first value in no field, in one, … in ``most`` fields."""
    first = {field: values[0] for field, values in ranges.items()}
    for count in range(most + 1):
        for fields in itertools.combinations(ranges, count):
            for values in itertools.product(*(ranges[field][1:] for field in fields)):
                yield {**first, **dict(zip(fields, values, strict=True))}
