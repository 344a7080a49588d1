"""The program that is running: where the operations of a kernel find their surroundings.

1. One program runs at a time; operations reach it through ``now``.
2. What belongs to a program (LDS, copies in flight) is cleared when it ends.
"""

from __future__ import annotations

from harness.emulation.findings import fail
from harness.emulation.shared import Copies, Lds


class Program:
    """What the operations of the running program refer to."""

    def __init__(self) -> None:
        self.ids: tuple[int, int, int] = (0, 0, 0)
        self.grid: tuple[int, int, int] = (1, 1, 1)
        self.warps = 4
        #: Tells one launch from another.
        self.launch: object = None
        self.lds = Lds()
        self._copies: Copies | None = None
        #: What kernels print.
        self.printed: list[str] = []

    @property
    def copies(self) -> Copies:
        """The asynchronous copies of the program."""
        if self._copies is None:
            fail("launch-error", "a kernel's operation was called where no kernel is running")
        return self._copies

    def begin(self, copies: Copies | None) -> None:
        """Begin a launch, or end one with None."""
        self._copies = copies
        self.launch = object()

    def end(self) -> None:
        """End a program."""
        self.lds.clear()
        if self._copies is not None:
            self._copies.clear()


now = Program()
