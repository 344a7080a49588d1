"""Where AITER is found, and what is said when it is not there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from harness.backends import aiter_source
from harness.backends.aiter_source import SOURCE_VARIABLE, find_source, name_sources, named_sources, parse_source
from harness.backends.protocol import NotInstalled
from tests.aiter_checkout import make_checkout


@pytest.fixture(autouse=True)
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide an installed AITER and sources that the environment names."""
    monkeypatch.delenv(SOURCE_VARIABLE, raising=False)
    monkeypatch.setattr(aiter_source, "installed_source", lambda: None)


def test_a_directory_is_its_own_label(tmp_path: Path) -> None:
    source = parse_source(str(make_checkout(tmp_path / "mine")))
    assert source.label == "mine" and source.package == tmp_path / "mine" / "aiter"


def test_a_label_can_be_given(tmp_path: Path) -> None:
    assert parse_source(f"{make_checkout(tmp_path / 'mine')}=base").label == "base"


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotInstalled, match=r"gone.*is not a directory"):
        parse_source(str(tmp_path / "gone"))


def test_a_directory_that_is_not_aiter_is_refused_with_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(NotInstalled, match=r"is not AITER: it has no aiter/__init__\.py"):
        parse_source(str(tmp_path))


def test_another_package_of_the_same_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "aiter").mkdir()
    (tmp_path / "aiter" / "__init__.py").touch()
    with pytest.raises(NotInstalled, match=r"holds no 'ops' directory"):
        parse_source(str(tmp_path))


@pytest.mark.parametrize("label", ["a b", "a:b", "a@b"])
def test_a_label_that_a_name_cannot_hold_is_refused(tmp_path: Path, label: str) -> None:
    with pytest.raises(NotInstalled, match="has the label"):
        parse_source(f"{make_checkout(tmp_path)}={label}")


def test_two_sources_may_not_share_a_label(tmp_path: Path) -> None:
    text = os.pathsep.join(f"{make_checkout(tmp_path / name)}=x" for name in ("one", "two"))
    with pytest.raises(NotInstalled, match="share the label 'x'"):
        named_sources({SOURCE_VARIABLE: text})


def test_sources_of_a_command_line_reach_the_environment_once(tmp_path: Path) -> None:
    environment: dict[str, str] = {}
    text = str(make_checkout(tmp_path / "mine"))
    name_sources([text], environment)
    name_sources([text], environment)
    assert [source.label for source in named_sources(environment)] == ["mine"]


def test_without_a_label_the_only_source_answers(tmp_path: Path) -> None:
    environment = {SOURCE_VARIABLE: str(make_checkout(tmp_path / "mine"))}
    assert find_source(None, environment).label == "mine"


def test_without_a_label_several_sources_are_a_question(tmp_path: Path) -> None:
    text = os.pathsep.join(str(make_checkout(tmp_path / name)) for name in ("one", "two"))
    with pytest.raises(NotInstalled, match=r"several AITER sources are named \(one, two\).*aiter-gluon@one"):
        find_source(None, {SOURCE_VARIABLE: text})
    assert find_source("two", {SOURCE_VARIABLE: text}).label == "two"


def test_an_unknown_label_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(NotInstalled, match=r"no AITER source has the label 'other'; known: mine"):
        find_source("other", {SOURCE_VARIABLE: str(make_checkout(tmp_path / "mine"))})


def test_no_source_at_all_says_how_to_get_one() -> None:
    with pytest.raises(NotInstalled, match=r"neither installed nor named.*--aiter-source DIR"):
        find_source(None, {})
