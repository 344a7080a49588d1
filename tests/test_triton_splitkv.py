"""The embedded kernel answers right in every corner of its contract, and its planted mistakes do not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from harness.backends import triton_splitkv
from harness.backends.protocol import NotInstalled, UnknownBackend, Unsupported
from harness.backends.registry import make
from harness.backends.triton_splitkv import SplitKV, operand_of, splits_of, tokens_per_split, variant
from harness.backends.triton_splitkv_mistakes import MISTAKES
from harness.case import Case
from harness.emulation.interpreter import interpreted, mended
from harness.emulation.interpreter_memory import IntegerFault, MemoryFault
from harness.inputs import Inputs, make_inputs
from references.arithmetic import Splits
from references.formats import FORMATS, decode
from references.oracle import oracle

BACKEND = make("triton-splitkv")
ALL = ("bf16", "fp16", "fp32", "e4m3fn", "e4m3fnuz", "e5m2")


def wrong(inputs: Inputs, out: Tensor, lse: Tensor | None) -> str | None:
    """Say what no rounding explains: P to bf16 or finer, the output to bf16, the rest in fp32."""
    case, truth = inputs.case, oracle(inputs.problem())
    rows = inputs.cache[inputs.slots // case.page_size, inputs.slots % case.page_size].contiguous()
    largest = float(decode(rows, FORMATS[case.cache_format]).abs().max()) * case.cache_scale if len(rows) else 0.0
    # each P is off by its rounding, so that an element is off by at most that share of the largest |v|
    unit, fine = FORMATS["bf16"].unit_roundoff, case.width * 40 * FORMATS["fp32"].unit_roundoff
    bound = 2 * unit * truth.out.abs() + (unit + fine * (1 + case.amplitude)) * largest
    if not torch.isfinite(out.float()).all():
        return "not finite"
    if ((out.double() - truth.out).abs() > bound).any():
        return "out"
    if lse is not None:
        seen = torch.isfinite(truth.lse)
        if not torch.equal(lse == -torch.inf, ~seen):
            return "lse of empty rows"
        if ((lse.double() - truth.lse)[seen].abs() > fine * (1 + truth.lse[seen].abs())).any():
            return "lse"
    return None


def answer(case: Case, backend: SplitKV | None = None) -> tuple[Inputs, str | None]:
    inputs = make_inputs(case)
    output = (backend or BACKEND).run(inputs)
    return inputs, wrong(inputs, output.out, output.lse) or (str(inputs.violations()) if inputs.violations() else None)


def corners() -> Iterator[Case]:
    for query_format in ALL:
        for cache_format in ALL:
            if operand_of(query_format, cache_format) is None:
                continue
            yield Case(
                heads=3, lengths=(150,), query_tokens=2, query_format=query_format, cache_format=cache_format, query_scale=0.6,
                cache_scale=1.7, page_size=16, placement="permuted", latent=64, rope=16, amplitude=2.0,
            )  # fmt: skip
    plain = Case(heads=12, lengths=(70, 0, 200), placement="permuted", amplitude=3.0)
    for page_size in (1, 3, 16, 32, 64, 100):
        yield plain.replace(page_size=page_size, table="ragged", page_padding=5, token_padding=3)
        yield plain.replace(page_size=page_size, placement="scattered", table_padding=2)
    for heads in (1, 15, 16, 17, 33, 128, 256):
        yield plain.replace(heads=heads, lengths=(66,))
    for tokens in (1, 2, 5, 16):
        yield plain.replace(query_tokens=tokens, lengths=(1, 0, tokens, tokens - 1, 64 + tokens), heads=2)
    for latent, rope in ((512, 0), (1, 1), (7, 3), (96, 24), (100, 64), (576, 64)):
        yield plain.replace(latent=latent, rope=rope, lengths=(66,))
    for layout in ("split", "fused", "transposed"):
        yield plain.replace(query_layout=layout, query_tokens=3)
    for content in ("newest", "needle", "peak-tail", "rising", "falling", "ties", "zero-query", "slots", "edges"):
        yield plain.replace(content=content, lengths=(300, 65), cache_format="e4m3fn", amplitude=8.0)
    for length in (63, 64, 65, 127, 128, 129, 1023, 1024, 1025, 1400):
        yield plain.replace(lengths=(length,), lse=length % 2 == 0)
    yield plain.replace(amplitude=100.0)
    yield plain.replace(lengths=(0, 0))
    yield plain.replace(placement="shared", page_size=16, lengths=(100, 150), query_tokens=2)
    yield plain.replace(poison="large")


@pytest.mark.parametrize("case", list(corners()), ids=str)
def test_the_kernel_answers_right(case: Case) -> None:
    assert answer(case)[1] is None


def test_v_of_ones_comes_back_as_the_cache_scale() -> None:
    inputs, _ = answer(Case(heads=5, lengths=(300, 77), content="ones", cache_scale=0.5))
    assert (inputs.out == 0.5).all()


@pytest.mark.parametrize("name", ["e4m3fn", "e4m3fnuz", "e5m2"])
def test_integer_decoding_is_the_cast_for_every_code(name: str) -> None:
    kernels = BACKEND._kernels

    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    found = torch.empty(256)
    with mended():
        interpreted(kernels.decode_codes)[(1,)](codes, found, COUNT=256, FORMAT=name)
    expected = decode(codes.view(FORMATS[name].storage), FORMATS[name])
    same = (found == expected) & (torch.signbit(found) == torch.signbit(expected))
    assert (same | (found.isnan() & expected.isnan())).all()


@pytest.mark.parametrize("content", ["gaussian", "edges"])
@pytest.mark.parametrize("name", ["e4m3fn", "e4m3fnuz", "e5m2"])
def test_integer_decoding_changes_no_bit_of_an_answer(name: str, content: str) -> None:
    case = Case(heads=5, lengths=(150,), query_format=name, cache_format=name, content=content, latent=64, rope=16)
    cast, integer = make_inputs(case), make_inputs(case)
    BACKEND.run(cast)
    SplitKV("integer", BACKEND._kernels, integer_decode=True).run(integer)
    assert torch.equal(cast.out, integer.out) and torch.equal(cast.lse, integer.lse)


def test_the_operand_format_holds_every_value_of_both_formats() -> None:
    for query_format in ALL:
        for cache_format in ALL:
            named = operand_of(query_format, cache_format)
            operand = FORMATS[named] if named else None
            if operand is None:
                continue
            for name in (query_format, cache_format):
                known = FORMATS[name]
                assert operand.significand >= known.significand
                assert operand.maximum >= known.maximum
                assert operand.smallest_subnormal <= known.smallest_subnormal


def test_splits_are_those_that_the_regimes_declare() -> None:
    declared = Splits(kind="even", count=triton_splitkv.MOST_SPLITS, tile=triton_splitkv.SPLIT_STEP)
    for length in [0, *range(1, 1200), 2048, 4096, 65536, 1 << 20]:
        edges = declared.edges(length, heads=1, query_tokens=1, batch=1)
        share = tokens_per_split(length)
        assert edges == [*range(0, length, share or 1), length]
        assert splits_of(length) == len(edges) - 1 <= triton_splitkv.MOST_SPLITS
    inputs = make_inputs(Case(heads=1, lengths=(300,), latent=16, rope=0))
    assert BACKEND.run(inputs).what_ran["splits"] == splits_of(300) == 3


def test_a_pair_of_formats_that_no_operand_holds_is_refused() -> None:
    for query_format, cache_format in (("bf16", "fp16"), ("fp32", "bf16"), ("e4m3fn", "fp16"), ("bf16", "fp32")):
        inputs = make_inputs(Case(heads=1, lengths=(3,), query_format=query_format, cache_format=cache_format))
        with pytest.raises(Unsupported, match=f"not {query_format} with {cache_format}"):
            BACKEND.run(inputs)
        assert torch.isnan(inputs.out).all()


def test_an_answer_does_not_depend_on_the_batch() -> None:
    case = Case(heads=4, lengths=(300, 40, 700), placement="permuted", latent=64, rope=16)
    together = make_inputs(case)
    BACKEND.run(together)
    for request in range(case.batch):
        only = tuple(length if other == request else 0 for other, length in enumerate(case.lengths))
        assert together.block_table is not None
        # the same tensors, with the other requests empty
        alone = make_inputs(case)
        alone.lengths.copy_(torch.tensor(only, dtype=torch.int32))
        BACKEND.run(alone)
        assert torch.equal(together.out[request], alone.out[request])


@pytest.mark.parametrize("options", [{"reverse": True}, {"undefined": "poison"}], ids=str)
def test_the_answer_needs_no_order_of_programs_and_no_undefined_value(
    options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(heads=20, lengths=(300, 0, 65), query_tokens=2, page_size=16, placement="permuted", latent=100, rope=24)
    one, two = make_inputs(case), make_inputs(case)
    BACKEND.run(one)
    monkeypatch.setattr(triton_splitkv, "_meaning", lambda device: mended(**options))
    BACKEND.run(two)
    assert torch.equal(one.out, two.out) and torch.equal(one.lse, two.lse)


def test_sharing_types_between_tensors_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(heads=5, lengths=(300, 0, 65), query_tokens=2, cache_format="e4m3fn", latent=100, rope=24)
    one, two = make_inputs(case), make_inputs(case)
    BACKEND.run(one)
    monkeypatch.setattr("harness.emulation.interpreter_types.shared_types", list)
    BACKEND.run(two)
    assert torch.equal(one.out, two.out) and torch.equal(one.lse, two.lse)


def test_rows_past_four_gibibytes_are_reached() -> None:
    case = Case(heads=2, lengths=(65,), placement="high", pool_rows=4_200_000, page_size=64)
    assert case.pool_rows * case.width * 2 > 1 << 32
    inputs, fault = answer(case)
    assert fault is None and inputs.cache.numel() * 2 > 1 << 32
    with pytest.raises(IntegerFault, match=r"leaves int32 .*page \* page_stride"):
        answer(case, make("triton-splitkv!offsets-in-int32"))


def test_a_device_of_another_kind_is_refused() -> None:
    case = Case(heads=2, lengths=(5,))
    assert "not on meta" in str(BACKEND.why_not(case, torch.device("meta")))
    too_long = Case(heads=1, lengths=((1 << 31) - 1,), page_size=64)
    assert "int32" in str(BACKEND.why_not(too_long, torch.device("cpu")))


def test_another_triton_is_refused_on_a_cpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triton.__version__", "3.6.0")
    case = Case(heads=2, lengths=(5,))
    assert "this is Triton 3.6.0" in str(BACKEND.why_not(case, torch.device("cpu")))
    assert BACKEND.why_not(case, torch.device("cuda")) is None


def test_a_missing_triton_is_said_to_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "harness.backends.triton_splitkv_kernel")
    with pytest.raises(NotInstalled, match="needs Triton"):
        make("triton-splitkv")


def test_run_refuses_what_lies_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_splitkv, "_LONGEST", 4)
    inputs = make_inputs(Case(heads=2, lengths=(5,)))
    with pytest.raises(Unsupported, match="positions are int32"):
        BACKEND.run(inputs)
    assert torch.isnan(inputs.out).all()


@pytest.mark.parametrize("switch", ["0", "1"])
def test_the_answer_is_the_same_whether_triton_was_imported_for_interpreting(switch: str) -> None:
    script = """
