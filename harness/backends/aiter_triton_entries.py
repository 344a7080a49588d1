"""The Triton decode entry points of AITER: where each is, what it takes, how a case is laid out for it.

Rules kept here:

1. An entry point is a record; its contract and its layout are functions of a case, without any import of AITER.
2. A call is by keyword, with parameters that a known release has; others are refused by name.
3. An entry point for one query token is given a request of S tokens as S requests of one, each as long as its token
   sees: that is how engines verify drafts with it.
4. Scales go where the entry point applies them. One that it does not apply is folded into the softmax scale where that
   is the same number, and is outside the contract where it is not.

Source: ``aiter/ops/triton/attention/{mla,mla_decode,mla_decode_rope}.py``, releases 0.1.7 (wheel) to 0.1.20.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from harness.backends.token_rows import flat_rows, page_table, ragged_rows, row_lengths, why_not_flat
from harness.case import Case
from harness.inputs import Inputs

#: KV splits of the entry points that leave the count to the caller; vLLM's default of many years.
SPLITS = 4
#: Least inner dimension of a dot of 8-bit operands on CUDA: ``min_dot_size`` of Triton's NVIDIA backend. Its AMD backend has
#: no such limit. A kernel below it ends in a compile error, "Input shapes should have ... K >= 32".
CUDA_DEPTH = 32
#: Smallest page of the entry point whose page is its tile: a dot of Triton's needs 16 on each side.
_LEAST_TILE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryPoint:
    """One public decode function of AITER's Triton kernels."""

    #: Modules that may hold it, newest first.
    places: tuple[str, ...]
    #: The function's name.
    function: str
    #: Parameters of the releases that are known.
    signatures: tuple[tuple[str, ...], ...]
    #: Whether it returns the log-sum-exp.
    returns_lse: bool
    #: Why a case lies outside its contract, or None.
    why_not: Callable[[Case], str | None]
    #: The same of a GPU that is not AMD's, beyond what holds everywhere.
    why_not_cuda: Callable[[Case], str | None]
    #: The call's keyword arguments for a case.
    arguments: Callable[[Inputs], dict[str, Any]]
    #: Which path of AITER's own choice it stands for: "rocm", "other", or "" where there is one for all.
    path: str
    #: The log-sum-exp out of the arguments after the call, fp32 [B, S, H].
    lse: Callable[[Inputs, Mapping[str, Any]], Tensor | None]


def _power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


def _joint(inputs: Inputs) -> Tensor:
    """Join the query, [B * S, H, D]."""
    return inputs.query.reshape(-1, inputs.case.heads, inputs.case.width)


def _flat_out(inputs: Inputs) -> Tensor:
    return inputs.out.view(-1, inputs.case.heads, inputs.case.latent)


def _why_not_mla(case: Case) -> str | None:
    if not (_power_of_two(case.latent) and _power_of_two(case.rope) and min(case.latent, case.rope) >= _LEAST_TILE):
        return f"takes latent and rope widths that are powers of two, 16 or more, not {case.latent} and {case.rope}"
    if not (_power_of_two(case.page_size) and case.page_size >= _LEAST_TILE):
        return f"a page is a tile: takes powers of two, 16 or more, not {case.page_size}"
    pair = (case.query_format, case.cache_format)
    if pair not in {("bf16", "bf16"), ("bf16", "e4m3fn"), ("e4m3fn", "e4m3fn")}:
        return f"takes bf16 or e4m3fn queries with a cache as narrow or narrower, not {pair[0]} with {pair[1]}"
    return None


def _why_not_mla_cuda(case: Case) -> str | None:
    """Refuse inner dimensions of an fp8 dot that CUDA lacks: K has latent and rope, P V has the page."""
    short = min(case.page_size, case.rope, case.latent)
    if case.query_format == "e4m3fn" and short < CUDA_DEPTH:
        return f"an fp8 dot on CUDA is {CUDA_DEPTH} deep at least: takes no page, latent or rope of {short}"
    return None


