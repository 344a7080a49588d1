"""Production shapes: rows of axes in ``cases/shapes_*.toml``, expanded into named cases, and what each case needs.

1. A row is a base case, the first value of each axis, and what may be otherwise: each axis alone, and the axes of ``cross``
   together. A case is called after what is otherwise in it.
2. Every row has a source and a reason. A key, axis or set that nobody knows, and two cases of one name, are errors that name
   the file and the row.
3. What a case needs is estimated: memory by the same rule that refuses it before a run, work as scores (heads x query tokens
   x cached tokens). A CPU is asked up to a profile's ``scores``, a GPU up to ``GPU_FACTOR`` times as many.
4. A case that needs more than there is is not run, and is counted with what it needs.

Source: the rows' own; the estimate of memory is that of ``inputs.py``.
"""

from __future__ import annotations

import functools
import itertools
import tomllib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from harness.backends.protocol import Backend, accepts
from harness.case import Case, CaseError
from harness.inputs import needed_bytes
from harness.known import covering
from harness.memory import total_bytes
from harness.plan import Plan
from harness.profiles import Profile
from harness.regimes import NoRegime

FOLDER = Path(__file__).resolve().parent.parent / "cases"
VERSION = 1
#: How many times a CPU's scores a GPU is asked for: an estimate from the ratio of their fp64 rates, a few thousand to one core.
GPU_FACTOR = 10_000
#: Fields that a value of the axis "formats" gives.
_FORMATS = ("query_format", "cache_format", "query_scale", "cache_scale")
_KEYS = {"name", "source", "why", "fixed", "axes", "cross"}


