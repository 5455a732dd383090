"""Reads savepoints and checkpoints without running a job, and makes changed copies of them.

    async with af.Savepoint("/var/lib/app/savepoints/savepoint-1f0c") as savepoint:
        print([(operator.uid, operator.states) for operator in savepoint.operators])
        totals = {entry.key: entry.value async for entry in savepoint.entries("count", "total")}
        edit = savepoint.edit()
        edit.map_values("count", "total", lambda key, value: value * 100)
        edit.remove_operator("old-join")
        print(await edit.write("/var/lib/app/savepoints"))

Records of classes that this process has not imported are read as stand-in dataclasses with the same
name and fields. To get the real classes, import them before reading.

`SavepointEdit` makes a changed copy of a savepoint: operators can be renamed or removed, states
removed, and entries changed.

A stand-in replaces a class that is not imported here. The stand-in is a frozen dataclass with the
name and the fields that were written. Writing it again gives the record that was read.
"""

from __future__ import annotations

import keyword
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, make_dataclass, replace
from itertools import islice
from os import PathLike, fspath
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from aioflow.checkpoint.completed import (
    CheckpointKind,
    CompletedCheckpoint,
    OperatorStateHandle,
    SubtaskState,
    files_of,
)
from aioflow.checkpoint.metadata import encode_metadata, rename_files
from aioflow.checkpoint.objects import is_name
from aioflow.checkpoint.source_state import SplitState, decode_source_state
from aioflow.checkpoint.state_files import FileInput, FileOutput
from aioflow.checkpoint.store import METADATA, read_checkpoint
from aioflow.checkpoint.urls import join_url, open_objects
from aioflow.core.errors import CheckpointError, RestoreError
from aioflow.core.keygroups import KeyGroupRange
from aioflow.core.system_host import SystemHost
from aioflow.core.wire.serializers import Codec
from aioflow.core.wire.types import DEFAULT_TYPES, Assembler, TypeRegistry
from aioflow.state.format import (
    TIMERS,
    FileHeader,
    encode_end,
    encode_entries,
    encode_header,
    groups_of_read,
)
from aioflow.state.heap_restore import ReadState, read_handle
from aioflow.state.operator_state import decode_operator_state, encode_operator_state
from aioflow.state.snapshot import (
    CANONICAL,
    KeyedStateHandle,
    OperatorSnapshot,
    StateFile,
    TableMeta,
    whole,
)

if TYPE_CHECKING:
    from aioflow.core.host import Host

__all__ = ["Entry", "OperatorSummary", "Savepoint", "SavepointEdit", "StandInTypes", "StateSummary"]


class StandInTypes(TypeRegistry):
    """The types of this process, plus a stand-in for each dataclass that is not imported.

    Enums and registered types get no stand-in, because their fields are unknown.
    """

    def __init__(self) -> None:
        super().__init__(DEFAULT_TYPES)

    def assembler(self, name: str, fields: Sequence[str]) -> Assembler:
        """Returns the assembler of type `name`, or of a stand-in if the class is not imported.

        Raises LookupError if the class is not imported and was not a plain record when written.
        """
        if self._resolve(name) is None and fields and all(_is_field(field) for field in fields):
            module, _, qualname = name.rpartition(":")
            label = qualname.rpartition(".")[2]
            made: type[Any] = make_dataclass(
                label if label.isidentifier() else "Record", list(fields), frozen=True
            )
            made.__module__, made.__qualname__ = module, qualname
            self.register(made, name)
        return super().assembler(name, fields)


def _is_field(name: str) -> bool:
    return name.isidentifier() and not keyword.iskeyword(name)


class Entry(NamedTuple):
    """One entry of a keyed state: a key and its value."""

    key: Any
    value: Any
    """The value of a value or reducing state; a list for a list state; a dict for a map state; the
    accumulator of an aggregating state.
    """
    namespace: Any = None
    """The window, for state that is kept for each window; otherwise None."""


