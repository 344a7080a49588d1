"""Mutants are single edits of kernels, and those the gate does not catch are told with their line."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from harness import mutate
from harness.case import Case
from harness.inputs import make_inputs
from harness.judge import Known
from harness.mutants import OPERATORS, Mutant, mutants
from harness.mutate import equivalents, report
from harness.profiles import Profile
from harness.reached import reached, statements
from harness.regimes import load
from harness.targets import TARGETS
from harness.trials import FIRST, MORE, Fate, Question, best_first, questions, run

KERNEL = '''"""A kernel."""

SIZE = 64

@gluon.jit
def walk(Out, length, row_stride, page_stride, scale, WIDE: gl.constexpr):
    """Walk."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 64], [4, 1], [1, 0])
    row = gl.program_id(0).to(gl.int64)
    best = gl.full([16], float("-inf"), gl.float32, layout)
    for tile in range(length):
        wait_group(1)
        value = buffers.index(tile % 2).load()
        best = gl.maximum(best, gl.max(value * scale, 1))
    if WIDE:
        best = best - scale
    best = gl.where(best < length, best, 0.0)
    gl.store(Out + row * row_stride, best, mask=row < length)
'''


def made() -> list[Mutant]:
    return mutants(KERNEL)


def test_every_mutant_is_one_edit_that_parses() -> None:
    found = made()
    assert len({one.source for one in found}) == len(found) > 30
    for one in found:
        ast.parse(one.source)
        changed = [n for n, (a, b) in enumerate(zip(KERNEL.splitlines(), one.source.splitlines(), strict=True), 1) if a != b]
        assert changed == [one.line], one


@pytest.mark.parametrize("operator", [name for name in OPERATORS if name != "other bound"])
def test_every_operator_has_something_to_change(operator: str) -> None:
    assert any(one.operator == operator for one in made()), operator


def test_layouts_and_other_code_are_left_alone() -> None:
    assert not any("Layout" in one.text or one.text.startswith("SIZE") for one in made())


@pytest.mark.parametrize("backend", ["gluon-splitkv", "triton-splitkv"])
def test_a_kernel_of_ours_has_hundreds_of_mutants_of_most_operators(backend: str) -> None:
    found = mutants(TARGETS[backend].path().read_text(encoding="utf-8"))
    assert len(found) > 300 and len({one.operator for one in found}) >= 12


def test_recorded_equivalents_stand_in_the_kernels() -> None:
    for backend in ("gluon-splitkv", "triton-splitkv"):
        keys = {one.key for one in mutants(TARGETS[backend].path().read_text(encoding="utf-8"))}
        assert set(equivalents(backend)) <= keys


def test_an_equivalent_without_a_reason_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "equivalent.toml"
    path.write_text('[[mutant]]\nbackend = "b"\nline = "x"\nold = "1"\nnew = "2"\nwhy = " "\n', encoding="utf-8")
    with pytest.raises(ValueError, match="needs a reason"):
        equivalents("b", path)


def fate(one: Mutant, end: str, by: str = "mismatch") -> Fate:
    return Fate(mutant=one, end=end, by=by, cases=1, seconds=0.1)


def test_the_score_leaves_out_the_equivalent_and_the_stillborn() -> None:
    a, b, c, d = made()[:4]
    text, score = report(
        "b", [fate(a, "caught"), fate(b, "survived"), fate(c, "survived"), fate(d, "stillborn")], {c.key: "why"}
    )
    assert score == 0.5
    assert f"survives: {b}" in text and b.text in text and str(c) not in text


def test_a_line_that_no_case_executes_is_a_hole_unless_only_some_regimes_were_asked() -> None:
    a, b = made()[:2]
    fates = [fate(a, "caught"), fate(b, "unreached", "")]
    assert report("b", fates, {})[1] == 0.5 and "survives unreached" in report("b", fates, {})[0]
    text, score = report("b", fates, {}, part=True)
    assert score == 1.0 and "1 stand in lines that no case executes" in text


def test_the_lines_that_a_run_executes_count_by_statement(tmp_path: Path) -> None:
    source = "def walk(n):\n    if n > (\n        1\n    ):\n        n = (\n            n\n        )\n    return n\n"
    path = tmp_path / "kernel.py"
    path.write_text(source, encoding="utf-8")
    names: dict[str, Any] = {}
    exec(compile(source, str(path), "exec"), names)
    with reached(path) as lines:
        names["walk"](0)
    whole = statements(source)
    assert {line for part in lines for line in whole[part]} == {2, 3, 4, 8}


def test_a_record_that_is_caught_is_told() -> None:
    one = made()[0]
    text, _ = report("b", [fate(one, "caught")], {one.key: "why"})
    assert "recorded as equivalent, yet caught" in text


def test_the_cases_that_caught_most_in_least_time_are_asked_first() -> None:
    cases = [Case(heads=heads, lengths=(1,)) for heads in (1, 2, 3, 4)]
    regime = load().named("model-splits")
    asked = [
        Question(inputs=make_inputs(case), regime=regime, known=Known(), seconds=seconds, lines=frozenset())
        for case, seconds in zip(cases, (0.1, 0.1, 0.1, 2.0), strict=True)
    ]
    order = best_first(asked, {cases[2]: 5, cases[3]: 6})
    assert [question.inputs.case for question in order] == [cases[2], cases[3], cases[0], cases[1]]


def test_a_regime_that_the_backend_does_not_have_is_refused() -> None:
    target = TARGETS["triton-splitkv"]
    with pytest.raises(ValueError, match="no regime of triton-splitkv is called bh16"):
        questions(target.build(target.path()), target.path(), count=1, seed=0, regimes=["bh16"])


def test_what_lives_is_asked_further_cases(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[tuple[int, int, Sequence[Profile]]] = []

    def stand_in(backend: str, chosen: Sequence[Mutant], **options: Any) -> list[Fate]:
        asked.append((len(chosen), options["count"], options["profiles"]))
        ends = ["survived", "caught"] if len(asked) == 1 else ["caught"]
        return [fate(one, end) for one, end in zip(chosen, ends, strict=True)]

    monkeypatch.setattr(mutate, "run", stand_in)
    assert mutate.main(["--backend", "triton-splitkv", "--sample", "2", "--cases", "3", "--more", "5"]) == 0
    assert asked == [(2, 3, FIRST), (1, 5, MORE)]
    assert "2 of 2 mutants caught" in capsys.readouterr().out


def test_mutants_of_the_triton_kernel_are_caught() -> None:
    found = mutants(TARGETS["triton-splitkv"].path().read_text(encoding="utf-8"))
    chosen = [one for one in found if one.old == "score * scale"][:2]
    fates = run("triton-splitkv", chosen, count=12, seed=0, processes=1)
    assert [one.end for one in fates] == ["caught"] * len(chosen), report("triton-splitkv", fates, {})[0]
