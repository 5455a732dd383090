"""Simulated machines and processes, and the errors that stop a run that would not end.

Each callback belongs to one process, and to one life of the process.

Invariant: a callback runs only in the life of the process that made it. Killing a process begins a
new generation, so that all callbacks, timers and messages of the old generation are void. A task's
process is kept in the task's context. So when one process completes a future for which a task of
another process waits, the task continues in its own process.
"""

from __future__ import annotations

import asyncio
import enum
from collections import deque
from contextvars import Context, ContextVar, copy_context
from typing import Any, Protocol

__all__ = [
    "OWNER",
    "Life",
    "Orphan",
    "SimDeadlock",
    "SimFenceBroken",
    "SimHandle",
    "SimLivelock",
    "SimMachine",
    "SimProcess",
]


class SimDeadlock(Exception):
    """Nothing can ever run again: no callback is ready and no timer is set.

    The message names the tasks that wait.
    """


class SimLivelock(Exception):
    """The run passed its limit of steps or of virtual time without ending, or one callback passed
    its limit of processor time.
    """


class SimFenceBroken(Exception):
    """Simulated code used the real machine: a file, a socket, a process, a thread or a real
    sleep.
    """


class Orphan(Protocol):
    """An object that the kernel cleans up when a process dies: a connection or a listener."""

    def process_died(self, power: bool) -> None:
        """Cleans up after the process's death. Notifies peers, unless the machine has lost power
        (`power`).
        """
        ...


class SimHandle(asyncio.TimerHandle):
    """A callback that belongs to one life of a process."""

    __slots__ = ("generation", "process")

    process: SimProcess
    generation: int


OWNER: ContextVar[tuple[SimProcess, int] | None] = ContextVar("OWNER", default=None)
"""The process to which the running code belongs, and the generation of the process. None outside of
a simulation.
"""


class SimMachine:
    """A computer: an address, its ports, and the processes that lose power together."""

    __slots__ = ("clock_ms", "name", "next_port", "ports", "up")

    def __init__(self, name: str) -> None:
        self.name = name
        self.up = True
        self.clock_ms = 0
        """Number of ms by which the machine's wall clock is ahead of the loop's.

        A fault may increase or decrease this lead during the run.
        """
        self.ports: dict[int, Any] = {}  # Any: listeners of `network`, which imports this module.
        self.next_port = 49_152


class Life(enum.Enum):
    """The state of a simulated process."""

    NEW = "new"
    RUNNING = "running"
    PAUSED = "paused"
    DEAD = "dead"


class SimProcess:
    """A simulated process of an operating system. To its tasks it looks as if they had an event
    loop of their own.
    """

    __slots__ = (
        "context", "due", "generation", "index", "io", "life", "machine", "name", "orphans",
        "ready", "runnable", "tasks", "tasks_made", "todo",
    )  # fmt: skip

    def __init__(self, name: str, index: int, machine: SimMachine) -> None:
        self.name = name
        self.index = index
        self.machine = machine
        self.life = Life.NEW
        self.generation = 0
        self.ready: deque[SimHandle] = deque()
        self.io: deque[SimHandle] = deque()
        self.due: deque[SimHandle] = deque()
        self.todo = 0  # Callbacks left of the current iteration.
        self.runnable = False
        self.tasks: dict[asyncio.Task[Any], None] = {}
        self.tasks_made = 0
        self.orphans: dict[Orphan, None] = {}
        self.context = Context()

    def begin_life(self) -> None:
        """Marks the process as running. Sets a fresh context, in which `OWNER` is the new life."""
        self.life = Life.RUNNING
        self.context = copy_context()
        self.context.run(OWNER.set, (self, self.generation))

    @property
    def alive(self) -> bool:
        """Whether the process runs or is paused."""
        return self.life is Life.RUNNING or self.life is Life.PAUSED

    def __repr__(self) -> str:
        return f"<process {self.name} {self.life.value}>"
