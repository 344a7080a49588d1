"""Cases of the portable kernels that reduce, move, multiply, branch or go through shared memory."""

import numpy as np
import torch

from tests.emulation import portable_kernels as kernels
from tests.emulation.portable_case import Case, hard, random


def _matrices() -> list[Case]:
    made = []
    reductions = {
        "max": np.max,
        "min": np.min,
        "sum": np.sum,
        "argmax": np.argmax,
        "argmin": np.argmin,
        "xor": lambda x, axis: np.bitwise_xor.reduce(x, axis=axis),
    }
    for how, twin in reductions.items():
        for axis in (0, 1):

            def expected(x: np.ndarray, axis: int = axis, twin: object = twin) -> np.ndarray:
                return twin(x.reshape(16, 32), axis=axis)

            made.append(
                Case(
                    name=f"{how} int32 axis {axis}",
                    kernel=kernels.reduced,
                    inputs=lambda: [random(torch.int32, 512)],
                    out=((32 if axis == 0 else 16,), torch.int32),
                    twin=expected,
                    constants={"HOW": how, "ROWS": 16, "COLUMNS": 32, "AXIS": axis},
                )
            )
    for how, twin in (("max", np.fmax.reduce), ("min", np.fmin.reduce)):
        made.append(
            Case(
                name=f"{how} fp32 with NaN",
                kernel=kernels.reduced,
                inputs=lambda: [torch.cat([hard(1), hard(2)])],
                out=((16,), torch.float32),
                twin=lambda x, twin=twin: twin(x.reshape(16, 32), axis=1),
                constants={"HOW": how, "ROWS": 16, "COLUMNS": 32, "AXIS": 1},
            )
        )
    moves = {
        "trans": lambda x: x.T,
        "reshape": lambda x: x,
        "permute": lambda x: x.reshape(4, 4, 32).transpose(2, 0, 1),
        "join": lambda x: x.reshape(16, 16, 2)[..., ::-1],
        "broadcast": lambda x: np.broadcast_to(x.max(1)[:, None], (16, 32)).T,
    }
    for how, twin in moves.items():
        made.append(
            Case(
                name=f"{how} fp32",
                kernel=kernels.moved,
                inputs=lambda: [random(torch.float32, 512)],
                out=((512,), torch.float32),
                twin=lambda x, twin=twin: twin(x.reshape(16, 32)).reshape(-1),
                constants={"HOW": how, "ROWS": 16, "COLUMNS": 32},
            )
        )
    for dtype, out in ((torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.int8, torch.int32)):
        made.append(
            Case(
                name=f"product {dtype}".replace("torch.", ""),
                kernel=kernels.product,
                inputs=lambda dtype=dtype, out=out: [
                    random(torch.int32, 16 * 64, -8, 8).to(dtype),
                    random(torch.int32, 64 * 32, -8, 8, 1).to(dtype),
                    random(torch.int32, 16 * 32, -99, 99, 2).to(out),
                ],
                out=((16, 32), out),
                constants={"M": 16, "N": 32, "K": 64},
                twin=lambda a, b, c: (
                    a.reshape(16, 64).astype(np.int64) @ b.reshape(64, 32).astype(np.int64) + c.reshape(16, 32)
                ),
            )
        )
    return made


def _flows() -> list[Case]:
    def ranged(x: np.ndarray, n: int) -> np.ndarray:
        z, flip = x.copy(), 0
        for i in range(1, n, 3):
            z = z + i * (1 - 2 * flip)
            flip = int(np.fmod(flip - 1, 2))
        return z

    twins = {
        "range": ranged,
        "while": lambda x, n: x + sum(range(n, 0, -2)),
        "branch": lambda x, n: x + (-(n // 3) if 10 < n < 1000 else 5),
        "otherwise": lambda x, n: x + (n if n > 10 else -n),
        "static": lambda x, n: x + 14,
        "call": lambda x, n: x + 16,
        "not": lambda x, n: x + (1 if n != 20 else 2),
        "wide": lambda x, n: x.astype(np.int64) * 1000,
    }
    made = [
        Case(
            name=f"{how} n={n}",
            kernel=kernels.controlled,
            inputs=lambda: [random(torch.int32, 16)],
            out=((16,), torch.int32),
            rest=(n,),
            constants={"HOW": how},
            twin=lambda x, twin=twin, n=n: twin(x, n),
        )
        for how, twin in twins.items()
        for n in (1, 7, 20)
    ]
    made += [
        Case(
            name="masked other",
            kernel=kernels.masked,
            inputs=lambda: [random(torch.int32, 100)],
            out=((100,), torch.int32),
            rest=(90,),
            constants={"N": 32, "HOW": "other"},
            grid=(4,),
            twin=lambda x: np.where(np.arange(100) < 90, x * 2, np.where(np.arange(100) < 93, -14, 0)),
        ),
        Case(
            name="programs",
            kernel=kernels.masked,
            inputs=lambda: [random(torch.int32, 100)],
            out=((100,), torch.int32),
            rest=(100,),
            constants={"N": 32, "HOW": "programs"},
            grid=(4,),
            twin=lambda x: 400 + np.arange(100) // 32,
        ),
        Case(
            name="atomic add",
            kernel=kernels.masked,
            inputs=lambda: [random(torch.int32, 100)],
            out=((32,), torch.int32),
            rest=(100,),
            constants={"N": 32, "HOW": "count"},
            grid=(4,),
            twin=lambda x: np.pad(x, (0, 28)).reshape(4, 32).sum(0),
        ),
        Case(
            name="types",
            kernel=kernels.types,
            inputs=lambda: [
                torch.ones(1, dtype=dtype)
                for dtype in (
                    torch.int8,
                    torch.int16,
                    torch.int32,
                    torch.int64,
                    torch.uint8,
                    torch.bfloat16,
                    torch.float16,
                    torch.float32,
                )
            ],
            out=((1,), torch.int32),
            constants={},
            twin=lambda *_: np.ones(1, np.int32),
        ),
    ]
    return made


def _gluon() -> list[Case]:
    twins = {
        "index": lambda x: x,
        "permute": lambda x: (x + 1).T,
        "sum": lambda x: np.broadcast_to(x.max(1)[:, None], (32, 32)),
        "convert": lambda x: x * 2,
        "where": lambda x: np.where(x < 0.5, x, -x),
    }
    return [
        Case(
            name=f"gluon {how}",
            kernel=kernels.through_shared,
            inputs=lambda: [random(torch.float32, 1024)],
            out=((32, 32), torch.float32),
            constants={"HOW": how},
            twin=lambda x, twin=twin: twin(x.reshape(32, 32)),
            lanes=True,
        )
        for how, twin in twins.items()
    ]


FLOWS: tuple[Case, ...] = (*_matrices(), *_flows(), *_gluon())
