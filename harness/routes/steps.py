"""What an engine does to a decode before a kernel sees it, step by step, and how it takes the answer back.

Rules kept here:

1. A step says what it makes of the case, of the tensors, and of the answer on the way back; nothing else changes.
2. No input is written to. The cache is viewed, never copied; query and tables are made anew.
3. A step knows nothing of kernels, and nothing of the truth: it does what the engine's own code does, with torch.

Source: vLLM's ``rocm_aiter_mla.py`` and ``mla_attention.py``, SGLang's ``aiter_backend.py``; AITER's ``mla.py`` for folding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from harness.backends.token_rows import flat_rows, padded_rows, page_table, ragged_rows, row_lengths
from harness.case import Case
from harness.inputs import Inputs

#: Largest value of e4m3fn; engines clamp to it before they cast.
_LARGEST = 448.0
#: Ways of filling up heads.
PADDINGS = ("repeat", "tile", "zeros")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One thing that an engine does."""

    #: What it does, one line.
    about: str
    #: Refuses an argument that it cannot follow.
    check: Callable[[str], object]
    #: The case that the next step sees.
    ask: Callable[[Case, str], Case]
    #: The tensors that the next step sees, for the case that ``ask`` made; outputs are laid out later.
    lay: Callable[[Inputs, Case, str], Inputs]
    #: The answer as the step before sees it: ([B, S, H, ...] after, case before, argument).
    back: Callable[[Tensor, Case, str], Tensor]


def _nothing(argument: str) -> None:
    if argument:
        raise ValueError(f"takes no argument, not {argument!r}")


def _same(out: Tensor, case: Case, argument: str) -> Tensor:
    return out


# -- the query's form ------------------------------------------------------------------------------------------------------


def _joint(inputs: Inputs, case: Case, query: Tensor) -> Inputs:
    """Give a joint query [B, S, H, D] to the next step, as two slices of one tensor."""
    return replace(inputs, case=case, query_nope=query[..., : case.latent], query_rope=query[..., case.latent :])


def _ask_fused(case: Case, argument: str) -> Case:
    return case.replace(query_layout="fused")


def _join(inputs: Inputs, case: Case, argument: str) -> Inputs:
    return _joint(inputs, case, inputs.query.contiguous())


def _ask_split(case: Case, argument: str) -> Case:
    return case.replace(query_layout="split")


def _split(inputs: Inputs, case: Case, argument: str) -> Inputs:
    return replace(inputs, case=case, query_nope=inputs.query_nope.contiguous(), query_rope=inputs.query_rope.contiguous())


# -- the query's format ----------------------------------------------------------------------------------------------------


def _scale(case: Case, argument: str) -> float:
    """Find the scale that a query is quantised by: a number, or the cache's own."""
    return case.cache_scale if argument == "cache" else float(argument)


def _check_scale(argument: str) -> None:
    if argument != "cache" and not float(argument) > 0:
        raise ValueError(f"the scale is a positive number, or the cache's, not {argument!r}")


def _ask_quantised(case: Case, argument: str) -> Case:
    return case.replace(query_format="e4m3fn", query_scale=_scale(case, argument), query_layout="fused")


def _quantise(inputs: Inputs, case: Case, argument: str) -> Inputs:
    values = inputs.query.float() * inputs.case.query_scale / case.query_scale
    codes = values.clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)
    return replace(_joint(inputs, case, codes), query_scale=torch.full_like(inputs.query_scale, case.query_scale))


def _ask_dequantised(case: Case, argument: str) -> Case:
    """A query that was not rounded stays as it is."""
    if case.query_format == "bf16":
        return case
    return case.replace(query_format="bf16", query_scale=1.0, query_layout="fused")


def _dequantise(inputs: Inputs, case: Case, argument: str) -> Inputs:
    if inputs.case.query_format == "bf16":
        return inputs
    values = (inputs.query.float() * inputs.case.query_scale).to(torch.bfloat16)
    return replace(_joint(inputs, case, values), query_scale=torch.ones_like(inputs.query_scale))


# -- heads -----------------------------------------------------------------------------------------------------------------


def _check_padding(argument: str) -> None:
    ways, _, count = argument.partition(" ")
    if not set(ways.split("/")) <= set(PADDINGS) or not count.isdigit():
        raise ValueError(f"a padding is one of {', '.join(PADDINGS)} and the multiple to reach, not {argument!r}")


