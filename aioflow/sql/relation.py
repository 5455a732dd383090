"""A relation: a stream, and the description of how queries read its records.

Invariant: `reads` has an expression for each field that is not simply the field of the record with
the same key. So a projection of plain columns costs nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from sqlglot import exp

from aioflow.api.streams import DataStream
from aioflow.expressions.nodes import Case, Column, Expr, Literal
from aioflow.expressions.nodes import Field as Nested
from aioflow.operators.window.assigners import SlidingWindows, TumblingWindows, WindowAssigner
from aioflow.sql.errors import SqlError
from aioflow.sql.functions import UNITS_MS
from aioflow.sql.scope import Field
from aioflow.sql.types import TIMESTAMP
from aioflow.sql.windows import FieldWindows

__all__ = [
    "CHANGE",
    "END",
    "PASSES",
    "START",
    "TIME",
    "WINDOW_FIELDS",
    "Pending",
    "Relation",
    "Windows",
    "bounds_of",
    "duration_ms",
    "refuse_updates",
    "substitute",
    "under",
]

START, END, TIME = "window_start", "window_end", "window_time"
CHANGE = "$change"
"""Key of a field that the rows of a changelog have: 1 for an insertion, -1 for a deletion."""
PASSES = "$passes"
"""Key of a field that a record which replaces a row has: whether the row still exists."""
WINDOW_FIELDS = tuple(Field(name, TIMESTAMP, False, name) for name in (START, END, TIME))
"""The fields that a table function of windows adds."""


@dataclass(frozen=True, slots=True)
class Pending:
    """Windows of a table function that no operator has applied yet.

    The GROUP BY, the ranking or the join that reads the relation applies them.
    """

    kind: str
    assigner: WindowAssigner
    time: str
    """Key of the column that has the time of a record."""
    ends: WindowAssigner
    """Assigner that collects the results of one window, as in `Windows.ends`."""
    partition: tuple[str, ...] = ()
    """Keys of the fields that sessions are partitioned by."""

    @property
    def size(self) -> int | None:
        """Length of each window in ms; None if it varies."""
        assigner = self.assigner
        return assigner.size if isinstance(assigner, TumblingWindows | SlidingWindows) else None

    def windows(self, regroup: WindowAssigner | None) -> Windows:
        return Windows(START, END, regroup, self.size, self.ends)


@dataclass(frozen=True, slots=True)
class Windows:
    """The windows to which the records of a relation belong. Fields of the records hold their
    bounds.
    """

    start: str | None
    end: str
    """`start` and `end` are the keys of the fields with the bounds of the window. `start` is None
    if no field has it.
    """
    regroup: WindowAssigner | None
    """Assigner that puts the records of one window into one window again. None means that a window
    is read from the fields of each record.
    """
    size: int | None
    """Length in ms if all windows have the same length, so that the end alone identifies a window.
    None if the length varies.
    """
    ends: WindowAssigner
    """Assigner that collects the results of one window. The time of each result is the last ms of
    its window.
    """

    @property
    def assigner(self) -> WindowAssigner:
        """Assigner that gives each record the window to which it belongs."""
        return self.regroup or FieldWindows(self.start or "", self.end)

    def are_among(self, names: Collection[str]) -> bool:
        """Returns whether the fields `names` identify the window of a record."""
        return self.end in names or (self.size is not None and self.start in names)

    def moved(self, keys: Mapping[str, str]) -> Windows | None:
        """Returns the windows after their fields got other keys. `keys` maps old keys to new keys.
        Returns None if `keys` lacks a field that identifies the window.
        """
        start, end = keys.get(self.start or ""), keys.get(self.end)
        if end is None or not (start or (self.size and self.regroup)):
            return None
        return replace(self, start=start, end=end)

    def after(self, start: str | None, end: str) -> Windows:
        """Returns the windows of an operator's results, which have the bounds in the fields `start`
        and `end`.
        """
        return Windows(start, end, self.ends, self.size, self.ends)


@dataclass(frozen=True, slots=True, kw_only=True)
class Relation:
    """A stream with its fields, its event time and its windows."""

    stream: DataStream[Any]
    fields: tuple[Field, ...]
    is_open: bool = False
    """Whether records may have more fields than are known."""
    reads: Mapping[str, Expr[Any]] = field(default_factory=dict)
    is_plain: bool = False
    """Whether records are dicts of exactly the fields."""
    times: Mapping[str, int] | None = None
    """Maps the key of each field that follows event time to its offset: the number of ms by which
    the field is later than the record's event time.

    None if these fields are not known, so that any column may be the event time.
    """
    latest: tuple[frozenset[str], ...] = ()
    """After a join: for each side, the keys of its fields of event time. The later of two such
    fields is the time of the pair.
    """
    clock: frozenset[str] = frozenset()
    """Keys of the fields that PROCTIME() computes. They are not in the records."""
    pending: Pending | None = None
    windows: Windows | None = None
    identity: tuple[str, ...] | None = None
    """Keys of the fields that identify the row that a record replaces; None if records are only
    appended.

    All records of one row come from one subtask, in order. In a changelog these fields are the key
    of the rows, and None means that there is no key.
    """
    is_changelog: bool = False
    """Whether records are insertions and deletions, marked by the field CHANGE."""
    lacks: str = ""
    """Reason why the rows of a changelog have no key, for an error message. Empty by default."""
    stays: bool = False
    """Whether a join keeps its rows without a time to live."""
    passes: Expr[Any] | None = None
    """Condition on a record that replaces a row. If it is not true, the row is deleted. None means
    that the record always replaces the row.
    """

    @property
    def changes(self) -> bool:
        """Whether rows may be replaced or deleted."""
        return self.is_changelog or self.identity is not None

    @property
    def replaces(self) -> bool:
        """Whether a record replaces the earlier record with the same identity."""
        return self.identity is not None and not self.is_changelog

    def read(self, expression: Expr[Any]) -> Expr[Any]:
        """Converts `expression`, which reads fields by key, to an expression that reads a
        record.
        """
        return substitute(expression, self.reads)

    @property
    def names(self) -> tuple[str, ...]:
        """Keys of the fields that have a value."""
        return tuple(one.key for one in self.fields if one.key not in self.clock)

    def column(self, key: str) -> Expr[Any]:
        """Returns the expression of a field."""
        return self.reads.get(key, Column(key))

    def has_time(self, key: str) -> bool:
        """Returns whether the field follows event time. Returns True if this is not known."""
        return self.times is None or key in self.times

    def is_latest(self, node: exp.Expr) -> bool:
        """Returns whether `node` is GREATEST(a, b) of the event times of both sides of a join. This
        is the event time of the pair.
        """
        if not isinstance(node, exp.Greatest) or not self.latest:
            return False
        names = [one.name for one in (node.this, *node.expressions) if isinstance(one, exp.Column)]
        if len(names) != 2 or len(node.expressions) != 1:
            return False
        left, right = self.latest
        return any(a in left and b in right for a, b in (names, names[::-1]))

    def filtered(self, condition: Expr[Any]) -> Relation:
        return replace(self, stream=self.stream.filter(self.read(condition)))

    def passing(self, condition: Expr[Any]) -> Relation:
        """Returns the relation in which a row counts as deleted while the condition is not true."""
        condition = self.read(condition)
        if self.passes is not None:
            condition = Case(((self.passes, condition),), Literal(False))
        return replace(self, passes=condition)

    def in_place(self) -> Relation:
        """Returns the relation with the expression that reads a field from a record stored in the
        field itself (`Field.read`).
        """
        fields = tuple(replace(one, read=self.reads.get(one.key)) for one in self.fields)
        return replace(self, fields=fields)

    def as_rows(self) -> Relation:
        """Returns this relation with its records converted to dicts that have exactly its fields,
        and CHANGE in a changelog. Returns `self` if no conversion is needed.
        """
        if self.is_plain and not self.reads:
            return self
        named = {key: self.column(key) for key in self.names}
        if self.is_changelog:
            named[CHANGE] = self.column(CHANGE)
        return replace(self, stream=self.stream.select(named), reads={}, is_plain=True)

    def renamed(self, keys: Mapping[str, str]) -> Relation:
        """Returns the relation with other keys for some fields."""
        if not keys:
            return self

        def new(key: str) -> str:
            return keys.get(key, key)

        reads = {new(key): value for key, value in self.reads.items()}
        reads |= {new(key): self.column(key) for key in keys}
        windows = self.windows and replace(
            self.windows,
            start=self.windows.start and new(self.windows.start),
            end=new(self.windows.end),
        )
        return replace(
            self,
            fields=tuple(replace(one, key=new(one.key)) for one in self.fields),
            reads=reads,
            times=self.times and {new(key): offset for key, offset in self.times.items()},
            clock=frozenset(map(new, self.clock)),
            windows=windows,
            identity=None if self.identity is None else tuple(map(new, self.identity)),
        )


def bounds_of(start: Any, end: Any) -> dict[str, Any]:
    """Returns the three window fields for a window from `start` to `end`, which are ms or
    expressions.
    """
    return {START: start, END: end, TIME: end - 1}


def refuse_updates(relation: Relation, what: str, node: exp.Expr) -> None:
    """Raises SqlError if rows of the relation may change."""
    if relation.changes:
        raise SqlError(
            f"{what} of rows that change is not known; give the query inside a window, or write "
            "its rows to a table that the rest reads",
            node,
        )


def substitute(expression: Expr[Any], reads: Mapping[Any, Expr[Any]]) -> Expr[Any]:
    """Returns the expression with some columns replaced by other expressions."""
    if not reads:
        return expression
    if isinstance(expression, Column):
        return reads.get(expression._name, expression)
    return _rebuilt(expression, lambda child: substitute(child, reads))


def under(expression: Expr[Any], side: str | int) -> Expr[Any]:
    """Converts an expression on a record to an expression on a pair of records. The field `side` of
    the pair holds the record.
    """
    if isinstance(expression, Column):
        return Nested(Column(side), expression._name)
    return _rebuilt(expression, lambda child: under(child, side))


def _rebuilt(expression: Expr[Any], change: Any) -> Expr[Any]:
    def changed(value: Any) -> Any:
        if isinstance(value, Expr):
            return change(value)
        return tuple(map(changed, value)) if isinstance(value, tuple) else value

    own = [getattr(expression, one.name) for one in fields(expression)]  # type: ignore[arg-type]
    return type(expression)(*map(changed, own))


def duration_ms(node: exp.Expr | None, what: str) -> int:
    """Returns the length of an INTERVAL literal in ms. Raises SqlError, which names `what`, for
    anything else.
    """
    sign = 1
    while isinstance(node, exp.Neg | exp.Paren):
        sign, node = (-sign if isinstance(node, exp.Neg) else sign), node.this
    unit = "" if not isinstance(node, exp.Interval) else str(node.args.get("unit") or "").upper()
    per_unit = UNITS_MS.get(unit.removesuffix("S"))
    try:
        if node is None or per_unit is None:
            raise ValueError
        value = float(node.this.name) * per_unit
        if not value.is_integer():
            raise ValueError
    except ValueError:
        raise SqlError(
            f"{what} needs an interval such as INTERVAL '10' SECOND, in "
            f"{', '.join(UNITS_MS)}; months and years have no fixed length",
            node,
        ) from None
    return sign * int(value)
