"""A child process that runs cases and may be lost.

1. Every way of losing the child is a verdict: a signal or exit is ``crash``, silence past the time limit is ``hang``, both
   with the last lines the child wrote and, for a hang, its stack. The next case gets a new child.
2. A child lost before the backend's own run is our fault: ERROR, not FAIL. One lost after it died of what the backend
   left behind.
3. Children are forked from a server that has imported torch and holds no accelerator: a new one costs milliseconds.
4. A child dies with its parent, has its own process group, and its memory is bounded, so that a kernel that eats memory
   loses its child and not the machine.
5. After a fault the GPU's context may be poisoned: the child checks it and, if it is, says so and leaves. On a GPU a child
   takes no more than its share of the memory, so that processes can share one.
6. The time limit follows what cases have taken so far. The first hang of a backend has the long limit, so that a slow
   machine is not taken for a hanging kernel; later ones have the short limit, so that a hang can be shrunk.

Source: multiprocessing's forkserver; prctl(2) for the parent's death; faulthandler for the stack.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import multiprocessing
import multiprocessing.forkserver
import os
import resource
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from harness.answer import answer
from harness.backends import registry
from harness.case import Case
from harness.judge import Verdict
from harness.memory import free_bytes, limit_device_memory
from harness.regimes import load
from harness.run import Result, clipped

#: prctl's option that names the signal a process gets when its parent dies.
_PR_SET_PDEATHSIG = 1
#: Lines of the child's stderr kept in a verdict.
_LAST_LINES = 30
#: Share of the free memory that a child may take.
_MEMORY_SHARE = 0.7
#: Share of a GPU's memory for torch's allocator; the rest is for contexts, kernels and what else runs there.
_MEMORY_SHARE_OF_GPU = 0.9
#: Seconds given to a hanging child to write its stack.
_STACK_SECONDS = 1.0
#: Seconds that a child may take until it begins a case, at least: it imports torch and the backend; no time of the case's.
START_SECONDS = 60.0
#: What a stage is called in a verdict.
_STAGES = {
    "start": "before the case began",
    "prepare": "before the backend ran",
    "run": "in the backend",
    "judge": "after the backend ran",
}
_CONTEXT = multiprocessing.get_context("forkserver")


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLimits:
    """How long a case may take."""

    #: Limit until a backend has hung once, seconds: compilation on a GPU and a busy machine included.
    first: float = 120.0
    #: Least limit after that, seconds.
    least: float = 5.0
    #: Limit after that, in times of the slowest case so far.
    factor: float = 20.0


@dataclass(frozen=False, slots=True, kw_only=True)
class _Seen:
    """What cases of one backend have taken."""

    slowest: float = 0.0
    hung: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    case: Case
    backend: str
    device: str
    regimes: Path | None
    relation: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Last:
    """The result of a child that leaves after it."""

    result: Result


def _serve(jobs: Connection, stderr: str, memory: int | None, device: str, share: float) -> None:
    """Run jobs until the parent closes the pipe: the child's whole life."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The server ends when nobody holds this pipe any more, and we with it; multiprocessing hands us an end of it.
    os.close(multiprocessing.forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]
    os.setpgid(0, 0)
    with open(stderr, "ab", buffering=0) as file:
        os.dup2(file.fileno(), 2)
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends its children in order
    if memory is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if device.startswith("cuda"):
        # Backends launch on the current device, wherever their tensors are.
        torch.cuda.set_device(torch.device(device).index or 0)
        limit_device_memory(device, _MEMORY_SHARE_OF_GPU * share)
        torch.zeros(1, device=device)  # makes the context, before a case's time begins
    backends: dict[str, Any] = {}
    rules: dict[Path | None, Any] = {}
    while True:
        try:
            job = jobs.recv()
        except EOFError:
            return
        if job.backend not in backends:
            backends[job.backend] = registry.make(job.backend)
        if job.regimes not in rules:
            rules[job.regimes] = load(job.regimes)
        made, own = backends[job.backend], rules[job.regimes]
        jobs.send("prepare")
        result = answer(job.case, job.relation, made, own, device=job.device, on_stage=jobs.send)
        if job.device.startswith("cuda") and result.verdict.kind in ("FAIL", "ERROR") and _poisoned(job.device):
            jobs.send(_Last(result=result))
            # Not by the ordinary way: what would be torn down there waits for a device that no longer answers.
            os._exit(0)
        jobs.send(result)


def _poisoned(device: str) -> bool:
    """Tell whether an earlier fault has left the GPU's context unusable."""
    try:
        torch.zeros(1, device=device)
        torch.cuda.synchronize(device)
    except Exception:
        return True
    return False


