"""Runs the operators of a stream, or one function, under the control of a test. All calls are
synchronous, and the test advances the clock.

    h = OperatorHarness(Alert(), key=lambda r: r.sensor)
    h.push(Reading("a", 95), ts=1_000)
    h.watermark(60_000)
    assert h.take() == ["a: hot"]

The harness uses the runtime's own chain, mailbox, state backend, timers and watermark valve, on an
event loop of its own. So it works in plain tests and inside coroutines alike. A call returns when
nothing is left to do at the present time. The call that led to an error of user code raises this
error, and the harness cannot be used afterwards. Changing an input or an emitted value raises
`ValueMutated`.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, overload

from aioflow.api.streams import LATE
from aioflow.core.errors import StateError
from aioflow.core.functions import OutputTag
from aioflow.testing.harness_plan import HarnessPlan, plan_of
from aioflow.testing.harness_task import HarnessTask, OperatorStateSnapshot, Record

if TYPE_CHECKING:
    from aioflow.api.streams import DataStream

__all__ = ["HarnessSnapshot", "ManualClock", "OperatorHarness", "Timer"]


class ManualClock:
    """A wall clock in ms that a test moves.

    Several harnesses may share one clock. Each harness catches up with it when it is used next.
    """

    __slots__ = ("now_ms",)

    def __init__(self, now_ms: int = 0) -> None:
        self.now_ms = now_ms

    def advance(self, ms: int) -> None:
        """Lets `ms` milliseconds pass."""
        if ms < 0:
            raise ValueError(f"time cannot go back, got {ms} ms")
        self.now_ms += ms


class Timer(NamedTuple):
    """A registered timer that has not fired yet."""

    timestamp: int
    """Time at which the timer fires, in ms."""
    key: Any
    time: str
    """Kind of the timer: "event" or "processing"."""
    window: Any = None
    """(start, end) of the window to which the timer belongs; None for a timer of a process
    function.
    """


@dataclass(frozen=True, slots=True)
class HarnessSnapshot:
    """Keyed state, timers and operator state of all operators of a harness, and the plan that made
    the operators. Can be pickled.

    aioflow's codec can encode `operators` if it can encode the values in the state.
    """

    plan: HarnessPlan
    operators: list[OperatorStateSnapshot]
    now_ms: int

    def __reduce__(self) -> Any:
        import cloudpickle

        # Functions of a test are often lambdas or local: they are pickled by value, as for a
        # worker.
        return _unpickled, (cloudpickle.dumps(self.plan), self.operators, self.now_ms)


class OperatorHarness:
    """Runs the operators of a stream, or one function.

    For a stream, the harness runs the operators of its chain up to the operator that made the
    stream. It does not run the source: push the elements that the first operator would read. Any
    other `stream_or_fn` is one of: a function of one element (mapped; a generator function is
    flat-mapped; `async def` is awaited), a function of (value, ctx), an object or class of the
    function classes, an expression, an AggregateFunction (as a running aggregate), or an Operator.
    If the test made an object, this very object runs, not a copy.

    `key` is the key function of one element; a tuple of two functions gives each input its own. A
    keyed stream has a key function already. `clock` is a ManualClock or the start time in ms;
    None means 0. Leaving `with`, or `close()`, closes the functions.
    """

    def __init__(
        self,
        stream_or_fn: DataStream[Any] | Any,
        key: Any = None,
        clock: ManualClock | int | None = None,
    ) -> None:
        first, later = plan_of(stream_or_fn, key)
        self._begin(first, later, clock, 1, 0, [])

    @classmethod
    def restore(
        cls,
        snapshot: HarnessSnapshot | Sequence[HarnessSnapshot],
        parallelism: int = 1,
        index: int = 0,
        *,
        stream_or_fn: DataStream[Any] | Any = None,
        key: Any = None,
        clock: ManualClock | int | None = None,
    ) -> Self:
        """Returns a harness of subtask `index` of `parallelism`, with the state of `snapshot` or of
        the snapshots of all former subtasks.

        `stream_or_fn` (with `key`) is another version of the program; None runs the program of the
        snapshot. Without `clock`, time continues from the time of the snapshot.
        """
        former = [snapshot] if isinstance(snapshot, HarnessSnapshot) else list(snapshot)
        if not former:
            raise ValueError(
                "restore() got no snapshot, expected one, or those of all former subtasks"
            )
        first, later = (
            (former[0].plan, former[0].plan) if stream_or_fn is None else plan_of(stream_or_fn, key)
        )
        harness = cls.__new__(cls)
        now_ms = max(one.now_ms for one in former)
        harness._begin(
            first,
            later,
            now_ms if clock is None else clock,
            parallelism,
            index,
            [one.operators for one in former],
        )
        return harness

    def _begin(
        self,
        plan: HarnessPlan,
        later: HarnessPlan,
        clock: ManualClock | int | None,
        parallelism: int,
        index: int,
        restored: list[list[OperatorStateSnapshot]],
    ) -> None:
        self._plan = later
        self._clock = (
            clock if isinstance(clock, ManualClock) else ManualClock(0 if clock is None else clock)
        )
        self._task = task = HarnessTask(plan, self._clock.now_ms, parallelism, index, restored)
        self._clock.now_ms = max(self._clock.now_ms, task.loop.wall_ms())
        # If a test does not close its harness, suspended coroutines must not be left to the garbage
        # collector.
        self._finalizer = weakref.finalize(self, _close_quietly, task)

    # What goes in.

    def push(self, v: Any, ts: int | None = None, input: int = 1) -> None:
        """Puts one element with timestamp `ts` (ms) into input 1 or 2."""
        self._catch_up().push(v, ts, self._channel(input))

    def watermark(self, ms: int, input: int = 1) -> None:
        """Raises the watermark of one input to `ms`; the operator's watermark is the minimum over
        the inputs that are not idle.
        """
        self._catch_up().advance_watermark(ms, self._channel(input))

    def idle(self, input: int = 1) -> None:
        """Makes an input idle until its next element or watermark.

        An idle input does not hold the watermark back.
        """
        self._catch_up().set_idle(self._channel(input), idle=True)

    def advance(self, ms: int) -> None:
        """Lets `ms` milliseconds of processing time pass. Timers that are due at or before the new
        time fire, and sleeping coroutines continue.
        """
        self._clock.advance(ms)
        self._catch_up()

    def finish(self) -> None:
        """Ends the inputs. The operators get the MAX watermark, the end of input, `finish` and
        `close`.

        Afterwards the harness takes no more input; its output can still be read.
        """
        self._catch_up().finish()
        self.close()

    def close(self) -> None:
        """Closes the functions.

        Drops output that closing causes. Closing again has no effect.
        """
        self._finalizer.detach()
        self._task.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # What came out.

    @overload
    def take(self, *, timestamps: Literal[False] = False) -> list[Any]: ...
    @overload
    def take(self, *, timestamps: Literal[True]) -> list[Record]: ...
    def take(self, *, timestamps: bool = False) -> list[Any]:
        """Returns the elements emitted since the last call of `take`.

        With `timestamps`, each is a pair (value, timestamp in ms or None).
        """
        taken, self._task.output = self._task.output, []
        return taken if timestamps else [value for value, _ in taken]

    def side(self, tag: OutputTag[Any] | str) -> list[Any]:
        """Returns the elements of a side output since the last call for this side output."""
        return [
            value
            for value, _ in self._task.side.pop(OutputTag(tag) if isinstance(tag, str) else tag, [])
        ]

    def late(self) -> list[Any]:
        """Returns the elements that windows have dropped as too late since the last call.

        Late elements of joins are not returned, only counted in a metric.
        """
        tags = [LATE, *[operator.late_tag for operator in self._task.operators]]
        return [value for tag in dict.fromkeys(tags) if tag is not None for value in self.side(tag)]

    @property
    def current_watermark(self) -> int:
        """The last watermark that the last operator has emitted; MIN_WATERMARK if there is none."""
        return self._task.watermark

    @property
    def now_ms(self) -> int:
        """The processing time, in ms."""
        return self._clock.now_ms

    def metrics(self) -> dict[str, float]:
        """Returns all metrics of the operators, as "operator.metric"."""
        return dict(self._task.metrics.snapshot())

    # What is inside.

    def timers(self) -> list[Timer]:
        """Returns all pending timers, event time first, in the order in which they will fire."""
        services = [
            service for context in self._task.contexts for service in context.timer_services
        ]
        event = [
            Timer(t, key, "event", window)
            for service in services
            for t, key, window in service.event_time_timers()
        ]
        return event + [
            Timer(t, key, "processing", window)
            for service in services
            for t, key, window in service.processing_time_timers()
        ]

    def state(self, name: str, key: Any, window: Any = None) -> Any:
        """Returns the value of keyed state `name` for `key`, in `window` (a window or (start,
        end)). If there is no value, returns the default of the state, or None.
        """
        backends = [
            context.keyed_state
            for context in self._task.contexts
            if context.keyed_state is not None
        ]
        for backend in backends:
            if name in backend.names():
                return backend.query(name, key, None if window is None else tuple(window))
        known = (
            ", ".join(repr(known) for backend in backends for known in backend.names())
            or "none at all"
        )
        raise StateError(
            f"there is no keyed state {name!r} in this harness, expected one of {known}"
        )

    def snapshot(self) -> HarnessSnapshot:
        """Returns all state as a checkpoint would hold it, for use with `restore`.

        The snapshot does not follow later changes of the state.
        """
        return HarnessSnapshot(self._plan, self._catch_up().snapshot(), self._clock.now_ms)

    def _catch_up(self) -> HarnessTask:
        """Advances the task to the time of the clock, and returns the task."""
        self._task.settle(self._clock.now_ms)
        return self._task

    def _channel(self, number: int) -> int:
        count = len(self._plan.keys)
        if not 1 <= number <= count:
            raise ValueError(f"input is {number}, expected 1{'' if count == 1 else f' to {count}'}")
        return number - 1


def _unpickled(plan: bytes, operators: list[OperatorStateSnapshot], now_ms: int) -> HarnessSnapshot:
    import cloudpickle

    return HarnessSnapshot(cloudpickle.loads(plan), operators, now_ms)


def _close_quietly(task: HarnessTask) -> None:
    try:
        task.close()
    except Exception:  # noqa: BLE001  # No caller is left: the harness is garbage.
        return
