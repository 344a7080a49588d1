"""The portable kernels, emulated on the CPU and run natively on the GPU at hand: do they agree?

1. Exact cases must agree bit for bit, the others within the units in the last place that the case allows.
2. A case that does not compile on this Triton is counted as not run, with the compiler's last line; it is not a pass.
3. The exit status is the number of cases that differ.

Run ``python -m tests.native.compare [PART OF A NAME]`` from the root of the repository.
"""

import sys

import torch
import triton

from harness.emulation import emulate
from tests.emulation.portable_case import difference, launch
from tests.emulation.portable_cases import CASES
from tests.native.asked import Asked


def compared(given: Asked) -> bool:
    """Compare all of them."""
    return main() == 0


def main(part: str = "") -> int:
    """Compare every case whose name holds a text."""
    lanes = 64 if torch.version.hip else 32
    print(f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}, triton {triton.__version__}")
    agree, differ, not_run = 0, 0, 0
    for case in CASES.values():
        if part not in case.name:
            continue
        try:
            native = launch(case, device="cuda", lanes=lanes)
        except Exception as error:
            not_run += 1
            print(f"not run  {case.name}: {str(error).strip().splitlines()[-1][:160]}")
            continue
        with emulate():
            emulated = launch(case, lanes=lanes)
        found = difference(emulated, native, case.ulps or case.fused)
        agree, differ = agree + (found is None), differ + (found is not None)
        if found:
            print(f"DIFFERS  {case.name}: {found} (emulated, native)")
    print(f"{agree} agree, {differ} differ, {not_run} were not run")
    return differ


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
