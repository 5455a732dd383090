"""The interface of a sink, and the operator that writes to it. A sink has two phases: prepare at
the barrier, commit when the checkpoint is complete.

    barrier n        flush, prepare(n): the committables of n go into operator state, beside those
                     not confirmed yet
    n is complete    commit everything prepared up to n, in order, with retries; committed items
                     leave the state
    restore of n     commit the contents of the state of n, before the writer opens: n is complete,
                     and committing again does nothing

A completed checkpoint includes the checkpoints before it: if the metadata of n was never written
and n + 1 is complete, the data prepared for n is part of n + 1. No data is committed for a
checkpoint that is not complete.

Without checkpoints all prepared data is committed when the input ends (and when the writer rolls by
itself). With checkpoints the last checkpoint commits it, and the task waits for this commit.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeGuard, TypeVar, runtime_checkable

from aioflow.core.aio import wait_all
from aioflow.core.availability import Availability
from aioflow.core.elements import RecordBatch
from aioflow.core.errors import AioflowError, RestoreError, note_once
from aioflow.core.functions import CheckpointedFunction
from aioflow.core.signatures import call_with, takes_argument
from aioflow.core.user_code import check_own_task
from aioflow.operators.call_pool import Retry
from aioflow.operators.operator import UNBOUNDED_ROOM, Operator

if TYPE_CHECKING:
    from aioflow.operators.operator import OperatorContext, ProcessingTimeTimer

__all__ = [
    "LINGER_MS",
    "BaseCommitter",
    "BaseSink",
    "BaseWriter",
    "CommitId",
    "Committer",
    "GlobalCommitter",
    "Sink",
    "SinkOperator",
    "SinkWriter",
    "as_committer",
    "as_writer",
    "completed",
    "commits",
    "is_sink",
]

T_contra = TypeVar("T_contra", contravariant=True)

logger = logging.getLogger(__name__)

COMMIT_RETRY = Retry(8, backoff="100ms", max_backoff="5s")
"""Retries a commit for about 11 seconds, since a database may restart or a file server may fail
over.

Then the task fails. After the restart of the task the commit is tried again.
"""

LINGER_MS = 50
"""Time for which a record waits to be sent together with later records."""

COMMITTABLES = "committables"
"""Name of the list state with pairs (checkpoint id, committable) that are not committed yet."""

PREPARED = "prepared"
"""Name of the union list state with the checkpoint id, which every subtask reads after a restore.
"""


class SinkWriter(Protocol[T_contra]):
    """The interface of an object that writes the records of one subtask.

    The further members of `BaseWriter` are optional. The methods of a `CheckpointedFunction` are
    optional, too: `initialize_state` is called before all other methods, `snapshot_state` after
    `prepare`.

    After a restore, the subtasks of the sink commit all data that was prepared up to the restored
    checkpoint. Work that an earlier attempt of this subtask began after that checkpoint is
    orphaned. `open` removes it, but must not remove work that a later attempt may have begun.
    """

    def write_batch(self, values: Sequence[T_contra], timestamps: Sequence[int] | None) -> None:
        """Accepts records and their timestamps. Never blocks: the writer buffers the records, and
        sets `full` if it has enough.
        """

    async def flush(self) -> None:
        """Writes out the buffered records that may be visible without a commit."""

    async def prepare(self, checkpoint_id: int) -> list[Any]:
        """Returns all records written so far as committables.

        Committables are plain data. The data that they refer to must survive the end of this
        process.
        """


class BaseWriter(SinkWriter[T_contra]):
    """A writer with a default for each optional member."""

    full: bool = False
    """Whether `flush` has to be awaited before more records are written. The writer sets this
    attribute.
    """
    linger_ms: int | None = None
    """Time after which buffered records are flushed even if the writer is not `full`. None means
    that only a checkpoint or the end of the input flushes them.
    """
    reads_columns: bool = False
    """Whether `write_batch` can use a `ColumnBatch`, which reads like a list of rows."""

    def restored(self, checkpoint_id: int, /) -> None:
        """Notes that the job was restored from checkpoint `checkpoint_id`. Called before `open`."""

    async def open(self) -> None:
        """Opens the writer. Called once, before the first record."""

    async def close(self) -> None:
        """Releases all resources. Called once, also after a failure."""


def as_writer(writer: SinkWriter[Any]) -> BaseWriter[Any]:
    """Returns `writer`, with the defaults of `BaseWriter` for the optional members that it
    lacks.
    """
    return writer if isinstance(writer, BaseWriter) else _CompletedWriter(writer)


class _CompletedWriter(BaseWriter[Any]):
    """Wraps a writer of an application, and adds defaults for optional members that it lacks."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def write_batch(self, values: Sequence[Any], timestamps: Sequence[int] | None) -> None:
        self._writer.write_batch(values, timestamps)

    async def flush(self) -> None:
        await self._writer.flush()

    async def prepare(self, checkpoint_id: int) -> list[Any]:
        return await self._writer.prepare(checkpoint_id)  # type: ignore[no-any-return]

    @property
    def full(self) -> bool:  # type: ignore[override]
        return getattr(self._writer, "full", False)

    @property
    def linger_ms(self) -> int | None:  # type: ignore[override]
        return getattr(self._writer, "linger_ms", None)

    @property
    def reads_columns(self) -> bool:  # type: ignore[override]
        return getattr(self._writer, "reads_columns", False)

    def restored(self, checkpoint_id: int, /) -> None:
        if (told := getattr(self._writer, "restored", None)) is not None:
            told(checkpoint_id)

    async def open(self) -> None:
        if (opener := getattr(self._writer, "open", None)) is not None:
            await opener()

    async def close(self) -> None:
        if (closer := getattr(self._writer, "close", None)) is not None:
            await closer()


