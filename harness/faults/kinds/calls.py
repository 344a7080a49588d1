"""Faults between calls, in memory the kernel does not own, and in what it claims (kinds G, L, M and S)."""

from __future__ import annotations

import math

import torch

from harness.case import Case
from harness.faults.record import Fault
from harness.faults.scene import Scene

Tensor = torch.Tensor
Stored = tuple[Tensor, Tensor, Tensor]
Pair = tuple[Tensor, Tensor]


def never_ran(scene: Scene, stored: Stored) -> Stored:
    """Launch nothing: a rejected launch whose error is dropped."""
    stored[2].fill_(False)
    return stored


def zeros(scene: Scene, stored: Stored) -> Stored:
    """Answer zeros."""
    return torch.zeros_like(stored[0]), stored[1], stored[2]


def reads_no_cache(scene: Scene, stored: Stored) -> Stored:
    """Answer the scaled query without reading the cache."""
    case = scene.inputs.case
    factor = case.softmax_scale * case.query_scale * case.cache_scale
    return scene.query[..., : case.latent] * factor, stored[1], stored[2]


def mean_of_values(scene: Scene, scores: Tensor) -> Tensor:
    """Weigh all tokens alike."""
    return torch.zeros_like(scores)


def scale_of_call_before(scene: Scene, value: Scene) -> Scene:
    """Use the softmax scale of the call before, as a graph or cache key without it does."""
    before = scene.memory.get("softmax_scale", scene.softmax_scale)
    scene.memory["softmax_scale"] = scene.softmax_scale
    scene.softmax_scale = before
    return value


def cache_scale_of_call_before(scene: Scene, value: Scene) -> Scene:
    """Use the cache scale of the call before."""
    before = scene.memory.get("cache_scale", scene.value_scale)
    scene.memory["cache_scale"] = scene.value_scale
    scene.key_scale = scene.value_scale = before
    return value


def lengths_of_call_before(scene: Scene, value: Scene) -> Scene:
    """Use the lengths of the call before where they are shorter, as captured metadata does."""
    key = ("lengths", len(scene.lengths))
    before = scene.memory.get(key, scene.lengths)
    scene.memory[key] = scene.lengths
    scene.lengths = [min(a, b) for a, b in zip(before, scene.lengths, strict=True)]
    return value


def split_of_call_before(scene: Scene, partials: Pair) -> Pair:
    """Merge the second split from the workspace that the call before left, if it fits."""
    out, lse = partials
    key = ("workspace", out.shape, scene.request)
    before = scene.memory.get(key)
    scene.memory[key] = (out[..., 1:2, :].clone(), lse[..., 1:2].clone())
    if before is None:
        return partials
    out, lse = out.clone(), lse.clone()
    out[..., 1:2, :], lse[..., 1:2] = before
    return out, lse


def query_of_call_before(scene: Scene, value: Scene) -> Scene:
    """Answer the query of the call before, if it has the same shape."""
    key = ("query", scene.query.shape)
    before = scene.memory.get(key, scene.query)
    scene.memory[key] = scene.query
    scene.query = before
    return value