@dataclass(frozen=True, slots=True)
class StateSummary:
    """Name, kind and size of one state of an operator."""

    name: str
    kind: str
    """One of `value`, `list`, `map`, `reducing` and `aggregating`; `table` for a built-in operator;
    `timers`; or `split`, `union` and `broadcast` for operator state.
    """
    entries: int
    """Number of keys (counted once for each namespace), of timers, or of elements."""


@dataclass(frozen=True, slots=True)
class OperatorSummary:
    """One operator of the job from which the savepoint was taken."""

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

    Reading changes nothing. `key` is the checkpoint key with which the savepoint was written.
    Raises RestoreError, naming the file, for anything that cannot be read.
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
        """The host whose file system is used. The savepoint must be open."""
        assert self._host is not None, "the savepoint is not open: use it inside of `async with`"
        return self._host

    @property
    def operators(self) -> tuple[OperatorSummary, ...]:
        """All operators of the job, including those without state."""
        return self._summaries

    def operator(self, uid: str) -> OperatorSummary:
        """Returns the summary of the operator with this uid. Raises KeyError, naming the existing
        uids, if there is none.
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


async def delete_savepoint(
    path: str | PathLike[str], *, key: bytes | None = None, host: Host | None = None
) -> str:
    """Deletes a savepoint with its state, and returns its URL.

    Does not delete files to which the savepoint does not refer, even in its directory `state/`.
    Raises RestoreError if there is no readable savepoint at `path`. Raises CheckpointError if there
    is a checkpoint, because its job may still restart from it.
    """
    async with AsyncExitStack() as stack:
        if host is None:
            host = SystemHost()
            stack.push_async_callback(host.close)
        found = await read_checkpoint(fspath(path), host, key)
        if not found.kind.is_savepoint:
            raise CheckpointError(
                f"{found.location} is a checkpoint, expected a savepoint: a job deletes its own "
                "checkpoints when newer ones are complete"
            )
        objects = open_objects(found.location, host)
        try:
            own = f"{found.location}/"
            names = [
                name.removeprefix(own)
                for name in files_of(found.subtasks.values())
                if name.startswith(f"{own}state/")
            ]
            above, metadata = objects, METADATA
            parent, _, directory = found.location.rpartition("/")
            if found.location.startswith("file:///") and parent != "file://" and is_name(directory):
                # Deleted through the parent, so that the directory goes with its last file.
                above, metadata = open_objects(parent, host), f"{directory}/{METADATA}"
            # The metadata comes last, so that an interrupted deletion can be repeated.
            await objects.delete(names)
            await above.delete([metadata])
        except OSError as error:
            raise CheckpointError(f"{found.location} could not be deleted: {error}") from error
    return found.location


def _without_times(stored: Any, kind: str, where: str) -> Any:
    """Returns a stored value of a state with a time to live, without its time stamps.

    Raises RestoreError if `stored` has another form; the error names `where`, the place of the
    value.
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


ROWS_A_FRAME = 512
"""Number of rows in a frame of a file, as the heap backend writes them.

The bound keeps the memory for reading small, beyond that for the values.
"""

Change = Callable[[Any, Any], Any]


@dataclass(slots=True)
class _Changes:
    """The collected changes to one operator of a savepoint."""

    uid: str
    removed_states: set[str] = field(default_factory=set)
    values: dict[str, list[Change]] = field(default_factory=dict)
    kept: dict[str, list[Change]] = field(default_factory=dict)

    @property
    def touches_keyed(self) -> bool:
        return bool(self.removed_states or self.values or self.kept)


