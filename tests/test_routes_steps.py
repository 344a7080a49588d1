"""Each step on a route does what the engine's does, and a step that is done wrongly is caught by the ordinary judge.

The right answer of a step is worked out here from the problem's own words: rounding by encode, heads by index, tables by slots.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from harness.backends.torch_sdpa import TorchSdpa
from harness.case import Case
from harness.inputs import Inputs, make_inputs
from harness.regimes import load
from harness.region import Region
from harness.routes.backend import Routed
from harness.routes.record import Call, Route, Rule
from harness.routes.steps import STEPS, Step
from harness.run import Result, run_case
from references.formats import FORMATS, decode, encode

BF16 = Case.parse("v1:H=12:S=3:N=130+64+5:T=16:place=permuted:layout=transposed:content=needle:qscale=1.7:lse=0:end")
FP8 = BF16.replace(cache_format="e4m3fn", cache_scale=0.37)
EVERY_STEP: Mapping[str, tuple[str, ...]] = {
    "join-query": ("join-query",),
    "split-query": ("join-query", "split-query"),
    "quantise-query": ("quantise-query 0.25",),
    "quantise by the cache's scale": ("quantise-query cache",),
    "dequantise-query": ("quantise-query 0.25", "dequantise-query"),
    "pad by repeating": ("pad-heads repeat 24",),
    "pad by tiling": ("pad-heads tile 16",),
    "pad by zeros": ("pad-heads zeros 16",),
    "fold-heads": ("fold-heads 4",),
    "flatten-tokens": ("flatten-tokens",),
    "pages-as-tokens": ("pages-as-tokens",),
    "ragged-tokens": ("ragged-tokens",),
    "all that vLLM does": ("quantise-query 0.25", "flatten-tokens", "pad-heads repeat/tile 16", "ragged-tokens"),
    "fold, then flatten": ("fold-heads 6", "flatten-tokens", "pages-as-tokens"),
}


def values(inputs: Inputs) -> Tensor:
    """Decode a query with its scale, fp32 [B, S, H, D]."""
    return decode(inputs.query, FORMATS[inputs.case.query_format]).float() * inputs.case.query_scale


def laid(case: Case, *calls: str, steps: Mapping[str, Step] = STEPS) -> tuple[Inputs, Inputs]:
    """Make the inputs of a case and what the steps make of them."""
    inner = inputs = make_inputs(case)
    for call in calls:
        name, _, argument = call.partition(" ")
        inner = steps[name].lay(inner, steps[name].ask(inner.case, argument), argument)
    return inputs, inner


def routed(*calls: str, name: str = "route:vllm-51011+torch-sdpa", steps: Mapping[str, Step] = STEPS) -> Routed:
    """Make a route of these steps over torch's attention."""
    made = tuple(Call(name=call.partition(" ")[0], argument=call.partition(" ")[2]) for call in calls)
    rule = Rule(
        where=Region(allowed={}), arch=(), settings={}, kernel="aiter-triton-grouped", steps=made, fallback=None, why="tested"
    )
    route = Route(
        name="tested", about="tested", source="here", aiter="", arch=("gfx950",), settings={}, serves=Region(allowed={}),
        before=(), rules=(rule,),
    )  # fmt: skip
    return Routed(name=name, route=route, kernels={"aiter-triton-grouped": Anything("anything")}, steps=steps)


class Anything(TorchSdpa):
    """torch's attention in place of a kernel whose contract does not matter here."""


@pytest.fixture(autouse=True)
def no_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.routes.contracts.Contracts.ask", lambda self, kernel, case: None)


def judged(case: Case, *calls: str, steps: Mapping[str, Step] = STEPS) -> Result:
    """Run a route of these steps and judge it by the rows of routes."""
    by_cache = any(call == "quantise-query cache" for call in calls)
    rounds = any(call.startswith("quantise") for call in calls)
    plain = case.cache_format == "e4m3fn" and not rounds
    name = "route:sglang-aiter+torch-sdpa" if by_cache else f"route:{'vllm-triton' if plain else 'vllm-51011'}+torch-sdpa"
    return run_case(case, routed(*calls, name=name, steps=steps), load())


# -- what each step makes --------------------------------------------------------------------------------------------------


def test_a_query_is_rounded_as_the_references_round_it_and_clamped() -> None:
    case = FP8.replace(content="gaussian", amplitude=100.0, softmax_scale=0.001)
    inputs, inner = laid(case, "quantise-query 0.25")
    expected = encode(values(inputs) / 0.25, FORMATS["e4m3fn"], saturate=True)
    assert torch.equal(inner.query.view(torch.uint8), expected.view(torch.uint8))
    assert (inner.case.query_format, inner.case.query_scale, float(inner.query_scale)) == ("e4m3fn", 0.25, 0.25)
    assert values(inner).abs().max() == 448 * 0.25, "nothing was clamped: the test asks nothing"


