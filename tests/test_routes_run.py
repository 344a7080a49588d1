"""What the contract check says of the story's routes, the ordinary judge sees when they run.

1. Kernels that no CPU has are stood in for, under their own contracts (``route_standins``).
2. With a checkout of AITER its own Gluon kernel runs, emulated; its asm decode is in ``test_routes_aiter``.
"""

from __future__ import annotations

import ast
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.backends import registry
from harness.backends.aiter_source import SOURCE_VARIABLE, named_sources
from harness.backends.conformance import CHECKS, PROBES, Check
from harness.case import Case
from harness.inputs import make_inputs
from harness.regimes import RegimesError, load
from harness.repro import load as load_repro
from harness.repro import save
from harness.rounded_query import RoundedQuery
from harness.routes.backend import Routed
from harness.routes.contracts import FP8_BLOCKS, GLUON_RELEASES
from harness.routes.record import find_route
from harness.run import run_case
from harness.verdict import Verdict
from references.formats import FORMATS, decode
from tests.route_standins import PlainAsm, stood_in

ONE = Case.parse("v1:H=12:N=700:T=64:c=e4m3fn:cscale=0.37:place=permuted:lse=0:end")
EQUAL, RAGGED = ONE.replace(lengths=(512,) * 4), ONE.replace(lengths=(700, 90))
DRAFT = RAGGED.replace(query_tokens=5)
#: What a value that was never written may be called.
UNWRITTEN = {"unwritten", "non-finite"}
needs_source = pytest.mark.skipif(
    not os.environ.get(SOURCE_VARIABLE), reason=f"needs a checkout of AITER: name one in {SOURCE_VARIABLE}"
)


def judged(backend: Any, case: Case) -> Verdict:
    return run_case(case, backend, load()).verdict


# -- stood in --------------------------------------------------------------------------------------------------------------


def test_before_50578_the_engine_dies_with_the_first_decode() -> None:
    verdict = judged(stood_in("vllm-before-50578"), ONE)
    assert (verdict.kind, verdict.fault) == ("FAIL", "refused")
    assert "takes bf16 queries, not e4m3fn" in verdict.message


def test_with_the_query_left_alone_one_request_passes_and_two_assert() -> None:
    backend = stood_in("vllm-50563")
    assert judged(backend, ONE).kind == "PASS"
    verdict = judged(backend, RAGGED)
    assert (verdict.kind, verdict.fault) == ("FAIL", "crash")
    assert "AssertionError: aiter-gluon: bh16bn128 takes one request, not 2" in verdict.message


def test_between_a_draft_longer_than_the_table_is_a_key_error() -> None:
    verdict = judged(stood_in("vllm-before-51011", padding="asm"), DRAFT)
    assert (verdict.kind, verdict.fault) == ("FAIL", "crash")
    assert "KeyError: 'aiter-asm-np: 80: 16 heads x 5 query tokens" in verdict.message


def test_between_what_the_validation_asked_passes_and_what_a_server_asks_is_wrong() -> None:
    backend = stood_in("vllm-before-51011", plain=PlainAsm())
    assert judged(backend, ONE).kind == "PASS", "one request alone"
    assert judged(backend, EQUAL).kind == "PASS", "requests of one length"
    verdict = judged(backend, RAGGED)
    assert verdict.kind == "FAIL" and verdict.fault in UNWRITTEN, verdict.message
    stale = judged(stood_in("vllm-before-51011", plain=PlainAsm(stale=True)), RAGGED)
    assert (stale.kind, stale.fault) == ("FAIL", "mismatch"), "numbers, and no error: what an earlier call left"
    assert {row.index[0] for row in stale.measurements.worst_rows} == {1}, "the request shorter than the average"


def test_a_merge_that_counts_the_kernels_blocks_passes() -> None:
    assert judged(stood_in("vllm-before-51011", plain=PlainAsm(counts=128)), RAGGED).kind == "PASS"


@pytest.mark.parametrize("case", [ONE, EQUAL, RAGGED, DRAFT], ids=["one", "equal", "ragged", "draft"])
def test_after_51011_all_of_it_passes(case: Case) -> None:
    assert judged(stood_in("vllm-51011"), case).kind == "PASS"


@pytest.mark.parametrize("route", ["vllm-triton", "sglang-aiter", "sglang-gluon"])
def test_the_other_engines_pass(route: str) -> None:
    assert judged(stood_in(route), RAGGED).kind == "PASS"


def test_sglangs_fallback_answers_without_an_error_and_is_caught_by_its_numbers() -> None:
    backend = stood_in("sglang-gluon", plain=PlainAsm(stale=True))
    older = replace(find_route("sglang-gluon"), aiter="0.1.19.post2")
    fallen = Routed(name=backend.name, route=older, kernels=backend.kernels)
    output = fallen.run(make_inputs(RAGGED))
    assert output.what_ran["kernel"] == "aiter-asm-np", "Gluon asserts one request and is not heard"
    assert judged(backend, RAGGED).kind == "PASS" and judged(fallen, RAGGED).fault == "mismatch"


def test_an_emulated_kernel_stands_in_where_the_query_is_bf16() -> None:
    pytest.importorskip("triton", reason="the kernel is written for Triton, which is not installed here")
    backend = registry.make("route:sglang-gluon+gluon-splitkv")
    result = run_case(RAGGED.replace(lengths=(130, 33)), backend, load())
    assert (result.regime, result.verdict.kind) == ("route-splitkv", "PASS"), result.verdict.message


