"""The reference on a GPU: its rate beside a plain product, and its pieces on two streams held to the oracle."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from harness.bench import LATENT, ROPE, best_times, describe, make_problem, rate_against_product
from harness.case import Case
from harness.inputs import make_inputs
from references.decode import mla_decode
from references.oracle import oracle
from tests.native.asked import Asked, say


def reference(given: Asked) -> bool:
    """Measure the reference beside a plain product, and hold its pieces on two streams to the oracle."""
    finding = rate_against_product()
    say(describe(finding))
    problem = make_problem(batch=64, heads=128, length=8192, cache_format="e4m3fn", device="cuda")
    work = 2 * 64 * 128 * 8192 * (LATENT + ROPE + LATENT) / 1e12
    for dtype in (torch.float32, torch.float64):
        for pieces in (160, 320, 640, 1280, 2560):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            run = partial(mla_decode, problem, piece_bytes=pieces << 20, working=dtype)
            (seconds,) = best_times(run, rounds=3, device="cuda")
            most = (torch.cuda.max_memory_allocated() - before) / 2**30
            say(f"  reference in {str(dtype)[6:]}, pieces of {pieces} MiB: {work / seconds:.1f} TFLOP/s, {most:.1f} GiB")
    codes = problem.cache.view(-1)
    wide = torch.empty(codes.shape, dtype=torch.float32, device="cuda")
    half = torch.empty(codes.shape, dtype=torch.float16, device="cuda")
    table = torch.arange(1 << 16, device="cuda")
    pairs = codes.view(torch.int16)
    ways: dict[str, Callable[[], object]] = {
        "to fp32": lambda: wide.copy_(codes),
        "to fp16": lambda: half.copy_(codes),
        "fp16 to fp32": lambda: wide.copy_(half),
        "by a table of pairs": lambda: torch.index_select(table, 0, pairs.to(torch.int32).add_(1 << 15)),
        "gather": lambda: problem.cache.view(torch.uint8)[:, 0].index_select(0, problem.slots),
    }
    times = best_times(*ways.values(), rounds=3, device="cuda")
    say("  decoding 302 M codes: " + ", ".join(f"{name} {1000 * time:.2f} ms" for name, time in zip(ways, times, strict=True)))
    strays = []
    for seed in range(12):
        case = Case(heads=3, query_tokens=2, lengths=(9000, 700, 0, 3, 2500), page_size=4, placement="permuted", seed=seed,
                    cache_format=("e4m3fn", "e4m3fnuz", "e5m2", "bf16")[seed % 4])  # fmt: skip
        given_to = make_inputs(case, device="cuda:0").problem()
        truth = oracle(given_to).out
        for pieces in (1 << 19, 1 << 21, 1 << 23):
            strays.append(float((mla_decode(given_to, piece_bytes=pieces).out - truth).abs().max() / truth.abs().max()))
    say(f"  on two streams it strays {max(strays):.2g} of the largest output from the oracle at most")
    torch.cuda.empty_cache()
    return finding.met is True and max(strays) < 1e-5
