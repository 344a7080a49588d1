"""Repros: a failing case as a file that is replayed, and as a script that stands alone.

1. A repro names its version, the case, the backend and the regime; replaying needs nothing else.
2. A repro that is cut off, misspelt or from a newer version is refused with the reason.
3. A folder that cannot be written, or a script that cannot be made, costs the file and is said; it never costs a verdict.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.backends.protocol import Backend
from harness.case import Case, CaseError
from harness.environment import environment
from harness.ledger import plain
from harness.regimes import NoRegime, Regimes
from harness.run import Result
from harness.script import write_script
from harness.search import Finding
from harness.serving.search import TraceFinding
from harness.serving.trace import TraceError, is_trace, trace_of

VERSION = 1


class ReproError(ValueError):
    """A repro that cannot be read; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repro:
    """A failing case on a backend."""

    case: Case
    #: Name of the backend.
    backend: str
    #: Name of the regime, or None.
    regime: str | None
    #: Device it failed on.
    device: str
    #: Kind of verdict and of fault, and the verdict's message.
    verdict: str
    fault: str | None
    message: str
    #: Relation between two runs that it broke; None for one run.
    relation: str | None = None
    #: Steps of the serving trace whose id is the relation, for people.
    steps: tuple[str, ...] = ()
    #: Id of the first case that showed the fault, and of the smallest passing neighbour; or None.
    first: str | None = None
    neighbour: str | None = None
    #: What the neighbour has instead, in words.
    difference: str = ""
    #: The regimes file it was judged by; None for the project's.
    rules: str | None = None
    #: What it ran on.
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def command(self) -> str:
        """Give the command that replays it."""
        return replay_command(self.case, self.backend, self.device, self.relation, rules=self.rules)


def replay_command(case: Case, backend: str, device: str, relation: str | None = None, *, rules: str | None = None) -> str:
    """Give the command that replays a case on a backend, as whoever started the run would call it."""
    program = os.environ.get("MLA_GATE_COMMAND", "mla-gate")
    named = [] if relation is None or is_trace(relation) else ["--relation", relation]
    named += [] if rules is None else ["--regimes-file", rules]
    asked = relation if relation is not None and is_trace(relation) else str(case)
    return f"{program} replay {shlex.join([asked, '--backend', backend, '--device', device, *named])}"


def save(
    result: Result,
    backend: Backend,
    regimes: Regimes,
    folder: Path,
    *,
    device: str,
    finding: Finding | TraceFinding | None = None,
) -> list[str]:
    """Write the repro and the script of a failing result; return a line about each."""
    trace = trace_of(result.relation)
    walk = finding.walk if isinstance(finding, Finding) else None
    made = Repro(
        case=result.case,
        backend=result.backend,
        regime=result.regime,
        device=device,
        verdict=result.verdict.kind,
        fault=result.verdict.fault,
        message=result.verdict.message,
        relation=result.relation,
        steps=tuple(trace.lines) if trace else (),
        first=str(finding.first) if finding else None,
        neighbour=str(walk.neighbour) if walk and walk.neighbour else None,
        difference=walk.difference if walk else "",
        rules=regimes.option,
        environment=environment(device),
    )
    name = _name(result)
    notes = []
    body = {"mla-gate": "repro", "version": VERSION, **plain(made), "case": str(made.case), "command": made.command}
    notes.append(_write(folder / f"{name}.json", json.dumps(body, indent=2, ensure_ascii=False) + "\n", "repro"))
    if trace is not None:
        return [*notes, "script not made: the fault shows after the steps before it (the repro replays them)"]
    if result.relation is not None and result.verdict.fault in ("variant", "nondeterministic"):
        return [*notes, "script not made: the fault shows between two runs (the repro replays both)"]
    if backend.name.startswith("route:"):
        return [*notes, "script not made: a route is steps and tables of this project's own (the repro replays it)"]
    try:
        rows = tuple(found.index for found in result.verdict.measurements.worst_rows)
        text = write_script(result.case, backend, regimes.of(result.backend, result.case), rows=rows)
    except (NoRegime, MemoryError, OSError, ValueError, RuntimeError, NotImplementedError) as error:
        return [*notes, f"script not made: {type(error).__name__}: {error}"]
    return [*notes, _write(folder / f"{name}.py", text, "script")]


def load(path: Path | str) -> Repro:
    """Read a repro.

    Raises:
        ReproError: if it cannot be read, is no repro, is cut off, or is of a newer version.
    """
    path = Path(path)
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ReproError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ReproError(f"{path}: is cut off or no JSON: {error}") from error
    if not isinstance(body, dict) or body.get("mla-gate") != "repro":
        raise ReproError(f'{path}: is no repro: it must hold "mla-gate": "repro"')
    if body.get("version") != VERSION:
        raise ReproError(
            f"{path}: is of version {body.get('version')!r}, this mla-gate reads {VERSION}: use the one that wrote it"
        )
    fields: dict[str, Any] = {name: body[name] for name in Repro.__dataclass_fields__ if name in body}
    missing = [name for name in ("case", "backend", "regime", "device", "verdict", "fault", "message") if name not in fields]
    if missing:
        raise ReproError(f"{path}: lacks {', '.join(missing)}")
    try:
        fields["case"] = Case.parse(str(fields["case"]))
        trace_of(fields.get("relation"))
    except (CaseError, TraceError) as error:
        raise ReproError(f"{path}: {error}") from error
    fields["steps"] = tuple(fields.get("steps", ()))
    return Repro(**fields)


def _name(result: Result) -> str:
    asked = result.relation if result.relation is not None and is_trace(result.relation) else str(result.case)
    digest = hashlib.sha256(asked.encode()).hexdigest()[:8]
    return re.sub(r"[^\w.-]+", "-", f"{result.backend}-{result.verdict.fault or 'error'}-{digest}")


def _write(path: Path, text: str, what: str) -> str:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        with contextlib.suppress(OSError):  # a full disk leaves half a file
            path.unlink(missing_ok=True)
        return f"{what} not saved: {path} cannot be written ({error.strerror}); name another folder with --repro-dir"
    here = Path.cwd()
    return f"{what}: {path.relative_to(here) if path.is_relative_to(here) else path}"