def _anywhere(case: Case) -> str | None:
    return None


def _mla(inputs: Inputs) -> dict[str, Any]:
    case = inputs.case
    plain = case.query_scale == 1.0 and case.query_format == "bf16"
    return {
        "q": _joint(inputs),
        "kv_buffer": inputs.cache.unsqueeze(2),
        "out": _flat_out(inputs),
        "cu_seqlens_q": torch.arange(0, (case.batch + 1) * case.query_tokens, case.query_tokens).to(inputs.device, torch.int32),
        "seqused_k": inputs.lengths,
        "max_seqlen_kv": max(case.lengths),
        "block_tables": page_table(inputs),
        "softmax_scale": case.softmax_scale,
        "kv_lora_rank": case.latent,
        "qk_rope_head_dim": case.rope,
        "causal": True,
        "q_descale": None if plain else inputs.query_scale,
        "kv_descale": None if case.cache_scale == 1.0 and case.cache_format == "bf16" else inputs.cache_scale,
    }


def _why_not_decode(case: Case) -> str | None:
    if case.query_format != "bf16" or case.cache_format not in ("bf16", "e4m3fn"):
        return f"takes bf16 queries and bf16 or e4m3fn caches, not {case.query_format} and {case.cache_format}"
    if case.cache_format == "bf16" and case.cache_scale != 1.0:
        return f"applies no scale to a bf16 cache, and the case has {case.cache_scale}"
    if case.width != 576 and not _power_of_two(case.latent):
        return f"cuts rows of 512 + 64 or of powers of two, not {case.latent} + {case.rope}"
    return why_not_flat(case)


def _decode(inputs: Inputs) -> dict[str, Any]:
    case, rows = inputs.case, flat_rows(inputs).unsqueeze(1)
    batch = case.batch * case.query_tokens
    lse = inputs.lse if inputs.lse is not None else torch.empty(batch, case.heads, device=inputs.device)
    return {
        "q": _joint(inputs),
        "k_buffer": rows,
        "v_buffer": rows[..., : case.latent],
        "o": _flat_out(inputs),
        "lse": lse.view(batch, case.heads),
        "req_to_token": page_table(inputs).repeat_interleave(case.query_tokens, 0),
        "b_seq_len": row_lengths(inputs),
        "attn_logits": torch.empty(batch, case.heads, SPLITS, case.latent + 1, device=inputs.device),
        "num_kv_splits": SPLITS,
        "sm_scale": case.softmax_scale * case.query_scale,
        "page_size": case.page_size,
        "k_scale": inputs.cache_scale,
        "v_scale": inputs.cache_scale,
    }


def _decode_lse(inputs: Inputs, given: Mapping[str, Any]) -> Tensor | None:
    return inputs.lse


def _why_not_rope(case: Case) -> str | None:
    if case.query_format != case.cache_format or case.query_format not in ("bf16", "fp16"):
        return f"takes queries and caches of one format, bf16 or fp16, not {case.query_format} and {case.cache_format}"
    if case.cache_scale != 1.0:
        return f"applies no cache scale, and the case has {case.cache_scale}"
    if not _power_of_two(case.rope) or case.rope < _LEAST_TILE:
        return f"takes a rope width that is a power of two, 16 or more, not {case.rope}"
    return why_not_flat(case)


def _rope(inputs: Inputs) -> dict[str, Any]:
    case, rows = inputs.case, flat_rows(inputs).unsqueeze(1)
    ends, ids = _flattened(inputs)
    batch = case.batch * case.query_tokens
    return {
        "q": _joint(inputs),
        "k_buffer": rows,
        "v_buffer": rows[..., : case.latent],
        "o": _flat_out(inputs),
        "kv_indptr": ends,
        "kv_indices": ids,
        "k_pe_tokens": None,
        "kv_lora_rank": case.latent,
        "rotary_dim": case.rope,
        "cos_sin_cache": None,
        "positions": None,
        # The partial log-sum-exps live here too: in the query's own bf16 they would be off by 2 % a split.
        "attn_logits": torch.empty(batch, case.heads, SPLITS, case.latent + 1, device=inputs.device),
        "num_kv_splits": SPLITS,
        "sm_scale": case.softmax_scale * case.query_scale,
        "use_rope": False,
    }


