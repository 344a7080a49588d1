"""Production shapes: rows that expand into named cases, what each needs, and a count of those that are not run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from harness.backends.registry import make
from harness.case import Case
from harness.cli import main
from harness.inputs import needed_bytes
from harness.memory import total_bytes
from harness.plan import make_plan
from harness.profiles import PROFILES
from harness.regimes import load
from harness.report.rows import rows
from harness.report.terminal import notes, table
from harness.shapes import GPU_FACTOR, Shape, ShapesError, left_of, lengths_of, regime_of, shape_rows, sort

ROWS = {row.name: row for row in shape_rows()}
SHAPES = [shape for row in ROWS.values() for shape in row.shapes]
#: Heads of a rank of each model and tensor-parallel size that the issue names.
HEADS = {
    "kimi-k3-tp8": 12, "kimi-k3-tp4": 24, "kimi-k3-tp2": 48, "kimi-k25-tp1": 64, "kimi-linear-tp1": 32, "glm-5-tp4": 16,
    **{f"deepseek-v3-tp{ranks}": 128 // ranks for ranks in (1, 2, 4, 8, 16)},
}  # fmt: skip


def test_every_row_has_a_source_a_reason_and_cases_with_names_of_their_own() -> None:
    assert len({shape.name for shape in SHAPES}) == len(SHAPES) > 1000
    assert all(len(row.source) > 20 and row.why.endswith(".") for row in ROWS.values())
    assert {name: ROWS[name].shapes[0].case.heads for name in HEADS} == HEADS


def test_no_case_is_asked_twice_but_where_two_models_are_alike() -> None:
    for row in ROWS.values():
        assert len({shape.case for shape in row.shapes}) == len(row.shapes), row.name
    assert len({shape.case for shape in SHAPES}) > 0.99 * len(SHAPES)


def test_the_axes_reach_as_far_as_production_does() -> None:
    cases = [shape.case for shape in SHAPES]
    assert {case.batch for case in cases} >= {1, 2, 4, 8, 16, 32, 64, 128, 256, 512}
    assert {max(case.lengths) for case in cases} >= {8192, 65536, 337128, 1048576}
    assert {max(case.lengths) for case in cases} >= {edge + step for edge in (16, 32, 64, 128, 256, 480) for step in (-1, 0, 1)}
    assert {shape.case.query_tokens for shape in ROWS["kimi-k3-tp8"].shapes} == set(range(1, 9))
    pools = {shape.case.pool_rows for name in ROWS if name.startswith("pools-") for shape in ROWS[name].shapes}
    assert {2_096_567, 3_730_000} <= pools and 337_128 / 2_096_567 == pytest.approx(0.1608, rel=1e-4)


@pytest.mark.parametrize(("name", "line", "size"), [
    ("pools-fp8-past-31-bits", 1 << 31, 576), ("pools-fp8-past-32-bits", 1 << 32, 576),
    ("pools-bf16-past-31-bits", 1 << 31, 1152), ("pools-bf16-past-32-bits", 1 << 32, 1152),
])  # fmt: skip
def test_a_pool_just_across_a_line_has_its_last_rows_past_it(name: str, line: int, size: int) -> None:
    for shape in ROWS[name].shapes:
        assert line < shape.case.pool_rows * size < line + 128 * size


def test_a_batch_has_four_lengths_in_runs_and_the_longest_among_them() -> None:
    assert lengths_of(8192, 1) == (8192,)
    for batch in (2, 3, 4, 17, 64, 512):
        for length in (1, 2, 9, 130, 8192):
            made = lengths_of(length, batch)
            assert len(made) == batch and max(made) == length and min(made) >= 1 and len(set(made)) <= 4
    assert len(str(Case(heads=1, lengths=lengths_of(8192, 512)))) < 60


def test_what_a_case_needs_is_what_it_is_refused_for() -> None:
    shape = next(shape for shape in SHAPES if shape.name == "kimi-k3-tp8-served-length-1048576-batch-512")
    needs = shape.needs
    assert needs.scores == 12 * sum(shape.case.lengths) and needs.gpu_gib * 2**30 == needed_bytes(
        shape.case, torch.device("cuda")
    )
    assert 500 < needs.gpu_gib < 2000 and str(needs) == "1.18e+03 GiB and 3.7e+09 scores"
    cpu, nightly = torch.device("cpu"), PROFILES["nightly"]
    assert "asks a CPU for 2e+06 scores at most" in str(shape.why_not(nightly, cpu))
    small = Shape(name="small", case=Case(heads=1, lengths=(9,)))
    assert small.why_not(PROFILES["smoke"], cpu) is None
    row = shape.case.replace(heads=1, lengths=(1,), pool_rows=0, token_padding=1 << 20, page_size=1 << 12)
    fat = Shape(name="fat", case=row.replace(lengths=(total_bytes(cpu) >> 23,)))
    assert "GiB" in str(fat.why_not(nightly, cpu)) and fat.needs.scores < nightly.scores


def test_a_profile_asks_all_that_fit_or_one_of_a_row_and_counts_the_rest() -> None:
    plan = make_plan(load(), device="cpu", backends=["torch-sdpa"])
    backend = plan.backends[0]
    row = ROWS["deepseek-v3-tp8"]
    gate, smoke = (sort(row, backend, plan, PROFILES[name], 0) for name in ("gate", "smoke"))
    assert len(gate.chosen) + len(gate.left["sdpa-fp32"]) == len(row.shapes)
    assert all(shape.needs.scores <= PROFILES["gate"].scores for shape in gate.chosen)
    assert len(smoke.chosen) == 1 and smoke.chosen[0] in gate.chosen
    others = {sort(row, backend, plan, PROFILES["smoke"], seed).chosen[0].name for seed in range(8)}
    assert len(others) > 3
    count, needs = left_of(backend, plan, PROFILES["gate"], 0)["sdpa-fp32"]
    assert count == sum(shape.needs.scores > PROFILES["gate"].scores for shape in SHAPES) and needs.startswith(
        "production shapes"
    )
    assert GPU_FACTOR * PROFILES["gate"].scores > max(shape.needs.scores for shape in ROWS["kimi-k3-tp8"].shapes)


def test_what_lies_outside_a_contract_is_neither_asked_nor_left() -> None:
    plan = make_plan(load(), device="cpu", backends=["gluon-splitkv"])
    backend = plan.backends[0]
    sorted_ = sort(ROWS["kimi-k3-tp8"], backend, plan, PROFILES["gate"], 0)
    asked = [*sorted_.chosen, *(shape for shapes in sorted_.left.values() for shape in shapes)]
    assert asked and all(shape.case.query_format == "bf16" for shape in asked) and len(asked) < len(ROWS["kimi-k3-tp8"].shapes)
    assert regime_of(plan, backend, Case(heads=12, lengths=(4,), query_format="e4m3fn", cache_format="e4m3fn")) is None
    assert regime_of(plan, make("torch-sdpa"), Case(heads=12, lengths=(4,))) is None  # no backend of this run


def test_the_table_counts_what_is_not_run_and_says_what_it_needs() -> None:
    named = {"backend": "b", "regime": "r"}
    line = {"kind": "unasked", **named, "cases": 380, "reason": "production shapes that need up to 12 GiB"}
    ran = {"kind": "result", **named, "phase": "shapes", "verdict": "PASS", "case": "c", "relation": None, "message": "",
           "measurements": {}, "seconds": 1.0}  # fmt: skip
    found = rows([line, ran, line])  # two processes of one run say the same
    assert (found[0].unrun, found[0].executed, found[0].reason) == (380, 1, None)
    assert any("1 (+380 not run)" in drawn and "PASS, 380 not run" in drawn for drawn in table(found))
    assert notes(found) == ["not run: b × r: 380 of 381 cases; production shapes that need up to 12 GiB"]


GOOD = """
version = 1
[sets]
some = [3, 4]
[[row]]
name = "a"
source = "here"
why = "because."
fixed = { heads = 2 }
axes = { length = "some", batch = [1, 2], query_tokens = [1, 5] }
cross = [["length", "batch"]]
"""


def test_a_row_expands_to_each_axis_alone_and_the_crossed_ones_together(tmp_path: Path) -> None:
    (tmp_path / "shapes_x.toml").write_text(GOOD)
    (row,) = shape_rows(tmp_path)
    assert [shape.name for shape in row.shapes] == [
        "x-a", "x-a-length-4", "x-a-batch-2", "x-a-query-tokens-5", "x-a-length-4-batch-2",
    ]  # fmt: skip
    assert row.shapes[-1].case == Case(heads=2, lengths=(3, 4))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("version = 1", "version = 2", "must hold version = 1"),
        ('"some"', '"none"', "no set is called 'none'"),
        ('source = "here"', "", "lacks source"),
        ("heads = 2", "heads = 2, colour = 3", "colour"),
        ("heads = 2", "heads = 0", "heads must be"),
        ('["length", "batch"]', '["length", "heads"]', "cross names heads"),
        ("batch = [1, 2], ", "", "length and batch are axes"),
        ("[3, 4]", "3", "no list"),
        ("cross", "crossed", "has crossed"),
        ("[[row]]", "[[row]", "cannot be read as TOML"),
    ],
)
def test_a_file_at_fault_is_an_error_that_names_it(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert old in GOOD
    (tmp_path / "shapes_bad.toml").write_text(GOOD.replace(old, new, 1))
    with pytest.raises(ShapesError, match=said) as caught:
        shape_rows(tmp_path)
    assert "shapes_bad.toml" in str(caught.value)


def test_the_command_lists_what_each_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["shapes"]) == 0
    said = capsys.readouterr().out
    assert "kimi-k3-tp8 " in said and f"{len(SHAPES)} cases in {len(ROWS)} rows" in said
    assert main(["shapes", "pools-k3-21"]) == 0
    said = capsys.readouterr().out
    assert "16.08 % of the pool" in said and "pools-k3-2100k-length-337128" in said and "GPU only" in said
    assert main(["shapes", "kimi-k3-tp8-served", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["cases"][-1]["scores"] > 3e9 and row["cases"][-1]["first_profile_on_a_cpu"] == "GPU only"
    assert main(["shapes", "nobody"]) == 2 and "no row of shapes begins with nobody" in capsys.readouterr().err
