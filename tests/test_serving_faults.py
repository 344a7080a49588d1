"""Every planted pool fault is found by the machine, and in a handful of steps; a right engine is accused of nothing."""

from __future__ import annotations

import pytest

from harness.backends.registry import make
from harness.case import Case
from harness.regimes import load
from harness.run import Result
from harness.serving.detect import draw_for, hunt
from harness.serving.engine import POINTS
from harness.serving.faults import FAULTS, PoolFault
from harness.serving.run import run_trace
from harness.serving.steps import Step
from harness.serving.trace import Setup, Trace

REGIMES, SDPA = load(), make("torch-sdpa")
#: Steps that a shrunk trace may have.
MOST = 6
#: Fault -> layers of the pool and a few steps that show it, in pages of two tokens.
SHORTEST = {
    "table-stale-after-reuse": ("1", "admit a 1; decode a; admit b 1; decode b"),
    "page-freed-early": ("1", "admit a 1; fork a b; append a 2; decode b"),
    "shared-page-written": ("1", "admit a 1; fork a b; decode a"),
    "copy-leaves-a-group-out": ("1+1", "admit a 1; fork a b; decode a"),
    "fork-shares-the-table": ("1", "admit a 1; fork a b; decode a"),
    "restored-to-old-pages": ("1", "admit a 1; offload a; restore a; decode a"),
    "restored-in-reverse": ("1", "admit a 3; offload a; restore a; decode a"),
    "saved-after-reuse": ("1", "admit a 1; offload a; admit b 1; restore a; decode a"),
    "restore-leaves-a-group-out": ("1+1", "admit a 1; offload a; restore a; decode a"),
    "preempted-page-not-restored": ("1", "admit a 3; preempt a; resume a; decode a"),
    "resumed-without-the-newest": ("1", "admit a 3; preempt a; resume a; decode a"),
    "rejected-tokens-visible": ("1", "admit a 1; speculate a draft 3 keep 1; decode a"),
    "length-not-updated-after-rejection": ("1", "admit a 1; speculate a draft 2 keep 1; decode a"),
    "rejection-frees-live-page": ("1", "admit a 2; speculate a draft 2 keep 1; admit b 1; decode a"),
    "append-one-slot-late": ("1", "admit a 2; decode a"),
    "append-in-the-page-before": ("1", "admit a 2; decode a"),
    "new-rows-leave-a-group-out": ("1+1", "admit a 1; decode a"),
    "padded-row-reads-row-0": ("1", "admit a 1; decode a pad 2"),
    "padded-row-not-cleared": ("1", "admit a 1; admit b 1; decode a b; decode a pad 2"),
    "layer-stride-ignored": ("2", "admit a 1; decode a"),
    "layer-offset-ignored": ("2", "admit a 1; decode a"),
    "group-table-stale": ("1+1", "admit a 1; decode a; offload a; restore a; decode a"),
    "group-tables-exchanged": ("1+1", "admit a 1; admit b 1; decode a"),
}


def asked(name: str, *, planted: bool, watched: bool = True) -> Result:
    layers, text = SHORTEST[name]
    shape = Case(heads=1, lengths=(1,), page_size=2)
    setup = Setup.of(shape, pages=8, layers=tuple(map(int, layers.split("+"))))
    trace = Trace(setup=setup, steps=tuple(map(Step.parse, text.split("; "))))
    return run_trace(trace, SDPA, REGIMES, acts=FAULTS[name].acts if planted else {}, watched=watched)


def test_every_fault_has_a_short_trace() -> None:
    assert set(SHORTEST) == set(FAULTS) and len(FAULTS) >= 10
    assert all(len(text.split("; ")) <= MOST for _, text in SHORTEST.values())


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_in_a_few_steps_that_a_right_engine_passes(name: str) -> None:
    verdict = asked(name, planted=True).verdict
    assert verdict.kind == "FAIL", verdict.message
    verdict = asked(name, planted=False).verdict
    assert verdict.kind == "PASS", verdict.message


#: Faults that the answers of these few steps do not show: the page's other request is not decoded in them.
QUIET = {"shared-page-written", "fork-shares-the-table", "copy-leaves-a-group-out"}


@pytest.mark.parametrize("name", [name for name in FAULTS if name not in QUIET])
def test_the_judged_answers_alone_find_it_too(name: str) -> None:
    verdict = asked(name, planted=True, watched=False).verdict
    assert verdict.kind == "FAIL" and "step" in verdict.message, verdict.message


def test_a_fault_says_where_it_acts() -> None:
    assert all(set(fault.acts) <= set(POINTS) for fault in FAULTS.values())
    with pytest.raises(ValueError, match="points are places"):
        PoolFault(name="odd", what="w", why="w", needs="n", acts={"nowhere": lambda moment, value: value})


def test_a_hunt_over_drawn_traces_finds_a_fault_and_shrinks_it() -> None:
    asked_of_all = draw_for(SDPA, REGIMES, count=12, seed=0)
    found = hunt(FAULTS["padded-row-reads-row-0"].acts, asked_of_all, SDPA, REGIMES)
    assert found.trace is not None and [str(step) for step in found.trace.steps] == ["admit a 1", "decode a pad 2"]
    assert found.result is not None and found.result.verdict.kind == "FAIL" and 0 < found.asked <= 12
    assert hunt({}, asked_of_all[:3], SDPA, REGIMES).asked == 0
