"""Properties of the state backend over RocksDB: its cache, its files, its directory, and its
users.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioflow.core.errors import RestoreError, StateError, TypeNotSupported
from aioflow.core.keygroups import KeyGroupRange, key_group
from aioflow.core.states import ListStateDescriptor, ValueStateDescriptor
from aioflow.core.system_host import SystemHost
from aioflow.core.wire.serializers import Codec
from aioflow.state.backend import KeyedStateBackend, create_keyed_backend
from aioflow.state.rocksdb import RocksDB
from aioflow.state.rocksdb_cache import EVICTED_MAX, ROWS_FEW, Cache
from aioflow.state.rocksdb_rows import RowCodec, StoredSpace, group_in, plain_key
from aioflow.state.snapshot import CANONICAL, InlineState, KeyedStateHandle, StateFile
from aioflow.state.timers import InternalTimerService
from tests.state.snapshots import FAR, Passing, closing_backends, made

GROUPS = 16
ALL = KeyGroupRange(0, GROUPS - 1)


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    with closing_backends():
        yield


def backend(choice: Any = "rocksdb", groups: KeyGroupRange = ALL) -> KeyedStateBackend:
    return made(
        choice, max_parallelism=GROUPS, key_group_range=groups, now_ms=lambda: 0, operator="count"
    )


async def checkpoint(
    of: KeyedStateBackend, number: int, output: Any = None, **kind: bool
) -> KeyedStateHandle:
    handle = await of.begin_snapshot(number, **kind).write(output or InlineState())
    of.checkpoint_completed(number)
    assert handle is not None
    return handle


async def restored(
    choice: Any, handles: list[KeyedStateHandle], groups: KeyGroupRange = ALL
) -> KeyedStateBackend:
    new = backend(choice, groups)
    await new.restore_from(handles, InlineState())
    return new


class Counting(InlineState):
    """Counts what is written."""

    def __init__(self) -> None:
        self.files: list[StateFile] = []

    async def write(self, chunks: AsyncIterator[bytes]) -> StateFile:
        self.files.append(await super().write(chunks))
        return self.files[-1]


# Rows.

PARTS = (
    st.integers(),
    st.text(),
    st.binary(),
    st.booleans(),
    st.floats(allow_nan=False),
    st.decimals(-9, 9),
)
KEYS = st.one_of(*PARTS, st.tuples(st.integers(), st.text()))
VALUES = st.one_of(
    st.integers(),
    st.text(),
    st.floats(allow_nan=False),
    st.booleans(),
    st.lists(st.integers()),
    st.tuples(st.text()),
)


@given(key=KEYS, value=VALUES)
def test_a_row_gives_back_the_key_as_it_was_spelled_and_the_value_type_for_type(
    key: Any, value: Any
) -> None:
    rows, space = (
        RowCodec(Codec(), GROUPS),
        StoredSpace(7, "t", None, False, "operator 'count', state 't'"),
    )
    row = rows.row(space, key)
    found = rows.entry(space, row, rows.content(space, key, value))
    assert (found, type(found[0]), type(found[1])) == ((key, value), type(key), type(value))
    assert group_in(row) == key_group(key, GROUPS)


def test_keys_that_are_equal_have_one_row_and_rows_are_in_order_of_key_groups() -> None:
    rows, space = RowCodec(Codec(), GROUPS), StoredSpace(7, "t", None, False, "")
    assert len({rows.row(space, key) for key in (1, True, 1.0, Decimal(1))}) == 1
    keys = sorted(range(1_000), key=lambda key: rows.row(space, key))
    groups = [key_group(key, GROUPS) for key in keys]
    assert groups == sorted(groups)


def test_a_key_that_canonical_bytes_do_not_tell_is_none() -> None:
    with pytest.raises(ValueError, match="not in it"):
        plain_key(b"f12345678")


def test_a_damaged_row_is_an_error_naming_the_state() -> None:
    rows, space = (
        RowCodec(Codec(), GROUPS),
        StoredSpace(7, "t", None, False, "operator 'count', state 't'"),
    )
    with pytest.raises(StateError, match=r"operator 'count', state 't'.*cannot be read"):
        rows.entry(space, rows.row(space, "a"), b"\x00")


# The cache.


async def test_hardly_anything_stays_in_memory_and_everything_is_found() -> None:
    small = backend(RocksDB(cache_entries=500))
    state = small.get_state(ValueStateDescriptor("v"))
    for number in range(20_000):
        small.set_current_key(f"key-{number}")
        state.update(number)
    cache = small._cache  # type: ignore[attr-defined]
    assert sum(len(space.entries) for space in cache.spaces.values()) < 5_000
    for number in range(0, 20_000, 37):
        small.set_current_key(f"key-{number}")
        assert state.value() == number
        state.update(-number)
    assert len(small.items("v")) == 20_000
    assert (small.query("v", "key-37"), small.query("v", "key-38"), small.query("v", "none")) == (
        -37,
        38,
        None,
    )


async def test_the_cache_is_bounded_by_the_bytes_of_its_values_too() -> None:
    small = backend(RocksDB(cache_bytes=1 << 20))
    table = small.table("t")
    for number in range(5_000):
        table.of(None, [number])[number] = "x" * 1_000
    assert small._cache.limit < 1_000  # type: ignore[attr-defined]
    assert len(small.items("t")) == 5_000


async def test_the_first_spelling_of_a_key_is_kept_through_eviction_and_restore() -> None:
    small = backend(RocksDB(cache_entries=1))
    table = small.table("t")
    table.of(None, [1.0])[1.0] = "first"
    table.of(None, [0])[0] = "first"
    for number in range(2, 6_000):
        table.of(None, [str(number)])[str(number)] = number
    table.of(None, [True])[True] = "second"
    table.of(None, [False])[False] = "second"
    handle = await checkpoint(small, 1)
    for found in (small, await restored("rocksdb", [handle])):
        spelled = {key: (type(key), value) for key, value in found.items("t") if key in (0, 1)}
        assert spelled == {1: (float, "second"), 0: (int, "second")}


async def test_a_window_that_is_mostly_on_disk_is_not_taken_for_empty() -> None:
    small = backend(RocksDB(cache_entries=1))
    table = small.table("t")
    for number in range(6_000):
        table.of((0, 10), [number])[number] = number
    gone = list(table.of_key((0, 10), 5_999).keys_in_memory())  # type: ignore[attr-defined]
    left = table.of((0, 10), gone)
    for key in list(left.keys_in_memory()):  # type: ignore[attr-defined]
        del left[key]
    assert left
    assert set(left) == set(range(6_000)) - set(gone)
    assert table.namespaces() == [(0, 10)]
    table.drop((0, 10))
    assert table.namespaces() == []
    assert dict(table.peek((0, 10))) == {}
    handle = await checkpoint_or_none(small)
    assert handle is None


@pytest.mark.parametrize("restore", [False, True])
@pytest.mark.parametrize("in_order_of_rows", [False, True])
async def test_whether_a_window_on_disk_is_empty_is_not_asked_of_each_of_its_rows_again(
    restore: bool, in_order_of_rows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window asks after each key that it lets go of."""
    looked_at, count, window = 0, 4_000, (0, 10)
    plain = RowCodec.key

    def key(*args: Any) -> Any:
        nonlocal looked_at
        looked_at += 1
        return plain(*args)

    monkeypatch.setattr(RowCodec, "key", key)
    small = backend(RocksDB(cache_entries=1))
    table = small.table("t")
    for number in range(count):
        table.of(window, [number])[number] = number
    if restore:
        handle = await checkpoint(small, 1)
        small = await restored(RocksDB(cache_entries=1), [handle])
        table = small.table("t")
    numbers = list(table.peek(window)) if in_order_of_rows else list(range(count))
    for gone, number in enumerate(numbers, 1):
        held = table.of_key(window, number)
        assert held.pop(number) == number
        assert bool(held) is (gone < count)
    assert looked_at < 5 * count
    # A key that returns, and that others push to disk, is found there although rows behind it were
    # read.
    again, others = numbers[0], range(-4_000, 0)
    for number in (again, *others):
        table.of_key(window, number)[number] = number
    held = table.of_key(window, count)
    assert again not in list(held.keys_in_memory())  # type: ignore[attr-defined]
    for number in others:
        table.of_key(window, number).pop(number)
    assert held
    table.of_key(window, again).pop(again)
    assert not held
    assert table.namespaces() == []


