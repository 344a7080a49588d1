"""What a call of the fault model knows, and the points at which a fault may act.

1. An act is a function (scene, value) -> value at one named point; acts of several faults may be put together.
2. The scene holds what the kernel *believes*: acts at ``arguments`` may change it.

Source: the order of the points is that of a split-KV decode kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from harness.faults.variant import Variant
from harness.inputs import Inputs

#: The points, in the order a call passes them, and what the value is there.
POINTS: Mapping[str, str] = {
    "arguments": "the scene itself: scales, lengths, strides, page size, as the kernel believes them",
    "plan": "splits of a request, list of (start, stop)",
    "lanes": "token index and liveness of every lane, two tensors [K, M]",
    "columns": "index of each token's entry in the request's row of the block table",
    "pages": "page ids read from the table",
    "within": "offset of each token in its page, tokens",
    "offsets": "element offset of each row from the cache pointer",
    "codes": "raw codes of the rows [n, D], storage type",
    "rows": "decoded rows [K, M, D], without the cache scale; dead lanes are zero",
    "query": "decoded query [S, H, D], without the query scale",
    "scores": "scaled scores [S, H, K, M], natural-log units",
    "visible": "which lanes a query token may see, bool [S, 1, K, M]",
    "running": "running maximum of each tile [S, H, K, G]",
    "rescale": "factor that brings a tile to its split's last maximum [S, H, K, G]",
    "probabilities": "numerators before rounding [S, H, K, M], relative to the running maximum",
    "rounded": "numerators after rounding [S, H, K, M]",
    "sums": "softmax denominators of splits [S, H, K]",
    "values": "decoded V [K, M, L], without the cache scale",
    "partials": "outputs [S, H, K, L] and lse [S, H, K] that the splits write",
    "weights": "weights of the splits in the merge [S, H, K]",
    "merged": "output [S, H, L] and lse [S, H] of a request",
    "answer": "the same, as the request's answer",
    "store": "outputs [B, S, H, L], lse [B, S, H] and which rows are written, bool [B, S, H]",
    "end": "the scene, after the outputs are stored",
}

Act = Callable[["Scene", Any], Any]
Acts = Mapping[str, Sequence[Act]]


class IllegalAccess(RuntimeError):
    """A read outside every allocation; on a GPU, a memory fault."""


class Hang(RuntimeError):
    """A loop that would not end."""

    #: What a run that ends in it is taken for.
    verdict_fault = "hang"


@dataclass(frozen=False, slots=True, kw_only=True)
class Scene:
    """What a call of the model knows; acts at ``arguments`` may change what it believes."""

    inputs: Inputs
    variant: Variant
    acts: Acts
    #: Kept from call to call by the backend.
    memory: dict[Any, Any]
    lengths: list[int] = field(default_factory=list)
    query_scale: float = 1.0
    #: Cache scale as it acts on K.
    key_scale: float = 1.0
    #: Cache scale as it acts on V.
    value_scale: float = 1.0
    softmax_scale: float = 1.0
    page_size: int = 1
    #: Elements from page to page, and from row to row.
    page_stride: int = 0
    token_stride: int = 0
    #: Type that cache codes are read as.
    cache_dtype: torch.dtype = torch.bfloat16
    #: What a read outside the cache does: "raise", or "zero" for a bounded buffer load.
    outside: str = "raise"
    #: Where each request's table row starts in ``entries``.
    table_starts: list[int] = field(default_factory=list)
    #: The whole table allocation, int64.
    entries: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    #: Query codes as values [B, S, H, D].
    query: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    #: Request whose query is answered, and request whose cache is read.
    request: int = 0
    source: int = 0
    #: Lanes of the request at hand.
    tokens: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    live: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.bool))
    plan: list[tuple[int, int]] = field(default_factory=list)

    def at(self, point: str, value: Any) -> Any:
        """Pass a value through the acts of a point."""
        for act in self.acts.get(point, ()):
            value = act(self, value)
        return value

    @property
    def length(self) -> int:
        """N of the request whose cache is read, as the kernel believes it."""
        return self.lengths[self.source]

    @property
    def itemsize(self) -> int:
        """Bytes of a cache code."""
        return self.inputs.cache.element_size()


def open_scene(inputs: Inputs, variant: Variant, acts: Acts, memory: dict[Any, Any]) -> Scene:
    """Lay out what a kernel is given in this call."""
    case = inputs.case
    scene = Scene(inputs=inputs, variant=variant, acts=acts, memory=memory)
    scene.lengths = inputs.lengths.tolist()
    scene.query_scale, scene.softmax_scale = case.query_scale, case.softmax_scale
    scene.key_scale = scene.value_scale = case.cache_scale
    scene.page_size = case.page_size
    scene.page_stride, scene.token_stride = inputs.cache.stride(0), inputs.cache.stride(1)
    scene.cache_dtype = inputs.cache.dtype
    if inputs.block_table is not None:
        table = inputs.block_table
        scene.entries = allocation(table).long()
        scene.table_starts = [int(table.storage_offset() + b * table.stride(0)) for b in range(case.batch)]
    else:
        assert inputs.kv_indices is not None and inputs.kv_indptr is not None
        scene.entries = allocation(inputs.kv_indices).long()
        base = inputs.kv_indices.storage_offset()
        scene.table_starts = [base + start for start in inputs.kv_indptr.tolist()[:-1]]
    scene.query = torch.cat([inputs.query_nope.float(), inputs.query_rope.float()], dim=-1)
    scene.at("arguments", scene)
    return scene


def allocation(tensor: torch.Tensor) -> torch.Tensor:
    """View the whole allocation that a tensor lies in as one row of its elements."""
    whole = torch.empty(0, dtype=tensor.dtype)
    return whole.set_(tensor.untyped_storage())
