"""Detection limits: how small a mistake the gate still sees, by context length.

1. A mistake has a size: a relative error of a scale, a number of dropped tokens, a share of wrong pages. The smallest that is
   a FAIL is bracketed, for each content family, and the best family is named: the gate draws them all.
2. Mistakes are planted in the base variant of the model; ``planted in the model`` means as a kernel would make them, before
   every rounding.

Source: the lengths are those at which the peers' rules were measured to be blind (docs/why.md).

Usage: ``python -m harness.limits [--lengths N …] [--families NAME …] [--processes N]``.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from harness.backends.protocol import Output
from harness.case import Case
from harness.faults.backend import Planted
from harness.faults.kinds.scales import believe
from harness.faults.scene import Act, Scene
from harness.faults.variant import BASE, VARIANTS
from harness.hunt import fresh
from harness.inputs import Inputs, make_inputs
from harness.judge import Known, judge
from harness.regimes import Regime, load

Tensor = torch.Tensor

#: Context lengths asked.
LENGTHS = (1, 63, 64, 65, 256, 4096, 32768, 98304)
#: Content families asked.
FAMILIES = ("gaussian", "decorrelated", "needle", "peak-tail", "newest")
#: Heads and tokens a page: Kimi-K3 on eight GPUs.
HEADS, PAGE = 12, 16
#: Scale errors are bracketed between these, to this many halvings of the exponent's range.
LARGEST, SMALLEST, HALVINGS = 0.5, 2.0**-20, 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistake:
    """A mistake with a size."""

    #: What it is.
    name: str
    #: Makes it: size -> point and act.
    make: Callable[[float], tuple[str, Act]]
    #: Sizes for a context of a length, smallest first; none for a scale error, which is bracketed.
    sizes: Callable[[int], Sequence[float]] | None = None


def _value_scale(size: float) -> tuple[str, Act]:
    return "arguments", believe(value_scale=lambda scene: scene.value_scale * (1 + size))


def _softmax_scale(size: float) -> tuple[str, Act]:
    return "arguments", believe(softmax_scale=lambda scene: scene.softmax_scale * (1 + size))


def _spread(count: int, length: int) -> Tensor:
    """Spread some tokens evenly over a context, none of them the first or newest where others are left."""
    return ((torch.arange(count) + 0.5) * length / count).long()


def _dropped(size: float) -> tuple[str, Act]:
    def act(scene: Scene, visible: Tensor) -> Tensor:
        lost = torch.isin(scene.tokens, _spread(int(size), scene.length))
        return visible & ~lost

    return "visible", act


def _wrong_pages(size: float) -> tuple[str, Act]:
    def act(scene: Scene, columns: Tensor) -> Tensor:
        pages = -(-scene.length // scene.page_size)
        wrong = torch.isin(columns, _spread(int(size), pages))
        # The page before is read in its place; the first page's place is taken by the second.
        return torch.where(wrong, torch.where(columns > 0, columns - 1, columns + 1), columns)

    return "columns", act


def _counts(most: int) -> list[float]:
    return [float(1 << k) for k in range(most.bit_length()) if 1 << k <= most]


MISTAKES = (
    Mistake(name="scale of V off by", make=_value_scale),
    Mistake(name="softmax scale off by", make=_softmax_scale),
    Mistake(name="tokens dropped", make=_dropped, sizes=lambda length: _counts(length - 1)),
    # A context of one page has no other page that could be read.
    Mistake(name="wrong pages", make=_wrong_pages, sizes=lambda length: _counts(max(0, -(-length // PAGE) - 1))),
)


def smallest(mistake: Mistake, length: int, caught: Callable[[float], bool]) -> float | None:
    """Find the smallest size of a mistake that is caught, or None."""
    if mistake.sizes is not None:
        return next((size for size in mistake.sizes(length) if caught(size)), None)
    low, high = SMALLEST, LARGEST
    if not caught(high):
        return None
    for _ in range(HALVINGS):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if caught(middle) else (middle, high)
    return high


def measure(length: int, family: str, regime: Regime) -> dict[bool, dict[str, float | None]]:
    """Measure the limits at one length with one content family: from output and lse (True), and from the output alone."""
    case = Case(heads=HEADS, lengths=(length,), page_size=PAGE, placement="permuted", content=family)
    known, inputs = Known(), make_inputs(case)
    seen: dict[tuple[str, float, bool], bool] = {}

    def catches(mistake: Mistake, lse: bool) -> Callable[[float], bool]:
        def caught(size: float) -> bool:
            if (mistake.name, size, lse) not in seen:
                output = _answer(mistake, size, inputs)
                for asked, given in ((True, output), (False, Output(out=output.out, lse=None))):
                    verdict = judge(inputs, given, regime, models=False, known=known)
                    seen[mistake.name, size, asked] = verdict.kind == "FAIL"
            return seen[mistake.name, size, lse]

        return caught

    return {
        lse: {mistake.name: smallest(mistake, length, catches(mistake, lse)) for mistake in MISTAKES} for lse in (True, False)
    }


def _answer(mistake: Mistake, size: float, inputs: Inputs) -> Output:
    point, act = mistake.make(size)
    return Planted(name=f"model:{BASE}", variant=VARIANTS[BASE], acts={point: [act]}).run(fresh(inputs))


def _work(job: tuple[int, str]) -> tuple[int, str, dict[bool, dict[str, float | None]]]:
    torch.set_num_threads(1)
    length, family = job
    found = measure(length, family, load().named(f"model-{BASE}"))
    print(f"limits: N {length}, {family}: {found}", file=sys.stderr, flush=True)
    return length, family, found


def table(found: Mapping[int, Mapping[str, Mapping[str, float | None]]]) -> str:
    """Print the best limit of each mistake at each length, with the family that has it."""
    lines = ["| N | " + " | ".join(mistake.name for mistake in MISTAKES) + " |", "|---" * (1 + len(MISTAKES)) + "|"]
    for length, families in found.items():
        cells = []
        for mistake in MISTAKES:
            best = min(
                ((size, family) for family, sizes in families.items() if (size := sizes[mistake.name]) is not None),
                default=None,
            )
            cells.append("–" if best is None else f"{_show(mistake, best[0], length)} ({best[1]})")
        lines.append(f"| {length} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _show(mistake: Mistake, size: float, length: int) -> str:
    if mistake.sizes is None:
        return f"{100 * size:.2g} %"
    if mistake.name == "wrong pages":
        pages = -(-length // PAGE)
        return f"{int(size)} of {pages}, {size / pages:.3%}"
    return f"{int(size)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the limits."""
    parser = argparse.ArgumentParser(prog="python -m harness.limits", description=__doc__.partition("\n")[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args(arguments)
    began = time.perf_counter()
    lengths: list[int] = options.lengths
    descending = sorted(lengths, reverse=True)  # the longest first, so that no process is left with them at the end
    jobs = list(itertools.product(descending, options.families))
    found: dict[bool, dict[int, dict[str, dict[str, float | None]]]] = {
        lse: {length: {} for length in lengths} for lse in (True, False)
    }
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        for length, family, both in pool.imap_unordered(_work, jobs):
            for lse, sizes in both.items():
                found[lse][length][family] = sizes
    for lse, said in ((False, "From the output alone:"), (True, "From the output and lse:")):
        print(f"{said}\n\n{table(found[lse])}\n")
    print(f"{time.perf_counter() - began:.0f} s on {options.processes} processes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
