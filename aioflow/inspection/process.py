"""One process, as it reports about itself to monitors: here by a call, in another process by the
same call over RPC.
"""

from __future__ import annotations

import asyncio
import gc
from typing import TYPE_CHECKING, Any

from aioflow.core.errors import Closed
from aioflow.inspection.await_stacks import await_chain, tasks_by_name, thread_infos
from aioflow.inspection.flames import FlameSampler
from aioflow.inspection.log_tail import LogTail
from aioflow.inspection.loop_lag import LoopLag

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aioflow.core.host import Host

__all__ = ["ProcessInspector"]


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
