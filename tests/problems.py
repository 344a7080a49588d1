"""Small decode problems for the tests of the truth."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import torch

from references.formats import FORMATS, encode
from references.problem import Problem


def random_problem(
    lengths: Sequence[int] = (130, 1, 0, 33),
    *,
    query_tokens: int = 2,
    heads: int = 5,
    latent: int = 48,
    rope: int = 16,
    page_size: int = 4,
    cache_format: str = "e4m3fn",
    query_format: str = "bf16",
    amplitude: float = 1.0,
    seed: int = 0,
) -> Problem:
    """Make a problem with normal codes, slots scattered over a pool twice as large, and NaN in the slots that nobody owns."""
    generator = torch.Generator().manual_seed(seed)
    width, total = latent + rope, sum(lengths)
    pages = 2 * -(-total // page_size) + 1
    slots = torch.randperm(pages * page_size, generator=generator)[:total]
    live = torch.randn((total, width), generator=generator, dtype=torch.float64)
    values = torch.full((pages * page_size, width), torch.nan, dtype=torch.float64)
    values[slots] = live.clamp(-3.5, 3.5)
    query = torch.randn((len(lengths), query_tokens, heads, width), generator=generator, dtype=torch.float64)
    return Problem(
        query=encode(query, FORMATS[query_format], saturate=True),
        query_format=query_format,
        query_scale=0.75,
        cache=encode(values, FORMATS[cache_format]).view(pages, page_size, width),
        cache_format=cache_format,
        cache_scale=1.3,
        slots=slots,
        lengths=tuple(lengths),
        softmax_scale=amplitude / (0.75 * 1.3 * width**0.5),
        latent=latent,
    )


def exact_problem(
    query: Sequence[Fraction | int], rows: Sequence[Sequence[Fraction | int]], *, latent: int, scale: float
) -> Problem:
    """Make a problem of one request and one head from numbers that fp32 holds exactly."""
    return Problem(
        query=torch.tensor([[[[float(value) for value in query]]]]),
        query_format="fp32",
        query_scale=1.0,
        cache=torch.tensor([[[float(value) for value in row]] for row in rows]),
        cache_format="fp32",
        cache_scale=1.0,
        slots=torch.arange(len(rows)),
        lengths=(len(rows),),
        softmax_scale=scale,
        latent=latent,
    )
