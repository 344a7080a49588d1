"""Cases answered by the simulated kernel, right or wrong on purpose, and judged."""

from __future__ import annotations

import dataclasses

from harness.backends.protocol import Output
from harness.case import Case
from harness.inputs import Inputs, make_inputs
from harness.regimes import Limits, Regime, load
from harness.region import Region
from references.arithmetic import Arithmetic, Splits
from references.formats import FORMATS, encode
from tests.simulated import RIGHT, Mistake, simulate

ARITHMETIC = Arithmetic(
    probability="bf16", output="bf16", partial="bf16", tile=64, splits=Splits(kind="even", count=3, tile=64)
)
LIMITS: Limits = load().rows[0].limits
REGIME = Regime(
    name="tested",
    backends=("tested",),
    where=Region(allowed={}),
    arithmetic=ARITHMETIC,
    limits=LIMITS,
    accuracy=load().named("splitkv-bf16").accuracy,
    exact=frozenset(),
    why="for the tests",
)


def regime(**changes: object) -> Regime:
    """Make the tested regime with other parts."""
    return dataclasses.replace(REGIME, **changes)  # type: ignore[arg-type]


def answered(case: Case, rules: Regime = REGIME, mistake: Mistake = RIGHT) -> tuple[Inputs, Output]:
    """Make the inputs of a case and let a simulated kernel of a regime's arithmetic write its answer into them."""
    inputs = make_inputs(case, output_format=rules.arithmetic.output)
    answer = simulate(inputs.problem(), rules.arithmetic, mistake)
    inputs.out.copy_(encode(answer.out, FORMATS[rules.arithmetic.output]))
    if inputs.lse is not None:
        inputs.lse.copy_(answer.lse)
    return inputs, Output(out=inputs.out, lse=inputs.lse)