async def test_however_many_windows_there_are_few_entries_are_written_out_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The windows have one key each, like sessions."""
    small, windows = backend(RocksDB(cache_entries=6_000)), 12_000
    table = small.table("t")
    written: list[int] = []
    make_room, put = Cache.make_room, Cache.put

    def counted(cache: Cache) -> None:
        written.append(0)
        make_room(cache)

    def noted(cache: Cache, *args: Any) -> None:
        written[-1] += 1
        put(cache, *args)

    monkeypatch.setattr(Cache, "make_room", counted)
    monkeypatch.setattr(Cache, "put", noted)
    for number in range(windows):
        table.of((number, number + 10), ["k"])["k"] = number
    assert max(written) <= EVICTED_MAX
    assert sum(written) >= windows - 6_000 - EVICTED_MAX
    in_memory = [
        number for number in range(windows) if len(table.find((number, number + 10)).entries)
    ]  # type: ignore[attr-defined]
    assert in_memory == list(range(sum(written), windows)), (
        "the oldest go first, and none of them twice"
    )


class Deletions:
    """Stands in for a batch, and counts what it would delete."""

    rows: int = 0
    ranges: int = 0

    def __init__(self, raw_mode: bool) -> None:
        assert raw_mode

    def __len__(self) -> int:
        return 0

    def delete(self, row: bytes) -> None:
        Deletions.rows += 1

    def delete_range(self, first: bytes, behind: bytes) -> None:
        Deletions.ranges += 1


@pytest.mark.parametrize(("keys", "ranges"), [(1, 0), (ROWS_FEW, 0), (ROWS_FEW + 1, GROUPS)])
async def test_a_window_of_few_keys_leaves_no_deleted_range_that_reads_would_have_to_heed(
    keys: int, ranges: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = backend()
    table = there.table("t")
    for number in range(ROWS_FEW + 1):
        table.of((0, 10), [number])[number] = number
        if number < keys:
            table.of((5, 15), [number])[number] = number
    await checkpoint(there, 1)
    for number in range(keys):
        table.of((5, 15), [number])[number] = -number  # Written twice, it is still one row.
    await checkpoint(there, 2)
    monkeypatch.setattr("aioflow.state.rocksdb_cache.WriteBatch", Deletions)
    monkeypatch.setattr(Deletions, "rows", 0)
    monkeypatch.setattr(Deletions, "ranges", 0)
    table.drop((5, 15))
    # The row that tells of the space goes, too.
    assert (Deletions.rows, Deletions.ranges) == (1 if ranges else keys + 1, ranges)


async def test_keys_that_come_and_go_between_two_checkpoints_are_never_written() -> None:
    state: Any = backend()
    passing = Passing(state)

    def dirty() -> int:
        return sum(map(len, state._cache.dirty.values()))

    for key in range(-20, 0):
        passing.come(key, FAR)
    for number in range(1, 6):
        snapshot = state.begin_snapshot(number)
        before = dirty()
        passing.pass_through(range(1000 * number, 1000 * number + 200))
        passing.settle()
        assert dirty() == before, "while it is unfinished"
        handle = await snapshot.write(InlineState())
        state.checkpoint_completed(number)
        passing.pass_through(range(1000 * number + 200, 1000 * number + 400))
        passing.settle()
        assert dirty() == 0
        assert state._cache.held >= 0
    assert handle is not None
    other: Any = await restored("rocksdb", [handle])
    assert dict(other.items("value")) == {key: key for key in range(-20, 0)}


async def test_removed_key_stays_removed_although_a_cancelled_snapshot_recorded_it() -> None:
    state: Any = backend()
    passing = Passing(state)
    passing.come("key", 10)
    passing.come("stays", FAR)
    await checkpoint(state, 1)
    passing.settle()
    snapshot = state.begin_snapshot(2)
    passing.come("key", 200)
    passing.settle()
    passing.settle()
    snapshot.cancel()
    state.checkpoint_aborted(2)
    handle = await checkpoint(state, 3)
    other: Any = await restored("rocksdb", [handle])
    assert dict(other.items("value")) == {"stays": "stays"}
    assert dict(other.items("table")) == {"stays": ["stays"]}


async def checkpoint_or_none(of: KeyedStateBackend) -> KeyedStateHandle | None:
    return await of.begin_snapshot(9).write(InlineState())


def test_unencodable_value_is_refused_at_the_update() -> None:
    class Local:
        pass

    there = backend()
    value, elements = (
        there.get_state(ValueStateDescriptor("v")),
        there.get_state(ListStateDescriptor("l")),
    )
    there.set_current_key("a")
    for update, name in (
        (lambda: value.update(Local()), "v"),
        (lambda: elements.add(Local()), "l"),
    ):
        with pytest.raises(TypeNotSupported, match=rf"operator 'count', state '{name}'.*Local"):
            update()
    with pytest.raises(TypeNotSupported, match=r"operator 'count', state 't'.*Local"):
        there.table("t").of()["a"] = Local()
    assert (value.value(), elements.get(), there.items("t")) == (None, [], [])


# Files.


async def test_a_file_of_the_database_is_uploaded_once() -> None:
    there, output = backend(), Counting()
    table = there.table("t")
    handles = []
    for number in range(1, 4):
        for key in range(2_000):
            table.of(number)[key] = key
        handles.append(await checkpoint(there, number, output))
    for before, after in pairwise(handles):
        assert before.files[0] in after.files
    assert len(output.files) == 6, "each time one file and what belongs to it"


async def test_files_of_an_aborted_checkpoint_are_uploaded_again() -> None:
    """Its files may be deleted as soon as it is aborted."""
    there, output = backend(), Counting()
    there.table("t").of()["a"] = 1
    aborted = await there.begin_snapshot(1).write(output)
    there.checkpoint_aborted(1)
    assert aborted is not None
    handle = await checkpoint(there, 2, output)
    assert not any(file is gone for file in handle.files for gone in aborted.files)
    assert dict((await restored("rocksdb", [handle])).items("t")) == {"a": 1}


@pytest.mark.parametrize(
    ("old", "new"),
    [("heap", "rocksdb"), ("rocksdb", "heap"), ("rocksdb", "rocksdb"), ("heap", "heap")],
)
async def test_a_savepoint_of_one_backend_is_restored_by_the_other(old: str, new: str) -> None:
    """H7: with timers in their order, and the progress of windows and times, at another
    parallelism.
    """
    fired: list[tuple[int, Any]] = []

    def timers_of(of: KeyedStateBackend) -> InternalTimerService:
        fire = lambda time, key, _: fired.append((time, key))
        return InternalTimerService(
            "timers",
            of,
            fire,
            fire,
            lambda _time, _callback: None,  # type: ignore[arg-type, return-value]
        )

    before = backend(old)
    timers = timers_of(before)
    state = before.get_state(ValueStateDescriptor("v"))
    for number in range(300):
        before.set_current_key(number)
        state.update([number])
        before.table("windows").of((number % 3, 10))[number] = number
        timers.register_event_time_timer(number, None if number % 2 else (0, 10), 100 + number % 5)
    timers.advance_watermark(50)
    savepoint = await checkpoint(before, 1, canonical=True)
    assert (savepoint.format, len(savepoint.files)) == (CANONICAL, 1)
    expected = timers.event_time_timers()
    whole = await restored(new, [savepoint])
    again = timers_of(whole)
    assert (again.event_time_timers(), again.current_watermark) == (expected, 50)
    halves = [
        await restored(new, [savepoint], groups)
        for groups in (KeyGroupRange(0, 7), KeyGroupRange(8, 15))
    ]
    for parts in ([whole], halves):
        assert sorted(row for part in parts for row in part.items("v")) == [
            (number, [number]) for number in range(300)
        ]
        for window in range(3):
            found = sorted(
                row for part in parts for row in part.items("windows", namespace=(window, 10))
            )
            assert found == [(number, number) for number in range(window, 300, 3)]


async def test_a_checkpoint_of_the_other_backend_is_refused_with_the_remedy() -> None:
    for old, new in (("heap", "rocksdb"), ("rocksdb", "heap")):
        before = backend(old)
        before.table("t").of()["a"] = 1
        with pytest.raises(RestoreError, match=rf"in the format '{old}'.*savepoint"):
            await restored(new, [await checkpoint(before, 1)])


@pytest.mark.parametrize("damage", ["cut", "version", "groups", "path", "files"])
async def test_a_last_file_that_is_not_sound_is_refused_naming_it_and_the_operator(
    damage: str,
) -> None:
    before = backend()
    before.table("t").of()["a"] = 1
    handle = await checkpoint(before, 1)
    bundle = msgspec.msgpack.decode(handle.files[-1].content or b"")
    if damage == "version":
        bundle["version"] = 9
    elif damage == "groups":
        bundle["last"] = 7
    elif damage == "path":
        bundle["small"]["../outside"] = b"x"
    elif damage == "files":
        bundle["files"] = []
    content = msgspec.msgpack.encode(bundle)[: -1 if damage == "cut" else None]

    async def once() -> AsyncIterator[bytes]:
        yield content

    files = (*handle.files[:-1], await InlineState().write(once()))
    with pytest.raises(RestoreError, match="restore the state of operator 'count'"):
        await restored("rocksdb", [KeyedStateHandle(handle.format, GROUPS, 0, GROUPS - 1, files)])


async def test_a_database_that_is_not_whole_is_refused_naming_the_operator() -> None:
    before = backend()
    before.table("t").of()["a"] = 1
    handle = await checkpoint(before, 1)

    async def nothing() -> AsyncIterator[bytes]:
        yield b"no table"

    files = (await InlineState().write(nothing()), handle.files[-1])
    with pytest.raises(RestoreError, match="operator 'count'"):
        await restored("rocksdb", [KeyedStateHandle(handle.format, GROUPS, 0, GROUPS - 1, files)])


# The machine.


async def test_with_threads_of_a_real_machine_the_job_goes_on_beside_the_checkpoint(
    tmp_path: Path,
) -> None:
    host = SystemHost()
    there = create_keyed_backend(
        RocksDB(path=str(tmp_path), cache_entries=2_000),
        max_parallelism=GROUPS,
        key_group_range=ALL,
        now_ms=lambda: 0,
        host=host,
    )
    table = there.table("t")
    expected: dict[str, int] = {}

    def change(number: int) -> None:
        key = f"key-{number * 7919 % 10_000}"
        table.of(None, [key])[key] = expected[key] = number

    try:
        for number in range(10_000):
            change(number)
        for round in range(1, 4):
            seen = dict(expected)
            writing = asyncio.ensure_future(there.begin_snapshot(round).write(InlineState()))
            number = 10_000 * round
            while not writing.done():
                for _ in range(100):
                    change(number)
                    number += 1
                await asyncio.sleep(0)
            there.checkpoint_completed(round)
            new = await restored("rocksdb", [await writing])  # type: ignore[list-item]
            assert dict(new.items("t")) == seen
        assert dict(there.items("t")) == expected
    finally:
        there.close()
        await host.close()
    assert os.listdir(tmp_path) == []


async def test_closed_while_a_thread_makes_a_checkpoint_it_leaves_nothing(tmp_path: Path) -> None:
    host = SystemHost()
    there = create_keyed_backend(
        RocksDB(path=str(tmp_path)),
        max_parallelism=GROUPS,
        key_group_range=ALL,
        now_ms=lambda: 0,
        host=host,
    )
    there.table("t").of()["a"] = 1
    snapshot = there.begin_snapshot(1)
    writing = asyncio.ensure_future(snapshot.write(InlineState()))
    while snapshot.linking is None and not writing.done():  # type: ignore[attr-defined]
        await asyncio.sleep(0)
    writing.cancel()
    there.close()
    with pytest.raises(asyncio.CancelledError):
        await writing
    await host.close()
    async with asyncio.timeout(30):
        while os.listdir(tmp_path):  # The directory has no event to wait for.
            await asyncio.sleep(0.01)


PROGRAM = """
import asyncio, pickle, sys
from aioflow.core.system_host import SystemHost
from aioflow.core.keygroups import KeyGroupRange
from aioflow.state.backend import create_keyed_backend
from aioflow.state.snapshot import InlineState
from aioflow.state.rocksdb import RocksDB

