"""Finds out which calls the signature of a user's function accepts.

A function is rejected, when the flow is built, only if Python would reject the call at the first
element. A signature that cannot be read, or that a decorator has replaced, is accepted:
`functools.wraps` shows the parameters of the wrapped function, and the wrapper may take others.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from aioflow.core.errors import GraphError

__all__ = ["call_with", "check_takes", "takes_argument", "wrong_signature"]


def check_takes(function: Any, what: str, parameters: str) -> None:
    """Raises GraphError if `function` cannot be called with `parameters`.

    `what` names the user of the function. `parameters` are named as in "value, ctx"; "" for none.
    """
    if wrong := wrong_signature(function, len(parameters.split(",")) if parameters else 0):
        name = getattr(function, "__qualname__", type(function).__name__)
        raise GraphError(f"{what} needs a function of ({parameters}), got {name}{wrong}")


def wrong_signature(function: Any, count: int) -> str:
    """Returns the signature of `function` as text if it cannot take `count` positional arguments.

    Returns an empty string if the function can take them, or if the signature is unknown.
    """
    signature = _signature(function)
    try:
        if signature is not None:
            signature.bind(*(None,) * count)
    except TypeError:
        return str(signature)
    return ""


def _signature(function: Any) -> inspect.Signature | None:
    called = function
    while isinstance(called, partial):
        called = called.func
    if hasattr(called, "__signature__"):  # It was set by hand, and may be wrong.
        return None
    try:
        return inspect.signature(function, follow_wrapped=False)
    # Some builtins tell nothing about themselves, and a class may do so in its own way.
    except Exception:  # noqa: BLE001
        return None


_POSITIONAL = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.VAR_POSITIONAL,
)


def takes_argument(function: Callable[..., Any]) -> bool:
    """Returns whether `function` can be called with one positional argument.

    A callable without a readable signature cannot.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
    return any(parameter.kind in _POSITIONAL for parameter in parameters.values())


def call_with(function: Callable[..., Any], argument: object) -> Any:
    """Calls `function(argument)`, or `function()` if it takes no argument."""
    return function(argument) if takes_argument(function) else function()
