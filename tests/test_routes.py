"""Routes are data that is checked when read; their contract check finds what the story is about, and runs nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from harness.backends import registry
from harness.backends.protocol import NotInstalled, UnknownBackend, Unsupported
from harness.case import Case
from harness.cli import main
from harness.inputs import make_inputs
from harness.regimes import load
from harness.routes.backend import Routed, names
from harness.routes.check import BATCHES, HEADS, QUERY_TOKENS, Cell, Checked, check, ranges, runs, show
from harness.routes.contracts import KERNELS, REPORTS, Contracts
from harness.routes.record import FILES, RouteError, find_route, read_routes
from harness.routes.steps import STEPS
from harness.routes.way import find_way
from harness.run import run_case
from tests.route_standins import stood_in

CPU = torch.device("cpu")
#: Kimi-K3 at TP8 with an fp8 cache: 96 heads over 8 ranks, requests of unequal length.
KIMI = Case(heads=12, lengths=(700, 90), page_size=64, cache_format="e4m3fn", cache_scale=0.37, lse=False)
GOOD = """
[[route]]
name = "made-up"
about = "for a test"
source = "this test"
arch = ["gfx950"]
settings = { mode = ["one", "two"] }
serves = { heads = { max = 15 } }
[[route.before]]
where = { cache_format = ["e4m3fn"] }
steps = ["quantise-query 0.25"]
why = "for a test"
[[route.rule]]
where = { query_tokens = [1] }
settings = { mode = ["one"] }
steps = ["pad-heads tile 16", "ragged-tokens"]
kernel = "aiter-asm-ps"
why = "for a test"
"""


def outcomes(checked: Checked) -> set[tuple[str, str, bool]]:
    return {(group.found.problem.outcome, group.found.problem.kernel, group.found.behind) for group in checked.groups}


def cells(checked: Checked, outcome: str, kernel: str, *, says: str = "", behind: bool = False) -> set[Cell]:
    """Gather the cells of all groups with this outcome."""
    return {
        cell
        for group in checked.groups
        if (group.found.problem.outcome, group.found.problem.kernel, group.found.behind) == (outcome, kernel, behind)
        and says in group.found.problem.reason
        for cell in group.cells
    }


# -- records ---------------------------------------------------------------------------------------------------------------


def test_a_rule_may_be_one_of_an_architecture(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(GOOD.replace("[[route.rule]]", '[[route.rule]]\narch = ["gfx942"]'), encoding="utf-8")
    route = read_routes((path,))["made-up"]
    assert route.rule(KIMI, "gfx942", {"mode": "one"}) is not None and route.rule(KIMI, "gfx950", {"mode": "one"}) is None


def test_every_route_says_where_it_was_read_and_every_rule_why() -> None:
    assert set(read_routes()) >= {
        "vllm-before-50578", "vllm-before-51011", "vllm-51011", "vllm-50563", "vllm-triton", "sglang-aiter", "sglang-gluon"
    }  # fmt: skip
    for route in read_routes().values():
        assert "#" in route.source or ".py" in route.source
        assert all(rule.why for rule in route.rules) and all(habit.why for habit in route.before)


def test_every_rule_of_every_route_decides_some_cell() -> None:
    for route in read_routes().values():
        used = set()
        for heads in (1, 2, 12, 16, 24, 32, 128):
            for tokens in (1, 2):
                for cache in ("bf16", "e4m3fn"):
                    case = Case(heads=heads, query_tokens=tokens, lengths=(64,), page_size=16, cache_format=cache, lse=False)
                    for chosen in all_settings(route.settings):
                        if route.why_not(case) is None:
                            used.add(id(route.rule(case, route.arch[0], chosen)))
        assert set(map(id, route.rules)) <= used, route.name


def all_settings(settings: object) -> list[dict[str, str]]:
    found: list[dict[str, str]] = [{}]
    for key, values in dict(settings).items():  # type: ignore[call-overload]
        found = [{**one, key: value} for one in found for value in values]
    return found


def test_a_route_can_be_read_from_a_file_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(GOOD, encoding="utf-8")
    route = read_routes((path,))["made-up"]
    rule = route.rule(KIMI, "gfx950", {"mode": "one"})
    assert rule is not None and route.rule(KIMI, "gfx950", {"mode": "two"}) is None
    assert [str(step) for step in route.steps(KIMI, rule)] == ["quantise-query 0.25", "pad-heads tile 16", "ragged-tokens"]
    assert route.steps(KIMI.replace(cache_format="bf16", cache_scale=1.0), rule)[0].name == "pad-heads"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('kernel = "aiter-asm-ps"', 'kernel = "aiter-asm"', "no kernel 'aiter-asm'"),
        ('kernel = "aiter-asm-ps"', 'kernel = "aiter-gluon"', "does not say of which release"),
        ("tile 16", "tiles 16", "a padding is one of"),
        ("quantise-query 0.25", "quantise-query -1", "the scale is a positive number"),
        ('"ragged-tokens"', '"ragged"', "no step 'ragged'"),
        ('"ragged-tokens"', '"ragged-tokens 3"', "takes no argument"),
        ('mode = ["one"] }\nsteps', 'mode = ["three"] }\nsteps', "no setting mode of three"),
        ("query_tokens = [1]", "tokens = [1]", "no field 'tokens'"),
        ('source = "this test"', 'source = ""', "where it was read"),
        ('about = "for a test"\n', "", "lacks 'about'"),
        ("[[route.before]]", "speed = 1\n[[route.before]]", "no key speed"),
        ('arch = ["gfx950"]', 'arch = ["gfx950"]\naiter = "0.1.3"', "no AITER release '0.1.3'"),
    ],
)
def test_a_fault_in_a_file_of_routes_is_named(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert old in GOOD
    path = tmp_path / "mine.toml"
    path.write_text(GOOD.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(RouteError, match=r"mine\.toml: route made-up") as error:
        read_routes((path,))
    assert said in str(error.value)


def test_a_route_that_stands_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(GOOD + GOOD, encoding="utf-8")
    with pytest.raises(RouteError, match="stands twice"):
        read_routes((path,))
    assert FILES and all(file.exists() for file in FILES)


def test_reports_name_kernels_and_who_says_so() -> None:
    assert all((report.kernel in KERNELS and "#" in report.source) or "mla.py" in report.source for report in REPORTS)


# -- the contract check ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def before() -> Checked:
    return check(find_route("vllm-before-50578"))


def test_before_50578_the_check_finds_the_refused_query_and_the_batch_behind_it(before: Checked) -> None:
    refused = cells(before, "refusal", "aiter-gluon", says="takes bf16 queries, not e4m3fn")
    assert {cell.heads for cell in refused} == set(range(1, 16))
    assert {cell.query_tokens for cell in refused} == set(QUERY_TOKENS) and {cell.cache for cell in refused} == {"e4m3fn"}
    behind = cells(before, "assertion", "aiter-gluon", says="bh16bn128 takes one request", behind=True)
    assert behind == {cell for cell in refused if cell.batch * cell.query_tokens > 1}


def test_before_50578_the_check_finds_the_key_error_and_the_offset_past_2_gib(before: Checked) -> None:
    raised = cells(before, "KeyError", "aiter-asm-np")
    assert {cell.settings for cell in raised} == {("drafter=other",)} and {cell.cache for cell in raised} == {"e4m3fn"}
    assert {cell.query_tokens for cell in raised if cell.heads == 16} == {5, 6, 7, *range(9, 16)}
    faulting = cells(before, "abort", "aiter-gluon")
    assert {(cell.pool, cell.cache) for cell in faulting} == {("pool past 4 GiB", "bf16")}


def test_between_the_check_finds_the_cell_without_metadata() -> None:
    checked = check(find_route("vllm-before-51011"), heads=(8, 12, 16))
    wrong = cells(checked, "wrong", "aiter-asm-np", says="fp8 without a persistent schedule")
    at_12 = {cell for cell in wrong if cell.heads == 12 and cell.settings == ("padding=auto", "drafter=listed")}
    assert {cell.query_tokens for cell in at_12} == {1} and {cell.batch for cell in at_12} == set(BATCHES)
    assert not any(cell.heads == 8 and "padding=auto" in cell.settings for cell in wrong), "8 heads stay on Gluon"
    asserted = cells(checked, "assertion", "aiter-gluon", says="takes one request")
    assert {cell.query_tokens for cell in asserted if cell.heads == 12 and "padding=auto" in cell.settings} == set(range(2, 17))
    assert any(cell.heads == 8 and cell.query_tokens == 1 for cell in asserted)
    raised = cells(checked, "KeyError", "aiter-asm-np")
    assert {cell.query_tokens for cell in raised if cell.heads == 12} == {5, 6, 7, *range(9, 16)}


def test_both_changes_together_end_the_process_at_12_heads() -> None:
    checked = check(find_route("vllm-50563-on-50578"), heads=(8, 12))
    ended = cells(checked, "abort", "aiter-asm-np", says="no kernel: plain, bf16 query, fp8 cache, 16 heads, 1 query tokens")
    assert {(cell.heads, cell.query_tokens) for cell in ended} == {(12, 1)} and {cell.batch for cell in ended} == set(BATCHES)
    verdict = run_case(KIMI, stood_in("vllm-50563-on-50578"), load()).verdict
    assert (verdict.kind, verdict.fault) == ("FAIL", "crash") and "Aborted" in verdict.message


def test_after_51011_nothing_ends_badly_and_the_rounded_query_is_said() -> None:
    checked = check(find_route("vllm-51011"))
    assert checked.failing == 0 and checked.served > 20_000
    assert {outcome for outcome, _, _ in outcomes(checked)} == {"changed"}
    rounded = cells(checked, "changed", "aiter-asm-ps", says="rounded to e4m3fn")
    assert {cell.cache for cell in rounded} == {"e4m3fn"} and len(rounded) == checked.served / 2


def test_what_50563_proposed_asserts_with_one_aiter_and_not_with_the_next() -> None:
    route = find_route("vllm-50563")
    asserted = cells(check(route, heads=(12,)), "assertion", "aiter-gluon")
    assert asserted and all(cell.batch * cell.query_tokens > 1 for cell in asserted)
    assert not check(route, heads=(12,), release="0.1.20").groups


def test_a_fallback_in_silence_is_a_change_and_what_it_falls_on_is_asked_too() -> None:
    route = find_route("sglang-gluon")
    assert not check(route, heads=(12,)).groups
    found = check(route, heads=(12,), release="0.1.19.post2")
    assert {("changed", "aiter-gluon", False), ("wrong", "aiter-asm-np", False)} <= outcomes(found)
    assert {cell.batch for cell in cells(found, "wrong", "aiter-asm-np")} == set(BATCHES) - {1}


def test_vllms_triton_changes_nothing_and_refuses_nothing() -> None:
    checked = check(find_route("vllm-triton"), heads=(1, 12, 16, 128))
    assert not checked.groups and checked.failing == 0 < checked.served


def test_bf16_of_sglang_goes_without_a_schedule_and_its_pool_ends_at_4_gib() -> None:
    wrong = cells(check(find_route("sglang-aiter"), heads=(8, 16, 128)), "wrong", "aiter-asm-np")
    assert {(cell.cache, cell.pool, cell.query_tokens) for cell in wrong} == {("bf16", "pool past 4 GiB", 1)}


def test_a_case_that_no_rule_covers_is_a_refusal(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(GOOD, encoding="utf-8")
    checked = check(read_routes((path,))["made-up"], heads=(12,))
    assert ("refusal", "made-up", False) in outcomes(checked)


def test_the_check_counts_every_cell_once() -> None:
    checked = check(find_route("vllm-51011"), heads=(12, 17))
    points = len(QUERY_TOKENS) * len(BATCHES) * 2 * 2 * 3
    assert (checked.served, checked.refused) == (points, points)
    assert HEADS[0] == 1 and HEADS[-1] == 128


def test_another_architecture_is_another_answer() -> None:
    route = find_route("vllm-50563")
    way = find_way(route, KIMI, Contracts(arch="gfx942", release=route.aiter), {})
    assert way is not None and way.ends_with is not None and "requires gfx950" in way.ends_with.reason


def test_cells_are_shown_as_ranges() -> None:
    assert runs([3, 1, 2, 5], HEADS) == "1-3, 5"
    route = find_route("vllm-51011")
    cell = {"cache": "bf16", "pool": "small pool", "arch": "gfx950", "settings": ("padding=asm",)}
    some = [
        Cell(heads=heads, query_tokens=tokens, batch=batch, **cell)  # type: ignore[arg-type]
        for heads in (1, 2, 3, 8)
        for tokens in (1, 2)
        for batch in (BATCHES if tokens == 1 else BATCHES[1:])
    ]
    assert ranges(some, route) == [
        "heads 1-3, 8: tokens 1 of batches 1-512, tokens 2 of batches 2-512; cache bf16; small pool; padding asm"
    ]


# -- the command -----------------------------------------------------------------------------------------------------------

Ask = Callable[..., tuple[int, str, str]]


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Ask:
    monkeypatch.setattr("harness.cli._sees_gpu", lambda: True)  # or the command would change how Triton is imported

    def run(*arguments: str) -> tuple[int, str, str]:
        status = main(("routes", *arguments))
        said = capsys.readouterr()
        return status, said.out, said.err

    return run


def test_the_command_lists_routes_and_says_which_end_badly(ask: Ask) -> None:
    status, out, _ = ask()
    assert status == 0 and all(name in out for name in read_routes())
    status, out, _ = ask("vllm-before-50578", "--heads", "12")
    assert status == 1 and "refusal    aiter-gluon: takes bf16 queries, not e4m3fn" in out
    assert "once the query is left as it was" in out
    assert ask("vllm-51011", "--heads", "12")[0] == 0
    assert ask("vllm-51011", "--heads", "12", "--strict")[0] == 1
    assert ask("vllm-50563", "--heads", "12", "--aiter", "0.1.20")[0] == 0
    status, out, _ = ask("vllm-before-51011", "--heads", "12", "--json")
    (found,) = json.loads(out)
    assert status == 1 and found["failing"] and any(group["outcome"] == "wrong" for group in found["groups"])


def test_a_regime_that_rounds_the_query_says_so(capsys: pytest.CaptureFixture[str], ask: Ask) -> None:
    assert main(("regimes", "--backend", "route:vllm-51011+torch-sdpa")) == 0
    assert "query       rounded to e4m3fn by the scale 0.25 before the kernel sees it" in capsys.readouterr().out


def test_all_of_a_route_is_told_in_few_lines(before: Checked) -> None:
    assert before.failing > 5_000 and len(show(before)) < 40


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["vllm-5101"], "did you mean vllm-51011"),
        (["vllm-51011", "--heads", "0"], "heads go from 1 to 128"),
        (["vllm-51011", "--aiter", "9"], "no contract of AITER 9"),
    ],
)
def test_a_wrong_question_about_routes_is_one_line(ask: Ask, arguments: list[str], said: str) -> None:
    status, out, err = ask(*arguments)
    assert (status, out) == (2, "") and said in err and err.count("\n") == 1


# -- a route as a backend --------------------------------------------------------------------------------------------------


def test_a_route_over_a_backend_is_a_backend() -> None:
    backend = registry.make("route:vllm-before-51011:padding=asm,drafter=other+torch-sdpa")
    assert isinstance(backend, Routed) and dict(backend.settings) == {"padding": "asm", "drafter": "other"}
    assert backend.name in {f"{name}:padding=asm,drafter=other+torch-sdpa" for name in names()}
    assert backend.why_not(KIMI, CPU) is None
    output = backend.run(make_inputs(KIMI.replace(cache_format="bf16", cache_scale=1.0)))
    assert output.what_ran["computed by"] == "torch-sdpa" and output.what_ran["kernel"] == "aiter-asm-np"
    assert output.what_ran["steps"] == "pad-heads repeat/tile 16, ragged-tokens"


@pytest.mark.parametrize(
    ("name", "error", "said"),
    [
        ("route:vllm-5101+torch-sdpa", UnknownBackend, "did you mean vllm-51011"),
        ("route:vllm-51011+torch-sdp", UnknownBackend, "did you mean torch-sdpa"),
        ("route:vllm-51011:padding=none+torch-sdpa", UnknownBackend, "it has padding=auto"),
        ("route:vllm-51011:padding+torch-sdpa", UnknownBackend, "a setting is KEY=VALUE"),
        ("route:vllm-51011@no-such-label", NotInstalled, r"name one to stand in with route:vllm-51011\+BACKEND"),
    ],
)
def test_a_name_that_leads_nowhere_says_why(name: str, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        registry.make(name)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("v1:H=17:N=64:end", "the engine does not serve it: heads 17"),
        ("v1:H=12:N=64:q=e4m3fn:end", "bf16 queries"),
        ("v1:H=12:N=64:c=e4m3fnuz:end", "caches in bf16 or e4m3fn"),
        ("v1:H=12:N=64:cscale=0.5:end", "no scale for a bf16 cache"),
        ("v1:H=12:N=64:L=256:end", "rows of 512"),
        ("v1:H=12:N=64:tokenpad=16:end", "nothing between its rows"),
        ("v1:H=12:S=3:N=64+2:end", "a graph's padding"),
    ],
)
def test_what_the_engine_does_not_serve_is_outside_its_contract(text: str, said: str) -> None:
    backend = stood_in("vllm-51011")
    case = Case.parse(text)
    assert said in str(backend.why_not(case, CPU))
    with pytest.raises(Unsupported):
        backend.run(make_inputs(case))


def test_a_kernel_that_is_not_here_leaves_its_cases_outside() -> None:
    route = find_route("vllm-51011")
    kernels = {"aiter-gluon": registry.make("torch-sdpa"), "aiter-asm-ps": NotInstalled("no ROCm")}
    backend = Routed(name="route:vllm-51011", route=route, kernels=kernels)
    assert "needs aiter-asm-ps, which cannot run here: no ROCm" in str(backend.why_not(KIMI, CPU))
    assert backend.why_not(Case(heads=8, lengths=(64,), lse=False), CPU) is None
    with pytest.raises(NotInstalled, match="none of the kernels"):
        Routed(name="route:vllm-51011", route=route, kernels=dict.fromkeys(route.kernels, NotInstalled("no ROCm")))


def test_on_a_gpu_the_route_is_that_of_its_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, device = stood_in("vllm-51011"), torch.device("cuda")
    for found, said in (("gfx942", "described for gfx950, not for gfx942"), ("gfx950", None), ("cuda", None)):
        monkeypatch.setattr("harness.routes.backend.device_architecture", lambda device, found=found: found)
        reason = backend.why_not(KIMI, device)
        assert reason is None if said is None else said in str(reason), found


def test_steps_are_named_with_what_they_do() -> None:
    assert all(step.about for step in STEPS.values()) and {"fold-heads", "pages-as-tokens"} <= set(STEPS)
