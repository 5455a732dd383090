"""Names frames: where code is, and which frames belong to the user of the engine."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aioflow.core.host import Frame

__all__ = ["Stack", "place_of", "spell_stack", "user_frames"]

FRAMES_MAX = 12
"""Number of innermost frames of user code in a stack."""

ENGINE = str(Path(__file__).parents[1]) + os.sep
LIBRARY = str(Path(asyncio.__file__).parents[1]) + os.sep
LOOP_FILES = tuple(
    str(Path(asyncio.__file__).with_name(name))
    for name in ("base_events.py", "events.py", "runners.py")
)

Stack = tuple[str, ...]
"""Frames, outermost first."""


def place_of(code: CodeType, line: int) -> str:
    """Function, file and line.

    The file is shown by its last two parts, because the machine's paths are private.
    """
    return spell_place(code.co_qualname, code.co_filename, line)


def spell_place(name: str, file: str, line: int) -> str:
    """Returns a place in code as text."""
    parts = file.replace("\\", "/").rsplit("/", 2)
    return f"{name} ({'/'.join(parts[-2:])}:{line})"


def spell_stack(stack: Stack) -> str:
    """Returns the lines of a stack for a log, innermost last; empty without frames."""
    return "".join(f"\n  at {place}" for place in stack)


def user_frames(frames: Sequence[Frame]) -> tuple[Stack, bool]:
    """Returns the frames above those of the engine and the loop, outermost first.

    Libraries that user code calls belong to them. Also returns whether the outermost of them is in
    a file of the user, and not in a library that the engine calls or imports.
    """
    places: list[str] = []
    kept, is_own = 0, False
    for file, line, name in frames:
        if file.startswith((ENGINE, "<aioflow")) or file in LOOP_FILES:
            break
        is_library = file.startswith(LIBRARY) or "site-packages" in file
        is_own = not is_library and not file.startswith("<")
        if not file.startswith("<frozen"):
            places.append(spell_place(name, file, line))
        if is_own or "site-packages" in file:
            kept = len(places)
    return tuple(reversed(places[:kept][:FRAMES_MAX])), is_own
