"""Serving traces: values that print and parse, pools that are checked against the truth, and a short shrink."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from harness.acceptance import acceptance
from harness.backends.registry import make
from harness.case import Case
from harness.cli import main
from harness.memory import Arena
from harness.profiles import PROFILES
from harness.regimes import load
from harness.run import Result
from harness.serving.draw import traces
from harness.serving.engine import Engine
from harness.serving.memory import PoolMemory
from harness.serving.rows import Rows
from harness.serving.run import run_trace
from harness.serving.search import draw, why_no_traces
from harness.serving.shrink import nearby, shrink, size
from harness.serving.steps import VERBS, Step, StepError
from harness.serving.trace import Setup, Trace, TraceError, mended
from harness.strategies import cases
from harness.worker import Worker
from tests.test_plugin import STUB, Gate, gate  # noqa: F401  the fixture

pytest_plugins = ["pytester"]

REGIMES = load()
SDPA = make("torch-sdpa")
SMALL = Setup.of(Case(heads=2, lengths=(1,), page_size=2, cache_format="e4m3fn", cache_scale=0.5), pages=9, layers=(2, 1))
#: Every verb, pages that are shared, copied, taken away and used again, and a batch padded with empty rows.
EVERYTHING = """
admit a 3
fork a b
decode b a pad 4
speculate a draft 3 keep 1
offload a
admit c 2
restore a
append a 2
preempt b
decode c a
free c
resume b
decode a b pad 2
"""


def trace_of_lines(text: str, setup: Setup = SMALL) -> Trace:
    return Trace(setup=setup, steps=tuple(Step.parse(line) for line in text.strip().splitlines()))


def test_a_trace_of_every_verb_passes_on_a_right_engine_and_kernel() -> None:
    trace = trace_of_lines(EVERYTHING)
    assert {step.verb for step in trace.steps} == set(VERBS)
    result = run_trace(trace, SDPA, REGIMES)
    assert result.verdict.kind == "PASS", result.verdict.message
    assert result.verdict.message.startswith("13 steps, 12 answers") and result.relation == str(trace)
    assert result.regime == "sdpa-fp32" and result.what_ran["kernel"] == "scaled_dot_product_attention"


@pytest.mark.parametrize("table", ["padded", "ragged"])
@pytest.mark.parametrize("layers", [(1,), (3,), (1, 2)])
def test_any_table_and_any_layers_pass(table: str, layers: tuple[int, ...]) -> None:
    shape = SMALL.shape.replace(table=table, token_padding=3, page_size=1, lse=False)
    setup = dataclasses.replace(SMALL, shape=shape, layers=layers, pages=16)
    assert run_trace(trace_of_lines(EVERYTHING, setup), SDPA, REGIMES).verdict.kind == "PASS"


def test_a_trace_prints_as_an_id_and_as_lines_and_parses_back() -> None:
    trace = trace_of_lines(EVERYTHING)
    assert Trace.parse(str(trace)) == trace and " " not in str(trace)
    assert str(trace).startswith("trace1:H=2:T=2:c=e4m3fn:cscale=0.5:pages=9:layers=2+1:admit,a,3:fork,a,b:decode,b,a,pad,4:")
    assert trace.lines[3].split("  ") == [" 4", "speculate a draft 3 keep 1"]
    assert trace.about == "a pool of 9 pages of 2 tokens, 2 layers and 1 layer a page, two groups that share the block table"
    for step in trace.steps:
        assert Step.parse(str(step)) == step


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("trace1:H=2:pages=9:layers=1:admit,a,1", "cut off"),
        ("trace0:H=2:pages=9:layers=1:end", "starts with trace1:"),
        ("trace1:H=2:layers=1:end", "pages=NUMBER"),
        ("trace1:H=2:pages=9:layers=1:decode,a:end", "step 1 cannot be done: decode a: no request has that name"),
        ("trace1:H=2:pages=1:layers=1:admit,a,1:decode,a:end", "the pool has 1 pages and it may take 2"),
        ("trace1:H=2:pages=9:layers=1:admit,a,1:admit,a,1:end", "that name is taken"),
        ("trace1:H=2:pages=9:layers=1:admit,a,1:offload,a:decode,a:end", "it is offloaded"),
        ("trace1:H=2:pages=9:layers=1:admit,a,1:preempt,a:append,a,1:end", "it is preempted"),
        ("trace1:H=2:pages=9:layers=1:admit,e,1:end", "requests are called a, b, c, d, not 'e'"),
        ("trace1:H=2:pages=9:layers=1:restore,a,1:end", "restore takes no tokens"),
        ("trace1:H=2:pages=9:layers=1:admit,a:end", "admit needs tokens"),
        ("trace1:H=2:pages=9:layers=1:admit,a,1:decode,a,pad:end", "pad lacks its number"),
        ("trace1:H=2:pages=9:layers=1:jump,a:end", "verbs are admit"),
        ("trace1:H=2:place=high:pages=9:layers=1:end", "place stands twice"),
        ("trace1:H=2:pool=9:pages=9:layers=1:end", "a trace decides pool_rows itself"),
        ("trace1:H=2:pages=9:layers=17:end", "1 to 16 layers"),
    ],
)
def test_what_is_no_trace_is_refused_with_the_reason(text: str, said: str) -> None:
    with pytest.raises(TraceError, match=said):
        Trace.parse(text)


@pytest.mark.parametrize(
    "text", ["decode a a", "decode a b pad 1", "speculate a draft 2 keep 3", "fork a", "decode a 1 2", "a 1 b"]
)
def test_a_line_that_is_no_step_is_refused(text: str) -> None:
    with pytest.raises(StepError, match="no such step"):
        Step.parse(text)


def engine_of(trace: Trace) -> Engine:
    """Do a trace's pool steps, decodes left out, with rows by token number."""
    setup = trace.setup
    engine = Engine(setup=setup, memory=PoolMemory(setup, Arena("cpu")))
    rows, truth = Rows.of(setup.shape), setup.truth()
    for step in trace.steps:
        for name, numbers in truth.written(step).items():
            engine.write(name, {(0, 0): rows.tokens(numbers, 0, 0)})
        simple = {"free": engine.end, "preempt": engine.drop, "offload": engine.offload, "restore": engine.restore}
        if step.verb == "fork":
            engine.fork(*step.requests)
        elif step.verb == "resume":
            engine.resume(step.requests[0], {(0, 0): rows.tokens(truth.tokens[step.requests[0]], 0, 0)})
        elif step.verb in simple:
            simple[step.verb](step.requests[0])
        truth.take(step)
        if step.verb == "speculate":
            for name in step.requests:
                engine.reject(name, step.draft - step.keep)
        named = sorted(page for table in engine.tables.values() for page in table)
        counted = sorted(page for page, count in enumerate(engine.counts) for _ in range(count))
        assert named == counted, f"after {step}: the tables name {named} and the counts say {counted}"
        assert sorted({*named, *engine.free}) == list(range(1, setup.pages + 1)) and not set(named) & set(engine.free)
        assert engine.lengths == {name: len(truth.tokens[name]) for name, here in truth.where.items() if here == "device"}
    return engine


