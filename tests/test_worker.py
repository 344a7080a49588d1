"""The worker: whatever a backend does, the case gets its verdict and the next one is unharmed."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.case import Case
from harness.run import Result
from harness.shrink import shrink
from harness.worker import TimeLimits, Worker
from tests.slow.crashes import held

CASE = Case(heads=2, lengths=(5, 3))
REGIMES = Path(__file__).parent / "faulty.toml"


@pytest.fixture
def worker() -> Iterator[Worker]:
    with Worker(regimes=REGIMES, limits=TimeLimits(first=10.0, least=1.0)) as made:
        yield made


def run(worker: Worker, name: str, case: Case = CASE) -> Result:
    return worker.run(case, f"python:tests.faulty:{name}")


def verdict(result: Result) -> tuple[str, str | None]:
    return result.verdict.kind, result.verdict.fault


@pytest.mark.parametrize(
    ("name", "fault", "words"),
    [
        ("segfault", "crash", "killed by SIGSEGV in the backend"),
        ("abort", "crash", "killed by SIGABRT in the backend"),
        ("exit", "crash", "exited with code 3 in the backend"),
        ("raise", "crash", "KeyError: 2"),
        ("eat-memory", "crash", "memory"),
        ("write-past", "guard-touched", "out: written 0 to 7 bytes past its end"),
        ("write-cache", "input-changed", "cache: 1 bytes changed, the first at byte 0"),
        ("leave-a-row", "unwritten", "512 output elements were never written, the first at request 1, query token 0, head 1"),
        ("position", "mismatch", "row [1, 0,"),
        ("read-workspace", "non-finite", "output elements are NaN"),
    ],
)
def test_a_faulty_backend_is_reported_as_what_it_is_and_the_next_case_passes(
    worker: Worker, name: str, fault: str, words: str
) -> None:
    result = run(worker, name)
    assert verdict(result) == ("FAIL", fault), result.verdict.message
    assert words in result.verdict.message
    assert verdict(run(worker, "right")) == ("PASS", None)


def test_one_wrong_answer_in_twenty_is_nondeterministic(worker: Worker) -> None:
    results = [run(worker, "waver", CASE.replace(seed=seed)) for seed in range(24)]
    assert [verdict(result) for result in results].count(("FAIL", "nondeterministic")) == 1
    message = next(result.verdict.message for result in results if result.verdict.kind == "FAIL")
    assert "and right when the same call is made again" in message


def test_an_answer_from_the_call_before_is_nondeterministic(worker: Worker) -> None:
    assert verdict(run(worker, "stale")) == ("PASS", None)
    assert verdict(run(worker, "stale", CASE.replace(seed=1))) == ("FAIL", "nondeterministic")
    assert verdict(run(worker, "right")) == ("PASS", None)


@pytest.mark.parametrize(
    ("name", "smallest"),
    [
        ("segfault", "v1:H=1:S=1:N=0:end"),
        ("abort", "v1:H=1:S=1:N=0:end"),
        ("eat-memory", "v1:H=1:S=1:N=0:end"),
        ("hang", "v1:H=1:S=1:N=0:end"),
        ("write-past", "v1:H=1:S=1:N=0:end"),
        ("write-cache", "v1:H=1:S=1:N=0:end"),
        ("leave-a-row", "v1:H=1:S=1:N=0:end"),
        ("read-workspace", "v1:H=1:S=1:N=0:end"),
        ("position", "v1:H=1:S=1:N=0+1:end"),
    ],
)
def test_every_fault_shrinks_through_the_worker(name: str, smallest: str) -> None:
    case = Case(heads=3, lengths=(5, 3), page_size=2, placement="permuted", seed=7)
    with Worker(regimes=REGIMES, limits=TimeLimits(first=1.0, least=0.2)) as worker:
        wanted = verdict(run(worker, name, case))
        assert wanted[0] == "FAIL"
        walk = shrink(case, lambda near: verdict(run(worker, name, near)) == wanted, seconds=60)
    assert str(walk.case) == smallest


def test_the_last_words_of_a_crash_are_in_its_verdict(worker: Worker) -> None:
    message = run(worker, "segfault").verdict.message
    assert "about to read address 8" in message
    assert "Segmentation fault" in message and "tests/faulty.py" in message


@pytest.mark.parametrize("name", ["hang", "deaf-hang"])
def test_a_hang_ends_at_its_limit_and_later_ones_sooner(name: str) -> None:
    with Worker(regimes=REGIMES, limits=TimeLimits(first=3.0, least=0.5, factor=2.0)) as worker:
        assert verdict(run(worker, "right")) == ("PASS", None)
        began = time.monotonic()
        first = run(worker, name)
        assert time.monotonic() - began > 3.0
        second = run(worker, name)
        assert verdict(first) == verdict(second) == ("FAIL", "hang")
        assert "no answer in 3.0 s in the backend" in first.verdict.message
        # By its own words, not by the clock: a new child starts as well, and the machine may be busy.
        limit = re.search(r"no answer in ([\d.]+) s in the backend", second.verdict.message)
        assert limit and 0.5 <= float(limit[1]) < 3.0
        assert verdict(run(worker, "right")) == ("PASS", None)
    assert name == "deaf-hang" or "tests/faulty.py" in first.verdict.message  # the stack; a deaf child shows none


def test_a_child_that_takes_long_to_start_has_its_case_s_time_all_the_same() -> None:
    with Worker(regimes=REGIMES, limits=TimeLimits(first=1.5)) as worker:
        assert verdict(run(worker, "slow-to-make")) == ("PASS", None)


def test_a_backend_that_cannot_be_made_is_our_error(worker: Worker) -> None:
    result = worker.run(CASE, "python:tests.nowhere")
    assert result.verdict.kind == "ERROR"
    first, rest = result.verdict.message.split("\n", 1)
    assert "before the case began: " in first and "tests.nowhere" in first  # the cause, where only one line is shown
    assert "Traceback" in rest


def test_crash_after_crash_leaks_nothing(worker: Worker) -> None:
    run(worker, "segfault")
    run(worker, "right")
    before, began = held(), time.monotonic()
    verdicts = [verdict(run(worker, "abort")) for _ in range(40)]
    assert verdicts == [("FAIL", "crash")] * 40
    assert time.monotonic() - began < 40 * 1.0
    run(worker, "right")
    after = held()
    assert all(after[name] <= before[name] for name in ("processes", "open files", "folders")), (before, after)


def test_a_warm_worker_costs_at_most_5_ms_a_case(worker: Worker) -> None:
    run(worker, "right")
    overheads = []
    for _ in range(50):
        began = time.perf_counter()
        result = run(worker, "right")
        overheads.append(time.perf_counter() - began - result.seconds)
    assert min(overheads) < 0.005  # the least of many: what the worker costs, not what else this machine does


def test_children_die_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path\nfrom harness.worker import Worker\nfrom harness.case import Case\n"
        f"w = Worker(regimes=Path({str(REGIMES)!r}))\n"
        "w.run(Case(heads=1, lengths=(1,)), 'python:tests.faulty:right')\n"
        "print(w._child.process.pid, flush=True)\nw.run(Case(heads=1, lengths=(1,)), 'python:tests.faulty:hang')\n"
    )
    root = Path(__file__).parents[1]
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=root)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    for _ in range(100):
        if not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text().split(") ")[1][:1]:
            return
        time.sleep(0.05)
    raise AssertionError(f"child {child} outlived its parent")
