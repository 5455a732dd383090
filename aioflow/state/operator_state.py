"""Operator state: the state of a subtask that belongs to no key. Always on the heap.

    list state        elements that may go to any subtask: spread evenly when the parallelism
                      changes
    union list state  elements that every subtask gets from all subtasks
    broadcast state   a map that is the same on every subtask

`redistribute` is a pure function from the snapshots of the former subtasks to those of the new
subtasks.

Raw keyed state has bytes for each key group, which a function writes and reads by itself.
A function may keep its data in a form of its own, such as an index, a model or a sketch. It writes
the data in `snapshot_state` and reads them in `initialize_state`. The engine stores the bytes, and
gives each key group to the subtask that has it after the restore, at any parallelism.

The bytes are in a table of the operator's keyed state, under one key of each group. So they are
part of checkpoints and savepoints like any other state, and only changed groups are written again.
"""

from __future__ import annotations

from collections.abc import Generator, Hashable, Iterable, Mapping, Sequence
from itertools import count
from typing import Any, TypeVar

import msgspec

from aioflow.core.errors import (
    ProtocolError,
    RestoreError,
    StateError,
    TypeNotSupported,
    ValueNotSupported,
)
from aioflow.core.keygroups import key_group
from aioflow.core.states import MapStateDescriptor, StateDescriptor
from aioflow.core.wire.serializers import Codec
from aioflow.state.backend import INTERNAL_PREFIX, KeyedStateBackend
from aioflow.state.snapshot import OperatorSnapshot, frozen_copy

__all__ = [
    "BroadcastState",
    "HeapOperatorStateBackend",
    "OperatorListState",
    "RawKeyedView",
    "ReadOnlyBroadcastState",
    "decode_operator_state",
    "encode_in_parts",
    "encode_operator_state",
    "redistribute",
]

MAGIC = b"aioflow.operator"
VERSION = 1
DIVIDED = 2
"""Version of the format for a state with more values than are encoded at once."""

ENCODED_AT_ONCE = 16_384
"""Number of values that are encoded between two yields: 2 to 10 ms."""

T = TypeVar("T")


class OperatorListState:
    """List state: the elements of this subtask. None cannot be an element."""

    __slots__ = ("_elements", "name")

    def __init__(self, name: str, elements: list[Any] | None = None) -> None:
        self.name = name
        self._elements: list[Any] = [] if elements is None else elements

    def get(self) -> list[Any]:
        """Returns a new list of the elements; changing the list does not change the state."""
        return self._elements[:]

    def add(self, value: Any) -> None:
        self.add_all((value,))

    def add_all(self, values: Iterable[Any]) -> None:
        self._elements.extend(self._checked(values))

    def update(self, values: Iterable[Any]) -> None:
        """Replaces all elements; an empty list clears the state."""
        self._elements = self._checked(values)

    def clear(self) -> None:
        self._elements = []

    def _checked(self, values: Iterable[Any]) -> list[Any]:
        new = list(values)
        if any(value is None for value in new):
            raise StateError(
                f"operator state {self.name!r} was given None, expected an element that is not None"
            )
        return new


class ReadOnlyBroadcastState:
    """A read-only view of broadcast state, for the input that is not broadcast.

    A change by that input would not reach the other subtasks.
    """

    __slots__ = ("_entries", "name")

    def __init__(self, name: str, entries: dict[Any, Any]) -> None:
        self.name = name
        self._entries = entries

    def get(self, key: Any, default: Any = None) -> Any:
        return self._entries.get(key, default)

    def contains(self, key: Any) -> bool:
        return key in self._entries

    def keys(self) -> list[Any]:
        return list(self._entries)

    def values(self) -> list[Any]:
        return list(self._entries.values())

    def items(self) -> list[tuple[Any, Any]]:
        return list(self._entries.items())

    def is_empty(self) -> bool:
        return not self._entries

    def put(self, key: Any, value: Any) -> None:
        raise self._refused("put")

    def put_all(self, entries: Mapping[Any, Any]) -> None:
        raise self._refused("put_all")

    def remove(self, key: Any) -> None:
        raise self._refused("remove")

    def clear(self) -> None:
        raise self._refused("clear")

    def _refused(self, method: str) -> StateError:
        return StateError(
            f"{method}() on broadcast state {self.name!r} from the side that is not broadcast: it "
            "is read-only there, or "
            "the subtasks would differ; change it in process_broadcast_element"
        )


