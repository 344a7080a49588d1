"""The text of the script: case, data, reference, call, check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from harness.backends.protocol import Backend
from harness.case import Case
from harness.extremes import NARROW
from harness.inputs import UNABSORBED, Inputs, make_inputs
from harness.measure import measure_truth
from harness.regimes import Regime
from harness.script.buffers import describe
from harness.script.calls import call, pack
from references.formats import FORMATS
from references.oracle import oracle

#: Rows whose limits a script carries.
ROWS = 64

HEAD = '''\
#!/usr/bin/env python3
"""MLA decode: {backend} answers one small case wrongly.

{words}

Exits 1 where the fault is present and 0 where it is not. Needs torch, numpy{package}.
Found by mla-gate; its id of the case: {case}
"""

import base64
import json
import pathlib
import sys
import tempfile
import zlib
from types import SimpleNamespace

import numpy as np
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

'''

LAYOUT = {
    "split": """\
query_nope, query_rope = query[..., :L].contiguous(), query[..., L:].contiguous()
""",
    "fused": """\
query_nope, query_rope = query[..., :L], query[..., L:]
""",
    "transposed": f"""\
query_nope = query[..., :L].permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
whole = torch.zeros(B, S, H, {UNABSORBED} + R, dtype=torch.float32, device=DEVICE).to(QUERY_TYPE)
whole[..., {UNABSORBED}:] = query[..., L:]
query_rope = whole[..., {UNABSORBED}:]
""",
}

TABLES = {
    "padded": """\
