"""Reads savepoints and checkpoints without running a job, and makes changed copies of them.

    async with af.Savepoint("/var/lib/app/savepoints/savepoint-1f0c") as savepoint:
        print([(operator.uid, operator.states) for operator in savepoint.operators])
        totals = {entry.key: entry.value async for entry in savepoint.entries("count", "total")}
        edit = savepoint.edit()
        edit.map_values("count", "total", lambda key, value: value * 100)
        edit.remove_operator("old-join")
        print(await edit.write("/var/lib/app/savepoints"))

Records of classes that this process has not imported are read as stand-in dataclasses with the same
name and fields. To get the real classes, import them before.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from os import PathLike, fspath
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from aioflow.checkpoint.completed import CompletedCheckpoint
from aioflow.checkpoint.source_state import SplitState, decode_source_state
from aioflow.checkpoint.standins import StandInTypes
from aioflow.checkpoint.state_files import FileInput
from aioflow.checkpoint.store import read_checkpoint
from aioflow.checkpoint.subtask import OperatorStateHandle
from aioflow.checkpoint.urls import open_objects
from aioflow.core.errors import RestoreError
from aioflow.core.keygroups import KeyGroupRange
from aioflow.core.serializers import Codec
from aioflow.core.system_host import SystemHost
from aioflow.state.format import TIMERS
from aioflow.state.heap_restore import ReadState, read_handle
from aioflow.state.operator_state import decode_operator_state
from aioflow.state.snapshot import OperatorSnapshot

if TYPE_CHECKING:
    from aioflow.checkpoint.savepoint_edit import SavepointEdit
    from aioflow.core.host import Host

__all__ = ["Entry", "OperatorSummary", "Savepoint", "StateSummary"]


class Entry(NamedTuple):
    """One entry of a keyed state: a key and its value."""

    key: Any
    value: Any
    """The value of a value state, the list or dict of a list or map state, the accumulator of an
    aggregating state.
    """
    namespace: Any = None
    """The window, for state that is kept for each window."""


@dataclass(frozen=True, slots=True)
class StateSummary:
    """Name, kind and size of one state of an operator."""

    name: str
    kind: str
    """value, list, map, reducing or aggregating; `table` of a built-in operator; `timers`;
    `split`, `union` or `broadcast`.
    """
    entries: int
    """Number of keys (counted once for each namespace), of timers, or of elements."""


@dataclass(frozen=True, slots=True)
class OperatorSummary:
    """One operator of the job that the savepoint was taken of."""

    uid: str
    name: str
    parallelism: int
    max_parallelism: int
    states: tuple[StateSummary, ...] = ()
    splits: int = 0
    """Number of a source's splits in the checkpoint."""
    size: int = 0
    """Total size of the stored state, in bytes."""


