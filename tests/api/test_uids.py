"""A savepoint with state under derived uids says so, once per job, and names the operators."""

from __future__ import annotations

import logging
import sqlite3
from pathlib import Path
from typing import Any

import pytest

import aioflow as af


def counted(flow: af.Flow, **options: Any) -> af.DataStream[Any]:
    """Pushed into, and counted by an operator with `options`."""
    pushed = flow.source(af.io.push())
    pushed.key_by(lambda x: x).map(str).key_by(len).count(name="counts", **options).sink(
        lambda row: None
    )
    return pushed


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if "derived from the graph" in record.getMessage()
    ]


async def test_a_savepoint_that_depends_on_derived_uids_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    flow = af.Flow("derived")
    counted(flow)
    with caplog.at_level(logging.WARNING):
        async with flow.run(checkpoints="memory://derived-uids") as job:
            await job.checkpoint()
            assert told(caplog) == []
            for _ in range(2):
                await job.savepoint()
    (message,) = told(caplog)
    assert "job derived keeps the state of 'counts' under uids derived from the graph" in message
    assert "give them uid=" in message


async def test_a_sink_whose_writes_are_committed_has_state_too(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Its prepared writes are found by its uid: under another uid those writes would never be
    visible.
    """
    flow = af.Flow("committed")
    pushed = flow.source(af.io.push(), uid="pushed")
    pushed.sink(af.io.lines(tmp_path / "derived"))
    pushed.sink(af.io.jsonl(tmp_path / "named"), uid="named")
    pushed.sink(af.io.sqlite(tmp_path / "rows.db", "rows"))
    pushed.sink(af.io.blackhole())
    pushed.sink(print)
    with sqlite3.connect(tmp_path / "rows.db") as database:
        database.execute("CREATE TABLE rows (n INTEGER)")
    database.close()
    with caplog.at_level(logging.WARNING):
        async with flow.run(checkpoints="memory://committed-uids") as job:
            await job.savepoint()
    (message,) = told(caplog)
    assert "keeps the state of 'lines', 'sqlite' under uids" in message


@pytest.mark.parametrize("stop", ["named", "without a savepoint", "without checkpoints"])
async def test_a_savepoint_that_depends_on_none_says_nothing(
    stop: str, caplog: pytest.LogCaptureFixture
) -> None:
    flow = af.Flow("named")
    counted(flow, **({"uid": "counts"} if stop == "named" else {}))
    options = (
        {}
        if stop == "without checkpoints"
        else {"checkpoints": f"memory://uids-{stop.replace(' ', '-')}"}
    )
    with caplog.at_level(logging.WARNING):
        async with flow.run(**options) as job:
            await job.stop(savepoint=False if stop == "without a savepoint" else None)
    assert told(caplog) == []
