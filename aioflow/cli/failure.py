"""Describes the failure of a job for its user.

The description holds the error, its place in the flow, and the line of the user's own code. Frames
of the engine are left out.
"""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

from aioflow.core.errors import message_of

__all__ = ["describe"]

PACKAGE = str(Path(__file__).parents[1])
FOREIGN = (
    PACKAGE,
    sysconfig.get_path("stdlib"),
    sysconfig.get_path("purelib"),
    sysconfig.get_path("platlib"),
    "<",
)
"""Paths of files that the user did not write."""


def describe(error: BaseException) -> list[str]:
    """Returns a few lines about `error`.

    They are its type and message, its notes (which name operator, subtask and record), and the
    user's innermost line of code.
    """
    text = message_of(error)
    lines = [f"{type(error).__name__}: {text}" if text else type(error).__name__]
    lines += [note.removeprefix("aioflow: ") for note in getattr(error, "__notes__", ())]
    # A frame of compiled code has no line to show.
    own = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.line and not frame.filename.startswith(FOREIGN)
    ]
    if own:
        frame = own[-1]
        lines.append(f"at {frame.filename}:{frame.lineno}, in {frame.name}: {frame.line}")
    return lines
