"""The command that lists the production shapes.

1. Without names it lists the rows; with names every case of the rows that begin so, with its id.
2. What a case needs is an estimate that nothing was run for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from harness.cli_case import CommandError, print_json

if TYPE_CHECKING:
    from harness.shapes import Shape


def shapes(given: Any) -> int:
    """List the production shapes and what each needs; return the exit status."""
    from harness.shapes import shape_rows

    rows = [row for row in shape_rows() if not given.names or row.name.startswith(tuple(given.names))]
    if not rows:
        known = ", ".join(row.name for row in shape_rows())
        raise CommandError(f"no row of shapes begins with {' or '.join(given.names)}: there are {known}")
    if given.json:
        return print_json([
            {"row": row.name, "source": row.source, "why": row.why, "cases": [_as_json(shape) for shape in row.shapes]}
            for row in rows
        ])  # fmt: skip
    for row in rows:
        counts: dict[str, int] = {}
        for shape in row.shapes:
            counts[_where(shape)] = counts.get(_where(shape), 0) + 1
        most = max(row.shapes, key=lambda shape: (shape.needs.scores, shape.needs.gpu_gib)).needs
        shown = ", ".join(f"{count} {where}" for where, count in counts.items())
        print(f"{row.name:<26} {len(row.shapes):>4} cases: {shown}; up to {most}")
        if given.names:
            print(f"  {row.why}\n  source: {row.source}")
            for shape in row.shapes:
                needs = shape.needs
                needed = f"{needs.gpu_gib:>8.3g} GiB  {needs.scores:>8.2g} scores"
                print(f"  {shape.name:<58} {needed}  {_where(shape):<8} {shape.case}")
    count, least = sum(len(row.shapes) for row in rows), "" if given.names else "; name a row to list its cases"
    print(f"{count} cases in {len(rows)} rows{least}")
    return 0


def _where(shape: Shape) -> str:
    """Name the first profile in which a CPU runs a shape, or say that none does."""
    from harness.profiles import PROFILES

    return next((name for name, profile in PROFILES.items() if shape.needs.scores <= profile.scores), "GPU only")


def _as_json(shape: Shape) -> dict[str, Any]:
    from harness.ledger import plain

    needs: dict[str, Any] = plain(shape.needs)
    return {"name": shape.name, "case": str(shape.case), "first_profile_on_a_cpu": _where(shape), **needs}
