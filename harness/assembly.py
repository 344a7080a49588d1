"""What a compiled AMD kernel costs, read from its assembly.

Rules kept here:

1. Numbers come from the compiler's own metadata and comments; one that is not there is an error, never a zero.
2. LDS is what the compiler reserved for the launch: Triton's shared memory is dynamic, so the assembly says 0.

Source: the metadata notes of an AMDGPU code object (LLVM, "User Guide for AMDGPU Backend", code object V5).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields

_PATTERNS = {
    "vgpr": r"^\s*-?\s*\.vgpr_count:\s*(\d+)",
    "agpr": r"^\s*-?\s*\.agpr_count:\s*(\d+)",
    "sgpr": r"^\s*-?\s*\.sgpr_count:\s*(\d+)",
    "vgpr_spills": r"^\s*-?\s*\.vgpr_spill_count:\s*(\d+)",
    "sgpr_spills": r"^\s*-?\s*\.sgpr_spill_count:\s*(\d+)",
    "scratch": r"^\s*-?\s*\.private_segment_fixed_size:\s*(\d+)",
    "code": r"^; codeLenInByte = (\d+)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What one kernel takes of a compute unit."""

    #: Vector registers a lane, accumulation registers counted in.
    vgpr: int
    #: Accumulation registers among them.
    agpr: int
    #: Scalar registers a wave.
    sgpr: int
    #: Vector registers spilled.
    vgpr_spills: int
    #: Scalar registers spilled.
    sgpr_spills: int
    #: Scratch memory a lane, bytes.
    scratch: int
    #: LDS a work group, bytes.
    lds: int
    #: Code, bytes.
    code: int

    @property
    def spills(self) -> int:
        """Registers spilled, of both kinds."""
        return self.vgpr_spills + self.sgpr_spills

    def as_numbers(self) -> dict[str, int]:
        """Give the numbers by name, in the order of a table."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def read_resources(assembly: str, *, lds: int) -> Resources:
    """Read a kernel's resources from its AMD assembly and the LDS (bytes) that its launch reserves.

    Raises: ValueError, naming the number that the assembly does not state.
    """
    numbers = {}
    for name, pattern in _PATTERNS.items():
        match = re.search(pattern, assembly, re.MULTILINE)
        if match is None:
            raise ValueError(f"the assembly states no {name}: it is not AMD assembly with metadata, or of a new form")
        numbers[name] = int(match.group(1))
    return Resources(lds=lds, **numbers)
