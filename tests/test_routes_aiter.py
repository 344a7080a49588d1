"""Routes over AITER's own asm dispatch: its split table and its second stage as they are, what is compiled stood in for.

These stand apart from the other tests of routes: while AITER's Triton kernels are interpreted, no Gluon kernel is emulated.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="AITER's modules import triton, which is not installed here")

from harness.backends import registry
from harness.backends.aiter_asm import MODES, AiterAsm
from harness.backends.aiter_source import SOURCE_VARIABLE, named_sources
from harness.backends.protocol import Capabilities
from harness.case import Case
from harness.regimes import load
from harness.routes.backend import Routed
from harness.routes.contracts import FP8_BLOCKS
from harness.routes.record import find_route
from harness.run import run_case

ONE = Case.parse("v1:H=12:N=700:T=64:c=e4m3fn:cscale=0.37:place=permuted:lse=0:end")
RAGGED = ONE.replace(lengths=(700, 90))
DRAFT = RAGGED.replace(query_tokens=5)
#: What a value that was never written may be called.
UNWRITTEN = {"unwritten", "non-finite"}
needs_source = pytest.mark.skipif(
    not os.environ.get(SOURCE_VARIABLE), reason=f"needs a checkout of AITER: name one in {SOURCE_VARIABLE}"
)


@pytest.fixture(scope="module")
def library() -> Iterator[Any]:
    """AITER's dispatch of the first named checkout, over a stand-in that splits as the fp8 table says and counts no splits."""
    from harness.backends.aiter_modules import AiterModules
    from tests.aiter_standin import StandIn, stood_in

    modules = AiterModules(named_sources()[0], answered=True)
    if not modules.has("aiter.mla"):
        pytest.skip(f"{named_sources()[0].root} has no aiter/mla.py")
    with stood_in(modules, StandIn(fp8_blocks=FP8_BLOCKS)) as (made, _):
        yield made


def over_aiter(route: str, library: Any) -> Routed:
    """Make a route whose asm kernels are AITER's dispatch over the stand-in, on a CPU."""
    found, kernels = find_route(route), {}
    for kernel in found.kernels:
        kernels[kernel] = registry.make("torch-sdpa")
        if kernel in MODES:
            kernels[kernel] = AiterAsm(kernel, MODES[kernel], library, lambda device: "gfx950")
            kernels[kernel].capabilities = Capabilities(empty_rows="undefined", devices=frozenset({"cpu"}))
    return Routed(name=f"route:{route}", route=found, kernels=kernels)


@needs_source
def test_aiters_own_second_stage_merges_splits_that_a_kernel_of_its_own_table_did_not_write(library: Any) -> None:
    backend = over_aiter("vllm-before-51011", library)
    assert run_case(ONE, backend, load()).verdict.kind == "PASS"
    verdict = run_case(RAGGED, backend, load()).verdict
    assert verdict.kind == "FAIL" and verdict.fault in UNWRITTEN, verdict.message


@needs_source
def test_aiters_own_table_has_no_entry_for_five_tokens_of_sixteen_heads(library: Any) -> None:
    choose = library.decode.__globals__["get_meta_param"]
    with pytest.raises(KeyError, match="80"):
        choose(None, 2, sum(DRAFT.lengths), 16, DRAFT.query_tokens, torch.float8_e4m3fn)
    splits, _ = choose(None, 2, sum(RAGGED.lengths), 16, 1, torch.float8_e4m3fn)
    assert splits == -(-sum(RAGGED.lengths) // (2 * FP8_BLOCKS[16])), "the model in route_standins chooses as many"


@needs_source
@pytest.mark.parametrize("case", [ONE, RAGGED, DRAFT], ids=["one", "ragged", "draft"])
@pytest.mark.parametrize("route", ["vllm-51011", "sglang-aiter"])
def test_padded_heads_with_a_schedule_pass_over_aiters_dispatch(library: Any, route: str, case: Case) -> None:
    result = run_case(case, over_aiter(route, library), load())
    assert result.verdict.kind == "PASS", result.verdict.message
