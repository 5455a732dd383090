"""A relation: a stream, and how a query reads its records.

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
"""Field of the rows of a changelog: 1 for an insertion, -1 for a deletion."""
PASSES = "$passes"
"""Field of an update: whether the row exists."""
WINDOW_FIELDS = tuple(Field(name, TIMESTAMP, False, name) for name in (START, END, TIME))
"""The fields that a table function of windows adds."""


@dataclass(frozen=True, slots=True)
class Pending:
    """Windows of a table function that no operator has applied yet.

    A GROUP BY, a ranking or a join applies them itself.
    """

    kind: str
    assigner: WindowAssigner
    time: str
    """Key of the column that has the time of a record."""
    ends: WindowAssigner
    """As in `Windows`."""
    partition: tuple[str, ...] = ()
    """Keys of the fields that a session is for."""

    @property
    def size(self) -> int | None:
        """Length of all windows in ms; None if it varies."""
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
    """Keys of the fields with the bounds of the window."""
    regroup: WindowAssigner | None
    """Windows that bring the records of one window together again; None: their fields do."""
    size: int | None
    """Length in ms if all windows have the same length, so that the end alone identifies a window.
    None: the length varies.
    """
    ends: WindowAssigner
    """Assigner that collects the results of one window. The time of each result is the last ms of
    its window.
    """

    @property
    def assigner(self) -> WindowAssigner:
        """Assigner of the windows to the records."""
        return self.regroup or FieldWindows(self.start or "", self.end)

    def are_among(self, names: Collection[str]) -> bool:
        """Returns whether the fields `names` say which window a record belongs to."""
        return self.end in names or (self.size is not None and self.start in names)

    def moved(self, keys: Mapping[str, str]) -> Windows | None:
        """Returns the windows with the new keys of their fields, or None if fields that are needed
        are left out.
        """
        start, end = keys.get(self.start or ""), keys.get(self.end)
        if end is None or not (start or (self.size and self.regroup)):
            return None
        return replace(self, start=start, end=end)

    def after(self, start: str | None, end: str) -> Windows:
        """Returns the windows of results, with the fields `start` and `end`."""
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
    """Whether records are dicts of just the fields."""
    times: Mapping[str, int] | None = None
    """Fields that follow event time: the value is the time of the record plus these ms.

    None: not known, so any column may be the time.
    """
    latest: tuple[frozenset[str], ...] = ()
    """Fields of both sides of a join; the later one of two is the time of the pair."""
    clock: frozenset[str] = frozenset()
    """Keys of fields that PROCTIME() made. They have no value."""
    pending: Pending | None = None
    windows: Windows | None = None
    identity: tuple[str, ...] | None = None
    """Keys of the fields that say which row a record replaces; None: records only append.

    All records of a row come from one subtask, in order. In a changelog these fields are the key of
    the rows; None means no key.
    """
    is_changelog: bool = False
    """Whether records are insertions and deletions, marked by the field CHANGE."""
    lacks: str = ""
    """Why the rows of a changelog have no key, for an error."""
    stays: bool = False
    """Whether a join keeps its rows without a time to live."""
    passes: Expr[Any] | None = None
    """Condition over a record that updates. If it is not true, the row is gone."""

    @property
    def changes(self) -> bool:
        """Whether rows are replaced or go."""
        return self.is_changelog or self.identity is not None

    @property
    def replaces(self) -> bool:
        """Whether a record takes the place of the one with its identity."""
        return self.identity is not None and not self.is_changelog

    def read(self, expression: Expr[Any]) -> Expr[Any]:
        """Returns `expression`, which reads fields by key, as an expression of a record."""
        return substitute(expression, self.reads)

    @property
    def names(self) -> tuple[str, ...]:
        """Keys of the fields that have a value."""
        return tuple(one.key for one in self.fields if one.key not in self.clock)

    def column(self, key: str) -> Expr[Any]:
        """Returns the expression of a field."""
        return self.reads.get(key, Column(key))

    def has_time(self, key: str) -> bool:
        """Returns whether the field may follow event time."""
        return self.times is None or key in self.times

    def is_latest(self, node: exp.Expr) -> bool:
        """Returns whether `node` is GREATEST(...) of two fields, which is event time."""
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
        """Returns the relation whose rows are gone while the condition is not true."""
        condition = self.read(condition)
        if self.passes is not None:
            condition = Case(((self.passes, condition),), Literal(False))
        return replace(self, passes=condition)

    def in_place(self) -> Relation:
        """Returns the relation with fields that are read from the records as they are."""
        fields = tuple(replace(one, read=self.reads.get(one.key)) for one in self.fields)
        return replace(self, fields=fields)

    def as_rows(self) -> Relation:
        """Returns the relation with dicts of just its fields as records."""
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
    """Returns the fields of a window from `start` to `end`: ms, or expressions of ms."""
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
    """Returns the expression for pairs, whose field `side` is the record."""
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
    """Returns an interval in ms. Raises SqlError for anything else, named `what`."""
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
