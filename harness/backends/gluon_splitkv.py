"""A small CDNA4 decode kernel in Gluon: natively on gfx950, on a CPU by emulation.

1. It shows and tests the emulator: asynchronous copies into two buffers, page tables, partial head blocks, bf16 and e4m3fn.
2. On a CPU every run is two runs, at both extremes of what a GPU may do; a difference is the kernel's fault.
3. Splits are ``SPLITS`` at most, of equal length rounded up to tiles; partial outputs are fp32.

Source: the kernel's own module, `gluon_splitkv_kernel`.
"""

from __future__ import annotations

from typing import Any

import torch

from harness.backends.protocol import Capabilities, NotInstalled, Output, Unsupported
from harness.case import Case
from harness.inputs import Inputs

#: Splits of a launch.
SPLITS = 8
_CACHES = ("bf16", "e4m3fn")
_LATENT, _ROPE = 512, 64
_TARGET = "gfx950"


class GluonSplitKV:
    """The backend over one pair of kernels."""

    def __init__(self, name: str, attend: Any, merge: Any, *, tile: int, block: int) -> None:
        """Take the kernels; a variant has kernels of its own."""
        self._name = name
        self._attend, self._merge = attend, merge
        self._tile, self._block = tile, block

    @property
    def name(self) -> str:
        """Its name in the registry."""
        return self._name

    @property
    def capabilities(self) -> Capabilities:
        """What holds for all its cases."""
        return Capabilities(output_format="bf16", empty_rows="zeros", returns_lse=True)

    def why_not(self, case: Case, device: torch.device) -> str | None:
        """Say why a case lies outside the contract on a device, or None."""
        if device.type not in ("cpu", "cuda"):
            return f"it runs on {_TARGET} and, emulated, on a CPU; not on {device}"
        if device.type == "cuda" and (found := _architecture(device)) != _TARGET:
            return f"it is written for {_TARGET}, this is {found}; on a CPU it is emulated"
        if (case.latent, case.rope) != (_LATENT, _ROPE):
            return f"it has latent {_LATENT} and rope {_ROPE}, not {case.latent} and {case.rope}"
        if case.query_format != "bf16":
            return f"the query must be bf16, not {case.query_format}"
        if case.cache_format not in _CACHES:
            return f"the cache must be {' or '.join(_CACHES)}, not {case.cache_format}"
        rows = case.batch * case.query_tokens * case.heads * SPLITS
        if max(rows, case.query_tokens * case.heads * case.batch * 2 * (_LATENT + _ROPE)) >= 1 << 31:
            return f"query and split offsets are int32: {rows} rows are too many"
        return None

    def run(self, inputs: Inputs) -> Output:
        """Compute the decode.

        Raises:
            Unsupported: if the case lies outside the contract.
            EmulationFault: on a CPU, if the kernel does something that it must not.
        """
        reason = self.why_not(inputs.case, inputs.device)
        if reason is not None:
            raise Unsupported(f"{self.name} cannot run {inputs.case}: {reason}")
        if inputs.device.type == "cpu":
            from harness.emulation import run_all_extremes

            run_all_extremes(lambda: self._launch(inputs), target=_TARGET)
        else:
            self._launch(inputs)
        mode = "emulated" if inputs.device.type == "cpu" else "native"
        return Output(
            out=inputs.out,
            lse=inputs.lse,
            what_ran={"kernel": self.name, "splits": SPLITS, "tile": self._tile, "mode": mode},
        )

    def launch(self, inputs: Inputs) -> None:
        """Call the kernels as on gfx950, whatever device the tensors are on; for compiling."""
        self._launch(inputs)

    def _launch(self, inputs: Inputs) -> None:
        case = inputs.case
        if inputs.block_table is not None:
            table, starts, stride = inputs.block_table, inputs.block_table, inputs.block_table.stride(0)
        else:
            assert inputs.kv_indices is not None and inputs.kv_indptr is not None
            table, starts, stride = inputs.kv_indices, inputs.kv_indptr, 0
        shape = (case.batch, case.query_tokens, case.heads, SPLITS)
        partial = torch.empty((*shape, case.latent), dtype=torch.float32, device=inputs.device)
        partial_lse = torch.empty(shape, dtype=torch.float32, device=inputs.device)
        blocks = -(-case.heads // self._block)
        scale = case.softmax_scale * case.query_scale * case.cache_scale
        self._attend[(case.batch, SPLITS, blocks * case.query_tokens)](
            inputs.query_nope, inputs.query_rope, inputs.cache, table, starts, inputs.lengths, partial, partial_lse,
            scale, case.cache_scale,
            *inputs.query_nope.stride()[:3], *inputs.query_rope.stride()[:3], stride,
            case.page_size, *inputs.cache.stride()[:2], case.heads, case.query_tokens, SPLITS,
            RAGGED=inputs.block_table is None, LATENT=case.latent, ROPE=case.rope, TILE=self._tile, BLOCK=self._block,
            EIGHT_BITS=case.cache_format == "e4m3fn", num_warps=4,
        )  # fmt: skip
        rows = case.batch * case.query_tokens * case.heads
        self._merge[(rows,)](
            partial, partial_lse, inputs.out, inputs.lse, SPLITS,
            HAS_LSE=inputs.lse is not None, LATENT=case.latent, SPLITS=SPLITS, num_warps=4,
        )  # fmt: skip


def _architecture(device: torch.device) -> str:
    return str(getattr(torch.cuda.get_device_properties(device), "gcnArchName", "no AMD device")).partition(":")[0]


def make(name: str, label: str | None = None) -> GluonSplitKV:
    """Make the backend.

    Raises:
        NotInstalled: if Triton is missing or has no Gluon for CDNA4.
        ValueError: if a version is asked for.
    """
    if label is not None:
        raise ValueError(f"{name} has no versions to choose from, {label!r} was asked for")
    try:
        from harness.backends.gluon_splitkv_kernel import BLOCK, TILE, attend, merge
    except ImportError as error:
        raise NotInstalled(
            f"{name} needs Triton 3.7 or newer with Gluon, and could not import it ({error}): pip install 'mla-gate[triton]'"
        ) from error
    return GluonSplitKV(name, attend, merge, tile=TILE, block=BLOCK)
