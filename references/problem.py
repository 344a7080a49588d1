"""A decode problem as the truth sees it, and its answer.

1. A problem is stored bytes and a map of slots; it knows nothing of page tables, kernels or layouts beyond strides.
2. Slots outside the map are never read.
3. Everything here moves codes; nothing computes with their values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from references.formats import as_integers, find


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One batch of MLA decode over a paged cache of codes."""

    #: Query codes, [B, S, H, D].
    query: Tensor
    #: Format of the query codes.
    query_format: str
    #: What a decoded query is multiplied by.
    query_scale: float
    #: Cache codes, [P, T, D]; any strides over pages and tokens, unit stride over D.
    cache: Tensor
    #: Format of the cache codes.
    cache_format: str
    #: What a decoded cache row is multiplied by.
    cache_scale: float
    #: Token slots (page * T + offset), int64 [sum of lengths], request after request.
    slots: Tensor
    #: N of each request; the S query tokens are its last.
    lengths: tuple[int, ...]
    #: What the scores are multiplied by before the softmax, natural base.
    softmax_scale: float
    #: L: the first columns of a row are the latent part, which is also V.
    latent: int

    def __post_init__(self) -> None:
        if self.query.dim() != 4 or self.cache.dim() != 3 or self.query.shape[-1] != self.cache.shape[-1]:
            raise ValueError(
                f"query [B,S,H,D] and cache [P,T,D] of one D wanted, these are {tuple(self.query.shape)} and "
                f"{tuple(self.cache.shape)}"
            )
        for codes, name in ((self.query, self.query_format), (self.cache, self.cache_format)):
            if codes.dtype != find(name).storage:
                raise TypeError(f"codes of {name} are {find(name).storage}, these are {codes.dtype}")
        if self.cache.stride(-1) != 1:
            raise ValueError(f"cache rows must be contiguous, their stride is {self.cache.stride(-1)}")
        if not 0 < self.latent <= self.width:
            raise ValueError(f"latent width {self.latent} does not fit rows of {self.width}")
        if len(self.lengths) != self.query.shape[0] or min(self.lengths, default=0) < 0:
            raise ValueError(f"{self.query.shape[0]} lengths of 0 or more wanted, these are {self.lengths}")
        if self.slots.dtype != torch.int64 or self.slots.shape != (sum(self.lengths),):
            raise ValueError(
                f"{sum(self.lengths)} int64 slots wanted for these lengths, there are {tuple(self.slots.shape)} of "
                f"{self.slots.dtype}"
            )

    @property
    def batch(self) -> int:
        """B."""
        return self.query.shape[0]

    @property
    def query_tokens(self) -> int:
        """S."""
        return self.query.shape[1]

    @property
    def heads(self) -> int:
        """H."""
        return self.query.shape[2]

    @property
    def width(self) -> int:
        """D."""
        return self.query.shape[3]

    @property
    def score_scale(self) -> float:
        """What a product of decoded query and cache rows is multiplied by to give a score."""
        return self.softmax_scale * self.query_scale * self.cache_scale

    @property
    def starts(self) -> tuple[int, ...]:
        """Where each request's slots start."""
        starts = [0]
        for length in self.lengths:
            starts.append(starts[-1] + length)
        return tuple(starts[:-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a decode problem comes to."""

    #: Output, [B, S, H, L]; zeros for a query token that sees nothing.
    out: Tensor
    #: Natural logarithm of the sum of exponentials, [B, S, H]; minus infinity for a query token that sees nothing.
    lse: Tensor


def gather(problem: Problem, slots: Tensor) -> Tensor:
    """Copy the rows of ``slots`` ([n], any order) out of the pool: codes [n, D] of the cache's storage type."""
    pool = _in_words(problem.cache)
    pages, tokens, width = pool.shape
    page_stride, token_stride = pool.stride(0), pool.stride(1)
    if tokens == 1:
        rows = pool[:, 0].index_select(0, slots)
    elif page_stride == tokens * token_stride:
        flat = pool.as_strided((pages * tokens, width), (token_stride, 1))
        rows = flat.index_select(0, slots)
    else:
        rows = pool[slots // tokens, slots % tokens]
    return rows.view(problem.cache.dtype)


def _in_words(pool: Tensor) -> Tensor:
    """View a pool of codes as the widest integers that its rows and strides are made of: a GPU copies one at a time."""
    bits = as_integers(pool)
    lengths = (pool.shape[2], pool.stride(0), pool.stride(1), pool.storage_offset())
    for word in (torch.int64, torch.int32, torch.int16):
        codes = word.itemsize // pool.element_size()
        if codes and not any(length % codes for length in lengths):
            return bits.view(word)
    return bits


def visible(length: int, query_tokens: int) -> Sequence[int]:
    """Count the tokens that each query token of a request sees: N - S + t + 1, at least none."""
    return [max(0, length - query_tokens + token + 1) for token in range(query_tokens)]


def place(values: Sequence[Any], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Put numbers on a device without waiting for it."""
    return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)


def pick(requests: Sequence[int], device: torch.device) -> slice | Tensor:
    """Index some requests: a slice where they lie side by side, which needs no copy."""
    first = requests[0]
    if tuple(requests) == tuple(range(first, first + len(requests))):
        return slice(first, first + len(requests))
    return place(requests, device)
