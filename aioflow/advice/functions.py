"""Checks of user functions when a flow is built.

Plain functions are never awaited: keys, reductions, windows and joins call them within a batch. An
`async def` there would return coroutines in place of values, and the error would appear far from
its line. So an `async def`, or a function with wrong parameters, is rejected when the flow is
built. Where resources are not injected, a parameter that declares a resource is rejected too,
because the function would get the declaration instead of the resource. A function with operator
state is rejected where checkpoints do not include this state, because it would be lost at the first
restart.

The checks also find mistakes in a function class: a method that is never called because its name is
misspelled, or a method that takes too few arguments. For example, a ProcessFunction that spells
`on_timer` as Flink does is a valid class, but its timers would have no effect. A misspelled method
is an error if the method is required. Otherwise it causes a warning only, because it may be a
helper of the other methods.
"""

from __future__ import annotations

import inspect
import logging
from types import FunctionType
from typing import Any, Final

from aioflow.core.errors import GraphError
from aioflow.core.functions import CheckpointedFunction, Function, has_operator_state
from aioflow.core.signatures import check_takes, injected_parameters, wrong_signature

__all__ = [
    "check_called",
    "check_function_class",
    "check_plain",
    "check_without_resources",
    "check_without_state",
]

logger = logging.getLogger(__name__)

REQUIRED = {
    "MapFunction": ("map",),
    "FilterFunction": ("filter",),
    "FlatMapFunction": ("flat_map",),
    "ProcessFunction": ("process_element",),
    "CoProcessFunction": ("process_element1", "process_element2"),
    "BroadcastProcessFunction": ("process_element", "process_broadcast_element"),
    "ProcessWindowFunction": ("process",),
    "AggregateFunction": ("create_accumulator", "add", "get_result"),
    "Trigger": ("on_element",),
}
"""Maps each base class to the methods that a subclass must define, because those of the base class
only raise an error.
"""

CHECKPOINTED: Final = ("initialize_state", "snapshot_state")

NEARLY = 0.92
"""Minimum similarity of two names, from 0 to 1: `on_timers` is similar to `on_timer`, `closed` is
not similar to `close`.
"""


def check_plain(function: Any, what: str, parameters: str, method: str = "__call__") -> None:
    """Raises GraphError unless `function`, or the `method` of a function class, is a plain function
    with the given `parameters`.

    `parameters` names the arguments of the call, for example "value, ctx". `what` names the
    function in errors.
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
    """Raises GraphError unless `function` can be called with `parameters`, or is a function class.

    `parameters` names the arguments of the call, for example "value, ctx". `what` names the
    function in errors.
    """
    if not callable(function):
        raise GraphError(
            f"{what} needs a function of ({parameters}), got {type(function).__name__}: "
            f"{function!r}"
        )
    if not isinstance(function, type) or not has_operator_state(function):
        # For such a class, an instance is called.
        check_takes(function, what, parameters)


def check_without_resources(function: Any, what: str) -> None:
    """Raises GraphError, which names the function as `what`, if a parameter of `function` declares
    a resource.
    """
    for parameter, resource in injected_parameters(function).items():
        raise GraphError(
            f"{what}: its parameter {parameter!r} wants the resource {resource.name!r}, and is "
            "given none here; use it in a map before"
        )


def check_without_state(function: Any, what: str) -> None:
    """Raises GraphError if `function` has operator state, because its methods for this state would
    not be called here.
    """
    if has_operator_state(function):
        name = (function if isinstance(function, type) else type(function)).__name__
        raise GraphError(
            f"{what}: {name} has initialize_state and snapshot_state, and nothing of it is kept "
            "in checkpoints here; keep operator state "
            "in a map or process before, or in the function of a sink"
        )


def check_function_class(function: Any) -> None:
    """Raises GraphError for a function class, or an instance of one, that cannot work.

    Also logs warnings for probable mistakes. Accepts all other values.
    """
    cls = function if isinstance(function, type) else type(function)
    if isinstance(function, type) and (needed := _required_arguments(cls)):
        given = ", ".join(f"{name}=..." for name in needed)
        raise GraphError(
            f"the class {cls.__name__} needs arguments, and the engine calls it without any; "
            f"pass an instance: {cls.__name__}({given})"
        )
    contract = _contract(cls)
    own = {
        name: method
        for one in reversed(cls.__mro__)
        if not _is_ours(one)
        for name, method in vars(one).items()
    }
    for name, method in own.items():
        called = contract.get(name)
        if (
            called
            and type(method) is FunctionType
            and (wrong := wrong_signature(method, called.__code__.co_argcount))
        ):
            raise GraphError(f"{cls.__name__} has {name}{wrong}, expected {_head(called)}")
    missing = [
        name
        for name in contract
        if name not in own and name not in getattr(function, "__dict__", ())
    ]
    bases = [one.__name__ for one in cls.__mro__ if _is_ours(one)]
    required = {name for base in bases for name in REQUIRED.get(base, ())}
    # The constructor of a class was not called yet, and may still add missing methods.
    certain = not isinstance(function, type) or "__init__" not in own
    for name, method in own.items():
        if name in contract or name.startswith("_") or type(method) is not FunctionType:
            continue
        meant = _meant(name, missing)
        if meant in required and certain:
            raise GraphError(
                f"{cls.__name__} must define {_head(contract[meant])}; did you mean that by {name}?"
            )
        if meant:
            logger.warning(
                "%s has a method %s, which is never called: did you mean %s?",
                cls.__name__,
                name,
                _head(contract[meant]),
            )
            missing.remove(meant)
    half = [name for name in CHECKPOINTED if name in contract and name not in missing]
    if len(half) == 1:
        (other,) = {*CHECKPOINTED} - {*half}
        logger.warning(
            "%s has %s and no %s: it is never called, and checkpoints keep nothing of it",
            cls.__name__,
            *half,
            other,
        )


def _required_arguments(cls: type) -> list[str]:
    """Returns the names of the constructor's parameters that have no default."""
    try:
        parameters = inspect.signature(cls).parameters.values()
    except (TypeError, ValueError):  # There is no signature, so nothing is known.
        return []
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [one.name for one in parameters if one.kind not in optional and one.default is one.empty]


def _contract(cls: type) -> dict[str, FunctionType]:
    """Returns the methods that the engine calls on objects of `cls`, by name, as its base classes
    in aioflow define them.
    """
    ours = [one for one in cls.__mro__ if _is_ours(one)]
    if any(issubclass(one, Function) for one in ours):
        ours.append(CheckpointedFunction)
    methods = {name: method for one in reversed(ours) for name, method in vars(one).items()}
    return {
        name: method
        for name, method in methods.items()
        if type(method) is FunctionType and not name.startswith("_")
    }


def _is_ours(cls: type) -> bool:
    return cls.__module__.partition(".")[0] in ("aioflow", "builtins", "typing", "abc")


def _meant(name: str, missing: list[str]) -> str:
    """Returns the name in `missing` of which `name` is probably a misspelling, or "" if there is
    none.

    A misspelling may differ in underscores, in case, or by about one letter.
    """
    for one in missing:
        if _letters(one) == _letters(name):
            return one
    from difflib import get_close_matches  # Only wrong programs need it.

    return next(iter(get_close_matches(name, missing, 1, NEARLY)), "")


def _letters(name: str) -> str:
    return name.replace("_", "").casefold()


def _head(method: FunctionType) -> str:
    code = method.__code__
    return f"{method.__name__}({', '.join(code.co_varnames[: code.co_argcount])})"
