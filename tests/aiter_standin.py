"""A strict stand-in for AITER's compiled MLA entry points, under AITER's own Python.

Rules kept here:

1. ``aiter/mla.py`` and ``aiter/ops/attention.py`` of a checkout run as they are: dispatch, metadata sizes, folding and the
   Triton stage-2 kernel (interpreted). Only what is compiled from C++ or shipped as machine code stands in.
2. A compiled entry point binds its arguments to the signature that AITER's own Python declares for it, so a wrong order
   shows, and enforces shapes, types, contiguity and mandatory scales; a breach raises ``Abort``, where AITER would end
   the process.
3. It answers with the documented arithmetic: scores in fp32, probabilities rounded to the query's format, fp32 partials
   with their log-sum-exp, bf16 where a single split writes the output itself.
4. What AITER leaves unwritten stays NaN.

Source: ``csrc/py_itfs_cu/asm_mla.cu``, ``csrc/kernels/mla/metadata/v1_2_device.cuh`` and ``reduce.cu`` of AITER, main of
2026-08-22.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import math
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from harness.backends.aiter_asm import AsmLibrary
from harness.backends.aiter_modules import AiterModules
from harness.backends.aiter_triton import _interpreted

FP8 = torch.float8_e4m3fn


class Abort(Exception):
    """AITER's check_fail: on hardware the process ends here."""


def demand(holds: bool, what: str) -> None:
    """Abort unless something holds."""
    if not holds:
        raise Abort(what)


class _Compiled(enum.IntEnum):
    """Members that AITER's modules name when they are imported; their numbers are not used here."""

    No, Silu, Gelu, Swiglu, per_Tensor, per_Token, per_1x32, per_1x128, per_128x128 = range(9)


class _Version(enum.IntEnum):
    """Versions of the MLA kernels."""

    V32, V40 = range(2)


class _OnCpu(TorchFunctionMode):
    """Give tensors that AITER asks for on "cuda" on the CPU, and begin uninitialised ones as NaN or -1."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        made = func(*args, **kwargs)
        if func is torch.empty:
            made.fill_(math.nan if made.dtype.is_floating_point else -1)
        return made


def _rows(kv: Tensor, pages: Tensor, start: int, stop: int) -> Tensor:
    return kv[pages[start:stop].long(), 0, 0].float()


def _attend(query: Tensor, rows: Tensor, visible: int, scale: float, value_scale: float) -> tuple[Tensor, Tensor]:
    """Attend with one token's heads [H, D] to rows [n, D], of which the first ``visible`` are seen."""
    rows = rows[: max(visible, 0)]
    if rows.shape[0] == 0:
        return torch.zeros(query.shape[0], 512), torch.full((query.shape[0],), -math.inf)
    scores = scale * (query.float() @ rows.T)
    top = scores.max(dim=1, keepdim=True).values
    shares = torch.exp(scores - top)
    total = shares.sum(dim=1, keepdim=True)
    rounded = shares.to(query.dtype).float()
    return value_scale * (rounded @ rows[:, :512]) / total, (top + total.log()).squeeze(1)


