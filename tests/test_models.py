"""Wrong answers in closed form are the answers of the wrong problem."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import harness.weights as weighing
from harness.case import Case
from harness.inputs import make_inputs
from harness.models import MODELS, NULLS, SENSITIVITIES, View, Wrong
from harness.weights import weigh
from references.oracle import oracle
from references.problem import Answer, Problem

CASE = Case(
    heads=3, query_tokens=2, lengths=(70, 33), latent=64, rope=16, page_size=8, cache_scale=0.7, query_scale=1.9, seed=5
)
#: What fp64 sums leave of two equal answers.
NOISE = 1e-11


def view_of(case: Case, *requests: int) -> View:
    problem = make_inputs(case).problem()
    everything = weigh(problem, tuple(range(case.batch)))
    out = everything.sum_values(everything.probabilities)
    requests = requests or (0,)
    edges = [[32]] * len(requests)
    return View(case=case, weights=weigh(problem, requests), out=out, truth=out[list(requests)], split_edges=edges, tile=16)


def answer_of(view: View, change: Callable[[Problem], Problem]) -> Answer:
    return oracle(change(view.weights.problem))


def rows(tensor: Tensor, request: int) -> Tensor:
    return tensor[request].flatten(0, 1)


def agrees(wrong: Wrong | None, answer: Answer, request: int) -> None:
    assert wrong is not None
    expected = rows(answer.out, request)
    assert ((wrong.out[-1] - expected).norm(dim=-1) <= NOISE * expected.norm(dim=-1)).all()
    if wrong.lse is not None:
        assert (wrong.lse[-1] - rows(answer.lse, request)).abs().max() <= NOISE


def test_the_truth_in_weights_is_the_oracle_and_pieces_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = view_of(CASE, 1)
    monkeypatch.setattr(weighing, "PIECE", 16)
    pieces = view_of(CASE, 1)
    assert whole.weights.rows is not None and pieces.weights.rows is None
    for view in (whole, pieces):
        agrees(Wrong(out=view.truth, lse=view.weights.lse), oracle(view.weights.problem), 1)
    tokens = torch.tensor([[0, 20, 32]])
    assert torch.equal(whole.weights.values(tokens), pieces.weights.values(tokens))
    assert (whole.weights.norms() - pieces.weights.norms()).abs().max() <= NOISE
    assert (whole.weights.magnitudes() - pieces.weights.magnitudes()).abs().max() <= NOISE


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("key-scale-dropped", lambda problem: dataclasses.replace(problem, softmax_scale=problem.softmax_scale / 0.7)),
        ("query-scale-dropped", lambda problem: dataclasses.replace(problem, query_scale=1.0)),
        ("mean", lambda problem: dataclasses.replace(problem, softmax_scale=0.0)),
    ],
)
def test_a_null_model_is_the_answer_to_its_problem(name: str, change: Callable[[Problem], Problem]) -> None:
    view = view_of(CASE, 1)
    agrees(NULLS[name].answer(view), answer_of(view, change), 1)


def test_softmax_scale_off_is_the_answer_with_that_scale() -> None:
    view = view_of(CASE)
    changed = answer_of(view, lambda problem: dataclasses.replace(problem, softmax_scale=problem.softmax_scale * 1.01))
    agrees(SENSITIVITIES["softmax-scale-off"].answer(view), changed, 0)


def test_nulls_that_mix_up_rows_take_the_neighbours() -> None:
    view = view_of(CASE)
    truth = oracle(view.weights.problem).out
    expected = {
        "other-request": truth[1],
        "other-head": truth[0].roll(1, dims=1),
        "other-token": truth[0].roll(1, dims=0),
        "value-scale-dropped": truth[0] / 0.7,
        "zeros": torch.zeros_like(truth[0]),
    }
    for name, out in expected.items():
        wrong = NULLS[name].answer(view)
        assert wrong is not None
        assert (wrong.out - out.flatten(0, 1)).abs().max() <= NOISE, name


def test_the_query_model_is_the_best_multiple() -> None:
    view = view_of(CASE)
    wrong = NULLS["query-only"].answer(view)
    assert wrong is not None
    query = view.weights.query[..., :64]
    error = ((wrong.out - view.truth) * query).sum()
    assert error.abs() <= NOISE * (view.truth.norm() * query.norm())


def without(problem: Problem, tokens: list[int]) -> Problem:
    """Take tokens out of the first request, one for all query tokens; only rows that saw them all can be compared."""
    keep = [slot for index, slot in enumerate(problem.slots.tolist()) if index not in tokens]
    lengths = (problem.lengths[0] - len(tokens), *problem.lengths[1:])
    return dataclasses.replace(problem, slots=torch.tensor(keep), lengths=lengths)


def test_the_newest_token_dropped_is_the_answer_without_it() -> None:
    view = view_of(CASE.replace(query_tokens=1))
    agrees(SENSITIVITIES["newest-dropped"].answer(view), answer_of(view, lambda problem: without(problem, [69])), 0)


@pytest.mark.parametrize(("name", "token"), [("page-edge-dropped", 39), ("tile-edge-dropped", 47), ("split-edge-dropped", 31)])
def test_a_token_beside_an_edge_dropped_is_the_answer_without_it(name: str, token: int) -> None:
    view = view_of(CASE)
    agrees(SENSITIVITIES[name].answer(view), answer_of(view, lambda problem: without(problem, [token])), 0)


def test_every_other_request_loses_the_token_after_the_edge() -> None:
    view = view_of(CASE, 1)
    one = SENSITIVITIES["page-edge-dropped"].answer(view)
    assert one is not None
    problem = view.weights.problem
    keep = torch.cat([problem.slots[: 70 + 24], problem.slots[70 + 25 :]])
    agrees(one, oracle(dataclasses.replace(problem, slots=keep, lengths=(70, 32))), 1)


def test_a_foreign_page_is_the_answer_with_that_page_read_twice() -> None:
    view = view_of(CASE)

    def change(problem: Problem) -> Problem:
        slots = problem.slots.clone()
        slots[32:40] = slots[24:32]
        return dataclasses.replace(problem, slots=slots)

    agrees(SENSITIVITIES["foreign-page"].answer(view), answer_of(view, change), 0)


@pytest.mark.parametrize("name", MODELS)
def test_requests_side_by_side_answer_what_each_answers_alone(name: str) -> None:
    model = MODELS[name]
    case = CASE.replace(lengths=(70, 33, 7))
    together = model.answer(dataclasses.replace(view_of(case, 0, 1, 2), split_edges=[[32], [32], []]))
    assert together is not None
    for request in range(case.batch):
        alone = model.answer(dataclasses.replace(view_of(case, request), split_edges=[[32]] if request < 2 else [[]]))
        assert (alone is not None) == (together.applies is None or together.applies[request])
        if alone is not None:
            assert (together.out[request] - alone.out[0]).abs().max() <= NOISE
            assert (together.lse is None) == (alone.lse is None)
            if together.lse is not None and alone.lse is not None:
                assert (together.lse[request] - alone.lse[0]).abs().max() <= NOISE


def test_models_that_do_not_apply_say_nothing() -> None:
    plain = CASE.replace(heads=1, query_tokens=1, lengths=(1,), page_size=1, cache_scale=1.0, query_scale=1.0)
    view = dataclasses.replace(view_of(plain), split_edges=[[]], tile=0)
    silent = {name for name, model in MODELS.items() if model.answer(view) is None}
    assert silent == {
        "other-request", "other-head", "other-token", "value-scale-dropped", "key-scale-dropped", "query-scale-dropped",
        "page-edge-dropped", "tile-edge-dropped", "split-edge-dropped", "foreign-page",
    }  # fmt: skip


def test_a_row_that_saw_only_the_dropped_token_is_left_with_nothing() -> None:
    view = view_of(CASE.replace(lengths=(1, 5), query_tokens=1))
    wrong = SENSITIVITIES["newest-dropped"].answer(view)
    assert wrong is not None and not wrong.out.any()
    assert wrong.lse is not None and bool((wrong.lse == -torch.inf).all())
