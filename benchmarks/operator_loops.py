"""The loops that a Python programmer would write in place of the operators of `operator_cases`.

A loop takes the rows of its case and returns the outputs. It advances its watermark with every
element, as the strategies of the flows do.
"""

from __future__ import annotations

import asyncio
import csv
import json
import random
from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from heapq import heappop, heappush, nlargest
from itertools import zip_longest
from operator import itemgetter
from pathlib import Path
from time import time_ns
from typing import Any, NamedTuple

DELAY_MS = 1_000
WINDOW_MS = 10_000
SLIDE_MS = 2_000
KEYS = 1_000
CHUNK = 100

Rows = list[Any]
Row = tuple[str, int, int]
"""(key, value, time)"""

KEY: Callable[[Any], Any] = itemgetter(0)
VALUE: Callable[[Any], Any] = itemgetter(1)


class Sale(NamedTuple):
    """A record of the files."""

    user: str
    cents: int
    ms: int


# --------------------------------------------------------------------------------------------------
# functions of one element, which the flows call too


def scaled(row: Row) -> tuple[str, int]:
    return row[0], row[1] * 31 + 7


def is_odd(pair: tuple[str, int]) -> bool:
    return pair[1] & 3 != 0


def flipped(pair: tuple[str, int]) -> tuple[int, str]:
    return pair[1], pair[0]


def is_large(row: Row) -> bool:
    return row[1] > 500


def first_two(row: Row) -> tuple[Any, ...]:
    return row[:2]


async def unchanged(row: Row) -> Row:
    return row


async def paused(row: Row) -> Row:
    await asyncio.sleep(0)
    return row


def checked(row: Row) -> tuple[str, float]:
    return row[0], 1_000 / row[1]


def doubled(rows: Rows) -> Rows:
    return [row[1] * 2 for row in rows]


# --------------------------------------------------------------------------------------------------
# loops


def grouped(first: Callable[[Row], Any], step: Callable[[Any, Row], Any]) -> Callable[[Rows], Rows]:
    """A running aggregate: an output for each row."""

    def loop(rows: Rows) -> Rows:
        held: dict[Any, Any] = {}
        out = []
        for row in rows:
            key = row[0]
            value = held[key] = step(held[key], row) if key in held else first(row)
            out.append((key, value))
        return out

    return loop


def counted(rows: Rows) -> Rows:
    held: dict[Any, int] = {}
    out = []
    for row in rows:
        key = row[0]
        held[key] = count = held.get(key, 0) + 1
        out.append((key, count))
    return out


def summed(rows: Rows) -> Rows:
    held: dict[Any, int] = {}
    out = []
    for row in rows:
        key = row[0]
        held[key] = total = held.get(key, 0) + row[1]
        out.append((key, total))
    return out


def lesser(rows: Rows) -> Rows:
    held: dict[Any, int] = {}
    out = []
    for key, value, _ in rows:
        if key not in held or value < held[key]:
            held[key] = value
        out.append((key, held[key]))
    return out


def greater(rows: Rows) -> Rows:
    held: dict[Any, int] = {}
    out = []
    for key, value, _ in rows:
        if key not in held or value > held[key]:
            held[key] = value
        out.append((key, held[key]))
    return out


def averaged(rows: Rows) -> Rows:
    held: dict[Any, list[int]] = {}
    out = []
    for key, value, _ in rows:
        pair = held.setdefault(key, [0, 0])
        pair[0] += 1
        pair[1] += value
        out.append((key, pair[1] / pair[0]))
    return out


def summed_for_a_day(rows: Rows) -> Rows:
    """Sums that are forgotten a day after their last change, the oldest one first."""
    held: dict[Any, tuple[int, int]] = {}
    out = []
    for row in rows:
        now, key = time_ns() // 1_000_000, row[0]
        while held and now - held[oldest := next(iter(held))][0] >= 86_400_000:
            del held[oldest]
        before = held.pop(key, None)
        total = row[1] if before is None else before[1] + row[1]
        held[key] = now, total
        out.append((key, total))
    return out


def counted_and_summed(rows: Rows) -> Rows:
    held: dict[Any, list[int]] = {}
    out = []
    for key, value, _ in rows:
        pair = held.setdefault(key, [0, 0])
        pair[0] += 1
        pair[1] += value
        out.append((key, {"n": pair[0], "total": pair[1]}))
    return out


def best_by(better: Callable[[int, int], bool]) -> Callable[[Rows], Rows]:
    return grouped(lambda row: row, lambda held, row: row if better(row[1], held[1]) else held)


