"""The embedded default backend: a small paged split-KV decode kernel in Triton.

1. On a CUDA or ROCm device it runs natively; on a CPU through Triton's interpreter, mended for the run.
2. Its contract is every case whose pair of formats is in OPERANDS; what a device's Triton cannot cast, the kernel decodes by
   integers.
3. Operands are exact: both codes are widened to the format of `operand_of`. Probabilities are rounded to that format and
   partial outputs are fp32; splits are even, of SPLIT_STEP tokens or a multiple, MOST_SPLITS at most.
4. A variant is this backend with its kernel's source changed in one place: a wrong kernel made on purpose.

Source: the kernel's own module, `triton_splitkv_kernel`.
"""

from __future__ import annotations

import atexit
import importlib.util
import itertools
import shutil
import sys
import tempfile
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import torch
from torch import Tensor

from harness.backends.protocol import Capabilities, NotInstalled, Output, UnknownBackend, Unsupported
from harness.backends.triton_splitkv_mistakes import MISTAKES
from harness.case import Case
from harness.emulation.interpreter import interpreted, mended
from harness.emulation.interpreter import why_not as interpreter_why_not
from harness.inputs import Inputs

NAME = "triton-splitkv"
#: tokens a program holds at a time, between two updates of the running maximum
TILE = 64
#: tokens that a split is a multiple of: two tiles, so that short contexts have both several splits and several tiles in one
SPLIT_STEP = 2 * TILE
#: splits a request has at most
MOST_SPLITS = 8
#: query rows (S x H) of a program, at least and at most; a dot of Triton's needs 16
ROWS = (16, 64)
#: int32 token positions, with room for the last tile
_LONGEST = (1 << 31) - (1 << 12)
#: fields that are constants of the kernel, or decide whether the pool's strides are multiples of 16
_COMPILED = frozenset({"query_format", "cache_format", "latent", "rope", "page_size", "token_padding", "page_padding", "lse"})
_KERNEL = Path(__file__).with_name("triton_splitkv_kernel.py")
_EIGHT_BITS = ("e4m3fn", "e4m3fnuz", "e5m2")
#: format of the operands, and the query and cache formats that are widened to it: every value of either is one of its own
OPERANDS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = MappingProxyType(
    {
        "bf16": (("bf16", *_EIGHT_BITS), ("bf16", *_EIGHT_BITS)),
        "fp16": (("fp16",), ("fp16", *_EIGHT_BITS)),
        "fp32": (("fp32",), ("fp32",)),
    }
)
_numbers = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """How a launch cuts its work."""

    #: query rows of a program
    rows: int
    #: tokens a program holds at a time
    tile: int
    #: splits of the longest request
    splits: int


def operand_of(query_format: str, cache_format: str) -> str | None:
    """Name the format that both operands of the dots are widened to, exactly; None for a pair outside the contract."""
    for operand, (queries, caches) in OPERANDS.items():
        if query_format in queries and cache_format in caches:
            return operand
    return None


