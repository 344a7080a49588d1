"""The speed and memory of reference and judge, measured as ratios and counts.

1. A ratio's two sides are measured in one process, by turns, and each side's best time counts: a busy machine slows both.
2. What is asked is printed beside what was measured. A bench informs; it never fails a run.
3. A measure that this machine cannot take says why.

Source: the reference must not be what a gate waits for, so it is held to the plain product and the plain loop it replaces.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from harness import judging
from references.decode import Problem, mla_decode
from references.formats import find
from references.precision import full_precision

#: Latent and rope widths of every problem here: those of DeepSeek-V3 and Kimi-K3.
LATENT, ROPE = 512, 64

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One measure of one run."""

    #: What was measured.
    name: str
    #: The ratio or amount; None where it could not be measured.
    value: float | None
    #: What is asked of it, in words.
    asked: str
    #: Whether it is met; None where it could not be measured.
    met: bool | None
    #: The figures behind it, or why there are none.
    detail: str


def make_problem(*, batch: int, heads: int, length: int, cache_format: str, device: str) -> Problem:
    """Make a problem of random codes; their values do not matter here, but none is infinite or NaN."""
    generator = torch.Generator().manual_seed(0)
    width = LATENT + ROPE
    query = torch.randn((batch, 1, heads, width), generator=generator).to(torch.bfloat16)
    # Below 0x40 every 8-bit code is an ordinary number. In bf16 a byte repeated is one too: 0x3F3F is 0.75.
    codes = torch.randint(0, 0x40, (batch * length, width), dtype=torch.uint8, generator=generator)
    storage = find(cache_format).storage
    cache = codes.view(storage) if storage.itemsize == 1 else codes.to(torch.float32).div(64).to(storage)
    return Problem(
        query=query.to(device),
        query_format="bf16",
        query_scale=1.0,
        cache=cache.view(batch * length, 1, width).to(device),
        cache_format=cache_format,
        cache_scale=0.5,
        slots=torch.randperm(batch * length, generator=generator).to(device),
        lengths=(length,) * batch,
        softmax_scale=(128 + ROPE) ** -0.5,
        latent=LATENT,
    )


def request_loop(problem: Problem) -> torch.Tensor:
    """Decode as a first draft does: a request at a time, whole rows gathered, widened and softmaxed; [B, S, H, L]."""
    answers = []
    pool = problem.cache.view(-1, problem.width)
    for request, length in enumerate(problem.lengths):
        slots = problem.slots[problem.starts[request] :][:length]
        rows = pool.view(torch.uint8)[slots].view(pool.dtype) if pool.element_size() == 1 else pool[slots]
        rows = rows.to(torch.float32) * problem.cache_scale
        query = problem.query[request, 0].to(torch.float32) * problem.query_scale
        weights = torch.softmax(query @ rows.T * problem.softmax_scale, dim=-1)
        answers.append(weights @ rows[:, : problem.latent])
    return torch.stack(answers)[:, None]


def best_times(*sides: Callable[[], object], rounds: int, device: str) -> list[float]:
    """Run all sides by turns after a warm-up and return each side's shortest time, in seconds."""
    best = [float("inf")] * len(sides)
    for turn in range(rounds + 1):
        for index, side in enumerate(sides):
            if device == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            side()
            if device == "cuda":
                torch.cuda.synchronize()
            if turn:
                best[index] = min(best[index], time.perf_counter() - start)
    return best


def speed_against_loop(cache_format: str, *, length: int = 4096, rounds: int = 5) -> Finding:
    """Compare with a loop over requests on a CPU: B 8, H 128."""
    problem = make_problem(batch=8, heads=128, length=length, cache_format=cache_format, device="cpu")
    with full_precision():
        ours, loop = best_times(lambda: mla_decode(problem), lambda: request_loop(problem), rounds=rounds, device="cpu")
    return Finding(
        name="speed on a CPU against a loop over requests",
        value=loop / ours,
        asked="at least 2",
        met=loop >= 2 * ours,
        detail=f"{loop:.3f} s against {ours:.3f} s at B 8, H 128, N {length}, {cache_format}",
    )