def _padding(argument: str, heads: int) -> tuple[str, int]:
    """Choose the way of padding, the first that works, and the heads to reach: repeating works where it comes out even."""
    ways, _, multiple = argument.partition(" ")
    reached = -(-heads // int(multiple)) * int(multiple)
    return next(way for way in ways.split("/") if way != "repeat" or reached % heads == 0), reached


def _ask_padded(case: Case, argument: str) -> Case:
    return case.replace(heads=_padding(argument, case.heads)[1], query_layout="fused")


def _pad(inputs: Inputs, case: Case, argument: str) -> Inputs:
    query, heads = inputs.query, inputs.case.heads
    way, _ = _padding(argument, heads)
    bits = query.view(torch.uint8 if query.element_size() == 1 else torch.int16)  # fp8 has no arithmetic, and needs none
    if way == "repeat":
        padded = bits.repeat_interleave(case.heads // heads, dim=2)
    elif way == "tile":
        padded = bits.repeat(1, 1, -(-case.heads // heads), 1)[:, :, : case.heads]
    else:
        padded = bits.new_zeros(*bits.shape[:2], case.heads, bits.shape[3])
        padded[:, :, :heads] = bits
    return _joint(inputs, case, padded.contiguous().view(query.dtype))


def _unpad(out: Tensor, case: Case, argument: str) -> Tensor:
    if _padding(argument, case.heads)[0] == "repeat":
        return out[:, :, :: out.shape[2] // case.heads]
    return out[:, :, : case.heads]


def _whole(argument: str) -> int:
    if not argument.isdigit() or int(argument) < 1:
        raise ValueError(f"takes a number of heads, not {argument!r}")
    return int(argument)


def _ask_folded(case: Case, argument: str) -> Case:
    parts = case.heads // _whole(argument)
    lengths = tuple(length for length in case.lengths for _ in range(parts))
    return case.replace(heads=_whole(argument), lengths=lengths, query_layout="fused", table="padded")


def _fold(inputs: Inputs, case: Case, argument: str) -> Inputs:
    parts = inputs.case.heads // case.heads
    batch, tokens, _, width = inputs.query.shape
    query = inputs.query.reshape(batch, tokens, parts, case.heads, width).transpose(1, 2)
    query = query.reshape(batch * parts, tokens, case.heads, width)
    return _repeated(_joint(inputs, case, query), parts, inputs.lengths.repeat_interleave(parts))


def _unfold(out: Tensor, case: Case, argument: str) -> Tensor:
    parts = case.heads // _whole(argument)
    apart = out.view(case.batch, parts, *out.shape[1:]).transpose(1, 2)
    return apart.reshape(case.batch, case.query_tokens, case.heads, *out.shape[3:])


# -- requests and pages ----------------------------------------------------------------------------------------------------


def _repeated(inputs: Inputs, times: int, lengths: Tensor) -> Inputs:
    """Let each request stand several times in a row, with the same pages."""
    table = page_table(inputs).repeat_interleave(times, 0)
    return replace(inputs, block_table=table, kv_indptr=None, kv_indices=None, lengths=lengths.to(torch.int32))


def _ask_flattened(case: Case, argument: str) -> Case:
    tokens = case.query_tokens
    lengths = tuple(max(length - tokens + token + 1, 0) for length in case.lengths for token in range(tokens))
    return case.replace(query_tokens=1, lengths=lengths, query_layout="fused", table="padded")


def _flatten(inputs: Inputs, case: Case, argument: str) -> Inputs:
    query = inputs.query.reshape(case.batch, 1, case.heads, case.width)
    return _repeated(_joint(inputs, case, query), inputs.case.query_tokens, row_lengths(inputs))


def _unflatten(out: Tensor, case: Case, argument: str) -> Tensor:
    return out.reshape(case.batch, case.query_tokens, case.heads, *out.shape[3:])


def _ask_tokens(case: Case, argument: str) -> Case:
    return case.replace(page_size=1, table="padded", table_padding=0)


def _view_tokens(inputs: Inputs, case: Case, argument: str) -> Inputs:
    table = padded_rows(replace(inputs, block_table=page_table(inputs)))
    return replace(inputs, case=case, cache=flat_rows(inputs).unsqueeze(1), block_table=table, kv_indptr=None, kv_indices=None)


def _ask_ragged(case: Case, argument: str) -> Case:
    return case.replace(page_size=1, table="ragged", table_padding=0)


def _build_ragged(inputs: Inputs, case: Case, argument: str) -> Inputs:
    ends, rows = ragged_rows(inputs)
    return replace(inputs, case=case, cache=flat_rows(inputs).unsqueeze(1), block_table=None, kv_indptr=ends, kv_indices=rows)


STEPS: Mapping[str, Step] = {
    "join-query": Step(about="latent and rope part into one tensor", check=_nothing, ask=_ask_fused, lay=_join, back=_same),
    "split-query": Step(about="the joint query into two tensors", check=_nothing, ask=_ask_split, lay=_split, back=_same),
    "quantise-query": Step(
        about="the query to e4m3fn by a static scale, clamped",
        check=_check_scale, ask=_ask_quantised, lay=_quantise, back=_same,
    ),
    "dequantise-query": Step(
        about="an e4m3fn query back to bf16, times its scale",
        check=_nothing, ask=_ask_dequantised, lay=_dequantise, back=_same,
    ),
    "pad-heads": Step(
        about="heads up to a multiple, by repeating each, tiling all or zeros (repeat/tile: the first that comes out even)",
        check=_check_padding, ask=_ask_padded, lay=_pad, back=_unpad,
    ),
    "fold-heads": Step(
        about="groups of heads into requests of their own with the same pages",
        check=_whole, ask=_ask_folded, lay=_fold, back=_unfold,
    ),
    "flatten-tokens": Step(
        about="each query token into a request of its own that ends where the token sees to",
        check=_nothing, ask=_ask_flattened, lay=_flatten, back=_unflatten,
    ),
    "pages-as-tokens": Step(
        about="the pool viewed as pages of one token, tables expanded to token rows",
        check=_nothing, ask=_ask_tokens, lay=_view_tokens, back=_same,
    ),
    "ragged-tokens": Step(
        about="the pool viewed as pages of one token, the metadata of the kernel built: ends and token rows",
        check=_nothing, ask=_ask_ragged, lay=_build_ragged, back=_same,
    ),
}  # fmt: skip
