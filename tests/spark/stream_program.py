"""A program that takes a streaming query into a table of Spark while processes are killed:
`test_deaths` reads what it prints.

    python -m tests.spark.stream_program FOLDER FILES

Each of the `FILES` files of numbers becomes a batch. In the first run (there is no `FOLDER/ran`),
which takes all but the last, Spark's Python processes are killed in the middle of a batch, then
Java, and the flow goes on by itself; then the program says so, and waits to be killed. The next run
takes the last file, and prints whether the table has each number once.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

import aioflow as af
from aioflow.spark.streaming.source import Handover, Taken
from tests.spark.brief import BRIEF

ROWS = 3000
"""Number of rows in a file, in Arrow batches of 500."""


def give(folder: Path, first: int, count: int) -> None:
    for number in range(first, first + count):
        aside = folder / "in" / f".{number}"
        aside.write_text(
            "".join(
                json.dumps({"id": i, "part": i % 2}) + "\n"
                for i in range(number * ROWS, (number + 1) * ROWS)
            )
        )
        aside.rename(folder / "in" / f"{number:05}.json")


def children_of(pid: int) -> list[int]:
    return [
        int(child)
        for thread in Path(f"/proc/{pid}/task").iterdir()
        for child in (thread / "children").read_text().split()
    ]


class Killer:
    """Kills Python processes while they push a batch, and Java when a batch was written down and
    not yet answered; each once.
    """

    def __init__(self, bridge: af.SparkBridge) -> None:
        self._bridge = bridge
        self.killed: list[str] = []
        self._append, self._seal = Handover.append, Handover.seal
        Handover.append = lambda *args: self.append(*args)  # type: ignore[method-assign]
        Handover.seal = lambda *args: self.seal(*args)  # type: ignore[method-assign]

    async def append(self, handover: Handover, number: int, batches: Any) -> None:
        await self._append(handover, number, batches)
        if number == 1 and not self.killed:
            # Java's child is a daemon of Python, and the processes that run tasks are its children.
            tasks = [task for daemon in children_of(self.java()) for task in children_of(daemon)]
            for pid in tasks:
                os.kill(pid, signal.SIGKILL)
            self.killed.append("killed tasks" if tasks else "found no task")

    async def seal(self, handover: Handover, number: int) -> Taken:
        taken = await self._seal(handover, number)
        if number == 2 and len(self.killed) == 1:
            self.killed.append("killed Java")
            os.kill(self.java(), signal.SIGKILL)
        return taken

    def java(self) -> int:
        process = self._bridge._process
        assert process is not None
        return int(process._process.pid)


async def main(folder: Path, files: int) -> None:
    config = {
        "spark.sql.execution.arrow.maxRecordsPerBatch": "500",
        "spark.sql.catalogImplementation": "hive",
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.hadoop.javax.jdo.option.ConnectionURL": (
            f"jdbc:derby:;databaseName={folder}/metastore;create=true"
        ),
        "spark.driver.extraJavaOptions": BRIEF,
    }
    is_first = not (folder / "ran").exists()
    if is_first:
        (folder / "ran").touch()
        (folder / "in").mkdir()
        give(folder, 0, files - 1)
    else:
        give(folder, files - 1, 1)
    async with af.SparkBridge(
        "local[2,4]", config=config
    ) as bridge:  # The second number: so often a task is run.
        killer = Killer(bridge) if is_first else None
        seen = set[int]()

        def watch(row: dict[str, Any]) -> dict[str, Any]:
            seen.add(row["id"])
            return row

        def query(session: Any) -> Any:
            stream = session.readStream.schema("id bigint, part int").option(
                "maxFilesPerTrigger", 1
            )
            return stream.json(str(folder / "in"))

        flow = af.Flow("numbers")
        rows = flow.source(
            af.io.spark(bridge, query, checkpoint=folder / "query", trigger="100ms"), uid="query"
        )
        sink = af.io.spark(
            bridge, table="numbers", schema="id bigint, part int", spool=folder / "spool"
        )
        rows.map(watch, uid="watch").sink(sink, uid="table")
        last = (files - 1 if is_first else files) * ROWS - 1
        settings = {
            "checkpoints": folder / "checkpoints",
            "every": "1s",
            "restart": af.fixed_delay(attempts=20, delay="200ms"),
        }
        async with flow.run(**settings) as job:  # type: ignore[arg-type]
            waiting = asyncio.ensure_future(job.wait())
            while last not in seen and not waiting.done():
                await asyncio.sleep(0.05)
            if waiting.done():
                await waiting
            if killer is not None:
                print(*killer.killed, sep=", ", flush=True)
                await waiting
            waiting.cancel()
            await job.stop()
        stored = [
            row.id
            for row in await bridge.call((await bridge.sql("SELECT id FROM numbers")).collect)
        ]
        print("each once:", sorted(stored) == list(range(files * ROWS)), len(stored), flush=True)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    logging.getLogger("py4j").setLevel(logging.CRITICAL)
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))
