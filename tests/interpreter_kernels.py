"""Small Triton kernels, one operation each, and a launcher with and without the mends."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import triton
import triton.language as tl

from harness.emulation.interpreter import TRITON_RELEASE, interpreted, mended

#: Why the interpreter's tests cannot run here, or None.
FOREIGN = (
    None
    if triton.__version__.startswith(TRITON_RELEASE)
    else f"the mends are for the interpreter of Triton {TRITON_RELEASE}, and this is {triton.__version__}"
)


@triton.jit
def cast(source, target, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    tl.store(target + at, tl.load(source + at).to(target.dtype.element_ty))


@triton.jit
def cast_toward_zero(source, target, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    tl.store(target + at, tl.load(source + at).to(target.dtype.element_ty, fp_downcast_rounding="rtz"))


@triton.jit
def product(left, right, out, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    at = tl.arange(0, SIZE)
    cell = at[:, None] * SIZE + at[None, :]
    found = tl.dot(tl.load(left + cell), tl.load(right + cell), input_precision=PRECISION)
    tl.store(out + cell, found)


@triton.jit
def combine(left, right, out, COUNT: tl.constexpr, HOW: tl.constexpr):
    at = tl.arange(0, COUNT)
    x, y = tl.load(left + at), tl.load(right + at)
    if HOW == "add":
        z = x + y
    elif HOW == "multiply":
        z = x * y
    elif HOW == "subtract":
        z = x - y
    elif HOW == "negate":
        z = -x
    elif HOW == "maximum":
        z = tl.maximum(x, y)
    elif HOW == "less":
        z = (x < y).to(tl.float32)
    elif HOW == "equal":
        z = (x == y).to(tl.float32)
    elif HOW == "fma":
        z = tl.fma(x, y, x)
    tl.store(out + at, z)


@triton.jit
def scaled(source, target, factor, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    tl.store(target + at, tl.load(source + at) * factor)


@triton.jit
def take(source, target, first, COUNT: tl.constexpr, LIMIT: tl.constexpr):
    at = tl.arange(0, COUNT)
    found = tl.load(source + first + at, mask=at < LIMIT)
    tl.store(target + at, found)


@triton.jit
def put(target, first, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    tl.store(target + first + at, at.to(tl.float32))


@triton.jit
def indirect(source, target, stride, page):
    wanted = tl.load(page)
    tl.store(target, tl.load(source + wanted * stride))


@triton.jit
def total_of(source, target, COUNT: tl.constexpr, HOW: tl.constexpr):
    values = tl.load(source + tl.arange(0, COUNT))
    if HOW == "sum":
        tl.store(target, tl.sum(values, 0))
    elif HOW == "max":
        tl.store(target, tl.max(values, 0))
    elif HOW == "argmax":
        tl.store(target, tl.argmax(values, 0))


@triton.jit
def count_up(target):
    tl.atomic_add(target, 1)


@triton.jit
def last_program(target):
    tl.store(target, tl.program_id(0))


def run(kernel: Any, *args: Any, grid: tuple[int, ...] = (1,), mend: bool = True, **constants: Any) -> None:
    with mended() if mend else nullcontext():
        interpreted(kernel)[grid](*args, **constants)
