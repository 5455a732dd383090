"""Ships a class of `msgspec.Struct` by value.

cloudpickle makes an empty class first and then sets its attributes, because methods may refer to
their class. The fields of a Struct are fixed when the class is made, and cannot be set later. So
this module sends the fields first, with the options of the class. Annotations may refer to the
class too, so they follow with the attributes. msgspec reads them when the first value is decoded.

From Python 3.14 on, annotations are evaluated when they are read. The evaluation fails if a name is
defined later, or for type checkers alone. Such annotations are sent as text, as before Python 3.14
with `from __future__ import annotations`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

import msgspec

__all__ = ["annotations_of", "evaluated", "with_fields"]

OPTIONS = (
    "array_like", "cache_hash", "dict", "eq", "forbid_unknown_fields", "frozen", "gc",
    "omit_defaults", "order", "repr_omit_defaults", "tag", "tag_field", "weakref",
)  # fmt: skip
"""Class keywords of a Struct that subclasses inherit and that can be read from the class.

`kw_only` and `rename` are not among them, because they can be seen from the fields.
"""

POST_INIT = "__post_init__"


@dataclass(frozen=True, slots=True)
class _Field:
    default: Any
    """Default value; `msgspec.NODEFAULT` if there is none."""
    factory: Callable[[], Any] | None
    encoded_name: str


def with_fields(cls: type[msgspec.Struct], reduced: Any) -> Any:
    """Changes `reduced`, cloudpickle's reduction of the Struct `cls`, so that the fields and
    defaults of `cls` come first."""
    if type(reduced) is not tuple or len(reduced) != 6:
        return reduced  # By reference.
    make, args, (attributes, slots), *rest = reduced
    fields = _own_fields(cls)
    options = {
        name: getattr(cls.__struct_config__, name)
        for name in OPTIONS
        if hasattr(cls.__struct_config__, name)
    }
    if options["tag"] is None:
        options["tag"] = (
            False  # None would mean the tag of the base, and with it the field of the tag.
        )
    parameters = inspect.signature(cls).parameters
    options["kw_only"] = any(
        parameters[name].kind is inspect.Parameter.KEYWORD_ONLY for name in fields
    )
    kept = {
        name: value
        for name, value in attributes.items()
        if name not in fields and name != "__slots__"
    }
    return _make, (make, args, fields, options, POST_INIT in attributes), (kept, slots), *rest


def _own_fields(cls: Any) -> dict[str, _Field]:
    """Returns the fields that the class itself declares, in order."""
    names, defaults = cls.__struct_fields__, cls.__struct_defaults__
    default_of = dict(zip(names[len(names) - len(defaults) :], defaults, strict=True))
    own = annotations_of(cls)
    fields = {}
    for name, encoded in zip(names, cls.__struct_encode_fields__, strict=True):
        if name in own:
            default = default_of.get(name, msgspec.NODEFAULT)
            factory = getattr(default, "factory", None) if type(default) is _FACTORY else None
            fields[name] = _Field(
                msgspec.NODEFAULT if factory is not None else default, factory, encoded
            )
    return fields


class _WithFactory(msgspec.Struct):
    field: list[Any] = msgspec.field(default_factory=list)


_FACTORY: type = type(_WithFactory.__struct_defaults__[0])
"""The private msgspec class that wraps the factory of a default."""


def _make(
    make: Any,
    args: tuple[Any, ...],
    fields: dict[str, _Field],
    options: dict[str, Any],
    has_post_init: bool,
) -> type:
    """Makes the class with its fields, but without its other attributes.

    `make` and `args` are the function and the arguments with which cloudpickle makes the class.
    cloudpickle keeps one class in a process for each class that is sent.
    """
    metaclass, name, bases, namespace, *rest = args
    namespace = {**namespace, "__annotations__": dict.fromkeys(fields, Any)}
    for field, one in fields.items():
        if one.factory is not None:
            namespace[field] = msgspec.field(default_factory=one.factory)
        elif one.default is not msgspec.NODEFAULT:
            namespace[field] = msgspec.field(default=one.default)
    if has_post_init:
        namespace[POST_INIT] = _post_init
    rename = {field: one.encoded_name for field, one in fields.items()}
    made: type = make(partial(metaclass, rename=rename, **options), name, bases, namespace, *rest)
    return made


def _post_init(instance: Any) -> None:
    """Calls the real `__post_init__` of the class, which does not exist yet when the class is made.

    msgspec determines which `__post_init__` a Struct class calls when it makes the class.
    """
    getattr(instance, POST_INIT)()


def annotations_of(what: type | FunctionType) -> dict[str, Any]:
    """Returns the annotations of a class, without inherited ones, or of a function. Returns all as
    text if one cannot be evaluated."""
    try:
        return inspect.get_annotations(what)
    except Exception:  # Of any kind: they are expressions.
        if sys.version_info >= (3, 14):
            from annotationlib import Format, get_annotations

            return get_annotations(what, format=Format.STRING)
        raise


def evaluated(function: FunctionType) -> FunctionType:
    """Returns `function`, or a copy with annotations as text if they cannot be evaluated."""
    try:
        function.__annotations__  # noqa: B018  # Evaluates them.
    except Exception:  # noqa: BLE001  # Of any kind: they are expressions.
        copied = FunctionType(
            function.__code__,
            function.__globals__,
            function.__name__,
            function.__defaults__,
            function.__closure__,
        )
        copied.__kwdefaults__ = function.__kwdefaults__
        copied.__dict__.update(function.__dict__)
        copied.__module__, copied.__doc__ = function.__module__, function.__doc__
        copied.__qualname__ = function.__qualname__
        copied.__annotations__ = annotations_of(function)
        return copied
    return function
