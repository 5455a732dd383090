"""The interfaces that users implement, and their contexts.

Functions are classes with optional hooks; plain callables are accepted wherever one method would
do. Methods that emit elements return None or an iterable, or are generators; `async def` is allowed
where the method's docstring says so. The contexts here are Protocols, which operators implement.
"""

from __future__ import annotations

import copy
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Sequence
from enum import Flag
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    NamedTuple,
    Never,
    Protocol,
    TypeVar,
    overload,
    runtime_checkable,
)

from aioflow.core.errors import GraphError
from aioflow.core.states import OrNone

if TYPE_CHECKING:
    import asyncio
    import concurrent.futures

    from aioflow.core.metrics import MetricGroup
    from aioflow.core.states import (
        AggregatingState,
        AggregatingStateDescriptor,
        ListState,
        ListStateDescriptor,
        MapState,
        MapStateDescriptor,
        RawKeyedState,
        ReducingState,
        ReducingStateDescriptor,
        ValueState,
        ValueStateDescriptor,
    )
    from aioflow.core.timeunits import Duration

__all__ = [
    "AggregateFunction",
    "BroadcastProcessFunction",
    "CheckpointedFunction",
    "CoProcessFunction",
    "Failed",
    "FilterFunction",
    "FlatMapFunction",
    "Function",
    "KeyedBroadcastProcessFunction",
    "KeyedCoProcessFunction",
    "KeyedProcessFunction",
    "Mailbox",
    "MapFunction",
    "OutputTag",
    "Pair",
    "ProcessContext",
    "ProcessFunction",
    "ProcessWindowFunction",
    "Repeated",
    "RuntimeContext",
    "TimerService",
    "TriggerResult",
    "WindowContext",
    "WindowResult",
    "fresh",
    "has_operator_state",
]

T = TypeVar("T")
U = TypeVar("U")
K = TypeVar("K")
IN = TypeVar("IN")
IN1 = TypeVar("IN1")
IN2 = TypeVar("IN2")
OUT = TypeVar("OUT")
ACC = TypeVar("ACC")


class OutputTag(Generic[T]):
    """The name of a side output. Tags are equal by name: `af.OutputTag[Reading]("late")`."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        if not isinstance(name, str) or not name:
            raise ValueError(f"an OutputTag needs a name that is not empty, got {name!r}")
        self.name = name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OutputTag) and other.name == self.name

    def __hash__(self) -> int:
        return hash(("OutputTag", self.name))

    def __repr__(self) -> str:
        return f"OutputTag({self.name!r})"


class Failed(NamedTuple, Generic[T]):
    """An element whose processing failed, emitted to the side output given as `on_error=`."""

    value: T
    """The input element; for a malformed line, its bytes."""
    error: str
    """The message of the error; for a malformed line it names file and line."""
    error_type: str
    """Name of the exception's class."""
    operator: str
    """Name of the operator that failed."""
    timestamp: int | None
    """Timestamp of the element in ms, None without event time."""


class WindowResult(NamedTuple, Generic[K, OUT]):
    """One result of a window.

    `start` (inclusive) and `end` (exclusive) are in ms; None for count and global windows.
    """

    key: K
    start: int | OrNone
    end: int | OrNone
    value: OUT


class Pair(NamedTuple, Generic[T, U]):
    """A pair of elements that a join has found."""

    left: T
    right: U


class TriggerResult(Flag):
    """The decision of a trigger on its window: FIRE emits the result, PURGE drops the contents."""

    CONTINUE = 0
    FIRE = 1
    PURGE = 2
    FIRE_AND_PURGE = 3


class TimerService(Protocol):
    """The timers of the current key, and the clocks."""

    @property
    def current_watermark(self) -> int | None: ...
    @property
    def current_processing_time(self) -> int: ...
    def register_event_time_timer(self, timestamp: int) -> None: ...
    def register_processing_time_timer(self, timestamp: int) -> None: ...
    def delete_event_time_timer(self, timestamp: int) -> None: ...
    def delete_processing_time_timer(self, timestamp: int) -> None: ...