def tokens_per_split(length: int) -> int:
    """Count the tokens of every split but the last, as the kernel does."""
    least = -(-length // MOST_SPLITS)
    return -(-least // SPLIT_STEP) * SPLIT_STEP


def splits_of(length: int) -> int:
    """Count the splits of a request of `length` tokens."""
    return -(-length // tokens_per_split(length)) if length else 0


class SplitKV:
    """The backend over one kernel module."""

    def __init__(self, name: str, kernels: ModuleType, *, integer_decode: bool = False) -> None:
        """Take kernels from a module; `integer_decode` decodes every fp8 format by integers, also where a cast exists."""
        self._name = name
        self._kernels = kernels
        self._integer_decode = integer_decode

    @property
    def name(self) -> str:
        """Its name; a variant's ends with `!` and the mistake."""
        return self._name

    @property
    def capabilities(self) -> Capabilities:
        """What holds for all its cases."""
        return Capabilities(output_format="bf16", empty_rows="zeros", returns_lse=True, compiled=_COMPILED, graphs=True)

    def why_not(self, case: Case, device: torch.device) -> str | None:
        """Say why a case lies outside the contract on a device, or None."""
        if device.type not in self.capabilities.devices:
            return f"it runs on a CPU and on CUDA or ROCm devices, not on {device}"
        if operand_of(case.query_format, case.cache_format) is None:
            return (
                f"its dots take a query and a cache of formats that one format holds exactly, and not {case.query_format} "
                f"with {case.cache_format}"
            )
        if max(case.lengths) > _LONGEST:
            return f"token positions are int32: a request has at most {_LONGEST} tokens, and one has {max(case.lengths)}"
        return interpreter_why_not() if device.type == "cpu" else None

    def run(self, inputs: Inputs) -> Output:
        """Compute the decode.

        Raises:
            Unsupported: if the case lies outside the contract.
            KernelFault: on a CPU, if the kernel leaves its memory or its integers.
        """
        reason = self.why_not(inputs.case, inputs.device)
        if reason is not None:
            raise Unsupported(f"{self.name} cannot run {inputs.case}: {reason}")
        tiling = _tile(inputs.case, inputs.device)
        with _meaning(inputs.device):
            self._launch(inputs, tiling)
        mode = "interpreted" if inputs.device.type == "cpu" else "native"
        ran: dict[str, str | int] = {
            "kernel": self.name,
            "splits": tiling.splits,
            "tile": tiling.tile,
            "rows": tiling.rows,
            "mode": mode,
        }
        return Output(out=inputs.out, lse=inputs.lse, what_ran=ran)

    def launch(self, inputs: Inputs) -> None:
        """Call the kernels as on gfx950, whatever device the tensors are on; for compiling."""
        self._launch(inputs, replace(_tile(inputs.case, torch.device("cpu")), rows=ROWS[0]), native=True)

    def _launch(self, inputs: Inputs, tiling: Tiling, *, native: bool = False) -> None:
        case = inputs.case
        attend, merge = self._kernels.attend, self._kernels.merge
        if inputs.device.type == "cpu" and not native:
            attend, merge = interpreted(attend), interpreted(merge)
        nope, query_code = self._codes(inputs.query_nope, case.query_format)
        rope, _ = self._codes(inputs.query_rope, case.query_format)
        cache, cache_code = self._codes(inputs.cache, case.cache_format)
        if inputs.block_table is not None:
            table, starts, table_width = inputs.block_table, inputs.lengths, inputs.block_table.stride(0)
        else:
            assert inputs.kv_indices is not None and inputs.kv_indptr is not None
            table, starts, table_width = inputs.kv_indices, inputs.kv_indptr, 0
        shape = (case.batch, case.query_tokens * case.heads, tiling.splits)
        partial = torch.full((*shape, case.latent), torch.nan, dtype=torch.float32, device=inputs.device)
        partial_lse = torch.full(shape, torch.nan, dtype=torch.float32, device=inputs.device)
        blocks = -(-shape[1] // tiling.rows)
        cuts: dict[str, Any] = {
            "LATENT": case.latent, "LATENT_TILE": _padded(case.latent), "ROWS": tiling.rows, "STEP": SPLIT_STEP,
            "SPLITS": MOST_SPLITS,
        }  # fmt: skip
        attend[(case.batch, blocks, tiling.splits)](
            nope, rope, cache, table, starts, inputs.lengths, partial, partial_lse, case.softmax_scale,
            case.query_scale, case.cache_scale, case.query_tokens, case.heads, case.page_size, *nope.stride()[:3],
            *rope.stride()[:3], cache.stride(0), cache.stride(1), table_width, tiling.splits,
            int(inputs.block_table is None), **cuts, **_options(native or torch.version.hip is not None),
            ROPE=case.rope, ROPE_TILE=_padded(case.rope), TILE=tiling.tile,
            QUERY=query_code, CACHE=cache_code, OPERAND=_triton_type(operand_of(case.query_format, case.cache_format)),
        )  # fmt: skip
        lse = partial_lse if inputs.lse is None else inputs.lse
        merge[(case.batch, blocks)](
            partial, partial_lse, inputs.lengths, inputs.out, lse, case.query_tokens, case.heads, tiling.splits, **cuts,
            WITH_LSE=inputs.lse is not None,
        )  # fmt: skip

    def _codes(self, codes: Tensor, name: str) -> tuple[Tensor, str]:
        """Give the tensor as the kernel takes it, and how the kernel decodes it."""
        if name not in _EIGHT_BITS:
            return codes, "cast"
        if not self._integer_decode and name in _castable(codes.device):
            return codes, "cast"
        return codes.view(torch.uint8), name


def make(name: str, label: str | None = None) -> SplitKV:
    """Make the backend, or with ``!NAME`` the variant that makes the mistake NAME of MISTAKES.

    Raises:
        ValueError: if a version is asked for: there is one.
        UnknownBackend: if no mistake has the name.
        NotInstalled: if there is no Triton.
    """
    if label is not None:
        raise ValueError(f"{name} has no versions to choose from, and @{label} asks for one: leave it out")
    try:
        import harness.backends.triton_splitkv_kernel as kernels
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise NotInstalled(f"{name} needs Triton, which is not installed here: pip install triton") from error
    stem, bang, mistake = name.partition("!")
    if not bang:
        return SplitKV(name, kernels)
    if mistake not in MISTAKES:
        raise UnknownBackend(f"{stem} has no mistake {mistake!r} to make: there are {', '.join(MISTAKES)}")
    return variant(mistake, MISTAKES[mistake].old, MISTAKES[mistake].new)


def variant(mistake: str, old: str, new: str) -> SplitKV:
    """Make the backend with `old` replaced by `new` in its kernel's source, named after the mistake.

    Raises:
        ValueError: if `old` does not stand exactly once in the source.
    """
    source = _KERNEL.read_text(encoding="utf-8")
    if source.count(old) != 1:
        raise ValueError(
            f"the variant {mistake!r} replaces {old!r}, which must stand exactly once in {_KERNEL.name} "
            f"and stands there {source.count(old)} times"
        )
    folder = Path(tempfile.mkdtemp(prefix="mla-gate-variant-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    # Triton reads a kernel's source from its file, so that the file must outlive the backend.
    name = f"triton_splitkv_variant_{next(_numbers)}"
    path = folder / f"{name}.py"
    path.write_text(source.replace(old, new), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return SplitKV(f"{NAME}!{mistake}", module)


def _meaning(device: torch.device) -> AbstractContextManager[None]:
    if device.type != "cpu":
        return torch.cuda.device(device)
    return mended()


def _tile(case: Case, device: torch.device) -> Tiling:
    rows = case.query_tokens * case.heads
    least, most = ROWS
    splits = max(1, *(splits_of(length) for length in case.lengths))
    if device.type == "cpu":
        return Tiling(rows=min(max(least, 1 << (rows - 1).bit_length()), most), tile=TILE, splits=splits)
    # A program's accumulators must fit its registers, its operands its shared memory. CUDA keeps two tiles of the cache
    # there, so as to load one while it multiplies the other; with one stage ROCm keeps one.
    if torch.cuda.is_current_stream_capturing():
        splits = MOST_SPLITS  # a graph is replayed over longer requests; a split that has no tokens ends at once
    exact = operand_of(case.query_format, case.cache_format) == "fp32"
    row = (_padded(case.latent) + _padded(case.rope)) * (4 if exact else 2)
    buffers = 2 if torch.version.hip is None else 1
    properties = torch.cuda.get_device_properties(device)
    room = getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)
    fitting = [tile for tile in (TILE, TILE // 2) if (buffers * tile + least) * row <= room]
    return Tiling(rows=least, tile=fitting[0] if fitting else least, splits=splits)


def _options(rocm: bool) -> dict[str, int]:
    """Give Triton's launch options; the interpreter has none and ignores them."""
    # eight warps compile the integer decoding three times as fast as four, and run fp32 tiles six times as fast (H200)
    return {"num_warps": 8, "num_stages": 1} if rocm else {"num_warps": 8}


def _padded(width: int) -> int:
    return max(16, 1 << max(width - 1, 0).bit_length())


def _castable(device: torch.device) -> tuple[str, ...]:
    """Name the fp8 formats that Triton can cast on a device; the interpreter casts them all."""
    if device.type == "cpu":
        return _EIGHT_BITS
    if torch.version.hip is not None:
        architecture = torch.cuda.get_device_properties(device).gcnArchName
        return ("e4m3fnuz",) if architecture.startswith("gfx94") else ("e4m3fn", "e5m2")
    return ("e4m3fn", "e5m2") if torch.cuda.get_device_capability(device) >= (8, 9) else ("e5m2",)


def _triton_type(name: str | None) -> Any:
    import triton.language as language

    return {"bf16": language.bfloat16, "fp16": language.float16, "fp32": language.float32}[name or "fp32"]