def distinct(rows: Rows) -> Rows:
    held: dict[Any, set[int]] = defaultdict(set)
    out = []
    for key, value, _ in rows:
        held[key].add(value)
        out.append((key, len(held[key])))
    return out


def top_three(rows: Rows) -> Rows:
    held: dict[Any, list[int]] = defaultdict(list)
    out = []
    for key, value, _ in rows:
        held[key] = best = nlargest(3, [*held[key], value])
        out.append((key, best))
    return out


def collected(rows: Rows) -> Rows:
    held: dict[Any, list[int]] = defaultdict(list)
    fired = []
    for key, value, _ in rows:
        held[key].append(value)
    for key, values in held.items():
        fired.append((key, None, None, values))
    return fired


def windows(
    add: Callable[[dict[Any, Any], Any], None],
    result: Callable[[Any], Any] = lambda held: held,
    *,
    size: int = WINDOW_MS,
    slide: int = WINDOW_MS,
    lateness: int = 0,
    keep_late: bool = False,
    time: Callable[[Any], int] = itemgetter(2),
) -> Callable[[Rows], Rows]:
    """Tumbling and sliding windows: `add(table, row)` adds a row to the table of a window."""

    def loop(rows: Rows) -> Rows:
        open_windows: dict[int, dict[Any, Any]] = {}
        out: Rows = []
        late = []
        highest, next_end = -1, slide
        for row in rows:
            moment = time(row)
            watermark = highest - DELAY_MS - 1
            start = moment - moment % slide
            added = False
            while start > moment - size:
                if start + size - 1 + lateness > watermark:
                    table = open_windows.get(start)
                    if table is None:
                        table = open_windows[start] = {}
                    add(table, row)
                    added = True
                    if lateness and start + size - 1 <= watermark:
                        key = row[0]
                        out.append((key, start, start + size, result(table[key])))
                start -= slide
            if not added:
                late.append(row)
            if moment > highest:
                highest = moment
                while highest - DELAY_MS - 1 >= next_end - 1:
                    begin = next_end - size
                    for key, held in open_windows.get(begin, {}).items():
                        out.append((key, begin, next_end, result(held)))
                    open_windows.pop(begin - lateness, None)
                    next_end += slide
        for begin in sorted(open_windows):
            if begin + size >= next_end:
                for key, held in open_windows[begin].items():
                    out.append((key, begin, begin + size, result(held)))
        return out + late if keep_late else out

    return loop


def add_count(table: dict[Any, int], row: Row) -> None:
    key = row[0]
    table[key] = table.get(key, 0) + 1


def add_value(table: dict[Any, int], row: Row) -> None:
    key = row[0]
    table[key] = table.get(key, 0) + row[1]


def add_reduced(table: dict[Any, Row], row: Row) -> None:
    key = row[0]
    held = table.get(key)
    table[key] = row if held is None else (key, held[1] + row[1], row[2])


def add_pair(table: dict[Any, list[int]], row: Row) -> None:
    pair = table.get(row[0])
    if pair is None:
        table[row[0]] = [1, row[1]]
    else:
        pair[0] += 1
        pair[1] += row[1]


def add_dict(table: dict[Any, list[int]], row: dict[str, Any]) -> None:
    pair = table.get(row["user"])
    if pair is None:
        table[row["user"]] = [1, row["cents"]]
    else:
        pair[0] += 1
        pair[1] += row["cents"]


def add_row(table: dict[Any, list[Row]], row: Row) -> None:
    held = table.get(row[0])
    if held is None:
        table[row[0]] = [row]
    else:
        held.append(row)


def as_dict(pair: list[int]) -> dict[str, int]:
    return {"n": pair[0], "total": pair[1]}


def appended(held: list[Row], row: Row) -> list[Row]:
    held.append(row)
    return held


def spreads(rows: Rows) -> Rows:
    return [(key, held) for key, _, _, held in windows(add_row, spread_of)(rows)]


def spread_of(held: list[Row]) -> int:
    values = [row[1] for row in held]
    return max(values) - min(values)


