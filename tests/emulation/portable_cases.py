"""Cases of the portable kernels: inputs, and what numpy says of them.

1. ``exact`` cases must agree bit for bit wherever they run; the others within ``ulps`` units in the last place of fp32.
2. Integers are chosen so that nothing overflows, matrices so that fp32 sums are exact.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from tests.emulation import portable_kernels as kernels

COUNT = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One launch."""

    #: Its name.
    name: str
    #: The kernel.
    kernel: object
    #: Makes the inputs.
    inputs: Callable[[], list[torch.Tensor]]
    #: Shape and type of the output.
    out: tuple[tuple[int, ...], torch.dtype]
    #: Constants of the launch.
    constants: dict[str, object]
    #: Arguments after the output.
    rest: tuple[int, ...] = ()
    #: What numpy says: inputs as arrays in, output values out. None where only other machines are a twin.
    twin: Callable[..., np.ndarray] | None = None
    #: Allowed difference, units in the last place of fp32; 0 for bit equality.
    ulps: int = 0
    #: The grid.
    grid: tuple[int, ...] = (1,)
    #: Whether it needs lanes of the target as a constant.
    lanes: bool = False
    #: Where the output begins at; zero else.
    tags: frozenset[str] = field(default_factory=frozenset)


def random(dtype: torch.dtype, count: int = COUNT, low: float = -100, high: float = 100, seed: int = 0) -> torch.Tensor:
    generator = np.random.Generator(np.random.Philox(seed))
    values = generator.uniform(low, high, count)
    return torch.from_numpy(values).to(dtype)


def hard(seed: int = 0) -> torch.Tensor:
    """Make fp32 values with zeros, infinities, NaN, ties of bf16 and subnormals among them."""
    bits = np.random.Generator(np.random.Philox(seed)).integers(0, 2**32, COUNT, dtype=np.uint64).astype(np.uint32)
    bits[:40] = (bits[:40] & 0xFFFF0000) | 0x8000
    values = bits.view(np.float32)
    values[40:48] = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, -1e-40, 1.0]
    return torch.from_numpy(values.copy())


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
        _one("negate fp32", "negate", hard, torch.float32, np.negative),
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
        _one("half constant bf16", "half constant", lambda: random(torch.bfloat16, low=1, high=2), torch.bfloat16, None),
        _one("cumsum int32", "cumsum", lambda: random(torch.int32), torch.int32, np.cumsum),
    ]
    for how, low, high, twin in (
        ("exp", -20, 20, np.exp),
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


CASES: dict[str, Case] = {case.name: case for case in (*_pairs(), *_singles(), *_matrices(), *_flows(), *_gluon())}


def launch(
    case: Case, device: str = "cpu", lanes: int = 64, wrap: Callable[[object], object] = lambda kernel: kernel
) -> torch.Tensor:
    """Run a case wherever launches go."""
    inputs = [tensor.to(device) for tensor in case.inputs()]
    shape, dtype = case.out
    out = torch.zeros(shape, dtype=torch.uint8 if dtype.itemsize == 1 else dtype, device=device).view(dtype)
    constants = {**case.constants, **({"LANES": lanes} if case.lanes else {})}
    wrap(case.kernel)[case.grid](*inputs, out, *case.rest, **constants)
    return out.cpu()


def difference(actual: torch.Tensor, expected: torch.Tensor, ulps: int) -> str | None:
    """Say how two outputs differ, or None; a NaN equals a NaN whatever its payload."""
    if actual.is_floating_point():
        if ulps:
            one, two = actual.double(), expected.double()
            unit = torch.from_numpy(np.spacing(np.abs(expected.float().numpy()))).double()
            wrong = (one - two).abs() > ulps * unit
            wrong &= ~(one == two) & ~(one.isnan() & two.isnan())
        else:
            bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[actual.element_size()]
            wrong = actual.view(bits) != expected.view(bits)
            wrong &= ~(actual.float().isnan() & expected.float().isnan())
    else:
        wrong = actual != expected
    if not wrong.any():
        return None
    place = tuple(int(item) for item in torch.nonzero(wrong)[0])
    return f"{int(wrong.sum())} elements differ; at {place} {actual[place].item()} and {expected[place].item()}"
