"""Takes instances of a user's class apart into the values of their fields, and makes instances from
such values.

    dataclass, attrs    by attributes; `__init__` does not run
    NamedTuple          is its own row
    msgspec.Struct      by attributes
    Pydantic model      by its `__dict__`, without validation; the names of the fields that were not
                        set, extra fields and private attributes travel beside the fields
    Enum                by the name of the member
    Pydantic URL        by its text

attrs and Pydantic are never imported here: a class made by them exists only if user code imported
them.
"""

from __future__ import annotations

import dataclasses
import enum
import sys
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import msgspec

__all__ = [
    "Kind",
    "Rows",
    "creator",
    "defaults_of",
    "fields_of",
    "kind_of",
    "rows_of",
    "type_name",
]

UNSET_FIELDS = "__pydantic_unset_fields__"
"""Name of the extra field of a Pydantic model's row that lists the fields that were not set,
separated by commas.
"""

EXTRA = "__pydantic_extra__"
PRIVATE = "__pydantic_private__"

_CACHED_HASH = "_attrs_cached_hash"
"""Attribute in which an attrs class with `cache_hash=True` keeps its hash; None at first."""


class Kind(enum.Enum):
    """How the fields of a class's instances are read."""

    DATACLASS = "dataclass"
    ATTRS = "attrs class"
    NAMED_TUPLE = "NamedTuple"
    STRUCT = "Struct"
    PYDANTIC = "Pydantic model"
    ENUM = "Enum"
    TEXT = "text"
    CUSTOM = "registered"


Rows = Callable[[Sequence[Any]], Sequence[tuple[Any, ...]]]
"""A function that returns the field values of each instance. It raises AttributeError or KeyError
for a field that is not set.
"""


def type_name(cls: type[Any]) -> str:
    """Returns the name of `cls`, for log and error messages."""
    return (
        cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
    )


def kind_of(cls: type[Any]) -> Kind | None:
    """Returns the kind of `cls`, or None if its instances are not taken apart."""
    if issubclass(cls, enum.Enum):
        return Kind.ENUM
    if issubclass(cls, msgspec.Struct):
        return Kind.STRUCT if cls is not msgspec.Struct else None
    if issubclass(cls, tuple):
        return Kind.NAMED_TUPLE if isinstance(getattr(cls, "_fields", None), tuple) else None
    model = _of_pydantic("pydantic.main", "BaseModel")
    if model is not None and issubclass(cls, model):
        return Kind.PYDANTIC if cls is not model else None
    url = _of_pydantic("pydantic.networks", "AnyUrl")
    if url is not None and issubclass(cls, url):
        return Kind.TEXT
    # A subclass that is no dataclass itself may hold more than the fields of its base.
    if "__dataclass_fields__" in cls.__dict__:
        kind = Kind.DATACLASS
    elif "__attrs_attrs__" in cls.__dict__:
        kind = Kind.ATTRS
    else:
        return None
    try:
        object.__new__(cls)
    except TypeError:  # It derives from a builtin, whose contents the fields do not show.
        return None
    return kind


def _of_pydantic(module: str, name: str) -> type[Any] | None:
    found = getattr(sys.modules.get(module), name, None)
    return found if isinstance(found, type) else None


def fields_of(cls: Any, kind: Kind) -> tuple[str, ...]:
    """Returns the names of the values in a row of `cls`."""
    if kind is Kind.DATACLASS:
        names = tuple(field.name for field in dataclasses.fields(cls))
        return (*names, EXTRA) if _keeps_extra(cls) else names
    if kind is Kind.ATTRS:
        return tuple(field.name for field in cls.__attrs_attrs__)
    if kind is Kind.NAMED_TUPLE:
        return tuple(cls._fields)
    if kind is Kind.STRUCT:
        return tuple(cls.__struct_fields__)
    if kind is Kind.PYDANTIC:
        beside = [UNSET_FIELDS]
        if cls.model_config.get("extra") == "allow":
            beside.append(EXTRA)
        if cls.__private_attributes__:
            beside.append(PRIVATE)
        return (*cls.model_fields, *beside)
    return ()


