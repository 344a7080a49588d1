"""What a report is drawn from: grids of an error, spreads of ratios, and where the generator went."""

from __future__ import annotations

import math
from typing import Any

import pytest

from harness.backends import registry
from harness.case import Case
from harness.inputs import make_inputs
from harness.ledger import Line
from harness.plan import Pair
from harness.regimes import load
from harness.report import look
from harness.report.coverage import by_twos, crossings, domain_of, reaches
from harness.report.evidence import MOST, Grid, grids
from harness.report.failure import failure_fields, panel
from harness.report.spread import BINS, ratios, rhos
from harness.run import run_case
from harness.strategies import drawable
from harness.tokens import arrived, sight

RULES = load()


def laid(backend: str, case: str) -> dict[str, Grid]:
    """Lay out a case on a backend; by the grid's kind and rows."""
    made, known = registry.make(backend), Case.parse(case)
    found = grids(known, made, RULES.of(made.name, known), device="cpu", role="smallest")
    return {f"{grid.what} {grid.rows}": grid for grid in found}


def test_a_right_answer_has_no_cell_past_a_limit() -> None:
    for content in ("gaussian", "slots"):
        found = laid("model:splits", f"v1:H=20:S=2:N=70+1:T=16:content={content}:end")
        assert set(found) == {"error head", "error request"}  # no token is missing
        for grid in found.values():
            assert not any(map(any, grid.broken))
            assert all(value is None or value < 3 for row in grid.values for value in row)


def test_heads_that_were_not_written_are_the_cells_past_the_limit() -> None:
    grid = laid("fault:heads-past-64-unwritten@splits", "v1:H=72:S=1:N=70:end")["error head"]
    assert len(grid.row_names) <= MOST and grid.column_names[-1] == "448–511"
    for name, values, broken in zip(grid.row_names, grid.values, grid.broken, strict=True):
        wrong = int(name.rpartition("–")[2]) >= 64
        assert all(mark == wrong for mark in broken) and all(math.isinf(value or 0) == wrong for value in values)


def test_requests_and_query_tokens_that_are_wrong_are_told_apart() -> None:
    grid = laid("fault:causal-one-more@splits", "v1:H=2:S=3:N=40+64:end")["error request"]
    # The newest query token sees everything anyway.
    assert grid.broken == ((True, True, False), (True, True, False))


@pytest.mark.parametrize("content", ["slots", "gaussian"])
def test_tokens_of_a_dropped_split_are_missing_on_their_pages(content: str) -> None:
    grid = laid("fault:last-split-dropped@splits", f"v1:H=4:S=1:N=33:T=16:content={content}:end")["share page"]
    assert grid.title == "tokens of request 0 × its pages" and len(grid.column_names) == 16
    assert grid.broken == ((False,) * 16, (False,) * 16, (True, *(False,) * 15))
    assert grid.values[2] == (0.0, *(None,) * 15)
    others = [value for row in grid.values[:2] for value in row if value is not None]
    assert len(others) > 24 and all(0.9 < value < 1.1 for value in others)


def test_nothing_is_said_of_tokens_whose_weight_is_lost_in_rounding() -> None:
    """A softmax that one token leads: the others are too light for an output in bf16 to tell of them."""
    case = Case.parse(
        "v1:H=127:S=1:N=131+57:q=e4m3fn:c=e4m3fn:qscale=7.9:cscale=11.3:softmax=0.1352361606405621:content=slots:end"
    )
    backend = registry.make("model:splits")
    inputs = make_inputs(case)
    out = backend.run(inputs).out
    arithmetic = RULES.of(backend.name, case).arithmetic
    assert sight(inputs, out, arithmetic) == ()
    shares = arrived(inputs, out, arithmetic)
    assert shares and all(bool(((found - 1).abs() < 0.25)[~found.isnan()].all()) for found in shares.values())
    assert any(bool(found.isnan().any()) for found in shares.values())


def test_rows_that_see_no_token_have_nothing_to_say() -> None:
    grid = laid("model:splits", "v1:H=1:S=2:N=1+0:end")["error request"]
    assert grid.values[1] == (None, None) and grid.values[0][0] is None and grid.values[0][1] is not None


def test_a_picture_that_cannot_be_drawn_costs_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any, **named: Any) -> tuple[Grid, ...]:
        raise RuntimeError("no picture")

    monkeypatch.setattr(look, "grids", broken)
    backend = registry.make("fault:last-split-dropped@splits")
    result = run_case(Case.parse("v1:H=1:S=1:N=33:end"), backend, RULES)
    looked = look.look_again(result, RULES, device="cpu", child=False)
    told = failure_fields(result, device="cpu", finding=None, looked=looked, notes=["script: none.py"])
    assert not told["grids"] and told["looks"] == list(looked.lines) and told["script"] == ""
    assert any("last-split-dropped" in line for line in looked.lines)


