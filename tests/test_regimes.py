"""The regimes file: what is read from it, and that every fault in it is named with its row."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.case import Case
from harness.regimes import RELATIONS, RULES, NoRegime, RegimesError, load
from references.formats import FORMATS

LIMITS = """
schema = 1
[limits.strict]
false_alarm = 1e-9
hard = 1.0
lse = 1.0
conditioned = 30.0
distinct = 1e-9
doubt = 16.0
why = "for the test"
"""
ROW = """
[[regime]]
name = "narrow"
backends = ["triton-splitkv*"]
limits = "strict"
accuracy = 0.02
exact = ["repeat"]
why = "for the test"
where = { heads = { max = 16 }, cache_format = ["bf16"] }
arithmetic = { probability = "bf16", output = "bf16" }
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "rules.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_row_is_read_as_it_stands(tmp_path: Path) -> None:
    regimes = load(written(tmp_path, LIMITS + ROW))
    regime = regimes.of("triton-splitkv@main", Case(heads=12, lengths=(5,)))
    assert (regime.name, regime.accuracy, regime.exact) == ("narrow", 0.02, frozenset({"repeat"}))
    assert (regime.limits.false_alarm, regime.arithmetic.probability) == (1e-9, "bf16")
    assert regimes.named("narrow") is regime
    assert regimes.for_backend("another") == ()


def test_a_case_without_a_regime_says_what_kept_it_out(tmp_path: Path) -> None:
    path = written(tmp_path, LIMITS + ROW)
    regimes = load(path)
    with pytest.raises(NoRegime, match=r"narrow: heads 17 is not 1 to 16.*rules\.toml"):
        regimes.of("triton-splitkv", Case(heads=17, lengths=(5,)))
    with pytest.raises(NoRegime, match="no row names this backend"):
        regimes.of("another", Case(heads=1, lengths=(5,)))
    with pytest.raises(NoRegime, match=r"rules\.toml has narrow"):
        regimes.named("wide")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("schema = 1", "schema = 2", "schema is 2"),
        ("schema = 1", "", "lacks schema"),
        ("[limits.strict]", "[limits.lax]", "names the limits 'strict': the file has lax"),
        ("hard = 1.0", "hard = 0.0", r"limits 'strict': hard must be a positive float"),
        ("hard = 1.0", "hard = 1", "hard must be a positive float"),
        ("false_alarm = 1e-9", "false_alarm = 2.0", "probability below 1"),
        ("doubt = 16.0", "", "limits 'strict' lacks doubt"),
        ("doubt = 16.0", "doubt = 16.0\nhope = 1.0", "limits 'strict' has no key hope"),
        ('doubt = 16.0\nwhy = "for the test"', 'doubt = 16.0\nwhy = " "', "limits 'strict' needs a reason"),
        ("accuracy = 0.02", "", r"regime 'narrow' \(row 1\) lacks accuracy"),
        ("accuracy = 0.02", "accuracy = -1.0", "accuracy must be a positive float"),
        ("accuracy = 0.02", "accuracy = 0.02\ncolour = 3", r"regime 'narrow' \(row 1\) has no key colour"),
        ('exact = ["repeat"]\nwhy = "for the test"', 'exact = ["repeat"]\nwhy = ""', r"'narrow' \(row 1\) needs a reason"),
        ('exact = ["repeat"]', 'exact = ["replay"]', "exact names replay, which is none of repeat"),
        ('backends = ["triton-splitkv*"]', "backends = []", "covers no backend"),
        ('backends = ["triton-splitkv*"]', 'backends = "triton-splitkv"', "backends takes a list of names"),
        ('name = "narrow"', 'name = "two words"', "needs a name of one word"),
        ('name = "narrow"', 'name = "a/b"', "letters, digits, dots and dashes, not 'a/b'"),
        ('name = "narrow"', 'name = ".."', "letters, digits, dots and dashes"),
        ('backends = ["triton-splitkv*"]', 'backends = ["triton-splitvk*"]', "'triton-splitvk.', which no backend is called"),
        ('backends = ["triton-splitkv*"]', 'backends = ["model"]', "'model', which no backend is called: there are torch-sdpa"),
        ("accuracy = 0.02", "accuracy = 1e9", "accuracy must be a positive float below 1, for zeros are 1 off; not 1000000000"),
        ('output = "bf16" }', 'output = "bf16", tile = 600000000000 }', r"row 1\): tile is 65536 at most, not 600000000000"),
        ('output = "bf16" }', 'output = "bf16", splits = { kind = "even", count = 2, tile = 70000 } }', "splits.tile is 65536"),
        ('output = "bf16" }', 'output = "bf16", splits = { kind = "even", count = 70000 } }', "splits.count is 65536"),
        ("max = 16", "max = 0", r"'narrow' \(row 1\): heads leaves no value"),
        ('["bf16"] }', '["fp9"] }', r"'narrow' \(row 1\): cache_format cannot be 'fp9'"),
        ('probability = "bf16"', 'probability = "fp9"', r"'narrow' \(row 1\): .*fp9"),
        ('probability = "bf16"', 'probabilty = "bf16"', r"'narrow' \(row 1\): .*probabilty"),
        ('output = "bf16" }', 'output = "bf16", splits = { kind = "odd" } }', r"'narrow' \(row 1\): .*odd"),
        ("[[regime]]", "[[regime", "cannot be read as TOML"),
    ],
)
def test_a_fault_in_the_file_is_named_with_its_row_and_file(tmp_path: Path, old: str, new: str, message: str) -> None:
    text = LIMITS + ROW
    assert old in text
    path = written(tmp_path, text.replace(old, new, 1))
    with pytest.raises(RegimesError, match=message) as caught:
        load(path)
    assert str(path) in str(caught.value)