async def main():
    there = create_keyed_backend(
        RocksDB(path=sys.argv[1], cache_entries=100), max_parallelism=16,
        key_group_range=KeyGroupRange(0, 15), now_ms=lambda: 0, operator="count", host=SystemHost())
    table = there.table("t")
    for number in range(5000):
        table.of(None, [number])[number] = number
    handle = await there.begin_snapshot(1).write(InlineState())
    for number in range(5000):
        table.of(None, [number])[number] = -1
    content = pickle.dumps(handle)
    sys.stdout.buffer.write(len(content).to_bytes(8, "big") + content)
    sys.stdout.flush()
    await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_after_kill_9_the_checkpoint_is_restored_and_the_directory_is_cleared(
    tmp_path: Path,
) -> None:
    """H7, I5: later writes of the dead process are gone."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    assert process.stdout is not None
    try:
        handle = pickle.loads(process.stdout.read(int.from_bytes(process.stdout.read(8), "big")))
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    left = os.listdir(tmp_path)
    assert len(left) == 1
    new = await restored(RocksDB(path=str(tmp_path)), [handle])
    assert dict(new.items("t")) == {number: number for number in range(5_000)}
    assert len(os.listdir(tmp_path)) == 1
    assert os.listdir(tmp_path) != left
    new.close()
    assert os.listdir(tmp_path) == []


async def test_options_of_the_cluster_and_of_the_application(tmp_path: Path) -> None:
    """H1.4"""
    there = made(
        "rocksdb",
        max_parallelism=GROUPS,
        key_group_range=ALL,
        now_ms=lambda: 0,
        options={"rocksdb.path": str(tmp_path / "deep")},
    )
    there.table("t").of()["a"] = 1
    assert not (tmp_path / "deep").exists(), "nothing is made before it is needed"
    await checkpoint(there, 1)
    assert len(os.listdir(tmp_path / "deep")) == 1
    with pytest.raises(StateError, match="expected at least 1"):
        backend(RocksDB(cache_entries=0))


def test_without_a_real_machine_it_is_refused_with_the_remedy() -> None:
    class Simulated:
        pass

    for host in (None, Simulated()):
        with pytest.raises(
            StateError,
            match=r"operator 'count' cannot .*RocksDB.*files and threads.*state=\"heap\"",
        ):
            create_keyed_backend(
                "rocksdb",
                max_parallelism=GROUPS,
                key_group_range=ALL,
                now_ms=lambda: 0,
                operator="count",
                host=host,  # type: ignore[arg-type]
            )


def test_without_the_package_it_is_refused_with_the_command_that_installs_it() -> None:
    program = (
        "import sys; sys.modules['rocksdict'] = None\n"
        "from aioflow.state.backend import create_keyed_backend\n"
        "from aioflow.core.keygroups import KeyGroupRange\n"
        "create_keyed_backend('rocksdb', max_parallelism=8, key_group_range=KeyGroupRange(0, 7), "
        "now_ms=lambda: 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert "StateError" in done.stderr
    assert "pip install 'aioflow[rocksdb]'" in done.stderr


async def test_more_keys_may_change_between_two_slices_than_are_written_in_one() -> None:
    there = backend()
    table = there.table("t")
    numbers = list(range(2_000))
    table.of(None, numbers).update(dict.fromkeys(numbers, 0))
    snapshot = there.begin_snapshot(1)
    table.of(None, numbers[:1_000]).update(dict.fromkeys(numbers[:1_000], 1))
    handle = await snapshot.write(InlineState())
    assert handle is not None
    assert dict((await restored("rocksdb", [handle])).items("t")) == dict.fromkeys(numbers, 0)
    assert dict(there.items("t")) == {number: int(number < 1_000) for number in numbers}
