"""The task around the operators of a harness: a real mailbox, chain, valve, state and timers,
without partitions and gates.

It runs on a `VirtualLoop` of its own, and only while the harness waits for it: every call from
outside puts something in and lets the loop run until nothing is left to do at the present time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from aioflow.core.aio import OrderedTaskGroup
from aioflow.core.availability import AVAILABLE, Availability
from aioflow.core.elements import (
    MAX_WATERMARK,
    MIN_WATERMARK,
    RecordBatch,
    WatermarkStatus,
    empty_batch,
)
from aioflow.core.errors import Closed, RestoreError
from aioflow.core.keygroups import range_for_subtask
from aioflow.core.metrics import MetricGroup
from aioflow.core.scope import Scope, enter_scope
from aioflow.graph.stream_graph import Partitioning, ShipStrategy
from aioflow.mailbox.processor import MailboxProcessor, Suspension
from aioflow.operators.valve import StatusWatermarkValve
from aioflow.state.backend import KeyedStateBackend, create_keyed_backend
from aioflow.state.operator_state import HeapOperatorStateBackend, redistribute
from aioflow.state.snapshot import InlineState, KeyedStateHandle, OperatorSnapshot
from aioflow.task.chain import ChainStatus
from aioflow.task.context import SubtaskRuntimeContext, TaskOperatorContext
from aioflow.task.mutation import CheckedOperatorChain
from aioflow.task.partitioners import Partitioner, create_partitioner
from aioflow.task.resources import ResourceScope
from aioflow.testing.virtual_loop import VirtualHost, VirtualLoop

if TYPE_CHECKING:
    from aioflow.core.functions import OutputTag
    from aioflow.mailbox.timers import ProcessingTimer
    from aioflow.operators.operator import Operator
    from aioflow.testing.harness_plan import HarnessPlan, OperatorPlan

__all__ = ["HarnessTask", "OperatorStateSnapshot", "Record"]

T = TypeVar("T")

Record = tuple[Any, int | None]
"""A value and its timestamp in ms, None without event time."""

SNAPSHOT_ID = 1
"""The checkpoint that a snapshot of the harness stands for."""


@dataclass(frozen=True, slots=True)
class OperatorStateSnapshot:
    """Everything that one operator remembers. Plain data, as far as the values are."""

    keyed: KeyedStateHandle | None
    """Keyed state and timers, all inline."""
    operator: OperatorSnapshot


class HarnessTask:
    """Runs `plan` as subtask `index` of `parallelism`.

    `restored`: the state of each operator, of each former subtask.
    """

    def __init__(
        self,
        plan: HarnessPlan,
        now_ms: int,
        parallelism: int,
        index: int,
        restored: Sequence[Sequence[OperatorStateSnapshot]],
    ) -> None:
        for former in restored:
            if len(former) != len(plan.operators):
                raise RestoreError(
                    f"the snapshot has {len(former)} operators, the harness runs "
                    f"{len(plan.operators)}"
                )
        self.loop = VirtualLoop(now_ms / 1000)
        self.host = VirtualHost(self.loop)
        self.resources = ResourceScope()
        self.group = OrderedTaskGroup()
        self.metrics = MetricGroup(self.loop.time)
        self.name = " -> ".join(operator.name for operator in plan.operators)
        self.parallelism, self.index, self.max_parallelism = (
            parallelism,
            index,
            plan.max_parallelism,
        )
        self.output: list[Record] = []
        self.side: dict[OutputTag[Any], list[Record]] = {}
        self.watermark = MIN_WATERMARK
        self.idle = False
        self.contexts: list[HarnessContext] = []
        self.operators: list[Operator] = []
        self._valve = StatusWatermarkValve(len(plan.keys))
        self._idle = [False] * len(plan.keys)
        self._keys = [self._partitioner(key) for key in plan.keys]
        self._scope = Scope("harness")
        self._suspension: Suspension | None = None
        self._watched: list[Availability] = []
        self._opened = self._ending = False
        self._error: BaseException | None = None
        self._failed = False
        self._processor = MailboxProcessor(
            self._default_action, name=self.name, probe_interval_s=None
        )
        self._executor = self._processor.executor(-1)
        self._restored: list[tuple[KeyedStateBackend, list[KeyedStateHandle]]] = []
        for place, operator_plan in enumerate(plan.operators):
            self._add_operator(place, operator_plan, [former[place] for former in restored])
        self._chain = CheckedOperatorChain(
            self.operators, self._on_output, AVAILABLE, self.host.clock.perf_ns, scope=self._scope
        )
        self._chain.holds_end = False
        self._task = self.loop.create_task(self._run(), name=self.name)
        # The rest of a harness that was not closed is not worth a message.
        self._task._log_destroy_pending = False  # type: ignore[attr-defined]
        self._task.add_done_callback(lambda _: self.loop.stop())
        self._wait_for(lambda: self._opened)

    # From outside of the loop.

    def push(self, value: Any, timestamp: int | None, channel: int) -> None:
        """One record into input `channel`, which becomes active by it."""
        batch = RecordBatch([value], None if timestamp is None else [timestamp])
        partitioner = self._keys[channel]
        if partitioner is not None:
            (subtask, batch), *_ = partitioner.split(batch)
            if subtask != self.index:
                key = None if batch.keys is None else batch.keys[0]
                raise ValueError(
                    f"key {key!r} belongs to subtask {subtask} of {self.parallelism}, this "
                    f"harness is subtask {self.index}"
                )
        self.set_idle(channel, idle=False)
        self.loop.call_soon(self._feed, self._valve.input_batch(channel, batch), channel)
        self.settle()

    def advance_watermark(self, watermark: int, channel: int) -> None:
        self.set_idle(channel, idle=False)
        combined = self._valve.input_watermark(channel, watermark)
        if combined is not None:
            self.loop.call_soon(self._feed, empty_batch(combined), 0)
        self.settle()

    def set_idle(self, channel: int, *, idle: bool) -> None:
        if self._idle[channel] == idle:
            return
        self._idle[channel] = idle
        for output in self._valve.input_status(channel, idle):
            if isinstance(output, WatermarkStatus):
                self.idle = output.idle
            else:
                self.loop.call_soon(self._feed, empty_batch(output.timestamp), 0)
        self.settle()

    def settle(self, now_ms: int | None = None) -> None:
        """Let everything happen that is due at `now_ms`, or now. Raises what failed."""
        self._check()
        self.loop.run_to(self.loop.time() if now_ms is None else now_ms / 1000)
        self._check()

    def call(self, action: Callable[[], T | Awaitable[T]], what: str) -> T:
        """Run `action` between two elements."""
        results: list[asyncio.Future[T]] = []
        self.loop.call_soon(lambda: results.append(self._executor.submit(action, what)))
        self.settle()
        if not results[0].done():
            raise RuntimeError(
                f"cannot {what} now: {self.name} awaits something in between; advance() the time "
                "first"
            )
        return results[0].result()

    def snapshot(self) -> list[OperatorStateSnapshot]:
        """The state of each operator, head first."""
        return self.call(self._snapshot, "take a snapshot")

    def finish(self) -> None:
        """All inputs end: MAX watermark, end of input, `finish` of each operator.

        Takes as much time as results need.
        """
        self._check()
        self.loop.call_soon(self._begin_end)
        self._wait_for(self._task.done)

    def close(self) -> None:
        """Close the operators, if they are not closed yet. Raises what that raises."""
        if not self.loop.is_closed():
            failed, self._failed = self._failed, True
            self.loop.call_soon(self._task.cancel)
            try:
                if not self._task.done():
                    self._wait_for(self._task.done)
            finally:
                self.loop.close()
                self._failed = failed

    def _wait_for(self, condition: Callable[[], bool]) -> None:
        """Let time pass until `condition` holds."""
        self.loop.run_to(float("inf"))
        self._raise_error()
        if not condition():
            raise RuntimeError(
                f"{self.name} waits for something that never comes: nothing is left to run, and "
                "no timer is set"
            )

    def _check(self) -> None:
        self._raise_error()
        if self._task.done() or self._failed:
            raise Closed(
                f"the harness of {self.name} is over "
                f"({'failed' if self._failed else 'finished or closed'}): make a new one"
            )

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            self._failed = True
            raise error

    # On the loop.

    async def _run(self) -> None:
        """Runs the task from open to close. Errors are kept for the next caller."""
        enter_scope(self._scope)
        try:
            async with self.group:
                try:
                    await self._open()
                    self.loop.stop()
                    await self._processor.run_loop()
                    if self._ending:
                        await self._finish()
                # Raised by the call from outside that led to it.
                except Exception as error:  # noqa: BLE001
                    self._error = error
                self.group.cancel_children()
        finally:
            await self._clean_up()

    async def _open(self) -> None:
        for keyed_state, handles in self._restored:
            await keyed_state.restore_from(handles, InlineState())
        for operator in reversed(self.operators):
            self._scope.operator_context = operator.ctx
            operator.initialize_state()
            await operator.open()
        self._chain.compile()
        self._opened = True

    def _default_action(self, _processor: MailboxProcessor) -> None:
        if self._chain.has_work:
            if self._chain.run() is ChainStatus.BLOCKED:
                assert self._chain.blocked_on is not None
                self._suspend("operator")
                self._watch(self._chain.blocked_on)
        elif self._ending:
            self._processor.suspend()
        else:
            self._suspend("input")

    def _suspend(self, reason: str) -> None:
        self._suspension = self._processor.suspend_default_action(reason)

    def _resume(self) -> None:
        suspension, self._suspension = self._suspension, None
        if suspension is not None:
            suspension.resume()

    def _watch(self, availability: Availability) -> None:
        if availability not in self._watched:
            self._watched.append(availability)
            availability.on_available(partial(self._on_available, availability))

    def _on_available(self, availability: Availability) -> None:
        self._watched.remove(availability)
        if self._suspension is not None:
            self._resume()
        elif self._ending and not self._task.done():
            self._executor.execute(_nothing, "availability changed")

    def _feed(self, batch: RecordBatch, channel: int) -> None:
        self._chain.push(batch, channel)
        self._resume()

    def _begin_end(self) -> None:
        self._ending = True
        self._resume()

    async def _finish(self) -> None:
        self._chain.holds_end = True
        for operator in self.operators:
            operator.input_stopped()
        await self._settle()
        for place, operator in enumerate(self.operators):
            self._chain.end_event_time(place)
            await self._settle()
            for channel in range(operator.inputs) if place == 0 else (0,):
                self._chain.emit_from(place, operator.end_input(channel))
            await self._settle()
            await self.contexts[place].processing_timers.quiesce()
            self._chain.emit_from(place, operator.finish())
            await self._settle()
        self._on_output(empty_batch(MAX_WATERMARK))
        for operator in self.operators:
            operator.end_of_data()
        await self._settle()

    async def _settle(self) -> None:
        """Run mail and the chain until no operator has results to come."""
        while True:
            while self._executor.try_yield():
                pass
            waiting: Availability | None = None
            if self._chain.has_work:
                if self._chain.run() is ChainStatus.BLOCKED:
                    waiting = self._chain.blocked_on
            else:
                waiting = next(
                    (operator.availability for operator in self.operators if operator.busy), None
                )
                if waiting is None:
                    return
            if waiting is not None:
                self._watch(waiting)
                await self._executor.yield_()

    async def _snapshot(self) -> list[OperatorStateSnapshot]:
        if self._chain.has_work:
            raise RuntimeError(
                f"cannot take a snapshot: elements wait before an operator of {self.name} that is "
                "full; advance() first"
            )
        for operator in reversed(self.operators):
            ongoing = operator.snapshot_state(SNAPSHOT_ID)
            if ongoing is not None:
                await ongoing
        return [await context.snapshot() for context in self.contexts]

    async def _clean_up(self) -> None:
        for context in self.contexts:
            context.processing_timers.shutdown()
        self._processor.close()
        for operator in reversed(self.operators):
            try:
                await operator.close()
            # The others are closed all the same; the first error counts.
            except Exception as error:  # noqa: BLE001
                self._error = self._error or error
        for context in self.contexts:
            if context.keyed_state is not None:
                context.keyed_state.close()
        await self.resources.close()

    def _on_output(self, batch: RecordBatch) -> None:
        stamps: Sequence[int | None] = batch.timestamps or [None] * len(batch.values)
        self.output.extend(zip(batch.values, stamps, strict=True))
        self.watermark = max(self.watermark, batch.watermark)

    # What operators ask for (TaskServices).

    def emit_from(self, operator_index: int, batch: RecordBatch) -> None:
        self._chain.emit_from(operator_index, batch)
        self._resume()

    def emit_side(
        self,
        operator_index: int,
        tag: OutputTag[Any],
        value: Any,
        timestamp: int | None,
        watermark: int,
    ) -> None:
        self._chain.guards[operator_index].emitted([value])
        self.side.setdefault(tag, []).append((value, timestamp))

    def emit_status(self, idle: bool) -> None:
        self.idle = idle

    def report(self, error: BaseException) -> None:
        self._processor.report_throwable(error)

    # Building blocks.

    def _partitioner(self, key: Any) -> Partitioner | None:
        if key is None:
            return None
        partitioning = Partitioning(ShipStrategy.HASH, key)
        return create_partitioner(
            partitioning,
            self.parallelism,
            max_parallelism=self.max_parallelism,
            subtask_index=0,
            rng=self.host.rng,
            place="the harness's push",
        )

    def _add_operator(
        self, place: int, plan: OperatorPlan, restored: list[OperatorStateSnapshot]
    ) -> None:
        keyed_state = None
        if plan.keyed:
            groups = range_for_subtask(self.index, self.parallelism, self.max_parallelism)
            keyed_state = create_keyed_backend(
                max_parallelism=self.max_parallelism,
                key_group_range=groups,
                now_ms=self.host.clock.wall_ms,
                operator=plan.name,
            )
            if restored:
                self._restored.append(
                    (keyed_state, [former.keyed for former in restored if former.keyed is not None])
                )
        operator_state = HeapOperatorStateBackend()
        if restored:
            operator_state.restore(
                redistribute([former.operator for former in restored], self.parallelism)[self.index]
            )
        runtime = SubtaskRuntimeContext(
            job_name="harness",
            operator_name=plan.name,
            task_name=f"{self.name} ({self.index + 1}/{self.parallelism})",
            subtask_index=self.index,
            parallelism=self.parallelism,
            max_parallelism=self.max_parallelism,
            attempt=0,
            metrics=self.metrics.add_group(plan.name),
            keyed_state=keyed_state,
            operator_state=operator_state,
        )
        executor = self._processor.executor(place)
        context = HarnessContext(
            self,
            place,
            plan.name,
            plan.uid,
            runtime,
            executor,
            self._scope,
            self.host.clock.wall_ms,
            has_event_time=plan.event_time,
            checkpointing=True,  # A snapshot stands for a checkpoint: it decides what is committed.
            debug=True,
        )
        operator = plan.factory()
        operator.setup(context)
        self.contexts.append(context)
        self.operators.append(operator)


class HarnessContext(TaskOperatorContext):
    """The context of a task, whose timers are punctual."""

    def register_processing_timer(
        self, timestamp_ms: int, callback: Callable[[int], None]
    ) -> ProcessingTimer:
        """Fires at its millisecond, where a task waits until that is over: `advance(1000)`
        reaches a timer 1000 ms from now.
        """
        return super().register_processing_timer(timestamp_ms - 1, lambda _: callback(timestamp_ms))

    async def snapshot(self) -> OperatorStateSnapshot:
        """All that the operator keeps in its state, and its timers."""
        keyed = None
        if self.keyed_state is not None:
            keyed = await self.keyed_state.begin_snapshot(SNAPSHOT_ID, full=True).write(
                InlineState()
            )
        return OperatorStateSnapshot(keyed, self.operator_state.snapshot())


def _nothing() -> None:
    """Mail that only wakes."""