def test_the_panel_says_how_badly_in_a_few_lines() -> None:
    backend = registry.make("fault:last-split-dropped@splits")
    result = run_case(Case.parse("v1:H=1:S=1:N=33:end"), backend, RULES)
    lines = panel(result, device="cpu").splitlines()
    assert any(line.startswith("  an element is further off than any rounding can take it: hard ") for line in lines)
    assert sum("element [" in line for line in lines) == 2 and sum("row [" in line for line in lines) == 1
    assert "element [0, 0, 0, 430]" in result.verdict.message  # the repro keeps them all


def line(**fields: Any) -> Line:
    return {"kind": "result", "verdict": "PASS", "measurements": {"ratios": fields.pop("ratios", {"row": 0.5}), **fields}}


def test_a_ratio_at_its_limit_keeps_it_and_the_next_number_does_not() -> None:
    lines = [line(ratios={"row": ratio}) for ratio in (-0.5, 0.0, 0.999, 1.0, math.nextafter(1, 2), "inf", "nan")]
    (spread,) = ratios(lines)
    assert len(spread.counts) == BINS + 1 and sum(spread.counts) == 7
    assert spread.counts[-1] == 3 and spread.counts[0] == 2 and spread.counts[BINS - 1] == 2
    assert math.isnan(spread.largest) and spread.least == -0.5


def test_the_axis_of_rho_holds_every_mark_in_the_order_of_their_sizes() -> None:
    spread = rhos([line(rho=value) for value in (0.5, 1.0, 1.2)], 1.4, 2000.0)
    assert spread is not None and sum(spread.counts) == 3
    places = [spread.place(value) for value in (0.5, 1.0, 1.2, 1.4, 2000.0)]
    assert places == sorted(places) and places[0] >= 0 and places[-1] <= 1 and len(spread.counts) < 60
    assert {1.0, 10.0, 100.0, 1000.0} <= set(spread.ticks)
    assert rhos([line(ratios={}, rho=0.0)]) is None


def test_what_could_have_been_drawn_and_was_not_has_a_zero() -> None:
    cases = [Case(heads=16, lengths=(3, 200)), Case(heads=9, lengths=(64,), content="slots")]
    domain = {"heads": [1, 9, 16], "content": ["gaussian", "slots", "edges"], "lengths": [0, 3, 64, 200]}
    found = {one.name: one for one in reaches(cases, domain)}
    assert found["heads"].counts == (("1", 0), ("9–16", 2)) and found["heads"].known
    assert found["content"].missed == ("edges",)
    assert dict(found["tokens of a request"].counts) == {"0": 0, "3–4": 1, "33–64": 1, "129–256": 1}
    assert not any(one.missed for one in reaches(cases, {}))
    assert not any(one.known for one in reaches(cases, {}))


def test_two_axes_are_crossed_with_every_case_in_one_cell() -> None:
    cases = [Case(heads=16, lengths=(3, 200)), Case(heads=9, lengths=(64,)), Case(heads=9, lengths=(64,))]
    for one in crossings(cases, {"heads": [1, 16]}):
        assert sum(map(sum, one.counts)) == 3
    heads = crossings(cases, {"heads": [1, 16]})[0]
    assert (heads.row_names, heads.column_names) == (("1", "9–16"), ("3–4", "33–64", "129–256"))
    assert heads.counts == ((0, 0, 0), (0, 2, 1)) and heads.most == 2


def test_ranges_are_those_of_powers_of_two() -> None:
    assert [by_twos(value) for value in (0, 1, 2, 3, 4, 5, 8, 9, 16, 17)] == [
        "0", "1", "2", "3–4", "3–4", "5–8", "5–8", "9–16", "9–16", "17–32",
    ]  # fmt: skip


def test_what_a_search_may_draw_is_what_its_ledger_says() -> None:
    backend = registry.make("torch-sdpa")
    (regime,) = RULES.for_backend("torch-sdpa")
    from harness.acceptance import acceptance
    from harness.profiles import PROFILES

    pair = Pair(backend=backend, regime=regime)
    values = drawable(pair.regime, PROFILES["smoke"], acceptance(regime, backend))
    assert {"heads", "lengths", "batch", "query_tokens", "content", "cache_format", "placement"} <= set(values)
    assert len(set(values["content"])) == len(values["content"]) == 13
    joined = domain_of([{"kind": "domain", "backend": "b", "regime": "r", **values}] * 2)
    assert joined == values
