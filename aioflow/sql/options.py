"""The options in WITH of CREATE TABLE: the arguments of the connector's function.

They are read from the signature of the function, so connectors and their options are listed once.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

from sqlglot import exp

from aioflow import io
from aioflow.core.errors import AioflowError, did_you_mean
from aioflow.inspection.redaction import hide, is_secret_name
from aioflow.sql.dialect import CreateTable
from aioflow.sql.errors import SqlError

__all__ = ["Options", "connectors", "options_of", "parameters_of"]

NO_TABLES = {"drop_postgres_slot", "push"}
"""Functions of `aioflow.io` that take texts, but neither read nor write a table."""

BUILT: dict[str, Callable[..., Any]] = {
    "RollPolicy": lambda **given: io.RollPolicy(**given),
    "SchemaRegistry": lambda **given: io.SchemaRegistry(**given),
}
"""Builds arguments by the name of their class. Options with a dot (`roll.age_ms`) set the parts."""

_TEXT = re.compile(
    r"str|int|float|bool|Duration|(Lake)?Mode|Deletes|On(Error|Cascade)"
    r"|(Sequence|Mapping)\[.*str.*\]"
)
"""Matches the annotations of parameters whose arguments can be given as text."""

_SECRET = re.compile(r"\$\{(\w+)\}")
_WORDS = re.compile(r"[A-Za-z]+([-._][A-Za-z]+)*")
"""Matches a plain word such as localhost. Error messages show it even if it is from a variable."""


@lru_cache(1)
def connectors() -> tuple[str, ...]:
    """Returns the names of the connectors whose arguments can be given as texts."""
    found = [one for one in io.__all__ if one.islower() and one not in ("formats", *NO_TABLES)]
    return tuple(one for one in found if one == "datagen" or _takes_texts(one))


def _takes_texts(name: str) -> bool:
    parameters = inspect.signature(getattr(io, name)).parameters.values()
    given = options_of(name)
    return all(one.name in given for one in parameters if one.default is one.empty)


@lru_cache
def options_of(name: str) -> Mapping[str, tuple[str, ...]]:
    """Returns the options of a connector: its arguments, with the types that each takes."""
    return parameters_of(getattr(io, name))


def parameters_of(function: Callable[..., Any]) -> dict[str, tuple[str, ...]]:
    """Returns the parameters of `function` that can be given as text, with their types."""
    found = {}
    for name, one in inspect.signature(function).parameters.items():
        kinds = re.split(r" \| (?![^\[]*\])", str(one.annotation))
        plain = tuple(kind for kind in kinds if kind in BUILT or _TEXT.fullmatch(kind))
        if plain and name != "type":
            found[name] = plain
    return found


def _value(kinds: Sequence[str], text: str) -> Any:
    """Converts the text of an option to an argument. Raises ValueError with the expected form."""
    if any(kind.startswith("Sequence") for kind in kinds) and ("," in text or "str" not in kinds):
        return [part.strip() for part in text.split(",")]
    if "int" in kinds and re.fullmatch(r"[+-]?\d+", text):
        return int(text)
    if "bool" in kinds and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if not {*kinds} & {"int", "float", "bool"} or {*kinds} & {"str", "Duration"}:
        return text
    if "float" in kinds:
        try:
            return float(text)
        except ValueError:
            raise ValueError("a number") from None
    raise ValueError("true or false" if "bool" in kinds else "a whole number")


@dataclass(slots=True, eq=False)
class Options:
    """The options of WITH not yet used, with their places in the text of the query."""

    node: CreateTable
    places: dict[str, exp.Expr] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    secrets: dict[str, str] = field(default_factory=dict)
    """Values of environment variables, by the `${NAME}` that refers to each."""

    def __post_init__(self) -> None:
        for one in self.node.args["options"]:
            name = one.this.name
            # The names of headers and of settings of a client stay as they are.
            name = name if "." in name else name.replace("-", "_").lower()
            if name in self.texts:
                raise SqlError(f"the option {name!r} is given twice", one.this)
            self.places[name] = one
            self.texts[name] = _SECRET.sub(
                partial(self._secret, one.args["value"]), one.text("value")
            )
        if "format" in self.texts:  # Flink writes debezium-json.
            self.texts["format"] = self.texts["format"].replace("-", "_")

    def _secret(self, place: exp.Expr, found: re.Match[str]) -> str:
        value = os.environ.get(found[1])
        if value is None:
            raise SqlError(f"the environment has no variable {found[1]}", place)
        if value:
            self.secrets[found[0]] = value
            if is_secret_name(found[1]) or not _WORDS.fullmatch(value):
                hide(value)
        return value

    def take(self, name: str) -> str | None:
        """Removes an option, and returns its text. Returns None if the option is not given."""
        return self.texts.pop(name, None)

    def place(self, name: str) -> exp.Expr:
        found: exp.Expr = self.places.get(name, self.node.this)
        return found

    def arguments(self, known: Mapping[str, Sequence[str]], prefix: str = "") -> dict[str, Any]:
        """Removes the given options that `known` names, and returns their values as arguments."""
        found: dict[str, Any] = {}
        for name in [one for one in self.texts if one.startswith(prefix)]:
            first, dot, rest = name.removeprefix(prefix).partition(".")
            if first not in known or first in found:
                continue
            kinds = known[first]
            built = next((kind for kind in kinds if kind in BUILT), None)
            if built is not None:
                found[first] = self._built(built, f"{prefix}{first}")
            elif dot and rest and any(kind.startswith("Mapping") for kind in kinds):
                begin = f"{prefix}{first}."
                own = [one for one in self.texts if one.startswith(begin)]
                found[first] = {one.removeprefix(begin): self.texts.pop(one) for one in own}
            elif not dot:
                if {*kinds} == {"Mapping[str, str]"}:
                    raise SqlError(f"write '{name}.NAME' = 'value'", self.place(name))
                found[first] = self._parsed(name, kinds)
        return found

    def _parsed(self, name: str, kinds: Sequence[str]) -> Any:
        text = self.texts.pop(name)
        try:
            return _value(kinds, text)
        except ValueError as error:
            given = self.places[name].text("value")
            raise SqlError(
                f"{name} is {given!r}, expected {error}", self.places[name].args["value"]
            ) from None

    def _built(self, kind: str, name: str) -> Any:
        known = parameters_of(getattr(io, kind))
        first = next(iter(known))
        if name in self.texts:  # The object's own option is its first argument.
            self.texts[f"{name}.{first}"] = self.texts.pop(name)
            self.places[f"{name}.{first}"] = self.places[name]
        return self.call(BUILT[kind], self.arguments(known, f"{name}."), self.place(name))

    def call(self, function: Callable[..., Any], given: dict[str, Any], place: exp.Expr) -> Any:
        """Calls the function of a connector. An error becomes an SqlError at the option that its
        message names, or else at `place`.
        """
        try:
            return function(**given)
        except (AioflowError, ValueError, TypeError, ModuleNotFoundError) as error:
            message = self.without_secrets(str(error))
        named = re.search(rf"\b({'|'.join(map(re.escape, self.places))})\b", message)
        raise SqlError(message, self.places[named[1]] if named else place)

    def without_secrets(self, message: str) -> str:
        for name, value in sorted(self.secrets.items(), key=lambda one: -len(one[1])):
            message = message.replace(value, name)
        return message

    def refuse_rest(self, what: str, known: Sequence[str]) -> None:
        """Raises SqlError if there is an option that no call has used."""
        for name in self.texts:
            hint = did_you_mean(name, known, "{}")
            raise SqlError(
                f"{what} has no option {name!r}; there are {', '.join(known)}{hint}",
                self.places[name].this,
            )
