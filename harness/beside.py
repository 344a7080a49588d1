"""The gate beside its peers: what each rule would have said of the same faults.

1. On our inputs: the first cases that the gate asks, every fault, every rule, over the same outputs. A rule has found a fault
   if it rejects one of them.
2. On their inputs: each owner's recipe at its shapes, every fault, the owner's rules.
3. The correct model goes first: what a rule rejects of it is printed beside what it finds.

Source: rules and recipes are the rows of ``cases/peers.toml``.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from harness.backends.protocol import Output
from harness.faults.backend import Planted, planted
from harness.faults.catalogue import FAULTS
from harness.faults.variant import BASE, VARIANTS
from harness.hunt import draw, emptied
from harness.inputs import Inputs, make_inputs
from harness.kills import Kill
from harness.memory import NotEnoughMemory
from harness.peers import Recipe, Rule
from harness.peers import load as load_peers
from harness.profiles import PROFILES
from harness.regimes import load
from references.decode import mla_decode
from references.problem import Answer

#: Cases of ours that the rules see.
SEEN = 20


@dataclass(frozen=False, slots=True, kw_only=True)
class Count:
    """What one rule did on one set of inputs."""

    #: Faults that it rejected at least once.
    found: set[str] = field(default_factory=set)
    #: Cases of the correct model that it rejected, of how many.
    rejected: int = 0
    cases: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Inputs with their truth."""

    #: Makes them; a fault may have changed those there were.
    make: Callable[[], Inputs]
    truth: Answer


def ours(seed: int, count: int = SEEN) -> list[Seen]:
    """Make the first inputs of the gate."""
    regime = load().named(f"model-{BASE}")
    backend = Planted(name=f"model:{BASE}", variant=VARIANTS[BASE])
    seen = []
    for case in draw(regime, backend, PROFILES["gate"], count, seed):
        try:
            inputs = make_inputs(case)
        except NotEnoughMemory:
            continue
        seen.append(Seen(make=partial(make_inputs, case), truth=mla_decode(inputs.problem())))
    return seen


def theirs(recipe: Recipe) -> list[Seen]:
    """Make the inputs of a recipe."""
    return [
        Seen(make=partial(recipe.inputs, case, "bf16"), truth=mla_decode(recipe.inputs(case, "bf16").problem()))
        for case in recipe.cases
    ]


def ask(seen: Sequence[Seen], rules: Sequence[Rule], names: Sequence[str]) -> dict[str, Count]:
    """Ask rules of some faults, and of the correct model, on some inputs."""
    counts = {rule.name: Count() for rule in rules}
    correct = Planted(name=f"model:{BASE}", variant=VARIANTS[BASE])
    backends: list[tuple[str, Planted]] = [("", correct)]
    # All in the base variant: the rules are asked of the same kernel.
    backends += [(name, planted(name, variant=VARIANTS[BASE])) for name in names]
    for one in seen:
        inputs = one.make()
        for name, backend in backends:
            inputs = one.make() if inputs.violations() else emptied(inputs)
            output = _run(backend, inputs)
            for rule in rules:
                if not name:
                    counts[rule.name].cases += 1
                elif name in counts[rule.name].found:
                    continue
                if output is None or not rule.accepts(output.out, one.truth.out, output.lse, one.truth.lse):
                    if name:
                        counts[rule.name].found.add(name)
                    else:
                        counts[rule.name].rejected += 1
    return counts


def _run(backend: Planted, inputs: Inputs) -> Output | None:
    try:
        return backend.run(inputs)
    except Exception:  # a crash is seen by everyone
        return None


def _work(job: tuple[list[str], int]) -> dict[str, dict[str, Count]]:
    torch.set_num_threads(1)
    names, seed = job
    rules, recipes = load_peers()
    counts = {"ours": ask(ours(seed), list(rules.values()), names)}
    for recipe in recipes:
        counts[recipe.name] = ask(theirs(recipe), [rules[name] for name in recipe.rules], names)
    return counts


def beside(kills: Sequence[Kill], *, processes: int, seed: int) -> str:
    """Print what the gate found beside what each rule finds, as a Markdown table."""
    names = [kill.name for kill in kills if not FAULTS[kill.name].history]
    jobs = [(names[part::processes], seed) for part in range(processes)]
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        parts = pool.map(_work, jobs)
    total = _joined(parts)
    own: dict[str, Any] = {name: count for recipe, found in total.items() if recipe != "ours" for name, count in found.items()}
    gate = sum(kill.found for kill in kills if kill.name in names)
    within = sum(kill.found and kill.cases <= SEEN for kill in kills if kill.name in names)
    lines = [
        f"| rule | faults found on {SEEN} of our cases | correct answers rejected there "
        "| found on its own inputs | rejected there |",
        "|---|---|---|---|---|",
        f"| this gate | {within} of {len(names)} ({gate} with all cases) | 0 | | |",
    ]
    for name, count in total["ours"].items():
        there = own[name]
        lines.append(
            f"| {name} | {len(count.found)} of {len(names)} | {count.rejected} of {count.cases} "
            f"| {len(there.found)} of {len(names)} | {there.rejected} of {there.cases} |"
        )
    return "\n".join(lines)


def _joined(parts: Sequence[dict[str, dict[str, Count]]]) -> dict[str, dict[str, Count]]:
    """Put the counts of several processes together; each asked the correct model of all cases."""
    total: dict[str, dict[str, Count]] = {}
    for part in parts:
        for place, counts in part.items():
            for name, count in counts.items():
                sum_of = total.setdefault(place, {}).setdefault(name, Count())
                sum_of.found |= count.found
                sum_of.rejected, sum_of.cases = count.rejected, count.cases
    return total
