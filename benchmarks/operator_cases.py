"""Each operator of the guide as a small flow, beside a loop of `operator_loops` with the same
outputs.

Operators of one element call the same function in the flow and in the loop. All other loops contain
the code of the flow's functions.
"""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Callable, Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import aioflow as af
from benchmarks.operator_loops import (
    CHUNK,
    DELAY_MS,
    KEYS,
    SLIDE_MS,
    VALUE,
    WINDOW_MS,
    Row,
    Rows,
    Sale,
    above,
    add_count,
    add_dict,
    add_pair,
    add_reduced,
    add_row,
    add_value,
    appended,
    as_dict,
    averaged,
    best_by,
    checked,
    chunks,
    collected,
    count_in_two,
    counted,
    counted_and_summed,
    counts_by_digit,
    counts_of,
    csv_of,
    csv_sales,
    dealt,
    dealt_in_four,
    distinct,
    doubled,
    each_second,
    each_tenth_element,
    elements_of_counts,
    filtered,
    first_two,
    flattened,
    flipped,
    greater,
    grouped,
    in_order,
    interval_pairs,
    is_large,
    is_odd,
    join_loop,
    json_of,
    json_sales,
    kept_apart,
    last_three,
    lesser,
    lines_of,
    mapped,
    numbered,
    paused,
    pool,
    ratios,
    scaled,
    sessions,
    shuffled,
    silent_keys,
    sliding_counts,
    spread_of,
    spreads,
    stateless_chain,
    summed,
    summed_for_a_day,
    summed_from_three,
    threads,
    to_both,
    top_three,
    tripled,
    unchanged,
    united,
    windows,
)

__all__ = ["CASES", "Case", "Data"]


class Data:
    """The records of all cases, of which each makes what it reads on demand."""

    def __init__(self, records: int, folder: Path) -> None:
        rng = random.Random(7)
        self.records = records
        self.folder = folder
        self.rows: list[Row] = [
            (
                f"user-{int(KEYS * rng.random() ** 2)}",
                rng.randrange(1_000),
                i + DELAY_MS - rng.randrange(DELAY_MS),
            )
            for i in range(records)
        ]
        """Out of order by less than the delay of the strategies, so that no row is late."""

    def late_rows(self) -> list[Row]:
        """Rows of which one in a hundred is late by up to two windows."""
        rng = random.Random(8)
        return [
            (key, value, max(0, time - rng.randrange(2 * WINDOW_MS)) if i % 100 == 0 else time)
            for i, (key, value, time) in enumerate(self.rows)
        ]

    def short_sessions(self) -> list[Row]:
        """Rows of which a key has one or two near each other."""
        return [(f"user-{i // 2 * 7919 % 50_000}", v, t) for i, (_, v, t) in enumerate(self.rows)]

    def dicts(self) -> list[dict[str, Any]]:
        return [{"user": key, "cents": value, "ms": time} for key, value, time in self.rows]

    def halves(self) -> tuple[list[Row], list[Row]]:
        """Two streams, of ten times as many keys."""
        rng = random.Random(9)
        rows = [(f"{key}/{rng.randrange(10)}", value, time) for key, value, time in self.rows]
        return rows[::2], rows[1::2]

    def many_tuples(self) -> list[tuple[tuple[int, str], int]]:
        """Rows of as many keys as rows, nearly: pairs."""
        rng = random.Random(10)
        return [((rng.randrange(self.records), f"item-{i % 7}"), 1) for i in range(self.records)]

    def few_tuples(self) -> list[tuple[tuple[str, str], int]]:
        return [((key, f"item-{value % 7}"), value) for key, value, _ in self.rows]

    def integers(self) -> list[tuple[int, int]]:
        return [(int(key[5:]), value) for key, value, _ in self.rows]

    def file(self, kind: str) -> Path:
        path = self.folder / f"rows.{kind}"
        if not path.exists():
            with path.open("w", newline="") as to:
                if kind == "csv":
                    writer = csv.writer(to)
                    writer.writerow(Sale._fields)
                    writer.writerows(self.rows)
                elif kind == "jsonl":
                    to.writelines(json.dumps(row) + "\n" for row in self.dicts())
                else:
                    to.writelines(f"{key} {value} {time}\n" for key, value, time in self.rows)
        return path


class Case(NamedTuple):
    """A comparison."""

    name: str
    flow: Callable[[af.Flow, Any], Any]
    """Adds the operators that read the rows, and returns the stream of their outputs."""
    loop: Callable[[Any], Rows]
    rows: Callable[[Data], Any] = lambda data: data.rows


