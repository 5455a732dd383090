"""Sinks without an external system: `stdout` prints each record as a line, `blackhole` drops all
records.

The executor writes the lines of a batch in one call. So a pipe with a slow reader blocks this sink
and never the event loop. `blackhole` is for benchmarks, and for flows whose results are only read
by subscriptions.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TextIO

from aioflow.advice.hints import explained
from aioflow.operators.sink import BaseSink, BaseWriter

if TYPE_CHECKING:
    from aioflow.operators.operator import OperatorContext

__all__ = ["BlackholeSink", "ReaderGone", "StdoutSink", "blackhole", "stdout"]


@explained
def stdout(prefix: str = "") -> StdoutSink:
    """Returns a sink that prints `prefix` and `str(record)`, one record a line.

    Delivery is at least once: records may be printed again after a restart.
    """
    return StdoutSink(prefix)


class ReaderGone(BrokenPipeError):
    """Standard output was closed by its reader (as by `| head`), so a retry is useless."""


class StdoutSink(BaseSink[Any]):
    """A sink that writes to the object that was `sys.stdout` when the job started."""

    name = "stdout"

    def __init__(self, prefix: str = "") -> None:
        self._prefix = prefix

    def __repr__(self) -> str:
        return f"stdout({self._prefix!r})" if self._prefix else "stdout()"

    def writer(self, ctx: OperatorContext) -> StdoutWriter:
        return StdoutWriter(ctx, sys.stdout, self._prefix)

    def committer(self) -> None:
        return None


class StdoutWriter(BaseWriter[Any]):
    """A writer that collects the lines of a batch and requests a flush after each batch.

    So lines appear without delay.
    """

    def __init__(self, ctx: OperatorContext, stream: TextIO, prefix: str) -> None:
        self._ctx = ctx
        self._stream = stream
        self._prefix = prefix
        self._pending: list[str] = []
        self._broken = False
        self.full = False

    def write_batch(self, values: Sequence[Any], timestamps: Sequence[int] | None) -> None:
        prefix = self._prefix
        if prefix:
            self._pending.extend([f"{prefix}{value}\n" for value in values])
        else:
            self._pending.extend([f"{value}\n" for value in values])
        self.full = True

    async def flush(self) -> None:
        self.full = False
        pending, self._pending = self._pending, []
        if pending:
            try:
                await self._ctx.host.blocking(_print, self._stream, "".join(pending))
            except BrokenPipeError as error:
                self._broken = True
                raise ReaderGone(error.errno, "the reader of standard output is gone") from error

    async def prepare(self, checkpoint_id: int) -> list[Any]:
        await self.flush()
        return []

    async def close(self) -> None:
        """Flushes the output, even if the job has failed."""
        if not self._broken:
            await self.flush()


def _print(stream: TextIO, text: str) -> None:
    stream.write(text)
    stream.flush()


@explained
def blackhole() -> BlackholeSink:
    """Returns a sink that drops every record."""
    return BlackholeSink()


class BlackholeSink(BaseWriter[Any], BaseSink[Any]):
    """A sink that drops all records."""

    name = "blackhole"
    reads_columns = True

    def __repr__(self) -> str:
        return "blackhole()"

    def writer(self, ctx: OperatorContext) -> BlackholeSink:
        return self

    def committer(self) -> None:
        return None

    def write_batch(self, values: Sequence[Any], timestamps: Sequence[int] | None) -> None:
        """Drops `values`."""

    async def flush(self) -> None:
        """Does nothing: no record is buffered."""

    async def prepare(self, checkpoint_id: int) -> list[Any]:
        return []
