"""Cases of the portable kernels: inputs, and what numpy says of them.

1. Integers are chosen so that nothing overflows, matrices so that fp32 sums are exact.
2. What depends on the Triton at hand is left out: up to 3.6 a negation is a difference from 0, so that -(+0) is +0.
"""

from dataclasses import replace

import numpy as np
import torch

from tests.emulation import portable_kernels as kernels
from tests.emulation.portable_case import COUNT, Case, hard, random
from tests.emulation.portable_flows import FLOWS


def _pairs() -> list[Case]:
    made = []
    integer = {
        "add": np.add,
        "subtract": np.subtract,
        "multiply": np.multiply,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
        "maximum": np.maximum,
        "minimum": np.minimum,
        "where": lambda x, y: np.where(x < y, x, y + 1),
        "quotient": lambda x, y: np.trunc(x / y).astype(np.int64),
        "remainder": np.fmod,
        "less": np.less,
        "at most": np.less_equal,
        "equal": np.equal,
        "unequal": np.not_equal,
        "logical": lambda x, y: (x > 0) & ((y > 0) | (x > y)) & ~(x == y),
    }
    for how, twin in integer.items():
        for dtype in (torch.int32, torch.int64, torch.int8):
            if dtype is torch.int8 and how == "multiply":
                continue

            def inputs(dtype: torch.dtype = dtype) -> list[torch.Tensor]:
                top = 60 if dtype is torch.int8 else 30000
                x, y = (random(dtype, low=-top, high=top, seed=seed) for seed in (1, 2))
                return [x, torch.where(y == 0, torch.ones_like(y), y)]

            made.append(_pair(f"{how} {dtype}"[:99].replace("torch.", ""), how, inputs, dtype, twin))
    for how, twin in (("left", np.left_shift), ("right", np.right_shift)):
        made.append(
            _pair(f"{how} int32", how, lambda: [random(torch.int32), random(torch.int32, low=0, high=8)], torch.int32, twin)
        )
    made.append(
        _pair(
            "umulhi int32",
            "umulhi",
            lambda: [random(torch.int32, low=0, high=2e9), random(torch.int32, low=0, high=2e9, seed=3)],
            torch.int32,
            lambda x, y: (x.astype(np.uint64) * y.astype(np.uint64)) >> np.uint64(32),
        )
    )
    wide = {"add": np.add, "subtract": np.subtract, "multiply": np.multiply, "maximum": np.fmax, "minimum": np.fmin}
    for how, twin in wide.items():
        made.append(_pair(f"{how} fp32", how, lambda: [hard(1), hard(2)], torch.float32, twin))
        for dtype in (torch.bfloat16, torch.float16):
            name = f"{how} {dtype}".replace("torch.", "")
            made.append(_pair(name, how, lambda dtype=dtype: [random(dtype), random(dtype, seed=5)], dtype, twin))
    for how, twin in (("less", np.less), ("equal", np.equal)):
        made.append(_pair(f"{how} fp32", how, lambda: [hard(1), hard(2)], torch.int32, twin))
    made.append(
        _pair(
            "divide fp32", "divide", lambda: [random(torch.float32), random(torch.float32, seed=4)], torch.float32, np.divide, 2
        )
    )
    made.append(
        _pair(
            "divide int32",
            "divide",
            lambda: [random(torch.int32), random(torch.int32, low=1, seed=4)],
            torch.float32,
            lambda x, y: x.astype(np.float32) / y.astype(np.float32),
            2,
        )
    )
    made.append(
        _pair(
            "fma fp32",
            "fma",
            lambda: [random(torch.float32), random(torch.float32, seed=4)],
            torch.float32,
            lambda x, y: x.astype(np.float64) * y + y,
            0,
        )
    )
    made.append(
        _pair(
            "clamp fp32",
            "clamp",
            lambda: [random(torch.float32, low=-3, high=3), random(torch.float32, low=0, high=2, seed=4)],
            torch.float32,
            lambda x, y: np.fmin(np.fmax(x, np.float32(-1)), y),
        )
    )
    return made


def _pair(name: str, how: str, inputs: object, dtype: torch.dtype, twin: object, ulps: int = 0) -> Case:
    return Case(
        name=name,
        kernel=kernels.pairs,
        inputs=inputs,
        out=((COUNT,), dtype),
        constants={"N": COUNT, "HOW": how},
        twin=twin,
        ulps=ulps,
    )


