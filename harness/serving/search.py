"""The search for failing traces of one backend in one regime.

1. Traces are drawn first and run one after another; the first that fails ends the search and is shrunk. The same seed asks the
   same traces.
2. A trace that is near the failing one counts as failing where its fault is of the same nature.
3. A regime without a decode of few requests has no traces; why is said in the table.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import hypothesis
import torch
from hypothesis import HealthCheck, Phase, Verbosity
from hypothesis import strategies as st

from harness.acceptance import Accepts, acceptance
from harness.case import Case, CaseError
from harness.plan import Pair
from harness.profiles import Profile
from harness.regimes import Regime
from harness.run import Result
from harness.search import EXECUTED, nature
from harness.serving.draw import traces
from harness.serving.shrink import ShrunkTrace, shrink
from harness.serving.steps import NAMES
from harness.serving.trace import Setup, Trace
from harness.strategies import NoSuchCase, cases, plain_case


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFinding:
    """A failing trace, shrunk."""

    #: What became of the shortest trace.
    result: Result
    #: The first trace that failed.
    first: Trace
    #: The walk from it.
    walk: ShrunkTrace


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What a search found."""

    #: Traces executed, shrinking apart.
    executed: int
    finding: TraceFinding | None
    #: Our own faults.
    errors: tuple[Result, ...]


def why_no_traces(regime: Regime, accepts: Accepts) -> str | None:
    """Say why a regime is asked for no traces, or None."""
    try:
        plain = plain_case(accepts, regime.where)
        setup = Setup.of(plain, pages=max(1, *(-(-length // plain.page_size) for length in plain.lengths)) * plain.batch)
        if plain.batch <= len(NAMES) and accepts(setup.case(0, plain.query_tokens, plain.lengths)):
            return None
    except (NoSuchCase, CaseError):
        pass
    return f"no decode of {len(NAMES)} requests or fewer from a shared pool lies in it"


def draw(strategy: st.SearchStrategy[Trace], count: int, *, seed: int) -> list[Trace]:
    """Draw traces; the same seed draws the same ones."""
    drawn: list[Trace] = []
    settings = hypothesis.settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
        verbosity=Verbosity.quiet,
    )

    def keep(trace: Trace) -> None:
        drawn.append(trace)

    state = random.getstate()
    try:
        hypothesis.seed(seed)(settings(hypothesis.given(strategy)(keep)))()
    finally:
        random.setstate(state)
    return drawn[:count]


def serve(
    pair: Pair,
    profile: Profile,
    run: Callable[[Trace], Result],
    heard: Callable[[Result, str], None],
    *,
    device: torch.device,
    seed: int,
    excuses: Callable[[Result], bool] = lambda result: False,
) -> Served:
    """Ask a pair for traces until one fails, and shrink it.

    Args:
        pair: the backend and the regime.
        profile: says how many, and how long.
        run: runs one.
        heard: hears of each result as it comes, with "search" or "shrink".
        device: where it runs.
        seed: of the search.
        excuses: whether a failure counts for nothing, as where a baseline shares it.
    """
    accepts = acceptance(pair.regime, pair.backend, device)
    shapes = cases(pair.regime, profile, pair.backend, device, seed=seed)
    strategy = traces(shapes, accepts, most=profile.trace_steps)
    executed, end = 0, time.monotonic() + profile.seconds
    errors: list[Result] = []
    for trace in draw(strategy, profile.traces, seed=seed):
        if not all(accepts(case) for case in _cases(trace)):
            continue  # the shortest trace stands for a shape of which nothing may be decoded, as where a failure is known
        result = run(trace)
        heard(result, "search")
        executed += result.verdict.kind in EXECUTED
        if result.verdict.kind == "FAIL" and not excuses(result):
            finding = _shrunk(trace, result, run, accepts, heard, profile, excuses)
            return Served(executed=executed, finding=finding, errors=tuple(errors))
        if result.verdict.kind == "ERROR":
            errors.append(result)
        if time.monotonic() > end and executed:
            break
    return Served(executed=executed, finding=None, errors=tuple(errors))


def _shrunk(
    first: Trace,
    result: Result,
    run: Callable[[Trace], Result],
    accepts: Accepts,
    heard: Callable[[Result, str], None],
    profile: Profile,
    excuses: Callable[[Result], bool],
) -> TraceFinding:
    results = {first: result}

    def fails(near: Trace) -> bool | None:
        if not all(accepts(case) for case in _cases(near)):
            return None
        results[near] = run(near)
        heard(results[near], "shrink")
        return nature(results[near]) == nature(result) and not excuses(results[near])

    walk = shrink(first, fails, seconds=profile.shrink_seconds)
    return TraceFinding(result=results[walk.trace], first=first, walk=walk)


def _cases(trace: Trace) -> Iterator[Case]:
    yield from (case for _, cases in trace.decodes() for case in cases)
