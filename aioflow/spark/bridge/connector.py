"""`af.io.spark`: sources that read from Spark, and sinks that write through it.

Rows of Spark become values of a type. Errors name the field and the remedy.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any, overload

import msgspec

from aioflow.advice.hints import explained
from aioflow.core.errors import GraphError, describe_record
from aioflow.core.timeunits import to_seconds
from aioflow.io.conversion import field_names, value_maker
from aioflow.spark.bridge.calls import check_bridge

if TYPE_CHECKING:
    from aioflow.spark.bridge.calls import Bridge
    from aioflow.spark.bridge.sink import FrameSink
    from aioflow.spark.bridge.source import FrameSource
    from aioflow.spark.streaming.source import StreamSource

__all__ = ["TypedRows", "spark"]

_PLACE = re.compile(
    r"^(?P<what>.*) - at `\$(?:\.(?P<field>\w+)|\[(?P<index>\d+)\])(?P<within>.*)`$", re.DOTALL
)
_MISSING = re.compile(r"^Object missing required field `(?P<field>[^`]+)`$")


@dataclass(frozen=True, slots=True)
class TypedRows:
    """Converts a row to a value of `type`. It is sent to Spark's executors with the flow."""

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


@overload
def spark(
    bridge: Bridge,
    what: str | Callable[[Any], Any] | Any,
    type: Any = None,
    *,
    batches: bool = ...,
) -> FrameSource[Any]: ...
@overload
def spark(
    bridge: Bridge,
    what: str | Callable[[Any], Any] | Any,
    type: Any = None,
    *,
    batches: bool = ...,
    checkpoint: str | PathLike[str],
    trigger: str = ...,
) -> StreamSource[Any]: ...
@overload
def spark(
    bridge: Bridge,
    *,
    into: str | PathLike[str] | Callable[[Any, str], object],
    schema: str,
    spool: str | PathLike[str] | None = ...,
    format: str | None = ...,
    options: Mapping[str, str] | None = ...,
) -> FrameSink: ...
@overload
def spark(
    bridge: Bridge,
    *,
    table: str,
    schema: str,
    spool: str | PathLike[str],
    format: str | None = ...,
    options: Mapping[str, str] | None = ...,
) -> FrameSink: ...
@explained
def spark(
    bridge: Bridge,
    what: str | Callable[[Any], Any] | Any = None,
    type: Any = None,
    *,
    batches: bool = False,
    checkpoint: str | PathLike[str] | None = None,
    trigger: str | None = None,
    into: str | PathLike[str] | Callable[[Any, str], object] | None = None,
    table: str | None = None,
    schema: str | None = None,
    spool: str | PathLike[str] | None = None,
    format: str | None = None,
    options: Mapping[str, str] | None = None,
) -> FrameSource[Any] | StreamSource[Any] | FrameSink:
    """Returns a source of the rows of `what`, or a sink that writes `into` a directory, function or
    table.

    `what` is a query, a function from the session to a DataFrame, or a DataFrame. A row is a dict,
    or a `type` of its columns (dataclass, NamedTuple, Struct); with `batches` the elements are
    Arrow's record batches. Each partition is a split. After a restart the query is computed again,
    and reading continues after the rows that were read. Each row is read exactly once if the query
    gives the same rows in the same order, which is checked.

    With `checkpoint`, a local directory that outlives the process, `what` is a streaming query. The
    directory keeps Spark's offsets, and Spark's batches until a checkpoint of the flow covers them.
    `trigger` is the time after which Spark looks for more data (by default "1s"); "once" reads the
    data that exists and ends.

    `into` is a directory that gets part files of `format` ("parquet") with the `options` of Spark's
    writer, exactly once with checkpoints. Or it is a function `fn(frame, batch_id)`, called in a
    thread once for each checkpoint, and after a crash perhaps again with the same `batch_id`.
    `table` is a table of Spark's catalog whose rows are in files, also written exactly once; it is
    created with `format` if it does not exist. `schema` uses Spark's notation, such as "station
    string, celsius double"; records have these fields, or are tuples in this order. `spool` is a
    directory of this machine that keeps rows until Spark has written them. It is required unless
    `into` is a local directory, which then holds the spool.
    """
    check_bridge(bridge, "the first argument of spark(...)")
    if [what is None, into is None, table is None].count(False) != 1:
        raise GraphError(
            "spark(...) got both what to read and into= or table=, or two of them, or none: "
            "expected one of the three"
        )
    if what is not None:
        _refuse(
            "what is read",
            "into= or table=",
            schema=schema,
            spool=spool,
            format=format,
            options=options,
        )
        _check_readable(what)
        if checkpoint is not None:
            return _stream(
                bridge,
                what,
                type,
                batches,
                fspath(checkpoint),
                "1s" if trigger is None else trigger,
            )
        if trigger is not None:
            raise GraphError(
                f"spark(...) got trigger={trigger!r} and no checkpoint=: a query with a trigger "
                "is a streaming one, and wants a local "
                'directory that outlives the process, as checkpoint="/var/lib/app/spark"; a batch '
                "is read once"
            )
        return _source(bridge, what, type, batches)
    _refuse(
        "a sink",
        "what is read",
        type=type,
        batches=batches or None,
        checkpoint=checkpoint,
        trigger=trigger,
    )
    return _sink(
        bridge,
        into,
        table,
        schema,
        None if spool is None else fspath(spool),
        format,
        dict(options or {}),
    )


