"""Stand-ins for kernels that no CPU has, under the contracts of the real ones: what routes are judged with here.

Rules kept here:

1. ``PlainAsm`` is a model of AITER's plain fp8 decode for 16 heads as its Python states it: partial outputs in as many
   splits as ``get_meta_param`` chooses, cut in blocks of 128 tokens, merged by a second stage that counts blocks of 64.
   Whether the compiled kernel cuts so is not known; that the route is wrong is (vllm-project/vllm #51011).
2. A route over stand-ins bears the route's own name, so that it is judged by the route's own rows.
3. ``route:ROUTE+python:tests.route_standins`` lets the plain decode stand in, with workspaces as a GPU has them: they hold
   what an earlier call left.

Source: ``aiter/mla.py`` of AITER, main of 2026-08-22.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from harness.backends import registry
from harness.backends.aiter_asm_cells import why_no_cell
from harness.backends.protocol import Backend, Capabilities, Output
from harness.backends.token_rows import flat_rows, ragged_rows
from harness.case import Case
from harness.inputs import Inputs
from harness.routes.backend import Routed
from harness.routes.contracts import FP8_BLOCKS
from harness.routes.record import find_route
from harness.routes.steps import STEPS, Step

#: Tokens that the second stage counts to a split, for 8 and 16 heads and one query token.
MERGED_BLOCK = 64
#: Splits at most.
MOST_SPLITS = 16


class PlainAsm:
    """The plain fp8 decode, with the merge that fits its blocks or the one that it has."""

    def __init__(self, *, name: str = "plain-asm", counts: int = MERGED_BLOCK, stale: bool = False) -> None:
        """Take the tokens that the merge counts to a split, and whether workspaces hold an earlier call's values."""
        self.name = name
        self.capabilities = Capabilities(empty_rows="undefined", returns_lse=False)
        self._counts, self._stale = counts, stale

    def why_not(self, case: Case, device: torch.device) -> str | None:
        """Say why a case lies outside the contract, which is the real kernel's on gfx950."""
        return why_no_cell(case, arch="gfx950", mode="plain")

    def run(self, inputs: Inputs) -> Output:
        """Compute partial outputs and merge them."""
        case = inputs.case
        block = FP8_BLOCKS[case.heads * case.query_tokens]
        splits = min(MOST_SPLITS, -(-sum(case.lengths) // (case.batch * block)))
        shape = (case.batch, case.query_tokens, splits, case.heads)
        partial, lse = torch.empty(*shape, case.latent), torch.empty(shape)
        if self._stale:
            draw = torch.Generator().manual_seed(case.seed)
            partial.normal_(generator=draw)
            lse.normal_(generator=draw)
        rows = flat_rows(inputs).float() * case.cache_scale
        ends, ids = ragged_rows(inputs)
        for request, length in enumerate(case.lengths):
            own = rows[ids[int(ends[request]) : int(ends[request + 1])].long()]
            blocks = -(-length // block)
            used, start = min(splits, blocks), 0
            for split in range(used):
                stop = min(start + block * (blocks // used + (split < blocks % used)), length)
                _attend(inputs, own, request, (start, stop), partial[request, :, split], lse[request, :, split])
                start = stop
            merged = min(splits, -(-length // self._counts))
            shares = torch.softmax(lse[request, :, :merged], dim=1)[..., None]
            inputs.out[request] = (shares * partial[request, :, :merged]).sum(1).to(inputs.out.dtype)
        return Output(out=inputs.out, what_ran={"kernel": "a model of the plain asm decode", "splits": splits})


def _attend(inputs: Inputs, own: Tensor, request: int, part: tuple[int, int], out: Tensor, lse: Tensor) -> None:
    """Attend to a part of a request's rows with every query token; P is rounded to the query's format, as AITER models it."""
    case, (start, stop) = inputs.case, part
    query = inputs.query[request].float() * case.query_scale  # [S, H, D]
    scores = torch.einsum("shd,nd->shn", query, own[start:stop]) * case.softmax_scale
    seen = torch.arange(case.query_tokens)[:, None] + len(own) - case.query_tokens
    scores.masked_fill_((torch.arange(start, stop) > seen)[:, None], -torch.inf)
    top = scores.amax(-1, keepdim=True)
    shares = (scores - top).exp()
    rounded = shares.to(inputs.query.dtype).float()
    out.copy_(rounded @ own[start:stop, : case.latent] / shares.sum(-1, keepdim=True))
    lse.copy_((top + shares.sum(-1, keepdim=True).log()).squeeze(-1))


def stood_in(route: str, *, plain: Backend | None = None, steps: Mapping[str, Step] = STEPS, **settings: str) -> Routed:
    """Make a route over stand-ins: torch's attention for every kernel but the plain asm decode."""
    found, right = find_route(route), registry.make("torch-sdpa")
    kernels: dict[str, Backend] = dict.fromkeys(found.kernels, right)
    if plain is not None and "aiter-asm-np" in kernels:
        kernels["aiter-asm-np"] = plain
    return Routed(name=f"route:{route}", route=found, kernels=kernels, settings=settings, steps=steps)


def make(name: str, label: str | None = None) -> PlainAsm:
    """Make the plain decode as it stands in for a route's kernels: ``route:ROUTE+python:tests.route_standins``."""
    return PlainAsm(name=name, stale=True)
