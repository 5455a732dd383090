"""Chooses the operator that calls a user's function for each element.

The function runs inline in the chain, is awaited, runs in a thread, is guarded by `on_error`, or
has full access to the element.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from aioflow.advice.functions import check_called, check_function_class, check_without_state
from aioflow.advice.hints import field_hint
from aioflow.core.errors import GraphError, did_you_mean
from aioflow.core.functions import Function, OutputTag, has_operator_state
from aioflow.core.signatures import check_takes
from aioflow.core.timeunits import to_seconds
from aioflow.expressions.nodes import is_expression
from aioflow.graph.stream_graph import Chaining
from aioflow.operators import traits
from aioflow.operators.async_io import make_async_wait
from aioflow.operators.call_pool import Retry
from aioflow.operators.guarded_rows import make_guarded_rows
from aioflow.operators.operator import make_operator
from aioflow.operators.process.async_functions import (
    AsyncBroadcastProcessOperator,
    AsyncCoProcessOperator,
    is_async_process,
)
from aioflow.operators.process.functions import (
    BroadcastProcessOperator,
    CoProcessOperator,
    KeyedProcessOperator,
    ProcessOperator,
)
from aioflow.operators.stateless import (
    StatelessKind,
    is_async,
    make_keyed_rows,
    make_stateless,
)

if TYPE_CHECKING:
    from aioflow.operators.operator import Operator

__all__ = [
    "Call",
    "connected_factory",
    "inline_call",
    "process_call",
    "row_call",
]

CONCURRENCY = 8
"""Default number of concurrent calls: enough to hide latency, few enough for most servers."""

OPTIONS = ("blocking", "concurrency", "ordered", "timeout", "retry", "on_error", "on_timeout")


@dataclass(frozen=True, slots=True)
class Call:
    """The factory of an operator that calls a user's function, and further arguments for the
    graph.
    """

    factory: Callable[[], Operator]
    more: dict[str, Any]
    """Further arguments of `add_operator`."""


def row_call(kind: StatelessKind, fn: Any, options: dict[str, Any], *, keyed: bool) -> Call:
    """Returns the operator for `map`, `filter` or `flat_map` with their `options`.

    `keyed` means that the step follows a `key_by` directly, so a function class has keyed state.
    """
    if not callable(fn) and not is_expression(fn) and not isinstance(fn, Function):
        raise GraphError(
            f"{kind.value} needs a function or an expression, got {type(fn).__name__}: "
            f"{fn!r}{field_hint(fn)}"
        )
    _check_function(fn, kind.value, kind.value, "value")
    factory = _asynchronous_factory(kind, fn, options)
    if factory is not None:
        on_error = options.get("on_error")
        side_tags = () if on_error is None else (on_error,)
        chaining = Chaining.HEAD if is_async(fn, kind.value) else Chaining.ALWAYS
        waits = is_async(fn, kind.value) or bool(options.get("blocking", False))
        return Call(
            factory,
            {
                "chaining": chaining,
                "side_tags": side_tags,
                "stateful": has_operator_state(fn),
                "traits": traits.AWAITED if waits else traits.BY_RECORD,
            },
        )
    if keyed and _is_function_class(fn):
        return Call(partial(make_keyed_rows, kind, fn), {"stateful": True})
    return inline_call(kind, fn)


def inline_call(kind: StatelessKind, fn: Any) -> Call:
    """Returns the operator for a function that runs inline, with nothing to await."""
    return Call(
        partial(make_stateless, kind, fn),
        {
            "side_tags": (),
            "stateful": has_operator_state(fn),
            "traits": traits.step(kind, fn),
        },
    )


def process_call(fn: Any, *, keyed: bool) -> Call:
    """Returns the operator for `process`."""
    from aioflow.operators.process.async_functions import AsyncProcessOperator, is_async_process

    _check_function(fn, "process", "process_element", "value, ctx")
    if is_async_process(fn):
        factory = partial(make_operator, AsyncProcessOperator, fn, keyed=keyed)
        return Call(
            factory,
            {"stateful": keyed, "chaining": Chaining.HEAD, "traits": traits.AWAITED_IN_TURN},
        )
    return Call(
        partial(make_operator, KeyedProcessOperator if keyed else ProcessOperator, fn),
        {"stateful": keyed},
    )


def _check_function(fn: Any, kind: str, method: str, parameters: str) -> None:
    """Raises GraphError if `fn` is a function class of the wrong kind, or a callable with the wrong
    parameters.
    """
    if _is_function_class(fn):
        given = fn if isinstance(fn, type) else type(fn)
        if not hasattr(given, method):
            raise GraphError(
                f"{kind} needs a function class with a method {method!r}, and {given.__name__} "
                "has none"
            )
        check_function_class(fn)
    elif not is_expression(fn):
        check_called(fn, kind, parameters)


def _is_function_class(fn: Any) -> bool:
    """Whether `fn` is a function class or an instance of one."""
    return issubclass(fn if isinstance(fn, type) else type(fn), Function)


def _asynchronous_factory(
    kind: StatelessKind, function: Any, options: dict[str, Any]
) -> Callable[[], Operator] | None:
    """Returns the factory of the operator that calls `function` with `options`.

    Returns None if the function runs inline, fused with its neighbours.
    """
    _check_names(kind, options)
    waits = is_async(function, kind.value)
    blocking = bool(options.get("blocking", False))
    on_error = options.get("on_error")
    if on_error is not None and not isinstance(on_error, OutputTag):
        shown = f"{type(on_error).__name__}: {on_error!r}"
        raise GraphError(
            f"{kind.value}: on_error= takes a tag, got {shown}; expected "
            f"af.OutputTag({str(on_error)!r})"
        )
    if waits and blocking:
        raise GraphError(
            f"{kind.value}: blocking=True is for plain functions, this one is async; leave "
            "blocking= out"
        )
    if waits or blocking:
        return partial(make_async_wait, kind, function, _wait_settings(kind, options))
    _refuse_wait_options(kind, options)
    return None if on_error is None else partial(make_guarded_rows, kind, function, on_error)


def _check_names(kind: StatelessKind, options: Iterable[str]) -> None:
    for name in options:
        if name not in OPTIONS:
            known = (*OPTIONS, "name", "uid", "parallelism")
            takes = ", ".join(f"{option}=" for option in known)
            raise TypeError(
                f"{kind.value}() has no argument {name}={did_you_mean(name, known, '{}=')}; it "
                f"takes fn, {takes}"
            )


def _refuse_wait_options(kind: StatelessKind, options: dict[str, Any]) -> None:
    """Raises GraphError for options that a function which runs inline cannot have."""
    useless = [
        name
        for name in ("concurrency", "ordered", "timeout", "retry", "on_timeout")
        if options.get(name) is not None
    ]
    if useless:
        need = (
            f"{', '.join(f'{name}=' for name in useless)} "
            f"{'needs' if len(useless) == 1 else 'need'}"
        )
        raise GraphError(
            f"{kind.value}: {need} an async function or blocking=True; this one runs inline"
        )


def _wait_settings(kind: StatelessKind, options: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings of the operator that awaits the calls. Raises GraphError for invalid
    options."""
    concurrency = options.get("concurrency", CONCURRENCY)
    if type(concurrency) is not int or concurrency < 1:
        raise GraphError(f"{kind.value}: concurrency must be at least 1, got {concurrency!r}")
    retry = options.get("retry")
    if retry is not None and not isinstance(retry, Retry):
        raise GraphError(f"{kind.value}: retry= takes af.Retry(...), got {type(retry).__name__}")
    timeout, on_timeout = options.get("timeout"), options.get("on_timeout")
    timeout_s = None if timeout is None else to_seconds(timeout, f"{kind.value}: timeout")
    if timeout_s is not None and timeout_s <= 0:
        raise GraphError(f"{kind.value}: timeout is {timeout!r}, expected more than 0")
    if on_timeout is not None and timeout_s is None:
        raise GraphError(
            f"{kind.value}: on_timeout= is given without timeout=, so it could never be called"
        )
    check_without_state(on_timeout, f"{kind.value}: on_timeout=")
    if callable(on_timeout):
        check_takes(on_timeout, f"{kind.value}: on_timeout=", "value")
    return {
        "concurrency": concurrency,
        "ordered": options.get("ordered", True),
        "timeout_s": timeout_s,
        "retry": retry,
        "on_error": options.get("on_error"),
        "on_timeout": on_timeout,
        "blocking": bool(options.get("blocking", False)),
    }


def connected_factory(fn: Any, *, keyed: bool, broadcast: bool) -> Callable[[], Operator]:
    """Returns the factory of the operator for `process` on connected streams."""
    waits = is_async_process(fn)
    operator: type[Operator]
    if broadcast:
        operator = AsyncBroadcastProcessOperator if waits else BroadcastProcessOperator
    else:
        operator = AsyncCoProcessOperator if waits else CoProcessOperator
    return partial(make_operator, operator, fn, **({"keyed": keyed} if waits else {}))
