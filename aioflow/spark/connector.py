"""`af.io.spark`: what is read from Spark, and what is written through it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from aioflow.core.errors import GraphError
from aioflow.io.shapes import value_maker
from aioflow.spark.source import FrameSource

if TYPE_CHECKING:
    from aioflow.spark.session import SparkBridge

__all__ = ["spark"]


def spark(bridge: SparkBridge, what: str | Callable[[Any], Any] | Any, type: Any = None, *, batches: bool = False) -> FrameSource[Any]:
    """Reads the rows of `what`: a query, a function that is given the session and returns a DataFrame, or a DataFrame.

    A row is a dict, or a `type` of its columns (dataclass, NamedTuple, Struct); with `batches` the elements are Arrow's record batches.
    Each partition is a split. After a restart the query is computed again and goes on behind what was read, exactly once if it gives the
    same rows in the same order, which is checked.
    """
    if batches and type is not None:
        raise GraphError(f"spark(...) got batches=True and type={type!r}: a record batch is no row; leave one of them out")
    try:
        make = value_maker(type)
    except TypeError as error:
        raise GraphError(f"spark(...): {error}") from None
    return FrameSource(bridge, what, make, batches=batches)
