"""The options that the gate adds to pytest, and what a run makes of them."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from harness.profiles import DEFAULT, PROFILES

if TYPE_CHECKING:
    from harness.options import Options

#: Options that say that a session is a run of the gate, wherever its tests are.
NAMING = ("--backend", "--regime", "--device", "--regimes-file", "--aiter-source", "--baseline", "--shard")


def add_options(parser: pytest.Parser) -> None:
    """Add the gate's options."""
    group = parser.getgroup("mla-gate", "gate of MLA decode kernels")
    group.addoption("--backend", action="append", default=[], metavar="NAME",
                    help="gate this backend; may be repeated (default: every backend that can run here)")  # fmt: skip
    group.addoption("--regime", action="append", default=[], metavar="NAME",
                    help="gate only this regime; may be repeated (default: all regimes of the backends)")  # fmt: skip
    group.addoption("--profile", choices=tuple(PROFILES), default=DEFAULT,
                    help=f"how many cases, how large, how long (default: {DEFAULT})")  # fmt: skip
    group.addoption("--examples", type=_count, metavar="N",
                    help="random cases of each backend and regime (default: the profile's number)")  # fmt: skip
    group.addoption("--device", metavar="DEVICE", help="cpu, cuda or cuda:INDEX (default: a GPU where there is one)")
    group.addoption("--seed", type=int, metavar="N",
                    help="seed of the searches (default: 0; a new one each time where the profile explores)")  # fmt: skip
    group.addoption("--repro-dir", metavar="DIR", help="where repros of failures go (default: repros)")
    group.addoption("--ledger-dir", metavar="DIR", help="folder of this run's ledgers (default: a new one in .mla-gate/runs)")
    # Not --html, which pytest-html has.
    group.addoption("--report-html", metavar="FILE", help="write the run's report as one HTML file")
    group.addoption("--regimes-file", metavar="FILE", help="judge by this file (default: cases/regimes.toml)")
    group.addoption("--isolation", choices=("worker", "off"), default="worker",
                    help="run cases in a child process that may be lost, or in this one (default: worker)")  # fmt: skip
    group.addoption("--baseline", metavar="LABEL",
                    help="put the same cases to this backend too, or to this version of each, and compare")  # fmt: skip
    group.addoption("--fail-on", choices=("all", "new"), default="all",
                    help="what fails a run with a baseline: every failure, or those only that the baseline does not share "
                    "(default: all)")  # fmt: skip
    group.addoption("--shard", type=_shard, metavar="I/N",
                    help="ask only the I-th of N parts of the run; mla-gate report puts the parts together")  # fmt: skip
    group.addoption("--aiter-source", action="append", default=[], metavar="DIR[=LABEL]",
                    help="source checkout of AITER for the aiter backends; may be repeated with labels")  # fmt: skip


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a number from 1 on, not {text!r}")
    return int(text)


def _shard(text: str) -> tuple[int, int]:
    shard, slash, size = text.partition("/")
    if not (slash and shard.isdecimal() and size.isdecimal() and 1 <= int(shard) <= int(size)):
        raise argparse.ArgumentTypeError(f"I/N with I from 1 to N, as in 2/3, not {text!r}")
    return int(shard), int(size)


def check_options(config: pytest.Config) -> None:
    """Check that options which need each other come together.

    Raises:
        pytest.UsageError: if one is lacking.
    """
    if config.getoption("--fail-on") == "new" and not config.getoption("--baseline"):
        raise pytest.UsageError("--fail-on new needs --baseline LABEL: what is new is told by a baseline")


def read_options(config: pytest.Config, shared: Mapping[str, Any], folder: Path) -> Options:
    """Read what a run was asked for.

    Args:
        config: pytest's.
        shared: the seed and the folder that the run's processes share.
        folder: where its other files go.
    """
    from harness.options import Options

    option = config.getoption
    repros = option("--repro-dir")
    return Options(
        backends=tuple(option("--backend")),
        regimes=tuple(option("--regime")),
        profile=option("--profile"),
        examples=option("--examples"),
        device=option("--device"),
        seed=shared["seed"],
        regimes_file=Path(option("--regimes-file")) if option("--regimes-file") else None,
        repro_dir=Path(repros) if repros else folder / "repros",
        run_dir=Path(shared["run_dir"]),
        database=folder / ".hypothesis" / "mla-gate",
        baseline=option("--baseline"),
        fail_on=option("--fail-on"),
        isolation=option("--isolation"),
        process=getattr(config, "workerinput", {}).get("workerid", "main"),
        processes=getattr(config, "workerinput", {}).get("workercount", 1),
    )
