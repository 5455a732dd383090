"""Names frames: where code is, and which frames belong to the user of the engine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import CodeType, FrameType

__all__ = ["Stack", "place_of", "spell_stack", "user_frames"]

FRAMES_MAX = 12
"""Number of innermost frames of user code in a stack."""

ENGINE = str(Path(__file__).parents[1])
LIBRARY = str(Path(asyncio.__file__).parents[1])
LOOP_FILES = tuple(
    str(Path(asyncio.__file__).with_name(name))
    for name in ("base_events.py", "events.py", "runners.py")
)
IMPORT = "<frozen importlib"

Stack = tuple[str, ...]
"""Frames, outermost first."""


def place_of(code: CodeType, line: int) -> str:
    """Function, file and line.

    The file is shown by its last two parts, because the machine's paths are private.
    """
    parts = code.co_filename.replace("\\", "/").rsplit("/", 2)
    return f"{code.co_qualname} ({'/'.join(parts[-2:])}:{line})"


def spell_stack(stack: Stack) -> str:
    """Returns the lines of a stack for a log, innermost last; empty without frames."""
    return "".join(f"\n  at {place}" for place in stack)


def user_frames(frame: FrameType) -> Stack:
    """Returns the innermost frames above those of the engine and the loop, outermost first.

    Libraries that user code calls belong to them. What the engine imports does not.
    """
    places: list[str] = []
    kept, imports = 0, False
    current: FrameType | None = frame
    while current is not None:
        file = current.f_code.co_filename
        if file.startswith((ENGINE, "<aioflow")):
            kept = 0 if imports else kept
            break
        if file in LOOP_FILES:
            break
        imports = file.startswith(IMPORT)
        if not imports:
            places.append(place_of(current.f_code, current.f_lineno))
        if not file.startswith((LIBRARY, "<")) or "site-packages" in file:
            kept = len(places)
        current = current.f_back
    return tuple(reversed(places[:kept][:FRAMES_MAX]))
