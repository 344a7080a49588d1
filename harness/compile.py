"""Ahead-of-time compilation of every kernel variant for gfx950, as a table.

Rules kept here:

1. No GPU is needed: Triton's AMD backend compiles, nothing runs.
2. A variant is a case: the backend calls its kernels for it, and every launch of the call is a row.
3. A row says what the compiler was told: without the divisibility hints that a caller's strides and pointers give,
   many variants do not compile at all.
4. The run fails on a compile error, on more LDS than a work group has, and, against an earlier table, on registers
   spilled that were not spilled before. A variant that the earlier table lacks is new, not wrong.
5. A case outside a backend's contract is listed as such with its reason; it is no row.

Source: the limits of gfx950 in ``harness/backends/gfx950.py``; variants in ``cases/compile.toml``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from harness.assembly import Resources
from harness.backends import registry
from harness.backends.gfx950 import LDS_BYTES
from harness.backends.launches import Compiled, compile_launch, needed_hints, recorded
from harness.case import Case
from harness.inputs import make_inputs

VARIANTS = Path(__file__).resolve().parent.parent / "cases" / "compile.toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One kernel of one variant."""

    #: The backend, with its label.
    backend: str
    #: The case that calls for the variant.
    case: str
    #: What became of compiling it.
    compiled: Compiled
    #: Arguments whose divisibility by 16 it cannot do without; None when that was not tried.
    needs: tuple[str, ...] | None = None

    @property
    def key(self) -> str:
        """What names the same row in another table: the label is left out, so that versions can be compared."""
        return f"{self.backend.partition('@')[0]} {self.case} {self.compiled.kernel}"

    def as_json(self) -> dict[str, Any]:
        """Give the row as it is stored."""
        compiled = self.compiled
        return {
            "backend": self.backend,
            "case": self.case,
            "kernel": compiled.kernel,
            "resources": compiled.resources.as_numbers() if compiled.resources else None,
            "error": compiled.error,
            "divisible": list(compiled.divisible),
            "within_2gib": list(compiled.within_2gib),
            "needs": None if self.needs is None else list(self.needs),
        }


def read_variants(path: Path, backend: str) -> list[Case]:
    """Read the cases whose kernels are compiled for a backend: a product of axes for each ``[[variants]]``.

    Raises: ValueError, when the file names no variant of the backend.
    """
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    name = backend.partition("@")[0]
    cases: list[Case] = []
    for entry in table.get("variants", []):
        if name not in entry["backends"]:
            continue
        axes = entry.get("axes", {})
        for values in itertools.product(*axes.values()):
            given = {**entry.get("fixed", {}), **dict(zip(axes, values, strict=True))}
            batch, length = given.pop("batch", 1), given.pop("length", 256)
            cases.append(Case(lengths=(length,) * batch, **given))
    if not cases:
        raise ValueError(f"{path} names no variant of {name!r}; add a [[variants]] entry with that backend")
    return cases


def compile_backend(name: str, cases: Iterable[Case], *, hints: bool = False) -> tuple[list[Row], list[str]]:
    """Compile what a backend would launch for each case, and list the cases outside its contract."""
    backend = registry.make(name)
    launch = getattr(backend, "launch", None)
    if launch is None:
        raise ValueError(f"backend {name!r} has no Triton or Gluon kernel to compile")
    rows, outside = [], []
    for case in cases:
        reason = backend.why_not(case, torch.device("cpu"))
        if reason is not None:
            outside.append(f"{name} {case}: {reason}")
            continue
        inputs = make_inputs(case)
        with recorded() as launches:
            launch(inputs)
        for one in launches:
            compiled = compile_launch(one)
            needs = needed_hints(one, compiled) if hints and compiled.error is None else None
            rows.append(Row(backend=name, case=str(case), compiled=compiled, needs=needs))
    return rows, outside