class Committer(Protocol):
    """The interface of an object that makes prepared data visible.

    Both methods are idempotent: repeating a call changes nothing, even much later. The further
    members of `BaseCommitter` are optional.
    """

    async def commit(self, committables: Sequence[Any]) -> None: ...
    async def abort(self, committables: Sequence[Any]) -> None: ...


class BaseCommitter(Committer):
    """A committer with a default for each optional member."""

    async def close(self) -> None:
        """Releases all resources. Called once, also after a failure."""


class _CompletedCommitter(BaseCommitter):
    """Wraps a committer of an application, which may lack `close`."""

    def __init__(self, committer: Committer) -> None:
        self._committer = committer

    async def commit(self, committables: Sequence[Any]) -> None:
        await self._committer.commit(committables)

    async def abort(self, committables: Sequence[Any]) -> None:
        await self._committer.abort(committables)

    async def close(self) -> None:
        if (closer := getattr(self._committer, "close", None)) is not None:
            await closer()


def as_committer(committer: Committer | None) -> BaseCommitter | None:
    """Returns `committer`, with the defaults of `BaseCommitter`. Returns None for None."""
    if committer is None or isinstance(committer, BaseCommitter):
        return committer
    return _CompletedCommitter(committer)


class CommitId(NamedTuple):
    """The identity of one checkpoint's commit. A repeated commit has the same id."""

    sink: str
    """The name of the flow and the uid of the operator, which are equal in all runs."""
    run: str
    """The id of the run that prepared the data. Checkpoints are numbered within it."""
    checkpoint: int
    """The number of the checkpoint; 0 at the end of a run without checkpoints."""


class GlobalCommitter(Protocol):
    """The interface of an object that commits for all writers of a sink, in one call.

    A run has one such object at a time. But a process that was declared dead may still commit at
    the same time as its replacement. So the store must compare the ids and commit in one atomic
    step.
    """

    async def commit(self, prepared: Sequence[tuple[CommitId, Sequence[Any]]]) -> None:
        """Makes the data visible that all writers prepared for some checkpoints of one run.

        `prepared` has a pair (id, committables) for each checkpoint, oldest first. Skips each
        checkpoint that is committed already.
        """

    async def close(self) -> None:
        """Releases all resources. Called once, also after a failure."""


@runtime_checkable
class Sink(Protocol[T_contra]):
    """A destination of records. A sink is pure data: it opens nothing until a job runs.

    The further attributes of `BaseSink` are optional.
    """

    def writer(self, ctx: OperatorContext) -> SinkWriter[T_contra]: ...
    def committer(self) -> Committer | None:
        """Returns the committer, or None if `flush` suffices (at-least-once).

        The method may have a parameter `ctx`. Then it gets the context of the operator, for example
        to use the host.
        """


