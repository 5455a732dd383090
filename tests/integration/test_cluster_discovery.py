"""A source that cannot leave the process that submits it, and goes on looking for more to read."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import aioflow as af
from aioflow.operators.source import Split
from tests.integration.clusters import Cluster

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]


class AtHome:
    """Files whose names only this process knows."""

    bounded = False
    discover_every = "20ms"
    stays_here = True

    def __init__(self, directory: Path) -> None:
        self.known: list[str] = []
        self._directory = directory
        self._lines = af.io.lines(directory)

    def put(self, name: str, *lines: str) -> None:
        (self._directory / name).write_text("".join(f"{line}\n" for line in lines))
        self.known.append(name)

    async def discover(self) -> list[Split]:
        return [
            Split(name, None, (str(self._directory / name), 0, None, None)) for name in self.known
        ]

    def reader(self, ctx: Any) -> Any:
        return self._lines.reader(ctx)

    def __reduce__(self) -> Any:
        raise TypeError("it stays here")


async def eventually(rows: list[str], count: int) -> None:
    async with asyncio.timeout(60):
        while len(rows) < count:
            await asyncio.sleep(0.01)


async def test_files_found_later_by_a_source_that_stays_here_are_read_once_over_restarts(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Holds also if one subtask had nothing when the savepoint was taken: files that the other has
    read are not assigned to it.
    """
    await asyncio.to_thread(cluster.start, workers=1, slots=2)
    (tmp_path / "in").mkdir()
    source, rows = AtHome(tmp_path / "in"), list[str]()
    options: dict[str, Any] = {
        "on": af.RemoteCluster(cluster.address, secret=cluster.secret),
        "checkpoints": (tmp_path / "store").as_uri(),
        "every": "1h",
    }

    def flow() -> af.Flow:
        made = af.Flow("at home", parallelism=2)
        made.source(source, uid="in").key_by(len).process(Same, uid="same").sink(
            rows.append, uid="out"
        )
        return made

    source.put("a", "1", "2")
    async with flow().run(**options) as job:
        await eventually(rows, 2)
        await job.stop()
    for name in "bc":
        source.put(name, f"{name}1", f"{name}2")
    async with flow().run(**options) as job:
        await eventually(rows, 6)
        source.put("d", "d1")
        await eventually(rows, 7)
        await job.stop()
    assert sorted(rows) == ["1", "2", "b1", "b2", "c1", "c2", "d1"]


class Same(af.KeyedProcessFunction[int, str, str]):
    def process_element(self, value: str, ctx: Any) -> Iterator[str]:
        yield value