def _refuse(who: str, whose: str, **given: Any) -> None:
    for name, value in given.items():
        if value is not None:
            raise GraphError(
                f"spark(...) got {name}={value!r} for {who}, which has no use for it: it is for "
                f"{whose}; leave it out"
            )


def _sink(
    bridge: Bridge,
    into: Any,
    table: str | None,
    schema: str | None,
    spool: str | None,
    format: str | None,
    options: dict[str, str],
) -> FrameSink:
    if schema is None:
        raise GraphError(
            "spark(into=...) got no schema=, expected the columns in Spark's words: \"station "
            'string, celsius double"'
        )
    try:
        from aioflow.spark.bridge.sink import FrameSink
    except ModuleNotFoundError as error:
        raise _missing(error) from None
    from aioflow.spark.bridge.targets import FileTarget, FunctionTarget, TableTarget

    target: FileTarget | FunctionTarget | TableTarget
    if table is not None:
        target, what = TableTarget(table, format, options), f"table={table!r}"
    elif callable(into):
        _refuse(
            "a function, which writes as it likes",
            "files and tables",
            format=format,
            options=options or None,
        )
        target, what = FunctionTarget(into), "into=<function>"
    else:
        path = fspath(into).rstrip("/") or "/"
        target, what = FileTarget(path, format or "parquet", options), f"into={path!r}"
        local = path.removeprefix("file://")
        if spool is None and "://" not in local:
            spool = f"{local}/_aioflow/spool"
    if spool is None:
        raise GraphError(
            f"spark({what}) got no spool=, expected a local directory that keeps rows until they "
            "are written"
        )
    return FrameSink(bridge, target, schema, spool)


def _check_readable(what: object) -> None:
    if not (isinstance(what, str) or callable(what) or hasattr(what, "toDF")):
        raise TypeError(
            f"spark(...) got {what!r} of type {type(what).__name__} to read, expected a query, a "
            "DataFrame, or a function that takes the "
            "session and gives one"
        )


def _source(bridge: Bridge, what: Any, type_: Any, batches: bool) -> FrameSource[Any]:
    make = _maker(type_, batches)
    try:
        from aioflow.spark.bridge.source import FrameSource
    except ModuleNotFoundError as error:
        raise _missing(error) from None
    return FrameSource(bridge, what, make, batches=batches)


def _stream(
    bridge: Bridge, what: Any, type_: Any, batches: bool, checkpoint: str, trigger: str
) -> StreamSource[Any]:
    make = _maker(type_, batches)
    if "://" in checkpoint:
        raise GraphError(
            f"spark(...) got checkpoint={checkpoint!r}, expected a local directory: what Spark "
            "hands over is kept there too"
        )
    try:
        from aioflow.spark.streaming.source import ONCE, StreamSource
    except ModuleNotFoundError as error:
        raise _missing(error) from None
    try:
        every = (
            trigger
            if trigger == ONCE
            else f"{round(to_seconds(trigger, 'trigger') * 1000)} milliseconds"
        )
    except (TypeError, ValueError) as error:
        raise GraphError(
            f"spark(...): {error}; that is how often Spark looks for more, and {ONCE!r} takes "
            "what is there"
        ) from None
    return StreamSource(bridge, what, make, batches=batches, checkpoint=checkpoint, trigger=every)


def _maker(type_: Any, batches: bool) -> Callable[[dict[str, Any]], Any] | None:
    if batches and type_ is not None:
        raise GraphError(
            f"spark(...) got batches=True and type={type_!r}: a record batch is no row; leave one "
            "of them out"
        )
    try:
        make = value_maker(type_)
    except TypeError as error:
        raise GraphError(f"spark(...): {error}") from None
    return None if make is None else TypedRows(make, type_)


def _missing(error: ModuleNotFoundError) -> ModuleNotFoundError:
    return ModuleNotFoundError(
        f"af.io.spark needs {error.name}: pip install 'aioflow[spark]'", name=error.name
    )
