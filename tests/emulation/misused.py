"""Kernels that misuse the language, each in one way."""

import triton
import triton.language as tl
from triton.experimental.gluon import language as gl

LIMIT = tl.constexpr(7)


@triton.jit
def misused(X, Out, n, HOW: tl.constexpr):
    """Do one thing that must be refused, in the line that a PLANT comment marks."""
    at = tl.arange(0, 16)
    x = tl.load(X + at)
    if HOW == "try":
        try:  # PLANT try
            x = x + 1
        except ValueError:
            x = x + 2
    elif HOW == "with":
        with n:  # PLANT with
            x = x + 1
    elif HOW == "chain":
        x = x + (0 < n < 9)  # PLANT chain
    elif HOW == "lambda":
        x = (lambda y: y)(x)  # PLANT lambda
    elif HOW == "name":
        x = x + nowhere  # noqa: F821 # PLANT name
    elif HOW == "method":
        x = x.cumprod_of(n)  # PLANT method
    elif HOW == "python":
        x = x + [1, 2, 3][5]  # PLANT python
    elif HOW == "argument":
        x = tl.where(x > 0, x)  # PLANT argument
    elif HOW == "constant":
        k: tl.constexpr = n + 1  # PLANT constant
        x = x + k
    elif HOW == "condition":
        if x > 0:  # PLANT condition
            x = x + 1
    elif HOW == "small":
        x = x.to(tl.int8) + 300  # PLANT small
    elif HOW == "float index":
        x = tl.load(X + at * 1.0)  # PLANT float index
    elif HOW == "big float":
        x = (x * 1.0e6).to(tl.float8e4nv).to(tl.int32)  # PLANT big float
    elif HOW == "shift":
        x = x << (n + 40)  # PLANT shift
    elif HOW == "sizes":
        x = x + tl.arange(0, 8)  # PLANT sizes
    elif HOW == "gluon":
        gl.amd.gfx1250.tdm.async_wait(0)  # PLANT gluon
    elif HOW == "assert":
        assert n == 999, "n"  # PLANT assert
    elif HOW == "static":
        tl.static_assert(n == 999)  # PLANT static
    elif HOW == "dead":
        if LIMIT.value > 100:
            nowhere()  # noqa: F821
    tl.store(Out + at, x + LIMIT)


@triton.jit
def narrow(x, SHIFT: tl.constexpr):
    """Overflow inside a function that a kernel calls."""
    amount: tl.constexpr = SHIFT * 10
    return x * (1 << amount)  # PLANT inner


@triton.jit
def outer(X, Out):
    """Call another function twice, with different constants."""
    at = tl.arange(0, 16)
    x = tl.load(X + at)
    y = narrow(x, 1)
    tl.store(Out + at, y + narrow(x, 3))
