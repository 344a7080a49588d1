"""Faults of splits, tiles and their pipeline (kinds H, T and V)."""

from __future__ import annotations

import math

import torch

from harness.case import Case
from harness.faults.record import Fault
from harness.faults.scene import IllegalAccess, Scene
from harness.faults.variant import BASE, VARIANTS

Tensor = torch.Tensor
Plan = list[tuple[int, int]]
Pair = tuple[Tensor, Tensor]


def drop_last_split(scene: Scene, weights: Tensor) -> Tensor:
    """Leave the last split that holds tokens out of the merge, if there are two."""
    used = [k for k, (a, b) in enumerate(scene.plan) if b > a]
    if len(used) > 1:
        weights = weights.clone()
        weights[..., used[-1]] = 0.0
    return weights


def drop_second_split(scene: Scene, weights: Tensor) -> Tensor:
    """Leave the second split out of the merge."""
    weights = weights.clone()
    weights[..., 1:2] = 0.0
    return weights


def double_first_split(scene: Scene, weights: Tensor) -> Tensor:
    """Count the first split twice."""
    weights = weights.clone()
    weights[..., 0] *= 2
    return weights


def merge_without_lse(scene: Scene, weights: Tensor) -> Tensor:
    """Average the splits that hold tokens."""
    return (weights > 0).float()


def merge_by_tokens(scene: Scene, weights: Tensor) -> Tensor:
    """Weight the splits by how many tokens they hold."""
    counts = torch.tensor([float(b - a) for a, b in scene.plan])
    return counts.expand_as(weights) * (weights > 0)


def empty_split_counts(scene: Scene, pair: Pair) -> Pair:
    """Give a split without tokens the lse of a score of zero."""
    out, lse = pair
    empty = torch.tensor([b <= a for a, b in scene.plan])
    return out, lse.masked_fill(empty, 0.0)


def masked_split_is_nan(scene: Scene, pair: Pair) -> Pair:
    """Divide by the empty sum of a split that holds tokens but none that the query token may see."""
    out, lse = pair
    holds = torch.tensor([b > a for a, b in scene.plan])
    blind = torch.isneginf(lse) & holds
    return out.masked_fill(blind[..., None], math.nan), lse


def workspace_not_cleared(scene: Scene, pair: Pair) -> Pair:
    """Merge the splits without tokens from a workspace that they did not write, with what a split before left there."""
    out, lse = pair[0].clone(), pair[1].clone()
    for k, (a, b) in enumerate(scene.plan):
        if b <= a:
            out[..., k, :], lse[..., k] = out[..., 0, :].roll(1, -1), lse[..., 0]
    return out, lse


def merge_overflows(scene: Scene, pair: Pair) -> Pair:
    """Take the exponential of each lse without the common maximum."""
    out, lse = pair
    weights = lse.exp()
    total = weights.sum(-1, keepdim=True)
    if bool((total.isfinite() & (total > 0) | torch.isneginf(lse).all(-1, keepdim=True)).all()):
        return pair
    joint = (weights[..., None] * out).sum(-2, keepdim=True) / total[..., None]
    return joint.where(lse[..., :1, None] > -math.inf, 0.0), total.log()


def lse_in_bf16(scene: Scene, pair: Pair) -> Pair:
    """Hand the splits' lse over in bf16."""
    return pair[0], pair[1].bfloat16().float()


def partials_in_e4m3(scene: Scene, pair: Pair) -> Pair:
    """Hand the splits' outputs over in e4m3."""
    return pair[0].clamp(-448, 448).to(torch.float8_e4m3fn).float(), pair[1]


def partials_in_bf16(scene: Scene, pair: Pair) -> Pair:
    """Hand the splits' outputs over in bf16 though fp32 is declared."""
    return pair[0].bfloat16().float(), pair[1]


def edge_token_dropped(scene: Scene, plan: Plan) -> Plan:
    """Start every split after the first one token late."""
    return [(min(a + 1, b) if a else a, b) for a, b in plan]


def edge_token_doubled(scene: Scene, plan: Plan) -> Plan:
    """Start every split after the first one token early."""
    return [(a - 1 if a and b > a else a, b) for a, b in plan]


def sixteen_splits(scene: Scene, plan: Plan) -> Plan:
    """Plan for at most four splits though more are needed."""
    return plan[:4]


def remainder_dropped(scene: Scene, plan: Plan) -> Plan:
    """Round the tokens of a split down: the remainder belongs to none."""
    stop = scene.length // len(plan) * len(plan)
    return [(min(a, stop), min(b, stop)) for a, b in plan]


