"""Converts rows of texts into values of a type.

The fields of a user's type (dataclass, NamedTuple, Struct, Pydantic model, attrs class) are found
here, and rows of texts become values of the type. Pydantic validates values of its models.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import re
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from decimal import Decimal
from functools import lru_cache, partial
from itertools import starmap
from typing import Any

import msgspec

from aioflow.core.wire.columns import is_made_by_position
from aioflow.core.wire.kinds import Kind, defaults_of, fields_of, kind_of
from aioflow.core.wire.types import STANDS_FOR

__all__ = [
    "aliases_in",
    "allows_none",
    "are_plain",
    "are_scalars",
    "certain_hints_of",
    "field_names",
    "fields_of_value",
    "hints_of",
    "is_model",
    "made_part",
    "is_namedtuple",
    "model_fields",
    "model_maker",
    "namedtuple_from",
    "namedtuple_reader",
    "renaming_maker",
    "row_converter",
    "struct_like",
    "value_maker",
    "without_none",
]

_SCALARS: tuple[type, ...] = (int, float, str, bool, type(None))


def is_namedtuple(type_: Any) -> bool:
    """Returns whether `type_` is a class made by NamedTuple or namedtuple."""
    return isinstance(type_, type) and issubclass(type_, tuple) and hasattr(type_, "_fields")


def is_model(type_: Any) -> bool:
    """Returns whether `type_` is a Pydantic model class."""
    return isinstance(type_, type) and kind_of(type_) is Kind.PYDANTIC


def _is_attrs(type_: Any) -> bool:
    return isinstance(type_, type) and kind_of(type_) is Kind.ATTRS


def _attrs_inputs(type_: Any) -> dict[str, str]:
    """Maps each parameter name of an attrs class's `__init__` to the name of its field."""
    return {field.alias: field.name for field in type_.__attrs_attrs__}


def model_fields(model: Any) -> dict[str, Any]:
    """Returns the fields of a Pydantic model by their names in its input. The key of a field with
    several names is its first name.
    """
    return {
        _input_names(model, name, field)[0]: field for name, field in model.model_fields.items()
    }


def _input_names(model: Any, name: str, field: Any) -> list[str]:
    """Returns all names that field `name` may have in the input of a Pydantic model."""
    alias, config = field.validation_alias, model.model_config
    names = [one for one in getattr(alias, "choices", [alias]) if isinstance(one, str)]
    if not config.get("validate_by_alias", True):
        names = []
    by_name = config.get("populate_by_name") or config.get("validate_by_name")
    return [*names, name] if by_name or not names else names