def test_pages_are_counted_and_none_is_lost() -> None:
    engine = engine_of(trace_of_lines(EVERYTHING, dataclasses.replace(SMALL, layers=(1,))))
    assert set(engine.tables) == {"a", "b"}
    for name in list(engine.tables):
        engine.end(name)
    assert sorted(engine.free) == list(range(1, 10)) and sorted(engine.free_hosts) == list(range(1, 10))


def test_a_restored_request_lies_in_other_pages_and_a_fork_shares_whole_ones() -> None:
    setup = dataclasses.replace(SMALL, layers=(1,))
    before = engine_of(trace_of_lines("admit a 5", setup)).tables["a"]
    after = engine_of(trace_of_lines("admit a 5\noffload a\nrestore a", setup)).tables["a"]
    assert not set(before) & set(after)
    tables = engine_of(trace_of_lines("admit a 5\nfork a b\nappend b 1", setup)).tables
    assert tables["a"][:2] == tables["b"][:2] and tables["a"][2] != tables["b"][2]


def test_a_step_that_changes_what_it_does_not_own_is_found_without_a_decode_of_it() -> None:
    trace = trace_of_lines("admit a 1\nadmit b 1\ndecode a")
    spoiled = {"places": lambda moment, places: places if moment.request == "a" else [(moment.engine.tables["a"][0], 0)]}
    verdict = run_trace(trace, SDPA, REGIMES, acts=spoiled).verdict
    assert (verdict.kind, verdict.fault) == ("FAIL", "input-changed")
    assert "step 2 of 3 (admit b 1): it changed slot 0 of page 1 (layer 0 of group 0), which a has" in verdict.message
    verdict = run_trace(trace, SDPA, REGIMES, acts=spoiled, watched=False).verdict
    assert (verdict.kind, verdict.fault) == ("FAIL", "mismatch") and "step 3 of 3 (decode a), layer 0" in verdict.message


