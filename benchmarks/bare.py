"""The limit: the same work in one bare `for` loop, without an engine. What an engine adds is its
ratio to these.

Each takes its pool and the number of records, and gives (number of outputs, checksum).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, Iterator
from pathlib import Path

from benchmarks.workloads import MASK, Event, Events, Result

__all__ = ["w1", "w1json", "w2", "w2json", "w3fn", "w4"]


def w1(words: list[str], n: int) -> Result:
    """Running count of each word."""
    counts: dict[str, int] = {}
    outputs = checksum = 0
    for i in range(n):
        word = words[i & MASK]
        count = counts.get(word, 0) + 1
        counts[word] = count
        row = (word, count)  # The output record is made, as an engine must make it.
        outputs += 1
        checksum += row[1]
    return outputs, checksum


def w1json(path: Path) -> Result:
    """The same of a file of JSON lines."""
    counts: dict[str, int] = {}
    outputs = checksum = 0
    loads = json.loads
    with path.open() as lines:
        for line in lines:
            word = loads(line)["word"]
            count = counts.get(word, 0) + 1
            counts[word] = count
            row = (word, count)
            outputs += 1
            checksum += row[1]
    return outputs, checksum


def w2(events: Events, n: int) -> Result:
    """Count and sum of each user in tumbling windows of 10 s; a window fires when the watermark
    (greatest time - 1 s) passes it.
    """
    users, lateness, values = events.users, events.lateness_ms, events.values

    def stream() -> Iterator[Event]:
        for i in range(n):
            k = i & MASK
            yield users[k], values[k], i // 10 + 1000 - lateness[k]

    return _windows(stream(), n)


def w2json(path: Path, n: int) -> Result:
    """The same of a file of JSON lines."""

    def stream() -> Iterator[Event]:
        loads = json.loads
        with path.open() as lines:
            for line in lines:
                row = loads(line)
                yield row["user"], row["value"], row["ts"]

    return _windows(stream(), n)


def _windows(stream: Iterable[Event], n: int) -> Result:
    windows: dict[int, dict[int, list[float]]] = {}
    outputs = checksum = counted = 0
    highest, fires_at = 0, 11_001
    for user, value, ts in stream:
        window = ts // 10_000
        table = windows.get(window)
        if table is None:
            table = windows[window] = {}
        pair = table.get(user)
        if pair is None:
            table[user] = [1, value]
        else:
            pair[0] += 1
            pair[1] += value
        if ts > highest:
            highest = ts
            if highest >= fires_at:
                for due in [w for w in windows if (w + 1) * 10_000 - 1 <= highest - 1001]:
                    for count, total in windows.pop(due).values():
                        outputs += 1
                        counted += count
                        checksum += int(total * 8)
                fires_at += 10_000
    for table in windows.values():
        for count, total in table.values():
            outputs += 1
            counted += count
            checksum += int(total * 8)
    assert counted == n, f"{counted} of {n} events were counted"
    return outputs, checksum


def w3fn(n: int) -> Result:
    """Map, filter, map, flat_map: four functions called for each record, as an engine that is
    given functions must.
    """
    spread = lambda x: (x * 31 + 7) & 0x7FFF_FFFF  # noqa: E731
    keep = lambda x: x & 3 != 0  # noqa: E731
    pair = lambda x: (x & 1023, x)  # noqa: E731
    twice = lambda t: (t, (t[0], t[1] >> 1))  # noqa: E731
    outputs = checksum = 0
    for i in range(n):
        x = spread(i)
        if keep(x):
            for row in twice(pair(x)):
                outputs += 1
                checksum += row[1]
    return outputs, checksum


async def _none(value: int) -> int:
    return value


async def _zero(value: int) -> int:
    await asyncio.sleep(0)
    return value


async def _millisecond(value: int) -> int:
    await asyncio.sleep(0.001)
    return value


CALLS: dict[str, Callable[[int], Awaitable[int]]] = {
    "none": _none,
    "zero": _zero,
    "1ms": _millisecond,
}
"""Async calls by their pause."""


def calls(call: Callable[[int], Awaitable[int]], concurrency: int, n: int) -> Result:
    """A pool of tasks, each of which makes one call after the other."""

    async def run() -> Result:
        numbers, outputs, checksum = iter(range(n)), 0, 0

        async def work() -> None:
            nonlocal outputs, checksum
            for number in numbers:
                result = await call(number)
                outputs += 1
                checksum += result

        await asyncio.gather(*(work() for _ in range(concurrency)))
        return outputs, checksum

    return asyncio.run(run())


def w4(words: list[str], events: Events, n: int) -> Result:
    """The greatest count of a word in each window of 10 s, sliding by 2 s: counted in slices of
    2 s, which windows share.
    """
    lateness = events.lateness_ms
    slices: dict[int, dict[str, int]] = {}
    outputs = checksum = highest = 0
    end = 2_000

    def fire(end: int) -> int:
        counts: dict[str, int] = {}
        for start in range(end - 10_000, end, 2_000):
            for word, count in slices.get(start, {}).items():
                counts[word] = counts.get(word, 0) + count
        slices.pop(end - 10_000, None)
        return max(counts.values(), default=0)

    for i in range(n):
        k = i & MASK
        ts = i // 10 + 1000 - lateness[k]
        start = ts - ts % 2_000
        counts = slices.get(start)
        if counts is None:
            counts = slices[start] = {}
        word = words[k]
        counts[word] = counts.get(word, 0) + 1
        if ts > highest:
            highest = ts
            while end <= highest - 1_000:
                if most := fire(end):
                    outputs, checksum = outputs + 1, checksum + most
                end += 2_000
    while slices:
        if most := fire(end):
            outputs, checksum = outputs + 1, checksum + most
        end += 2_000
    return outputs, checksum