def test_a_query_is_rounded_by_the_caches_scale_where_the_engine_does_so() -> None:
    inputs, inner = laid(FP8, "quantise-query cache")
    assert inner.case.query_scale == 0.37 and not torch.equal(values(inner), values(inputs))
    assert (values(inner) - values(inputs)).abs().max() <= values(inputs).abs().max() / 16


def test_a_rounded_query_is_widened_with_its_scale_and_a_plain_one_left() -> None:
    _, rounded = laid(FP8, "quantise-query 0.25")
    _, widened = laid(FP8, "quantise-query 0.25", "dequantise-query")
    assert widened.case.query_format == "bf16" and torch.equal(values(widened), values(rounded))
    inputs, left = laid(BF16, "dequantise-query")
    assert left.case == inputs.case and left.query_nope is inputs.query_nope


@pytest.mark.parametrize(
    ("argument", "sources"),
    [
        ("repeat 24", [head for head in range(12) for _ in range(2)]),
        ("tile 16", [*range(12), 0, 1, 2, 3]),
        ("zeros 16", [*range(12), None, None, None, None]),
        ("repeat/tile 16", [*range(12), 0, 1, 2, 3]),
        ("repeat/tile 24", [head for head in range(12) for _ in range(2)]),
    ],
)
@pytest.mark.parametrize("first", [(), ("quantise-query 0.25",)])
def test_heads_are_filled_up_and_the_answer_is_sliced_back(
    argument: str, sources: list[int | None], first: tuple[str, ...]
) -> None:
    _, before = laid(FP8, *first)
    _, inner = laid(FP8, *first, f"pad-heads {argument}")
    assert inner.case.heads == len(sources)
    for head, source in enumerate(sources):
        expected = torch.zeros_like(values(before)[:, :, 0]) if source is None else values(before)[:, :, source]
        assert torch.equal(values(inner)[:, :, head], expected)
    answer = torch.arange(len(sources)).expand(3, 3, -1)[..., None]
    back = STEPS["pad-heads"].back(answer, before.case, argument)[0, 0, :, 0].tolist()
    assert [sources[head] for head in back] == list(range(12))


def test_heads_that_need_no_filling_stay() -> None:
    inputs, inner = laid(BF16.replace(heads=16), "pad-heads repeat/tile 16")
    assert inner.case.heads == 16 and torch.equal(values(inner), values(inputs))


def test_heads_are_folded_into_requests_with_the_same_pages() -> None:
    inputs, inner = laid(BF16, "fold-heads 4")
    assert (inner.case.heads, inner.case.batch, inner.case.lengths) == (4, 9, (130,) * 3 + (64,) * 3 + (5,) * 3)
    assert inner.block_table is not None and inputs.block_table is not None
    for request in range(3):
        for part in range(3):
            assert torch.equal(values(inner)[3 * request + part], values(inputs)[request, :, 4 * part : 4 * part + 4])
            assert torch.equal(inner.block_table[3 * request + part], inputs.block_table[request])
    answer = torch.arange(9 * 3 * 4).view(9, 3, 4)
    back = STEPS["fold-heads"].back(answer, inputs.case, "4")
    assert torch.equal(back[1, :, 4:8], answer[4])


@pytest.mark.parametrize("table", ["padded", "ragged"])
def test_tokens_are_flattened_to_requests_that_end_where_they_see_to(table: str) -> None:
    inputs, inner = laid(BF16.replace(table=table), "flatten-tokens")
    assert inner.case.lengths == (128, 129, 130, 62, 63, 64, 3, 4, 5)
    assert inner.lengths.tolist() == list(inner.case.lengths) and inner.case.query_tokens == 1
    assert torch.equal(values(inner)[:, 0], values(inputs).flatten(0, 1))


@pytest.mark.parametrize("table", ["padded", "ragged"])
@pytest.mark.parametrize("step", ["pages-as-tokens", "ragged-tokens"])
def test_pages_become_the_token_rows_that_the_slots_name(step: str, table: str) -> None:
    inputs, inner = laid(FP8.replace(table=table), step)
    assert inner.case.page_size == 1 and inner.cache.data_ptr() == inputs.cache.data_ptr(), "the cache is viewed, not copied"
    ends = [0, *torch.tensor(inputs.case.lengths).cumsum(0).tolist()]
    for request, length in enumerate(inputs.case.lengths):
        if step == "pages-as-tokens":
            assert inner.block_table is not None
            rows = inner.block_table[request, :length]
            assert not set(inner.block_table[request, length:].tolist()) & set(range(len(inner.cache)))
        else:
            assert inner.kv_indptr is not None and inner.kv_indices is not None
            assert inner.kv_indptr.tolist() == ends
            rows = inner.kv_indices[ends[request] : ends[request + 1]]
        assert rows.tolist() == inputs.slots[ends[request] : ends[request + 1]].tolist()