class Repeated(Protocol):
    """A callback that runs periodically."""

    def cancel(self) -> None:
        """Prevents all further calls. Idempotent."""


class Mailbox(Protocol):
    """The mailbox of a function: callbacks run in its task, between two elements.

    A callback may use the state and the attributes of the function. With `key=`, the callback sees
    the state of that key, which must belong to this subtask. Without `key=`, the callback has no
    current key. A callback may be `async def`: the task then does nothing else until the callback
    ends. A callback cannot emit elements. Mail is not part of a checkpoint. `MailboxClosed` is
    raised once the task has ended.
    """

    def execute(self, fn: Callable[..., object], *args: Any, key: Any = ...) -> None:
        """Runs `fn(*args)` between two elements. An error in `fn` fails the job, with a note that
        names the operator. Call this in the task's thread only.
        """

    def submit(
        self, fn: Callable[..., T | Awaitable[T]], *args: Any, key: Any = ...
    ) -> asyncio.Future[T]:
        """Runs `fn(*args)` like `execute`, and returns a future of the result. An error is set on
        the future and does not fail the job. The future is cancelled if the task ends first.
        """

    def execute_threadsafe(
        self, fn: Callable[..., object], *args: Any, key: Any = ...
    ) -> concurrent.futures.Future[None]:
        """Does the same as `execute`, from any thread. Returns a future that is done when `fn` has
        run.
        """

    async def yield_(self) -> None:
        """Waits for one mail of this function, and runs it. Needed by `async def` methods that wait
        for a callback that they have submitted. No timer fires meanwhile.
        """

    def schedule_at_fixed_rate(
        self, fn: Callable[..., object], period: Duration, *args: Any, key: Any = ...
    ) -> Repeated:
        """Runs `fn(*args)` once every `period`, first after one period. Missed calls are made up
        for. No call is made after the end of the input.
        """

    def schedule_with_fixed_delay(
        self, fn: Callable[..., object], period: Duration, *args: Any, key: Any = ...
    ) -> Repeated:
        """Runs `fn(*args)` after one period, and again one `period` after each run has ended."""


class RuntimeContext(Protocol):
    """The context of a function in its subtask; valid from `open` on."""

    @property
    def task_name(self) -> str: ...
    @property
    def subtask_index(self) -> int: ...
    @property
    def parallelism(self) -> int: ...
    @property
    def max_parallelism(self) -> int: ...
    @property
    def attempt(self) -> int: ...
    @property
    def metrics(self) -> MetricGroup: ...
    @property
    def is_restored(self) -> bool:
        """Whether the operator starts with the state of a checkpoint, even if this subtask's share
        of it is empty.
        """

    @property
    def operator_state(self) -> Any:
        """Operator state (list, union list, broadcast) of this subtask."""

    @property
    def mailbox(self) -> Mailbox:
        """Runs callbacks in this subtask, between two elements. Not on Spark."""

    @overload  # `ValueStateDescriptor("last", default=None)` has no type.
    def get_state(self, descriptor: ValueStateDescriptor[Never]) -> ValueState[Any]: ...
    @overload
    def get_state(self, descriptor: ValueStateDescriptor[T]) -> ValueState[T]: ...
    def get_list_state(self, descriptor: ListStateDescriptor[T]) -> ListState[T]: ...
    def get_map_state(self, descriptor: MapStateDescriptor[K, U]) -> MapState[K, U]: ...
    def get_reducing_state(self, descriptor: ReducingStateDescriptor[T]) -> ReducingState[T]: ...
    def get_aggregating_state(
        self, descriptor: AggregatingStateDescriptor[T]
    ) -> AggregatingState[T]: ...
    def get_raw_keyed_state(self) -> RawKeyedState:
        """Returns the raw keyed state of this subtask, which the function writes and reads as
        bytes.
        """


