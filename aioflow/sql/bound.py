"""Bound expressions: trees of a query in which each column name is replaced by the key of a field.

Bound trees are compared as trees, for example to find an expression of GROUP BY in a column.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from sqlglot import exp

from aioflow.sql.aggregates import is_aggregate
from aioflow.sql.casts import Scalar
from aioflow.sql.dialect import WindowTable
from aioflow.sql.errors import SqlError, span_of
from aioflow.sql.relation import END, START, TIME, Relation, refuse_updates
from aioflow.sql.scalars import Functions, arguments_of, async_calls, compile_scalar
from aioflow.sql.scope import Field, Scope
from aioflow.sql.types import ANY, BOOLEAN

__all__ = [
    "HINTS",
    "LEGACY",
    "MIRRORED",
    "Compiler",
    "Keys",
    "aggregates_in",
    "by_clock",
    "conjuncts",
    "is_clock",
    "is_key",
    "key_column",
    "mention",
    "rank_limit",
    "refuse_clauses",
    "replaced",
    "unused",
]

HINTS = "there are no hints: move their options into WITH of CREATE TABLE, and STATE_TTL into ttl"

CLAUSES = {
    "order": "ORDER BY of a stream needs all rows, which never end; rank the rows of a window: "
    "ROW_NUMBER() OVER (PARTITION BY window_start, window_end ORDER BY ...) <= n",
    "limit": "LIMIT of a stream depends on the order of arrival; rank the rows of a window with "
    "ROW_NUMBER(), or stop reading",
    "offset": "OFFSET of a stream depends on the order of arrival",
    "laterals": "LATERAL is not supported; use flat_map() on the stream before the query",
    "pivots": "PIVOT is not supported; write one CASE for each column",
    "match": "MATCH_RECOGNIZE is not supported; use process() with a KeyedProcessFunction",
    "connect": "CONNECT BY is not supported; use process() with a KeyedProcessFunction",
    "sample": "TABLESAMPLE is not supported; use filter() on the stream",
    "into": "SELECT INTO is not supported; use .sink(...) on the stream of the query",
    "locks": "FOR UPDATE is not supported; leave it out",
    "hint": HINTS,
}
"""Clauses that streams do not support, each with a text that says what to write instead."""


LEGACY = {
    f"{kind}{part}": (kind, field)
    for kind in ("TUMBLE", "HOP", "SESSION")
    for part, field in (("", ""), ("_START", START), ("_END", END), ("_ROWTIME", TIME))
}
"""Maps the name of a window function in GROUP BY or SELECT to two texts: the kind of the window,
and the field that the function reads. Functions of GROUP BY read no field, so it is "".
"""


MIRRORED: dict[type[exp.Expr], type[exp.Binary]] = {
    exp.LT: exp.GT,
    exp.LTE: exp.GTE,
    exp.GT: exp.LT,
    exp.GTE: exp.LTE,
    exp.EQ: exp.EQ,
}
"""Maps a comparison to the one that has the same meaning after the operands are exchanged."""


class Keys(Scope):
    """The scope of bound expressions, in which each name is the key of a field."""

    def __init__(self, fields: Iterable[Field], is_open: bool, missing: str = "") -> None:
        self._by_key = {field.key: field for field in fields}
        self._is_open = is_open
        self._missing = missing

    def resolve(self, column: exp.Column) -> Field:
        found = self._by_key.get(column.name)
        if found is not None:
            return found
        if self._is_open:
            return Field(column.name, ANY, True, column.name)
        raise SqlError(self._missing.format(column.name), column)


def key_column(key: str, place: exp.Expr) -> exp.Column:
    """Returns a bound column, with the position in the text of the node `place`."""
    name = exp.Identifier(this=key, quoted=True)
    if span := span_of(place):
        name.meta["start"], name.meta["end"] = span[0], span[1] - 1
    return exp.Column(this=name)


def refuse_clauses(node: exp.Expr) -> None:
    """Raises SqlError for a clause that streams do not support."""
    if isinstance(node, WindowTable):
        return  # Its OFFSET belongs to the windows.
    for name, message in CLAUSES.items():
        clause = node.args.get(name)
        if clause:
            raise SqlError(message, clause[0] if isinstance(clause, list) else clause)


def conjuncts(node: exp.Expr) -> Iterable[exp.Expr]:
    """Yields the conditions of a chain of ANDs."""
    if isinstance(node, exp.Paren):
        yield from conjuncts(node.this)
    elif isinstance(node, exp.And):
        yield from conjuncts(node.this)
        yield from conjuncts(node.expression)
    else:
        yield node


def aggregates_in(node: exp.Expr) -> list[exp.Expr]:
    """Returns the aggregates in `node`, except those within an OVER."""
    if isinstance(node, exp.Window):
        return []
    if is_aggregate(node):
        return [node]
    return [one for child in node.iter_expressions() for one in aggregates_in(child)]


def mention(nodes: Iterable[exp.Expr], fields: Iterable[Field]) -> bool:
    names = {field.key for field in fields}
    return any(column.name in names for node in nodes for column in node.find_all(exp.Column))


def is_key(node: exp.Expr, names: Collection[str]) -> bool:
    return isinstance(node, exp.Column) and node.name in names


def is_clock(node: exp.Expr) -> bool:
    return isinstance(node, exp.Anonymous) and node.name.upper() == "PROCTIME"


def by_clock(node: exp.Expr, relation: Relation) -> bool:
    """Returns whether `node` is PROCTIME(), or a column that was computed by PROCTIME()."""
    return is_clock(node) or is_key(node, relation.clock)


def replaced(
    node: exp.Expr, trees: Sequence[tuple[exp.Expr, str]], legacy: exp.Expr | None
) -> exp.Expr:
    """Returns `node` with a column in place of each aggregate, and of each expression of GROUP BY.

    `trees` has each such expression with the key of its column. `legacy` is the call in GROUP BY
    that makes windows, such as TUMBLE(...); None if there is none.
    """

    def place(one: exp.Expr) -> exp.Expr:
        for tree, key in trees:
            if one == tree:
                return key_column(key, one)
        found = LEGACY.get(one.name.upper()) if isinstance(one, exp.Anonymous) else None
        if found is not None and found[1] and legacy is not None:
            if found[0] != legacy.name.upper() or one.expressions != legacy.expressions:
                raise SqlError(
                    f"{one.name} needs the arguments of the windows in GROUP BY: {legacy.sql()}",
                    one,
                )
            return key_column(found[1], one)
        return one

    return node.transform(place)


def rank_limit(entry: exp.Expr, conditions: list[exp.Expr]) -> tuple[str, int] | None:
    """Returns the name of the ROW_NUMBER() column of the subquery `entry`, and the highest rank
    that the outer query reads. Returns None if `conditions` do not limit the rank.

    Removes the condition that limits the rank from `conditions`, unless it also sets a lower bound.
    """
    inner = entry.unnest()
    if not isinstance(inner, exp.Select):
        return None
    ranked = [one.alias for one in inner.expressions if isinstance(one.unalias(), exp.Window)]
    for given in conditions:
        one = given
        if isinstance(one, exp.GTE | exp.GT):  # 3 >= rank
            one = MIRRORED[type(one)](this=one.expression, expression=one.this)
        if not isinstance(one, exp.LTE | exp.LT | exp.EQ | exp.Between) or not isinstance(
            one.this, exp.Column
        ):
            continue
        limit = one.args["high"] if isinstance(one, exp.Between) else one.expression
        name = one.this.name
        alike = [name] if name in ranked else [r for r in ranked if r.lower() == name.lower()]
        if len(alike) == 1 and isinstance(limit, exp.Literal) and limit.is_int:
            n = int(limit.name) - isinstance(one, exp.LT)
            if n >= 1:
                if isinstance(one, exp.LTE | exp.LT) or (n == 1 and isinstance(one, exp.EQ)):
                    conditions.remove(given)
                return alike[0], n
    return None


def unused(name: str, taken: Any) -> str:
    key, number = name, 0
    while key in taken:
        number += 1
        key = f"{name}_{number}"
    return key


class Compiler:
    """Compiles bound expressions over the fields of a relation. Holds the arguments of `sql`."""

    def __init__(self, flow: Any, functions: Functions, ttl: Any, updates: bool | str) -> None:
        self.flow = flow
        self.functions = functions
        self.ttl = ttl
        self.updates = updates
        self.shared: dict[tuple[str, ...], Any] = {}
        """Streams of the results of GROUP BY. The key of a stream is the repr of its inputs, its
        grouping key, its windows, its aggregates and its time to live.
        """

    def compile(self, node: exp.Expr, relation: Relation) -> Scalar:
        """Returns the compiled expression, which reads fields by their keys."""
        missing = "{} must stand in GROUP BY or in an aggregate"
        return compile_scalar(
            node, Keys(relation.fields, relation.is_open, missing), self.functions
        )

    def condition(self, node: exp.Expr, relation: Relation) -> Scalar:
        """Returns the compiled condition. Raises SqlError if its type is not BOOLEAN."""
        made = self.compile(node, relation)
        if not made.type.may_be(BOOLEAN):
            raise SqlError(f"a condition takes BOOLEAN, not {made.type}: write a comparison", node)
        return made

    def awaited(self, relation: Relation, nodes: list[exp.Expr]) -> tuple[Relation, list[exp.Expr]]:
        """Adds steps that await the calls of async functions in `nodes`, and put each result into a
        field. Returns the new relation and the nodes that read these fields.
        """
        calls = [call for node in nodes for call in async_calls(node, self.functions)]
        if not calls:
            return relation, nodes
        refuse_updates(relation, "an async function", calls[0])
        if relation.is_open:
            raise SqlError("async functions need to know the columns; declare them with schemas=")
        relation = relation.as_rows()
        for call in calls:
            key = f"${call.name}{len(relation.fields)}"
            own = self.functions.find(call)
            assert own is not None, "a call of an async function"
            arguments = [self.compile(one, relation).function for one in arguments_of(call)]
            function = partial(_awaited, own.function, arguments, key)
            stream = relation.stream.map(function, name=call.name)
            field = Field(key, own.type, own.nullable, key)
            relation = replace(relation, stream=stream, fields=(*relation.fields, field))
            column = key_column(key, call)
            nodes = [column if node is call else node for node in nodes]
            if call.parent is not None:
                call.replace(column)
        return relation, nodes


async def _awaited(
    function: Callable[..., Any],
    arguments: list[Callable[[Any], Any]],
    key: str,
    row: dict[str, Any],
) -> dict[str, Any]:
    """Awaits an async function for a row. Returns the row with the result as the field `key`."""
    return {**row, key: await function(*(argument(row) for argument in arguments))}
