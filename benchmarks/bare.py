"""The limit: the same work in one bare `for` loop, without an engine. What an engine adds is its ratio to these.

Each takes its pool and the number of records, and gives (number of outputs, checksum).
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.workloads import MASK, Event, Events, Result

__all__ = ["w1", "w2", "w3fn"]


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


def w2(events: Events, n: int) -> Result:
    """Count and sum of each user in tumbling windows of 10 s; a window fires when the watermark (greatest time - 1 s) passes it."""
    users, lateness, values = events.users, events.lateness_ms, events.values

    def stream() -> Iterator[Event]:
        for i in range(n):
            k = i & MASK
            yield users[k], values[k], i // 10 + 1000 - lateness[k]

    windows: dict[int, dict[int, list[float]]] = {}
    outputs = checksum = counted = 0
    highest, fires_at = 0, 11_001
    for user, value, ts in stream():
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
    """Map, filter, map, flat_map: four functions called for each record, as an engine that is given functions must."""
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
