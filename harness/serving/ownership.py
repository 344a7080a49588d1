"""What a step may change in the pool, and what it changed that it does not own.

1. A step owns the pages that only the requests it names have in their tables, and in those only the slots that held none of
   the request's tokens before. A page that two requests share, that another has, or that nobody has, is not its own.
2. Steps that write no rows own nothing.

Source: the engine's own tables say whose a page is; the truth says how many tokens a request had.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from harness.serving.engine import Engine
from harness.serving.memory import Row
from harness.serving.steps import Step

#: Verbs that write rows on the device.
WRITES = frozenset({"admit", "append", "decode", "speculate", "resume", "restore"})


def trespass(
    step: Step, changed: Sequence[Row], engine: Engine, before: Mapping[str, Sequence[int]], tokens: Mapping[str, int]
) -> str | None:
    """Say what a step changed that it does not own, or None.

    Args:
        step: what was done.
        changed: the rows that are not what they were.
        engine: after the step.
        before: page ids of each request before it.
        tokens: how many tokens each request had on the device before it, by the truth.
    """
    size = engine.setup.shape.page_size
    owners: dict[int, list[str]] = {}
    for name, table in engine.tables.items():
        for page in table:
            owners.setdefault(page, []).append(name)
    for row in changed:
        where = f"slot {row.offset} of page {row.page} (layer {row.layer} of group {row.group})"
        own = owners.get(row.page, [])
        if step.verb not in WRITES:
            return f"it changed {where}, and {step.verb} owns nothing"
        if len(own) != 1 or own[0] not in step.requests:
            whose = " and ".join(own) if own else "nobody"
            return f"it changed {where}, which {whose} {'have' if len(own) > 1 else 'has'}"
        name = own[0]
        index = engine.tables[name].index(row.page)
        old = before.get(name, ())
        token = index * size + row.offset
        if index < len(old) and old[index] == row.page and token < tokens.get(name, 0):
            return f"it changed {where}, which holds token {token} of {name} already"
    return None
