"""The search for failing cases of one backend in one regime: Hypothesis asks, the gate answers.

1. A case is run once. Whatever asks for it again, Hypothesis or the walk after it, gets the same answer, so that a
   kernel which fails only sometimes keeps its verdict.
2. Faults of different nature shrink apart: a crash does not shrink into a wrong number.
3. Hypothesis shrinks first; then ``shrink`` walks on to a case whose every neighbour passes.
4. The time limit ends the search for a first failure, and a second one its shrinking; a verdict that exists stays.
5. The same seed asks the same cases unless the profile explores; Hypothesis's database asks earlier failures first.
6. A search that compares with a baseline asks every case before it shrinks anything, so that errors are compared over all of
   them; then it walks from the smallest failing case of each nature. What the baseline gets wrong in the same way is apart.

Source: Hypothesis tells failures apart by the type and place of their exception.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import hypothesis
from hypothesis import HealthCheck, Phase, Verbosity
from hypothesis import strategies as st
from hypothesis.database import DirectoryBasedExampleDatabase

from harness.case import Case
from harness.profiles import Profile
from harness.regimes import RELATIONS
from harness.run import Result
from harness.shrink import Shrunk, shrink, size

#: Faults that may shrink into each other; every other fault is a nature of its own.
_NATURE = {"mismatch": "value", "non-finite": "value", "unwritten": "value"}
#: What the nature of a fault ends in where a baseline fails in the same way.
_SHARED = ", on the baseline too"
#: Verdicts of cases that were executed.
EXECUTED = frozenset({"PASS", "FAIL", "UNTRUSTED"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One fault of a backend, shrunk."""

    #: The result of the smallest failing case.
    result: Result
    #: The first case that showed it.
    first: Case
    #: The walk that ended at the smallest.
    walk: Shrunk
    #: Whether a baseline is asked and fails on it in the same way.
    shared: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a search found."""

    #: Cases executed before and besides shrinking.
    executed: int
    #: Faults, one for each nature.
    findings: tuple[Finding, ...]
    #: Our own faults: results whose verdict is ERROR.
    errors: tuple[Result, ...]
    #: Whether the time limit ended the search before its examples did.
    cut: bool
    #: Wall time, seconds.
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What Hypothesis draws: a case, and a relation between two runs of it to hold the backend to."""

    case: Case
    #: A key of relations.ALL; None for one run.
    relation: str | None = None


class QuestionFailed(Exception):
    """A question failed; Hypothesis shrinks by the type, one for each nature of fault."""

    def __init__(self, question: Question) -> None:
        super().__init__(str(question))
        self.question = question


class _TimeUp(BaseException):
    """The search's time is over; not an Exception, so that Hypothesis does not take it for a failing case."""


_TYPES: dict[str, type[QuestionFailed]] = {}


def nature(result: Result) -> str | None:
    """Name the nature of a result's fault; None for a result that is no failure."""
    return nature_of(result.verdict.kind, result.verdict.fault)


def nature_of(kind: str, fault: str | None) -> str | None:
    """Name the nature of a verdict's fault; None for a verdict that is no failure."""
    if kind not in ("FAIL", "ERROR"):
        return None
    return _NATURE.get(fault or "", fault) or kind.lower()


