"""What each request's tokens are: the truth of a serving trace, kept apart from the pool.

1. A request is a plain list of token numbers. A token gets its number when it is written and never another; the number and
   the layer fix its row's bytes. No page, slot or table is known here.
2. Nothing here reads the pool; the pool is checked against it and not against itself.
3. ``why_not`` says why a step cannot be done. Room is counted without sharing, so a step that it lets pass always fits.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from harness.serving.steps import Step

#: Where the rows of a request lie: in pages of the device, in pages of the host, or nowhere.
DEVICE, HOST, NOWHERE = "device", "host", "nowhere"
#: Where a request must be for each verb that is no decode; "" for a name that is free.
_FROM = {"admit": "", "append": DEVICE, "preempt": DEVICE, "resume": NOWHERE, "offload": DEVICE, "restore": HOST}
#: Where it is afterwards, where that is another place.
_TO = {"admit": DEVICE, "preempt": NOWHERE, "resume": DEVICE, "offload": HOST, "restore": DEVICE}


@dataclass(frozen=False, slots=True, kw_only=True)
class Truth:
    """The requests of a trace so far."""

    #: Pages of the device's pool that requests may have, and of the host's.
    pages: int
    #: T, tokens a page.
    page_size: int
    #: Token numbers of each request.
    tokens: dict[str, list[int]] = field(default_factory=dict)
    #: Where each request is: DEVICE, HOST or NOWHERE.
    where: dict[str, str] = field(default_factory=dict)
    #: Tokens that have been numbered.
    issued: int = 0

    def why_not(self, step: Step) -> str | None:
        """Say why a step cannot be done now, or None."""
        for index, name in enumerate(step.requests):
            here = self.where.get(name, "")
            wanted = {"free": here or DEVICE, "fork": "" if index else DEVICE}.get(step.verb, _FROM.get(step.verb, DEVICE))
            if here != wanted:
                is_now = {"": "no request has that name", HOST: "it is offloaded", NOWHERE: "it is preempted"}
                return f"{step.verb} {name}: {is_now.get(here, 'that name is taken')}"
        after = self.copy()
        after._apply(step, full=True)
        for place, what in ((DEVICE, "the pool"), (HOST, "the host's memory")):
            needed = after.pages_in(place)
            if needed > self.pages:
                return f"{step}: {what} has {self.pages} pages and it may take {needed}"
        return None

    def pages_in(self, place: str) -> int:
        """Count the pages that the requests in a place take if none is shared."""
        return sum(-(-len(self.tokens[name]) // self.page_size) for name, here in self.where.items() if here == place)

    def written(self, step: Step) -> dict[str, list[int]]:
        """Number the tokens that a step writes, for each request it names; the numbers are not taken yet."""
        count = step.tokens or step.query_tokens
        if not count:
            return {}
        return {
            name: list(range(self.issued + index * count, self.issued + (index + 1) * count))
            for index, name in enumerate(step.requests)
        }

    def take(self, step: Step) -> None:
        """Do a step, rejection of drafted tokens included."""
        self._apply(step, full=False)

    def copy(self) -> Truth:
        """Copy it."""
        tokens = {name: list(own) for name, own in self.tokens.items()}
        return Truth(pages=self.pages, page_size=self.page_size, tokens=tokens, where=dict(self.where), issued=self.issued)

    def _apply(self, step: Step, *, full: bool) -> None:
        new = self.written(step)
        for name, numbers in new.items():
            kept = numbers if full or step.verb != "speculate" else numbers[: step.keep]
            self.tokens[name] = self.tokens.get(name, []) + kept
        self.issued += sum(map(len, new.values()))
        if step.verb == "fork":
            self.tokens[step.requests[1]] = list(self.tokens[step.requests[0]])
            self.where[step.requests[1]] = DEVICE
        for name in step.requests:
            if step.verb in _TO:
                self.where[name] = _TO[step.verb]
            if step.verb == "free":
                del self.tokens[name], self.where[name]
