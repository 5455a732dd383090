"""Savepoints without a job: what is in them is shown as it was written, and a new one restores."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import aioflow as af
from aioflow.checkpoint.completed import (
    CheckpointedOperator,
    CheckpointKind,
    CompletedCheckpoint,
    OperatorStateHandle,
    SubtaskState,
)
from aioflow.checkpoint.savepoint import Entry, Savepoint, StateSummary, delete_savepoint
from aioflow.checkpoint.source_state import SplitState, encode_source_state
from aioflow.checkpoint.store import FlowStore, open_store
from aioflow.cli import main
from aioflow.core.errors import RestoreError
from aioflow.core.host import Host
from aioflow.core.keygroups import KeyGroupRange, key_group, range_for_subtask
from aioflow.core.states import (
    ListStateDescriptor,
    MapStateDescriptor,
    ValueStateDescriptor,
)
from aioflow.core.system_host import SystemHost
from aioflow.core.wire.serializers import Codec
from aioflow.state.backend import KeyedStateBackend, create_keyed_backend
from aioflow.state.format import FileHeader, encode_end, encode_entries, encode_header
from aioflow.state.operator_state import encode_operator_state
from aioflow.state.snapshot import CANONICAL, KeyedStateHandle, OperatorSnapshot, TableMeta
from tests.checkpoint_store.samples import chunks

MAX, NOW = 128, 1_000_000
KEYS = [f"key-{number}" for number in range(2000)]
TOTAL = ValueStateDescriptor("total", default=0)
NAMES = ListStateDescriptor("names", ttl="1d")
SEEN = MapStateDescriptor("seen")


@dataclass(frozen=True)
class Order:
    id: int
    item: str


def backend(index: int = 0, parallelism: int = 1) -> KeyedStateBackend:
    groups = range_for_subtask(index, parallelism, MAX)
    return create_keyed_backend(
        "heap",
        max_parallelism=MAX,
        key_group_range=groups,
        now_ms=lambda: NOW,
        codec=Codec(),
        operator="count",
    )


async def subtask(store: FlowStore, place: str, index: int, *, canonical: bool) -> SubtaskState:
    """One of two subtasks of a source and a keyed operator with each kind of state."""
    keyed, output = backend(index, 2), store.output(place)
    total, names, seen = keyed.get_state(TOTAL), keyed.get_state(NAMES), keyed.get_state(SEEN)
    for number, key in enumerate(KEYS):
        if key_group(key, MAX) in keyed.key_group_range:
            keyed.set_current_key(key)
            total.update(number)
            if number % 100 == 0:
                names.add(key)
                names.add("again")
                seen.put("first", Order(number, key))
    handle = await keyed.begin_snapshot(1, canonical=canonical).write(output)
    keyed.close()
    list_state = encode_operator_state(
        OperatorSnapshot(
            split={"buffer": [index, "x"]}, union={"all": ["u"]}, broadcast={"rules": {"a": 1}}
        ),
        Codec(),
        "count",
    )
    splits = encode_source_state(
        [SplitState(f"split-{index}", {"offset": 7 * index}, None, 5, index == 1)],
        Codec(),
        "source",
    )
    return SubtaskState(
        (
            OperatorStateHandle("source", source=await output.write(chunks(splits))),
            OperatorStateHandle(
                "count", keyed=handle, operator=await output.write(chunks(list_state))
            ),
        )
    )


async def stored(
    store: FlowStore, kind: CheckpointKind = CheckpointKind.SAVEPOINT, directory: str | None = None
) -> CompletedCheckpoint:
    savepoint = kind.is_savepoint
    place = store.savepoint_url(directory) if savepoint else ""
    return await store.complete(
        CompletedCheckpoint(
            checkpoint_id=5,
            kind=kind,
            flow="orders",
            job_id="job-1",
            completed_ms=1_795_300_000_000,
            operators=(
                CheckpointedOperator(
                    uid="source", name="orders.csv", parallelism=2, max_parallelism=MAX
                ),
                CheckpointedOperator(
                    uid="count", name="count orders", parallelism=2, max_parallelism=MAX
                ),
                CheckpointedOperator(uid="sink", name="print", parallelism=1, max_parallelism=MAX),
            ),
            subtasks={
                ("source", index): await subtask(store, place, index, canonical=savepoint)
                for index in range(2)
            },
            directory=place,
        )
    )


@pytest.fixture
async def host() -> AsyncIterator[Host]:
    host = SystemHost()
    yield host
    await host.close()


@pytest.fixture
def store(host: Host, tmp_path: Path) -> FlowStore:
    return open_store(f"file://{tmp_path}/store", host)


@pytest.mark.parametrize("kind", [CheckpointKind.SAVEPOINT, CheckpointKind.CHECKPOINT])
async def test_everything_in_it_is_listed_and_read_as_it_was_written(
    store: FlowStore, kind: CheckpointKind
) -> None:
    made = await stored(store, kind)
    async with Savepoint(made.location) as savepoint:
        assert [operator.uid for operator in savepoint.operators] == ["source", "count", "sink"]
        count = savepoint.operator("count")
        assert (count.name, count.parallelism, count.max_parallelism) == ("count orders", 2, MAX)
        assert sorted(count.states, key=lambda state: state.name) == [
            StateSummary("all", "union", 2),
            StateSummary("buffer", "split", 4),
            StateSummary("names", "list", 20),
            StateSummary("rules", "broadcast", 2),
            StateSummary("seen", "map", 20),
            StateSummary("total", "value", 2000),
        ]
        assert count.size > 20_000
        assert savepoint.operator("source").splits == 2
        assert savepoint.operator("sink").states == ()
        total = {entry.key: entry.value async for entry in savepoint.entries("count", "total")}
        assert total == {key: number for number, key in enumerate(KEYS)}
        assert {entry async for entry in _hashable(savepoint.entries("count", "names"))} == {
            (key, (key, "again")) for key in KEYS[::100]
        }
        seen = {entry.key: entry.value async for entry in savepoint.entries("count", "seen")}
        assert seen == {key: {"first": Order(int(key[4:]), key)} for key in KEYS[::100]}
        assert [state.split for state in await savepoint.operator_state("count")] == [
            {"buffer": [0, "x"]},
            {"buffer": [1, "x"]},
        ]
        assert await savepoint.operator_state("sink") == []
        assert await savepoint.positions("source") == [
            SplitState("split-0", {"offset": 0}, None, 5, False),
            SplitState("split-1", {"offset": 7}, None, 5, True),
        ]


async def _hashable(entries: AsyncIterator[Entry]) -> AsyncIterator[tuple[str, tuple[str, ...]]]:
    async for entry in entries:
        yield entry.key, tuple(entry.value)


async def test_nothing_is_left_of_a_deleted_savepoint(store: FlowStore) -> None:
    made = await stored(store)
    directory = Path(made.location.removeprefix("file://"))
    assert directory.is_dir()
    await delete_savepoint(made.location)
    assert not directory.exists()
    assert directory.parent.is_dir()


async def test_only_files_of_the_savepoint_are_deleted(store: FlowStore, tmp_path: Path) -> None:
    """A file or a link of the user in its directory stays."""
    (tmp_path / "elsewhere").mkdir()
    made = await stored(store)
    directory = Path(made.location.removeprefix("file://"))
    states = directory / "state"
    states.mkdir(exist_ok=True)
    (states / "link").symlink_to(tmp_path / "elsewhere")
    (states / "notes.txt").write_text("of the user")
    await delete_savepoint(made.location)
    assert sorted(path.name for path in states.iterdir()) == ["link", "notes.txt"]
    assert (tmp_path / "elsewhere").is_dir()
    with pytest.raises(RestoreError, match="it has no file 'metadata'"):
        await delete_savepoint(made.location)


async def test_missing_path_is_named_with_the_existing_ones(
    store: FlowStore, tmp_path: Path
) -> None:
    made = await stored(store)
    async with Savepoint(made.location) as savepoint:
        with pytest.raises(
            KeyError, match="no operator with the uid 'cuont', only 'source', 'count', 'sink'"
        ):
            savepoint.operator("cuont")
        with pytest.raises(KeyError, match=r"no state 'totals', only 'total', 'names', 'seen'"):
            _ = [entry async for entry in savepoint.entries("count", "totals")]
    with pytest.raises(RestoreError, match="is no checkpoint or savepoint"):
        async with Savepoint(tmp_path / "nothing"):
            pass


async def test_a_changed_one_restores_with_the_changes_and_the_old_one_stays(
    store: FlowStore, host: Host, tmp_path: Path
) -> None:
    made = await stored(store, CheckpointKind.CHECKPOINT)
    async with Savepoint(made.location, host=host) as savepoint:
        edit = savepoint.edit()
        edit.rename_operator("count", "tally")
        edit.remove_state("count", "seen")
        edit.remove_state("count", "buffer")
        edit.map_values("count", "total", lambda key, value: value * 10)
        edit.keep_entries("count", "total", lambda key, value: value % 2 == 1)
        edit.remove_operator("source")
        written = await edit.write(tmp_path / "new")
    (tmp_path / "new").rename(tmp_path / "moved")
    async with Savepoint(written.replace("/new/", "/moved/")) as changed:
        assert changed.checkpoint.kind is CheckpointKind.SAVEPOINT
        assert [operator.uid for operator in changed.operators] == ["tally", "sink"]
        assert sorted(changed.checkpoint.subtasks) == [("tally", 0), ("tally", 1)]
        assert {state.name for state in changed.operator("tally").states} == {
            "all",
            "names",
            "rules",
            "total",
        }
        total = {entry.key: entry.value async for entry in changed.entries("tally", "total")}
        assert total == {key: number * 10 for number, key in enumerate(KEYS) if number % 2}
        # A job restores the same, at another parallelism.
        handles = [handle.keyed for handle in changed.handles("tally") if handle.keyed is not None]
        assert {handle.format for handle in handles} == {CANONICAL}
        restored = {}
        for index in range(3):
            part = backend(index, 3)
            await part.restore_from(
                [handle for handle in handles if _meets(handle, part.key_group_range)],
                changed.files,
            )
            state, names = part.get_state(TOTAL), part.get_state(NAMES)
            for key in KEYS:
                if key_group(key, MAX) in part.key_group_range:
                    part.set_current_key(key)
                    restored[key] = state.value()
                    assert names.get() == ([key, "again"] if key in KEYS[::100] else [])
            part.close()
        assert restored == {
            key: number * 10 if number % 2 else 0 for number, key in enumerate(KEYS)
        }
    assert await store.newest() == made


def _meets(handle, groups: KeyGroupRange) -> bool:  # type: ignore[no-untyped-def]
    return groups.intersection(KeyGroupRange(handle.first_group, handle.last_group)) is not None


async def test_an_unchanged_copy_says_the_same(
    store: FlowStore, host: Host, tmp_path: Path
) -> None:
    made = await stored(store)
    async with Savepoint(made.location) as savepoint:
        written = await savepoint.edit().write(str(tmp_path / "copy"))
        async with Savepoint(written) as copy:
            assert copy.operators == savepoint.operators
            assert replace(copy.checkpoint, subtasks={}, directory="", location="") == replace(
                made, subtasks={}, directory="", location=""
            )
            assert await copy.positions("source") == await savepoint.positions("source")


async def test_edits_that_cannot_be_meant_are_refused_at_once(store: FlowStore) -> None:
    made = await stored(store)
    async with Savepoint(made.location) as savepoint:
        edit = savepoint.edit()
        with pytest.raises(ValueError, match="another one has that uid"):
            edit.rename_operator("count", "sink")
        with pytest.raises(KeyError, match="no operator"):
            edit.remove_operator("nothing")
        with pytest.raises(KeyError, match="no state 'nothing'"):
            edit.remove_state("count", "nothing")
        with pytest.raises(ValueError, match="expected a keyed state"):
            edit.map_values("count", "buffer", lambda key, value: value)


async def with_rows(store: FlowStore, keys: list[Any], values: list[Any]) -> str:
    """Returns the path of a savepoint whose file holds these rows of two states, one of them with a
    time to live. It is complete and has a correct digest.
    """
    groups, codec = KeyGroupRange(0, MAX - 1), Codec()
    header = FileHeader(
        MAX, groups, {"total": TableMeta("value"), "names": TableMeta("list", True)}, {}
    )
    rows = [
        encode_entries(table, groups, [None], keys, values, codec, "count") for table in range(2)
    ]
    content = encode_header(header) + b"".join(rows) + encode_end(3)
    place = store.savepoint_url(None)
    file = await store.output(place).write(chunks(content))
    handle = OperatorStateHandle(
        "count", keyed=KeyedStateHandle(CANONICAL, MAX, 0, MAX - 1, (file,))
    )
    made = await store.complete(
        CompletedCheckpoint(
            checkpoint_id=5,
            kind=CheckpointKind.SAVEPOINT,
            flow="orders",
            job_id="job-1",
            completed_ms=1,
            operators=(
                CheckpointedOperator(
                    uid="count", name="count orders", parallelism=1, max_parallelism=MAX
                ),
            ),
            subtasks={("count", 0): SubtaskState((handle,))},
            directory=place,
        )
    )
    return made.location


async def test_a_key_that_can_be_none_is_refused_by_name_when_it_is_written_again(
    store: FlowStore, tmp_path: Path
) -> None:
    async with Savepoint(await with_rows(store, [None], [[(1, "x")]])) as savepoint:
        edit = savepoint.edit()
        edit.keep_entries("count", "total", lambda key, value: True)
        with pytest.raises(
            RestoreError,
            match=(
                r"table 'total' of operator 'count': it holds a key that is none: None cannot be "
                r"a key"
            ),
        ):
            await edit.write(str(tmp_path / "copy"))


async def test_values_without_their_times_are_refused_by_name(store: FlowStore) -> None:
    async with Savepoint(await with_rows(store, ["a"], [["x"]])) as savepoint:
        assert [entry.value async for entry in savepoint.entries("count", "total")] == [["x"]]
        with pytest.raises(
            RestoreError,
            match="state 'names' of operator 'count' holds list where values with their times",
        ):
            [entry async for entry in savepoint.entries("count", "names")]


async def test_classes_that_are_not_loaded_are_stood_in_for_and_written_back_as_they_were(
    store: FlowStore, host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = ModuleType("program_of_others")
    monkeypatch.setitem(sys.modules, "program_of_others", program)
    exec(
        "from dataclasses import dataclass\n@dataclass(frozen=True)\nclass Trade:\n    symbol: "
        "str\n    n: int",
        vars(program),
    )
    keyed, place = backend(), store.savepoint_url()
    state = keyed.get_state(TOTAL)
    for number in range(100):
        keyed.set_current_key(program.Trade("X", number))
        state.update(program.Trade("Y", number))
    handle = await keyed.begin_snapshot(1, canonical=True).write(store.output(place))
    keyed.close()
    made = await store.complete(
        CompletedCheckpoint(
            checkpoint_id=1,
            kind=CheckpointKind.SAVEPOINT,
            operators=(
                CheckpointedOperator(uid="count", name="count", parallelism=1, max_parallelism=MAX),
            ),
            subtasks={("count", 0): SubtaskState((OperatorStateHandle("count", keyed=handle),))},
            directory=place,
        )
    )
    monkeypatch.delitem(sys.modules, "program_of_others")
    async with Savepoint(made.location) as savepoint:
        entries = [entry async for entry in savepoint.entries("count", "total")]
        assert sorted((entry.key.symbol, entry.key.n, entry.value.symbol) for entry in entries) == [
            ("X", n, "Y") for n in range(100)
        ]
        assert type(entries[0].key).__qualname__ == "Trade"
        edit = savepoint.edit()
        edit.map_values("count", "total", lambda key, value: key)
        written = await edit.write(tmp_path)
    monkeypatch.setitem(sys.modules, "program_of_others", program)
    async with Savepoint(written) as savepoint:
        values = {entry.value async for entry in savepoint.entries("count", "total")}
        assert values == {program.Trade("X", number) for number in range(100)}


async def test_it_is_public() -> None:
    assert af.Savepoint is Savepoint


async def _stored_at(tmp_path: Path) -> str:
    host = SystemHost()
    try:
        return (await stored(open_store(f"file://{tmp_path}/store", host))).location.removeprefix(
            "file://"
        )
    finally:
        await host.close()


def test_the_command_shows_it_for_people_and_for_programs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = asyncio.run(_stored_at(tmp_path))
    assert main(["state", "show", path]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("savepoint 5 of flow 'orders', completed 2026-11-21 22:26:40 UTC, ")
    assert "\ncount orders  uid 'count', parallelism 2 of 128, " in shown
    assert "\n  total  value, 2,000 keys\n" in shown
    assert "\n  rules  broadcast, 2 entries\n" in shown
    assert "\n  2 splits with positions\n" in shown
    assert main(["state", "show", path, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["kind"], found["number"], found["flow"]) == ("SAVEPOINT", 5, "orders")
    assert {"name": "total", "kind": "value", "entries": 2000} in found["operators"][1]["states"]


def test_the_command_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["state", "show", str(tmp_path)]) == 1
    told = capsys.readouterr().err
    assert told.startswith(
        f"aioflow state show: file://{tmp_path} is no checkpoint or savepoint: there is nothing; "
        "expected "
    )
    (file := tmp_path / "metadata").write_text("of nothing")
    assert main(["state", "show", str(file)]) == 1
    told = capsys.readouterr().err
    assert told.startswith(
        f"aioflow state show: file://{file} is no checkpoint or savepoint: it is no directory; "
        "expected the directory "
    )
    file.unlink()
    (tmp_path / "metadata").write_bytes(b"AIOFCKPT, or not")
    assert main(["state", "show", str(tmp_path)]) == 1
    assert "do not match their digest" in capsys.readouterr().err
    assert main(["state", "show", str(tmp_path), "--key-file", f"{tmp_path}/none"]) == 2
    assert main(["state", "show", "ftp://somewhere"]) == 1
    assert "has the scheme 'ftp', expected one of" in capsys.readouterr().err
