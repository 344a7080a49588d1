"""A meaning on the CPU for kernels written for a GPU."""

from harness.emulation.extremes import run_all_extremes
from harness.emulation.findings import KINDS, EmulationFault, Finding
from harness.emulation.session import Session, emulate

__all__ = ["KINDS", "EmulationFault", "Finding", "Session", "emulate", "run_all_extremes"]
