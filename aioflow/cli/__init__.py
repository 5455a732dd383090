"""The command line: `aioflow run`, `aioflow graph`, `aioflow demo`. Exit codes: 0 finished, 1 the job failed, 2 wrong usage."""

from aioflow.cli.command import main

__all__ = ["main"]