def short_split_reads_stale(scene: Scene, rescale: Tensor) -> Tensor:
    """Assume three tiles a split: where there are fewer, the first tile is counted again."""
    rescale = rescale.clone()
    for k, (a, b) in enumerate(scene.plan):
        if 0 < b - a <= 2 * scene.variant.tile:
            rescale[..., k, 0] *= 2
    return rescale


def three_tiles_fault(scene: Scene, plan: Plan) -> Plan:
    """Fault where a split needs three tiles or more."""
    if any(b - a > 2 * scene.variant.tile for a, b in plan):
        raise IllegalAccess("the third stage of the pipeline reads past local memory")
    return plan


def buffer_reused(scene: Scene, values: Tensor) -> Tensor:
    """Overwrite the V buffer of a split's third tile with the first one's before it is used."""
    tile = scene.variant.tile
    if values.shape[1] <= 2 * tile:
        return values
    values = values.clone()
    values[:, 2 * tile : 3 * tile] = values[:, :tile]
    return values


def k_buffer_reused(scene: Scene, rows: Tensor) -> Tensor:
    """Multiply the second tile of a split with the first one's K and V."""
    tile = scene.variant.tile
    if rows.shape[1] <= tile:
        return rows
    rows = rows.clone()
    rows[:, tile : 2 * tile] = rows[:, :tile]
    return rows


def rescale_dropped(scene: Scene, rescale: Tensor) -> Tensor:
    """Do not rescale what was accumulated when the maximum rises."""
    return (rescale > 0).float()


def rescale_of_output_dropped(scene: Scene, sums: Tensor) -> Tensor:
    """Rescale the output but not the denominator when the maximum rises."""
    return torch.where(sums > 0, scene.memory["numerators"], sums)


def note_numerators(scene: Scene, numerators: Tensor) -> Tensor:
    """Keep the sums of unscaled numerators for what acts on the denominators."""
    scene.memory["numerators"] = numerators.sum(-1)
    return numerators


