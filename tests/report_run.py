"""A run with three different failures beside a backend that passes, for the tests of reports and for their picture.

``python -m tests.report_run FOLDER`` leaves its ledger there.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from harness.case import Case
from harness.gate import Gate
from harness.options import Options
from harness.profiles import Profile

#: Backend -> a case on which it is wrong; None where a search finds one.
WRONG = {
    "fault:last-split-dropped@splits": None,
    "fault:heads-past-64-unwritten@splits": "v1:H=72:S=2:N=70+33:T=16:content=slots:end",
    "fault:writes-past-output@splits": "v1:H=4:S=1:N=20:end",
}
RIGHT = "torch-sdpa"


class Patient(Gate):
    """A gate whose search ends by itself, however busy the machine is."""

    @property
    def profile(self) -> Profile:
        """How much the run asks."""
        return dataclasses.replace(super().profile, seconds=600.0, shrink_seconds=600.0)


def run(folder: Path) -> Path:
    """Run it and return its folder of ledgers."""
    options = Options(
        backends=(*WRONG, RIGHT),
        examples=30,
        device="cpu",
        run_dir=folder / "ledgers",
        repro_dir=folder / "repros",
        isolation="off",
    )
    gate = Patient(options, say=lambda line: None)
    for pair in gate.plan.pairs:
        gate.intend(pair)
    for pair in gate.plan.pairs:
        case = WRONG.get(pair.backend.name)
        if case is None:
            outcome = gate.search(pair)
            for finding in outcome.findings:
                gate.failed(finding.result, pair.backend, finding)
        else:
            gate.failed(gate.ask(Case.parse(case), pair.backend, "pinned"), pair.backend)
            gate.ledger.write("gated", backend=pair.backend.name, regime=pair.regime.name)
    gate.close(status=1)
    return options.run_dir


if __name__ == "__main__":
    run(Path(sys.argv[1]))
