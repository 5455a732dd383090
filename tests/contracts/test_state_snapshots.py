"""The contract of every keyed state backend for checkpoints.

A backend passes when it is added to `BACKENDS` and nothing here changes.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioflow.core.elements import MIN_WATERMARK
from aioflow.core.errors import RestoreError, TypeNotSupported
from aioflow.core.keygroups import KeyGroupRange, key_group, range_for_subtask
from aioflow.core.states import (
    AggregatingStateDescriptor,
    ListStateDescriptor,
    MapStateDescriptor,
    ReducingStateDescriptor,
    ValueStateDescriptor,
)
from aioflow.state.backend import KeyedStateBackend, PendingSnapshot
from aioflow.state.heap import HeapKeyedStateBackend
from aioflow.state.rocksdb import RocksDB
from aioflow.state.snapshot import CANONICAL, InlineState, KeyedStateHandle, StateFile
from aioflow.state.timers import InternalTimerService
from tests.state.snapshots import closing_backends, made

BACKENDS = ["heap", "rocksdb"]
MAX_PARALLELISM = 16
ALL = KeyGroupRange(0, MAX_PARALLELISM - 1)


class Subtask:
    """One backend with a timer service on it, restored from `handles`."""

    def __init__(self, name: Any, groups: KeyGroupRange = ALL) -> None:
        self.now_ms = 0
        self.backend: KeyedStateBackend = made(
            name,
            max_parallelism=MAX_PARALLELISM,
            key_group_range=groups,
            now_ms=lambda: self.now_ms,
            operator="count",
        )
        self.fired: list[tuple[int, Any, Any]] = []
        self.timers: InternalTimerService

    @classmethod
    async def restored(
        cls, name: Any, handles: list[KeyedStateHandle], groups: KeyGroupRange = ALL
    ) -> Subtask:
        self = cls(name, groups)
        await self.backend.restore_from(handles, InlineState())
        return self.opened()

    def opened(self) -> Subtask:
        def fire(timestamp: int, key: Any, namespace: Any) -> None:
            self.fired.append((timestamp, key, namespace))
            for timer in next_timers(timestamp, key, namespace):
                self.timers.register_event_time_timer(timer[1], timer[2], timer[0])

        self.timers = InternalTimerService(
            "timers", self.backend, fire, fire, lambda _time, _callback: Physical()
        )
        return self


def next_timers(timestamp: int, key: Any, namespace: Any) -> list[tuple[int, Any, Any]]:
    """The timers that a timer sets when it fires: one of its own instant, and a later one."""
    if (key, namespace) != (4, None):
        return []
    return [(timestamp, key, 0), (timestamp + 3, key, 0)]


class Physical:
    def cancel(self) -> None:
        """Cancels the snapshot, which is not awaited."""


class Slow(InlineState):
    """Takes a turn of the loop for each chunk, as a disk would; gives up after `fails_after`
    chunks.
    """

    def __init__(self, fails_after: int | None = None) -> None:
        self.fails_after = fails_after
        self.written = 0

    async def write(self, chunks: AsyncIterator[bytes]) -> StateFile:
        async def slowly() -> AsyncIterator[bytes]:
            async for chunk in chunks:
                self.written += len(chunk)
                if self.fails_after is not None and self.written > self.fails_after:
                    raise OSError("disk full")
                await asyncio.sleep(0)
                yield chunk

        return await super().write(slowly())


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    with closing_backends():
        yield


@pytest.fixture(params=BACKENDS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def subtask(name: str) -> Subtask:
    return Subtask(name).opened()


async def checkpoint(
    backend: KeyedStateBackend, number: int, *, full: bool = False, canonical: bool = False
) -> KeyedStateHandle:
    """A checkpoint that is completed."""
    handle = await backend.begin_snapshot(number, full=full, canonical=canonical).write(
        InlineState()
    )
    assert handle is not None
    backend.checkpoint_completed(number)
    return handle


def size(handle: KeyedStateHandle, before: KeyedStateHandle | None = None) -> int:
    """Bytes of the files that `handle` has and `before` has not."""
    known = () if before is None else before.files
    return sum(file.size for file in handle.files if file not in known)


def shares(handle: KeyedStateHandle, file: StateFile) -> bool:
    """Whether `handle` refers to this very file, not to another one of the same content."""
    return any(known is file for known in handle.files)


# One snapshot.


async def test_a_backend_without_state_has_nothing_to_keep(name: str) -> None:
    assert await Subtask(name).backend.begin_snapshot(1).write(InlineState()) is None


async def test_a_list_changed_while_the_snapshot_is_written_is_in_it_as_it_was(
    name: str, subtask: Subtask
) -> None:
    """F7.9: in ValueState, whether or not it is written back, and in every other kind of state."""
    backend = subtask.backend
    kept = backend.get_state(ValueStateDescriptor("kept"))
    windowed = backend.get_state(ValueStateDescriptor("kept"), (0, 10))
    elements = backend.get_state(ListStateDescriptor("list"))
    entries = backend.get_state(MapStateDescriptor("map"))
    total = backend.get_state(ReducingStateDescriptor("sum", lambda a, b: a + b))
    backend.set_current_key("a")
    kept.update([1])
    windowed.update([1])
    elements.add(1)
    entries.put("k", 1)
    total.add(1)
    snapshot = backend.begin_snapshot(1)
    kept.value().append(2)
    windowed.value().append(2)
    elements.add(2)
    entries.put("k", 2)
    entries.remove("k")
    total.add(2)
    handle = await snapshot.write(InlineState())
    assert handle is not None
    new = (await Subtask.restored(name, [handle])).backend
    found = [
        new.items("kept"),
        new.items("kept", namespace=(0, 10)),
        new.items("list"),
        new.items("map"),
        new.items("sum"),
    ]
    assert found == [[("a", [1])], [("a", [1])], [("a", [1])], [("a", {"k": 1})], [("a", 1)]]
    assert (kept.value(), elements.get(), entries.items(), total.get()) == ([1, 2], [1, 2], [], 3)


class Collected:
    """An AggregateFunction with a list that is changed in place."""

    def create_accumulator(self) -> list[int]:
        return []

    def add(self, value: int, accumulator: list[int]) -> list[int]:
        accumulator.append(value)
        return accumulator

    def get_result(self, accumulator: list[int]) -> list[int]:
        return accumulator[:]

    def merge(self, a: list[int], b: list[int]) -> list[int]:
        return a + b


@pytest.mark.parametrize("ttl", [None, "1h"])
async def test_accumulators_and_tables_changed_in_place_are_in_the_snapshot_as_they_were(
    name: str, subtask: Subtask, ttl: Any
) -> None:
    """F7.9, for the state of built-in operators: they name the changed keys of a table."""
    backend = subtask.backend
    collected = backend.get_state(AggregatingStateDescriptor("agg", Collected(), ttl=ttl))
    table = backend.table("table")
    backend.set_current_key("a")
    collected.add(1)
    table.of(5, ["a", "b"]).update({"a": ([1], [1]), "b": [1]})
    table.of()["c"] = [1]
    snapshot = backend.begin_snapshot(1)
    collected.add(2)
    table.of(5, ["a"])["a"][0].append(2)
    table.of_key(5, "b")["b"].append(2)
    table.of()["c"].append(2)
    handle = await snapshot.write(InlineState())
    assert handle is not None
    new = (await Subtask.restored(name, [handle])).backend
    assert new.get_state(AggregatingStateDescriptor("agg", Collected(), ttl=ttl)) is not None
    assert new.query("agg", "a") == [1]
    assert (dict(new.items("table", namespace=5)), new.items("table")) == (
        {"a": ([1], [1]), "b": [1]},
        [("c", [1])],
    )


async def test_slow_durable_write_holds_no_view_of_the_heap() -> None:
    """The content of the file is encoded by then.

    Saving a change in vain costs twice as much as noting one.
    """
    encoded, durable = asyncio.Event(), asyncio.Event()

    class Syncing(InlineState):
        async def write(self, chunks: AsyncIterator[bytes]) -> StateFile:
            file = await super().write(chunks)
            encoded.set()
            await durable.wait()
            return file

    backend = HeapKeyedStateBackend(
        max_parallelism=MAX_PARALLELISM, key_group_range=ALL, now_ms=lambda: 0
    )
    state = backend.get_state(ValueStateDescriptor("value"))
    backend.set_current_key("a")
    state.update(1)
    await checkpoint(backend, 1)
    state.update(2)
    writing = asyncio.ensure_future(backend.begin_snapshot(2).write(Syncing()))
    await encoded.wait()
    assert not backend._log.guarded
    state.update(3)
    durable.set()
    second = await writing
    assert second is not None
    restored = HeapKeyedStateBackend(
        max_parallelism=MAX_PARALLELISM, key_group_range=ALL, now_ms=lambda: 0
    )
    await restored.restore_from([second], InlineState())
    assert restored.query("value", "a") == 2
    backend.checkpoint_completed(2)
    third = await checkpoint(backend, 3)
    restored = HeapKeyedStateBackend(
        max_parallelism=MAX_PARALLELISM, key_group_range=ALL, now_ms=lambda: 0
    )
    await restored.restore_from([third], InlineState())
    assert restored.query("value", "a") == 3


async def test_a_second_snapshot_may_begin_while_the_first_is_written(
    name: str, subtask: Subtask
) -> None:
    table = subtask.backend.table("t")
    snapshots: list[PendingSnapshot] = []
    for number in range(1, 4):
        table.of(None, ["a"]).setdefault("a", []).append(number)
        if number == 1:
            table.of()["still"] = [0]
        snapshots.append(subtask.backend.begin_snapshot(number, full=True))
    for key in ("a", "still"):
        table.of(None, [key])[key].append(4)
    for number in (2, 3, 1):  # In whichever order they end.
        handle = await snapshots[number - 1].write(InlineState())
        assert handle is not None
        assert dict((await Subtask.restored(name, [handle])).backend.items("t")) == {
            "a": list(range(1, number + 1)),
            "still": [0],
        }


async def test_a_cancelled_snapshot_leaves_everything_as_it_is(name: str, subtask: Subtask) -> None:
    """F7.7: unwritten changes are in the next one."""
    backend = subtask.backend
    backend.table("t").of()["a"] = 1
    await checkpoint(backend, 1)
    backend.table("t").of()["a"] = 2
    cancelled = backend.begin_snapshot(2)
    backend.table("t").of()["b"] = 3
    cancelled.cancel()
    cancelled.cancel()
    interrupted = backend.begin_snapshot(3)
    writing = asyncio.ensure_future(interrupted.write(Slow()))
    await asyncio.sleep(0)
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    backend.checkpoint_aborted(3)
    handle = await checkpoint(backend, 4)
    assert dict((await Subtask.restored(name, [handle])).backend.items("t")) == {"a": 2, "b": 3}


async def test_a_write_that_failed_is_made_up_for_by_the_next(name: str, subtask: Subtask) -> None:
    """F7.5"""
    backend = subtask.backend
    for number in range(100):
        backend.table("t").of()[number] = number
    with pytest.raises(OSError, match="disk full"):
        await backend.begin_snapshot(1).write(Slow(fails_after=100))
    backend.checkpoint_aborted(1)
    handle = await checkpoint(backend, 2)
    assert len((await Subtask.restored(name, [handle])).backend.items("t")) == 100


async def test_unencodable_value_is_refused_naming_operator_state_and_type(
    subtask: Subtask,
) -> None:
    class Local:
        pass

    state = subtask.backend.get_state(ValueStateDescriptor("last"))
    subtask.backend.set_current_key("a")
    with pytest.raises(TypeNotSupported, match=r"operator 'count', state 'last'.*Local"):
        state.update(Local())  # At the latest, it is refused by
        await subtask.backend.begin_snapshot(1).write(InlineState())


async def test_the_first_snapshot_holds_all_keys_while_they_come_and_go(
    name: str, subtask: Subtask
) -> None:
    """F7.9: it is the snapshot without a predecessor.

    Keys go from before and behind what it has looked at, and some come back.
    """
    table = subtask.backend.table("t")
    table.of().update(dict.fromkeys(range(60), 0))
    with patch.multiple("aioflow.state.heap_keys", KEYS_A_SLICE=2, KEYS_LISTED=4):
        snapshot = subtask.backend.begin_snapshot(1)
        writing = asyncio.ensure_future(snapshot.write(Slow()))
        for number in range(0, 60, 2):
            del table.of()[number]
            del table.of()[59 - number]
            table.of()[f"new-{number}"] = 1
            table.of()[number] = 1
            await asyncio.sleep(0)
        handle = await writing
    assert handle is not None
    assert dict((await Subtask.restored(name, [handle])).backend.items("t")) == dict.fromkeys(
        range(60), 0
    )


async def test_a_subtask_without_entries_writes_nothing(name: str, subtask: Subtask) -> None:
    """This holds also if state is declared.

    Its former content is in no later checkpoint, and is no longer referred to.
    """
    backend = subtask.backend
    backend.get_state(ValueStateDescriptor("v"))
    windows = backend.table("windows")
    assert await backend.begin_snapshot(1).write(InlineState()) is None
    backend.checkpoint_completed(1)
    windows.of(5)["a"] = 1
    before = await checkpoint(backend, 2)
    windows.drop(5)
    assert await backend.begin_snapshot(3, full=True).write(InlineState()) is None
    backend.checkpoint_completed(3)
    windows.of(6)["b"] = 2
    after = await checkpoint(backend, 4)
    assert not any(shares(after, file) for file in before.files)
    new = (await Subtask.restored(name, [after])).backend
    assert (new.table("windows").namespaces(), new.items("windows", namespace=6)) == (
        [6],
        [("b", 2)],
    )


# Increments.


async def test_an_increment_is_small_and_a_full_snapshot_is_not(subtask: Subtask) -> None:
    table = subtask.backend.table("t")
    for number in range(20_000):
        table.of()[f"key-{number}"] = number
    first = await checkpoint(subtask.backend, 1)
    whole = size(first)
    for number in range(200):
        table.of()[f"key-{number}"] = -number
    handle = await checkpoint(subtask.backend, 2)
    assert size(handle, first) <= 0.05 * whole
    for number in range(20):
        table.of()[f"key-{number}"] = 0
    for number, canonical in ((3, False), (4, True)):
        full = await checkpoint(subtask.backend, number, full=not canonical, canonical=canonical)
        assert not any(shares(full, file) for file in handle.files)
        assert size(full) > 0.9 * whole
        assert (full.format == CANONICAL) is canonical
        assert len(full.files) == 1 or not canonical


async def test_removed_state_stays_removed_after_a_restore(name: str, subtask: Subtask) -> None:
    backend = subtask.backend
    state = backend.get_state(ValueStateDescriptor("v"))
    for number in range(50):
        backend.set_current_key(number)
        state.update(number)
        backend.table("windows").of(number % 5)[number] = number
        subtask.timers.register_event_time_timer(number, None, 100 + number)
        subtask.timers.register_event_time_timer(number, "same", 1_000)
    first = await checkpoint(backend, 1)
    backend.set_current_key(7)
    state.clear()
    backend.table("windows").drop(3)
    backend.table("windows").drop(4)
    backend.table("windows").of(4)["new"] = 1
    subtask.timers.advance_watermark(109)
    subtask.timers.delete_event_time_timer(20, None, 120)
    subtask.timers.delete_event_time_timer(20, "same", 1_000)
    handle = await checkpoint(backend, 2)
    assert handle.files[0] == first.files[0]
    new = await Subtask.restored(name, [handle])
    assert sorted(key for key, _ in new.backend.items("v")) == [*range(7), *range(8, 50)]
    assert new.backend.table("windows").namespaces() == [0, 1, 2, 4]
    assert new.backend.items("windows", namespace=4) == [("new", 1)]
    assert new.timers.event_time_timers() == subtask.timers.event_time_timers()
    assert new.timers.current_watermark == 109


async def test_an_increment_never_refers_to_an_aborted_checkpoint(
    name: str, subtask: Subtask
) -> None:
    table = subtask.backend.table("t")
    for number in range(20):
        table.of()[number] = 0
    first = await checkpoint(subtask.backend, 1)
    table.of()[1] = 1
    aborted = await subtask.backend.begin_snapshot(2).write(InlineState())
    subtask.backend.checkpoint_aborted(2)
    table.of()[2] = 2
    handle = await checkpoint(subtask.backend, 3)
    assert aborted is not None
    assert handle.files[0] == first.files[0]
    assert aborted.files[-1] not in handle.files
    assert dict((await Subtask.restored(name, [handle])).backend.items("t")) == {
        **dict.fromkeys(range(20), 0),
        1: 1,
        2: 2,
    }


async def test_files_are_few_and_their_size_in_proportion_after_many_checkpoints(
    name: str, subtask: Subtask
) -> None:
    table = subtask.backend.table("t")
    for number in range(300):
        table.of()[number] = "0" * 100
    for number in range(1, 120):
        table.of()[number % 300] = "1" * 100
        table.of(number)["x"] = 1
        table.drop(number - 3)
        handle = await checkpoint(subtask.backend, number)
        assert len(handle.files) < 40
    assert size(handle) < 3 * size(await checkpoint(subtask.backend, 200, full=True))
    new = (await Subtask.restored(name, [handle])).backend
    assert dict(new.items("t")) == dict(subtask.backend.items("t"))
    assert new.table("t").namespaces() == subtask.backend.table("t").namespaces()


async def test_a_restored_subtask_goes_on_with_the_files_of_the_checkpoint(
    name: str, subtask: Subtask
) -> None:
    """H7.1: unless it is told to write everything, or was restored from a savepoint, or from
    more than its own state.
    """
    table = subtask.backend.table("t")
    for number in range(100):
        table.of(number % 2)[number] = number
    handle = await checkpoint(subtask.backend, 1)
    claimed = await Subtask.restored(name, [handle])
    claimed.backend.table("t").of(1)[1] = -1
    del claimed.backend.table("t").of(1)[3]
    claimed.backend.table("t").drop(0)
    second = await checkpoint(claimed.backend, 2)
    assert second.files[0] == handle.files[0]
    again = (await Subtask.restored(name, [second])).backend
    assert sorted(again.items("t", namespace=1)) == sorted(claimed.backend.items("t", namespace=1))
    assert again.table("t").namespaces() == [1]
    told = await Subtask.restored(name, [handle])
    told.backend.table("t").of()["told"] = 1
    assert not shares(await checkpoint(told.backend, 2, full=True), handle.files[0])
    savepoint = await checkpoint(subtask.backend, 2, canonical=True)
    moved = await Subtask.restored(name, [savepoint])
    moved.backend.table("t").of()["moved"] = 1
    assert not shares(await checkpoint(moved.backend, 3), savepoint.files[0])
    rescaled = await Subtask.restored(name, [handle], range_for_subtask(0, 2, MAX_PARALLELISM))
    assert not shares(await checkpoint(rescaled.backend, 2), handle.files[0])


async def test_an_increment_after_a_savepoint_does_not_rest_on_it(
    name: str, subtask: Subtask
) -> None:
    table = subtask.backend.table("t")
    table.of().update(dict.fromkeys(range(50), 0))
    first = await checkpoint(subtask.backend, 1)
    table.of()[1] = 1
    savepoint = await checkpoint(subtask.backend, 2, canonical=True)
    table.of()[2] = 2
    third = await checkpoint(subtask.backend, 3)
    assert third.files[0] == first.files[0]
    assert savepoint.files[0] not in third.files
    assert dict((await Subtask.restored(name, [third])).backend.items("t")) == {
        **dict.fromkeys(range(50), 0),
        1: 1,
        2: 2,
    }


# Malformed files.


async def test_every_file_that_is_not_whole_is_refused_naming_it_and_the_operator(
    name: str, subtask: Subtask
) -> None:
    subtask.backend.table("t").of(3).update({f"key-{number}": [number] for number in range(5)})
    subtask.timers.register_event_time_timer("a", (0, 10), 100)
    handle = await checkpoint(subtask.backend, 1, canonical=True)
    (file,) = handle.files
    assert file.content is not None
    for end in range(file.size):
        with pytest.raises(RestoreError, match="restore the state of operator 'count'"):
            await Subtask.restored(name, [with_content(handle, file.content[:end])])
    with pytest.raises(RestoreError, match="'count'"):
        await Subtask.restored(name, [with_content(handle, file.content + b"\0")])


async def test_bytes_that_are_changed_are_refused_or_harmless_and_never_an_error_of_a_decoder(
    name: str, subtask: Subtask
) -> None:
    """Their digest guards the files; what gets past it must still not bring down more than this
    restore.
    """
    subtask.backend.table("t").of(3).update({f"key-{number}": [number] for number in range(5)})
    subtask.timers.register_event_time_timer("a", (0, 10), 100)
    handle = await checkpoint(subtask.backend, 1, canonical=True)
    content = handle.files[0].content
    assert content is not None
    for place in range(len(content)):
        for flip in (1, 0x80, 0xFF):
            changed = bytearray(content)
            changed[place] ^= flip
            try:
                await Subtask.restored(name, [with_content(handle, bytes(changed))])
            except RestoreError as error:
                assert "'count'" in str(error)  # noqa: PT017  # It may also be restored.
    damaged = StateFile("", handle.files[0].size, handle.files[0].digest, content[:-1] + b"\0")
    with pytest.raises(RestoreError, match="digest"):
        await Subtask.restored(
            name,
            [KeyedStateHandle(handle.format, MAX_PARALLELISM, 0, MAX_PARALLELISM - 1, (damaged,))],
        )


async def test_state_of_another_backend_is_refused_with_the_remedy(name: str) -> None:
    with pytest.raises(RestoreError, match=r"operator 'count' is in the format 'other'.*savepoint"):
        await Subtask.restored(
            name, [KeyedStateHandle("other", MAX_PARALLELISM, 0, MAX_PARALLELISM - 1, ())]
        )


def with_content(handle: KeyedStateHandle, content: bytes) -> KeyedStateHandle:
    import hashlib

    file = StateFile("", len(content), hashlib.blake2b(content, digest_size=16).digest(), content)
    return KeyedStateHandle(
        handle.format, handle.max_parallelism, handle.first_group, handle.last_group, (file,)
    )


# Against plain dicts.

Place = tuple[str, Any, Any]


@dataclass
class World:
    """A job of several subtasks, and beside it what its state should be."""

    name: Any
    subtasks: list[Subtask]
    state: dict[Place, Any] = field(default_factory=dict)
    timers: dict[tuple[int, int, Any], None] = field(default_factory=dict)
    watermark: int = MIN_WATERMARK
    ends: dict[Place, int] = field(default_factory=dict)
    """When the state with a time to live ends."""
    now_ms: int = 0
    number: int = 0
    pending: dict[int, tuple[list[PendingSnapshot], list[asyncio.Future[Any]], Any]] = field(
        default_factory=dict
    )
    completed: tuple[list[KeyedStateHandle], Any] | None = None

    def owner(self, key: Any) -> Subtask:
        (owner,) = [
            s for s in self.subtasks if key_group(key, MAX_PARALLELISM) in s.backend.key_group_range
        ]
        return owner

    def value(self, key: int, namespace: Any, number: int) -> None:
        self._set("v", key, namespace, number)

    def nothing(self, key: int, namespace: Any, _number: int) -> None:
        self._set("v", key, namespace, None)

    def document(self, key: int, namespace: Any, number: int) -> None:
        held = self.owner(key).backend
        held.set_current_key(key)
        state = held.get_state(ValueStateDescriptor("doc"), namespace)
        found = state.value() or []
        found.append(number)
        state.update(found)
        self.state["doc", namespace, key] = [*self.state.get(("doc", namespace, key), []), number]

    def table(self, key: int, namespace: Any, number: int) -> None:
        table = self.owner(key).backend.table("table").of(namespace, [key])
        table.setdefault(key, []).append(number)
        self.state["table", namespace, key] = [
            *self.state.get(("table", namespace, key), []),
            number,
        ]

    def removed(self, key: int, namespace: Any, number: int) -> None:
        table = self.owner(key).backend.table("table")
        (table.of(namespace) if number % 2 else table.of_key(namespace, key)).pop(key, None)
        self.state.pop(("table", namespace, key), None)

    def passing(self, key: int, namespace: Any, number: int) -> None:
        table = self.owner(key).backend.table("passing", transient=True)
        entries = table.of(namespace, [key]) if number % 2 else table.of_key(namespace, key)
        entries.setdefault(key, []).append(number)
        self.state["passing", namespace, key] = [
            *self.state.get(("passing", namespace, key), []),
            number,
        ]

    def passed(self, key: int, namespace: Any, _number: int) -> None:
        table = self.owner(key).backend.table("passing", transient=True)
        table.of_key(namespace, key).pop(key, None)
        table.removed(namespace, key)
        self.state.pop(("passing", namespace, key), None)

    def churn(self, key: int, namespace: Any, number: int) -> None:
        """A key, an entry and a timer that come and go at once, unless they were there: then
        they only go.
        """
        self.value(key, namespace, number)
        self.nothing(key, namespace, number)
        self.passing(key, namespace, number)
        self.passed(key, namespace, number)
        self.timer(key, namespace, number)
        self.no_timer(key, namespace, number)

    def many(self, key: int, namespace: Any, number: int) -> None:
        """Adds to some keys of two tables, each with one call."""
        for name in ("table", "passing"):
            for subtask, keys in self.owners(key):
                table = subtask.backend.table(name, transient=name == "passing")
                entries = table.of(namespace, keys)
                for one in keys:
                    entries[one] = [*entries.get(one, []), number]
                    place = (name, namespace, one)
                    self.state[place] = [*self.state.get(place, []), number]

    def many_passed(self, key: int, namespace: Any, _number: int) -> None:
        """Removes some keys of two tables."""
        for subtask, keys in self.owners(key):
            entries = subtask.backend.table("table").of(namespace, keys)
            for one in keys:
                entries.pop(one, None)
                self.state.pop(("table", namespace, one), None)
        for one in range(key + 1):
            self.passed(one, namespace, 0)

    def listed(self, key: int, namespace: Any, number: int) -> None:
        held = self.owner(key).backend
        held.set_current_key(key)
        place = ("list", namespace, key)
        state = held.get_state(ListStateDescriptor("list"), namespace)
        if number % 3:
            state.add(number)
            self.state[place] = [*self.state.get(place, []), number]
        else:
            state.clear()
            self.state.pop(place, None)

    def mapped(self, key: int, namespace: Any, number: int) -> None:
        held = self.owner(key).backend
        held.set_current_key(key)
        place = ("map", namespace, key)
        state, known = held.get_state(MapStateDescriptor("map"), namespace), self.state.get(place)
        if number % 3:
            state.put(number % 4, number)
            self.state[place] = {**(known or {}), number % 4: number}
        else:
            state.remove((number + 1) % 4)
            if known is not None:
                self.state[place] = left = {
                    one: of for one, of in known.items() if one != (number + 1) % 4
                }
                if not left:
                    del self.state[place]

    def aged(self, key: int, namespace: Any, number: int) -> None:
        held = self.owner(key).backend
        held.set_current_key(key)
        descriptor = ValueStateDescriptor("aged", ttl="20ms")
        held.get_state(descriptor, namespace).update([number])
        self.state["aged", namespace, key] = [number]
        self.ends["aged", namespace, key] = self.now_ms + 20

    def time(self, _key: int, _namespace: Any, number: int) -> None:
        self.now_ms += number
        for subtask in self.subtasks:
            subtask.now_ms = self.now_ms
        self.state = self.alive(self.state, self.ends)

    def alive(self, state: dict[Place, Any], ends: dict[Place, int]) -> dict[Place, Any]:
        return {
            place: value
            for place, value in state.items()
            if place[0] != "aged" or ends[place] > self.now_ms
        }

    def owners(self, upto: int) -> list[tuple[Subtask, list[int]]]:
        """Each subtask, with those of the keys up to `upto` that it owns."""
        keys: dict[int, list[int]] = {}
        for key in range(upto + 1):
            keys.setdefault(self.subtasks.index(self.owner(key)), []).append(key)
        return [(self.subtasks[place], some) for place, some in keys.items()]

    def drop(self, _key: int, namespace: Any, _number: int) -> None:
        for subtask in self.subtasks:
            subtask.backend.table("table").drop(namespace)
            subtask.backend.table("passing", transient=True).drop(namespace)
        gone = (("table", namespace), ("passing", namespace))
        self.state = {place: value for place, value in self.state.items() if place[:2] not in gone}

    def timer(self, key: int, namespace: Any, number: int) -> None:
        self.owner(key).timers.register_event_time_timer(key, namespace, number)
        self.timers[number, key, namespace] = None

    def no_timer(self, key: int, namespace: Any, number: int) -> None:
        self.owner(key).timers.delete_event_time_timer(key, namespace, number)
        self.timers.pop((number, key, namespace), None)

    def advance(self, _key: int, _namespace: Any, number: int) -> None:
        self.watermark = max(self.watermark, number)
        for subtask in self.subtasks:
            subtask.timers.advance_watermark(number)
        for timer in list(self.timers):
            if timer[0] <= self.watermark:
                self.timers.update(dict.fromkeys(next_timers(*timer)))
        self.timers = {timer: None for timer in self.timers if timer[0] > self.watermark}

    def some_fire(self, _key: int, _namespace: Any, number: int) -> None:
        for subtask in self.subtasks:
            timer = subtask.timers.pop_due(max(number, self.watermark))
            if timer is not None:
                del self.timers[timer]
                subtask.timers.current_watermark = MIN_WATERMARK  # The others may still be due.
        self.watermark = MIN_WATERMARK
        for subtask in self.subtasks:
            subtask.timers.current_watermark = MIN_WATERMARK

    def begin(self, _key: int, _namespace: Any, number: int) -> None:
        self.number += 1
        kind = {0: {"full": True}, 1: {"canonical": True}}.get(number, {})
        snapshots = [
            subtask.backend.begin_snapshot(self.number, **kind) for subtask in self.subtasks
        ]
        writing = [
            asyncio.ensure_future(snapshot.write(Slow(60 if number == 2 else None)))
            for snapshot in snapshots
        ]
        self.pending[self.number] = (
            snapshots,
            writing,
            copy.deepcopy((self.state, self.timers, self.watermark, self.ends)),
        )

    async def slices(self, key: int, _namespace: Any, _number: int) -> None:
        for _ in range(3 * key):
            await asyncio.sleep(0)

    async def complete(self, key: int, _namespace: Any, _number: int) -> None:
        """Completes one of the pending checkpoints; those before it are subsumed."""
        if not self.pending:
            return
        number = list(self.pending)[key % len(self.pending)]
        _, writing, expected = self.pending.pop(number)
        handles = await asyncio.gather(*writing, return_exceptions=True)
        if any(isinstance(handle, OSError) for handle in handles):
            for subtask in self.subtasks:
                subtask.backend.checkpoint_aborted(number)
            return
        self.completed = (
            [handle for handle in handles if isinstance(handle, KeyedStateHandle)],
            expected,
        )
        for subtask in self.subtasks:
            subtask.backend.checkpoint_completed(number)
        for earlier in [known for known in self.pending if known < number]:
            await self.give_up(earlier)
        world = await restored(self.name, 1, *self.completed, now_ms=self.now_ms)
        assert world.seen() == world.expected()

    def expected(self) -> Any:
        return self.state, self.timers, self.watermark

    async def checkpoint(self, _key: int, _namespace: Any, _number: int) -> None:
        """Begins and completes a checkpoint."""
        self.begin(0, None, 9)
        await self.complete(len(self.pending) - 1, None, 0)

    async def abort(self, key: int, _namespace: Any, _number: int) -> None:
        if self.pending:
            await self.give_up(list(self.pending)[key % len(self.pending)])

    async def give_up(self, number: int) -> None:
        snapshots, writing, _ = self.pending.pop(number)
        for subtask, snapshot, task in zip(self.subtasks, snapshots, writing, strict=True):
            task.cancel()
            snapshot.cancel()
            subtask.backend.checkpoint_aborted(number)
        await asyncio.gather(*writing, return_exceptions=True)

    def seen(self) -> Any:
        state = {
            (table, namespace, key): value
            for subtask in self.subtasks
            for table in subtask.backend.names()
            for namespace in (None, 0, (0, 10))
            for key, value in subtask.backend.items(table, namespace=namespace)
        }
        timers = {
            timer: None for subtask in self.subtasks for timer in subtask.timers.event_time_timers()
        }
        reached = {subtask.timers.current_watermark for subtask in self.subtasks}
        return state, timers, min(reached)

    def _set(self, table: str, key: int, namespace: Any, value: Any) -> None:
        held = self.owner(key).backend
        held.set_current_key(key)
        held.get_state(ValueStateDescriptor(table), namespace).update(value)
        if value is None:
            self.state.pop((table, namespace, key), None)
        else:
            self.state[table, namespace, key] = value


async def restored(
    name: Any, parallelism: int, handles: list[KeyedStateHandle], expected: Any, now_ms: int = 0
) -> World:
    groups = [
        range_for_subtask(index, parallelism, MAX_PARALLELISM) for index in range(parallelism)
    ]
    world = World(name, [await Subtask.restored(name, handles, range) for range in groups])
    world.state, world.timers, world.watermark, world.ends = copy.deepcopy(expected)
    for subtask in world.subtasks:
        # Functions declare their state when they open.
        subtask.backend.get_state(ValueStateDescriptor("aged", ttl="20ms"))
    world.now_ms = now_ms
    world.time(0, None, 0)
    return world


ACTIONS = [
    "value",
    "nothing",
    "document",
    "document",
    "table",
    "table",
    "removed",
    "drop",
    "timer",
    "timer",
    "no_timer",
]
ACTIONS += ["passing", "passing", "passed", "passed", "churn", "churn"]
ACTIONS += [
    "advance",
    "some_fire",
    "begin",
    "begin",
    "slices",
    "slices",
    "complete",
    "complete",
    "abort",
    "restart",
]
ACTIONS += ["many", "many", "many_passed", "listed", "mapped", "aged", "time"]
ACTIONS += ["checkpoint", "checkpoint", "checkpoint"]
STEP = st.tuples(
    st.sampled_from(ACTIONS),
    st.integers(0, 4),
    st.sampled_from([None, 0, (0, 10)]),
    st.integers(0, 9),
)


FIRING_STEP = st.tuples(
    st.sampled_from(["timer", "some_fire", "begin", "slices", "complete"]),
    st.integers(0, 4),
    st.sampled_from([None, 0, (0, 10)]),
    st.integers(0, 9),
)


@contextmanager
def few_fire() -> Iterator[None]:
    """Has few timers that fire count as very many, and parts of timers be small."""
    with (
        patch("aioflow.state.heap_churn.FIRING_MIN", 1),
        patch("aioflow.state.heap_timers.TIMERS_A_PART", 2),
    ):
        yield


@settings(max_examples=150, deadline=None)
@given(steps=st.lists(STEP, min_size=20, max_size=120))
def test_every_checkpoint_agrees_with_plain_dicts_despite_changes_while_it_is_written(
    steps: list[Any],
) -> None:
    """F7.9, G5, H7: updates, removals, dropped windows, timers that set timers, state that ends,
    several checkpoints at once, failures, aborts, restores, rescaling.
    """
    agrees("heap", steps)


@settings(max_examples=100, deadline=None)
@given(steps=st.lists(st.one_of(STEP, FIRING_STEP), min_size=20, max_size=120))
def test_every_checkpoint_amid_timers_that_fire_agrees_with_plain_dicts(steps: list[Any]) -> None:
    """F7.9, G5: likewise, with the file of timers that fire now."""
    with few_fire():
        agrees("heap", steps)


@settings(max_examples=10, deadline=None)
@given(steps=st.lists(st.one_of(STEP, FIRING_STEP), min_size=20, max_size=120))
def test_every_checkpoint_of_rocksdb_amid_timers_that_fire_agrees_with_plain_dicts(
    steps: list[Any],
) -> None:
    """F7.9, G5, H7: likewise."""
    with few_fire():
        agrees(RocksDB(), steps)


@settings(max_examples=10, deadline=None)
@given(steps=st.lists(STEP, min_size=20, max_size=120))
def test_every_checkpoint_of_rocksdb_agrees_with_plain_dicts_with_a_tiny_cache(
    steps: list[Any],
) -> None:
    """F7.9, G5, H7: likewise; fewer examples, as each opens databases by the dozen."""
    few = {"NAMED_LATELY": 3, "EVICTED_MAX": 2}
    with (
        patch.multiple("aioflow.state.rocksdb_cache", **few),
        patch("aioflow.state.rocksdb_snapshot.ROWS_A_SLICE", 2),
    ):
        agrees(RocksDB(cache_entries=3), steps)


@settings(max_examples=10, deadline=None)
@given(steps=st.lists(STEP, min_size=20, max_size=120))
def test_every_checkpoint_of_rocksdb_agrees_with_plain_dicts_if_memory_holds_all(
    steps: list[Any],
) -> None:
    """F7.9, G5, H7: likewise, with plain files between those of the database."""
    with patch("aioflow.state.rocksdb_snapshot.ROWS_A_SLICE", 2):
        agrees(RocksDB(), steps)


@pytest.mark.parametrize("name", ["heap", RocksDB(cache_entries=3)], ids=["heap", "rocksdb"])
def test_a_savepoint_that_is_written_beside_a_later_checkpoint_holds_its_own_moment(
    name: Any,
) -> None:
    """G5, H7: rows that change while it is read are those of the checkpoint alone."""
    agrees(
        name,
        [
            ("value", 0, None, 0),
            ("begin", 0, None, 1),
            ("value", 0, None, 1),
            ("value", 3, None, 1),
            ("begin", 0, None, 3),
        ],
    )


def agrees(name: Any, steps: list[Any]) -> None:
    """Takes `steps`, and compares with plain dicts."""

    async def run() -> None:
        nothing: Any = ({}, {}, MIN_WATERMARK, {})
        world = await restored(name, 1, [], nothing)
        for action, key, namespace, number in steps:
            if action == "restart":
                while world.pending:
                    await world.give_up(next(iter(world.pending)))
                handles, expected = world.completed or ([], nothing)
                world, completed = (
                    await restored(name, 1 + number % 3, handles, expected, world.now_ms),
                    world.completed,
                )
                world.completed, world.number = completed, 1_000 * len(steps) + key
                continue
            ongoing = getattr(world, action)(key, namespace, number)
            if ongoing is not None:
                await ongoing
        assert world.seen() == world.expected()
        while world.pending:
            await world.complete(0, None, 0)

    # A slice of production size would hold all of this at once.
    small = {"KEYS_A_SLICE": 2, "ROWS_A_FRAME": 2, "FIRST_FRAME_ROWS": 1, "GENERATIONS_MAX": 2}
    few = {"KEYS_A_SLICE": 2, "KEYS_LISTED": 1, "KEYS_A_TUPLE": 3, "KEYS_ALONE": 2, "TURNS": 1}
    often = {"SECTIONS_MAX": 3, "SMALL_FILES_MAX": 2, "SMALL_ROWS": 8}
    plain = {"ROWS_A_FRAME": 2, "FIRST_FRAME_ROWS": 1, "KEYS_A_SLICE": 2}
    unnoted = {"UNNOTED_MIN": 2, "UNNOTED_MAX": 3, "UNNOTED_ROWS_MIN": 1, "UNNOTED_ROWS_MAX": 12}
    with (
        patch.multiple("aioflow.state.heap_snapshot", **small),
        patch.multiple("aioflow.state.heap_keys", **few),
        patch.multiple("aioflow.state.heap_churn", **plain, **unnoted),
        patch.multiple("aioflow.state.heap_archive", **often),
        patch("aioflow.state.timers.FEW_TIMERS", 1),
        closing_backends(),
    ):
        asyncio.run(run())