class ProcessContext(Protocol):
    """The context of `process_element` and `on_timer`; valid during the call."""

    @property
    def timestamp(self) -> int | OrNone:
        """Event time of the element in ms. None without a watermark strategy."""

    @property
    def current_key(self) -> Any:
        """The key of the element as the key function returned it; in `on_timer` the key for which
        the timer was set.

        Values that are equal, such as 1 and True, are one key.
        """

    @property
    def current_watermark(self) -> int | None: ...
    @property
    def timer_service(self) -> TimerService: ...
    @property
    def metadata(self) -> Any: ...
    def output(self, tag: OutputTag[T], value: T) -> None: ...
    def get_broadcast_state(self, descriptor: MapStateDescriptor[K, U]) -> Any: ...


class WindowContext(Protocol):
    """The context of `ProcessWindowFunction.process`."""

    @property
    def window(self) -> Any: ...
    @property
    def current_watermark(self) -> int | None: ...
    @property
    def current_processing_time(self) -> int: ...
    @property
    def window_state(self) -> Any: ...
    @property
    def global_state(self) -> Any: ...
    def output(self, tag: OutputTag[T], value: T) -> None: ...


class Function:
    """Base of the function classes.

    `open` is called before the first element. `close` is called exactly once, also after a failure
    or a cancellation.
    """

    def open(self, ctx: RuntimeContext) -> Awaitable[None] | None:
        """Prepares the function. Keyed state is declared here. May be `async def`."""
        return None

    def close(self) -> Awaitable[None] | None:
        """Releases what `open` has acquired. May be `async def`. Cannot emit elements."""
        return None


class MapFunction(Function, Generic[IN, OUT]):
    """A function that emits one element for each element.

    `map` may be `async def`: each call is then awaited.
    """

    def map(self, value: IN, /) -> OUT | Awaitable[OUT]:
        raise TypeError(f"{type(self).__name__} must define map(self, value)")


class FilterFunction(Function, Generic[IN]):
    """A function that keeps the elements for which `filter` is true. `filter` may be `async
    def`.
    """

    def filter(self, value: IN, /) -> bool | Awaitable[bool]:
        raise TypeError(f"{type(self).__name__} must define filter(self, value)")


class FlatMapFunction(Function, Generic[IN, OUT]):
    """A function that emits any number of elements for each element.

    `flat_map` may be `async def`, or an async generator.
    """

    def flat_map(
        self, value: IN, /
    ) -> Iterable[OUT] | Awaitable[Iterable[OUT]] | AsyncIterable[OUT]:
        raise TypeError(f"{type(self).__name__} must define flat_map(self, value)")


class ProcessFunction(Function, Generic[IN, OUT]):
    """A function that can read the time of each element and emit to side outputs.

    `process_element` returns an iterable or None, or is a generator.
    """

    def process_element(self, value: IN, ctx: ProcessContext, /) -> Any:
        raise TypeError(f"{type(self).__name__} must define process_element(self, value, ctx)")

    def on_timer(self, timestamp: int, ctx: ProcessContext) -> Any:
        """Handles a due timer of the current key. May return the same results as
        `process_element`.
        """
        return None

    def finish(self) -> Any:
        """Handles the end of all input; may emit like `process_element`.

        Not called after a cancel or a stop without drain.
        """
        return None


class KeyedProcessFunction(ProcessFunction[IN, OUT], Generic[K, IN, OUT]):
    """A `ProcessFunction` with keyed state and timers. Its type parameters are the types of the
    key, the input and the output.
    """


class CoProcessFunction(Function, Generic[IN1, IN2, OUT]):
    """A function that processes the elements of two inputs."""

    def process_element1(self, value: IN1, ctx: ProcessContext, /) -> Any:
        raise TypeError(f"{type(self).__name__} must define process_element1(self, value, ctx)")

    def process_element2(self, value: IN2, ctx: ProcessContext, /) -> Any:
        raise TypeError(f"{type(self).__name__} must define process_element2(self, value, ctx)")

    def on_timer(self, timestamp: int, ctx: ProcessContext) -> Any:
        return None


