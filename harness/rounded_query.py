"""A query that is rounded on its way to a kernel, and the truth that its answer is held to.

Rules kept here:

1. The truth of a regime that rounds the query is that of the rounded query. What the rounding itself costs is not the
   kernel's, and no budget of independent errors holds for it: it moves all scores of a row together.
2. The rounding is done here, by the references' formats, from the regime's words; nothing of it comes from the backend.

Source: vLLM rounds by the layer's static scale, SGLang by the cache's; both clamp to the format's largest value.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from references.formats import decode, encode, find
from references.problem import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundedQuery:
    """How a query is rounded."""

    #: Number format it is rounded to.
    format: str
    #: What it is divided by before, and what a code is multiplied by after: a number, or "cache" for the cache's scale.
    scale: float | str

    def __post_init__(self) -> None:
        find(self.format)
        if self.scale != "cache" and not (type(self.scale) is float and self.scale > 0):
            raise ValueError(f"the scale of a rounded query is a positive float or 'cache', not {self.scale!r}")

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> RoundedQuery:
        """Read it from its table of format and scale.

        Raises: ValueError, if a key or a value is wrong.
        """
        if set(table) != {"format", "scale"}:
            raise ValueError(f"query takes format and scale, not {', '.join(table)}")
        return cls(**table)

    def of(self, problem: Problem) -> Problem:
        """State the problem of the rounded query."""
        scale = problem.cache_scale if isinstance(self.scale, str) else self.scale
        values = decode(problem.query, find(problem.query_format)).to(torch.float32) * problem.query_scale / scale
        codes = encode(values, find(self.format), saturate=True)
        return dataclasses.replace(problem, query=codes, query_format=self.format, query_scale=scale)
