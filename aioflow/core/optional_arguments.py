"""Optional arguments of a protocol, which an implementation may omit: `committer()` and
`committer(ctx)` are both valid.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

__all__ = ["call_with", "takes_argument"]

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
