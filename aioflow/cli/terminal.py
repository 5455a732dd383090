"""A block of lines that is redrawn in place at the bottom of a terminal. The program's output
scrolls by above it.

Plain ANSI, no curses. While a block is shown, `sys.stdout` and `sys.stderr` go through it when they
are the same terminal.
"""

from __future__ import annotations

import io
import os
import select
import shutil
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TextIO

__all__ = ["LiveBlock", "is_live", "reader_is_gone", "uses_color"]

CLEAR_LINE, CLEAR_BELOW = "\x1b[K", "\x1b[J"

SIZE_DEFAULT = (100, 40)
"""Columns and lines of a terminal of unknown size."""


def is_live(stream: TextIO, environ: Mapping[str, str] = os.environ) -> bool:
    """Returns whether lines can be redrawn in place on `stream`."""
    return stream.isatty() and environ.get("TERM", "") != "dumb"


def uses_color(stream: TextIO, environ: Mapping[str, str] = os.environ) -> bool:
    """Returns whether `stream` shows colours and the user wants them: see no-color.org."""
    return is_live(stream, environ) and not environ.get("NO_COLOR")


def reader_is_gone() -> bool:
    """Returns whether the reader of standard output has gone (`| head`).

    Output that is still to be flushed is then discarded.
    """
    watched = select.poll()
    watched.register(sys.stdout.fileno(), 0)  # Errors are told without being asked for.
    if not watched.poll(0):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


class LiveBlock:
    """The lines last drawn on `stream`.

    May be used from several threads: sinks print from the executor's.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lines: list[str] = []
        self._lock = threading.Lock()

    def size(self) -> tuple[int, int]:
        """Columns and lines that a block may have."""
        try:
            columns, lines = os.get_terminal_size(self._stream.fileno())
        except (OSError, ValueError):
            columns, lines = 0, 0  # Not a terminal.
        if not columns or not lines:  # Some terminals do not know: a serial line, a recording.
            columns, lines = shutil.get_terminal_size(SIZE_DEFAULT)
        return max(columns - 1, 20), max(lines - 1, 3)

    def draw(self, lines: Sequence[str]) -> None:
        """Put `lines` in place of those drawn before."""
        with self._lock:
            text = self._back() + _over(lines)
            self._lines = list(lines)
            self._stream.write(text)
            self._stream.flush()

    def print_above(self, stream: TextIO, text: str) -> None:
        """Write `text`, whole lines, to `stream` where the block stands, and the block again
        below it.
        """
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
        """Meanwhile what the program prints on the terminal appears above the block."""
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
        """To the first line of the block."""
        return f"\x1b[{len(self._lines)}F" if self._lines else ""


def _over(lines: Sequence[str]) -> str:
    """`lines` over what stands there, and nothing below.

    Clearing first would flicker, and fill the history of some terminals.
    """
    return "".join(f"{line}{CLEAR_LINE}\n" for line in lines) + CLEAR_BELOW


class _Outlet(io.TextIOBase):
    """Stands in for a stream of the terminal.

    Passes on whole lines; the rest of one waits for its end.
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