from harness.backends.registry import make
from harness.case import Case
from harness.inputs import make_inputs
import torch
inputs = make_inputs(Case(heads=3, lengths=(150,), latent=64, rope=16))
make("triton-splitkv").run(inputs)
print(int(inputs.out.view(torch.int16).long().sum()))
"""
    inputs = make_inputs(Case(heads=3, lengths=(150,), latent=64, rope=16))
    BACKEND.run(inputs)
    environment = {**os.environ, "TRITON_INTERPRET": switch}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert int(done.stdout) == int(inputs.out.view(torch.int16).long().sum())


# --- mistakes ---------------------------------------------------------------------------------------------------

_PLAIN = Case(heads=3, lengths=(200, 300), query_tokens=2, page_size=16, placement="permuted", query_scale=0.6, cache_scale=1.7)
#: Cases of which one at least shows each mistake.
TELLING = (
    _PLAIN.replace(content="rising", amplitude=4.0),
    _PLAIN.replace(content="newest", amplitude=4.0),
    Case(heads=2, lengths=(65,), placement="high", pool_rows=4_200_000, page_size=64),
)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_planted_mistake_shows(name: str) -> None:
    backend = make(f"triton-splitkv!{name}")
    assert backend.name == f"triton-splitkv!{name}"
    faults = []
    for case in TELLING:
        try:
            faults.append(answer(case, backend)[1])
        except (MemoryFault, IntegerFault) as fault:
            faults.append(str(fault))
    assert any(faults)


@pytest.mark.parametrize("case", TELLING, ids=str)
def test_the_kernel_without_a_mistake_answers_the_telling_cases(case: Case) -> None:
    assert answer(case)[1] is None


def test_a_mistake_that_is_unknown_is_refused() -> None:
    with pytest.raises(UnknownBackend, match="drop-v-scale"):
        make("triton-splitkv!no-such-mistake")
    with pytest.raises(UnknownBackend, match="torch-sdpa!drop-v-scale"):
        make("torch-sdpa!drop-v-scale")


def test_a_variant_must_replace_one_place() -> None:
    with pytest.raises(ValueError, match="stands there 0 times"):
        variant("nothing", "no such text", "")
    with pytest.raises(ValueError, match="must stand exactly once"):
        variant("many", "tl.load", "tl.load")
    assert answer(Case(heads=2, lengths=(40,)), variant("none", "import triton\n", "import triton\n"))[1] is None
