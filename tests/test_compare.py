"""Base against change: what fails newly, what passes newly, whose errors moved, whose bits differ; and nothing for the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from harness.case import Case
from harness.cli import CASES
from harness.compare import Comparison, across, comparisons
from harness.ledger import LedgerError, Line, read_all, result_line
from harness.plan import PlanError, make_plan
from harness.regimes import load
from harness.report.comparison import section
from harness.run import Result, run_case
from harness.search import Search, questions, search
from harness.strategies import cases
from harness.verdict import Measurements, Verdict
from tests import stubs
from tests.test_plugin import STUB, Gate, gate  # noqa: F401  the fixture
from tests.test_search import SMOKE, pair, verdict  # noqa: F401  the fixture

pytest_plugins = ["pytester"]


def line(kind: str, number: int, *, fault: str | None = None, bits: str = "aa", rho: float = 1.0, **fields: object) -> Line:
    """Make the line of one case, told from others by its heads."""
    measured = Measurements(rows=1, rho=rho, element=rho, ratios={"lse": rho})
    made = Verdict(kind=kind, fault=fault, message="the reason\nmore", measurements=measured)
    result = Result(case=Case(heads=number, lengths=(3,)), backend="b", regime="r", verdict=made, bits=bits)
    return {"kind": "result", **result_line(result, "search"), **fields}


def compared(*pairs: tuple[Line | None, Line]) -> Comparison:
    """Compare pairs of base and change."""
    lines: list[Line] = [{"kind": "against", "backend": "b", "regime": "r", "baseline": "a"}]
    for base, change in pairs:
        lines += [{**base, "kind": "baseline", "backend": "a", "of": "b"}] if base else []
        lines.append(change)
    (found,) = comparisons(lines)
    return found


def test_each_case_is_counted_as_what_became_of_it() -> None:
    wrong, crash = {"fault": "mismatch"}, {"fault": "crash"}
    found = compared(
        (line("PASS", 1), line("PASS", 1, bits="bb")),
        (line("PASS", 2), line("FAIL", 2, **wrong)),
        (line("FAIL", 3, **wrong), line("PASS", 3)),
        (line("FAIL", 4, **wrong), line("FAIL", 4, fault="non-finite")),
        (line("FAIL", 5, **wrong), line("FAIL", 5, **crash)),
        (line("UNTRUSTED", 6), line("UNTRUSTED", 6)),
        (line("UNSUPPORTED", 7), line("FAIL", 7, **wrong)),
        (line("ERROR", 8), line("PASS", 8)),
        (None, line("PASS", 9)),
    )
    heads = [[Case.parse(case).heads for case in cases] for cases in (found.failing, found.passing, found.both)]
    assert heads == [[2, 5], [3], [4]]
    assert found.differing == ("v1:H=1:S=1:N=3:end",)
    assert (found.pairs, found.known) == (6, 6)
    assert found.unpaired == {
        "not run on the baseline: the reason": 1,
        "an error of the gate itself on the baseline": 1,
        "not asked of the baseline": 1,
    }
    assert found.reason == "2 fail newly"


def test_a_comparison_of_nothing_is_no_comparison() -> None:
    found = compared((line("UNSUPPORTED", 7), line("PASS", 7)))
    assert found.reason == "nothing was compared"
    assert "WORSE: b × r (nothing was compared)" in section([found])[-1]
    assert comparisons([line("PASS", 1)]) == []
    assert section([]) == []


def test_an_error_that_moved_is_told_and_fails_nothing() -> None:
    found = compared(*((line("PASS", n), line("PASS", n, rho=1.1)) for n in range(1, 40)))
    assert {test.metric for test in found.moved} == {"rho", "element", "lse"}
    assert found.reason is None
    assert "no new failure in 39 cases, and the differences above" in section([found])[-1]


def test_a_failing_log_sum_exp_is_measured_otherwise_and_not_compared() -> None:
    found = compared(*((line("PASS", n), line("FAIL", n, fault="mismatch", rho=1.1)) for n in range(1, 40)))
    assert {test.metric for test in found.moved} == {"rho", "element"}


def test_the_cause_is_that_of_the_first_failure_that_has_one() -> None:
    lines = [
        {"kind": "moved", "backend": "b", "regime": "r", "looks": ["what:  a move"]},
        {"kind": "failure", "backend": "b", "regime": "r", "looks": []},
        {"kind": "failure", "backend": "b", "regime": "r", "looks": ["where: all", "what:  the cause", "what:  another"]},
        {"kind": "against", "backend": "b", "regime": "r", "baseline": "a"},
    ]
    assert comparisons(lines)[0].cause == "the cause"
    assert comparisons([lines[0], lines[3]])[0].cause == "a move"


def test_two_runs_are_compared_by_the_names_of_their_backends() -> None:
    base, change = [line("PASS", 1)], [line("FAIL", 1, fault="mismatch"), line("PASS", 2)]
    (found,) = across(base, change)
    assert (found.baseline, found.pairs, found.failing) == ("b", 1, ("v1:H=1:S=1:N=3:end",))
    assert found.unpaired == {"not asked of the baseline": 1}
    assert across([{**base[0], "backend": "b@old"}], change)[0].baseline == "b@old"
    with pytest.raises(LedgerError, match="the base has b@old, b@older"):
        across([{**base[0], "backend": "b@old"}, {**base[0], "backend": "b@older"}], change)
    with pytest.raises(LedgerError, match="no case in common"):
        across([line("PASS", 3)], change)


def test_the_bits_of_an_answer_are_those_of_the_rows_that_see_a_token(tmp_path: Path) -> None:
    regimes = load(stubs.write_regimes(tmp_path))
    right, wrong = (stubs.make(f"{STUB}{kind}") for kind in ("right", "wrong"))
    short, long = Case(heads=1, lengths=(0, 3), query_tokens=2), Case(heads=1, lengths=(80,))
    assert run_case(short, right, regimes).bits == run_case(short, wrong, regimes).bits
    assert run_case(long, right, regimes).bits != run_case(long, wrong, regimes).bits
    assert run_case(short, right, regimes).bits != run_case(short.replace(seed=1), right, regimes).bits
    assert run_case(long, stubs.make(f"{STUB}refusing"), regimes).bits is None


def hunt(pair, change: Callable[[Case], str | None], base: Callable[[Case], str | None], new_only: bool = True):  # type: ignore[no-untyped-def]  # noqa: F811
    def run(question) -> Result:  # type: ignore[no-untyped-def]
        return Result(case=question.case, backend="b", regime="r", verdict=verdict(change(question.case)))

    def shared(question, result: Result) -> bool:  # type: ignore[no-untyped-def]
        return verdict(base(question.case)).fault == result.verdict.fault

    asked = Search(run, lambda result, phase: None, SMOKE, shared=shared, new_only=new_only)
    drawn = questions(cases(pair.regime, SMOKE, pair.backend), SMOKE)
    return search(drawn, asked, lambda case: case in pair.regime.where, seed=0, database=None)


def long(case: Case) -> str | None:
    return "mismatch" if max(case.lengths) >= 20 else None


def paged(case: Case) -> str | None:
    return "mismatch" if case.page_size > 1 else long(case)


def test_new_failures_shrink_apart_from_those_of_the_baseline(pair) -> None:  # type: ignore[no-untyped-def]  # noqa: F811
    outcome = hunt(pair, paged, long)
    (finding,) = outcome.findings
    assert finding.result.case == Case(heads=1, lengths=(0,), page_size=2)
    assert outcome.executed > 60  # a failure does not end it: errors are compared over all cases
    both = hunt(pair, paged, long, new_only=False).findings
    assert {(found.shared, found.result.case) for found in both} == {
        (False, Case(heads=1, lengths=(0,), page_size=2)),
        (True, Case(heads=1, lengths=(20,))),
    }


def test_what_the_baseline_gets_wrong_too_may_count_for_nothing(pair) -> None:  # type: ignore[no-untyped-def]  # noqa: F811
    assert not hunt(pair, long, long).findings
    assert not hunt(pair, lambda case: None, long).findings


def test_a_baseline_is_a_backend_a_version_or_an_error(tmp_path: Path) -> None:
    regimes = load(stubs.write_regimes(tmp_path))
    options = {"device": "cpu", "backends": [f"{STUB}right"]}
    plan = make_plan(regimes, baseline=f"{STUB}wrong", **options)  # type: ignore[arg-type]
    assert plan.baselines[f"{STUB}right"].name == f"{STUB}wrong"
    assert make_plan(regimes, baseline="old", **options).baselines[f"{STUB}right"].name == f"{STUB}right@old"  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"'triton-splitk'.*did you mean triton-splitkv.*has no versions"):
        make_plan(load(), device="cpu", backends=["torch-sdpa"], baseline="triton-splitk")
    with pytest.raises(PlanError, match="the baseline torch-sdpa has no regime"):
        make_plan(regimes, baseline="torch-sdpa", **options)  # type: ignore[arg-type]


def test_the_same_version_twice_is_no_difference(gate: Gate) -> None:  # noqa: F811
    done = gate.run("right", "--baseline", f"{STUB}right", "--examples", "12", "-k", "random or contract")
    assert done.ret == 0
    done.stdout.fnmatch_lines([
        f"mla-gate: {STUB}right is compared with {STUB}right",
        f"{STUB}right  few-heads   {STUB}right * 0 * 0 * 0 * 0 of * no move seen",
        f"{STUB}right  (contract)  {STUB}right * 12 * 0 * 0 * 0 * no move seen",
        "against the baseline: no difference in * cases",
    ])  # fmt: skip


def test_new_failures_fail_a_run_and_old_ones_only_where_all_count(gate: Gate) -> None:  # noqa: F811
    few = ("--examples", "10", "-k", "random and few-heads")
    done = gate.run("wrong", "--baseline", f"{STUB}right", "--fail-on", "new", "--ledger-dir", "new", *few)
    assert done.ret == 1
    done.stdout.fnmatch_lines([
        f"mla-gate replay v1:H=1:S=1:N=70:end --backend {STUB}wrong --device cpu --regimes-file *",
        "  fails newly: *",
        f"against the baseline: WORSE: {STUB}wrong × few-heads (* fail newly)",
    ])  # fmt: skip
    lines = [line for ledger in read_all([gate.path / "new"]) for line in ledger.lines]
    assert comparisons(lines)[0].failing

    both = ("--examples", "10", "-k", "few-heads or pinned and lengths")
    done = gate.run("wrong", "--baseline", f"{STUB}wrong", "--fail-on", "new", *both)
    assert done.ret == 0
    done.stdout.fnmatch_lines(["against the baseline: no difference in * cases; * cases fail on both"])
    done = gate.run("wrong", "--baseline", f"{STUB}wrong", *few)
    assert done.ret == 1

    done = gate.run("right", "--baseline", f"{STUB}wrong", *few)
    assert done.ret == 0
    done.stdout.fnmatch_lines(
        ["  passes newly: *", "against the baseline: no new failure in * cases, and the differences above"]
    )


def test_an_answer_outside_the_contract_counts_for_nothing_where_the_baseline_gives_it_too(gate: Gate) -> None:  # noqa: F811
    options = ("-k", "contract", "--fail-on", "new", "--baseline")
    assert gate.run("answering", *options, f"{STUB}answering").ret == 0
    assert gate.run("answering", *options, f"{STUB}right").ret == 1


def test_a_crash_of_the_baseline_is_the_baseline_s(gate: Gate) -> None:  # noqa: F811
    done = gate.spawn(
        "right", "--baseline", f"{STUB}dying", "-k", "random and few-heads", "--fail-on", "new", "--examples", "10"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "  passes newly: " in done.stdout


def test_counting_new_failures_needs_a_baseline(gate: Gate) -> None:  # noqa: F811
    done = gate.run("right", "--fail-on", "new")
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    done.stderr.fnmatch_lines(["*--fail-on new needs --baseline LABEL*"])


def test_half_a_percent_in_the_scale_of_v_is_a_new_failure_with_its_cause(gate: Gate) -> None:  # noqa: F811
    wrong, right = "fault:value-scale-off@single", "model:single"
    options = ["--backend", wrong, "--baseline", right, "--fail-on", "new", "--examples", "6", "--device", "cpu"]
    arguments = ["-p", "harness.plugin", "-c", "tox.ini", "--rootdir", ".", str(CASES), "-k", "random", "--isolation", "off"]
    done = gate.pytester.runpytest_inprocess(*arguments, *options)
    assert done.ret == 1
    done.stdout.fnmatch_lines([
        "  fails newly: *",
        "  likely cause: as if V's scale is half a percent too large (value-scale-off): *",
        f"against the baseline: WORSE: {wrong} × model-single (* fail newly)",
    ])  # fmt: skip
