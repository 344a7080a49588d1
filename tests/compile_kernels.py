"""Kernels that the tests of compilation compile: one that compiles, one that cannot."""

import triton
import triton.language as tl


@triton.jit
def copy(source, target, stride, SIZE: tl.constexpr):
    """Copy with a stride."""
    at = tl.arange(0, SIZE)
    tl.store(target + at * stride, tl.load(source + at))


@triton.jit
def wrong(source, target, stride, SIZE: tl.constexpr):
    """Use a name that there is not."""
    at = tl.arange(0, SIZE)
    tl.store(target + at, tl.no_such(source + at))


def results() -> dict:
    """Compile the kernels in this process, which must not have Triton's interpreter switched on."""
    import torch

    from harness.backends.launches import compile_launch, needed_hints, recorded

    data = torch.zeros(4096)

    def launched(kernel, offset=0):
        with recorded() as launches:
            kernel[(1,)](data[offset:], data, 64, SIZE=64)
        return launches[0]

    aligned = launched(copy)
    compiled = [compile_launch(aligned), compile_launch(launched(copy, offset=1)), compile_launch(launched(wrong))]
    return {
        "ran": float(data.sum()) != 0,
        "vgpr": compiled[0].resources.vgpr,
        "errors": [one.error for one in compiled],
        "divisible": [one.divisible for one in compiled],
        "within_2gib": compiled[0].within_2gib,
        "needs": needed_hints(aligned, compiled[0]),
    }


if __name__ == "__main__":
    import json
    import os
    import sys

    print(json.dumps(results()))
    sys.stdout.flush()
    os._exit(0)  # Triton's bindings report their own leaks on the way out
