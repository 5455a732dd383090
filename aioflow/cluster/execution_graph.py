"""The state of one job: the current attempt of each subtask, and the consequences of a change.

This module only decides; the JobMaster carries out its instructions.

Each stimulus is a call (`start`, `update`, `restart_due`, `cancel`), which returns instructions.
Time and jitter are arguments. A region is a set of vertices joined by pipelined exchanges: when one
of its tasks fails, the region restarts, and nothing else. Reports of an attempt that is not the
current one are ignored.

    region: RUNNING --failure, may retry--> CANCELING --all ended--> WAITING
            WAITING --delay over--> RUNNING (attempt + 1)
    job:    CREATED -> RUNNING <-> RESTARTING
            RUNNING -> FINISHED | FAILING -> FAILED | CANCELLING -> CANCELED

`rescale` changes the parallelism of every unfinished region: its tasks end, and the tasks of the
new graph start. Attempt numbers of a subtask always rise, even if a lower parallelism had removed
the subtask for a while.

A task that ends CANCELED without a request counts as failed. Usually its producer failed and
reports the root cause itself. The report of the producer may come later, and then replaces the
first failure (`_is_consequence`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, StrEnum
from typing import TYPE_CHECKING

from aioflow.cluster.restart import RestartPolicy, RestartStrategy
from aioflow.core.errors import (
    Broken,
    CancellationTimeout,
    InsufficientBuffers,
    ProcessCrashed,
    ProducerFailed,
    RemoteError,
    ValueNotSupported,
    add_note,
    message_of,
)
from aioflow.graph.deployment import (
    ExecutionAttemptId,
    ExecutionState,
    InputChannelDescriptor,
    InputGateDescriptor,
    PartitionId,
    ResultPartitionDescriptor,
    TaskDeploymentDescriptor,
)
from aioflow.graph.job_graph import (
    JobGraph,
    JobVertex,
    connected_subtasks,
    same_parallelism,
    with_parallelism,
)
from aioflow.graph.stream_graph import ShipStrategy
from aioflow.operators.source import Split

if TYPE_CHECKING:
    from aioflow.checkpoint.assignment import TaskRestore
    from aioflow.graph.job_graph import JobEdge

__all__ = [
    "CancelTask",
    "Deploy",
    "Execution",
    "ExecutionGraph",
    "Instruction",
    "JobEnded",
    "JobStatus",
    "ScheduleRestart",
]


class JobStatus(StrEnum):
    """The status of a job. The values are spelled as in Flink."""

    INITIALIZING = "INITIALIZING"
    CREATED = "CREATED"
    RUNNING = "RUNNING"
    FAILING = "FAILING"
    FAILED = "FAILED"
    CANCELLING = "CANCELLING"
    CANCELED = "CANCELED"
    FINISHED = "FINISHED"
    RESTARTING = "RESTARTING"

    @property
    def is_terminal(self) -> bool:
        return self in (JobStatus.FAILED, JobStatus.CANCELED, JobStatus.FINISHED)


@dataclass(frozen=True, slots=True)
class Deploy:
    """Instruction to submit this attempt.

    Producers are deployed first, so that their partitions exist before consumers ask for them.
    """

    descriptor: TaskDeploymentDescriptor


@dataclass(frozen=True, slots=True)
class CancelTask:
    """Instruction to cancel this attempt. The end of the task is reported to `update`."""

    attempt: ExecutionAttemptId


@dataclass(frozen=True, slots=True)
class ScheduleRestart:
    """Instruction to call `restart_due(region, epoch)` after `delay_s`."""

    region: int
    epoch: int
    delay_s: float


@dataclass(frozen=True, slots=True)
class JobEnded:
    """The job is over: no further instruction will follow."""

    status: JobStatus
    error: BaseException | None


Instruction = Deploy | CancelTask | ScheduleRestart | JobEnded


@dataclass(slots=True)
class Execution:
    """The current attempt of one subtask."""

    attempt: ExecutionAttemptId
    state: ExecutionState = ExecutionState.CREATED
    error: BaseException | None = None


class _RegionState(Enum):
    RUNNING = "running"
    CANCELING = "waits for its tasks to end"
    WAITING = "waits for its restart"


@dataclass(slots=True)
class _Region:
    vertices: list[JobVertex]
    state: _RegionState = _RegionState.RUNNING
    epoch: int = 0
    delay_over: bool = False


@dataclass(slots=True)
class ExecutionGraph:
    """The executions of one job.

    The splits of each source are distributed once, round robin, and kept over restarts. `restore`
    replaces these splits by the restored ones.
    """

    job_id: str
    graph: JobGraph
    restart: RestartPolicy
    status: JobStatus = JobStatus.CREATED
    failure: BaseException | None = None
    restarts: int = 0
    rescales: int = 0
    has_run: bool = False
    """Whether all tasks have ever run at the same time."""
    executions: dict[tuple[int, int], Execution] = field(default_factory=dict)
    locations: dict[tuple[int, int], str] = field(default_factory=dict)
    """Maps (vertex, subtask) to the location where the subtask runs or will run.

    The code that places subtasks fills this mapping, which is empty in a single process.
    """
    _splits: Mapping[int, Sequence[Split]] = field(default_factory=dict)
    _restores: Mapping[tuple[int, int], TaskRestore] = field(default_factory=dict)
    _restored_splits: Mapping[tuple[int, int], Sequence[Split]] = field(default_factory=dict)
    _regions: list[_Region] = field(default_factory=list)
    _next: JobGraph | None = None
    """The graph that is deployed next, while a rescaling is under way; otherwise None."""
    refusal: InsufficientBuffers | None = None
    """The reason why the job went back to its former parallelism. None unless the last rescaling
    was undone.
    """
    _former: JobGraph | None = None
    """The graph before a rescaling, until all tasks of the new graph have run; otherwise None."""
    _attempts_from: int = 0
    """First attempt number of subtasks that a rescaling adds."""
    _is_consequence: bool = False
    """Whether `failure` came from a task that was canceled without a request.

    The next failure of a task then replaces `failure`.
    """
    _strategy: RestartStrategy = field(init=False)

    def __post_init__(self) -> None:
        self._strategy = self.restart.begin()
        self._regions = [_Region(vertices) for vertices in _pipelined_regions(self.graph)]
        for vertex in self.graph.vertices:
            for index in range(vertex.parallelism):
                attempt = ExecutionAttemptId(self.job_id, vertex.id, index, 0)
                self.executions[vertex.id, index] = Execution(attempt)

    @property
    def all_have_run(self) -> bool:
        """Whether every subtask is RUNNING or FINISHED."""
        states = (ExecutionState.RUNNING, ExecutionState.FINISHED)
        return all(execution.state in states for execution in self.executions.values())

    @property
    def next_graph(self) -> JobGraph:
        """The graph of the tasks that the next restart deploys."""
        return self.graph if self._next is None else self._next

    @property
    def is_rescaling(self) -> bool:
        """Whether tasks of a former parallelism are still to be replaced."""
        return self._next is not None

    @property
    def runs(self) -> bool:
        """Whether no region waits for a restart."""
        return all(region.state is _RegionState.RUNNING for region in self._regions)

    @property
    def is_down(self) -> bool:
        """Whether every region waits for a restart, or has finished."""
        return all(
            region.state is not _RegionState.RUNNING or self._all_terminal(region.vertices)
            for region in self._regions
        )

    # Stimuli.

    def restore(
        self,
        states: Mapping[tuple[int, int], TaskRestore],
        splits: Mapping[tuple[int, int], Sequence[Split]],
    ) -> None:
        """Sets the states and splits with which later deployments start, by (vertex id,
        subtask)."""
        self._restores, self._restored_splits = states, splits

    def start(self, splits: Mapping[int, Sequence[Split]]) -> list[Instruction]:
        """Deploys all tasks. `splits` holds the splits of each source, by vertex id."""
        assert self.status is JobStatus.CREATED, f"job {self.job_id} was started already"
        self._splits = splits
        self.status = JobStatus.RUNNING
        return self._deploy([v for region in self._regions for v in region.vertices])

    def update(
        self,
        attempt: ExecutionAttemptId,
        state: ExecutionState,
        error: BaseException | None,
        now: float,
        jitter: float,
    ) -> list[Instruction]:
        """Handles the report of a task that its state is now `state`."""
        execution = self._current(attempt)
        if execution is None or execution.state.is_terminal:
            return []
        if execution.state is ExecutionState.CANCELING and not state.is_terminal:
            return []  # Sent before the cancellation arrived there.
        unasked = (
            state is ExecutionState.CANCELED and execution.state is not ExecutionState.CANCELING
        )
        execution.state = state
        execution.error = error
        self.has_run = self.has_run or self.all_have_run
        if not state.is_terminal:
            return []
        region = self._region_of(attempt.vertex_id)
        instructions: list[Instruction] = []
        if unasked:
            cause = error or Broken(
                f"task {attempt} ended CANCELED, although the job had not cancelled it"
            )
            instructions += self._on_failure(region, cause, now, jitter, is_consequence=True)
        elif state is ExecutionState.CANCELED and error is not None:
            self._attach_closing(error)
        elif state is ExecutionState.FAILED:
            instructions += self._on_failure(
                region, error or Broken(f"task {attempt} failed and did not say why"), now, jitter
            )
        return instructions + self._after_end(region)

    def restart_due(self, region_index: int, epoch: int) -> list[Instruction]:
        """Handles the end of the delay of a restart.

        Returns no instructions if the job is over, or if the region restarts for another failure.
        """
        if not self.awaits_restart(region_index, epoch):
            return []
        region = self._regions[region_index]
        region.delay_over = True
        return self._after_end(region)

    def restart_failed(
        self, region_index: int, epoch: int, error: BaseException, now: float, jitter: float
    ) -> list[Instruction]:
        """Handles a failure to read the state for a restart.

        This counts as another failure, and the restart strategy decides what follows.
        """
        if not self.awaits_restart(region_index, epoch):
            return []
        region = self._regions[region_index]
        delay = (
            None
            if isinstance(error, self.restart.fatal)
            else self._strategy.on_failure(now, jitter)
        )
        if delay is None:
            return self.fail(error)
        self.restarts += 1
        region.epoch += 1
        return [ScheduleRestart(region_index, region.epoch, delay)]

    def rescale(self, graph: JobGraph) -> list[Instruction]:
        """Restarts every unfinished region, with the parallelism of `graph`.

        `graph` has the same vertices and exchanges. A finished region keeps its tasks. A region
        that waits for a restart gets the new parallelism with that restart, without more delay. If
        the network memory does not suffice for the new tasks, the job goes back to its former
        parallelism, and `refusal` says why.
        """
        if self.status not in (JobStatus.RUNNING, JobStatus.RESTARTING):
            return []
        self._former, self.refusal = self.graph, None
        return self._restart_as(graph)

    def rescaled(self) -> None:
        """Notes that all tasks of a rescaling have run: a later failure does not undo the
        rescaling.
        """
        self._former = None

    def _restart_as(self, graph: JobGraph) -> list[Instruction]:
        finished = {
            vertex.id: vertex
            for region in self._regions
            if region.state is _RegionState.RUNNING and self._all_terminal(region.vertices)
            for vertex in region.vertices
        }
        vertices = tuple(finished.get(vertex.id, vertex) for vertex in graph.vertices)
        self._next = replace(graph, vertices=vertices)
        self.rescales += 1
        self.status = JobStatus.RESTARTING
        instructions: list[Instruction] = []
        for region in self._regions:
            if region.vertices[0].id not in finished:
                instructions += self._restart(region, 0.0)
        return instructions

    def cancel(self) -> list[Instruction]:
        """Ends the job without a result; an ended job stays as it is."""
        if self.status.is_terminal or self.status is JobStatus.CANCELLING:
            return []
        self.status = JobStatus.CANCELLING
        return self._cancel_all() + self._ended_if_all_ended()

    def fail(self, error: BaseException) -> list[Instruction]:
        """Ends the job as failed, without a retry."""
        if self.status.is_terminal or self.status in (JobStatus.CANCELLING, JobStatus.FAILING):
            return []
        self.failure, self._is_consequence = error, False
        self.status = JobStatus.FAILING
        return self._cancel_all() + self._ended_if_all_ended()

    def fail_all(self, error: BaseException, now: float, jitter: float) -> list[Instruction]:
        """Handles a failure of the whole job that no single task caused.

        Every region that has not finished restarts, if the strategy allows it.
        """
        if self.status.is_terminal or self.status in (JobStatus.CANCELLING, JobStatus.FAILING):
            return []
        regions = [
            r
            for r in self._regions
            if r.state is _RegionState.RUNNING and not self._all_terminal(r.vertices)
        ]
        if not regions:
            return []
        first, *others = regions
        instructions = self._on_failure(first, error, now, jitter)
        if self.status is not JobStatus.RESTARTING:
            return instructions + self._ended_if_all_ended()
        wait = instructions[0]
        assert isinstance(wait, ScheduleRestart)
        for region in others:
            instructions += self._restart(region, wait.delay_s)
        return instructions

    # Consequences of stimuli.

    def awaits_deployment(self, attempt: ExecutionAttemptId) -> bool:
        """Whether an instruction to deploy `attempt` is still valid.

        The instruction is invalid once `attempt` was cancelled or replaced.
        """
        execution = self._current(attempt)
        return execution is not None and execution.state in (
            ExecutionState.DEPLOYING,
            ExecutionState.SCHEDULED,
        )

    def has_finished(self, attempt: ExecutionAttemptId) -> bool:
        """Returns whether `attempt` is the current attempt of its subtask and has FINISHED."""
        execution = self._current(attempt)
        return execution is not None and execution.state is ExecutionState.FINISHED

    def state_of(self, attempt: ExecutionAttemptId) -> ExecutionState | None:
        """Returns the state of `attempt`; None if another attempt replaced it."""
        execution = self._current(attempt)
        return None if execution is None else execution.state

    def _current(self, attempt: ExecutionAttemptId) -> Execution | None:
        """Returns the execution of `attempt`; None if another attempt replaced it."""
        execution = self.executions.get((attempt.vertex_id, attempt.subtask_index))
        return execution if execution is not None and execution.attempt == attempt else None

    def slot_is_there(self, attempt: ExecutionAttemptId, there: bool) -> bool:
        """Sets the state of `attempt`, which awaits deployment: DEPLOYING if its slot is there
        (`there`), else SCHEDULED.

        Returns whether this changed the state.
        """
        state = ExecutionState.DEPLOYING if there else ExecutionState.SCHEDULED
        execution = self._current(attempt)
        if execution is None or not self.awaits_deployment(attempt) or execution.state is state:
            return False
        execution.state = state
        return True

    def awaits_restart(self, region_index: int, epoch: int) -> bool:
        """Whether a restart is still valid.

        The restart is invalid if the job is over, or if the region has failed again or started
        meanwhile.
        """
        region = self._regions[region_index]
        return (
            not self.status.is_terminal
            and region.epoch == epoch
            and region.state is not _RegionState.RUNNING
        )

    def subtasks_of(self, region_index: int) -> list[tuple[int, int]]:
        """Returns (vertex, index) of each subtask that the restart of a region deploys."""
        graph = self.next_graph
        return [
            (v.id, i)
            for v in self._regions[region_index].vertices
            for i in range(graph.vertex(v.id).parallelism)
        ]

    def _on_failure(
        self,
        region: _Region,
        error: BaseException,
        now: float,
        jitter: float,
        *,
        is_consequence: bool = False,
    ) -> list[Instruction]:
        if isinstance(error, CancellationTimeout) and self.status in (
            JobStatus.CANCELLING,
            JobStatus.RESTARTING,
        ):
            return self._on_stuck(error)
        if self.status is JobStatus.CANCELLING:
            return []
        if self.status is JobStatus.FAILING or region.state is not _RegionState.RUNNING:
            return [] if is_consequence else self._on_further_failure(error)
        self.failure, self._is_consequence = error, is_consequence
        if self._former is not None and isinstance(error, InsufficientBuffers):
            former, self._former, self.refusal = self._former, None, error
            return self._restart_as(former)
        delay = None if self._is_final(error) else self._strategy.on_failure(now, jitter)
        if delay is None:
            self.status = JobStatus.FAILING
            return self._cancel_all()
        self.restarts += 1
        self.status = JobStatus.RESTARTING
        return self._restart(region, delay)

    def _on_further_failure(self, error: BaseException) -> list[Instruction]:
        """Handles a failure in a region that is already ending. The failure is either the root
        cause of the known failure, or a second failure.
        """
        if not self._is_consequence:
            self._attach(error)
            return []
        self.failure, self._is_consequence = error, False
        if self.status is JobStatus.FAILING or not self._is_final(error):
            return []
        self.status = JobStatus.FAILING
        return self._cancel_all()

    def _on_stuck(self, error: CancellationTimeout) -> list[Instruction]:
        """Fails the job for good, because user code still runs although its task was cancelled.

        No new attempt may run beside that code, and the job must not count as cancelled.
        """
        if self.status is JobStatus.CANCELLING or self._is_consequence:
            self.failure, self._is_consequence = error, False
        else:
            self._attach(error)
        self.status = JobStatus.FAILING
        return self._cancel_all()

    def _is_final(self, error: BaseException) -> bool:
        """Whether no restart can help after `error`, under any strategy."""
        # SystemExit and KeyboardInterrupt, which are no Exception, ask for the end of the job.
        # A JobManager outside the program knows the SystemExit of a TaskManager only by its name.
        # A value that cannot be encoded would be the same after a restart.
        fatal = (*self.restart.fatal, CancellationTimeout, ValueNotSupported)
        final = isinstance(error, fatal) or not isinstance(error, Exception)
        final = final or (isinstance(error, RemoteError) and error.type_name == "SystemExit")
        if self.restart.from_running and not self.has_run:
            # A killed process is not the fault of the program. A crash is.
            final = final or not isinstance(error, Broken) or isinstance(error, ProcessCrashed)
        return final

    def _restart(self, region: _Region, delay_s: float) -> list[Instruction]:
        region.state = _RegionState.CANCELING
        region.epoch += 1
        region.delay_over = False
        wait = ScheduleRestart(self._regions.index(region), region.epoch, delay_s)
        return [wait, *self._cancel(region.vertices)]

    def _after_end(self, region: _Region) -> list[Instruction]:
        if self.status in (JobStatus.CANCELLING, JobStatus.FAILING):
            return self._ended_if_all_ended()
        if region.state is not _RegionState.RUNNING:
            if not self._all_terminal(region.vertices):
                return []
            region.state = _RegionState.WAITING
            if not region.delay_over:
                return []
            region.state = _RegionState.RUNNING
            if self._next is not None:
                self._adopt(region, self._next)
            if self.runs:
                self.status = JobStatus.RUNNING
                self._next = None
            for execution in self._executions_of(region.vertices):
                old = execution.attempt
                execution.attempt = ExecutionAttemptId(
                    old.job_id, old.vertex_id, old.subtask_index, old.attempt + 1
                )
                execution.state, execution.error = ExecutionState.CREATED, None
            return self._deploy(region.vertices)
        return self._ended_if_all_ended()

    def mirror(self, parallelism: Mapping[int, int]) -> None:
        """Sets the parallelism of vertices, by vertex id, as another process reports it."""
        graph = with_parallelism(self.graph, parallelism)
        if not same_parallelism(graph, self.graph):
            self.rescales += 1
            for region in self._regions:
                self._adopt(region, graph)

    def _adopt(self, region: _Region, graph: JobGraph) -> None:
        """Gives a region the vertices and exchanges of `graph`. All tasks of the region have
        ended."""
        own = {vertex.id: graph.vertex(vertex.id) for vertex in region.vertices}
        newest = [execution.attempt.attempt for execution in self.executions.values()]
        self._attempts_from = max([self._attempts_from, *newest])
        for place in [place for place in self.executions if place[0] in own]:
            if place[1] >= own[place[0]].parallelism:
                del self.executions[place]
                self.locations.pop(place, None)
        for vertex in own.values():
            for index in range(vertex.parallelism):
                if (vertex.id, index) not in self.executions:
                    attempt = ExecutionAttemptId(self.job_id, vertex.id, index, self._attempts_from)
                    self.executions[vertex.id, index] = Execution(attempt)
        region.vertices = list(own.values())
        exchanges = {edge.id: edge for edge in graph.edges if edge.source in own}
        self.graph = replace(
            self.graph,
            vertices=tuple(own.get(vertex.id, vertex) for vertex in self.graph.vertices),
            edges=tuple(exchanges.get(edge.id, edge) for edge in self.graph.edges),
        )

    def _ended_if_all_ended(self) -> list[Instruction]:
        if not self._all_terminal(self.graph.vertices):
            return []
        if self.status is JobStatus.RUNNING:
            if any(e.state is not ExecutionState.FINISHED for e in self.executions.values()):
                return []
            self.status = JobStatus.FINISHED
        elif self.status is JobStatus.FAILING:
            self.status = JobStatus.FAILED
        elif self.status is JobStatus.CANCELLING:
            self.status = JobStatus.CANCELED
        else:
            return []
        return [JobEnded(self.status, self.failure if self.status is JobStatus.FAILED else None)]

    def _attach_closing(self, error: BaseException) -> None:
        """Adds the errors that a cancelled task raised while it was closed to the root cause, as
        notes."""
        if not isinstance(error, ProducerFailed):
            self._attach(error, "a cancelled task failed while it was closed")
        elif self.failure is not None:
            for note in getattr(error, "__notes__", ()):
                add_note(self.failure, note)

    def _attach(
        self, error: BaseException, what: str = "another task failed at the same time"
    ) -> None:
        """Adds a further failure to the root cause as a note, which begins with `what`."""
        if self.failure is not None and error is not self.failure:
            told = "; ".join(
                [f"{type(error).__name__}: {message_of(error)}", *getattr(error, "__notes__", ())]
            )
            add_note(self.failure, f"aioflow: {what}: {told}")

    def _cancel_all(self) -> list[Instruction]:
        return self._cancel(self.graph.vertices)

    def _cancel(self, vertices: Sequence[JobVertex]) -> list[Instruction]:
        instructions: list[Instruction] = []
        for execution in self._executions_of(vertices):
            if execution.state is ExecutionState.CREATED:
                execution.state = ExecutionState.CANCELED
            elif not execution.state.is_terminal:
                execution.state = ExecutionState.CANCELING
                instructions.append(CancelTask(execution.attempt))
        return instructions

    def _executions_of(self, vertices: Sequence[JobVertex]) -> list[Execution]:
        return [self.executions[v.id, i] for v in vertices for i in range(v.parallelism)]

    def _all_terminal(self, vertices: Sequence[JobVertex]) -> bool:
        return all(execution.state.is_terminal for execution in self._executions_of(vertices))

    def _region_of(self, vertex_id: int) -> _Region:
        return next(
            region for region in self._regions if any(v.id == vertex_id for v in region.vertices)
        )

    # Deployment.

    def _deploy(self, vertices: Sequence[JobVertex]) -> list[Instruction]:
        """Deploys the tasks of `vertices`, producers first."""
        instructions: list[Instruction] = []
        wanted = {v.id for v in vertices}
        for vertex in self.graph.vertices:
            if vertex.id not in wanted:
                continue
            for index in range(vertex.parallelism):
                self.executions[vertex.id, index].state = ExecutionState.DEPLOYING
                instructions.append(Deploy(self._descriptor(vertex, index)))
        return instructions

    def located(self, descriptor: TaskDeploymentDescriptor) -> TaskDeploymentDescriptor:
        """Returns `descriptor` with the current locations of its producers.

        The locations were unknown when the descriptor was made.
        """
        inputs = []
        for gate in descriptor.inputs:
            channels = []
            for channel in gate.channels:
                producer = channel.partition.producer
                location = self.locations[producer.vertex_id, producer.subtask_index]
                channels.append(replace(channel, location=location))
            inputs.append(replace(gate, channels=tuple(channels)))
        return replace(descriptor, inputs=tuple(inputs))

    def _descriptor(self, vertex: JobVertex, index: int) -> TaskDeploymentDescriptor:
        attempt = self.executions[vertex.id, index].attempt
        splits = self._restored_splits.get((vertex.id, index))
        if splits is None:
            splits = self._splits.get(vertex.id, ())[index :: vertex.parallelism]
        return TaskDeploymentDescriptor(
            job_name=self.graph.name,
            attempt=attempt,
            vertex=vertex,
            inputs=tuple(
                self._gate(edge, vertex, index) for edge in self.graph.inputs_of(vertex.id)
            ),
            outputs=tuple(
                self._partition(edge, vertex, attempt) for edge in self.graph.outputs_of(vertex.id)
            ),
            splits=tuple(splits),
            restore=self._restores.get((vertex.id, index)),
        )

    def _partition(
        self, edge: JobEdge, vertex: JobVertex, attempt: ExecutionAttemptId
    ) -> ResultPartitionDescriptor:
        """Describes the partition that the subtask of `attempt` produces for `edge`."""
        reached = connected_subtasks(
            edge.partitioning.strategy,
            attempt.subtask_index,
            vertex.parallelism,
            self.graph.vertex(edge.target).parallelism,
        )
        return ResultPartitionDescriptor(
            PartitionId(edge.id, attempt),
            edge.partitioning,
            edge.operator_index,
            edge.side,
            reached,
            announces=self.graph.awaits_behind(edge.target),
        )

    def _gate(self, edge: JobEdge, vertex: JobVertex, index: int) -> InputGateDescriptor:
        """Describes the input gate through which subtask `index` of `vertex` reads from `edge`."""
        producer = self.graph.vertex(edge.source)
        strategy = edge.partitioning.strategy
        channels = []
        for producer_index in range(producer.parallelism):
            reached = connected_subtasks(
                strategy, producer_index, producer.parallelism, vertex.parallelism
            )
            if index in reached:
                partition = PartitionId(
                    edge.id, self.executions[producer.id, producer_index].attempt
                )
                location = self.locations.get((producer.id, producer_index), "")
                channels.append(InputChannelDescriptor(partition, index - reached.start, location))
        return InputGateDescriptor(
            edge.id,
            edge.input_index,
            strategy is ShipStrategy.HASH,
            tuple(channels),
            strategy.may_be_overtaken,
            producer.name,
        )


def _pipelined_regions(graph: JobGraph) -> list[list[JobVertex]]:
    """Returns the connected components of the graph, each in topological order. All exchanges are
    pipelined, so each component is a region."""
    component = {vertex.id: vertex.id for vertex in graph.vertices}

    def root(vertex_id: int) -> int:
        while component[vertex_id] != vertex_id:
            vertex_id = component[vertex_id]
        return vertex_id

    for edge in graph.edges:
        component[root(edge.source)] = root(edge.target)
    regions: dict[int, list[JobVertex]] = {}
    for vertex in graph.vertices:
        regions.setdefault(root(vertex.id), []).append(vertex)
    return list(regions.values())
