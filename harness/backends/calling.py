"""Calls of a foreign function by keyword, checked against the signature of the version at hand.

Rules kept here:

1. What the call rests on must be a parameter of the function; what it merely states may be missing.
2. A parameter that the function requires and nobody gives is refused by name: its meaning is not guessed.

Source: the order of AITER's parameters has changed in six releases; their names have not been reused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from harness.backends.protocol import NotInstalled


class Written(str):
    """An argument of a call in a script that is an expression, not a value."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Something that a script does before it calls a kernel: a call of a public function, or a line."""

    #: Names that its result goes to, as they stand left of the equals sign; "" for none.
    names: str = ""
    #: Module and name of the function; None where it is a line.
    place: tuple[str, str] | None = None
    #: Keyword arguments of the call.
    given: Mapping[str, Any] = field(default_factory=dict)
    #: The line's expression.
    text: str = ""


def keywords_for(
    function: Callable[..., Any], needed: Mapping[str, Any], stated: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Choose the keyword arguments that a function takes: all of ``needed``, and of ``stated`` what it knows.

    Raises: NotInstalled, naming the function and the parameters that do not fit.
    """
    parameters = inspect.signature(function).parameters
    lacking = [name for name in needed if name not in parameters]
    given = {**needed, **{name: value for name, value in (stated or {}).items() if name in parameters}}
    unknown = [
        name
        for name, parameter in parameters.items()
        if name not in given
        and parameter.default is inspect.Parameter.empty
        and parameter.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    ]
    if lacking or unknown:
        raise NotInstalled(
            f"unknown signature of {function.__module__}.{function.__name__}: it lacks {', '.join(lacking) or 'nothing'} "
            f"and requires {', '.join(unknown) or 'nothing'} that this version of mla-gate does not know."
        )
    return given
