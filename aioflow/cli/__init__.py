"""The command line.

Commands run flows in this process or on a cluster, manage clusters and their jobs, and show
savepoints. `command` describes the exit codes.
"""

from aioflow.cli.command import main

__all__ = ["main"]
