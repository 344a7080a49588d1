"""The values of a trace: the cache rows of a token, and the query of a decode.

1. The row of a token in a layer is fixed by the trace's seed, the token's number and the layer: it can be written anew after
   a preemption, and is the same in every page that it comes to lie in.
2. Rows and queries are independent and normal, at the magnitudes that give scores the shape's amplitude: every token has its
   share of the softmax, so a wrong one shows.

Source: the gaussian family of ``content.py``, a token at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from harness.cache import stream
from harness.case import Case
from harness.content import Aim
from harness.draws import normal
from references.formats import FORMATS, as_integers, encode

_TOKENS, _QUERIES = 8, 9  # stream names; a case's content and placement have those below, and relations 6 and 7
#: Layers of one group that have streams of their own.
_LAYERS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Makes the codes of one trace."""

    shape: Case
    aim: Aim

    @classmethod
    def of(cls, shape: Case) -> Rows:
        """Make the codes of a shape."""
        return cls(shape=shape, aim=Aim.at(shape))

    def tokens(self, numbers: Iterable[int], group: int, layer: int) -> Tensor:
        """Make the rows of some tokens in a layer: codes as integers [n, D]."""
        own, width = _LAYERS * group + layer, self.shape.width
        drawn = [normal(stream(self.shape.seed, _TOKENS, number * (_LAYERS << 2) + own), width) for number in numbers]
        values = np.stack(drawn) if drawn else np.zeros((0, width), np.float32)
        return self._codes(values * np.float32(self.aim.cache), self.shape.cache_format)

    def queries(self, turn: int, group: int, layer: int, batch: int, query_tokens: int) -> Tensor:
        """Make the queries of a decode, the ``turn``-th step: codes as integers [B, S, H, D]."""
        part = turn * (_LAYERS << 2) + _LAYERS * group + layer
        values = normal(stream(self.shape.seed, _QUERIES, part), batch, query_tokens, self.shape.heads, self.shape.width)
        return self._codes(values * np.float32(self.aim.query), self.shape.query_format)

    def _codes(self, values: np.ndarray[tuple[int, ...], np.dtype[np.float32]], name: str) -> Tensor:
        return as_integers(encode(torch.from_numpy(values), FORMATS[name], saturate=True))
