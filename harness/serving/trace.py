"""A serving trace as a value: a pool and the steps that are done on it.

1. A trace holds no tensors. It is frozen and hashable, and fixes every byte that is written.
2. ``str(trace)`` is an id for shells, logs and file names; ``Trace.parse`` gives the same trace back. ``lines`` is the same
   for people, a step a line.
3. Every step of a trace can be done at its place: one whose steps cannot is refused, with the step and the reason.
4. A decode of a trace is a Case for the backend's contract, the regimes and the judge; its pages lie where the steps put them.

Source: block-major pools of vLLM with several layers in a block; groups of layers that share a block table.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from harness.case import Case, CaseError
from harness.serving.steps import Step, StepError
from harness.serving.truth import Truth

VERSION = "trace1"
#: What a shape holds where the trace decides, or where there is no choice.
_DECIDED = {"lengths": (1,), "query_tokens": 1, "placement": "permuted", "pool_rows": 0, "page_padding": 0, "table_padding": 0}
_DECIDED |= {"query_layout": "split", "content": "gaussian", "poison": "nan"}


class TraceError(ValueError):
    """A trace that cannot be, or an id that names none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The pool that a trace works on.

    Raises:
        TraceError: if there can be none such.
    """

    #: Heads, widths, formats, scales, page size, form of the table, lse and seed; what the trace decides is plain.
    shape: Case
    #: Pages that requests may have; page 0 is one more, and nobody's.
    pages: int = 8
    #: Layers of each group. A group is one allocation in which a page holds a block of each of its layers, one after
    #: another; all groups share the block tables.
    layers: tuple[int, ...] = (1,)

    def __post_init__(self) -> None:
        odd = [name for name, value in _DECIDED.items() if getattr(self.shape, name) != value]
        if odd:
            raise TraceError(f"no such pool: a trace decides {', '.join(odd)} itself")
        if not 1 <= self.pages <= 1 << 16 or not 1 <= len(self.layers) <= 4 or not all(1 <= n <= 16 for n in self.layers):
            raise TraceError(
                f"no such pool: 1 to 65536 pages, 1 to 4 groups and 1 to 16 layers in each, not {self.pages} and {self.layers}"
            )

    @classmethod
    def of(cls, case: Case, **fields: Any) -> Setup:
        """Make a pool with the shape of a case."""
        return cls(shape=case.replace(**_DECIDED), **fields)

    @property
    def block(self) -> int:
        """Elements of one layer's rows in a page."""
        return self.shape.page_size * (self.shape.width + self.shape.token_padding)

    def truth(self) -> Truth:
        """Begin with no request."""
        return Truth(pages=self.pages, page_size=self.shape.page_size)

    def case(self, group: int, query_tokens: int, lengths: tuple[int, ...]) -> Case:
        """Make the case of a decode in a layer of a group.

        Raises:
            CaseError: if it cannot exist.
        """
        most = max(1, *(-(-length // self.shape.page_size) for length in lengths))
        return self.shape.replace(
            query_tokens=query_tokens,
            lengths=lengths,
            page_padding=(self.layers[group] - 1) * self.block,
            pool_rows=(self.pages + 1) * self.shape.page_size,
            table_padding=self.pages - most if self.shape.table == "padded" else 0,
        )

    def cases(self, step: Step, truth: Truth) -> list[Case]:
        """Make the cases of a decoding step, one a group; ``truth`` is what was before it."""
        grown = [len(truth.tokens[name]) + step.query_tokens for name in step.requests]
        lengths = (*grown, *(0 for _ in range(step.rows - len(grown))))
        return [self.case(group, step.query_tokens, lengths) for group in range(len(self.layers))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A pool and what is done on it.

    Raises:
        TraceError: if a step cannot be done at its place.
    """

    setup: Setup
    steps: tuple[Step, ...]

    def __post_init__(self) -> None:
        truth = self.setup.truth()
        for number, step in enumerate(self.steps, start=1):
            reason = truth.why_not(step)
            if reason is not None:
                raise TraceError(f"no such trace: step {number} cannot be done: {reason}")
            truth.take(step)

    def decodes(self) -> Iterator[tuple[int, list[Case]]]:
        """Walk over the decoding steps: index, and the case of each group."""
        truth = self.setup.truth()
        for index, step in enumerate(self.steps):
            if step.decodes:
                yield index, self.setup.cases(step, truth)
            truth.take(step)

    @property
    def case(self) -> Case:
        """The case of its last decode; its shape where it decodes nothing."""
        cases = [self.setup.shape, *(cases[0] for _, cases in self.decodes())]
        return cases[-1]

    @property
    def lines(self) -> list[str]:
        """The steps for people, numbered."""
        width = len(str(len(self.steps)))
        return [f"{number:>{width}}  {step}" for number, step in enumerate(self.steps, start=1)]

    @property
    def about(self) -> str:
        """The pool in words."""
        setup, size = self.setup, self.setup.shape.page_size
        groups = " and ".join(f"{count} layer{'s' * (count > 1)}" for count in setup.layers)
        shared = ", two groups that share the block table" if len(setup.layers) == 2 else ""
        shared = shared or (", groups that share the block table" if len(setup.layers) > 2 else "")
        return f"a pool of {setup.pages} pages of {size} token{'s' * (size > 1)}, {groups} a page{shared}"

    def __str__(self) -> str:
        keys = str(self.setup.shape).split(":")[1:-1]
        keys = [key for key in keys if key not in ("S=1", "N=1", "place=permuted")]
        keys += [f"pages={self.setup.pages}", f"layers={'+'.join(map(str, self.setup.layers))}"]
        return ":".join([VERSION, *keys, *(str(step).replace(" ", ",") for step in self.steps), "end"])

    @classmethod
    def parse(cls, text: str) -> Trace:
        """Read the trace that an id names.

        Raises:
            TraceError: if the id is of another version, cut off, misspelt, or names a trace that cannot be.
        """
        version, *parts = text.strip().split(":")
        if version != VERSION:
            raise TraceError(f"the id of a trace starts with {VERSION}: and ends with :end, not {text!r}")
        if not parts or parts.pop() != "end":
            raise TraceError(f"this id is cut off: it must end with :end, not {text[-12:]!r}")
        keys = [part for part in parts if "=" in part]
        own = {key: value for key, _, value in (part.partition("=") for part in keys) if key in ("pages", "layers")}
        if (
            len(own) < 2
            or not re.fullmatch(r"\d{1,9}", own["pages"])
            or not re.fullmatch(r"\d{1,3}(\+\d{1,3})*", own["layers"])
        ):
            raise TraceError(f"the id of a trace has pages=NUMBER and layers=NUMBER+NUMBER, {text!r} has not")
        shape = [key for key in keys if key.partition("=")[0] not in own]
        try:
            setup = Setup(
                shape=Case.parse(":".join(["v1", *shape, "N=1", "place=permuted", "end"])),
                pages=int(own["pages"]),
                layers=tuple(map(int, own["layers"].split("+"))),
            )
            return cls(setup=setup, steps=tuple(Step.parse(part) for part in parts if "=" not in part))
        except (CaseError, StepError) as error:
            raise TraceError(f"{text!r}: {error}") from None


def trace_of(relation: str | None) -> Trace | None:
    """Read the trace that a question's relation names by its id; None where it names none.

    Raises:
        TraceError: if the id is at fault.
    """
    return Trace.parse(relation) if relation is not None and is_trace(relation) else None


def is_trace(relation: str | None) -> bool:
    """Tell whether a question's relation is the id of a trace."""
    return relation is not None and relation.startswith(f"{VERSION}:")


def mended(setup: Setup, steps: Iterable[Step]) -> Trace:
    """Make a trace of the steps that can be done; the others are left out."""
    truth, kept = setup.truth(), []
    for step in steps:
        if truth.why_not(step) is None:
            truth.take(step)
            kept.append(step)
    return Trace(setup=setup, steps=tuple(kept))


def replaced(trace: Trace, **fields: Any) -> Trace:
    """Make the trace with another pool; steps that cannot be done there are left out.

    Raises:
        TraceError, CaseError: if there can be no such pool.
    """
    return mended(dataclasses.replace(trace.setup, **fields), trace.steps)
