"""The sink side of files: a directory of part files, each made visible by one rename.

A part is written under a hidden name,
`.part-<subtask>-<n>.<ext>.<since>-<sink>-<job>-<attempt>-<token>`, and becomes
`part-<subtask>-<n>.<ext>` when it is committed. With checkpoints a part is prepared at the barrier
(synced and closed) and committed when the checkpoint is complete. Without checkpoints, the writer
itself commits parts that are full or old, and the rest at the end.

`since` is the number of the last checkpoint before the part was begun, so the part is prepared at
the barrier of a later checkpoint. A killed attempt leaves hidden files, which readers ignore. The
next attempt of this sink (flow and uid), restored from checkpoint r, decides by their names alone:

    since < r     prepared up to r: it is among the committables of r, this subtask's or another's,
                  or was committed
    since >= r    begun after r: it will never be committed, and its records are written again;
                  deleted before the writer begins
    newer         of a later attempt of this job: left alone; the attempt that sees it is the
                  one that should have ended
    none          of a run without checkpoints. No lease keeps a second run of its flow from
                  running at the same time. So the file of another run is deleted only if it was
                  not written to for so long that its writer must have ended

Invariants: a visible part is complete and never changes. Committing and aborting are idempotent. No
name is used twice, so a request that is executed late has no effect. Several sinks, of one flow or
of many, may write to one directory. A part never replaces another: if its number is in use, it gets
the next free one. In an object store, a name cannot be reserved atomically. There the name has a
random token: `part-<subtask>-<n>-<token>.<ext>`. A sink never touches the hidden files of another
sink. Two concurrent runs of one flow without checkpoints are told apart by age. With checkpoints
the lease prevents a second run. Runs with different checkpoint stores must not share a directory,
because each store has its own lease.
"""

from __future__ import annotations

import asyncio
import logging
import posixpath
import re
import zlib
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from aioflow.core.aio import wait_all
from aioflow.core.errors import GraphError, RestoreError
from aioflow.io.arguments import checked_whole
from aioflow.io.files.file_access import file_access
from aioflow.io.files.paths import lent
from aioflow.io.files.patterns import is_object_url
from aioflow.operators.sink import BaseCommitter, BaseWriter

if TYPE_CHECKING:
    from aioflow.core.host import Host
    from aioflow.operators.operator import OperatorContext, ProcessingTimeTimer

__all__ = ["PartCommitter", "PartWriter", "RollPolicy", "checked_roll"]

UNCHECKED = "none"
"""Value of `since` in a run without checkpoints."""

ABANDONED_MS = 600_000
"""Minimum time without a write after which a part of a run without checkpoints counts as abandoned.

A running writer commits such a part when it is `RollPolicy.age_ms` old. A part is abandoned if it
was not written to for twice `age_ms`, and at least for this minimum.
"""

_HIDDEN = re.compile(
    r"\.part-(\d+)-(\d+)(?:-[0-9a-f]+)?\.[^.]+"
    r"\.(\d+|none)-([0-9a-f]{8})-([0-9A-Za-z]*)-(\d+)-[0-9a-f]+"
)
"""Groups: subtask, number, since, sink, job, attempt."""

_VISIBLE = re.compile(r"(part-\d+-)(\d+)((?:-[0-9a-f]+)?\..+)")

BUFFER_BYTES = 1024 * 1024
"""Number of bytes at which the writer requests a flush. A flush is one call of the executor and one
`write`.
"""

ROLL_EXAMPLE = "roll=af.io.RollPolicy(size_bytes=64 * 1024 * 1024, age_ms=60_000)"

logger = logging.getLogger(__name__)


class Encoder(Protocol):
    """The interface of an object that encodes records into the bytes of a file."""

    @property
    def head(self) -> bytes:
        """The bytes at the beginning of each part. They are requested after the first call of
        `encode`.
        """

    def encode(self, values: Sequence[Any]) -> bytes:
        """Returns `values` as bytes: whole records, one after the other."""