def _one(name: str, how: str, inputs: object, dtype: torch.dtype, twin: object, ulps: int = 0) -> Case:
    return Case(
        name=name,
        kernel=kernels.single,
        inputs=lambda: [inputs()],
        out=((COUNT,), dtype),
        constants={"N": COUNT, "HOW": how},
        twin=twin,
        ulps=ulps,
    )


def _halves(x: np.ndarray) -> np.ndarray:
    tenth, third = (torch.tensor(value, dtype=torch.bfloat16) for value in (0.1, 0.3))
    halves: np.ndarray = (torch.from_numpy(x).bfloat16() * tenth + third).float().numpy()
    return halves


def _singles() -> list[Case]:
    eight = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    made = [
        _one("cast fp32 to bf16", "cast", hard, torch.bfloat16, lambda x: x),
        _one("cast fp32 to fp16", "cast", lambda: random(torch.float32, low=-1, high=1), torch.float16, lambda x: x),
        _one("cast fp32 to int32", "cast", lambda: random(torch.float32), torch.int32, np.trunc),
        _one("cast int32 to fp32", "cast", lambda: random(torch.int32, low=-2e9, high=2e9), torch.float32, lambda x: x),
        _one(
            "cast int64 to int32",
            "cast",
            lambda: random(torch.int64, low=-9e15, high=9e15),
            torch.int32,
            lambda x: x.astype(np.int32),
        ),
        _one(
            "cast int32 to uint8",
            "cast",
            lambda: random(torch.int32, low=-2e9, high=2e9),
            torch.uint8,
            lambda x: x.astype(np.uint8),
        ),
        _one("cast uint8 to int32", "cast", lambda: eight, torch.int32, lambda x: x),
        _one("cast e4m3fn to fp32", "cast", lambda: eight.view(torch.float8_e4m3fn), torch.float32, lambda x: x),
        _one("cast e5m2 to fp32", "cast", lambda: eight.view(torch.float8_e5m2), torch.float32, lambda x: x),
        _one(
            "cast fp32 to e4m3fn", "cast", lambda: random(torch.float32, low=-440, high=440), torch.float8_e4m3fn, lambda x: x
        ),
        _one("cast fp32 to e5m2", "cast", lambda: random(torch.float32, low=-1, high=1), torch.float8_e5m2, lambda x: x),
        _one("bits of fp32", "bits", hard, torch.int32, lambda x: x.view(np.int32)),
        _one("negate fp32", "negate", lambda: torch.where(hard() == 0, -0.0, hard()), torch.float32, np.negative),
        _one("negate int32", "negate", lambda: random(torch.int32), torch.int32, np.negative),
        _one("invert int32", "invert", lambda: random(torch.int32), torch.int32, np.invert),
        _one("abs fp32", "abs", hard, torch.float32, np.abs),
        _one("floor fp32", "floor", lambda: random(torch.float32), torch.float32, np.floor),
        _one("ceil fp32", "ceil", lambda: random(torch.float32), torch.float32, np.ceil),
        _one("sqrt fp32", "sqrt", lambda: random(torch.float32, low=0), torch.float32, np.sqrt),
        _one(
            "constants int32",
            "constants",
            lambda: random(torch.int32),
            torch.int32,
            lambda x: np.fmod(2 * x + 3 - np.trunc(x / 7) + (1 - x), 1000),
        ),
        replace(
            _one("half constant bf16", "half constant", lambda: random(torch.bfloat16, low=1, high=2), torch.bfloat16, _halves),
            fused=1,
        ),
        _one("cumsum int32", "cumsum", lambda: random(torch.int32), torch.int32, np.cumsum),
    ]
    for how, low, high, twin in (
        # The product with 1 / ln 2 is rounded on every target.
        ("exp", -5, 5, lambda x: np.exp2((x.astype(np.float32) * np.float32(1 / np.log(2))).astype(np.float64))),
        ("exp2", -30, 30, np.exp2),
        ("log", 1e-3, 1e3, np.log),
        ("log2", 1e-3, 1e3, np.log2),
        ("rsqrt", 1e-3, 1e3, lambda x: 1 / np.sqrt(x)),
    ):
        # Near 1 a logarithm loses digits of its argument's rounding: the bound is on values away from it.
        limit = 64 if how.startswith("log") else 8
        made.append(
            _one(
                f"{how} fp32",
                how,
                lambda low=low, high=high: random(torch.float32, low=low, high=high),
                torch.float32,
                lambda x, twin=twin: twin(x.astype(np.float64)),
                limit,
            )
        )
    return made


CASES: dict[str, Case] = {case.name: case for case in (*_pairs(), *_singles(), *FLOWS)}
