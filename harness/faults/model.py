"""A correct split-KV model of MLA decode with named points at which a fault may act.

1. Without acts it is right: paging, tiles, online softmax, splits, merge, scales, formats and the causal tail are those
   of a real kernel, and it rounds where its variant says, nowhere else.
2. It reads memory as a kernel does (``reading``), and passes every value by the point of that name (``scene``).
3. It uses only what a kernel is given, never the slots that the truth is computed from.

Source: the equations of ``references.decode``; the structure of split-KV decode kernels (FlashDecoding).
"""

from __future__ import annotations

import math
from typing import Any

import torch

from harness.faults.reading import walk
from harness.faults.scene import Acts, Scene, open_scene
from harness.faults.variant import Variant
from harness.inputs import Inputs
from references.formats import FORMATS


def run(inputs: Inputs, variant: Variant, acts: Acts, memory: dict[Any, Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Answer one decode problem and store it into the outputs of ``inputs``.

    Raises:
        IllegalAccess: if an act made it read outside the allocations.
    """
    with torch.inference_mode():
        scene = open_scene(inputs, variant, acts, memory)
        case = inputs.case
        out = torch.zeros(case.batch, case.query_tokens, case.heads, case.latent)
        lse = torch.full((case.batch, case.query_tokens, case.heads), -math.inf)
        for request in range(case.batch):
            out[request], lse[request] = answer(scene, request)
        written = torch.ones(lse.shape, dtype=torch.bool)
        out, lse, written = scene.at("store", (out, lse, written))
        for target, values in ((inputs.out, out), (inputs.lse, lse)):
            if target is not None:
                target[written] = values.contiguous().to(target.dtype)[written]
        scene.at("end", scene)
    return inputs.out, inputs.lse


def answer(scene: Scene, request: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Answer one request: output [S, H, L] and lse [S, H]."""
    scene.request = scene.source = request
    return scene.at("answer", attend(scene))  # type: ignore[no-any-return]


def attend(scene: Scene) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from the query of ``scene.request`` to the cache of ``scene.source``."""
    case, arithmetic = scene.inputs.case, scene.variant.arithmetic
    cut = scene.variant.plan(scene.length, heads=case.heads, query_tokens=case.query_tokens, batch=case.batch)
    scene.plan = scene.at("plan", cut)
    rows = walk(scene)
    query = scene.at("query", scene.query[scene.request])
    keys = rows
    scale = scene.softmax_scale * scene.query_scale * scene.key_scale
    if arithmetic.operand is not None:
        keys = rounded_to(rows * scene.key_scale, arithmetic.operand)
        scale = scene.softmax_scale * scene.query_scale
        values = rounded_to(rows[..., : case.latent] * scene.value_scale, arithmetic.operand)
    else:
        values = rows[..., : case.latent]
    splits, lanes = scene.tokens.shape
    flat = query.reshape(-1, query.shape[-1]) @ keys.reshape(-1, keys.shape[-1]).T
    scores = flat.view(*query.shape[:2], splits, lanes) * scale
    scores = scene.at("scores", scores)
    newest = scene.length - case.query_tokens + torch.arange(case.query_tokens)
    visible = scene.live & (scene.tokens <= newest.view(-1, 1, 1))
    visible = scene.at("visible", visible[:, None])
    scores = scores.masked_fill(~visible, -math.inf)
    partials = _softmax(scene, scores, scene.at("values", values))
    return scene.at("merged", _merge(scene, *scene.at("partials", partials)))  # type: ignore[no-any-return]


def rounded_to(values: torch.Tensor, name: str) -> torch.Tensor:
    """Round values to a format as conversion instructions do: to nearest even, fp8 saturating."""
    fmt = FORMATS[name]
    if fmt.storage == torch.float32:
        return values
    if fmt.storage.itemsize == 1:
        values = values.clamp(-fmt.maximum, fmt.maximum)
    return values.to(fmt.storage).float()


def _softmax(scene: Scene, scores: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the partial output [S, H, K, L] and lse [S, H, K] of every split, tile by tile."""
    arithmetic = scene.variant.arithmetic
    tokens, heads, splits, lanes = scores.shape
    numerators, rescale, last = _numerators(scene, scores)
    lift: float | torch.Tensor = arithmetic.probability_scale
    if arithmetic.pivot == "normalised":
        lift = lift / numerators.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    rounded = scene.at("rounded", rounded_to(numerators * lift, arithmetic.probability))
    summed = rounded / lift if arithmetic.normaliser == "rounded" else numerators
    sums = scene.at("sums", (summed * rescale).sum(-1))
    weighted = (rounded / lift * rescale).permute(2, 0, 1, 3).reshape(splits, tokens * heads, lanes)
    accumulated = torch.bmm(weighted, values).view(splits, tokens, heads, -1).permute(1, 2, 0, 3)
    empty = sums == 0
    safe = sums.masked_fill(empty, 1.0)
    out = accumulated / safe[..., None]
    if arithmetic.operand is None:
        out = out * scene.value_scale
    if len(scene.plan) > 1:
        out = rounded_to(out, arithmetic.partial)
    return out, (last + safe.log()).masked_fill(empty, -math.inf)


def _numerators(scene: Scene, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Take the exponentials relative to the running maxima; with them the factors to the last one, a lane each."""
    variant = scene.variant
    tiled = scores.view(*scores.shape[:3], -1, variant.tile or scores.shape[-1])
    peaks = tiled.amax(-1)
    if variant.backward:
        running = peaks.flip(-1).cummax(-1).values.flip(-1)
        last = running[..., 0]
    else:
        running = peaks.cummax(-1).values
        last = running[..., -1]
    if variant.arithmetic.pivot != "tile":
        running = last[..., None].expand_as(running)
    running = scene.at("running", running)
    relative, shrink = tiled - _finite(running)[..., None], running - _finite(last)[..., None]
    if variant.binary:
        factor = 1 / math.log(2)
        numerators, rescale = (relative * factor).exp2(), (shrink * factor).exp2()
    else:
        numerators, rescale = relative.exp(), shrink.exp()
    rescale = scene.at("rescale", rescale)
    lanes = rescale[..., None].expand_as(tiled).reshape(scores.shape)
    return scene.at("probabilities", numerators.view(scores.shape)), lanes, last


def _merge(scene: Scene, out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge the splits of a request by their lse; a split that saw nothing has no weight."""
    top = _finite(lse.amax(-1, keepdim=True))
    weights = scene.at("weights", (lse - top).exp())
    total = weights.sum(-1)
    empty = total == 0
    safe = total.masked_fill(empty, 1.0)
    merged = (weights[..., None] * out).sum(-2) / safe[..., None]
    return merged, (top[..., 0] + safe.log()).masked_fill(empty, -math.inf)


def _finite(values: torch.Tensor) -> torch.Tensor:
    """Replace minus infinity, the maximum of nothing, by zero."""
    return values.masked_fill(values == -math.inf, 0.0)