class BroadcastState(ReadOnlyBroadcastState):
    """A map with the same contents in every subtask, because each applies the same broadcast
    elements.
    """

    __slots__ = ()

    def put(self, key: Any, value: Any) -> None:
        self._entries[key] = value

    def put_all(self, entries: Mapping[Any, Any]) -> None:
        self._entries.update(entries)

    def remove(self, key: Any) -> None:
        self._entries.pop(key, None)

    def clear(self) -> None:
        self._entries.clear()

    def read_only(self) -> ReadOnlyBroadcastState:
        """Returns a view of the map that cannot change it."""
        return ReadOnlyBroadcastState(self.name, self._entries)


class HeapOperatorStateBackend:
    """Operator state of one subtask, by name. A name belongs to one kind of state."""

    def __init__(self) -> None:
        self.is_restored = False
        self.is_lent = False
        self._split: dict[str, OperatorListState] = {}
        self._union: dict[str, OperatorListState] = {}
        self._broadcast: dict[str, BroadcastState] = {}
        self._asked: dict[str, None] = {}

    def get_list_state(self, descriptor: StateDescriptor | str) -> OperatorListState:
        """Returns list state, whose elements are redistributed when the parallelism changes."""
        name = self._name(descriptor, self._split, "list")
        return self._split.setdefault(name, OperatorListState(name))

    def get_union_list_state(self, descriptor: StateDescriptor | str) -> OperatorListState:
        """Returns union list state: after a restore, every subtask has the elements of all
        subtasks.
        """
        name = self._name(descriptor, self._union, "union list")
        return self._union.setdefault(name, OperatorListState(name))

    def get_broadcast_state(self, descriptor: MapStateDescriptor[Any, Any] | str) -> BroadcastState:
        """Returns broadcast state, a map that is the same on every subtask."""
        name = self._name(descriptor, self._broadcast, "broadcast")
        return self._broadcast.setdefault(name, BroadcastState(name, {}))

    def snapshot(self) -> OperatorSnapshot:
        """Returns a consistent copy; it includes names without elements.

        A value that cannot be copied is rejected when the snapshot is encoded.
        """
        snapshot = OperatorSnapshot()
        for lists, copies in ((self._split, snapshot.split), (self._union, snapshot.union)):
            for name, state in lists.items():
                copies[name] = _frozen(name, state._elements, snapshot.uncopied)
        for name, entries in self._broadcast.items():
            snapshot.broadcast[name] = _frozen(name, entries._entries, snapshot.uncopied)
        return snapshot

    def lend(self) -> None:
        """Notes that a function holds a reference to this backend, and may request state at any
        time.
        """
        self.is_lent = True

    def unclaimed(self) -> list[str]:
        """Returns the names of restored list states that hold elements and were not requested.

        Broadcast state is not included, because it may still be requested with an element.
        """
        lists = {**self._split, **self._union}
        return [name for name, state in lists.items() if name not in self._asked and state.get()]

    def forget(self, name: str) -> None:
        """Drops the restored list state `name`, which `unclaimed` returned."""
        self._split.pop(name, None)
        self._union.pop(name, None)

    def restore(self, snapshot: OperatorSnapshot) -> None:
        """Restores `snapshot`, this subtask's share, which `redistribute` returned.

        Called before any state is requested. Does not change the snapshot.
        """
        self.is_restored = True
        for name, elements in snapshot.split.items():
            self._split[name] = OperatorListState(name, frozen_copy(elements))
        for name, elements in snapshot.union.items():
            self._union[name] = OperatorListState(name, frozen_copy(elements))
        for name, entries in snapshot.broadcast.items():
            self._broadcast[name] = BroadcastState(name, frozen_copy(entries))

    def _name(
        self, descriptor: StateDescriptor | str, wanted: Mapping[str, object], kind: str
    ) -> str:
        name = descriptor if isinstance(descriptor, str) else descriptor.name
        if not name:
            raise StateError("operator state needs a name that is not empty")
        self._asked[name] = None
        for states, found in (
            (self._split, "list"),
            (self._union, "union list"),
            (self._broadcast, "broadcast"),
        ):
            if states is not wanted and name in states:
                raise StateError(
                    f"operator state {name!r} is asked for as {kind} state, but it is {found} "
                    "state; use another name"
                )
        return name


