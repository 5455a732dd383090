"""One process, as it reports about itself to monitors: here by a call, in another process by the
same call over RPC.

The lag of the event loop is measured with a call that is due at a known time: code that blocks the
loop delays the call too.

The last log records of the engine are kept in memory while a monitor may read them. No file is ever
read for them.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import traceback
from collections import deque
from typing import TYPE_CHECKING, Any

from aioflow.core.errors import Closed
from aioflow.inspection.redaction import redacted
from aioflow.inspection.stacks import FlameSampler, await_chain, tasks_by_name, thread_infos

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aioflow.core.host import Host

__all__ = ["ProcessInspector", "LoopLag", "RECORDS_MAX", "LogTail"]

LAG_EVERY_S = 0.1
LAGS_MAX = 600
"""Number of measurements in a minute."""


class LoopLag:
    """Measures between `start` and `stop`, on the running loop."""

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
        """0.0 before the first measurement, as `max_ms`."""
        return round(self._lags[-1] * 1000, 3) if self._lags else 0.0

    @property
    def max_ms(self) -> float:
        """Over the last minute."""
        return round(max(self._lags, default=0.0) * 1000, 3)

    def milliseconds(self) -> dict[str, float]:
        """Over the last minute; zeros before the first measurement."""
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
    """Attached between `start` and `stop`.

    It changes no level: records that the program does not log are missing here too.
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
        self._records.append(
            {
                "number": self._next,
                "time": int(record.created * 1000),
                "level": record.levelname,
                "logger": record.name,
                "message": redacted(message, MESSAGE_CHARACTERS_MAX),
                "stack": redacted(stack, MESSAGE_CHARACTERS_MAX),
            }
        )
        self._next += 1

    def _alone(self, record: logging.LogRecord) -> bool:
        """Whether no other handler gets `record`; of several tails the first answers for all."""
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
        """The newest `most` records after `number`, oldest first."""
        found = [
            one
            for one in list(self._records)
            if one["number"] > number and logging.getLevelName(one["level"]) >= level
        ]
        return found[-most:] if most else []


class ProcessInspector:
    """Everything runs on the loop of the process.

    Lag and log are recorded from `start` on, at the latest from the first question.
    """

    def __init__(self, host: Host) -> None:
        self._usage = host.procs.usage
        self.lag = LoopLag()
        self.flames = FlameSampler(host)
        self.logs = LogTail()
        self.runs = False

    def start(self) -> None:
        """Idempotent."""
        if not self.runs:
            self.runs = True
            self.lag.start()
            self.logs.start()

    async def close(self) -> None:
        """Stop what runs, and keep what was recorded. Idempotent."""
        if self.runs:
            self.runs = False
            self.lag.stop()
            self.logs.stop()
        await self.flames.close()

    def metrics(self) -> dict[str, float]:
        """Metrics under Flink's names where it has one."""
        cpu_s, peak_bytes = self._usage()
        return {
            "Status.Process.CPU.Time": cpu_s,
            "Status.Process.Memory.Peak": peak_bytes,
            "Status.Loop.lagMs": self.lag.last_ms,
            "Status.Loop.lagMsMax": self.lag.max_ms,
        }

    async def ask(self, what: str, *args: Any) -> Any:
        """Plain data, which may travel.

        Raises Closed for an unknown question.
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
                return thread_infos()
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
        return {
            "loop": type(loop).__module__.partition(".")[0],
            "debug": loop.get_debug(),
            "lag-ms": self.lag.milliseconds(),
            "task-count": len(tasks),
            "tasks": tasks_by_name(tasks),
        }

    def _waiting(self, names: Sequence[str]) -> list[list[str]]:
        """The places where the tasks with these names wait."""
        running, wanted = asyncio.current_task(), frozenset(names)
        return [
            await_chain(task)
            for task in asyncio.all_tasks()
            if task is not running and task.get_name() in wanted
        ]
