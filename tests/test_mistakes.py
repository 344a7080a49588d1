"""Mistakes made on purpose in the embedded kernel are caught in the smoke profile and shrink to the least that shows them."""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest
import torch

from harness.acceptance import acceptance
from harness.backends import registry
from harness.backends.protocol import Backend
from harness.backends.triton_splitkv_mistakes import MISTAKES
from harness.plan import Pair
from harness.profiles import PROFILES
from harness.regimes import Regimes, load
from harness.run import Result, attempt
from harness.search import Finding, Question, Search, questions, search
from harness.strategies import cases

#: The smoke profile with time to spare: on a busy machine the search must not end for want of it.
SMOKE = dataclasses.replace(PROFILES["smoke"], seconds=300.0, shrink_seconds=120.0, related=0.0)
#: What a mistake needs beyond one request, one head and one token: lengths, and other fields.
NEEDS: dict[str, dict[str, object]] = {
    "merge-without-lse": {"lengths": (129,)},  # two splits: of at least 128 tokens
    "first-split-only": {"lengths": (129,)},
    "no-rescale": {"lengths": (65,)},  # two tiles
    "rope-dropped": {"heads": 2},
    "mask-off-by-one": {"query_tokens": 2},
    "causal-lost": {"query_tokens": 2},
    "first-request-s-table": {"batch": 2},
}


def ask(question: Question, *, backend: Backend, rules: Regimes) -> Result:
    """Run a case once: these mistakes do not waver, so a wrong answer need not be asked for again."""
    return attempt(question.case, backend, rules, device=torch.device("cpu")).result(question.case, backend, 0.0)


def find(name: str) -> Finding:
    """Search the regimes of the kernel with a mistake, as the smoke profile does, until one finds it."""
    backend, rules = registry.make(f"triton-splitkv!{name}"), load()
    for regime in rules.for_backend(backend.name):
        pair = Pair(backend=backend, regime=regime)
        asked = Search(partial(ask, backend=backend, rules=rules), lambda result, phase: None, SMOKE)
        strategy = questions(cases(regime, SMOKE, backend), SMOKE)
        outcome = search(strategy, asked, acceptance(regime, backend), seed=len(str(pair)), database=None)
        if outcome.findings:
            return min(outcome.findings, key=lambda finding: sum(finding.walk.case.lengths))
    raise AssertionError(f"{name} was not found")


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_caught_and_shrinks_to_the_least_that_shows_it(name: str) -> None:
    finding = find(name)
    case, needs = finding.walk.case, NEEDS.get(name, {})
    assert finding.walk.complete
    assert case.batch <= 2
    assert case.heads == needs.get("heads", 1)
    assert case.query_tokens == needs.get("query_tokens", 1)
    if "batch" in needs:
        assert case.batch == needs["batch"]
    assert max(case.lengths) <= max(needs.get("lengths", (1,)))  # type: ignore[call-overload]
    assert finding.walk.neighbour is not None
