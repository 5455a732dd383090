"""Resources for functions, such as connections: finds the resources that a function requests by the
defaults of its parameters. The worker opens and closes them.

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
from typing import Any

__all__ = ["Injected", "Resource", "injected_parameters", "resource", "use"]


@dataclass(frozen=True, slots=True, eq=False)
class Resource:
    """A resource that functions share, such as a connection pool.

    There is one instance for a worker process and job. The instance is opened when the first task
    that needs it starts, and closed after the last one. `factory` is a generator function, an async
    one, or a function that returns a context manager of either kind. A factory may use other
    resources through the defaults of its own parameters. Equality is identity: the decorated name
    is the resource.
    """

    factory: Callable[..., Any]

    @property
    def name(self) -> str:
        """The name for messages and task names."""
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
        if name.startswith(
            "__"
        ):  # Protocol probes (copy, pickle, inspect) must see an ordinary object.
            raise AttributeError(name)
        raise TypeError(
            f"resource {self.resource.name!r} is injected by the engine; calling by hand, pass "
            f"the argument (read .{name})"
        )


def resource(factory: Callable[..., Any]) -> Resource:
    """Declares a resource.

    `factory` is a generator function that yields once, an async one, or a function that returns a
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
