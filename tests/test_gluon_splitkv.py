"""gluon-splitkv keeps the protocol, answers right at every extreme, and shows a fault planted in it."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", minversion="3.6")

from harness.backends.conformance import CHECKS, PROBES, Check
from harness.backends.gluon_splitkv import SPLITS, GluonSplitKV, make
from harness.backends.protocol import Unsupported
from harness.case import Case
from harness.emulation import EmulationFault
from harness.inputs import make_inputs
from references.oracle import oracle

CPU = torch.device("cpu")
CASES = (
    Case(heads=12, lengths=(130,)),
    Case(heads=1, lengths=(1, 2, 64, 65)),
    Case(heads=17, lengths=(300,), cache_format="e4m3fn", cache_scale=0.37, placement="permuted"),
    Case(heads=16, query_tokens=4, lengths=(3, 0, 66, 200), page_size=16, table="ragged", placement="scattered"),
    Case(heads=33, query_tokens=2, lengths=(600, 70), cache_format="e4m3fn", page_size=64, query_layout="fused"),
    Case(heads=5, lengths=(90, 33), token_padding=8, page_padding=64, page_size=3, query_layout="transposed", lse=False),
)


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_it_keeps_the_protocol(check: Check) -> None:
    assert check(make("gluon-splitkv"), CPU, PROBES) == []


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_is_right_and_leaves_everything_else_alone(case: Case) -> None:
    inputs = make_inputs(case)
    output = make("gluon-splitkv").run(inputs)
    truth = oracle(inputs.problem())
    # Probabilities and outputs are rounded to bf16 once each: an element errs by 2^-8 of the largest value at most.
    bound = 2.0**-7 * truth.out.abs().amax(-1, keepdim=True)
    assert ((output.out.double() - truth.out).abs() <= bound).all()
    if case.lse:
        seen = torch.isfinite(truth.lse)
        assert output.lse is not None
        assert ((output.lse.double() - truth.lse)[seen].abs() <= 2.0**-16 * (1 + truth.lse[seen].abs())).all()
        assert torch.isneginf(output.lse[~seen]).all()
    assert inputs.violations() == []
    assert output.what_ran["splits"] == SPLITS


def test_a_pool_above_2_gib_with_live_rows_past_the_line_needs_no_memory_of_its_size() -> None:
    case = Case(heads=4, lengths=(40,), placement="high", cache_format="e4m3fn", pool_rows=2**22)
    inputs = make_inputs(case)
    assert inputs.cache.numel() > 2**31
    output = make("gluon-splitkv").run(inputs)
    truth = oracle(inputs.problem())
    assert ((output.out.double() - truth.out).abs() <= 2.0**-7 * truth.out.abs().amax(-1, keepdim=True)).all()


def test_a_case_outside_the_contract_is_refused() -> None:
    backend = make("gluon-splitkv")
    for change in ({"cache_format": "fp16", "query_format": "fp16"}, {"latent": 256}, {"cache_format": "e5m2"}):
        case = dataclasses.replace(CASES[0], **change)
        assert backend.why_not(case, CPU)
        with pytest.raises(Unsupported, match="cannot run"):
            backend.run(make_inputs(case))


def _variant(old: str, new: str) -> tuple[GluonSplitKV, int]:
    """Change one line of the kernel's source; returns the backend and the line."""
    import triton.experimental.gluon as gluon

    from harness.backends import gluon_splitkv_kernel as kernels

    attend = gluon.jit(kernels.attend.fn)
    source = kernels.attend.src
    assert source.count(old) == 1
    attend._unsafe_update_src(source.replace(old, new))
    before = source.partition(old)[0].count("\n")
    with open(kernels.__file__, encoding="utf-8") as lines:
        first = next(number for number, text in enumerate(lines, 1) if text.startswith("def attend("))
    return GluonSplitKV("variant", attend, kernels.merge, tile=kernels.TILE, block=kernels.BLOCK), first + before


@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [
        ("async_copy.wait_group(1)", "async_copy.wait_group(2)", "race"),
        ("latents.index((tile + 1) % 2), Cache", "latents.index(tile % 2), Cache", "race"),
        ("first = request * table_stride", "first = request * table_stride + 1000000", "out-of-bounds"),
        ("live_head = (head < heads)[:, None]", "live_head = (head < heads + 1)[:, None]", "out-of-bounds"),
    ],
)
def test_a_fault_in_the_kernel_is_named(old: str, new: str, kind: str) -> None:
    backend, _ = _variant(old, new)
    with pytest.raises(EmulationFault) as caught:
        backend.run(make_inputs(Case(heads=12, lengths=(1400,))))
    assert caught.value.finding.kind == kind, caught.value
    assert caught.value.finding.file.endswith("gluon_splitkv_kernel.py")


def test_a_wide_offset_made_narrow_overflows_in_its_line() -> None:
    backend, _ = _variant(
        "out_offset = row_out.to(gl.int64)[:, None] * LATENT", "out_offset = row_out[:, None] * (LATENT << 20)"
    )
    with pytest.raises(EmulationFault, match="int-overflow"):
        backend.run(make_inputs(Case(heads=12, lengths=(65,))))


def test_it_is_emulated_though_triton_was_imported_for_its_interpreter() -> None:
    code = (
        "from harness.backends.gluon_splitkv_kernel import merge\n"
        "from harness.backends import registry\n"
        "from harness.case import Case\nfrom harness.regimes import load\nfrom harness.run import run_case\n"
        "case = Case(heads=12, lengths=(300,), cache_format='e4m3fn')\n"
        "print(type(merge).__name__, run_case(case, registry.make('gluon-splitkv'), load()).verdict.kind)\n"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment, cwd=root)
    assert done.stdout.split() == ["InterpretedFunction", "PASS"]
