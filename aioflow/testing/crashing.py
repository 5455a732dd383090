"""Kills a flow at a chosen row, restarts it, and compares the results. This tests whether state
survives.

    run = crash_and_restore(counts, here=lambda row: row == ("a", 3))

The flow runs twice on a simulated machine, in virtual time: once to its end, and once with a kill.
The kill acts like SIGKILL: no `finally` runs, and all memory is lost. A new process then resumes
from the last checkpoint on the simulated disk. A sink commits the rows of the stream whenever a
checkpoint completes. Both runs must commit the same rows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from aioflow.api.build import OperatorOptions, add_sink, refuse_pushed
from aioflow.cluster.restart import no_restart
from aioflow.core.aio import wait_first
from aioflow.core.errors import TypeNotSupported, describe_record
from aioflow.core.wire.serializers import Codec
from aioflow.operators.sink import BaseWriter
from aioflow.operators.source import completed
from aioflow.testing.simulation.host import SimulatedHost
from aioflow.testing.simulation.run import simulate
from aioflow.testing.virtual_loop import outside_of_loops

if TYPE_CHECKING:
    from aioflow.api.streams import DataStream
    from aioflow.core.host import Host
    from aioflow.graph.stream_graph import StreamGraph

__all__ = ["CrashedRun", "crash_and_restore"]

PROCESS = "flow"
STORE = "file:///crash-and-restore"

PACE_S = 0.01
"""Virtual time between two elements of a source. It lets checkpoints happen between elements."""

SHOWN_MAX = 5
"""Maximum number of differing rows that an error message shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CrashedRun:
    """The rows of both runs, and the number of rows that were emitted again after the kill."""

    rows: list[Any]
    """Rows that the run with the kill committed, in order of their checkpoints."""
    expected: list[Any]
    """Rows of the run without a kill."""
    committed: int
    """Number of rows that were committed before the kill."""
    again: int
    """Number of rows that the stream emitted before the kill and emitted again after it."""


def crash_and_restore(
    stream: DataStream[Any],
    *,
    here: Callable[[Any], bool] | int,
    seed: int | str = 0,
    every: str = "25ms",
    **options: Any,
) -> CrashedRun:
    """Runs the flow of `stream` once to its end and once with a kill and a restart, and compares
    the rows.

    `here` is where the kill happens: at the first row of the stream for which a function is true,
    or after a number of rows. `every` is the time between checkpoints; the elements of a source
    come 10 ms apart. `seed` chooses the order of events. `options` are the options of `flow.run`
    for one process. The order of rows is not compared. The function is synchronous, and may be
    called while an event loop runs.

    Raises an error of the flow: without `restart=` a flow is not restarted after an error.

    Functions of the flow are called in both runs, and their own variables survive the kill.

    Raises AssertionError if rows are missing, or were committed twice, and ValueError if the stream
    never reached `here`.
    """
    if not callable(here) and type(here) is not int:
        raise TypeError(f"here={here!r}: expected a number of rows, or a function of a row")
    if type(here) is int and here < 1:
        raise ValueError(f"here={here}: expected a number of rows of at least 1")
    for name in ("workers", "on"):
        if options.get(name):
            raise ValueError(
                f"{name}={options[name]!r}: crash_and_restore runs the flow in one simulated "
                f"process, so leave {name}= out"
            )
    whole = _Rows(None)
    _simulate(stream, whole, seed, every, options)
    crashed = _Rows(here)
    _simulate(stream, crashed, seed, every, options)
    if not crashed.is_hit:
        raise ValueError(
            f"the stream gave {len(whole.committed)} rows and never came to here={here!r}, so "
            "nothing was killed"
        )
    _compare(crashed.committed, whole.committed)
    before = crashed.seen_before_kill
    return CrashedRun(
        rows=crashed.committed,
        expected=whole.committed,
        committed=crashed.committed_before_kill,
        again=max(0, crashed.seen - len(crashed.committed)) if before else 0,
    )


@dataclass(slots=True)
class _Rows:
    """The rows that the sink of one run has got and committed. They survive the kill, as in a
    database.
    """

    here: Callable[[Any], bool] | int | None
    parts: dict[tuple[int, int], list[Any]] = field(default_factory=dict)
    """Committed rows, by the number of the checkpoint and the subtask."""
    seen: int = 0
    seen_before_kill: int = 0
    committed_before_kill: int = 0
    is_hit: bool = False
    on_hit: Callable[[], None] = lambda: None

    @property
    def committed(self) -> list[Any]:
        return [row for key in sorted(self.parts) for row in self.parts[key]]

    def see(self, row: Any) -> None:
        self.seen += 1
        if self.here is None or self.is_hit:
            return
        if self.seen >= self.here if isinstance(self.here, int) else self.here(row):
            self.is_hit = True
            self.seen_before_kill = self.seen
            self.committed_before_kill = len(self.committed)
            self.on_hit()


