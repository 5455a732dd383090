"""Positions of the tasks of a loop: for a waiting task, the chain of awaits from its coroutine to
the awaited object.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import sys
import threading
import traceback
from collections.abc import Sequence
from types import CodeType, FrameType
from typing import Any

__all__ = ["await_chain", "place_of", "tasks_by_name", "thread_infos"]

DEPTH_MAX = 50
TASKS_MAX = 1_000


def place_of(code: CodeType, line: int) -> str:
    """Function, file and line.

    The file is shown by its last two parts, because the machine's paths are private.
    """
    parts = code.co_filename.replace("\\", "/").rsplit("/", 2)
    return f"{code.co_qualname} ({'/'.join(parts[-2:])}:{line})"


def await_chain(task: asyncio.Task[Any]) -> list[str]:
    """Outermost first; the last entry is the awaited object, if it is known."""
    chain: list[str] = []
    current: Any = task.get_coro()
    while current is not None and len(chain) < DEPTH_MAX:
        frame: FrameType | None = _first(current, "cr_frame", "gi_frame", "ag_frame")
        if frame is None:
            generator = next(filter(inspect.isasyncgen, gc.get_referents(current)), None)
            if generator is None:
                chain.append(_waited_for(current))
                break
            current = generator  # Its step does not say which generator it belongs to.
            continue
        chain.append(place_of(frame.f_code, frame.f_lineno))
        current = _first(current, "cr_await", "gi_yieldfrom", "ag_await")
    return chain


def _first(value: Any, *names: str) -> Any:
    return next((getattr(value, name) for name in names if hasattr(value, name)), None)


def _waited_for(awaited: Any) -> str:
    kind = type(awaited).__name__
    return (
        f"waits for task {awaited.get_name()}"
        if isinstance(awaited, asyncio.Task)
        else f"waits for a {kind}"
    )


def tasks_by_name(tasks: Sequence[asyncio.Task[Any]]) -> list[dict[str, Any]]:
    """Name, state and await chain of each, in the order of their names."""
    ordered = sorted(tasks, key=lambda task: task.get_name())[:TASKS_MAX]
    running = asyncio.current_task()
    return [
        {
            "name": task.get_name(),
            "state": "running" if task is running else "waiting",
            "stack": await_chain(task),
        }
        for task in ordered
        if not task.done()
    ]


def thread_infos() -> list[dict[str, str]]:
    """The entries of Flink's thread dump: tasks, which play the part of threads, then the threads
    of the process.
    """
    infos = [
        _info(one["name"], f'"{one["name"]}" {one["state"]}', one["stack"])
        for one in tasks_by_name(list(asyncio.all_tasks()))
    ]
    frames = sys._current_frames()
    for thread in threading.enumerate():
        frame = frames.get(thread.ident or 0)
        stack = (
            []
            if frame is None
            else [place_of(f.f_code, line) for f, line in traceback.walk_stack(frame)][:DEPTH_MAX]
        )
        infos.append(
            _info(
                thread.name, f'"{thread.name}" thread{" (daemon)" if thread.daemon else ""}', stack
            )
        )
    return infos


def _info(name: str, heading: str, stack: Sequence[str]) -> dict[str, str]:
    return {
        "threadName": name,
        "stringifiedThreadInfo": "".join([f"{heading}\n", *(f"\tat {place}\n" for place in stack)]),
    }