def in_time() -> Any:
    return af.WatermarkStrategy.bounded_out_of_orderness("1s", timestamp=lambda row: row[2])


def timed(flow: af.Flow, rows: Rows) -> Any:
    return flow.source(rows, watermarks=in_time())


def keyed(flow: af.Flow, rows: Rows) -> Any:
    return flow.source(rows).key_by(lambda row: row[0])


def timed_keyed(flow: af.Flow, rows: Rows) -> Any:
    return timed(flow, rows).key_by(lambda row: row[0])


def running(aggregate: Any) -> Callable[[af.Flow, Rows], Any]:
    return lambda flow, rows: keyed(flow, rows).aggregate(aggregate)


def windowed(aggregate: Any, window: Any, **options: Any) -> Callable[[af.Flow, Rows], Any]:
    return lambda flow, rows: timed_keyed(flow, rows).window(window, **options).aggregate(aggregate)


def two_streams(flow: af.Flow, rows: tuple[Rows, Rows]) -> tuple[Any, Any]:
    return timed(flow, rows[0]), timed(flow, rows[1])


def joined(flow: af.Flow, rows: tuple[Rows, Rows], how: str) -> Any:
    left, right = two_streams(flow, rows)
    return (
        getattr(left, how)(right)
        .where(lambda row: row[0])
        .equal_to(lambda row: row[0])
        .window(af.tumbling("10s"))
    )


class Bumped(af.KeyedProcessFunction[str, Row, Any]):
    """A running sum in a value of state, with or without a time to live."""

    ttl: str | None = None

    def open(self, ctx: Any) -> None:
        self.total = ctx.get_state(af.ValueStateDescriptor("total", default=0, ttl=self.ttl))

    def process_element(self, value: Row, ctx: Any) -> Iterator[Any]:
        total = self.total.value() + value[1]
        self.total.update(total)
        yield value[0], total


class BumpedForADay(Bumped):
    ttl = "1d"


class LastThree(af.KeyedProcessFunction[str, Row, Any]):
    def open(self, ctx: Any) -> None:
        self.last = ctx.get_list_state(af.ListStateDescriptor("last"))

    def process_element(self, value: Row, ctx: Any) -> Iterator[Any]:
        self.last.add(value[1])
        last = list(self.last.get())
        if len(last) == 3:
            self.last.clear()
            yield value[0], sum(last)


class CountsByDigit(af.KeyedProcessFunction[str, Row, Any]):
    def open(self, ctx: Any) -> None:
        self.counts = ctx.get_map_state(af.MapStateDescriptor("counts"))

    def process_element(self, value: Row, ctx: Any) -> Iterator[Any]:
        digit = value[1] % 10
        count = self.counts.get(digit, 0) + 1
        self.counts.put(digit, count)
        yield value[0], digit, count


class Reduced(af.KeyedProcessFunction[str, Row, Any]):
    def open(self, ctx: Any) -> None:
        self.most = ctx.get_reducing_state(af.ReducingStateDescriptor("most", max))

    def process_element(self, value: Row, ctx: Any) -> Iterator[Any]:
        self.most.add(value[1])
        yield value[0], self.most.get()


class Averaged(af.KeyedProcessFunction[str, Row, Any]):
    def open(self, ctx: Any) -> None:
        self.mean = ctx.get_aggregating_state(af.AggregatingStateDescriptor("mean", af.mean()))

    def process_element(self, value: Row, ctx: Any) -> Iterator[Any]:
        self.mean.add(value[1])
        yield value[0], self.mean.get()


class Silence(af.KeyedProcessFunction[str, Row, Any]):
    """Keys that are silent for a second: a timer that each element moves."""

    def open(self, ctx: Any) -> None:
        self.due = ctx.get_state(af.ValueStateDescriptor("due"))

    def process_element(self, value: Row, ctx: Any) -> None:
        due = self.due.value()
        if due is not None:
            if ctx.timestamp + 1_000 <= due:
                return
            ctx.timer_service.delete_event_time_timer(due)
        self.due.update(ctx.timestamp + 1_000)
        ctx.timer_service.register_event_time_timer(ctx.timestamp + 1_000)

    def on_timer(self, timestamp: int, ctx: Any) -> Iterator[Any]:
        self.due.clear()
        yield ctx.current_key, timestamp


