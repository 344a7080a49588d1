"""Backends for the tests of the gate, right or wrong in one way: ``python:tests.stubs:NAME``; and regimes to judge them by.

1. Each computes the oracle's answer and rounds it once, so that a case takes milliseconds and a wrong one is wrong on purpose.
2. They accept bf16 queries and caches with at most 8 heads and reject all else.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from harness.backends.protocol import Capabilities, Output, Unsupported
from harness.case import Case
from harness.inputs import Inputs
from harness.regimes import RULES
from references.oracle import oracle

#: The rows; the limits are the project's own.
ROWS = """
[[regime]]
name = "few-heads"
backends = ["python:tests.stubs:*"]
limits = "{limits}"
accuracy = 0.02
exact = ["repeat"]
why = "for tests"
[regime.where]
heads = { min = 1, max = 4 }
[regime.arithmetic]
probability = "fp32"
output = "bf16"
[[regime]]
name = "more-heads"
backends = ["python:tests.stubs:*"]
limits = "{limits}"
accuracy = 0.02
exact = ["repeat"]
why = "for tests"
[regime.where]
heads = { min = 5, max = 256 }
[regime.arithmetic]
probability = "fp32"
output = "bf16"
"""

#: Length from which the wrong ones are wrong.
THRESHOLD = 70


def _right(inputs: Inputs) -> None:
    answer = oracle(inputs.problem())
    inputs.out.copy_(answer.out)
    if inputs.lse is not None:
        inputs.lse.copy_(answer.lse)


def _long_wrong(inputs: Inputs, factor: float = 1.02) -> None:
    """Scale the last head of long requests."""
    _right(inputs)
    for request, length in enumerate(inputs.case.lengths):
        if length >= THRESHOLD:
            inputs.out[request, :, -1] *= factor


def _permuted_wrong(inputs: Inputs) -> None:
    """Answer zeros where pages of more than one token are not in order."""
    _right(inputs)
    if inputs.case.page_size > 1 and inputs.case.placement != "identity":
        inputs.out.zero_()


def _two_faults(inputs: Inputs) -> None:
    """Fail one way for several query tokens, another for long requests; never by the accuracy that the rows ask for."""
    if inputs.case.query_tokens > 1:
        raise RuntimeError("this kernel has one query token")
    _long_wrong(inputs, 1.01)


def _refusing(inputs: Inputs) -> None:
    if max(inputs.case.lengths) > THRESHOLD:
        raise Unsupported("too long")
    _right(inputs)


def _interrupted(inputs: Inputs) -> None:
    if max(inputs.case.lengths) > THRESHOLD:
        raise KeyboardInterrupt
    _right(inputs)


def _dying(inputs: Inputs) -> None:
    """Take the process along where a request is long."""
    if max(inputs.case.lengths) > THRESHOLD:
        os.abort()
    _right(inputs)


_KINDS: Mapping[str, Callable[[Inputs], None]] = {
    "right": _right,
    "wrong": _long_wrong,
    "permuted": _permuted_wrong,
    "two": _two_faults,
    "refusing": _refusing,
    "answering": _right,
    "interrupted": _interrupted,
    "dying": _dying,
    "unsure": _right,
    "aborting": _right,
}


ON_CPU = Capabilities(devices=frozenset({"cpu"}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Stub:
    """A stub backend."""

    #: Its registry name.
    name: str
    capabilities: Capabilities = ON_CPU

    @property
    def kind(self) -> str:
        """Name what it does."""
        return self.name.rpartition(":")[2].partition("@")[0]

    def why_not(self, case: Case, device: torch.device) -> str | None:
        """Say why a case lies outside the contract."""
        if self.kind == "unsure" and max(case.lengths) > THRESHOLD:
            raise KeyError(max(case.lengths))
        if (case.query_format, case.cache_format) != ("bf16", "bf16"):
            return f"takes bf16, not {case.query_format} and {case.cache_format}"
        return f"takes 8 heads at most, not {case.heads}" if case.heads > 8 else None

    def run(self, inputs: Inputs) -> Output:
        """Compute the decode, in this stub's way."""
        reason = self.why_not(inputs.case, inputs.device)
        if reason and self.kind == "aborting":
            os.abort()
        if reason and self.kind != "answering":
            raise Unsupported(reason)
        _KINDS[self.kind](inputs)
        return Output(out=inputs.out, lse=inputs.lse, what_ran={"kernel": self.kind})


def make(name: str, label: str | None = None) -> Stub:
    """Make a stub."""
    return Stub(name=f"{name}@{label}" if label else name)


def write_regimes(folder: Path) -> Path:
    """Write the stubs' regimes file."""
    path = folder / "regimes.toml"
    head = RULES.read_text(encoding="utf-8").partition("[[regime]]")[0]
    name = next(iter(tomllib.loads(head)["limits"]))
    path.write_text(head + ROWS.replace("{limits}", name), encoding="utf-8")
    return path
