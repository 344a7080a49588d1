"""What Triton refuses is refused, with the line; what it does not look at is not looked at."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", minversion="3.6")

from harness.emulation import EmulationFault, emulate, run_all_extremes
from tests.emulation import misused


def line_of(plant: str) -> int:
    for number, text in enumerate(Path(misused.__file__).read_text(encoding="utf-8").splitlines(), 1):
        if text.endswith(f"# PLANT {plant}"):
            return number
    raise LookupError(plant)


def _misuse(how: str) -> torch.Tensor:
    out = torch.zeros(16, dtype=torch.int32)
    with emulate():
        misused.misused[(1,)](torch.arange(16, dtype=torch.int32), out, 5, HOW=how)
    return out


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        ("try", "unknown-operation"),
        ("with", "unknown-operation"),
        ("chain", "unknown-operation"),
        ("lambda", "unknown-operation"),
        ("name", "unknown-operation"),
        ("method", "unknown-operation"),
        ("gluon", "unknown-operation"),
        ("python", "kernel-error"),
        ("argument", "kernel-error"),
        ("sizes", "kernel-error"),
        ("constant", "type-error"),
        ("condition", "type-error"),
        ("small", "type-error"),
        ("float index", "type-error"),
        ("big float", "unmodelled"),
        ("shift", "unmodelled"),
        ("assert", "assertion"),
        ("static", "assertion"),
    ],
)
def test_a_misuse_is_refused_in_its_line(how: str, kind: str) -> None:
    with pytest.raises(EmulationFault) as caught:
        _misuse(how)
    found = caught.value.finding
    assert (found.kind, found.line) == (kind, line_of(how)), found
    assert found.program == (0, 0, 0) and found.kernel == "misused"
    assert caught.value.verdict_kind == ("ERROR" if kind in ("unknown-operation", "unmodelled") else "FAIL")


def test_a_branch_that_a_constant_rules_out_may_say_anything() -> None:
    assert torch.equal(_misuse("dead"), torch.arange(16, dtype=torch.int32) + 7)


def test_a_fault_in_a_called_function_has_its_line_there() -> None:
    with pytest.raises(EmulationFault) as caught, emulate():
        misused.outer[(1,)](torch.full((16,), 3, dtype=torch.int32), torch.zeros(16, dtype=torch.int32))
    found = caught.value.finding
    assert (found.kind, found.line, found.value) == ("int-overflow", line_of("inner"), str(3 << 30)), found


@pytest.mark.parametrize(
    ("arguments", "named", "message"),
    [
        ((1, 2, 3, 4, 5, 6), {}, "takes 4 arguments"),
        ((), {"HOW": "x"}, "was not given X"),
        ((None, None, 1), {"HOW": "x", "n": 2}, "was given n twice"),
        ((None, None, 1), {"HOW": "x", "colour": 2}, "no argument and Triton no launch option colour"),
    ],
)
def test_a_launch_that_does_not_fit_is_refused(arguments: tuple[object, ...], named: dict[str, object], message: str) -> None:
    with pytest.raises(EmulationFault, match=message), emulate():
        misused.misused[(1,)](*arguments, **named)


def test_a_large_allocation_is_kept_by_the_blocks_that_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    from harness.emulation import undo
    from tests.emulation import planted

    monkeypatch.setattr(undo, "WHOLE_BYTES", 0)
    monkeypatch.setattr(undo, "BLOCK", 32)
    before = torch.arange(200, dtype=torch.float32)
    out = before.clone()

    def run() -> None:
        # In place: a run that began with what another left would show it.
        planted.scale[(2,)](out, out, 2.0, 100, BLOCK=64)

    run_all_extremes(run)
    assert torch.equal(out[:100], before[:100] * 2) and torch.equal(out[100:], before[100:])


def test_a_finding_survives_the_way_between_processes() -> None:
    import pickle

    with pytest.raises(EmulationFault) as caught:
        _misuse("shift")
    again = pickle.loads(pickle.dumps(caught.value))
    assert again.finding == caught.value.finding and again.verdict_kind == "ERROR"
