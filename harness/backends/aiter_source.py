"""Where AITER is: an installed package, or checkouts named by directory.

Rules kept here:

1. Nothing of AITER is imported here; a directory is judged by the files it holds.
2. A source has a label, and labels differ within a run, so that several versions appear side by side as
   ``aiter-gluon@LABEL``.
3. Sources travel in one environment variable, because the children that run cases inherit nothing else.
4. A directory that is not AITER is refused with its own path and what was looked for.

Source: the layout of the ROCm/aiter repository since 0.1.7 (``aiter/__init__.py`` under the root).
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from harness.backends.protocol import NotInstalled

#: Directories of AITER, separated as in PATH; each may end in ``=LABEL``.
SOURCE_VARIABLE = "MLA_GATE_AITER_SOURCE"

#: Label of an installed ``aiter``; no checkout may take it.
INSTALLED = "installed"


@dataclass(frozen=True, slots=True, kw_only=True)
class AiterSource:
    """One version of AITER on disk."""

    #: The directory that holds the package directory ``aiter``.
    root: Path
    #: The name that tells this version from the others of a run.
    label: str

    def __post_init__(self) -> None:
        if not self.label or any(character in self.label for character in "@=:, \t") or os.pathsep in self.label:
            raise NotInstalled(
                f"AITER source {self.root} has the label {self.label!r}: a label is not empty and has no "
                f"blank, '@', '=', ',' or ':'. Name it as DIR=LABEL."
            )

    @property
    def package(self) -> Path:
        """The package directory."""
        return self.root / "aiter"


def parse_source(text: str) -> AiterSource:
    """Read ``DIR`` or ``DIR=LABEL``; without a label the directory's own name is the label.

    Raises: NotInstalled, when DIR is not the root of an AITER checkout.
    """
    directory, separator, label = text.rpartition("=")
    if not separator:
        directory, label = text, ""
    root = Path(directory).expanduser().resolve()
    if not root.is_dir():
        raise NotInstalled(f"AITER source {directory!r} is not a directory. Name the root of a checkout.")
    if not (root / "aiter" / "__init__.py").is_file():
        raise NotInstalled(
            f"AITER source {root} is not AITER: it has no aiter/__init__.py. "
            f"Name the root of a checkout, the directory that holds the package 'aiter'."
        )
    if not (root / "aiter" / "ops").is_dir():
        raise NotInstalled(
            f"AITER source {root} is not AITER: {root / 'aiter'} is a package but holds no 'ops' directory. "
            f"Name the root of a checkout of ROCm/aiter."
        )
    return AiterSource(root=root, label=label or root.name)


def installed_source() -> AiterSource | None:
    """Find an installed ``aiter`` without importing it."""
    try:
        spec = importlib.util.find_spec("aiter")
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None:
        return None
    return AiterSource(root=Path(spec.origin).resolve().parent.parent, label=INSTALLED)


def named_sources(environ: Mapping[str, str] | None = None) -> tuple[AiterSource, ...]:
    """List the checkouts that the environment names, in its order.

    Raises: NotInstalled, when one is not AITER or two share a label.
    """
    text = (os.environ if environ is None else environ).get(SOURCE_VARIABLE, "")
    found: list[AiterSource] = []
    for part in filter(None, text.split(os.pathsep)):
        source = parse_source(part)
        for other in found:
            if other.label == source.label:
                raise NotInstalled(
                    f"two AITER sources share the label {source.label!r}: {other.root} and {source.root}. "
                    f"Give one another label with DIR=LABEL."
                )
        found.append(source)
    return tuple(found)


def name_sources(texts: Iterable[str], environ: MutableMapping[str, str] | None = None) -> tuple[AiterSource, ...]:
    """Add checkouts given on a command line to those the environment names, so that children see them too.

    Raises: NotInstalled, as named_sources.
    """
    target = os.environ if environ is None else environ
    parts = [part for part in target.get(SOURCE_VARIABLE, "").split(os.pathsep) if part]
    parts += [text for text in texts if text not in parts]
    trial = {SOURCE_VARIABLE: os.pathsep.join(parts)}
    found = named_sources(trial)
    target[SOURCE_VARIABLE] = trial[SOURCE_VARIABLE]
    return found


def find_source(label: str | None = None, environ: Mapping[str, str] | None = None) -> AiterSource:
    """Find the version that a backend name asks for.

    Without a label: the only named checkout, else the installed package.

    Raises: NotInstalled, when none or more than one answers, with what to type.
    """
    named = named_sources(environ)
    installed = installed_source()
    known = {source.label: source for source in named}
    if installed is not None:
        known.setdefault(INSTALLED, installed)
    if label is not None:
        if label in known:
            return known[label]
        raise NotInstalled(
            f"no AITER source has the label {label!r}; known: {', '.join(known) or 'none'}. "
            f"Name one with --aiter-source DIR={label} or {SOURCE_VARIABLE}=DIR={label}."
        )
    if len(named) == 1:
        return named[0]
    if not named and installed is not None:
        return installed
    if named:
        raise NotInstalled(
            f"several AITER sources are named ({', '.join(s.label for s in named)}): "
            f"say which, as in aiter-gluon@{named[0].label}."
        )
    raise NotInstalled(
        f"AITER is neither installed nor named. Install it (pip install amd-aiter, or ROCm's own wheel), "
        f"or name a checkout with --aiter-source DIR[=LABEL] or {SOURCE_VARIABLE}=DIR[=LABEL]."
    )
