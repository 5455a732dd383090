"""What a process reports about itself to monitors. Monitors in other processes make the same calls
over RPC.

The lag of the event loop is measured with a call that is due at a known time: code that blocks the
loop delays the call too.

The last log records of the engine are kept in memory while a monitor may read them. Log files are
never read.

The position of a waiting task is the chain of awaits from its coroutine to the awaited object.

`FlameSampler` samples the thread of the loop: another thread looks at it a hundred times a second,
for a short while. Each sample names the asyncio task that ran, which is a subtask. So the flame
graph of a vertex holds the samples of its subtasks. Sampling needs no change of the program. It
costs only the time to read the frames, some 250 us a sample.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import logging
import threading
import traceback
from collections import Counter, deque
from collections.abc import Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

from aioflow.core.aio import switch_interval, wait_all
from aioflow.core.errors import Closed, JobNotRunning
from aioflow.core.user_code import place_of, spell_place
from aioflow.inspection.loop_watch import release_watch, watch_loop
from aioflow.inspection.redaction import redacted

if TYPE_CHECKING:
    from aioflow.core.host import Frame, Host, Processes
    from aioflow.inspection.loop_watch import LoopWatch

__all__ = [
    "RECORDS_MAX",
    "FlameSampler",
    "LogTail",
    "LoopLag",
    "ProcessInspector",
    "Samples",
    "Stack",
    "await_chain",
    "merged",
    "tasks_by_name",
    "thread_infos",
]

LAG_EVERY_S = 0.1
LAGS_MAX = 600
"""Number of measurements that are kept, which covers the last minute."""


class LoopLag:
    """Measures how late the running loop is, between `start` and `stop`."""

    def __init__(self) -> None:
        self._lags: deque[float] = deque(maxlen=LAGS_MAX)
        self._handle: asyncio.TimerHandle | None = None
        self._due_at = 0.0

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._due_at = loop.time() + LAG_EVERY_S
        self._handle = loop.call_at(self._due_at, self._measure)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _measure(self) -> None:
        self._lags.append(max(asyncio.get_running_loop().time() - self._due_at, 0.0))
        self.start()

    @property
    def last_ms(self) -> float:
        """The newest measured lag in ms; 0.0 before the first measurement."""
        return round(self._lags[-1] * 1000, 3) if self._lags else 0.0

    @property
    def max_ms(self) -> float:
        """The largest measured lag of the last minute in ms; 0.0 before the first measurement."""
        return round(max(self._lags, default=0.0) * 1000, 3)

    def milliseconds(self) -> dict[str, float]:
        """Returns statistics of the last minute in ms; zeros before the first measurement."""
        ordered = sorted(self._lags)
        if not ordered:
            return {"last": 0.0, "p50": 0.0, "p99": 0.0, "max": 0.0}

        def at(share: float) -> float:
            return round(ordered[min(int(len(ordered) * share), len(ordered) - 1)] * 1000, 3)

        return {"last": self.last_ms, "p50": at(0.5), "p99": at(0.99), "max": self.max_ms}


RECORDS_MAX = 1_000
MESSAGE_CHARACTERS_MAX = 4_000
LOGGER = "aioflow"


class LogTail(logging.Handler):
    """Keeps the newest log records of the process, between `start` and `stop`.

    The tail changes no log level, so records that the program does not log are missing here too.
    """

    def __init__(self) -> None:
        super().__init__()
        self._records: deque[dict[str, Any]] = deque(maxlen=RECORDS_MAX)
        self._next = 1

    def start(self) -> None:
        logging.getLogger(LOGGER).addHandler(self)

    def stop(self) -> None:
        logging.getLogger(LOGGER).removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if self._alone(record):
            # Warnings of a program without handlers go to stderr, but logging counts this handler
            # as one.
            last = logging.lastResort
            if last is not None and record.levelno >= last.level:
                last.handle(record)
        try:
            message = record.getMessage()
            stack = (
                "".join(traceback.format_exception(record.exc_info[1]))
                if record.exc_info and record.exc_info[1]
                else ""
            )
        # As in logging: a record that cannot be formatted must not break the code that logs it.
        except Exception:  # noqa: BLE001
            self.handleError(record)
            return
        self.add(
            {
                "time": int(record.created * 1000),
                "level": record.levelname,
                "logger": record.name,
                "message": redacted(message, MESSAGE_CHARACTERS_MAX),
                "stack": redacted(stack, MESSAGE_CHARACTERS_MAX),
            }
        )

    def add(self, record: dict[str, Any]) -> None:
        """Keeps a record under the next number. The record comes from this process, or from a
        process that this process has started.
        """
        self._records.append({"number": self._next, **record})
        self._next += 1

    def _alone(self, record: logging.LogRecord) -> bool:
        """Returns whether only log tails handle `record`, and this log tail is the first of
        them.
        """
        logger: logging.Logger | None = logging.getLogger(record.name)
        tails = []
        while logger is not None:
            for handler in logger.handlers:
                if not isinstance(handler, LogTail):
                    return False
                tails.append(handler)
            logger = logger.parent if logger.propagate else None
        return tails[:1] == [self]

    def after(self, number: int, level: int, most: int) -> list[dict[str, Any]]:
        """Returns up to `most` of the newest records whose number is above `number` and whose level
        is at least `level`, oldest first."""
        found = [
            one
            for one in list(self._records)
            if one["number"] > number and logging.getLevelName(one["level"]) >= level
        ]
        return found[-most:] if most else []


class ProcessInspector:
    """Answers questions about this process on its loop.

    The inspector records the loop's lag and log records from `start` on, or from the first question
    if that comes earlier.
    """

    def __init__(self, host: Host, logs: LogTail | None = None) -> None:
        """Makes an inspector. `logs` replaces the tail that keeps log records of the process."""
        self._host = host
        self._usage = host.procs.usage
        self._watch: LoopWatch | None = None
        self.lag = LoopLag()
        self.flames = FlameSampler(host)
        self.logs = LogTail() if logs is None else logs
        self.runs = False

    def start(self) -> None:
        """Begins to record lag and log. Further calls have no effect."""
        if not self.runs:
            self.runs = True
            self.lag.start()
            self.logs.start()
            self._watch = watch_loop(self._host)

    async def close(self) -> None:
        """Stops all recording, and keeps what was recorded. Further calls have no effect."""
        if self.runs:
            self.runs = False
            self.lag.stop()
            self.logs.stop()
            await release_watch(self._watch)
        await self.flames.close()

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of the process, under Flink's names where Flink has such a metric."""
        cpu_s, peak_bytes = self._usage()
        return {
            "Status.Process.CPU.Time": cpu_s,
            "Status.Process.Memory.Peak": peak_bytes,
            "Status.Loop.lagMs": self.lag.last_ms,
            "Status.Loop.lagMsMax": self.lag.max_ms,
        }

    async def ask(self, what: str, *args: Any) -> Any:
        """Returns the answer to the question `what`, such as "metrics" or "threads", as plain data
        for another process. Raises Closed for an unknown question.
        """
        self.start()
        match what, args:
            case "loop", ():
                return self._loop()
            case "waiting", (names,):
                return self._waiting(names)
            case "flames", (float(seconds),):
                return [
                    [task, list(stack), count]
                    for (task, stack), count in (await self.flames.samples(seconds)).items()
                ]
            case "logs", (int(after), int(level), int(most)):
                return self.logs.after(after, level, most)
            case "threads", ():
                return thread_infos(self._host.procs)
            case "memory", ():
                collectors = [
                    {"name": f"generation {number}", "count": one["collections"]}
                    for number, one in enumerate(gc.get_stats())
                ]
                return {"peak": self._usage()[1], "collectors": collectors}
            case "metrics", ():
                return self.metrics()
        raise Closed(
            f"this process does not know what {what!r} is: another version of aioflow asks"
        )

    def _loop(self) -> dict[str, Any]:
        loop, tasks = asyncio.get_running_loop(), list(asyncio.all_tasks())
        watch = self._watch
        return {
            "loop": type(loop).__module__.partition(".")[0],
            "debug": loop.get_debug(),
            "lag-ms": self.lag.milliseconds(),
            "holds": [] if watch is None else [one.as_json() for one in reversed(watch.holds)],
            "late-unexplained": 0 if watch is None else watch.unexplained,
            "task-count": len(tasks),
            "tasks": tasks_by_name(tasks),
        }

    def _waiting(self, names: Sequence[str]) -> list[list[str]]:
        """Returns the await chain of each task with one of these names."""
        running, wanted = asyncio.current_task(), frozenset(names)
        return [
            await_chain(task)
            for task in asyncio.all_tasks()
            if task is not running and task.get_name() in wanted
        ]