class KeyedCoProcessFunction(CoProcessFunction[IN1, IN2, OUT], Generic[K, IN1, IN2, OUT]):
    """A `CoProcessFunction` on two keyed streams, with keyed state and timers."""


class BroadcastProcessFunction(Function, Generic[IN1, IN2, OUT]):
    """A function of one stream, and a broadcast stream whose elements every subtask gets.

    `ctx.get_broadcast_state` is available in the methods for both streams.
    """

    def process_element(self, value: IN1, ctx: ProcessContext, /) -> Any:
        raise TypeError(f"{type(self).__name__} must define process_element(self, value, ctx)")

    def process_broadcast_element(self, value: IN2, ctx: ProcessContext, /) -> Any:
        raise TypeError(
            f"{type(self).__name__} must define process_broadcast_element(self, value, ctx)"
        )

    def on_timer(self, timestamp: int, ctx: ProcessContext) -> Any:
        return None


class KeyedBroadcastProcessFunction(
    BroadcastProcessFunction[IN1, IN2, OUT], Generic[K, IN1, IN2, OUT]
):
    """A `BroadcastProcessFunction` whose stream that is not broadcast is keyed."""


class ProcessWindowFunction(Function, Generic[IN, OUT, K]):
    """A function that processes the contents of one window when it fires."""

    def process(self, key: K, ctx: WindowContext, elements: Sequence[IN]) -> Iterable[OUT] | None:
        raise TypeError(f"{type(self).__name__} must define process(self, key, ctx, elements)")

    def clear(self, ctx: WindowContext) -> None:
        """Clears `ctx.window_state`. Called when the window is removed."""


class AggregateFunction(Generic[IN, ACC, OUT]):
    """A function that folds elements into an accumulator.

    In `merge(a, b)`, all elements of `a` came before all of `b`.
    """

    def create_accumulator(self) -> ACC:
        raise TypeError(f"{type(self).__name__} must define create_accumulator(self)")

    def add(self, value: IN, accumulator: ACC) -> ACC:
        """Returns the accumulator with `value` added. This may be `accumulator` itself, changed in
        place, or a new object.
        """
        raise TypeError(f"{type(self).__name__} must define add(self, value, accumulator)")

    def get_result(self, accumulator: ACC) -> OUT:
        raise TypeError(f"{type(self).__name__} must define get_result(self, accumulator)")

    def merge(self, a: ACC, b: ACC) -> ACC:
        raise TypeError(
            f"{type(self).__name__} must define merge(self, a, b): session windows need it"
        )


@runtime_checkable
class CheckpointedFunction(Protocol):
    """A function with operator state.

    `initialize_state` is called before `open`, `snapshot_state` between two elements.
    `snapshot_state` may be `async def`: until it ends, its subtask processes no element.
    """

    def initialize_state(self, ctx: Any) -> None: ...
    def snapshot_state(self, ctx: Any) -> Awaitable[None] | None: ...


def has_operator_state(function: Any) -> bool:
    """Returns whether `function`, an instance or a class, is a CheckpointedFunction."""
    return issubclass(
        function if isinstance(function, type) else type(function), CheckpointedFunction
    )


def fresh(function: Any) -> Any:
    """Returns a function object for one subtask.

    A function class is instantiated, an instance of a function class is copied, and any other
    function is shared. So two subtasks, and two runs of the same flow, never share an attribute.
    """
    if isinstance(function, type):
        # Other classes are ordinary functions: map(str) makes strings.
        return (
            function()
            if issubclass(function, (Function, AggregateFunction, CheckpointedFunction))
            else function
        )
    if isinstance(function, (Function, AggregateFunction, CheckpointedFunction)):
        try:
            return copy.deepcopy(function)
        except Exception as error:
            raise GraphError(
                f"{type(function).__name__} cannot be copied for its subtasks "
                f"({type(error).__name__}: {error}): keep connections, locks "
                "and files out of __init__ and take them in open(), or through af.use(resource)"
            ) from error
    return function
