"""One decode problem as a value.

1. A Case holds no tensors. It is frozen and hashable, and with its seed it fixes every byte of the inputs.
2. ``str(case)`` is an id for shells, logs and file names, and ``Case.parse`` gives the same case back. Only fields that
   differ from their default are printed, so an id is as long as its problem is unusual.
3. An id starts with its version and ends with ``:end``: one that was cut off or comes from a newer version is refused.
4. A case that cannot exist is refused when it is made, with the reason.

Source: the axes are those of the README; the fields are what engines vary (vLLM, SGLang) and what kernels have got wrong.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from references.formats import FORMATS

VERSION = "v1"

#: Content families: how the values of query and cache are laid out. ``content.py`` generates each.
CONTENTS: Mapping[str, str] = {
    "gaussian": "query and cache rows independent and normal: a flat softmax at amplitude 1",
    "decorrelated": "scores come from the rope part, so the output does not lean towards the query",
    "needle": "each head looks at one token: context, page, tile and split edges and places between",
    "newest": "the newest token that each query token may see outweighs the others, and later ones would outweigh it",
    "peak-tail": "one token holds half the weight, a long low tail the other half",
    "rising": "scores grow along the context, so that the running maximum moves in every tile",
    "falling": "scores fall along the context, so that the first tile sets the maximum",
    "sunken": "every score lies far below zero, so that a maximum or an lse that begins at zero drowns all of them",
    "ties": "rows drawn from a book of four, so that many scores tie exactly",
    "zero-query": "a query of zeros: the output is the mean of V",
    "ones": "V is one everywhere: the output is the cache scale, whatever the scores",
    "slots": "V spells out which slot it is, so that a wrong output tells which tokens it read",
    "edges": "the largest, smallest, subnormal and signed-zero codes of the cache format among moderate ones",
}
TABLES = ("padded", "ragged")
PLACEMENTS = ("identity", "permuted", "scattered", "high", "shared", "straddling")
QUERY_LAYOUTS = ("split", "fused", "transposed")
POISONS = ("nan", "large")


class CaseError(ValueError):
    """A case that cannot exist, or an id that does not name one."""


def _print_lengths(lengths: tuple[int, ...]) -> str:
    runs = [(length, len(list(run))) for length, run in groupby(lengths)]
    return "+".join(f"{length}x{count}" if count > 1 else f"{length}" for length, count in runs)


def _parse_lengths(text: str) -> tuple[int, ...]:
    lengths: list[int] = []
    for run in text.split("+"):
        match = re.fullmatch(r"(\d+)(?:x(\d+))?", run)
        if not match:
            raise ValueError(f"lengths look like 130+64x3, not {text!r}")
        lengths += [int(match[1])] * int(match[2] or 1)
    return tuple(lengths)


def _parse_flag(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError(f"0 or 1, not {text!r}")
    return text == "1"


#: Keys of an id, in its order: field name, how a value is printed, how it is read.
_KEYS: Mapping[str, tuple[str, Callable[[Any], str], Callable[[str], Any]]] = {
    "H": ("heads", str, int),
    "S": ("query_tokens", str, int),
    "N": ("lengths", _print_lengths, _parse_lengths),
    "L": ("latent", str, int),
    "R": ("rope", str, int),
    "T": ("page_size", str, int),
    "q": ("query_format", str, str),
    "c": ("cache_format", str, str),
    "qscale": ("query_scale", repr, float),
    "cscale": ("cache_scale", repr, float),
    "softmax": ("softmax_scale", repr, float),
    "lse": ("lse", lambda flag: str(int(flag)), _parse_flag),
    "table": ("table", str, str),
    "tablepad": ("table_padding", str, int),
    "place": ("placement", str, str),
    "pool": ("pool_rows", str, int),
    "tokenpad": ("token_padding", str, int),
    "pagepad": ("page_padding", str, int),
    "layout": ("query_layout", str, str),
    "content": ("content", str, str),
    "amp": ("amplitude", repr, float),
    "poison": ("poison", str, str),
    "seed": ("seed", str, int),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One decode problem.

    Raises:
        CaseError: if the fields cannot stand together; the message says which and why.
    """

    #: H, query heads that share the one latent cache, 1 to 256.
    heads: int
    #: S, query tokens a request, 1 to 16; token t sees the cached tokens up to N - S + t.
    query_tokens: int = 1
    #: N of each request: cached tokens, the S new ones counted in; 0 for an empty row of a graph bucket.
    lengths: tuple[int, ...]
    #: L, latent width: all of V and the first part of K, elements.
    latent: int = 512
    #: R, rope width: the second part of K, elements.
    rope: int = 64
    #: T, tokens a page.
    page_size: int = 1
    #: Number format of the query codes.
    query_format: str = "bf16"
    #: Number format of the cache codes.
    cache_format: str = "bf16"
    #: Query value = query code x this (per tensor).
    query_scale: float = 1.0
    #: Cache value = cache code x this (per tensor, K and V alike).
    cache_scale: float = 1.0
    #: Factor of the scores before softmax; 192 = 128 + 64 is the width that the un-absorbed heads have.
    softmax_scale: float = 192**-0.5
    #: Whether the log-sum-exp of each row is asked for.
    lse: bool = True
    #: "padded": a 2-D block table and lengths; "ragged": kv_indptr and kv_indices.
    table: str = "padded"
    #: Columns of a padded table beyond the pages of the longest request.
    table_padding: int = 0
    #: Where pages lie in the pool: in order from 0; permuted; scattered over a larger pool; at its end; shared prefixes;
    #: around the lines at which offsets and page ids outgrow a type.
    placement: str = "identity"
    #: Token slots that the pool has at least; 0 for as many as the placement needs.
    pool_rows: int = 0
    #: Elements between the end of a token's row and the next row.
    token_padding: int = 0
    #: Elements between the end of a page and the next page.
    page_padding: int = 0
    #: "split": two contiguous tensors; "fused": slices of one joint tensor; "transposed": head-major, as a bmm leaves it.
    query_layout: str = "split"
    #: Content family, a key of CONTENTS.
    content: str = "gaussian"
    #: Standard deviation of the scores, natural-log units; families that set their own scores scale with it.
    amplitude: float = 1.0
    #: What memory the kernel must not use holds: NaN, or large finite values.
    poison: str = "nan"
    #: Seed of the content and of the placement.
    seed: int = 0

    def __post_init__(self) -> None:
        for reason in self._faults():
            raise CaseError(f"no such case: {reason}")

    def _faults(self) -> list[str]:
        ranges = {
            "heads": (1, 256),
            "query_tokens": (1, 16),
            "latent": (1, 4096),
            "rope": (0, 4096),
            "page_size": (1, 1 << 20),
            "table_padding": (0, 1 << 20),
            "pool_rows": (0, 1 << 40),
            "token_padding": (0, 1 << 20),
            "page_padding": (0, 1 << 30),
            "seed": (0, (1 << 63) - 1),
        }
        words = {
            "query_format": tuple(FORMATS),
            "cache_format": tuple(FORMATS),
            "table": TABLES,
            "placement": PLACEMENTS,
            "query_layout": QUERY_LAYOUTS,
            "content": tuple(CONTENTS),
            "poison": POISONS,
        }
        faults = []
        for name, (low, high) in ranges.items():
            value = getattr(self, name)
            if type(value) is not int or not low <= value <= high:
                faults.append(f"{name} must be a whole number from {low} to {high}, not {value!r}")
        for name, known in words.items():
            value = getattr(self, name)
            if value not in known:
                faults.append(f"{name} must be one of {', '.join(known)}, not {value!r}")
        for name in ("query_scale", "cache_scale", "softmax_scale", "amplitude"):
            value = getattr(self, name)
            if type(value) is not float or not (math.isfinite(value) and value > 0):
                faults.append(f"{name} must be a finite positive float, not {value!r}")
        if type(self.lse) is not bool:
            faults.append(f"lse must be True or False, not {self.lse!r}")
        if type(self.lengths) is not tuple or not self.lengths:
            faults.append(f"lengths must be a tuple with one entry a request, not {self.lengths!r}")
        elif any(type(length) is not int or not 0 <= length <= 1 << 31 for length in self.lengths):
            faults.append(f"lengths must be whole numbers from 0 to 2^31, not {self.lengths!r}")
        elif not faults and max(self.pool_rows, 4 * sum(self.lengths)) // self.page_size >= 1 << 31:
            faults.append("the pool has more pages than int32 page ids can name: make the pages larger or the pool smaller")
        elif len(self.lengths) > 65536:
            faults.append(f"at most 65536 requests, not {len(self.lengths)}")
        return faults

    @property
    def batch(self) -> int:
        """B, requests."""
        return len(self.lengths)

    @property
    def width(self) -> int:
        """D = L + R, elements of a cache row."""
        return self.latent + self.rope

    def replace(self, **changes: Any) -> Case:
        """Make the case that differs in the named fields.

        Raises:
            CaseError: if that case cannot exist.
        """
        return dataclasses.replace(self, **changes)

    def __str__(self) -> str:
        parts = [VERSION]
        for key, (name, show, _) in _KEYS.items():
            value = getattr(self, name)
            if key in "HSN" or value != _DEFAULTS[name]:
                parts.append(f"{key}={show(value)}")
        return ":".join([*parts, "end"])

    @classmethod
    def parse(cls, text: str) -> Case:
        """Read the case that an id names.

        Raises:
            CaseError: if the id is from another version, cut off, misspelt, or names an impossible case.
        """
        version, *pairs = text.strip().split(":")
        if version != VERSION:
            if re.fullmatch(r"v\d+", version):
                raise CaseError(f"this id is of version {version}, this mla-gate reads {VERSION}: use the one that wrote it")
            raise CaseError(f"a case id starts with {VERSION}: and ends with :end, not {text!r}")
        if not pairs or pairs.pop() != "end":
            raise CaseError(f"this id is cut off: it must end with :end, not {text[-12:]!r}")
        fields: dict[str, Any] = {}
        for pair in pairs:
            key, equals, value = pair.partition("=")
            if not equals or key not in _KEYS:
                raise CaseError(f"{pair!r} in the id is not KEY=VALUE with a KEY of {', '.join(_KEYS)}")
            name, _, read = _KEYS[key]
            if name in fields:
                raise CaseError(f"{key} stands twice in the id {text!r}")
            try:
                fields[name] = read(value)
            except ValueError as error:
                raise CaseError(f"cannot read {pair!r} in the id: {error}") from None
        missing = [key for key in ("H", "N") if _KEYS[key][0] not in fields]
        if missing:
            raise CaseError(f"the id lacks {' and '.join(missing)}: {text!r}")
        return cls(**fields)


_DEFAULTS: Mapping[str, Any] = {field.name: field.default for field in dataclasses.fields(Case)}
