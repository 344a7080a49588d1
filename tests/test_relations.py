"""Relations between runs: each holds for a right backend and breaks for one that is wrong in its way."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from harness.case import Case
from harness.inputs import Arrangement, Inexact, make_inputs
from harness.regimes import RELATIONS, load
from harness.relations import ALL, run_relation
from harness.run import Result
from references.oracle import oracle
from tests.faulty import make

CASE = Case(heads=3, query_tokens=2, lengths=(40, 7, 18), page_size=4, placement="permuted", cache_scale=0.5, seed=1)
REGIMES = load(Path(__file__).parent / "faulty.toml")


def ask(name: str, relation: str, case: Case = CASE) -> Result:
    return run_relation(case, relation, make(f"python:tests.faulty:{name}"), REGIMES)


def test_every_relation_of_the_regimes_file_can_be_asked() -> None:
    assert set(ALL) == set(RELATIONS)


@pytest.mark.parametrize("relation", ALL)
@pytest.mark.parametrize("formats", [("bf16", "bf16"), ("bf16", "e4m3fn")])
def test_a_right_backend_keeps_every_relation(relation: str, formats: tuple[str, str]) -> None:
    case = CASE.replace(query_format=formats[0], cache_format=formats[1])
    if relation == "scale-shifted" and formats[1] == "e4m3fn":
        case = case.replace(content="ones", rope=0, cache_scale=1.0)  # other fp8 rows hold subnormals that cannot be halved
    result = ask("right", relation, case)
    assert result.verdict.kind in ("PASS", "UNTRUSTED"), result.verdict.message
    assert result.relation == relation


@pytest.mark.parametrize("relation", ["requests-permuted", "request-replicated"])
def test_a_backend_that_depends_on_the_position_is_a_variant(relation: str) -> None:
    assert ask("nudge-second", relation).verdict.fault == "variant"


def test_an_answer_in_memory_of_the_next_call_is_nondeterministic() -> None:
    verdict = ask("reuse", "repeat").verdict
    assert verdict.fault == "nondeterministic" and "the first answer changed during the next call" in verdict.message


def test_a_backend_that_wavers_is_nondeterministic() -> None:
    verdicts = [ask("toggle", "repeat").verdict for _ in range(3)]
    assert {verdict.fault for verdict in verdicts} == {"nondeterministic"}
    assert "became" in verdicts[0].message


def test_a_stale_answer_is_found_by_repeating_with_another_between() -> None:
    ask("stale", "repeat")
    assert ask("stale", "repeat").verdict.kind == "FAIL"


def test_a_relation_that_does_not_apply_is_not_a_pass() -> None:
    result = ask("right", "requests-permuted", CASE.replace(lengths=(4,)))
    assert result.verdict.kind == "UNSUPPORTED" and "does not apply" in result.verdict.message


def test_an_arrangement_has_the_answers_of_its_case() -> None:
    plain = make_inputs(CASE)
    other = make_inputs(CASE, arrangement=Arrangement(requests=(2, 0, 0), heads=(1, 2, 0), cache_shift=1))
    assert other.case.lengths == (18, 40, 40) and other.case.cache_scale == 1.0
    expected = oracle(plain.problem()).out[[2, 0, 0]][:, :, [1, 2, 0]]
    assert torch.allclose(oracle(other.problem()).out, expected, rtol=2.0**-50, atol=0)


def test_a_shift_that_would_change_a_value_is_refused() -> None:
    with pytest.raises(Inexact, match="2\\^1 cannot move"):
        make_inputs(CASE.replace(cache_format="e4m3fn", content="edges"), arrangement=Arrangement(cache_shift=1))


def test_what_rows_without_tokens_hold_is_not_compared() -> None:
    backend = make("python:tests.faulty:noisy-empty")
    result = run_relation(CASE.replace(lengths=(5, 1, 0)), "repeat", backend, REGIMES)
    assert result.verdict.kind == "PASS", result.verdict.message
