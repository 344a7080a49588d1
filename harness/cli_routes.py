"""The command about routes: what engines do before a kernel, and where that ends badly.

1. Without a name it lists the routes. With names it checks each of them, cell by cell, and runs nothing.
2. Exit status 1 where a cell ends badly; a change of arithmetic without an error is listed and ends well, unless --strict.
"""

from __future__ import annotations

from typing import Any

from harness.cli_case import CommandError, print_json


def add_options(command: Any) -> None:
    """Add the command's options to its parser."""
    command.add_argument("names", nargs="*", metavar="NAME", help="routes to check (default: list them)")
    command.add_argument("--heads", type=int, nargs="+", metavar="H", help="only these head counts (default: 1 to 128)")
    command.add_argument("--aiter", metavar="RELEASE", help="AITER release of the Gluon kernel (default: the engine's time)")
    command.add_argument("--strict", action="store_true", help="let a change of arithmetic fail too")


def routes(given: Any) -> int:
    """List the routes, or check some; return the exit status."""
    from harness.routes.check import HEADS, check, show
    from harness.routes.contracts import GLUON_RELEASES
    from harness.routes.record import find_route, read_routes

    if not given.names:
        return _list(read_routes(), as_json=given.json)
    if given.aiter is not None and given.aiter not in GLUON_RELEASES:
        raise CommandError(f"no contract of AITER {given.aiter} is described: there are {', '.join(GLUON_RELEASES)}")
    heads = given.heads or HEADS
    if not set(heads) <= set(HEADS):
        raise CommandError(f"heads go from {HEADS[0]} to {HEADS[-1]}, not {' '.join(map(str, given.heads))}")
    found = [check(find_route(name), heads=heads, release=given.aiter) for name in given.names]
    if given.json:
        print_json([_plain(checked) for checked in found])
    else:
        print("\n\n".join("\n".join(show(checked)) for checked in found))
    return int(any(checked.failing or (given.strict and checked.groups) for checked in found))


def _list(known: Any, *, as_json: bool) -> int:
    rows = [
        {"name": route.name, "about": route.about, "kernels": route.kernels, "source": route.source} for route in known.values()
    ]
    if as_json:
        return print_json(rows)
    for row in rows:
        print(f"{row['name']:<20} {row['about']}\n{'':<20} {', '.join(row['kernels'])}")
    return 0


def _plain(checked: Any) -> dict[str, Any]:
    from harness.routes.check import ranges

    return {
        "route": checked.route.name,
        "aiter": checked.release,
        "served": checked.served,
        "refused": checked.refused,
        "failing": checked.failing,
        "groups": [
            {
                "outcome": group.found.problem.outcome,
                "kernel": group.found.problem.kernel,
                "reason": group.found.problem.reason,
                "behind": group.found.behind,
                "cells": len(group.cells),
                "where": ranges(group.cells, checked.route),
            }
            for group in checked.groups
        ],
    }
