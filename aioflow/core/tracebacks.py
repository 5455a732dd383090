"""Frames and tracebacks for users: which frames are theirs, and errors without those of the engine.

The frames of the engine lie between those of the user. The log has the whole traceback at DEBUG. A
traceback of the engine's frames alone stays as it is.
"""

from __future__ import annotations

import asyncio
import logging
import os
import traceback
from pathlib import Path
from types import CodeType, NoneType, TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aioflow.core.host import Frame

__all__ = [
    "Stack",
    "fold_traceback",
    "format_folded",
    "place_of",
    "spell_stack",
    "user_frames",
    "whole_traceback",
]

logger = logging.getLogger(__name__)

ENGINE = str(Path(__file__).parents[1]) + os.sep
WHOLE = "__aioflow_traceback__"
"""Attribute of an error with its traceback before it was folded."""


class _Whole:
    """A traceback as an attribute. A copied or pickled error has None in its place."""

    __slots__ = ("traceback",)

    def __init__(self, whole: TracebackType | None) -> None:
        self.traceback = whole

    def __reduce__(self) -> Any:
        return (NoneType, ())


def fold_traceback(error: BaseException) -> BaseException:
    """Removes the frames of the engine from `error`, which is about to be raised to the user."""
    whole = error.__traceback__
    places: list[TracebackType] = []
    current = whole
    while current is not None:
        places.append(current)
        current = current.tb_next
    kept = [place for place in places if not _is_internal(place.tb_frame.f_code.co_filename)]
    if not kept or len(kept) == len(places):
        return error
    logger.debug("the whole traceback of an error of user code", exc_info=error)
    # Not by setattr, which the class of the error may refuse.
    if not isinstance(error.__dict__.get(WHOLE), _Whole):
        error.__dict__[WHOLE] = _Whole(whole)
    folded: TracebackType | None = None
    for place in reversed(kept):
        folded = TracebackType(folded, place.tb_frame, place.tb_lasti, place.tb_lineno)
    return error.with_traceback(folded)


def whole_traceback(error: BaseException) -> TracebackType | None:
    """Returns the traceback of `error` as it was before it was folded."""
    whole = error.__dict__.get(WHOLE)
    return whole.traceback if isinstance(whole, _Whole) else error.__traceback__


def format_folded(error: BaseException) -> str:
    """Returns the traceback of `error`, and of its causes, as text without the engine's frames."""
    described = traceback.TracebackException.from_exception(error)
    waiting: list[traceback.TracebackException | None] = [described]
    while waiting:
        one = waiting.pop()
        if one is None:
            continue
        own = [frame for frame in one.stack if not _is_internal(frame.filename)]
        if own:
            one.stack = traceback.StackSummary.from_list(own)
        waiting += [one.__cause__, one.__context__, *(one.exceptions or ())]
    return "".join(described.format())


def _is_internal(file: str) -> bool:
    return file.startswith((ENGINE, "<aioflow"))


FRAMES_MAX = 12
"""Number of innermost frames of user code in a stack."""

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
