"""Types of records that consist only of their fields: they are made of the values, in order,
without running code of the application.

A batch of such a type may be stored as columns: a row made of the values equals the original
record.
"""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any, Generic

import msgspec

__all__ = ["is_made_by_position"]

_GENERATED = "<string>"
"""File name of code that `dataclasses` generates."""

_TYPES_MAX = 1_024
"""Maximum number of cached types, because a peer chooses the types that it names."""


@lru_cache(_TYPES_MAX)
def is_made_by_position(kind: Any, names: tuple[str, ...]) -> bool:
    """Returns whether `kind` has these fields, and `kind(*values)` only sets them.

    `kind` must be a dataclass, NamedTuple or Struct.
    """
    if not isinstance(kind, type) or hasattr(kind, "__post_init__"):
        return False
    if issubclass(kind, tuple):
        return (
            kind.__bases__ in ((tuple,), (tuple, Generic))
            and getattr(kind, "_fields", None) == names
        )
    if issubclass(kind, msgspec.Struct):
        if kind.__init__ is not msgspec.Struct.__init__:
            return False
    elif not _is_plain_dataclass(kind):
        return False
    parameters = inspect.signature(kind).parameters
    return tuple(parameters) == names and all(
        one.kind is one.POSITIONAL_OR_KEYWORD for one in parameters.values()
    )


def _is_plain_dataclass(kind: Any) -> bool:
    """Returns whether `dataclass` generated the class's `__init__`, and setting a field runs no
    other code.

    A class may define `__init__` itself.
    """
    params = vars(kind).get("__dataclass_params__")
    if params is None or not params.init or kind.__new__ is not object.__new__:
        return False
    code = getattr(vars(kind)["__init__"], "__code__", None)
    return (
        code is not None
        and code.co_filename == _GENERATED
        and (params.frozen or kind.__setattr__ is object.__setattr__)
    )