class ShapesError(ValueError):
    """A file of shapes that cannot be used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a case needs."""

    #: Memory on a GPU, GiB, and on a CPU, which holds of a large pool only what is live.
    gpu_gib: float
    cpu_gib: float
    #: Heads x query tokens x cached tokens.
    scores: int

    def __str__(self) -> str:
        return f"{self.gpu_gib:.3g} GiB and {self.scores:.2g} scores"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A case that somebody serves."""

    #: Row and what is otherwise: "k3-tp8-batch64".
    name: str
    case: Case

    @property
    def needs(self) -> Needs:
        """Estimate what it needs."""
        gpu, cpu = (needed_bytes(self.case, torch.device(kind)) / 2**30 for kind in ("cuda", "cpu"))
        return Needs(gpu_gib=gpu, cpu_gib=cpu, scores=self.case.heads * self.case.query_tokens * sum(self.case.lengths))

    def why_not(self, profile: Profile, device: torch.device) -> str | None:
        """Say what a profile's run on a device lacks for it, or None."""
        needs, gpu = self.needs, device.type == "cuda"
        most = profile.scores * (GPU_FACTOR if gpu else 1)
        if needs.scores > most:
            return f"needs {needs}, and profile {profile.name} asks a {'GPU' if gpu else 'CPU'} for {most:.2g} scores at most"
        # All of its memory and not what is free now, so that every process of a run sorts alike; a run looks again.
        gib, whole = needs.gpu_gib if gpu else needs.cpu_gib, total_bytes(device) / 2**30
        return f"needs {gib:.3g} GiB, and {device} has {whole:.3g} GiB" if gib > whole else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeRow:
    """A row: a model at a tensor-parallel size, or a corner that somebody met."""

    #: File and name: "kimi-k3-tp8".
    name: str
    #: Where its numbers come from, and why it stands here.
    source: str
    why: str
    shapes: tuple[Shape, ...]

    def chosen(self, fitting: Sequence[Shape], profile: Profile, seed: int) -> list[Shape]:
        """Choose those of the fitting shapes that a profile asks: all, or some of the less work, as the seed decides."""
        if profile.shapes is None or not fitting:
            return list(fitting)
        fitting = sorted(fitting, key=lambda shape: shape.needs.scores)[: -(-len(fitting) // 2)]
        count = min(profile.shapes, len(fitting))
        start = zlib.crc32(f"{self.name} {seed}".encode())
        return [fitting[(start + index * len(fitting) // count) % len(fitting)] for index in range(count)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sorted:
    """What a run asks of a row."""

    #: Shapes that are asked.
    chosen: list[Shape]
    #: Regime -> shapes that need more than there is.
    left: Mapping[str, list[Shape]]


def sort(row: ShapeRow, backend: Backend, plan: Plan, profile: Profile, seed: int) -> Sorted:
    """Sort a row's shapes: what lies outside a backend's contract or the run's regimes is neither asked nor left."""
    fitting: list[Shape] = []
    left: dict[str, list[Shape]] = {}
    for shape in row.shapes:
        regime = regime_of(plan, backend, shape.case)
        if regime is not None and shape.why_not(profile, plan.device) is not None:
            left.setdefault(regime, []).append(shape)
        elif regime is not None:
            fitting.append(shape)
    return Sorted(chosen=row.chosen(fitting, profile, seed), left=left)


def regime_of(plan: Plan, backend: Backend, case: Case) -> str | None:
    """Name the regime in which a run asks a backend for a case that stands in a file; None where it does not ask.

    A case inside the contract that no regime covers is asked ("(none)"): the run says so as an error.
    """
    if not accepts(backend, case, plan.device):
        return None
    try:
        regime = plan.regimes.of(backend.name, case)
    except NoRegime:
        return "(none)"
    if covering(backend.name, case, regime.name) is not None:
        return None  # the entry's own case is asked in its stead
    return regime.name if any(pair.backend is backend and pair.regime.name == regime.name for pair in plan.pairs) else None


def left_of(backend: Backend, plan: Plan, profile: Profile, seed: int) -> dict[str, tuple[int, str]]:
    """Count what is left of all rows, by regime: how many shapes, and what they need at most."""
    found: dict[str, list[Shape]] = {}
    for row in shape_rows():
        for regime, shapes in sort(row, backend, plan, profile, seed).left.items():
            found.setdefault(regime, []).extend(shapes)
    counted = {}
    for regime, shapes in found.items():
        most = Needs(**{
            name: max(getattr(shape.needs, name) for shape in shapes) for name in ("gpu_gib", "cpu_gib", "scores")
        })  # fmt: skip
        counted[regime] = (len(shapes), f"production shapes that need up to {most} (mla-gate shapes lists them)")
    return counted


@functools.cache
def shape_rows(folder: Path = FOLDER) -> tuple[ShapeRow, ...]:
    """Read every row, by file and in order.

    Raises:
        ShapesError: if a file is at fault.
    """
    files = {path: _read(path) for path in sorted(folder.glob("shapes_*.toml"))}
    sets: dict[str, list[Any]] = {}
    for path, body in files.items():
        for name, values in body.get("sets", {}).items():
            if name in sets or not isinstance(values, list) or not values:
                raise ShapesError(f"{path}: the set {name!r} stands elsewhere too, or is no list of values")
            sets[name] = values
    rows = [_row(path, entry, sets) for path, body in files.items() for entry in body.get("row", [])]
    names = [shape.name for row in rows for shape in row.shapes]
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise ShapesError(f"{folder}: two shapes are called {', '.join(twice)}")
    return tuple(rows)


def lengths_of(length: int, batch: int) -> tuple[int, ...]:
    """Make the lengths of a batch, ``length`` the longest: four lengths, in runs, so that ids stay short."""
    if batch == 1:
        return (length,)
    four = (length - length // 3, length, length // 7 + 1, length // 2 + 1)
    run = -(-batch // 4)
    return tuple(min(four[index // run], length) for index in range(batch))


def _read(path: Path) -> dict[str, Any]:
    try:
        body = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ShapesError(f"{path}: cannot be read as TOML: {error}") from error
    if body.get("version") != VERSION or not set(body) <= {"version", "sets", "row"}:
        raise ShapesError(f"{path}: must hold version = {VERSION}, and [[row]] or [sets], not {', '.join(body)}")
    return body


def _row(path: Path, entry: Mapping[str, Any], sets: Mapping[str, list[Any]]) -> ShapeRow:
    owner = f"{path}: row {entry.get('name', '?')}"
    lacking = [key for key in ("name", "source", "why", "fixed", "axes") if not entry.get(key)]
    if lacking or set(entry) - _KEYS:
        raise ShapesError(
            f"{owner}: lacks {', '.join(lacking) or 'nothing'}, and has {', '.join(set(entry) - _KEYS) or 'no more'}"
        )
    axes: dict[str, list[Any]] = {}
    for axis, values in entry["axes"].items():
        if isinstance(values, str) and values not in sets:
            raise ShapesError(f"{owner}: no set is called {values!r}: there are {', '.join(sets)}")
        axes[axis] = sets[values] if isinstance(values, str) else values
    if not all(isinstance(values, list) and values for values in axes.values()) or not {"length", "batch"} <= set(axes):
        raise ShapesError(f"{owner}: every axis has a list of values or the name of a set, and length and batch are axes")
    crossed = [tuple(names) for names in entry.get("cross", [])]
    if unknown := {name for names in crossed for name in names} - set(axes):
        raise ShapesError(f"{owner}: cross names {', '.join(sorted(unknown))}, which are no axes of it")
    stem = f"{path.stem.removeprefix('shapes_')}-{entry['name']}"
    shapes = []
    for changed in _choices(axes, crossed):
        try:
            shapes.append(_shape(stem, entry["fixed"], axes, changed))
        except (CaseError, TypeError, ValueError) as error:
            raise ShapesError(f"{owner}: {changed}: {error}") from error
    return ShapeRow(name=stem, source=entry["source"].strip(), why=entry["why"].strip(), shapes=tuple(shapes))


def _choices(axes: Mapping[str, list[Any]], crossed: Sequence[tuple[str, ...]]) -> Iterator[dict[str, Any]]:
    """List what is otherwise: nothing, each value of each axis, and of the crossed axes together; each once."""
    seen: list[dict[str, Any]] = []
    for names in ((), *((name,) for name in axes), *crossed):
        for values in itertools.product(*(axes[name] for name in names)):
            changed = {name: value for name, value in zip(names, values, strict=True) if value != axes[name][0]}
            if changed not in seen:
                seen.append(changed)
                yield changed


def _shape(stem: str, fixed: Mapping[str, Any], axes: Mapping[str, list[Any]], changed: Mapping[str, Any]) -> Shape:
    fields = {**fixed, **{name: values[0] for name, values in axes.items()}, **changed}
    lengths = lengths_of(fields.pop("length"), fields.pop("batch"))
    if "formats" in fields:
        fields |= dict(zip(_FORMATS, fields.pop("formats"), strict=True))
    words = [f"{name}-{'-'.join(value[:2]) if isinstance(value, list) else value}" for name, value in changed.items()]
    return Shape(name="-".join([stem, *words]).replace("_", "-"), case=Case(lengths=lengths, **fields))
