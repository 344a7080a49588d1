"""Hypothesis strategies of cases, shaped so that shrinking reads well.

1. A case is built inside its regime and its backend's contract; it is never drawn anywhere and filtered.
2. Hypothesis draws indices into the tables of ``axes`` and shrinks them, so in a shrunk case every axis that does not
   matter is plain.
3. What costs most to leave large is drawn first, since Hypothesis shrinks earlier choices harder: requests, lengths,
   heads, query tokens.
4. On a GPU the fields that a backend compiles kernels for are drawn together, from a few sets of them: another kernel costs
   seconds and another case milliseconds. Every value of every such field stands in some set, the plainest in the first one.
5. Values are probed from a plain case that the backend accepts, alone and beside one other change. Where drawn values
   cannot stand together, the case moves axis by axis towards that plain case until it is accepted.

Source: Hypothesis's shrink order: fewer choices first, then smaller ones, the earliest first.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

from harness.acceptance import Accepts, acceptance
from harness.axes import AXES, BATCHES, FEW, FORMATS, HEADS, QUERY_TOKENS, SEEDS, Axis, by_distance, lengths_table
from harness.backends.protocol import Backend
from harness.case import CONTENTS, QUERY_LAYOUTS, TABLES, Case, CaseError
from harness.kernel_sets import kernel_sets
from harness.outsized import shapes
from harness.profiles import Profile
from harness.regimes import Regime
from harness.region import Numbers, Region

#: Where a plain case is looked for, likeliest first; for lengths the length of each request.
_USUAL: Mapping[str, Sequence[Any]] = {
    "query_format": FORMATS,
    "cache_format": FORMATS,
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
#: How many times a profile's scores the plainest case of a regime may have on a CPU: AITER's bh64 (64 requests, 64 heads,
#: 1024 tokens) belongs to the gate profile.
_FACTOR = 30
#: Cases tried in looking for it: each costs microseconds, and a region leaves few choices.
_TRIALS = 100_000


class NoSuchCase(ValueError):
    """No case lies both in a regime and in a backend's contract."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Domain:
    """What may be drawn for one backend and one regime."""

    #: A plain case that is accepted; where axes clash, cases move towards it.
    plain: Case
    #: Numbers of requests that are accepted, ascending, weighted.
    batches: tuple[int, ...]
    #: Lengths, ascending, weighted by repetition.
    lengths: tuple[int, ...]
    #: Heads, ascending, weighted.
    heads: tuple[int, ...]
    #: Query tokens, ascending, weighted.
    query_tokens: tuple[int, ...]
    #: The axes with the values that are accepted, weighted.
    axes: tuple[Axis, ...]


def domain(regime: Regime, profile: Profile, accepts: Accepts) -> Domain:
    """Find what may be drawn.

    Args:
        regime: the row whose cases are wanted.
        profile: how large cases may be.
        accepts: whether a case may be asked.

    Raises:
        NoSuchCase: if no case is accepted.
    """
    plain = plain_case(accepts, regime.where)
    changes = [dict(zip(axis.fields, value, strict=True)) for axis in AXES for value in axis.values]
    others = [change for change in changes if _accepted(accepts, plain, **change)]

    def possible(**change: Any) -> bool:
        """Accepted alone, or beside one change of another axis: what two axes forbid together neither loses."""
        beside = (other for other in others if not other.keys() & change.keys())
        return _accepted(accepts, plain, **change) or any(_accepted(accepts, plain, **change, **other) for other in beside)

    def allowed(field: str, table: Iterable[Any]) -> tuple[Any, ...]:
        fits = {value: possible(**{field: value}) for value in dict.fromkeys(table)}
        return tuple(value for value in table if fits[value])

    table = _lengths(regime, profile)
    fits = {length: possible(lengths=(length,) * plain.batch) for length in dict.fromkeys(table)}
    dense = [count for count in range(1, profile.batch + 1) if _accepted(accepts, plain, lengths=plain.lengths[:1] * count)]
    batches = sorted(count for count in BATCHES if count in dense) or dense
    axes = []
    for axis in AXES:
        kept = [value for value in axis.values if possible(**dict(zip(axis.fields, value, strict=True)))]
        own = tuple(getattr(plain, field) for field in axis.fields)
        kept = kept or [own]
        axes.append(Axis(fields=axis.fields, values=axis.table(kept)))
    return Domain(
        plain=plain,
        batches=tuple(batches) or (plain.batch,),
        lengths=tuple(length for length in table if fits[length]) or plain.lengths[:1],
        heads=allowed("heads", sorted(head for head in HEADS if head <= profile.heads)) or (plain.heads,),
        query_tokens=allowed("query_tokens", QUERY_TOKENS) or (plain.query_tokens,),
        axes=tuple(axes),
    )