class StandIn:
    """The compiled entry points."""

    def __init__(self, *, fp8_blocks: Mapping[int, int] | None = None) -> None:
        """Take blocks in tokens, by heads times query tokens, that the plain fp8 kernels split by; none for those of stage 2.

        With blocks of their own they count no valid splits either: only kernels of gfx1250 are told where to.
        """
        self._fp8_blocks = fp8_blocks
        #: How often each was called.
        self.calls: dict[str, int] = {}
        self._planned: dict[int, tuple[int, int]] = {}
        #: AITER's number for bf16.
        self.bf16_id = -1

    def _check_stage1(self, a: dict[str, Any]) -> tuple[float, float]:
        query, kv = a["Q"], a["KV"]
        demand(query.is_contiguous(), "only support Q.is_contiguous()")
        demand(a["nhead_kv"] == 1, "only support num_kv_heads==1")
        demand(kv.dim() == 4 and kv.size(3) == query.size(2) == 576, "head_size == KV.size(3)")
        demand(query.dtype in (torch.bfloat16, FP8) and kv.dtype in (torch.bfloat16, FP8), "unsupported dtype")
        for name in ("qo_indptr", "kv_indptr", "kv_page_indices", "kv_last_page_lens"):
            demand(a[name].dtype is torch.int32, f"{name} must be int32")
        demand(a["splitLse"].dtype is torch.float32, "splitLse must be fp32")
        demand(bool((a["kv_last_page_lens"] == 1).all()), "a page of one token is full")
        scales = [1.0, 1.0]
        for index, name in enumerate(("q_scale", "kv_scale")):
            given = a[name]
            if query.dtype is FP8:
                demand(given is not None, "fp8 Q requires q_scale and kv_scale")
            if given is not None:
                demand(isinstance(given, Tensor) and given.dtype is torch.float32 and given.numel() == 1, f"{name}: fp32 [1]")
                if query.dtype is FP8 or (index == 1 and kv.dtype is FP8):
                    scales[index] = float(given)
        demand(bool(a["causal"]), "the stand-in knows the masked kernels")
        return scales[0], scales[1]

    def mla_decode_stage1_asm_fwd(self, **a: Any) -> None:
        """Compute partial or final attention, persistent or not."""
        query_scale, cache_scale = self._check_stage1(a)
        a |= {"scale": a["softmax_scale"] * query_scale * cache_scale, "value_scale": cache_scale}
        (self._persistent if a["work_meta_data"] is not None else self._plain)(a)

    def _plain(self, a: dict[str, Any]) -> None:
        query, partial, lse = a["Q"], a["splitData"], a["splitLse"]
        heads, tokens, splits = query.size(1), a["max_seqlen_q"], partial.size(1)
        pair = (query.dtype is FP8, a["KV"].dtype is FP8)
        cells = {(False, False): (8, 16, 32, 64, 128), (True, True): (8, 16, 128)}
        demand(heads in cells.get(pair, ()), f"cannot find suitable kernel: {heads} heads, fp8 {pair}")
        demand(not pair[0] or tokens <= (1 if heads == 8 else 4), "cannot find suitable kernel: query tokens")
        grain = 64 if heads in (8, 16) and (tokens == 1 or heads == 8) else 32 if heads == 128 and pair[0] else 16
        if heads == 64 and tokens == 1:
            grain = 32
        own = self._fp8_blocks if pair[0] else None
        if own:
            grain = own[heads * tokens]
        # One split writes bf16 where its output belongs, but for the oldest kernel.
        narrow = splits == 1 and not (heads == 16 and tokens == 1 and not pair[0])
        target = partial if partial.dtype is torch.bfloat16 else None
        if narrow and target is None:
            target = partial.view(torch.bfloat16).flatten()[: partial.numel()].view(partial.shape)
        for request in range(a["qo_indptr"].numel() - 1):
            first, length = self._span(a, request)
            blocks = -(-length // grain)
            used = min(splits, blocks)
            if not own:
                a["valid_split_count"][request] = used
            start = 0
            for split in range(used):
                stop = min(start + grain * (blocks // used + (split < blocks % used)), length)
                rows = _rows(a["KV"], a["kv_page_indices"], first + start, first + stop)
                for token in range(tokens):
                    at = int(a["qo_indptr"][request]) + token
                    visible = length - tokens + token + 1 - start
                    out, logarithm = _attend(query[at], rows, visible, a["scale"], a["value_scale"])
                    if narrow:
                        assert target is not None
                        target[at, split] = out.to(torch.bfloat16)
                    else:
                        partial[at, split] = out
                        lse[at, split, :, 0] = logarithm
                start = stop

    def _span(self, a: dict[str, Any], request: int) -> tuple[int, int]:
        first, last = (int(a["kv_indptr"][request + step]) for step in (0, 1))
        return first, last - first

    def _persistent(self, a: dict[str, Any]) -> None:
        query, tokens = a["Q"], a["max_seqlen_q"]
        plan = self._planned.get(a["work_info_set"].data_ptr())
        demand(plan is not None, "work_info_set was not filled by get_mla_metadata_v1")
        demand(plan == (query.size(1), tokens), f"planned for heads, tokens {plan}, called with {query.size(1)}, {tokens}")
        demand(a["num_kv_splits_indptr"] is None, "persistent takes no split indptr")
        for row in a["work_info_set"][: int(a["work_indptr"][-1])].tolist():
            _, partial, q_start, q_end, kv_start, kv_end, after, _ = row
            rows = _rows(a["KV"], a["kv_page_indices"], kv_start, kv_end)
            for token in range(q_end - q_start):
                visible = kv_end + after - kv_start - tokens + token + 1
                out, logarithm = _attend(query[q_start + token], rows, visible, a["scale"], a["value_scale"])
                if partial < 0:
                    a["output"][q_start + token] = out.to(torch.bfloat16)
                    if a["lse"] is not None:
                        a["lse"][q_start + token] = logarithm
                else:
                    a["splitData"][partial + token, 0] = out
                    a["splitLse"][partial + token, 0, :, 0] = logarithm

    def get_mla_metadata_v1(self, **a: Any) -> None:
        """Plan: the longest requests in two parts, the others whole; heads folded as the planner folds them."""
        for name in ("work_info_set", "work_indptr", "reduce_indptr", "reduce_final_map", "reduce_partial_map"):
            demand(a[name].dtype is torch.int32, f"{name} must be int32")
        demand(a["work_metadata_ptrs"].dtype is torch.uint64 and a["work_metadata_ptrs"].numel() == 2, "ptrs: uint64 [2]")
        demand(a["work_info_set"].dim() == 2 and a["work_info_set"].size(1) == 8, "work_info_set: [work, 8]")
        demand(a["reduce_final_map"].dim() == 2, "reduce_final_map: [tiles, 2]")
        heads, tokens = a["num_heads_per_head_k"], a["max_seqlen_qo"]
        # An omitted type means bf16: the plan then does not fold.
        wide = a["dtype_q_nope"] in (None, self.bf16_id), a["dtype_kv_nope"] in (None, self.bf16_id)
        native = heads == 16 or wide == (True, True) or (wide == (False, False) and heads in (8, 32, 64, 128))
        ratio = 1 if native else heads // 16
        works, partials, tiles = [], [], [0]
        finals, offset = [], 0
        batch = a["seqlens_qo_indptr"].numel() - 1
        for folded in range(batch * ratio):
            request, q_start = folded // ratio, folded * tokens
            first, last = (int(a["seqlens_kv_indptr"][request + step]) for step in (0, 1))
            grain = a["kv_granularity"]
            middle = first + -(-((last - first) // 2) // grain) * grain
            cuts = [(first, middle), (middle, last)] if first + tokens < middle < last - tokens else [(first, last)]
            for start, stop in cuts:
                split = len(cuts) > 1
                works.append([folded, offset if split else -1, q_start, q_start + tokens, start, stop, last - stop, 0])
                if split:
                    partials.append(offset)
                    offset += tokens
            tiles.append(len(partials))
            finals.append([q_start, q_start + tokens])
        demand(len(works) <= a["work_info_set"].size(0) and len(finals) <= a["reduce_final_map"].size(0), "metadata too small")
        demand(len(partials) <= a["reduce_partial_map"].numel(), "reduce_partial_map too small")
        a["work_info_set"][: len(works)] = torch.tensor(works, dtype=torch.int32)
        a["work_indptr"].fill_(len(works))
        a["reduce_indptr"].fill_(tiles[-1])
        a["reduce_indptr"][: len(tiles)] = torch.tensor(tiles, dtype=torch.int32)
        a["reduce_final_map"][: len(finals)] = torch.tensor(finals, dtype=torch.int32)
        a["reduce_partial_map"][: len(partials)] = torch.tensor(partials, dtype=torch.int32)
        self._planned[a["work_info_set"].data_ptr()] = (heads // ratio, tokens)

    def mla_reduce_v1(self, **a: Any) -> None:
        """Merge partials; tiles without one were written by stage 1."""
        demand(a["partial_output"].size(-2) in (8, 16, 24, 32, 48, 64, 80, 96, 112, 128), "no reduction for these heads")
        tokens = a["max_seqlen_q"]
        for tile in range(a["reduce_indptr"].numel() - 1):
            start, stop = int(a["reduce_indptr"][tile]), int(a["reduce_indptr"][tile + 1])
            if start == stop:
                continue
            at = int(a["reduce_final_map"][tile, 0])
            places = a["reduce_partial_map"][start:stop].long()
            for token in range(tokens):
                lse = a["partial_lse"][places + token].view(stop - start, -1)
                total = torch.logsumexp(lse, 0)
                share = torch.exp(lse - total)[:, :, None]
                out = (share * a["partial_output"][places + token, 0].nan_to_num()).sum(0)
                a["final_output"][at + token] = out.to(torch.bfloat16)
                if a["final_lse"] is not None:
                    a["final_lse"][at + token] = total

    def ActivationType(self, **a: Any) -> Any:
        """Give a member of the compiled enumeration."""
        return _Compiled.No

    def QuantType(self, **a: Any) -> Any:
        """Give a member of the compiled enumeration."""
        return _Compiled.No

    def MlaVersion(self, **a: Any) -> Any:
        """Give a member of the compiled enumeration."""
        return _Version.V32


@contextmanager
def stood_in(modules: AiterModules, standin: StandIn | None = None) -> Iterator[tuple[AsmLibrary, StandIn]]:
    """Load AITER's own dispatch from a checkout with the compiled entry points stood in, for the block."""
    standin = standin or StandIn()

    def compile_ops(module: str, fc_name: str | None = None, **options: Any) -> Callable[..., Any]:
        def declare(function: Callable[..., Any]) -> Callable[..., Any]:
            signature, name = inspect.signature(function), fc_name or function.__name__

            def call(*arguments: Any, **named: Any) -> Any:
                standin.calls[name] = standin.calls.get(name, 0) + 1
                bound = signature.bind(*arguments, **named)
                bound.apply_defaults()
                return getattr(standin, name)(**bound.arguments)

            return call

        return declare

    core = types.ModuleType("aiter.jit.core")
    core.__dict__.update(compile_ops=compile_ops, is_experimental_enabled=lambda: False)
    foreign = {
        "csrc": {},
        "csrc.cpp_itfs": {},
        "csrc.cpp_itfs.pa": {},
        "csrc.cpp_itfs.torch_utils": {"direct_register_custom_op"},
    }
    for name, function in (
        ("pa", "paged_attention_rocm"),
        ("pa_ragged", "paged_attention_ragged"),
        ("pa_v1", "paged_attention_v1"),
    ):
        foreign[f"csrc.cpp_itfs.pa.{name}"] = {function}
    before = {name: sys.modules.get(name) for name in foreign}
    with modules.entered():
        sys.modules["aiter.jit.core"] = core
        for name, functions in foreign.items():
            module = types.ModuleType(name)
            module.__path__ = []  # type: ignore[attr-defined]
            module.__dict__.update(dict.fromkeys(functions, lambda *arguments, **named: None))
            sys.modules[name] = module
        try:
            package = sys.modules["aiter"]
            package.dtypes = importlib.import_module("aiter.utility.dtypes")  # type: ignore[attr-defined]
            attention = importlib.import_module("aiter.ops.attention")
            for name in ("mla_decode_stage1_asm_fwd", "mla_reduce_v1"):
                setattr(package, name, getattr(attention, name))
            mla = importlib.import_module("aiter.mla")
            standin.bf16_id = attention._aiter_dtype_id(torch.bfloat16)
            library = AsmLibrary(
                decode=mla.mla_decode_fwd,
                metadata_info=attention.get_mla_metadata_info_v1,
                metadata=attention.get_mla_metadata_v1,
            )
            with _interpreted(modules), _OnCpu():
                yield library, standin
        finally:
            for name, module in before.items():
                if module is None:
                    sys.modules.pop(name, None)
                else:
                    sys.modules[name] = module
