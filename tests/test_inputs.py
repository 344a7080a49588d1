"""Inputs: the same bytes everywhere, hostile around what a kernel may use, and every family what it says it is."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch

from harness.cache import place, stream
from harness.case import CONTENTS, PLACEMENTS, QUERY_LAYOUTS, Case
from harness.content import FAMILIES, Aim, Request, needle_places
from harness.draws import normal, slot_signs
from harness.inputs import BACKEND_BYTES, Inputs, make_inputs, needed_bytes
from harness.memory import GUARD_BYTES, LAZY_BYTES, NotEnoughMemory
from references.formats import FORMATS, decode
from references.oracle import oracle

FAMILY_CASE = Case(heads=6, query_tokens=2, lengths=(150, 33), page_size=16, placement="permuted", seed=3)


def live_bits(inputs: Inputs) -> torch.Tensor:
    size = inputs.case.page_size
    cells = inputs.cache.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[inputs.cache.element_size()])
    return cells[inputs.slots // size, inputs.slots % size]


def digest(inputs: Inputs) -> str:
    query = inputs.query
    parts = [query.view(torch.uint8), live_bits(inputs).contiguous().view(torch.uint8), inputs.slots]
    return hashlib.sha256(b"".join(part.numpy().tobytes() for part in parts)).hexdigest()[:16]


def weights(inputs: Inputs) -> torch.Tensor:
    """Softmax weights of request 0 in fp64, [S, H, N]; by plain equations, for looking at families."""
    case, problem = inputs.case, inputs.problem()
    length = case.lengths[0]
    keys = decode(problem.cache, FORMATS[case.cache_format]).double()
    size = case.page_size
    slots = inputs.slots[:length]
    keys = keys[slots // size, slots % size] * case.cache_scale
    query = decode(problem.query[0], FORMATS[case.query_format]).double() * case.query_scale
    scores = query @ keys.T * case.softmax_scale
    hidden = torch.arange(length) > length - case.query_tokens + torch.arange(case.query_tokens)[:, None, None]
    return torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1)


@pytest.mark.parametrize("content", CONTENTS)
def test_the_same_case_gives_the_same_bytes(content: str) -> None:
    case = FAMILY_CASE.replace(content=content, cache_format="e4m3fn")
    assert digest(make_inputs(case)) == digest(make_inputs(case))
    assert digest(make_inputs(case)) != digest(make_inputs(case.replace(seed=4)))


def test_the_bytes_are_those_of_every_other_machine() -> None:
    """Pinned when first written: a change here breaks every case id and repro there is."""
    pinned = {content: digest(make_inputs(FAMILY_CASE.replace(content=content))) for content in CONTENTS}
    assert pinned == PINNED


@pytest.mark.parametrize("layout", QUERY_LAYOUTS)
def test_every_query_layout_holds_the_same_query(layout: str) -> None:
    plain = make_inputs(FAMILY_CASE)
    other = make_inputs(FAMILY_CASE.replace(query_layout=layout))
    assert torch.equal(plain.query.view(torch.int16), other.query.view(torch.int16))
    assert torch.equal(plain.query_nope, other.query_nope) and torch.equal(plain.query_rope, other.query_rope)
    assert other.query_nope.is_contiguous() == (layout == "split")


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("cache_format", FORMATS)
def test_everything_that_is_not_live_is_poison(placement: str, cache_format: str) -> None:
    case = FAMILY_CASE.replace(
        placement=placement, cache_format=cache_format, token_padding=16, page_padding=32, lengths=(40, 33)
    )
    for poison in ("nan", "large"):
        inputs = make_inputs(case.replace(poison=poison))
        known = FORMATS[cache_format]
        count = (inputs.cache.untyped_storage().nbytes() - 2 * GUARD_BYTES) // known.storage.itemsize
        pool = inputs.cache.as_strided((count,), (1,), inputs.cache.storage_offset())
        values = decode(pool, known)
        dead = torch.isnan(values) if poison == "nan" else values == known.maximum
        live = torch.zeros(len(values), dtype=torch.bool)
        pages, offsets = inputs.slots // case.page_size, inputs.slots % case.page_size
        starts = pages * inputs.cache.stride(0) + offsets * inputs.cache.stride(1)
        live[(starts[:, None] + torch.arange(case.width)).reshape(-1)] = True
        assert dead[~live].all()
        assert not torch.isnan(values[live]).any()


def test_outputs_begin_unwritten() -> None:
    inputs = make_inputs(FAMILY_CASE)
    assert torch.isnan(inputs.out).all() and inputs.lse is not None and torch.isnan(inputs.lse).all()
    assert make_inputs(FAMILY_CASE.replace(lse=False)).lse is None
    assert inputs.violations() == []


def test_a_pool_past_4_gib_takes_the_memory_of_its_live_rows() -> None:
    case = FAMILY_CASE.replace(placement="high", pool_rows=(1 << 32) // 576 + 100, cache_format="e4m3fn")
    inputs = make_inputs(case)
    assert inputs.cache.numel() > 1 << 32 > LAZY_BYTES
    assert int(inputs.slots.max()) * 576 > 1 << 32
    assert torch.isfinite(oracle(inputs.problem()).out).all()
    inputs.cache.view(torch.uint8)[-1, -1, 0] ^= 1
    assert [violation.fault for violation in inputs.violations()] == ["input-changed"]


def test_a_case_larger_than_the_machine_is_not_run() -> None:
    with pytest.raises(NotEnoughMemory, match="not run: needs"):
        make_inputs(Case(heads=1, lengths=(1 << 30,) * 4, page_size=64))


def test_normal_numbers_are_nearly_normal() -> None:
    sample = normal(stream(1, 1), 400_000).astype(np.float64)
    assert abs(sample.mean()) < 0.01 and abs(sample.std() - 1) < 0.01
    assert abs(np.mean(sample**4) - 2.7) < 0.05  # 3 - 6/(5 n) of a sum of n = 4 uniforms


def test_slot_signs_are_distinct_and_balanced() -> None:
    rows = slot_signs(np.arange(3000), 512)
    assert len(np.unique(rows, axis=0)) == 3000
    assert abs(rows.mean()) < 0.01
    assert np.abs(rows @ rows.T - 512 * np.eye(3000)).max() < 200


@pytest.mark.parametrize("scale", [2.0**-6, 0.037, 1.0, 8.0])
@pytest.mark.parametrize("formats", [("bf16", "bf16"), ("bf16", "e4m3fn"), ("e4m3fnuz", "e4m3fnuz"), ("e5m2", "e4m3fn")])
@pytest.mark.parametrize("amplitude", [1.0, 30.0])
def test_scores_have_the_amplitude_asked_for(scale: float, formats: tuple[str, str], amplitude: float) -> None:
    case = Case(
        heads=16, lengths=(800,), query_format=formats[0], cache_format=formats[1], query_scale=scale, cache_scale=2.3,
        amplitude=amplitude,
    )  # fmt: skip
    inputs = make_inputs(case)
    problem = inputs.problem()
    query = decode(problem.query, FORMATS[formats[0]]).double().reshape(16, -1)
    keys = decode(problem.cache, FORMATS[formats[1]]).double().reshape(-1, case.width)[: case.lengths[0]]
    scores = query @ keys.T * (case.softmax_scale * case.query_scale * case.cache_scale)
    assert 0.8 * amplitude < float(scores.std()) < 1.2 * amplitude


def test_needles_hold_nearly_all_the_weight_at_their_places() -> None:
    case = FAMILY_CASE.replace(content="needle", lengths=(500,))
    held = weights(make_inputs(case)).amax(dim=-1)
    assert held.median() > 0.99
    request = Request(case=case, index=0, slots=place(case).slots, aim=Aim.at(case))
    places = needle_places(request, 1)
    assert {0, 1, 15, 16, 63, 64, 65, 249, 250, 498, 499} <= set(places) and max(places) == 499
    assert max(needle_places(request, 0)) == 498


def test_the_newest_visible_token_holds_the_weight_and_a_hidden_one_would_take_it() -> None:
    case = FAMILY_CASE.replace(content="newest", query_tokens=3, lengths=(300,), heads=12)
    held = weights(make_inputs(case))
    assert (held.argmax(dim=-1) == torch.tensor([297, 298, 299])[:, None]).all()
    assert held.amax(dim=-1).min() > 0.9


def test_a_peak_holds_about_half_the_weight() -> None:
    held = weights(make_inputs(FAMILY_CASE.replace(content="peak-tail", lengths=(2000,), query_tokens=1)))
    assert 0.3 < held.amax(dim=-1).median() < 0.7


@pytest.mark.parametrize(("content", "end"), [("rising", -1), ("falling", 0)])
def test_climbing_scores_put_the_weight_at_their_end(content: str, end: int) -> None:
    held = weights(make_inputs(FAMILY_CASE.replace(content=content, lengths=(1000,), query_tokens=1)))
    pieces = held.reshape(6, 10, 100).sum(dim=-1)
    assert (pieces[:, end] > 0.5).all()


def test_ties_are_exact() -> None:
    held = weights(make_inputs(FAMILY_CASE.replace(content="ties", query_tokens=1)))
    assert all(len(torch.unique(row)) <= 4 for row in held.reshape(6, -1))


def test_a_zero_query_weighs_all_alike() -> None:
    held = weights(make_inputs(FAMILY_CASE.replace(content="zero-query", query_tokens=1)))
    assert torch.allclose(held, torch.full_like(held, 1 / 150))


@pytest.mark.parametrize("cache_format", FORMATS)
def test_ones_give_the_cache_scale(cache_format: str) -> None:
    inputs = make_inputs(FAMILY_CASE.replace(content="ones", cache_scale=0.037, cache_format=cache_format))
    assert torch.allclose(oracle(inputs.problem()).out, torch.tensor(0.037, dtype=torch.float64))


def test_slots_spell_themselves() -> None:
    inputs = make_inputs(FAMILY_CASE.replace(content="slots", cache_format="e4m3fn"))
    values = decode(live_bits(inputs).view(torch.float8_e4m3fn), FORMATS["e4m3fn"])[:, :512].numpy()
    assert np.array_equal(values, slot_signs(inputs.slots.numpy(), 512))


def test_edges_hold_the_extremes_of_the_format() -> None:
    inputs = make_inputs(FAMILY_CASE.replace(content="edges", cache_format="e4m3fn"))
    codes = set(live_bits(inputs)[:, 1::2].reshape(-1).tolist())
    assert {0x7E, 0xFE, 0x01, 0x81, 0x08, 0x88, 0x00, 0x80} <= codes


def test_every_family_is_finite_everywhere() -> None:
    for content in FAMILIES:
        for cache_format in FORMATS:
            case = FAMILY_CASE.replace(content=content, cache_format=cache_format, amplitude=100.0)
            answer = oracle(make_inputs(case).problem())
            assert torch.isfinite(answer.out).all(), (content, cache_format)


PINNED: dict[str, str] = {
    "gaussian": "3831b2d49be8d66c",
    "decorrelated": "359c844378689e62",
    "needle": "8f7a88cbd761e6bb",
    "newest": "ddeef4aee2b297d1",
    "peak-tail": "417d30942047e7e4",
    "rising": "2b7f34fbcd387511",
    "falling": "6a2df8d5c08a77ef",
    "sunken": "f8bee820250b4f54",
    "ties": "19a4b14e57f1243b",
    "zero-query": "3da0f6e309e99ebc",
    "ones": "3c0cb851409426b5",
    "slots": "da62f13d578d6fa0",
    "edges": "3556bd2f25a4ef0a",
}


def test_a_gpu_s_memory_has_room_for_the_backend_too() -> None:
    pool = Case(heads=2, lengths=(5,), pool_rows=4_000_000)
    small = Case(heads=2, lengths=(5,))
    for case, room in ((pool, BACKEND_BYTES), (small, needed_bytes(small, torch.device("cpu")))):
        assert needed_bytes(case, torch.device("cuda")) >= case.pool_rows * case.width * 2 + room
    assert needed_bytes(small, torch.device("cuda")) == 2 * needed_bytes(small, torch.device("cpu"))
