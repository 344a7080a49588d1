"""What a run gates: backends, their regimes, the device.

1. Without names, every default backend that can run here is gated in every regime it has; one that cannot is listed with
   its reason, never dropped in silence.
2. A name that is unknown, a backend that is not installed or does not run on the device, and a regime that none of the
   backends has are errors: what was asked for by name is gated or the run does not start.
3. A baseline is the name of a backend, or the label of another version of each backend that is gated. One that cannot be
   asked, or that no regime covers, is an error too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

import torch

from harness.backends import registry
from harness.backends.protocol import Backend, NotInstalled, UnknownBackend
from harness.regimes import Regime, Regimes


class PlanError(ValueError):
    """A run that cannot be planned as it was asked for; the message says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A backend in one of its regimes."""

    backend: Backend
    regime: Regime

    def __str__(self) -> str:
        return f"{self.backend.name}-{self.regime.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a run gates."""

    device: torch.device
    regimes: Regimes
    #: Backends that are gated.
    backends: tuple[Backend, ...]
    #: Default backends that cannot run here, with the reason.
    absent: Mapping[str, str]
    #: Every backend in every regime that was asked for.
    pairs: tuple[Pair, ...]
    #: Name of a backend that is gated -> the backend that it is compared with; empty where none was asked for.
    baselines: Mapping[str, Backend]


def find_device(name: str | None) -> torch.device:
    """Find the device of a run: the one named, else the GPU where torch sees one, else the CPU.

    Raises:
        PlanError: if the named device is not one, or is not here.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise PlanError(f"no device is called {name!r}: ask for cpu, cuda or cuda:INDEX (ROCm's GPUs are cuda too)") from None
    if device.type not in ("cpu", "cuda"):
        raise PlanError(f"backends run on cpu and cuda, not on {name!r}")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise PlanError(
                f"device {name!r} was asked for and torch {torch.__version__} sees {count or 'no'} GPU{'s' * (count > 1)}: "
                "run where it is, or use --device cpu"
            )
    return device


def make_plan(
    regimes: Regimes,
    *,
    device: str | None = None,
    backends: Sequence[str] = (),
    regime_names: Sequence[str] = (),
    baseline: str | None = None,
) -> Plan:
    """Plan a run.

    Args:
        regimes: the rules.
        device: where backends run; None for a GPU where there is one.
        backends: names of the backends; none for the default ones.
        regime_names: names of the regimes; none for all.
        baseline: name of a backend, or label of a version, to compare with; None for no comparison.

    Raises:
        PlanError: if something was asked for that is not there.
    """
    place = find_device(device)
    backends = backends or _other_versions(baseline)
    made, absent = (_named(backends), {}) if backends else _default()
    for name, backend in list(made.items()):
        if place.type not in backend.capabilities.devices:
            reason = f"it runs on {' and '.join(sorted(backend.capabilities.devices))}, not on {place.type}"
            if backends:
                raise PlanError(f"{name} cannot run on device {place}: {reason}")
            absent[name] = reason
            del made[name]
    if not made:
        raise PlanError("no backend can run here: " + "; ".join(f"{name}: {reason}" for name, reason in absent.items()))
    check_regimes(regimes, regime_names)
    wanted = set(regime_names)
    pairs = tuple(
        Pair(backend=backend, regime=regime)
        for backend in made.values()
        for regime in regimes.for_backend(backend.name)
        if not wanted or regime.name in wanted
    )
    for pair in pairs:
        _check_output(pair.backend, pair.regime, regimes)
    idle = wanted - {pair.regime.name for pair in pairs}
    if idle:
        raise PlanError(f"regime {', '.join(sorted(idle))} covers none of the backends {', '.join(made)}")
    bare = [name for name in made if not wanted and not regimes.for_backend(name)]
    if bare:
        raise PlanError(
            f"{', '.join(bare)} has no regime: add a row to {regimes.path}, or name another file with --regimes-file"
        )
    baselines = {name: _baseline(name, baseline, regimes, place) for name in made} if baseline else {}
    return Plan(device=place, regimes=regimes, backends=tuple(made.values()), absent=absent, pairs=pairs, baselines=baselines)


def check_regimes(regimes: Regimes, names: Iterable[str]) -> None:
    """Check that regimes exist.

    Raises:
        PlanError: if one does not; the message names what is near.
    """
    known = [row.name for row in regimes.rows]
    for name in names:
        if name not in known:
            near = get_close_matches(name, known, n=3, cutoff=0.5)
            hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(known)}"
            raise PlanError(f"no regime is called {name!r}: {hint}")


def _other_versions(baseline: str | None) -> list[str]:
    """List the versions of AITER's Gluon kernel beside the one that a baseline's label names; none where it names none."""
    from harness.backends.aiter_source import named_sources

    try:
        labels = [source.label for source in named_sources()] if baseline else []
    except NotInstalled as error:
        raise PlanError(str(error)) from error
    return [f"aiter-gluon@{label}" for label in labels if label != baseline] if baseline in labels else []


def _baseline(name: str, baseline: str, regimes: Regimes, place: torch.device) -> Backend:
    """Make the backend that a gated one is compared with."""
    stem = name.partition("@")[0]
    tried = []
    for asked in (baseline, f"{stem}@{baseline}"):
        try:
            made = registry.make(asked)
            break
        except (UnknownBackend, NotInstalled, ValueError) as error:
            tried.append(str(error))
    else:
        raise PlanError(f"--baseline {baseline} is no backend ({tried[0]}) and no version of {stem} ({tried[1]})")
    if place.type not in made.capabilities.devices:
        raise PlanError(f"the baseline {made.name} runs on {' and '.join(sorted(made.capabilities.devices))}, not on {place}")
    rows = regimes.for_backend(made.name)
    if not rows:
        raise PlanError(f"the baseline {made.name} has no regime: add a row to {regimes.path}")
    for row in rows:
        _check_output(made, row, regimes)
    return made


def _check_output(backend: Backend, regime: Regime, regimes: Regimes) -> None:
    """Check that a row says of a backend's output what the backend says of it."""
    said, own = regime.arithmetic.output, backend.capabilities.output_format
    if said != own:
        raise PlanError(
            f"{regimes.path}: regime {regime.name!r} says the output of {backend.name} is {said}, and it is {own}: mend the row"
        )


def _named(names: Sequence[str]) -> dict[str, Backend]:
    made: dict[str, Backend] = {}
    for name in dict.fromkeys(names):
        try:
            backend = registry.make(name)
            made[backend.name] = backend  # its full name: of a fault, with the variant that it is planted in
        except (UnknownBackend, NotInstalled, ValueError) as error:
            raise PlanError(str(error)) from error
    return made


def _default() -> tuple[dict[str, Backend], dict[str, str]]:
    found = registry.defaults()
    absent = {name: str(backend) for name, backend in found.items() if isinstance(backend, NotInstalled)}
    return {name: backend for name, backend in found.items() if not isinstance(backend, NotInstalled)}, absent