def test_a_joint_query_is_one_tensor_and_a_split_one_two() -> None:
    _, joint = laid(BF16, "join-query")
    assert joint.query_rope.data_ptr() - joint.query_nope.data_ptr() == 512 * 2 and joint.query_nope.stride(-2) == 576
    _, split = laid(BF16, "join-query", "split-query")
    assert split.query_nope.is_contiguous() and split.query_rope.is_contiguous()
    assert torch.equal(values(joint), values(split))


# -- judged ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("calls", EVERY_STEP.values(), ids=EVERY_STEP)
@pytest.mark.parametrize("case", [BF16, FP8, FP8.replace(table="ragged", query_layout="fused")], ids=["bf16", "fp8", "ragged"])
def test_a_step_done_right_passes(calls: tuple[str, ...], case: Case) -> None:
    if case.cache_format == "bf16" and any(call.startswith("quantise") for call in calls):
        case = case.replace(cache_format="e4m3fn")
    result = judged(case, *calls)
    assert result.verdict.kind == "PASS", result.verdict.message


def _altered(name: str, **changes: Callable[..., object]) -> Mapping[str, Step]:
    return {**STEPS, name: replace(STEPS[name], **changes)}


def _query_scaled(factor: float) -> Callable[[Inputs, Case, str], Inputs]:
    def lay(inputs: Inputs, case: Case, argument: str) -> Inputs:
        wrong = case.replace(query_scale=case.query_scale * factor)
        made = STEPS["quantise-query"].lay(inputs, case, argument)
        return replace(made, case=wrong, query_scale=made.query_scale * factor)

    return lay


def _truncated(inputs: Inputs, case: Case, argument: str) -> Inputs:
    """Cut the codes off towards zero instead of rounding them."""
    made = STEPS["quantise-query"].lay(inputs, case, argument)
    exact = values(inputs) / case.query_scale
    codes = made.query.contiguous().view(torch.uint8)
    codes = torch.where(made.query.float().abs() > exact.abs(), codes - 1, codes).view(torch.float8_e4m3fn)
    return replace(made, query_nope=codes[..., :512], query_rope=codes[..., 512:])


def _other_format(inputs: Inputs, case: Case, argument: str) -> Inputs:
    """Round to gfx942's fp8, whose codes mean half as much."""
    made = STEPS["quantise-query"].lay(inputs, case, argument)
    codes = (values(inputs) / case.query_scale).clamp(-240, 240).to(torch.float8_e4m3fnuz).view(torch.float8_e4m3fn)
    return replace(made, query_nope=codes[..., :512], query_rope=codes[..., 512:])


def _without_scale(inputs: Inputs, case: Case, argument: str) -> Inputs:
    made = STEPS["dequantise-query"].lay(inputs, case, argument)
    return replace(made, query_nope=made.query_nope * 4, query_rope=made.query_rope * 4)


def _whole_requests(inputs: Inputs, case: Case, argument: str) -> Inputs:
    """Let every token see its whole request: no causal tail (vllm-project/vllm #50476)."""
    made = STEPS["flatten-tokens"].lay(inputs, case, argument)
    lengths = tuple(length for length in inputs.case.lengths for _ in range(inputs.case.query_tokens))
    return replace(made, case=case.replace(lengths=lengths), lengths=torch.tensor(lengths, dtype=torch.int32))