LARGE = af.OutputTag[Row]("large")


def split(value: Row, ctx: Any) -> Iterator[Any]:
    if value[1] >= 900:
        ctx.output(LARGE, value)
    else:
        yield value


SIDES = [af.OutputTag[Row](f"side-{i}") for i in range(3)]


def split_in_four(value: Row, ctx: Any) -> Iterator[Any]:
    side = value[1] % 4
    if side < 3:
        ctx.output(SIDES[side], value)
    else:
        yield value


class SplitByKey(af.KeyedProcessFunction[str, Row, Row]):
    def process_element(self, value: Row, ctx: Any) -> Iterator[Row]:
        return split(value, ctx)


def both(flow: af.Flow, made: Any) -> Any:
    return made.union(made.side(LARGE))


class Threshold(af.KeyedCoProcessFunction[str, Row, Row, Any]):
    """Values above the last even number of the other stream are let through: none ever is less."""

    def open(self, ctx: Any) -> None:
        self.limit = ctx.get_state(af.ValueStateDescriptor("limit", default=-1))

    def process_element1(self, value: Row, ctx: Any) -> Iterator[Row]:
        if value[1] > self.limit.value():
            yield value

    def process_element2(self, value: Row, ctx: Any) -> None:
        self.limit.update(-value[1])


RULES = af.MapStateDescriptor[str, int]("rules")


class Ruled(af.BroadcastProcessFunction[Row, tuple[str, int], Any]):
    def process_broadcast_element(self, value: tuple[str, int], ctx: Any) -> None:
        ctx.get_broadcast_state(RULES).put(*value)

    def process_element(self, value: Row, ctx: Any) -> Iterator[Any]:
        yield value[0], value[1] * ctx.get_broadcast_state(RULES).get("factor")


class Limited(af.KeyedBroadcastProcessFunction[str, Row, tuple[str, int], Any]):
    """A running sum of what is at least a broadcast limit."""

    def open(self, ctx: Any) -> None:
        self.total = ctx.get_state(af.ValueStateDescriptor("total", default=0))

    def process_broadcast_element(self, value: tuple[str, int], ctx: Any) -> None:
        ctx.get_broadcast_state(RULES).put(*value)

    def process_element(self, value: Row, ctx: Any) -> Iterator[Any]:
        if value[1] >= ctx.get_broadcast_state(RULES).get("factor"):
            total = self.total.value() + value[1]
            self.total.update(total)
            yield value[0], total


class Sorted(af.KeyedProcessFunction[str, Row, Row]):
    """The rows of each key in the order of their times, by a timer for each."""

    def open(self, ctx: Any) -> None:
        self.rows = ctx.get_map_state(af.MapStateDescriptor("rows"))

    def process_element(self, value: Row, ctx: Any) -> None:
        same = self.rows.get(value[2], [])
        same.append(value)
        self.rows.put(value[2], same)
        ctx.timer_service.register_event_time_timer(value[2])

    def on_timer(self, timestamp: int, ctx: Any) -> Iterator[Row]:
        same = self.rows.get(timestamp)
        self.rows.remove(timestamp)
        yield from same


class Numbered(af.MapFunction[Row, Any], af.CheckpointedFunction):
    """Operator state."""

    def initialize_state(self, ctx: Any) -> None:
        self.kept = ctx.operator_state.get_list_state("count")
        self.count = sum(self.kept.get())

    def map(self, value: Row) -> tuple[int, int]:
        self.count += 1
        return self.count, value[1]

    def snapshot_state(self, ctx: Any) -> None:
        self.kept.update([self.count])


def spread(key: str, ctx: Any, elements: list[Row]) -> Iterator[Any]:
    values = [row[1] for row in elements]
    yield key, max(values) - min(values)


def bad_ratios(flow: af.Flow, rows: Rows) -> Any:
    failures = af.OutputTag[af.Failed[Row]]("bad")
    good = flow.source(rows).map(checked, on_error=failures)
    return good.union(good.side(failures).map(lambda failure: failure.value))


def broadcast_rules(flow: af.Flow, rows: Rows) -> Any:
    rules = flow.source([("factor", 3)]).broadcast(RULES)
    return flow.source(rows).connect(rules, read_first="right").process(Ruled())


def broadcast_limits(flow: af.Flow, rows: Rows) -> Any:
    limits = flow.source([("factor", 3)]).broadcast(RULES)
    return keyed(flow, rows).connect(limits, read_first="right").process(Limited())