def merged(what: str, answers: Sequence[Any]) -> Any:
    """Merges the answers of several processes to the question `what` into one."""
    match what:
        case "loop":
            lags = [answer["lag-ms"] for answer in answers]
            return {
                **answers[0],
                "lag-ms": {name: max(lag[name] for lag in lags) for name in lags[0]},
                "holds": sorted(
                    (hold for answer in answers for hold in answer["holds"]),
                    key=lambda hold: -hold["time"],
                ),
                "late-unexplained": sum(answer["late-unexplained"] for answer in answers),
                "task-count": sum(answer["task-count"] for answer in answers),
                "tasks": [task for answer in answers for task in answer["tasks"]][:TASKS_MAX],
            }
        case "memory":
            counts: Counter[str] = Counter()
            for answer in answers:
                for one in answer["collectors"]:
                    counts[one["name"]] += one["count"]
            return {
                "peak": sum(answer["peak"] for answer in answers),
                "collectors": [{"name": name, "count": counts[name]} for name in counts],
            }
        case "waiting" | "flames" | "threads":
            return [one for answer in answers for one in answer]
        case _:
            return answers[0]


AWAITS_MAX = 50
TASKS_MAX = 1_000


def await_chain(task: asyncio.Task[Any]) -> list[str]:
    """Returns the await chain of `task`, outermost coroutine first. Its last entry is the awaited
    object, if known."""
    chain: list[str] = []
    current: Any = task.get_coro()
    while current is not None and len(chain) < AWAITS_MAX:
        frame: FrameType | None = _first(current, "cr_frame", "gi_frame", "ag_frame")
        if frame is None:
            generator = next(filter(inspect.isasyncgen, gc.get_referents(current)), None)
            if generator is None:
                chain.append(_waited_for(current))
                break
            current = generator  # Its step does not say which generator it belongs to.
            continue
        chain.append(place_of(frame.f_code, frame.f_lineno))
        current = _first(current, "cr_await", "gi_yieldfrom", "ag_await")
    return chain


