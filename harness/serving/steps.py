"""A step of a serving trace as a record, and its one line of text.

1. A step is a verb, the requests it names, and its numbers. What a verb takes is a row of ``VERBS``.
2. ``str(step)`` reads as a sentence; ``Step.parse`` gives the same step back, also from the form without spaces.
3. A line that is no step is refused with what was found and what the verb takes.

Source: the steps are those of vLLM's and SGLang's schedulers between two decodes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

#: Requests that a trace may name: few, so that names, pages and batch rows are used again.
NAMES = ("a", "b", "c", "d")
#: Numbers of a step, and the word that stands before each in its line; the number of tokens stands alone.
WORDS: Mapping[str, str] = {"tokens": "", "draft": "draft", "keep": "keep", "pad": "pad"}


class StepError(ValueError):
    """A line that is no step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verb:
    """What a verb does and takes."""

    #: What the engine does, one clause.
    about: str
    #: Requests it names, at least and at most.
    requests: tuple[int, int] = (1, 1)
    #: Numbers that it must have, and one that it may have.
    needs: tuple[str, ...] = ()
    may: tuple[str, ...] = ()


#: Every verb, plainest first.
VERBS: Mapping[str, Verb] = {
    "admit": Verb(about="takes a request in and writes the rows of its prompt", needs=("tokens",)),
    "decode": Verb(
        about="appends a token to each request and decodes it, in a batch padded with empty rows",
        requests=(1, len(NAMES)),
        may=("pad",),
    ),
    "append": Verb(about="writes the rows of more tokens without decoding", needs=("tokens",)),
    "speculate": Verb(
        about="appends drafted tokens to each request, decodes them at once, and keeps only the first of them",
        requests=(1, len(NAMES)),
        needs=("draft", "keep"),
        may=("pad",),
    ),
    "fork": Verb(about="starts the second request on the pages of the first, copied when one writes", requests=(2, 2)),
    "free": Verb(about="ends a request and gives its pages back"),
    "preempt": Verb(about="takes a request's pages away and keeps nothing of them"),
    "resume": Verb(about="gives a preempted request pages again and writes all its rows anew"),
    "offload": Verb(about="moves a request's pages to the host's memory"),
    "restore": Verb(about="moves an offloaded request's pages back, to other page ids"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One thing that an engine does.

    Raises:
        StepError: if the verb does not take these requests or numbers.
    """

    #: A key of VERBS.
    verb: str
    #: Names of the requests, in the order of the batch.
    requests: tuple[str, ...]
    #: Tokens that are written; of admit and append.
    tokens: int = 0
    #: Query tokens of each request, and how many of them are kept; of speculate.
    draft: int = 0
    keep: int = 0
    #: Rows that the batch is padded to with empty ones; 0 for none.
    pad: int = 0

    def __post_init__(self) -> None:
        for reason in self._faults():
            raise StepError(f"no such step: {self}: {reason}")

    def _faults(self) -> list[str]:
        if self.verb not in VERBS:
            return [f"an engine's verbs are {', '.join(VERBS)}, not {self.verb!r}"]
        verb = VERBS[self.verb]
        least, most = verb.requests
        faults = [f"requests are called {', '.join(NAMES)}, not {name!r}" for name in self.requests if name not in NAMES]
        if not least <= len(self.requests) <= most or len(set(self.requests)) < len(self.requests):
            count = f"{least}" if least == most else f"{least} to {most}"
            faults.append(f"{self.verb} names {count} different requests")
        for word in WORDS:
            value = getattr(self, word)
            if word in verb.needs and value < 1:
                faults.append(f"{self.verb} needs {word} from 1 on")
            if word not in verb.needs + verb.may and value:
                faults.append(f"{self.verb} takes no {word}")
        if self.keep > self.draft:
            faults.append(f"of {self.draft} drafted tokens {self.keep} cannot be kept")
        if self.pad and self.pad < len(self.requests):
            faults.append(f"a batch of {len(self.requests)} is not padded to {self.pad}")
        return faults

    @property
    def decodes(self) -> bool:
        """Whether a kernel runs."""
        return self.verb in ("decode", "speculate")

    @property
    def query_tokens(self) -> int:
        """S of its decode; 0 of a step that decodes nothing."""
        return self.draft if self.verb == "speculate" else int(self.decodes)

    @property
    def rows(self) -> int:
        """B of its decode, empty rows counted in."""
        return max(self.pad, len(self.requests))

    def __str__(self) -> str:
        numbers = [f"{word} {getattr(self, name)}".strip() for name, word in WORDS.items() if getattr(self, name)]
        return " ".join([self.verb, *self.requests, *numbers])

    @classmethod
    def parse(cls, text: str) -> Step:
        """Read the step of a line; commas may stand for its spaces.

        Raises:
            StepError: if it is none.
        """
        verb, *rest = text.replace(",", " ").split() or [""]
        requests: list[str] = []
        numbers: dict[str, int] = {}
        word = ""
        for part in rest:
            if re.fullmatch(r"\d{1,9}", part):
                names = [name for name, shown in WORDS.items() if shown == word]
                if not names or names[0] in numbers:
                    raise StepError(f"no such step: {text!r}: the number {part} stands where none belongs")
                numbers[names[0]], word = int(part), ""
            elif part in WORDS.values() and not word:
                word = part
            elif numbers or word:
                raise StepError(f"no such step: {text!r}: {part!r} stands where a number belongs")
            else:
                requests.append(part)
        if word:
            raise StepError(f"no such step: {text!r}: {word} lacks its number")
        return cls(verb=verb, requests=tuple(requests), **numbers)
