"""The task that reads all metrics once a second."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from aioflow.core.errors import Closed
from aioflow.monitoring import monitor
from aioflow.monitoring.monitor import Monitor, Sampler


class Trouble:
    """A monitor without jobs, whose cluster cannot be asked the first times."""

    host: Any
    watched: Any

    def __init__(self, errors: list[Exception]) -> None:
        self.host = self.watched = self.clock = self
        self.errors = errors

    def wall_ms(self) -> int:
        return 0

    def jobs(self) -> list[Any]:
        return []

    def forget(self) -> None: ...

    async def refresh(self) -> None:
        if self.errors:
            raise self.errors.pop(0)


@pytest.mark.parametrize(
    "error", [Closed("gone"), TimeoutError(), RuntimeError("unexpected")], ids=repr
)
async def test_readings_go_on_when_the_cluster_cannot_be_asked(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plots and streams of events would stand still without a word."""
    monkeypatch.setattr(monitor, "EVERY_S", 0.001)
    sampler = Sampler(cast(Monitor, Trouble([error])))
    sampler.start()
    async with asyncio.timeout(60):
        while sampler.ticks < 3:
            await sampler.tick()
    await sampler.stop()
    assert not sampler.runs