def _first(value: Any, *names: str) -> Any:
    return next((getattr(value, name) for name in names if hasattr(value, name)), None)


def _waited_for(awaited: Any) -> str:
    kind = type(awaited).__name__
    return (
        f"waits for task {awaited.get_name()}"
        if isinstance(awaited, asyncio.Task)
        else f"waits for a {kind}"
    )


def tasks_by_name(tasks: Sequence[asyncio.Task[Any]]) -> list[dict[str, Any]]:
    """Returns name, state and await chain of each task, in the order of the names."""
    ordered = sorted(tasks, key=lambda task: task.get_name())[:TASKS_MAX]
    running = asyncio.current_task()
    return [
        {
            "name": task.get_name(),
            "state": "running" if task is running else "waiting",
            "stack": await_chain(task),
        }
        for task in ordered
        if not task.done()
    ]


def thread_infos(procs: Processes) -> list[dict[str, str]]:
    """Returns the entries of Flink's thread dump: first the asyncio tasks, then the threads."""
    infos = [
        _info(one["name"], f'"{one["name"]}" {one["state"]}', one["stack"])
        for one in tasks_by_name(list(asyncio.all_tasks()))
    ]
    for thread in threading.enumerate():
        stack = _places(procs.thread_frames(thread.ident or 0))[:AWAITS_MAX]
        infos.append(
            _info(
                thread.name, f'"{thread.name}" thread{" (daemon)" if thread.daemon else ""}', stack
            )
        )
    return infos


