"""Redraws a block of lines in place at the bottom of a terminal.

The program's output scrolls by above the block. The module uses ANSI control sequences, not curses.
While a block is shown, `sys.stdout` and `sys.stderr` are replaced if they refer to the same
terminal.

`describe` describes the failure of a job to the user: the error, its location in the flow, and the
line of the user's own code. Frames of the engine are left out.
"""

from __future__ import annotations

import io
import os
import select
import shutil
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TextIO

from aioflow.core.contexts import contextmanager
from aioflow.core.errors import message_of

__all__ = ["LiveBlock", "describe", "is_live", "reader_is_gone", "uses_color"]

CLEAR_LINE, CLEAR_BELOW = "\x1b[K", "\x1b[J"

SIZE_DEFAULT = (100, 40)
"""Columns and lines assumed for a terminal of unknown size."""


def is_live(stream: TextIO, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether lines can be redrawn in place on `stream`."""
    return stream.isatty() and environ.get("TERM", "") != "dumb"


def uses_color(stream: TextIO, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether `stream` shows colours, and the user has not disabled colours by NO_COLOR (see
    no-color.org).
    """
    return is_live(stream, environ) and not environ.get("NO_COLOR")


def reader_is_gone() -> bool:
    """Returns whether the program that reads standard output has ended, such as `head` in a pipe.

    If so, discards later output.
    """
    watched = select.poll()
    watched.register(sys.stdout.fileno(), 0)  # Errors are always reported.
    if not watched.poll(0):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


class LiveBlock:
    """A block of lines that is redrawn in place on `stream`.

    May be used from several threads, because sinks print in threads of an executor.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lines: list[str] = []
        self._lock = threading.Lock()

    def size(self) -> tuple[int, int]:
        """Returns the maximum number of columns and lines of a block."""
        try:
            columns, lines = os.get_terminal_size(self._stream.fileno())
        except (OSError, ValueError):
            columns, lines = 0, 0  # Not a terminal.
        if not columns or not lines:  # Some terminals report 0: a serial line, a recording.
            columns, lines = shutil.get_terminal_size(SIZE_DEFAULT)
        return max(columns - 1, 20), max(lines - 1, 3)

    def draw(self, lines: Sequence[str]) -> None:
        """Replaces the lines of the block."""
        with self._lock:
            text = self._back() + _over(lines)
            self._lines = list(lines)
            self._stream.write(text)
            self._stream.flush()

    def print_above(self, stream: TextIO, text: str) -> None:
        """Writes whole lines `text` to `stream` above the block."""
        with self._lock:
            self._stream.write(self._back())
            self._stream.flush()
            stream.write(text.replace("\n", CLEAR_LINE + "\n") if self._lines else text)
            stream.flush()
            if self._lines:
                self._stream.write(_over(self._lines))
                self._stream.flush()

    @contextmanager
    def above(self) -> Iterator[None]:
        """Within the `with` block, makes the output of the program appear above the lines."""
        before = sys.stdout, sys.stderr
        outlets = [_Outlet(self, stream) if stream.isatty() else stream for stream in before]
        sys.stdout, sys.stderr = outlets
        try:
            yield
        finally:
            sys.stdout, sys.stderr = before
            for outlet in outlets:
                if isinstance(outlet, _Outlet):
                    outlet.close()

    def _back(self) -> str:
        """Returns the control sequence that moves the cursor to the first line of the block."""
        return f"\x1b[{len(self._lines)}F" if self._lines else ""


def _over(lines: Sequence[str]) -> str:
    """Returns the text that overwrites the old lines with `lines`, and clears the screen below.

    Clearing first would flicker, and fill the history of some terminals.
    """
    return "".join(f"{line}{CLEAR_LINE}\n" for line in lines) + CLEAR_BELOW


class _Outlet(io.TextIOBase):
    """A stream that replaces a stream of the terminal, and prints its lines above a block.

    An incomplete line is kept until its end is written.
    """

    def __init__(self, block: LiveBlock, stream: TextIO) -> None:
        self._block = block
        self._stream = stream
        self._rest = ""

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._stream.fileno()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        whole, newline, rest = (self._rest + text).rpartition("\n")
        self._rest = rest
        if newline:
            self._block.print_above(self._stream, whole + newline)
        return len(text)

    def close(self) -> None:
        rest, self._rest = self._rest, ""
        if rest:
            self._block.print_above(self._stream, rest + "\n")
        super().close()


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

    They contain its type and message, its notes (which name the operator, subtask and record), and
    the user's innermost line of code.
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
