"""The shards of a run are the run: merged, they have its rows, its cases and its findings."""

from __future__ import annotations

import dataclasses
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from harness.cli import main
from harness.ledger import read_all
from harness.merge import Merged, merge
from harness.profiles import PROFILES
from tests.test_plugin import STUB, Gate, gate  # noqa: F401  the fixture

pytest_plugins = ["pytester"]
#: Two backends, one of them wrong: four searches, two rows of refusals, and a few pinned cases.
ASKED = ("--backend", f"{STUB}right", "--examples", "8", "-k", "random or contract or pinned and lengths")


def run(gate: Gate, folder: str, *options: str) -> int:  # noqa: F811
    """Run the wrong backend and the right one, as on a machine of its own."""
    shutil.rmtree(gate.path / ".hypothesis", ignore_errors=True)
    return int(gate.run("permuted", *ASKED, "--ledger-dir", str(gate.path / folder), *options).ret)


def rows(merged: Merged) -> list[Any]:
    """Give the rows without their times."""
    return [dataclasses.replace(row, seconds=0.0) for row in merged.rows]


def kept(merged: Merged, kind: str) -> list[Any]:
    """Give the lines of a kind without what depends on the clock."""
    lines = [{**line, "seconds": 0, "run_seconds": 0} for line in merged.lines if line["kind"] == kind]
    return sorted(
        lines, key=lambda line: (line["backend"], str(line["regime"]), line["phase"], line["case"], str(line["relation"]))
    )


def test_merged_shards_are_the_unsharded_run(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    # No search may be cut by its time limit: the clock is no part of what is said here.
    patient = dataclasses.replace(PROFILES["smoke"], seconds=3600, shrink_seconds=3600)
    monkeypatch.setitem(PROFILES, "smoke", patient)  # type: ignore[arg-type]
    assert run(gate, "whole") == 1
    statuses = [run(gate, f"parts/{shard}", "--shard", f"{shard}/3") for shard in (1, 2, 3)]
    whole, parts = merge([gate.path / "whole"]), merge([gate.path / "parts"])
    assert rows(parts) == rows(whole)
    assert [row.reason for row in rows(whole)].count("failures") == 2
    for kind in ("result", "finding"):
        assert kept(parts, kind) == kept(whole, kind)
        assert kept(parts, kind)
    assert not parts.remarks
    # Each row is one shard's, so that a shard tells of its rows what the whole run tells.
    shards = [merge([gate.path / "parts" / shard]).rows for shard in ("1", "2", "3")]
    held = [{(row.backend, row.regime) for row in found if row.executed} for found in shards]
    assert [len(several) for several in held] == [2, 2, 2]
    assert not held[0] & held[1] and not held[1] & held[2] and not held[0] & held[2]
    assert sorted(statuses) == [0, 1, 1]


def test_a_shard_that_did_not_run_fails_the_merged_report(gate: Gate, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    page = gate.path / "page.html"
    run(gate, "parts/1", "--shard", "1/2", "-k", "contract", "--report-html", str(page))
    assert "no case executed" not in page.read_text()  # what is asked elsewhere is not missing from a shard's own report
    capsys.readouterr()
    assert main(["report", str(gate.path / "parts")]) == 1
    said = capsys.readouterr().out
    assert re.search(rf"{STUB}right +\(contract\) .* FAIL: no case executed", said)
    assert f"mla-gate: shard 2 of 2 is missing, and with it {STUB}right × (contract)" in said


def test_the_seed_and_the_shards_do_not_depend_on_each_other(gate: Gate) -> None:  # noqa: F811
    run(gate, "parts/1", "--shard", "1/6", "--seed", "7")
    units = [line["units"] for ledger in read_all([gate.path / "parts"]) for line in ledger.lines if line["kind"] == "split"]
    assert [[unit[0].rpartition(":")[2], unit[1]] for unit in units[0]] == [
        ["permuted", "few-heads"], ["permuted", "more-heads"], ["right", "few-heads"], ["right", "more-heads"],
        ["permuted", "(contract)"], ["right", "(contract)"],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("shard", "said"),
    [
        ("7/7", "*this one has 6 (*permuted × few-heads*): ask for 6 shards at most*"),
        ("0/2", "*I/N with I from 1 to N, as in 2/3, not '0/2'*"),
        ("3/2", "*not '3/2'*"),
        ("1", "*not '1'*"),
        ("a/b", "*not 'a/b'*"),
    ],
)
def test_a_shard_that_is_none_is_one_clear_line(gate: Gate, shard: str, said: str) -> None:  # noqa: F811
    done = gate.run("permuted", *ASKED, "--shard", shard)
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    done.stderr.fnmatch_lines([said])


def test_processes_of_pytest_xdist_share_a_shard(gate: Gate, tmp_path: Path) -> None:  # noqa: F811
    for shard in ("1", "2"):
        options = ("-n", "2", "-k", "contract", "--isolation", "off", "--backend", f"{STUB}right", "--shard", f"{shard}/2")
        done = gate.spawn("right", "--backend", f"{STUB}wrong", *options, "--ledger-dir", str(tmp_path / shard))
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"shard {shard} of 2: mla-gate report" in done.stdout
    assert [(row.backend, row.executed) for row in merge([tmp_path]).rows] == [(f"{STUB}right", 12), (f"{STUB}wrong", 12)]