class SavepointEdit:
    """Collects changes to a savepoint; `write` makes a changed copy.

    The original stays as it is. `write` may be called several times.
    """

    def __init__(self, savepoint: Savepoint) -> None:
        self._savepoint = savepoint
        self._changes = {operator.uid: _Changes(operator.uid) for operator in savepoint.operators}
        self._removed: set[str] = set()

    def rename_operator(self, uid: str, new_uid: str) -> None:
        """Stores the state of operator `uid` under `new_uid`, so that it is restored to the
        operator with that uid.

        Raises ValueError if another operator has `new_uid`.
        """
        changes = self._of(uid)
        if any(
            other.uid == new_uid and old not in self._removed
            for old, other in self._changes.items()
        ):
            raise ValueError(
                f"operator {uid!r} cannot be called {new_uid!r}: another one has that uid, remove "
                "or rename it first"
            )
        changes.uid = new_uid

    def remove_operator(self, uid: str) -> None:
        """Removes an operator with all its state, including the positions of a source."""
        self._of(uid)
        self._removed.add(uid)

    def remove_state(self, uid: str, state: str) -> None:
        """Removes one keyed or operator state."""
        self._of_state(uid, state).removed_states.add(state)

    def map_values(self, uid: str, state: str, change: Change) -> None:
        """Replaces each value of a keyed state by `change(key, value)`.

        If the state has a time to live, `change` gets and returns stored values, which include time
        stamps.
        """
        self._of_state(uid, state, keyed=True).values.setdefault(state, []).append(change)

    def keep_entries(self, uid: str, state: str, wanted: Callable[[Any, Any], bool]) -> None:
        """Keeps only the entries of a keyed state for which `wanted(key, value)` is true."""
        self._of_state(uid, state, keyed=True).kept.setdefault(state, []).append(wanted)

    async def write(self, directory: str | PathLike[str]) -> str:
        """Writes the changed savepoint into a new directory below `directory`, a path or URL.

        Returns the URL of the new directory. Raises CheckpointError if it cannot be written.
        """
        savepoint = self._savepoint
        host = savepoint.host
        place = join_url(
            open_objects(fspath(directory), host).url, f"savepoint-{host.ids.new('savepoint')}"
        )
        objects = open_objects(place, host)
        output = FileOutput(host, objects, absolute=True)
        old = savepoint.checkpoint
        subtasks: dict[tuple[str, int], SubtaskState] = {}
        for (head, index), state in old.subtasks.items():
            operators = [
                await self._operator(handle, self._changes[handle.uid], output)
                for handle in state.operators
                if handle.uid not in self._removed
            ]
            channels = [
                replace(channel, file=await self._copy(channel.file, output))
                for channel in state.channels
            ]
            if operators or channels:
                subtasks[self._new_head(head, operators), index] = SubtaskState(
                    tuple(operators), tuple(channels), state.finished
                )
        operators_left = tuple(
            replace(operator, uid=self._changes[operator.uid].uid)
            for operator in old.operators
            if operator.uid not in self._removed
        )
        made = replace(
            old, kind=CheckpointKind.SAVEPOINT, operators=operators_left, subtasks=subtasks
        )
        data = encode_metadata(
            rename_files(made, lambda name: name.removeprefix(f"{place}/")), savepoint.key
        )
        try:
            await objects.create(METADATA, whole(data))
        except OSError as error:
            raise CheckpointError(
                f"the savepoint could not be written at {place}: {error}"
            ) from error
        return place

    def _of(self, uid: str) -> _Changes:
        self._savepoint.operator(uid)
        return self._changes[uid]

    def _of_state(self, uid: str, state: str, *, keyed: bool = False) -> _Changes:
        found = [
            summary for summary in self._savepoint.operator(uid).states if summary.name == state
        ]
        if not found:
            raise KeyError(f"operator {uid!r} has no state {state!r}")
        if keyed and found[0].kind in (TIMERS, "split", "union", "broadcast"):
            raise ValueError(
                f"state {state!r} of operator {uid!r} is of kind {found[0].kind}, expected a "
                "keyed state"
            )
        return self._changes[uid]

    def _new_head(self, head: str, operators: list[OperatorStateHandle]) -> str:
        """Returns the uid of the first operator of a task, which names the task in a checkpoint.

        `head` is the uid of the former first operator, which may be renamed or removed.
        """
        if head not in self._removed:
            return self._changes[head].uid if head in self._changes else head
        return operators[0].uid if operators else head

    async def _operator(
        self, handle: OperatorStateHandle, changes: _Changes, output: FileOutput
    ) -> OperatorStateHandle:
        keyed, operator = handle.keyed, handle.operator
        if keyed is not None:
            keyed = await self._keyed(handle.uid, keyed, changes, output)
        if operator is not None:
            operator = await self._operator_state(handle.uid, operator, changes, output)
        source = None if handle.source is None else await self._copy(handle.source, output)
        return OperatorStateHandle(changes.uid, keyed, operator, source)

    async def _keyed(
        self, uid: str, handle: KeyedStateHandle, changes: _Changes, output: FileOutput
    ) -> KeyedStateHandle:
        if handle.format == CANONICAL and not changes.touches_keyed:
            return replace(
                handle, files=tuple([await self._copy(file, output) for file in handle.files])
            )
        groups = KeyGroupRange(handle.first_group, handle.last_group)
        read = await read_handle(handle, groups, self._savepoint.files, self._savepoint.codec, uid)
        file = await output.write(self._content(read, changes))
        return KeyedStateHandle(
            CANONICAL, handle.max_parallelism, handle.first_group, handle.last_group, (file,)
        )

    async def _content(self, read: ReadState, changes: _Changes) -> AsyncIterator[bytes]:
        """Yields the chunks of a new file in canonical format, with all entries of `read` that
        `changes` keep."""
        header = read.header
        tables = {
            name: meta for name, meta in header.tables.items() if name not in changes.removed_states
        }
        yield encode_header(
            FileHeader(header.max_parallelism, header.groups, tables, header.watermarks)
        )
        frames = 1
        for index, (name, meta) in enumerate(tables.items()):
            rows = _rows(read, name, meta, header.max_parallelism, changes)
            while part := list(islice(rows, ROWS_A_FRAME)):
                found, namespaces, keys, values = (
                    list(column) for column in zip(*part, strict=True)
                )
                groups = KeyGroupRange(found[0], found[-1])
                owner = f"operator {changes.uid!r}, state {name!r}"
                yield encode_entries(
                    index, groups, namespaces, keys, values, self._savepoint.codec, owner
                )
                frames += 1
        yield encode_end(frames)

    async def _operator_state(
        self, uid: str, file: StateFile, changes: _Changes, output: FileOutput
    ) -> StateFile:
        if not changes.removed_states:
            return await self._copy(file, output)
        state = decode_operator_state(
            await self._savepoint.files.read(file), self._savepoint.codec, uid
        )
        for tables in (state.split, state.union, state.broadcast):
            for name in changes.removed_states & set(tables):
                del tables[name]
        return await output.write(
            whole(encode_operator_state(state, self._savepoint.codec, changes.uid))
        )

    async def _copy(self, file: StateFile, output: FileOutput) -> StateFile:
        return await output.write(whole(await self._savepoint.files.read(file)))


def _rows(
    read: ReadState, name: str, meta: TableMeta, max_parallelism: int, changes: _Changes
) -> Iterator[tuple[int, Any, Any, Any]]:
    """Returns the kept entries of a table with their changed values, as (key group, namespace, key,
    value).

    The entries are sorted by key group, and within a key group in the order in which they were
    read.
    """
    rows = []
    where = f"table {name!r} of operator {changes.uid!r}"
    for namespace, held in read.tables.get(name, {}).items():
        groups = groups_of_read(meta.kind, list(held), max_parallelism, where)
        for group, (key, value) in zip(groups, held.items(), strict=True):
            if all(wanted(key, value) for wanted in changes.kept.get(name, ())):
                for change in changes.values.get(name, ()):
                    value = change(key, value)
                rows.append((group, namespace, key, value))
    rows.sort(key=lambda row: row[0])
    return iter(rows)
