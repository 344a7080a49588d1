"""The contract of AITER's Gluon wrapper is read, never guessed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.backends.aiter_contract import GluonContract, read_contract
from harness.backends.protocol import NotInstalled
from harness.case import Case
from tests.aiter_checkout import WRAPPER

CPU = torch.device("cpu")


def wrapper(folder: Path, text: str = WRAPPER) -> Callable[..., Any]:
    """Import a wrapper from its text."""
    path = folder / "wrapper.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location("wrapper", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.mla_gluon  # type: ignore[no-any-return]


@pytest.fixture
def contract(tmp_path: Path) -> GluonContract:
    """The contract of the newest generation."""
    return read_contract(wrapper(tmp_path))


def test_a_contract_is_read_from_assertions(contract: GluonContract) -> None:
    assert (contract.most_heads, contract.wide_batches, contract.multi_token) == (96, 64, True)
    assert not contract.single_request and not contract.promised_splits and contract.returns_lse


def test_fewer_heads_are_read_as_such(tmp_path: Path) -> None:
    assert read_contract(wrapper(tmp_path, WRAPPER.replace("<= 96", "<= 16"))).most_heads == 16


def test_a_single_request_is_read_with_its_regime(tmp_path: Path) -> None:
    text = WRAPPER.replace(
        "    return o, None", "    if REGIME == 'bh16bn128':\n        assert batch_size == 1\n    return o, None"
    )
    assert read_contract(wrapper(tmp_path, text)).single_request == {"bh16bn128"}


def test_a_list_of_batches_is_read(tmp_path: Path) -> None:
    text = WRAPPER.replace("batch_size % 64 == 0", "batch_size in (64, 128, 256)")
    assert read_contract(wrapper(tmp_path, text)).wide_batches == (64, 128, 256)


def test_splits_by_a_promised_length_are_read(tmp_path: Path) -> None:
    text = WRAPPER.replace("256 // (batch_size * qlen)", "min(256, min_kv_seq_len)")
    assert read_contract(wrapper(tmp_path, text)).promised_splits


def test_an_unknown_parameter_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(NotInstalled, match=r"unknown signature of wrapper\.mla_gluon .*has window in addition"):
        read_contract(wrapper(tmp_path, WRAPPER.replace("attn_sink=None", "attn_sink=None, window=0")))


def test_a_missing_parameter_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(NotInstalled, match="lacks has_pe"):
        read_contract(wrapper(tmp_path, WRAPPER.replace("has_pe=True, ", "")))


def test_another_order_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotInstalled, match="the order differs"):
        read_contract(wrapper(tmp_path, WRAPPER.replace("q_nope, q_pe,", "q_pe, q_nope,")))


def test_a_bound_that_is_no_longer_stated_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotInstalled, match="no longer states its most heads"):
        read_contract(wrapper(tmp_path, WRAPPER.replace("1 <= nhead <= 96", "nhead < 97")))
    with pytest.raises(NotInstalled, match="no longer states the batches of bh64"):
        read_contract(wrapper(tmp_path, WRAPPER.replace("assert batch_size % 64 == 0", "pass")))


@pytest.mark.parametrize(
    "text",
    [
        "v1:H=1:N=1:end",
        "v1:H=96:S=16:N=0+5:end",
        "v1:H=12:N=300:c=e4m3fn:cscale=0.3:qscale=2.0:table=ragged:end",
        "v1:H=12:N=300:T=16:tokenpad=64:end",
        "v1:H=64:N=785x64:end",
        "v1:H=128:S=2:N=194x64:end",
    ],
)
def test_cases_inside_the_contract_are_taken(contract: GluonContract, text: str) -> None:
    assert contract.why_not(Case.parse(text)) is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("v1:H=97:N=1:end", "no regime for 97 heads"),
        ("v1:H=129:N=1:end", "no regime for 129 heads"),
        ("v1:H=64:N=1000x64:c=e4m3fn:end", "takes bf16 caches"),
        ("v1:H=64:N=1000:end", "multiples of 64"),
        ("v1:H=64:N=784x64:end", "more than 784 tokens"),
        ("v1:H=1:N=1:q=e4m3fn:c=e4m3fn:end", "takes bf16 queries"),
        ("v1:H=1:N=1:c=e4m3fnuz:end", "takes caches in bf16 or e4m3fn"),
        ("v1:H=1:N=1:L=256:end", "rows of 512"),
        ("v1:H=1:N=1:tokenpad=8:end", "not a multiple of 16"),
        ("v1:H=1:N=20:T=16:pagepad=576:end", "not evenly spaced"),
    ],
)
def test_cases_outside_the_contract_are_named(contract: GluonContract, text: str, reason: str) -> None:
    said = contract.why_not(Case.parse(text))
    assert said is not None and reason in said


def test_splits_are_the_launcher_s(contract: GluonContract) -> None:
    asked = {"v1:H=12:N=1:end": 256, "v1:H=12:N=1x4:end": 64, "v1:H=96:S=2:N=1:end": 21, "v1:H=1:N=1x300:end": 1}
    asked |= {"v1:H=64:N=1000x64:end": 4, "v1:H=64:N=1000x128:end": 2, "v1:H=64:S=4:N=1000x64:end": 1}
    assert {text: contract.splits_of(Case.parse(text)) for text in asked} == asked
