"""Connects two streams of different types to one operator, and the broadcast state pattern."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from aioflow.api.build import OperatorOptions, Upstream, add_operator, fresh, is_keyed
from aioflow.api.keyed import KeyedStream, keyed_stream
from aioflow.api.steps import HalfStream
from aioflow.api.streams import DataStream
from aioflow.core.errors import GraphError
from aioflow.core.explained_calls import explained_methods
from aioflow.core.functions import (
    BroadcastProcessFunction,
    CoProcessFunction,
    KeyedBroadcastProcessFunction,
    KeyedCoProcessFunction,
)
from aioflow.operators.async_process import (
    AsyncBroadcastProcessOperator,
    AsyncCoProcessOperator,
    is_async_process,
)
from aioflow.operators.connected_rows import ConnectedRowsOperator
from aioflow.operators.function_classes import check_function_class
from aioflow.operators.plain_functions import check_plain
from aioflow.operators.process import BroadcastProcessOperator, CoProcessOperator
from aioflow.operators.stateless import StatelessKind
from aioflow.operators.userfunction import has_operator_state

if TYPE_CHECKING:
    from aioflow.core.state_descriptors import MapStateDescriptor
    from aioflow.expressions.nodes import Expr
    from aioflow.operators.operator import Operator

__all__ = ["BroadcastStream", "ConnectedStreams"]

T = TypeVar("T")
U = TypeVar("U")
R = TypeVar("R")


class BroadcastStream(HalfStream, Generic[U]):
    """A stream that every subtask receives, with the broadcast state that it may change.

    Made by `stream.broadcast(*descriptors)`.
    """

    completed_by = "elements.connect(it).process(BroadcastProcessFunction)"

    def __init__(
        self, stream: DataStream[U], descriptors: tuple[MapStateDescriptor[Any, Any], ...]
    ) -> None:
        self.stream = stream
        self.descriptors = descriptors


@explained_methods
class ConnectedStreams(HalfStream, Generic[T, U]):
    """Two streams that one operator reads.

    With a broadcast stream on the right, `process` takes a BroadcastProcessFunction.
    """

    completed_by = "map(f1, f2), flat_map(f1, f2) or process(fn)"

    def __init__(self, left: DataStream[T], right: DataStream[U] | BroadcastStream[U]) -> None:
        self._left = left
        self._broadcast = isinstance(right, BroadcastStream)
        self._right: DataStream[U] = right.stream if isinstance(right, BroadcastStream) else right
        if not isinstance(self._right, DataStream):
            raise GraphError(
                f"connect() takes a stream or stream.broadcast(...), got {type(right).__name__}"
            )
        if left.flow is not self._right.flow:
            raise GraphError(
                f"connect() of streams of two flows, {left.flow.name!r} and "
                f"{self._right.flow.name!r}: build both in one flow"
            )

    def key_by(
        self,
        left: Callable[[T], Any] | Expr[Any],
        right: Callable[[U], Any] | Expr[Any] | None = None,
    ) -> ConnectedStreams[T, U]:
        """Partitions both streams by key. A broadcast stream gets no key."""
        if self._broadcast:
            if right is not None:
                raise GraphError(
                    "key_by of a broadcast connection takes one key, of the elements: the other "
                    "side goes to every subtask"
                )
            raise GraphError(
                "key the element side before connecting: "
                "stream.key_by(k).connect(rules.broadcast(descriptor))"
            )
        if right is None:
            raise GraphError("key_by of connected streams takes two keys, one for each side")
        return ConnectedStreams(
            keyed_stream(self._left, left, "key_by", " of the left"),
            keyed_stream(self._right, right, "key_by", " of the right"),
        )

    def map(
        self,
        f1: Callable[[T], R],
        f2: Callable[[U], R],
        *,
        name: str | None = None,
        uid: str | None = None,
        parallelism: int | None = None,
    ) -> DataStream[R]:
        """Emits one element for each element: `f1` for elements of the left, `f2` for those of the
        right.
        """
        return self._rows(StatelessKind.MAP, f1, f2, OperatorOptions(name, uid, parallelism))

    def flat_map(
        self,
        f1: Callable[[T], Iterable[R]],
        f2: Callable[[U], Iterable[R]],
        *,
        name: str | None = None,
        uid: str | None = None,
        parallelism: int | None = None,
    ) -> DataStream[R]:
        """Emits any number of elements for each element: `f1` for the left, `f2` for the right."""
        return self._rows(StatelessKind.FLAT_MAP, f1, f2, OperatorOptions(name, uid, parallelism))

    def process(
        self,
        fn: CoProcessFunction[T, U, R]
        | type[CoProcessFunction[T, U, R]]
        | BroadcastProcessFunction[T, U, R]
        | type[BroadcastProcessFunction[T, U, R]],
        *,
        name: str | None = None,
        uid: str | None = None,
        parallelism: int | None = None,
    ) -> DataStream[R]:
        """Calls a CoProcessFunction, or with a broadcast stream a BroadcastProcessFunction.

        Keyed streams take the keyed variants: KeyedCoProcessFunction,
        KeyedBroadcastProcessFunction.
        """
        wanted = BroadcastProcessFunction if self._broadcast else CoProcessFunction
        given = fn if isinstance(fn, type) else type(fn)
        if not issubclass(given, wanted):
            raise GraphError(
                f"process() of these connected streams takes a {wanted.__name__}, got "
                f"{given.__name__}"
            )
        check_function_class(fn)
        keyed_kinds = (KeyedCoProcessFunction, KeyedBroadcastProcessFunction)
        if issubclass(given, keyed_kinds) and not self._is_keyed:
            one_is = isinstance(self._left, KeyedStream) or isinstance(self._right, KeyedStream)
            which = (
                "both streams keyed, and one of them is not"
                if one_is and not self._broadcast
                else "keyed streams"
            )
            raise GraphError(f"{given.__name__} needs {which}: put key_by(...) before process(...)")
        waits = is_async_process(fn)
        operator: type[Operator]
        if self._broadcast:
            operator = AsyncBroadcastProcessOperator if waits else BroadcastProcessOperator
        else:
            operator = AsyncCoProcessOperator if waits else CoProcessOperator
        factory = partial(_process, operator, fn, {"keyed": self._is_keyed} if waits else {})
        return self._add(
            "process", factory, OperatorOptions(name, uid, parallelism), function=fn, stateful=True
        )

    @property
    def _is_keyed(self) -> bool:
        """Whether the operator has keyed state and timers.

        A key on one side alone only distributes its elements.
        """
        return is_keyed(
            self._left.upstreams
            if self._broadcast
            else [*self._left.upstreams, *self._right.upstreams]
        )

    def _rows(
        self, kind: StatelessKind, f1: Any, f2: Any, options: OperatorOptions
    ) -> DataStream[Any]:
        if self._broadcast:
            raise GraphError(
                f"{kind.value}() of a broadcast connection would lose its state: use "
                "process(BroadcastProcessFunction)"
            )
        for function in (f1, f2):
            check_plain(function, f"{kind.value} of connected streams", "value", kind.value)
        stateful = [function for function in (f1, f2) if has_operator_state(function)]
        if len(stateful) == 2:
            raise GraphError(
                f"{kind.value} of connected streams: both functions have operator state, which "
                "would be one and the same, as the operator "
                "is one: write one CoProcessFunction for process(...)"
            )
        return self._add(
            kind.value,
            partial(_rows, kind, f1, f2),
            options,
            function=None,
            stateful=bool(stateful),
        )

    def _add(
        self, kind: str, factory: Any, options: OperatorOptions, **more: Any
    ) -> DataStream[Any]:
        flow = self._left.flow
        inputs: list[list[Upstream]] = [self._left.upstreams, self._right.upstreams]
        event_time = (
            None
            if not self._broadcast
            else flow.graph.nodes[self._left.upstreams[0].node_id].event_time
        )
        node = add_operator(
            flow.graph,
            kind,
            inputs,
            factory,
            options,
            event_time=event_time,
            keyed=self._is_keyed,
            **more,
        )
        return DataStream(flow, [Upstream(node.id)])


def _process(operator: Callable[..., Operator], fn: Any, options: dict[str, Any]) -> Operator:
    return operator(fresh(fn), **options)


def _rows(kind: StatelessKind, f1: Any, f2: Any) -> Operator:
    return ConnectedRowsOperator(kind, fresh(f1), fresh(f2))
