"""Joins of two streams: by window, in groups, and by interval."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar

from aioflow.api.build import OperatorOptions, Upstream, add_operator, fresh
from aioflow.api.hints import window_time_hint
from aioflow.api.keyed import KeyedStream, keyed_stream
from aioflow.api.steps import HalfStream
from aioflow.api.streams import DataStream, operator_options
from aioflow.api.windows import require_event_time, without_event_time
from aioflow.core.errors import GraphError
from aioflow.core.explained_calls import explained_methods, hinted
from aioflow.core.functions import Pair
from aioflow.core.timeunits import to_ms
from aioflow.operators.joins import CoGroupOperator, IntervalJoinOperator
from aioflow.operators.plain_functions import check_plain
from aioflow.operators.window_join import WindowJoinOperator
from aioflow.operators.window_plan import check_window

if TYPE_CHECKING:
    from aioflow.core.functions import ProcessContext
    from aioflow.expressions.nodes import Expr
    from aioflow.operators.operator import Operator
    from aioflow.operators.triggers import Trigger
    from aioflow.operators.windowing import Evictor, WindowAssigner

__all__ = ["CoGroupedStreams", "IntervalJoin", "JoinedStreams"]

T = TypeVar("T")
U = TypeVar("U")
K = TypeVar("K")
R = TypeVar("R")

KEYS = "where(key of the left).equal_to(key of the right)"

STEPS = "where(key).equal_to(key).window(assigner)"


@explained_methods
class _TwoStreams(HalfStream, Generic[T, U]):
    """A join or co-group of two streams whose keys and window are not complete yet.

    `where`, `equal_to` and `window` set them, one after the other.
    """

    completed_by = f"{STEPS}.apply(fn)"

    kind = ""
    takes = ""
    operator: type[CoGroupOperator]

    def __init__(self, left: DataStream[T], right: DataStream[U]) -> None:
        self._left = left
        self._right = right
        self._left_keyed: KeyedStream[Any, T] | None = None
        self._right_keyed: KeyedStream[Any, U] | None = None
        self._window: (
            tuple[WindowAssigner, Trigger[Any] | None, Evictor[Any] | None, int] | None
        ) = None

    def where(self, key: Callable[[T], Any] | Expr[Any]) -> Self:
        """Sets the key of the left elements: a function or an expression."""
        self._left_keyed = keyed_stream(self._left, key, "where", f" of the {self.kind}")
        return self

    def equal_to(self, key: Callable[[U], Any] | Expr[Any]) -> Self:
        """Sets the key of the right elements: a function or an expression."""
        if self._left_keyed is None:
            raise GraphError(
                f"{self.kind}: where(key of the left) comes before equal_to(key of the right)"
            )
        self._right_keyed = keyed_stream(self._right, key, "equal_to", f" of the {self.kind}")
        return self

    @hinted(window_time_hint)
    def window(
        self,
        assigner: WindowAssigner,
        *,
        trigger: Trigger[Any] | None = None,
        evictor: Evictor[Any] | None = None,
        lateness: str | timedelta = "0s",
    ) -> Self:
        """Sets the window in which elements of both sides meet.

        In a co-group, a key that occurs on only one side makes a group too. Elements later than
        `lateness` are dropped.
        """
        if self._left_keyed is None or self._right_keyed is None:
            raise GraphError(f"{self.kind}: where(...).equal_to(...) come before window(...)")
        lateness_ms = to_ms(lateness, "lateness")
        check_window(assigner, trigger, evictor, lateness_ms)
        require_event_time(self._left_keyed, assigner, f"the left of the {self.kind}, ")
        require_event_time(self._right_keyed, assigner, f"the right of the {self.kind}, ")
        self._window = (assigner, trigger, evictor, lateness_ms)
        return self

    def _apply(
        self, fn: Any, options: OperatorOptions, said: str = "apply(...)"
    ) -> DataStream[Any]:
        """Adds the operator. `said` is the user's call, for error messages."""
        if self._window is None or self._left_keyed is None or self._right_keyed is None:
            raise GraphError(
                f"{self.kind}: where(...).equal_to(...).window(...) come before {said}"
            )
        check_plain(fn, f"apply of {self.kind}", self.takes)
        assigner, trigger, evictor, lateness_ms = self._window
        factory = partial(_window_join, self.operator, assigner, fn, trigger, evictor, lateness_ms)
        flow = self._left.flow
        inputs = [self._left_keyed.upstreams, self._right_keyed.upstreams]
        remark = f"per window, {assigner}"
        node = add_operator(
            flow.graph,
            self.kind,
            inputs,
            factory,
            options,
            function=fn,
            stateful=True,
            remark=remark,
        )
        return DataStream(flow, [Upstream(node.id)])


def _window_join(
    operator: type[CoGroupOperator],
    assigner: WindowAssigner,
    fn: Any,
    trigger: Trigger[Any] | None,
    evictor: Evictor[Any] | None,
    lateness_ms: int,
) -> Operator:
    return operator(assigner, fresh(fn), trigger=trigger, evictor=evictor, lateness_ms=lateness_ms)