def sessions(
    gap: int,
    first: Callable[[Row], Any],
    add: Callable[[Any, Row], Any],
    merge: Callable[[Any, Any], Any],
    result: Callable[[Any, int, int, Any], Any] = lambda key, start, end, held: (
        key,
        start,
        end,
        held,
    ),
) -> Callable[[Rows], Rows]:
    """Sessions: [start, end, value] in lists by key, and a heap of the ends that may be due."""

    def loop(rows: Rows) -> Rows:
        held: dict[Any, list[list[Any]]] = {}
        ends: list[tuple[int, Any]] = []
        out: Rows = []
        highest = -1

        def fire(watermark: float) -> None:
            while ends and ends[0][0] - 1 <= watermark:
                end, key = heappop(ends)
                own = held.get(key, [])
                for session in own[:]:
                    if session[1] - 1 <= watermark and session[1] == end:
                        own.remove(session)
                        out.append(result(key, *session))
                if not own:
                    held.pop(key, None)

        for row in rows:
            key, _, time = row
            own = held.get(key)
            if own is None:
                held[key] = [[time, time + gap, first(row)]]
                heappush(ends, (time + gap, key))
            else:
                start, end = time, time + gap
                touched = [s for s in own if s[0] <= end and start <= s[1]]
                if not touched:
                    own.append([start, end, first(row)])
                    heappush(ends, (end, key))
                else:
                    session = touched[0]
                    for other in touched[1:]:
                        session[2] = merge(session[2], other[2])
                        session[0] = min(session[0], other[0])
                        session[1] = max(session[1], other[1])
                        own.remove(other)
                    session[2] = add(session[2], row)
                    session[0] = min(session[0], start)
                    if end > session[1]:
                        session[1] = end
                        heappush(ends, (end, key))
            if time > highest:
                highest = time
                fire(highest - DELAY_MS - 1)
        fire(float("inf"))
        return out

    return loop


def counts_of(size: int) -> Callable[[Rows], Rows]:
    def loop(rows: Rows) -> Rows:
        held: dict[Any, list[Any]] = {}
        out: Rows = []
        for row in rows:
            key = row[0]
            pair = held.get(key)
            if pair is None:
                pair = held[key] = [0, 0]
            pair[0] += 1
            pair[1] += row[1]
            if pair[0] == size:
                out.append((key, None, None, pair[1]))
                del held[key]
        return out

    return loop


def elements_of_counts(size: int) -> Callable[[Rows], Rows]:
    def loop(rows: Rows) -> Rows:
        held: dict[Any, list[Row]] = {}
        out: Rows = []
        for row in rows:
            key = row[0]
            own = held.get(key)
            if own is None:
                own = held[key] = []
            own.append(row)
            if len(own) == size:
                out.append((key, spread_of(own)))
                del held[key]
        return out

    return loop


def sliding_counts(size: int, slide: int) -> Callable[[Rows], Rows]:
    def loop(rows: Rows) -> Rows:
        held: dict[Any, list[int]] = defaultdict(list)
        seen: dict[Any, int] = {}
        out: Rows = []
        for key, value, _ in rows:
            own = held[key]
            own.append(value)
            seen[key] = count = seen.get(key, 0) + 1
            if count % slide == 0:
                del own[:-size]
                out.append((key, None, None, sum(own)))
        return out

    return loop


def each_tenth_element(rows: Rows) -> Rows:
    """Windows of 10 s that also fire at each tenth element of a key."""
    out: Rows = []

    def add(table: dict[Any, list[int]], row: Row) -> None:
        pair = table.setdefault(row[0], [0, 0])
        pair[0] += 1
        pair[1] += row[1]
        if pair[0] == 10:
            pair[0] = 0
            start = row[2] - row[2] % WINDOW_MS
            out.append((row[0], start, start + WINDOW_MS, pair[1]))

    windows(add)(rows)
    return out


def each_second(rows: Rows) -> Rows:
    """Windows of 10 s that also fire each second of event time, for keys with a new firing."""
    held: dict[tuple[Any, int], int] = {}
    timers: list[tuple[int, int, Any]] = []
    out: Rows = []
    highest, number = -1, 0

    def fire(watermark: float) -> None:
        nonlocal number
        while timers and timers[0][0] <= watermark:
            time, _, at = heappop(timers)
            key, start = at
            end = start + WINDOW_MS
            out.append((key, start, end, held[at]))
            if time == end - 1:
                del held[at]
            else:
                number += 1
                heappush(timers, (min(time + 1_000, end - 1), number, at))

    for key, value, time in rows:
        start = time - time % WINDOW_MS
        at = (key, start)
        if at in held:
            held[at] += value
        else:
            held[at] = value
            number += 1
            first = min(time - time % 1_000 + 1_000, start + WINDOW_MS - 1)
            heappush(timers, (first, number, at))
        if time > highest:
            highest = time
            fire(highest - DELAY_MS - 1)
    fire(float("inf"))
    return out


def in_turn(rows: tuple[Rows, Rows]) -> Iterator[tuple[int, Row]]:
    for pair in zip_longest(*rows):
        for side, row in enumerate(pair):
            if row is not None:
                yield side, row


