"""The command line.

Commands run flows here or on a cluster, manage clusters and their jobs, and show savepoints. Exit
codes: see `command`.
"""

from aioflow.cli.command import main

__all__ = ["main"]
