"""Windows and groups: plans the operators of GROUP BY with its windows and aggregates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from sqlglot import exp

import aioflow as af
from aioflow.expressions.nodes import Column, Expr
from aioflow.expressions.rows import compile_row
from aioflow.operators.window.assigners import TumblingWindows
from aioflow.sql import joins
from aioflow.sql.aggregates import Aggregate, compile_aggregate
from aioflow.sql.bound import LEGACY, Compiler, Keys, aggregates_in, is_key, replaced
from aioflow.sql.casts import Scalar
from aioflow.sql.dialect import DURATIONS, WINDOWS
from aioflow.sql.errors import SqlError
from aioflow.sql.keyed import First, Groups
from aioflow.sql.relation import (
    END,
    START,
    TIME,
    WINDOW_FIELDS,
    Pending,
    Relation,
    Windows,
    bounds_of,
    duration_ms,
    refuse_updates,
    substitute,
)
from aioflow.sql.rewriting import STAYS
from aioflow.sql.scope import Field
from aioflow.sql.sources import changelog
from aioflow.sql.types import ANY, DATE, INTEGER, TIMESTAMP
from aioflow.sql.windows import CumulativeWindows

__all__ = ["aggregate", "applied", "pending_windows"]


def pending_windows(
    relation: Relation,
    kind: str,
    durations: Mapping[str, int],
    time: Field,
    node: exp.Expr,
    partition: tuple[str, ...] = (),
) -> Relation:
    """Returns the relation with pending windows of a `kind` such as TUMBLE. A later step applies
    them. `durations` are in ms, by name. `partition` has the keys of the fields of sessions.
    """
    by_clock = time.key in relation.clock
    if not by_clock and not relation.has_time(time.key):
        known = ", ".join(relation.times or ())
        raise SqlError(
            f"{time.name} is not the event time of the stream, which "
            + (
                f"is {known}: WATERMARK of CREATE TABLE, or watermarks= of the source, says what "
                "event time is"
                if known
                else f"no column has; declare WATERMARK FOR {time.name} AS {time.name} in CREATE "
                "TABLE, select the column of watermarks=, or after a join within an interval "
                "GREATEST(a.ts, b.ts) AS ts"
            ),
            node,
        )
    if not by_clock and time.type not in (TIMESTAMP, DATE, INTEGER, ANY):
        raise SqlError(f"{time.name} is {time.type}, but the time of a row is a TIMESTAMP", node)
    if not by_clock and (relation.times or {}).get(time.key, 0) != 0:
        raise SqlError(f"{time.name} is not a time of rows; write window_time", node)
    for name, value in durations.items():
        if value <= 0 and name != "offset":
            raise SqlError(f"{name.upper()} of {kind} must be more than 0", node)
    assigner = _assigner(kind, durations, "processing" if by_clock else "event", node)
    every = durations.get("slide") or durations.get("step") or durations.get("size", 1)
    shift = (durations.get("offset", 0) + durations.get("size", 0)) % every
    ends = af.tumbling(f"{every}ms", shift)
    pending = Pending(kind, assigner, time.key, ends, partition)
    return replace(relation, pending=pending, windows=None)


def _assigner(kind: str, durations: Mapping[str, int], time: str, node: exp.Expr) -> Any:
    given = {name: f"{value}ms" for name, value in durations.items() if name != "offset"}
    offset = durations.get("offset", 0)
    if kind == "TUMBLE":
        size = durations["size"]
        return af.tumbling(given["size"], offset % size, time=time)
    if kind == "HOP":
        return af.sliding(given["size"], given["slide"], offset % durations["slide"], time=time)
    if kind == "SESSION":
        return af.session(given["gap"], time=time)
    step, size = durations["step"], durations["size"]
    if size % step:
        raise SqlError("SIZE of CUMULATE must be a multiple of STEP", node)
    return CumulativeWindows(step, size, time == "event")


def applied(relation: Relation) -> Relation:
    """Applies the pending windows. In the returned relation, each record has the bounds of its
    window as fields.
    """
    pending = relation.pending
    if pending is None:
        return relation
    assigner = pending.assigner
    if relation.is_open:
        raise SqlError(
            "windows without GROUP BY need to know the columns; declare them with schemas="
        )
    if not assigner.is_event_time:
        raise SqlError("windows by PROCTIME() need GROUP BY with window_start or window_end")
    fields = tuple(relation.fields) + WINDOW_FIELDS
    plain = {one.key: relation.column(one.key) for one in relation.fields}
    base = replace(relation, fields=fields, pending=None, reads={}, is_plain=True)
    if pending.kind == "TUMBLE":
        assert isinstance(assigner, TumblingWindows)
        size = assigner.size
        time = relation.column(pending.time)
        start = time - (time - assigner.offset) % size
        more = {START: start, END: start + size, TIME: start + (size - 1)}
        windows = pending.windows(assigner)
        return replace(base, stream=relation.stream.select({**plain, **more}), windows=windows)
    rows = relation.stream.select(plain)
    if pending.kind == "SESSION":
        joins.require_event_time(relation, "a window")
        key = tuple(map(af.col, pending.partition)) or af.lit(0)
        stream = rows.key_by(key).window(assigner).process(_framed)
        times = {TIME: 0, END: 1}
        windows = pending.windows(pending.ends)
        return replace(base, stream=stream, windows=windows, times=times)
    read = compile_row(af.col(pending.time))
    return replace(
        base,
        stream=rows.flat_map(partial(_copies, assigner, read)),
        windows=pending.windows(None),
    )


def sessions_differ(relation: Relation, keys: Iterable[str]) -> bool:
    """Returns whether pending session windows are partitioned by other fields than `keys`. Window
    fields in `keys` are ignored.
    """
    pending = relation.pending
    if pending is None or pending.kind != "SESSION":
        return False
    return set(pending.partition) != set(keys) - {START, END, TIME}


def aggregate(
    compiler: Compiler,
    relation: Relation,
    group: list[exp.Expr],
    items: list[tuple[str, exp.Expr]],
    having: list[exp.Expr],
    node: exp.Select,
) -> tuple[Relation, list[tuple[str, exp.Expr]], list[exp.Expr]]:
    """Groups a relation by the keys `group`, which may include windows. Without a window the groups
    are running aggregates, whose rows change.

    Returns the relation of the groups, and `items` and `having` as expressions over its fields.
    """
    what, place = _named(node, group)
    stays = node.meta.get(STAYS)
    changes = relation.changes
    relation, legacy = _legacy(relation, group)
    if changes:
        relation = changelog(relation).as_rows()
    group = [one for n, one in enumerate(group) if one is not legacy and one not in group[:n]]
    if legacy is None and sessions_differ(relation, [one.name for one in group]):
        relation = applied(relation)
    bounded, windows = (True, None) if legacy else _grouping_windows(relation, group, place)
    if not bounded and not changes:
        if relation.pending or any(map(aggregates_in, [*(one for _, one in items), *having])):
            _require_updates(compiler, relation, what, place)
        elif not stays:  # A row that has only keys never changes.
            joins.require_ttl(compiler.ttl, compiler.flow, [relation], what, place)
    if not bounded:
        relation = applied(relation)
    pending = bounded and windows is None
    keys = [one for one in group if not (pending and is_key(one, (START, END, TIME)))]
    relation, nodes = compiler.awaited(relation, [*keys, *(one for _, one in items), *having])
    keys, rest = nodes[: len(keys)], nodes[len(keys) :]
    items = [(name, one) for (name, _), one in zip(items, rest, strict=False)]
    having = rest[len(items) :]
    start, keys = _without_start(keys, windows)
    if windows is not None and windows.regroup is None:
        relation = relation.as_rows()  # Its fields have the bounds of the window.
    relation = relation.in_place()
    calls: list[exp.Expr] = []
    for one in (*(one for _, one in items), *having):
        calls += [call for call in aggregates_in(one) if call not in calls]
    scope = Keys(relation.fields, relation.is_open)
    grouping = _Grouping(
        relation=relation,
        bounded=bounded,
        windows=windows,
        changes=changes,
        keys=keys,
        start=start,
        scalars=[compiler.compile(one, relation) for one in keys],
        calls=calls,
        computed=[compile_aggregate(one, scope, compiler.functions) for one in calls],
    )
    if bounded and grouping.assigner.is_event_time:
        joins.require_event_time(relation, "a window", node.args.get("group") or node)
    trees = grouping.trees()
    return (
        grouping.results(grouping.operator(compiler, None if stays else compiler.ttl)),
        [(name, replaced(one, trees, legacy)) for name, one in items],
        [replaced(one, trees, legacy) for one in having],
    )


def _without_start(
    keys: list[exp.Expr], windows: Windows | None
) -> tuple[exp.Expr | None, list[exp.Expr]]:
    """Removes the start of a window from the keys if its end is a key too and all windows have the
    same size. The end alone then identifies the window.

    Returns the start and the other keys. In all other cases returns None and all keys.
    """
    if windows is not None and windows.size is not None:
        bounds = [one for one in keys if is_key(one, (windows.start or "", windows.end))]
        if len({one.name for one in bounds}) == 2:
            start = next(one for one in bounds if one.name == windows.start)
            return start, [one for one in keys if one.name != windows.start]
    return None, keys


@dataclass(frozen=True, slots=True, kw_only=True)
class _Grouping:
    """The relation that a query groups, its keys and windows, and the aggregates of each group.

    The fields of the results are `$k0` and so on for keys, and `$a0` and so on for aggregates.
    """

    relation: Relation
    bounded: bool
    """Whether a window bounds each group."""
    windows: Windows | None
    """Windows whose bounds are fields of the records. None if the windows are pending, or if there
    are none.
    """
    changes: bool
    """Whether rows of the relation may be replaced or deleted."""
    keys: list[exp.Expr]
    start: exp.Expr | None
    """Start of the window, if the query groups by both bounds and only the end is used as a key.
    Otherwise None.
    """
    scalars: list[Scalar]
    """The compiled keys."""
    calls: list[exp.Expr]
    """The distinct calls of aggregates in the query."""
    computed: list[Aggregate]
    """The compiled calls of aggregates."""

    @property
    def assigner(self) -> Any:
        """Assigner of the windows, or None if there are none."""
        if self.windows is not None:
            return self.windows.assigner
        return self.relation.pending.assigner if self.bounded and self.relation.pending else None

    @property
    def parts(self) -> dict[str, Any]:
        """Parts of all aggregates (`Aggregate.parts`), by name. Equal parts are computed once."""
        return {name: part for one in self.computed for name, part in one.parts.items()}

    def operator(self, compiler: Compiler, ttl: Any) -> Any:
        """Returns the stream of the results. Subqueries with the same grouping share the stream.

        `ttl` is the time after which a group without aggregates is forgotten.
        """
        parts, relation = self.parts, self.relation
        key = joins.key_of(self.scalars)
        of = (*relation.stream.upstreams, key, self.assigner, sorted(parts), ttl)
        alike = tuple(map(repr, of))
        if alike in compiler.shared:
            return compiler.shared[alike]
        whole = next(iter(parts.values())) if len(parts) == 1 else parts and af.agg(**parts)
        results: Any
        if self.bounded:
            keyed = _with_time(relation).stream.key_by(key)
            results = keyed.window(self.assigner).aggregate(whole or af.count())
        elif self.changes:
            results = relation.stream.key_by(key).process(Groups(parts), name="aggregate")
        else:
            keyed = relation.stream.key_by(key)
            results = keyed.aggregate(whole) if whole else keyed.process(First(False, ttl))
        compiler.shared[alike] = results
        return results

    def trees(self) -> list[tuple[exp.Expr, str]]:
        """Returns pairs of an expression of the query and the field of the results that replaces
        it.
        """
        trees = [(one, f"$k{i}") for i, one in enumerate(self.keys)]
        trees += [(one, f"$a{i}") for i, one in enumerate(self.calls)]
        if self.start is not None:
            trees.append((self.start, "$start"))
        return trees

    def results(self, stream: Any) -> Relation:
        """Returns the relation of the groups, whose records are `stream`."""
        parts = self.parts
        fields = [
            Field(one.name or one.sql(), s.type, s.nullable, f"$k{i}")
            for i, (one, s) in enumerate(zip(self.keys, self.scalars, strict=True))
        ]
        fields += [
            Field(f"$a{i}", a.type, a.nullable, f"$a{i}") for i, a in enumerate(self.computed)
        ]
        of_key, value = (af.col.key, af.col.value) if self.bounded else (Column(0), Column(1))
        read_part = {n: value if len(parts) == 1 else value[n] for n in parts}
        of_keys = joins.reads_of_key(of_key, self.scalars)
        if not self.bounded and not parts and not self.changes:
            of_keys = [one.expression for one in self.scalars]  # The first record of the group.
        reads: dict[str, Expr[Any]] = {f"$k{i}": one for i, one in enumerate(of_keys)}
        reads |= {f"$a{i}": substitute(a.result, read_part) for i, a in enumerate(self.computed)}
        groups = Relation(
            stream=stream,
            fields=tuple(fields),
            reads=reads,
            times={},
            passes=Column(2) > 0 if self.changes else None,
        )
        if not self.bounded:
            keys = tuple(f"$k{i}" for i in range(len(self.keys)))
            return replace(groups, identity=keys if parts or self.changes else None)
        if self.windows is None:
            return self._with_bounds(groups)
        return self._with_key_windows(groups, self.windows)

    def _with_bounds(self, groups: Relation) -> Relation:
        """Returns `groups` with the bounds of the formerly pending windows as fields."""
        pending = self.relation.pending
        assert pending is not None
        by_event_time = self.assigner.is_event_time
        return replace(
            groups,
            fields=groups.fields + WINDOW_FIELDS,
            reads={**groups.reads, **bounds_of(af.col.start, af.col.end)},
            times={TIME: 0, END: 1} if by_event_time else {},
            windows=pending.windows(pending.ends) if by_event_time else None,
        )

    def _with_key_windows(self, groups: Relation, windows: Windows) -> Relation:
        """Returns `groups` with windows, for a query whose keys have the bounds of `windows`."""
        fields, reads = groups.fields, dict(groups.reads)
        own = {one.name: f"$k{i}" for i, one in enumerate(self.keys) if isinstance(one, exp.Column)}
        if self.start is not None:
            assert windows.size is not None, "only a known size leaves the start out of the keys"
            own[self.start.name] = "$start"
            fields = (*fields, Field("$start", TIMESTAMP, False, "$start"))
            reads["$start"] = reads[own[windows.end]] - windows.size
        end, start = own.get(windows.end), own.get(windows.start or "")
        times = {} if end is None else {end: 1}
        if TIME in own:
            times[own[TIME]] = 0
        after = None if end is None else windows.after(start, end)
        return replace(groups, fields=fields, reads=reads, times=times, windows=after)


def _with_time(relation: Relation) -> Relation:
    """Adds a step that fails at a record without the time column of the pending windows.

    Windows use the timestamp of the record, so no other step would notice that the column is
    missing. A stream whose time is a known column needs no such step.
    """
    pending = relation.pending
    if pending is None or not pending.assigner.is_event_time or relation.times is not None:
        return relation
    name = f"DESCRIPTOR({pending.time})"
    there = relation.column(pending.time).is_null() | True
    return replace(relation, stream=relation.stream.filter(there, name=name))


def _legacy(relation: Relation, group: list[exp.Expr]) -> tuple[Relation, exp.Expr | None]:
    """Returns the relation with the pending windows of a call TUMBLE(...), HOP(...) or SESSION(...)
    in GROUP BY, and the call. Without a call, returns the relation and None.
    """
    calls = [
        one
        for one in group
        if LEGACY.get(one.name.upper(), ("", "?"))[1] == "" and isinstance(one, exp.Anonymous)
    ]
    if not calls:
        return relation, None
    if len(calls) > 1 or relation.pending:
        raise SqlError("GROUP BY has two windows; write one, or a query around a query", calls[-1])
    (call,) = calls
    refuse_updates(relation, "a window", call)
    kind = call.name.upper()
    time, *given = call.expressions or [None]
    labels = [name.lower() for name in WINDOWS[kind] if name in DURATIONS]
    if not isinstance(time, exp.Column) or not 1 <= len(given) <= len(labels):
        raise SqlError(f"{kind} takes a time and {', '.join(labels)}", call)
    durations = {
        name: duration_ms(one, f"{name.upper()} of {kind}")
        for name, one in zip(labels, given, strict=False)
    }
    if kind == "HOP" and "size" not in durations:
        raise SqlError("HOP takes a time, SLIDE and SIZE", call)
    field = Keys(relation.fields, relation.is_open).resolve(time)
    return pending_windows(relation, kind, durations, field, time), call


def _grouping_windows(
    relation: Relation, group: list[exp.Expr], place: exp.Expr
) -> tuple[bool, Windows | None]:
    """Returns whether a window bounds the groups, and the applied windows. The latter are None if
    the windows are pending, or if there are none.
    """
    names = {one.name for one in group if isinstance(one, exp.Column)}
    if relation.pending and relation.pending.kind == "CUMULATE" and names & {START, END} == {START}:
        raise SqlError("the groups of CUMULATE need window_end among their columns", place)
    if relation.pending:
        return bool(names & {START, END}), None
    windows = relation.windows
    return (True, windows) if windows and windows.are_among(names) else (False, None)


def _named(node: exp.Select, group: list[exp.Expr]) -> tuple[str, exp.Expr]:
    """Returns the name of the clause that groups the rows of a query, and the node to which errors
    point.
    """
    if node.args.get("distinct"):
        return "SELECT DISTINCT", node.expressions[0]
    return "GROUP BY" if group else "an aggregate", node.args.get("group") or node


def _require_updates(compiler: Compiler, relation: Relation, what: str, place: exp.Expr) -> None:
    """Raises SqlError for groups without a window, unless the caller asked for updates."""
    if compiler.updates:
        return
    windows = relation.windows
    if windows is not None:
        raise SqlError(
            f"{what} lacks the end of the window; add {windows.end}, or give updates=True", place
        )
    if relation.pending:
        add = "write GROUP BY" if what == "an aggregate" else "add"
        raise SqlError(f"{what} lacks the window; {add} window_start, window_end", place)
    raise SqlError(
        f"{what} without a window gives results that change with each row; give updates=True for "
        "a stream of af.Upsert, which replace each other, or group by a window: "
        "FROM TABLE(TUMBLE(TABLE t, DESCRIPTOR(ts), INTERVAL '1' MINUTE)) GROUP BY "
        "window_start, window_end",
        place,
    )


def _framed(key: Any, ctx: Any, elements: list[dict[str, Any]]) -> Iterable[dict[str, Any]]:
    bounds = bounds_of(*ctx.window)
    return ({**row, **bounds} for row in elements)


def _copies(
    assigner: Any, time: Callable[[Any], int], row: dict[str, Any]
) -> Iterable[dict[str, Any]]:
    for start, end in assigner.assign(row, time(row)):
        yield row | bounds_of(start, end)
