"""The contract of AITER's Gluon MLA decode, read from the version at hand.

Rules kept here:

1. The parameters are read by inspection and must be exactly those of a known generation; any other is refused by name.
2. What a generation does not fix is read from the wrapper's own assertions: which heads, batches and regimes it takes.
3. A wrapper that no longer states one of these is refused; its contract is not guessed.
4. Where the wrapper checks a promise, not the data, the contract is the data.

Source: AITER releases 0.1.14 to 0.1.20 and main of 2026-08-22; each fact names the statement it is read from.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from harness.backends.protocol import NotInstalled
from harness.backends.token_rows import row_stride, why_not_flat
from harness.case import Case

_FIRST = ("q_nope", "q_pe", "kv_c", "o", "page_table", "seq_info", "sm_scale", "k_pe", "kv_pe_offset", "use_2d_view")
#: Parameters by generation, and the release that began it.
GENERATIONS: dict[tuple[str, ...], str] = {
    (*_FIRST, "min_kv_seq_len"): "0.1.14",
    (*_FIRST, "kv_scale", "min_kv_seq_len"): "0.1.15",
    (*_FIRST, "kv_scale", "min_kv_seq_len", "return_lse"): "0.1.16",
    (*_FIRST, "kv_scale", "min_kv_seq_len", "return_lse", "has_pe", "attn_sink"): "0.1.18",
}
#: Tokens a tile of the regimes; the wrapper sets BLOCK_N to them.
TILES = {"bh64": 64, "bh16bn64": 64, "bh16bn128": 128}
#: Head counts of regime bh64.
WIDE_HEADS = (64, 128)
#: Elements that every stride must be a multiple of: Triton tells its compiler of this divisibility and no other, and
#: without it the copies to LDS do not compile for gfx950 (``python -m harness.compile --hints``).
STRIDE_STEP = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class GluonContract:
    """What one version of the wrapper takes."""

    #: The release whose parameters it has.
    generation: str
    #: Regimes it knows.
    regimes: frozenset[str]
    #: Most heads of the bh16 regimes; 0 without them.
    most_heads: int
    #: Batches of bh64: a list, or a divisor.
    wide_batches: tuple[int, ...] | int
    #: bh16 regimes that take one request only.
    single_request: frozenset[str]
    #: Whether it takes several query tokens.
    multi_token: bool
    #: Whether bh16 derives its splits from the promised shortest length rather than from the batch alone.
    promised_splits: bool
    #: Fewest tokens that each bh16 split must have, in tiles; 0 without such a check.
    tiles_a_split: int

    @property
    def has_scale(self) -> bool:
        """Whether it takes a cache scale."""
        return self.generation != "0.1.14"

    @property
    def returns_lse(self) -> bool:
        """Whether it returns the log-sum-exp."""
        return self.generation in ("0.1.16", "0.1.18")

    def regime_of(self, case: Case) -> str | None:
        """Name the regime that the wrapper picks, or None when it picks none."""
        if case.heads in WIDE_HEADS:
            return "bh64"
        if case.heads <= self.most_heads:
            return {"bf16": "bh16bn64", "e4m3fn": "bh16bn128"}.get(case.cache_format)
        return None

    def splits_of(self, case: Case) -> int:
        """Count the splits that the wrapper launches."""
        blocks = -(-case.heads // 16) if self.most_heads > 16 else 1
        if self.regime_of(case) == "bh64":
            grid = 8 * -(-case.heads // 64) * case.query_tokens * (case.batch // 8)
            return 1 << max(0, -(-256 // max(grid, 1)) - 1).bit_length()
        if self.generation == "0.1.15":
            return 256
        budget = 256 // (case.batch * case.query_tokens * blocks)
        if self.promised_splits:
            shortest = min(case.lengths)
            budget = min(budget, shortest if case.cache_format == "e4m3fn" else -(-shortest // 64))
        return max(1, budget)

    def why_not(self, case: Case) -> str | None:
        """Say why a case lies outside this version's contract, or None."""
        if (case.latent, case.rope) != (512, 64):
            return f"takes rows of 512 + 64, not {case.latent} + {case.rope}"
        if case.query_format != "bf16":
            return f"takes bf16 queries, not {case.query_format}"
        if case.cache_format not in ("bf16", "e4m3fn"):
            return f"takes caches in bf16 or e4m3fn, not {case.cache_format}"
        if case.cache_scale != 1.0 and not self.has_scale:
            return "takes no cache scale"
        if case.query_tokens > 1 and not self.multi_token:
            return f"takes one query token, not {case.query_tokens}"
        flat = why_not_flat(case)
        if flat is not None:
            return flat
        if row_stride(case) % STRIDE_STEP:
            return (
                f"a row stride of {row_stride(case)} elements is not a multiple of {STRIDE_STEP}: "
                f"the kernel does not compile for gfx950 without that hint"
            )
        regime = self.regime_of(case)
        if regime is None or regime not in self.regimes:
            return f"has no regime for {case.heads} heads: takes up to {self.most_heads}, 64 and 128"
        return self._why_not_wide(case) if regime == "bh64" else self._why_not_narrow(case, regime)

    def _why_not_wide(self, case: Case) -> str | None:
        if case.cache_format != "bf16":
            return f"bh64 (64 and 128 heads) takes bf16 caches, not {case.cache_format}"
        if isinstance(self.wide_batches, int):
            if case.batch % self.wide_batches:
                return f"bh64 takes batches that are multiples of {self.wide_batches}, not {case.batch}"
        elif case.batch not in self.wide_batches:
            return f"bh64 takes batches of {self.wide_batches}, not {case.batch}"
        splits = self.splits_of(case)
        least = splits * (3 * TILES["bh64"] + splits)
        if min(case.lengths) <= least:
            return f"bh64 assumes 3 tiles a split: more than {least} tokens a request, not {min(case.lengths)}"
        return None

    def _why_not_narrow(self, case: Case, regime: str) -> str | None:
        if regime in self.single_request and case.batch != 1:
            return f"{regime} takes one request, not {case.batch}"
        if self.tiles_a_split:
            least = 256 * self.tiles_a_split * TILES[regime]
            if min(case.lengths) < least:
                return f"{regime} takes requests of at least {least} tokens, not {min(case.lengths)}"
        return None