def is_sink(what: object) -> TypeGuard[Sink[Any]]:
    """Returns whether `what` has the members of a Sink.

    From Python 3.12 on, `isinstance` does not find members that `__getattr__` provides.
    """
    return all(hasattr(what, name) for name in ("writer", "committer"))


class BaseSink(Sink[T_contra]):
    """A sink with a default for each optional member."""

    name: str = ""
    """The name of the sink in the graph, unless the flow gives it another name."""
    parallelism_max: int | None = None
    """The largest useful number of writers; None means no limit."""
    commits_globally: bool = False
    """Whether the single committer that `global_committer` returns commits for all writers."""
    stays_here: bool = False
    """Whether the writers must run in the process of the program that runs the flow."""
    reads_columns: bool = False
    """Whether the writers of the sink can use a `ColumnBatch`, which reads like a list of rows."""
    slow_remedy: str = Operator.slow_remedy
    """Advice for the user if the sink slows the flow down."""

    def committer(self) -> Committer | None:
        return None

    def global_committer(self, ctx: OperatorContext, /) -> GlobalCommitter:
        """Returns the single committer of all writers. Called instead of `committer` if
        `commits_globally` is True.
        """
        raise TypeError(f"{type(self).__name__} must define global_committer(self, ctx)")

    @property
    def part_files(self) -> tuple[str, str] | None:
        """Directory and suffix of the part files of the sink; None for a sink without part
        files.
        """
        return None

    def check_sink(self) -> None:
        """Raises GraphError if the sink has options that only a source can have."""

    def check_upserts(self, key: Sequence[str]) -> None:
        """Raises GraphError if the sink's table cannot replace and delete rows by the columns
        `key`.
        """


def completed(sink: Sink[Any]) -> BaseSink[Any]:
    """Returns `sink`, with the defaults of `BaseSink` for the optional members that it lacks."""
    return sink if isinstance(sink, BaseSink) else _CompletedSink(sink)


class _CompletedSink(BaseSink[Any]):
    """Wraps a sink of an application, and adds defaults for optional members that it lacks."""

    def __init__(self, sink: Any) -> None:
        self._sink = sink
        self.name = getattr(sink, "name", None) or type(sink).__name__
        self.parallelism_max = getattr(sink, "parallelism_max", None)
        self.commits_globally = bool(getattr(sink, "commits_globally", False))
        self.stays_here = bool(getattr(sink, "stays_here", False))
        self.reads_columns = bool(getattr(sink, "reads_columns", False))
        self.slow_remedy = getattr(sink, "slow_remedy", self.slow_remedy)

    def __repr__(self) -> str:
        return repr(self._sink)

    @property
    def committer(self) -> Any:
        """The application's method `committer`, which may have a parameter for the context."""
        return self._sink.committer

    def writer(self, ctx: OperatorContext) -> SinkWriter[Any]:
        return self._sink.writer(ctx)  # type: ignore[no-any-return]

    def global_committer(self, ctx: OperatorContext, /) -> GlobalCommitter:
        return self._sink.global_committer(ctx)  # type: ignore[no-any-return]

    def check_sink(self) -> None:
        if (check := getattr(self._sink, "check_sink", None)) is not None:
            check()


def commits(sink: Sink[Any]) -> bool:
    """Returns whether `sink` commits prepared data. Can be called before the sink's committer
    exists.
    """
    committer = sink.committer
    return takes_argument(committer) or committer() is not None


