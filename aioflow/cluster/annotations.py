"""The annotations of classes and functions that are sent by value.

From Python 3.14 on they are evaluated when they are read, and may then fail. A name may be defined
later, or for type checkers alone. Such annotations are sent as text, as before Python 3.14 with
`from __future__ import annotations`.
"""

from __future__ import annotations

import inspect
import sys
from types import FunctionType
from typing import Any

__all__ = ["annotations_of", "evaluated"]


def annotations_of(what: type | FunctionType) -> dict[str, Any]:
    """Returns the own annotations of a class or function; as text if one cannot be evaluated."""
    try:
        return inspect.get_annotations(what)
    except Exception:  # Of any kind: they are expressions.
        if sys.version_info >= (3, 14):
            from annotationlib import Format, get_annotations

            return get_annotations(what, format=Format.STRING)
        raise


def evaluated(function: FunctionType) -> FunctionType:
    """Returns `function`, or a copy with annotations as text if they cannot be evaluated."""
    try:
        function.__annotations__  # noqa: B018  # Evaluates them.
    except Exception:  # noqa: BLE001  # Of any kind: they are expressions.
        copied = FunctionType(
            function.__code__,
            function.__globals__,
            function.__name__,
            function.__defaults__,
            function.__closure__,
        )
        copied.__kwdefaults__ = function.__kwdefaults__
        copied.__dict__.update(function.__dict__)
        copied.__module__, copied.__doc__ = function.__module__, function.__doc__
        copied.__qualname__ = function.__qualname__
        copied.__annotations__ = annotations_of(function)
        return copied
    return function
