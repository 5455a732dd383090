"""The code that sources and sinks of all line-based formats share, and `lines`, the simplest of
these formats.

A source reads a file, a glob or a directory. A sink writes a directory of part files.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar

from aioflow.advice.hints import explained
from aioflow.core.errors import GraphError
from aioflow.core.functions import OutputTag
from aioflow.io.arguments import checked_encoding, checked_on_error, checked_seconds, checked_whole
from aioflow.io.files.blocks import BLOCK_BYTES, FilePart
from aioflow.io.files.file_reader import Bad, Decoded, FileReader, FollowReader
from aioflow.io.files.found_files import FileConnector, FoundFiles
from aioflow.io.files.parts import PartWriter, RollPolicy, checked_roll
from aioflow.io.files.paths import SPLIT_BYTES, checked_place, cut
from aioflow.io.files.patterns import is_object_url
from aioflow.operators.source import Split

if TYPE_CHECKING:
    from aioflow.core.host import Host
    from aioflow.core.timeunits import Duration
    from aioflow.io.arguments import OnError
    from aioflow.io.files.file_reader import Decoder
    from aioflow.io.files.parts import Encoder
    from aioflow.operators.operator import OperatorContext
    from aioflow.operators.source import SourceContext, SourceReader

__all__ = ["Files", "lines"]

T = TypeVar("T")

COLUMN_BLOCK_BYTES = 256 * 1024
"""Size of the blocks that are decoded into columns. Decoding takes some milliseconds, and there are
enough lines for numpy's fixed cost to be small.
"""

FOLLOWED = "followed"
"""Id of the only split of a source that follows its files."""


@explained
def lines(
    path: str | os.PathLike[str],
    *,
    encoding: str = "utf-8",
    follow: bool = False,
    every: Duration = "500ms",
    discover_every: Duration | None = None,
    on_error: OnError = "fail",
    split_bytes: int = SPLIT_BYTES,
    roll: RollPolicy | None = None,
) -> Files[str]:
    """Returns a connector that reads or writes the lines of text files, without line ends.

    `path` is a file, a glob or a directory, on this machine or in an object store: `s3://`, `gs://`
    or `az://`, with the extra `[s3]`.

    With `follow` the source never ends: every `every` it reads new files and new lines, all in one
    subtask. With `discover_every` the source never ends either, but reads only new files: it looks
    for them at this interval, and assigns them to all subtasks. Each file is read only once, so it
    must be complete when it appears. Write it under a name that begins with a dot, and then rename
    it. Later additions and replacements are not read, and a warning is logged.

    Files above `split_bytes` are divided at line ends, for several subtasks. `on_error` decides
    what happens to a line that cannot be decoded with `encoding`.

    As a sink it writes `str(value)`, one value a line, to `part-<subtask>-<n>.txt`; `roll` decides
    when a part is full.
    """
    checked_encoding(encoding, f"lines({str(path)!r})")
    return Files(
        "lines",
        path,
        decoder=lambda header: LinesDecoder(encoding),
        encoder=lambda: LinesEncoder(encoding),
        extension="txt",
        divisible=True,
        follow=follow,
        every=every,
        discover_every=discover_every,
        on_error=on_error,
        split_bytes=split_bytes,
        roll=roll,
    )


class Files(FileConnector[T]):
    """A `Source` and a `Sink` of files in one format. Made by `lines`, `jsonl` and `csv`."""

    offers_columns = True

    def __init__(
        self,
        function: str,
        path: str | os.PathLike[str],
        *,
        decoder: Callable[[list[str] | None], Decoder],
        column_decoder: Callable[[list[str] | None], Decoder] | None = None,
        narrows: bool = False,
        stands_in: tuple[str, ...] | None = None,
        no_columns: str = "texts without fields: jsonl and csv have them",
        encoder: Callable[[], Encoder],
        extension: str,
        divisible: bool,
        follow: bool,
        every: Duration,
        on_error: OnError,
        discover_every: Duration | None = None,
        split_bytes: int = SPLIT_BYTES,
        roll: RollPolicy | None = None,
        block_bytes: int = BLOCK_BYTES,
        record_type: Any = None,
    ) -> None:
        """Makes the connector of the format that `function` names.

        `column_decoder` makes a decoder into columns, if the format has one. `narrows` means that
        this decoder can skip columns. `no_columns` is the reason, with advice, that `explain()`
        shows if the format has no columns. `stands_in` has the fields of the records, if `decoder`
        can make simpler objects with the same fields.
        """
        self._path = checked_place(path, function)
        place = f"{function}({str(self._path)!r})"
        checked_on_error(on_error, place)
        checked_whole(split_bytes, "split_bytes", place)
        self.name = self._function = function
        if follow and is_object_url(str(self._path)):
            raise GraphError(
                f"{place}: follow=True reads what is added to a file, and nothing is added to an "
                "object: find new objects with discover_every="
            )
        if discover_every is not None and follow:
            raise GraphError(
                f"{function}({str(path)!r}): follow=True finds new files too: leave out "
                "discover_every=, or follow="
            )
        self.record_type = record_type
        """The type of the records; None if `type=` was not given."""
        self._decoder = decoder
        self._column_decoder = column_decoder
        self._narrows = narrows
        self._stands_in = stands_in
        self._no_columns = no_columns
        self._encoder = encoder
        self._extension = extension
        self._divisible = divisible
        self._follow = follow
        self._every_s = checked_seconds(every, "every", place)
        self._on_error = on_error
        self._split_bytes = split_bytes
        self._roll = checked_roll(roll, place)
        self._block_bytes = block_bytes
        self.finder = FoundFiles(
            self._path, self._cut, what=repr(self), discover_every=discover_every, follow=follow
        )
        self.discover_every = discover_every
        self.side_outputs: tuple[OutputTag[Any], ...] = (
            (on_error,) if isinstance(on_error, OutputTag) else ()
        )
        """The tag of the side output for malformed lines; empty if there is none."""

    def __repr__(self) -> str:
        return f"{self._function}({str(self._path)!r})"

    def with_columns(self) -> Files[T] | None:
        """Returns a copy of this source that emits columns, with the same splits and positions.

        Returns None if the format has no columns, or if the source follows its files.
        """
        if self._column_decoder is None or self._follow or find_spec("numpy") is None:
            return None
        source = copy.copy(self)
        source._decoder = self._column_decoder
        source._block_bytes = max(self._block_bytes, COLUMN_BLOCK_BYTES)
        source.columnar = True
        return source

    def with_fields(self, names: tuple[str, ...]) -> Files[T]:
        """Returns a copy of this source that makes only the columns `names`.

        Returns this source itself if its decoder cannot skip columns.
        """
        if not self._narrows:
            return self
        return self._changed(lambda made: made.narrow(names))

    def with_stand_ins(self) -> tuple[Files[T], tuple[str, ...]] | None:
        """Returns a copy of this source that emits simpler objects with the fields of its records,
        and the names of these fields.

        Returns None if this is impossible, or not faster.
        """
        if self._stands_in is None or self._follow or self.columnar:
            return None
        return self._changed(lambda made: made.stand_in()), self._stands_in

    def _changed(self, change: Callable[[Any], None]) -> Files[T]:
        """Returns a copy of this source that applies `change` to each of its decoders before
        use.
        """
        source, make = copy.copy(self), self._decoder

        def decoder(header: list[str] | None) -> Decoder:
            made = make(header)
            change(made)
            return made

        source._decoder = decoder
        return source

    @property
    def why_rows(self) -> str:
        """Returns the reason why `with_columns` returns None, for the output of `explain()`."""
        if self._follow:
            return (
                "follow=True takes lines as they are written: without it, or with "
                "discover_every=, files are read as columns"
            )
        if self._column_decoder is None:
            return f"{self._function} has no columns for {self._no_columns}"
        return "numpy is not installed: pip install 'aioflow[columns]'"

    @property
    def bounded(self) -> bool:
        return not self._follow and super().bounded

    async def discover(self, host: Host | None = None) -> list[Split]:
        return [Split(FOLLOWED)] if self._follow else await super().discover(host)

    async def _cut(self, host: Host, path: str, size: int) -> list[FilePart]:
        return await cut(host, path, size, divisible=self._divisible, split_bytes=self._split_bytes)

    @property
    def _reading(self) -> str:
        return "follow=" if self._follow else super()._reading

    def reader(self, ctx: SourceContext) -> SourceReader[T]:
        if self._follow:
            return FollowReader(
                ctx,
                self._decoder,
                self._on_error,
                self._path,
                self._every_s,
                block_bytes=self._block_bytes,
            )
        return FileReader(
            ctx,
            self._decoder,
            self._on_error,
            block_bytes=self._block_bytes,
            columnar=self.columnar,
        )

    def writer(self, ctx: OperatorContext) -> PartWriter:
        return PartWriter(ctx, str(self._path), self._extension, self._encoder(), self._roll)


class LinesDecoder:
    """Decodes each line to a text."""

    header: list[str] | None = None

    def __init__(self, encoding: str) -> None:
        self._encoding = encoding

    def decode(self, data: bytes, final: bool) -> Decoded:
        try:
            text = data.decode(self._encoding)
        except UnicodeDecodeError:
            return self._decode_each(data)
        if "\r" in text:
            text = text.replace("\r\n", "\n")
        # splitlines() is not used, because it also splits at form feeds and other characters that
        # belong to a line.
        records = text.split("\n")
        if not records[-1]:
            records.pop()
        return Decoded(records)

    def _decode_each(self, data: bytes) -> Decoded:
        records: list[str] = []
        starts: list[int] = []
        bad: list[Bad] = []
        for i, line in enumerate(split_lines(data)):
            try:
                record = line.decode(self._encoding)
            except UnicodeDecodeError as error:
                bad.append(Bad(len(records), i, line, error))
                continue
            records.append(record.removesuffix("\r"))
            starts.append(i)
        return Decoded(records, starts, bad)


class LinesEncoder:
    """An encoder that writes `str(value)` and a line end for each value."""

    head = b""

    def __init__(self, encoding: str) -> None:
        self._encoding = encoding

    def encode(self, values: Sequence[Any]) -> bytes:
        """Returns the lines of `values` as bytes."""
        if not values:
            return b""
        text = "\n".join(map(str, values))
        return f"{text}\n".encode(self._encoding)


def split_lines(data: bytes) -> list[bytes]:
    """Returns the lines of a block, without the line feeds."""
    found = data.split(b"\n")
    if not found[-1]:
        found.pop()
    return found