def _flattened(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Give the ragged table of token rows with each query token as a request: ends [B * S + 1] and rows, int32."""
    ends, ids = ragged_rows(inputs)
    tokens = inputs.case.query_tokens
    if tokens == 1:
        return ends, ids
    lengths = row_lengths(inputs)
    starts = ends[:-1].long().repeat_interleave(tokens)
    flat = torch.zeros(lengths.numel() + 1, dtype=torch.int32, device=lengths.device)
    flat[1:] = torch.cumsum(lengths, 0)
    parts = [ids[start : start + length] for start, length in zip(starts.tolist(), lengths.tolist(), strict=True)]
    return flat, torch.cat(parts)


def _no_lse(inputs: Inputs, given: Mapping[str, Any]) -> Tensor | None:
    return None


_MLA = (
    "q", "kv_buffer", "out", "cu_seqlens_q", "seqused_k", "max_seqlen_kv", "block_tables", "softmax_scale",
    "kv_lora_rank", "qk_rope_head_dim", "causal", "q_descale", "kv_descale",
)  # fmt: skip
_DECODE = (
    "q", "k_buffer", "v_buffer", "o", "lse", "req_to_token", "b_seq_len", "attn_logits", "num_kv_splits", "sm_scale",
    "page_size", "logit_cap", "k_scale", "v_scale",
)  # fmt: skip
_ROPE = (
    "q", "k_buffer", "v_buffer", "o", "kv_indptr", "kv_indices", "k_pe_tokens", "kv_lora_rank", "rotary_dim",
    "cos_sin_cache", "positions", "attn_logits", "num_kv_splits", "sm_scale", "logit_cap", "use_rope",
    "is_neox_style", "config",
)  # fmt: skip

ENTRY_POINTS: Mapping[str, EntryPoint] = {
    "aiter-triton-mla": EntryPoint(
        places=("aiter.ops.triton.attention.mla",),
        function="mla_decode_fwd",
        signatures=(
            (*_MLA, "out_scale", "shuffled_kv_cache", "skip_reduce"),
            (*_MLA, "q_scales", "out_scale", "shuffled_kv_cache", "skip_reduce"),
        ),
        returns_lse=False,
        why_not=_why_not_mla,
        why_not_cuda=_why_not_mla_cuda,
        arguments=_mla,
        path="",
        lse=_no_lse,
    ),
    "aiter-triton-decode": EntryPoint(
        places=("aiter.ops.triton.attention.mla_decode",),
        function="decode_attention_fwd",
        signatures=(_DECODE,),
        returns_lse=True,
        why_not=_why_not_decode,
        why_not_cuda=_anywhere,
        arguments=_decode,
        path="rocm",
        lse=_decode_lse,
    ),
    "aiter-triton-grouped": EntryPoint(
        places=("aiter.ops.triton.attention.mla_decode",),
        function="decode_attention_fwd",
        signatures=(_DECODE,),
        returns_lse=True,
        why_not=_why_not_decode,
        why_not_cuda=_anywhere,
        arguments=_decode,
        path="other",
        lse=_decode_lse,
    ),
    "aiter-triton-rope": EntryPoint(
        places=("aiter.ops.triton.attention.mla_decode_rope", "aiter.ops.triton.mla_decode_rope"),
        function="decode_attention_fwd_grouped_rope",
        signatures=(_ROPE,),
        returns_lse=False,
        why_not=_why_not_rope,
        why_not_cuda=_anywhere,
        arguments=_rope,
        path="",
        lse=_no_lse,
    ),
}
