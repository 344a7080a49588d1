"""The paged cache as kernels of page size 1 take it: flat rows, and tables of token rows.

Rules kept here:

1. A table of pages becomes a table of rows on the device it lies on, as engines do it before such a kernel.
2. Table entries past a request's tokens stay absurd; expanding a table must not make them valid.
3. The cache is never copied: a pool whose pages are not evenly spaced has no flat view, and is refused.

Source: vLLM's and SGLang's expansion of block tables for kernels with one token a page.
"""

from __future__ import annotations

import torch
from torch import Tensor

from harness.case import Case
from harness.inputs import Inputs

#: Entries that no pool has, by turns, as in a table of pages.
_ABSURD = (2**31 - 1, -1)


def why_not_flat(case: Case) -> str | None:
    """Say why the pool of a case has no view as evenly spaced token rows, or None."""
    if case.page_size > 1 and case.page_padding:
        return (
            f"pages of {case.page_size} tokens with {case.page_padding} elements between them are not evenly spaced "
            f"token rows, and the kernel takes one row stride"
        )
    return None


def row_stride(case: Case) -> int:
    """Count the elements from one token row to the next."""
    return case.width + case.token_padding + (case.page_padding if case.page_size == 1 else 0)


def flat_rows(inputs: Inputs) -> Tensor:
    """View the pool as token rows, [P * T, D] with one row stride."""
    pages, size, width = inputs.cache.shape
    return inputs.cache.as_strided((pages * size, width), (row_stride(inputs.case), 1))


def padded_rows(inputs: Inputs) -> Tensor:
    """Give the 2-D table of token rows, int32 [B, W * T]; a table of single tokens is given as it is."""
    table, size = inputs.block_table, inputs.case.page_size
    if table is None:
        raise ValueError("the case has a ragged table; ask for ragged_rows")
    if size == 1:
        return table
    device = table.device
    steps = torch.arange(size, device=device)
    rows = (table.long()[:, :, None] * size + steps).reshape(table.shape[0], -1)
    position = torch.arange(rows.shape[1], device=device)
    absurd = torch.tensor(_ABSURD, device=device)[position % len(_ABSURD)].expand_as(rows)
    return torch.where(position < inputs.lengths[:, None], rows, absurd).to(torch.int32)


def ragged_rows(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Give the ragged table of token rows: ends int32 [B + 1] and rows int32 [sum N].

    A table of single tokens in ragged form is given as it is; any other is expanded or flattened.
    """
    size = inputs.case.page_size
    if size == 1 and inputs.kv_indptr is not None and inputs.kv_indices is not None:
        return inputs.kv_indptr, inputs.kv_indices
    lengths = inputs.lengths
    ends = torch.zeros(lengths.numel() + 1, dtype=torch.int32, device=lengths.device)
    ends[1:] = torch.cumsum(lengths, 0)
    request = torch.repeat_interleave(torch.arange(lengths.numel(), device=lengths.device), lengths.long())
    position = torch.arange(int(ends[-1]), device=lengths.device) - ends[:-1].long()[request]
    if inputs.block_table is not None:
        page = inputs.block_table[request, position // size]
    elif inputs.kv_indptr is not None and inputs.kv_indices is not None:
        page = inputs.kv_indices[inputs.kv_indptr.long()[request] + position // size]
    else:
        raise ValueError("the inputs have neither a padded nor a ragged table")
    return ends, (page.long() * size + position % size).to(torch.int32)


def page_table(inputs: Inputs) -> Tensor:
    """Give the 2-D table of pages, int32 [B, W], whichever form the case has; unused entries stay absurd."""
    if inputs.block_table is not None:
        return inputs.block_table
    ends, ids = inputs.kv_indptr, inputs.kv_indices
    if ends is None or ids is None:
        raise ValueError("the inputs have neither a padded nor a ragged table")
    counts = (ends[1:] - ends[:-1]).long()
    position = torch.arange(max(int(counts.max()), 1), device=ids.device)
    source = (ends[:-1].long()[:, None] + position).clamp(max=max(ids.numel() - 1, 0))
    pages = ids[source] if ids.numel() else torch.zeros_like(source, dtype=torch.int32)
    absurd = torch.tensor(_ABSURD, dtype=torch.int32, device=ids.device)[position % len(_ABSURD)].expand_as(pages)
    return torch.where(position < counts[:, None], pages, absurd)


def row_lengths(inputs: Inputs) -> Tensor:
    """Count the tokens that each query token sees, int32 [B * S]: a request of S tokens as S requests of one."""
    steps = torch.arange(inputs.case.query_tokens, device=inputs.lengths.device) - inputs.case.query_tokens + 1
    return (inputs.lengths[:, None] + steps).clamp(min=0).flatten().to(torch.int32)
