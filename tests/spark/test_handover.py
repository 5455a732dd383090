"""Batches of a streaming query stay until a checkpoint covers them, and are read once.

No Java here.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pyarrow as pa
import pytest

from aioflow.core.errors import RestoreError, StateError
from aioflow.core.host import Host
from aioflow.core.system_host import SystemHost
from aioflow.spark.streaming.source import Handover


@pytest.fixture
async def host() -> AsyncIterator[Host]:
    machine = SystemHost()
    yield machine
    await machine.close()


def batch(*numbers: int) -> pa.RecordBatch:
    return pa.record_batch({"n": pa.array(numbers, pa.int64())})


async def opened(host: Host, directory: Path, start: int | None = None) -> Handover:
    handover = Handover(host, str(directory))
    await handover.open(start)
    return handover


async def take(handover: Handover, number: int, *batches: pa.RecordBatch) -> None:
    await handover.begin(number)
    if batches:
        await handover.append(number, batches)
    await handover.seal(number)


async def rows(handover: Handover) -> dict[int, list[int]]:
    found = {}
    for number, taken in handover.taken.items():
        read = [await handover.read(taken, place) for place in range(len(taken.lengths))]
        found[number] = [n for one in read for n in one.column(0).to_pylist()]
    return found


async def test_sealed_batches_are_there_after_a_restart_and_unsealed_ones_are_not(
    host: Host, tmp_path: Path
) -> None:
    first = await opened(host, tmp_path)
    await take(first, 0, batch(1, 2), batch(3))
    await take(first, 1)
    await first.begin(2)
    await first.append(2, [batch(4)])

    again = await opened(host, tmp_path)
    assert await rows(again) == {0: [1, 2, 3], 1: []}
    assert again.knows(1) and not again.knows(2) and again.first == 0

    await take(again, 2, batch(5))
    assert (await rows(await opened(host, tmp_path)))[2] == [5]


async def test_leftovers_of_an_interrupted_write_are_removed_by_the_next_start(
    host: Host, tmp_path: Path
) -> None:
    first = await opened(host, tmp_path)
    for number in range(2):
        await take(first, number, batch(number))
    await first.begin(2)
    await first.append(2, [batch(2)])
    (tmp_path / "0000000002.aside").write_bytes(b"")
    # As if it had ended between the mark and the rows of a batch that it let go.
    (tmp_path / "0000000000.batch").unlink()

    again = await opened(host, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "0000000001.arrow",
        "0000000001.batch",
    ]
    assert await rows(again) == {1: [1]}


async def test_released_batches_go_and_the_newest_number_is_remembered(
    host: Host, tmp_path: Path
) -> None:
    handover = await opened(host, tmp_path)
    for number in range(3):
        await take(handover, number, batch(number))
    await handover.release(3)

    assert sorted(path.name for path in tmp_path.iterdir()) == ["0000000002.batch"]
    again = await opened(host, tmp_path, 3)
    assert again.knows(2) and not again.knows(3) and again.first == 3 and again.taken == {}
    await take(again, 3, batch(3))
    await again.release(4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0000000003.batch"]


async def test_a_checkpoint_older_than_what_was_released_is_refused(
    host: Host, tmp_path: Path
) -> None:
    handover = await opened(host, tmp_path)
    for number in range(3):
        await take(handover, number, batch(number))
    await handover.release(2)

    with pytest.raises(
        RestoreError,
        match=r"batch 1 of the streaming query is not in .* a later checkpoint was behind it",
    ):
        await opened(host, tmp_path, 1)


async def test_a_directory_that_was_emptied_is_refused(host: Host, tmp_path: Path) -> None:
    with pytest.raises(
        RestoreError, match=r"batch 4 of the streaming query is not in .* the directory was emptied"
    ):
        await opened(host, tmp_path, 4)


async def test_the_numbers_of_another_query_are_not_taken_for_ours(
    host: Host, tmp_path: Path
) -> None:
    handover = await opened(host, tmp_path)
    await handover.check_query("a")
    await (await opened(host, tmp_path)).check_query("a")

    with pytest.raises(StateError, match="belongs to the streaming query a, and this is b"):
        await handover.check_query("b")
