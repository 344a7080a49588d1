"""The peers' rules say what their owners' do, and their rows are checked."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from harness.beside import ask, theirs
from harness.peers import PEERS, load

RULES, RECIPES = load()


@pytest.mark.parametrize("name", RULES)
def test_a_rule_accepts_the_truth_and_rejects_gross_mistakes(name: str) -> None:
    expected = torch.randn(2, 1, 4, 512, generator=torch.Generator().manual_seed(0))
    lse = torch.randn(2, 1, 4, generator=torch.Generator().manual_seed(1))
    assert RULES[name].accepts(expected, expected, lse, lse)
    assert not RULES[name].accepts(-3 * expected, expected, lse, lse)


def test_a_ratio_rule_counts_nan_as_one_bad_element() -> None:
    expected = torch.ones(1, 1, 1, 512)
    actual = expected.clone()
    actual[..., 0] = torch.nan
    assert RULES["GPU MODE mixed-mla"].accepts(actual, expected, None, expected[..., 0])
    assert not RULES["FlashMLA, dense"].accepts(actual, expected, None, expected[..., 0])


def test_every_rule_has_a_recipe_of_its_own() -> None:
    assert {name for recipe in RECIPES for name in recipe.rules} == set(RULES)


def test_on_its_own_inputs_a_rule_accepts_the_correct_model() -> None:
    recipe = next(recipe for recipe in RECIPES if recipe.name == "vLLM")
    counts = ask(theirs(recipe), [RULES[name] for name in recipe.rules], ["zeros"])
    assert all(count.rejected == 0 and count.found == {"zeros"} for count in counts.values())


@pytest.mark.parametrize(
    ("old", "new", "said"), [('kind = "cosine"', 'kind = "sine"', "needs a kind"), ('"CUTLASS 77"]', '"CUTLESS"]', "CUTLESS")]
)
def test_a_row_at_fault_is_named(tmp_path: Path, old: str, new: str, said: str) -> None:
    path = tmp_path / "peers.toml"
    path.write_text(PEERS.read_text(encoding="utf-8").replace(old, new, 1), encoding="utf-8")
    with pytest.raises(ValueError, match=said):
        load(path)
