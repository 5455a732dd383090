"""`af.io.spark`: what is read from Spark, and what is written through it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any, overload

from aioflow.core.errors import GraphError
from aioflow.core.timeunits import to_seconds
from aioflow.io.shapes import value_maker
from aioflow.spark.typed_rows import TypedRows

if TYPE_CHECKING:
    from aioflow.spark.session import SparkBridge
    from aioflow.spark.sink import FrameSink
    from aioflow.spark.source import FrameSource
    from aioflow.spark.streaming import StreamSource

__all__ = ["spark"]


@overload
def spark(
    bridge: SparkBridge, what: str | Callable[[Any], Any] | Any, type: Any = None, *, batches: bool = ...
) -> FrameSource[Any]: ...
@overload
def spark(
    bridge: SparkBridge,
    what: str | Callable[[Any], Any] | Any,
    type: Any = None,
    *,
    batches: bool = ...,
    checkpoint: str | PathLike[str],
    trigger: str = ...,
) -> StreamSource[Any]: ...
@overload
def spark(
    bridge: SparkBridge,
    *,
    into: str | PathLike[str] | Callable[[Any, str], object],
    schema: str,
    spool: str | PathLike[str] | None = ...,
    format: str = ...,
    options: Mapping[str, str] | None = ...,
) -> FrameSink: ...
def spark(
    bridge: SparkBridge,
    what: str | Callable[[Any], Any] | Any = None,
    type: Any = None,
    *,
    batches: bool = False,
    checkpoint: str | PathLike[str] | None = None,
    trigger: str = "1s",
    into: str | PathLike[str] | Callable[[Any, str], object] | None = None,
    schema: str | None = None,
    spool: str | PathLike[str] | None = None,
    format: str = "parquet",
    options: Mapping[str, str] | None = None,
) -> FrameSource[Any] | StreamSource[Any] | FrameSink:
    """The rows of `what` as a source, or a sink `into` files or a function that writes a DataFrame.

    `what`: a query, a function that is given the session and returns a DataFrame, or a DataFrame. A row is a dict, or a `type` of its
    columns (dataclass, NamedTuple, Struct); with `batches` the elements are Arrow's record batches. Each partition is a split. After a
    restart the query is computed again and goes on behind what was read: each row exactly once if it gives the same rows in the same
    order, which is checked.

    With `checkpoint`, a local directory that outlives the process, `what` is a streaming query: Spark keeps its offsets there, and its
    batches until a checkpoint of the flow is behind them. `trigger` is how often Spark looks for more; "once" takes what is there and ends.

    `into`: a directory that gets part files of `format` with the `options` of Spark's writer, exactly once under checkpoints; or
    `fn(frame, batch_id)`, called in a thread once a checkpoint, and after a crash perhaps again with the same `batch_id`. `schema` in
    Spark's words: "station string, celsius double"; records have these fields, or are tuples in this order. `spool` is a directory of
    this machine that keeps rows until Spark has written them; needed unless `into` is a local directory, which then has it.
    """
    from aioflow.spark.session import check_bridge

    check_bridge(bridge, "the first argument of spark(...)")
    if (what is None) == (into is None):
        raise GraphError("spark(...) got both what to read and into=, or neither: expected one of them")
    if into is None:
        _check_readable(what)
        if checkpoint is not None:
            return _stream(bridge, what, type, batches, fspath(checkpoint), trigger)
        return _source(bridge, what, type, batches)
    if schema is None:
        raise GraphError('spark(into=...) got no schema=, expected the columns in Spark\'s words: "station string, celsius double"')
    try:
        from aioflow.spark.sink import FrameSink
    except ModuleNotFoundError as error:
        raise _missing(error) from None
    from aioflow.spark.targets import FileTarget, FunctionTarget

    if callable(into):
        if spool is None:
            raise GraphError("spark(into=<function>) got no spool=, expected a local directory that keeps rows until they are written")
        return FrameSink(bridge, FunctionTarget(into), schema, fspath(spool))
    path = fspath(into).rstrip("/") or "/"
    if spool is None:
        local = path.removeprefix("file://")
        if "://" in local:
            raise GraphError(f"spark(into={path!r}) got no spool=, expected a local directory that keeps rows until they are written")
        spool = f"{local}/_aioflow/spool"
    return FrameSink(bridge, FileTarget(path, format, dict(options or {})), schema, fspath(spool))


def _check_readable(what: object) -> None:
    if not (isinstance(what, str) or callable(what) or hasattr(what, "toDF")):
        raise TypeError(
            f"spark(...) got {what!r} of type {type(what).__name__} to read, expected a query, a DataFrame, or a function that takes the "
            "session and gives one"
        )


def _source(bridge: SparkBridge, what: Any, type_: Any, batches: bool) -> FrameSource[Any]:
    make = _maker(type_, batches)
    try:
        from aioflow.spark.source import FrameSource
    except ModuleNotFoundError as error:
        raise _missing(error) from None
    return FrameSource(bridge, what, make, batches=batches)


def _stream(bridge: SparkBridge, what: Any, type_: Any, batches: bool, checkpoint: str, trigger: str) -> StreamSource[Any]:
    make = _maker(type_, batches)
    if "://" in checkpoint:
        raise GraphError(f"spark(...) got checkpoint={checkpoint!r}, expected a local directory: what Spark hands over is kept there too")
    try:
        from aioflow.spark.streaming import ONCE, StreamSource
    except ModuleNotFoundError as error:
        raise _missing(error) from None
    try:
        every = trigger if trigger == ONCE else f"{round(to_seconds(trigger, 'trigger') * 1000)} milliseconds"
    except (TypeError, ValueError) as error:
        raise GraphError(f"spark(...): {error}; that is how often Spark looks for more, and {ONCE!r} takes what is there") from None
    return StreamSource(bridge, what, make, batches=batches, checkpoint=checkpoint, trigger=every)


def _maker(type_: Any, batches: bool) -> Callable[[dict[str, Any]], Any] | None:
    if batches and type_ is not None:
        raise GraphError(f"spark(...) got batches=True and type={type_!r}: a record batch is no row; leave one of them out")
    try:
        make = value_maker(type_)
    except TypeError as error:
        raise GraphError(f"spark(...): {error}") from None
    return None if make is None else TypedRows(make, type_)


def _missing(error: ModuleNotFoundError) -> ModuleNotFoundError:
    return ModuleNotFoundError(f"af.io.spark needs {error.name}: pip install 'aioflow[spark]'", name=error.name)
