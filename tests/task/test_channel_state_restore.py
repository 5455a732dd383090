"""Data in flight becomes one line for each subtask: in its order, each record at the watermark that
it would have seen.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import pytest

from aioflow.checkpoint.assignment import ChannelRestore, InFlightRestore, TaskRestore
from aioflow.core.elements import (
    MAX_WATERMARK,
    MIN_WATERMARK,
    RecordBatch,
    WatermarkStatus,
    empty_batch,
)
from aioflow.core.keygroups import KeyGroupRange
from aioflow.core.wire.serializers import Codec
from aioflow.operators.valve import BEGINNING, ChannelTime
from aioflow.state.snapshot import StateFile
from aioflow.task.channel_state import ChannelStateLog, RestoredChannelState, read_channel_state

CODEC = Codec()
EDGE = 3


class Files:
    """Reads what lies in the handles."""

    async def read(self, file: StateFile) -> bytes:
        assert file.content is not None
        return file.content


async def log(*elements: Any, time: ChannelTime = BEGINNING, channels: int = 0) -> StateFile:
    made = ChannelStateLog(CODEC, "test", time, channels)
    for element in elements:
        made.add(element)
    content = b"".join([chunk async for chunk in made.chunks()])
    return StateFile("", len(content), blake2b(content, digest_size=16).digest(), content)


def seen(*watermarks: int, at: str, after: int = MIN_WATERMARK) -> RecordBatch:
    """Records of one key that see these watermarks."""
    values = [f"{at}{mark}" for mark in watermarks]
    return RecordBatch(
        values, [0] * len(values), [at] * len(values), list(watermarks), max(after, watermarks[-1])
    )


async def former(
    subtask: int, *channels: StateFile, restored: StateFile | None = None, chain: Any = ()
) -> InFlightRestore:
    read = tuple(
        ChannelRestore(EDGE, index, (file,), has_head=True) for index, file in enumerate(channels)
    )
    return InFlightRestore(subtask, False, tuple(chain), restored, read, dealt=True)


async def restored(
    *lines: InFlightRestore, limit: int = MAX_WATERMARK, **options: Any
) -> RestoredChannelState:
    task = TaskRestore(1, in_flight=lines, **options)
    return await read_channel_state(
        task, Files(), CODEC, KeyGroupRange(0, 127), 128, {EDGE: 0}, 9, limit
    )


def told(found: RestoredChannelState) -> list[tuple[str, int]]:
    """Each record with the watermark that it sees."""
    records = []
    for _, _, batch, mark in found.waiting:
        marks = [mark] * len(batch.values) if batch.watermarks is None else batch.watermarks
        records += list(zip(batch.values, marks, strict=True))
    return records


async def test_lines_of_former_subtasks_are_merged_in_the_order_of_their_watermarks() -> None:
    first = await former(0, await log(seen(10, 20, 60, at="a"), seen(70, 80, at="a", after=90)))
    second = await former(1, await log(seen(30, 40, at="b"), seen(65, at="b", after=90)))
    found = await restored(first, second)
    assert told(found) == [
        ("a10", 10),
        ("a20", 20),
        ("b30", 30),
        ("b40", 40),
        ("a60", 60),
        ("b65", 65),
        ("a70", 70),
        ("a80", 80),
    ]
    assert found.watermark == 90


async def test_a_line_that_is_through_holds_the_others_at_its_end() -> None:
    """Records of its subtask may come here: records that are on time for them must not become
    late.
    """
    first = await former(0, await log(seen(10, at="a", after=30)))
    second = await former(1, await log(seen(20, 50, at="b", after=90)))
    found = await restored(first, second)
    assert told(found) == [("a10", 10), ("b20", 20), ("b50", 30)]
    assert found.watermark == 30


@pytest.mark.parametrize(
    "limits", [{"limit": 25}, {"others": True}], ids=["of a source", "of another subtask"]
)
async def test_no_record_sees_more_than_what_may_continue_here(limits: dict[str, Any]) -> None:
    options = (
        {"others": (await log(time=ChannelTime(25), channels=1),)} if "others" in limits else limits
    )
    found = await restored(await former(0, await log(seen(10, 50, at="a", after=90))), **options)
    assert told(found) == [("a10", 10), ("a50", 25)]
    assert found.watermark == 25


async def test_records_keep_the_watermark_in_force_though_none_of_them_saw_it_move() -> None:
    plain = RecordBatch(["x", "y"], [0, 0], ["k", "k"])
    found = await restored(
        await former(0, await log(plain, empty_batch(50), plain, time=ChannelTime(40)))
    )
    assert told(found) == [("x", 40), ("y", 40), ("x", 50), ("y", 50)]


async def test_a_channel_that_has_announced_nothing_holds_back_though_it_left_nothing() -> None:
    """It counts where the event time of the whole input is kept."""
    head = await log(time=ChannelTime(15), channels=2)
    found = await restored(
        await former(
            0, await log(seen(20, 50, at="a", after=90), time=ChannelTime(20)), restored=head
        )
    )
    assert told(found) == [("a20", 15), ("a50", 15)]
    assert found.watermark == 15


async def test_a_channel_that_is_idle_or_behind_holds_nothing_back() -> None:
    idle, behind = ChannelTime(5, True, False), ChannelTime(5, False, False)
    for time in (idle, behind):
        channels = [
            await log(seen(20, 50, at="a", after=90), time=ChannelTime(20)),
            await log(time=time),
        ]
        found = await restored(
            await former(0, *channels, restored=await log(time=ChannelTime(20), channels=2))
        )
        assert told(found) == [("a20", 20), ("a50", 50)]
    woken = [
        await log(seen(20, 50, at="a"), time=ChannelTime(20)),
        await log(WatermarkStatus(False), seen(60, at="b"), time=idle),
    ]
    found = await restored(
        await former(0, *woken, restored=await log(time=ChannelTime(20), channels=2))
    )
    assert dict(told(found))["b60"] == 50


async def test_chain_data_comes_first_and_restored_data_before_new_data() -> None:
    chain = [
        (2, await log(seen(5, at="t"), time=ChannelTime(5))),
        (1, await log(seen(8, at="h"), time=ChannelTime(8))),
    ]
    before = await log(seen(10, at="r"), time=ChannelTime(12), channels=1)
    line = await former(
        0, await log(seen(20, at="n", after=30), time=ChannelTime(12)), restored=before, chain=chain
    )
    found = await restored(line)
    assert told(found) == [("t5", 5), ("h8", 8), ("r10", 10), ("n20", 20)]
    assert [one.stage for one in found.waiting][:2] == [1, 0]