def model_maker(validate: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wraps `validate`, a Pydantic model's method, so that it raises msgspec.ValidationError.

    The message is one line that locates each fault.
    """
    # Pydantic is imported already, because the program uses one of its models.
    from pydantic import ValidationError

    def make(value: Any) -> Any:
        try:
            return validate(value)
        except ValidationError as error:
            told = [
                f"{one['msg']} - at `{'.'.join(map(str, ('$', *one['loc'])))}`"
                for one in error.errors(include_url=False)
            ]
            raise msgspec.ValidationError("; ".join(told)) from error

    return make


def renaming_maker(type_: Any, strict: bool = True) -> Callable[[Any], Any] | None:
    """Returns a function that makes a value of `type_` from decoded JSON.

    The JSON names the fields of attrs classes as the parameters of `__init__`, such as `x` for
    `_x`. Returns None if no class in `type_` has such names. `strict` is as for msgspec.
    """
    aliases = aliases_in(type_)
    if not aliases:
        return None
    rename = _renamer(type_, {})
    assert rename is not None

    def make(value: Any) -> Any:
        try:
            return msgspec.convert(rename(value), type_, strict=strict, dec_hook=made_part)
        except msgspec.ValidationError as error:
            told = re.sub(
                r"(required field `|\.)(\w+)",
                lambda found: found[1] + aliases.get(found[2], found[2]),
                str(error),
            )
            raise msgspec.ValidationError(told) from error

    return make


@lru_cache(1_024)
def aliases_in(type_: Any) -> dict[str, str]:
    """Maps field names to parameter names of `__init__`, for all attrs classes that values of
    `type_` may hold. Fields whose two names are equal are left out.
    """
    aliases: dict[str, str] = {}
    for cls in _classes_in(type_):
        if _is_attrs(cls):
            aliases |= {name: alias for alias, name in _attrs_inputs(cls).items() if alias != name}
    return aliases


def _classes_in(hint: Any) -> set[type[Any]]:
    """Returns the classes with fields that an annotation contains, and the classes that their
    fields contain.
    """
    found: set[type[Any]] = set()
    left = [hint]
    while left:
        one = left.pop()
        left += [part for part in typing.get_args(one) if not isinstance(part, str)]
        if _has_fields(one) and one not in found:
            found.add(one)
            left += _annotations(one).values()
    return found


def _has_fields(hint: Any) -> bool:
    return isinstance(hint, type) and kind_of(hint) in (
        Kind.ATTRS,
        Kind.DATACLASS,
        Kind.NAMED_TUPLE,
        Kind.STRUCT,
    )


def _annotations(cls: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(cls)
    except (NameError, TypeError):  # Such as a class in a function: not renamed.
        return {}


Renamer = Callable[[Any], Any]
"""Returns decoded JSON with attrs parameter names replaced by field names."""


def _renamer(hint: Any, known: dict[type[Any], list[Renamer]]) -> Renamer | None:
    """Returns the renamer for values of `hint`, or None if no name differs.

    `known` holds the renamers of the enclosing classes, because a class may contain itself.
    """
    if not aliases_in(hint):
        return None
    if _has_fields(hint):
        if hint not in known:
            known[hint] = []
            known[hint].append(_fields_renamer(hint, known))
        made = known[hint]
        return lambda value: made[0](value)
    inner = [renamer for part in typing.get_args(hint) if (renamer := _renamer(part, known))]
    if len(inner) != 1:
        return lambda value: value  # The class is not known before decoding.
    rename, origin = inner[0], typing.get_origin(hint)
    if not isinstance(origin, type) or origin is types.UnionType:
        return rename
    if issubclass(origin, collections.abc.Mapping):
        return lambda value: (
            {key: rename(one) for key, one in value.items()} if isinstance(value, dict) else value
        )
    return lambda value: list(map(rename, value)) if isinstance(value, list) else value


def _fields_renamer(cls: Any, known: dict[type[Any], list[Renamer]]) -> Renamer:
    hints = _annotations(cls)
    names = {name: name for name in hints}
    if _is_attrs(cls):
        names |= _attrs_inputs(cls)
    elif _is_struct(cls):
        names |= dict(zip(cls.__struct_encode_fields__, cls.__struct_fields__, strict=True))
    inner = {key: _renamer(hints.get(name), known) for key, name in names.items()}
    keeps_names = not _is_attrs(cls)
    order = list(cls._fields) if is_namedtuple(cls) else []

    def rename(value: Any) -> Any:
        if order and isinstance(value, list):
            value = dict(zip(order, value, strict=False))
            return list(rename(value).values())
        if not isinstance(value, dict):
            return value
        made = {}
        for key, one in value.items():
            renamer = inner.get(key)
            name = key if keeps_names else names.get(key, key)
            made[name] = one if renamer is None else renamer(one)
        return made

    return rename


def field_names(type_: Any) -> list[str]:
    """Returns the names that the fields of a type have in its input. Raises TypeError for a type
    without fields.
    """
    if is_namedtuple(type_):
        return list(type_._fields)
    if _is_struct(type_):
        return list(type_.__struct_encode_fields__)
    if dataclasses.is_dataclass(type_):
        return [field.name for field in dataclasses.fields(type_)]
    if is_model(type_):
        return list(model_fields(type_))
    if _is_attrs(type_):
        return list(_attrs_inputs(type_))
    raise TypeError(
        f"type is {type_!r}, expected a dataclass, a NamedTuple, a msgspec.Struct, a Pydantic "
        "model, an attrs class or dict"
    )


def fields_of_value(value: Any) -> list[str] | None:
    """Returns the names of a value's fields; None if the value has no fields."""
    if isinstance(value, dict):
        return [str(key) for key in value]
    if is_model(type(value)):
        return list(type(value).model_fields)
    if _is_attrs(type(value)):
        return list(fields_of(type(value), Kind.ATTRS))
    try:
        return field_names(type(value))
    except TypeError:
        return None


def hints_of(type_: Any) -> dict[str, Any]:
    """Returns the annotation of each field by the field's Python name. For a Pydantic model or an
    attrs class, the names are the names in its input.
    """
    if is_model(type_):
        return {name: field.annotation for name, field in model_fields(type_).items()}
    hints = typing.get_type_hints(type_, include_extras=True)
    if _is_attrs(type_):
        return {alias: hints.get(name, Any) for alias, name in _attrs_inputs(type_).items()}
    names = type_.__struct_fields__ if _is_struct(type_) else field_names(type_)
    return {name: hints.get(name, Any) for name in names}


def certain_hints_of(type_: Any) -> dict[str, Any]:
    """Returns the annotation of each field, as `hints_of`, or None for an uncertain field.

    A field is uncertain if its default may not match the annotation, as in `x: float = None`.
    Decoders do not check the defaults of dataclasses and Structs.
    """
    defaults = {} if is_namedtuple(type_) else _defaults(type_)
    return {
        name: hint if name not in defaults or _is_certain(defaults[name], hint) else None
        for name, hint in hints_of(type_).items()
    }


def _is_certain(default: Any, hint: Any) -> bool:
    kind = without_none(hint)
    return type(default) is kind or (default is None and kind is not hint)


def without_none(hint: Any) -> Any:
    """Returns X for the annotation `X | None`, and any other annotation unchanged."""
    kinds = [one for one in _members(hint) if one is not type(None)]
    return kinds[0] if len(kinds) == 1 else hint


def struct_like(type_: Any) -> type[msgspec.Struct] | None:
    """Returns a Struct that is decoded like `type_`, but faster.

    `type_(*values)` makes the record from the values of the decoded Struct. Returns None if the
    type runs its own code in its constructor, or has fields that cannot be passed by position.
    """
    try:
        hints = hints_of(type_)
        if not hints or not is_made_by_position(type_, tuple(hints)) or aliases_in(type_):
            return None
        if _is_struct(type_):
            return type_  # type: ignore[no-any-return]
        made_by = _default_factories(type_)
        fields: list[Any] = [
            (name, hint, msgspec.field(default_factory=made_by[name]))
            if name in made_by
            else (name, hint)
            for name, hint in hints.items()
        ]
        # The garbage collector need not track decoded values: they have no cycles, and live only
        # until their fields are read.
        made = msgspec.defstruct(type_.__name__, fields, gc=False, namespace={STANDS_FOR: type_})
        msgspec.json.Decoder(made)
    except (TypeError, NameError, msgspec.ValidationError):
        # The type has no fields, annotations that msgspec does not support, or defaults that do not
        # match the annotations.
        return None
    return made


def _is_struct(type_: Any) -> bool:
    return isinstance(type_, type) and issubclass(type_, msgspec.Struct)


def _defaults(type_: Any) -> dict[str, Any]:
    """Returns the default of each field that has one, or the factory of a field with a default
    factory.
    """
    fields: Any = msgspec.structs.fields(type_) if _is_struct(type_) else dataclasses.fields(type_)
    missing = msgspec.NODEFAULT if _is_struct(type_) else dataclasses.MISSING
    found = {
        field.name: field.default_factory if field.default is missing else field.default
        for field in fields
    }
    return {name: default for name, default in found.items() if default is not missing}


def _default_factories(type_: Any) -> dict[str, Callable[[], Any]]:
    """Returns a function for each field with a default. The function makes the default value.

    Raises ValidationError for a default that `namedtuple_from` refuses.
    """
    if is_namedtuple(type_):
        hints = hints_of(type_)
        return {
            name: _giving(msgspec.convert(value, hints[name]))
            for name, value in type_._field_defaults.items()
        }
    factories: dict[str, Callable[[], Any]] = {}
    for field in dataclasses.fields(type_):
        if field.default is not dataclasses.MISSING:
            factories[field.name] = _giving(field.default)
        elif field.default_factory is not dataclasses.MISSING:
            factories[field.name] = field.default_factory
    return factories


def _giving(value: Any) -> Callable[[], Any]:
    return lambda: value


def namedtuple_from(type_: Any) -> Callable[[Any], Any]:
    """Returns a function that makes a NamedTuple from a dict, or from a list in the order of the
    fields.

    The function checks the types of the values.
    """
    names, defaults = list(type_._fields), type_._field_defaults
    rename = _renamer(type_, {})

    def make(value: Any) -> Any:
        if rename is not None:
            value = rename(value)
        if not isinstance(value, dict):
            return msgspec.convert(value, type_, dec_hook=made_part)
        missing = [name for name in names if name not in value and name not in defaults]
        if missing:
            raise msgspec.ValidationError(f"Object missing required field `{missing[0]}`")
        try:
            return msgspec.convert(
                [value[name] if name in value else defaults[name] for name in names],
                type_,
                dec_hook=made_part,
            )
        except msgspec.ValidationError as error:
            # The values were passed by position, so the message names a position. The name of the
            # field is clearer to the user.
            told = re.sub(
                r"`\$\[(\d+)\]", lambda found: f"`$.{names[int(found[1])]}", str(error), count=1
            )
            raise msgspec.ValidationError(told) from error

    return make


def namedtuple_reader(type_: Any) -> Callable[[bytes | str], Any]:
    """Returns a function that makes a NamedTuple from a JSON object or array.

    If `are_plain` holds for the fields, a number for a Decimal field keeps all its digits, because
    it is not decoded as a float first.
    """
    # msgspec decodes a NamedTuple from an array, but JSON contains objects more often.
    read, make = msgspec.json.Decoder().decode, namedtuple_from(type_)
    struct, defaults = struct_like(type_), type_._field_defaults.values()
    # The Struct would share a mutable default between records.
    shares = not all(isinstance(one, _SCALARS) for one in defaults)
    if struct is None or shares or not are_plain(hints_of(type_).values()):
        return lambda data: make(read(data))
    of_object = msgspec.json.Decoder(struct).decode
    of_array = msgspec.json.Decoder(type_).decode

    def of_json(data: bytes | str) -> Any:
        # The Struct skips fields that the type lacks, even a number too large for a float. So a
        # single line gives the same record as in a block that is decoded at once.
        for decode in (of_object, of_array):
            try:
                found = decode(data)
            except (msgspec.MsgspecError, ValueError, RecursionError):
                continue
            return found if decode is of_array else type_._make(msgspec.structs.astuple(found))
        return make(read(data))  # Its errors name the fields.

    return of_json


def made_part(type: Any, value: Any) -> Any:
    """Converts `value` to `type` if `type` is a Pydantic model. Passed to msgspec as `dec_hook`,
    for models inside other types.
    """
    return model_maker(type.model_validate)(value) if is_model(type) else value


def value_maker(type_: Any) -> Callable[[dict[str, Any]], Any] | None:
    """Returns a function that makes a value of `type_` from a dict of its fields. Returns None if
    `type_` is None or dict.

    A bool field accepts 0 and 1, as databases store it. Raises TypeError for a type without fields.
    """
    if type_ is None or type_ is dict:
        return None
    field_names(type_)
    if is_model(type_):
        return model_maker(type_.model_validate)
    make: Callable[[dict[str, Any]], Any]
    if is_namedtuple(type_):
        make = namedtuple_from(type_)
    else:
        convert = renaming_maker(type_, strict=False)
        make = convert or (
            lambda row: msgspec.convert(row, type_, strict=False, dec_hook=made_part)
        )
    bools = [name for name, hint in hints_of(type_).items() if hint in (bool, bool | None)]
    if not bools:
        return make

    def make_with_bools(row: dict[str, Any]) -> Any:
        for name in bools:
            # Only ints: 1.0 or a Decimal is no bool.
            if type(value := row.get(name)) is int and value in (0, 1):
                row = {**row, name: bool(value)}
        return make(row)

    return make_with_bools


def row_converter(
    type_: Any,
    columns: Sequence[str],
    called: str = "column",
    remedy: str = "give columns=, or a default",
) -> Callable[[Sequence[str]], Any]:
    """Returns a function that makes a value of `type_` from a row of texts with these `columns`.

    Texts are converted by the annotations of `type_`. An empty text stays as it is in a field that
    accepts text. In any other field it becomes None if the field allows None, else the field's
    default. Columns without a field are skipped.

    A Pydantic model with a validator that may rename its input gets all columns instead, and
    reports missing ones itself. The function raises msgspec.ValidationError. `called` and `remedy`
    are used in the message of the TypeError for missing fields.
    """
    names = field_names(type_)
    hints = hints_of(type_)
    given, columns = columns, _field_names_of(type_, columns)
    renames = is_model(type_) and _renames(type_)
    missing = [name for name in names if name not in columns and name not in _with_default(type_)]
    if missing and not renames:
        raise TypeError(
            f"{type_.__name__} needs the {called} {missing[0]!r}, found "
            f"{', '.join(map(repr, columns))}: {remedy}"
        )
    index = {name: columns.index(name) for name in names if name in columns}
    nullable = {name for name in names if allows_none(hints.get(name, Any))}
    textual = {name for name in names if _allows_text(hints.get(name, Any))}
    defaulted = _with_default(type_)
    plain = [(name, i) for name, i in index.items() if name in textual]
    special = [(name, i, name in nullable) for name, i in index.items() if name not in textual]

    def make_dict(row: Sequence[str]) -> dict[str, Any]:
        values: dict[str, Any] = {name: row[i] for name, i in plain}
        for name, i, may_be_none in special:
            text = row[i]
            if text:
                values[name] = text
            elif may_be_none:
                values[name] = None
            elif name not in defaulted:
                values[name] = text  # This fails below with an error that names the field.
        return values

    if is_model(type_):
        validate = model_maker(type_.model_validate)
        if renames:
            # The model itself checks its columns, and decides what an empty text in the other
            # columns means.
            others = [(name, i) for i, name in enumerate(given) if columns[i] not in index]
            return lambda row: validate(make_dict(row) | {name: row[i] for name, i in others})
        return lambda row: validate(make_dict(row))
    if not is_namedtuple(type_):
        make = renaming_maker(type_, strict=False)
        if make is not None:
            return lambda row: make(make_dict(row))
        return lambda row: msgspec.convert(make_dict(row), type_, strict=False)
    order = list(index.values()) if len(index) == len(names) else None
    return _namedtuple_converter(type_, make_dict, order)


def _field_names_of(type_: Any, columns: Sequence[str]) -> Sequence[str]:
    """Replaces each name of a field in `columns` by the field's first name in the input."""
    if is_model(type_):
        known = {
            other: accepted[0]
            for accepted in starmap(partial(_input_names, type_), type_.model_fields.items())
            for other in accepted
        }
    elif _is_attrs(type_):
        known = {name: alias for alias, name in _attrs_inputs(type_).items()}
    else:
        return columns
    return [known.get(column, column) for column in columns]


def _namedtuple_converter(
    type_: Any,
    make_dict: Callable[[Sequence[str]], dict[str, Any]],
    order: Sequence[int] | None,
) -> Callable[[Sequence[str]], Any]:
    """Returns a function that converts a row of texts to the NamedTuple `type_`.

    `order` has the index of each field's column, or is None if a field has no column.
    """
    convert, hints = msgspec.convert, hints_of(type_)
    all_hints = [hints.get(name, Any) for name in field_names(type_)]
    field_types = {
        name: _as_field(hint) for name, hint in zip(field_names(type_), all_hints, strict=True)
    }

    def make_namedtuple(row: Sequence[str]) -> Any:
        made: dict[str, Any] = {}
        for name, value in make_dict(row).items():
            try:
                made[name] = convert({name: value}, field_types[name], strict=False)[name]
            except msgspec.ValidationError as error:
                # For a dict, msgspec does not say which value was wrong.
                raise msgspec.ValidationError(str(error).replace("`$[...]", f"`$.{name}")) from None
        return type_(**made)

    if order is None:
        return make_namedtuple
    whole = tuple[tuple(all_hints)]  # type: ignore[misc, valid-type]

    def make_whole(row: Sequence[str]) -> Any:
        """Converts all fields at once. Rows with an empty or invalid text are converted field by
        field.
        """
        texts = [row[i] for i in order]
        if "" not in texts:
            try:
                return type_(*convert(texts, whole, strict=False))
            except msgspec.ValidationError:
                pass
        return make_namedtuple(row)

    return make_whole


def _renames(model: Any) -> bool:
    """Returns whether a Pydantic model has a validator that sees the raw input and may rename its
    fields.
    """
    validators = model.__pydantic_decorators__.model_validators.values()
    return any(one.info.mode in ("before", "wrap") for one in validators)


def _as_field(hint: Any) -> Any:
    return dict[str, hint]


def _with_default(type_: Any) -> set[str]:
    if is_namedtuple(type_):
        return set(type_._field_defaults)
    if issubclass(type_, msgspec.Struct):
        return {field.encode_name for field in msgspec.structs.fields(type_) if not field.required}
    if is_model(type_):
        return {name for name, field in model_fields(type_).items() if not field.is_required()}
    if _is_attrs(type_):
        defaults = defaults_of(type_, Kind.ATTRS)
        return {alias for alias, name in _attrs_inputs(type_).items() if name in defaults}
    missing = dataclasses.MISSING
    return {
        field.name
        for field in dataclasses.fields(type_)
        if field.default is not missing or field.default_factory is not missing
    }


def _members(hint: Any) -> tuple[Any, ...]:
    return (
        typing.get_args(hint)
        if typing.get_origin(hint) in (typing.Union, types.UnionType)
        else (hint,)
    )


def are_scalars(hints: Iterable[Any]) -> bool:
    """Returns whether each annotation is int, float, str, bool, or a union of these and None."""
    return all(member in _SCALARS for hint in hints for member in _members(hint))


def are_plain(hints: Iterable[Any]) -> bool:
    """Returns whether each annotation is a scalar, Decimal, bytes, Any, a list or dict of these, or
    a union of these.

    Decoding such fields into a Struct or into a dict gives equal values, except for digits of
    Decimals.
    """

    def is_plain(hint: Any) -> bool:
        parts = typing.get_args(hint)
        if typing.get_origin(hint) in (list, dict, typing.Union, types.UnionType):
            return all(map(is_plain, parts))
        return hint in (*_SCALARS, Decimal, bytes, Any)

    return all(map(is_plain, hints))


def allows_none(hint: Any) -> bool:
    """Returns whether None is a value of the annotation."""
    return type(None) in _members(hint)


def _allows_text(hint: Any) -> bool:
    return any(member in (str, Any) for member in _members(hint)) and not allows_none(hint)