def defaults_of(cls: Any, kind: Kind) -> dict[str, Callable[[], Any]]:
    """Returns, for each field with a default, a function that makes the default.

    Defaults that are computed from other fields are left out.
    """
    defaults: dict[str, Callable[[], Any]] = {}
    if kind is Kind.NAMED_TUPLE:
        return {field: _constant(value) for field, value in cls._field_defaults.items()}
    if kind is Kind.STRUCT:
        for info in msgspec.structs.fields(cls):
            if info.default_factory is not msgspec.NODEFAULT:
                defaults[info.name] = info.default_factory
            elif info.default is not msgspec.NODEFAULT:
                defaults[info.name] = _constant(info.default)
        return defaults
    if kind is Kind.ATTRS:
        return _attrs_defaults(cls)
    if kind is Kind.PYDANTIC:
        return _model_defaults(cls)
    if hasattr(cls, "__pydantic_fields__"):  # Its defaults may be a `Field(...)`.
        return {EXTRA: dict, **_pydantic_defaults(cls.__pydantic_fields__)}
    for field in dataclasses.fields(cls):
        if field.default_factory is not dataclasses.MISSING:
            defaults[field.name] = field.default_factory
        elif field.default is not dataclasses.MISSING:
            defaults[field.name] = _constant(field.default)
    return defaults


def _attrs_defaults(cls: Any) -> dict[str, Callable[[], Any]]:
    attr: Any = sys.modules["attr"]  # Loaded, because it made the class.
    defaults: dict[str, Callable[[], Any]] = {}
    for field in cls.__attrs_attrs__:
        if isinstance(field.default, attr.Factory):
            if not field.default.takes_self:
                defaults[field.name] = field.default.factory
        elif field.default is not attr.NOTHING:
            defaults[field.name] = _constant(field.default)
    return defaults


def _model_defaults(cls: Any) -> dict[str, Callable[[], Any]]:
    private = _private_defaults(cls)
    defaults: dict[str, Callable[[], Any]] = {UNSET_FIELDS: str, EXTRA: dict}
    defaults[PRIVATE] = lambda: {name: default() for name, default in private.items()}
    return {**defaults, **_pydantic_defaults(cls.model_fields)}


