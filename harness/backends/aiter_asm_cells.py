"""Which calls of AITER's asm decode have a kernel, as data.

Rules kept here:

1. The table is ``aiter_asm.toml``; a cell that is not in it is refused with what was looked for and what is near.
2. The log-sum-exp is part of the question: where AITER leaves it unwritten, asking for it is outside the contract.
3. A row is checked when it is read.

Source: AITER main of 2026-08-22: the kernel lists ``hsa/gfx9*/mla/mla_asm.csv`` and the dispatch of
``csrc/py_itfs_cu/asm_mla.cu`` and ``aiter/mla.py``.
"""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass
from pathlib import Path

from harness.backends.token_rows import why_not_flat
from harness.case import Case

TABLE = Path(__file__).with_name("aiter_asm.toml")
MODES = ("plain", "persistent")
#: The fp8 format of each architecture.
EIGHT_BITS = {"gfx950": "e4m3fn", "gfx942": "e4m3fnuz"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A row of the table."""

    #: Architecture, as ROCm names it.
    arch: str
    #: One of MODES.
    mode: str
    #: Query format, "bf16" or "fp8".
    query: str
    #: Cache format, "bf16" or "fp8".
    cache: str
    #: Head counts.
    heads: tuple[int, ...]
    #: Query tokens, lowest and highest.
    tokens: tuple[int, int]
    #: Query tokens for which the lse is written; None where it never is.
    lse: tuple[int, int] | None
    #: Query tokens among those for which asking for it aborts.
    lse_not: tuple[int, ...]
    #: Where the row comes from.
    why: str

    def __post_init__(self) -> None:
        if self.arch not in EIGHT_BITS or self.mode not in MODES or {self.query, self.cache} - {"bf16", "fp8"}:
            raise ValueError(f"{TABLE}: no such architecture, mode or format in {self}")
        if not 1 <= self.tokens[0] <= self.tokens[1] or not self.heads or not self.why:
            raise ValueError(f"{TABLE}: an empty range or no reason in {self}")

    def writes_lse(self, tokens: int) -> bool:
        """Say whether the log-sum-exp can be asked for."""
        return self.lse is not None and self.lse[0] <= tokens <= self.lse[1] and tokens not in self.lse_not


@functools.cache
def read_cells(path: Path = TABLE) -> tuple[Cell, ...]:
    """Read the table.

    Raises: ValueError, when a row is at fault.
    """
    cells = []
    for row in tomllib.loads(path.read_text(encoding="utf-8"))["cell"]:
        words = {key: str(row[key]) for key in ("arch", "mode", "query", "cache", "why")}
        cells.append(
            Cell(
                **words,
                heads=tuple(row["heads"]),
                tokens=(row["tokens"][0], row["tokens"][1]),
                lse=(row["lse"][0], row["lse"][1]) if "lse" in row else None,
                lse_not=tuple(row.get("lse_not", ())),
            )
        )
    return tuple(cells)


def why_no_cell(case: Case, *, arch: str, mode: str) -> str | None:
    """Say why a case has no kernel on an architecture in a mode, or None."""
    if arch not in EIGHT_BITS:
        return f"runs on {' and '.join(EIGHT_BITS)}, not {arch}"
    if (case.latent, case.rope) != (512, 64):
        return f"takes rows of 512 + 64, not {case.latent} + {case.rope}"
    if why_not_flat(case) or case.token_padding or (case.page_size == 1 and case.page_padding):
        return "takes contiguous rows of 576 elements, and the case pads them"
    if min(case.lengths) < case.query_tokens:
        return "empty rows: what the kernels do for fewer cached than query tokens is not established"
    names = {"bf16": "bf16", EIGHT_BITS[arch]: "fp8"}
    query, cache = names.get(case.query_format), names.get(case.cache_format)
    if query is None or cache is None:
        return f"takes bf16 and {EIGHT_BITS[arch]} on {arch}, not {case.query_format} and {case.cache_format}"
    if cache == "bf16" and case.cache_scale != 1.0:
        return f"applies no scale to a bf16 cache, and the case has {case.cache_scale}"
    asked = f"{mode}, {query} query, {cache} cache, {case.heads} heads, {case.query_tokens} query tokens on {arch}"
    rows = [c for c in read_cells() if (c.arch, c.mode, c.query, c.cache) == (arch, mode, query, cache)]
    if not rows:
        return f"no kernel: {asked}; the call would abort the process"
    for cell in rows:
        if case.heads in cell.heads and cell.tokens[0] <= case.query_tokens <= cell.tokens[1]:
            if case.lse and not cell.writes_lse(case.query_tokens):
                return f"no log-sum-exp: {asked}; it would be left unwritten or the call would abort ({cell.why})"
            return None
    near = "; ".join(
        f"{'/'.join(map(str, cell.heads))} heads with {cell.tokens[0]} to {cell.tokens[1]} tokens" for cell in rows
    )
    return f"no kernel: {asked}; the call would abort the process. There is one for {near}"
