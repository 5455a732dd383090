"""Reads the signature of a user's function: the calls that it accepts, and the resources that it
requests by the defaults of its parameters.

A function is rejected while the flow is built, but only if Python would reject the call at the
first element. A signature that cannot be read, or that a decorator has replaced, is accepted:
`functools.wraps` shows the parameters of the wrapped function, and the wrapper may take others.

The worker opens and closes resources, such as connections:

    @resource
    async def http():
        async with aiohttp.ClientSession() as session:
            yield session

    async def enrich(trade, session=use(http)): ...
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from aioflow.core.errors import GraphError

__all__ = [
    "Injected",
    "Resource",
    "call_with",
    "check_takes",
    "injected_parameters",
    "resource",
    "takes_argument",
    "use",
    "wrong_signature",
]


def check_takes(function: Any, what: str, parameters: str) -> None:
    """Raises GraphError if `function` cannot be called with `parameters`.

    `what` says what uses the function. `parameters` are names, as in "value, ctx"; "" for none.
    """
    if wrong := wrong_signature(function, len(parameters.split(",")) if parameters else 0):
        name = getattr(function, "__qualname__", type(function).__name__)
        raise GraphError(f"{what} needs a function of ({parameters}), got {name}{wrong}")
    signature = _signature(function)
    for name, parameter in signature.parameters.items() if signature is not None else ():
        if isinstance(parameter.default, Resource):
            raise GraphError(
                f"{what}: the default of {name} is the resource {parameter.default.name!r} itself, "
                f"which is not opened: write {name}=af.use(...) around it"
            )


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
    if hasattr(called, "__signature__"):  # Set by hand, so it may be wrong.
        return None
    try:
        return inspect.signature(function, follow_wrapped=False)
    # Some builtins have no readable signature, and code of a class may raise any error here.
    except Exception:  # noqa: BLE001
        return None


_POSITIONAL = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.VAR_POSITIONAL,
)


def takes_argument(function: Callable[..., Any]) -> bool:
    """Returns whether `function` can be called with one positional argument.

    Returns False for a callable without a readable signature.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
    return any(parameter.kind in _POSITIONAL for parameter in parameters.values())


def call_with(function: Callable[..., Any], argument: object) -> Any:
    """Calls `function(argument)`, or `function()` if it takes no argument."""
    return function(argument) if takes_argument(function) else function()


@dataclass(frozen=True, slots=True, eq=False)
class Resource:
    """A resource that functions share, such as a connection pool.

    There is one instance for a worker process and job. The instance is opened when the first task
    that needs it starts, and closed after the last one. `factory` is a generator function, an async
    generator function, or a function that returns a context manager (async or not). A factory may
    use other resources through the defaults of its own parameters. Equality is identity: the
    decorated name is the resource.
    """

    factory: Callable[..., Any]

    @property
    def name(self) -> str:
        """The name in error messages and task names."""
        return getattr(self.factory, "__qualname__", repr(self.factory))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the factory, as if it were not decorated."""
        return self.factory(*args, **kwargs)


@dataclass(frozen=True, slots=True, eq=False)
class Injected:
    """The default of a parameter for which the engine passes a resource.

    Code that calls the function itself must pass the argument.
    """

    resource: Resource

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            # Protocol probes (copy, pickle, inspect) must see an ordinary object.
            raise AttributeError(name)
        raise TypeError(
            f"resource {self.resource.name!r} is injected by the engine; calling by hand, pass "
            f"the argument (read .{name})"
        )


def resource(factory: Callable[..., Any]) -> Resource:
    """Declares a resource.

    `factory` is a generator function that yields once (async or not), or a function that returns a
    context manager.
    """
    if not callable(factory):
        raise TypeError(f"@resource decorates a function, got {type(factory).__name__}")
    return Resource(factory)


def use(what: Resource) -> Any:
    """Returns the default value for a parameter, for which the engine then passes the opened
    resource.
    """
    if not isinstance(what, Resource):
        raise TypeError(
            f"use() takes what @resource decorated, got {type(what).__name__}: {what!r}"
        )
    return Injected(what)


def injected_parameters(function: Callable[..., Any]) -> dict[str, Resource]:
    """Returns the parameters of `function` that resources fill, in order.

    Returns an empty dict for a callable without a readable signature.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}
    return {
        name: parameter.default.resource
        for name, parameter in parameters.items()
        if isinstance(parameter.default, Injected)
    }
