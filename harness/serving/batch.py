"""A decode of a trace as tensors: what the kernel is given, and what it is judged by.

1. The kernel gets the engine's tables and lengths and the pool as it is. The judge gets the truth's rows, laid one after
   another in memory of their own: no page id or table is part of it.
2. Batches of one size and number of query tokens share their memory, as the batches of one captured graph do. Columns of a
   table row that this batch does not write hold what an earlier one left, and absurd ids before that.

Source: persistent input buffers of vLLM's and SGLang's graph runners.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from harness.cache import absurd_ids
from harness.case import Case
from harness.inputs import Inputs
from harness.memory import Arena, empty
from harness.serving.engine import Batch
from harness.serving.rows import Rows
from harness.serving.trace import Setup
from references.formats import FORMATS, as_integers


@dataclass(frozen=False, slots=True, kw_only=True)
class Buffers:
    """The memory of a trace's batches."""

    setup: Setup
    arena: Arena
    #: Number format of the backend's output.
    output_format: str
    _made: dict[str, Tensor] = field(default_factory=dict)

    def lay(self, case: Case, batch: Batch, cache: Tensor, query: Tensor) -> Inputs:
        """Lay a batch into its memory: what the kernel is given. ``case`` is the engine's own idea of it."""
        shape, size = self.setup.shape, f"{case.batch} x {case.query_tokens}"
        rows = (case.batch, case.query_tokens, case.heads)
        known = FORMATS[shape.query_format].storage
        nope = self._give(f"query_nope of {size}", (*rows, shape.latent), known)
        rope = self._give(f"query_rope of {size}", (*rows, shape.rope), known)
        as_integers(nope).copy_(query[..., : shape.latent])
        as_integers(rope).copy_(query[..., shape.latent :])
        lengths = self._give(f"lengths of {case.batch}", (case.batch,), torch.int32)
        lengths.copy_(torch.tensor(batch.lengths, dtype=torch.int32))
        tables = self._tables(case, batch)
        out = self._give(f"out of {size}", (*rows, shape.latent), FORMATS[self.output_format].storage, output=True)
        lse = self._give(f"lse of {size}", rows, torch.float32, output=True) if shape.lse else None
        return Inputs(
            case=case,
            device=self.arena.device,
            query_nope=nope,
            query_rope=rope,
            cache=cache,
            block_table=tables["block_table"],
            kv_indptr=tables["kv_indptr"],
            kv_indices=tables["kv_indices"],
            lengths=lengths,
            query_scale=self._give("query_scale", (1,), torch.float32).fill_(shape.query_scale),
            cache_scale=self._give("cache_scale", (1,), torch.float32).fill_(shape.cache_scale),
            out=out,
            lse=lse,
            slots=self._slots(batch).to(self.arena.device),
            arena=self.arena,
        )

    def _slots(self, batch: Batch) -> Tensor:
        """List the slots of the batch's tokens as the engine believes them; int64 [sum of lengths]."""
        size = self.setup.shape.page_size
        lists = zip(batch.entries, batch.lengths, strict=True)
        slots = [pages[token // size] * size + token % size for pages, length in lists for token in range(length)]
        return torch.tensor(slots, dtype=torch.int64)

    def _tables(self, case: Case, batch: Batch) -> dict[str, Tensor | None]:
        pages = self.setup.pages
        if case.table == "ragged":
            # A list of ids has no columns that are left over: each batch writes its own.
            ids = [page for entries in batch.entries for page in entries]
            whole = self._give(f"kv_indices of {case.batch}", (pages * case.batch,), torch.int32)
            whole[: len(ids)] = torch.tensor(ids, dtype=torch.int32)
            ends = self._give(f"kv_indptr of {case.batch}", (case.batch + 1,), torch.int32)
            ends[1:] = torch.tensor([len(entries) for entries in batch.entries], dtype=torch.int32).cumsum(0)
            ends[0] = 0
            return {"block_table": None, "kv_indptr": ends, "kv_indices": whole[: len(ids)]}
        name = f"block_table of {case.batch}"
        fresh = name not in self._made
        table = self._give(name, (case.batch, pages), torch.int32)
        if fresh:
            table.copy_(torch.from_numpy(absurd_ids(pages, pages + 1)))
        for row, (entries, columns) in enumerate(zip(batch.entries, batch.columns, strict=True)):
            if columns:
                table[row, columns] = torch.tensor([entries[column] for column in columns], dtype=torch.int32).to(table.device)
        return {"block_table": table, "kv_indptr": None, "kv_indices": None}

    def _give(self, name: str, shape: Sequence[int], dtype: torch.dtype, *, output: bool = False) -> Tensor:
        made = self._made.get(name)
        if made is None:
            made = self._made[name] = self.arena.allocate(name, math.prod(shape), dtype, output=output).view(tuple(shape))
        if output:
            empty(made)
        return made


def judged_by(given: Inputs, case: Case, tokens: Sequence[Sequence[int]], rows: Rows, group: int, layer: int) -> Inputs:
    """Make what a batch is judged by: the truth's case and its tokens' rows, one after another."""
    numbers = [number for own in tokens for number in own]
    codes = rows.tokens(numbers, group, layer).to(given.device)
    return dataclasses.replace(
        given,
        case=case,
        cache=codes.view(FORMATS[case.cache_format].storage)[:, None],
        slots=torch.arange(len(numbers), device=given.device),
    )
