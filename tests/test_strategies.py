"""Random cases lie where they were asked to lie, reach every edge, and shrink to plain ones."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest
import torch
from hypothesis import HealthCheck, Phase, find, given, settings

from harness.acceptance import acceptance
from harness.axes import AXES, DENSE, Axis, lengths_table
from harness.backends import registry
from harness.backends.protocol import Capabilities
from harness.case import CONTENTS, Case
from harness.kernel_sets import kernel_sets
from harness.plan import Pair
from harness.profiles import PROFILES
from harness.regimes import load
from harness.strategies import NoSuchCase, beyond, cases, domain
from tests.stubs import make, write_regimes

CPU = torch.device("cpu")
SMOKE = PROFILES["smoke"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    regimes = load(write_regimes(tmp_path_factory.mktemp("regimes")))
    return Pair(backend=make("python:tests.stubs:right"), regime=regimes.named("few-heads"))


def draw(pair: Pair, count: int, profile: str = "smoke") -> list[Case]:
    drawn: list[Case] = []

    @hypothesis.seed(2)
    @settings(max_examples=count, database=None, deadline=None, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(cases(pair.regime, PROFILES[profile], pair.backend))
    def collect(case: Case) -> None:
        drawn.append(case)

    collect()
    return drawn


@pytest.fixture(scope="module")
def drawn(pair: Pair) -> list[Case]:
    return draw(pair, 400)


def test_every_drawn_case_lies_in_the_regime_and_the_contract(pair: Pair, drawn: list[Case]) -> None:
    accepts = acceptance(pair.regime, pair.backend)
    assert all(accepts(case) for case in drawn)


def test_no_draw_is_thrown_away(pair: Pair, drawn: list[Case]) -> None:
    assert len(drawn) == 400


def test_the_same_seed_draws_the_same_cases(pair: Pair) -> None:
    assert draw(pair, 30) == draw(pair, 30)


@pytest.fixture(scope="module")
def anything() -> list[Case]:
    """Draw cases of a backend that accepts all."""
    return draw(Pair(backend=registry.make("torch-sdpa"), regime=load().named("sdpa-fp32")), 600)


def test_a_case_is_no_near_copy_of_one_before_it(anything: list[Case]) -> None:
    fields = Case.__dataclass_fields__
    drawn = anything[100:]  # Hypothesis begins with some of the plainest
    copies = {
        case
        for place, case in enumerate(drawn)
        for before in drawn[max(0, place - 6) : place]
        if sum(getattr(case, field) != getattr(before, field) for field in fields) <= 2
    }
    assert len(copies) < len(drawn) // 20


#: Where kernels are wrong alone: each must be asked in any run.
CORNERS: dict[str, Callable[[Case], bool]] = {
    "many heads, long": lambda case: case.heads >= 16 and max(case.lengths) > 256,
    "more heads than a tile": lambda case: case.heads > 64,
    "more query rows than two tiles": lambda case: case.heads * case.query_tokens > 128,
    "many query tokens": lambda case: case.query_tokens > 8,
    "long, several query tokens and heads": lambda case: max(case.lengths) > 256 and min(case.query_tokens, case.heads) > 1,
    "several query tokens, one cached": lambda case: any(0 < length < case.query_tokens for length in case.lengths),
    "as many tokens as query tokens": lambda case: 1 < case.query_tokens in case.lengths,
    "an empty request before another": lambda case: 0 in case.lengths[:-1] and max(case.lengths) > 0,
    "one token": lambda case: 1 in case.lengths,
    "more than four requests": lambda case: case.batch > 4,
    "one long request among short ones": lambda case: case.batch > 1 and max(case.lengths) > 4 * max(1, min(case.lengths)),
    "pages that are shared": lambda case: case.placement == "shared" and sum(n > case.page_size for n in case.lengths) > 1,
    "pages larger than a tile": lambda case: case.page_size > 128,
    "several large pages": lambda case: case.page_size >= 64 and max(case.lengths) > 2 * case.page_size,
    "pages that divide no tile": lambda case: 64 % case.page_size != 0 and case.page_size % 64 != 0,
    "a high pool, ragged": lambda case: case.pool_rows > 0 and case.table == "ragged" and case.page_size > 1,
    "padded rows in pages": lambda case: case.token_padding > 0 and case.page_size > 1,
    "transposed, every axis": lambda case: (
        case.query_layout == "transposed" and min(case.batch, case.query_tokens, case.heads) > 1
    ),
    "fused, ragged, several query tokens": lambda case: (
        (case.query_layout, case.table) == ("fused", "ragged") and case.query_tokens > 1
    ),
    "no lse, several query tokens": lambda case: not case.lse and case.query_tokens > 1,
    "a small scale": lambda case: case.cache_scale < 0.001,
    "a large scale": lambda case: case.cache_scale > 100,
    "widths that are no powers of two": lambda case: case.latent == 192,
    "no rope part": lambda case: case.rope == 0,
}


@pytest.mark.parametrize("corner", CORNERS)
def test_corners_are_drawn(anything: list[Case], corner: str) -> None:
    assert sum(map(CORNERS[corner], anything)) >= len(anything) // 100


def test_large_batches_are_drawn_where_there_is_room() -> None:
    made = draw(Pair(backend=registry.make("torch-sdpa"), regime=load().named("sdpa-fp32")), 200, "gate")
    assert max(case.batch for case in made) >= 64
    assert sum(case.batch <= 4 for case in made) > 80
    large = [case for case in made if case.batch > 8]
    assert any(len(set(case.lengths)) > 4 for case in large)


def test_every_value_of_every_axis_is_drawn(pair: Pair, drawn: list[Case]) -> None:
    known = domain(pair.regime, SMOKE, acceptance(pair.regime, pair.backend))
    for axis in known.axes:
        found = {tuple(getattr(case, field) for field in axis.fields) for case in drawn}
        assert found == set(axis.values), axis.fields
    assert {case.content for case in drawn} == set(CONTENTS)


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 127, 128, 129])
def test_edges_are_drawn(drawn: list[Case], length: int) -> None:
    assert any(length in case.lengths for case in drawn)


def test_some_requests_are_shorter_than_their_query_tokens(drawn: list[Case]) -> None:
    assert any(0 < min(case.lengths) < case.query_tokens for case in drawn)


def test_most_cases_are_small_and_some_are_large(drawn: list[Case]) -> None:
    sizes = sorted(max(case.lengths) for case in drawn)
    assert sizes[len(sizes) // 2] <= 2 * DENSE
    assert sizes[-1] > SMOKE.longest // 2


@pytest.mark.parametrize("profile", PROFILES)
def test_a_profile_bounds_the_size_of_its_cases(pair: Pair, profile: str) -> None:
    limits = PROFILES[profile]
    for case in draw(pair, 60, profile):
        assert max(case.lengths) <= limits.longest
        assert case.batch <= limits.batch
        # One request is always kept, and one head and query token are never too many.
        assert case.batch == 1 or sum(case.lengths) <= limits.tokens
        assert case.heads * case.query_tokens == 1 or case.heads * case.query_tokens * sum(case.lengths) <= limits.scores


def test_edges_are_drawn_more_often_than_their_neighbours() -> None:
    counts = Counter(lengths_table(1000))
    assert counts[64] > counts[60] == 1
    assert set(range(DENSE)) <= set(counts)
    assert {511, 512, 513} <= set(counts)


def test_a_table_of_lengths_ascends() -> None:
    table = lengths_table(5000, tiles=(96,))
    assert list(table) == sorted(table)
    assert {95, 96, 97, 96 * 8 + 1} <= set(table)
    assert max(table) <= 5000


def test_shrinking_heads_for_the_plain_case(pair: Pair) -> None:
    strategy = cases(pair.regime, SMOKE, pair.backend)
    quiet = settings(database=None, deadline=None, suppress_health_check=list(HealthCheck), max_examples=500)
    assert find(strategy, lambda case: True, settings=quiet) == Case(heads=1, lengths=(0,))
    assert find(strategy, lambda case: max(case.lengths) >= 65, settings=quiet) == Case(heads=1, lengths=(65,))
    shrunk = find(strategy, lambda case: case.page_size > 1 and case.placement != "identity", settings=quiet)
    assert (shrunk.page_size, shrunk.placement, shrunk.heads, shrunk.batch) == (2, "permuted", 1, 1)


def test_clashing_axes_move_towards_the_plain_case_instead_of_being_thrown_away(pair: Pair) -> None:
    """A backend that accepts paddings only with page size 1 gets cases of both sides, and no rejected ones."""

    class Picky:
        name, capabilities = pair.backend.name, pair.backend.capabilities

        def why_not(self, case: Case, device: torch.device) -> str | None:
            if case.page_size > 1 and (case.token_padding or case.query_tokens > 1):
                return "cannot"
            return pair.backend.why_not(case, device)

        run = pair.backend.run

    made = draw(Pair(backend=Picky(), regime=pair.regime), 300)
    assert all(Picky().why_not(case, CPU) is None for case in made)
    assert any(case.token_padding for case in made)
    assert any(case.page_size > 1 for case in made)


def test_a_value_that_is_accepted_only_beside_another_is_drawn(pair: Pair) -> None:
    """Here odd lengths need the large poison, which the plain case does not have."""

    class Picky:
        name, capabilities, run = pair.backend.name, pair.backend.capabilities, pair.backend.run

        def why_not(self, case: Case, device: torch.device) -> str | None:
            odd = any(length % 2 for length in case.lengths)
            return "cannot" if odd and case.poison == "nan" else pair.backend.why_not(case, device)

    made = draw(Pair(backend=Picky(), regime=pair.regime), 200)
    assert all(Picky().why_not(case, CPU) is None for case in made)
    assert any(length % 2 for case in made for length in case.lengths)


def test_a_regime_without_an_accepted_case_is_an_error(pair: Pair) -> None:
    class Never:
        name, capabilities, run = pair.backend.name, pair.backend.capabilities, pair.backend.run

        def why_not(self, case: Case, device: torch.device) -> str | None:
            return "never"

    with pytest.raises(NoSuchCase, match="no case of this regime"):
        cases(pair.regime, SMOKE, Never())


def test_a_regime_that_needs_many_long_requests_is_entered(tmp_path: Path) -> None:
    text = write_regimes(tmp_path).read_text().replace(
        "heads = { min = 1, max = 4 }", "heads = { min = 1, max = 4 }\nbatch = { min = 64, max = 128, multiple_of = 64 }\n"
        "lengths = { min = 200, max = 4000 }"
    )  # fmt: skip
    path = tmp_path / "wide.toml"
    path.write_text(text)
    pair = Pair(backend=make("python:tests.stubs:right"), regime=load(path).named("few-heads"))
    accepts = acceptance(pair.regime, pair.backend)
    assert beyond(pair.regime, SMOKE, accepts) is None
    tiny = dataclasses.replace(SMOKE, scores=100)
    assert "scores" in str(beyond(pair.regime, tiny, accepts))
    made = draw(pair, 20)
    assert made
    assert all(case.batch == 64 and min(case.lengths) >= 200 for case in made)


def test_plain_values_stand_first_in_every_axis() -> None:
    plain = Case(heads=1, lengths=(1,))
    for axis in AXES:
        assert axis.values[0] == tuple(getattr(plain, field) for field in axis.fields)
        assert len(set(axis.values)) == len(axis.values)
    fields = list(itertools.chain.from_iterable(axis.fields for axis in AXES))
    assert len(set(fields)) == len(fields)
    assert set(Case.__dataclass_fields__) - set(fields) == {"heads", "query_tokens", "lengths", "seed"}


def test_on_a_gpu_the_fields_that_kernels_are_compiled_for_come_in_few_sets(pair: Pair) -> None:
    compiled = frozenset({"heads", "page_size", "latent", "rope", "token_padding"})
    backend = dataclasses.replace(pair.backend, capabilities=Capabilities(compiled=compiled))  # type: ignore[type-var]
    accepts = acceptance(pair.regime, backend, "cuda")
    known = domain(pair.regime, SMOKE, accepts)
    heads = Axis(fields=("heads",), values=tuple((count,) for count in known.heads))
    sets = {tuple(sorted(made.items())) for made in kernel_sets((heads, *known.axes), compiled, 8, 3)}
    assert len({value for made in sets for name, value in made if name == "page_size"}) == SMOKE.kernels == 8
    found, drawn = set(), []

    @hypothesis.seed(1)
    @settings(max_examples=200, database=None, deadline=None, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(cases(pair.regime, SMOKE, backend, "cuda", seed=3))
    def collect(case: Case) -> None:
        drawn.append(case)
        found.add(tuple((name, getattr(case, name)) for name in sorted(compiled)))
        assert case.batch == 1 or case.heads * case.query_tokens * sum(case.lengths) <= SMOKE.scores

    collect()
    assert found <= sets and len(found) >= 4
    assert len({case.lengths for case in drawn}) > 100


def test_the_first_set_of_kernels_is_the_plainest(pair: Pair) -> None:
    known = domain(pair.regime, SMOKE, acceptance(pair.regime, pair.backend))
    first = kernel_sets(known.axes, frozenset({"page_size", "table", "latent"}), 5, 1)[0]
    assert first == {"page_size": 1, "table": "padded", "latent": 512, "rope": 64}
