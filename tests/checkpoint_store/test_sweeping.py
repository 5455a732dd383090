"""Only the leftovers of crashed jobs are removed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from aioflow.checkpoint.completed import CheckpointKind, files_of
from aioflow.checkpoint.store import FlowStore, open_store
from aioflow.checkpoint.sweeping import sweep
from aioflow.core.host import Host
from aioflow.core.system_host import SystemHost
from tests.checkpoint_store.samples import LARGE, checkpoint, chunks, contents

OLD = -3_600_000
"""A grace that makes everything old that was written until now."""


@pytest.fixture
async def host() -> AsyncIterator[Host]:
    host = SystemHost()
    yield host
    await host.close()


@pytest.fixture
def store(host: Host, tmp_path: Path) -> FlowStore:
    return open_store(f"file://{tmp_path}/flow", host)


async def test_state_that_no_checkpoint_refers_to_goes_once_it_is_old(
    store: FlowStore, host: Host
) -> None:
    kept = await store.complete(await checkpoint(store, 1))
    orphan = await store.output().write(chunks(LARGE))
    await checkpoint(store, 2)
    assert await sweep(store, host, retain=1) == []
    assert await store.input().read(orphan) == LARGE
    removed = await sweep(store, host, retain=1, grace_ms=OLD)
    assert orphan.name in removed
    assert len(removed) == 5
    assert await store.newest() == kept
    assert len(await contents(store, kept)) == 10
    assert sorted(await store.objects.names("state")) == sorted(files_of(kept.subtasks.values()))


async def test_savepoints_that_were_never_completed_go_and_the_others_stay(
    store: FlowStore, host: Host
) -> None:
    """R17: garbage collected after a grace period."""
    place, other = store.savepoint_url(), store.savepoint_url()
    kept = await store.complete(await checkpoint(store, 1, CheckpointKind.SAVEPOINT, place))
    await checkpoint(store, 2, CheckpointKind.SAVEPOINT, other)
    assert await sweep(store, host, retain=1) == []
    removed = await sweep(store, host, retain=1, grace_ms=OLD)
    assert len(removed) == 4
    assert all(f"{store.url}/{name}".startswith(f"{other}/") for name in removed)
    assert await store.newest() == kept
    assert len(await contents(store, kept)) == 10


async def test_leftovers_of_a_job_do_not_count_as_kept_checkpoints(
    store: FlowStore, host: Host
) -> None:
    for number in (1, 2, 3, 4):
        await store.complete(await checkpoint(store, number))
    await store.leave_behind(2)
    await sweep(store, host, retain=1, keep=(2,), grace_ms=OLD)
    assert await store.checkpoints() == [
        2,
        3,
        4,
    ]  # The job has only gone back: it may be told to begin with one of those.
    await store.complete(await checkpoint(store, 5))
    await sweep(store, host, retain=2, keep=(5,), grace_ms=OLD)
    assert await store.checkpoints() == [2, 5]


async def test_checkpoints_beyond_what_is_kept_and_of_jobs_that_are_over_go_with_their_state(
    store: FlowStore, host: Host
) -> None:
    for number in (1, 2, 3, 4):
        await store.complete(await checkpoint(store, number))
    await sweep(store, host, retain=2, keep=[1], grace_ms=OLD)
    assert await store.checkpoints() == [1, 3, 4]
    assert len(await contents(store, await store.checkpoint(1))) == 10
    await store.finish(3)
    await sweep(store, host, retain=2, grace_ms=OLD)
    assert await store.checkpoints() == [4]
    assert len(await store.objects.names("state")) == 4
    await store.finish(4)
    await sweep(store, host, retain=2, grace_ms=OLD)
    assert await store.objects.names() == ["finished/4"]


async def test_nothing_goes_while_a_checkpoint_cannot_be_read(
    store: FlowStore, host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    await store.complete(await checkpoint(store, 1))
    orphan = await store.output().write(chunks(LARGE))
    path = Path(store.url.removeprefix("file://")) / "checkpoints/1/metadata"
    path.write_bytes(path.read_bytes()[:-1])
    assert await sweep(store, host, retain=1, grace_ms=OLD) == []
    assert "could not be removed, and stay" in caplog.text
    assert await store.input().read(orphan) == LARGE