class SinkOperator(Operator):
    """The operator that writes through one `SinkWriter` and its `Committer`.

    The operator accepts no records during a flush. It emits only watermarks. Commits run
    concurrently in a helper task: a slow commit delays only the end of the task, not the records or
    the next checkpoint.
    """

    def __init__(self, sink: Sink[Any], commit_retry: Retry = COMMIT_RETRY) -> None:
        self._sink = completed(sink)
        self.slow_remedy = self._sink.slow_remedy
        self._commit_retry = commit_retry
        self._writer: BaseWriter[Any] | None = None
        self._function: CheckpointedFunction | None = None
        """The writer if it has operator state, otherwise None."""
        self._committer: BaseCommitter | None = None
        # Prepared writes by checkpoint id, ascending, that may not be committed yet.
        self._prepared: dict[int, list[Any]] = {}
        self._confirmed = 0
        self._flushing = False
        self._committing = False
        self._flush_failure: BaseException | None = None
        self._linger_ms: int | None = None
        self._linger: ProcessingTimeTimer | None = None
        self._work: asyncio.Task[None] | None = None
        self.availability = Availability(available=True)

    @property
    def commits(self) -> bool:
        """Whether the operator keeps uncommitted prepared data in its state. Can be read before the
        sink's committer exists.
        """
        return commits(self._sink)

    @property
    def _has_committables(self) -> bool:
        """Whether the writer prepares data that is committed later."""
        return self._committer is not None

    # Restoring.

    def initialize_state(self) -> None:
        self._committer = as_committer(call_with(self._sink.committer, self.ctx))
        state = self.ctx.operator_state
        restored = state.get_list_state(COMMITTABLES).get() if state.is_restored else []
        if restored and self._committer is None:
            raise RestoreError(
                f"sink {self.ctx.name!r} commits nothing, but its restored state holds "
                f"{len(restored)} prepared writes that are not "
                "committed yet: restore with the sink that prepared them, or give this one "
                "another uid and allow_non_restored=True"
            )
        for checkpoint_id, committable in sorted(restored, key=lambda pair: int(pair[0])):
            self._prepared.setdefault(checkpoint_id, []).append(committable)

    async def open(self) -> None:
        if self._prepared:
            # Other subtasks may have prepared some of them: the checkpoint decides what is
            # committed, not the writer.
            logger.info(
                "%s: commits all data that was prepared up to the restored checkpoint %d",
                self.ctx.name,
                max(self._prepared),
            )
            self._confirmed = max(self._prepared)
            await self._commit_confirmed()
        made = self._sink.writer(self.ctx)
        self._writer = writer = as_writer(made)
        self.ctx.operator_state.lend()
        if isinstance(made, CheckpointedFunction):
            self._function = made
            made.initialize_state(self.ctx.runtime)
        ids = (
            self.ctx.operator_state.get_union_list_state(PREPARED).get()
            if self._has_committables
            else []
        )
        if ids:
            writer.restored(max(ids))
        await writer.open()
        self.reads_columns = writer.reads_columns
        self._linger_ms = writer.linger_ms

    # Records.

    def room(self) -> int:
        return 0 if self._flushing else UNBOUNDED_ROOM

    @property
    def busy(self) -> bool:
        return self._flushing or self._committing

    def process_batch(self, batch: RecordBatch) -> RecordBatch:
        writer = self._writer
        assert writer is not None, "open() comes before the first batch"
        if batch.values:
            writer.write_batch(batch.values, batch.timestamps)
            if writer.full:
                self._begin_flush(writer.flush, "flush")
            elif self._linger_ms is not None and self._linger is None:
                self._linger = self.ctx.register_processing_timer(
                    self.ctx.processing_time() + self._linger_ms, self._on_linger_over
                )
        return RecordBatch([], None, None, None, batch.watermark)

    def end_of_data(self) -> None:
        """Handles the end of the records. Without checkpoints, commits the remaining data.

        With checkpoints, only flushes: the last checkpoint commits the remaining data.
        """
        assert self._writer is not None
        if self.ctx.checkpointing and self._committer is not None:
            self._begin_flush(self._writer.flush, "flush")
        else:
            self._begin_flush(self._commit_rest, "commit")

    def _on_linger_over(self, timestamp_ms: int) -> None:
        """Flushes the records that have waited for `linger_ms`. Runs as mail, so never amid a
        checkpoint.
        """
        self._linger = None
        if self._writer is not None and not self._flushing:
            self._begin_flush(self._writer.flush, "flush")

    def _end_linger(self) -> None:
        linger, self._linger = self._linger, None
        if linger is not None:
            linger.cancel()

    def _begin_flush(self, work: Callable[[], Awaitable[None]], what: str) -> None:
        self._flushing = True
        self._end_linger()
        self.availability.set_unavailable()
        self._work = self.ctx.spawn(self._flush(work), f"{self.ctx.name}-{what}")

    async def _flush(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            # The coroutine is made only here, because a task that is cancelled before it begins
            # must not leave it unawaited.
            await work()
            check_own_task()
        except BaseException as error:
            self._flush_failure = error
            raise
        finally:
            self._flushing = False
            self._show_state()

    def _show_state(self) -> None:
        """Wakes all tasks that wait on `availability`.

        Then unsets it again if the operator is still busy, so that tasks that wait for its end wait
        again.
        """
        self.availability.set_available()
        if self.busy:
            self.availability.set_unavailable()

    async def _commit_rest(self) -> None:
        writer, committer = self._writer, self._committer
        assert writer is not None
        await writer.flush()
        committables = await writer.prepare(FINAL_COMMIT)
        if committer is not None and committables:
            await self._commit(committables)

    # Checkpoints.

    def snapshot_state(self, checkpoint_id: int) -> Awaitable[None]:
        return self._prepare(checkpoint_id)

    async def _prepare(self, checkpoint_id: int) -> None:
        """Flushes and prepares all records up to the barrier. No other work of this task runs
        meanwhile.
        """
        committables = await self._prepare_writes(checkpoint_id)
        await self._snapshot_writer()
        if self._committer is None:
            return
        if committables:
            self._prepared[checkpoint_id] = committables
        state = self.ctx.operator_state
        state.get_list_state(COMMITTABLES).update(
            [[id_, one] for id_, prepared in self._prepared.items() for one in prepared]
        )
        state.get_union_list_state(PREPARED).update([checkpoint_id])

    async def _prepare_writes(self, checkpoint_id: int) -> list[Any]:
        """Returns everything written up to the barrier as committables."""
        writer = self._writer
        assert writer is not None, "open() comes before the first checkpoint"
        if self._work is not None:
            await wait_all([self._work])
        if self._flush_failure is not None:
            # The error also fails the task, but an acknowledgement must not come first.
            raise self._flush_failure
        self._end_linger()
        await writer.flush()
        return await writer.prepare(checkpoint_id)

    async def _snapshot_writer(self) -> None:
        """Lets a writer with operator state store its data in that state."""
        if (
            self._function is not None
            and (ongoing := self._function.snapshot_state(self.ctx.runtime)) is not None
        ):
            await ongoing

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        self._confirmed = max(self._confirmed, checkpoint_id)
        if not self._committing and self._first_confirmed() is not None:
            self._committing = True
            if not self._flushing:
                self.availability.set_unavailable()
            _ = self.ctx.spawn(self._commit_beside(), f"{self.ctx.name}-commit")

    def _first_confirmed(self) -> int | None:
        first = next(iter(self._prepared), None)
        return first if first is not None and first <= self._confirmed else None

    def _committed_together(self, first: int) -> list[int]:
        """Returns the ids of the checkpoints to commit in one call, beginning with `first`."""
        return [first]

    async def _commit_beside(self) -> None:
        try:
            await self._commit_confirmed()
            check_own_task()
        finally:
            self._committing = False
            self._show_state()

    async def _commit_confirmed(self) -> None:
        """Commits the completed checkpoints in order, including those that are completed meanwhile.

        If a commit fails, its data stays in `_prepared`.
        """
        while (first := self._first_confirmed()) is not None:
            together = self._committed_together(first)
            try:
                await self._commit([one for id_ in together for one in self._prepared[id_]])
            except BaseException as error:
                note_once(error, f"in commit of checkpoint {first} by sink {self.ctx.name!r}")
                raise
            for id_ in together:
                del self._prepared[id_]

    async def _commit(self, committables: list[Any]) -> None:
        committer, retry = self._committer, self._commit_retry
        assert committer is not None, "only a committer's sink has committables"
        tries = 0
        while True:
            try:
                await committer.commit(committables)
                return
            except AioflowError:
                raise  # The error says what to do; trying again does not help.
            except Exception as error:
                tries += 1
                if tries == retry.attempts:
                    raise
                delay_s = retry.delay_s(tries) * self.ctx.host.rng.uniform(0.5, 1.0)
                logger.warning(
                    "%s: commit failed, try %d of %d follows in %.1f s: %r",
                    self.ctx.name,
                    tries + 1,
                    retry.attempts,
                    delay_s,
                    error,
                )
                await asyncio.sleep(delay_s)

    async def close(self) -> None:
        self._end_linger()
        writer, self._writer = self._writer, None
        committer, self._committer = self._committer, None
        try:
            if writer is not None:
                await writer.close()
        finally:
            if committer is not None:
                await committer.close()


FINAL_COMMIT = 0
"""The checkpoint id that a job without checkpoints uses for the commit at the end of its input. Ids
of real checkpoints start at 1.
"""