class Search:
    """A search under way."""

    def __init__(
        self,
        run: Callable[[Question], Result],
        heard: Callable[[Result, str], None],
        profile: Profile,
        *,
        shared: Callable[[Question, Result], bool] | None = None,
        new_only: bool = False,
    ) -> None:
        """Begin.

        Args:
            run: runs a question.
            heard: hears of each result as it comes, with "search" or "shrink".
            profile: bounds the search.
            shared: whether a baseline fails on a question as this result does; None where there is no baseline.
            new_only: whether what the baseline gets wrong too is no failure.
        """
        self.run, self.heard, self.profile = run, heard, profile
        self.shared, self.new_only = shared, new_only
        #: Failing questions of each nature, where all are asked before any is shrunk.
        self.held: dict[str, list[Question]] = {}
        self.results: dict[Question, Result] = {}
        #: First failing case of each nature.
        self.firsts: dict[str, Case] = {}
        self.executed = 0
        self.cut = False
        self.began = time.monotonic()
        #: When shrinking must end; None before the first failure.
        self.end: float | None = None

    def answer(self, question: Question) -> Result | None:
        """Run a question, or remember its result; None where the time for new ones is over."""
        if question in self.results:
            return self.results[question]
        now = time.monotonic()
        if self.end is None and now - self.began > self.profile.seconds:
            self.cut = True
            raise _TimeUp
        if self.end is not None and now > self.end:
            return None
        result = self.results[question] = self.run(question)
        phase = "search" if self.end is None else "shrink"
        self.executed += phase == "search" and result.verdict.kind in EXECUTED
        self.heard(result, phase)
        return result

    def ask(self, question: Question) -> None:
        """Ask for Hypothesis: raise where a question fails."""
        result = self.answer(question)
        kind = self.kind(question, result) if result else None
        if kind is not None and self.shared is not None:
            self.firsts.setdefault(kind, question.case)
            self.held.setdefault(kind, []).append(question)
        elif kind is not None:
            if self.end is None:
                self.end = time.monotonic() + self.profile.shrink_seconds
            self.firsts.setdefault(kind, question.case)
            made = _TYPES.setdefault(kind, type(f"QuestionFailed[{kind}]", (QuestionFailed,), {}))
            raise made(question)

    def kind(self, question: Question, result: Result) -> str | None:
        """Name the nature of a result's fault, apart where a baseline has it too; None for what is no failure here."""
        kind = nature(result)
        if kind is None or self.shared is None or not self.shared(question, result):
            return kind
        return None if self.new_only and kind != "error" else f"{kind}{_SHARED}"

    def finding(self, question: Question, accepts: Callable[[Case], bool]) -> Finding:
        """Walk from the case that Hypothesis ended at to one whose every neighbour passes."""
        kind = self.kind(question, self.results[question])

        def at(case: Case) -> Question:
            return Question(case=case, relation=question.relation)

        def fails(near: Case) -> bool | None:
            if not accepts(near):
                return None
            if at(near) not in self.results:
                self.results[at(near)] = self.run(at(near))
                self.heard(self.results[at(near)], "shrink")
            result = self.results[at(near)]
            return self.kind(at(near), result) == kind if result.verdict.kind in EXECUTED | {"ERROR"} else None

        walk = shrink(question.case, fails, seconds=self.profile.shrink_seconds)
        shared = str(kind).endswith(_SHARED)
        return Finding(result=self.results[at(walk.case)], first=self.firsts[str(kind)], walk=walk, shared=shared)


def _plainness(question: Question) -> tuple[object, ...]:
    """Order questions from plain to strange; what fails in one run is told more of than what a relation shows."""
    return question.relation is not None, size(question.case)


def questions(cases: st.SearchStrategy[Case], profile: Profile) -> st.SearchStrategy[Question]:
    """Make the strategy of questions over cases; the share with a relation is the profile's, and none is plainest."""
    names = list(RELATIONS)
    plain = round(len(names) * (1 - profile.related) / profile.related) if profile.related else 1
    table = [None] * plain + names * bool(profile.related)

    @st.composite
    def ask(draw: st.DrawFn) -> Question:
        case = draw(cases)
        return Question(case=case, relation=table[draw(st.sampled_from(range(len(table))))])

    return ask()


def search(
    strategy: st.SearchStrategy[Question],
    asked: Search,
    accepts: Callable[[Case], bool],
    *,
    seed: int,
    database: Path | None,
) -> Outcome:
    """Search a strategy's questions for failing ones.

    Args:
        strategy: the questions.
        asked: what runs them, and the profile that bounds the search.
        accepts: whether a case may be asked in the walk.
        seed: of the search; the same seed asks the same cases.
        database: folder of failures to ask first and keep; None to keep none.
    """
    began = time.monotonic()
    settings = hypothesis.settings(
        max_examples=asked.profile.examples,
        # A search that holds its failures back would make Hypothesis forget those that it knows.
        database=None if database is None or asked.shared else DirectoryBasedExampleDatabase(database),
        deadline=None,
        derandomize=False,
        phases=(Phase.reuse, Phase.generate, Phase.shrink),
        print_blob=False,
        report_multiple_bugs=True,
        suppress_health_check=list(HealthCheck),
        verbosity=Verbosity.quiet,
    )

    def ask(question: Question) -> None:
        asked.ask(question)

    failed: list[QuestionFailed] = []
    state = random.getstate()
    try:
        # In this order: a seed turns the database off, and settings turn it on again.
        settings(hypothesis.seed(seed)(hypothesis.given(strategy)(ask)))()
    except _TimeUp:
        pass
    except QuestionFailed as one:
        failed = [one]
    except BaseExceptionGroup as several:
        ours, rest = several.split(QuestionFailed)
        if rest is not None:
            raise
        failed = [one for one in (ours.exceptions if ours else ()) if isinstance(one, QuestionFailed)]
    finally:
        random.setstate(state)
    ends = [one.question for one in failed] + [min(held, key=_plainness) for held in asked.held.values()]
    findings = [asked.finding(question, accepts) for question in ends if asked.results[question].verdict.kind == "FAIL"]
    errors = [asked.results[question] for question in ends if asked.results[question].verdict.kind == "ERROR"]
    return Outcome(
        executed=asked.executed,
        findings=tuple(findings),
        errors=tuple(errors),
        cut=asked.cut,
        seconds=time.monotonic() - began,
    )