class _Compared:
    """The `Sink` of one run. Rows become visible exactly once, when their checkpoint completes."""

    def __init__(self, rows: _Rows) -> None:
        self._rows = rows

    def writer(self, ctx: Any) -> _Writer:
        return _Writer(self._rows, ctx.runtime.subtask_index)

    def committer(self) -> _Compared:
        return self

    async def commit(self, committables: Sequence[Any]) -> None:
        for checkpoint_id, index, rows in committables:
            self._rows.parts[checkpoint_id, index] = rows

    async def abort(self, committables: Sequence[Any]) -> None:
        """Drops the rows of `committables`, which will not be committed."""


class _Writer(BaseWriter[Any]):
    def __init__(self, rows: _Rows, index: int) -> None:
        self._rows = rows
        self._index = index
        self._open: list[Any] = []

    def write_batch(self, values: Sequence[Any], timestamps: Sequence[int] | None) -> None:
        for row in values:
            self._open.append(row)
            self._rows.see(row)

    async def flush(self) -> None:
        """Does nothing, because rows become visible only when their checkpoint completes."""

    async def prepare(self, checkpoint_id: int) -> list[Any]:
        rows, self._open = self._open, []
        return [(checkpoint_id, self._index, rows)] if rows else []


class _PacedSource:
    """A source that emits one element at a time, with `PACE_S` of virtual time between elements."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "finder":
            raise AttributeError(name)
        return getattr(self._source, name)

    def reader(self, ctx: Any) -> _PacedReader:
        return _PacedReader(self._source.reader(ctx))


class _PacedReader:
    def __init__(self, reader: Any) -> None:
        self._reader = reader
        self._next_at = 0.0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._reader, name)

    def poll_batch(self, _max_records: int) -> Any:
        now = asyncio.get_running_loop().time()
        if now < self._next_at:
            return None
        batch = self._reader.poll_batch(1)
        if batch is not None and len(batch):
            self._next_at = now + PACE_S
        return batch

    async def wait(self) -> None:
        delay_s = self._next_at - asyncio.get_running_loop().time()
        if delay_s > 0:
            await asyncio.sleep(delay_s)
        else:
            await self._reader.wait()


def _simulate(
    stream: DataStream[Any], rows: _Rows, seed: int | str, every: str, options: dict[str, Any]
) -> None:
    flow: Any = stream.flow
    graph: StreamGraph = flow.graph.copy()
    refuse_pushed(graph, "crash_and_restore()")
    for number, node in graph.nodes.items():
        if node.source is not None:
            paced: Any = _PacedSource(node.source.own())
            graph.nodes[number] = replace(node, source=completed(paced))
    add_sink(graph, stream.upstreams, _Compared(rows), OperatorOptions(name="crash_and_restore"))
    errors: list[Exception] = []

    async def run_flow(host: Host) -> None:
        own = {"checkpoints": STORE, "every": every, "restart": no_restart()}
        given = {**own, **options, "host": host}
        try:
            async with flow._run(graph.copy(), given) as job:
                await job.wait()
        except Exception as error:  # noqa: BLE001  # Raised where the process is awaited.
            errors.append(error)

    async def main(host: SimulatedHost) -> None:
        loop = asyncio.get_running_loop()
        hit: asyncio.Future[None] = loop.create_future()
        rows.on_hit = lambda: hit.set_result(None)
        process = host.sim.spawn(PROCESS, run_flow)
        ended = loop.create_task(process.wait(), name="end of the flow")
        await wait_first([hit, ended])
        if hit.done():  # The kill comes from outside of the process.
            process.kill()
            await ended
            ended = loop.create_task(host.sim.restart(PROCESS).wait(), name="end of the flow")
        else:
            hit.cancel()
        await ended
        if errors:
            raise errors[0]

    with outside_of_loops():
        simulate(main, seed)


def _compare(rows: Sequence[Any], expected: Sequence[Any]) -> None:
    missing, doubled = _without(list(expected), rows, lambda row: row)
    if missing and doubled:  # NaN does not equal itself, and arrays compare by element.
        missing, doubled = _without(missing, doubled, _encoded)
    if missing or doubled:
        told = [
            f"{len(some)} {what}: {', '.join(map(describe_record, some[:SHOWN_MAX]))}"
            for what, some in (("missing", missing), ("too many or different", doubled))
            if some
        ]
        raise AssertionError(
            f"after a kill and a restart the stream has {len(rows)} rows, expected "
            f"{len(expected)}; {'; '.join(told)}"
        )


def _without(
    rest: list[Any], rows: Sequence[Any], form: Callable[[Any], Any]
) -> tuple[list[Any], list[Any]]:
    """Returns the rows of `rest` that `rows` lacks, and the rows of `rows` that `rest` lacks. Rows
    are compared by the results of `form(row)`. Changes the list `rest`.
    """
    forms, strange = [form(row) for row in rest], []
    for row in rows:
        try:
            at = forms.index(form(row))
        except ValueError:  # An array raises it too: it has no truth value.
            strange.append(row)
        else:
            del forms[at], rest[at]
    return rest, strange


def _encoded(row: Any) -> Any:
    try:
        return Codec().encode_batch([row], owner="crash_and_restore")
    except TypeNotSupported:
        return row
