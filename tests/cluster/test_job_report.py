"""Reports of a JobManager about a job arrive unchanged."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from aioflow.checkpoint.completed import CheckpointKind, CheckpointStats
from aioflow.checkpoint.instructions import CheckpointFailureReason
from aioflow.checkpoint.plan import CheckpointedOperator, CheckpointedVertex
from aioflow.checkpoint.statistics import CheckpointStatistics
from aioflow.cluster.job_history import (
    JobHistory,
    WorkerReport,
    decode_report,
    encode_report,
    statistics_of,
)
from aioflow.core.errors import RemoteProtocolError
from aioflow.graph.deployment import ExecutionAttemptId, ExecutionState


def statistics() -> CheckpointStatistics:
    operator = CheckpointedOperator(uid="count", name="count", parallelism=2, max_parallelism=128)
    made = CheckpointStatistics(
        [CheckpointedVertex(vertex_id=7, name="count", operators=(operator,))]
    )
    made.restored(3, CheckpointKind.SAVEPOINT, "file:///savepoint", 5)
    for number in (4, 5, 6):
        made.triggered(number, CheckpointKind.CHECKPOINT, 10 * number, [])
        made.acknowledged(
            number,
            7,
            1,
            CheckpointStats(sync_ms=0.5, state_size=100, checkpointed_size=40),
            10 * number + 3,
        )
    made.completed(4, "file:///4", 48)
    made.failed(5, CheckpointFailureReason.EXPIRED, "too slow", 59)
    return made


def history() -> JobHistory:
    made = JobHistory()
    attempt = ExecutionAttemptId("job", 7, 1, 0)
    made.task(attempt, ExecutionState.DEPLOYING, 1, "")
    made.task(attempt, ExecutionState.RUNNING, 2, "host:1")
    made.failed(ValueError("no"), 3, attempt, "host:1", is_root=True)
    made.failed(KeyError("too"), 4, None, "", is_root=False)
    return made


def told(checkpoints: CheckpointStatistics | None) -> Any:
    master: Any = SimpleNamespace(checkpoint_statistics=checkpoints, history=history())
    worker = WorkerReport("one", 4, 3, 12, "host:1", {"Status.Loop.lagMs": 0.25})
    return decode_report(encode_report(master.history, master.checkpoint_statistics, [worker]))


def test_checkpoints_arrive_with_their_phases_and_reasons() -> None:
    sent = statistics()
    found = statistics_of(told(sent).checkpoints)
    assert found.history == sent.history
    assert (found.counts, found.latest) == (sent.counts, sent.latest)
    assert found.summary == sent.summary


def test_attempts_and_failures_arrive_with_their_places() -> None:
    sent, found = history(), JobHistory()
    found.failed(OSError("of before"), 1, None, "", is_root=True)
    told(None).put_into(found)
    assert found.attempts == sent.attempts
    assert (list(found.failures), found.failures_total) == (list(sent.failures), 1)
    assert told(None).checkpoints is None


def test_processes_arrive_with_what_they_said_of_themselves() -> None:
    assert told(None).workers == [
        WorkerReport("one", 4, 3, 12, "host:1", {"Status.Loop.lagMs": 0.25})
    ]


@pytest.mark.parametrize("content", [b"", b"\xc1", b"\x80", b"\x90"])
def test_unintelligible_report_is_an_error_of_the_peer(content: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="cannot be decoded"):
        decode_report(content)
