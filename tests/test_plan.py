"""A run is planned as it was asked for, or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from harness.backends import registry
from harness.backends.protocol import NotInstalled
from harness.backends.registry import Entry
from harness.plan import PlanError, find_device, make_plan
from harness.regimes import Regimes, load
from tests.stubs import make, write_regimes

RIGHT = "python:tests.stubs:right"


@pytest.fixture
def regimes(tmp_path: Path) -> Regimes:
    return load(write_regimes(tmp_path))


def test_a_backend_is_paired_with_each_of_its_regimes(regimes: Regimes) -> None:
    plan = make_plan(regimes, device="cpu", backends=[RIGHT])
    assert [str(pair) for pair in plan.pairs] == [f"{RIGHT}-few-heads", f"{RIGHT}-more-heads"]


def test_naming_a_regime_leaves_the_others_out(regimes: Regimes) -> None:
    plan = make_plan(regimes, device="cpu", backends=[RIGHT], regime_names=["more-heads"])
    assert [pair.regime.name for pair in plan.pairs] == ["more-heads"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"backends": ["triton-splitk"]}, "did you mean triton-splitkv"),
        ({"backends": ["python:nowhere.at.all"]}, "does not find"),
        ({"backends": [RIGHT], "regime_names": ["few-head"]}, "did you mean few-heads"),
        ({"backends": [RIGHT], "regime_names": ["xyz"]}, "there are few-heads, more-heads"),
        ({"backends": ["torch-sdpa"], "regime_names": ["few-heads"]}, "covers none of the backends torch-sdpa"),
        ({"backends": ["torch-sdpa"]}, "torch-sdpa has no regime: add a row to"),
        ({"backends": [RIGHT], "device": "tpu:x"}, "no device is called"),
        ({"backends": [RIGHT], "device": "meta"}, "not on 'meta'"),
    ],
)
def test_what_is_not_there_is_an_error_that_says_what_to_do(
    regimes: Regimes, options: dict[str, list[str] | str], said: str
) -> None:
    with pytest.raises(PlanError, match=said):
        make_plan(regimes, **{"device": "cpu", **options})  # type: ignore[arg-type]


def test_a_row_that_says_another_output_format_than_the_backend_is_an_error(tmp_path: Path) -> None:
    path = write_regimes(tmp_path)
    path.write_text(path.read_text().replace('output = "bf16"', 'output = "fp32"', 1))
    said = r"regimes.toml: regime 'few-heads' says the output of python:tests.stubs:right is fp32, and it is bf16: mend the row"
    with pytest.raises(PlanError, match=said):
        make_plan(load(path), device="cpu", backends=[RIGHT])


def test_a_gpu_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(PlanError, match="sees no GPU: run where it is, or use --device cpu"):
        find_device("cuda")
    assert find_device(None).type == "cpu"


def test_a_gpu_beyond_those_that_are_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert find_device("cuda:1").index == 1
    with pytest.raises(PlanError, match="sees 2 GPUs"):
        find_device("cuda:2")


def test_a_backend_that_does_not_run_on_the_device_is_an_error_if_it_was_named(
    regimes: Regimes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(PlanError, match="it runs on cpu, not on cuda"):
        make_plan(regimes, device="cuda", backends=[RIGHT])


def test_a_default_backend_that_cannot_run_is_listed_with_its_reason(regimes: Regimes, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str, label: str | None) -> None:
        raise NotInstalled("absent needs the package 'nowhere'")

    entries = {name: Entry(module="tests.stubs", about="", default=True) for name in (RIGHT, "absent")}
    monkeypatch.setattr(registry, "ENTRIES", entries)
    monkeypatch.setattr("tests.stubs.make", lambda name, label=None: absent(name, label) if name == "absent" else make(name))
    monkeypatch.setattr(registry, "entry_of", entries.__getitem__)
    plan = make_plan(regimes, device="cpu")
    assert [backend.name for backend in plan.backends] == [RIGHT]
    assert plan.absent == {"absent": "absent needs the package 'nowhere'"}


def test_a_fault_is_gated_in_the_variant_that_it_is_planted_in() -> None:
    (pair,) = make_plan(load(), device="cpu", backends=["fault:last-split-dropped"]).pairs
    assert str(pair) == "fault:last-split-dropped@splits-model-splits"