def drawable(regime: Regime, profile: Profile, accepts: Accepts) -> dict[str, list[Any]]:
    """List the values of each field of a case that may be drawn; of ``lengths`` those of one request."""
    known = domain(regime, profile, accepts)
    values: dict[str, list[Any]] = {"batch": list(known.batches), "lengths": list(known.lengths)}
    values |= {"heads": list(known.heads), "query_tokens": list(known.query_tokens)}
    for axis in known.axes:
        values |= {field: [value[place] for value in axis.values] for place, field in enumerate(axis.fields)}
    return {field: list(dict.fromkeys(found)) for field, found in values.items()}


def beyond(regime: Regime, profile: Profile, accepts: Accepts) -> str | None:
    """Say why a regime is not for a profile on a CPU: its plainest case alone is many times what a case may be; or None."""
    try:
        plain = plain_case(accepts, regime.where)
    except NoSuchCase:
        return None
    scores = plain.heads * plain.query_tokens * sum(plain.lengths)
    if scores <= _FACTOR * profile.scores:
        return None
    return f"its plainest case has {scores} scores, and a case of profile {profile.name} about {profile.scores} at most"


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
    numbers = (Axis(fields=(name,), values=tuple((one,) for one in getattr(known, name))) for name in ("heads", "query_tokens"))
    sets = kernel_sets((*numbers, *known.axes), compiled, profile.kernels, seed) if compiled else [{}]

    # What outgrows the profile is drawn in whole shapes: the profile's bounds would leave one of them.
    limits = {"batches": known.batches, "heads": known.heads, "query_tokens": known.query_tokens}
    outsized = () if compiled else shapes(known.plain, profile, accepts, **limits)
    every_length = _lengths(regime, profile)

    @st.composite
    def build(draw: st.DrawFn) -> Case:
        place = itertools.count()

        def index(count: int) -> int:
            return draw_index(draw, next(place), count)

        def upto(table: tuple[int, ...], most: int) -> int:
            return table[index(max(bisect_right(table, most), 1))]

        chosen = sets[index(len(sets))] if compiled else {}
        fields: dict[str, Any] = {}
        if outsized:
            shape = outsized[index(len(outsized))]
            fields |= {"heads": shape.heads, "query_tokens": shape.query_tokens}
            fields["lengths"] = shape.lengths(index, every_length)
        else:
            # Where heads and query tokens are chosen already, the lengths have to fit them.
            scores = profile.scores // (chosen.get("heads", 1) * chosen.get("query_tokens", 1))
            most = min(profile.tokens, max(scores, 1)) if compiled else profile.tokens
            table = known.lengths[: max(bisect_right(known.lengths, most), 1)]
            fields["lengths"] = _draw_lengths(index, known, table, most)
            tokens = max(sum(fields["lengths"]), 1)
            fields["heads"] = chosen.get("heads") or upto(known.heads, profile.scores // tokens)
            fields["query_tokens"] = chosen.get("query_tokens") or upto(
                known.query_tokens, profile.scores // (tokens * fields["heads"])
            )
        for axis in known.axes:
            value = axis.values[index(len(axis.values)) if len(axis.values) > 1 else 0]
            fields |= {name: chosen.get(name, own) for name, own in zip(axis.fields, value, strict=True)}
        fields["seed"] = draw(st.integers(0, SEEDS - 1))
        return _inside(fields, known.plain, accepts)

    return build()


def _lengths(regime: Regime, profile: Profile) -> tuple[int, ...]:
    arithmetic = regime.arithmetic
    return lengths_table(profile.longest, {tile for tile in (arithmetic.tile, arithmetic.splits.tile) if tile > 1})


def draw_index(draw: st.DrawFn, place: int, count: int) -> int:
    """Draw an index below ``count``; ``place`` tells it from every other index of the case."""
    # Hypothesis follows a draw by copies in which one part repeats another of its kind, and takes equal strategies for one
    # kind: of plain integers, two cases in three would be near copies of the case before.
    apart = (place + 1) << 32
    return draw(st.sampled_from(range(apart, apart + count))) - apart


def _draw_lengths(index: Callable[[int], int], known: Domain, table: tuple[int, ...], tokens: int) -> tuple[int, ...]:
    count = known.batches[index(len(known.batches))]
    least, left, lengths = table[0], tokens, []
    for place in range(count):
        # What is left when the requests after this one are as short as may be; of many, each has its share and some more.
        most = min(left - least * (count - place - 1), tokens if count <= FEW else FEW * tokens // count)
        lengths.append(table[index(max(bisect_right(table, most), 1))])
        left -= lengths[-1]
    return tuple(lengths)


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


def plain_case(accepts: Accepts, where: Region) -> Case:
    """Find the plainest accepted case: no field off its first value, then one, then more, within the region."""
    ranges = {field: _within(where, field, values) for field, values in _USUAL.items()}
    for choice in itertools.islice(by_distance(ranges), _TRIALS):
        length, batch = choice.pop("lengths"), choice.pop("batch")
        try:
            case = Case(lengths=(length,) * batch, **choice)
        except CaseError:
            continue
        if accepts(case):
            return case
    raise NoSuchCase(
        "no case of this regime lies in the backend's contract: mend the regime's `where`, or leave the backend out"
    )


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
