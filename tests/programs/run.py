"""Runs a drawn program in the ways that must not matter, and compares what comes out with the
model.

A way is a name and what it draws for itself from the seed: sources in another form, other batches,
parallelism, state backend, a simulated loop, failures and restarts, savepoints and checkpoints that
the next run goes on from, simulated machines that fail, columns, worker processes, Spark.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import logging
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import aioflow as af
from aioflow.checkpoint.objects import _STORES
from aioflow.task import partitioners
from aioflow.task.environment import TaskOptions
from aioflow.testing import Faults, run_simulated
from tests.programs import model, pieces
from tests.programs.pieces import plain
from tests.programs.program import Program
from tests.programs.sinks import GATHERED, WRITTEN, Gather, Text, Written
from tests.programs.sources import SOURCE_FORMS, Pace, in_form
from tests.programs.worlds import PLACES, run_world

__all__ = ["WAYS", "Difference", "build_of", "check", "ways_of"]

RUN_S = 60.0
"""Real seconds that a run may take before it counts as one that hangs."""

Build = Callable[..., tuple[af.Flow, list[af.DataStream[Any]]]]


class Difference(AssertionError):
    """A run gave something else than the model."""


@dataclass
class Run:
    """One run of a program in one way."""

    program: Program
    rng: Random
    build: Build
    way: str
    service: Any = None
    """What serves all programs of a way: a bridge to Spark, or the directory of a cluster."""
    log: list[str] = field(default_factory=list)
    """The draws, for a report."""
    kills: int = 0
    """Number of processes that were killed, real or simulated."""

    def draw(self, name: str, *choices: Any) -> Any:
        chosen = self.rng.choice(choices)
        self.log.append(f"{name}={chosen!r}")
        return chosen

    @property
    def parallelism(self) -> int:
        return self.draw("parallelism", 1, 2, 3, 5) if self.program.spread else 1


_computed: dict[int, tuple[Program, list[model.Stream], Build]] = {}
"""The last program that was run, with what its ways have in common."""


def computed(program: Program) -> tuple[list[model.Stream], Build]:
    """Returns what the model says, and the function that builds the flow."""
    known = _computed.get(id(program))
    if known is None or known[0] is not program:
        _computed.clear()
        known = (program, model.evaluate(program), build_of(program))
        _computed[id(program)] = known
    return known[1:]


def build_of(program: Program) -> Build:
    """The function `build` of the program's text.

    No process can import its module, so it travels by value, like a script's function.
    """
    module = types.ModuleType(program.name)
    exec(compile(program.text, f"<{program.name}>", "exec"), module.__dict__)
    return module.build  # type: ignore[no-any-return]


def check(program: Program, way: str, service: Any = None) -> Run:
    """Runs `program` in `way`, and returns the run. Raises `Difference`, or what the run raised."""
    expected, build = computed(program)
    run = Run(program, Random(f"{program.seed} {way}"), build, way, service)
    logging.disable(logging.WARNING)
    try:
        with small_slices(run), cheaper():
            found = WAYS[way](run)
        compare(run, expected, found)
    except Exception as error:
        error.add_note(f"program {program.seed}, way {way}: {' '.join(run.log)}")
        raise
    finally:
        logging.disable(logging.NOTSET)
        for name in [name for name in GATHERED if name.startswith(f"{program.name}/")]:
            del GATHERED[name]
        _STORES.pop(program.name, None)
    return run


compiled_once = functools.cache(partitioners._generate_loop)
"""Compiled at each start, the loops of partitioners would take a tenth of the time of a world."""


def cheaper() -> Any:
    """Saves work that changes no answer: code is compiled once, debug mode keeps short stacks."""
    stack = ExitStack()
    stack.enter_context(patch.object(partitioners, "_generate_loop", compiled_once))
    stack.enter_context(patch("asyncio.constants.DEBUG_STACK_DEPTH", 1))
    return stack


def compare(run: Run, expected: list[model.Stream], found: tuple[list[Any], ...]) -> None:
    """Elements, of exact types; in their order where that is determined, and the order of one
    key where each comes from one subtask.
    """
    loose = run.program.loose
    for output, stream, rows in zip(run.program.outputs, expected, found, strict=True):
        want = [plain(value, loose=loose) for value in stream.values]
        have = [
            str(value) if isinstance(value, Text) else plain(value, loose=loose) for value in rows
        ]
        missing, extra = Counter(want) - Counter(have), Counter(have) - Counter(want)
        if missing or extra:
            raise Difference(
                f"s{output} has {len(have)} elements, expected {len(want)};\n  missing "
                f"{shown(missing)}\n  not expected {shown(extra)}"
            )
        in_files = any(isinstance(value, Text) for value in rows)
        if stream.ordered and not in_files and run.way not in UNORDERED and want != have:
            at = next(i for i, (a, b) in enumerate(zip(want, have, strict=True)) if a != b)
            raise Difference(
                f"s{output} has another order: element {at} is {have[at]}, expected {want[at]}"
            )


def shown(rows: Counter[str]) -> str:
    some = [
        f"{count}x {text[:200]}" if count > 1 else text[:200]
        for text, count in list(rows.items())[:4]
    ]
    return f"{sum(rows.values())}: {'; '.join(some)}" if some else "nothing"


def finished(coroutine: Any, *, debug: bool = False) -> Any:
    """Run to the end, within the time that a run may take."""

    async def bounded() -> Any:
        async with asyncio.timeout(RUN_S):
            return await coroutine

    return asyncio.run(bounded(), debug=debug)


def lengths(program: Program) -> dict[int, int]:
    return {
        i: len(step.args["rows"]) for i, step in enumerate(program.steps) if step.kind == "source"
    }


# --------------------------------------------------------------------------------------------------
# ways


def plainly(run: Run) -> Any:
    """Runs the program as a user first runs it."""
    flow, streams = run.build()
    return finished(flow.collect(*streams))


def otherwise(run: Run) -> Any:
    """Sources, batches, parallelism, backend and debug mode as they fall."""
    rng = Random(f"{run.program.seed} more")  # Leaves the other draws of a seed as they are.
    form = run.draw("form", *SOURCE_FORMS)
    form = rng.choice((form, form, form, "hybrid"))
    if form == "hybrid" and run.program.reads_first:
        form = "list"  # What follows a hybrid's first source might not end.
    more = rng.choice(({}, {}, {"network_memory": "4MiB"}, {"latency_tracking": "1ms"}))
    run.log.append(f"{form} {more}")
    flow, streams = run.build(run.parallelism, lambda rows, i: in_form(form, rows))
    tasks = TaskOptions(
        batch_records_max=run.draw("batch", 1, 2, 3, 10, 2048),
        slice_ns=run.draw("slice", 1, 100_000, 2_000_000),
    )
    state = run.draw("state", "heap", "heap", "rocksdb") if has_rocksdb() else "heap"
    options: dict[str, Any] = {"tasks": tasks, "state": state, **more}
    if len(streams) == 1 and rng.random() < 0.3:
        run.log.append("read as it comes")
        return [finished(iterated(streams[0], options))]
    return finished(flow.collect(*streams, **options), debug=run.draw("debug", False, False, True))


async def iterated(stream: af.DataStream[Any], options: dict[str, Any]) -> list[Any]:
    async with stream.execute_and_collect(**options) as rows:
        return [row async for row in rows]


def simulated(run: Run) -> Any:
    """Runs the program on a simulated loop that varies the undetermined order of a machine, and
    stands still now and then.
    """
    pace = Pace(run.draw("burst", 1, 3, 10, 50))
    flow, streams = run.build(
        run.parallelism, pace if run.draw("paced", True, False) else lambda rows, i: rows
    )
    faults = Faults(pause=50.0, outage_s=(0.001, 0.02)) if run.draw("pause", True, False) else None
    tasks = TaskOptions(batch_records_max=run.draw("batch", 1, 3, 10, 2048))
    found = run_simulated(
        flow, seed=f"{run.program.seed}", collect=streams, faults=faults, tasks=tasks
    )
    if found.errors:
        raise Difference(f"unretrieved errors: {found.errors}")
    return found.outputs


def restarted(run: Run) -> Any:
    """Sources fail, and the job starts again from its last checkpoint."""
    rows = [(i, row) for i, count in lengths(run.program).items() for row in range(count)]
    fails = set(run.rng.sample(rows, min(len(rows), run.draw("failures", 1, 2, 4))))
    flow, streams = run.build(run.parallelism, Pace(run.draw("burst", 1, 3, 10), fails=fails))
    options = {
        "every": run.draw("every", "1ms", "3ms", "10ms"),
        "unaligned": run.draw("unaligned", False, True, "2ms"),
    }
    restart = af.fixed_delay(attempts=10, delay="1ms")
    tasks = TaskOptions(
        batch_records_max=run.draw("batch", 1, 3, 2048),
        local_state_bytes=run.draw("local", 0, 1 << 20),
    )
    options |= checkpoint_options(run, options["unaligned"])
    store = f"memory://{run.program.name}"
    found = run_simulated(
        flow,
        seed=f"{run.program.seed}",
        collect=streams,
        checkpoints=store,
        restart=restart,
        tasks=tasks,
        **options,
    )
    return found.outputs


def restored(run: Run) -> Any:
    """Stopped in the midst once or more, each time in one of the ways to stop, and gone on with
    at another parallelism and backend.
    """
    program, store = run.program, f"memory://{run.program.name}"
    counts = lengths(program)
    phases = run.draw("phases", 1, 2, 3)
    reached = dict.fromkeys(counts, 0)
    unaligned = run.draw("unaligned", False, True, "2ms")
    more = checkpoint_options(run, unaligned)
    how_before, on_machine, former = "", False, 0
    for phase in range(phases + 1):
        parallelism = run.parallelism
        pace = Pace(run.draw("burst", 1, 3, 10, 50))
        if phase < phases:
            reached = pace.limits = {
                i: run.rng.randint(reached[i], count) for i, count in counts.items()
            }
            run.log.append(f"limits={reached}")
        how = (
            run.draw("how", "stop", "savepoint", "checkpoint", "cancel")
            if phase < phases
            else "end"
        )
        every = run.draw("every", "1ms", "5ms", "10s")
        after_s = run.rng.choice(
            (0.0, 0.001, 0.005, 0.02) if every == "1ms" else (0.0, 0.002, 0.01, 0.1)
        )
        tasks = TaskOptions(batch_records_max=run.draw("batch", 1, 3, 2048))
        options: dict[str, Any] = {
            "checkpoints": store,
            "every": every,
            "unaligned": unaligned,
            "tasks": tasks,
            **more,
        }
        if how_before in ("", "stop", "savepoint"):
            drawn = has_rocksdb() and run.draw("state", "heap", "heap", "rocksdb") == "rocksdb"
            # A checkpoint, which may come between a savepoint and the end, is of one backend.
            on_machine = on_machine if how_before == "savepoint" else drawn
        how_before = how
        phase_run = partial(
            run_phase, Interrupt(how, after_s), options, on_machine, f"{program.seed} {phase}"
        )
        try:
            phase_run(gathering(run, parallelism, pace))
        except af.RestoreError as error:
            # Operators of one parallelism are chained, and data in flight between them has no
            # place once they are not.
            if parallelism == former or "data in flight between operators" not in str(error):
                raise
            run.log.append("refused")
            parallelism = former
            phase_run(gathering(run, parallelism, pace))
        former = parallelism
    return gathered(program)


def gathered(program: Program) -> list[list[Any]]:
    """Returns the rows of each output that are committed in this process."""
    outputs = [GATHERED.get(f"{program.name}/{i}", {}) for i in program.outputs]
    return [[row for key in sorted(rows) for row in rows[key]] for rows in outputs]


def gathering(run: Run, parallelism: int, pace: Pace) -> af.Flow:
    """Returns the flow of a run whose outputs go to sinks that gather them."""
    flow, streams = run.build(parallelism, pace)
    for i, stream in zip(run.program.outputs, streams, strict=True):
        stream.sink(Gather(f"{run.program.name}/{i}"), uid=f"out{i}")
    return flow


def run_phase(
    drive: Any, options: dict[str, Any], on_machine: bool, seed: str, flow: af.Flow
) -> None:
    if on_machine:
        finished(run_here(flow, drive, {**options, "state": "rocksdb"}))
    else:
        # Timers of the clock, and times to live, go on from one phase to the next.
        clock = time.time_ns() // 1_000_000
        run_simulated(flow, seed=seed, drive=drive, clock=clock, **options)


def checkpoint_options(run: Run, unaligned: Any) -> dict[str, Any]:
    """Draws options of checkpoints that change no answer."""
    rng = Random(f"{run.program.seed} checkpoints")
    some: list[dict[str, Any]] = [
        {},
        {},
        {"min_pause": "2ms"},
        {"retain": 3},
        {"checkpoint_key": bytes(range(32))},
        {"tolerable_failures": 0},
    ]
    if unaligned is False:
        some.append({"max_concurrent": 3})
    chosen = rng.choice(some)
    run.log.append(str(chosen))
    return chosen


def small_slices(run: Run) -> Any:
    """Sizes of files and slices in proportion to the few keys of a program, or those that there
    are.
    """
    if not run.draw("small slices", False, True):
        return nullcontext()
    stack = ExitStack()
    frames = {"ROWS_A_FRAME": 3, "FIRST_FRAME_ROWS": 2, "KEYS_A_SLICE": 4}
    limits = {"UNNOTED_ROWS_MIN": 4, "UNNOTED_ROWS_MAX": 2_000, "SAMPLE_MIN": 2}
    stack.enter_context(patch.multiple("aioflow.state.heap_churn", **frames, **limits))
    stack.enter_context(patch.multiple("aioflow.state.heap_keys", KEYS_A_SLICE=4))
    if has_rocksdb():
        stack.enter_context(patch("aioflow.state.rocksdb_snapshot.ROWS_A_SLICE", 4))
    return stack


async def run_here(flow: af.Flow, drive: Any, options: dict[str, Any]) -> None:
    async with flow.run(**options) as job:
        await drive(job)


@dataclass(frozen=True)
class Interrupt:
    """Ends a job in one of the ways that the next one can go on from."""

    how: str
    after_s: float

    async def __call__(self, job: af.Job) -> None:
        if self.how == "end":
            await job.wait()
            return
        await asyncio.sleep(self.after_s)
        if self.how == "stop":
            await job.stop()
        elif self.how == "savepoint":
            await job.savepoint()
            await job.cancel()
        else:
            if self.how == "checkpoint":
                await job.checkpoint()
            await job.cancel()


def rescaled(run: Run) -> Any:
    """Goes on at another parallelism in the midst, once or more, while sources fail."""
    program = run.program
    rows = [(i, row) for i, count in lengths(program).items() for row in range(count)]
    fails = set(run.rng.sample(rows, min(len(rows), run.draw("failures", 0, 0, 1))))
    flow = gathering(run, run.parallelism, Pace(run.draw("burst", 1, 3, 10), fails=fails))
    steps = [(run.rng.choice((0.0, 0.005, 0.02)), run.parallelism) for _ in range(3)]
    run.log.append(f"steps={steps}")

    async def drive(job: af.Job) -> None:
        for after_s, parallelism in steps:
            await asyncio.sleep(after_s)
            try:
                await job.rescale(parallelism=parallelism)
            except (af.JobNotRunning, af.RescaleError):
                break  # It has ended, or is about to.
        await job.wait()

    run_simulated(
        flow,
        seed=f"{program.seed}",
        drive=drive,
        checkpoints=f"memory://{program.name}",
        every=run.draw("every", "2ms", "10ms"),
        unaligned=run.draw("unaligned", False, True, "2ms"),
        restart=af.fixed_delay(attempts=10, delay="1ms"),
        tasks=TaskOptions(batch_records_max=run.draw("batch", 1, 3, 2048)),
    )
    return gathered(program)


def in_world(place: str) -> Callable[[Run], Any]:
    """Returns the way that runs a program on simulated machines, while these fail."""

    def run_there(run: Run) -> Any:
        run_world(run, place, partial(gathering, run))
        return gathered(run.program)

    return run_there


def on_columns(run: Run) -> Any:
    """All sources give columns."""
    import pyarrow as pa

    def table(rows: list[Any], i: int) -> Any:
        columns = {name: [pieces.field_of(row, name) for row in rows] for name in pieces.FIELDS}
        arrays = [
            pa.array(column, type=None if any(v is not None for v in column) else pa.int64())
            for column in columns.values()
        ]
        made = pa.Table.from_arrays(arrays, names=list(columns))
        size = run.draw("rows", 1, 3, 10, 1000)
        return af.io.arrow(pa.Table.from_batches(made.to_batches(max_chunksize=size), made.schema))

    flow, streams = run.build(run.parallelism, table)
    state = run.draw("state", "heap", "heap", "rocksdb") if has_rocksdb() else "heap"
    tasks = TaskOptions(batch_records_max=run.draw("batch", 1, 10, 2048))
    return finished(flow.collect(*streams, state=state, tasks=tasks))


def over_workers(run: Run) -> Any:
    """Runs the program in two worker processes."""
    flow, streams = run.build(run.parallelism)
    return finished(flow.collect(*streams, workers=2))


def killed(run: Run) -> Any:
    """Runs the program in two worker processes, and kills one of them in the midst, once or more.

    Restarts read copies of the state on the machine, or the store. The rows are collected, or
    committed to files.
    """
    flow, streams = run.build(run.parallelism, Pace(run.draw("burst", 1, 3, 10), pause_s=0.02))
    delays = [run.draw("delay", 0.1, 0.3, 1.0) for _ in range(run.draw("kills", 1, 2))]
    state = run.draw("state", "heap", "rocksdb") if has_rocksdb() else "heap"

    kind = run.draw("sink", "collect", *WRITTEN)

    async def ran(place: str) -> Any:
        options: dict[str, Any] = {
            "workers": 2,
            "state": state,
            "checkpoints": f"{place}/store",
            "every": run.draw("every", "20ms", "100ms"),
            "unaligned": run.draw("unaligned", False, True, "2ms"),
            "local_recovery": f"{place}/local" if run.draw("local", False, True) else False,
            "restart": af.fixed_delay(attempts=20, delay="10ms"),
        }
        kills = asyncio.create_task(kill_workers(delays, run))
        try:
            if kind == "collect":
                return await flow.collect(*streams, **options)
            written = Written(place, kind, run.program.loose)
            written.add(run.program.outputs, streams)
            await flow.execute(**options)
            return written.read(run.program.outputs)
        finally:
            kills.cancel()

    with tempfile.TemporaryDirectory() as place:
        return finished(ran(place))


def rescaled_workers(run: Run) -> Any:
    """Changes the parallelism, or the number of worker processes, in the midst. Sometimes a worker
    is killed beside it.
    """
    program = run.program
    flow, streams = run.build(run.parallelism, Pace(run.draw("burst", 1, 3, 10), pause_s=0.02))
    kind = run.draw("sink", *WRITTEN)
    steps = [(run.rng.choice((0.05, 0.2, 0.5)), run.draw("to", 1, 2, 3)) for _ in range(2)]
    kills = [0.3] if run.draw("kill", False, False, True) else []
    over = run.draw("over", "workers", "parallelism") if program.spread else "workers"

    async def ran(place: str) -> Any:
        written = Written(place, kind, program.loose)
        written.add(program.outputs, streams)
        options: dict[str, Any] = {
            "workers": run.draw("workers", 1, 2),
            "checkpoints": f"{place}/store",
            "every": run.draw("every", "50ms", "200ms"),
            "unaligned": run.draw("unaligned", False, True, "2ms"),
            "restart": af.fixed_delay(attempts=20, delay="10ms"),
        }
        async with flow.run(**options) as job:
            killing = asyncio.create_task(kill_workers(kills, run))
            for after_s, to in steps:
                await asyncio.sleep(after_s)
                wanted = {over: to} if program.spread else {"workers": to, "parallelism": 1}
                try:
                    await job.rescale(**wanted)
                except (af.JobNotRunning, af.RescaleError) as error:
                    run.log.append(f"{type(error).__name__}: {error}")
                    break  # It has ended, or is about to.
                run.log.append(f"{over}={to}")
            await job.wait()
            killing.cancel()
        return written.read(program.outputs)

    with tempfile.TemporaryDirectory() as place:
        return finished(ran(place))


def died(run: Run) -> Any:
    """Kills the whole program, once or more, and starts it again over its store.

    Its sources do not end before the last start: the store would have nothing to go on from.
    """
    program = run.program
    kind = run.draw("sink", *WRITTEN)
    workers = run.draw("workers", 0, 0, 0, 2)
    unaligned = run.draw("unaligned", False, True, "2ms")
    state = run.draw("state", "heap", "rocksdb") if has_rocksdb() else "heap"
    parallelism = run.parallelism
    deaths = [run.draw("death", 0.0, 0.05, 0.2, 0.4, 0.8) for _ in range(run.draw("deaths", 1, 2))]
    with tempfile.TemporaryDirectory() as place:
        for death_s in [*deaths, None]:
            pace = Pace(run.draw("burst", 1, 3, 10), pause_s=0.01)
            if death_s is not None:
                pace.limits = lengths(program)
            options: dict[str, Any] = {
                "workers": workers,
                "checkpoints": f"{place}/store",
                "every": run.draw("every", "10ms", "50ms"),
                "unaligned": unaligned,
                "state": state,
                "restart": af.fixed_delay(attempts=3, delay="10ms"),
            }
            if not unaligned:  # Data in flight needs the same chains, as in `restored`.
                parallelism = run.parallelism
            given = (program, parallelism, pace, Written(place, kind, program.loose), options)
            Path(place, "program").write_bytes(pickle.dumps(given))
            one_life(f"{place}/program", death_s)
            run.kills += death_s is not None
        return Written(place, kind, program.loose).read(program.outputs)


def one_life(path: str, death_s: float | None) -> None:
    """Runs the program of `path` in a process, which is killed `death_s` after its job runs."""
    argv = [sys.executable, "-m", "tests.programs.child", path]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        timer = threading.Timer(RUN_S, process.kill)
        timer.start()
        try:
            assert process.stdout is not None
            if death_s is not None and process.stdout.readline():
                time.sleep(death_s)
                process.kill()
            _, errors = process.communicate()
        finally:
            process.kill()
            timer.cancel()
    if process.returncode != (0 if death_s is None else -signal.SIGKILL):
        raise Difference(f"the process ended with {process.returncode}: {errors.decode()[-1500:]}")


async def kill_workers(delays: list[float], run: Run) -> None:
    """Kills a worker process of this program after each delay. Linux only."""
    for delay in delays:
        await asyncio.sleep(delay)
        mine = Path(f"/proc/self/task/{os.getpid()}/children").read_text("ascii").split()
        workers = [pid for pid in map(int, mine) if is_worker(pid)]
        if workers:
            os.kill(run.rng.choice(workers), signal.SIGKILL)
            run.kills += 1


def is_worker(pid: int) -> bool:
    return b"aioflow" in Path(f"/proc/{pid}/cmdline").read_bytes()


def on_cluster(run: Run) -> Any:
    """Runs the program on a cluster of processes that stays for all programs."""
    flow, streams = run.build(run.draw("parallelism", 1, 2, 3) if run.program.spread else 1)
    state = run.draw("state", "heap", "rocksdb") if has_rocksdb() else "heap"
    return finished(flow.collect(*streams, state=state, on=af.RemoteCluster(run.service)))


def on_spark(run: Run) -> Any:
    """Runs the program as a job of Spark."""
    flow, streams = run.build(run.draw("parallelism", 1, 2) if run.program.spread else 1)
    return asyncio.run(flow.collect(*streams, on=af.Spark(run.service.master, bridge=run.service)))


def has_rocksdb() -> bool:
    return importlib.util.find_spec("rocksdict") is not None


WAYS: dict[str, Callable[[Run], Any]] = {
    "plainly": plainly,
    "otherwise": otherwise,
    "simulated": simulated,
    "restarted": restarted,
    "restored": restored,
    "rescaled": rescaled,
    **{f"in_world_of_{place}": in_world(place) for place in PLACES},
    "on_columns": on_columns,
    "over_workers": over_workers,
    "killed": killed,
    "rescaled_workers": rescaled_workers,
    "died": died,
    "on_cluster": on_cluster,
    "on_spark": on_spark,
}
UNORDERED = frozenset({"restored", "rescaled", *(f"in_world_of_{place}" for place in PLACES)})
"""Ways whose rows come out of several runs."""

WORKERS_EVERY = 50
KILLED_EVERY = 200
PROCESS_WAYS = {0: "killed", 1: "rescaled_workers", 2: "died"}
"""Ways with processes that end or change, by the remainder of a seed by `KILLED_EVERY`."""

WORLDS = {"": 24, "one": 4, "workers": 2, "cluster": 1}
"""Places of simulated machines, and the number of seeds of 31 that choose each: a world costs as
much as two to six other ways.
"""


def ways_of(program: Program, *, processes: bool = True) -> list[str]:
    """The ways in which a seed's program is run: always plainly, and two or more others."""
    rng = Random(f"ways {program.seed}")
    ways = ["plainly", "otherwise", *rng.sample(("simulated", "restarted", "restored"), 1)]
    if program.columnar:
        ways.append("on_columns")
    if program.spread and rng.random() < 0.3:
        ways.append("rescaled")
    if place := rng.choices(list(WORLDS), list(WORLDS.values()))[0]:
        ways.append(f"in_world_of_{place}")
    if processes and program.seed % WORKERS_EVERY == 0:
        ways.append("over_workers")
    more = PROCESS_WAYS.get(program.seed % KILLED_EVERY - 1)
    if processes and more is not None:
        ways.append(more)
    return ways
