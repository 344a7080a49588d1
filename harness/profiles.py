"""How much a run asks: the profiles.

1. A profile is data. It bounds the number of cases, their size, and the time spent on each backend and regime.
2. ``smoke`` and ``gate`` ask the same cases each time they run with the same seed; ``nightly`` explores.
3. A time limit ends the search for a first failure; it never ends a search as passed that has executed nothing.

Source: sizes are chosen so that most cases take milliseconds to judge on a CPU: cases per second is the worth of a search.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """How many cases a run asks of each backend and regime, and how large they may be."""

    #: Its name on the command line.
    name: str
    #: Random cases of each backend and regime.
    examples: int
    #: Time spent on them, seconds, before shrinking.
    seconds: float
    #: Time spent on shrinking one backend and regime, seconds.
    shrink_seconds: float
    #: Longest request, cached tokens.
    longest: int
    #: Cached tokens of a case, all requests together.
    tokens: int
    #: Requests of a case.
    batch: int
    #: Heads of a case.
    heads: int
    #: Scores of a case: heads x query tokens x cached tokens.
    scores: int
    #: Whether each run draws new cases.
    explores: bool = False
    #: Whether a regime fails that never saw one of the judge's sensitivities.
    demands_sensitivities: bool = True
    #: Share of random cases that are held to a relation between two runs.
    related: float = 0.25
    #: On a GPU: sets of the fields that a backend compiles kernels for, shared by the cases of a search.
    kernels: int = 8
    #: On a GPU: searches that a pair's random cases are cut into, so that several processes or GPUs can share them.
    parts: int = 1
    #: On a GPU: captured graphs that are asked of each backend and regime.
    graphs: int = 4
    #: Serving traces that are asked of each backend and regime, and the steps that one has at most.
    traces: int = 3
    trace_steps: int = 10
    #: Production shapes of each backend and row; None for all that fit.
    shapes: int | None = 1
    #: Rejected cases that the contract check asks of each backend.
    refusals: int = 12


#: The profiles, smallest first.
PROFILES: Mapping[str, Profile] = {
    profile.name: profile
    for profile in (
        Profile(
            name="smoke",
            examples=100,
            seconds=25,
            shrink_seconds=20,
            longest=1100,
            tokens=1400,
            batch=8,
            heads=128,
            scores=40_000,
            demands_sensitivities=False,
        ),
        Profile(
            name="gate",
            examples=500,
            seconds=600,
            shrink_seconds=90,
            longest=8200,
            tokens=16_400,
            batch=130,
            heads=128,
            scores=150_000,
            kernels=24,
            parts=4,
            graphs=16,
            traces=40,
            shapes=None,
            trace_steps=16,
            refusals=40,
        ),
        Profile(
            name="nightly",
            examples=20_000,
            seconds=7200,
            shrink_seconds=600,
            longest=65_600,
            tokens=131_200,
            batch=260,
            heads=256,
            scores=2_000_000,
            explores=True,
            kernels=200,
            parts=16,
            graphs=200,
            traces=1000,
            shapes=None,
            trace_steps=24,
            refusals=200,
        ),
    )
}
#: What a run asks when no profile is named.
DEFAULT = "smoke"
