"""The two phases of a sink under checkpoints: what is committed when, what the state holds
meanwhile, and what a restore does.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from aioflow.core.elements import RecordBatch
from aioflow.core.errors import RestoreError, StateError
from aioflow.operators.call_pool import Retry
from aioflow.operators.sink import SinkOperator, as_writer
from aioflow.state.operator_state import HeapOperatorStateBackend, redistribute
from tests.io.driver import SinkContext, system_context


class Ledger:
    """A sink in memory. Its committables are lists (checkpoint, values)."""

    def __init__(self) -> None:
        self.committed: list[Any] = []
        self.log: list[Any] = []
        self.errors: list[Exception] = []
        self.gate: asyncio.Event | None = None
        self.flush_gate: asyncio.Event | None = None
        self.flush_error: Exception | None = None

    def writer(self, ctx: Any) -> LedgerWriter:
        return LedgerWriter(self)

    def committer(self) -> Any:
        return LedgerCommitter(self)

    @property
    def values(self) -> list[int]:
        return [value for _, values in self.committed for value in values]


class LedgerWriter:
    full = False

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.rows: list[int] = []

    def restored(self, checkpoint_id: int) -> None:
        self.ledger.log.append(("restored", checkpoint_id))

    async def open(self) -> None:
        self.ledger.log.append("open")

    def write_batch(self, values: Sequence[int], timestamps: Sequence[int] | None) -> None:
        self.rows.extend(values)
        self.full = self.ledger.flush_gate is not None

    async def flush(self) -> None:
        self.full = False
        self.ledger.log.append("flush")
        if self.ledger.flush_gate is not None:
            await self.ledger.flush_gate.wait()
        if self.ledger.flush_error is not None:
            raise self.ledger.flush_error
        self.ledger.log.append("flushed")

    async def prepare(self, checkpoint_id: int) -> list[Any]:
        rows, self.rows = self.rows, []
        self.ledger.log.append(("prepare", checkpoint_id, rows))
        return [[checkpoint_id, rows]] if rows else []


class LedgerCommitter:
    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    async def commit(self, committables: Sequence[Any]) -> None:
        if self.ledger.gate is not None:
            await self.ledger.gate.wait()
        if self.ledger.errors:
            raise self.ledger.errors.pop(0)
        for one in committables:
            if one not in self.ledger.committed:
                self.ledger.committed.append(one)
        self.ledger.log.append("commit")

    async def abort(self, committables: Sequence[Any]) -> None:
        raise AssertionError("nothing is aborted here")


class OnlyFlushes(Ledger):
    def committer(self) -> None:
        return None


@pytest.fixture
async def ctx() -> AsyncIterator[SinkContext]:
    async with system_context() as context:
        yield SinkContext(context.host)


SOON = Retry(3, backoff="1ms")


async def opened(sink: Any, ctx: SinkContext, retry: Retry = SOON) -> SinkOperator:
    operator = SinkOperator(sink, retry)
    operator.setup(ctx)  # type: ignore[arg-type]
    operator.initialize_state()
    await operator.open()
    return operator


def after(
    ctx: SinkContext, *former: SinkContext, parallelism: int = 1, index: int = 0
) -> SinkContext:
    """The context of an attempt that was restored from what `former` subtasks had snapshot last."""
    state = HeapOperatorStateBackend()
    state.restore(
        redistribute([one.operator_state.snapshot() for one in former], parallelism)[index]
    )
    return SinkContext(ctx.host, operator_state=state)


async def take(operator: SinkOperator, checkpoint_id: int, *values: int) -> None:
    operator.process_batch(RecordBatch(list(values), None))
    await operator.snapshot_state(checkpoint_id)


async def test_nothing_is_committed_before_its_checkpoint_is_complete(ctx: SinkContext) -> None:
    """R22: prepared is not committed."""
    ledger = Ledger()
    operator = await opened(ledger, ctx)
    await take(operator, 1, 1, 2)
    await ctx.settled()
    assert ledger.values == []
    operator.notify_checkpoint_complete(1)
    await ctx.settled()
    assert ledger.values == [1, 2]
    await operator.close()


async def test_a_completed_checkpoint_commits_everything_prepared_up_to_it_in_order(
    ctx: SinkContext,
) -> None:
    """R22.1: the metadata of 1 was never written, 2 is complete: 1 is
    part of it.
    """
    ledger = Ledger()
    operator = await opened(ledger, ctx)
    await take(operator, 1, 1)
    operator.notify_checkpoint_aborted(1)
    await take(operator, 2, 2)
    await take(operator, 3, 3)
    operator.notify_checkpoint_complete(2)
    await ctx.settled()
    assert ledger.committed == [[1, [1]], [2, [2]]]
    operator.notify_checkpoint_complete(3)
    await ctx.settled()
    assert ledger.values == [1, 2, 3]
    await operator.close()


@pytest.fixture
def lingering(ctx: SinkContext, monkeypatch: pytest.MonkeyPatch) -> Ledger:
    """A sink whose records wait for 50 ms."""
    monkeypatch.setattr(LedgerWriter, "linger_ms", 50, raising=False)
    return OnlyFlushes()


async def test_few_records_are_flushed_after_a_while(ctx: SinkContext, lingering: Ledger) -> None:
    operator = await opened(lingering, ctx)
    for value in (1, 2):
        operator.process_batch(RecordBatch([value], None))
    await ctx.advance(49)
    assert lingering.log == ["open"]
    await ctx.advance(1)
    assert lingering.log == ["open", "flush", "flushed"]
    await ctx.advance(1_000)
    operator.process_batch(RecordBatch([3], None))
    await ctx.advance(50)
    assert lingering.log.count("flushed") == 2
    await operator.close()


async def test_a_checkpoint_and_the_end_leave_no_flush_for_later(
    ctx: SinkContext, lingering: Ledger
) -> None:
    operator = await opened(lingering, ctx)
    await take(operator, 1, 1)
    await ctx.advance(50)
    assert lingering.log.count("flush") == 1
    operator.process_batch(RecordBatch([2], None))
    operator.end_of_data()
    await ctx.advance(50)
    assert lingering.log.count("flush") == 2
    operator.process_batch(RecordBatch([3], None))
    await operator.close()
    await ctx.advance(50)
    assert lingering.log.count("flush") == 2


async def test_records_do_not_wait_while_a_full_writer_is_flushed(
    ctx: SinkContext, lingering: Ledger
) -> None:
    operator = await opened(lingering, ctx)
    operator.process_batch(RecordBatch([1], None))
    lingering.flush_gate = asyncio.Event()
    operator.process_batch(RecordBatch([2], None))
    ctx.now_ms += 50
    assert all(timer.cancelled for timer in ctx.timers)
    lingering.flush_gate.set()
    await ctx.settled()
    assert lingering.log.count("flush") == 1
    await operator.close()


async def test_a_repeated_or_late_notification_commits_nothing_twice(ctx: SinkContext) -> None:
    ledger = Ledger()
    operator = await opened(ledger, ctx)
    await take(operator, 1, 1)
    await take(operator, 2, 2)
    for checkpoint_id in (2, 2, 1):
        operator.notify_checkpoint_complete(checkpoint_id)
    await ctx.settled()
    assert ledger.values == [1, 2]
    assert ledger.log.count("commit") == 2
    await operator.close()


async def test_elements_confirmed_while_a_commit_runs_are_committed_after_it(
    ctx: SinkContext,
) -> None:
    ledger = Ledger()
    ledger.gate = asyncio.Event()
    operator = await opened(ledger, ctx)
    await take(operator, 1, 1)
    operator.notify_checkpoint_complete(1)
    await take(operator, 2, 2)
    operator.notify_checkpoint_complete(2)
    ledger.gate.set()
    await ctx.settled()
    assert ledger.values == [1, 2]
    assert len(ctx.tasks) == 1
    await operator.close()


async def test_a_commit_holds_back_the_end_and_not_the_records(ctx: SinkContext) -> None:
    ledger = Ledger()
    ledger.gate = asyncio.Event()
    operator = await opened(ledger, ctx)
    await take(operator, 1, 1)
    operator.notify_checkpoint_complete(1)
    assert operator.room() > 0
    assert operator.busy
    assert not operator.availability.is_available
    await take(operator, 2, 2)
    ledger.gate.set()
    await ctx.settled()
    assert not operator.busy
    assert operator.availability.is_available
    await operator.close()


async def test_waiter_for_room_is_woken_although_a_commit_goes_on(ctx: SinkContext) -> None:
    ledger = Ledger()
    ledger.gate = asyncio.Event()
    operator = await opened(ledger, ctx)
    await take(operator, 1, 1)
    ledger.flush_gate = asyncio.Event()
    operator.process_batch(RecordBatch([2], None))
    operator.notify_checkpoint_complete(1)
    assert operator.room() == 0
    woken = asyncio.Event()
    operator.availability.on_available(woken.set)
    ledger.flush_gate.set()
    await woken.wait()
    assert operator.room() > 0
    assert operator.busy
    assert not operator.availability.is_available
    ledger.gate.set()
    await ctx.settled()
    assert operator.availability.is_available
    await operator.close()


async def test_the_state_holds_what_is_not_confirmed_and_nothing_else(ctx: SinkContext) -> None:
    ledger = Ledger()
    operator = await opened(ledger, ctx)
    await take(operator, 1, 1)
    await take(operator, 2, 2)
    assert ctx.operator_state.get_list_state("committables").get() == [[1, [1, [1]]], [2, [2, [2]]]]
    operator.notify_checkpoint_complete(1)
    await ctx.settled()
    await take(operator, 3)
    assert ctx.operator_state.get_list_state("committables").get() == [[2, [2, [2]]]]
    await operator.close()


async def test_restored_committables_are_committed_before_the_writer_opens(
    ctx: SinkContext,
) -> None:
    """R22: the notification was lost with the process; the restored checkpoint is complete
    all the same.
    """
    ledger = Ledger()
    operator = await opened(ledger, ctx)
    await take(operator, 1, 1)
    await take(operator, 2, 2)
    await operator.close()

    ledger.log.clear()
    again = await opened(ledger, after(ctx, ctx))
    assert ledger.values == [1, 2]
    assert ledger.log == ["commit", "commit", ("restored", 2), "open"]
    await again.close()


async def test_restoring_twice_commits_once(ctx: SinkContext) -> None:
    """R22: the reply to the commit was lost, or the process died right after it."""
    ledger = Ledger()
    operator = await opened(ledger, ctx)
    await take(operator, 1, 1)
    operator.notify_checkpoint_complete(1)
    await ctx.settled()
    await operator.close()
    for _ in range(2):
        await (await opened(ledger, after(ctx, ctx))).close()
    assert ledger.values == [1]


@pytest.mark.parametrize("parallelism", [1, 2, 3, 5])
async def test_committables_survive_a_change_of_parallelism(
    ctx: SinkContext, parallelism: int
) -> None:
    """H7: each is committed by exactly one new subtask, and all know which checkpoint was
    restored.
    """
    ledger = Ledger()
    former = [SinkContext(ctx.host) for _ in range(3)]
    for i, one in enumerate(former):
        operator = await opened(ledger, one)
        await take(operator, 1, 10 * i)
        await take(operator, 2, 10 * i + 1)
        await operator.close()
    ledger.log.clear()
    for index in range(parallelism):
        await (
            await opened(ledger, after(ctx, *former, parallelism=parallelism, index=index))
        ).close()
    assert sorted(ledger.values) == [0, 1, 10, 11, 20, 21]
    assert ledger.log.count(("restored", 2)) == parallelism
    await ctx.settled()


async def test_a_commit_that_fails_is_tried_again(
    ctx: SinkContext, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = Ledger()
    ledger.errors = [OSError("unreachable"), OSError("unreachable")]
    operator = await opened(ledger, ctx)
    await take(operator, 1, 1)
    operator.notify_checkpoint_complete(1)
    await ctx.settled()
    assert ledger.values == [1]
    assert "commit failed, try 2 of 3" in caplog.text
    await operator.close()


@pytest.mark.parametrize(
    "errors",
    [[OSError("unreachable")] * 3, [StateError("rows are gone")]],
    ids=["after the last try", "at once where it is no use"],
)
async def test_a_commit_that_does_not_succeed_fails_the_task_and_stays_in_the_state(
    ctx: SinkContext, errors: list[Exception]
) -> None:
    ledger = Ledger()
    ledger.errors = list(errors)
    operator = await opened(ledger, ctx)
    await take(operator, 7, 1)
    operator.notify_checkpoint_complete(7)
    with pytest.raises(type(errors[0])) as caught:
        await ctx.settled()
    assert caught.value.__notes__ == ["aioflow: in commit of checkpoint 7 by sink 'operator'"]
    assert ledger.errors == []
    await operator.close()
    await (await opened(ledger, after(ctx, ctx))).close()
    assert ledger.values == [1]


async def test_a_snapshot_waits_for_the_flush_that_is_under_way(ctx: SinkContext) -> None:
    """H6.4: it is awaited, and holds everything up to the barrier."""
    ledger = Ledger()
    ledger.flush_gate = asyncio.Event()
    operator = await opened(ledger, ctx)
    operator.process_batch(RecordBatch([1], None))
    snapshot = asyncio.ensure_future(operator.snapshot_state(1))
    for _ in range(5):  # Enough for a snapshot that does not wait to begin a flush of its own.
        await asyncio.sleep(0)
    ledger.flush_gate.set()
    await snapshot
    assert ledger.log == ["open", "flush", "flushed", "flush", "flushed", ("prepare", 1, [1])]
    await operator.close()


async def test_a_flush_that_failed_fails_the_snapshot(ctx: SinkContext) -> None:
    """H6.3: otherwise the checkpoint would complete without unwritten elements."""
    ledger = Ledger()
    ledger.flush_gate = asyncio.Event()
    ledger.flush_error = OSError("disk full")
    operator = await opened(ledger, ctx)
    operator.process_batch(RecordBatch([1], None))
    ledger.flush_gate.set()
    with pytest.raises(OSError, match="disk full"):
        await operator.snapshot_state(1)
    with pytest.raises(OSError, match="disk full"):
        await ctx.settled()
    await operator.close()


async def test_at_the_end_the_last_checkpoint_commits(ctx: SinkContext) -> None:
    ledger = Ledger()
    operator = await opened(ledger, ctx)
    operator.process_batch(RecordBatch([1], None))
    operator.end_of_data()
    await ctx.settled()
    assert ledger.values == []
    await operator.snapshot_state(1)
    operator.notify_checkpoint_complete(1)
    assert operator.busy
    await ctx.settled()
    assert not operator.busy
    assert ledger.values == [1]
    await operator.close()


async def test_without_checkpoints_the_end_commits(ctx: SinkContext) -> None:
    ledger = Ledger()
    ctx.checkpointing = False
    operator = await opened(ledger, ctx)
    operator.process_batch(RecordBatch([1], None))
    operator.end_of_data()
    assert operator.busy
    await ctx.settled()
    assert ledger.values == [1]
    await operator.close()


async def test_a_sink_that_commits_nothing_is_flushed_at_the_barrier_and_keeps_no_state(
    ctx: SinkContext,
) -> None:
    sink = OnlyFlushes()
    operator = await opened(sink, ctx)
    await take(operator, 1, 1)
    assert sink.log == ["open", "flush", "flushed", ("prepare", 1, [1])]
    snapshot = ctx.operator_state.snapshot()
    assert (snapshot.split, snapshot.union) == ({}, {})
    operator.notify_checkpoint_complete(1)
    assert not operator.busy
    await operator.close()


async def test_prepared_writes_are_not_dropped_by_a_sink_that_cannot_commit_them(
    ctx: SinkContext,
) -> None:
    operator = await opened(Ledger(), ctx)
    await take(operator, 1, 1)
    await operator.close()
    with pytest.raises(
        RestoreError, match=r"'operator' commits nothing, but its restored state holds 1 prepared"
    ):
        await opened(OnlyFlushes(), after(ctx, ctx))


async def test_a_committer_may_ask_for_the_context(ctx: SinkContext) -> None:
    class Lent(Ledger):
        def committer(self, ctx: Any) -> Any:  # type: ignore[override]
            self.log.append(ctx)
            return super().committer()

    sink = Lent()
    await (await opened(sink, ctx)).close()
    assert sink.log[0] is ctx


async def test_writer_without_optional_members_has_their_defaults() -> None:
    class Bare:
        def __init__(self) -> None:
            self.written: list[int] = []

        def write_batch(self, values: Sequence[int], timestamps: Sequence[int] | None) -> None:
            self.written += values

        async def flush(self) -> None: ...

        async def prepare(self, checkpoint_id: int) -> list[Any]:
            return [checkpoint_id]

    bare = Bare()
    writer = as_writer(bare)

    writer.restored(1)
    await writer.open()
    writer.write_batch([1, 2], None)
    assert not writer.full and not writer.reads_columns
    assert await writer.prepare(3) == [3]
    await writer.close()
    assert bare.written == [1, 2]
