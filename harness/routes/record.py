"""A route as data: which kernel an engine picks for a decode, and what it does to the tensors on the way.

Rules kept here:

1. A route is a table of a TOML file; its rules are tried in order on the case as the engine sees it, the first that fits
   decides. A case that none fits, or that the engine says no to, has no way.
2. A rule names a kernel and the steps before it, in their order; what the engine does before it chooses comes first. Steps
   are those of ``steps``, kernels those of ``contracts``.
3. Every route says where it was read.
4. A table with an unknown key, word or region is refused when it is read, with the file and the route.

Source: the engines' own files and pull requests, which each route's ``source`` names.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from harness.backends.protocol import UnknownBackend
from harness.case import Case
from harness.region import Region, RegionError
from harness.routes.contracts import GLUON_RELEASES, KERNELS
from harness.routes.steps import STEPS

#: The files that hold the routes.
FILES = tuple(sorted(Path(__file__).parent.glob("engine_*.toml")))


class RouteError(ValueError):
    """A file of routes that cannot be used; the message names the file, the route and the fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A step as a rule names it."""

    #: Key of STEPS.
    name: str
    #: What it is told: the way of padding, a scale; "" for nothing.
    argument: str = ""

    def __str__(self) -> str:
        return f"{self.name} {self.argument}".rstrip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Habit:
    """What an engine does before it chooses a kernel."""

    #: The cases, as the engine sees them.
    where: Region
    steps: tuple[Call, ...]
    #: Why the engine does this.
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What an engine does in a region of cases."""

    #: The cases, as the engine sees them.
    where: Region
    #: Architectures; none for all of the route's.
    arch: tuple[str, ...]
    #: Setting -> values; a setting that is not named may be any.
    settings: Mapping[str, tuple[str, ...]]
    #: The kernel that is called.
    kernel: str
    #: What is done before, in this order.
    steps: tuple[Call, ...]
    #: The kernel that is called instead, without an error, when the first one raises; None where the error is not caught.
    fallback: Rule | None
    #: Why the engine does this.
    why: str

    def fits(self, case: Case, arch: str, settings: Mapping[str, str]) -> bool:
        """Tell whether the rule covers a case."""
        return (
            (not self.arch or arch in self.arch)
            and all(settings[name] in values for name, values in self.settings.items())
            and case in self.where
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One version of one engine's decode."""

    #: Its name; as a backend ``route:NAME``.
    name: str
    #: What it is, one line.
    about: str
    #: Where it was read: pull requests and files.
    source: str
    #: AITER release whose Gluon kernel the engine met at that time; "" where it calls none.
    aiter: str
    #: Architectures it is described for.
    arch: tuple[str, ...]
    #: Settings of the engine and their values, the default first.
    settings: Mapping[str, tuple[str, ...]]
    #: Cases that the engine accepts when it starts.
    serves: Region
    #: What is done before, in this order.
    before: tuple[Habit, ...]
    #: The rules, first match first.
    rules: tuple[Rule, ...]

    @property
    def kernels(self) -> tuple[str, ...]:
        """The kernels that it may lead to."""
        rules = (found for rule in self.rules for found in (rule, rule.fallback) if found)
        return tuple(dict.fromkeys(rule.kernel for rule in rules))

    def why_not(self, case: Case) -> str | None:
        """Say why the engine refuses a case when it starts, or None."""
        reason = self.serves.why_outside(case)
        return None if reason is None else f"the engine does not serve it: {reason}"

    def rule(self, case: Case, arch: str, settings: Mapping[str, str]) -> Rule | None:
        """Find the rule that a case goes by; None where the engine has none."""
        return next((rule for rule in self.rules if rule.fits(case, arch, settings)), None)

    def steps(self, case: Case, rule: Rule) -> tuple[Call, ...]:
        """List all that is done to a case before a rule's kernel."""
        return (*(call for habit in self.before if case in habit.where for call in habit.steps), *rule.steps)

    def choose(self, given: Mapping[str, str]) -> dict[str, str]:
        """Complete settings by their defaults.

        Raises: UnknownBackend, for a setting or value that the route does not have.
        """
        for name, value in given.items():
            if value not in self.settings.get(name, ()):
                known = "; ".join(f"{key}={'|'.join(values)}" for key, values in self.settings.items())
                raise UnknownBackend(f"route {self.name} has no setting {name}={value}: it has {known or 'none'}")
        return {name: given.get(name, values[0]) for name, values in self.settings.items()}


@functools.lru_cache(maxsize=64)
def walk(case: Case, steps: tuple[Call, ...]) -> Case:
    """Follow what the steps make of a case, without tensors."""
    for call in steps:
        case = STEPS[call.name].ask(case, call.argument)
    return case


@functools.cache
def read_routes(files: tuple[Path, ...] = FILES) -> Mapping[str, Route]:
    """Read the routes of some files, by name.

    Raises: RouteError, naming the file and the route.
    """
    found: dict[str, Route] = {}
    for path in files:
        for number, table in enumerate(tomllib.loads(path.read_text(encoding="utf-8"))["route"], start=1):
            try:
                route = _route(table)
                if route.name in found:
                    raise ValueError("the name stands twice")
            except (KeyError, TypeError, ValueError) as error:
                where = f"{path.name}: route {table.get('name', number)}"
                text = f"lacks {error}" if isinstance(error, KeyError) else str(error)
                raise RouteError(f"{where}: {text}") from error
            found[route.name] = route
    return found


def find_route(name: str) -> Route:
    """Find a route by name.

    Raises: UnknownBackend, naming what is near.
    """
    routes = read_routes()
    if name not in routes:
        near = get_close_matches(name, routes, n=2)
        raise UnknownBackend(
            f"no route is called {name!r}: {'did you mean ' if near else 'there are '}{', '.join(near or routes)}"
        )
    return routes[name]


def _keys(table: Mapping[str, Any], *known: str) -> None:
    unknown = set(table) - set(known)
    if unknown:
        raise ValueError(f"no key {', '.join(sorted(unknown))}: there are {', '.join(known)}")


def _route(table: Mapping[str, Any]) -> Route:
    _keys(table, "name", "about", "source", "aiter", "arch", "settings", "serves", "before", "rule")
    settings = {name: tuple(values) for name, values in table.get("settings", {}).items()}
    aiter = table.get("aiter", "")
    if aiter and aiter not in GLUON_RELEASES:
        raise ValueError(f"no AITER release {aiter!r} is described: there are {', '.join(GLUON_RELEASES)}")
    rules = tuple(_rule(rule, settings) for rule in table["rule"])
    if not aiter and any(rule.kernel == "aiter-gluon" for rule in rules):
        raise ValueError("it calls AITER's Gluon kernel and does not say of which release: add aiter")
    words = {key: table[key] for key in ("name", "about", "source")}
    if not all(isinstance(word, str) and word.strip() for word in words.values()):
        raise ValueError("it needs a name, what it is about, and where it was read")
    return Route(
        **words,
        aiter=aiter,
        arch=tuple(table["arch"]),
        settings=settings,
        serves=_region(table["serves"]),
        before=tuple(_habit(habit) for habit in table.get("before", ())),
        rules=rules,
    )


def _region(table: Mapping[str, Any]) -> Region:
    try:
        return Region.from_table(table)
    except RegionError as error:
        raise ValueError(str(error)) from error


def _habit(table: Mapping[str, Any]) -> Habit:
    _keys(table, "where", "steps", "why")
    return Habit(where=_region(table["where"]), steps=tuple(_call(text) for text in table["steps"]), why=table["why"])


def _rule(table: Mapping[str, Any], known: Mapping[str, tuple[str, ...]], *, inner: bool = False) -> Rule:
    _keys(table, "where", "arch", "settings", "kernel", "steps", "why", *(() if inner else ("fallback",)))
    if table["kernel"] not in KERNELS:
        raise ValueError(f"no kernel {table['kernel']!r}: there are {', '.join(KERNELS)}")
    settings = {name: tuple(values) for name, values in table.get("settings", {}).items()}
    for name, values in settings.items():
        if not set(values) <= set(known.get(name, ())):
            raise ValueError(f"no setting {name} of {', '.join(values)}")
    if not inner and not table["why"].strip():
        raise ValueError("a rule needs a reason: why")
    return Rule(
        where=_region(table.get("where", {})),
        arch=tuple(table.get("arch", ())),
        settings=settings,
        kernel=table["kernel"],
        steps=tuple(_call(text) for text in table.get("steps", ())),
        fallback=_rule(table["fallback"], known, inner=True) if "fallback" in table else None,
        why=table["why"],
    )


def _call(text: str) -> Call:
    name, _, argument = text.partition(" ")
    if name not in STEPS:
        raise ValueError(f"no step {name!r}: there are {', '.join(STEPS)}")
    STEPS[name].check(argument)
    return Call(name=name, argument=argument)
