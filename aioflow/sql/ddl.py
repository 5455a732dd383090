"""Tables of CREATE TABLE: each is a connector of `aioflow.io`, as source and as sink of queries."""

from __future__ import annotations

import inspect
import keyword
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import partial
from operator import itemgetter
from typing import Any

import msgspec
from sqlglot import exp

from aioflow import io
from aioflow.core.errors import did_you_mean
from aioflow.expressions.nodes import Column, Expr, Literal
from aioflow.io.formats.debezium_format import DebeziumJson
from aioflow.operators.sink import is_sink
from aioflow.operators.source import is_source
from aioflow.operators.watermarks import WatermarkStrategy
from aioflow.sql import values as v
from aioflow.sql.bound import Compiler, is_clock
from aioflow.sql.casts import Scalar, cast, widened
from aioflow.sql.dialect import CreateTable
from aioflow.sql.errors import SqlError
from aioflow.sql.options import Options, connectors, options_of, parameters_of
from aioflow.sql.relation import CHANGE, PASSES, Relation, duration_ms
from aioflow.sql.rows import CheckedRow, as_row, json_text, row_of_event, rows_of_change
from aioflow.sql.scope import Field
from aioflow.sql.sources import UpdateStream, changelog
from aioflow.sql.types import (
    ANY,
    BOOLEAN,
    BYTES,
    DATE,
    DECIMAL,
    FLOAT,
    INTEGER,
    INTERVAL,
    NULL,
    NUMERIC,
    STRING,
    TIMESTAMP,
    SqlType,
    type_of_declaration,
    unify,
)

__all__ = ["CreatedTable"]

TEXTS = {"lines", "socket", "websocket"}
"""Connectors of texts. Each text is a JSON object of the columns, or the value of a sole STRING."""

CHANGES = {"mysql_changes", "postgres_changes"}
"""Connectors that read changes of rows. PRIMARY KEY identifies a row."""

TYPED = {"delta", "iceberg", "mysql", "parquet", "postgres", *CHANGES}
"""Connectors whose times are `datetime` objects, and whose decimals are Decimals. With other
connectors, times are texts or milliseconds, and decimals are any numbers.
"""

DATABASES = {"mysql", "postgres", "sqlite"}
"""Connectors of tables that may have undeclared columns. INSERT leaves these at their defaults."""

DEBEZIUM = "debezium_json"
"""The name of the format for changes of rows, in messages of brokers and in texts."""

SCHEMAS = ("avro", "json_schema", "protobuf")
"""Formats of `aioflow.io.formats` that need a schema."""

_HINTS: dict[SqlType, Any] = {
    BOOLEAN: bool,
    INTEGER: int,
    FLOAT: float,
    DECIMAL: Decimal,
    STRING: str,
    BYTES: bytes,
    TIMESTAMP: int | str,
    DATE: int | str,
    INTERVAL: int,
}


@dataclass(frozen=True, slots=True)
class _Declared:
    """A column of CREATE TABLE."""

    field: Field
    node: exp.ColumnDef

    @property
    def is_physical(self) -> bool:
        return self.node.args.get("kind") is not None

    @property
    def has_zone(self) -> bool:
        return self.node.args["kind"].this in (exp.DType.TIMESTAMPTZ, exp.DType.TIMESTAMPLTZ)


