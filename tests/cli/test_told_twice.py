"""A process that was told to end and is on its way out is not killed by being told so again."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import asyncio, os, signal
from aioflow.cli.cluster import _stopped_by_signals

async def main():
    told = asyncio.Event()
    with _stopped_by_signals(told.set):
        os.kill(os.getpid(), signal.SIGTERM)
        await told.wait()

asyncio.run(main())
os.kill(os.getpid(), signal.SIGTERM)
print("ended by itself")
"""


def test_a_second_sigterm_does_not_kill_what_is_on_its_way_out() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout) == (0, "ended by itself\n"), ended.stderr