def _names(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def _compares(tree: ast.AST) -> Iterator[ast.Compare]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Compare))


def _numbers(node: ast.AST) -> tuple[int, ...]:
    return tuple(p.value for p in ast.walk(node) if isinstance(p, ast.Constant) and type(p.value) is int)


def read_contract(function: Callable[..., Any]) -> GluonContract:
    """Read the contract of a wrapper from its parameters and its assertions.

    Raises: NotInstalled, naming the function and what about it is unknown.
    """
    where = f"{function.__module__}.{function.__name__} ({inspect.getsourcefile(function)})"
    parameters = tuple(inspect.signature(function).parameters)
    generation = GENERATIONS.get(parameters)
    if generation is None:
        nearest = min(reversed(GENERATIONS), key=lambda known: len(set(known) ^ set(parameters)))
        more, less = set(parameters) - set(nearest), set(nearest) - set(parameters)
        raise NotInstalled(
            f"unknown signature of {where}: against release {GENERATIONS[nearest]} it has "
            f"{', '.join(sorted(more)) or 'nothing'} in addition and lacks {', '.join(sorted(less)) or 'nothing'}"
            f"{'' if more or less else '; the order differs'}. This version of mla-gate does not know how to call it."
        )
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    texts = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    regimes = frozenset(TILES) & texts or frozenset({"bh64"})
    return GluonContract(
        generation=generation,
        regimes=regimes,
        most_heads=_most_heads(tree, where) if len(regimes) > 1 else 0,
        wide_batches=_wide_batches(tree, where),
        single_request=_single_request(tree, regimes),
        multi_token=any("qlen" in _names(node) for node in ast.walk(tree) if isinstance(node, ast.Assign)),
        promised_splits=any(
            "min_kv_seq_len" in _names(node.value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign) and "NUM_KV_SPLITS" in _names(node.targets[0])
        ),
        tiles_a_split=_tiles_a_split(tree),
    )


def _most_heads(tree: ast.AST, where: str) -> int:
    for compare in _compares(tree):
        if "nhead" in _names(compare) and len(compare.ops) == 2 and all(isinstance(o, ast.LtE) for o in compare.ops):
            return max(_numbers(compare))
    raise NotInstalled(f"{where} no longer states its most heads as 1 <= nhead <= N; its contract is unknown.")


def _wide_batches(tree: ast.AST, where: str) -> tuple[int, ...] | int:
    for compare in _compares(tree):
        if "batch_size" not in _names(compare.left):
            continue
        if isinstance(compare.ops[0], ast.In):
            return _numbers(compare.comparators[0])
        if isinstance(compare.left, ast.BinOp) and isinstance(compare.left.op, ast.Mod):
            return _numbers(compare.left.right)[0]
    raise NotInstalled(f"{where} no longer states the batches of bh64; its contract is unknown.")


def _asserts_single(tree: ast.AST) -> bool:
    return any(
        isinstance(node, ast.Assert)
        and isinstance(node.test, ast.Compare)
        and _names(node.test) == {"batch_size"}
        and isinstance(node.test.ops[0], ast.Eq)
        and _numbers(node.test) == (1,)
        for node in ast.walk(tree)
    )


def _single_request(tree: ast.AST, regimes: frozenset[str]) -> frozenset[str]:
    if not _asserts_single(tree):
        return frozenset()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "bh16bn128" in ast.unparse(node.test):
            if any(_asserts_single(statement) for statement in node.body):
                return frozenset({"bh16bn128"})
    return regimes - {"bh64"}


def _tiles_a_split(tree: ast.AST) -> int:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert) and "min_seq_len_wg" in _names(node.test):
            return max(_numbers(node.test), default=1)
    return 0
