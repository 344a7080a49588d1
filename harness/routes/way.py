"""The way that one case takes through a route: the kernel, the steps, and how it ends.

Rules kept here:

1. A way is found without tensors and without AITER.
2. All that goes wrong on it is listed, not the first alone: what a kernel refuses because the query was quantised may hide
   what it would refuse next.

Source: the route's rules and the kernels' contracts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from harness.case import Case
from harness.routes.contracts import Contracts, Problem, pool_bytes
from harness.routes.record import Call, Route, Rule, walk

#: The step whose absence is asked about: what a kernel would say to the query as the model made it.
_QUANTISE = "quantise-query"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Something on the way that does not end well."""

    problem: Problem
    #: Whether it shows only once the query is left as it was.
    behind: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One case's way."""

    #: The rule that decides.
    rule: Rule
    #: The kernel that answers, and the steps before it: the fallback's where the first kernel is caught failing.
    kernel: str
    steps: tuple[Call, ...]
    #: The case that the kernel sees.
    case: Case
    #: What goes wrong, as it is met.
    found: tuple[Found, ...]

    @property
    def ends_with(self) -> Problem | None:
        """What the call ends with instead of an answer; None where it answers."""
        return next((found.problem for found in self.found if not found.problem.runs and not found.behind), None)


def find_way(
    route: Route, case: Case, contracts: Contracts, settings: Mapping[str, str], *, pool: int | None = None
) -> Way | None:
    """Find the way of a case; None where the engine has none for it.

    Args:
        route: whose.
        case: as the engine sees it.
        contracts: what the kernels take.
        settings: the engine's.
        pool: bytes of its pool; None for the case's own.
    """
    if case.lse:
        case = case.replace(lse=False)  # no engine asks for it here
    rule = route.rule(case, contracts.arch, settings)
    if rule is None:
        return None
    kernel, steps = rule.kernel, route.steps(case, rule)
    asked, found = walk(case, steps), []
    problem = contracts.ask(kernel, asked)
    if problem is not None and rule.fallback is not None:
        kernel, steps = rule.fallback.kernel, route.steps(case, rule.fallback)
        text = f"after {rule.kernel} ({problem.reason}) the engine goes on with {kernel}, without an error"
        found.append(Found(problem=Problem(outcome="changed", kernel=rule.kernel, reason=text)))
        asked = walk(case, steps)
        problem = contracts.ask(kernel, asked)
    if problem is not None:
        found.append(Found(problem=problem))
        left = tuple(step for step in steps if step.name != _QUANTISE)
        next_one = contracts.ask(kernel, walk(case, left)) if left != steps else None
        if next_one is not None and next_one != problem:
            found.append(Found(problem=next_one, behind=True))
    else:
        reported = contracts.reported(kernel, asked, pool_bytes(case) if pool is None else pool)
        found += [Found(problem=reported)] if reported else []
        if any(step.name == _QUANTISE for step in steps):
            text = f"the {case.query_format} query is rounded to e4m3fn on the way"
            found.append(Found(problem=Problem(outcome="changed", kernel=kernel, reason=text)))
    return Way(rule=rule, kernel=kernel, steps=steps, case=asked, found=tuple(found))