def _pydantic_defaults(fields: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """Returns the defaults of the fields of a Pydantic model, or of a Pydantic dataclass."""
    return {
        name: partial(field.get_default, call_default_factory=True)
        for name, field in fields.items()
        if not field.is_required()
        and not getattr(field, "default_factory_takes_validated_data", False)
    }


def _private_defaults(cls: Any) -> dict[str, Callable[[], Any]]:
    undefined = sys.modules["pydantic_core"].PydanticUndefined
    defaults: dict[str, Callable[[], Any]] = {}
    for name, private in cls.__private_attributes__.items():
        if getattr(private, "default_factory_takes_validated_data", False):
            continue
        if private.default_factory is not None:
            defaults[name] = private.default_factory
        elif private.default is not undefined:
            defaults[name] = private.get_default
    return defaults


def rows_of(cls: Any, kind: Kind, fields: tuple[str, ...]) -> Rows:
    """Returns the function that takes instances of `cls` apart. A NamedTuple is its own row."""
    if kind is Kind.NAMED_TUPLE:
        return _themselves
    if kind is Kind.PYDANTIC:
        return _model_rows(cls, fields)
    if EXTRA in fields:
        return lambda instances: [_row_with_extra(one, fields[:-1]) for one in instances]
    if len(fields) > 1:
        values_of = attrgetter(*fields)
        return lambda instances: list(map(values_of, instances))
    return lambda instances: [tuple(getattr(one, field) for field in fields) for one in instances]


def _keeps_extra(cls: Any) -> bool:
    """Returns whether instances of a dataclass of Pydantic may have more attributes than fields."""
    config: dict[str, Any] = getattr(cls, "__pydantic_config__", {})
    return config.get("extra") == "allow"


def _row_with_extra(instance: Any, names: tuple[str, ...]) -> tuple[Any, ...]:
    extra = {name: value for name, value in instance.__dict__.items() if name not in names}
    return (*[getattr(instance, name) for name in names], extra)


def _themselves(instances: Sequence[Any]) -> Sequence[tuple[Any, ...]]:
    return instances


def _model_rows(cls: Any, fields: tuple[str, ...]) -> Rows:
    names = tuple(cls.model_fields)
    beside = fields[len(names) + 1 :]

    def row(instance: Any) -> tuple[Any, ...]:
        content = instance.__dict__
        given = instance.__pydantic_fields_set__
        # The names that were given may include some that are no fields.
        unset = "" if given.issuperset(names) else ",".join([n for n in names if n not in given])
        values = [content[name] for name in names]
        return (*values, unset, *[getattr(instance, name) for name in beside])

    return lambda instances: list(map(row, instances))


def _constant(value: Any) -> Callable[[], Any]:
    return lambda: value


def creator(
    cls: type[Any], kind: Kind, fields: tuple[str, ...], added: frozenset[str] = frozenset()
) -> Callable[..., Any]:
    """Returns a function that makes an instance from the values of all fields, in their order.

    `added` are the fields that the writer of the values did not have. The values for these fields
    are defaults.
    """
    if kind is Kind.STRUCT:
        return _struct_creator(cls, fields)
    if kind is Kind.PYDANTIC:
        return _model_creator(cls, fields, added)
    if kind is Kind.ATTRS or (kind is Kind.DATACLASS and not _is_plain_dataclass(cls, fields)):
        return _attribute_setter(cls, kind, fields)
    return cls


def _attribute_setter(cls: type[Any], kind: Kind, fields: tuple[str, ...]) -> Callable[..., Any]:
    new, put = object.__new__, object.__setattr__
    hashing = getattr(cls.__hash__, "__code__", None)
    caches_hash = kind is Kind.ATTRS and hashing is not None and _CACHED_HASH in hashing.co_names

    def create(*values: Any) -> Any:
        instance = new(cls)
        for field, value in zip(fields, values, strict=True):
            if field == EXTRA:
                for name, more in (value or {}).items():
                    put(instance, name, more)
            else:
                put(instance, field, value)
        if caches_hash:
            put(instance, _CACHED_HASH, None)
        return instance

    return create


def _model_creator(cls: Any, fields: tuple[str, ...], added: frozenset[str]) -> Callable[..., Any]:
    names = tuple(cls.model_fields)
    count = len(names)
    beside = fields[count + 1 :]
    written = set(names) - added
    private = _private_defaults(cls)
    # Pydantic restores a pickled model in the same way. A class may have a `__setstate__` of its
    # own.
    restore = sys.modules["pydantic.main"].BaseModel.__setstate__

    def create(*values: Any) -> Any:
        state: dict[str, Any] = {EXTRA: None, PRIVATE: None}
        state.update(zip(beside, values[count + 1 :], strict=True))
        given = written.difference(values[count].split(","))
        if state[EXTRA]:
            given.update(state[EXTRA])
        state["__dict__"] = dict(zip(names, values[:count], strict=True))
        state["__pydantic_fields_set__"] = given
        if private and state[PRIVATE] is not None:
            for name in private.keys() - state[PRIVATE].keys():  # Fields that were added since.
                state[PRIVATE][name] = private[name]()
        instance = cls.__new__(cls)
        restore(instance, state)
        return instance

    return create


def _struct_creator(cls: type[Any], fields: tuple[str, ...]) -> Callable[..., Any]:
    # A Struct cannot be made without msgspec's `__init__`; what a `__post_init__` does to the
    # fields is undone.
    restore = hasattr(cls, "__post_init__")
    if not restore and cls.__match_args__ == fields:  # The fields that may be given by position.
        return cls
    put = msgspec.structs.force_setattr

    def create(*values: Any) -> Any:
        instance = cls(**dict(zip(fields, values, strict=True)))
        if restore:
            for field, value in zip(fields, values, strict=True):
                put(instance, field, value)
        return instance

    return create


def _is_plain_dataclass(cls: type[Any], fields: tuple[str, ...]) -> bool:
    """Returns whether calling `cls` only sets its fields, which is faster than setting them."""
    init = cls.__init__
    code = getattr(init, "__code__", None)
    new: object = cls.__new__
    setattr_: object = cls.__setattr__
    return (
        code is not None
        and code.co_qualname.startswith("__create_fn__.")
        and "__init__" in cls.__dict__
        and code.co_varnames[1 : code.co_argcount] == fields
        and all(field.init for field in dataclasses.fields(cls))
        and not hasattr(cls, "__post_init__")
        and type(cls) is type
        and new is object.__new__
        and (setattr_ is object.__setattr__ or cls.__dataclass_params__.frozen)
    )
