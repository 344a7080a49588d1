"""The pytest plugin: the gate's options, its progress, its table and its exit status.

1. It stays silent in a session that gates nothing: no file is written, no backend is imported.
2. The table is counted from the ledgers of every process of the run, so pytest-xdist changes nothing in it. It is printed
   however the session ends, Ctrl-C included.
3. A row that fails fails the session, whatever the tests said: a regime that executed nothing, or one that never saw a
   sensitivity where the profile demands it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from harness.plugin_options import add_options, read_options
from harness.profiles import PROFILES

if TYPE_CHECKING:
    from harness.gate import Gate
    from harness.ledger import Ledger, Line

_GATE = pytest.StashKey["Gate"]()
_RUN = pytest.StashKey[dict[str, Any]]()
_LOST = pytest.StashKey[list[Any]]()
_FAULT = pytest.StashKey[pytest.UsageError]()
_UNITS = pytest.StashKey[list[tuple[str, str]]]()
#: The gate's own suite.
CASES = Path(__file__).resolve().parent.parent / "cases"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the gate's options."""
    add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Fix what all processes of the run share: its folder and its seed."""
    shared = getattr(config, "workerinput", {}).get("mla_gate")
    if shared is None:
        seed = config.getoption("--seed")
        if seed is None:
            explores = PROFILES[config.getoption("--profile")].explores
            seed = random.SystemRandom().randrange(1 << 32) if explores else 0
        named = config.getoption("--ledger-dir")
        stamp = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        run_dir = Path(named).absolute() if named else home(config) / ".mla-gate" / "runs" / stamp
        shared = {"seed": seed, "run_dir": str(run_dir)}
    config.stash[_RUN] = shared


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Hand a worker of pytest-xdist what all processes share."""
    node.workerinput["mla_gate"] = node.config.stash[_RUN]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Take over from a worker of pytest-xdist the lines of its ledger that the disk did not take."""
    node.config.stash.setdefault(_LOST, []).extend(getattr(node, "workeroutput", {}).get("mla_gate_lost", []))


def pytest_sessionstart(session: pytest.Session) -> None:
    """Plan a run before any test is collected where its arguments say that it is one: a fault is then one clear line."""
    config, option = session.config, session.config.getoption
    named = any(
        option(name) for name in ("--backend", "--regime", "--device", "--regimes-file", "--aiter-source", "--baseline")
    )
    if option("--fail-on") == "new" and not option("--baseline"):
        raise pytest.UsageError("--fail-on new needs --baseline LABEL: what is new is told by a baseline")
    paths = [(config.invocation_params.dir / argument.partition("::")[0]).resolve() for argument in config.args]
    inside = any(path.is_relative_to(CASES) for path in paths)
    if (named or inside) and not hasattr(config, "workerinput"):
        gate_of(config)


def planned(config: pytest.Config) -> Gate | None:
    """Give the session's run, for the hooks that collect; None where it cannot be planned, which ends it later."""
    try:
        return gate_of(config)
    except pytest.UsageError as error:
        config.stash[_FAULT] = error
        return None


@pytest.hookimpl(trylast=True)  # after -k and -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """End a session whose run cannot be planned (within a file it would be that file's error); leave out what is not asked."""
    if _FAULT in config.stash:
        raise config.stash[_FAULT]
    # Where nothing is to be asked, pytest makes a test that it skips; a skip would look green.
    empty = [item for item in items if _asks_nothing(item)]
    if empty:
        config.hook.pytest_deselected(items=empty)
        items[:] = [item for item in items if item not in empty]
    shard = config.getoption("--shard")
    if shard and items:
        from harness.shards import shard_of

        config.stash[_UNITS], mine = shard_of(items, gate_of(config).plan, *shard)
        config.hook.pytest_deselected(items=[item for item in items if item not in mine])
        items[:] = [item for item in items if item in mine]


def _asks_nothing(item: pytest.Item) -> bool:
    if not item.path.is_relative_to(CASES):
        return False
    return any("empty parameter set" in str(mark.kwargs.get("reason")) for mark in item.iter_markers("skip"))


def gate_of(config: pytest.Config) -> Gate:
    """Make the session's gate, once.

    Raises:
        pytest.UsageError: if the run cannot be planned as it was asked for.
    """
    if _GATE not in config.stash:
        from harness.gate import Gate
        from harness.plan import PlanError
        from harness.regimes import RegimesError

        shared = config.stash[_RUN]
        if config.getoption("--aiter-source"):
            _name_sources(config.getoption("--aiter-source"))
        gate = Gate(read_options(config, shared, home(config)), say=lambda line: _say(config, line))
        try:
            _ = gate.plan
        except (PlanError, RegimesError) as error:
            raise pytest.UsageError(str(error)) from None
        config.stash[_GATE] = gate
    return config.stash[_GATE]


def home(config: pytest.Config) -> Path:
    """Find the folder that a run's files go to by default: the project's, or where an installed gate is called from.

    Without a project's configuration pytest's own root may be the folder that the cases are installed in.
    """
    return config.rootpath if config.inipath else config.invocation_params.dir


def _name_sources(texts: list[str]) -> None:
    from harness.backends.aiter_source import name_sources
    from harness.backends.protocol import NotInstalled

    try:
        name_sources(texts)
    except NotInstalled as error:
        raise pytest.UsageError(str(error)) from error