def resident(field: str) -> int:
    """Read this process's memory: ``VmRSS`` now or ``VmHWM`` at its highest, in bytes."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise LookupError(f"the kernel does not report {field}")


def memory_of_a_million_tokens(*, length: int = 1 << 20) -> Finding:
    """Measure what the reference takes above its inputs at a context of a million tokens: H 12, fp8."""
    name, asked = "memory above the inputs", "at most 1024 MiB"
    problem = make_problem(batch=1, heads=12, length=length, cache_format="e4m3fn", device="cpu")
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the highest mark starts again from here
        before = resident("VmRSS")
    except (OSError, LookupError) as error:
        return Finding(name=name, value=None, asked=asked, met=None, detail=f"not measured: {error}")
    start = time.perf_counter()
    mla_decode(problem)
    seconds = time.perf_counter() - start
    taken = (resident("VmHWM") - before) / MIB
    detail = f"{taken:.0f} MiB in {seconds:.1f} s at H 12, N {length}, e4m3fn"
    return Finding(name=name, value=taken, asked=asked, met=taken <= 1024, detail=detail)


#: Settings of the reference that a GPU may prefer: the type it works in, and MiB of temporaries.
SETTINGS = [(working, mebibytes) for working in (torch.float32, torch.float64) for mebibytes in (80, 160, 320, 640, 1280, 2560)]


def rates_by_setting(*, length: int = 8192, rounds: int = 3) -> Finding:
    """Find the setting of the reference that is the fastest on a GPU: B 64, H 128."""
    name, asked = "fastest setting on a GPU", "for information"
    if not torch.cuda.is_available():
        return Finding(name=name, value=None, asked=asked, met=None, detail="not measured: torch sees no GPU here")
    problem = make_problem(batch=64, heads=128, length=length, cache_format="e4m3fn", device="cuda")
    sides = [partial(mla_decode, problem, working=working, piece_bytes=mib * MIB) for working, mib in SETTINGS]
    times = best_times(*sides, rounds=rounds, device="cuda")
    work = 2 * 64 * 128 * length * (LATENT + ROPE + LATENT) / 1e12
    rates = [f"{str(working)[6:]} {mib} MiB {work / taken:.1f}" for (working, mib), taken in zip(SETTINGS, times, strict=True)]
    return Finding(name=name, value=work / min(times), asked=asked, met=None, detail="TFLOP/s: " + ", ".join(rates))


def rate_against_product(*, length: int = 8192, rounds: int = 5) -> Finding:
    """Compare with a plain fp32 matrix product on a GPU: B 64, H 128; gathering and decoding included."""
    name, asked = "rate on a GPU against a plain fp32 product", "at least 0.8"
    if not torch.cuda.is_available():
        return Finding(name=name, value=None, asked=asked, met=None, detail="not measured: torch sees no GPU here")
    batch, heads, side = 64, 128, 8192
    problem = make_problem(batch=batch, heads=heads, length=length, cache_format="e4m3fn", device="cuda")
    left, right = torch.randn((2, side, side), device="cuda")
    with full_precision():
        ours, product = best_times(lambda: mla_decode(problem), lambda: left @ right, rounds=rounds, device="cuda")
    rate = 2 * batch * heads * length * (LATENT + ROPE + LATENT) / ours / 1e12
    plain = 2 * side**3 / product / 1e12
    detail = f"{rate:.1f} of {plain:.1f} TFLOP/s at B {batch}, H {heads}, N {length}, e4m3fn"
    return Finding(name=name, value=rate / plain, asked=asked, met=rate >= 0.8 * plain, detail=detail)


def cost_of_judging(*, cases: int = 60) -> Finding:
    """Count what judging a small case costs, and time it: on a GPU where there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = judging.cost(judging.small_cases(cases), device)
    each = found.operations.total() / found.cases
    return Finding(
        name=f"operations to judge a small case, on {device}",
        value=each,
        asked="at most 1500",
        met=each <= 1500,
        detail=found.told(),
    )


#: Every measure, by the name it is asked for with.
MEASURES: dict[str, Callable[[], Finding]] = {
    "speed-bf16": partial(speed_against_loop, "bf16"),
    "speed-fp8": partial(speed_against_loop, "e4m3fn"),
    "memory": memory_of_a_million_tokens,
    "rate": rate_against_product,
    "settings": rates_by_setting,
    "judging": cost_of_judging,
}


def describe(finding: Finding) -> str:
    """Write a finding as one line."""
    word = {True: "met", False: "MISSED", None: "-"}[finding.met]
    value = "-" if finding.value is None else f"{finding.value:.2f}"
    return f"{word:7} {finding.name}: {value} ({finding.asked}); {finding.detail}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Take the measures asked for and print them."""
    parser = argparse.ArgumentParser(prog="nox -s bench --", description=__doc__.partition("\n")[0])
    parser.add_argument("measure", nargs="*", help=f"which to take: {', '.join(MEASURES)} (all unless named)")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.measure if name not in MEASURES]
    if unknown:
        parser.error(f"no measure is called {', '.join(unknown)}: there are {', '.join(MEASURES)}")
    findings = []
    for name in options.measure or MEASURES:
        findings.append(MEASURES[name]())
        if not options.json:
            print(describe(findings[-1]), flush=True)
    if options.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
