"""Kernels of operations that every target has, for a CPU under emulation, Triton's interpreter, and a GPU natively.

1. Each operation stands alone: a case that differs names what differs.
2. Types of results are claimed in the kernels themselves, by static_assert: a compiler and the emulator must both agree.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@triton.jit
def pairs(X, Y, Out, N: tl.constexpr, HOW: tl.constexpr):
    """Combine two vectors."""
    at = tl.arange(0, N)
    x = tl.load(X + at)
    y = tl.load(Y + at)
    if HOW == "add":
        z = x + y
    elif HOW == "subtract":
        z = x - y
    elif HOW == "multiply":
        z = x * y
    elif HOW == "divide":
        z = x / y
    elif HOW == "quotient":
        z = x // y
    elif HOW == "remainder":
        z = x % y
    elif HOW == "and":
        z = x & y
    elif HOW == "or":
        z = x | y
    elif HOW == "xor":
        z = x ^ y
    elif HOW == "left":
        z = x << y
    elif HOW == "right":
        z = x >> y
    elif HOW == "maximum":
        z = tl.maximum(x, y)
    elif HOW == "minimum":
        z = tl.minimum(x, y)
    elif HOW == "where":
        z = tl.where(x < y, x, y + 1)
    elif HOW == "less":
        z = x < y
    elif HOW == "at most":
        z = x <= y
    elif HOW == "equal":
        z = x == y
    elif HOW == "unequal":
        z = x != y
    elif HOW == "logical":
        z = (x > 0) & ((y > 0) | (x > y)) & ~(x == y)
    elif HOW == "umulhi":
        z = tl.umulhi(x, y)
    elif HOW == "fma":
        z = tl.fma(x, y, y)
    elif HOW == "clamp":
        z = tl.clamp(x, -1.0, y)
    tl.store(Out + at, z)


@triton.jit
def single(X, Out, N: tl.constexpr, HOW: tl.constexpr):
    """Change a vector element by element."""
    at = tl.arange(0, N)
    x = tl.load(X + at)
    if HOW == "cast":
        z = x.to(Out.dtype.element_ty)
    elif HOW == "bits":
        z = x.to(Out.dtype.element_ty, bitcast=True)
    elif HOW == "negate":
        z = -x
    elif HOW == "invert":
        z = ~x
    elif HOW == "abs":
        z = tl.abs(x)
    elif HOW == "exp":
        z = tl.exp(x)
    elif HOW == "exp2":
        z = tl.exp2(x)
    elif HOW == "log":
        z = tl.log(x)
    elif HOW == "log2":
        z = tl.log2(x)
    elif HOW == "sqrt":
        z = tl.sqrt_rn(x)
    elif HOW == "rsqrt":
        z = tl.rsqrt(x)
    elif HOW == "floor":
        z = tl.floor(x)
    elif HOW == "ceil":
        z = tl.ceil(x)
    elif HOW == "constants":
        z = (2 * x + 3 - x // 7 + (1 - x)) % 1000
    elif HOW == "half constant":
        z = x * 0.1 + 0.3
    elif HOW == "cumsum":
        z = tl.cumsum(x, 0)
    tl.store(Out + at, z)


@triton.jit
def reduced(X, Out, HOW: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, AXIS: tl.constexpr):
    """Reduce a matrix along an axis."""
    x = tl.load(X + tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :])
    if HOW == "max":
        z = tl.max(x, AXIS)
    elif HOW == "min":
        z = tl.min(x, AXIS)
    elif HOW == "sum":
        z = tl.sum(x, AXIS)
    elif HOW == "xor":
        z = tl.xor_sum(x, AXIS)
    elif HOW == "argmax":
        z = tl.argmax(x, AXIS)
    elif HOW == "argmin":
        z = tl.argmin(x, AXIS)
    tl.store(Out + tl.arange(0, COLUMNS if AXIS == 0 else ROWS), z)


@triton.jit
def moved(X, Out, HOW: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Move the elements of a matrix without changing them."""
    size: tl.constexpr = ROWS * COLUMNS
    x = tl.load(X + tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :])
    if HOW == "trans":
        z = tl.trans(x)
    elif HOW == "reshape":
        z = tl.reshape(x, [COLUMNS, ROWS])
    elif HOW == "permute":
        z = tl.reshape(tl.permute(tl.reshape(x, [4, ROWS // 4, COLUMNS]), [2, 0, 1]), [COLUMNS, ROWS])
    elif HOW == "join":
        left, right = tl.split(tl.reshape(x, [ROWS, COLUMNS // 2, 2]))
        z = tl.reshape(tl.join(right, left), [COLUMNS, ROWS])
    elif HOW == "broadcast":
        column = tl.max(x, 1)
        z = tl.trans(tl.broadcast_to(tl.expand_dims(column, 1), [ROWS, COLUMNS]))
    tl.store(Out + tl.arange(0, size), tl.reshape(z, [size]))


@triton.jit
def step(value, by: tl.constexpr):
    """Add a constant: a function that a kernel calls."""
    kept: tl.constexpr = by * 2
    return value + kept


@triton.jit
def controlled(X, Out, n, HOW: tl.constexpr):
    """Loops, branches and constants that become tensors."""
    at = tl.arange(0, 16)
    x = tl.load(X + at)
    if HOW == "range":
        z = x
        flip = 0
        for i in range(1, n, 3):
            z = z + i * (1 - 2 * flip)
            flip = (flip - 1) % 2  # of tensors, the remainder of -1 is -1
    elif HOW == "while":
        z = x
        left = n
        while left > 0:
            z = z + left
            left -= 2
    elif HOW == "branch":
        k = 5
        if n > 10 and n < 1000:
            k = n // -3
        z = x + k
    elif HOW == "otherwise":
        z = x + (n if n > 10 else -n)
    elif HOW == "static":
        z = x
        for i in tl.static_range(4):
            z += i * i
    elif HOW == "call":
        z = step(step(x, 3), 5)
    elif HOW == "not":
        z = x + (1 if not n == 20 else 2)
    elif HOW == "wide":
        # int64 from a cast, not from a constant: 3 billion would wrap otherwise
        z = (x.to(tl.int64) * 1000000000 // 1000000).to(tl.int32)
    tl.store(Out + at, z)


@triton.jit
def masked(X, Out, n, N: tl.constexpr, HOW: tl.constexpr):
    """Load and store under masks, several programs."""
    at = tl.program_id(0) * N + tl.arange(0, N)
    if HOW == "other":
        tl.store(Out + at, tl.load(X + at, mask=at < n, other=-7) * 2, mask=at < n + 3)
    elif HOW == "programs":
        tl.store(Out + at, tl.num_programs(0) * 100 + tl.program_id(0), mask=at < n)
    elif HOW == "count":
        tl.atomic_add(Out + tl.arange(0, N), tl.load(X + at, mask=at < n, other=0))


@triton.jit
def product(A, B, C, Out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """Multiply matrices and add."""
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a = tl.load(A + m[:, None] * K + k[None, :])
    b = tl.load(B + k[:, None] * N + n[None, :])
    c = tl.load(C + m[:, None] * N + n[None, :])
    tl.store(Out + m[:, None] * N + n[None, :], tl.dot(a, b, c, out_dtype=c.dtype))


@triton.jit
def types(I8, I16, I32, I64, U8, BF, HF, F32, Out):
    """Claim the type of results: a wrong one fails to compile."""
    i8, i16, i32, i64, u8 = tl.load(I8), tl.load(I16), tl.load(I32), tl.load(I64), tl.load(U8)
    bf, hf, f32 = tl.load(BF), tl.load(HF), tl.load(F32)
    tl.static_assert((i32 + i32).dtype == tl.int32)
    tl.static_assert((i32 * 1000).dtype == tl.int32)
    tl.static_assert((i32 + i64).dtype == tl.int64)
    tl.static_assert((i8 + i16).dtype == tl.int16)
    tl.static_assert((i8 + 1).dtype == tl.int8)
    tl.static_assert((i8 + u8).dtype == tl.uint8)
    tl.static_assert((i16 + u8).dtype == tl.int16)
    tl.static_assert((i32 / i32).dtype == tl.float32)
    tl.static_assert((i32 + 1.5).dtype == tl.float32)
    tl.static_assert((i32 * f32).dtype == tl.float32)
    tl.static_assert((bf + bf).dtype == tl.bfloat16)
    tl.static_assert((bf * 2.5).dtype == tl.bfloat16)
    tl.static_assert((bf * 2).dtype == tl.bfloat16)
    tl.static_assert((bf / bf).dtype == tl.float32)
    tl.static_assert((bf + hf).dtype == tl.float16)
    tl.static_assert((bf + f32).dtype == tl.float32)
    tl.static_assert((hf + f32).dtype == tl.float32)
    tl.static_assert((i32 < i64).dtype == tl.int1)
    tl.static_assert((i64 // 3).dtype == tl.int64)
    tl.static_assert(tl.maximum(i32, 3).dtype == tl.int32)
    tl.static_assert(tl.where(i32 > 0, bf, 0.0).dtype == tl.bfloat16)
    tl.static_assert(tl.sum(tl.full([4], 1, tl.int8), 0).dtype == tl.int32)
    tl.static_assert(tl.max(tl.full([4], 1, tl.bfloat16), 0).dtype == tl.float32)
    tl.static_assert(tl.program_id(0).dtype == tl.int32)
    tl.store(Out, i32)


@gluon.jit
def through_shared(X, Out, HOW: gl.constexpr, LANES: gl.constexpr):
    """Take a matrix through shared memory: a Gluon kernel that every target has."""
    blocked: gl.constexpr = gl.BlockedLayout([1, 4], [LANES // 8, 8], [4, 1], [1, 0])
    shared: gl.constexpr = gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[1, 0])
    rows = gl.arange(0, 32, gl.SliceLayout(1, blocked))
    columns = gl.arange(0, 32, gl.SliceLayout(0, blocked))
    offsets = rows[:, None] * 32 + columns[None, :]
    x = gl.load(X + offsets)
    memory = gl.allocate_shared_memory(gl.float32, [2, 32, 32], shared)
    memory.index(1).store(x)
    memory.index(0).store(x + 1.0)
    if HOW == "index":
        z = memory.index(1).load(blocked)
    elif HOW == "permute":
        z = memory.index(0).permute([1, 0]).load(blocked)
    elif HOW == "sum":
        y = memory.index(1).load(blocked)
        z = y * 0.0 + gl.max(y, 1)[:, None]
    elif HOW == "convert":
        other: gl.constexpr = gl.BlockedLayout([4, 1], [8, LANES // 8], [1, 4], [0, 1])
        z = gl.convert_layout(gl.convert_layout(memory.index(1).load(blocked), other) * 2.0, blocked)
    elif HOW == "where":
        z = gl.where(x < gl.full([32, 32], 0.5, gl.float32, blocked), x, -x)
    gl.store(Out + offsets, z)
