"""What an emulated kernel did wrong, as records.

1. A finding names the kernel's own file and line, the program, and the value that gives it away.
2. Finding the line costs nothing until there is something to say: it is read from the stack.
3. ``EmulationFault`` carries one finding; a kernel that raises it was stopped there.

Source: the list of kinds is what ``harness/emulation/README.md`` promises.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import NoReturn

#: Every kind of finding and what it means.
KINDS: Mapping[str, str] = {
    "int-overflow": "a sum, difference or product left the type that Triton gives it",
    "out-of-bounds": "a lane that is not masked read or wrote outside its allocation",
    "buffer-range": "a buffer operation was given an offset that its 31-bit byte range cannot hold",
    "race": "the result depends on when an asynchronous copy lands",
    "cross-program": "the result depends on the order in which programs run",
    "nondeterministic": "the result differs between two runs that differ in nothing",
    "division-by-zero": "an integer was divided by zero",
    "assumption": "a condition that the kernel promises the compiler does not hold",
    "assertion": "a static or device assertion of the kernel does not hold",
    "unknown-operation": "a name that has no meaning in the table of names",
    "unmodelled": "a known name, used in a way whose result is not modelled",
    "type-error": "operands that Triton refuses",
    "kernel-error": "the kernel's Python raised an error",
    "launch-error": "the launch does not fit the kernel's signature",
}

#: Kinds that say that the emulator lacks a meaning, not that the kernel is wrong.
_OURS = frozenset({"unknown-operation", "unmodelled", "launch-error"})
#: Kinds found by comparing runs.
_DIFFERENCES = frozenset({"race", "cross-program", "nondeterministic"})
#: Marks the globals of functions made from a kernel's source; its value is the kernel's name.
MARK = "__mla_gate_kernel__"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that a kernel did wrong."""

    #: One of KINDS.
    kind: str
    #: The kernel's source file, or "" where no kernel was running.
    file: str
    #: Line in that file, 0 where none is known.
    line: int
    #: The program's id on each grid axis, or None outside a program.
    program: tuple[int, int, int] | None
    #: The value that gives it away, printed; "" if there is none.
    value: str
    #: What happened and, where it helps, why.
    message: str
    #: The kernel's name.
    kernel: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"a finding's kind must be one of {', '.join(KINDS)}, not {self.kind!r}")

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}" if self.file else "outside a kernel"
        program = "" if self.program is None else f", program {self.program}"
        return f"{self.kind} at {where}{program}: {self.message}"


class EmulationFault(Exception):
    """A kernel was stopped, or two of its runs differ; ``finding`` says where and why."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(str(finding))
        self.finding = finding

    @property
    def verdict_kind(self) -> str:
        """The verdict that it is: ERROR where the emulator lacks a meaning, else FAIL."""
        return "ERROR" if self.finding.kind in _OURS else "FAIL"

    @property
    def verdict_fault(self) -> str:
        """The fault of the verdict, where it is FAIL."""
        return "nondeterministic" if self.finding.kind in _DIFFERENCES else "crash"

    def __reduce__(self) -> tuple[type[EmulationFault], tuple[Finding]]:
        return type(self), (self.finding,)


class Where:
    """The program that is running now."""

    program: tuple[int, int, int] | None = None
    kernel: str = ""


def site(frame: FrameType | None = None) -> tuple[str, int]:
    """Find the kernel line that is being run: the innermost frame made from a kernel's source."""
    frame = frame or sys._getframe(1)
    while frame is not None:
        if MARK in frame.f_globals:
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return "", 0


def site_of(trace: TracebackType | None) -> tuple[str, int]:
    """Find the innermost kernel line of a traceback."""
    found = ("", 0)
    while trace is not None:
        if MARK in trace.tb_frame.f_globals:
            found = trace.tb_frame.f_code.co_filename, trace.tb_lineno
        trace = trace.tb_next
    return found


def finding(kind: str, message: str, value: object = "", at: tuple[str, int] | None = None) -> Finding:
    """Record a finding at a line: the one being run, unless another is named."""
    file, line = at or site(sys._getframe(1))
    return Finding(
        kind=kind, file=file, line=line, program=Where.program, value=str(value), message=message, kernel=Where.kernel
    )


def fail(kind: str, message: str, value: object = "", at: tuple[str, int] | None = None) -> NoReturn:
    """Stop the kernel with a finding.

    Raises:
        EmulationFault: always.
    """
    raise EmulationFault(finding(kind, message, value, at or site(sys._getframe(1))))