def find_faults(rows: Sequence[Row], baseline: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Say what is wrong with a table by itself and against an earlier one (row key to stored row)."""
    faults = []
    for row in rows:
        resources = row.compiled.resources
        if resources is None:
            faults.append(f"does not compile: {row.key}: {row.compiled.error}")
            continue
        if resources.lds > LDS_BYTES:
            faults.append(f"LDS: {row.key}: {resources.lds} bytes, a work group has {LDS_BYTES}")
        before = (baseline.get(row.key) or {}).get("resources")
        if before is not None:
            old = Resources(**before)
            if resources.spills > old.spills or resources.scratch > old.scratch:
                faults.append(
                    f"new spills: {row.key}: {resources.spills} registers and {resources.scratch} bytes of scratch, "
                    f"before {old.spills} and {old.scratch}"
                )
    return faults


def read_baseline(path: Path | None) -> dict[str, Mapping[str, Any]]:
    """Read an earlier table by row key; no path gives an empty one.

    Raises: ValueError, when the file is not such a table.
    """
    if path is None:
        return {}
    stored = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(stored, dict) or not isinstance(stored.get("rows"), list):
        raise ValueError(f"{path} is not a table of compiled kernels; write one with --output FILE")
    return {f"{r['backend'].partition('@')[0]} {r['case']} {r['kernel']}": r for r in stored["rows"]}


def print_table(rows: Sequence[Row], baseline: Mapping[str, Mapping[str, Any]]) -> None:
    """Print the table, with the change against an earlier one in brackets."""
    if not rows:
        return
    names = [field.name for field in fields(Resources)]
    print(f"{'kernel':<28} " + " ".join(f"{name:>12}" for name in names) + "  case")
    for row in rows:
        compiled = row.compiled
        if compiled.resources is None:
            print(f"{compiled.kernel:<28} {compiled.error}  {row.backend} {row.case}")
            continue
        before = (baseline.get(row.key) or {}).get("resources") or {}
        cells = [_cell(value, before.get(name)) for name, value in compiled.resources.as_numbers().items()]
        print(f"{compiled.kernel:<28} " + " ".join(f"{cell:>12}" for cell in cells) + f"  {row.backend} {row.case}")
        told = f"multiples of 16: {', '.join(compiled.divisible) or 'none'}"
        if row.needs is not None:
            told = f"needs multiples of 16: {', '.join(row.needs) or 'none'}"
        print(f"    {told}; under 2 GiB: {', '.join(compiled.within_2gib) or 'none'}")


def _cell(value: int, before: int | None) -> str:
    return str(value) if before is None or before == value else f"{value} ({value - before:+d})"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line; 0 when nothing is wrong, 1 when something is, 2 when the question is."""
    parser = argparse.ArgumentParser(prog="python -m harness.compile", description=__doc__.splitlines()[0])
    parser.add_argument("--backend", action="append", default=[], help="backend, as in aiter-gluon@LABEL; repeatable")
    parser.add_argument("--aiter-source", action="append", default=[], metavar="DIR[=LABEL]")
    parser.add_argument("--case", action="append", default=[], help="compile for this case id only; repeatable")
    parser.add_argument("--variants", type=Path, default=VARIANTS, help="file of variants")
    parser.add_argument("--hints", action="store_true", help="find which hints each variant needs (slow)")
    parser.add_argument("--baseline", type=Path, help="earlier table to compare with")
    parser.add_argument("--output", type=Path, help="write the table here (JSON)")
    options = parser.parse_args(arguments)

    from harness.backends.aiter_source import name_sources

    # The interpreter would take the place of the kernels, and of Triton's own library, when triton is imported.
    os.environ.pop("TRITON_INTERPRET", None)

    rows: list[Row] = []
    try:
        name_sources(options.aiter_source)
        baseline = read_baseline(options.baseline)
        for name in options.backend or ["gluon-splitkv", "triton-splitkv"]:
            cases = [Case.parse(text) for text in options.case] or read_variants(options.variants, name)
            found, outside = compile_backend(name, cases, hints=options.hints)
            rows += found
            for line in outside:
                print(f"outside the contract: {line}")
    except (ValueError, OSError, RuntimeError) as error:
        print(f"compile: {error}", file=sys.stderr)
        return 2
    print_table(rows, baseline)
    faults = find_faults(rows, baseline)
    for fault in faults:
        print(f"FAIL {fault}")
    print(f"{len(rows)} kernels compiled for gfx950, {len(faults)} faults")
    if options.output is not None:
        options.output.write_text(json.dumps({"rows": [row.as_json() for row in rows]}, indent=1), encoding="utf-8")
    if not rows:
        print("compile: no kernel was compiled", file=sys.stderr)
        return 2
    return 1 if faults else 0


if __name__ == "__main__":
    # Triton's bindings report their own leaks on the way out of the interpreter; there is nothing left to do on that way.
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
