"""The task that runs the operators of a harness: a real mailbox, chain, watermark valve, state and
timers, without result partitions and input gates.

The task runs on a `VirtualLoop` of its own, and only during a call of the harness. Every call hands
something to the task, and lets the loop run until nothing is left to do at the present time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from aioflow.core.aio import OrderedTaskGroup
from aioflow.core.availability import AVAILABLE
from aioflow.core.elements import (
    MAX_WATERMARK,
    MIN_WATERMARK,
    RecordBatch,
    WatermarkStatus,
    empty_batch,
)
from aioflow.core.errors import Closed, RestoreError
from aioflow.core.metrics import MetricGroup
from aioflow.core.scope import Scope, enter_scope
from aioflow.graph.stream_graph import Partitioning, ShipStrategy
from aioflow.mailbox.processor import MailboxProcessor
from aioflow.operators.valve import StatusWatermarkValve
from aioflow.state.operator_state import redistribute
from aioflow.state.snapshot import InlineState, KeyedStateHandle, OperatorSnapshot
from aioflow.task.chain import ChainStatus
from aioflow.task.context import TaskOperatorContext
from aioflow.task.environment import ResourceScope
from aioflow.task.mutation import CheckedOperatorChain
from aioflow.task.partitioners import Partitioner, create_partitioner
from aioflow.task.runtime import Drive, OperatorRuntime, SubtaskSettings
from aioflow.testing.virtual_loop import VirtualHost, VirtualLoop

if TYPE_CHECKING:
    from aioflow.core.functions import OutputTag
    from aioflow.mailbox.timers import ProcessingTimer
    from aioflow.testing.harness_plan import HarnessPlan

__all__ = ["HarnessTask", "OperatorStateSnapshot", "Record"]

T = TypeVar("T")

Record = tuple[Any, int | None]
"""A value and its timestamp in ms. The timestamp is None if the value has no event time."""

SNAPSHOT_ID = 1
"""Checkpoint id of the snapshots of a harness."""


@dataclass(frozen=True, slots=True)
class OperatorStateSnapshot:
    """All state of one operator. It is plain data if the values in the state are plain data."""

    keyed: KeyedStateHandle | None
    """Keyed state and timers, with all content in the handle itself."""
    operator: OperatorSnapshot


class HarnessTask:
    """Runs `plan` as subtask `index` of `parallelism`.

    `restored` has a list for each former subtask, with the state of each operator.
    """

    def __init__(
        self,
        plan: HarnessPlan,
        now_ms: int,
        parallelism: int,
        index: int,
        restored: Sequence[Sequence[OperatorStateSnapshot]],
    ) -> None:
        _check_restored(restored, plan)
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
        self._valve = StatusWatermarkValve(len(plan.keys))
        self._idle = [False] * len(plan.keys)
        self._keys = [self._partitioner(key) for key in plan.keys]
        self._opened = self._ending = False
        self._error: BaseException | None = None
        self._failed = False
        self._processor = MailboxProcessor(
            self._default_action, name=self.name, probe_interval_s=None
        )
        self._executor = self._processor.executor(-1)
        self._scope = Scope("harness")
        self._chain = CheckedOperatorChain(
            (), self._on_output, AVAILABLE, self.host.clock.perf_ns, scope=self._scope
        )
        self._chain.holds_end = False
        self._runtime = OperatorRuntime(
            self,
            self._settings(),
            self._processor,
            self._chain,
            self,
            self._scope,
            context_type=HarnessContext,
        )
        self._parking = self._runtime.parking
        self._drive = Drive(self._processor, [self._runtime])
        for node in plan.operators:
            self._runtime.add(node, node.uid, self.metrics.add_group(node.name))
        self.contexts, self.operators = self._runtime.contexts, self._runtime.operators
        self._restored = restored
        self._task = self.loop.create_task(self._run(), name=self.name)
        # Tasks that are left in a harness that was not closed are not reported.
        self._task._log_destroy_pending = False  # type: ignore[attr-defined]
        self._task.add_done_callback(lambda _: self.loop.stop())
        self._wait_for(lambda: self._opened)

    def _settings(self) -> SubtaskSettings:
        return SubtaskSettings(
            job_name="harness",
            task_name=f"{self.name} ({self.index + 1}/{self.parallelism})",
            index=self.index,
            parallelism=self.parallelism,
            max_parallelism=self.max_parallelism,
            now_ms=self.host.clock.wall_ms,
            checkpointing=True,  # A snapshot acts as a checkpoint, which decides what is committed.
            debug=True,
        )

    # From outside of the loop.

    def push(self, value: Any, timestamp: int | None, channel: int) -> None:
        """Puts one record into the input with the index `channel`. This input becomes active."""
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
        """Runs everything that is due at `now_ms`, or at the present time.

        Raises errors of the operators.
        """
        self._check()
        self.loop.run_to(self.loop.time() if now_ms is None else now_ms / 1000)
        self._check()

    def call(self, action: Callable[[], T | Awaitable[T]], what: str) -> T:
        """Runs `action` in the task, between two elements, and returns its result. `what` names the
        action in errors.
        """
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
        """Returns the state of each operator, that of the chain's first operator first."""
        return self.call(self._snapshot, "take a snapshot")

    def finish(self) -> None:
        """Ends all inputs. The operators get the MAX watermark, the end of input, and `finish`.

        Lets time pass until all pending results have been emitted.
        """
        self._check()
        self.loop.call_soon(self._begin_end)
        self._wait_for(self._task.done)

    def close(self) -> None:
        """Closes the operators, if they are not closed yet. Raises their errors."""
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
        """Lets time pass until nothing is left to run. Raises RuntimeError if `condition` is then
        not true.
        """
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
        """Runs the task from open to close. An error is kept, and the harness's next call raises
        it.
        """
        enter_scope(self._scope)
        try:
            async with self.group:
                try:
                    await self._open()
                    self.loop.stop()
                    await self._processor.run_loop()
                    if self._ending:
                        await self._finish()
                # The call from outside that led to it raises it.
                except Exception as error:  # noqa: BLE001
                    self._error = error
                self.group.cancel_children()
        finally:
            await self._clean_up()

    async def _open(self) -> None:
        for place, context in enumerate(self.contexts):
            former = [operators[place] for operators in self._restored]
            if not former:
                continue
            if context.keyed_state is not None:
                keyed = [one.keyed for one in former if one.keyed is not None]
                await context.keyed_state.restore_from(keyed, InlineState())
            shares = redistribute([one.operator for one in former], self.parallelism)
            context.operator_state.restore(shares[self.index])
        await self._runtime.open()
        self._opened = True

    def _default_action(self, _processor: MailboxProcessor) -> None:
        if self._chain.has_work:
            if self._chain.run() is ChainStatus.BLOCKED:
                self._parking.suspend("operator", self._chain.blocked_on)
        elif self._ending:
            self._processor.suspend()
        else:
            self._parking.suspend("input")

    def _feed(self, batch: RecordBatch, channel: int) -> None:
        self._chain.push(batch, channel)
        self._parking.resume()

    def _begin_end(self) -> None:
        self._ending = True
        self._parking.resume()

    async def _finish(self) -> None:
        self._chain.holds_end = True
        self._runtime.input_stopped()
        await self._drive.settle()
        await self._runtime.finish(self._drive.settle)
        self._on_output(empty_batch(MAX_WATERMARK))
        self._runtime.end_of_data()
        await self._drive.settle()

    async def _snapshot(self) -> list[OperatorStateSnapshot]:
        """Returns the state and the timers of each operator."""
        if self._chain.has_work:
            raise RuntimeError(
                f"cannot take a snapshot: elements wait before an operator of {self.name} that is "
                "full; advance() first"
            )
        await self._runtime.snapshot_state(SNAPSHOT_ID)
        snapshots = []
        for context in self.contexts:
            keyed = None
            if context.keyed_state is not None:
                begun = context.keyed_state.begin_snapshot(SNAPSHOT_ID, full=True)
                keyed = await begun.write(InlineState())
            snapshots.append(OperatorStateSnapshot(keyed, context.operator_state.snapshot()))
        return snapshots

    async def _clean_up(self) -> None:
        errors: list[BaseException] = []
        self._runtime.stop_timers()
        self._processor.close()
        await self._runtime.close(errors)
        if errors:
            self._error = self._error or errors[0]
        self._runtime.close_state()
        await self.resources.close()

    def _on_output(self, batch: RecordBatch) -> None:
        stamps: Sequence[int | None] = batch.timestamps or [None] * len(batch.values)
        self.output.extend(zip(batch.values, stamps, strict=True))
        self.watermark = max(self.watermark, batch.watermark)

    # Output and errors of the operators (OperatorOutput, RuntimeOwner).

    def emit_side(self, node_index: int, tag: OutputTag[Any], batch: RecordBatch) -> None:
        self._chain.guards[node_index].emitted(batch.values)
        stamps: Sequence[int | None] = batch.timestamps or [None] * len(batch.values)
        self.side.setdefault(tag, []).extend(zip(batch.values, stamps, strict=True))

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


class HarnessContext(TaskOperatorContext):
    """An operator context whose timers fire exactly on time."""

    def register_processing_timer(
        self, timestamp_ms: int, callback: Callable[[int], None]
    ) -> ProcessingTimer:
        """Registers a timer that fires at the start of its millisecond, so that `advance(1000)`
        fires a timer that is set 1000 ms from now. In a real task it fires when that millisecond is
        over.
        """
        return super().register_processing_timer(timestamp_ms - 1, lambda _: callback(timestamp_ms))


def _check_restored(restored: Sequence[Sequence[OperatorStateSnapshot]], plan: HarnessPlan) -> None:
    """Raises RestoreError if a snapshot does not match the operators that the harness runs."""
    for former in restored:
        if len(former) != len(plan.operators):
            raise RestoreError(
                f"the snapshot has {len(former)} operators, the harness runs {len(plan.operators)}"
            )
