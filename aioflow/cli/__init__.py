"""The command line: flows run here or on a cluster, clusters and their jobs, and what is in
savepoints. Exit codes: see `command`.
"""

from aioflow.cli.command import main

__all__ = ["main"]
