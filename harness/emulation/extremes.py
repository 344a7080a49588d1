"""Runs at the extremes of what a GPU may do, compared bit for bit.

1. Two runs serve a sound kernel: (early, forward) and (late, reverse). What differs between them is a fault; only then are
   the two mixed extremes run, to tell a race from a dependency between programs.
2. Every run begins with the same memory: what an earlier run wrote is put back first. The last run's memory remains.
3. A launch whose programs share nothing, and which is given the same bits in both, is run once (``alike``).
4. A fault of one run that another does not have is itself a difference: its cause is what is reported.

Source: the two legal extremes of ``harness/emulation/shared.py``; programs of a grid may run in any order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import numpy as np
import torch

from harness.emulation.alike import Launches
from harness.emulation.findings import EmulationFault, Finding, fail, site
from harness.emulation.formats import Array
from harness.emulation.memory import CARRIERS, Allocation
from harness.emulation.session import Session, emulate

#: The runs, in order: when copies land, and the order of programs.
FIRST, SECOND = ("early", "forward"), ("late", "reverse")
_MIXED = {"order": ("early", "reverse"), "copies": ("late", "forward")}


class _Outcome:
    """What one run gave: an answer and the memory it wrote, or a fault."""

    def __init__(self, session: Session, answer: Any, fault: EmulationFault | None) -> None:
        self.session = session
        self.answer = answer
        self.fault = fault
        self.tensors = {} if fault else {name: _bits(item) for name, item in _tensors(answer)}
        self.memory = {} if fault else {key: (item.memory.name, item.now()) for key, item in session.written.items()}

    def difference(self, other: _Outcome) -> str | None:
        """Say where it differs from another, or None."""
        if self.fault or other.fault:
            one, two = (item.fault.finding if item.fault else None for item in (self, other))
            if one and two and (one.kind, one.file, one.line) == (two.kind, two.file, two.line):
                return None
            return f"{_how(self)} {_outcome(one)}, {_how(other)} {_outcome(two)}"
        for name, values in self.tensors.items():
            found = _first_difference(values, other.tensors.get(name))
            if found:
                return f"{name} differs at {found}"
        for key, (name, blocks) in self.memory.items():
            if key not in other.memory:
                continue
            theirs = other.memory[key][1]
            if blocks.keys() != theirs.keys():
                return f"{name} is written in other places"
            for start, codes in blocks.items():
                found = _first_difference(codes, theirs[start])
                if found:
                    return f"{name} differs at {found}{f' from {start} on' if start else ''}"
        return None


def run_all_extremes(function: Callable[[], Any], *, target: str = "gfx950") -> tuple[Any, Session]:
    """Run a launcher at both extremes and compare.

    Args:
        function: launches kernels and returns tensors; it must ask for the same work each time.
        target: what the kernels are written for.

    Returns:
        What the last run returned, and its session.

    Raises:
        EmulationFault: what the kernel does wrong in every run; else race, cross-program or nondeterministic.
    """
    launches = Launches(None)
    one = _run(function, FIRST, target, launches=launches)
    two = _run(function, SECOND, target, undo=one, launches=Launches(launches))
    difference = one.difference(two)
    if difference is not None:
        _explain(function, target, one, two, difference)
    if one.fault:
        raise one.fault
    return two.answer, two.session


def _run(
    function: Callable[[], Any],
    how: tuple[str, str],
    target: str,
    undo: _Outcome | None = None,
    tracer: Callable[[Allocation], None] | None = None,
    launches: Launches | None = None,
) -> _Outcome:
    if undo is not None:
        undo.session.undo()
    with emulate(target=target, copies=how[0], order=how[1], keep=True, launches=launches) as session:
        session.tracer = tracer
        try:
            answer, fault = function(), None
        except EmulationFault as error:
            answer, fault = None, error
    return _Outcome(session, answer, fault)


def _explain(function: Callable[[], Any], target: str, one: _Outcome, two: _Outcome, difference: str) -> NoReturn:
    again = _run(function, FIRST, target, undo=two)
    repeated = one.difference(again)
    if repeated is not None:
        fail("nondeterministic", f"two equal runs differ: {repeated}", at=_place(one, again))
    mixed = {}
    before = again
    for cause, how in _MIXED.items():
        before = mixed[cause] = _run(function, how, target, undo=before)
    if (found := one.difference(mixed["order"])) is not None:
        trace = _Trace()
        before.session.undo()
        _run(function, FIRST, target, tracer=trace.allocated).session.undo()
        conflict = trace.conflict
        at = (conflict[0], conflict[1]) if conflict else _place(one, mixed["order"])
        where = f"; {conflict[2]}" if conflict else ""
        _raise("cross-program", f"the order of programs changes the result: {found}{where}", at, one, mixed["order"])
    overlaps = sorted(two.session.overlaps | mixed["copies"].session.overlaps)
    at = (overlaps[0][0], overlaps[0][1]) if overlaps else _place(one, two)
    lines = "; ".join(f"line {load} loads what the copy of line {copy} may still be writing" for _, load, copy in overlaps[:4])
    _raise(
        "race", f"the time at which copies land changes the result: {difference}{'; ' + lines if lines else ''}", at, one, two
    )


def _raise(kind: str, message: str, at: tuple[str, int], *runs: _Outcome) -> NoReturn:
    fault = next((item.fault for item in runs if item.fault), None)
    program = fault.finding.program if fault else None
    kernel = fault.finding.kernel if fault else runs[0].session.launches[0][0] if runs[0].session.launches else ""
    value = fault.finding.value if fault else ""
    raise EmulationFault(
        Finding(kind=kind, file=at[0], line=at[1], program=program, value=value, message=message, kernel=kernel)
    ) from fault


def _how(run: _Outcome) -> str:
    return f"with {run.session.copies} copies, programs {run.session.order},"


def _outcome(found: Finding | None) -> str:
    return f"there is {found}" if found else "there is an answer"


def _place(*runs: _Outcome) -> tuple[str, int]:
    for run in runs:
        if run.fault:
            return run.fault.finding.file, run.fault.finding.line
    return "", 0


def _tensors(answer: Any, name: str = "result") -> list[tuple[str, torch.Tensor]]:
    if isinstance(answer, torch.Tensor):
        return [(name, answer)]
    if isinstance(answer, (tuple, list)):
        return [pair for at, item in enumerate(answer) for pair in _tensors(item, f"{name}[{at}]")]
    if isinstance(answer, Mapping):
        return [pair for key, item in answer.items() for pair in _tensors(item, f"{name}[{key!r}]")]
    if dataclasses.is_dataclass(answer):
        return [
            pair for item in dataclasses.fields(answer) for pair in _tensors(getattr(answer, item.name), f"{name}.{item.name}")
        ]
    return []


def _bits(values: torch.Tensor) -> Array:
    bits: Array = values.detach().contiguous().view(CARRIERS[values.element_size()]).numpy().copy()
    return bits


def _first_difference(one: Array, two: Array | None) -> str | None:
    if two is None or one.shape != two.shape:
        return "its shape"
    different = one.view(f"i{one.itemsize}") != two.view(f"i{two.itemsize}")
    if not different.any():
        return None
    place = [int(item) for item in np.argwhere(different)[0]]
    return f"element {place[0] if len(place) == 1 else place} and {int(different.sum()) - 1} others"


class _Trace:
    """Who reads and writes what: finds the first access that meets another program's."""

    def __init__(self) -> None:
        self.conflict: tuple[str, int, str] | None = None
        self._maps: dict[tuple[int, int], tuple[Array, Array, Array]] = {}
        self._launch: object = None

    def allocated(self, memory: Allocation) -> None:
        """Watch an allocation."""
        memory.watch = self._access

    def _access(self, memory: Allocation, elements: Array, writes: bool) -> None:
        from harness.emulation.program import now

        if self.conflict is not None:
            return
        storage = memory.tensor.untyped_storage()
        width = memory.codes.itemsize
        if self._launch is not now.launch:
            self._maps.clear()
            self._launch = now.launch
        key, size = (storage.data_ptr(), width), storage.nbytes() // width
        if key not in self._maps:
            self._maps[key] = (np.zeros(size, np.int32), np.zeros(size, np.int32), np.zeros(size, np.int32))
        writer, reader, lines = self._maps[key]
        first, second, third = now.ids
        me = 1 + first + now.grid[0] * (second + now.grid[1] * third)
        at = elements + (memory.address - storage.data_ptr()) // width
        others = (writer[at] != 0) & (writer[at] != me)
        if writes:
            others |= (reader[at] != 0) & (reader[at] != me)
        file, line = site()
        if others.any():
            place = int(np.flatnonzero(others)[0])
            other = int(writer[at][place] or reader[at][place])
            verb = "writes" if writes else "reads"
            self.conflict = (
                file,
                line,
                f"program {now.ids} {verb} element {int(elements[place])} of {memory.name}, which program number {other - 1} "
                f"used in line {int(lines[at][place])}",
            )
            return
        (writer if writes else reader)[at] = me
        lines[at] = line