def redistribute(snapshots: Sequence[OperatorSnapshot], parallelism: int) -> list[OperatorSnapshot]:
    """Returns the snapshots of `parallelism` new subtasks, computed from the snapshots of the
    former subtasks.

    List state: all elements in old order are cut into contiguous chunks whose sizes differ by at
    most one. The larger chunks of one state begin after the last larger chunk of the previous
    state. So the first subtasks do not get all larger chunks. With an unchanged parallelism
    elements stay where they were. Union list state: every subtask gets all elements in old order.
    Broadcast state: new subtask i gets the copy of former subtask i modulo the former parallelism.

    The design follows Flink's RoundRobinOperatorStateRepartitioner.
    """
    if parallelism < 1:
        raise ValueError(f"parallelism is {parallelism}, expected at least 1")
    new = [OperatorSnapshot() for _ in range(parallelism)]
    if not snapshots:
        return new
    if len(snapshots) == parallelism:
        for old, snapshot in zip(snapshots, new, strict=True):
            snapshot.split = dict(old.split)
    else:
        start = 0
        for name in _names([snapshot.split for snapshot in snapshots]):
            elements = [
                element for snapshot in snapshots for element in snapshot.split.get(name, ())
            ]
            base, extra = divmod(len(elements), parallelism)
            taken = 0
            for i in range(parallelism):
                size = base + 1 if i < extra else base
                new[(start + i) % parallelism].split[name] = elements[taken : taken + size]
                taken += size
            start = (start + extra) % parallelism
    for name in _names([snapshot.union for snapshot in snapshots]):
        everything = [element for snapshot in snapshots for element in snapshot.union.get(name, ())]
        for snapshot in new:
            snapshot.union[name] = everything
    for i, snapshot in enumerate(new):
        snapshot.broadcast = dict(snapshots[i % len(snapshots)].broadcast)
    return new


def _frozen(name: str, state: Any, uncopied: dict[str, str]) -> Any:
    """Returns a copy of `state`.

    A value that cannot be copied is recorded in `uncopied` under `name`. `encode_operator_state`
    later names the state in its error, which fails the job.
    """
    try:
        return frozen_copy(state)
    # `__deepcopy__` may raise any error, and would raise it again after a restart of the task.
    except Exception as error:  # noqa: BLE001
        uncopied[name] = f"{type(error).__name__}: {error}"
        return state.copy()


def _names(states: Sequence[Mapping[str, T]]) -> list[str]:
    # In order of first appearance: a set would differ from run to run.
    return list(dict.fromkeys(name for state in states for name in state))


