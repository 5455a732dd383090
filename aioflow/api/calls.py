"""Which operator runs a function of one element when it is not simply inline: awaited, in a thread, or guarded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from aioflow.api.build import fresh
from aioflow.core.errors import GraphError, did_you_mean
from aioflow.core.functions import OutputTag
from aioflow.core.retry import Retry
from aioflow.core.signatures import check_takes
from aioflow.core.timeunits import to_seconds
from aioflow.operators.async_wait import AsyncWaitOperator, GuardedRowsOperator
from aioflow.operators.plain_functions import check_without_state
from aioflow.operators.stateless import StatelessKind, is_async

if TYPE_CHECKING:
    from aioflow.operators.operator import Operator

__all__ = ["asynchronous_factory"]

CONCURRENCY = 8
"""Calls at a time when the user says nothing: enough to hide latency, few enough for any server."""

OPTIONS = ("blocking", "concurrency", "ordered", "timeout", "retry", "on_error", "on_timeout")


def asynchronous_factory(kind: StatelessKind, function: Any, options: dict[str, Any]) -> Callable[[], Operator] | None:
    """The factory of the operator that `options` ask for; None when the function runs inline, fused with its neighbours."""
    for name in options:
        if name not in OPTIONS:
            known = (*OPTIONS, "name", "uid", "parallelism")
            takes = ", ".join(f"{option}=" for option in known)
            raise TypeError(f"{kind.value}() has no argument {name}={did_you_mean(name, known, '{}=')}; it takes fn, {takes}")
    waits = is_async(function, kind.value)
    blocking = bool(options.get("blocking", False))
    on_error = options.get("on_error")
    if on_error is not None and not isinstance(on_error, OutputTag):
        shown = f"{type(on_error).__name__}: {on_error!r}"
        raise GraphError(f"{kind.value}: on_error= takes a tag, got {shown}; expected af.OutputTag({str(on_error)!r})")
    if waits and blocking:
        raise GraphError(f"{kind.value}: blocking=True is for plain functions, this one is async; leave blocking= out")
    if not waits and not blocking:
        useless = [name for name in ("concurrency", "ordered", "timeout", "retry", "on_timeout") if options.get(name) is not None]
        if useless:
            need = f"{', '.join(f'{name}=' for name in useless)} {'needs' if len(useless) == 1 else 'need'}"
            raise GraphError(f"{kind.value}: {need} an async function or blocking=True; this one runs inline")
        return None if on_error is None else partial(_guarded, kind, function, on_error)
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
        raise GraphError(f"{kind.value}: on_timeout= is given without timeout=, so it could never be called")
    check_without_state(on_timeout, f"{kind.value}: on_timeout=")
    if callable(on_timeout):
        check_takes(on_timeout, f"{kind.value}: on_timeout=", "value")
    settings = {
        "concurrency": concurrency,
        "ordered": options.get("ordered", True),
        "timeout_s": timeout_s,
        "retry": retry,
        "on_error": on_error,
        "on_timeout": on_timeout,
        "blocking": blocking,
    }
    return partial(_waiting, kind, function, settings)


def _waiting(kind: StatelessKind, function: Any, settings: dict[str, Any]) -> Operator:
    return AsyncWaitOperator(kind, fresh(function), **settings)


def _guarded(kind: StatelessKind, function: Any, on_error: Any) -> Operator:
    return GuardedRowsOperator(kind, fresh(function), on_error)
