"""The values of query and cache: one generator a content family.

1. All randomness is raw Philox words, turned into numbers by integer arithmetic; floating point then only adds,
   multiplies, divides and takes square roots, which IEEE 754 rounds alike everywhere. Sums over data, whose order a
   library may choose, and libm's functions are kept out (logarithms are rounded to 1/64).
2. Values here are *code* values: what the format stores, before the tensor's scale.
3. Scores are aimed, not measured: ``Aim`` chooses code magnitudes so that scores have the case's amplitude, as far as the
   formats reach.
4. A family sees one request at a time and makes its rows in pieces, so a million tokens need no more memory than one piece.

Source: the families answer the blind spots of the harnesses in ``docs/why.md``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from harness.cache import stream
from harness.case import Case
from harness.draws import Values, normal, signs, slot_signs
from references.formats import FORMATS

#: Rows generated at a time.
PIECE = 4096
#: Share of the common direction in a query that has one; the rest is noise of the same norm: 0.7^2 + 0.7^2 is about 1.
_SHARE = np.float32(0.7)
#: Score of a needle above the rest, beyond what outweighs the whole context, natural-log units: e^-8 is left to the rest.
_LEAD = 8.0
#: Steepest climb of rising and falling scores over the context, natural-log units: e^60 stays far inside fp32.
_CLIMB = 60.0
#: Depth of sunken scores below zero, natural-log units: e^-200 is nothing in fp32, whose smallest number is about e^-103.
_DEPTH = 200.0
#: Largest code magnitude of the edges family in wide formats: its sums over a context stay finite in fp32.
_WIDE = 2.0**40

_QUERY, _ROWS, _DIRECTION, _EDGES = 2, 3, 4, 5  # stream names; placement has 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Aim:
    """Code magnitudes that give the scores their amplitude.

    With independent codes of standard deviation ``query`` and ``cache`` over D elements, scores have the standard
    deviation softmax_scale · query_scale · cache_scale · query · cache · √D.
    """

    #: Standard deviation of query codes.
    query: float
    #: Standard deviation of cache codes.
    cache: float
    #: Score of one common direction: scores of q = query · u and k = u are ``gain``, u a vector of ±1.
    gain: float

    @classmethod
    def at(cls, case: Case) -> Aim:
        """Aim for a case."""
        factor = case.softmax_scale * case.query_scale * case.cache_scale
        product = case.amplitude / (factor * math.sqrt(case.width))
        query = _comfortable(product, case.query_format)
        cache = _comfortable(product / query, case.cache_format)
        query = _comfortable(product / cache, case.query_format)
        return cls(query=query, cache=cache, gain=factor * query * case.width)


def _comfortable(deviation: float, name: str) -> float:
    """Keep a standard deviation where ``normal``, which ends at ±3.5, neither saturates nor goes subnormal much."""
    known = FORMATS[name]
    return min(max(deviation, 16 * known.smallest_normal, 2.0**-20), known.maximum / 4, 2.0**20)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request as its family sees it."""

    case: Case
    #: Its index in the batch.
    index: int
    #: Its token slots, int64 [N].
    slots: NDArray[np.int64]
    aim: Aim

    @property
    def length(self) -> int:
        """N, cached tokens."""
        return len(self.slots)

    def visible(self, token: int) -> int:
        """Count the cached tokens that query token ``token`` sees."""
        return self.length - self.case.query_tokens + token + 1

    def queries(self) -> Values:
        """Draw independent normal query codes; [S, H, D]."""
        case = self.case
        return normal(stream(case.seed, _QUERY, self.index), case.query_tokens, case.heads, case.width) * np.float32(
            self.aim.query
        )

    def rows(self, start: int, stop: int) -> Values:
        """Draw independent normal cache codes of tokens start … stop - 1, within one piece; [stop - start, D]."""
        part = self.index * (1 << 32) + start // PIECE
        return normal(stream(self.case.seed, _ROWS, part), stop - start, self.case.width) * np.float32(self.aim.cache)

    def direction(self) -> Values:
        """Draw a direction common to all queries: D signs; [D]."""
        words = stream(self.case.seed, _DIRECTION, self.index).random_raw(-(-self.case.width // 64))
        direction: Values = signs(words[None], self.case.width)[0]
        return direction

    def log_length(self) -> float:
        """ln N, to 1/64."""
        return round(64 * math.log(max(self.length, 1))) / 64


#: Makes the query of a request, [S, H, D].
QueryFamily = Callable[[Request], Values]
#: Makes rows of a request given its query; tokens start … stop - 1, [stop - start, D].
RowFamily = Callable[[Request, Values, int, int], Values]


def _plain_rows(request: Request, query: Values, start: int, stop: int) -> Values:
    return request.rows(start, stop)


def _rope_query(request: Request) -> Values:
    case, query = request.case, request.queries()
    if case.rope:
        query[..., : case.latent] *= np.float32(0.1)
        query[..., case.latent :] *= np.float32(math.sqrt(case.width / case.rope))
    return query


def _leaning_query(request: Request) -> Values:
    noise = request.queries() * _SHARE
    return noise + np.float32(request.aim.query) * _SHARE * request.direction()


def needle_places(request: Request, token: int) -> list[int]:
    """List where needles may lie for a query token: both ends, page, tile and split edges and their neighbours, between."""
    seen, size = request.visible(token), request.case.page_size
    edges = [0, seen - 1, seen - 2]
    for step in (size, 64, 128, 256):
        for edge in (step, (seen // 2) // step * step, (seen - 1) // step * step):
            edges += [edge - 1, edge, edge + 1]
    for share in range(1, 8):  # the edges of even splits into 2, 4 and 8
        edges += [seen * share // 8 - 1, seen * share // 8]
    return list(dict.fromkeys(edge for edge in edges if 0 <= edge < seen))


def _needle_rows(request: Request, query: Values, start: int, stop: int) -> Values:
    rows, case = request.rows(start, stop), request.case
    lead = case.amplitude * (request.log_length() + _LEAD)
    gain = np.float32(lead / (request.aim.gain * request.aim.query))
    return _plant(request, query, rows, start, gain)


def _peak_rows(request: Request, query: Values, start: int, stop: int) -> Values:
    # The query is a quarter as large as aimed, so its own direction gives a sixteenth of the gain.
    rows = request.rows(start, stop)
    gain = np.float32(16 * request.log_length() / (request.aim.gain * request.aim.query))
    return _plant(request, query, rows, start, gain)


def _plant(request: Request, query: Values, rows: Values, start: int, gain: np.float32) -> Values:
    """Add to the row that each (query token, head) looks at that head's own query, ``gain`` times."""
    for token in range(request.case.query_tokens):
        places = needle_places(request, token)
        for head in range(request.case.heads if places else 0):
            place = places[(request.case.seed + 5 * head + 3 * token + request.index) % len(places)] - start
            if 0 <= place < len(rows):
                rows[place] += gain * query[token, head]
    return rows


def _newest_rows(request: Request, query: Values, start: int, stop: int) -> Values:
    rows, case = request.rows(start, stop), request.case
    lead = case.amplitude * (request.log_length() + _LEAD)
    for token in range(case.query_tokens):
        place = request.length - case.query_tokens + token - start
        if 0 <= place < len(rows):
            height = lead + 4 * case.amplitude * token
            rows[place] += np.float32(height / (request.aim.gain * float(_SHARE))) * request.direction()
    return rows


def _climb(request: Request, tokens: Values) -> Values:
    climb = min(_CLIMB, 20 * request.case.amplitude) / (request.aim.gain * float(_SHARE))
    height: Values = np.float32(climb) * (tokens / np.float32(request.length))
    return height[:, None] * request.direction()


def _climbing_rows(request: Request, query: Values, start: int, stop: int) -> Values:
    return request.rows(start, stop) + _climb(request, np.arange(start, stop, dtype=np.float32))


def _falling_rows(request: Request, query: Values, start: int, stop: int) -> Values:
    left = np.arange(request.length - start, request.length - stop, -1, dtype=np.float32)
    return request.rows(start, stop) + _climb(request, left)


def _sunken_rows(request: Request, query: Values, start: int, stop: int) -> Values:
    depth = min(_DEPTH, 60 * request.case.amplitude) / (request.aim.gain * float(_SHARE))
    return request.rows(start, stop) - np.float32(depth) * request.direction()


def _tied_rows(request: Request, query: Values, start: int, stop: int) -> Values:
    book = request.rows(0, 4)
    words = stream(request.case.seed, _EDGES, request.index * (1 << 32) + start // PIECE).random_raw(stop - start)
    return book[(words % np.uint64(4)).astype(np.int64)]


def _one_rows(request: Request, query: Values, start: int, stop: int) -> Values:
    rows = request.rows(start, stop)
    rows[:, : request.case.latent] = 1
    return rows


def _slot_rows(request: Request, query: Values, start: int, stop: int) -> Values:
    rows, latent = request.rows(start, stop), request.case.latent
    rows[:, :latent] = slot_signs(request.slots[start:stop], latent)
    return rows


def _edge_query(request: Request) -> Values:
    query = request.queries() * np.float32(math.sqrt(2))
    query[..., 1::2] = 0  # the odd elements hold the edges, and the largest would drown every score
    return query


def _edge_rows(request: Request, query: Values, start: int, stop: int) -> Values:
    known = FORMATS[request.case.cache_format]
    large = min(known.maximum, _WIDE)
    book = np.array([large, known.smallest_normal, known.smallest_subnormal, 0.0, 1.0, 3.0], np.float32)
    book = np.concatenate([book, -book])
    rows = request.rows(start, stop)
    odd = rows[:, 1::2]
    words = stream(request.case.seed, _EDGES, request.index * (1 << 32) + start // PIECE).random_raw(odd.size)
    rows[:, 1::2] = book[(words % np.uint64(len(book))).astype(np.int64)].reshape(odd.shape)
    return rows


#: Family name: how its query and its rows are made.
FAMILIES: Mapping[str, tuple[QueryFamily, RowFamily]] = {
    "gaussian": (Request.queries, _plain_rows),
    "decorrelated": (_rope_query, _plain_rows),
    "needle": (Request.queries, _needle_rows),
    "newest": (_leaning_query, _newest_rows),
    "peak-tail": (lambda request: request.queries() * np.float32(0.25), _peak_rows),
    "rising": (_leaning_query, _climbing_rows),
    "falling": (_leaning_query, _falling_rows),
    "sunken": (_leaning_query, _sunken_rows),
    "ties": (Request.queries, _tied_rows),
    "zero-query": (lambda request: request.queries() * np.float32(0), _plain_rows),
    "ones": (_rope_query, _one_rows),
    "slots": (Request.queries, _slot_rows),
    "edges": (_edge_query, _edge_rows),
}
