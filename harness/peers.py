"""How other harnesses would have judged an output.

1. Their numbers are data in ``cases/peers.toml``; here is only what each kind of rule computes.
2. A rule sees what its owner's sees: the output as stored against the truth in fp32, and lse where its owner asks for it.
3. A rule that its owner only logs is taken as if it were enforced.

Source: the files that the rows of ``cases/peers.toml`` name.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from harness.cache import stream
from harness.case import Case
from harness.draws import normal
from harness.inputs import Inputs, make_inputs
from references.formats import FORMATS, encode

Tensor = torch.Tensor
PEERS = Path(__file__).resolve().parent.parent / "cases" / "peers.toml"
_VALUES = 9  # stream name


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """An acceptance rule."""

    #: Whose it is.
    name: str
    #: Key of KINDS.
    kind: str
    #: Its numbers.
    numbers: Mapping[str, float]
    #: Where it stands.
    source: str

    def accepts(self, actual: Tensor, expected: Tensor, lse: Tensor | None, expected_lse: Tensor) -> bool:
        """Tell whether its owner would accept an output.

        Args:
            actual: output as stored [B, S, H, L].
            expected: the truth, fp32 of the same shape.
            lse: [B, S, H], or None.
            expected_lse: the truth of it.
        """
        if not KINDS[self.kind](actual.float(), expected.float(), self.numbers):
            return False
        if "lse_atol" not in self.numbers or lse is None:
            return True
        numbers = {"atol": self.numbers["lse_atol"], "rtol": self.numbers["lse_rtol"], "limit": math.inf}
        return _either(lse.float(), expected_lse.float(), numbers)


def _close(actual: Tensor, expected: Tensor, numbers: Mapping[str, float]) -> bool:
    inside = (actual - expected).abs() <= numbers["atol"] + numbers["rtol"] * expected.abs()
    return float((~inside).double().mean()) <= numbers["share"]


def _cosine(actual: Tensor, expected: Tensor, numbers: Mapping[str, float]) -> bool:
    x, y = actual.double(), expected.double()
    norms = float((x * x + y * y).sum())
    return norms == 0 or 1 - 2 * float((x * y).sum()) / norms < numbers["limit"]


def _either(actual: Tensor, expected: Tensor, numbers: Mapping[str, float]) -> bool:
    same = torch.isfinite(actual) == torch.isfinite(expected)
    if not bool(same.all()):
        return False
    finite = torch.isfinite(expected)
    actual, expected = actual[finite], expected[finite]
    error = (actual - expected).abs()
    inside = (error < numbers["atol"]) | (error < numbers["rtol"] * expected.abs())
    return bool(inside.all()) and (math.isinf(numbers["limit"]) or _cosine(actual, expected, numbers))


def _mean(actual: Tensor, expected: Tensor, numbers: Mapping[str, float]) -> bool:
    error = (actual - expected).abs()
    return float(error.max()) <= numbers["largest"] and float(error.mean()) <= numbers["mean"]


#: Kinds of rules: (actual, expected, numbers) -> accepted.
KINDS: Mapping[str, Callable[[Tensor, Tensor, Mapping[str, float]], bool]] = {
    "close": _close,
    "cosine": _cosine,
    "either": _either,
    "mean": _mean,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The inputs that a peer tests with."""

    #: Whose they are.
    name: str
    #: Rules that are asked on them.
    rules: tuple[str, ...]
    #: Standard deviation of the values, and where they are clamped (0 for nowhere).
    factor: float
    clamp: float
    #: What dead slots hold.
    dead: float
    #: One case a shape.
    cases: tuple[Case, ...]

    def inputs(self, case: Case, output_format: str) -> Inputs:
        """Make the inputs of one of its cases."""
        inputs = make_inputs(case, output_format=output_format)
        bits = stream(case.seed, _VALUES)

        def draw(*shape: int) -> Tensor:
            values = torch.from_numpy(normal(bits, *shape)) * self.factor
            return values.clamp(-self.clamp, self.clamp) if self.clamp else values

        rows = (case.batch, case.query_tokens, case.heads)
        inputs.query_nope.copy_(encode(draw(*rows, case.latent), FORMATS[case.query_format]))
        inputs.query_rope.copy_(encode(draw(*rows, case.rope), FORMATS[case.query_format]))
        inputs.cache.fill_(self.dead)
        pages, within = inputs.slots // case.page_size, inputs.slots % case.page_size
        inputs.cache[pages, within] = encode(draw(len(inputs.slots), case.width), FORMATS[case.cache_format])
        if not math.isnan(self.dead) and inputs.block_table is not None:
            inputs.block_table.clamp_(0, inputs.cache.shape[0] - 1)
        inputs.arena.seal()
        return inputs


def load(path: Path = PEERS) -> tuple[Mapping[str, Rule], tuple[Recipe, ...]]:
    """Read the rules and the recipes.

    Raises:
        ValueError: if a row lacks a key, or names an unknown kind or rule.
    """
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    rules: dict[str, Rule] = {}
    for row in table["rule"]:
        if row.get("kind") not in KINDS:
            raise ValueError(f"{path}: rule {row.get('name')!r} needs a kind of {', '.join(KINDS)}, not {row.get('kind')!r}")
        numbers = {key: float(value) for key, value in row.items() if key not in ("name", "kind", "source")}
        rules[row["name"]] = Rule(name=row["name"], kind=row["kind"], numbers=numbers, source=row["source"])
    return rules, tuple(_recipe(path, row, rules) for row in table["recipe"])


def _recipe(path: Path, row: Mapping[str, Any], rules: Mapping[str, Rule]) -> Recipe:
    unknown = set(row["rules"]) - set(rules)
    if unknown:
        raise ValueError(f"{path}: recipe {row['name']!r} names no rule of this file: {', '.join(sorted(unknown))}")
    cases = tuple(
        Case(
            heads=heads,
            query_tokens=tokens,
            lengths=tuple(lengths),
            page_size=row["page_size"],
            placement=row["placement"],
            softmax_scale=row["softmax_scale"],
            cache_format=row["cache_format"],
            content="zero-query",
        )
        for heads in row["heads"]
        for tokens in row["query_tokens"]
        for lengths in row["lengths"]
    )
    return Recipe(
        name=row["name"],
        rules=tuple(row["rules"]),
        factor=row["factor"],
        clamp=row["clamp"],
        dead=row["dead"],
        cases=cases,
    )
