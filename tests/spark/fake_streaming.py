"""A Spark whose streaming query the test plays: its batches, its notes of answered ones, and faults
between the two.

It hands batches over as Spark does: by a call of `foreachBatch` for each, whose tasks run the
function of `mapInArrow` in threads and push over real channels. Its notes outlive a query, as
Spark's checkpoint directory does: a batch that was not noted is given again by the next.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pyarrow as pa
import pytest

from aioflow.core.host import Host
from aioflow.core.system_host import SystemHost
from aioflow.spark.bridge import executor
from aioflow.spark.bridge.settings import Reach
from aioflow.spark.bridge.transfers import WINDOW
from aioflow.spark.failures import SparkError, SparkGone
from aioflow.spark.streaming.source import StreamSource

__all__ = ["FAULTS", "ROWS", "FakeSpark", "Log"]

T = TypeVar("T")

PARTITIONS = 2

ROWS = PARTITIONS * (WINDOW + 2)
"""Rows of a batch, each an Arrow batch of its own: from either partition more than a task sends
without credit.
"""

FAULTS = ("before", "task", "tasks", "after", "between")
"""Faults around a batch: the query ends before it calls, a task is killed and run again, all tasks
and the query are killed, the query ends after our answer and before its note, the query ends after
its note.
"""


class Log:
    """Data that outlives a query: the number of batches, those that were noted, and the faults
    around each, once each.
    """

    def __init__(self, directory: Path, batches: int, faults: dict[int, str] | None = None) -> None:
        self.directory = directory
        self.batches = batches
        self.noted = 0
        self.faults = dict(faults or {})
        self.given: list[int] = []
        self.attempts = itertools.count()
        (directory / "spark").mkdir(parents=True)
        (directory / "spark" / "metadata").write_text(json.dumps({"id": "the query"}) + "\n")

    def happens(self, number: int, *kinds: str) -> bool:
        if self.faults.get(number) in kinds:
            del self.faults[number]
            return True
        return False


_here = threading.local()


class Frame:
    """A batch, or the query itself."""

    _jdf = object()
    isStreaming = True

    def __init__(self, log: Log, number: int = -1) -> None:
        self._log = log
        self._number = number

    def partition(self, number: int) -> Iterator[pa.RecordBatch]:
        first = self._number * ROWS + number * ROWS // PARTITIONS
        for row in range(first, first + ROWS // PARTITIONS):
            yield pa.record_batch({"id": pa.array([row], pa.int64())})

    def mapInArrow(
        self, push: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]], schema: str
    ) -> Frame:
        self._push = push
        return self

    def collect(self) -> list[Any]:
        """The tasks of the batch, one behind the other: each pushes its partition, and is run
        again if it is killed.
        """
        rows = []
        for partition in range(PARTITIONS):
            if self._log.happens(self._number, "task"):
                with pytest.raises(OSError, match="killed"):
                    self._run(partition, dies=True)
            if self._log.happens(self._number, "tasks"):
                self._run(partition, dies=True)
            rows += [
                SimpleNamespace(**row)
                for batch in self._run(partition)
                for row in batch.to_pylist()
            ]
        return rows

    def _run(self, partition: int, *, dies: bool = False) -> list[pa.RecordBatch]:
        _here.task = partition, next(self._log.attempts)

        def batches() -> Iterator[pa.RecordBatch]:
            whole = list(self.partition(partition))
            yield from whole[:3] if dies else whole
            if dies:
                raise OSError("killed")

        return list(self._push(batches()))

    # The writer of the query.

    @property
    def writeStream(self) -> Frame:
        return self

    def foreachBatch(self, function: Callable[[Frame, int], None]) -> Frame:
        self._function = function
        return self

    def trigger(self, **trigger: Any) -> Frame:
        return self

    def option(self, name: str, value: str) -> Frame:
        return self

    def start(self) -> Query:
        return Query(self._log, self._function)


class Query:
    """Runs until it has given all batches, is stopped, or ends by a fault."""

    def __init__(self, log: Log, function: Callable[[Frame, int], None]) -> None:
        self._log = log
        self._function = function
        self._stopped = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="query", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        log = self._log
        try:
            while log.noted < log.batches and not self._stopped.is_set():
                number = log.noted
                if log.happens(number, "before"):
                    raise SparkGone("Java was killed before the call")
                log.given.append(number)
                self._function(Frame(log, number), number)
                if log.happens(number, "after"):
                    raise SparkGone("Java was killed after the answer")
                log.noted += 1
                if log.happens(number, "between"):
                    raise SparkGone("Java was killed between two batches")
        except Exception as error:
            self._error = error

    def awaitTermination(self) -> None:
        self._thread.join()
        if self._error is not None and not self._stopped.is_set():
            raise (
                self._error
                if isinstance(self._error, SparkError)
                else SparkError(f"the query failed: {self._error!r}")
            )

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()


class FakeSpark:
    """The bridge. As `with`."""

    master = "local[2]"

    reach = Reach("127.0.0.1")

    def __init__(self, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log = log
        self.host: Host = SystemHost()
        self._threads = ThreadPoolExecutor(8, thread_name_prefix="fake-spark")
        monkeypatch.setattr(executor, "_task", lambda: _here.task)

    def __enter__(self) -> FakeSpark:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._threads.shutdown()

    def source(self) -> StreamSource[Any]:
        bridge: Any = self
        where = str(self.log.directory)
        return StreamSource(
            bridge,
            lambda session: Frame(self.log),
            None,
            batches=False,
            checkpoint=where,
            trigger="once",
        )

    async def session(self) -> None: ...

    async def call(self, fn: Callable[..., T], *args: Any, timeout: str | None = None) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, fn, *args)

    async def job(self, fn: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, fn)
