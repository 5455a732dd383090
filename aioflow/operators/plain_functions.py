"""Checks of plain functions, which are never awaited: keys, reductions, windows and joins call them
within a batch.

An `async def` there would return coroutines in place of values, and the error would appear far from
its line. So it is rejected at its line, and so is a function with other parameters. Where resources
are not injected, a parameter that declares a resource is rejected too: the function would get the
declaration in its place. A function with operator state is rejected where checkpoints do not
include it: the state would be lost at the first restart.
"""

from __future__ import annotations

import inspect
from typing import Any

from aioflow.core.errors import GraphError
from aioflow.core.functions import Function
from aioflow.core.injection import injected_parameters
from aioflow.core.signatures import check_takes
from aioflow.operators.function_classes import check_function_class
from aioflow.operators.userfunction import has_operator_state

__all__ = ["check_called", "check_plain", "check_without_resources", "check_without_state"]


def check_plain(function: Any, what: str, parameters: str, method: str = "__call__") -> None:
    """Raises GraphError unless `function`, or the `method` of a function class, is a plain function
    of `parameters`.

    `parameters` are the arguments of the call, named as in "value, ctx".
    """
    is_class = isinstance(function, Function) or (
        isinstance(function, type) and issubclass(function, Function)
    )
    if is_class and not hasattr(function, method):
        name = function.__name__ if isinstance(function, type) else type(function).__name__
        raise GraphError(
            f"{what}: {name} has no method {method!r}, so it is no function for this place"
        )
    target = getattr(function, method) if is_class else function
    if not callable(target):
        raise GraphError(f"{what} needs a function, got {type(function).__name__}: {function!r}")
    # Finds out how the function is called, not whether it can be.
    for call in (target, getattr(target, "__call__", None)):  # noqa: B004
        if inspect.iscoroutinefunction(call) or inspect.isasyncgenfunction(call):
            raise GraphError(
                f"{what} needs a plain function, and this one is async, which is not awaited here; "
                "map(async fn) beside it"
            )
    if is_class:
        check_function_class(function)
    else:
        check_called(function, what, parameters)


def check_called(function: Any, what: str, parameters: str) -> None:
    """Raises GraphError unless `function` is a function of `parameters`, or a function class.

    `parameters` are named as in "value, ctx".
    """
    if not callable(function):
        raise GraphError(
            f"{what} needs a function of ({parameters}), got {type(function).__name__}: "
            f"{function!r}"
        )
    if not isinstance(function, type) or not has_operator_state(
        function
    ):  # For such a class, an instance is called.
        check_takes(function, what, parameters)


def check_without_resources(function: Any, what: str) -> None:
    """Raises GraphError if a parameter of `function` declares a resource."""
    for parameter, resource in injected_parameters(function).items():
        raise GraphError(
            f"{what}: its parameter {parameter!r} wants the resource {resource.name!r}, and is "
            "given none here; use it in a map before"
        )


def check_without_state(function: Any, what: str) -> None:
    """Raises GraphError for a CheckpointedFunction, whose methods would not be called here."""
    if has_operator_state(function):
        name = (function if isinstance(function, type) else type(function)).__name__
        raise GraphError(
            f"{what}: {name} has initialize_state and snapshot_state, and nothing of it is kept "
            "in checkpoints here; keep operator state "
            "in a map or process before, or in the function of a sink"
        )
