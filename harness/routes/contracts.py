"""What becomes of a call of a kernel, without making it: the kernels' contracts as a route meets them.

Rules kept here:

1. The contracts are those of the backends: their ``why_not``. Here they are only asked for a kernel by name, a release and
   an architecture, so that neither AITER nor a GPU is needed.
2. How a call outside the contract ends is part of the answer: refused, a failed assertion, the end of the process, a
   KeyError.
3. A call inside the contract may be reported wrong all the same; ``contracts.toml`` says by whom.

Source: ``aiter/mla.py`` and ``csrc/py_itfs_cu/asm_mla.cu`` of AITER for how its calls end.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.backends.aiter_asm_cells import why_no_cell
from harness.backends.aiter_contract import GluonContract
from harness.backends.aiter_triton_entries import ENTRY_POINTS
from harness.backends.gfx950 import ARCHITECTURE
from harness.backends.protocol import Unsupported
from harness.cache import pool_pages
from harness.case import Case
from harness.region import Region
from references.formats import FORMATS

TABLE = Path(__file__).with_name("contracts.toml")
#: How a decode ends that does not end well.
OUTCOMES: Mapping[str, str] = {
    "refusal": "the kernel says that it does not take this",
    "assertion": "an assertion of the kernel's wrapper fails",
    "abort": "the process ends",
    "KeyError": "a table of the kernel's has no such entry",
    "wrong": "it runs, and is reported to answer wrong",
    "changed": "it runs with another arithmetic than was asked for",
}
#: Outcomes that are no failure: the answer may be right by its own arithmetic.
HARMLESS = frozenset({"changed"})
#: Query tokens times heads that the plain fp8 kernels have a block size for, ``get_block_n_fp8`` in ``aiter/mla.py``.
FP8_BLOCKS: Mapping[int, int] = {
    8: 64, 16: 128, 24: 128, 32: 128, 48: 64, 64: 64, 128: 32, 256: 32, 384: 32, 512: 32,
}  # fmt: skip
_ASM_MODES = {"aiter-asm-np": "plain", "aiter-asm-ps": "persistent"}
#: The kernels that routes may name, by the backends' names, and what each is.
KERNELS: Mapping[str, str] = {
    "aiter-gluon": "AITER's Gluon decode",
    "aiter-asm-ps": "AITER's asm decode with a persistent schedule",
    "aiter-asm-np": "AITER's asm decode without one",
    "aiter-triton-grouped": "vLLM's Triton decode, which AITER ships too",
}


class Aborted(RuntimeError):
    """A call that would have ended the process."""


#: What a call that ends so raises; the others run.
_ERRORS: Mapping[str, type[Exception]] = {
    "refusal": Unsupported, "assertion": AssertionError, "abort": Aborted, "KeyError": KeyError,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A decode that does not end well."""

    #: Key of OUTCOMES.
    outcome: str
    #: The kernel.
    kernel: str
    #: What it says, or what is said of it.
    reason: str

    @property
    def runs(self) -> bool:
        """Whether the kernel answers all the same."""
        return self.outcome not in _ERRORS

    def error(self) -> Exception:
        """Make the exception that the call ends with."""
        return _ERRORS[self.outcome](f"{self.kernel}: {self.reason}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What somebody has reported of a kernel."""

    kernel: str
    #: Key of OUTCOMES.
    outcome: str
    where: Region
    #: Releases of the Gluon kernel; none for all.
    releases: tuple[str, ...]
    #: Bytes of the pool from which it holds; 0 for any.
    above_bytes: int
    #: What happens.
    why: str
    #: Who says so.
    source: str


def _gluon(row: Mapping[str, Any]) -> GluonContract:
    return GluonContract(
        generation="0.1.18",
        regimes=frozenset({"bh64", "bh16bn64", "bh16bn128"}),
        most_heads=row["most_heads"],
        wide_batches=64,
        single_request=frozenset(row["single_request"]),
        multi_token=True,
        promised_splits=row["promised_splits"],
        tiles_a_split=0,
    )


def _report(row: Mapping[str, Any]) -> Report:
    words = {key: row[key] for key in ("kernel", "outcome", "why", "source")}
    if words["kernel"] not in KERNELS or words["outcome"] not in OUTCOMES or not words["source"]:
        raise ValueError(f"{TABLE}: no such kernel or outcome, or no source: {row}")
    where = Region.from_table(row["where"])
    return Report(**words, where=where, releases=tuple(row.get("releases", ())), above_bytes=row.get("above_bytes", 0))


_TABLES = tomllib.loads(TABLE.read_text(encoding="utf-8"))
#: The contract of the Gluon kernel by release.
GLUON_RELEASES: Mapping[str, GluonContract] = {row["release"]: _gluon(row) for row in _TABLES["gluon"]}
REPORTS: tuple[Report, ...] = tuple(_report(row) for row in _TABLES["reported"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Contracts:
    """The kernels' contracts on one architecture."""

    #: As ROCm names it.
    arch: str
    #: Release of AITER whose Gluon kernel is asked; "" for none.
    release: str
    #: Its contract, where the kernel at hand is not of a release that is described.
    gluon: GluonContract | None = None

    def ask(self, kernel: str, case: Case) -> Problem | None:
        """Say how a call ends that does not run, or None."""
        outcome, reason = self._ask(kernel, case)
        return None if reason is None else Problem(outcome=outcome, kernel=kernel, reason=reason)

    def _ask(self, kernel: str, case: Case) -> tuple[str, str | None]:
        if kernel in _ASM_MODES:
            plain, product = kernel == "aiter-asm-np", case.heads * case.query_tokens
            if plain and case.query_format != "bf16" and product not in FP8_BLOCKS:
                return "KeyError", f"{product}: {case.heads} heads x {case.query_tokens} query tokens have no fp8 block size"
            if not plain and case.heads % 8:
                return "assertion", f"plans for multiples of 8 heads, not {case.heads}"
            reason = why_no_cell(case, arch=self.arch, mode=_ASM_MODES[kernel])
            return "abort" if reason is not None and reason.startswith("no kernel") else "refusal", reason
        if kernel == "aiter-triton-grouped":
            return "refusal", ENTRY_POINTS[kernel].why_not(case)
        if self.arch != ARCHITECTURE:
            return "assertion", f"requires {ARCHITECTURE}, not {self.arch}"
        reason = (self.gluon or GLUON_RELEASES[self.release]).why_not(case)
        return "refusal" if reason is not None and reason.startswith("takes ") else "assertion", reason

    def reported(self, kernel: str, case: Case, pool: int) -> Problem | None:
        """Say what is reported of a call that the contract allows, with a pool of so many bytes, or None."""
        for report in REPORTS:
            if (
                report.kernel == kernel
                and case in report.where
                and (not report.releases or self.release in report.releases)
                and (not report.above_bytes or pool > report.above_bytes)
            ):
                return Problem(outcome=report.outcome, kernel=kernel, reason=report.why)
        return None


def pool_bytes(case: Case) -> int:
    """Count the bytes of a case's pool."""
    row = (case.width + case.token_padding) * FORMATS[case.cache_format].storage.itemsize
    return pool_pages(case) * (row * case.page_size + case.page_padding * FORMATS[case.cache_format].storage.itemsize)