def race(scene: Scene, values: Tensor) -> Tensor:
    """Once in twenty calls let the second half of the first tile miss its V."""
    scene.memory["calls"] = calls = scene.memory.get("calls", 0) + (scene.request == 0)
    if calls * 2654435761 % 2**32 // 2**27 % 20 != 7:  # Knuth's multiplicative hash: no period that callers could share
        return values
    values = values.clone()
    values[:, scene.variant.tile // 2 : scene.variant.tile] = 0.0
    return values


def unordered(scene: Scene, stored: Stored) -> Stored:
    """Vary the last bit of the output from call to call, as an unordered sum does."""
    scene.memory["calls"] = calls = scene.memory.get("calls", 0) + 1
    return stored[0] * (1 + (calls // 2 % 2) * 2.0**-8), stored[1], stored[2]


def writes_cache(scene: Scene, end: Scene) -> Scene:
    """Write the first live row of the first request back to the cache, rounded."""
    if scene.tokens.numel() and max(scene.lengths):
        cache, size = scene.inputs.cache, scene.page_size
        page = int(scene.entries[scene.table_starts[max(range(len(scene.lengths)), key=scene.lengths.__getitem__)]])
        row = cache[page, 0] if size else cache[page]
        row.view(torch.uint8)[0] ^= 1
    return end


def writes_past_output(scene: Scene, end: Scene) -> Scene:
    """Write one row past the output."""
    out = scene.inputs.out
    past = out.as_strided((1,), (1,), out.storage_offset() + out.numel())
    past.zero_()
    return end


def writes_table(scene: Scene, end: Scene) -> Scene:
    """Replace the unused entries of the block table by zero."""
    table = scene.inputs.block_table
    if table is not None:
        table.clamp_(min=0, max=max(0, scene.inputs.cache.shape[0] - 1))
    return end


def last_request_unwritten(scene: Scene, stored: Stored) -> Stored:
    """Undersize the grid by one request."""
    if stored[2].shape[0] > 1:
        stored[2][-1] = False
    return stored


def stray_nan(scene: Scene, stored: Stored) -> Stored:
    """Leave one NaN."""
    stored[0][-1, -1, -1, -1] = math.nan
    return stored


def first_request_for_all(scene: Scene, stored: Stored) -> Stored:
    """Answer every request with the first one's output."""
    return stored[0][:1].expand_as(stored[0]), stored[1][:1].expand_as(stored[1]), stored[2]


def _some(case: Case) -> bool:
    return max(case.lengths) > 0


def _two(case: Case) -> bool:
    return case.batch > 1 and _some(case)


FAULTS = (
    Fault(name="never-ran", kind="G", report="ROCm/aiter #3128", what="nothing is written", needs="any case",
          shows=lambda case: True, acts={"store": never_ran}),
    Fault(name="zeros", kind="G", report="vllm-project/vllm #42956", what="the output is zero", needs="any tokens",
          acts={"store": zeros}),
    Fault(name="reads-no-cache", kind="G", report="GPU MODE mixed-mla (peers)", what="the scaled query is returned",
          needs="any case", shows=lambda case: True, acts={"store": reads_no_cache}),
    Fault(name="mean-of-values", kind="G", report="MSLK recipe (peers)", what="all tokens weigh the same",
          needs="two tokens",
          shows=lambda case: max(case.lengths) > (0 if case.lse else 1) and case.content != "zero-query",
          acts={"scores": mean_of_values}),
    Fault(name="last-request-unwritten", kind="L", report="ROCm/aiter #3760", what="the grid is one request short",
          needs="two requests", shows=lambda case: case.batch > 1, acts={"store": last_request_unwritten}),
    Fault(name="first-request-for-all", kind="L", report="vllm-project/vllm #38719",
          what="every request gets the first one's answer", needs="two requests", shows=_two,
          acts={"store": first_request_for_all}),
    Fault(name="one-nan", kind="S", report="ROCm/aiter #3682", what="one element is NaN", needs="any case",
          shows=lambda case: True, acts={"store": stray_nan}),
    Fault(name="stale-softmax-scale", kind="M", report="flashinfer-ai/flashinfer #4014",
          what="the softmax scale of the call before is used", needs="a call before with another softmax scale",
          history=True, acts={"arguments": scale_of_call_before}),
    Fault(name="stale-cache-scale", kind="M", report="vllm-project/vllm #35175",
          what="the cache scale of the call before is used", needs="a call before with another cache scale", history=True,
          acts={"arguments": cache_scale_of_call_before}),
    Fault(name="stale-lengths", kind="M", report="vllm-project/vllm #36611",
          what="lengths are those of the call before where shorter", needs="a call before with as many requests",
          history=True, acts={"arguments": lengths_of_call_before}),
    Fault(name="stale-query", kind="M", report="sgl-project/sglang #19362", what="the query is that of the call before",
          needs="a call before of the same shape", history=True, acts={"arguments": query_of_call_before}),
    Fault(name="stale-workspace", kind="L", report="vllm-project/vllm #25520",
          what="the second split is merged from the call before", needs="a call before of the same shape", history=True,
          acts={"partials": split_of_call_before}),
    Fault(name="race-one-in-twenty", kind="S", report="ROCm/aiter #4638", what="one call in twenty misses half a tile of V",
          needs="many calls", history=True, acts={"values": race}),
    Fault(name="not-bit-stable", kind="S", report="ROCm/aiter #4638", what="the last bit varies from call to call",
          needs="two calls", history=True, acts={"store": unordered}),
    Fault(name="writes-cache", kind="L", report="sgl-project/sglang #39948", what="a bit of the cache is changed",
          needs="any tokens", acts={"end": writes_cache}),
    Fault(name="writes-past-output", kind="L", report="NVIDIA/TensorRT-LLM #12089",
          what="the output is written past its end", needs="any case", shows=lambda case: True,
          acts={"end": writes_past_output}),
    Fault(name="writes-table", kind="D", report="lightseekorg/tokenspeed #709", what="unused table entries are overwritten",
          needs="a padded table with unused entries",
          shows=lambda case: case.table == "padded" and (case.table_padding > 0 or len(set(case.lengths)) > 1),
          acts={"end": writes_table}),
)  # fmt: skip