block_table = torch.full((B, max(1, *map(len, PAGES), 1) + {padding}), 2**31 - 1, dtype=torch.int32)
for b, pages in enumerate(PAGES):
    block_table[b, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
block_table, kv_indptr, kv_indices = block_table.to(DEVICE), None, None
""",
    "ragged": """\
block_table = None
ends = [0]
for pages in PAGES:
    ends.append(ends[-1] + len(pages))
kv_indptr = torch.tensor(ends, dtype=torch.int32, device=DEVICE)
kv_indices = torch.tensor([page for pages in PAGES for page in pages], dtype=torch.int32, device=DEVICE)
""",
}

REST = """\
lengths = torch.tensor(LENGTHS, dtype=torch.int32, device=DEVICE)
query_scale = torch.tensor([QUERY_SCALE], dtype=torch.float32, device=DEVICE)
cache_scale = torch.tensor([CACHE_SCALE], dtype=torch.float32, device=DEVICE)
out = torch.full((B, S, H, L), float("nan"), device=DEVICE).to({out_type})
lse = {lse}
"""

REFERENCE = '''\
def reference():
    """The equations in fp64: softmax over the tokens in sight, V the first L elements of a cache row."""
    expected = torch.zeros(B, S, H, L, dtype=torch.float64)
    expected_lse = torch.full((B, S, H), float("-inf"), dtype=torch.float64)
    for b, N in enumerate(LENGTHS):
        keys = rows[b].float().double() * CACHE_SCALE
        for t in range(S):
            sight = N - S + t + 1
            if sight <= 0:
                continue
            scores = SOFTMAX_SCALE * QUERY_SCALE * query[b, t].cpu().float().double() @ keys[:sight].T
            expected[b, t] = torch.softmax(scores, dim=-1) @ keys[:sight, :L]
            expected_lse[b, t] = torch.logsumexp(scores, dim=-1)
    return expected, expected_lse
'''

CHECK = """\
# How far a correct kernel may be off, from the rounding of each of its steps on this very data: for a row
# (request, query token, head) the 2-norm of its error and, element by element, its largest; for lse the error.
ROW_LIMIT = {rows}
ELEMENT_LIMIT = {elements}
LSE_LIMIT = {lse}


def main():
    before = [bits(tensor).clone() for tensor in (pool, query_nope, query_rope)]
    actual, actual_lse = run()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    rounded_type, faults = actual.dtype, 0
    actual = actual.reshape(B, S, H, L).cpu().float().double()
    expected, expected_lse = reference()
    for where, limit in ROW_LIMIT.items():
        error = (actual[where] - expected[where]).abs()
        norm, largest = float(error.norm()), float(error.max())
        wrong = not (norm <= limit and largest <= ELEMENT_LIMIT[where])
        faults += wrong
        if wrong:
            worst = int(torch.where(error.isnan(), torch.inf, error).argmax())
            value = float(expected[where][worst])
            print(f"WRONG out{{list(where)}}: error norm {{norm:.4g}} (at most {{limit:.4g}}), worst element [{{worst}}]: "
                  f"expected {{value:.8g}} ({{float(torch.tensor(value).to(rounded_type)):.8g}} rounded), "
                  f"actual {{float(actual[where][worst]):.8g}}")
    for where, limit in (LSE_LIMIT if actual_lse is not None else {{}}).items():
        value, got = float(expected_lse[where]), float(actual_lse.reshape(B, S, H)[where])
        if not abs(got - value) <= limit:
            faults += 1
            print(f"WRONG lse{{list(where)}}: expected {{value:.8g}}, actual {{got:.8g}}, at most {{limit:.3g}} off")
    for name, tensor, old in zip(("cache", "query", "query"), (pool, query_nope, query_rope), before):
        if not torch.equal(bits(tensor), old):
            faults += 1
            print(f"WRONG: the kernel wrote into its input {{name}}")
    print(f"{{faults}} faults in {{len(ROW_LIMIT)}} rows checked" if faults else f"right: {{len(ROW_LIMIT)}} rows checked")
    return 1 if faults else 0


sys.exit(main())
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLimits:
    """How far a correct kernel may be off in some rows, keyed by (request, query token, head)."""

    #: 2-norm of the error of a row.
    norm: Mapping[tuple[int, int, int], float]
    #: Largest error of an element of a row.
    element: Mapping[tuple[int, int, int], float]
    #: Error of the log-sum-exp.
    lse: Mapping[tuple[int, int, int], float]


def write_script(case: Case, backend: Backend, regime: Regime, *, rows: tuple[tuple[int, int, int], ...] = ()) -> str:
    """Write the script of a case.

    Args:
        case: the case, as small as it could be made.
        backend: whose kernel is called.
        regime: the arithmetic and the limits.
        rows: rows (request, query token, head) that must be among those checked.
    """
    inputs = make_inputs(case, device="cpu", output_format=backend.capabilities.output_format)
    buffers, called, limits = describe(inputs), call(backend, inputs), row_limits(inputs, regime, rows)
    out_type = FORMATS[backend.capabilities.output_format].storage
    lse = 'torch.full((B, S, H), float("nan"), dtype=torch.float32, device=DEVICE)' if case.lse else "None"
    needs = {"aiter-triton": ", aiter and a GPU", "aiter": ", aiter and a gfx950", "t": " and triton",
             "g": ", triton and a gfx950"}  # fmt: skip
    package = next((words for start, words in needs.items() if backend.name.startswith(start)), "")
    parts = [
        HEAD.format(backend=backend.name, words=in_words(case), case=case, package=package),
        pack((*buffers.needs, *called.needs), called.kernel),
        "# The case.\n" + buffers.constants,
        "# The data: query codes [B, S, H, D], and the cache rows of each request [N, D].\n" + buffers.data,
        "# The paged cache.\n" + buffers.pool,
        "pool, query = pool.to(DEVICE), query.to(DEVICE)\n"
        "cache = pool.as_strided((POOL_PAGES, T, D), (PAGE_STRIDE, ROW_STRIDE, 1))\n"
        + LAYOUT[case.query_layout]
        + TABLES[case.table].replace("{padding}", str(case.table_padding))
        + REST.format(out_type=out_type, lse=lse),
        called.lines,
        REFERENCE,
        CHECK.format(rows=_table(limits.norm), elements=_table(limits.element), lse=_table(limits.lse if case.lse else {})),
    ]
    return "\n\n".join(part.rstrip("\n") + "\n" for part in parts if part)


def row_limits(inputs: Inputs, regime: Regime, first: tuple[tuple[int, int, int], ...] = ()) -> RowLimits:
    """Derive how far a correct kernel may be off, in the rows that see a token."""
    problem = inputs.problem()
    truth = measure_truth(problem, oracle(problem), regime)
    norm = (truth.variance.sum(-1) * (1 + truth.row_limit * truth.spread.clamp_min(NARROW))).sqrt()
    accurate = torch.where(truth.conditioned, regime.accuracy * truth.size, torch.inf)
    norm = torch.minimum(norm, accurate)
    element = torch.minimum(truth.variance.sqrt() * truth.element_limit, truth.hard * regime.limits.hard).amax(-1)
    live = [tuple(int(part) for part in where) for where in truth.live.nonzero()]
    heads = inputs.case.heads
    keys = {(b, row // heads, row % heads): (b, row) for b, row in live}
    chosen = list(dict.fromkeys([*(where for where in first if where in keys), *keys]))[:ROWS]
    return RowLimits(
        norm={where: float(norm[keys[where]]) for where in chosen},
        element={where: float(element[keys[where]]) for where in chosen},
        lse={where: float(truth.lse_limit[keys[where]]) for where in chosen},
    )


def in_words(case: Case) -> str:
    """Say a case in words, one fact a line."""
    lengths = ", ".join(map(str, case.lengths[:12])) + (f", … ({case.batch} requests)" if case.batch > 12 else "")
    facts = [
        f"requests        {case.batch}, cached tokens {lengths}",
        f"query           {case.query_tokens} token{'s' * (case.query_tokens > 1)} a request, {case.heads} "
        f"head{'s' * (case.heads > 1)}, {case.query_format}, scale {case.query_scale:g}, layout {case.query_layout}",
        f"cache           rows of {case.latent} + {case.rope}, {case.cache_format}, scale {case.cache_scale:g}, "
        f"pages of {case.page_size}, placement {case.placement}, {case.table} table",
        f"softmax scale   {case.softmax_scale:.6g}",
        f"content         {case.content}, amplitude {case.amplitude:g}, seed {case.seed}; dead memory holds {case.poison}",
    ]
    padding = [(name, getattr(case, name)) for name in ("token_padding", "page_padding", "table_padding", "pool_rows")]
    facts += [f"{name.replace('_', ' '):<15} {value}" for name, value in padding if value]
    return "\n".join(facts)


def _table(limits: Mapping[tuple[int, int, int], Any]) -> str:
    return "{" + "".join(f"\n    {where}: {value:.6g}," for where, value in limits.items()) + ("\n}" if limits else "}")