@dataclass(frozen=True, slots=True)
class RollPolicy:
    """Decides when a part is full and the next one begins. With checkpoints, each checkpoint ends a
    part as well.
    """

    size_bytes: int = 128 * 1024 * 1024
    """Maximum size of a part. The size is checked after each flush, so a part may be larger by one
    buffer.
    """
    age_ms: int = 60_000
    """Maximum time since the first record of the part, by the wall clock."""

    def __post_init__(self) -> None:
        checked_whole(self.size_bytes, "size_bytes", "RollPolicy")
        checked_whole(self.age_ms, "age_ms", "RollPolicy")


def checked_roll(roll: RollPolicy | None, place: str) -> RollPolicy:
    """Returns `roll`, or the default policy if it is None. Raises GraphError for any other type."""
    if roll is None:
        return RollPolicy()
    if not isinstance(roll, RollPolicy):
        raise GraphError(f"{place}: roll is {roll!r}, expected a RollPolicy, as in {ROLL_EXAMPLE}")
    return roll


class PartWriter(BaseWriter[Any]):
    """A writer of the part files of one subtask."""

    def __init__(
        self,
        ctx: OperatorContext,
        directory: str,
        extension: str,
        encoder: Encoder,
        roll: RollPolicy,
    ) -> None:
        self._ctx = ctx
        self._fs = file_access(ctx.host, directory)
        self._is_store = is_object_url(directory)
        self._directory = directory
        self._prefix = f"part-{ctx.runtime.subtask_index}-"
        self._extension = extension
        self._encoder = encoder
        self._roll = roll
        # The checkpoint commits parts. Without checkpoints the writer itself commits full parts.
        self._self_commit = not ctx.checkpointing
        self._restored = 0
        self._since = 0
        self._sink = f"{zlib.crc32(f'{ctx.flow_name}/{ctx.uid}'.encode()):08x}"
        self._job = ctx.job_id[:8]
        self._buffer: list[bytes] = []
        self._buffered = 0
        self._next = 0
        self._part: tuple[str, str] | None = None
        self._part_bytes = 0
        self._rolled: list[tuple[str, str]] = []
        self._timer: ProcessingTimeTimer | None = None
        self._rolling: asyncio.Task[None] | None = None
        self._writing: asyncio.Task[None] | None = None
        # Appends to one file must not overtake each other, but a flush, a barrier and the timer may
        # run concurrently.
        self._lock = asyncio.Lock()
        self.full = False

    def restored(self, checkpoint_id: int) -> None:
        """Notes that the parts prepared up to `checkpoint_id` are committed, or will be committed,
        so they must not be removed.
        """
        self._restored = self._since = checkpoint_id

    async def open(self) -> None:
        """Creates the directory, removes the hidden files that will never be committed, and
        continues the numbering of earlier runs.
        """
        if not self._is_store:
            await self._make_directory()
        names = await self._fs.list(self._directory)
        pattern = re.compile(rf"\.?{re.escape(self._prefix)}(\d+)[.-]")
        matches = [pattern.match(name) for name in names]
        self._next = max((int(match[1]) + 1 for match in matches if match), default=0)
        for name in names:
            if self._is_orphan(name) and await self._is_abandoned(name):
                await self._fs.delete(posixpath.join(self._directory, name))

    async def _make_directory(self) -> None:
        """Creates the directory so that it survives a power loss. For this, the parent of each new
        directory is synced.
        """
        missing = []
        path = self._directory
        fs = self._ctx.host.fs
        while path and not await fs.exists(path):
            missing.append(path)
            path = posixpath.dirname(path)
        try:
            await fs.mkdirs(self._directory)
        except (FileExistsError, NotADirectoryError) as error:
            what = (
                f"{error.filename or self._directory} is a file, expected a directory, which is "
                "made when it is not there"
            )
            raise NotADirectoryError(
                f"{what}: a sink of files writes many parts; give another path"
            ) from error
        except OSError as error:
            what = (
                f"the sink cannot make its directory {self._directory}: {error.strerror}; give a "
                "path where it may write"
            )
            raise type(error)(error.errno, what) from error
        for made in reversed(missing):
            await fs.fsync_dir(posixpath.dirname(made) or ".")

    def _is_orphan(self, name: str) -> bool:
        match = _HIDDEN.fullmatch(name)
        if match is None:
            return False
        runtime = self._ctx.runtime
        subtask, sink, job, attempt = int(match[1]), match[4], match[5], int(match[6])
        if sink != self._sink:
            return False
        if subtask % runtime.parallelism != runtime.subtask_index:
            # After a rescaling, exactly one subtask handles the files of a former subtask.
            return False
        if job == self._job and attempt > runtime.attempt:
            return False
        if match[3] == UNCHECKED:
            return True
        # A run without checkpoints cannot tell whether parts of a run with checkpoints are still
        # needed.
        return not self._self_commit and int(match[3]) >= self._restored

    async def _is_abandoned(self, name: str) -> bool:
        """Returns whether the writer of the hidden file `name` has certainly ended."""
        match = _HIDDEN.fullmatch(name)
        assert match is not None, "an orphan has such a name"
        if match[3] != UNCHECKED or match[5] == self._job:
            return True
        (stat,) = await self._fs.stats([posixpath.join(self._directory, name)])
        age_ms = 0 if stat is None else self._ctx.host.clock.wall_ms() - stat.modified_ms
        return age_ms > max(ABANDONED_MS, 2 * self._roll.age_ms)

    def write_batch(self, values: Sequence[Any], timestamps: Sequence[int] | None) -> None:
        if not values:
            return
        data = self._encoder.encode(values)
        self._buffer.append(data)
        self._buffered += len(data)
        if self._buffered >= BUFFER_BYTES:
            self.full = True
        self._start_age()

    def _start_age(self) -> None:
        if self._timer is None and self._self_commit:
            due = self._ctx.processing_time() + self._roll.age_ms
            self._timer = self._ctx.register_processing_timer(due, self._on_age)

    async def flush(self) -> None:
        """Writes the buffer to the hidden file."""
        async with self._lock:
            await self._flush()
            if self._part is not None and self._part_bytes >= self._roll.size_bytes:
                await self._end_part()

    async def _flush(self) -> None:
        self.full = False
        if not self._buffer:
            return
        buffer, self._buffer, self._buffered = self._buffer, [], 0
        if self._part is None:
            buffer.insert(0, self._encoder.head)
            token = self._ctx.host.ids.new("part")[:12]
            number = f"{self._next}-{token}" if self._is_store else f"{self._next}"
            final = f"{self._prefix}{number}.{self._extension}"
            self._next += 1
            since = UNCHECKED if self._self_commit else self._since
            hidden = (
                f".{final}.{since}-{self._sink}-{self._job}-{self._ctx.runtime.attempt}-{token}"
            )
            self._part = (
                posixpath.join(self._directory, hidden),
                posixpath.join(self._directory, final),
            )
        data = b"".join(buffer)
        await self._write(self._fs.append(self._part[0], data))
        self._part_bytes += len(data)

    async def _end_part(self) -> None:
        """Closes the current part. The part is then durable, and waits to be committed."""
        if self._part is None:
            return
        part, self._part = self._part, None
        self._part_bytes = 0
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
        if self._buffer:  # These records were written after the flush: they begin the next part.
            self._start_age()
        self._rolled.append(part)
        await self._write(self._fs.fsync(part[0]))
        if self._self_commit:
            await PartCommitter(self._directory, self._ctx.host).commit(self._rolled)
            self._rolled = []

    async def _write(self, request: Coroutine[Any, Any, None]) -> None:
        """Awaits `request`, a write to the current part.

        If the caller is cancelled, the write continues, because its thread cannot be stopped.
        `close` waits for this write before it deletes the part. Otherwise the write could create
        the file again.
        """
        self._writing = asyncio.get_running_loop().create_task(request, name="write part")
        await asyncio.shield(self._writing)

    def _on_age(self, timestamp: int) -> None:
        self._timer = None
        self._rolling = self._ctx.spawn(self._roll_aged(), f"{self._ctx.name}-roll")

    async def _roll_aged(self) -> None:
        async with self._lock:
            await self._flush()
            await self._end_part()

    async def prepare(self, checkpoint_id: int) -> list[tuple[str, str]]:
        """Ends the current part. Returns all parts since the last checkpoint, as pairs (hidden
        path, visible path).
        """
        async with self._lock:
            await self._flush()
            await self._end_part()
            rolled, self._rolled = self._rolled, []
            if rolled:
                await self._fs.fsync_dir(self._directory)
            self._since = max(self._since, checkpoint_id)
            return rolled

    async def close(self) -> None:
        """Deletes the parts that were not prepared. If their records are still needed, a restart
        writes them again.
        """
        if self._timer is not None:
            self._timer.cancel()
        async with self._lock:
            writing, self._writing = self._writing, None
            if writing is not None:
                await wait_all([writing])
                # Retrieves the error, which the caller has handled, unless it is gone.
                _ = writing.cancelled() or writing.exception()
            left = [*self._rolled, *([self._part] if self._part is not None else [])]
            self._rolled, self._part = [], None
            for hidden, _ in left:
                await self._fs.delete(hidden)