def _tables_tiled(inputs: Inputs, case: Case, argument: str) -> Inputs:
    """Repeat the whole table instead of each row of it."""
    made = STEPS["fold-heads"].lay(inputs, case, argument)
    assert inputs.block_table is not None
    return replace(made, block_table=inputs.block_table.repeat(inputs.case.heads // case.heads, 1))


def _pages_kept(inputs: Inputs, case: Case, argument: str) -> Inputs:
    """Take page numbers for token rows."""
    made = STEPS["pages-as-tokens"].lay(inputs, case, argument)
    assert made.block_table is not None
    rows = made.block_table.clone()
    inside = (rows >= 0) & (rows < len(made.cache))
    return replace(made, block_table=torch.where(inside, rows // inputs.case.page_size, rows))


def _ends_late(inputs: Inputs, case: Case, argument: str) -> Inputs:
    """Begin every request but the first one row late."""
    made = STEPS["ragged-tokens"].lay(inputs, case, argument)
    assert made.kv_indptr is not None and made.kv_indices is not None
    return replace(made, kv_indices=made.kv_indices.roll(1))


def _rope_first(inputs: Inputs, case: Case, argument: str) -> Inputs:
    query = torch.cat([inputs.query_rope, inputs.query_nope], dim=-1)
    return replace(inputs, case=case, query_nope=query[..., :512], query_rope=query[..., 512:])


def _rope_lost(inputs: Inputs, case: Case, argument: str) -> Inputs:
    made = STEPS["split-query"].lay(inputs, case, argument)
    return replace(made, query_rope=torch.zeros_like(made.query_rope))


def _last_heads(out: Tensor, case: Case, argument: str) -> Tensor:
    return out[:, :, -case.heads :]


def _first_heads(out: Tensor, case: Case, argument: str) -> Tensor:
    return out[:, :, : case.heads]


def _every_other(out: Tensor, case: Case, argument: str) -> Tensor:
    return torch.cat([out, out], 2)[:, :, ::2][:, :, : case.heads]


def _parts_swapped(out: Tensor, case: Case, argument: str) -> Tensor:
    return STEPS["fold-heads"].back(out.flip(0).view(out.shape), case, argument).flip(0)


def _tokens_swapped(out: Tensor, case: Case, argument: str) -> Tensor:
    return out.reshape(case.query_tokens, case.batch, *out.shape[2:]).transpose(0, 1)


BROKEN: Mapping[str, tuple[tuple[str, ...], Mapping[str, Step]]] = {
    "the query's scale is dropped": (("quantise-query 0.25",), _altered("quantise-query", lay=_query_scaled(4.0))),
    "the query's scale is applied twice": (("quantise-query 0.25",), _altered("quantise-query", lay=_query_scaled(0.25))),
    "the query is cut off, not rounded": (("quantise-query 0.25",), _altered("quantise-query", lay=_truncated)),
    "the query is rounded to the other fp8": (("quantise-query 0.25",), _altered("quantise-query", lay=_other_format)),
    "the scale is lost when widening": (
        ("quantise-query 0.25", "dequantise-query"), _altered("dequantise-query", lay=_without_scale)
    ),
    "repeated heads are sliced as tiled ones": (("pad-heads repeat 24",), _altered("pad-heads", back=_first_heads)),
    "tiled heads are sliced as repeated ones": (("pad-heads tile 16",), _altered("pad-heads", back=_every_other)),
    "the wrong end of zeros is sliced": (("pad-heads zeros 16",), _altered("pad-heads", back=_last_heads)),
    "tables are tiled when folding": (("fold-heads 4",), _altered("fold-heads", lay=_tables_tiled)),
    "folded parts come back in another order": (("fold-heads 4",), _altered("fold-heads", back=_parts_swapped)),
    "flattened tokens see later ones": (("flatten-tokens",), _altered("flatten-tokens", lay=_whole_requests)),
    "flattened tokens come back in another order": (("flatten-tokens",), _altered("flatten-tokens", back=_tokens_swapped)),
    "pages are taken for tokens": (("pages-as-tokens",), _altered("pages-as-tokens", lay=_pages_kept)),
    "metadata begin one row late": (("ragged-tokens",), _altered("ragged-tokens", lay=_ends_late)),
    "the rope part is joined first": (("join-query",), _altered("join-query", lay=_rope_first)),
    "the rope part is lost in splitting": (("join-query", "split-query"), _altered("split-query", lay=_rope_lost)),
}  # fmt: skip


@pytest.mark.parametrize(("calls", "steps"), BROKEN.values(), ids=BROKEN)
def test_a_step_done_wrongly_is_caught(calls: tuple[str, ...], steps: Mapping[str, Step]) -> None:
    case = FP8.replace(content="gaussian", amplitude=3.0)
    assert judged(case, *calls).verdict.kind == "PASS"
    verdict = judged(case, *calls, steps=steps).verdict
    assert verdict.kind == "FAIL" and verdict.fault in {"mismatch", "non-finite", "unwritten", "crash"}, verdict.message


def test_every_step_has_a_wrong_one_that_is_caught() -> None:
    broken = {
        call.partition(" ")[0]
        for calls, steps in BROKEN.values()
        for call in calls
        if steps[call.split()[0]] != STEPS[call.split()[0]]
    }
    assert broken == set(STEPS)
