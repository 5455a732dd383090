"""Converts rows of Spark to values of a type, with errors that name the field and the remedy."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from aioflow.core.errors import describe_record
from aioflow.io.shapes import field_names

__all__ = ["TypedRows"]

_PLACE = re.compile(
    r"^(?P<what>.*) - at `\$(?:\.(?P<field>\w+)|\[(?P<index>\d+)\])(?P<within>.*)`$", re.DOTALL
)
_MISSING = re.compile(r"^Object missing required field `(?P<field>[^`]+)`$")


@dataclass(frozen=True, slots=True)
class TypedRows:
    """A function that converts a row to a value of `type`. It is sent to Spark's executors with the
    flow.
    """

    make: Callable[[dict[str, Any]], Any]
    type: Any

    def __call__(self, row: dict[str, Any]) -> Any:
        """Returns the value of `row`. Raises ValidationError naming type, field and row."""
        try:
            return self.make(row)
        except msgspec.ValidationError as error:
            raise msgspec.ValidationError(self._explained(str(error), row)) from None

    def _explained(self, text: str, row: Mapping[str, Any]) -> str:
        what, remedy = text, "change the type, or CAST the column in the query"
        if (missing := _MISSING.match(text)) is not None:
            name = missing["field"]
            what = (
                f"field {name}: there is no column {name!r}, there are {', '.join(map(repr, row))}"
            )
            remedy = f"name one so in the query (SELECT ... AS {name}), or give the field a default"
        elif (place := _PLACE.match(text)) is not None:
            name = place["field"] or field_names(self.type)[int(place["index"])]
            what = f"field {name}{place['within']}: {place['what']}"
            if what.endswith("got `null`"):
                remedy = (
                    "let the field be None as well (`| None`), or leave such rows out in the "
                    "query (WHERE ... IS NOT NULL)"
                )
        return (
            f"a row of Spark is no {self.type.__name__}: {what}; {remedy}. The row: "
            f"{describe_record(row)}"
        )