def chunk_past_split(scene: Scene, plan: Plan) -> Plan:
    """Let a split run on to the end of a tile of 48, into the next split's tokens."""
    return [(a, min(a + -(-(b - a) // 48) * 48, scene.length)) for a, b in plan]


def single_split_unwritten(scene: Scene, stored: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Write only rows that more than one split has answered: the direct path stores through a null pointer."""
    out, lse, written = stored
    for request, length in enumerate(scene.lengths):
        written[request] = length > scene.variant.tile
    return out, lse, written


def _splits(case: Case) -> bool:
    return max(case.lengths) > VARIANTS[BASE].tile


def _plans(case: Case) -> list[Plan]:
    return [VARIANTS[BASE].plan(n, heads=case.heads, query_tokens=case.query_tokens, batch=case.batch) for n in case.lengths]


def _empty_split(case: Case) -> bool:
    return any(a >= b for plan in _plans(case) for a, b in plan)


def _tiles_a_split(case: Case) -> int:
    variant = VARIANTS[BASE]
    return max(-(-(b - a) // variant.tile) for plan in _plans(case) for a, b in plan)


FAULTS = (
    Fault(name="last-split-dropped", kind="H", report="ROCm/aiter #2319", what="the last split is not merged",
          needs="two splits with tokens", shows=_splits, acts={"weights": drop_last_split}),
    Fault(name="second-split-dropped", kind="H", report="vllm-project/vllm #38615", what="the second split is not merged",
          needs="two splits with tokens", shows=_splits, acts={"weights": drop_second_split}),
    Fault(name="first-split-doubled", kind="H", report="InternLM/lmdeploy #4696", what="the first split counts twice",
          needs="two splits with tokens", acts={"weights": double_first_split}),
    Fault(name="merge-without-lse", kind="H", report="lightseekorg/tokenspeed #1185", what="splits are averaged",
          needs="two splits with tokens", shows=_splits, acts={"weights": merge_without_lse}),
    Fault(name="merge-by-tokens", kind="H", report="sgl-project/sglang #2479", what="splits are weighted by their tokens",
          needs="two splits with tokens", acts={"weights": merge_by_tokens}, twins=("merge-without-lse",)),
    Fault(name="empty-split-counted", kind="H", report="ROCm/aiter #3641",
          what="a split without tokens counts as a score of zero", needs="fewer tiles than splits", shows=_empty_split,
          acts={"partials": empty_split_counts}),
    Fault(name="masked-split-nan", kind="H", report="ROCm/aiter #4711",
          what="a split that a query token may not see is NaN", needs="a split that starts among the newest tokens",
          shows=lambda case: case.query_tokens > 1 and max(case.lengths) > 0, acts={"partials": masked_split_is_nan}),
    Fault(name="workspace-not-cleared", kind="H", report="ROCm/aiter #4117",
          what="splits without tokens are merged from a stale workspace", needs="fewer tiles than splits",
          shows=_empty_split, acts={"partials": workspace_not_cleared}),
    Fault(name="merge-overflows", kind="H", report="NVIDIA/cutlass #2274",
          what="lse are exponentiated without their maximum", needs="scores past 88", acts={"partials": merge_overflows}),
    Fault(name="split-lse-bf16", kind="H", report="ROCm/aiter mla_decode_rope (bf16 attn_logits)",
          what="the splits' lse are rounded to bf16", needs="any tokens", acts={"partials": lse_in_bf16}),
    Fault(name="partials-e4m3", kind="H", report="mlc-ai/TIRx-kernels #207", what="partial outputs are exchanged in e4m3",
          needs="any tokens", acts={"partials": partials_in_e4m3}),
    Fault(name="partials-rounded-twice", kind="H", report="local-inference-lab/b12x #292",
          what="partial outputs are bf16 where fp32 is declared", needs="two splits with tokens", variant="fp32-partials",
          acts={"partials": partials_in_bf16}),
    Fault(name="split-edge-dropped", kind="H", report="vllm-project/vllm #31282",
          what="splits after the first start one token late", needs="two splits with tokens", shows=_splits,
          acts={"plan": edge_token_dropped}),
    Fault(name="split-edge-doubled", kind="H", report="vllm-project/vllm #31282",
          what="splits after the first start one token early", needs="two splits with tokens", shows=_splits,
          acts={"plan": edge_token_doubled}),
    Fault(name="splits-past-four-dropped", kind="H", report="ROCm/aiter #4350",
          what="splits past the fourth are not merged", needs="more than four splits",
          shows=lambda case: max(case.lengths) > 64, variant="splits-16", acts={"plan": sixteen_splits}),
    Fault(name="split-remainder-dropped", kind="H", report="flashinfer-ai/flashinfer #1614",
          what="tokens past an even share belong to no split", needs="a length that is no multiple of the splits",
          shows=lambda case: any(n % 4 for n in case.lengths), acts={"plan": remainder_dropped}),
    Fault(name="single-split-unwritten", kind="G", report="ROCm/aiter #2983",
          what="requests of a single split are not written", needs="a request of one tile",
          shows=lambda case: min(case.lengths) <= 32, acts={"store": single_split_unwritten}),
    Fault(name="short-split-doubled", kind="H", report="sgl-project/sglang #34580",
          what="splits of fewer than three tiles count their first twice", needs="two tiles in a split, or two splits",
          acts={"rescale": short_split_reads_stale}),
    Fault(name="three-tiles-fault", kind="T", report="ROCm/aiter #5119", what="a split of three tiles faults",
          needs="three tiles a split", shows=lambda case: _tiles_a_split(case) > 2, acts={"plan": three_tiles_fault}),
    Fault(name="value-buffer-reused", kind="T", report="gfx950 pipelines of three stages (ROCm/aiter #5119)",
          what="the third tile of a split meets the first one's V", needs="three tiles a split",
          shows=lambda case: _tiles_a_split(case) > 2, acts={"values": buffer_reused}),
    Fault(name="tile-buffer-reused", kind="S", report="ROCm/aiter #5402",
          what="the second tile of a split repeats the first", needs="two tiles a split",
          shows=lambda case: _tiles_a_split(case) > 1, acts={"rows": k_buffer_reused}),
    Fault(name="rescale-dropped", kind="P", report="Dao-AILab/flash-attention #2716",
          what="a rising maximum does not rescale what was accumulated", needs="two tiles a split",
          shows=lambda case: _tiles_a_split(case) > 1, acts={"rescale": rescale_dropped}),
    Fault(name="denominator-not-rescaled", kind="P", report="Dao-AILab/flash-attention #2577",
          what="a rising maximum rescales the output only", needs="two tiles a split",
          shows=lambda case: _tiles_a_split(case) > 1,
          acts={"probabilities": note_numerators, "sums": rescale_of_output_dropped}),
    Fault(name="chunk-past-split", kind="V", report="flashinfer-ai/flashinfer #3890",
          what="a split runs on to the end of a tile of 48", needs="two splits with tokens", shows=_splits,
          acts={"plan": chunk_past_split}),
)  # fmt: skip