def join_loop(
    make: Callable[[Any, list[Row], list[Row]], Rows],
) -> Callable[[tuple[Rows, Rows]], Rows]:
    """Windows of 10 s of two streams."""

    def loop(rows: tuple[Rows, Rows]) -> Rows:
        tables: dict[int, dict[Any, tuple[list[Row], list[Row]]]] = {}
        highest = [-1, -1]
        next_end = WINDOW_MS
        out: Rows = []
        for side, row in in_turn(rows):
            key, _, time = row
            start = time - time % WINDOW_MS
            table = tables.get(start)
            if table is None:
                table = tables[start] = {}
            sides = table.get(key)
            if sides is None:
                sides = table[key] = ([], [])
            sides[side].append(row)
            if time > highest[side]:
                highest[side] = time
                while min(highest) - DELAY_MS >= next_end:
                    for own, (lefts, rights) in tables.pop(next_end - WINDOW_MS, {}).items():
                        out += make(own, lefts, rights)
                    next_end += WINDOW_MS
        for start in sorted(tables):
            for own, (lefts, rights) in tables[start].items():
                out += make(own, lefts, rights)
        return out

    return loop


def interval_pairs(rows: tuple[Rows, Rows]) -> Rows:
    """Pairs of which the right one is up to a second later; what can find no partner is dropped."""
    held: tuple[dict[Any, list[Any]], dict[Any, list[Any]]] = ({}, {})
    highest = [-1, -1]
    out: Rows = []
    by_time = itemgetter(2)
    for side, row in in_turn(rows):
        key, _, time = row
        watermark = min(highest) - DELAY_MS - 1
        lower, upper = (time, time + 1_000) if side == 0 else (time - 1_000, time)
        others = held[1 - side].get(key)
        if others:
            first = bisect_left(others, lower, key=by_time)
            for i in range(first, bisect_right(others, upper, key=by_time)):
                left, right = (row, others[i]) if side == 0 else (others[i], row)
                out.append((key, left[1], right[1]))
        own = held[side].get(key)
        if own is None:
            held[side][key] = [row]
        else:
            kept = watermark - 1_000 if side == 0 else watermark
            if own[0][2] < kept:
                del own[: bisect_left(own, kept, key=by_time)]
            insort(own, row, key=by_time)
        if time > highest[side]:
            highest[side] = time
    return out


def silent_keys(rows: Rows) -> Rows:
    due: dict[Any, int] = {}
    timers: list[tuple[int, Any]] = []
    out: Rows = []
    highest = -1

    def fire(watermark: float) -> None:
        while timers and timers[0][0] <= watermark:
            time, key = heappop(timers)
            if due.get(key) == time:
                del due[key]
                out.append((key, time))

    for key, _, time in rows:
        end = time + 1_000
        if key not in due or end > due[key]:
            due[key] = end
            heappush(timers, (end, key))
        if time > highest:
            highest = time
            fire(highest - DELAY_MS - 1)
    fire(float("inf"))
    return out


def last_three(rows: Rows) -> Rows:
    held: dict[Any, list[int]] = {}
    out: Rows = []
    for key, value, _ in rows:
        own = held.setdefault(key, [])
        own.append(value)
        if len(own) == 3:
            out.append((key, sum(own)))
            del held[key]
    return out


def counts_by_digit(rows: Rows) -> Rows:
    held: dict[Any, dict[int, int]] = {}
    out: Rows = []
    for key, value, _ in rows:
        counts = held.setdefault(key, {})
        digit = value % 10
        counts[digit] = count = counts.get(digit, 0) + 1
        out.append((key, digit, count))
    return out


def kept_apart(rows: Rows) -> Rows:
    small, large = [], []
    for row in rows:
        if row[1] >= 900:
            large.append(row)
        else:
            small.append(row)
    return small + large


def dealt_in_four(rows: Rows) -> Rows:
    sides: tuple[Rows, Rows, Rows, Rows] = ([], [], [], [])
    for row in rows:
        sides[row[1] % 4].append(row)
    return [row for side in sides for row in side]


def in_order(rows: Rows) -> Rows:
    """The rows in the order of their times, each once no earlier one can come."""
    held: list[tuple[int, int, Row]] = []
    out: Rows = []
    highest = -1
    for i, row in enumerate(rows):
        heappush(held, (row[2], i, row))
        if row[2] > highest:
            highest = row[2]
            while held[0][0] <= highest - DELAY_MS - 1:
                out.append(heappop(held)[2])
    while held:
        out.append(heappop(held)[2])
    return out


