"""The two operators of a sink that commits globally: one commit per checkpoint for all writers.

    writer, N subtasks --committables--> committer, 1 subtask

A writer prepares at the barrier, and sends its committables ahead of the barrier. So the committer
has all committables of checkpoint n when it has received all barriers of n. The committer is a sink
of committables: its state in checkpoint n contains them, and it commits them when n is complete. A
writer without records sends nothing, and a checkpoint without committables is not committed.

At the end of the input, and when the job is stopped, a writer sends its remaining committables as
its last records. The last checkpoint commits them. Without checkpoints, they are committed at the
end of the committer's input.

Barriers never overtake committables, not even in unaligned checkpoints. Otherwise each checkpoint
would be committed only with the next one.

Checkpoints that complete during a commit are committed together by the next call. So a commit that
takes longer than a checkpoint delays data, but commits do not pile up. Each checkpoint keeps its
id: after a restore, some of them may be committed already and others not.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import TYPE_CHECKING, Any

from aioflow.core.elements import RecordBatch
from aioflow.operators.sink import (
    FINAL_COMMIT,
    PREPARED,
    BaseCommitter,
    BaseSink,
    BaseWriter,
    CommitId,
    SinkOperator,
)

if TYPE_CHECKING:
    from aioflow.operators.operator import OperatorContext
    from aioflow.operators.sink import GlobalCommitter

__all__ = ["CommittablesSink", "GlobalCommitterOperator", "SinkWriterOperator"]


class SinkWriterOperator(SinkOperator):
    """The operator of the writers. It emits their committables."""

    @property
    def commits(self) -> bool:
        return False

    @property
    def _has_committables(self) -> bool:
        return True

    def initialize_state(self) -> None:
        """Does nothing: the state with committables belongs to the committer, which is another
        task.
        """

    def prepare_snapshot_pre_barrier(self, checkpoint_id: int) -> Awaitable[RecordBatch]:
        return self._prepared_batch(checkpoint_id)

    async def _prepared_batch(self, checkpoint_id: int) -> RecordBatch:
        return RecordBatch(await self._prepare_writes(checkpoint_id))

    async def _prepare(self, checkpoint_id: int) -> None:
        """Snapshots the writer. Its committables are not part of the state, because they have been
        sent.
        """
        await self._snapshot_writer()
        self.ctx.operator_state.get_union_list_state(PREPARED).update([checkpoint_id])

    def end_of_data(self) -> None:
        """Sends the remaining committables, which are committed by the last checkpoint or, without
        checkpoints, at the end of the committer's input.
        """
        self._begin_flush(self._send_rest, "flush")

    async def _send_rest(self) -> None:
        writer = self._writer
        assert writer is not None, "open() comes before the end"
        await writer.flush()
        rest = RecordBatch(await writer.prepare(FINAL_COMMIT))
        self.ctx.execute(self.ctx.emit, "the last committables", rest)


class GlobalCommitterOperator(SinkOperator):
    """The operator of the single committer. Its sink is a `CommittablesSink`."""

    def _committed_together(self, first: int) -> list[int]:
        return [id_ for id_ in self._prepared if id_ <= self._confirmed]


class CommittablesSink(BaseSink[Any]):
    """The sink of committables: its committer is the global committer of `sink`."""

    parallelism_max = 1

    def __init__(self, sink: BaseSink[Any], name: str) -> None:
        self._sink = sink
        self.name = name
        self.stays_here = sink.stays_here

    def writer(self, ctx: OperatorContext) -> _Gatherer:
        return _Gatherer(ctx.job_id)

    def committer(self, ctx: OperatorContext) -> _CommittingOnce:  # type: ignore[override]
        return _CommittingOnce(f"{ctx.flow_name}/{ctx.uid}", self._sink.global_committer(ctx))


class _Gatherer(BaseWriter[Any]):
    """Gathers the committables that all writers sent for a checkpoint.

    Prepares one committable from them: [run, checkpoint, committables of the writers].
    """

    def __init__(self, run: str) -> None:
        self._run = run
        self._gathered: list[Any] = []

    def write_batch(self, values: Sequence[Any], timestamps: Sequence[int] | None) -> None:
        self._gathered += values

    async def flush(self) -> None:
        """Does nothing: committables are not visible before the commit."""

    async def prepare(self, checkpoint_id: int) -> list[Any]:
        gathered, self._gathered = self._gathered, []
        return [[self._run, checkpoint_id, gathered]] if gathered else []


class _CommittingOnce(BaseCommitter):
    """Calls the global committer once per run, with all given checkpoints of that run."""

    def __init__(self, sink: str, committer: GlobalCommitter) -> None:
        self._sink = sink
        self._committer = committer

    async def commit(self, committables: Sequence[Any]) -> None:
        runs: dict[str, list[tuple[CommitId, list[Any]]]] = {}
        for run, checkpoint_id, gathered in committables:
            commit_id = CommitId(self._sink, run, checkpoint_id)
            runs.setdefault(run, []).append((commit_id, gathered))
        for prepared in runs.values():
            await self._committer.commit(prepared)

    async def abort(self, committables: Sequence[Any]) -> None:
        """Does nothing: the tools of the store remove data that was never committed."""

    async def close(self) -> None:
        await self._committer.close()
