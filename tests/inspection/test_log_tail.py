"""The last log records of a process, kept without taking them from anybody."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import logging
from aioflow.inspection.process import LogTail
{setup}
tails = [LogTail(), LogTail()]
for tail in tails:
    tail.start()
logging.getLogger("aioflow.task").warning("held")
logging.getLogger("aioflow.task").info("chatter")
assert [len(tail.after(0, 0, 10)) for tail in tails] == [1, 1]
"""


@pytest.mark.parametrize(
    ("setup", "said"),
    [
        ("", "held\n"),
        ("logging.basicConfig(format='mine: %(message)s')", "mine: held\n"),
        ("logging.getLogger('aioflow').addHandler(logging.NullHandler())", ""),
    ],
    ids=["no handlers", "handlers of its own", "silenced"],
)
def test_a_program_learns_as_much_as_without_the_tail(setup: str, said: str) -> None:
    """Warnings go to stderr where a program set nothing up: a worker process says there what
    holds its loop.
    """
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(setup=setup)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, said)