def summed_from_three(rows: Rows) -> Rows:
    limits = {"factor": 3}
    totals: dict[Any, int] = {}
    out: Rows = []
    for row in rows:
        if row[1] >= limits["factor"]:
            totals[row[0]] = total = totals.get(row[0], 0) + row[1]
            out.append((row[0], total))
    return out


def ratios(rows: Rows) -> Rows:
    good, bad = [], []
    for row in rows:
        try:
            good.append(checked(row))
        except ZeroDivisionError:
            bad.append(row)
    return [*good, *bad]


def above(rows: tuple[Rows, Rows]) -> Rows:
    limits: dict[Any, int] = {}
    out = []
    for side, row in in_turn(rows):
        if side:
            limits[row[0]] = -row[1]
        elif row[1] > limits.get(row[0], -1):
            out.append(row)
    return out


def numbered(rows: Rows) -> Rows:
    out = []
    for count, row in enumerate(rows, 1):
        out.append((count, row[1]))
    return out


def mapped(function: Callable[[Any], Any]) -> Callable[[Rows], Rows]:
    def loop(rows: Rows) -> Rows:
        out = []
        for row in rows:
            out.append(function(row))
        return out

    return loop


def filtered(rows: Rows) -> Rows:
    out = []
    for row in rows:
        if is_large(row):
            out.append(row)
    return out


def flattened(rows: Rows) -> Rows:
    out = []
    for row in rows:
        for part in first_two(row):
            out.append(part)
    return out


def stateless_chain(rows: Rows) -> Rows:
    out = []
    for row in rows:
        pair = scaled(row)
        if is_odd(pair):
            out.append(flipped(pair))
    return out


def united(rows: tuple[Rows, Rows]) -> Rows:
    out = []
    for own in rows:
        for row in own:
            out.append(row)
    return out


def tripled(rows: Rows) -> Rows:
    rules = {"factor": 3}
    out = []
    for row in rows:
        out.append((row[0], row[1] * rules["factor"]))
    return out


def pool(call: Callable[[Row], Any], concurrency: int) -> Callable[[Rows], Rows]:
    """A pool of tasks that keeps the order."""

    def loop(rows: Rows) -> Rows:
        out: Rows = [None] * len(rows)

        async def run() -> None:
            numbers = iter(range(len(rows)))

            async def work() -> None:
                for i in numbers:
                    out[i] = await call(rows[i])

            await asyncio.gather(*(work() for _ in range(concurrency)))

        asyncio.run(run())
        return out

    return loop


def threads(rows: Rows) -> Rows:
    with ThreadPoolExecutor(8) as executor:
        return list(executor.map(VALUE, rows))


def chunks(rows: Rows) -> Rows:
    out: Rows = []
    for at in range(0, len(rows), CHUNK):
        out += doubled(rows[at : at + CHUNK])
    return out


def dealt(target: Callable[[Row, int], int]) -> Callable[[Rows], Rows]:
    """Deals the rows out to two lists, of which each is then mapped."""

    def loop(rows: Rows) -> Rows:
        lists: tuple[Rows, Rows] = ([], [])
        for i, row in enumerate(rows):
            lists[target(row, i)].append(row)
        return mapped(VALUE)(lists[0]) + mapped(VALUE)(lists[1])

    return loop


def shuffled(rows: Rows) -> Rows:
    rng = random.Random(11)
    return dealt(lambda row, i: rng.randrange(2))(rows)


def to_both(rows: Rows) -> Rows:
    lists: tuple[Rows, Rows] = ([], [])
    for row in rows:
        lists[0].append(row)
        lists[1].append(row)
    return mapped(VALUE)(lists[0]) + mapped(VALUE)(lists[1])


def count_in_two(rows: Rows) -> Rows:
    tables: tuple[dict[Any, int], dict[Any, int]] = ({}, {})
    out = []
    for row in rows:
        key = row[0]
        table = tables[hash(key) & 1]
        table[key] = count = table.get(key, 0) + 1
        out.append((key, count))
    return out


def lines_of(path: Path) -> Rows:
    with path.open() as lines:
        return [line.rstrip("\n") for line in lines]


def json_of(path: Path) -> Rows:
    with path.open() as lines:
        return [json.loads(line) for line in lines]


def json_sales(path: Path) -> Rows:
    with path.open() as lines:
        return [Sale(**json.loads(line)) for line in lines]


def csv_of(path: Path) -> Rows:
    with path.open(newline="") as lines:
        return list(csv.DictReader(lines))


def csv_sales(path: Path) -> Rows:
    with path.open(newline="") as lines:
        reader = csv.reader(lines)
        next(reader)
        return [Sale(user, int(cents), int(ms)) for user, cents, ms in reader]