def test_a_repro_of_a_route_is_replayed_and_no_script_is_said_to_stand_alone(tmp_path: Path) -> None:
    backend = registry.make("route:vllm-50563+torch-sdpa")
    result = run_case(RAGGED, backend, load())
    notes = save(result, backend, load(), tmp_path, device="cpu")
    (path,) = tmp_path.iterdir()
    assert path.suffix == ".json" and any("script not made: a route is steps" in note for note in notes)
    repro = load_repro(path)
    assert (repro.case, repro.backend) == (RAGGED, backend.name)


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
@pytest.mark.parametrize("name", ["route:vllm-51011+torch-sdpa", "route:sglang-aiter+torch-sdpa"])
def test_a_route_keeps_what_every_backend_keeps(name: str, check: Check) -> None:
    probes = [
        *PROBES,
        RAGGED,
        DRAFT.replace(table="ragged", query_layout="fused"),
        Case(heads=8, query_tokens=2, lengths=(70, 3)),
    ]
    assert check(registry.make(name), torch.device("cpu"), probes) == []


# -- the truth of a rounded query ------------------------------------------------------------------------------------------


def test_the_truth_of_a_route_that_rounds_is_that_of_the_rounded_query() -> None:
    inputs = make_inputs(RAGGED)
    regime = load().named("route-sdpa-rounded")
    problem = regime.understood(inputs.problem())
    assert (problem.query_format, problem.query_scale) == ("e4m3fn", 0.25)
    before = decode(inputs.query, FORMATS["bf16"]).float()
    after = decode(problem.query, FORMATS["e4m3fn"]).float() * 0.25
    step = before.abs().clamp(min=2.0**-8) / 16
    assert not torch.equal(after, before) and bool(((after - before).abs() <= step).all())
    by_cache = load().named("route-sdpa-rounded-cache").understood(inputs.problem())
    assert by_cache.query_scale == 0.37
    assert load().named("route-sdpa").understood(inputs.problem()).query_format == "bf16"


def test_a_route_that_rounds_fails_against_the_truth_of_the_query_as_it_was() -> None:
    rows, backend = load(), registry.make("route:vllm-51011+torch-sdpa")
    assert run_case(RAGGED, backend, rows).verdict.kind == "PASS"
    blind = replace(rows, rows=(replace(rows.named("route-sdpa-rounded"), query=None),))
    verdict = run_case(RAGGED, backend, blind).verdict
    assert (verdict.kind, verdict.fault) == ("FAIL", "mismatch"), "a rounded query is no rounding of the kernel's"


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"format": "e4m3fn"}, "query takes format and scale"),
        ({"format": "e4m3fn", "scale": -1.0}, "a positive float or 'cache'"),
        ({"format": "e4m3fn", "scale": "layer"}, "a positive float or 'cache'"),
        ({"format": "e9", "scale": 1.0}, "e9"),
    ],
)
def test_a_rounding_that_cannot_be_is_refused(table: dict[str, Any], said: str) -> None:
    with pytest.raises((ValueError, LookupError), match=said):
        RoundedQuery.from_table(table)


def test_a_row_with_a_faulty_rounding_is_named(tmp_path: Any) -> None:
    text = load().path.read_text(encoding="utf-8")
    path = tmp_path / "rows.toml"
    path.write_text(
        text.replace('[regime.query]\nformat = "e4m3fn"\nscale = 0.25', "[regime.query]\nscale = 0.25", 1), encoding="utf-8"
    )
    with pytest.raises(RegimesError, match=r"regime 'route-sdpa-rounded'.*query takes format and scale"):
        load(path)


# -- AITER's own Gluon kernel -----------------------------------------------------------------------------------------------


@needs_source
def test_the_table_of_block_sizes_is_aiters() -> None:
    text = (named_sources()[0].package / "mla.py").read_text(encoding="utf-8")
    tables = [
        ast.literal_eval(node.value)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "get_block_n_fp8"
    ]
    assert tables and tables[0] == FP8_BLOCKS


@needs_source
def test_the_release_at_hand_is_one_that_is_described() -> None:
    pytest.importorskip("triton", reason="AITER's modules import triton, which is not installed here")
    from harness.backends.aiter_gluon import AiterGluon

    contract = AiterGluon("aiter-gluon", named_sources()[0]).contract
    if contract.generation != "0.1.18":
        pytest.skip(f"no route is described with AITER of generation {contract.generation}")
    assert contract in GLUON_RELEASES.values()


@needs_source
@pytest.mark.parametrize("route", ["vllm-50563", "sglang-gluon"])
def test_aiters_gluon_kernel_answers_a_ragged_batch_with_the_query_as_it_was(route: str) -> None:
    pytest.importorskip("triton", reason="AITER's modules import triton, which is not installed here")
    backend = registry.make(f"route:{route}")
    case = RAGGED.replace(lengths=(140, 33))
    contract = backend.kernels["aiter-gluon"].contract  # type: ignore[attr-defined]
    result = run_case(case, backend, load())
    if contract == GLUON_RELEASES["0.1.20"]:
        assert (result.regime, result.verdict.kind) == ("route-gluon-fp8", "PASS"), result.verdict.message
    elif route == "vllm-50563":
        assert (result.verdict.kind, result.verdict.fault) == ("FAIL", "crash"), "an older kernel asserts one request"
    else:
        assert "needs aiter-asm-np" in result.verdict.message, "an older kernel asserts one request, and the engine falls back"


@needs_source
def test_what_is_reported_of_a_release_is_not_said_of_the_kernel_at_hand() -> None:
    pytest.importorskip("triton", reason="AITER's modules import triton, which is not installed here")
    past, cpu = ONE.replace(pool_rows=3_800_000), torch.device("cpu")
    stood, here = stood_in("vllm-50563").way(past, cpu), registry.make("route:vllm-50563").way(past, cpu)  # type: ignore[attr-defined]
    assert stood is not None and stood.ends_with is not None and "more than 2 GiB" in stood.ends_with.reason
    assert here is not None and here.ends_with is None