class _Encoded(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """The content of the bytes after the magic and the version: encoded batches, by the name of the
    state.
    """

    split: dict[str, bytes]
    union: dict[str, bytes]
    broadcast: dict[str, tuple[bytes, bytes]]


class _Divided(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """The content of `DIVIDED`: each batch of `_Encoded` as a list of smaller batches."""

    split: dict[str, list[bytes]]
    union: dict[str, list[bytes]]
    broadcast: dict[str, tuple[list[bytes], list[bytes]]]


def encode_operator_state(snapshot: OperatorSnapshot, codec: Codec, owner: str) -> bytes:
    """Encodes `snapshot`.

    Raises TypeNotSupported naming the operator `owner`, the state, the type and the remedy.
    """
    encoding = encode_in_parts(snapshot, codec, owner)
    while True:
        try:
            next(encoding)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


def encode_in_parts(
    snapshot: OperatorSnapshot, codec: Codec, owner: str
) -> Generator[None, None, bytes]:
    """Does the same as `encode_operator_state`, but yields to the loop after each `ENCODED_AT_ONCE`
    values.
    """

    def batches(name: str, values: list[Any]) -> Generator[None, None, list[bytes]]:
        place = f"operator {owner!r}, operator state {name!r}"
        parts = []
        for begin in range(0, len(values) or 1, ENCODED_AT_ONCE):
            part = values[begin : begin + ENCODED_AT_ONCE]
            try:
                parts.append(codec.encode_batch(part, owner=place))  # Its error names the type.
            except TypeNotSupported:
                raise
            except Exception as error:
                # A registered `encode=` failed, and would fail again for the same value.
                raise ValueNotSupported(
                    f"{place}: a value cannot be encoded: {type(error).__name__}: {error}"
                ) from error
            if begin + ENCODED_AT_ONCE < len(values):
                yield
        if name in snapshot.uncopied:
            # The value may have changed since the checkpoint began, so its bytes would be wrong.
            raise ValueNotSupported(
                f"{place}: a value cannot be copied ({snapshot.uncopied[name]}), and would go on "
                "changing while the checkpoint is written; "
                "give its class __deepcopy__, or keep what it is made from"
            )
        return parts

    divided = _Divided({}, {}, {})
    for states, encoded in ((snapshot.split, divided.split), (snapshot.union, divided.union)):
        for name, elements in states.items():
            encoded[name] = yield from batches(name, elements)
    for name, held in snapshot.broadcast.items():
        keys = yield from batches(name, list(held))
        divided.broadcast[name] = keys, (yield from batches(name, list(held.values())))
    lists = [*divided.split.values(), *divided.union.values()]
    lists += [parts for both in divided.broadcast.values() for parts in both]
    if any(len(parts) > 1 for parts in lists):
        return MAGIC + bytes((DIVIDED,)) + _pack(divided)
    whole = _Encoded(
        {name: parts[0] for name, parts in divided.split.items()},
        {name: parts[0] for name, parts in divided.union.items()},
        {name: (keys[0], values[0]) for name, (keys, values) in divided.broadcast.items()},
    )
    return MAGIC + bytes((VERSION,)) + _pack(whole)


def decode_operator_state(content: bytes, codec: Codec, where: str) -> OperatorSnapshot:
    """Decodes the bytes that `encode_operator_state` returned.

    Raises RestoreError, which names the operator `where`, if the bytes have another format.
    """
    start = len(MAGIC) + 1
    if content[:start] not in (MAGIC + bytes((VERSION,)), MAGIC + bytes((DIVIDED,))):
        raise RestoreError(
            f"cannot restore operator state of {where!r}: it does not begin like version "
            f"{VERSION} or {DIVIDED} of its format"
        )

    def joined(parts: bytes | list[bytes]) -> list[Any]:
        if isinstance(parts, bytes):
            return codec.decode_batch(parts)
        return [value for part in parts for value in codec.decode_batch(part)]

    unpack = _unpack if content[start - 1] == VERSION else _unpack_divided
    try:
        encoded: _Encoded | _Divided = unpack(content[start:])
        broadcast = {
            name: (joined(keys), joined(values))
            for name, (keys, values) in encoded.broadcast.items()
        }
        return OperatorSnapshot(
            {name: joined(elements) for name, elements in encoded.split.items()},
            {name: joined(elements) for name, elements in encoded.union.items()},
            {
                name: dict(zip(keys, values, strict=True))
                for name, (keys, values) in broadcast.items()
            },
        )
    except (msgspec.MsgspecError, ProtocolError, ValueError, TypeError, RecursionError) as error:
        raise RestoreError(f"cannot restore operator state of {where!r}: {error}") from error


_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(_Encoded).decode
_unpack_divided = msgspec.msgpack.Decoder(_Divided).decode


TABLE = f"{INTERNAL_PREFIX}raw-keyed"


class RawKeyedView:
    """The raw state of the key groups of one subtask of an operator. A `RawKeyedState`."""

    def __init__(self, backend: KeyedStateBackend, operator: str) -> None:
        self._operator = operator
        self._groups = backend.key_group_range
        self._max_parallelism = backend.max_parallelism
        self._table = backend.table(TABLE)
        self._keys: dict[int, int] = {}
        """For each key group, the key under which its bytes are stored: the smallest int in this
        key group.
        """

    @property
    def key_groups(self) -> range:
        """The key groups of this subtask."""
        return range(self._groups.start, self._groups.end + 1)

    def group_of(self, key: Hashable) -> int:
        """Returns the key group of a key."""
        return key_group(key, self._max_parallelism)

    def get(self) -> dict[int, bytes]:
        """Returns a dict from key group to bytes, with each key group that has bytes."""
        return {self.group_of(key): content for key, content in self._table.peek().items()}

    def update(self, contents: Mapping[int, bytes]) -> None:
        """Replaces the bytes of all key groups. A group that is not in `contents` then has no
        bytes.

        Raises StateError for a group of another subtask, and for anything but bytes.
        """
        if not isinstance(contents, Mapping):
            raise StateError(
                f"operator {self._operator!r}: raw keyed state was given "
                f"{type(contents).__name__} {contents!r:.60}, expected a dict of key groups and "
                "their bytes, as get() returns"
            )
        for group, content in contents.items():
            if type(group) is not int or group not in self.key_groups or type(content) is not bytes:
                raise StateError(
                    f"operator {self._operator!r}: raw keyed state was given "
                    f"{type(content).__name__} for key group {group!r}, expected bytes for some of "
                    f"the groups {self._groups.start} to {self._groups.end}"
                )
        before = self.get()
        for group in before.keys() - contents.keys():
            key = self._key_of(group)
            del self._table.of_key(None, key)[key]
            self._table.removed(None, key)
        for group, content in contents.items():
            if before.get(group) != content:
                key = self._key_of(group)
                self._table.of_key(None, key)[key] = content

    def _key_of(self, group: int) -> int:
        if not self._keys:
            for key in count():
                self._keys.setdefault(self.group_of(key), key)
                if len(self._keys) == self._max_parallelism:
                    break
        return self._keys[group]