class PartCommitter(BaseCommitter):
    """Commits or deletes prepared parts of `directory`.

    Committables come from a checkpoint, which an attacker may have written. A pair with a path that
    is not a part of this directory is rejected with RestoreError before any rename or deletion.
    """

    def __init__(self, directory: str, host: Host | None = None) -> None:
        self._directory = directory
        self._host = host

    def _checked(self, committables: Sequence[Any]) -> list[tuple[str, str]]:
        return [self._own(committable) for committable in committables]

    def _own(self, committable: Any) -> tuple[str, str]:
        """Checks and returns the pair (hidden path, visible path)."""
        match committable:
            case (str(hidden), str(final)):
                places = [posixpath.split(path) for path in (hidden, final)]
            case _:
                raise RestoreError(
                    f"a committable of the sink into {self._directory!r} is "
                    f"{type(committable).__name__}, not two paths"
                )
        (_, hidden_name), (_, final_name) = places
        is_part = _VISIBLE.fullmatch(final_name) is not None and hidden_name.startswith(
            f".{final_name}."
        )
        if not is_part or any(not self._is_here(directory) for directory, _ in places):
            raise RestoreError(
                f"the checkpoint has {hidden!r} renamed to {final!r}, which is no part of the "
                f"sink's directory {self._directory!r}, and "
                "nothing was renamed: restore with the path that the sink had, or from a "
                "checkpoint that you trust"
            )
        return hidden, final

    def _is_here(self, directory: str) -> bool:
        return posixpath.abspath(directory) == posixpath.abspath(self._directory)

    async def commit(self, committables: Sequence[Any]) -> None:
        """Renames each hidden file to its visible name, or to the next free one.

        A part that is visible already stays as it is.
        """
        if not committables:
            return
        parts = self._checked(committables)
        async with lent(self._host) as host:
            fs = file_access(host, self._directory)
            directories: dict[str, None] = {}
            for hidden, final in parts:
                try:
                    shown = final
                    while not await fs.rename_new(hidden, shown):
                        shown = _next_name(shown)
                except FileNotFoundError:
                    if not await fs.exists(final):
                        logger.warning(
                            "part %s was prepared, but neither it nor its hidden file %s exists: "
                            "it was committed and then moved away, "
                            "or it is lost",
                            final,
                            hidden,
                        )
                        continue
                # This includes parts that were visible already: the process that renamed them may
                # have been killed before the name was durable.
                directories[posixpath.dirname(final) or "."] = None
            for directory in directories:
                await fs.fsync_dir(directory)

    async def abort(self, committables: Sequence[Any]) -> None:
        """Deletes the hidden files; committed parts stay."""
        if not committables:
            return
        parts = self._checked(committables)
        async with lent(self._host) as host:
            fs = file_access(host, self._directory)
            for hidden, _ in parts:
                await fs.delete(hidden)


def _next_name(path: str) -> str:
    directory, name = posixpath.split(path)
    match = _VISIBLE.fullmatch(name)
    assert match is not None, "a part has a number"
    return posixpath.join(directory, f"{match[1]}{int(match[2]) + 1}{match[3]}")
