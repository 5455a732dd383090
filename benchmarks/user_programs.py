"""Small programs as a data engineer writes them, each beside the plain loop with the same outputs.

`operator_cases` measures one operator at a time. These programs combine operators, and read and
make dicts, tuples and lines as applications do. Loops advance their watermark with every element.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from heapq import heappop, heappush, nlargest
from pathlib import Path
from statistics import median
from time import time
from typing import Any

import aioflow as af

__all__ = ["PROGRAMS"]

Click = dict[str, Any]
Reading = tuple[str, int, int]
"""(sensor, value, time)"""

DELAY_MS = 1_000
MINUTE_MS = 60_000
HOUR_MS = 3_600_000
GAP_MS = 30_000
PAGES = [f"/page/{i}" for i in range(300)]
COUNTRIES = {f"user-{i}": f"country-{i % 40}" for i in range(2_000)}
LINE = re.compile(r'(\S+) - - \[(\S+)\] "(\S+) (\S+) [^"]*" (\d{3}) (\d+)')


# --------------------------------------------------------------------------------------------------
# records


def clicks(records: int) -> list[Click]:
    """Clicks of an hour, out of order by less than the delay of the strategies."""
    rng = random.Random(21)
    step = HOUR_MS / records
    return [
        {
            "id": f"click-{int(records * 0.7 * rng.random())}",
            "user": f"user-{int(2_000 * rng.random() ** 2)}",
            "page": PAGES[int(300 * rng.random() ** 3)],
            "ms": int(i * step) + DELAY_MS - rng.randrange(DELAY_MS),
        }
        for i in range(records)
    ]


def readings(records: int) -> list[Reading]:
    rng = random.Random(22)
    return [
        (f"sensor-{rng.randrange(200)}", rng.randrange(100), i + DELAY_MS - rng.randrange(DELAY_MS))
        for i in range(records)
    ]


def orders_and_payments(records: int) -> tuple[list[Click], list[Click]]:
    """Orders of an hour, of which most are paid within ten minutes."""
    rng = random.Random(23)
    step = HOUR_MS / (records // 2)
    orders = [
        {"order": i, "cents": rng.randrange(10_000), "ms": int(i * step)}
        for i in range(records // 2)
    ]
    payments = sorted(
        (
            {"order": order["order"], "by": "card", "ms": order["ms"] + rng.randrange(12 * 60_000)}
            for order in orders
            if rng.random() < 0.9
        ),
        key=lambda payment: payment["ms"],
    )
    return orders, payments


def steps_of_orders(records: int) -> list[Click]:
    orders, payments = orders_and_payments(records)
    steps = [{"order": o["order"], "step": "placed", "ms": o["ms"]} for o in orders]
    steps += [{"order": p["order"], "step": "paid", "ms": p["ms"]} for p in payments]
    return sorted(steps, key=lambda step: step["ms"])


def nginx(path: Path, records: int) -> Path:
    rng = random.Random(24)
    with path.open("w") as to:
        for _ in range(records):
            status = rng.choice((200, 200, 200, 304, 404, 500, 503))
            to.write(
                f"10.0.0.{rng.randrange(256)} - - [28/Nov/2026:14:08:00+0000] "
                f'"GET {rng.choice(PAGES)} HTTP/1.1" {status} {rng.randrange(9_000)}\n'
            )
    return path


def text(path: Path, records: int) -> Path:
    rng = random.Random(25)
    words = [f"word{i}" for i in range(5_000)]
    with path.open("w") as to:
        for _ in range(records // 8):
            to.write(" ".join(words[int(5_000 * rng.random() ** 2)] for _ in range(8)) + "\n")
    return path


# --------------------------------------------------------------------------------------------------
# programs


def by_ms(row: Any) -> int:
    return row["ms"]  # type: ignore[no-any-return]


def timed(flow: af.Flow, rows: list[Click]) -> Any:
    return flow.source(
        rows, watermarks=af.WatermarkStrategy.bounded_out_of_orderness("1s", timestamp=by_ms)
    )


def read(flow: af.Flow, rows: list[Reading]) -> Any:
    return flow.source(
        rows,
        watermarks=af.WatermarkStrategy.bounded_out_of_orderness("1s", timestamp=lambda r: r[2]),
    )


# 1. Enrich by a dict.


def with_country(click: Click) -> Click:
    return {**click, "country": COUNTRIES.get(click["user"], "unknown")}


def enrich(flow: af.Flow, rows: list[Click]) -> Any:
    return flow.source(rows).map(with_country).filter(lambda c: c["country"] != "country-7")


def enrich_loop(rows: list[Click]) -> list[Any]:
    out = []
    for row in rows:
        click = with_country(row)
        if click["country"] != "country-7":
            out.append(click)
    return out


# 2. Parse the log of a web server.


def parsed(line: str) -> dict[str, Any] | None:
    match = LINE.match(line)
    if match is None:
        return None
    host, _, method, page, status, size = match.groups()
    return {"host": host, "method": method, "page": page, "status": int(status), "size": int(size)}


def failures(flow: af.Flow, path: Path) -> Any:
    lines = flow.source(af.io.lines(str(path)))
    return (
        lines.map(parsed)
        .filter(lambda entry: entry is not None and entry["status"] >= 500)
        .key_by(lambda entry: entry["page"])
        .count()
    )


def failures_loop(path: Path) -> list[Any]:
    counts: Counter[str] = Counter()
    out = []
    with path.open() as lines:
        for line in lines:
            entry = parsed(line)
            if entry is not None and entry["status"] >= 500:
                counts[entry["page"]] += 1
                out.append((entry["page"], counts[entry["page"]]))
    return out


# 3. Drop what came in the last hour, by state with a timer.


class FirstInTime(af.KeyedProcessFunction[str, Click, Click]):
    def open(self, ctx: Any) -> None:
        self.seen = ctx.get_state(af.ValueStateDescriptor("seen", default=False))

    def process_element(self, value: Click, ctx: Any) -> Iterator[Click]:
        if not self.seen.value():
            self.seen.update(True)
            ctx.timer_service.register_event_time_timer(ctx.timestamp + HOUR_MS)
            yield value

    def on_timer(self, timestamp: int, ctx: Any) -> None:
        self.seen.clear()


def dedupe(flow: af.Flow, rows: list[Click]) -> Any:
    return timed(flow, rows).key_by(lambda c: c["id"]).process(FirstInTime())


def dedupe_loop(rows: list[Click]) -> list[Any]:
    seen: set[str] = set()
    ends: list[tuple[int, str]] = []
    out = []
    highest = -1
    for row in rows:
        while ends and ends[0][0] <= highest - DELAY_MS - 1:
            seen.discard(heappop(ends)[1])
        key, ms = row["id"], row["ms"]
        if key not in seen:
            seen.add(key)
            heappush(ends, (ms + HOUR_MS, key))
            out.append(row)
        highest = max(highest, ms)
    return out


class FirstForAnHour(af.KeyedProcessFunction[str, Click, Click]):
    """The same by the time to live of the state, which follows the clock."""

    def open(self, ctx: Any) -> None:
        self.seen = ctx.get_state(af.ValueStateDescriptor("seen", default=False, ttl="1h"))

    def process_element(self, value: Click, ctx: Any) -> Iterator[Click]:
        if not self.seen.value():
            self.seen.update(True)
            yield value


def dedupe_by_ttl(flow: af.Flow, rows: list[Click]) -> Any:
    return flow.source(rows).key_by(lambda c: c["id"]).process(FirstForAnHour())


def dedupe_by_ttl_loop(rows: list[Click]) -> list[Any]:
    seen: dict[str, float] = {}
    out = []
    for row in rows:
        now = time()
        while seen and seen[oldest := next(iter(seen))] <= now - 3_600:
            del seen[oldest]
        if row["id"] not in seen:
            seen[row["id"]] = now
            out.append(row)
    return out


# 4. The ten pages with most clicks in each minute.


def top_pages(flow: af.Flow, rows: list[Click]) -> Any:
    return (
        timed(flow, rows)
        .key_by(lambda c: c["page"])
        .window(af.tumbling("1m"))
        .aggregate(af.count())
        .key_by(lambda row: row.start)
        .window(af.tumbling("1m"))
        .aggregate(af.top(10, by=lambda row: (row.value, row.key)))
        .map(lambda row: (row.key, [best.key for best in row.value]))
    )


def of_minutes(rows: Any, add: Callable[[Any, Any], None], make: Any, time: Any = by_ms) -> Any:
    """Yields (start, window) of each minute when it ends."""
    open_windows: dict[int, Any] = {}
    highest, next_end = -1, MINUTE_MS
    for row in rows:
        ms = time(row)
        start = ms - ms % MINUTE_MS
        if start + MINUTE_MS - 1 > highest - DELAY_MS - 1:
            window = open_windows.get(start)
            if window is None:
                window = open_windows[start] = make()
            add(window, row)
        if ms > highest:
            highest = ms
            while highest - DELAY_MS - 1 >= next_end - 1:
                if next_end - MINUTE_MS in open_windows:
                    yield next_end - MINUTE_MS, open_windows.pop(next_end - MINUTE_MS)
                next_end += MINUTE_MS
    yield from sorted(open_windows.items())


def count_page(window: Any, click: Click) -> None:
    window[click["page"]] += 1


def top_pages_loop(rows: list[Click]) -> list[Any]:
    return [
        (start, [page for page, _ in nlargest(10, counts.items(), key=lambda p: (p[1], p[0]))])
        for start, counts in of_minutes(rows, count_page, Counter)
    ]


# 5. Sessions of clicks, by a reduce.


def merged(a: Any, b: Any) -> Any:
    return {"user": a["user"], "pages": a["pages"] + b["pages"], "ms": min(a["ms"], b["ms"])}


def visit(click: Click) -> Any:
    return {"user": click["user"], "pages": 1, "ms": click["ms"]}


def visits(flow: af.Flow, rows: list[Click]) -> Any:
    return (
        timed(flow, rows)
        .map(visit)
        .key_by(lambda v: v["user"])
        .window(af.session("30s"))
        .reduce(merged)
        .map(lambda row: row.value)
    )


def visits_loop(rows: list[Click]) -> list[Any]:
    held: dict[str, list[list[Any]]] = defaultdict(list)
    ends: list[tuple[int, str]] = []
    out = []
    highest = -1
    for row in rows:
        value = visit(row)
        key, ms = value["user"], value["ms"]
        start, end = ms, ms + GAP_MS
        left = []
        for session in held[key]:
            if session[0] <= end and start <= session[1]:
                start, end = min(start, session[0]), max(end, session[1])
                value = merged(session[2], value)
            else:
                left.append(session)
        left.append([start, end, value])
        held[key] = left
        heappush(ends, (end, key))
        if ms > highest:
            highest = ms
            while ends and ends[0][0] - 1 <= highest - DELAY_MS - 1:
                end, key = heappop(ends)
                for session in held[key]:
                    if session[1] == end:
                        out.append(session[2])
                        held[key].remove(session)
                        break
                if not held[key]:
                    del held[key]
    for sessions in held.values():
        out += [session[2] for session in sessions]
    return out


# 6. The average of the last ten readings of a sensor, after each one.


def rolling(flow: af.Flow, rows: list[Reading]) -> Any:
    return (
        flow.source(rows)
        .key_by(lambda r: r[0])
        .count_window(10, 1)
        .aggregate(af.mean(lambda r: r[1]))
        .map(lambda row: (row.key, row.value))
    )


class Rolling(af.KeyedProcessFunction[str, Reading, Any]):
    def open(self, ctx: Any) -> None:
        self.last = ctx.get_state(af.ValueStateDescriptor("last", default=()))

    def process_element(self, value: Reading, ctx: Any) -> Iterator[Any]:
        last = (*self.last.value()[-9:], value[1])
        self.last.update(last)
        yield value[0], sum(last) / len(last)


def rolling_by_state(flow: af.Flow, rows: list[Reading]) -> Any:
    return flow.source(rows).key_by(lambda r: r[0]).process(Rolling())


def rolling_loop(rows: list[Reading]) -> list[Any]:
    held: dict[str, deque[int]] = {}
    out = []
    for sensor, value, _ in rows:
        last = held.get(sensor)
        if last is None:
            last = held[sensor] = deque(maxlen=10)
        last.append(value)
        out.append((sensor, sum(last) / len(last)))
    return out


# 7. Join orders with their payments within ten minutes.


def paid(flow: af.Flow, rows: tuple[list[Click], list[Click]]) -> Any:
    orders, payments = (timed(flow, side).key_by(lambda r: r["order"]) for side in rows)
    return orders.interval_join(payments, "0s", "10m").process(
        lambda order, payment, ctx: [(order["order"], order["cents"], payment["by"])]
    )


def paid_loop(rows: tuple[list[Click], list[Click]]) -> list[Any]:
    orders, payments = rows
    held: dict[int, Click] = {}
    ends: deque[tuple[int, int]] = deque()
    out = []
    i = 0
    for payment in payments:
        while i < len(orders) and orders[i]["ms"] <= payment["ms"]:
            order = orders[i]
            held[order["order"]] = order
            ends.append((order["ms"] + 600_000, order["order"]))
            i += 1
        while ends and ends[0][0] < payment["ms"] - DELAY_MS - 1:
            held.pop(ends.popleft()[1], None)
        order = held.get(payment["order"])
        if order is not None and payment["ms"] - order["ms"] <= 600_000:
            out.append((order["order"], order["cents"], payment["by"]))
    return out


# 8. Orders that are not paid in ten minutes: a state machine with a timer.


class Unpaid(af.KeyedProcessFunction[int, Click, Any]):
    def open(self, ctx: Any) -> None:
        self.state = ctx.get_state(af.ValueStateDescriptor("state"))
        self.due = ctx.get_state(af.ValueStateDescriptor("due"))

    def process_element(self, value: Click, ctx: Any) -> Iterator[Any]:
        if value["step"] == "placed":
            self.state.update("placed")
            self.due.update(ctx.timestamp + 600_000)
            ctx.timer_service.register_event_time_timer(ctx.timestamp + 600_000)
        elif self.state.value() == "placed":
            ctx.timer_service.delete_event_time_timer(self.due.value())
            self.state.clear()
            self.due.clear()
            yield ctx.current_key, "paid"

    def on_timer(self, timestamp: int, ctx: Any) -> Iterator[Any]:
        self.state.clear()
        self.due.clear()
        yield ctx.current_key, "unpaid"


def unpaid(flow: af.Flow, rows: list[Click]) -> Any:
    return timed(flow, rows).key_by(lambda step: step["order"]).process(Unpaid())


def unpaid_loop(rows: list[Click]) -> list[Any]:
    placed: dict[int, int] = {}
    ends: list[tuple[int, int]] = []
    out = []
    highest = -1
    for row in rows:
        while ends and ends[0][0] <= highest - DELAY_MS - 1:
            due, order = heappop(ends)
            if placed.get(order) == due:
                del placed[order]
                out.append((order, "unpaid"))
        order, ms = row["order"], row["ms"]
        if row["step"] == "placed":
            placed[order] = ms + 600_000
            heappush(ends, (ms + 600_000, order))
        elif placed.pop(order, None) is not None:
            out.append((order, "paid"))
        highest = max(highest, ms)
    out += [(order, "unpaid") for order in placed]
    return out


# 9. The average of a moving window of tuples.


def moving(flow: af.Flow, rows: list[Reading]) -> Any:
    return (
        read(flow, rows)
        .key_by(lambda r: r[0])
        .window(af.sliding("10s", "1s"))
        .aggregate(af.mean(lambda r: r[1]))
        .map(lambda row: (row.key, row.end, row.value))
    )


def moving_loop(rows: list[Reading]) -> list[Any]:
    open_windows: dict[int, dict[str, list[int]]] = {}
    out = []
    highest, next_end = -1, 1_000

    def fire(end: int) -> None:
        for sensor, (n, total) in open_windows.pop(end, {}).items():
            out.append((sensor, end, total / n))

    for sensor, value, ms in rows:
        first = ms - ms % 1_000 + 1_000
        for end in range(max(first, next_end), first + 10_000, 1_000):
            window = open_windows.get(end)
            if window is None:
                window = open_windows[end] = {}
            pair = window.get(sensor)
            if pair is None:
                window[sensor] = [1, value]
            else:
                pair[0] += 1
                pair[1] += value
        if ms > highest:
            highest = ms
            while highest - DELAY_MS - 1 >= next_end - 1:
                fire(next_end)
                next_end += 1_000
    for end in sorted(open_windows):
        fire(end)
    return out


# 10. Count the words of a text.


def words(flow: af.Flow, path: Path) -> Any:
    return (
        flow.source(af.io.lines(str(path)))
        .flat_map(str.split)
        .map(lambda word: (word, 1))
        .key_by(lambda pair: pair[0])
        .sum(lambda pair: pair[1])
    )


def words_loop(path: Path) -> list[Any]:
    counts: dict[str, int] = {}
    out = []
    with path.open() as lines:
        for line in lines:
            for word in line.split():
                counts[word] = count = counts.get(word, 0) + 1
                out.append((word, count))
    return out


# 11. Lowest, highest and mean value of a minute, by an own aggregate.


class Spread(af.AggregateFunction[Reading, Any, Any]):
    def create_accumulator(self) -> Any:
        return {"low": None, "high": None, "n": 0, "total": 0}

    def add(self, value: Reading, accumulator: Any) -> Any:
        v = value[1]
        if accumulator["low"] is None or v < accumulator["low"]:
            accumulator["low"] = v
        if accumulator["high"] is None or v > accumulator["high"]:
            accumulator["high"] = v
        accumulator["n"] += 1
        accumulator["total"] += v
        return accumulator

    def get_result(self, accumulator: Any) -> Any:
        return accumulator["low"], accumulator["high"], accumulator["total"] / accumulator["n"]

    def merge(self, a: Any, b: Any) -> Any:
        return {
            "low": min(a["low"], b["low"]),
            "high": max(a["high"], b["high"]),
            "n": a["n"] + b["n"],
            "total": a["total"] + b["total"],
        }


def spreads(flow: af.Flow, rows: list[Reading]) -> Any:
    return (
        read(flow, rows)
        .key_by(lambda r: r[0])
        .window(af.tumbling("1m"))
        .aggregate(Spread())
        .map(lambda row: (row.key, row.start, row.value))
    )


def spreads_loop(rows: list[Reading]) -> list[Any]:
    spread = Spread()

    def add(window: Any, row: Reading) -> None:
        held = window.get(row[0])
        if held is None:
            held = window[row[0]] = spread.create_accumulator()
        spread.add(row, held)

    return [
        (sensor, start, spread.get_result(held))
        for start, window in of_minutes(rows, add, dict, lambda row: row[2])
        for sensor, held in window.items()
    ]


# 12. The median of a minute, from all elements of the window.


def medians(flow: af.Flow, rows: list[Reading]) -> Any:
    def middle(key: str, ctx: Any, elements: list[Reading]) -> Iterator[Any]:
        yield key, ctx.window.start, median([row[1] for row in elements])

    return read(flow, rows).key_by(lambda r: r[0]).window(af.tumbling("1m")).process(middle)


def medians_loop(rows: list[Reading]) -> list[Any]:
    def add(window: Any, row: Reading) -> None:
        window[row[0]].append(row[1])

    return [
        (sensor, start, median(values))
        for start, window in of_minutes(rows, add, lambda: defaultdict(list), lambda row: row[2])
        for sensor, values in window.items()
    ]


# 13. The last click of each user with a number, by a reduce of dicts.


def profiles(flow: af.Flow, rows: list[Click]) -> Any:
    return (
        flow.source(rows)
        .map(visit)
        .key_by(lambda v: v["user"])
        .reduce(lambda a, b: {**b, "pages": a["pages"] + b["pages"]})
    )


def profiles_loop(rows: list[Click]) -> list[Any]:
    held: dict[str, Any] = {}
    out = []
    for row in rows:
        b = visit(row)
        a = held.get(b["user"])
        held[b["user"]] = value = b if a is None else {**b, "pages": a["pages"] + b["pages"]}
        out.append(value)
    return out


# 14. JSON lines by `json.loads`, and totals of a minute.


def totals(flow: af.Flow, path: Path) -> Any:
    return (
        flow.source(af.io.lines(str(path)))
        .map(json.loads)
        .assign_timestamps_and_watermarks(
            af.WatermarkStrategy.bounded_out_of_orderness("1s", timestamp=by_ms)
        )
        .key_by(lambda click: click["page"])
        .window(af.tumbling("1m"))
        .aggregate(af.agg(n=af.count(), last=af.max(by_ms)))
        .map(lambda row: {"page": row.key, "start": row.start, **row.value})
    )


def totals_loop(path: Path) -> list[Any]:
    def add(window: Any, row: Click) -> None:
        held = window.get(row["page"])
        if held is None:
            window[row["page"]] = [1, row["ms"]]
        else:
            held[0] += 1
            held[1] = max(held[1], row["ms"])

    with path.open() as lines:
        return [
            {"page": page, "start": start, "n": n, "last": last}
            for start, window in of_minutes(map(json.loads, lines), add, dict)
            for page, (n, last) in window.items()
        ]


# 15. Dataclasses with a datetime.


@dataclass(frozen=True, slots=True)
class Visit:
    user: str
    page: str
    at: datetime


def per_page(flow: af.Flow, rows: list[Visit]) -> Any:
    return (
        flow.source(
            rows,
            watermarks=af.WatermarkStrategy.bounded_out_of_orderness(
                "1s", timestamp=lambda v: int(v.at.timestamp() * 1_000)
            ),
        )
        .key_by(lambda v: v.page)
        .window(af.tumbling("1m"))
        .aggregate(af.count())
    )


def per_page_loop(rows: list[Visit]) -> list[Any]:
    def add(window: Any, row: Visit) -> None:
        window[row.page] += 1

    return [
        (page, start, start + MINUTE_MS, n)
        for start, counts in of_minutes(rows, add, Counter, lambda v: int(v.at.timestamp() * 1_000))
        for page, n in counts.items()
    ]


# 16. An alarm at the third high reading in a row.


class ThreeInARow(af.KeyedProcessFunction[str, Reading, Any]):
    def open(self, ctx: Any) -> None:
        self.high = ctx.get_state(af.ValueStateDescriptor("high", default=0))

    def process_element(self, value: Reading, ctx: Any) -> Iterator[Any]:
        if value[1] < 80:
            self.high.clear()
            return
        high = self.high.value() + 1
        self.high.update(high)
        if high == 3:
            yield ctx.current_key, value[2]


def alarms(flow: af.Flow, rows: list[Reading]) -> Any:
    return flow.source(rows).key_by(lambda r: r[0]).process(ThreeInARow())


def alarms_loop(rows: list[Reading]) -> list[Any]:
    held: dict[str, int] = {}
    out = []
    for sensor, value, ms in rows:
        if value < 80:
            held.pop(sensor, None)
            continue
        held[sensor] = high = held.get(sensor, 0) + 1
        if high == 3:
            out.append((sensor, ms))
    return out


# 17. Events unpacked from messages by a generator.


def parts(click: Click) -> Iterator[Any]:
    for name, value in click.items():
        if name != "id":
            yield click["id"], name, value


def unpacked(flow: af.Flow, rows: list[Click]) -> Any:
    return flow.source(rows).flat_map(parts)


def unpacked_loop(rows: list[Click]) -> list[Any]:
    out: list[Any] = []
    for row in rows:
        out.extend(parts(row))
    return out


# 18. Counts by two fields.


def by_two(flow: af.Flow, rows: list[Click]) -> Any:
    return flow.source(rows).key_by(lambda c: (c["user"], c["page"])).count()


def by_two_loop(rows: list[Click]) -> list[Any]:
    counts: dict[Any, int] = {}
    out = []
    for row in rows:
        key = row["user"], row["page"]
        counts[key] = count = counts.get(key, 0) + 1
        out.append((key, count))
    return out


# 19. One stream into two.


def fan(flow: af.Flow, rows: list[Reading]) -> Any:
    source = flow.source(rows)
    high = source.filter(lambda r: r[1] >= 50).map(lambda r: ("high", r[0], r[1]))
    low = source.filter(lambda r: r[1] < 50).map(lambda r: ("low", r[0], r[1]))
    return high.union(low)


def fan_loop(rows: list[Reading]) -> list[Any]:
    high, low = [], []
    for row in rows:
        if row[1] >= 50:
            high.append(("high", row[0], row[1]))
        else:
            low.append(("low", row[0], row[1]))
    return high + low


# 20. One total for all, each minute.


def everything(flow: af.Flow, rows: list[Reading]) -> Any:
    return (
        read(flow, rows)
        .key_by(lambda r: "all")
        .window(af.tumbling("1m"))
        .aggregate(af.sum(lambda r: r[1]))
        .map(lambda row: (row.start, row.value))
    )


def everything_loop(rows: list[Reading]) -> list[Any]:
    def add(window: Any, row: Reading) -> None:
        window[0] += row[1]

    return [
        (start, total) for start, (total,) in of_minutes(rows, add, lambda: [0], lambda row: row[2])
    ]


# 21. Users seen in a minute, by a set.


def unique(flow: af.Flow, rows: list[Click]) -> Any:
    return (
        timed(flow, rows)
        .key_by(lambda c: c["page"])
        .window(af.tumbling("1m"))
        .aggregate(af.distinct(lambda c: c["user"]))
    )


def unique_loop(rows: list[Click]) -> list[Any]:
    def add(window: Any, row: Click) -> None:
        window[row["page"]].add(row["user"])

    return [
        (page, start, start + MINUTE_MS, len(users))
        for start, window in of_minutes(rows, add, lambda: defaultdict(set))
        for page, users in window.items()
    ]


# 22. The difference to the value before.


class Change(af.KeyedProcessFunction[str, Reading, Any]):
    def open(self, ctx: Any) -> None:
        self.before = ctx.get_state(af.ValueStateDescriptor("before"))

    def process_element(self, value: Reading, ctx: Any) -> Any:
        before = self.before.value()
        self.before.update(value[1])
        if before is not None:
            return [(value[0], value[1] - before)]
        return None


def changes(flow: af.Flow, rows: list[Reading]) -> Any:
    return flow.source(rows).key_by(lambda r: r[0]).process(Change())


def changes_loop(rows: list[Reading]) -> list[Any]:
    held: dict[str, int] = {}
    out = []
    for sensor, value, _ in rows:
        before = held.get(sensor)
        held[sensor] = value
        if before is not None:
            out.append((sensor, value - before))
    return out


# 23. Split good from bad records by a side output of a function.

BAD = af.OutputTag[Any]("bad")


def sorted_out(value: Reading, ctx: Any) -> Iterator[Any]:
    if value[1] < 10:
        ctx.output(BAD, {"reading": value, "why": "too low"})
    else:
        yield value


def checked(flow: af.Flow, rows: list[Reading]) -> Any:
    good = flow.source(rows).process(sorted_out)
    return good.map(lambda r: (r[0], r[1] * 2)).union(good.side(BAD))


def checked_loop(rows: list[Reading]) -> list[Any]:
    good: list[Any] = []
    bad: list[Any] = []
    for row in rows:
        if row[1] < 10:
            bad.append({"reading": row, "why": "too low"})
        else:
            good.append((row[0], row[1] * 2))
    return good + bad


def _clicks(data: Any) -> list[Click]:
    return clicks(data.records)


def _readings(data: Any) -> list[Reading]:
    return readings(data.records)


def _json(data: Any) -> Path:
    path: Path = data.folder / "clicks.jsonl"
    with path.open("w") as to:
        to.writelines(json.dumps(click) + "\n" for click in clicks(data.records))
    return path


def _visits(data: Any) -> list[Visit]:
    return [
        Visit(c["user"], c["page"], datetime.fromtimestamp(c["ms"] / 1_000, UTC))
        for c in clicks(data.records)
    ]


PROGRAMS: list[tuple[str, Any, Any, Any]] = [
    # The name, the flow, the loop, and what makes its input of a `Data`.
    ("enrich by a dict", enrich, enrich_loop, _clicks),
    ("parse a web log", failures, failures_loop, lambda d: nginx(d.folder / "web.log", d.records)),
    ("dedupe, timer", dedupe, dedupe_loop, _clicks),
    ("dedupe, ttl", dedupe_by_ttl, dedupe_by_ttl_loop, _clicks),
    ("top ten of a minute", top_pages, top_pages_loop, _clicks),
    ("visits, reduce", visits, visits_loop, _clicks),
    ("rolling, count_window", rolling, rolling_loop, _readings),
    ("rolling, state", rolling_by_state, rolling_loop, _readings),
    ("orders and payments", paid, paid_loop, lambda d: orders_and_payments(d.records)),
    ("unpaid orders", unpaid, unpaid_loop, lambda d: steps_of_orders(d.records)),
    ("moving average", moving, moving_loop, _readings),
    ("words of a text", words, words_loop, lambda d: text(d.folder / "text.txt", d.records)),
    ("own aggregate", spreads, spreads_loop, _readings),
    ("median of a minute", medians, medians_loop, _readings),
    ("profiles, reduce", profiles, profiles_loop, _clicks),
    ("json.loads, totals", totals, totals_loop, _json),
    ("dataclasses", per_page, per_page_loop, _visits),
    ("three in a row", alarms, alarms_loop, _readings),
    ("generator", unpacked, unpacked_loop, _clicks),
    ("keys of two fields", by_two, by_two_loop, _clicks),
    ("two branches", fan, fan_loop, _readings),
    ("one total", everything, everything_loop, _readings),
    ("unique users", unique, unique_loop, _clicks),
    ("change, list", changes, changes_loop, _readings),
    ("good and bad", checked, checked_loop, _readings),
]
