"""Makes a changed copy of a savepoint, without running a job.

Operators can be renamed or removed, states removed, and entries changed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from os import PathLike, fspath
from typing import Any

from aioflow.checkpoint.completed import CheckpointKind
from aioflow.checkpoint.metadata import encode_metadata, rename_files
from aioflow.checkpoint.savepoint import Savepoint
from aioflow.checkpoint.state_files import FileOutput
from aioflow.checkpoint.store import METADATA
from aioflow.checkpoint.subtask import OperatorStateHandle, SubtaskState
from aioflow.checkpoint.urls import join_url, open_objects
from aioflow.core.errors import CheckpointError
from aioflow.core.keygroups import KeyGroupRange
from aioflow.state.format import (
    TIMERS,
    FileHeader,
    encode_end,
    encode_entries,
    encode_header,
    groups_of_read,
)
from aioflow.state.handles import CANONICAL, KeyedStateHandle, StateFile, whole
from aioflow.state.heap_restore import ReadState, read_handle
from aioflow.state.operator_state import decode_operator_state, encode_operator_state
from aioflow.state.snapshot import TableMeta

__all__ = ["SavepointEdit"]

ROWS_A_FRAME = 512
"""Number of rows in a frame of a file, as the heap backend writes them.

Bounded, so that reading needs little memory beyond the values.
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
        """Gives the operator another uid, so that its state is restored to that operator.

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

        If the state has a time to live, `change` gets and returns the stored values with their time
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

        The former first operator may be renamed or removed.
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
        """Yields the chunks of one file, in canonical format, with all entries that are kept."""
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
    """Returns (key group, namespace, key, value) of the entries of a table that are kept, changed.

    They are sorted by key group, and otherwise in the order in which they were read.
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
