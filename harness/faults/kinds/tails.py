"""Faults of lse, dead slots and empty rows (kinds I, J and K)."""

from __future__ import annotations

import math

import torch

from harness.case import Case
from harness.faults.reading import fetch, read
from harness.faults.record import Fault
from harness.faults.scene import Hang, IllegalAccess, Scene

Tensor = torch.Tensor
Stored = tuple[Tensor, Tensor, Tensor]
Pair = tuple[Tensor, Tensor]


def lse_base_two(scene: Scene, pair: Pair) -> Pair:
    """Return lse in base 2."""
    return pair[0], pair[1] / math.log(2)


def lse_times_ln2(scene: Scene, pair: Pair) -> Pair:
    """Convert a natural lse to natural units once more."""
    return pair[0], pair[1] * math.log(2)


def lse_negated(scene: Scene, pair: Pair) -> Pair:
    """Return minus the lse."""
    return pair[0], -pair[1]


def lse_is_maximum(scene: Scene, partials: Pair) -> Pair:
    """Keep each split's maximum for the returned lse."""
    scene.memory["peak"] = partials[1].amax(-1)
    return partials


def lse_without_scale(scene: Scene, pair: Pair) -> Pair:
    """Return lse in units of unscaled scores."""
    return pair[0], pair[1] / scene.softmax_scale


def lse_of_one_split(scene: Scene, pair: Pair) -> Pair:
    """Return the lse of the largest split."""
    return pair[0], scene.memory["peak"]


def lse_plus_infinity(scene: Scene, pair: Pair) -> Pair:
    """Return plus infinity for rows without tokens."""
    return pair[0], pair[1].masked_fill(torch.isneginf(pair[1]), math.inf)


def lse_zero_when_empty(scene: Scene, pair: Pair) -> Pair:
    """Return zero for rows without tokens."""
    return pair[0], pair[1].masked_fill(torch.isneginf(pair[1]), 0.0)


def lse_unwritten(scene: Scene, end: Scene) -> Scene:
    """Leave lse as it was."""
    if scene.inputs.lse is not None:
        scene.inputs.lse.fill_(math.nan)
    return end


def lse_through_null(scene: Scene, stored: Stored) -> Stored:
    """Write lse though none is asked for."""
    if scene.inputs.lse is None:
        raise IllegalAccess("stored lse through a null pointer")
    return stored


def lse_in_bf16(scene: Scene, pair: Pair) -> Pair:
    """Return lse rounded to bf16."""
    return pair[0], pair[1].bfloat16().float()


