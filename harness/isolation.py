"""Where a process of a run asks its questions: in child processes that may be lost, or in this one.

1. The backend under test and its baseline have a child each: what one leaves behind does not reach the other.
2. Processes take GPUs by turns, and share the memory of one that several of them use.
"""

from __future__ import annotations

from pathlib import Path

import torch

from harness.answer import answer
from harness.backends.protocol import Backend
from harness.case import Case
from harness.regimes import Regimes
from harness.run import Result
from harness.worker import TimeLimits, Worker

#: On a GPU a first run compiles: on an H200, beside eleven other processes, a case took up to 65 s for it, and two more did not
#: end within 120 s.
ON_A_GPU = TimeLimits(first=400.0)


class Isolation:
    """Runs questions for one process."""

    def __init__(
        self, place: torch.device, regimes: Regimes, *, process: str, processes: int, versions: int, children: bool
    ) -> None:
        """Begin.

        Args:
            place: the run's device.
            regimes: the rules that answers are judged by.
            process: name of this process.
            processes: processes of the run.
            versions: versions of a backend that are asked side by side, 1 or 2.
            children: whether questions go to child processes.
        """
        self.place, self.regimes, self.process, self.processes = place, regimes, process, processes
        self.versions, self.children = versions, children
        self._workers: dict[int, Worker] = {}

    @property
    def device(self) -> str:
        """Name this process's device: the one asked for by index, else the GPUs by turns, one a process."""
        if self.place.type != "cuda" or self.place.index is not None:
            return str(self.place)
        return f"cuda:{self._turn % torch.cuda.device_count()}"

    @property
    def _turn(self) -> int:
        """Number this process among those of pytest-xdist, which calls them gw0, gw1, ..."""
        return int("0" + "".join(mark for mark in self.process if mark.isdigit()))

    @property
    def sharing(self) -> int:
        """Count the children that share this process's GPU."""
        if self.place.type != "cuda":
            return 1
        gpus = 1 if self.place.index is not None else torch.cuda.device_count()
        return -(-self.processes // gpus) * self.versions

    def run(self, case: Case, backend: Backend, relation: str | None, version: int = 0) -> Result:
        """Put a question, as ``answer`` takes it; ``version`` is 1 for a baseline."""
        if not self.children:
            return answer(case, relation, backend, self.regimes, device=self.device)
        if version not in self._workers:
            rules: Path = self.regimes.path
            self._workers[version] = Worker(
                device=self.device,
                share=1 / self.sharing,
                regimes=rules,
                limits=ON_A_GPU if self.place.type == "cuda" else TimeLimits(),
            )
        return self._workers[version].run(case, backend.name, relation)

    def close(self) -> None:
        """End the children."""
        for worker in self._workers.values():
            worker.close()
