"""What a run of the gate was asked for.

Source: the options of harness/plugin.py, which says what each is for.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a run was asked for."""

    #: Names of backends; none for the default ones.
    backends: tuple[str, ...] = ()
    #: Names of regimes; none for all.
    regimes: tuple[str, ...] = ()
    #: Name of the profile.
    profile: str = "smoke"
    #: Random cases of each backend and regime; None for the profile's number.
    examples: int | None = None
    #: Device; None for a GPU where there is one.
    device: str | None = None
    #: Seed of the searches.
    seed: int = 0
    #: The regimes file; None for the project's.
    regimes_file: Path | None = None
    #: Where repros go.
    repro_dir: Path = Path("repros")
    #: Folder of this run's ledgers.
    run_dir: Path = Path(".mla-gate/run")
    #: Folder of Hypothesis's example database; None to keep none.
    database: Path | None = None
    #: Name of this process's ledger.
    process: str = "main"
    #: Processes of the run.
    processes: int = 1
    #: Name of a backend, or label of a version, to compare with; None for no comparison.
    baseline: str | None = None
    #: "all": every failure counts; "new": those count that the baseline does not share.
    fail_on: str = "all"
    #: "worker": cases run in a child process that may be lost; "off": in this one.
    isolation: str = "worker"