def _info(name: str, heading: str, stack: Sequence[str]) -> dict[str, str]:
    return {
        "threadName": name,
        "stringifiedThreadInfo": "".join([f"{heading}\n", *(f"\tat {place}\n" for place in stack)]),
    }


INTERVAL_S = 0.01
DEPTH_MAX = 100
SWITCH_S = 0.0001
"""The interpreter's switch interval while sampling: how long a thread waits before it gets the
interpreter.

With the longer default, the loop would nearly always release the interpreter in `select` first, and
the samples would show an idle loop.
"""

KEPT_S = 5.0
"""Time for which the result of a sampling is reused, so that several readers cost one sampling."""

IDLE_FILES = (
    "asyncio/runners.py",
    "asyncio/base_events.py",
    "selectors.py",
    "asyncio/selector_events.py",
    "asyncio/events.py",
)

Stack = tuple[str, ...]
Samples = Counter[tuple[str, Stack]]
"""Counts the samples by (name of the asyncio task, frames). The name is empty outside of all tasks;
frames are outermost first.
"""


class FlameSampler:
    """Samples the stack of the loop's thread. One sampling runs at a time, and all callers share
    its result.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self._running: asyncio.Task[Samples] | None = None
        self._latest: Samples | None = None
        self._latest_at = 0.0
        self._stop: threading.Event | None = None

    async def samples(self, seconds: float) -> Samples:
        """Samples for `seconds` and returns the samples. If a sampling has just ended, returns its
        samples instead.
        """
        now = self._host.clock.monotonic()
        if self._latest is not None and now - self._latest_at < KEPT_S:
            return self._latest
        if self._running is None:
            self._running = asyncio.get_running_loop().create_task(
                self._sample(seconds), name="flame graph"
            )
            self._running.add_done_callback(_retrieved)
        return await asyncio.shield(self._running)

    async def _sample(self, seconds: float) -> Samples:
        self._stop = stop = threading.Event()
        loop, thread = asyncio.get_running_loop(), threading.get_ident()
        looks = max(round(seconds / INTERVAL_S), 1)
        try:
            with switch_interval(SWITCH_S):
                try:
                    sampling = self._host.blocking(
                        _look,
                        self._host.procs,
                        loop,
                        thread,
                        looks,
                        stop,
                        dedicated=True,
                        name="aioflow-flame-graph",
                    )
                except RuntimeError as error:
                    raise JobNotRunning(
                        "the job is over, and its host runs no more threads"
                    ) from error
                self._latest = await sampling
            self._latest_at = self._host.clock.monotonic()
            return self._latest
        finally:
            stop.set()
            self._running = None

    async def close(self) -> None:
        """Ends a sampling that is under way, and waits for its thread."""
        if self._stop is not None:
            self._stop.set()
        if self._running is not None:
            await wait_all([self._running])


def _retrieved(task: asyncio.Task[Samples]) -> None:
    """Marks the task's error as retrieved, because no caller may be waiting for the task any
    more."""
    if not task.cancelled():
        task.exception()


def _look(
    procs: Processes,
    loop: asyncio.AbstractEventLoop,
    thread: int,
    looks: int,
    stop: threading.Event,
) -> Samples:
    """Takes up to `looks` samples of the stack of `thread`, until `stop` is set, and returns them.
    Runs in a thread of its own."""
    samples: Samples = Counter()
    for _ in range(looks):
        frames = procs.thread_frames(thread)
        if not frames:
            break
        task = asyncio.current_task(loop)
        if task is not None or not _is_idle(frames[0][0]):
            samples["" if task is None else task.get_name(), _places(frames)[::-1]] += 1
        if stop.wait(INTERVAL_S):
            break
    return samples


def _places(frames: Sequence[Frame]) -> Stack:
    """Returns the code positions of frames, in the same order."""
    return tuple(spell_place(name, file, line) for file, line, name in frames[:DEPTH_MAX])


def _is_idle(file: str) -> bool:
    return file.replace("\\", "/").endswith(IDLE_FILES)