def test_rows_that_claim_the_same_case_are_refused(tmp_path: Path) -> None:
    other = ROW.replace('"narrow"', '"other"')
    with pytest.raises(RegimesError, match="regimes 'narrow' and 'other' overlap"):
        load(written(tmp_path, LIMITS + ROW + other.replace("triton-splitkv*", "*-splitkv")))
    assert len(load(written(tmp_path, LIMITS + ROW + other.replace('["bf16"] }', '["fp16"] }'))).rows) == 2
    assert len(load(written(tmp_path, LIMITS + ROW + other.replace("triton-splitkv*", "torch-sdpa"))).rows) == 2
    with pytest.raises(RegimesError, match="two rows are called 'narrow'"):
        load(written(tmp_path, LIMITS + ROW + ROW.replace("triton-splitkv*", "torch-sdpa")))


def test_a_file_that_is_not_there_is_an_error_of_the_file(tmp_path: Path) -> None:
    with pytest.raises(RegimesError, match="absent"):
        load(tmp_path / "absent.toml")


def test_the_projects_own_file_holds(tmp_path: Path) -> None:
    regimes = load()
    assert regimes.path == RULES
    assert regimes is load()
    for row in regimes.rows:
        assert row.exact <= set(RELATIONS)


@pytest.mark.parametrize("cache_format", FORMATS)
@pytest.mark.parametrize("query_format", FORMATS)
def test_torch_sdpa_has_a_regime_for_every_pair_of_formats(query_format: str, cache_format: str) -> None:
    load().of("torch-sdpa", Case(heads=1, lengths=(1,), query_format=query_format, cache_format=cache_format))


@pytest.mark.parametrize(
    ("backend", "case", "name"),
    [
        ("aiter-gluon", Case(heads=12, lengths=(300,), cache_format="e4m3fn"), "bh16bn128"),
        ("aiter-gluon@v0.1.20", Case(heads=96, lengths=(300,)), "bh16bn64"),
        ("aiter-gluon", Case(heads=128, lengths=(300,)), "bh64"),
        ("triton-splitkv", Case(heads=12, lengths=(300,), query_format="fp16", cache_format="e5m2"), "splitkv-fp16"),
    ],
)
def test_a_case_finds_the_row_of_its_kernel(backend: str, case: Case, name: str) -> None:
    assert load().of(backend, case).name == name
