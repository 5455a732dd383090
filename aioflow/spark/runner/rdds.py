"""Builds the stages of a flow as RDDs of Spark, and runs them.

Everything here calls Spark and blocks: it runs in threads of the bridge. A stage is one pass over
its input, with one partition for each subtask. A partition of a source gets the number of its
subtask. Any other partition gets the blocks of its exchanges, sorted. Spark sorts on disk if memory
does not suffice. Spark caches output that several stages or the program read, so that each stage
runs once.

DataFrames are not used, because Spark need not see the content of a block. Planning, compiling and
converting a query for each run costs the JVM twice as much as the shuffle. Only a DataFrame that
the flow reads remains a DataFrame until its rows become blocks.

Before a flow reads a DataFrame, filters and selections of the flow are applied to it as Spark
expressions. Rows that a filter drops need not leave the JVM, nor columns that the next `select`
does not read. The operators of the flow remain unchanged, and check every row again. Spark may keep
a row that the operators drop, but never drops a row that the operators keep. So Spark may apply
only a part of an expression. Values that Spark treats differently than Python (NaN, numbers that
only compare as float, text under a collation) are left to the operators.

A filter is used only if no operator before it looks at rows. A watermark strategy counts as such an
operator, because even a row that is dropped later advances event time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from aioflow.core.errors import GraphError
from aioflow.expressions import nodes as ex
from aioflow.expressions.nodes import is_expression
from aioflow.expressions.rows import columns_of
from aioflow.expressions.trees import walk
from aioflow.operators.stateless import StatelessKind
from aioflow.spark.bridge.source import frame_of
from aioflow.spark.runner.blocks import COMMITTABLES, SCHEMA, BlockRow
from aioflow.spark.runner.translate import FrameRows

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioflow.spark.runner.program import Pair, StageProgram
    from aioflow.spark.runner.translate import SparkPlan, Stage

__all__ = ["StageRdds", "narrowed", "predicate_of"]

INTEGERS = frozenset({"tinyint", "smallint", "int", "bigint"})
INT64_MAX = 2**63 - 1
EXACT_MAX = 2**53
"""Largest integer that is exact as a float."""


def narrowed(frame: Any, stage: Stage) -> Any:
    """Returns `frame` without rows that the first filters of `stage` drop, and without columns that
    the stage does not read.

    Must run in a call of the bridge. Raises GraphError if two columns have the same name.
    """
    _check_names(frame)
    types = {field.name: field.dataType.simpleString() for field in frame.schema.fields}
    filters, selected = _leading(stage)
    for expression in filters:
        predicate, whole = predicate_of(expression, types)
        if predicate is not None:
            frame = frame.where(predicate)
        if not whole:
            break  # Later operators must see the same rows, because a row may make them fail.
    if (
        selected is not None
        and isinstance(stage.root.head.source, FrameRows)
        and stage.root.head.source.gives_dicts
    ):
        read = {
            part._name
            for one in (*filters, *selected)
            for part in walk(one)
            if isinstance(part, ex.Column)
        }
        if read and read <= types.keys():
            frame = frame.select(*[_quoted(name) for name in types if name in read])
    return frame


def _check_names(frame: Any) -> None:
    """Raises GraphError if two columns have names that Spark cannot distinguish."""
    exact = frame.sparkSession.conf.get("spark.sql.caseSensitive") == "true"
    spelled: dict[str, str] = {}
    for name in frame.columns:
        as_one = name if exact else name.lower()
        if as_one in spelled:
            raise GraphError(
                f"a DataFrame that the flow reads has columns {spelled[as_one]!r} and {name!r}, "
                "which Spark takes for one: give one of "
                "them another name in the query (AS)"
            )
        spelled[as_one] = name


def _leading(stage: Stage) -> tuple[list[ex.Expr[Any]], Sequence[ex.Expr[Any]] | None]:
    """Returns the filters through which every row passes before other operators, and the
    expressions of the `select` after these filters. These are None if no `select` follows.
    """
    filters: list[ex.Expr[Any]] = []
    if stage.root.head.watermarks is not None or len(stage.root.nodes) > 1:
        return filters, None
    following = [edge for edge in (*stage.inner, *stage.outputs) if edge.source == stage.id]
    if len(following) != 1 or following[0] not in stage.inner or following[0].side is not None:
        return filters, None
    vertex = next(vertex for vertex in stage.vertices if vertex.id == following[0].target)
    for node in vertex.nodes:
        arguments = node.factory.args if isinstance(node.factory, partial) else ()
        if len(arguments) != 2:
            break
        kind, function = arguments
        if kind is StatelessKind.MAP and (fields := columns_of(function)) is not None:
            return filters, list(fields.values())
        if node.kind != "filter" or kind is not StatelessKind.FILTER or not is_expression(function):
            break
        filters.append(function)
    return filters, None


def predicate_of(expression: ex.Expr[Any], types: Mapping[str, str]) -> tuple[Any, bool]:
    """Returns a Spark column that is true wherever `expression` is true, and whether the column is
    equivalent to the expression.

    The column is None if Spark cannot filter by any part of the expression. `types` maps the names
    of the DataFrame's columns to their types in Spark.
    """
    from pyspark.sql import functions as f

    match expression:
        case ex.Binary(_operator="&"):
            left, left_whole = predicate_of(expression._left, types)
            if not left_whole:
                return left, False
            right, whole = predicate_of(expression._right, types)
            return (left & right if right is not None else left), whole
        case ex.Binary(_operator="|"):
            left, left_whole = predicate_of(expression._left, types)
            right, right_whole = predicate_of(expression._right, types)
            return (left | right, True) if left_whole and right_whole else (None, False)
        case ex.Column() if types.get(str(expression._name)) == "boolean":
            return _column(expression), True
        case ex.IsNull(_operand=ex.Column() as column) if column._name in types:
            return f.isnull(_column(column)), True
        case ex.IsIn(_operand=ex.Column() as column, _values=values):
            type_ = types.get(str(column._name), "")
            if type_ in INTEGERS | {"string"} and all(_fits(type_, value) for value in values):
                return _column(column).isin(list(values)), True
        case ex.Binary(_left=ex.Column(), _right=ex.Literal(_value=value)) if (
            expression._operator in ex.COMPARISONS
        ):
            return _compared(expression._operator, expression._left, value, types)
        case ex.Binary(_left=ex.Literal(_value=value), _right=ex.Column()) if (
            expression._operator in ex.COMPARISONS
        ):
            return _compared(_MIRRORED[expression._operator], expression._right, value, types)
    return None, False


_MIRRORED = {"==": "==", "!=": "!=", "<": ">", "<=": ">=", ">": "<", ">=": "<="}


def _compared(operator: str, column: Any, value: Any, types: Mapping[str, str]) -> tuple[Any, bool]:
    if not _fits(types.get(str(column._name), ""), value):
        return None, False
    made = _column(column)
    compare = {
        "==": made.__eq__, "!=": made.__ne__, "<": made.__lt__, "<=": made.__le__, ">": made.__gt__,
        ">=": made.__ge__
    }  # fmt: skip
    return compare[operator](value), True


def _fits(type_: str, value: Any) -> bool:
    """Whether Spark compares a column of `type_` with `value` as Python does, except that NaN may
    count as the largest number.
    """
    if type_ == "string":
        return type(value) is str
    if type_ == "boolean":
        return type(value) is bool
    if type_ in INTEGERS:
        return type(value) is int and abs(value) <= INT64_MAX
    if type_ == "double":
        return (type(value) is float and math.isfinite(value)) or (
            type(value) is int and abs(value) <= EXACT_MAX
        )
    return False


def _column(expression: Any) -> Any:
    from pyspark.sql import functions as f

    return f.col(_quoted(str(expression._name)))


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


TAKEN_AT_ONCE_BYTES = 128 << 20
"""Maximum size of results that the program fetches at once, in bytes. It fetches larger results
partition by partition.
"""

ROWS_AT_A_TIME = 32


class StageRdds:
    """The RDDs of one run.

    All mappings are by the id of the stage. `programs` has the programs, `subtasks` the number of
    subtasks of each source, and `given` the query or DataFrame that `af.io.spark` reads.
    """

    def __init__(
        self,
        session: Any,
        plan: SparkPlan,
        programs: Mapping[int, StageProgram],
        subtasks: Mapping[int, int],
        given: Mapping[int, Any],
    ) -> None:
        self._context = session.sparkContext
        self._plan = plan
        self._kept: list[Any] = []
        self._rdds: dict[int, Any] = {}
        self._results: list[Any] = []
        self._rows: Iterator[BlockRow] | None = None
        for stage in plan.stages:
            if not stage.at_home:
                frame = frame_of(session, given[stage.id]) if stage.reads_frame else None
                self._rdds[stage.id] = self._rdd(
                    stage, programs[stage.id], subtasks.get(stage.id, 0), frame
                )

    def compute(self) -> bool:
        """Runs the stages on Spark.

        Returns whether the output for this program is small enough to be fetched at once. Counting
        the rows is the cheapest way to run a stage, because rows stay bytes in Java, and need no
        second Python process. Spark reports the true size of the output that it keeps in memory.
        Output that it moved to disk is compressed there, and counts as too large.
        """
        ends, kept = [], set()
        for stage in self._plan.stages:
            if stage.at_home:
                continue
            wanted, rdd = self._wanted(stage), self._rdds[stage.id]
            is_read = bool(self._readers(stage))
            if not is_read:
                ends.append(rdd)
            elif rdd.is_cached:
                rdd._jrdd.count()  # First, because each reader would otherwise compute it.
            if wanted:
                kept.add(rdd._jrdd.rdd().id())
                self._results.append(
                    rdd.filter(partial(_is_of, frozenset(wanted))) if is_read else rdd
                )
        if ends:
            # One job computes all stages, so Spark runs independent ones at the same time.
            self._context.union(ends)._jrdd.count()
        infos = [info for info in self._context._jsc.sc().getRDDStorageInfo() if info.id() in kept]
        return sum(info.memSize() for info in infos) <= TAKEN_AT_ONCE_BYTES and not any(
            info.diskSize() for info in infos
        )

    def take(self) -> list[BlockRow]:
        """Returns all output rows for this program."""
        return (
            list(map(_row_of, self._context.union(self._results).collect()))
            if self._results
            else []
        )

    def take_some(self) -> list[BlockRow]:
        """Returns the next output rows for this program; an empty list at the end."""
        if self._rows is None:
            self._rows = self._iterate()
        return list(islice(self._rows, ROWS_AT_A_TIME))

    def release(self) -> None:
        """Lets Spark drop the output that it has cached."""
        for rdd in self._kept:
            rdd.unpersist()

    def _iterate(self) -> Iterator[BlockRow]:
        for rdd in self._results:
            yield from map(_row_of, rdd.toLocalIterator())

    def _readers(self, stage: Stage) -> set[int]:
        """Returns the ids of the stages on Spark that read the output of this stage."""
        return {
            self._plan.target_of(edge).id
            for edge in stage.outputs
            if not self._plan.target_of(edge).at_home
        }

    def _wanted(self, stage: Stage) -> list[int]:
        """Returns the ids of the stage's output edges whose rows go to this program."""
        edges = [edge.id for edge in stage.outputs if self._plan.target_of(edge).at_home]
        return [*edges, COMMITTABLES] if any(node.sink for node in stage.nodes()) else edges

    def _rdd(self, stage: Stage, program: StageProgram, subtasks: int, frame: Any) -> Any:
        from pyspark import StorageLevel

        if stage.reads_frame:
            narrow = narrowed(frame, stage)
            if not stage.by_split:
                narrow = narrow.coalesce(1)
            rdd = narrow.mapInArrow(program.on_frame, SCHEMA).rdd.map(_pair_of)
        elif stage.is_source:
            rdd = self._context.parallelize(range(subtasks), subtasks).mapPartitionsWithIndex(
                program.on_splits
            )
        else:
            rdd = self._exchange(stage).mapPartitionsWithIndex(program.on_rows)
        wanted = bool(self._wanted(stage))
        if wanted or len(self._readers(stage)) > 1:
            rdd = rdd.persist(StorageLevel.MEMORY_AND_DISK_DESER)  # Rows are bytes in Java anyway.
            self._kept.append(rdd)
        return rdd

    def _exchange(self, stage: Stage) -> Any:
        """Returns the input blocks of `stage`, sorted, with one partition for each subtask."""
        edges_of: dict[int, list[int]] = {}
        for edge in stage.inputs:
            producer = next(one for one in self._plan.stages if edge in one.outputs)
            edges_of.setdefault(producer.id, []).append(edge.id)
        parts = []
        for producer_id, edges in edges_of.items():
            rows, leaves = self._rdds[producer_id], self._plan.stage(producer_id)
            # Most stages have only one exchange, so there is nothing to filter.
            whole = len(leaves.outputs) == len(edges) and not any(
                node.sink for node in leaves.nodes()
            )
            parts.append(rows if whole else rows.filter(partial(_is_of, frozenset(edges))))
        every = parts[0] if len(parts) == 1 else self._context.union(parts)
        return every.repartitionAndSortWithinPartitions(stage.parallelism, itemgetter(0))


def _is_of(edges: frozenset[int], pair: Pair) -> bool:
    return pair[0][2] in edges


def _row_of(pair: Pair) -> BlockRow:
    return BlockRow(*pair[0], pair[1])


def _pair_of(row: Any) -> Pair:
    """Returns a row of a DataFrame with `SCHEMA` as a pair of sort key and payload."""
    target, mark, edge, producer, seq, payload = row
    return (target, mark, edge, producer, seq), bytes(payload)
