"""A call in a process that may be lost.

1. The call and what it gives are pickled: a function of a module, with records for arguments.
2. What the process dies of, and a time that is over, are a ``Lost`` that says so; what the call raises, it raises here.
3. Nothing of it is left: the process is killed where it does not end.

Source: multiprocessing's forkserver, as for the worker (harness/worker.py).
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, TypeVar

_CONTEXT = multiprocessing.get_context("forkserver")
T = TypeVar("T")


class Lost(RuntimeError):
    """A process that gave no answer; the message says what became of it."""


def apart(call: Callable[[], T], *, seconds: float) -> T:
    """Make a call in a process of its own.

    Args:
        call: what is called; it can be pickled.
        seconds: how long it may take, the start of the process included.

    Raises:
        Lost: if the process ends without an answer or takes too long.
    """
    ours, theirs = _CONTEXT.Pipe(duplex=False)
    process = _CONTEXT.Process(target=_serve, args=(theirs, call), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(seconds):
            raise Lost(f"no answer in {seconds:.0f} s")
        answer, error = ours.recv()
    except EOFError:
        process.join()
        code = process.exitcode or 0
        raise Lost(f"the process was {f'killed by signal {-code}' if code < 0 else f'ended with code {code}'}") from None
    finally:
        ours.close()
        process.kill()
        process.join()
        process.close()
    if error is not None:
        raise error
    made: T = answer
    return made


def _serve(pipe: Connection, call: Callable[[], Any]) -> None:
    try:
        pipe.send((call(), None))
    except Exception as error:
        pipe.send((None, RuntimeError(f"{type(error).__name__}: {error}")))
