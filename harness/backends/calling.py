"""Calls of a foreign function by keyword, checked against the signature of the version at hand.

Rules kept here:

1. What the call rests on must be a parameter of the function; what it merely states may be missing.
2. A parameter that the function requires and nobody gives is refused by name: its meaning is not guessed.

Source: the order of AITER's parameters has changed in six releases; their names have not been reused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from harness.backends.protocol import NotInstalled


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
