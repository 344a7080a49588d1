"""The progress of a search, as a line now and then.

1. The time left is that of the cases left at the pace so far, and never more than the search may take.
2. Cases asked while shrinking are counted apart: they are no progress of the search.
"""

from __future__ import annotations

import time
from collections import Counter

from harness.profiles import Profile
from harness.run import Result
from harness.search import EXECUTED

#: Seconds between two lines.
SECONDS = 10.0


class Progress:
    """Hears of the results of one search."""

    def __init__(self, name: str, profile: Profile, last_word: float) -> None:
        """Begin.

        Args:
            name: of the row of the table.
            profile: how much the search asks, and how long it may.
            last_word: when a line was last shown, by any search of the run.
        """
        self.name, self.profile, self.last_word = name, profile, last_word
        self._began = time.monotonic()
        self._counts: Counter[str] = Counter()
        self._worst, self._metric = 0.0, ""

    def heard(self, result: Result, phase: str) -> str | None:
        """Count a result; give the line to show, where it is time for one."""
        self._counts[phase if phase == "shrink" else result.verdict.kind] += 1
        for name, ratio in result.verdict.measurements.ratios.items() if phase != "shrink" else ():
            if not ratio <= self._worst:
                self._worst, self._metric = ratio, name
        if time.monotonic() <= self.last_word + SECONDS:
            return None
        self.last_word = time.monotonic()
        return self.line()

    def line(self) -> str:
        """Say how far the search is."""
        done = sum(count for kind, count in self._counts.items() if kind in EXECUTED)
        parts = [f"{done} of {self.profile.examples} cases", ", ".join(f"{n} {kind}" for kind, n in self._counts.items())]
        if self._metric:
            parts.append(f"worst {self._worst:.3g} {self._metric}")
        if done and not self._counts["shrink"]:
            spent = time.monotonic() - self._began
            left = min(spent / done * (self.profile.examples - done), self.profile.seconds - spent)
            parts.append(f"about {max(left, 0):.0f} s left")
        return f"mla-gate: {self.name}: {'; '.join(parts)}"