def test_a_token_that_is_there_already_may_not_be_written_again() -> None:
    again = {"places": lambda moment, places: [(page, 0) for page, _ in places]}
    message = run_trace(trace_of_lines("admit a 1\ndecode a"), SDPA, REGIMES, acts=again).verdict.message
    assert "which holds token 0 of a already" in message


def test_a_trace_outside_the_contract_is_not_run_at_all() -> None:
    odd = dataclasses.replace(SMALL, shape=SMALL.shape.replace(query_format="fp16", cache_format="bf16"))
    verdict = run_trace(trace_of_lines("admit a 1\ndecode a", odd), make("triton-splitkv"), REGIMES).verdict
    assert verdict.kind == "UNSUPPORTED" and "step 2 (decode a)" in verdict.message
    verdict = run_trace(trace_of_lines("admit a 1"), SDPA, REGIMES).verdict
    assert verdict.kind == "UNSUPPORTED" and "decodes nothing" in verdict.message


def drawn(name: str, count: int) -> list[Trace]:
    backend = make(name)
    regime = REGIMES.for_backend(name)[0]
    accepts = acceptance(regime, backend)
    return draw(traces(cases(regime, PROFILES["smoke"], backend), accepts, most=14), count, seed=3)


def test_drawn_traces_can_be_done_and_reach_every_verb() -> None:
    found = drawn("torch-sdpa", 150)
    assert len(found) == 150 and all(any(step.decodes for step in trace.steps) for trace in found)
    assert {step.verb for trace in found for step in trace.steps} == set(VERBS)
    assert any(step.pad > len(step.requests) for trace in found for step in trace.steps)
    assert {len(trace.setup.layers) for trace in found} == {1, 2} and max(max(t.setup.layers) for t in found) == 3
    assert found == drawn("torch-sdpa", 150)


def test_a_backend_is_asked_only_for_decodes_that_it_takes() -> None:
    backend = make("gluon-splitkv")
    cpu = torch.device("cpu")
    asked = [case for trace in drawn("gluon-splitkv", 40) for _, found in trace.decodes() for case in found]
    assert len(asked) > 100 and all(backend.why_not(case, cpu) is None for case in asked)


def test_a_regime_of_large_batches_has_no_traces_and_says_why() -> None:
    regime = REGIMES.named("sdpa-fp32")
    accepts = acceptance(regime, SDPA)
    assert why_no_traces(regime, accepts) is None
    assert "4 requests or fewer" in str(why_no_traces(regime, lambda case: accepts(case) and case.batch >= 64))


