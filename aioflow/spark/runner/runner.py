"""Runs a bounded flow as a Spark job: `on=af.Spark(...)`, with the same handle as any other run.

    await flow.execute(on=af.Spark("local[4]"))
    rows = await counts.collect(on=af.Spark("spark://host:7077"))

The flow runs on Spark's executors, in stages with Spark's shuffles between them. The engine's own
operators run there, with their state, timers and windows, so the results are the same as without
Spark (`translate`, `blocks`). Operators that belong to the program (`collect`, functions as sinks,
sinks that print) run in the program after the Spark job. Sinks commit at the very end, so a failed
job makes no output visible.

The job takes no checkpoints, because Spark repeats a lost task. The state of a job cannot be kept:
stopping the job cancels it.

With `streaming="experimental"`, a flow over streaming queries becomes a streaming query itself
(`streaming.run`), which runs until it is stopped.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Never

from aioflow.cluster.execution_graph import JobStatus
from aioflow.cluster.gateways import RunningJob
from aioflow.cluster.job_session import unpack_error
from aioflow.cluster.remote_home import RemoteJobMaster
from aioflow.cluster.restart import no_restart
from aioflow.cluster.shipping import local_job, ship_job
from aioflow.core.aio import wait_first
from aioflow.core.errors import CheckpointError, GraphError, ProtocolError
from aioflow.core.wire.serializers import Codec
from aioflow.operators.source import discover_splits
from aioflow.spark.bridge.calls import Bridge, check_bridge, check_executors
from aioflow.spark.bridge.session import SparkBridge
from aioflow.spark.bridge.settings import check_master
from aioflow.spark.bridge.source import FrameSource
from aioflow.spark.runner.blocks import COMMITTABLES
from aioflow.spark.runner.home import Feeding, HomeStage, commit
from aioflow.spark.runner.program import ERROR_MARK, StageProgram
from aioflow.spark.runner.rdds import StageRdds
from aioflow.spark.runner.translate import plan_flow
from aioflow.spark.streaming.plan import is_stream, plan_stream
from aioflow.spark.streaming.rows import stream_program
from aioflow.spark.streaming.run import StreamRun
from aioflow.spark.streaming.source import StreamSource
from aioflow.spark.versions import Feature, check_feature

if TYPE_CHECKING:
    from aioflow.checkpoint.instructions import CheckpointSettings
    from aioflow.cluster.restart import RestartPolicy
    from aioflow.core.host import Host
    from aioflow.graph.job_graph import JobGraph
    from aioflow.operators.source import Split
    from aioflow.spark.runner.blocks import BlockRow
    from aioflow.spark.runner.translate import SparkPlan
    from aioflow.task.environment import TaskOptions

__all__ = ["Spark", "SparkRun"]

STREAMING = "experimental"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Spark:
    """An option for `on=`: the flow runs as a job of the Spark at `master`.

    Without `master`, the master of the bridge, of spark-submit or of spark-defaults.conf is used,
    otherwise "local[*]". `config` are settings of the Spark session that is started for the run.
    Alternatively, `bridge` is the service's own SparkBridge, which stays open after the run.
    """

    master: str | None = None
    config: Mapping[str, str] = field(default_factory=dict, repr=False)
    streaming: Literal["experimental"] | None = None
    """"experimental" runs a flow over a streaming query of Spark as a streaming query: state is
    exact, and event time advances once per batch. Without it such a flow is refused;
    `af.SparkWorkers` can run it.
    """
    bridge: Bridge | None = None

    def __post_init__(self) -> None:
        if self.streaming not in (None, STREAMING):
            raise ValueError(f"streaming is {self.streaming!r}, expected {STREAMING!r} or None")
        if self.master is not None:
            check_master(self.master)
        if self.bridge is not None:
            check_bridge(self.bridge, "bridge")
            check_executors(self.bridge)

    def start(
        self,
        host: Host,
        graph: JobGraph,
        restart: RestartPolicy,
        options: TaskOptions,
        checkpoints: CheckpointSettings | None = None,
    ) -> SparkRun:
        """Returns the run of one job.

        Raises GraphError for a flow that Spark cannot run, and CheckpointError if `checkpoints` is
        given.
        """
        if checkpoints is not None:
            raise CheckpointError(
                f"flow {graph.name!r} can neither take checkpoints nor restore one on Spark, "
                "which runs lost tasks again by itself: leave "
                "out checkpoints= and restore=, or run it here, with workers= or "
                "on=af.RemoteCluster(...)"
            )
        if restart.retries:
            raise GraphError(
                f"flow {graph.name!r} has restart=, and on Spark that is Spark's business: set "
                "spark.task.maxFailures in config="
            )
        spark = self
        sources: dict[int, FrameSource[Any] | StreamSource[Any]] = {}
        for vertex in graph.vertices:
            # For mypy, a source that needs the host is not a Source.
            source: object = vertex.head.source
            if isinstance(source, FrameSource | StreamSource):
                sources[vertex.id] = source
                spark = self._with_bridge_of(source, spark)
            if isinstance(source, StreamSource) and self.streaming is None:
                raise GraphError(
                    f"source {vertex.head.name!r} is a streaming query, and a job of Spark ends: "
                    "let the flow be a query itself with "
                    f"af.Spark(..., streaming={STREAMING!r}), or run it on machines of Spark with "
                    "on=af.SparkWorkers(...)"
                )
        planner = plan_stream if is_stream(graph) else plan_flow
        if planner is plan_stream:
            check_feature(Feature.QUERIES)
        return SparkRun(host, planner(graph), options, spark, sources, planner)

    def _with_bridge_of(self, source: FrameSource[Any] | StreamSource[Any], spark: Spark) -> Spark:
        """Returns `self` with the bridge of `source`, unless `spark` already has a bridge.

        A DataFrame can only be read in its own session. Raises GraphError for two different
        sessions.
        """
        bridge = source.bridge
        check_executors(bridge)
        if spark.bridge is None and self.master in (None, bridge.master):
            return replace(self, bridge=bridge)
        if bridge is not spark.bridge:
            raise GraphError(
                f"{source!r} belongs to a session on {bridge.master}, and the flow would run in "
                f"another one on {self.master}: give "
                "af.Spark the same bridge=, and one for all"
            )
        return spark


class SparkRun(RunningJob):
    """The run of one job on Spark."""

    job_master: RemoteJobMaster

    def __init__(
        self,
        host: Host,
        plan: SparkPlan,
        options: TaskOptions,
        spark: Spark,
        sources: Mapping[int, FrameSource[Any] | StreamSource[Any]],
        planner: Callable[[JobGraph], SparkPlan],
    ) -> None:
        """Makes the run. `sources` has the sources that read DataFrames, by the id of their stage.
        `planner` is the function that made the plan.
        """
        self.host = host
        self.job_id = host.ids.new("job")
        self.job_master = RemoteJobMaster(host, self.job_id, plan.graph, no_restart())
        self.task_executor = _NoTasks(plan.graph.name)
        self._plan = plan
        self._spark = spark
        self._sources = sources
        self._planner = planner
        self._stream: StreamRun | None = None
        self._shipped = ship_job(plan.graph, options)
        self._job = local_job(plan.graph, replace(options, debug=False))
        self._codec = Codec(self._job.types)
        self._working: asyncio.Task[None] | None = None
        self.job_master.ask = self._ask
        self.job_master.call = self._refuse

    async def run(self) -> JobStatus:
        """Runs the job from its beginning to its end. Cancelling this call cancels the job."""
        master = self.job_master
        if master.cancel_asked:
            master.set_status(JobStatus.CANCELED)
            return master.status
        self._working = asyncio.get_running_loop().create_task(
            self._work(), name=f"spark job {self._plan.graph.name}"
        )
        try:
            await wait_first([self._working])
        except asyncio.CancelledError:
            self._working.cancel()
            await wait_first([self._working])
            raise
        if self._working.cancelled():
            master.set_status(JobStatus.CANCELED)
        elif (error := self._working.exception()) is not None:
            master.error = error
            master.set_status(JobStatus.FAILED)
        else:
            master.set_status(JobStatus.FINISHED)
        return master.status

    async def _work(self) -> None:
        if self._spark.bridge is not None:
            await self._work_on(self._spark.bridge)
            return
        alone = SparkBridge(self._spark.master, config=self._spark.config)
        alone.defaults["spark.app.name"] = f"aioflow {self._plan.graph.name}"
        async with alone:
            await self._work_on(alone)

    async def _work_on(self, bridge: Bridge) -> None:
        logger.info(
            "job %s (%s) on Spark at %s:\n%s",
            self._plan.graph.name,
            self.job_id,
            bridge.master,
            self._plan.describe(),
        )
        home = [
            HomeStage(self.host, self._job, stage, self.job_id)
            for stage in self._plan.stages
            if stage.at_home
        ]
        streams = {
            stage_id: source
            for stage_id, source in self._sources.items()
            if isinstance(source, StreamSource)
        }
        if streams:
            await self._flow_on(bridge, streams, home)
        else:
            await self._on(bridge, await self._discover(), home)

    async def _flow_on(
        self,
        bridge: Bridge,
        sources: Mapping[int, StreamSource[Any]],
        home: Sequence[HomeStage],
    ) -> None:
        """Runs an unbounded flow as a streaming query until it ends or is stopped."""
        programs = {
            stage.id: stream_program(self._shipped, self.job_id, stage, _import_paths())
            for stage in self._plan.stages
            if not stage.at_home
        }
        self._stream = StreamRun(bridge, self._plan, programs, sources, home)
        try:
            await self._stream.run(self._started)
        except Exception as error:
            if (original := original_error(error, self._codec)) is None:
                raise
            raise original from original.__cause__

    def _started(self) -> None:
        self.job_master.set_status(JobStatus.RUNNING)
        self.job_master.started.set_result(None)

    async def _discover(self) -> dict[int, list[list[Split]]]:
        """Returns the splits of each subtask of each source, by the id of the source's stage.

        If `Stage.by_split` is true, each subtask has one split. Otherwise splits are distributed as
        in any other run.
        """
        found: dict[int, list[list[Split]]] = {}
        for stage in self._plan.stages:
            source = stage.root.head.source
            if source is not None and not stage.reads_frame:
                splits = await discover_splits(source, self.host)
                count = max(1, len(splits)) if stage.by_split else stage.parallelism
                found[stage.id] = [splits[i::count] for i in range(count)]
        return found

    async def _on(
        self,
        bridge: Bridge,
        splits: Mapping[int, Sequence[Sequence[Split]]],
        home: Sequence[HomeStage],
    ) -> None:
        programs = {
            stage.id: StageProgram(
                self._shipped, self.job_id, stage.id, _import_paths(), splits.get(stage.id)
            )
            for stage in self._plan.stages
            if not stage.at_home
        }
        session = await bridge.session()
        self._started()
        counts = {stage_id: len(subtasks) for stage_id, subtasks in splits.items()}
        try:
            given = {stage_id: source.what for stage_id, source in self._sources.items()}
            rdds = await bridge.call(StageRdds, session, self._plan, programs, counts, given)
            try:
                at_once = await bridge.call(rdds.compute)
                committables = await self._bring_home(bridge, rdds, home, at_once=at_once)
            finally:
                await bridge.call(rdds.release)
        except Exception as error:
            if (original := original_error(error, self._codec)) is None:
                raise
            raise original from original.__cause__
        for node_id, prepared in committables.items():
            await commit(self.host, self._job, self._plan, node_id, prepared, self.job_id)

    async def _bring_home(
        self, bridge: Bridge, rdds: StageRdds, home: Sequence[HomeStage], *, at_once: bool
    ) -> dict[int, list[Any]]:
        """Passes the results to the tasks that run in this program.

        Returns the prepared writes of sinks, by the id of the node.
        """
        take: Callable[[], list[BlockRow]] = rdds.take if at_once else rdds.take_some
        committables: dict[int, list[Any]] = {}
        feeding = Feeding(home)
        async with feeding:
            while rows := await bridge.call(take):
                for row in rows:
                    if row.edge == COMMITTABLES:
                        committables.setdefault(row.target, []).extend(
                            self._codec.decode_batch(row.payload)
                        )
                await feeding.give([row for row in rows if row.edge != COMMITTABLES])
                if at_once:
                    break
        return committables

    def metrics(self) -> dict[str, float]:
        """Returns no metrics, because Spark shows them in its own web interface."""
        return {}

    def refuse_state(self, operator: str) -> None:
        raise GraphError(
            f"state of {operator!r} cannot be read: job {self._plan.graph.name!r} runs on Spark, "
            "which shows no state of a running job; emit what you want to see, or run the flow "
            "with on=af.SparkWorkers(...)"
        )

    def _ask(self, method: str, *args: object) -> None:
        """Cancels or stops the job. Stopping a bounded job cancels it, because incomplete results
        are useless.

        Stopping a streaming query ends it after its current batch.
        """
        if method == "stop" and self._stream is not None:
            if args[1]:
                self.job_master.refuse_stop(
                    GraphError(
                        f"job {self._plan.graph.name!r} is a query of Spark, whose event time has "
                        "no end: stop it without drain="
                    )
                )
                return
            self._stream.stopping.set()
        elif self._working is not None:
            self._working.cancel()

    async def _refuse(self, method: str, *_: object) -> Any:
        raise CheckpointError(
            f"job {self._plan.graph.name!r} runs on Spark, where there is no {method}: lost tasks "
            "are run again"
        )


class _NoTasks:
    """A substitute for the tasks of a job that Spark runs. It refuses taps and state queries with
    an error that names the job.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def add_tap(self, *_: object, **__: object) -> Never:
        raise self._refusal()

    def remove_tap(self, *_: object, **__: object) -> Never:
        raise self._refusal()

    async def query_state(self, *_: object) -> Never:
        raise self._refusal()

    def _refusal(self) -> GraphError:
        return GraphError(
            f"job {self._name!r} runs on Spark, where nothing can be seen before it is "
            "through: use collect(), or a sink"
        )


def original_error(error: BaseException, codec: Codec) -> Exception | None:
    """Returns the error of user code inside an error of Spark; None if there is none.

    Only an encoded error at the very end of the message counts, because the text before it may
    contain arbitrary text of records. A message that was cut has no encoded error.
    """
    pieces = (getattr(error, "trace", "") or str(error)).split(ERROR_MARK)
    if len(pieces) < 3:
        return None
    try:
        return unpack_error(base64.b64decode(pieces[-2]), codec)
    except (ValueError, ProtocolError):  # The text between the marks is no encoded error.
        return None


def _import_paths() -> list[str]:
    """Returns the entries of `sys.path`, except "". Executors search them for the user's modules,
    which works if the executors see the same file system.
    """
    return [path for path in sys.path if path]