@dataclass(frozen=False, slots=True, kw_only=True)
class _Child:
    process: Any
    pipe: Connection
    stderr: Path

    def last_lines(self) -> str:
        return clipped("\n".join(self.stderr.read_text(encoding="utf-8", errors="replace").splitlines()[-_LAST_LINES:]))


@dataclass(frozen=False, slots=True, kw_only=True)
class Worker:
    """Runs cases in a child process, one at a time.

    Use as a context manager; closing ends the child and removes what it wrote.
    """

    #: Where cases run, "cpu" or "cuda:0".
    device: str = "cpu"
    #: Share of the device that the child may take, where it is a GPU: one over the processes that use it.
    share: float = 1.0
    #: Regimes file; None for the gate's own.
    regimes: Path | None = None
    limits: TimeLimits = field(default_factory=TimeLimits)
    #: Children lost so far.
    lost: int = 0
    _child: _Child | None = None
    _folder: Any = None
    _seen: dict[str, _Seen] = field(default_factory=dict)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def run(self, case: Case, backend: str, relation: str | None = None) -> Result:
        """Run a case on a backend, by its registry name, and judge it; whatever happens is in the result's verdict.

        Args:
            case: the problem.
            backend: registry name.
            relation: relation between two runs to hold it to, as for ``answer``; None for a plain run.
        """
        child = self._child or self._start()
        seen = self._seen.setdefault(backend, _Seen())
        limit = max(self.limits.least, self.limits.factor * seen.slowest) if seen.hung else self.limits.first
        began, stage = time.monotonic(), "start"
        end = began + max(limit, START_SECONDS)
        job = _Job(case=case, backend=backend, device=self.device, regimes=self.regimes, relation=relation)
        try:
            child.pipe.send(job)
            while child.pipe.poll(max(0.0, end - time.monotonic())):
                said = child.pipe.recv()
                if isinstance(said, _Last):
                    self._end()
                    self.lost += 1
                    return said.result
                if isinstance(said, Result):
                    seen.slowest = max(seen.slowest, time.monotonic() - began)
                    return said
                if said == "prepare":
                    began = time.monotonic()
                    end = began + limit
                stage = said
        except (EOFError, ConnectionResetError, BrokenPipeError):
            child.process.join()
            return self._lose(job, stage, "crash", _how_it_ended(child.process.exitcode), time.monotonic() - began)
        except BaseException:  # an interrupt: the child's answer would be taken for the next case's
            self._end()
            raise
        seen.hung = True
        os.kill(child.process.pid, signal.SIGUSR1)
        child.process.join(_STACK_SECONDS)
        return self._lose(job, stage, "hang", f"no answer in {end - began:.1f} s", time.monotonic() - began)

    def close(self) -> None:
        """End the child and remove what it wrote."""
        self._end()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _start(self) -> _Child:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix=f"mla-gate-{os.getpid()}-")
        _CONTEXT.set_forkserver_preload(["harness.worker"])
        ours, theirs = _CONTEXT.Pipe()
        stderr = Path(self._folder.name) / "stderr"
        stderr.write_bytes(b"")
        # A GPU's driver maps far more than it uses; there the device's own limit has to do.
        memory = None if self.device != "cpu" else int(_MEMORY_SHARE * free_bytes(torch.device("cpu")))
        process = _CONTEXT.Process(target=_serve, args=(theirs, str(stderr), memory, self.device, self.share), daemon=True)
        process.start()
        theirs.close()
        self._child = _Child(process=process, pipe=ours, stderr=stderr)
        return self._child

    def _lose(self, job: _Job, stage: str, fault: str, how: str, seconds: float) -> Result:
        lines = self._end()
        self.lost += 1
        # A child that an exception ended says which in its last line; a table or a panel may show the first line only.
        cause = f": {lines.splitlines()[-1]}" if how == _how_it_ended(1) and lines else ""
        message = f"{how} {_STAGES[stage]}{cause}\n{lines}".rstrip()
        ours = stage in ("start", "prepare")
        verdict = Verdict(kind="ERROR" if ours else "FAIL", fault=None if ours else fault, message=message)
        return Result(
            case=job.case,
            backend=job.backend,
            regime=_regime_name(job),
            verdict=verdict,
            relation=job.relation,
            seconds=seconds,
        )

    def _end(self) -> str:
        """End the child; return the last lines it wrote."""
        child, self._child = self._child, None
        if child is None:
            return ""
        child.pipe.close()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.process.pid, signal.SIGKILL)
        child.process.kill()
        child.process.join()
        child.process.close()
        return child.last_lines()


def _how_it_ended(code: int | None) -> str:
    if code is not None and code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exited with code {code}"


def _regime_name(job: _Job) -> str | None:
    with contextlib.suppress(LookupError):
        return load(job.regimes).of(job.backend, job.case).name
    return None
