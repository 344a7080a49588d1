"""Kernels of single CDNA4 operations."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def moves(X, Out, n, HOW: gl.constexpr):
    """Move 16 x 64 floats by one way of reading and writing memory."""
    blocked: gl.constexpr = gl.BlockedLayout([1, 4], [4, 16], [4, 1], [1, 0])
    shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    rows = gl.arange(0, 16, gl.SliceLayout(1, blocked))
    columns = gl.arange(0, 64, gl.SliceLayout(0, blocked))
    offsets = rows[:, None] * 64 + columns[None, :]
    live = (rows < n)[:, None]
    if HOW == "buffer":
        z = gl.amd.cdna4.buffer_load(X, offsets, mask=live)
    elif HOW == "buffer other":
        z = gl.amd.cdna4.buffer_load(X, offsets, mask=live, other=5.0)
    elif HOW == "store":
        z = gl.amd.cdna4.buffer_load(X, offsets)
        gl.amd.cdna4.buffer_store(z, ptr=Out, offsets=offsets, mask=live)
        return
    elif HOW == "elements":
        z = gl.amd.cdna4.buffer_load(X, offsets * 7 % 1024, mask=(offsets % 3 == 0), other=-1.0)
    else:
        memory = gl.allocate_shared_memory(gl.float32, [2, 16, 64], shared)
        half = memory.index(1)
        if HOW == "stale":
            half.store(gl.full([16, 64], 9.0, gl.float32, blocked))
        if HOW == "copy":
            gl.amd.cdna4.async_copy.buffer_load_to_shared(half, X, offsets, mask=live)
        elif HOW == "copy other":
            gl.amd.cdna4.async_copy.buffer_load_to_shared(half, X, offsets, mask=live, other=3.0)
        elif HOW == "global" or HOW == "stale":
            gl.amd.cdna4.async_copy.global_load_to_shared(half, X + offsets, mask=live)
        elif HOW == "global other":
            gl.amd.cdna4.async_copy.global_load_to_shared(half, X + offsets, mask=live, other=4.0)
        elif HOW == "unmasked":
            gl.amd.cdna4.async_copy.global_load_to_shared(half, X + offsets)
        elif HOW == "slices":
            lower = gl.arange(0, 8, gl.SliceLayout(1, blocked))
            part = lower[:, None] * 64 + columns[None, :]
            gl.amd.cdna4.async_copy.buffer_load_to_shared(half.slice(8, 8, 0), X, part)
            gl.amd.cdna4.async_copy.buffer_load_to_shared(half.slice(0, 8, 0), X, part + 512)
        gl.amd.cdna4.async_copy.commit_group()
        gl.amd.cdna4.async_copy.wait_group(0)
        z = gl.amd.cdna4.async_copy.load_shared_relaxed(half, blocked)
        if HOW == "other half":
            z = memory.index(0).load(blocked)
    gl.store(Out + offsets, z)


@gluon.jit
def groups(X, Out, WAIT: gl.constexpr, COMMIT: gl.constexpr):
    """Issue three copies and wait for some of them; show which have landed."""
    line: gl.constexpr = gl.BlockedLayout([1], [64], [4], [0])
    shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    at = gl.arange(0, 64, line)
    memory = gl.allocate_shared_memory(gl.float32, [3, 64], shared)
    for i in gl.static_range(3):
        memory.index(i).store(gl.zeros([64], gl.float32, line))
    for i in gl.static_range(3):
        gl.amd.cdna4.async_copy.buffer_load_to_shared(memory.index(i), X, at)
        if i < COMMIT:
            gl.amd.cdna4.async_copy.commit_group()
    gl.amd.cdna4.async_copy.wait_group(WAIT)
    for i in gl.static_range(3):
        gl.store(Out + i * 64 + at, memory.index(i).load(line))


@gluon.jit
def multiply(A, B, C, Out, M: gl.constexpr, N: gl.constexpr, K: gl.constexpr):
    """Multiply matrices with mfma; 8-bit operands as they are."""
    mfma: gl.constexpr = gl.amd.AMDMFMALayout(version=4, instr_shape=[16, 16, 32], transposed=True, warps_per_cta=[1, 4])
    left: gl.constexpr = gl.DotOperandLayout(0, mfma, 8)
    right: gl.constexpr = gl.DotOperandLayout(1, mfma, 8)
    a = gl.load(A + gl.arange(0, M, gl.SliceLayout(1, left))[:, None] * K + gl.arange(0, K, gl.SliceLayout(0, left))[None, :])
    b = gl.load(B + gl.arange(0, K, gl.SliceLayout(1, right))[:, None] * N + gl.arange(0, N, gl.SliceLayout(0, right))[None, :])
    cell = gl.arange(0, M, gl.SliceLayout(1, mfma))[:, None] * N + gl.arange(0, N, gl.SliceLayout(0, mfma))[None, :]
    gl.store(Out + cell, gl.amd.cdna4.mfma(a, b, gl.load(C + cell)))


@gluon.jit
def multiply_scaled(
    A, AScale, B, BScale, Out, AF: gl.constexpr, BF: gl.constexpr, M: gl.constexpr, N: gl.constexpr, KA: gl.constexpr,
    KB: gl.constexpr, K: gl.constexpr,
):  # fmt: skip
    """Multiply microscaled matrices."""
    mfma: gl.constexpr = gl.amd.AMDMFMALayout(version=4, instr_shape=[16, 16, 128], transposed=True, warps_per_cta=[1, 4])
    left: gl.constexpr = gl.DotOperandLayout(0, mfma, 16)
    right: gl.constexpr = gl.DotOperandLayout(1, mfma, 16)
    a = gl.load(A + gl.arange(0, M, gl.SliceLayout(1, left))[:, None] * KA + gl.arange(0, KA, gl.SliceLayout(0, left))[None, :])
    b = gl.load(
        B + gl.arange(0, KB, gl.SliceLayout(1, right))[:, None] * N + gl.arange(0, N, gl.SliceLayout(0, right))[None, :]
    )
    group = gl.arange(0, K // 32, gl.SliceLayout(0, mfma))
    a_scale = gl.load(AScale + gl.arange(0, M, gl.SliceLayout(1, mfma))[:, None] * (K // 32) + group[None, :])
    b_scale = gl.load(BScale + gl.arange(0, N, gl.SliceLayout(1, mfma))[:, None] * (K // 32) + group[None, :])
    out = gl.amd.cdna4.mfma_scaled(a, a_scale, AF, b, b_scale, BF, gl.zeros([M, N], gl.float32, mfma))
    cell = gl.arange(0, M, gl.SliceLayout(1, mfma))[:, None] * N + gl.arange(0, N, gl.SliceLayout(0, mfma))[None, :]
    gl.store(Out + cell, out)