class Savepoint:
    """A savepoint or a checkpoint at a path or URL, to be opened with `async with`.

    Reading changes nothing. `key` is the checkpoint key that it was written with. Raises
    RestoreError, naming the file, for anything that cannot be read.
    """

    def __init__(
        self, path: str | PathLike[str], *, key: bytes | None = None, host: Host | None = None
    ) -> None:
        self._url = fspath(path)
        self.key = key
        self._host = host
        self._stack = AsyncExitStack()
        self.codec = Codec(StandInTypes())
        self._summaries: tuple[OperatorSummary, ...] = ()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            if self._host is None:
                self._host = SystemHost()
                stack.push_async_callback(self._host.close)
            self.checkpoint = await read_checkpoint(self._url, self._host, self.key)
            self.files = FileInput(self._host, open_objects(self.checkpoint.location, self._host))
            self._summaries = tuple([await self._summary(uid) for uid in self._uids()])
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._stack.aclose()

    checkpoint: CompletedCheckpoint
    """The content of the metadata."""

    @property
    def host(self) -> Host:
        """The host, whose file system is used. The savepoint must be open."""
        assert self._host is not None, "the savepoint is not open: use it inside of `async with`"
        return self._host

    @property
    def operators(self) -> tuple[OperatorSummary, ...]:
        """All operators of the job, including those without state."""
        return self._summaries

    def operator(self, uid: str) -> OperatorSummary:
        """Returns the summary of operator `uid`. Raises KeyError, naming the existing uids, if
        unknown.
        """
        for summary in self._summaries:
            if summary.uid == uid:
                return summary
        raise KeyError(
            f"{self.checkpoint.location} has no operator with the uid {uid!r}, only "
            f"{', '.join(map(repr, self._uids()))}"
        )

    async def entries(self, uid: str, state: str) -> AsyncIterator[Entry]:
        """Yields the entries of a keyed state, one subtask after the other.

        Raises KeyError if the operator has no state of that name.
        """
        known = [summary.name for summary in self.operator(uid).states]
        if state not in known:
            raise KeyError(
                f"operator {uid!r} has no state {state!r}, only "
                f"{', '.join(map(repr, known)) or 'none'}"
            )
        async for read in self.read_keyed(uid):
            meta = read.header.tables.get(state)
            for namespace, values in read.tables.get(state, {}).items():
                for key, stored in values.items():
                    assert meta is not None
                    value = (
                        _without_times(stored, meta.kind, f"state {state!r} of operator {uid!r}")
                        if meta.timed
                        else stored
                    )
                    yield Entry(key, value, namespace)

    async def operator_state(self, uid: str) -> list[OperatorSnapshot]:
        """Returns the operator state (split, union and broadcast) of each subtask, in order."""
        self.operator(uid)
        found = [handle.operator for handle in self.handles(uid)]
        return [
            OperatorSnapshot()
            if file is None
            else decode_operator_state(await self.files.read(file), self.codec, uid)
            for file in found
        ]

    async def positions(self, uid: str) -> list[SplitState]:
        """Returns the splits of a source, each with the position at which reading would
        continue.
        """
        self.operator(uid)
        found: list[SplitState] = []
        for handle in self.handles(uid):
            if handle.source is not None:
                found += decode_source_state(
                    await self.files.read(handle.source), self.codec, f"source {uid!r}"
                )
        return found

    def edit(self) -> SavepointEdit:
        """Returns an editor that makes a changed copy of this savepoint."""
        from aioflow.checkpoint.savepoint_edit import SavepointEdit  # That module imports this one.

        return SavepointEdit(self)

    def handles(self, uid: str) -> list[OperatorStateHandle]:
        """Returns the state handles of an operator, in order of its subtasks."""
        places = sorted(self.checkpoint.subtasks.items(), key=lambda place: place[0][1])
        return [handle for _, state in places for handle in state.operators if handle.uid == uid]

    async def read_keyed(self, uid: str) -> AsyncIterator[ReadState]:
        """Yields the keyed state of an operator, one subtask after the other."""
        for handle in self.handles(uid):
            if handle.keyed is not None:
                groups = KeyGroupRange(handle.keyed.first_group, handle.keyed.last_group)
                yield await read_handle(handle.keyed, groups, self.files, self.codec, uid)

    def _uids(self) -> list[str]:
        with_state = [
            handle.uid for state in self.checkpoint.subtasks.values() for handle in state.operators
        ]
        return list(
            dict.fromkeys([*(operator.uid for operator in self.checkpoint.operators), *with_state])
        )

    async def _summary(self, uid: str) -> OperatorSummary:
        known = next(
            (operator for operator in self.checkpoint.operators if operator.uid == uid), None
        )
        if known is None:
            raise RestoreError(
                f"{self.checkpoint.location} has state of an operator {uid!r} that it does not "
                "list: it is damaged"
            )
        counts: dict[tuple[str, str], int] = {}
        async for read in self.read_keyed(uid):
            for name, meta in read.header.tables.items():
                entries = sum(len(values) for values in read.tables.get(name, {}).values())
                counts[name, meta.kind] = counts.get((name, meta.kind), 0) + entries
        # Without operator state there is nothing to list, and `operator_state` would ask for this
        # very summary.
        for file in [
            handle.operator for handle in self.handles(uid) if handle.operator is not None
        ]:
            state = decode_operator_state(await self.files.read(file), self.codec, uid)
            for kind, tables in (
                ("split", state.split),
                ("union", state.union),
                ("broadcast", state.broadcast),
            ):
                for name, elements in tables.items():
                    counts[name, kind] = counts.get((name, kind), 0) + len(elements)
        splits = 0
        size = 0
        for handle in self.handles(uid):
            files = [
                *(() if handle.keyed is None else handle.keyed.files),
                handle.operator,
                handle.source,
            ]
            size += sum(file.size for file in files if file is not None)
            if handle.source is not None:
                splits += len(
                    decode_source_state(
                        await self.files.read(handle.source), self.codec, f"source {uid!r}"
                    )
                )
        states = tuple(
            StateSummary(name, kind, entries)
            for (name, kind), entries in counts.items()
            if entries or kind != TIMERS
        )
        return OperatorSummary(
            uid, known.name, known.parallelism, known.max_parallelism, states, splits, size
        )


def _without_times(stored: Any, kind: str, where: str) -> Any:
    """Returns a stored value of a state with a time to live, without its time stamps.

    Raises RestoreError for anything else; the error names `where`, the place of the value.
    """
    try:
        if kind == "list":
            return [value for _, value in stored]
        if kind == "map":
            return {key: value for key, (_, value) in stored.items()}
        _, value = stored
        return value
    except (TypeError, ValueError, AttributeError) as error:
        raise RestoreError(
            f"{where} holds {type(stored).__name__} where values with their times are expected: "
            f"{error}"
        ) from error
