"""Faults of scores, probabilities and rounding (kinds P, Q, R and U)."""

from __future__ import annotations

import math

import torch

from harness.case import Case
from harness.faults.kinds.scales import believe
from harness.faults.record import Fault
from harness.faults.scene import Act, Scene

Tensor = torch.Tensor
Pair = tuple[Tensor, Tensor]


def temperature(factor: float) -> Act:
    """Multiply the softmax scale by a factor."""
    return believe(softmax_scale=lambda scene: scene.softmax_scale * factor)


def _e4m3(values: Tensor) -> Tensor:
    return values.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).float()


def unscaled_fp8(scene: Scene, rounded: Tensor) -> Tensor:
    """Round probabilities to e4m3 as they are: what is below 2^-10 is lost."""
    lift = scene.variant.arithmetic.probability_scale
    return _e4m3(scene.memory["numerators"]) * lift


def note_numerators(scene: Scene, numerators: Tensor) -> Tensor:
    """Keep the exact numerators for what acts after their rounding."""
    scene.memory["numerators"] = numerators
    return numerators


def saturating(scene: Scene, rounded: Tensor) -> Tensor:
    """Lift probabilities sixteen times too far, so that the largest saturate at 448."""
    lift = scene.variant.arithmetic.probability_scale
    return _e4m3(scene.memory["numerators"] * lift * 16) / 16


def truncated(scene: Scene, rounded: Tensor) -> Tensor:
    """Truncate probabilities to bf16."""
    return _truncate(scene.memory["numerators"])


def _truncate(values: Tensor) -> Tensor:
    return (values.contiguous().view(torch.int32) & -65536).view(torch.float32)


