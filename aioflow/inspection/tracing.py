"""Spans of OpenTelemetry for single calls: of an async function, and of a request to a webhook.

OpenTelemetry is imported when the first span is made. A program that does not use it pays nothing.
Spans go to the tracer provider that the program has set, in the process where the code runs.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from typing import Any, ParamSpec, TypeVar

from aioflow.core.contexts import contextmanager
from aioflow.core.scope import current_scope

__all__ = ["RequestSpans", "traced"]

P = ParamSpec("P")
R = TypeVar("R")

NAME = "aioflow"


def traced(
    function: Callable[P, Awaitable[R]],
    *,
    every: int = 1,
    name: str | None = None,
    parent: Callable[P, Mapping[str, str] | None] | None = None,
) -> Callable[P, Coroutine[Any, Any, R]]:
    """Returns `function` with a span for one of `every` calls in each subtask.

    The span has the name of the function, or `name`, and the attributes `aioflow.job`,
    `aioflow.operator` and `aioflow.subtask`. The span continues the caller's trace, or with
    `parent` the trace of the headers that `parent` returns. `parent` gets the arguments of each
    call and returns headers such as `{"traceparent": ...}`. Raises ValueError if `every` is not
    positive.
    """
    if every < 1:
        raise ValueError(f"every is {every}, expected the number of calls for one span, at least 1")
    named: Any = function  # A callable object has no name of its own.
    shown = str(name or getattr(named, "__qualname__", type(named).__name__))
    calls = [0]

    @functools.wraps(function)
    async def call(*args: P.args, **kwargs: P.kwargs) -> R:
        calls[0] += 1
        if (calls[0] - 1) % every:
            return await function(*args, **kwargs)
        from opentelemetry import propagate, trace

        carrier = None if parent is None else parent(*args, **kwargs)
        with trace.get_tracer(NAME).start_as_current_span(
            shown,
            context=None if carrier is None else propagate.extract(carrier),
            attributes=_place(),
        ):
            return await function(*args, **kwargs)

    return call


def _place() -> dict[str, str]:
    scope = current_scope()
    found = {
        f"aioflow.{name}": getattr(scope, name, None) for name in ("job", "operator", "subtask")
    }
    return {name: value for name, value in found.items() if value is not None}


class RequestSpans:
    """Makes a span for each request to a server of the engine, as a child of the caller's span."""

    def __init__(self, tracer: Any, extract: Callable[[Mapping[str, str]], Any], kind: Any) -> None:
        self._tracer = tracer
        self._extract = extract
        self._kind = kind

    @staticmethod
    def of_program() -> RequestSpans | None:
        """Returns the spans of a program that has set a tracer provider, or None."""
        if "opentelemetry.trace" not in sys.modules:
            return None
        from opentelemetry import propagate, trace

        provider = trace.get_tracer_provider()
        if isinstance(provider, trace.ProxyTracerProvider | trace.NoOpTracerProvider):
            return None
        return RequestSpans(provider.get_tracer(NAME), propagate.extract, trace.SpanKind.SERVER)

    @contextmanager
    def request(self, name: str, headers: Mapping[str, str]) -> Iterator[Any]:
        """Makes a span for the duration of the block. Its parent is the span that `headers` name,
        if they name one.
        """
        context = self._extract({key.lower(): value for key, value in headers.items()})
        with self._tracer.start_as_current_span(
            name, context=context, kind=self._kind, attributes=_place()
        ) as span:
            yield span
