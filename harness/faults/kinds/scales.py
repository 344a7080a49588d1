"""Faults of scales and formats (kinds N and O)."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from harness.case import Case
from harness.faults.record import Fault
from harness.faults.scene import Act, Scene

Tensor = torch.Tensor


def believe(**changes: Callable[[Scene], float]) -> Act:
    """Change what the kernel believes a scale to be."""

    def act(scene: Scene, value: Scene) -> Scene:
        for name, believed in [(name, change(scene)) for name, change in changes.items()]:
            setattr(scene, name, believed)
        return value

    return act


def _one(_: Scene) -> float:
    return 1.0


def _power_of_two(value: float) -> float:
    return 2.0 ** math.floor(math.log2(value))


def _bf16(value: float) -> float:
    return float(torch.tensor(value).bfloat16())


def both(change: Callable[[float], float]) -> Act:
    """Change the cache scale wherever it acts."""
    return believe(key_scale=lambda scene: change(scene.key_scale), value_scale=lambda scene: change(scene.value_scale))


def exchanged(scene: Scene, value: Scene) -> Scene:
    """Exchange the query scale and the cache scale."""
    scene.query_scale, scene.key_scale, scene.value_scale = scene.key_scale, scene.query_scale, scene.query_scale
    return value


_FLAVOURS = {torch.float8_e4m3fn: torch.float8_e4m3fnuz, torch.float8_e4m3fnuz: torch.float8_e4m3fn}
_FIVE_TWO = {
    torch.float8_e4m3fn: torch.float8_e5m2,
    torch.float8_e4m3fnuz: torch.float8_e5m2,
    torch.float8_e5m2: torch.float8_e4m3fn,
}


def read_as(names: dict[torch.dtype, torch.dtype]) -> Act:
    """Read cache codes of one format as another of the same size."""

    def act(scene: Scene, value: Scene) -> Scene:
        scene.cache_dtype = names.get(scene.cache_dtype, scene.cache_dtype)
        return value

    return act


def subnormals_flushed(scene: Scene, rows: Tensor) -> Tensor:
    """Flush subnormal fp8 values to zero."""
    if scene.cache_dtype.itemsize > 1:
        return rows
    return rows.masked_fill(rows.abs() < float(torch.finfo(scene.cache_dtype).smallest_normal), 0.0)


def largest_is_nan(scene: Scene, rows: Tensor) -> Tensor:
    """Take the largest exponent of e4m3 for infinity and NaN, as in IEEE formats."""
    if scene.cache_dtype.itemsize > 1:
        return rows
    return rows.masked_fill(rows.abs() >= 256.0, math.nan)


def clamped_to_240(scene: Scene, rows: Tensor) -> Tensor:
    """Cap fp8 values at 240, the largest of the other e4m3."""
    return rows.clamp(-240.0, 240.0) if scene.cache_dtype.itemsize == 1 else rows


def rope_scaled_alone(scene: Scene, query: Tensor) -> Tensor:
    """Apply the cache scale to the latent part of the scores only."""
    latent = scene.inputs.case.latent
    query = query.clone()
    query[..., latent:] /= scene.key_scale
    return query


def value_rounded(scene: Scene, values: Tensor) -> Tensor:
    """Round V to e4m3 again."""
    return values.clamp(-448, 448).to(torch.float8_e4m3fn).float()


def query_to_e4m3(scene: Scene, query: Tensor) -> Tensor:
    """Cast the query to e4m3 without a scale of its own."""
    return query.clamp(-448, 448).to(torch.float8_e4m3fn).float()


def _some(case: Case) -> bool:
    return max(case.lengths) > 0


def _cache_scale(case: Case) -> bool:
    return case.cache_scale != 1.0 and _some(case)


def _query_scale(case: Case) -> bool:
    return case.query_scale != 1.0 and _some(case)


def _fp8(case: Case) -> bool:
    return case.cache_format in ("e4m3fn", "e4m3fnuz", "e5m2") and _some(case)


FAULTS = (
    Fault(name="value-scale-dropped", kind="N", report="vllm-project/vllm #42580",
          what="the cache scale is not applied to V", needs="a cache scale that is not one", shows=_cache_scale,
          acts={"arguments": believe(value_scale=_one)}),
    Fault(name="value-scale-off", kind="N", report="none: the smallest systematic error that is asked for (docs/why.md)",
          what="V's scale is half a percent too large", needs="a token", shows=_some,
          acts={"arguments": believe(value_scale=lambda scene: scene.value_scale * 1.005)}),
    Fault(name="key-scale-dropped", kind="N", report="vllm-project/vllm #37054", what="the cache scale is not applied to K",
          needs="a cache scale that is not one", shows=_cache_scale, acts={"arguments": believe(key_scale=_one)}),
    Fault(name="cache-scale-dropped", kind="N", report="NVIDIA/TensorRT-LLM #16916",
          what="the cache scale is not applied at all", needs="a cache scale that is not one", shows=_cache_scale,
          acts={"arguments": believe(key_scale=_one, value_scale=_one)}),
    Fault(name="value-scale-twice", kind="N", report="vllm-project/vllm #37054",
          what="the cache scale is applied to V twice", needs="a cache scale that is not one", shows=_cache_scale,
          acts={"arguments": believe(value_scale=lambda scene: scene.value_scale**2)}),
    Fault(name="key-scale-twice", kind="N", report="vllm-project/vllm #37054", what="the cache scale is applied to K twice",
          needs="a cache scale that is not one", shows=_cache_scale,
          acts={"arguments": believe(key_scale=lambda scene: scene.key_scale**2)}),
    Fault(name="query-scale-dropped", kind="N", report="sgl-project/sglang #28144", what="the query scale is not applied",
          needs="a query scale that is not one", shows=_query_scale, acts={"arguments": believe(query_scale=_one)}),
    Fault(name="query-scale-twice", kind="N", report="sgl-project/sglang #28144", what="the query scale is applied twice",
          needs="a query scale that is not one", shows=_query_scale,
          acts={"arguments": believe(query_scale=lambda scene: scene.query_scale**2)}),
    Fault(name="scales-exchanged", kind="N", report="flashinfer-ai/flashinfer #1254",
          what="query and cache scale are exchanged", needs="scales that differ",
          shows=lambda case: case.query_scale != case.cache_scale and _some(case),
          acts={"arguments": exchanged}),
    Fault(name="query-scale-on-values", kind="N", report="flashinfer-ai/flashinfer #1254",
          what="V gets the query scale too", needs="a query scale that is not one", shows=_query_scale,
          acts={"arguments": believe(value_scale=lambda scene: scene.value_scale * scene.query_scale)}),
    Fault(name="scale-as-e8m0", kind="O", report="deepseek-ai/FlashMLA #184",
          what="the cache scale is cut to a power of two", needs="a cache scale that is no power of two",
          shows=lambda case: _some(case) and _power_of_two(case.cache_scale) != case.cache_scale,
          acts={"arguments": both(_power_of_two)}),
    Fault(name="scale-as-bf16", kind="O", report="vllm-project/vllm #49435", what="the cache scale is rounded to bf16",
          needs="a cache scale that bf16 cannot hold",
          shows=lambda case: _some(case) and _bf16(case.cache_scale) != case.cache_scale,
          acts={"arguments": both(_bf16)}),
    Fault(name="rope-not-scaled", kind="N", report="vllm-project/vllm #42956",
          what="the cache scale is not applied to the rope part", needs="a cache scale that is not one",
          shows=lambda case: _cache_scale(case) and case.rope > 0, acts={"query": rope_scaled_alone}),
    Fault(name="query-cast-to-e4m3", kind="N", report="sgl-project/sglang #28144",
          what="the query is cast to e4m3 without a scale", needs="a query in a wider format",
          shows=lambda case: _some(case) and case.query_format not in ("e4m3fn", "e4m3fnuz"),
          acts={"query": query_to_e4m3}),
    Fault(name="e4m3-flavours-exchanged", kind="O", report="vllm-project/vllm #45562",
          what="e4m3fn is read as e4m3fnuz or the other way round", needs="an e4m3 cache",
          shows=lambda case: _some(case) and case.cache_format in ("e4m3fn", "e4m3fnuz"),
          acts={"arguments": read_as(_FLAVOURS)}),
    Fault(name="e4m3-read-as-e5m2", kind="O", report="vllm-project/vllm #45562", what="e4m3 is read as e5m2",
          needs="an fp8 cache", shows=_fp8,
          acts={"arguments": read_as(_FIVE_TWO)}),
    Fault(name="fp16-read-as-bf16", kind="O", report="vllm-project/vllm #45562",
          what="bf16 is read as fp16 or the other way round", needs="a 16-bit cache",
          shows=lambda case: _some(case) and case.cache_format in ("bf16", "fp16"),
          acts={"arguments": read_as({torch.bfloat16: torch.float16, torch.float16: torch.bfloat16})}),
    Fault(name="fp8-subnormals-flushed", kind="O", report="ROCm/aiter #5642", what="subnormal fp8 values are zero",
          needs="an fp8 cache with subnormal codes", shows=_fp8, acts={"rows": subnormals_flushed}),
    Fault(name="fp8-largest-as-nan", kind="O", report="kekzl/imp #33", what="the top exponent of e4m3 is taken for NaN",
          needs="an fp8 cache with codes of 256 and more", shows=_fp8, acts={"rows": largest_is_nan}),
    Fault(name="fp8-clamped-to-240", kind="O", report="vllm-project/vllm #42956", what="fp8 values saturate at 240",
          needs="an fp8 cache with codes above 240", shows=_fp8, acts={"rows": clamped_to_240}),
    Fault(name="values-requantised", kind="O", report="Dao-AILab/flash-attention (fp8 paths)", what="V is rounded to e4m3",
          needs="a cache that is not e4m3", shows=lambda case: _some(case) and case.cache_format != "e4m3fn",
          acts={"values": value_rounded}),
)  # fmt: skip
