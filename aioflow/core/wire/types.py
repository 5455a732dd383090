"""The registry of user classes that may be encoded: their names, and how to encode and rebuild
their fields.

A class is encoded as `module:qualname`, or as the name it was registered with. The reader never
imports: it searches the registered types, then the modules that are loaded already, and accepts
only the classes of `core.wire.kinds`. Instances are made from their fields,
without running the user's `__init__`.

The names of the fields are encoded too, once a batch. A field that was added to the class since
then gets its default, and a removed field is dropped, with one warning for each class.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import starmap
from typing import Any, TypeVar

import msgspec

from aioflow.core.elements import GlobalWindow, TimeWindow
from aioflow.core.errors import ValueNotSupported
from aioflow.core.wire.kinds import (
    Kind,
    Rows,
    creator,
    defaults_of,
    fields_of,
    kind_of,
    rows_of,
    type_name,
)

__all__ = [
    "DEFAULT_TYPES",
    "STANDS_FOR",
    "Assembler",
    "Registration",
    "TypePlan",
    "TypeRegistry",
    "register_type",
]

STANDS_FOR = "__stands_for__"
"""Name of an attribute of a Struct class. Its value is the class that the Struct replaces, which
has the same fields in the same order.
"""

_K = TypeVar("_K")
_V = TypeVar("_V")

logger = logging.getLogger(__name__)

_CACHE_ENTRIES_MAX = 1_024
"""Maximum number of cached classes, and of cached lists of fields. Limited because the peer chooses
them.
"""

EXPECTED = "dataclass, attrs class, NamedTuple, msgspec.Struct, Pydantic model or Enum"

_BUILTINS = (bool, int, float, str, bytes, bytearray, tuple, list, dict, set, frozenset)


class TypePlan(msgspec.Struct, frozen=True):
    """The description of how the instances of one class are encoded.

    `fields` is empty for Enums and for custom types.
    """

    cls: type[Any]
    name: str
    kind: Kind
    fields: tuple[str, ...] = ()
    encode: Callable[[Any], Any] | None = None
    taken_apart: Rows | None = None

    def rows(self, values: Sequence[Any]) -> Sequence[tuple[Any, ...]]:
        """Returns the field values of each of `values`. A NamedTuple is its own tuple of field
        values.

        Raises TypeNotSupported if a value lacks a field.
        """
        assert self.taken_apart is not None
        try:
            return self.taken_apart(values)
        except (AttributeError, KeyError) as error:
            raise ValueNotSupported(
                f"{type_name(self.cls)} cannot travel: {error}; set all its fields"
            ) from None


class Registration(msgspec.Struct, frozen=True, eq=False):
    """The arguments of one call of `register_type`."""

    cls: type[Any]
    name: str
    encode: Callable[[Any], Any] | None = None
    decode: Callable[[Any], Any] | None = None
    aliases: tuple[str, ...] = ()


class TypeRegistry:
    """Names of the types that may be encoded, in addition to those of `parent`.

    Each deployment has its own registry, whose parent is the registry of the process.
    """

    def __init__(self, parent: TypeRegistry | None = None) -> None:
        self._parent = parent
        self._by_class: dict[type[Any], Registration] = {}
        self._by_name: dict[str, Registration] = {}
        self._kinds: dict[type[Any], Kind | None] = {}
        self._plans: dict[tuple[type[Any], Registration | None], TypePlan] = {}
        self._assemblers: dict[
            tuple[type[Any], tuple[str, ...], Registration | None], Assembler
        ] = {}
        self._warned: set[str] = set()

    def register(
        self,
        cls: type[Any],
        name: str | None = None,
        *,
        encode: Callable[[Any], Any] | None = None,
        decode: Callable[[Any], Any] | None = None,
        aliases: Iterable[str] = (),
    ) -> None:
        """Registers `cls`, so that instances of exactly `cls` are encoded as `name` (default
        `module:qualname`).

        `encode(value)` returns a supported value, and `decode` makes an instance of `cls` from it.
        Give both or neither. Both may be omitted only for the classes that `core.wire.kinds`
        supports. `aliases` are former names. Registering a redefinition of the same class replaces
        it. Raises ValueError if another class has the name.
        """
        if (encode is None) != (decode is None):
            raise ValueError(
                f"register_type({cls.__qualname__}) was given one of encode and decode, expected "
                "both"
            )
        if encode is None and kind_of(cls) is None:
            raise ValueNotSupported(
                f"{type_name(cls)} is no {EXPECTED}: register it with encode= and decode="
            )
        registration = Registration(cls, name or _path(cls), encode, decode, tuple(aliases))
        names = (registration.name, *registration.aliases)
        for known in names:
            holder = self._by_name.get(known)
            if holder is not None and _path(holder.cls) != _path(cls):
                raise ValueError(
                    f"{known!r} is the name of {type_name(holder.cls)} already; choose another "
                    "name="
                )
        for known in names:
            self._by_name[known] = registration
        self._by_class[cls] = registration

    def registrations(self) -> list[Registration]:
        """Returns the registrations of this registry, in order, without those of its parent."""
        return list(self._by_class.values())

    def plan(self, cls: type[Any]) -> TypePlan:
        """Returns how to encode instances of `cls`.

        Raises TypeNotSupported, which names the remedy, if they cannot be encoded.
        """
        registration = self._registered(cls)
        plan = self._plans.get((cls, registration))
        if plan is None:
            plan = _cached(self._plans, (cls, registration), self._plan(cls, registration))
        # Checked each time, because a notebook cell that runs again makes a new class of the old
        # name.
        if plan.kind is not Kind.CUSTOM and self._resolve(plan.name) is not plan.cls:
            raise ValueNotSupported(
                f"{type_name(cls)} cannot travel: no reader could find it by {plan.name!r}; "
                "define it at the top level of a module, or call aioflow.register_type on it"
            )
        return plan

    def assembler(self, name: str, fields: Sequence[str]) -> Assembler:
        """Returns the function that makes instances of class `name` from the values of `fields`.

        Never imports a module. Raises LookupError if no such class is loaded, or if a field without
        a default is missing.
        """
        cls = self._resolve(name)
        if cls is None:
            raise LookupError(
                f"type {name!r} is not registered here and not loaded as a {EXPECTED}; "
                "import its module before, or call aioflow.register_type with this name or alias"
            )
        registration = self._registered(cls)
        key = (cls, tuple(fields), registration)
        found = self._assemblers.get(key)
        return (
            found if found is not None else _cached(self._assemblers, key, self._build(name, *key))
        )

    def _plan(self, cls: type[Any], registration: Registration | None) -> TypePlan:
        if registration is not None and registration.encode is not None:
            return TypePlan(cls, registration.name, Kind.CUSTOM, (), registration.encode)
        stood_for = cls.__dict__.get(STANDS_FOR)
        if stood_for is not None:
            return self._plan_of_stand_in(self.plan(stood_for))
        kind = self._kind(cls)
        if kind is None:
            raise ValueNotSupported(f"{type_name(cls)} cannot travel: {_remedy(cls)}")
        name = registration.name if registration is not None else _path(cls)
        if kind is Kind.TEXT:
            return TypePlan(cls, name, Kind.CUSTOM, encode=str)
        fields = fields_of(cls, kind)
        return TypePlan(cls, name, kind, fields, taken_apart=rows_of(cls, kind, fields))

    def _plan_of_stand_in(self, real: TypePlan) -> TypePlan:
        """Returns a plan for a Struct class that stands in for another class (see `STANDS_FOR`).
        `real` is the plan of that other class.
        """
        encode, make = real.encode, real.cls
        if encode is not None:
            return msgspec.structs.replace(
                real, encode=lambda value: encode(make(*msgspec.structs.astuple(value)))
            )
        by_attribute = rows_of(real.cls, Kind.STRUCT, real.fields)
        return msgspec.structs.replace(real, kind=Kind.STRUCT, taken_apart=by_attribute)

    def _build(
        self, name: str, cls: type[Any], fields: tuple[str, ...], registration: Registration | None
    ) -> Assembler:
        if registration is not None and registration.decode is not None:
            return Assembler(cls, Kind.CUSTOM, decode=registration.decode)
        kind = self._kind(cls)
        assert kind is not None  # `_resolve` and `register` let no other class through.
        if kind is Kind.TEXT:
            return Assembler(cls, Kind.CUSTOM, decode=cls)
        if kind is Kind.ENUM:
            return Assembler(cls, kind)
        current = fields_of(cls, kind)
        if fields == current:
            return Assembler(cls, kind, current)
        removed = [field for field in fields if field not in current]
        if removed and name not in self._warned:
            self._warned.add(name)
            logger.warning(
                "fields %s of %s are no more, their values are dropped", ", ".join(removed), name
            )
        defaults = defaults_of(cls, kind)
        for field in current:
            if field not in fields and field not in defaults:
                raise LookupError(
                    f"{name} has a field {field!r} that was not written and has no default; give "
                    "it one"
                )
        position = {field: index for index, field in enumerate(fields)}
        sources = tuple(position.get(field, -1) for field in current)
        return Assembler(
            cls, kind, current, written=len(fields), sources=sources, defaults=defaults
        )

    def _registered(self, cls: type[Any]) -> Registration | None:
        found = self._by_class.get(cls)
        return found if found is not None or self._parent is None else self._parent._registered(cls)

    def _resolve(self, name: str) -> type[Any] | None:
        registry: TypeRegistry | None = self
        while registry is not None:
            registration = registry._by_name.get(name)
            if registration is not None:
                return registration.cls
            registry = registry._parent
        module_name, _, qualname = name.partition(":")
        found: Any = sys.modules.get(module_name)
        for part in qualname.split("."):
            # Not getattr: a module's `__getattr__` may import.
            found = getattr(found, "__dict__", {}).get(part)
        if isinstance(found, type) and _path(found) == name and self._kind(found) is not None:
            return found
        return None

    def _kind(self, cls: type[Any]) -> Kind | None:
        if cls in self._kinds:
            return self._kinds[cls]
        return _cached(self._kinds, cls, kind_of(cls))


class Assembler:
    """Makes instances of one class from the written values of their fields."""

    __slots__ = ("_create", "_defaults", "_sources", "cls", "decode", "kind", "written")

    def __init__(
        self,
        cls: type[Any],
        kind: Kind,
        fields: tuple[str, ...] = (),
        *,
        written: int | None = None,
        sources: tuple[int, ...] | None = None,
        defaults: dict[str, Callable[[], Any]] | None = None,
        decode: Callable[[Any], Any] | None = None,
    ) -> None:
        """Makes an assembler. `sources` contains for each field its index in a written row, or -1
        if the field gets its default. `written` is the number of values in a written row.

        If `sources` is None, a row contains exactly the fields, in order.
        """
        self.cls = cls
        self.kind = kind
        self.written = len(fields) if written is None else written
        self.decode = decode
        self._sources = sources
        self._defaults = [(defaults or {}).get(field) for field in fields]
        added = {name for name, at in zip(fields, sources or (), strict=False) if at < 0}
        self._create = creator(cls, kind, fields, frozenset(added))

    def assemble(self, rows: Sequence[Sequence[Any]]) -> list[Any]:
        """Returns an instance for each row. Raises ValueError if a row does not have `written`
        values.
        """
        if rows and set(map(len, rows)) != {self.written}:
            raise ValueError(f"rows of {type_name(self.cls)} do not all have {self.written} values")
        if self._sources is not None:
            rows = [self._current(row) for row in rows]
        if self.kind is Kind.NAMED_TUPLE:  # Takes half the time of a call.
            return list(map(partial(tuple.__new__, self.cls), rows))
        return list(starmap(self._create, rows))

    def _current(self, row: Sequence[Any]) -> list[Any]:
        assert self._sources is not None
        return [
            # A field without a source has a default.
            row[source] if source >= 0 else default()  # type: ignore[misc]
            for source, default in zip(self._sources, self._defaults, strict=True)
        ]


DEFAULT_TYPES = TypeRegistry()
"""The types of this process, which `register_type` adds to."""


def register_type(
    cls: type[Any],
    name: str | None = None,
    *,
    encode: Callable[[Any], Any] | None = None,
    decode: Callable[[Any], Any] | None = None,
    aliases: Iterable[str] = (),
) -> None:
    """Registers `cls` in every job of this process, see `TypeRegistry.register`."""
    DEFAULT_TYPES.register(cls, name, encode=encode, decode=decode, aliases=aliases)


def _cached(cache: dict[_K, _V], key: _K, value: _V) -> _V:
    if len(cache) >= _CACHE_ENTRIES_MAX:
        cache.clear()
    cache[key] = value
    return value


def _path(cls: type[Any]) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def _remedy(cls: type[Any]) -> str:
    register = "register it with aioflow.register_type(cls, encode=, decode=)"
    if dataclasses.is_dataclass(cls) and "__dataclass_fields__" not in cls.__dict__:
        return (
            "it inherits from a dataclass and is none itself; decorate it with @dataclass, or "
            f"{register}"
        )
    if cls is bytearray:
        return "it could be changed while it is on its way; make it bytes(value)"
    for base in _BUILTINS:
        if issubclass(cls, base):
            return (
                f"it is a subclass of {base.__name__} and would come out as one; convert it, or "
                f"{register}"
            )
    return f"use a {EXPECTED}, or {register}"


# Savepoints use these names, which the first release gave. They are registered here, because a
# process may read windows of another process without running a window itself.
register_type(TimeWindow, name="aioflow.operators.windowing:TimeWindow")
register_type(GlobalWindow, name="aioflow.operators.windowing:GlobalWindow")
