"""What judging costs: operations, waits and time of a case, by phase.

1. Cases are drawn from a seed, as small as those that a gate asks by the hundred; the answer judged is the rounded truth, so
   that judging alone is measured, on any device.
2. An operation is what torch dispatches: on a GPU a launch, or a view that costs the host as much. A wait is a value read back
   by the host, for which a GPU must have done everything before.
3. Time is the host's, the device waited for at the end of a phase only where phases are timed; counts and times come from
   different runs.

Source: a GPU's launches cost the host some microseconds each, whatever they do; on cases this small nothing else counts.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import harness.judge as judging
import harness.measure as measuring
from harness.backends.protocol import Output
from harness.case import Case
from harness.inputs import Inputs, make_inputs
from harness.regimes import Regime, load
from references.formats import FORMATS, encode
from references.oracle import oracle

#: Regime whose rules are asked: bf16 probabilities and partial outputs in four splits.
REGIME = "model-splits"
#: Phases, by where the judge calls them: (module, name).
PHASES: Mapping[str, tuple[Any, str]] = {
    "violations": (Inputs, "violations"),
    "reading": (judging, "flatten"),
    "blemishes": (judging, "blemish"),
    "reference": (judging, "mla_decode"),
    "yardstick": (judging, "measure_truth"),
    "budget": (measuring, "budget"),
    "measuring": (judging, "measure_actual"),
    "wrong answers": (judging, "score"),
}
#: Phase of everything else.
REST = "rest"
#: Operations that wait for the device.
_WAITS = frozenset({"aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::is_nonzero", "aten::_unique2"})


@dataclass(frozen=False, slots=True, kw_only=True)
class Cost:
    """What some cases cost, all together."""

    cases: int
    operations: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)
    #: By phase, without the phases inside it; seconds.
    seconds: dict[str, float] = field(default_factory=dict)
    #: Of all cases, with no phase timed; seconds.
    total: float = 0.0

    def told(self) -> str:
        """Write what a case costs: one line for all, one a phase."""
        lines = [
            f"{self.cases} cases: {self.operations.total() / self.cases:.0f} operations, {self.waits.total() / self.cases:.1f} "
            f"waits, {1e3 * self.total / self.cases:.1f} ms a case"
        ]
        for phase in sorted(self.operations, key=lambda phase: -self.operations[phase]):
            counts = f"{self.operations[phase] / self.cases:7.0f} operations {self.waits[phase] / self.cases:5.1f} waits"
            lines.append(f"  {phase:14} {counts} {1e3 * self.seconds.get(phase, 0.0) / self.cases:7.2f} ms")
        return "\n".join(lines)


def small_cases(count: int) -> list[Case]:
    """Draw small cases."""
    draw, found = random.Random(0), []
    for seed in range(count):
        lengths = tuple(draw.choice((1, 15, 64, 65, 130, 257, 500)) for _ in range(draw.choice((1, 1, 2, 3, 5, 8))))
        found.append(
            Case(
                heads=draw.choice((8, 12, 16)),
                query_tokens=draw.choice((1, 1, 2)),
                lengths=lengths,
                cache_format=draw.choice(("bf16", "e4m3fn")),
                cache_scale=draw.choice((1.0, 0.7)),
                content=draw.choice(("gaussian", "decorrelated", "needle", "peak-tail", "newest")),
                page_size=draw.choice((1, 16, 64)),
                seed=seed,
            )
        )
    return found


def answered(case: Case, regime: Regime, device: str) -> tuple[Inputs, Output]:
    """Make the inputs of a case and write the rounded truth into its outputs."""
    inputs = make_inputs(case, device=device, output_format=regime.arithmetic.output)
    truth = oracle(inputs.problem())
    inputs.out.copy_(encode(truth.out, FORMATS[regime.arithmetic.output]))
    if inputs.lse is not None:
        inputs.lse.copy_(truth.lse)
    return inputs, Output(out=inputs.out, lse=inputs.lse)


class _Phases:
    """The phase that the judge is in, innermost last."""

    def __init__(self, finish: Callable[[], object]) -> None:
        self.stack = [REST]
        self.seconds = dict.fromkeys((REST, *PHASES), 0.0)
        self._finish, self._since = finish, time.perf_counter()

    def _turn(self) -> None:
        self._finish()
        now = time.perf_counter()
        self.seconds[self.stack[-1]] += now - self._since
        self._since = now

    def wrap(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Give a function that does the same in a phase of its own."""

        def inside(*arguments: Any, **named: Any) -> Any:
            self._turn()
            self.stack.append(phase)
            try:
                return function(*arguments, **named)
            finally:
                self._turn()
                self.stack.pop()

        return inside

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Follow the judge through its phases."""
        with ExitStack() as stack:
            for phase, (owner, name) in PHASES.items():
                stack.enter_context(patch.object(owner, name, self.wrap(phase, getattr(owner, name))))
            self._since = time.perf_counter()
            yield
            self._turn()


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations and waits by phase."""

    def __init__(self, phases: _Phases, cost: Cost) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._phases, self._cost = phases, cost

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        phase, name = self._phases.stack[-1], func._schema.name
        self._cost.operations[phase] += 1
        self._cost.waits[phase] += name in _WAITS
        return func(*args, **(kwargs or {}))

    def reading(self, tolist: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
        """Count tensors that are read back as lists, which on a CPU is no operation."""

        def read(tensor: torch.Tensor) -> Any:
            self._cost.waits[self._phases.stack[-1]] += 1
            return tolist(tensor)

        return read


def cost(cases: Sequence[Case], device: str) -> Cost:
    """Judge cases on a device and say what that costs."""
    regime, found = load().named(REGIME), Cost(cases=len(cases))
    asked = [answered(case, regime, device) for case in cases]

    def finish() -> None:
        if device.startswith("cuda"):
            torch.cuda.synchronize()

    def judge_all() -> None:
        for inputs, output in asked:
            verdict = judging.judge(inputs, output, regime)
            if verdict.fault is not None or verdict.kind == "ERROR":
                raise AssertionError(f"the rounded truth is no right answer: {verdict.message}")

    judge_all()  # kernels are loaded, tables made
    began = time.perf_counter()
    judge_all()
    finish()
    found.total = time.perf_counter() - began
    timed = _Phases(finish)
    with timed.watched():
        judge_all()
    found.seconds = timed.seconds
    phases = _Phases(lambda: None)
    counting = _Counting(phases, found)
    with phases.watched(), counting, patch.object(torch.Tensor, "tolist", counting.reading(torch.Tensor.tolist)):
        judge_all()
    return found
