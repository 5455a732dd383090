"""Streams and tables as relations, with the columns and fields of event time that a flow knows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from aioflow.api.build import Upstream
from aioflow.api.streams import DataStream
from aioflow.core.errors import GraphError
from aioflow.expressions.nodes import Call, Column, Literal
from aioflow.graph.stream_graph import StreamGraph, StreamNode
from aioflow.io.changes import Change, Upsert, key_of
from aioflow.io.files.arrow_files import ArrowTable
from aioflow.io.memory import IterableSource
from aioflow.operators.function_sink import as_sink
from aioflow.sql.keyed import Shown, Versions, as_changes
from aioflow.sql.relation import CHANGE, PASSES, Relation
from aioflow.sql.scope import Field, Schema, schema_of
from aioflow.sql.types import ANY, INTEGER, TIMESTAMP

__all__ = ["ChangeStream", "QueryStream", "Table", "UpdateStream", "changelog", "relation"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table(Relation):
    """A bounded table in which a join looks up rows."""

    stream: Any = None
    """Always None, because only `streamed` makes a stream of the rows."""
    rows: tuple[Any, ...] = ()

    def streamed(self, flow: Any) -> Relation:
        """Returns the rows as a stream."""
        return Relation(
            stream=flow.source(self.rows),
            fields=self.fields,
            is_open=self.is_open,
            reads=self.reads,
            times=self.times,
        )


class QueryStream(DataStream[dict[str, Any]]):
    """The stream of a query's results. Another query that reads the stream knows its types, event
    time and windows.
    """

    def __init__(self, relation: Relation) -> None:
        super().__init__(relation.stream.flow, relation.stream.upstreams)
        self.relation = relation


class UpdateStream(DataStream[Upsert[dict[str, Any]]]):
    """The stream of a query whose rows change. Each element is an upsert, which has the latest
    version of a row or deletes it.

    Another query can read the stream as a table of the latest rows.
    """

    def __init__(self, relation: Relation) -> None:
        identity, passes = relation.identity, relation.passes
        assert identity is not None
        named = {one.key: relation.column(one.key) for one in relation.fields}
        if relation.is_changelog:
            made = _versions(relation, partial(_upsert_of_versions, identity), "upserts")
        elif passes is None:
            made = relation.stream.select(named).map(_upserts_by(identity), name="upserts")
        else:
            rows = relation.stream.select({**named, PASSES: passes})
            made = rows.map(partial(_upsert_or_deletion, identity), name="upserts")
            made = made.key_by(key_of).process(Shown(), name="deletions")
        super().__init__(made.flow, made.upstreams)
        self.relation = relation

    def sink(self, sink: Any, *, parallelism: int | None = None, **options: Any) -> UpdateStream:
        """Writes the upserts. Upserts of one row stay in their order. Raises GraphError for a sink
        of a table that does not replace rows by their key.
        """
        as_sink(sink).check_upserts(self.relation.identity or ())
        stream = self if parallelism is None else self.key_by(key_of)
        DataStream.sink(stream, sink, parallelism=parallelism, **options)
        return self


class ChangeStream(DataStream[Change[dict[str, Any]]]):
    """The stream of a query whose rows change: each change inserts, deletes or replaces a row. Rows
    without a key are only inserted and deleted.
    """

    def __init__(self, relation: Relation) -> None:
        if relation.identity is None:
            made = relation.as_rows().stream.map(_change_of_row, name="changes")
        else:
            made = _versions(relation, partial(_change_of_versions, relation.identity), "changes")
        super().__init__(made.flow, made.upstreams)
        self.relation = relation


def changelog(relation: Relation) -> Relation:
    """Returns the relation as a changelog, in which deletions retract rows."""
    if relation.is_changelog:
        return relation
    if relation.identity is None:
        reads = {**relation.reads, CHANGE: Literal(1)}
        return replace(relation, reads=reads, is_changelog=True, lacks=NO_KEY)
    stream = _versions(relation, as_changes, "changelog")
    return replace(
        relation, stream=stream, reads={}, is_plain=True, passes=None, is_changelog=True, times={}
    )


NO_KEY = "a row of a stream that appends has no key"


def _versions(relation: Relation, give: Callable[..., Any], name: str) -> Any:
    """Returns a stream with the results of `give(before, after)` for each change of a row. `name`
    is the name of the operator.
    """
    if relation.is_changelog:
        rows = relation.as_rows().stream
    else:
        named = {key: relation.column(key) for key in relation.names}
        there = Literal(True) if relation.passes is None else relation.passes
        rows = relation.stream.select({**named, PASSES: there})
    key: Any = tuple(map(Column, relation.identity or ())) or Literal(0)
    return rows.key_by(key).process(Versions(relation.is_changelog, give), name=name)


def _change_of_row(row: dict[str, Any]) -> Change[dict[str, Any]]:
    row = row.copy()
    if row.pop(CHANGE) > 0:
        return Change("insert", "", {}, None, row, "", 0)
    return Change("delete", "", {}, row, None, "", 0)


def _change_of_versions(
    identity: tuple[str, ...], before: dict[str, Any] | None, after: dict[str, Any] | None
) -> tuple[Change[dict[str, Any]]]:
    row = after or before or {}
    kind: Any = "insert" if before is None else "delete" if after is None else "update"
    return (Change(kind, "", {name: row[name] for name in identity}, before, after, "", 0),)


def _upsert_of_versions(
    identity: tuple[str, ...], before: dict[str, Any] | None, after: dict[str, Any] | None
) -> tuple[Upsert[dict[str, Any]]]:
    row = after or before or {}
    return (Upsert("", {name: row[name] for name in identity}, after),)


def _upserts_by(identity: tuple[str, ...]) -> Callable[[dict[str, Any]], Upsert[dict[str, Any]]]:
    if len(identity) == 1:
        (name,) = identity
        return lambda row: Upsert("", {name: row[name]}, row)
    return lambda row: Upsert("", {name: row[name] for name in identity}, row)


def _upsert_or_deletion(identity: tuple[str, ...], row: dict[str, Any]) -> Upsert[dict[str, Any]]:
    key = {name: row[name] for name in identity}
    if not row[PASSES]:
        return Upsert("", key, None)
    return Upsert("", key, {name: value for name, value in row.items() if name != PASSES})


def relation(flow: Any, name: str, what: Any, declared: Any) -> Relation:
    """Returns a stream or a bounded table as a relation. `declared` is its schema, or None."""
    if isinstance(what, DataStream):
        if what.flow is not flow:
            raise GraphError(
                f"table {name!r} is a stream of flow {what.flow.name!r}, and the query is of "
                f"{flow.name!r}: build both in one flow"
            )
        if isinstance(what, QueryStream | UpdateStream | ChangeStream) and declared is None:
            return what.relation
    schema = None if declared is None else schema_of(declared)
    if declared is not None and schema is None:
        raise GraphError(
            f"schemas=: {name!r} has {declared!r}; expected a dataclass, a TypedDict, a "
            "NamedTuple, a Struct, a model, an Arrow schema, or a dict of names to types"
        )
    if not isinstance(what, DataStream):
        return _table(name, what, schema)
    found = [_described(flow.graph, upstream) for upstream in what.upstreams]
    known, times, plain = found[0]
    if any(one != found[0] for one in found):
        known, times, plain = None, None, False
    schema = schema or known
    made = _relation(what, schema, times)
    return replace(made, is_plain=plain and declared is None and not made.reads)


def _relation(stream: Any, schema: Schema | None, times: dict[str, int] | None) -> Relation:
    if schema is None:
        return Relation(stream=stream, fields=(), is_open=True, times=times)
    fields = tuple(
        replace(f, type=TIMESTAMP) if f.key in (times or ()) and f.type in (INTEGER, ANY) else f
        for f in schema.fields
    )
    reads = {key: Column(key).dt.epoch_ms for key in sorted(schema.datetimes)}
    return Relation(stream=stream, fields=fields, reads=reads, times=times)


def _table(name: str, what: Any, schema: Schema | None) -> Table:
    if hasattr(what, "__arrow_c_stream__"):
        import pyarrow as pa

        table = pa.table(what)
        schema, rows = schema or schema_of(table.schema), tuple(table.to_pylist())
    elif isinstance(what, list | tuple):
        rows = tuple(what)
        schema = schema or _of_rows(rows)
    else:
        raise GraphError(
            f"table {name!r} is {what!r}; expected a stream of this flow, or for a table to look "
            "up a list of rows, or a table of Arrow, pandas or polars"
        )
    if schema is None:
        raise GraphError(
            f"the columns of table {name!r} are not known; declare them with "
            f"schemas={{{name!r}: ...}}"
        )
    made = _relation(None, schema, None)
    return Table(fields=made.fields, reads=made.reads, rows=rows, times={})


def _of_rows(rows: Any) -> Schema | None:
    if not rows:
        return None
    if isinstance(rows[0], dict):
        return Schema(tuple(Field(str(name), ANY, True, str(name)) for name in rows[0]))
    return schema_of(type(rows[0]))


def _described(
    graph: StreamGraph, upstream: Upstream
) -> tuple[Schema | None, dict[str, int] | None, bool]:
    """Returns the schema of a stream, the fields that follow its event time, and whether its
    records are dicts of exactly the schema's fields. The first two are None if not known.
    """
    node = graph.nodes[upstream.node_id]
    if upstream.side is not None:
        return None, None, False
    if node.kind == "source":
        return _described_source(node)
    columns = node.traits.columns
    inputs = graph.inputs_of(node.id)
    if len(inputs) != 1 or (node.kind != "filter" and columns is None):
        return None, None, False
    schema, times, plain = _described(graph, Upstream(inputs[0].source, inputs[0].side))
    if columns is None:
        return schema, times, plain
    known = {field.key: field for field in schema.fields} if schema else {}
    fields, moved = [], {}
    for name, expression in columns.items():
        old = str(expression._name) if isinstance(expression, Column) else ""
        fields.append(replace(known.get(old, Field("", ANY, True, "")), name=name, key=name))
        if times is not None and old in times:
            moved[name] = times[old]
    stamps = frozenset(
        name
        for name, expression in columns.items()
        if schema and isinstance(expression, Column) and expression._name in schema.datetimes
    )
    return Schema(tuple(fields), stamps), None if times is None else moved, True


def _described_source(node: StreamNode) -> tuple[Schema | None, dict[str, int] | None, bool]:
    source, strategy = node.source, node.watermarks
    times = None
    timestamp = None if strategy is None else strategy.timestamp
    if isinstance(timestamp, Call) and timestamp._name == "dt.epoch_ms":
        timestamp = timestamp._operand
    if isinstance(timestamp, Column):
        times = {str(timestamp._name): 0}
    if isinstance(source, ArrowTable):
        schema, table = schema_of(source.table.schema), source.table
        assert schema is not None
        known = (replace(f, nullable=table[f.name].null_count > 0) for f in schema.fields)
        return replace(schema, fields=tuple(known)), times, True
    if isinstance(source, IterableSource) and isinstance(source.items, list | tuple):
        return _of_rows(source.items), times, False
    kind = None if source is None else source.record_type
    return (None if kind is None else schema_of(kind)), times, False
