"""Runs a drawn program once, in a process that its starter may kill: see `died` in `run.py`."""

from __future__ import annotations

import asyncio
import pickle
import sys
from pathlib import Path

from tests.programs.run import build_of


async def main(path: str) -> None:
    """Runs the program in the file at `path`, and prints a line once its job runs."""
    program, parallelism, pace, written, options = pickle.loads(Path(path).read_bytes())
    flow, streams = build_of(program)(parallelism, pace)
    written.add(program.outputs, streams)
    async with flow.run(**options) as job:
        print("running", flush=True)
        await job.wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