def test_a_trace_shrinks_to_the_steps_that_matter_and_to_a_plain_pool() -> None:
    shape = SMALL.shape.replace(heads=12, seed=77, table="ragged", page_size=16)
    trace = trace_of_lines(EVERYTHING, dataclasses.replace(SMALL, shape=shape))

    def fails(near: Trace) -> bool:
        verbs = [step.verb for step in near.steps]
        return "offload" in verbs and "restore" in verbs and verbs[-1] == "decode" and len(near.setup.layers) == 2

    walk = shrink(trace, fails, seconds=60)
    assert walk.complete and [str(step) for step in walk.trace.steps] == ["admit a 1", "offload a", "restore a", "decode a"]
    assert walk.trace.setup.layers == (1, 1) and walk.trace.setup.shape == Setup.of(Case(heads=1, lengths=(1,))).shape
    assert all(size(near) < size(walk.trace) for near in nearby(walk.trace))


def test_mending_leaves_out_what_can_no_longer_be_done() -> None:
    trace = trace_of_lines(EVERYTHING)
    assert [step.verb for step in mended(trace.setup, trace.steps[1:]).steps] == ["admit", "free"]


def test_a_worker_runs_a_trace_and_survives_its_kernel() -> None:
    trace = trace_of_lines("admit a 1\ndecode a", Setup.of(Case(heads=1, lengths=(1,))))
    rules = Path(__file__).parent / "faulty.toml"
    with Worker(regimes=rules) as worker:
        lost: Result = worker.run(trace.case, "python:tests.faulty:segfault", str(trace))
        fine = worker.run(trace.case, "python:tests.faulty:right", str(trace))
    assert (lost.verdict.fault, lost.relation) == ("crash", str(trace)) and "SIGSEGV" in lost.verdict.message
    assert fine.verdict.kind == "PASS", fine.verdict.message


def test_a_trace_is_replayed_shown_and_shrunk_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trace = str(trace_of_lines("admit b 2\nappend b 1\nadmit a 1\ndecode a b", Setup.of(Case(heads=1, lengths=(1,)))))
    rules = ["--regimes-file", str(Path(__file__).parent / "faulty.toml")]
    wrong = ["--backend", "python:tests.faulty:position", *rules, "--isolation", "off"]
    assert main(["show", trace]) == 0
    assert "3  admit a 1" in capsys.readouterr().out
    assert main(["replay", trace, "--backend", "python:tests.faulty:right", *rules, "--isolation", "off"]) == 0
    assert "PASS" in capsys.readouterr().out
    assert main(["replay", trace, *wrong]) == 1
    said = capsys.readouterr().out
    assert "a pool of 8 pages of 1 token, 1 layer a page:" in said and "    4  decode a b\n" in said
    assert "wrong at step 4 of 4 (decode a b), layer 0 of group 0" in said and f"mla-gate replay {trace} --backend" in said
    assert main(["shrink", trace, *wrong, "--repro-dir", "kept"]) == 1
    (path,) = (tmp_path / "kept").iterdir()
    kept = json.loads(path.read_text())
    assert kept["steps"] == ["1  admit a 1", "2  admit b 1", "3  decode a b"] and kept["first"] == trace
    capsys.readouterr()
    assert main(["replay", str(path), *wrong]) == 1
    assert "1  admit a 1" in capsys.readouterr().out
    assert main(["replay", "trace1:H=1:pages=8:layers=1:decode,a:end", *wrong]) == 2
    assert "no request has that name" in capsys.readouterr().err


def test_the_gate_asks_traces_counts_them_and_keeps_a_failing_one(gate: Gate) -> None:  # noqa: F811
    done = gate.run("right", "-k", "serves")
    assert done.ret == 0
    count = PROFILES["smoke"].traces
    done.stdout.fnmatch_lines([f"{STUB}right  few-heads  *  {count}  *PASS", f"{STUB}right  more-heads  *  {count}  *PASS"])
    done = gate.run("permuted", "-k", "serves and few-heads", "--repro-dir", "kept")
    assert done.ret == 1
    done.stdout.fnmatch_lines(["  a pool of * pages of *", "    1  admit ? *", "  wrong at step *", "mla-gate replay trace1:*"])
    (path,) = gate.path.joinpath("kept").iterdir()
    assert json.loads(path.read_text())["steps"][-1].split()[1] in ("decode", "speculate")