def _dead(scene: Scene) -> Tensor:
    """Find lanes past the length whose slot is in the last page."""
    end = -(-scene.length // scene.page_size) * scene.page_size
    return (scene.tokens >= scene.length) & (scene.tokens < end)


def dead_values(scene: Scene, values: Tensor) -> Tensor:
    """Load V of the slots past the length, whose probabilities are zero."""
    dead = _dead(scene)
    if not bool(dead.any()):
        return values
    values = values.clone()
    values[dead] = read(scene, scene.tokens[dead])[:, : values.shape[-1]]
    return values


def dead_scores(scene: Scene, scores: Tensor) -> Tensor:
    """Mask scores of dead lanes by adding a large negative number, which leaves NaN as it is."""
    dead = _dead(scene)
    if not bool(dead.any()):
        return scores
    rows = read(scene, scene.tokens[dead])
    poison = torch.isnan(rows).any(-1)
    scene.memory["poison"] = bool(poison.any())
    return scores


def nan_stays(scene: Scene, pair: Pair) -> Pair:
    """Let NaN of dead lanes reach the output."""
    if scene.memory.pop("poison", False):
        return pair[0] * math.nan, pair[1] * math.nan
    return pair


def slot_zero_values(scene: Scene, values: Tensor) -> Tensor:
    """Fold lanes past the length to slot 0 and load V from there."""
    dead = ~scene.live
    if not bool(dead.any()):
        return values
    row = fetch(scene, torch.zeros(1, dtype=torch.int64)).view(scene.cache_dtype).float()
    return torch.where(dead[..., None], row[0, : values.shape[-1]], values)


def dead_as_zero_scores(scene: Scene, visible: Tensor) -> Tensor:
    """Let the zero rows that fill the last tile take part with a score of zero."""
    tile = scene.variant.tile
    stops = torch.tensor([a + -(-(b - a) // tile) * tile for a, b in scene.plan])[:, None]
    return visible | (~scene.live & (scene.tokens < stops))


def tail_shorter_than_four(scene: Scene, pair: Pair) -> Pair:
    """Produce NaN where the last tile holds fewer than four tokens."""
    if 0 < scene.length % scene.variant.tile < 4:
        return pair[0] * math.nan, pair[1]
    return pair


def empty_is_nan(scene: Scene, pair: Pair) -> Pair:
    """Divide zero by zero for rows without tokens."""
    empty = torch.isneginf(pair[1])
    return pair[0].masked_fill(empty[..., None], math.nan), pair[1]


def empty_unwritten(scene: Scene, stored: Stored) -> Stored:
    """Return early for requests without tokens."""
    stored[2][torch.tensor(scene.lengths) == 0] = False
    return stored


def empty_reads_one(scene: Scene, _: Scene) -> Scene:
    """Take a length of zero for one."""
    scene.outside = "zero"
    scene.lengths = [max(n, 1) for n in scene.lengths]
    return scene


def empty_shifts(scene: Scene, stored: Stored) -> Stored:
    """Skip requests without tokens in the schedule but not in the output: later answers move up."""
    out, lse, written = stored
    order = [b for b, n in enumerate(scene.lengths) if n > 0]
    shifted, shifted_lse = torch.zeros_like(out), torch.full_like(lse, -math.inf)
    shifted[: len(order)], shifted_lse[: len(order)] = out[order], lse[order]
    return shifted, shifted_lse, written


def short_rows_nan(scene: Scene, pair: Pair) -> Pair:
    """Produce NaN for query tokens that see nothing while later ones do."""
    blind = torch.isneginf(pair[1])
    if 0 < scene.length < pair[1].shape[0]:
        return pair[0].masked_fill(blind[..., None], math.nan), pair[1]
    return pair


def short_hangs(scene: Scene, _: Scene) -> Scene:
    """Count down from N - S and never reach zero where it starts below."""
    if any(0 < n < scene.inputs.case.query_tokens for n in scene.lengths):
        raise Hang("the loop over N - S = -1 tokens does not end")
    return scene


def _tail(case: Case) -> bool:
    return any(n % case.page_size for n in case.lengths)


def _empty_row(case: Case) -> bool:
    return min(case.lengths) < case.query_tokens


def _zero(case: Case) -> bool:
    return min(case.lengths) == 0


def _short(case: Case) -> bool:
    return any(0 < n < case.query_tokens for n in case.lengths)


def _lse(case: Case) -> bool:
    return case.lse


FAULTS = (
    Fault(name="lse-base-2", kind="I", report="vllm-project/vllm #47079", what="lse is returned in base 2",
          needs="lse asked for", shows=_lse, acts={"answer": lse_base_two}),
    Fault(name="lse-scaled-by-ln2", kind="I", report="sgl-project/sglang #40903",
          what="lse is converted to natural units twice", needs="lse asked for", shows=_lse,
          acts={"answer": lse_times_ln2}),
    Fault(name="lse-negated", kind="I", report="flashinfer-ai/flashinfer #4663", what="lse has the wrong sign",
          needs="lse asked for", shows=_lse, acts={"answer": lse_negated}),
    Fault(name="lse-without-scale", kind="I", report="flashinfer-ai/flashinfer #3372",
          what="lse is in units of unscaled scores", needs="lse asked for", shows=_lse, acts={"answer": lse_without_scale}),
    Fault(name="lse-of-one-split", kind="I", report="Dao-AILab/flash-attention #2388",
          what="lse is that of the largest split", needs="lse asked for, two splits",
          shows=lambda case: _lse(case) and max(case.lengths) > 32,
          acts={"partials": lse_is_maximum, "answer": lse_of_one_split}),
    Fault(name="lse-rounded-to-bf16", kind="I", report="ROCm/aiter mla_decode_rope (bf16 attn_logits)",
          what="lse is rounded to bf16", needs="lse asked for", shows=_lse, acts={"answer": lse_in_bf16}),
    Fault(name="lse-unwritten", kind="I", report="ROCm/aiter non-persistent asm, one split", what="lse is not written",
          needs="lse asked for", shows=lambda case: case.lse, acts={"end": lse_unwritten}),
    Fault(name="lse-through-null", kind="I", report="lightseekorg/tokenspeed #468",
          what="lse is written though none is asked for", needs="no lse asked for", shows=lambda case: not case.lse,
          acts={"store": lse_through_null}),
    Fault(name="lse-infinite-when-empty", kind="I", report="vllm-project/vllm #15492",
          what="rows without tokens have lse +inf", needs="lse asked for, a row without tokens",
          shows=lambda case: case.lse and _empty_row(case), acts={"answer": lse_plus_infinity}),
    Fault(name="lse-zero-when-empty", kind="I", report="pytorch/pytorch #134650", what="rows without tokens have lse 0",
          needs="lse asked for, a row without tokens", shows=lambda case: case.lse and _empty_row(case),
          acts={"answer": lse_zero_when_empty}),
    Fault(name="dead-slots-in-values", kind="J", report="flashinfer-ai/flashinfer #941",
          what="V past the length is loaded and meets P = 0", needs="a partial last page full of NaN",
          shows=lambda case: _tail(case) and case.poison == "nan", acts={"values": dead_values}),
    Fault(name="dead-slots-in-scores", kind="J", report="vllm-project/vllm #57716",
          what="scores past the length are masked by an addition", needs="a partial last page full of NaN",
          shows=lambda case: _tail(case) and case.poison == "nan", acts={"scores": dead_scores, "answer": nan_stays},
          twins=("dead-slots-in-values",)),
    Fault(name="tail-folds-to-slot-zero", kind="J", report="ROCm/aiter #4245",
          what="lanes past the length load V of slot 0", needs="lanes without tokens, slot 0 not in use",
          shows=lambda case: case.poison == "nan" and (case.placement != "identity" or 0 in case.lengths),
          acts={"values": slot_zero_values}),
    Fault(name="dead-lanes-score-zero", kind="J", report="sgl-project/sglang #39288",
          what="lanes past the length count with a score of zero", needs="a partial last tile",
          shows=lambda case: any(n % 32 for n in case.lengths), acts={"visible": dead_as_zero_scores}),
    Fault(name="short-tail-nan", kind="J", report="ROCm/aiter #2106",
          what="a last tile of fewer than four tokens gives NaN", needs="N mod tile of 1 to 3",
          shows=lambda case: any(0 < n % 32 < 4 for n in case.lengths), acts={"answer": tail_shorter_than_four}),
    Fault(name="empty-rows-nan", kind="K", report="sgl-project/sglang #1779", what="rows without tokens are NaN",
          needs="a row without tokens", shows=_empty_row, acts={"answer": empty_is_nan}),
    Fault(name="empty-requests-unwritten", kind="K", report="ROCm/aiter mla_gluon, one split",
          what="requests without tokens are not written", needs="a request of length zero", shows=_zero,
          acts={"store": empty_unwritten}),
    Fault(name="empty-requests-read-a-token", kind="K", report="vllm-project/vllm #35969",
          what="a length of zero is taken for one", needs="a request of length zero", shows=_zero,
          acts={"arguments": empty_reads_one}),
    Fault(name="empty-requests-shift", kind="K", report="flashinfer-ai/flashinfer #868",
          what="answers after an empty request move up", needs="a request of length zero before another",
          shows=lambda case: _zero(case) and case.batch > 1 and max(case.lengths) > 0, acts={"store": empty_shifts}),
    Fault(name="short-requests-nan", kind="K", report="ROCm/aiter mla_gluon, 0 < N < S",
          what="query tokens before the first cached one are NaN", needs="N between 0 and S", shows=_short,
          acts={"answer": short_rows_nan}, twins=("empty-rows-nan",)),
    Fault(name="short-requests-hang", kind="K", report="flashinfer-ai/flashinfer #5015",
          what="N below S makes a loop that does not end", needs="N between 0 and S", shows=_short,
          acts={"arguments": short_hangs}),
)  # fmt: skip
