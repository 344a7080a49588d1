"""The search finds what a backend gets wrong, shrinks it, keeps faults apart and its word about time and seeds."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import strategies as st

from harness.acceptance import acceptance
from harness.case import Case
from harness.plan import Pair
from harness.profiles import PROFILES, Profile
from harness.regimes import RELATIONS, load
from harness.run import Result, run_case
from harness.search import Outcome, Question, Search, questions, search
from harness.strategies import cases
from harness.verdict import Verdict
from tests.stubs import make, write_regimes


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    regimes = load(write_regimes(tmp_path_factory.mktemp("regimes")))
    return Pair(backend=make("python:tests.stubs:right"), regime=regimes.named("few-heads"))


def verdict(fault: str | None) -> Verdict:
    return Verdict(kind="FAIL" if fault else "PASS", fault=fault, message="")


#: The smoke profile without relations.
SMOKE = dataclasses.replace(PROFILES["smoke"], related=0.0)


def plain(pair: Pair) -> st.SearchStrategy[Question]:
    return questions(cases(pair.regime, SMOKE, pair.backend), SMOKE)


def hunt(
    pair: Pair,
    fault: Callable[[Case], str | None],
    *,
    profile: Profile = SMOKE,
    seed: int = 0,
    database: Path | None = None,
    heard: list[tuple[Case, str]] | None = None,
) -> tuple[Outcome, list[Case]]:
    """Search with a kernel that is a function from case to fault."""
    ran: list[Case] = []

    def run(question: Question) -> Result:
        case = question.case
        ran.append(case)
        return Result(case=case, backend=pair.backend.name, regime=pair.regime.name, verdict=verdict(fault(case)))

    def hear(result: Result, phase: str) -> None:
        if heard is not None:
            heard.append((result.case, phase))

    accepts = acceptance(pair.regime, pair.backend)
    strategy = questions(cases(pair.regime, profile, pair.backend), profile)
    return search(strategy, Search(run, hear, profile), accepts, seed=seed, database=database), ran


def test_a_right_kernel_has_no_finding(pair: Pair) -> None:
    outcome, ran = hunt(pair, lambda case: None)
    assert not outcome.findings
    assert outcome.executed == len(ran)
    assert outcome.executed > 4 * SMOKE.examples // 5  # some draws are the same case
    assert not outcome.cut


def test_a_wrong_kernel_is_found_and_shrunk_to_the_least_that_shows_it(pair: Pair) -> None:
    outcome, _ = hunt(pair, lambda case: "mismatch" if max(case.lengths) >= 70 and case.page_size > 1 else None)
    (finding,) = outcome.findings
    assert finding.result.case == Case(heads=1, lengths=(70,), page_size=2)
    assert finding.walk.neighbour == Case(heads=1, lengths=(69,), page_size=2)
    assert finding.walk.complete


def test_faults_of_different_nature_shrink_apart(pair: Pair) -> None:
    def fault(case: Case) -> str | None:
        if case.query_tokens > 1:
            return "crash"
        return "mismatch" if max(case.lengths) >= 70 else None

    outcome, _ = hunt(pair, fault)
    found = {finding.result.verdict.fault: finding.result.case for finding in outcome.findings}
    assert found == {
        "crash": Case(heads=1, lengths=(0,), query_tokens=2),
        "mismatch": Case(heads=1, lengths=(70,)),
    }


def test_wrong_values_and_missing_ones_are_one_finding(pair: Pair) -> None:
    faults = {0: "mismatch", 1: "non-finite", 2: "unwritten"}
    outcome, _ = hunt(pair, lambda case: faults[sum(case.lengths) % 3] if max(case.lengths) >= 70 else None)
    assert len(outcome.findings) == 1


def test_a_case_is_run_once_even_where_the_kernel_wavers(pair: Pair) -> None:
    """A kernel that fails every other time keeps the verdict it got, and Hypothesis never calls it flaky."""
    calls = [0]

    def fault(case: Case) -> str | None:
        calls[0] += 1
        return "mismatch" if calls[0] % 2 else None

    outcome, ran = hunt(pair, fault)
    assert len(ran) == len(set(ran))
    assert len(outcome.findings) == 1


def test_the_same_seed_asks_the_same_cases_and_another_seed_others(pair: Pair) -> None:
    one, two, other = (hunt(pair, lambda case: None, seed=seed)[1] for seed in (5, 5, 6))
    assert one == two
    assert one != other


def test_the_time_limit_ends_a_search_and_says_so(pair: Pair) -> None:
    short = dataclasses.replace(SMOKE, seconds=0.2, examples=10_000)

    def slow(case: Case) -> None:
        time.sleep(0.01)

    outcome, ran = hunt(pair, slow, profile=short)
    assert outcome.cut
    assert 0 < outcome.executed == len(ran) < 100


def test_a_finding_survives_the_end_of_the_time_for_shrinking(pair: Pair) -> None:
    short = dataclasses.replace(SMOKE, shrink_seconds=0.05)

    def slow(case: Case) -> str | None:
        time.sleep(0.02)
        return "mismatch" if max(case.lengths) >= 70 else None

    outcome, _ = hunt(pair, slow, profile=short)
    (finding,) = outcome.findings
    assert max(finding.result.case.lengths) >= 70


def test_an_earlier_failure_is_asked_first_from_the_database(pair: Pair, tmp_path: Path) -> None:
    def fault(case: Case) -> str | None:
        return "mismatch" if max(case.lengths) >= 70 else None

    hunt(pair, fault, database=tmp_path / "db")
    _, ran = hunt(pair, fault, database=tmp_path / "db", seed=99)
    assert max(ran[0].lengths) == 70


def test_our_own_errors_are_kept_apart_from_findings(pair: Pair) -> None:
    def run(question: Question) -> Result:
        case = question.case
        kind = Verdict(kind="ERROR", message="ours") if max(case.lengths) >= 70 else verdict(None)
        return Result(case=case, backend=pair.backend.name, regime=pair.regime.name, verdict=kind)

    asked = Search(run, lambda result, phase: None, SMOKE)
    outcome = search(plain(pair), asked, acceptance(pair.regime, pair.backend), seed=0, database=None)
    assert not outcome.findings
    assert [error.verdict.kind for error in outcome.errors] == ["ERROR"]


def test_cases_that_were_not_run_do_not_count(pair: Pair) -> None:
    def run(question: Question) -> Result:
        return Result(
            case=question.case,
            backend=pair.backend.name,
            regime=None,
            verdict=Verdict(kind="UNSUPPORTED", message="needs 9 GiB"),
        )

    asked = Search(run, lambda result, phase: None, SMOKE)
    outcome = search(plain(pair), asked, acceptance(pair.regime, pair.backend), seed=0, database=None)
    assert outcome.executed == 0


def test_an_interrupt_leaves_the_search_and_the_database_keeps_what_failed(pair: Pair, tmp_path: Path) -> None:
    failed = [0]

    def fault(case: Case) -> str | None:
        if failed[0] > 5:
            raise KeyboardInterrupt
        failed[0] += max(case.lengths) >= 70
        return "mismatch" if max(case.lengths) >= 70 else None

    with pytest.raises(KeyboardInterrupt):
        hunt(pair, fault, database=tmp_path / "db")
    _, ran = hunt(pair, lambda case: "mismatch" if max(case.lengths) >= 70 else None, database=tmp_path / "db")
    assert max(ran[0].lengths) >= 70


def test_results_before_the_first_failure_are_search_and_later_ones_shrink(pair: Pair) -> None:
    heard: list[tuple[Case, str]] = []
    outcome, _ = hunt(pair, lambda case: "mismatch" if max(case.lengths) >= 70 else None, heard=heard)
    phases = [phase for _, phase in heard]
    assert phases == sorted(phases)  # "search" before "shrink"
    assert phases.count("search") == outcome.executed
    assert max(heard[outcome.executed - 1][0].lengths) >= 70


def test_a_real_backend_is_searched_and_judged(pair: Pair, tmp_path: Path) -> None:
    regimes = load(write_regimes(tmp_path))
    wrong = make("python:tests.stubs:wrong")
    asked = Search(lambda question: run_case(question.case, wrong, regimes), lambda result, phase: None, SMOKE)
    outcome = search(plain(pair), asked, acceptance(pair.regime, wrong), seed=0, database=None)
    (finding,) = outcome.findings
    assert finding.result.case == Case(heads=1, lengths=(70,))
    assert finding.result.verdict.fault == "mismatch"


def test_a_quarter_of_the_questions_holds_the_backend_to_a_relation(pair: Pair) -> None:
    related: list[str | None] = []

    def run(question: Question) -> Result:
        related.append(question.relation)
        return Result(case=question.case, backend=pair.backend.name, regime=pair.regime.name, verdict=verdict(None))

    profile = dataclasses.replace(PROFILES["smoke"], related=0.25, examples=300)
    strategy = questions(cases(pair.regime, profile, pair.backend), profile)
    asked = Search(run, lambda result, phase: None, profile)
    search(strategy, asked, acceptance(pair.regime, pair.backend), seed=0, database=None)
    share = sum(relation is not None for relation in related) / len(related)
    assert 0.15 < share < 0.4
    assert len(set(related)) > len(RELATIONS) // 2
    assert set(related) <= {None, *RELATIONS}


def test_a_fault_that_needs_a_relation_keeps_it_while_it_shrinks(pair: Pair) -> None:
    def run(question: Question) -> Result:
        broken = question.relation == "requests-permuted" and question.case.batch > 1
        made = verdict("variant" if broken else None)
        return Result(case=question.case, backend=pair.backend.name, regime=None, verdict=made, relation=question.relation)

    profile = dataclasses.replace(PROFILES["smoke"], examples=300, related=0.9)
    strategy = questions(cases(pair.regime, profile, pair.backend), profile)
    asked = Search(run, lambda result, phase: None, profile)
    outcome = search(strategy, asked, acceptance(pair.regime, pair.backend), seed=0, database=None)
    (finding,) = outcome.findings
    assert finding.result.relation == "requests-permuted"
    assert finding.result.case == Case(heads=1, lengths=(0, 0))