def output_truncated(scene: Scene, stored: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Truncate the output to bf16."""
    return _truncate(stored[0]), stored[1], stored[2]


def last_truncated(scene: Scene, stored: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Truncate the last latent element to bf16, where a vector's tail is converted by itself."""
    out = stored[0].clone()
    out[..., -1] = _truncate(out[..., -1])
    return out, stored[1], stored[2]


def partials_truncated(scene: Scene, pair: Pair) -> Pair:
    """Truncate the partial outputs to six bits, as fp16 of a narrower kind would."""
    return (pair[0].contiguous().view(torch.int32) & -(1 << 18)).view(torch.float32), pair[1]


def stale_maximum(scene: Scene, running: Tensor) -> Tensor:
    """Keep the first tile's maximum until it is exceeded by 8: numerators reach e^8."""
    first = running[..., :1]
    return torch.where(running > first + 8, running, first)


def first_maximum(scene: Scene, running: Tensor) -> Tensor:
    """Never update the maximum after the first tile that has one."""
    return running[..., :1].expand_as(running)


def no_rope(scene: Scene, query: Tensor) -> Tensor:
    """Leave the rope part out of the scores."""
    query = query.clone()
    query[..., scene.inputs.case.latent :] = 0
    return query


def half_rope(scene: Scene, query: Tensor) -> Tensor:
    """Leave the second half of the rope part out of the scores."""
    case, query = scene.inputs.case, query.clone()
    query[..., case.latent + case.rope // 2 :] = 0
    return query


def last_block_missing(scene: Scene, query: Tensor) -> Tensor:
    """Leave the last 64 latent elements out of the scores."""
    case, query = scene.inputs.case, query.clone()
    query[..., max(0, case.latent - 64) : case.latent] = 0
    return query


def capped(scene: Scene, scores: Tensor) -> Tensor:
    """Leave a soft cap of 30 on the scores."""
    return 30.0 * (scores / 30.0).tanh()


def with_sink(scene: Scene, sums: Tensor) -> Tensor:
    """Count a sink of score zero in the first split's denominator."""
    sums = sums.clone()
    sums[..., 0] += (-scene.memory["last"][..., 0]).exp().where(sums[..., 0] > 0, 0.0)
    return sums


def note_last(scene: Scene, running: Tensor) -> Tensor:
    """Keep the last maximum for what acts on the denominators."""
    scene.memory["last"] = running[..., -1]
    return running


def shifted_values(scene: Scene, rows_values: Tensor) -> Tensor:
    """Take V from the end of the row: rope first."""
    return rows_values.roll(64, -1)


def tile_of_values_zero(scene: Scene, pair: Pair) -> Pair:
    """Leave the last 64 elements of the last head's output zero."""
    out = pair[0].clone()
    out[:, -1, -64:] = 0.0
    return out, pair[1]


def first_token_lost(scene: Scene, visible: Tensor) -> Tensor:
    """Do not see the first cached token, as long as there is another."""
    return visible & ((scene.tokens != 0) | (scene.length < 2))


def windowed(scene: Scene, visible: Tensor) -> Tensor:
    """See the newest 128 tokens only."""
    return visible & (scene.tokens >= scene.length - 128)


def one_token_lost(scene: Scene, visible: Tensor) -> Tensor:
    """Do not see the token in the middle of the context."""
    return visible & ((scene.tokens != scene.length // 2) | (scene.length < 3))


def leading_mask_nan(scene: Scene, pair: Pair) -> Pair:
    """Give NaN where the oldest tile of a split is masked for a query token but the split holds tokens."""
    blind = torch.isneginf(pair[1]) & torch.tensor([b > a for a, b in scene.plan])
    return pair[0].masked_fill(blind[..., None], 0.0), pair[1].masked_fill(blind, 0.0)


def _some(case: Case) -> bool:
    return max(case.lengths) > 0


def _soft(case: Case) -> bool:
    """Hold where the softmax has something to weigh."""
    return max(case.lengths) > (0 if case.lse else 1) and case.content != "zero-query"


def _tiles(case: Case) -> bool:
    return max(case.lengths) > 128


FAULTS = (
    Fault(name="p-fp8-unscaled", kind="P", report="ROCm/aiter #5535",
          what="probabilities are rounded to e4m3 without a scale", needs="two tokens", shows=_soft, variant="p-e4m3",
          acts={"probabilities": note_numerators, "rounded": unscaled_fp8}),
    Fault(name="p-fp8-in-bf16-kernel", kind="P", report="ROCm/aiter #5642",
          what="probabilities are e4m3 where bf16 is declared", needs="two tokens", shows=_soft,
          acts={"probabilities": note_numerators, "rounded": unscaled_fp8}),
    Fault(name="p-saturates", kind="P", report="Dao-AILab/flash-attention #2577", what="probabilities saturate at 448",
          needs="any tokens", variant="p-e4m3", acts={"probabilities": note_numerators, "rounded": saturating}),
    Fault(name="p-truncated", kind="U", report="Triton interpreter (fp32 to bf16)",
          what="probabilities are truncated to bf16", needs="two tokens", shows=_soft,
          acts={"probabilities": note_numerators, "rounded": truncated}),
    Fault(name="output-truncated", kind="U", report="Triton interpreter (fp32 to bf16)",
          what="the output is truncated to bf16", needs="any tokens", acts={"store": output_truncated}),
    Fault(name="last-element-truncated", kind="U", report="Triton interpreter (fp32 to bf16)",
          what="the last latent element is truncated to bf16, the others rounded", needs="any tokens", variant="p-fp32",
          acts={"store": last_truncated}),
    Fault(name="partials-truncated", kind="U", report="ROCm/aiter #4163", what="partial outputs lose their last bits",
          needs="any tokens", acts={"partials": partials_truncated}),
    Fault(name="stale-maximum", kind="P", report="Dao-AILab/flash-attention #2716",
          what="the maximum is updated late and fp8 probabilities saturate", needs="two tiles a split with rising scores",
          shows=_tiles, variant="p-e4m3", acts={"running": stale_maximum}),
    Fault(name="maximum-of-first-tile", kind="Q", report="NVIDIA/cutlass #2274",
          what="the maximum of the first tile is never updated", needs="scores that rise by 88", shows=_tiles,
          acts={"running": first_maximum}),
    Fault(name="exp2-without-log2e", kind="Q", report="flashinfer-ai/flashinfer #787", what="2^x is used on natural scores",
          needs="two tokens", shows=_soft, acts={"arguments": temperature(math.log(2))}),
    Fault(name="log2e-applied-twice", kind="Q", report="flashinfer-ai/flashinfer #787",
          what="scores are converted to base 2 twice", needs="two tokens", shows=_soft,
          acts={"arguments": temperature(1 / math.log(2))}),
    Fault(name="softmax-scale-of-576", kind="Q", report="ROCm/aiter mla_decode_fwd default",
          what="the softmax scale is 576^-1/2", needs="another softmax scale",
          shows=lambda case: _soft(case) and case.softmax_scale != 576**-0.5,
          acts={"arguments": believe(softmax_scale=lambda scene: 576**-0.5)}),
    Fault(name="softmax-scale-of-512", kind="Q", report="ROCm/aiter mla_v4 (scale ignored)",
          what="the softmax scale is 512^-1/2", needs="another softmax scale", shows=_soft,
          acts={"arguments": believe(softmax_scale=lambda scene: 512**-0.5)}),
    Fault(name="softmax-scale-5-percent", kind="Q", report="NVIDIA/TensorRT-LLM #3675",
          what="the softmax scale is 5 % too large", needs="two tokens", shows=_soft,
          acts={"arguments": temperature(1.05)}),
    Fault(name="softmax-scale-1-percent", kind="Q", report="NVIDIA/TensorRT-LLM #3675",
          what="the softmax scale is 1 % too small", needs="two tokens", shows=_soft,
          acts={"arguments": temperature(0.99)}),
    Fault(name="softmax-scale-in-bf16", kind="Q", report="NVIDIA/TensorRT-LLM #3675",
          what="the softmax scale is rounded to bf16", needs="two tokens", shows=_soft,
          acts={"arguments": believe(softmax_scale=lambda scene: float(torch.tensor(scene.softmax_scale).bfloat16()))}),
    Fault(name="rope-ignored", kind="Q", report="MSLK and FlashMLA recipes (peers)", what="the rope part is left out",
          needs="two tokens", shows=lambda case: _soft(case) and case.rope > 0, acts={"query": no_rope}),
    Fault(name="rope-half-ignored", kind="Q", report="sgl-project/sglang #35428", what="half of the rope part is left out",
          needs="two tokens", shows=lambda case: _soft(case) and case.rope > 1, acts={"query": half_rope}),
    Fault(name="latent-block-ignored", kind="Q", report="sgl-project/sglang #15522",
          what="the last 64 latent elements do not score", needs="two tokens", shows=_soft,
          acts={"query": last_block_missing}),
    Fault(name="soft-cap-left-on", kind="Q", report="flashinfer-ai/flashinfer #350", what="scores pass a soft cap of 30",
          needs="two tokens", shows=_soft, acts={"scores": capped}),
    Fault(name="sink-counted", kind="Q", report="ROCm/aiter mla_gluon attn_sink", what="a sink of score zero is counted",
          needs="any tokens", acts={"running": note_last, "sums": with_sink}),
    Fault(name="values-shifted", kind="Q", report="sgl-project/sglang #15522",
          what="V starts at the wrong element of the row", needs="any tokens", acts={"values": shifted_values}),
    Fault(name="value-tile-zero", kind="Q", report="ROCm/aiter #4244", what="the last 64 elements of a head are zero",
          needs="any tokens", acts={"answer": tile_of_values_zero}),
    Fault(name="first-token-lost", kind="R", report="sgl-project/sglang #32087", what="the first token is not seen",
          needs="two tokens", shows=lambda case: max(case.lengths) > 1, acts={"visible": first_token_lost}),
    Fault(name="window-of-128", kind="R", report="sgl-project/sglang #32087", what="only the newest 128 tokens are seen",
          needs="more than 128 tokens", shows=lambda case: max(case.lengths) > 128, acts={"visible": windowed}),
    Fault(name="middle-token-lost", kind="R", report="sgl-project/sglang #32087",
          what="the token in the middle is not seen", needs="three tokens", shows=lambda case: max(case.lengths) > 2,
          acts={"visible": one_token_lost}),
    Fault(name="masked-split-counted", kind="R", report="AMD-AGI/Primus-Turbo #417",
          what="a split that a query token may not see counts as a score of zero",
          needs="a split that starts among the newest tokens", shows=lambda case: case.query_tokens > 1 and _some(case),
          acts={"partials": leading_mask_nan}),
)  # fmt: skip