@pytest.fixture(scope="session")
def mla_gate(request: pytest.FixtureRequest) -> Gate:
    """The run that this session belongs to."""
    return gate_of(request.config)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Write down which pairs this session means to gate."""
    if _UNITS in session.config.stash and not session.config.option.collectonly:
        shard, size = session.config.getoption("--shard")
        gate_of(session.config).ledger.write("split", shard=shard, of=size, units=session.config.stash[_UNITS])
    from_items = [getattr(item, "callspec", None) for item in session.items]
    pairs = {str(spec.params["pair"]): spec.params["pair"] for spec in from_items if spec and "pair" in spec.params}
    if pairs and not session.config.option.collectonly:
        gate = gate_of(session.config)
        for pair in pairs.values():
            gate.intend(pair)
        for pair in gate.plan.pairs:
            if str(pair) not in pairs and (reason := gate.beyond(pair)):
                gate.leave_out(pair, reason)


def pytest_report_collectionfinish(config: pytest.Config) -> list[str]:
    """Say what is gated, before it is."""
    return _about(config.stash[_GATE]) if _GATE in config.stash else []


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """End this process's ledger, and fail the session where a row fails."""
    config = session.config
    if _GATE in config.stash:
        config.stash[_GATE].close(status=int(session.exitstatus))
        if hasattr(config, "workeroutput") and config.stash[_GATE].opened:
            config.workeroutput["mla_gate_lost"] = list(config.stash[_GATE].ledger.lost)
    if not hasattr(config, "workerinput") and int(session.exitstatus) == 0 and _bad(_lines(config)):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the verdict table."""
    lines = _lines(config)
    if not lines:
        return
    from harness.compare import comparisons
    from harness.report.comparison import section
    from harness.report.rows import left_out, rows
    from harness.report.terminal import notes, table, verdict

    terminalreporter.section("mla-gate")
    shared, found = config.stash[_RUN], rows(lines)
    beside = section(comparisons(lines))
    for line in (*table(found), *notes(found), *left_out(lines), *beside, "", verdict(found)):
        terminalreporter.write_line(line)
    if shard := config.getoption("--shard"):
        part = f"shard {shard[0]} of {shard[1]}: mla-gate report LEDGER… puts the parts together"
        terminalreporter.write_line(part)
    terminalreporter.write_line(
        f"profile {config.getoption('--profile')}, --seed {shared['seed']}, ledger {_relative(_folder(config), config)}"
    )
    for line in _reports(config):
        terminalreporter.write_line(line)


def _reports(config: pytest.Config) -> list[str]:
    """Write the report's forms that were asked for, and a CI step's summary; say what was written and what could not be."""
    path = config.getoption("--report-html")
    if not path and not os.environ.get("GITHUB_STEP_SUMMARY"):
        return []
    from harness.merge import merge_ledgers
    from harness.report.forms import write_forms

    try:
        merged = merge_ledgers(_ledgers(config), whole=False)  # other shards are asked elsewhere
        lost = tuple(_lost(config))
        return write_forms(dataclasses.replace(merged, lines=(*merged.lines, *lost)), html_file=Path(path) if path else None)
    except Exception as error:  # the verdict is printed by now, and stays
        return [f"mla-gate: no report: {type(error).__name__}: {error}"]


def _about(gate: Gate) -> list[str]:
    plan, options = gate.plan, gate.options
    named = ", ".join(backend.name for backend in plan.backends)
    lines = [f"mla-gate: {named} on {plan.device}, profile {options.profile}, --seed {options.seed}"]
    lines += [f"mla-gate: {name} is compared with {baseline.name}" for name, baseline in plan.baselines.items()]
    return lines + [f"mla-gate: {name} cannot run here: {reason}" for name, reason in plan.absent.items()]


def _folder(config: pytest.Config) -> Path:
    """Find the folder that holds the run's ledgers: where this process wrote, else where the run was told to."""
    if _GATE in config.stash and config.stash[_GATE].opened:
        path = config.stash[_GATE].ledger.path
        if path is not None:
            return path.parent
    return Path(config.stash[_RUN]["run_dir"])


def _bad(lines: list[Line]) -> bool:
    """Tell whether a row of the table or of the comparison fails."""
    from harness.compare import comparisons
    from harness.report.rows import rows

    return any(row.reason for row in rows(lines)) or any(one.reason for one in comparisons(lines))


def _lines(config: pytest.Config) -> list[Line]:
    return [*(line for ledger in _ledgers(config) for line in ledger.lines), *_lost(config)]


def _ledgers(config: pytest.Config) -> list[Ledger]:
    from harness.ledger import LedgerError, read

    ledgers = []
    for path in sorted(_folder(config).glob("*.jsonl")):
        with contextlib.suppress(LedgerError):  # a full disk may not have taken even its header
            ledgers.append(read(path))
    return ledgers


def _lost(config: pytest.Config) -> list[Line]:
    """List the lines that the disk did not take."""
    own = config.stash[_GATE].ledger.lost if _GATE in config.stash and config.stash[_GATE].opened else []
    return [line for line in (*own, *config.stash.get(_LOST, [])) if "kind" in line]


def _relative(path: Path, config: pytest.Config) -> str:
    with contextlib.suppress(ValueError):
        return str(path.relative_to(config.invocation_params.dir))
    return str(path)


def _say(config: pytest.Config, line: str) -> None:
    """Show a line of progress past pytest's capture; a worker's goes to the standard error it shares."""
    capture = config.pluginmanager.getplugin("capturemanager")
    quiet: Any = capture.global_and_fixture_disabled() if capture else contextlib.nullcontext()
    if config.option.verbose < 0:
        return
    with quiet:
        print(("\n" if not hasattr(config, "workerinput") else "") + line, file=sys.stderr, flush=True)
