"""Simulated code cannot reach the real machine unnoticed."""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from aioflow.testing import SimFenceBroken, simulate
from aioflow.testing.simulation import SimulatedHost

REACHES: dict[str, Callable[[], object]] = {
    "open": lambda: Path("/dev/null").read_bytes(),
    "socket.__new__": lambda: socket.socket(),
    "socket.getaddrinfo": lambda: socket.getaddrinfo("localhost", 80),
    "subprocess.Popen": lambda: subprocess.Popen(["true"]),
    "_thread.start_": lambda: threading.Thread(target=print).start(),
    "time.sleep": lambda: time.sleep(0),
    "os.listdir": lambda: list(Path("/").iterdir()),
}


@pytest.mark.parametrize("event", REACHES)
def test_reaching_for_the_machine_fails_where_it_happens(event: str) -> None:
    async def main(host: SimulatedHost) -> None:
        await asyncio.sleep(1)
        REACHES[event]()

    with pytest.raises(SimFenceBroken, match=f"process main reached for the real machine: {event}"):
        simulate(main, 1)


def test_swallowing_the_error_does_not_save_the_run() -> None:
    async def main(host: SimulatedHost) -> None:
        try:
            time.sleep(0)
        except Exception as error:
            host.sim.loop.note("swallowed", type(error).__name__)
        await asyncio.sleep(1)

    with pytest.raises(SimFenceBroken):
        simulate(main, 1)


def test_process_that_reaches_out_is_named() -> None:
    async def child_main(child: SimulatedHost) -> None:
        time.sleep(0)

    async def main(host: SimulatedHost) -> None:
        host.sim.spawn("worker", child_main)
        await asyncio.sleep(1)

    with pytest.raises(SimFenceBroken, match="process worker"):
        simulate(main, 1)


def test_imports_and_logging_pass(tmp_path: Path) -> None:
    handler = logging.FileHandler(tmp_path / "log", delay=True)
    logger = logging.getLogger("test_fence")

    async def main(host: SimulatedHost) -> str:
        sys.modules.pop("this_is_loaded_here", None)
        sys.modules.pop("colorsys", None)
        import colorsys

        logger.warning("written")
        return colorsys.__name__

    logger.addHandler(handler)
    try:
        assert simulate(main, 1).value == "colorsys"
    finally:
        logger.removeHandler(handler)
        handler.close()
    assert (tmp_path / "log").read_text() == "written\n"


def test_fence_stands_only_while_a_simulation_runs_and_can_be_left_out() -> None:
    async def main(host: SimulatedHost) -> None:
        time.sleep(0)

    with pytest.raises(SimFenceBroken):
        simulate(main, 1)
    time.sleep(0)
    assert simulate(main, 1, fence=False).errors == []
