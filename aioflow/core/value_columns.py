"""Stores values of one structure, such as accumulators, as columns: one column for each place, and
the structure once.

The values are nested lists and tuples of equal lengths, around immutable values. `[1, ("a",)]` and
`[2, ("b",)]` are the columns `1 2` and `"a" "b"`, with the layout `[LIST, LEAF, [TUPLE, LEAF]]`.
This takes a loop in C for each place, while value by value it takes a call for each container. A
copy of the values takes a few objects instead of two for each value.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

__all__ = ["LEAF", "lay_out", "pick", "put_together"]

LEAF, LIST, TUPLE = range(3)
"""Kind of a place: a value without places, or a list or tuple with the places that follow."""

LEVELS_MAX = 8
WIDTH_MAX = 32
"""Maximum depth of values, and their maximum width on each level. Wider values are no rows."""

ROWS_MAX = 8_192
"""Number of rows that one call of `zip` transposes: it keeps an iterator for each."""


def lay_out(
    values: Sequence[Any],
    leaves: frozenset[type],
    columns: list[Sequence[Any]],
    levels: int = LEVELS_MAX,
) -> Any:
    """Returns the layout of `values`, of which there is at least one, and appends their columns to
    `columns`.

    Returns None if the values have different layouts. `leaves` are the exact types of values that
    are not divided further.
    """
    types = list(map(type, values))
    kind = types[0]
    alike = types.count(kind) == len(types)
    if kind in leaves and (alike or leaves.issuperset(types)):
        columns.append(values)
        return LEAF
    if not alike or (kind is not list and kind is not tuple) or not levels:
        return None
    if len(values) > ROWS_MAX or not 0 < len(values[0]) <= WIDTH_MAX:
        return None
    try:
        places = list(zip(*values, strict=True))
    except ValueError:
        return None
    layout: list[Any] = [LIST if kind is list else TUPLE]
    for place in places:
        inner = lay_out(place, leaves, columns, levels - 1)
        if inner is None:
            return None
        layout.append(inner)
    return layout


def put_together(layout: Any, columns: Iterator[Sequence[Any]]) -> list[Any]:
    """Builds values as `layout` describes from the next columns of `columns`.

    Raises ValueError, TypeError or StopIteration if the layout and the columns do not match.
    """
    if layout == LEAF:
        return list(next(columns))
    kind, *places = layout
    rows = zip(*[put_together(place, columns) for place in places], strict=True)
    if kind == TUPLE:
        return list(rows)
    if kind == LIST:
        return list(map(list, rows))
    raise ValueError(f"values that are built as {kind!r}")


def pick(layout: Any, columns: Iterator[Sequence[Any]], row: int) -> Any:
    """Returns the single value at index `row` of the list that `put_together` would return."""
    if layout == LEAF:
        return next(columns)[row]
    places = [pick(place, columns, row) for place in layout[1:]]
    return places if layout[0] == LIST else tuple(places)
