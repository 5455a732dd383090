"""Types of records that are no more than their fields: made of the values, in order, and nothing of
the application's own runs.

Of such a type a batch may be columns: a row that is made of them is the record that was taken
apart.
"""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any, Generic

import msgspec

__all__ = ["is_made_by_position"]

_GENERATED = "<string>"
"""Where code of `dataclasses` says that it stands."""

_TYPES_MAX = 1_024
"""Of which the answer is remembered; a peer chooses which it names."""


@lru_cache(_TYPES_MAX)
def is_made_by_position(kind: Any, names: tuple[str, ...]) -> bool:
    """Whether `kind` is a dataclass, NamedTuple or Struct with these fields, and `kind(*values)`
    does nothing but set them.
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
    """Whether `dataclass` wrote its `__init__`, which a class may bring itself, and nothing else
    runs when a field is set.
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
