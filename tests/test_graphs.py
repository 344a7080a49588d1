"""Captured graphs: a run that may be replayed passes, and one that keeps something of the host's does not.

A CPU captures nothing, so here a graph is a call that runs again with what it was captured with.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from harness import graphs
from harness.backends.protocol import Capabilities, Output
from harness.cache import pool_pages
from harness.case import Case
from harness.graphs import replays, run_graph, why_not_graph
from harness.inputs import Inputs
from harness.memory import NotEnoughMemory
from harness.regimes import load
from harness.run import Result
from references.oracle import oracle
from tests.faulty import make

CASE = Case(heads=2, lengths=(40, 7, 18, 12), page_size=4, placement="permuted", table_padding=1, seed=1)
REGIMES = load(Path(__file__).parent / "faulty.toml")


def by_tensors(inputs: Inputs) -> Output:
    """Answer by what lies in the tensors now, whatever the host knew before."""
    case, lengths = inputs.case, tuple(inputs.lengths.tolist())
    tables = []
    for request, length in enumerate(lengths):
        count = -(-length // case.page_size)
        if inputs.block_table is not None:
            pages = inputs.block_table[request, :count]
        else:
            assert inputs.kv_indptr is not None and inputs.kv_indices is not None
            pages = inputs.kv_indices[inputs.kv_indptr[request] :][:count]
        tables.append((pages.long()[:, None] * case.page_size + torch.arange(case.page_size)).flatten()[:length])
    now = dataclasses.replace(inputs, case=case.replace(lengths=lengths), slots=torch.cat(tables))
    answer = oracle(now.problem())
    inputs.out.copy_(answer.out)
    if inputs.lse is not None:
        inputs.lse.copy_(answer.lse)
    return Output(out=inputs.out, lse=inputs.lse, what_ran={"kernel": "by tensors"})


def by_the_host_s_lengths(inputs: Inputs) -> Output:
    """Answer for the lengths that the host knew when it was captured."""
    answer = oracle(inputs.problem())
    inputs.out.copy_(answer.out)
    if inputs.lse is not None:
        inputs.lse.copy_(answer.lse)
    return Output(out=inputs.out, lse=inputs.lse)


def into_a_copy(inputs: Inputs) -> Output:
    """Answer right, into memory that only the first run fills: a replay leaves what was there."""
    output = by_tensors(inputs)
    return Output(out=output.out.clone(), lse=output.lse)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """A backend that says it may be captured."""

    run: Callable[[Inputs], Output]
    name: str = "python:tests.faulty:right"
    capabilities: Capabilities = Capabilities(graphs=True)

    def why_not(self, case: Case, device: torch.device) -> str | None:
        """Accept every case."""
        return None


def again(run: Callable[[], Output]) -> tuple[Output, Callable[[], object]]:
    return run(), run


def ask(run: Callable[[Inputs], Output], case: Case = CASE) -> Result:
    return run_graph(case, Captured(run=run), REGIMES, device="cpu", capture=again)


@pytest.mark.parametrize("table", ["padded", "ragged"])
@pytest.mark.parametrize("lengths", [CASE.lengths, (9,), (300, 0, 2)])
def test_a_run_that_reads_its_tensors_may_be_replayed(table: str, lengths: tuple[int, ...]) -> None:
    result = ask(by_tensors, CASE.replace(table=table, lengths=lengths))
    assert result.verdict.kind in ("PASS", "UNTRUSTED"), result.verdict.message
    assert result.relation == "graph" and result.what_ran == {"kernel": "by tensors"}


def test_a_run_that_keeps_the_lengths_it_was_captured_with_is_a_variant() -> None:
    verdict = ask(by_the_host_s_lengths).verdict
    assert (verdict.kind, verdict.fault) == ("FAIL", "variant")
    assert "captured on lengths [20, 4, 9, 6] and right there, wrong when replayed on" in verdict.message


def test_an_answer_that_a_replay_does_not_write_is_a_variant() -> None:
    def capture(run: Callable[[], Output]) -> tuple[Output, Callable[[], object]]:
        return run(), lambda: None

    result = run_graph(CASE, Captured(run=into_a_copy), REGIMES, device="cpu", capture=capture)
    assert result.verdict.fault == "variant" and "other values and other pages" in result.verdict.message


def test_a_run_that_cannot_be_captured_says_so() -> None:
    def capture(run: Callable[[], Output]) -> tuple[Output, Callable[[], object]]:
        raise RuntimeError("operation not permitted when stream is capturing")

    verdict = run_graph(CASE, Captured(run=by_tensors), REGIMES, device="cpu", capture=capture).verdict
    assert verdict.fault == "crash"
    assert "right, but cannot be captured" in verdict.message and "not permitted" in verdict.message


def test_memory_that_is_gone_once_the_graph_is_kept_costs_the_case(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = itertools.count()

    def lay(memory: Inputs, case: Case, backend: Captured, device: torch.device) -> Inputs:
        if next(asked) == 2:
            raise NotEnoughMemory("needs 9 GiB")
        return whole(memory, case, backend, device)

    whole = graphs._lay
    monkeypatch.setattr(graphs, "_lay", lay)
    verdict = ask(by_tensors).verdict
    assert (verdict.kind, verdict.message) == ("UNSUPPORTED", "longer contexts: needs 9 GiB")


def test_the_cases_of_a_graph_fit_one_memory() -> None:
    made = [case for _, case in replays(CASE)]
    assert made[0] == made[-1]
    assert {pool_pages(case) for case in made} == {pool_pages(made[0])}
    widths = {max(1, *(-(-length // case.page_size) for length in case.lengths)) + case.table_padding for case in made}
    assert widths == {11}
    assert any(0 in case.lengths for case in made) and len({max(case.lengths) for case in made}) == 3


def test_a_cpu_and_a_backend_that_says_nothing_are_asked_for_no_graph() -> None:
    backend = Captured(run=by_tensors)
    assert why_not_graph(backend, torch.device("cpu")) == "only a GPU captures graphs"
    assert why_not_graph(backend, torch.device("cuda")) is None
    assert "does not say" in str(why_not_graph(make("python:tests.faulty:right"), torch.device("cuda")))
    result = run_graph(CASE, backend, REGIMES, device="cpu")
    assert result.verdict.kind == "UNSUPPORTED" and "only a GPU" in result.verdict.message