def four_streams(flow: af.Flow, rows: Rows) -> Any:
    made = flow.source(rows).process(split_in_four)
    return made.union(*(made.side(tag) for tag in SIDES))


def two_subtasks(deal: Callable[[Any], Any]) -> Callable[[af.Flow, Rows], Any]:
    """A map in two subtasks of one process."""
    return lambda flow, rows: deal(flow.source(rows)).map(VALUE, parallelism=2)


CASES: list[Case] = [
    # One element at a time.
    Case("map", lambda f, rows: f.source(rows).map(scaled), mapped(scaled)),
    Case("filter", lambda f, rows: f.source(rows).filter(is_large), filtered),
    Case("flat_map", lambda f, rows: f.source(rows).flat_map(first_two), flattened),
    Case(
        "select",
        lambda f, rows: f.source(rows).select(user=af.col.user, twice=af.col.cents * 2),
        mapped(lambda row: {"user": row["user"], "twice": row["cents"] * 2}),
        Data.dicts,
    ),
    Case(
        "map, filter, map",
        lambda f, rows: f.source(rows).map(scaled).filter(is_odd).map(flipped),
        stateless_chain,
    ),
    Case("map, on_error", bad_ratios, ratios),
    Case(
        "map, async",
        lambda f, rows: f.source(rows).map(unchanged, concurrency=64),
        pool(unchanged, 64),
    ),
    Case(
        "map, async, sleep(0)",
        lambda f, rows: f.source(rows).map(paused, concurrency=64),
        pool(paused, 64),
    ),
    Case(
        "map, async, unordered",
        lambda f, rows: f.source(rows).map(paused, concurrency=64, ordered=False),
        pool(paused, 64),
    ),
    Case(
        "map, blocking",
        lambda f, rows: f.source(rows).map(VALUE, blocking=True, concurrency=8),
        threads,
    ),
    Case(
        "map_batches", lambda f, rows: f.source(rows).map_batches(doubled, max_size=CHUNK), chunks
    ),
    Case("process", lambda f, rows: both(f, f.source(rows).process(split)), kept_apart),
    Case(
        "union",
        lambda f, rows: f.source(rows[0]).union(f.source(rows[1])),
        united,
        Data.halves,
    ),
    Case("operator state", lambda f, rows: f.source(rows).map(Numbered), numbered),
    # Running.
    Case("count", lambda f, rows: keyed(f, rows).count(), counted),
    Case("sum", lambda f, rows: keyed(f, rows).sum(lambda row: row[1]), summed),
    Case("min", lambda f, rows: keyed(f, rows).min(lambda row: row[1]), lesser),
    Case("max", lambda f, rows: keyed(f, rows).max(lambda row: row[1]), greater),
    Case(
        "reduce",
        lambda f, rows: keyed(f, rows).reduce(lambda a, b: (a[0], a[1] + b[1], b[2])),
        lambda rows: [
            row for _, row in grouped(lambda r: r, lambda a, b: (a[0], a[1] + b[1], b[2]))(rows)
        ],
    ),
    Case("mean", running(af.mean(lambda row: row[1])), averaged),
    Case(
        "agg", running(af.agg(n=af.count(), total=af.sum(lambda row: row[1]))), counted_and_summed
    ),
    Case("max_by", running(af.max_by(lambda row: row[1])), best_by(lambda a, b: a > b)),
    Case("min_by", running(af.min_by(lambda row: row[1])), best_by(lambda a, b: a < b)),
    Case("first", running(af.first(lambda row: row[1])), grouped(VALUE, lambda held, row: held)),
    Case("last", running(af.last(lambda row: row[1])), grouped(VALUE, lambda held, row: row[1])),
    Case("distinct", running(af.distinct(lambda row: row[1])), distinct),
    Case(
        "top",
        lambda f, rows: (
            keyed(f, rows)
            .aggregate(af.top(3, VALUE))
            .map(lambda pair: (pair[0], [row[1] for row in pair[1]]))
        ),
        top_three,
    ),
    # Keys.
    Case("keys, int", lambda f, rows: keyed(f, rows).count(), counted, Data.integers),
    Case("keys, tuple", lambda f, rows: keyed(f, rows).count(), counted, Data.few_tuples),
    Case(
        "keys, tuple, each new", lambda f, rows: keyed(f, rows).count(), counted, Data.many_tuples
    ),
    Case("keys, expression", lambda f, rows: f.source(rows).key_by(af.col[0]).count(), counted),
    # Windows.
    Case("tumbling, count", windowed(af.count(), af.tumbling("10s")), windows(add_count)),
    Case(
        "tumbling, sum",
        windowed(af.sum(lambda row: row[1]), af.tumbling("10s")),
        windows(add_value),
    ),
    Case(
        "tumbling, agg",
        windowed(af.agg(n=af.count(), total=af.sum(lambda row: row[1])), af.tumbling("10s")),
        windows(add_pair, as_dict),
    ),
    Case(
        "tumbling, agg of dicts",
        lambda f, rows: (
            f.source(
                rows,
                watermarks=af.WatermarkStrategy.bounded_out_of_orderness(
                    "1s", timestamp=lambda row: row["ms"]
                ),
            )
            .key_by(lambda row: row["user"])
            .window(af.tumbling("10s"))
            .aggregate(af.agg(n=af.count(), total=af.sum(lambda row: row["cents"])))
        ),
        windows(add_dict, as_dict, time=itemgetter("ms")),
        Data.dicts,
    ),
    Case(
        "tumbling, reduce",
        lambda f, rows: (
            timed_keyed(f, rows)
            .window(af.tumbling("10s"))
            .reduce(lambda a, b: (a[0], a[1] + b[1], b[2]))
        ),
        windows(add_reduced),
    ),
    Case(
        "tumbling, process",
        lambda f, rows: timed_keyed(f, rows).window(af.tumbling("10s")).process(spread),
        spreads,
    ),
    Case(
        "tumbling, late",
        lambda f, rows: late_too(windowed(af.count(), af.tumbling("10s"))(f, rows)),
        windows(add_count, keep_late=True),
        Data.late_rows,
    ),
    Case(
        "tumbling, lateness",
        windowed(af.count(), af.tumbling("10s"), lateness="10s"),
        windows(add_count, lateness=WINDOW_MS),
        Data.late_rows,
    ),
    Case(
        "sliding, count",
        windowed(af.count(), af.sliding("10s", "2s")),
        windows(add_count, slide=SLIDE_MS),
    ),
    Case(
        "sliding, process",
        lambda f, rows: timed_keyed(f, rows).window(af.sliding("10s", "2s")).process(spread),
        lambda rows: [(r[0], r[3]) for r in windows(add_row, spread_of, slide=SLIDE_MS)(rows)],
    ),
    Case(
        "session, long",
        windowed(af.count(), af.session("1s")),
        sessions(1_000, lambda row: 1, lambda n, row: n + 1, lambda a, b: a + b),
    ),
    Case(
        "session, one or two",
        windowed(af.count(), af.session("1s")),
        sessions(1_000, lambda row: 1, lambda n, row: n + 1, lambda a, b: a + b),
        Data.short_sessions,
    ),
    Case(
        "session, process",
        lambda f, rows: timed_keyed(f, rows).window(af.session("1s")).process(spread),
        sessions(
            1_000,
            lambda row: [row],
            appended,
            lambda a, b: a + b,
            lambda key, start, end, held: (key, spread_of(held)),
        ),
    ),
    Case(
        "count_window",
        lambda f, rows: keyed(f, rows).count_window(10).aggregate(af.sum(lambda row: row[1])),
        counts_of(10),
    ),
    Case(
        "count_window, process",
        lambda f, rows: keyed(f, rows).count_window(10).process(spread),
        elements_of_counts(10),
    ),
    Case(
        "count_window, sliding",
        lambda f, rows: keyed(f, rows).count_window(10, 5).aggregate(af.sum(lambda row: row[1])),
        sliding_counts(10, 5),
    ),
    Case(
        "global_window",
        lambda f, rows: (
            keyed(f, rows)
            .window(af.global_window(at_end=True))
            .aggregate(af.collect(lambda row: row[1]))
        ),
        collected,
    ),
    Case(
        "trigger, on_count",
        windowed(af.sum(lambda row: row[1]), af.tumbling("10s"), trigger=af.on_count(10)),
        each_tenth_element,
    ),
    Case(
        "trigger, continuous",
        windowed(af.sum(lambda row: row[1]), af.tumbling("10s"), trigger=af.continuous("1s")),
        each_second,
    ),
    Case(
        "evictor, keep_last",
        windowed(af.sum(lambda row: row[1]), af.tumbling("10s"), evictor=af.keep_last(3)),
        windows(add_row, lambda held: sum(row[1] for row in held[-3:])),
    ),
    # Two streams.
    Case(
        "join",
        lambda f, rows: joined(f, rows, "join").apply(lambda a, b: (a[0], a[1], b[1])),
        join_loop(lambda key, ls, rs: [(a[0], a[1], b[1]) for a in ls for b in rs]),
        Data.halves,
    ),
    Case(
        "join, pairs",
        lambda f, rows: joined(f, rows, "join").pairs(),
        join_loop(lambda key, ls, rs: [(a, b) for a in ls for b in rs]),
        Data.halves,
    ),
    Case(
        "co_group",
        lambda f, rows: joined(f, rows, "co_group").apply(
            lambda key, ls, rs: [(key, len(ls), len(rs))]
        ),
        join_loop(lambda key, ls, rs: [(key, len(ls), len(rs))]),
        Data.halves,
    ),
    Case(
        "interval_join",
        lambda f, rows: (
            timed_keyed(f, rows[0])
            .interval_join(timed_keyed(f, rows[1]), "0s", "1s")
            .process(lambda a, b, ctx: [(a[0], a[1], b[1])])
        ),
        interval_pairs,
        Data.halves,
    ),
    Case(
        "connect, keyed",
        lambda f, rows: keyed(f, rows[0]).connect(keyed(f, rows[1])).process(Threshold()),
        above,
        Data.halves,
    ),
    Case(
        "connect, broadcast",
        broadcast_rules,
        tripled,
    ),
    Case("connect, broadcast, keyed", broadcast_limits, summed_from_three),
    # State.
    Case("value state", lambda f, rows: keyed(f, rows).process(Bumped()), summed),
    Case(
        "value state, ttl",
        lambda f, rows: keyed(f, rows).process(BumpedForADay()),
        summed_for_a_day,
    ),
    Case("list state", lambda f, rows: keyed(f, rows).process(LastThree()), last_three),
    Case("map state", lambda f, rows: keyed(f, rows).process(CountsByDigit()), counts_by_digit),
    Case("reducing state", lambda f, rows: keyed(f, rows).process(Reduced()), greater),
    Case("aggregating state", lambda f, rows: keyed(f, rows).process(Averaged()), averaged),
    Case("timers", lambda f, rows: timed_keyed(f, rows).process(Silence()), silent_keys),
    Case(
        "side output, keyed",
        lambda f, rows: both(f, keyed(f, rows).process(SplitByKey())),
        kept_apart,
    ),
    Case("side outputs, three", four_streams, dealt_in_four),
    Case("sort by timers", lambda f, rows: timed_keyed(f, rows).process(Sorted()), in_order),
    # Partitioners, to two subtasks of one process.
    Case("key_by, two", lambda f, rows: keyed(f, rows).count(parallelism=2), count_in_two),
    Case("rebalance", two_subtasks(lambda s: s.rebalance()), dealt(lambda row, i: i & 1)),
    Case("rescale", two_subtasks(lambda s: s.rescale()), dealt(lambda row, i: i & 1)),
    Case("shuffle", two_subtasks(lambda s: s.shuffle()), shuffled),
    Case("global_", two_subtasks(lambda s: s.global_()), dealt(lambda row, i: 0)),
    Case("broadcast", two_subtasks(lambda s: s.broadcast()), to_both),
    Case(
        "partition_custom",
        two_subtasks(lambda s: s.partition_custom(lambda row, n: row[1] % n)),
        dealt(lambda row, i: row[1] % 2),
    ),
    # Connectors.
    Case(
        "lines",
        lambda f, path: f.source(af.io.lines(str(path))),
        lines_of,
        lambda data: data.file("txt"),
    ),
    Case(
        "jsonl",
        lambda f, path: f.source(af.io.jsonl(str(path))),
        json_of,
        lambda data: data.file("jsonl"),
    ),
    Case(
        "jsonl, type",
        lambda f, path: f.source(af.io.jsonl(str(path), Sale)),
        json_sales,
        lambda data: data.file("jsonl"),
    ),
    Case(
        "csv",
        lambda f, path: f.source(af.io.csv(str(path))),
        csv_of,
        lambda data: data.file("csv"),
    ),
    Case(
        "csv, type",
        lambda f, path: f.source(af.io.csv(str(path), Sale)),
        csv_sales,
        lambda data: data.file("csv"),
    ),
]


def late_too(results: Any) -> Any:
    return results.union(results.late)
