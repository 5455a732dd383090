"""Improves the error messages of public functions for unknown arguments.

Python only names the argument: "got an unexpected keyword argument 'discover'". A decorated
function also names its parameters, and the parameter that was probably meant. A valid call costs
one more frame, so this is for functions that build a flow, never for functions that run in one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, TypeVar

from aioflow.core.errors import did_you_mean

__all__ = ["explained", "explained_methods", "hinted", "nearest_method", "no_such_method"]

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type[Any])

_BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def explained(function: F, name: str | None = None) -> F:
    """Returns `function` with a helpful TypeError for wrong arguments.

    `name` is the name to use in messages, by default that of the function.
    """

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            # No frame is below this one, so the call itself raised the error, not the function's
            # body.
            if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                raise
            raise TypeError(
                _explanation(function, name or function.__name__, args, kwargs) or str(error)
            ) from None

    return call  # type: ignore[return-value]  # It takes what `function` takes.


def hinted(hint: Callable[[Mapping[str, Any]], str | None]) -> Callable[[F], F]:
    """Returns a decorator that adds a hint to an `explained` function: `hint` is called with the
    unknown arguments.

    Its result replaces the list of parameters in the error. None means no hint.
    """

    def mark(function: F) -> F:
        function._aioflow_hint = hint  # type: ignore[attr-defined]
        return function

    return mark


def explained_methods(cls: C) -> C:
    """Returns `cls` with `explained` applied to its public methods and its constructor.

    An `async def` remains one, because callers may inspect it.
    """
    for name, method in list(vars(cls).items()):
        if (
            inspect.isfunction(method)
            and (name == "__init__" or not name.startswith("_"))
            and not inspect.iscoroutinefunction(method)
        ):
            setattr(cls, name, explained(method, cls.__name__ if name == "__init__" else name))
        elif isinstance(method, (staticmethod, classmethod)) and not name.startswith("_"):
            setattr(cls, name, type(method)(explained(method.__func__)))
    return cls


def _explanation(
    function: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> str | None:
    """Returns what is wrong with the arguments, and what would be right.

    Returns None if Python's own message is as good.
    """
    parameters = list(inspect.signature(function).parameters.values())
    if parameters and parameters[0].name in ("self", "cls"):
        parameters, args = parameters[1:], args[1:]
    by_name = [parameter.name for parameter in parameters if parameter.kind in _BY_NAME]
    by_place = [parameter.name for parameter in parameters if parameter.kind in _BY_PLACE]
    takes = ", ".join(_shown(parameter) for parameter in parameters) or "nothing"
    kinds = {parameter.kind for parameter in parameters}
    any_name, any_number = (
        inspect.Parameter.VAR_KEYWORD in kinds,
        inspect.Parameter.VAR_POSITIONAL in kinds,
    )
    strange = (
        {}
        if any_name
        else {given: value for given, value in kwargs.items() if given not in by_name}
    )
    if strange:
        unknown = next(iter(strange))
        hint = getattr(function, "_aioflow_hint", None)
        if hint is not None and (said := hint(strange)) is not None:
            return f"{name}() has no argument {unknown}=: {said}"
        return (
            f"{name}() has no argument {unknown}={did_you_mean(unknown, by_name, '{}=') or ''}; "
            f"it takes {takes}"
        )
    if len(args) > len(by_place) and not any_number:
        most = f"at most {len(by_place)}" if by_place else "no"
        return (
            f"{name}() takes {most} argument{'s' * (len(by_place) > 1)} without a name, got "
            f"{len(args)}; it takes {takes}"
        )
    missing = [
        parameter.name
        for place, parameter in enumerate(parameters)
        if parameter.kind in (*_BY_PLACE, *_BY_NAME)
        and parameter.default is parameter.empty
        and parameter.name not in kwargs
        if parameter.name not in by_place or place >= len(args)
    ]
    return f"{name}() needs {' and '.join(missing)}; it takes {takes}" if missing else None


def _shown(parameter: inspect.Parameter) -> str:
    """Returns a parameter as it is written in a call."""
    match parameter.kind:
        case inspect.Parameter.VAR_KEYWORD:
            return f"**{parameter.name}"
        case inspect.Parameter.VAR_POSITIONAL:
            return f"*{parameter.name}"
        case inspect.Parameter.KEYWORD_ONLY:
            return f"{parameter.name}="
    return parameter.name


def nearest_method(of: type, name: str) -> str:
    """Returns the end of a message that names the public method closest to `name`.

    Returns an empty string for private names, which no user wrote.
    """
    if name.startswith("_"):  # Copying, pickling and introspection ask for these, and often.
        return ""
    return did_you_mean(name, [one for one in dir(of) if not one.startswith("_")])


def no_such_method(of: object, name: str, remedy: str = "") -> AttributeError:
    """Returns an AttributeError with Python's usual text and `remedy`."""
    words = f"{type(of).__name__!r} object has no attribute {name!r}{remedy}"
    # Python adds the most similar attribute to an error that has a name and an object, which is one
    # hint too many after a remedy. Python fills both in if they are left out, so they are None.
    return (
        AttributeError(words, name=None, obj=None)
        if remedy
        else AttributeError(words, name=name, obj=of)
    )
