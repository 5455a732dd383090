"""Errors that end a simulated run which does not end by itself."""

from __future__ import annotations

__all__ = ["SimDeadlock", "SimFenceBroken", "SimLivelock"]


class SimDeadlock(Exception):
    """Nothing can ever run again: no callback is ready and no timer is set.

    Names the tasks that wait.
    """


class SimLivelock(Exception):
    """The run passed its limit of steps or of virtual time without ending, or one callback its
    limit of processor time.
    """


class SimFenceBroken(Exception):
    """Code under simulation reached for the real machine: a file, a socket, a process, a thread
    or a sleep.
    """
