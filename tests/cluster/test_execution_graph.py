"""The job's state by tables: reports in, instructions out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioflow.checkpoint.assignment import TaskRestore
from aioflow.cluster.execution_graph import (
    CancelTask,
    Deploy,
    ExecutionGraph,
    Instruction,
    JobEnded,
    JobStatus,
    ScheduleRestart,
)
from aioflow.cluster.restart import RestartPolicy, fixed_delay, no_restart, once_running
from aioflow.core.errors import Broken, ProducerFailed, RemoteError
from aioflow.graph.deployment import ExecutionAttemptId, ExecutionState
from aioflow.graph.job_graph import build_job_graph, with_parallelism
from aioflow.graph.stream_graph import (
    Partitioning,
    ShipStrategy,
    StreamEdge,
    StreamGraph,
    StreamNode,
)
from aioflow.operators.source import Split

RUNNING, FINISHED, FAILED, CANCELED = (
    ExecutionState.RUNNING,
    ExecutionState.FINISHED,
    ExecutionState.FAILED,
    ExecutionState.CANCELED,
)


def graph(
    restart: RestartPolicy,
    *,
    parallelism: int = 1,
    regions: int = 1,
    ship: ShipStrategy = ShipStrategy.REBALANCE,
) -> ExecutionGraph:
    """`regions` times source -> sink, joined by an exchange."""
    stream = StreamGraph("g", parallelism)
    for region in range(regions):
        for index, name in enumerate(("source", "sink")):
            stream.add_node(StreamNode(id=2 * region + index, kind=name, name=f"{name}{region}"))
        stream.add_edge(StreamEdge(2 * region, 2 * region + 1, partitioning=Partitioning(ship)))
    return ExecutionGraph("0" * 32, build_job_graph(stream), restart)


class Job:
    """Drives an ExecutionGraph and keeps what it told."""

    def __init__(self, executions: ExecutionGraph) -> None:
        self.graph = executions
        self.told: list[Instruction] = executions.start({})

    def report(
        self, vertex: int, state: ExecutionState, error: BaseException | None = None, index: int = 0
    ) -> list[Instruction]:
        told = self.graph.update(
            self.graph.executions[vertex, index].attempt, state, error, 0.0, 0.5
        )
        self.told += told
        return told

    def run_all(self) -> None:
        for vertex, index in self.graph.executions:
            self.report(vertex, RUNNING, index=index)


def deployed(told: list[Instruction]) -> list[tuple[int, int, int]]:
    attempts = [i.descriptor.attempt for i in told if isinstance(i, Deploy)]
    return [(a.vertex_id, a.subtask_index, a.attempt) for a in attempts]


def canceled(told: list[Instruction]) -> list[tuple[int, int]]:
    return [(i.attempt.vertex_id, i.attempt.attempt) for i in told if isinstance(i, CancelTask)]


def test_deploys_producers_before_consumers() -> None:
    job = Job(graph(no_restart(), parallelism=2))
    assert deployed(job.told) == [(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0)]


def test_finishes_when_every_task_has() -> None:
    job = Job(graph(no_restart()))
    job.run_all()
    assert job.graph.all_have_run
    assert job.report(0, FINISHED) == []
    assert job.report(1, FINISHED) == [JobEnded(JobStatus.FINISHED, None)]


def test_an_attempt_ends_once() -> None:
    """B1.2: a second report of an attempt that ended is ignored."""
    job = Job(graph(no_restart()))
    job.report(0, FINISHED)
    assert job.report(0, FAILED, ValueError()) == []
    assert job.graph.status is JobStatus.RUNNING
    assert job.graph.executions[0, 0].state is FINISHED


def test_without_restart_the_first_failure_cancels_the_rest_and_fails_the_job() -> None:
    job, error = Job(graph(no_restart())), ValueError("first")
    job.run_all()
    assert canceled(job.report(1, FAILED, error)) == [(0, 0)]
    assert job.graph.status is JobStatus.FAILING
    assert job.report(0, CANCELED) == [JobEnded(JobStatus.FAILED, error)]


def test_a_failed_region_restarts_when_all_its_tasks_ended_and_the_delay_is_over() -> None:
    job = Job(graph(fixed_delay(1, "2s")))
    job.run_all()
    told = job.report(0, FAILED, ValueError())
    assert [i for i in told if isinstance(i, ScheduleRestart)] == [ScheduleRestart(0, 1, 2.0)]
    assert canceled(told) == [(1, 0)]
    assert job.graph.status is JobStatus.RESTARTING
    assert job.graph.restart_due(0, 1) == []
    assert deployed(job.report(1, CANCELED)) == [(0, 0, 1), (1, 0, 1)]
    assert job.graph.status is JobStatus.RUNNING
    assert job.graph.restarts == 1


def test_the_delay_counts_also_when_all_tasks_ended_before() -> None:
    job = Job(graph(fixed_delay(1, "2s")))
    job.run_all()
    job.report(0, FAILED, ValueError())
    assert job.report(1, CANCELED) == []
    assert deployed(job.graph.restart_due(0, 1)) == [(0, 0, 1), (1, 0, 1)]


def test_a_finished_task_of_a_failed_region_runs_again() -> None:
    job = Job(graph(fixed_delay(1, "0ms")))
    job.run_all()
    job.report(0, FINISHED)
    job.report(1, FAILED, ValueError())
    assert deployed(job.graph.restart_due(0, 1)) == [(0, 0, 1), (1, 0, 1)]


def test_only_the_region_that_failed_restarts() -> None:
    """I7.4"""
    job = Job(graph(fixed_delay(1, "0ms"), regions=2))
    job.run_all()
    assert canceled(job.report(0, FAILED, ValueError())) == [(1, 0)]
    job.report(1, CANCELED)
    assert deployed(job.graph.restart_due(0, 1)) == [(0, 0, 1), (1, 0, 1)]
    assert job.graph.executions[2, 0].attempt.attempt == 0


def test_a_failure_of_the_job_as_a_whole_restarts_what_has_not_finished_once() -> None:
    job = Job(graph(fixed_delay(1, "2s"), regions=2))
    job.run_all()
    job.report(0, FINISHED)
    job.report(1, FINISHED)
    error = ValueError()
    told = job.graph.fail_all(error, 0.0, 0.5)
    assert [i for i in told if isinstance(i, ScheduleRestart)] == [ScheduleRestart(1, 1, 2.0)]
    assert canceled(told) == [(2, 0), (3, 0)]
    assert (job.graph.status, job.graph.failure, job.graph.restarts) == (
        JobStatus.RESTARTING,
        error,
        1,
    )
    job.report(2, CANCELED)
    job.report(3, CANCELED)
    assert deployed(job.graph.restart_due(1, 1)) == [(2, 0, 1), (3, 0, 1)]


def test_a_failure_of_the_job_as_a_whole_restarts_all_of_its_regions() -> None:
    job = Job(graph(fixed_delay(1, "0ms"), regions=2))
    job.run_all()
    told = job.graph.fail_all(ValueError(), 0.0, 0.5)
    assert [i.region for i in told if isinstance(i, ScheduleRestart)] == [0, 1]
    assert canceled(told) == [(0, 0), (1, 0), (2, 0), (3, 0)]
    assert job.graph.restarts == 1


def test_a_failure_of_the_job_as_a_whole_ends_one_that_does_not_restart() -> None:
    job = Job(graph(no_restart()))
    job.run_all()
    assert canceled(job.graph.fail_all(ValueError(), 0.0, 0.5)) == [(0, 0), (1, 0)]
    job.report(0, CANCELED)
    assert [type(i) for i in job.report(1, CANCELED)] == [JobEnded]
    assert job.graph.status is JobStatus.FAILED
    assert job.graph.fail_all(ValueError(), 0.0, 0.5) == []


def test_deployed_tasks_begin_with_the_restored_state() -> None:
    """The splits of a restored subtask are its own, and no more dealt out."""
    executions = graph(fixed_delay(1, "0ms"), parallelism=2)
    restore, split = TaskRestore(7), Split("a", 5)
    executions.restore({(0, 1): restore, (1, 0): restore}, {(0, 0): [], (0, 1): [split]})
    told = executions.start({0: [Split("a"), Split("b")]})
    found = {
        (d.descriptor.attempt.vertex_id, d.descriptor.attempt.subtask_index): d.descriptor
        for d in told
        if isinstance(d, Deploy)
    }
    assert {
        place: (descriptor.restore, descriptor.splits) for place, descriptor in found.items()
    } == {
        (0, 0): (None, ()),
        (0, 1): (restore, (split,)),
        (1, 0): (restore, ()),
        (1, 1): (None, ()),
    }


def test_a_restart_that_finds_no_state_is_another_failure() -> None:
    job = Job(graph(fixed_delay(2, "2s")))
    job.run_all()
    job.report(0, FAILED, ValueError())
    job.report(1, CANCELED)
    error = OSError("away")
    assert job.graph.restart_failed(0, 1, error, 0.0, 0.5) == [ScheduleRestart(0, 2, 2.0)]
    assert job.graph.restart_failed(0, 1, error, 0.0, 0.5) == [], "that restart is given up"
    assert job.graph.restart_due(0, 1) == []
    assert job.graph.status is JobStatus.RESTARTING
    assert [type(i) for i in job.graph.restart_failed(0, 2, error, 0.0, 0.5)] == [JobEnded]
    assert (job.graph.status, job.graph.failure) == (JobStatus.FAILED, error)


def test_a_policy_that_begins_once_all_run_ends_a_job_that_never_did() -> None:
    """A lost process is an exception, because the program is not at fault."""
    job = Job(graph(once_running()))
    job.report(0, RUNNING)
    job.report(1, FAILED, ValueError())
    assert job.graph.status is JobStatus.FAILING
    job = Job(graph(once_running()))
    job.report(1, FAILED, Broken("a worker is gone"))
    assert job.graph.status is JobStatus.RESTARTING
    job = Job(graph(once_running()))
    job.run_all()
    job.report(1, FAILED, ValueError())
    assert job.graph.status is JobStatus.RESTARTING


def test_a_job_is_not_over_while_one_region_waits_and_the_other_has_finished() -> None:
    job = Job(graph(fixed_delay(1, "1h"), regions=2))
    job.run_all()
    job.report(0, FAILED, ValueError())
    job.report(1, CANCELED)
    job.report(2, FINISHED)
    assert job.report(3, FINISHED) == []
    assert job.graph.status is JobStatus.RESTARTING


def test_reports_of_an_older_attempt_are_ignored() -> None:
    job = Job(graph(fixed_delay(2, "0ms")))
    old = job.graph.executions[0, 0].attempt
    job.report(0, FAILED, ValueError())
    job.report(1, CANCELED)
    job.graph.restart_due(0, 1)
    assert job.graph.update(old, FAILED, ValueError(), 0.0, 0.5) == []
    assert job.graph.status is JobStatus.RUNNING


def test_failures_together_are_one_failover_with_one_root_cause() -> None:
    """B6.3, J3.3."""
    job, first = Job(graph(fixed_delay(1, "0ms"), parallelism=2)), ValueError("first")
    job.run_all()
    job.report(0, FAILED, first)
    job.report(0, FAILED, KeyError("second"), index=1)
    assert job.graph.failure is first
    assert job.graph.restarts == 1
    assert first.__notes__ == ["aioflow: another task failed at the same time: KeyError: 'second'"]


def test_fatal_errors_fail_the_job_although_it_could_restart() -> None:
    job = Job(graph(fixed_delay(5, "0ms", fatal=(ValueError,))))
    job.run_all()
    assert not [i for i in job.report(0, FAILED, ValueError()) if isinstance(i, ScheduleRestart)]
    assert job.graph.status is JobStatus.FAILING


@pytest.mark.parametrize(
    "error", [SystemExit(), KeyboardInterrupt(), RemoteError("SystemExit", "3")]
)
def test_request_to_end_the_program_is_not_retried(error: BaseException) -> None:
    job = Job(graph(fixed_delay(5, "0ms")))
    job.run_all()
    job.report(0, FAILED, error)
    assert job.graph.status is JobStatus.FAILING


def test_a_task_canceled_unasked_fails_the_job_by_name() -> None:
    job = Job(graph(no_restart()))
    job.run_all()
    assert canceled(job.report(1, CANCELED)) == [(0, 0)]
    (ended,) = job.report(0, CANCELED)
    assert isinstance(ended, JobEnded)
    assert ended.status is JobStatus.FAILED
    assert "ended CANCELED, although the job had not cancelled it" in str(ended.error)


def test_a_task_canceled_unasked_restarts_its_region() -> None:
    job, error = Job(graph(fixed_delay(1, "0ms"))), ProducerFailed("the link is gone")
    job.run_all()
    assert canceled(job.report(1, CANCELED, error)) == [(0, 0)]
    assert (job.graph.status, job.graph.failure) == (JobStatus.RESTARTING, error)
    job.report(0, CANCELED)
    assert deployed(job.graph.restart_due(0, 1)) == [(0, 0, 1), (1, 0, 1)]


@pytest.mark.parametrize("restart", [no_restart(), fixed_delay(1, "1h")], ids=str)
def test_the_failure_of_a_producer_takes_the_place_of_what_its_consumer_reported_first(
    restart: RestartPolicy,
) -> None:
    """B1.6: over two connections the report of the consumer may arrive first."""
    job, cause = Job(graph(restart)), ValueError("cause")
    job.run_all()
    job.report(1, CANCELED, ProducerFailed("consequence"))
    job.report(0, FAILED, cause)
    assert job.graph.failure is cause
    assert job.graph.restarts == (1 if restart.retries else 0)
    assert not hasattr(cause, "__notes__")


def test_a_producer_that_failed_for_good_ends_the_restart_that_its_consumer_began() -> None:
    job, cause = Job(graph(fixed_delay(5, "1h", fatal=(ValueError,)))), ValueError("cause")
    job.run_all()
    job.report(1, CANCELED, ProducerFailed("consequence"))
    assert job.graph.status is JobStatus.RESTARTING
    assert job.report(0, FAILED, cause) == [JobEnded(JobStatus.FAILED, cause)]
    assert job.graph.restart_due(0, 1) == []


def test_a_consumer_that_ends_after_its_producer_failed_adds_nothing() -> None:
    job, cause = Job(graph(fixed_delay(1, "0ms"))), ValueError("cause")
    job.run_all()
    job.report(0, FAILED, cause)
    job.report(1, CANCELED, ProducerFailed("consequence"))
    assert (job.graph.failure, job.graph.restarts) == (cause, 1)
    assert not hasattr(cause, "__notes__")


def test_a_task_that_failed_without_an_error_fails_the_job() -> None:
    job = Job(graph(no_restart()))
    job.run_all()
    job.report(0, FAILED)
    assert job.graph.status is JobStatus.FAILING
    assert "did not say why" in str(job.graph.failure)


def test_cancel_ends_every_task_that_has_not_ended() -> None:
    job = Job(graph(no_restart()))
    job.run_all()
    job.report(0, FINISHED)
    assert canceled(job.graph.cancel()) == [(1, 0)]
    assert job.graph.cancel() == [], "asking twice changes nothing"
    assert job.report(1, CANCELED) == [JobEnded(JobStatus.CANCELED, None)]
    assert job.graph.cancel() == []


def test_a_report_that_crossed_the_cancel_on_its_way_changes_nothing() -> None:
    job, error = Job(graph(no_restart())), ValueError("first")
    job.run_all()
    job.report(0, FAILED, error)
    assert job.report(1, RUNNING) == []
    assert job.graph.executions[1, 0].state is ExecutionState.CANCELING
    assert job.report(1, CANCELED) == [JobEnded(JobStatus.FAILED, error)]


def test_an_error_while_cancelling_is_no_failure() -> None:
    """B3.5."""
    job, earlier = Job(graph(fixed_delay(5, "0ms"))), ValueError("earlier")
    job.run_all()
    job.report(0, FAILED, earlier)
    job.report(1, CANCELED)
    job.graph.restart_due(0, 1)
    job.graph.cancel()
    job.report(0, FAILED, KeyError("while cancelling"))
    assert job.report(1, CANCELED) == [JobEnded(JobStatus.CANCELED, None)]
    assert not hasattr(earlier, "__notes__")


def test_cancel_while_a_region_waits_for_its_restart_ends_the_job_and_deploys_nothing() -> None:
    job = Job(graph(fixed_delay(5, "1h")))
    job.run_all()
    job.report(0, FAILED, ValueError())
    job.report(1, CANCELED)
    assert job.graph.cancel() == [JobEnded(JobStatus.CANCELED, None)]
    assert job.graph.restart_due(0, 1) == []


def test_a_failure_during_a_restart_begins_another_one() -> None:
    job = Job(graph(fixed_delay(2, "1s")))
    job.run_all()
    job.report(0, FAILED, ValueError())
    job.report(1, CANCELED)
    job.graph.restart_due(0, 1)
    told = job.report(0, FAILED, ValueError("while opening"))
    assert [i for i in told if isinstance(i, ScheduleRestart)] == [ScheduleRestart(0, 2, 1.0)]
    job.report(1, CANCELED)
    assert job.graph.restart_due(0, 1) == [], "the first restart is over"
    assert deployed(job.graph.restart_due(0, 2)) == [(0, 0, 2), (1, 0, 2)]


def test_a_failure_of_another_region_that_may_not_restart_ends_the_waiting_one_too() -> None:
    job, last = Job(graph(fixed_delay(1, "1h"), regions=2)), ValueError("last")
    job.run_all()
    job.report(0, FAILED, ValueError())
    job.report(1, CANCELED)
    assert canceled(job.report(2, FAILED, last)) == [(3, 0)]
    assert job.report(3, CANCELED) == [JobEnded(JobStatus.FAILED, last)]
    assert job.graph.restart_due(0, 1) == []


def test_a_deployment_that_was_overtaken_by_a_failure_does_not_stand() -> None:
    job = Job(graph(no_restart()))
    second = job.graph.executions[1, 0].attempt
    assert job.graph.awaits_deployment(second)
    job.report(0, FAILED, ValueError())
    assert not job.graph.awaits_deployment(second)


def test_a_task_that_waits_for_its_slot_is_scheduled_until_it_has_one() -> None:
    """I2: as in Flink, so that an observer can tell a waiting job from a running one."""
    job = Job(graph(no_restart()))
    source = job.graph.executions[0, 0]

    assert job.graph.slot_is_there(source.attempt, False)
    assert not job.graph.slot_is_there(source.attempt, False)
    assert source.state is ExecutionState.SCHEDULED
    assert job.graph.awaits_deployment(source.attempt)
    assert job.graph.slot_is_there(source.attempt, True)
    assert source.state is ExecutionState.DEPLOYING


def test_a_job_that_waits_for_slots_can_be_cancelled() -> None:
    job = Job(graph(no_restart()))
    for execution in job.graph.executions.values():
        job.graph.slot_is_there(execution.attempt, False)

    assert canceled(job.graph.cancel()) == [(0, 0), (1, 0)]
    assert not job.graph.slot_is_there(job.graph.executions[0, 0].attempt, True)


def test_failing_a_job_that_never_started_ends_it() -> None:
    executions, error = graph(no_restart()), OSError("no splits")
    assert executions.fail(error) == [JobEnded(JobStatus.FAILED, error)]
    assert executions.fail(ValueError()) == []
    assert executions.failure is error


def test_splits_are_distributed_in_turn_and_stay_over_a_restart() -> None:
    executions = graph(fixed_delay(1, "0ms"), parallelism=2)
    splits = [Split(str(i)) for i in range(5)]
    first = [i.descriptor.splits for i in executions.start({0: splits}) if isinstance(i, Deploy)]
    executions.update(executions.executions[0, 0].attempt, FAILED, ValueError(), 0.0, 0.0)
    for vertex, index in ((0, 1), (1, 0), (1, 1)):
        executions.update(executions.executions[vertex, index].attempt, CANCELED, None, 0.0, 0.0)
    again = [i.descriptor.splits for i in executions.restart_due(0, 1) if isinstance(i, Deploy)]
    assert [[split.id for split in part] for part in first] == [["0", "2", "4"], ["1", "3"], [], []]
    assert again == first


@given(
    st.integers(1, 6),
    st.integers(1, 6),
    st.sampled_from([ShipStrategy.RESCALE, ShipStrategy.REBALANCE]),
)
def test_each_subpartition_has_exactly_one_channel_that_reads_it(
    producers: int, consumers: int, ship: ShipStrategy
) -> None:
    stream = StreamGraph("g")
    stream.add_node(StreamNode(id=0, kind="source", name="a", parallelism=producers))
    stream.add_node(StreamNode(id=1, kind="sink", name="b", parallelism=consumers))
    stream.add_edge(StreamEdge(0, 1, partitioning=Partitioning(ship)))
    executions = ExecutionGraph("0" * 32, build_job_graph(stream), no_restart())
    told = [i.descriptor for i in executions.start({}) if isinstance(i, Deploy)]

    written = [
        (o.partition, i, consumer)
        for d in told
        for o in d.outputs
        for i, consumer in enumerate(o.consumers)
    ]
    read = [
        (c.partition, c.subpartition_index, d.attempt.subtask_index)
        for d in told
        for g in d.inputs
        for c in g.channels
    ]
    key = lambda row: (row[0].producer.subtask_index, row[1], row[2])
    assert sorted(read, key=key) == sorted(written, key=key)


STIMULI = st.lists(
    st.one_of(
        st.tuples(
            st.just("report"),
            st.integers(0, 3),
            st.sampled_from([RUNNING, FINISHED, FAILED, CANCELED]),
        ),
        st.tuples(st.just("due"), st.integers(0, 1), st.just(None)),
        st.tuples(st.just("cancel"), st.just(0), st.just(None)),
        st.tuples(st.just("fail all"), st.just(0), st.just(None)),
    ),
    max_size=40,
)


@given(STIMULI)
def test_job_ends_once_and_deploys_nothing_afterwards_whichever_events_come(
    stimuli: list[tuple[str, int, ExecutionState | None]],
) -> None:
    """No two live attempts of one subtask; after JobEnded silence; all tasks ended then."""
    job = Job(graph(fixed_delay(2, "0ms"), regions=2))
    live: dict[int, ExecutionAttemptId] = {}
    due: dict[int, int] = {}
    ended = 0

    def see(told: list[Instruction]) -> None:
        nonlocal ended
        for one in told:
            assert not ended, f"{one} after the end"
            if isinstance(one, Deploy):
                attempt = one.descriptor.attempt
                assert attempt.vertex_id not in live
                live[attempt.vertex_id] = attempt
            elif isinstance(one, ScheduleRestart):
                due[one.region] = one.epoch
            elif isinstance(one, JobEnded):
                ended += 1
                assert not live

    see(job.told)
    for kind, number, state in stimuli:
        if kind == "cancel":
            see(job.graph.cancel())
        elif kind == "fail all":
            see(job.graph.fail_all(ValueError(), 0.0, 0.0))
        elif kind == "due":
            if number in due:
                see(job.graph.restart_due(number, due.pop(number)))
        elif number in live:
            assert state is not None
            attempt = live.pop(number) if state.is_terminal else live[number]
            see(
                job.graph.update(
                    attempt, state, ValueError() if state is FAILED else None, 0.0, 0.0
                )
            )
    assert bool(ended) == job.graph.status.is_terminal


# Rescaling.


def rescale(job: Job, parallelism: int) -> list[Instruction]:
    wanted = {vertex.id: parallelism for vertex in job.graph.graph.vertices}
    told = job.graph.rescale(with_parallelism(job.graph.graph, wanted))
    job.told += told
    return told


def due(job: Job, told: list[Instruction]) -> list[Instruction]:
    waits = [i for i in told if isinstance(i, ScheduleRestart)]
    return [i for wait in waits for i in job.graph.restart_due(wait.region, wait.epoch)]


def test_a_rescaled_job_ends_all_tasks_and_deploys_those_of_the_new_graph() -> None:
    job = Job(graph(no_restart(), parallelism=2))
    job.run_all()
    told = rescale(job, 3)
    assert sum(isinstance(i, CancelTask) for i in told) == 4
    assert job.graph.status is JobStatus.RESTARTING
    assert due(job, told) == []
    for vertex, index in list(job.graph.executions):
        told = job.report(vertex, CANCELED, index=index)
    assert deployed(told) == [(v, i, 1) for v in (0, 1) for i in range(3)]
    assert job.graph.status is JobStatus.RUNNING
    assert (job.graph.restarts, job.graph.rescales, job.graph.is_rescaling) == (0, 1, False)


def test_attempts_rise_also_for_a_subtask_that_was_gone() -> None:
    """A late report of the former one must not count for it."""
    job = Job(graph(no_restart(), parallelism=3))
    late = job.graph.executions[1, 2].attempt
    for parallelism in (1, 3):
        job.run_all()
        told = rescale(job, parallelism)
        due(job, told)
        for vertex, index in list(job.graph.executions):
            job.report(vertex, CANCELED, index=index)
        assert job.graph.update(late, FAILED, OSError("late"), 0.0, 0.5) == []
    assert {e.attempt.attempt for e in job.graph.executions.values()} == {2}


def test_a_region_that_has_finished_keeps_its_tasks_when_the_job_is_rescaled() -> None:
    job = Job(graph(no_restart(), regions=2))
    job.run_all()
    for vertex in (0, 1):
        job.report(vertex, FINISHED)
    due(job, rescale(job, 2))
    for vertex in (2, 3):
        told = job.report(vertex, CANCELED)
    assert deployed(told) == [(2, 0, 1), (2, 1, 1), (3, 0, 1), (3, 1, 1)]
    assert [vertex.parallelism for vertex in job.graph.graph.vertices] == [1, 1, 2, 2]


def test_a_failure_while_a_rescaled_job_ends_its_tasks_is_no_other_restart() -> None:
    job = Job(graph(no_restart()))
    job.run_all()
    told = rescale(job, 2)
    job.report(0, FAILED, OSError("away"))
    job.report(1, CANCELED)
    assert len(deployed(due(job, told))) == 4
    assert job.graph.status is JobStatus.RUNNING


def test_a_waiting_restart_has_the_new_parallelism_at_once() -> None:
    job = Job(graph(fixed_delay(3, "1h")))
    job.run_all()
    former = [i for i in job.report(0, FAILED, OSError("away")) if isinstance(i, ScheduleRestart)]
    job.report(1, CANCELED)
    assert job.graph.is_down
    told = rescale(job, 2)
    assert len(deployed(due(job, told))) == 4
    assert due(job, former) == [], "the delay of the former restart is over later"


def test_a_job_that_is_cancelled_while_it_is_rescaled_ends() -> None:
    job = Job(graph(no_restart()))
    job.run_all()
    rescale(job, 2)
    job.graph.cancel()
    for vertex in (0, 1):
        job.report(vertex, CANCELED)
    assert job.graph.status is JobStatus.CANCELED