class CreatedTable:
    """A table that a script has created. The first query that reads it adds the source."""

    def __init__(
        self, node: CreateTable, compiler: Compiler, bind: Callable[..., exp.Expr]
    ) -> None:
        self.name = node.this.name
        self.node = node
        self._compiler = compiler
        self._bind = bind
        self._read: Relation | None = None
        self.place: exp.Expr = node.this
        """Node of the last INSERT into the table, to which errors point. Initially CREATE TABLE."""
        options = Options(node)
        given = options.take("connector")
        if given is None:
            raise SqlError(f"WITH needs 'connector', one of {', '.join(connectors())}", node.this)
        if given not in connectors():
            hint = did_you_mean(given, connectors(), "{}")
            value = options.places["connector"].args["value"]
            raise SqlError(
                f"there is no connector {given!r} for tables; there are "
                f"{', '.join(connectors())}{hint}",
                value,
            )
        self.connector = given
        self.is_of_changes = given in CHANGES or self._option("format") == DEBEZIUM
        """Whether the source gives changes of rows. PRIMARY KEY identifies the rows."""
        self.columns = self._columns()
        self.key = self._key()
        if self.is_of_changes:
            self._check_changes(options)
        self._source()  # Its errors come at CREATE TABLE, not at a query.
        self._check_watermark()

    def _check_changes(self, options: Options) -> None:
        if not self.key:
            raise SqlError(
                f"{self.connector if self.connector in CHANGES else DEBEZIUM} needs the key of its "
                "rows: PRIMARY KEY (...) NOT ENFORCED",
                self.node.this,
            )
        if "," in options.texts.get("tables", ""):
            raise SqlError("write CREATE TABLE for each of the tables", options.place("tables"))
        if self.node.args.get("watermark"):
            raise SqlError("rows that change have no event time", self.node.args["watermark"][0])

    # Columns.

    def _columns(self) -> list[_Declared]:
        found: list[_Declared] = []
        for one in self.node.expressions:
            name, kind = one.name, one.args.get("kind")
            if any(name == other.field.name for other in found):
                raise SqlError(f"the column {name} stands twice", one.this)
            type_ = ANY if kind is None else type_of_declaration(kind)
            nullable = kind is None or bool(kind.args.get("nullable"))
            nullable |= self.is_of_changes  # A deletion has only the key.
            found.append(_Declared(Field(name, type_, nullable, name), one))
        physical = [one.field for one in found if one.is_physical]
        if self.connector == "datagen" and [(f.name, f.type) for f in physical] != [
            ("index", INTEGER)
        ]:
            raise SqlError(
                "datagen gives the column index BIGINT; compute others: price AS index % 100",
                self.node.this,
            )
        if not physical:
            raise SqlError("a table needs a column that the connector gives", self.node.this)
        return found

    @property
    def fields(self) -> list[Field]:
        return [one.field for one in self.columns]

    @property
    def physical(self) -> list[_Declared]:
        return [one for one in self.columns if one.is_physical]

    def _column(self, node: exp.Identifier, physical: bool = True) -> _Declared:
        names = [one.field.name for one in self.columns]
        for one in self.columns:
            if one.field.name == node.name and (one.is_physical or not physical):
                return one
        what = "is computed" if node.name in names else "is no column"
        raise SqlError(
            f"{node.name} {what} of {self.name}{did_you_mean(node.name, names, '{}')}", node
        )

    def _key(self) -> list[str]:
        return [self._column(one).field.name for one in self.node.args.get("key") or ()]

    # The connector.

    def _arguments(self, options: Options) -> dict[str, Any]:
        """Returns the connector's arguments. Raises SqlError for a missing or wrong option."""
        known = dict(options_of(self.connector))
        known.pop("fn", None)
        name = options.texts.get("format")
        made: dict[str, Any] = {}
        more: list[str] = []
        if name in SCHEMAS and "format" in known:
            options.take("format")
            function = getattr(io.formats, name)
            own = parameters_of(function)
            own.pop("schema", None)
            more = [f"format.{one}" for one in own]
            given = options.arguments(own, "format.")
            made["format"] = options.call(function, given, options.place("format"))
        if name == DEBEZIUM:
            options.take("format")
            if "format" in known:
                made["format"] = self._debezium()
            elif self.connector not in TEXTS:
                messages = [one for one in connectors() if "format" in options_of(one)]
                raise SqlError(
                    f"{self.connector} has no messages of Debezium: take one of "
                    f"{', '.join([*messages, *sorted(TEXTS)])}",
                    options.place("format"),
                )
        made |= options.arguments(known)
        options.refuse_rest(self.connector, [*known, *more])
        parameters = inspect.signature(getattr(io, self.connector)).parameters
        for one in parameters.values():
            if one.default is one.empty and one.name in known and one.name not in made:
                raise SqlError(f"{self.connector} needs the option {one.name!r}", self.node.this)
        return made

    def _made(self, more: Mapping[str, Any]) -> Any:
        options = Options(self.node)
        options.take("connector")
        given = {**more, **self._arguments(options)}
        return options.call(getattr(io, self.connector), given, self.node.this)

    # As a source.

    def relation(self) -> Relation:
        """Returns the table as a relation. All queries share one source."""
        if self._read is None:
            self._read = self._streamed()
        return self._read

    def _streamed(self) -> Relation:
        source, names = self._source()
        if not is_source(source):
            raise SqlError(f"{self.connector} is only a sink; INSERT INTO it", self.node.this)
        reads = {
            one.field.key: self._time(one.field)
            for one in self.physical
            if one.field.type in (TIMESTAMP, DATE)
        } | {
            one.field.key: self._decimal(one.field)
            for one in self.physical
            if one.field.type == DECIMAL
            and (one.field.type.scale is not None or self.connector not in TYPED)
        }
        fields = tuple(one.field for one in self.physical)
        made = Relation(stream=None, fields=fields, reads=reads)  # type: ignore[arg-type]
        for one in self.columns:
            if not one.is_physical:
                made = self._computed(made, one)
        order = [one.field.name for one in self.columns]
        made = replace(made, fields=tuple(sorted(made.fields, key=lambda f: order.index(f.name))))
        strategy, times = self._watermarks(made)
        if self.connector == "webhook":
            posting: Any = source
            posting.row = self._posted(made)
        flow, name = self._compiler.flow, self.name
        given = {"name": name, "uid": f"table-{name}"}
        decode = self._decoder()
        if self.is_of_changes:
            # Changes of a row come in order from one partition of Kafka, or from one reader.
            readers = None if self.connector == "kafka" else 1
            stream = flow.source(source, parallelism=readers, **given)
            return self._changing(made, stream, decode)
        if decode is not None:
            stream = flow.source(source, **given).map(decode, name=f"{name}: rows")
            if strategy is not None:
                own = {"name": f"{name}: time", "uid": f"table-{name}-time"}
                stream = stream.assign_timestamps_and_watermarks(strategy, **own)
            return replace(made, stream=stream, times=times)
        stream = flow.source(source, watermarks=strategy, **given)
        if names is not None:
            # Records of a class that only this process knows become dicts before they are sent.
            least = flow.graph.nodes[stream.upstreams[0].node_id].parallelism_max
            columns: dict[str, Expr[Any]] = {
                one: Column(own) for one, own in self._attributes.items()
            }
            stream = stream.select(columns, name=f"{name}: rows", parallelism=least)
        return replace(made, stream=stream, times=times, is_plain=names is not None)

    def _changing(self, made: Relation, stream: Any, decode: Any) -> Relation:
        """Returns the latest rows of a table. `decode`, if given, converts elements to changes."""
        names, key = tuple(one.field.key for one in self.physical), tuple(self.key)
        source = self._compiler.flow.graph.nodes[stream.upstreams[0].node_id]
        rows = stream.flat_map(
            partial(rows_of_change, self.name, names, key, decode),
            name=f"{self.name}: rows",
            parallelism=source.parallelism,
        )
        stream = rows.key_by(tuple(map(Column, key)))
        return replace(made, stream=stream, times={}, identity=key, passes=Column(PASSES))

    def _debezium(self) -> DebeziumJson:
        return DebeziumJson(tuple(self.key), CheckedRow(self._attributes, self._type(), {}, None))

    def _source(self) -> tuple[Any, list[str] | None]:
        """Returns the source or sink, and the names of the columns; None if records are dicts."""
        names = [one.field.name for one in self.physical]
        if self.connector in ("http", "webhook"):  # The table reads the JSON, by its types.
            return self._made({"decode": "bytes"}), None
        if self.connector == "datagen":
            return self._made({"fn": {"index": Column("index")}}), None
        if self.is_of_changes:
            return self._made({}), None
        parameters = options_of(self.connector)
        signature = inspect.signature(getattr(io, self.connector)).parameters
        if "type" in signature and not {"table", "tables"} & {*signature}:
            type_ = self._type()
            if type_ is not None:
                header = self._option("header") != "false"
                more = {} if header or "columns" not in parameters else {"columns": names}
                return self._made({"type": type_, **more}), names
        elif "columns" in parameters:
            return self._made({"columns": names}), None
        return self._made({}), None

    def _option(self, name: str) -> str:
        options = Options(self.node)
        return options.texts.get(name, "").lower()

    def _type(self) -> Any:
        """Returns the class that checks and holds the records, or None if none is needed."""
        if self._option("format") in ("avro", "protobuf"):
            return None
        text = str if self.connector == "csv" else int | str
        hints: list[Any] = []
        defaults: dict[str, None] = {}
        attributes = self._attributes
        for one in sorted((one.field for one in self.physical), key=lambda f: f.nullable):
            hint = text if one.type in (TIMESTAMP, DATE) else _hint(one.type)
            if one.type in (TIMESTAMP, DATE) and self.is_of_changes:
                hint = Any  # With a schema, times are `datetime` objects.
            hints.append((attributes[one.name], hint | None if one.nullable else hint))
            if one.nullable:
                defaults[attributes[one.name]] = None
        if {*attributes} != {*attributes.values()}:
            fields = [(*one, *([None] if one[0] in defaults else [])) for one in hints]
            renamed = {attribute: name for name, attribute in attributes.items()}
            return msgspec.defstruct("Row", fields, rename=renamed)
        made: Any = typing.NamedTuple("Row", hints)  # type: ignore[misc]
        made._field_defaults = defaults
        made.__new__.__defaults__ = (None,) * len(defaults)
        return made

    @property
    def _attributes(self) -> dict[str, str]:
        """Maps a column to its attribute in the records' class, of the same name if possible."""
        names = [one.field.name for one in self.physical]
        return {
            name: name
            if name.isidentifier() and not keyword.iskeyword(name) and not name.startswith("_")
            else f"field{number}"
            for number, name in enumerate(names)
        }

    def _decoder(self) -> Callable[[Any], Any] | None:
        """Returns the function that converts an element to a row, or to a change if the table is
        read as changes. Returns None if no conversion is needed.
        """
        checked = CheckedRow(self._attributes, self._type(), {}, None)
        if self.is_of_changes:
            return self._debezium().decode if self.connector in TEXTS else None
        if self.connector in TEXTS:
            if len(self.physical) == 1 and self.physical[0].field.type == STRING:
                return partial(as_row, self.physical[0].field.name)
            return checked
        if self.connector == "sse":
            return partial(row_of_event, checked)
        if self.connector == "http":
            return checked
        if self.connector == "webhook":  # The server has checked the row.
            return dict
        return None

    def _posted(self, made: Relation) -> CheckedRow:
        """Returns the function that converts a posted body to a row, and checks its values."""
        read = (TIMESTAMP, DATE, DECIMAL)
        physical = [one.field for one in self.physical if one.field.type in read]
        values = {f.name: made.column(f.name) for f in physical}
        event_time = self._lateness()[0] if self.node.args.get("watermark") else None
        if event_time is not None:
            values[event_time] = made.column(event_time)
        return CheckedRow(self._attributes, self._type(), values, event_time)

    def _time(self, one: Field) -> Expr[Any]:
        column: Expr[Any] = Column(one.key)
        if self.is_of_changes and self.connector not in TYPED:
            return v.apply(v.debezium_time, column, one.name, one.type == DATE)
        made = column.dt.epoch_ms if self.connector in TYPED else v.apply(v.time_of, column)
        return made.dt.truncate("1d") if one.type == DATE else made

    def _decimal(self, one: Field) -> Expr[Any]:
        scale = () if one.type.scale is None else (one.type.scale,)
        return v.apply(v.decimal_of, Column(one.key), one.name, *scale)

    def _computed(self, made: Relation, one: _Declared) -> Relation:
        node = one.node.args["default"]
        key = one.field.key
        if is_clock(node):
            clock = Field(key, TIMESTAMP, False, key)
            return replace(made, fields=(*made.fields, clock), clock=made.clock | {key})
        scalar = self._compiler.compile(self._bind(node, self.name, made.fields), made)
        own = Field(key, scalar.type, scalar.nullable, key)
        reads = {**made.reads, key: made.read(scalar.expression)}
        return replace(made, fields=(*made.fields, own), reads=reads)

    def _check_watermark(self) -> None:
        if self.node.args.get("watermark"):
            self._lateness()

    def _lateness(self) -> tuple[str, int]:
        """Returns the name of the event time column, and by how many ms rows may be late."""
        column, value = self.node.args["watermark"]
        name = self._column(column, physical=False).field.name
        late = 0
        if isinstance(value, exp.Sub):
            late, value = duration_ms(value.expression, "WATERMARK"), value.this
        if not isinstance(value, exp.Column) or value.name != name or late < 0:
            raise SqlError(
                f"write WATERMARK FOR {name} AS {name} - INTERVAL '5' SECOND, with the time that "
                "rows may come late",
                column,
            )
        return name, late

    def _watermarks(self, made: Relation) -> tuple[Any, dict[str, int] | None]:
        if not self.node.args.get("watermark"):
            return None, {}
        name, late = self._lateness()
        one = next(f for f in made.fields if f.name == name)
        if one.type not in (TIMESTAMP, ANY) or name in made.clock:
            raise SqlError(
                f"{name} is {one.type}, and event time is TIMESTAMP: declare {name} TIMESTAMP, or "
                f"compute a column, as in ts AS TO_TIMESTAMP_LTZ(ms, 3)",
                self.node.args["watermark"][0],
            )
        late_text = f"{late}ms"
        strategy: WatermarkStrategy[Any] = WatermarkStrategy.bounded_out_of_orderness(
            late_text, timestamp=made.column(name)
        )
        return strategy, {name: 0}

    # As a sink.

    @property
    def upserts(self) -> bool:
        """Whether INSERT replaces an earlier row with the same PRIMARY KEY."""
        takes_mode = "mode" in options_of(self.connector)
        return bool(self.key) and takes_mode and self._option("mode") in ("", "upsert")

    def insert(self, relations: Sequence[Relation]) -> None:
        """Adds the sink of the table to the flow, for the rows of all INSERTs."""
        given: dict[str, Any] = {"mode": "upsert", "key": self.key} if self.upserts else {}
        if self.connector in DATABASES:
            given["columns"] = self._columns_of(relations)
        sink = self._made(given)
        if self.connector == "parquet":
            sink = sink.with_types(self._arrow_types())
        if not is_sink(sink):
            message = f"{self.connector} is only a source; it takes no rows"
            raise SqlError(message, self.place)
        stream: Any
        changing = [one for one in relations if one.changes]
        if changing and len(relations) > 1:
            raise SqlError(
                f"{self.name} has several INSERTs, and at least one query has rows that change; "
                "write each query to its own table",
                self.place,
            )
        if changing:
            stream = UpdateStream(changing[0])
        else:
            first, *more = (self._complete(relations, one).as_rows().stream for one in relations)
            stream = first.union(*more) if more else first
            if self.upserts:  # Rows of one key must come from one subtask.
                stream = stream.key_by(tuple(map(Column, self.key)))
        if self.connector in ("lines", "socket"):
            one = self.physical[0].field
            alone = len(self.physical) == 1 and one.type == STRING
            text = itemgetter(one.key) if alone else json_text
            stream = stream.map(text, name=f"{self.name}: texts")
        stream.sink(sink, name=self.name, uid=f"insert-{self.name}")

    def _arrow_types(self) -> dict[str, Any]:
        """Returns the Arrow types of the columns in Parquet files."""
        import pyarrow as pa

        types = {
            BOOLEAN: pa.bool_(),
            INTEGER: pa.int64(),
            FLOAT: pa.float64(),
            BYTES: pa.binary(),
            DATE: pa.date32(),
        }
        made = {}
        for one in self.physical:
            if one.field.type == TIMESTAMP:
                made[one.field.key] = pa.timestamp("us", "UTC" if one.has_zone else None)
            elif one.field.type in types:
                made[one.field.key] = types[one.field.type]
        return made

    def _columns_of(self, relations: Sequence[Relation]) -> list[str]:
        """Returns the columns that INSERTs write; the database fills the others with defaults. All
        INSERTs must write the same columns, because NULL would override a default.
        """
        keys = [{field.key for field in one.fields} for one in relations]
        names = [f.name for f in self.fields if f.key in set().union(*keys)]
        for given in keys:
            if missing := [name for name in names if name not in given]:
                raise SqlError(
                    f"an INSERT into {self.name} leaves out {', '.join(missing)}, which another "
                    "one gives: give the same columns in each, as in SELECT ..., NULL AS "
                    f"{missing[0]}, or leave the column out of each for its default",
                    self.place,
                )
        return names

    def _complete(self, relations: Sequence[Relation], one: Relation) -> Relation:
        """Returns the relation `one` with NULL in the columns that only other INSERTs write."""
        keys = {field.key for other in relations for field in other.fields}
        fields = tuple(column.field for column in self.physical if column.field.key in keys)
        nulls = {field.key: Literal(None) for field in fields if field not in one.fields}
        return replace(one, fields=fields, reads={**one.reads, **nulls})

    def written(self, found: Relation, into: exp.Insert) -> Relation:
        """Converts rows of a query to rows of this table. Columns match by position, not name."""
        columns = into.this.expressions if isinstance(into.this, exp.Schema) else ()
        targets = [self._column(one) for one in columns] or self.physical
        place = into.expression
        if found.is_open:
            raise SqlError("INSERT needs to know the columns; list them in SELECT", place)
        if len(found.fields) != len(targets):
            raise SqlError(
                f"{self.name} takes {len(targets)} columns, "
                f"{', '.join(one.field.name for one in targets)}, and the query has "
                f"{len(found.fields)}",
                place,
            )
        nodes = place.expressions if isinstance(place, exp.Select) else ()
        reads = {CHANGE: found.column(CHANGE)} if found.is_changelog else {}
        for number, (own, target) in enumerate(zip(found.fields, targets, strict=True)):
            node = nodes[number] if len(nodes) == len(targets) else place
            if own.key in found.clock:
                raise SqlError(
                    f"{own.name} is PROCTIME(), which has no value; leave it out of SELECT", node
                )
            reads[target.field.key] = found.read(self._written(own, target, node))
        if found.changes and not self.upserts:
            with_mode = (one for one in connectors() if "mode" in options_of(one))
            raise SqlError(
                f"the rows of this query change, and {self.name} would append them; write to a "
                f"table with PRIMARY KEY, of {', '.join(with_mode)}, or group by a window",
                into.this,
            )
        if missing := [one for one in self.key if self.upserts and one not in reads]:
            raise SqlError(f"INSERT lacks {', '.join(missing)} of PRIMARY KEY", into.this)
        keys = {own.key: one.field.key for own, one in zip(found.fields, targets, strict=True)}
        identity = tuple(keys[key] for key in found.identity or ())
        made = replace(
            found,
            fields=tuple(one.field for one in targets),
            reads=reads,
            is_plain=False,
            times=None,
            windows=None,
            identity=identity if found.changes else None,
        )
        if found.changes and {*identity} != {*self.key}:
            # The query's rows have another key or none: keep the last row of each PRIMARY KEY.
            made = replace(changelog(made), identity=tuple(self.key))
        return made

    def _written(self, own: Field, target: _Declared, node: exp.Expr) -> Expr[Any]:
        to = target.field.type
        kind = unify(own.type, to)
        x: Expr[Any] = Column(own.key)
        if kind is None or (kind != to and ANY not in (own.type, to)):
            way = (
                f"declare {target.field.name} TIMESTAMP, or write UNIX_TIMESTAMP(...)"
                if own.type in (TIMESTAMP, DATE)
                else f"write CAST(... AS {to})"
            )
            raise SqlError(
                f"{target.field.name} of {self.name} is {to}, and the query has {own.type}: {way}",
                node,
            )
        if to == DECIMAL and to.scale is not None:
            return cast(Scalar(own.type, own.nullable, x), to, True, node).expression
        if own.type == NULL or to not in (TIMESTAMP, DATE):
            return widened(Scalar(own.type, own.nullable, x), to) if to in NUMERIC else x
        if self.connector in TYPED or self._option("format") in ("avro", "protobuf"):
            if to == DATE:
                return v.apply(v.date_of, x)
            return v.apply(v.moment_of if target.has_zone else v.naive_moment_of, x)
        return v.apply(v.date_text if to == DATE else v.time_text, x)


def _hint(kind: SqlType) -> Any:
    """Returns the annotation of a field whose values are read from JSON or CSV."""
    if kind.name == "ARRAY":
        assert kind.element is not None
        return list[_hint(kind.element) | None]  # type: ignore[misc]
    if kind.name == "MAP":
        assert kind.element is not None
        return dict[str, _hint(kind.element) | None]  # type: ignore[misc]
    return dict[str, Any] if kind.name == "ROW" else _HINTS.get(kind, Any)
