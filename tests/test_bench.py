"""The bench measures what it says it measures.

1. Both sides of a ratio compute the same answer.
2. No test here asks for a speed: that is the bench's own business, on a quiet machine.

Source: harness/bench.py.
"""

from __future__ import annotations

import json

import pytest
import torch

from harness import bench, judging
from harness.case import Case
from references.decode import mla_decode


@pytest.mark.parametrize("cache_format", ["bf16", "e4m3fn"])
def test_the_loop_computes_what_the_reference_does(cache_format: str) -> None:
    problem = bench.make_problem(batch=3, heads=4, length=70, cache_format=cache_format, device="cpu")
    expected, actual = mla_decode(problem).out, bench.request_loop(problem)
    assert actual.shape == expected.shape
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def test_a_side_that_does_more_takes_longer() -> None:
    little, much = bench.best_times(
        lambda: torch.ones(10).sum(), lambda: torch.ones(2_000_000).exp().sum(), rounds=3, device="cpu"
    )
    assert little < much


def test_the_memory_measured_is_above_the_inputs() -> None:
    finding = bench.memory_of_a_million_tokens(length=20_000)
    inputs = 20_000 * (bench.LATENT + bench.ROPE) / bench.MIB
    assert finding.value is not None
    assert 0 <= finding.value < 100 * inputs
    assert finding.met


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure")
def test_without_a_gpu_its_rate_is_not_measured_and_says_why() -> None:
    finding = bench.rate_against_product()
    assert (finding.value, finding.met) == (None, None)
    assert "sees no GPU" in bench.describe(finding)


def test_what_judging_costs_is_counted_by_phase() -> None:
    found = judging.cost(judging.small_cases(2), "cpu")
    assert set(found.operations) == {judging.REST, *judging.PHASES}
    assert found.operations["budget"] > 300 > found.operations["measuring"] / 2 > 20
    # Violations, blemishes, and what was measured are read back.
    assert found.waits["violations"] >= 4 and found.waits["blemishes"] >= 2 and found.waits[judging.REST] >= 2
    assert 0 < found.seconds["budget"] < sum(found.seconds.values())
    assert 0 < found.total
    assert found.told().startswith("2 cases: ")


def test_more_requests_of_one_length_cost_no_more_operations() -> None:
    one, many = (Case(heads=4, lengths=(65,) * batch, cache_scale=0.7) for batch in (1, 6))
    counts = [judging.cost([case], "cpu").operations["budget"] for case in (one, many)]
    assert counts[1] <= 1.05 * counts[0]


def test_a_missed_ratio_is_printed_as_missed() -> None:
    finding = bench.Finding(name="speed", value=0.5, asked="at least 2", met=False, detail="slow")
    assert bench.describe(finding) == "MISSED  speed: 0.50 (at least 2); slow"


def test_findings_can_be_read_by_a_program(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    finding = bench.Finding(name="speed", value=3.0, asked="at least 2", met=True, detail="quick")
    monkeypatch.setattr(bench, "MEASURES", {"speed": lambda: finding})
    assert bench.main(["--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["value"] == 3.0


def test_an_unknown_measure_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(["sped"])
    assert "no measure is called sped: there are speed-bf16, speed-fp8, memory, rate, settings," in capsys.readouterr().err
