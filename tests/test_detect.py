"""The gate finds faults, the hunt tells how, and its figures are what they say."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness import limits
from harness.calibrate import LINES
from harness.detect import main
from harness.false_alarms import Tally, added, keep, tally, upper_limit
from harness.false_alarms import main as count_alarms
from harness.false_alarms import table as alarms_table
from harness.faults.backend import Planted
from harness.faults.variant import BASE, VARIANTS
from harness.hunt import draw, hunt
from harness.kills import Kill, table
from harness.profiles import PROFILES
from harness.regimes import load

FOUND = ("zeros", "value-scale-dropped", "last-split-dropped", "lse-base-2", "writes-cache", "stale-softmax-scale", "never-ran")


@pytest.fixture(scope="module")
def kills() -> list[Kill]:
    regime = load().named(f"model-{BASE}")
    drawn = draw(regime, Planted(name=f"model:{BASE}", variant=VARIANTS[BASE]), PROFILES["smoke"], 20, 0)
    return hunt(FOUND, drawn, regime)


def test_faults_are_found_shrunk_and_named(kills: list[Kill]) -> None:
    assert {kill.name for kill in kills if kill.found} == set(FOUND)
    for kill in kills:
        assert kill.cases <= 20 and kill.size[0] <= 2, kill
        assert kill.right and kill.right_kind, kill


def test_what_one_check_alone_sees_is_told() -> None:
    regime = load().named("model-p-fp32")
    drawn = draw(regime, Planted(name="model:p-fp32", variant=VARIANTS["p-fp32"]), PROFILES["smoke"], 20, 0)
    hard, scale = hunt(("last-element-truncated", "value-scale-twice"), drawn, regime, walk=False)
    assert (hard.checks, hard.needs) == (("hard",), "hard")
    assert scale.found and scale.needs == ""
    assert "| hard | 2 | 1 | last-element-truncated |" in table([hard, scale])


def test_the_table_shows_every_fault_and_sums_up(kills: list[Kill]) -> None:
    text = table([*kills, Kill(name="heads-swapped", found=False, cases=20, seconds=1.0)])
    assert "**not found**" in text and f"{len(FOUND)} of {len(FOUND) + 1} faults found" in text


def test_a_correct_model_raises_no_alarm() -> None:
    found = tally("exp2", count=15, profile="smoke", seed=3)
    assert len(found.cases) > 10 and not found.alarms


def test_runs_of_false_alarms_add_up_and_a_case_drawn_twice_counts_once(tmp_path: Path) -> None:
    low, high = (dict.fromkeys(LINES, value) for value in (0.25, 0.5))
    one = Tally(variant="splits", cases={"a": low, "b": high}, alarms={"b": "FAIL: off"})
    keep(tmp_path, "gate-1", [one])
    keep(tmp_path, "gate-2", [Tally(variant="splits", cases={"b": high, "c": {}})])
    (total,) = added(tmp_path)
    assert set(total.cases) == {"a", "b", "c"} and total.alarms == one.alarms
    assert total.quantiles("z / limit") == "0.5, 0.5, 0.5"
    assert "1 false alarms in 3 cases" in alarms_table([total])


def test_an_alarm_of_a_kept_run_fails_the_sum(tmp_path: Path) -> None:
    keep(tmp_path, "gate-1", [Tally(variant="splits", cases={"a": {}}, alarms={"a": "FAIL: off"})])
    assert count_alarms(["--sum", str(tmp_path)]) == 1


def test_the_upper_limit_is_clopper_and_pearsons() -> None:
    assert upper_limit(0, 10_000) == pytest.approx(1 - 0.05 ** (1 / 10_000), rel=1e-6)
    assert upper_limit(1, 100) == pytest.approx(0.0466, rel=1e-2)
    assert upper_limit(3, 3) == 1.0


def test_limits_find_the_smallest_size_that_is_caught() -> None:
    scale, _, dropped, _ = limits.MISTAKES
    assert limits.smallest(scale, 64, lambda size: size >= 0.01) == pytest.approx(0.01, rel=0.15)
    assert limits.smallest(scale, 64, lambda size: False) is None
    assert limits.smallest(dropped, 64, lambda size: size >= 5) == 8
    assert limits.smallest(dropped, 1, lambda size: True) is None


def test_a_misspelt_fault_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--only", "zeroes"])
    assert "no fault is called zeroes" in capsys.readouterr().err
