"""The fp64 oracle: the truth by another route, which certifies the fp32 reference.

1. It shares no arithmetic with ``decode`` or ``formats``, not even the decoding of codes: it looks them up in tables that
   integer arithmetic builds from the bit layouts below.
2. It keeps whole rows: one request and one query token at a time, all scores at once, no running maximum.
3. Everything is fp64; memory grows with N.

Source: the equations in ``decode``; bit layouts from IEEE 754-2019 and OCP 8-bit floating point 1.0.
Error: that of fp64 sums, about 1e-15 of their terms' magnitudes; exponentials of scores near 1e3 lose three more digits.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from references.problem import Answer, Problem

#: Bit layout of each format: exponent bits, mantissa bits, bias, and how the top exponent is used. "ieee" keeps it for
#: infinity and NaN, "all-ones" takes the all-ones code alone for NaN, "minus-zero" the code of negative zero.
LAYOUTS: Mapping[str, tuple[int, int, int, str]] = {
    "fp32": (8, 23, 127, "ieee"),
    "fp16": (5, 10, 15, "ieee"),
    "bf16": (8, 7, 127, "ieee"),
    "e5m2": (5, 2, 15, "ieee"),
    "e4m3fn": (4, 3, 7, "all-ones"),
    "e4m3fnuz": (4, 3, 8, "minus-zero"),
}


def values_of(codes: NDArray[np.int64], name: str) -> NDArray[np.float64]:
    """Work out the values of unsigned integer codes, any shape, by the layout of their format."""
    exponent_bits, mantissa_bits, bias, special = LAYOUTS[name]
    mantissa = codes & ((1 << mantissa_bits) - 1)
    exponent = (codes >> mantissa_bits) & ((1 << exponent_bits) - 1)
    sign = 1 - 2 * ((codes >> (mantissa_bits + exponent_bits)) & 1)
    whole = np.where(exponent == 0, mantissa, mantissa | (1 << mantissa_bits))
    power = np.maximum(exponent, 1) - bias - mantissa_bits
    values = np.ldexp(np.copysign(whole.astype(np.float64), sign), power.astype(np.int32))
    top = (1 << exponent_bits) - 1
    if special == "ieee":
        values = np.where(exponent == top, np.where(mantissa == 0, sign * np.inf, np.nan), values)
    elif special == "all-ones":
        values = np.where((exponent == top) & (mantissa == (1 << mantissa_bits) - 1), np.nan, values)
    else:
        values = np.where(codes == 1 << (mantissa_bits + exponent_bits), np.nan, values)
    return values


@lru_cache(maxsize=16)
def _table(name: str, device: torch.device) -> Tensor:
    bits = 1 + sum(LAYOUTS[name][:2])
    return torch.from_numpy(values_of(np.arange(1 << bits, dtype=np.int64), name)).to(device)


def look_up(codes: Tensor, name: str) -> Tensor:
    """Look up the fp64 values of codes, any shape, of a format's storage type."""
    if codes.element_size() == 4:
        integers = codes.contiguous().view(torch.int32).cpu().numpy().astype(np.int64) & 0xFFFFFFFF
        return torch.from_numpy(values_of(integers, name)).to(codes.device)
    if codes.element_size() == 2:
        index = codes.contiguous().view(torch.int16).to(torch.int32) & 0xFFFF
    else:
        index = codes.contiguous().view(torch.uint8).to(torch.int32)
    return _table(name, codes.device).index_select(0, index.view(-1)).view(codes.shape)


def oracle(problem: Problem) -> Answer:
    """Compute a decode problem in fp64, on the device its tensors are on.

    Source: a = softmax, query and cache scales multiplied; s_j = a * sum_d q_d k_jd over the tokens in sight;
    out = cache_scale * sum_j exp(s_j) k_j[:L] / sum_j exp(s_j); lse = log sum_j exp(s_j).
    Error: see the module.
    """
    device, heads = problem.query.device, problem.heads
    shape = (problem.batch, problem.query_tokens, heads)
    out = torch.zeros((*shape, problem.latent), dtype=torch.float64, device=device)
    lse = torch.full(shape, -torch.inf, dtype=torch.float64, device=device)
    scale = problem.softmax_scale * problem.query_scale * problem.cache_scale
    page_size = problem.cache.shape[1]
    cells = problem.cache.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[problem.cache.element_size()])
    first = 0
    for request, length in enumerate(problem.lengths):
        slots = problem.slots[first : first + length]
        first += length
        if not length:
            continue
        codes = cells[torch.div(slots, page_size, rounding_mode="floor"), slots.remainder(page_size)]
        keys = look_up(codes.view(problem.cache.dtype), problem.cache_format)
        for token in range(problem.query_tokens):
            sight = length - (problem.query_tokens - 1 - token)
            if sight <= 0:
                continue
            query = look_up(problem.query[request, token], problem.query_format)
            scores = scale * torch.einsum("hd,nd->hn", query, keys[:sight])
            top = scores.max(dim=1, keepdim=True).values
            powers = torch.exp(scores - top)
            mass = powers.sum(dim=1, keepdim=True)
            weighted = torch.einsum("hn,nl->hl", powers, keys[:sight, : problem.latent])
            out[request, token] = problem.cache_scale * (weighted / mass)
            lse[request, token] = (top + torch.log(mass)).squeeze(1)
    return Answer(out=out, lse=lse)
