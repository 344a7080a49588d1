"""What a part of the native runs is asked for, and how it speaks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the command line asked for."""

    #: Processes of the gate.
    processes: int
    #: Random cases of each backend and regime; None for the profile's number.
    examples: int | None
    #: Time limit of each of the gate's two turns, seconds.
    seconds: float
    #: Checkout of AITER; None to gate none of its kernels.
    aiter_source: str | None
    #: Device of the gate.
    device: str
    #: Backends to gate; none for all that run on any GPU.
    backends: tuple[str, ...]


def say(text: str) -> None:
    """Print at once: a run that is cut off keeps what it said."""
    print(text, flush=True)


def ends_of(message: str) -> str:
    """Keep both ends of a message: the verdict begins it, and the cause of a child's end is its last line."""
    return message if len(message) < 1200 else f"{message[:400]} … {message[-800:]}"
