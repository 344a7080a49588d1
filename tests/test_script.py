"""A script stands alone: it makes the very bytes of its case, fails for a broken kernel and passes for the right one."""

from __future__ import annotations

import base64
import os
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from harness.backends import registry
from harness.backends.triton_splitkv import variant
from harness.backends.triton_splitkv_mistakes import MISTAKES
from harness.case import CONTENTS, Case
from harness.inputs import make_inputs
from harness.regimes import Regimes, load
from harness.script import write_script
from harness.script.buffers import describe
from harness.script.calls import call, sources_of
from harness.script.text import in_words
from references.formats import as_integers
from tests import stubs

STUB = "python:tests.stubs:"
SCALED = Case(heads=2, lengths=(9, 3), cache_format="e4m3fn", cache_scale=0.37, page_size=16, placement="permuted")


@pytest.fixture(scope="module")
def rules() -> Regimes:
    return load()


def run(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a script where nothing of the repository can be imported."""
    path = folder / "script.py"
    path.write_text(text, encoding="utf-8")
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LD_LIBRARY_PATH", "TRITON_CACHE_DIR") if name in os.environ}
    environment = {**kept, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, "-I", "-W", "ignore", str(path)],
        capture_output=True, text=True, cwd=folder, env=environment, timeout=300, check=False,
    )  # fmt: skip


def test_a_script_passes_for_the_right_kernel(rules: Regimes, tmp_path: Path) -> None:
    backend = registry.make("triton-splitkv")
    done = run(write_script(SCALED, backend, rules.of(backend.name, SCALED)), tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "right: 4 rows checked\n"


@pytest.mark.parametrize(
    ("mistake", "case", "said"),
    [
        ("drop-v-scale", SCALED, "WRONG out[0, 0, 0]: error norm"),
        ("lse-in-base-2", Case(heads=1, lengths=(9,)), "WRONG lse[0, 0, 0]: expected"),
        ("merge-without-lse", Case(heads=1, lengths=(129,)), "WRONG out[0, 0, 0]"),
    ],
)
def test_a_script_fails_for_a_broken_kernel(rules: Regimes, tmp_path: Path, mistake: str, case: Case, said: str) -> None:
    made = MISTAKES[mistake]
    backend = variant(mistake, made.old, made.new)
    text = write_script(case, backend, rules.of(backend.name, case))
    assert made.new in text  # the broken kernel can be read in it
    done = run(text, tmp_path)
    assert done.returncode == 1, done.stderr
    assert said in done.stdout
    assert "actual" in done.stdout


def test_a_kernel_that_crashes_fails_its_script(rules: Regimes, tmp_path: Path) -> None:
    made, case = MISTAKES["read-past-the-table"], Case(heads=1, lengths=(21,), table_padding=1)
    backend = variant("read-past-the-table", made.old, made.new)
    done = run(write_script(case, backend, rules.of(backend.name, case)), tmp_path)
    assert done.returncode not in (0, None)
    assert "Fault" in done.stderr


def test_a_script_calls_torch_alone_for_torch_sdpa(rules: Regimes, tmp_path: Path) -> None:
    backend = registry.make("torch-sdpa")
    done = run(write_script(SCALED, backend, rules.of(backend.name, SCALED)), tmp_path)
    assert done.returncode == 0, done.stderr


def made_by(source: str, inputs: Any) -> tuple[Tensor, list[Tensor], Tensor]:
    scope: dict[str, Any] = {"torch": torch, "np": np, "zlib": zlib, "base64": base64}
    exec(source, scope)
    return scope["query"], list(scope["rows"]), scope["pool"]


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("length", [5, 300])
def test_a_script_makes_the_very_bytes_of_its_case(content: str, length: int) -> None:
    case = Case(heads=2, query_tokens=2, lengths=(length, 7), page_size=4, placement="scattered", content=content,
                cache_format="e4m3fn", cache_scale=0.5, token_padding=16, page_padding=32, seed=3)  # fmt: skip
    inputs = make_inputs(case)
    buffers = describe(inputs)
    query, rows, pool = made_by(buffers.constants + buffers.data + buffers.pool, inputs)
    assert torch.equal(as_integers(query), as_integers(inputs.query))
    cells = as_integers(inputs.cache)
    mine = as_integers(pool).as_strided(cells.shape, cells.stride())
    assert torch.equal(mine, cells)
    assert [len(part) for part in rows] == list(case.lengths)


def test_a_large_pool_is_poisoned_where_that_of_the_case_is() -> None:
    inputs = make_inputs(Case(heads=1, lengths=(3,), placement="high", pool_rows=500_000))
    buffers = describe(inputs)
    pool = made_by(buffers.constants + buffers.data + buffers.pool, inputs)[2]
    for page in (0, 1, 499_995, *range(499_996, 500_000)):
        mine = as_integers(pool).as_strided((576,), (1,), page * 576)
        assert torch.equal(mine, as_integers(inputs.cache)[page, 0]), page


def test_plain_content_is_a_recipe_of_a_few_lines_and_other_content_comes_along() -> None:
    plain = describe(make_inputs(Case(heads=1, lengths=(500,))))
    assert "def normal" in plain.data
    assert len(plain.data) < 2_000
    assert "b64decode" in describe(make_inputs(Case(heads=1, lengths=(5,), content="edges"))).data
    assert describe(make_inputs(Case(heads=1, lengths=(500,), content="edges"))).needs == ("harness.content",)


def test_a_recipe_is_trusted_only_where_it_gives_the_very_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    from harness.script import buffers

    monkeypatch.setattr(buffers, "RECIPE", buffers.RECIPE.replace("2 * 65535", "2 * 65534"))
    assert "def normal" not in describe(make_inputs(Case(heads=1, lengths=(5,)))).data


@pytest.mark.parametrize(("layout", "table"), [("split", "ragged"), ("fused", "padded"), ("transposed", "ragged")])
def test_a_script_lays_its_buffers_out_as_the_case_does(rules: Regimes, tmp_path: Path, layout: str, table: str) -> None:
    """The packed backend runs on the script's own buffers; its answer is right only if all of them are."""
    case = Case(heads=2, query_tokens=2, lengths=(20, 9), page_size=4, placement="permuted", query_layout=layout, table=table)
    backend = registry.make("torch-sdpa")
    done = run(write_script(case, backend, rules.of(backend.name, case)), tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


class Public:
    """A stub whose kernel is somebody else's public function."""

    name, capabilities, public = "stub-public", stubs.Stub(name="x").capabilities, ("os.path", "join")

    def why_not(self, case: Case, device: torch.device) -> None:
        return None

    def run(self, inputs: Any) -> Any:
        raise NotImplementedError

    def arguments(self, inputs: Any) -> dict[str, Any]:
        rows = inputs.cache.view(-1, inputs.case.width)
        return {
            "q": inputs.query_nope,
            "q_first": inputs.query_nope[:, 0],
            "cache": rows,
            "rope": rows[:, inputs.case.latent :],
            "ids": torch.tensor([[1, 2]], dtype=torch.int32),
            "work": torch.empty(3, 4, dtype=torch.float32),
            "scale": 0.5,
            "missing": None,
            "o": inputs.out[:, 0],
            "joint": inputs.query.reshape(-1, inputs.case.heads, inputs.case.width),
            "many": torch.arange(9000, dtype=torch.int32).view(2, -1),
        }


def test_a_public_function_is_called_with_views_of_the_scripts_buffers() -> None:
    inputs = make_inputs(Case(heads=2, lengths=(5,)))
    lines = call(Public(), inputs).lines
    assert "from os.path import join" in lines
    assert "q=query_nope,\n" in lines
    scope = {"query_nope": inputs.query_nope, "cache": inputs.cache, "query": inputs.query.contiguous(), "out": inputs.out,
             "torch": torch, "DEVICE": "cpu", "zlib": zlib, "base64": base64}  # fmt: skip
    (made,) = [line.split(" = ", 1)[1] for line in lines.splitlines() if line.strip().startswith("given_out = ")]
    scope["given_out"] = eval(made, scope)
    for name, expected in Public().arguments(inputs).items():
        (expression,) = [line.strip().removeprefix(f"{name}=").rstrip(",") for line in lines.splitlines() if
                         line.strip().startswith(f"{name}=")]  # fmt: skip
        actual = eval(expression, scope)
        if not isinstance(expected, Tensor):
            assert actual == expected
        elif name == "work":
            assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
        else:
            assert actual.stride() == expected.stride()
            assert (
                torch.equal(as_integers(actual), as_integers(expected))
                if actual.is_floating_point()
                else torch.equal(actual, expected)
            )


def test_packed_sources_are_ours_and_all_that_they_import_of_ours() -> None:
    found = dict(sources_of(["harness.backends.triton_splitkv"]))
    assert {"harness/__init__.py", "harness/case.py", "harness/inputs.py", "references/formats.py"} <= set(found)
    assert all(name.startswith(("harness/", "references/")) for name in found)


def test_words_say_all_that_is_not_plain() -> None:
    words = in_words(SCALED.replace(token_padding=64))
    for said in ("2, cached tokens 9, 3", "e4m3fn, scale 0.37", "pages of 16", "permuted", "token padding   64"):
        assert said in words
