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
