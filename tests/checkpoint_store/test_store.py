"""The store of a flow: what is complete is found, what is not complete is not, and nothing older
is taken for it.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from aioflow.checkpoint.completed import CheckpointKind, Discard, files_of
from aioflow.checkpoint.objects import MemoryObjects, ObjectStore
from aioflow.checkpoint.store import FlowStore, open_store, read_checkpoint
from aioflow.checkpoint.urls import flow_url, open_objects
from aioflow.core.aio import cancel_and_wait
from aioflow.core.errors import CheckpointError, RestoreError
from aioflow.core.host import Host
from aioflow.core.system_host import SystemHost
from aioflow.state.snapshot import StateFile
from tests.checkpoint_store.samples import LARGE, Failing, checkpoint, chunks, contents, files

SAVEPOINT, LAST = CheckpointKind.SAVEPOINT, CheckpointKind.SYNC_SAVEPOINT


@pytest.fixture
async def host() -> AsyncIterator[Host]:
    host = SystemHost()
    yield host
    await host.close()


@pytest.fixture
def store(host: Host, tmp_path: Path) -> FlowStore:
    return open_store(flow_url(f"file://{tmp_path}/store", "wörd count"), host)


def under(store: FlowStore, name: str) -> Path:
    return Path(store.url.removeprefix("file://")) / name


async def test_a_checkpoint_comes_back_as_it_was_with_all_its_state(
    host: Host, store: FlowStore
) -> None:
    assert await store.newest() is None
    assert await store.highest() == 0
    written = await store.complete(await checkpoint(store, 7))
    found = await store.newest()
    assert found == written
    assert found is not None
    assert found.location == f"{store.url}/checkpoints/7"
    assert await contents(store, found) == [
        b"position 0", LARGE, b"small", b"list state", LARGE[:20_000],
        b"position 1", LARGE, b"small", b"list state", LARGE[:20_000],
    ]  # fmt: skip
    assert await store.highest() == 7
    # By its own URL too, as another job finds it.
    other = open_store(flow_url("memory://other-job", "flow"), host)
    assert await contents(other, await read_checkpoint(found.location, host)) == await contents(
        store, found
    )


class Counting(Failing):
    """Notes the names that are looked up."""

    def __init__(self, objects: ObjectStore) -> None:
        super().__init__(objects)
        self.asked: list[str] = []

    async def missing(self, names: Sequence[str]) -> list[str]:
        self.asked += names
        return await super().missing(names)


async def test_a_checkpoint_looks_up_its_new_files_only(host: Host, tmp_path: Path) -> None:
    """However many files the store has. A large state keeps most of them from one to the next."""
    objects = Counting(open_objects(f"file://{tmp_path}/store", host))
    store = FlowStore(host, objects)
    first = await store.complete(await checkpoint(store, 1))
    of_first = set(objects.asked)
    assert of_first == set(files_of(first.subtasks.values()))
    objects.asked.clear()
    (kept, changed), fresh = first.subtasks, await checkpoint(store, 2)
    second = replace(fresh, subtasks={kept: first.subtasks[kept], changed: fresh.subtasks[changed]})
    await store.complete(second)
    assert len(objects.asked) == len(set(objects.asked)) == len(of_first) // 2
    assert not of_first.intersection(objects.asked)


async def test_the_newest_is_the_largest_number_of_checkpoints_and_savepoints(
    store: FlowStore,
) -> None:
    for number in (9, 10, 100):
        await store.complete(await checkpoint(store, number))
    assert (found := await store.newest()) is not None
    assert found.checkpoint_id == 100
    saved = await store.complete(await checkpoint(store, 101, SAVEPOINT, store.savepoint_url()))
    assert await store.newest() == saved
    assert await store.savepoints() == [saved.location]
    assert await store.checkpoints() == [9, 10, 100]
    assert await store.checkpoint(10) == await store.checkpoint(10)


async def test_a_savepoint_in_memory_is_found_as_well(host: Host) -> None:
    store = open_store(flow_url("memory://savepoints-are-found", "flow"), host)
    await store.complete(await checkpoint(store, 1))
    saved = await store.complete(await checkpoint(store, 2, SAVEPOINT, store.savepoint_url()))
    assert await store.newest() == saved
    assert await store.savepoints() == [saved.location]


async def test_checkpoint_without_metadata_does_not_exist(store: FlowStore, host: Host) -> None:
    """R17: an incomplete checkpoint or savepoint is invisible."""
    kept = await store.complete(await checkpoint(store, 1))
    await checkpoint(store, 2)
    place = store.savepoint_url()
    await checkpoint(store, 3, SAVEPOINT, place)
    assert await store.newest() == kept
    assert await store.savepoints() == []
    with pytest.raises(RestoreError, match="no checkpoint or savepoint"):
        await read_checkpoint(place, host)


async def test_a_newest_that_is_damaged_is_refused_and_passed_over_only_when_asked(
    store: FlowStore, caplog: pytest.LogCaptureFixture
) -> None:
    """R15: refuse loudly; what sinks committed since an older one would be committed again."""
    older = await store.complete(await checkpoint(store, 1))
    await store.complete(await checkpoint(store, 2))
    path = under(store, "checkpoints/2/metadata")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(
        RestoreError,
        match=(
            r"no older one is taken in its place by itself: .*checkpoints/2/metadata cannot be "
            r"read"
        ),
    ):
        await store.newest()
    with caplog.at_level(logging.WARNING):
        assert await store.newest(fall_back=True) == older
    assert "checkpoints/2/metadata" in caplog.text
    under(store, "checkpoints/1/metadata").write_bytes(b"")
    with pytest.raises(RestoreError, match="can be restored"):
        await store.newest(fall_back=True)


async def test_metadata_under_another_number_is_refused(store: FlowStore) -> None:
    await store.complete(await checkpoint(store, 1))
    shutil.copytree(under(store, "checkpoints/1"), under(store, "checkpoints/5"))
    with pytest.raises(
        RestoreError, match="holds checkpoint 1 of flow 'wörd count', expected number 5"
    ):
        await store.newest()


async def test_a_finished_job_leaves_nothing_to_resume(store: FlowStore) -> None:
    await store.complete(await checkpoint(store, 1))
    await store.finish(1)
    assert await store.newest() is None
    assert await store.highest() == 1
    again = await store.complete(await checkpoint(store, 2))
    assert await store.newest() == again
    await store.finish(await store.highest())
    await store.finish(await store.highest())
    assert await store.newest() is None
    assert await store.objects.names("finished") == ["finished/2"]


async def test_a_savepoint_can_be_moved_and_copied(
    store: FlowStore, host: Host, tmp_path: Path
) -> None:
    place = store.savepoint_url(str(tmp_path / "my savepoints"))
    saved = await store.complete(await checkpoint(store, 4, LAST, place))
    assert saved.location == place
    expected = await contents(store, saved)
    shutil.rmtree(under(store, ""))
    shutil.move(place.removeprefix("file://").replace("%20", " "), tmp_path / "moved")
    shutil.copytree(tmp_path / "moved", tmp_path / "copied")
    for where in (str(tmp_path / "moved"), f"file://{tmp_path}/copied"):
        found = await read_checkpoint(where, host)
        assert found.checkpoint_id == 4
        assert found.kind is LAST
        assert await contents(store, found) == expected
        assert all(
            str(tmp_path / "m") in file.name or str(tmp_path / "c") in file.name
            for file in files(found)
            if file.name
        )


async def test_a_whole_store_can_be_moved(store: FlowStore, host: Host, tmp_path: Path) -> None:
    await store.complete(await checkpoint(store, 1))
    await store.complete(await checkpoint(store, 2, LAST, store.savepoint_url()))
    (tmp_path / "store").rename(tmp_path / "elsewhere")
    moved = open_store(flow_url(str(tmp_path / "elsewhere"), "wörd count"), host)
    found = await moved.newest()
    assert found is not None
    assert found.checkpoint_id == 2
    assert len(await contents(moved, found)) == 10
    assert len(await contents(moved, await moved.checkpoint(1))) == 10


async def test_a_job_that_ended_with_a_savepoint_elsewhere_goes_on_from_there_or_not_at_all(
    store: FlowStore, tmp_path: Path
) -> None:
    """Sinks committed on it: what is older must not be resumed."""
    await store.complete(await checkpoint(store, 1))
    saved = await store.complete(
        await checkpoint(store, 2, LAST, store.savepoint_url(f"file://{tmp_path}/mine"))
    )
    assert await store.newest() == saved
    assert await store.savepoints() == []
    shutil.rmtree(tmp_path / "mine")
    with pytest.raises(RestoreError, match=r"mine/savepoint-\w+ is no checkpoint or savepoint"):
        await store.newest()


async def test_a_savepoint_that_ended_nothing_may_be_gone(store: FlowStore, tmp_path: Path) -> None:
    older = await store.complete(await checkpoint(store, 1))
    inside = await store.complete(await checkpoint(store, 2, SAVEPOINT, store.savepoint_url()))
    await store.complete(
        await checkpoint(store, 3, SAVEPOINT, store.savepoint_url(f"file://{tmp_path}/mine"))
    )
    assert await store.newest() == inside, "one elsewhere is the user's own business"
    shutil.rmtree(inside.location.removeprefix("file://"))
    assert await store.newest() == older
    assert await store.savepoints() == []


async def test_a_savepoint_takes_a_copy_of_what_lies_elsewhere(
    host: Host, store: FlowStore, tmp_path: Path
) -> None:
    """F4: the state of a subtask that finished long ago lies in files of the flow, which go with
    its checkpoints.
    """
    older = await checkpoint(store, 1)
    written = await contents(store, older)
    place = store.savepoint_url(f"file://{tmp_path}/mine")
    saved = await store.complete(replace(older, kind=SAVEPOINT, directory=place))
    await store.discard(Discard((), tuple(files_of(older.subtasks.values()))))
    with pytest.raises(RestoreError):
        await contents(store, older)
    assert await contents(store, saved) == written
    assert await contents(store, await read_checkpoint(saved.location, host)) == written


async def test_a_savepoint_that_cannot_be_completed_is_none(
    store: FlowStore, tmp_path: Path
) -> None:
    older = await checkpoint(store, 1)
    await store.discard(Discard((), tuple(files_of(older.subtasks.values()))))
    place = store.savepoint_url(f"file://{tmp_path}/mine")
    with pytest.raises(
        CheckpointError,
        match=r"the state of tasks that finished before it cannot be copied: .*state/",
    ):
        await store.complete(replace(older, kind=SAVEPOINT, directory=place))
    assert await store.newest() is None


async def test_a_checkpoint_refers_to_no_file_of_a_savepoint(
    store: FlowStore, tmp_path: Path
) -> None:
    place = store.savepoint_url(f"file://{tmp_path}/mine")
    with pytest.raises(CheckpointError, match="must be full"):
        await store.complete(
            replace(
                await checkpoint(store, 1, SAVEPOINT, place),
                kind=CheckpointKind.CHECKPOINT,
                directory="",
            )
        )
    with pytest.raises(CheckpointError, match="savepoint_url"):
        await store.complete(await checkpoint(store, 1, SAVEPOINT))
    assert await store.newest() is None


async def test_a_number_is_given_once(store: FlowStore, host: Host) -> None:
    first = await store.complete(await checkpoint(store, 1))
    other = open_store(store.url, host)
    with pytest.raises(
        CheckpointError, match=r"checkpoints/1/metadata exists, expected a new number"
    ):
        await other.complete(await checkpoint(other, 1))
    # Files that the other store discards of its own do not take ours along.
    await other.discard(Discard((await checkpoint(other, 1),), ()))
    assert await store.newest() == first


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_checkpoint_that_could_not_be_stored_is_not_there(host: Host, when: str) -> None:
    """R13: the disk is full; also when the request had been carried out and only its reply was
    lost.
    """
    objects = Failing(MemoryObjects(host, f"failing-{when}"))
    store = FlowStore(host, objects)
    older = await store.complete(await checkpoint(store, 1))
    lost = await checkpoint(store, 2)
    getattr(objects, when).add("create")
    with pytest.raises(
        CheckpointError,
        match=r"checkpoint 2 of flow 'wörd count' could not be stored at .*No space left",
    ):
        await store.complete(lost)
    getattr(objects, when).clear()
    assert await store.newest() == older
    # The number is free again, and so is the way.
    assert await store.complete(lost) == await store.newest()


@pytest.mark.parametrize("kind", [CheckpointKind.CHECKPOINT, SAVEPOINT])
async def test_state_that_another_machine_wrote_to_its_own_directory_is_no_checkpoint(
    store: FlowStore, host: Host, kind: CheckpointKind
) -> None:
    """The directory of a TaskManager in a container has the same path, and is not the same."""
    directory = store.savepoint_url() if kind.is_savepoint else ""
    one = await checkpoint(store, 1, kind, directory)
    root = Path((directory or store.url).removeprefix("file://")) / "state"
    elsewhere = root.with_name("elsewhere")
    root.rename(elsewhere)
    root.mkdir()
    with pytest.raises(CheckpointError, match="expected a directory that all machines share"):
        await store.complete(one)
    assert await store.newest() is None
    root.rmdir()
    elsewhere.rename(root)
    assert await store.complete(one) == await store.newest()


async def test_uncertain_metadata_is_removed_before_anything_builds_on_its_absence(
    host: Host,
) -> None:
    objects = Failing(MemoryObjects(host, "in-doubt"))
    store = FlowStore(host, objects)
    older = await store.complete(await checkpoint(store, 1))
    lost = await checkpoint(store, 2)
    objects.after.add("create")
    objects.before.add("delete")
    with pytest.raises(CheckpointError, match="could not be stored"):
        await store.complete(lost)
    assert "checkpoints/2/metadata" in await objects.names()
    with pytest.raises(CheckpointError, match="may hold a checkpoint that was given up"):
        await store.settle()
    # Its files stay as long as it may be there.
    await store.discard(Discard((), tuple(files_of(lost.subtasks.values()))))
    assert len(await contents(store, lost)) == 10
    objects.before.clear()
    objects.after.clear()
    await store.settle()
    assert await store.newest() == older


async def test_checkpoint_removed_by_several_is_forgotten_once_and_nothing_else_is(
    host: Host, tmp_path: Path
) -> None:
    """Seed 69 of the simulated world: who came second forgot another that was in doubt, and who
    came third failed.
    """
    objects = Failing(open_objects(f"file://{tmp_path}/both", host))
    store = FlowStore(host, objects)
    older = await store.complete(await checkpoint(store, 1))
    lost = [await checkpoint(store, number) for number in (2, 3)]
    objects.after.add("create")
    objects.before.add("delete")
    for failed in await asyncio.gather(*map(store.complete, lost), return_exceptions=True):
        assert isinstance(failed, CheckpointError)
    assert {"checkpoints/2/metadata", "checkpoints/3/metadata"} <= {*await objects.names()}
    objects.before.clear()
    objects.after.clear()
    await asyncio.gather(store.settle(), store.settle(), store.settle())
    assert await store.newest() == older


async def test_metadata_that_could_not_be_removed_goes_before_what_it_refers_to(host: Host) -> None:
    """Seed 463 of the simulated world: later the files went that a checkpoint which could not be
    discarded still named.
    """
    objects = Failing(MemoryObjects(host, "unwanted"))
    store = FlowStore(host, objects)
    old, new = [await store.complete(await checkpoint(store, number)) for number in (1, 2)]
    objects.before.add("delete")
    await store.discard(Discard((old,), ()))
    objects.before.clear()
    await store.discard(Discard((), tuple(files_of(old.subtasks.values()))))
    assert "checkpoints/1/metadata" not in await objects.names()
    assert await store.newest() == new


async def test_a_reply_that_was_lost_and_asked_for_again_is_no_second_job(host: Host) -> None:
    objects = MemoryObjects(host, "repeated")
    store = FlowStore(host, objects)
    made = await checkpoint(store, 1)
    await store.complete(made)
    assert (await store.complete(made)).location == "memory://repeated/checkpoints/1"


async def test_a_cancelled_completion_leaves_nothing(store: FlowStore) -> None:
    made = await checkpoint(store, 1)
    for turns in range(12):
        task = asyncio.get_running_loop().create_task(store.complete(made))
        for _ in range(turns):
            await asyncio.sleep(0)
        await cancel_and_wait([task])
        if not task.cancelled():
            assert (await store.newest()) == task.result()
            return
        assert await store.newest() is None


async def test_unwanted_checkpoints_go_and_the_rest_stays(store: FlowStore) -> None:
    first = await store.complete(await checkpoint(store, 1))
    second = await store.complete(await checkpoint(store, 2))
    await store.discard(Discard((first,), tuple(files_of(first.subtasks.values()))))
    await store.discard(Discard((first,), tuple(files_of(first.subtasks.values()))))
    assert await store.checkpoints() == [2]
    assert len(await store.objects.names("state")) == 4
    assert len(await contents(store, second)) == 10
    with pytest.raises(RestoreError, match=r"state file .*/state/\w+ is missing"):
        await contents(store, first)


async def test_files_stay_when_the_metadata_that_names_them_cannot_be_removed(
    host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    objects = Failing(MemoryObjects(host, "stays"))
    store = FlowStore(host, objects)
    only = await store.complete(await checkpoint(store, 1))
    objects.before.add("delete")
    with caplog.at_level(logging.WARNING):
        await store.discard(Discard((only,), tuple(files_of(only.subtasks.values()))))
    assert "no longer needed could not be deleted" in caplog.text
    objects.before.clear()
    assert len(await contents(store, only)) == 10


async def test_a_discarded_savepoint_is_removed_where_it_is(
    store: FlowStore, tmp_path: Path
) -> None:
    saved = await store.complete(
        await checkpoint(store, 1, SAVEPOINT, store.savepoint_url(str(tmp_path / "mine")))
    )
    await store.discard(Discard((saved,), tuple(files_of(saved.subtasks.values()))))
    assert [path for path in (tmp_path / "mine").rglob("*") if path.is_file()] == []


async def test_with_a_key_only_what_was_written_with_it_is_trusted(
    host: Host, tmp_path: Path
) -> None:
    url = f"file://{tmp_path}/flow"
    mine, theirs, none = (
        open_store(url, host, b"my key"),
        open_store(url, host, b"another"),
        open_store(url, host),
    )
    written = await mine.complete(await checkpoint(mine, 1))
    assert await mine.newest() == written
    with pytest.raises(RestoreError, match="was written with a key"):
        await none.newest()
    with pytest.raises(RestoreError, match="was not written with the key of this store"):
        await theirs.newest()
    await none.complete(await checkpoint(none, 2))
    with pytest.raises(RestoreError, match="and with none: it is not trusted"):
        await mine.newest()


async def test_small_state_travels_and_in_memory_all_state(host: Host, store: FlowStore) -> None:
    small = await store.output().write(chunks(bytes(16 * 1024)))
    large = await store.output().write(chunks(bytes(16 * 1024 + 1)))
    assert (small.name, small.content, large.content) == ("", bytes(16 * 1024), None)
    assert large.name.startswith("state/")
    private = open_store("memory://private/flow", host)
    huge = await private.output().write(chunks(bytes(1 << 20), 1 << 16))
    assert huge.content == bytes(1 << 20)
    assert await private.input().read(huge) == bytes(1 << 20)


async def test_a_write_that_fails_leaves_nothing_and_closes_what_it_was_given(
    store: FlowStore,
) -> None:
    closed = []

    async def breaks() -> AsyncIterator[bytes]:
        try:
            yield LARGE
            raise ValueError("cannot be encoded")
        finally:
            closed.append(True)

    with pytest.raises(ValueError, match="cannot be encoded"):
        await store.output().write(breaks())
    assert closed == [True]
    assert await store.objects.names() == []
    assert [path for path in under(store, "").rglob("*") if path.is_file()] == []


@pytest.mark.parametrize(
    "name",
    [
        "../../etc/passwd",
        "state/../../x",
        "/etc/passwd",
        "state/a\0b",
        "file:///etc/../x",
        "state/",
        "http://a/b",
    ],
)
async def test_names_in_metadata_that_point_elsewhere_are_refused(
    store: FlowStore, name: str
) -> None:
    with pytest.raises((RestoreError, CheckpointError)):
        await store.input().read(StateFile(name, 1, bytes(16)))


async def test_symbolic_links_out_of_the_store_are_not_followed(
    store: FlowStore, host: Host, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "file").write_bytes(LARGE)
    made = await store.output().write(chunks(LARGE))
    path = under(store, made.name)
    path.unlink()
    path.symlink_to(secret / "file")
    with pytest.raises(RestoreError, match="symbolic link"):
        await store.input().read(made)
    path.unlink()
    under(store, "state").rmdir()
    under(store, "state").symlink_to(secret)
    with pytest.raises(OSError, match="symbolic link"):
        await store.output().write(chunks(LARGE))
    assert sorted(path.name for path in secret.iterdir()) == ["file"]
    # The root itself may be a link: that is how a mount is given a name.
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "real").mkdir()
    linked = open_store(str(tmp_path / "link"), host)
    assert await linked.input().read(await linked.output().write(chunks(LARGE))) == LARGE


async def test_directories_are_for_their_owner_alone(store: FlowStore, tmp_path: Path) -> None:
    await store.complete(await checkpoint(store, 1))
    made = [path for path in (tmp_path / "store").rglob("*") if path.is_dir()]
    assert {path.stat().st_mode & 0o777 for path in [tmp_path / "store", *made]} == {0o700}


async def test_leftovers_of_writers_are_swept_once_they_are_old(
    store: FlowStore, host: Host
) -> None:
    made = await store.output().write(chunks(LARGE))
    left = under(store, f"{made.name}~0123")
    left.write_bytes(b"half of it")
    await store.objects.sweep(host.clock.wall_ms() - 3_600_000)
    assert left.exists()
    assert await store.objects.names() == [made.name]
    await store.objects.sweep(host.clock.wall_ms() + 60_000)
    assert not left.exists()
    assert await store.input().read(made) == LARGE


async def test_opened_twice_in_one_process_memory_is_the_same(host: Host) -> None:
    await (first := open_store("memory://twice/flow", host)).complete(await checkpoint(first, 1))
    assert (found := await open_store("memory://twice/flow", host).newest()) is not None
    assert await contents(open_store("memory://else/flow", host), found)
    assert await open_store("memory://twice/other", host).newest() is None
    assert await open_objects("memory://twice", host).names("flow/checkpoints") == [
        "flow/checkpoints/1/metadata"
    ]
