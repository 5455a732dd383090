"""Drawn windows whose firing is cut by checkpoints and restored give the same rows as without."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

import aioflow as af
from aioflow.operators import results
from aioflow.operators.window import runs
from aioflow.task import checkpointing
from tests.task.checkpointed import Feed, Ledger
from tests.task.test_unaligned import Execution

pytestmark = pytest.mark.timeout(120)

Event = tuple[str, int, int]
"""Key, event time, number."""
Options = dict[str, Any]

BARRIERS: list[Options] = [{}, {"unaligned": True}, {"aligned_timeout_ms": 3_600_000}]


class Counting(af.ProcessWindowFunction[str, Any, Any]):
    """Emits several results, and the number of firings of the key."""

    def process(self, key: str, ctx: Any, elements: Iterable[Any]) -> Iterator[Any]:
        fired = ctx.global_state.get_state(af.ValueStateDescriptor("fired", default=0))
        fired.update(fired.value() + 1)
        for part in range(3):
            yield key, getattr(ctx.window, "start", None), sorted(elements), part, fired.value()


def drawn(draw: random.Random) -> tuple[Options, list[Event]]:
    """Returns the options of a window, and events with gaps that may be late."""
    keys, count = draw.choice([3, 20, 60]), draw.choice([20, 60, 150])
    step, jitter, time, events = draw.choice([0, 1, 3]), draw.choice([0, 8]), 0, []
    for number in range(count):
        time += draw.randint(0, step) + (draw.choice([10, 200]) if draw.random() < 0.05 else 0)
        events.append((f"k{draw.randrange(keys)}", time - draw.randint(0, jitter), number))
    size = draw.choice([7, 40])
    options = {
        "assigner": draw.choice(
            [
                af.tumbling(f"{size}ms"),
                af.sliding(f"{size}ms", "3ms"),
                af.session("5ms"),
                af.session("30ms"),
                af.session(lambda event: 1 + event[2] % 9),
            ]
        ),
        "trigger": draw.choice([None, None, af.on_count(2), af.continuous("13ms")]),
        "evictor": draw.choice([None, None, af.keep_last(2)]),
        "lateness": draw.choice(["0ms", "0ms", "20ms"]),
    }
    return {**options, "delay": draw.choice([jitter, 3]), "calls": draw.random() < 0.5}, events


def windowed(
    options: Options, feed: Feed, ledgers: tuple[Ledger, Ledger], parallelism: int = 1
) -> af.Flow:
    options = dict(options)
    delay, calls = options.pop("delay"), options.pop("calls")
    strategy = af.WatermarkStrategy.bounded_out_of_orderness(
        f"{delay}ms", timestamp=lambda event: event[1], idle_after=None
    )
    flow = af.Flow("drawn", parallelism=parallelism)
    source = flow.source(feed, watermarks=strategy, parallelism=1)
    keyed = source.key_by(lambda event: event[0])
    windows = keyed.window(options.pop("assigner"), **options)
    fired = windows.process(Counting()) if calls else windows.aggregate(af.collect(_number))
    fired.sink(ledgers[0])
    if options == {**options, "lateness": "0ms", "trigger": None}:  # No late result.
        counts = fired.key_by(lambda row: row[0]).window(af.tumbling("3ms")).aggregate(af.count())
        counts.sink(ledgers[1])
    return flow


def _number(event: Event) -> int:
    return event[2]


async def whole(options: Options, events: list[Event]) -> Counter[str]:
    feed, ledgers = Feed(events), (Ledger(), Ledger())
    feed.allow_all()
    async with Execution(windowed(options, feed, ledgers)) as run:
        await run.finished()
    return Counter(map(repr, ledgers[0].rows + ledgers[1].rows))


async def in_parts(
    options: Options,
    events: list[Event],
    draw: random.Random,
    parallelism: Callable[[], int],
    backend: str,
) -> Counter[str]:
    """Runs up to three times to a checkpoint at any moment, and then to the end."""
    feed, ledgers, cuts = Feed(events, bounded=False), (Ledger(), Ledger()), list[Any]()

    def continued() -> Execution:
        flow = windowed(options, feed, ledgers, parallelism())
        return Execution(flow, *cuts[-1:], state_backend=backend)

    for _ in range(draw.randint(1, 3)):
        async with continued() as run:
            if draw.random() < 0.7:
                feed.allow(draw.randint(0, len(events)))
                await run.idle(feed)
            for task in run.tasks.values():
                task._runtime.chain._slice_ns, task._processor._slice_s = 0, 0.0
            feed.allow_all()
            for _ in range(draw.randint(0, draw.choice([0, 3, 10, 30, 100, 400]))):
                await asyncio.sleep(0)
            cuts.append(await run.cut_here(**draw.choice(BARRIERS)))
    feed.bounded = True
    async with continued() as run:
        feed.allow_all()
        await run.finished()
    return Counter(map(repr, ledgers[0].rows + ledgers[1].rows))


async def compared(seed: int, patch: Callable[..., None], *, rescaled: bool, backend: str) -> None:
    draw, other = random.Random(seed), random.Random(f"parallelism {seed}")
    patch(results, "RESULTS_FIRST", draw.choice([1, 1, 3, 32]))
    patch(results, "PIECE_NS", draw.choice([0, 0, 2_000_000]))
    patch(checkpointing, "FIRING_S", draw.choice([0.0, 0.0, 0.1]))
    patch(runs, "RUN_MAX", draw.choice([2, 512]))
    patch(runs, "FIRED_TOGETHER", draw.choice([2, 512]))
    options, events = drawn(draw)
    expected = await whole(options, events)

    def parallelism() -> int:
        return other.randint(1, 4) if rescaled else 1

    found = await in_parts(options, events, draw, parallelism, backend)
    assert found == expected, f"seed {seed}"


@pytest.mark.parametrize("first", range(60, 90, 10))
async def test_windows_give_the_same_rows_over_checkpoints_amid_their_firing(
    first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(first, first + 10):
        await compared(seed, monkeypatch.setattr, rescaled=False, backend="heap")


@pytest.mark.parametrize(("first", "backend"), [(80, "heap"), (0, "rocksdb")])
async def test_windows_give_the_same_rows_at_other_parallelisms(
    first: int, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(first, first + 10):
        await compared(seed, monkeypatch.setattr, rescaled=True, backend=backend)