@explained_methods
class JoinedStreams(_TwoStreams[T, U]):
    """A window join: pairs of elements from both sides with the same key, in the same window.

    Written as `a.join(b).where(k).equal_to(k).window(w).apply(fn)`.
    """

    completed_by = f"{STEPS} and .apply(fn), .pairs() or .select(name=af.left.field)"
    kind = "join"
    takes = "left, right"
    operator = WindowJoinOperator
    elsewhere: ClassVar[Mapping[str, str]] = {
        "process": "apply(fn), with fn(left, right), or pairs().process(fn)",
        "on": KEYS,
    }

    def apply(
        self,
        fn: Callable[[T, U], R],
        *,
        name: str | None = None,
        uid: str | None = None,
        parallelism: int | None = None,
    ) -> DataStream[R]:
        """Emits one row, `fn(left, right)`, for each pair. Its timestamp is the window's `end -
        1`.
        """
        return self._apply(fn, OperatorOptions(name, uid, parallelism))

    def pairs(
        self, *, name: str | None = None, uid: str | None = None, parallelism: int | None = None
    ) -> DataStream[Pair[T, U]]:
        """Emits each pair as `Pair(left, right)`. Its timestamp is the window's `end - 1`.

        With tumbling and sliding windows it can run on columns.
        """
        return self._apply(Pair, OperatorOptions(name, uid, parallelism), "pairs()")

    def select(
        self, columns: dict[str, Any] | None = None, /, **named: Any
    ) -> DataStream[dict[str, Any]]:
        """Emits a dict row for each pair: `select(name=af.left.name, item=af.right.id)`.

        It is short for `pairs()` and `select`. If `name=`, `uid=` and `parallelism=` are no
        expressions, they are options of the join, which has the state. `on_error=tag` applies to
        the columns. To give a column such a name as well, write `pairs(uid="met").select(uid=...)`.
        """
        own = operator_options(named)
        return self._apply(Pair, own, "select(...)").select(
            columns, **{"parallelism": own.parallelism, **named}
        )


@explained_methods
class CoGroupedStreams(_TwoStreams[T, U]):
    """A co-group: all elements of both sides with the same key, in the same window.

    Written as `a.co_group(b).where(k).equal_to(k).window(w).apply(fn)`.
    """

    kind = "co_group"
    takes = "key, lefts, rights"
    operator = CoGroupOperator
    elsewhere: ClassVar[Mapping[str, str]] = {
        "process": "apply(fn), with fn(key, lefts, rights)",
        "on": KEYS,
    }

    def apply(
        self,
        fn: Callable[[Any, list[T], list[U]], Iterable[R]],
        *,
        name: str | None = None,
        uid: str | None = None,
        parallelism: int | None = None,
    ) -> DataStream[R]:
        """Emits any number of rows, `fn(key, lefts, rights)`, for each group.

        Their timestamp is the window's `end - 1`.
        """
        return self._apply(fn, OperatorOptions(name, uid, parallelism))


@explained_methods
class IntervalJoin(HalfStream, Generic[K, T, U]):
    """Pairs of elements with the same key whose times are within an interval of each other.

    The time of the right element minus that of the left is from `lower` to `upper`, both included.
    """

    completed_by = "process(fn)"
    elsewhere: ClassVar[Mapping[str, str]] = {
        "apply": "process(fn), with fn(left, right, ctx), which gives any number of rows"
    }

    def __init__(
        self,
        left: KeyedStream[K, T],
        right: KeyedStream[K, U],
        lower: str | timedelta,
        upper: str | timedelta,
    ) -> None:
        self._left = left
        self._right = right
        self._bounds = (to_ms(lower, "lower"), to_ms(upper, "upper"))
        if self._bounds[0] > self._bounds[1]:
            raise GraphError(
                f"interval_join: lower {lower!r} is after upper {upper!r}; no pair can match"
            )
        for side, stream in (("left", left), ("right", right)):
            if not isinstance(stream, KeyedStream):
                raise GraphError(
                    f"interval_join needs keyed streams, got {stream!r} on the {side}: put "
                    "key_by(...) before it"
                )
            if not stream.has_event_time:
                raise GraphError(
                    f"interval_join of {stream!r} on the {side} needs event time, but "
                    f"{without_event_time(stream)}"
                )

    def process(
        self,
        fn: Callable[[T, U, ProcessContext], Iterable[R]],
        *,
        name: str | None = None,
        uid: str | None = None,
        parallelism: int | None = None,
    ) -> DataStream[R]:
        """Emits the rows of `fn(left, right, ctx)` for each pair.

        Their timestamp is the larger of the two elements' times.
        """
        check_plain(fn, "process of interval_join", "left, right, ctx", "process_element")
        factory = partial(_interval_join, fn, *self._bounds)
        flow = self._left.flow
        inputs = [self._left.upstreams, self._right.upstreams]
        options = OperatorOptions(name, uid, parallelism)
        node = add_operator(
            flow.graph, "interval_join", inputs, factory, options, function=fn, stateful=True
        )
        return DataStream(flow, [Upstream(node.id)])


def _interval_join(fn: Any, lower_ms: int, upper_ms: int) -> Operator:
    return IntervalJoinOperator(fresh(fn), lower_ms, upper_ms)
