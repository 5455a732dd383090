"""Flows on columns end to end: the same records as rows give the same results, through every
kind of operator and edge.
"""

from __future__ import annotations

import csv
import json
from collections import Counter
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import aioflow as af
from aioflow.core.column_batch import ColumnBatch
from aioflow.core.elements import RecordBatch

e = af.col
COUNT = 5_000
ROWS = [
    {
        "ts": 1_000 + i * 3 - (i * 7919) % 1500,
        "user": (i * 31) % 97 - 40,
        "word": None if i % 50 == 49 else f"w{(i * 17) % 23}",
        "value": ((i * 13) % 41 - 20) / 8,
        "flag": i % 3 == 0,
    }
    for i in range(COUNT)
]
TIMES = af.WatermarkStrategy.bounded_out_of_orderness("1s", timestamp=e.ts)
PATIENT = af.WatermarkStrategy.bounded_out_of_orderness("2s", timestamp=e.ts)
"""Nothing is late. Where two streams meet, what is late depends on which of them was ahead."""


def table() -> pa.Table:
    return pa.Table.from_pylist(ROWS)


def sources(tmp_path: Path) -> dict[str, Any]:
    pq.write_table(table(), tmp_path / "events.parquet", row_group_size=1_700)
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return {
        "rows": ROWS,
        "arrow": af.io.arrow(table()),
        "parquet": af.io.parquet(tmp_path / "events.parquet"),
        "jsonl": af.io.jsonl(tmp_path / "events.jsonl"),
    }


def stateless(stream: Any) -> Any:
    return (
        stream.filter((e.value > 0) | e.word.is_null())
        .select(user=e.user, word=e.word.fill_null("?"), cents=(e.value * 100).round(), ts=e.ts)
        .filter(e.user != 3)
    )


def keyed_function(stream: Any) -> Any:
    def numbered(value: Any, ctx: Any) -> Any:
        yield (ctx.current_key, ctx.timestamp, value["cents"])

    return stateless(stream).key_by(e.user).process(numbered)


async def enriched(row: dict[str, Any]) -> tuple[int, float]:
    return row["user"], row["value"]


def joined(stream: Any) -> Any:
    left, right = stream.filter(e.flag), stream.filter(~e.flag)
    pairs = left.join(right).where(e.user).equal_to(e.user).window(af.tumbling("1s"))
    return pairs.apply(lambda a, b: (a["ts"], b["ts"]))


def between(stream: Any) -> Any:
    def pair(left: Any, right: Any, ctx: Any) -> Any:
        yield (left["ts"], right["ts"])

    left, right = stream.filter(e.flag).key_by(e.user), stream.filter(~e.flag).key_by(e.user)
    return left.interval_join(right, "-300ms", "300ms").process(pair)


def reassigned(stream: Any) -> Any:
    strategy = af.WatermarkStrategy.bounded_out_of_orderness("2s", timestamp=e.ts + 500)
    return (
        stream.assign_timestamps_and_watermarks(strategy)
        .key_by(e.user)
        .window(af.tumbling("2s"))
        .aggregate(af.count())
    )


SHAPES = {
    "awaited": lambda s: s.map(enriched, concurrency=4),
    "in batches": lambda s: s.map_batches(lambda rows: [row["ts"] for row in rows], max_size=64),
    "throttled": lambda s: s.throttle(1_000_000).filter(e.flag),
    "by values": lambda s: s.map(e.value * 2).filter(lambda x: x > 1),
    "joined": joined,
    "interval join": between,
    "sessions": lambda s: (
        s.key_by(e.user)
        .window(af.session("200ms"))
        .aggregate(af.agg(n=af.count(), total=af.sum(e.value)))
    ),
    "counted": lambda s: s.key_by(e.user).count_window(7).aggregate(af.sum(e.value)),
    "reduced": lambda s: s.key_by(e.user).reduce(lambda a, b: {**b, "ts": max(a["ts"], b["ts"])}),
    "reassigned": reassigned,
    "tops": lambda s: s.key_by(e.user).window(af.tumbling("2s")).aggregate(af.top(2, e.value)),
    "many slices": lambda s: (
        s.key_by(e.user)
        .window(af.sliding("2s", "100ms"))
        .aggregate(af.agg(n=af.count(), high=af.max(e.value)))
    ),
    "keys of floats": lambda s: s.key_by(e.value).count(),
    "keys of pairs": lambda s: (
        s.map(lambda row: (row["user"], row["value"])).key_by(af.col[0]).sum(af.col[1])
    ),
    "results of results": lambda s: (
        s.key_by(e.user).count().filter(af.col[1] % 2 == 0).key_by(af.col[0]).max(af.col[1])
    ),
    "both kinds": lambda s: (
        s.union(s.map(lambda row: row))
        .filter(e.flag)
        .key_by(e.user)
        .aggregate(af.agg(n=af.count()))
    ),
    "as it is": lambda s: s,
    "stateless": stateless,
    "rows behind columns": lambda s: (
        stateless(s).map(lambda row: (row["user"], row["cents"])).filter(lambda pair: pair[1] > 50)
    ),
    "columns behind rows": lambda s: (
        s.map(lambda row: {**row, "user": row["user"] + 1}).filter(e.user > 0).select(u=e.user)
    ),
    "running count": lambda s: s.key_by(e.user).count(),
    "running sum": lambda s: s.key_by(e.user).sum(e.value),
    "keyed function": keyed_function,
    "rebalanced": lambda s: s.rebalance().filter(e.flag),
    "window": lambda s: (
        s.key_by(e.user)
        .window(af.tumbling("2s"))
        .aggregate(af.agg(n=af.count(), total=af.sum(e.value)))
    ),
    "sliding": lambda s: (
        s.key_by(e.word.fill_null(""))
        .window(af.sliding("2s", "500ms"))
        .aggregate(af.agg(n=af.count(), top=af.max(e.value)))
    ),
    "expression of keys": lambda s: (
        s.key_by((e.user % 7).cast(str)).window(af.tumbling("2s")).aggregate(af.mean(e.value))
    ),
    "late": lambda s: (
        s.key_by(e.user).window(af.tumbling("100ms"), lateness="200ms").aggregate(af.count())
    ),
    "flat": lambda s: s.filter(e.flag).flat_map(lambda row: [row["user"]] * 2),
}


MEETING = frozenset({"joined", "interval join", "both kinds"})
"""Two inputs, between which no order is promised."""

ORDERED = frozenset({"keys of pairs"})
"""Flows whose result depends on the order of records from several subtasks."""


@pytest.mark.parametrize("shape", sorted(MEETING))
async def test_streams_that_meet_give_what_rows_give(shape: str, tmp_path: Path) -> None:
    expected = None
    for name, source in sources(tmp_path).items():
        found = sorted(
            map(
                repr,
                await SHAPES[shape](
                    af.Flow(f"{shape} of {name}").source(source, watermarks=PATIENT)
                ).collect(),
            )
        )
        assert found
        expected = expected or found
        assert found == expected, name


@pytest.mark.parametrize("shape", sorted(SHAPES.keys() - MEETING))
async def test_columns_give_what_rows_give(shape: str, tmp_path: Path) -> None:
    expected = None
    for name, source in sources(tmp_path).items():
        flow = af.Flow(f"{shape} of {name}")
        found = await SHAPES[shape](flow.source(source, watermarks=TIMES)).collect()
        assert found
        if expected is None:
            expected = found
        assert found == expected, name
        assert list(map(type, found)) == list(map(type, expected))


@pytest.mark.parametrize("shape", sorted(SHAPES.keys() - ORDERED))
async def test_parallel_columns_give_what_rows_give(shape: str, tmp_path: Path) -> None:
    expected = None
    for name, source in sources(tmp_path).items():
        flow = af.Flow(f"{shape} of {name}", parallelism=3)
        found = sorted(
            map(repr, await SHAPES[shape](flow.source(source, watermarks=PATIENT)).collect())
        )
        expected = expected or found
        assert found == expected, name


async def test_columns_stay_columns_up_to_the_first_operator_of_rows(tmp_path: Path) -> None:
    """Ablation: rows made at the source would give the same results."""
    seen: list[type] = []
    flow = af.Flow("kinds", parallelism=2)
    stream = stateless(flow.source(af.io.arrow(table()), watermarks=TIMES))

    class Look:
        def writer(self, ctx: Any) -> Any:
            return self

        def committer(self) -> None:
            return None

        def write_batch(self, values: Any, timestamps: Any) -> None:
            seen.append(type(values))

        async def flush(self) -> None: ...

        async def prepare(self, checkpoint_id: int) -> list[Any]:
            return []

    stream.rebalance().sink(Look())
    await flow.execute()
    assert set(seen) == {ColumnBatch}


@pytest.mark.parametrize("shape", ["as it is", "running count", "window", "sliding"])
async def test_columns_cross_processes(shape: str, tmp_path: Path) -> None:
    pq.write_table(table(), tmp_path / "events.parquet", row_group_size=1_700)
    expected = sorted(
        map(repr, await SHAPES[shape](af.Flow("here").source(ROWS, watermarks=TIMES)).collect())
    )
    flow = af.Flow("there", parallelism=2)
    stream = SHAPES[shape](
        flow.source(af.io.parquet(tmp_path / "events.parquet"), watermarks=TIMES)
    )
    assert sorted(map(repr, await stream.collect(workers=2))) == expected


@dataclass
class Event:
    ts: int
    user: int
    word: str | None
    value: float
    flag: bool


COLUMNAR = ["running count", "running sum", "stateless", "window", "sliding", "late", "reassigned"]
"""Shapes in which columns stay columns up to an aggregate."""


@pytest.mark.parametrize("shape", COLUMNAR)
async def test_records_of_a_type_give_what_rows_give(shape: str, tmp_path: Path) -> None:
    """From files of JSON lines and of CSV, in one process and over two: the records are of a
    class, and travel as columns of it.
    """
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    with (tmp_path / "events.csv").open("w") as file:
        writer = csv.writer(file)
        writer.writerow(ROWS[0])
        writer.writerows(row.values() for row in ROWS)
    expected = sorted(
        map(repr, await SHAPES[shape](af.Flow("rows").source(ROWS, watermarks=PATIENT)).collect())
    )
    for source in (
        af.io.jsonl(tmp_path / "events.jsonl", Event),
        af.io.csv(tmp_path / "events.csv", Event),
    ):
        stream = SHAPES[shape](af.Flow("typed", parallelism=2).source(source, watermarks=PATIENT))
        assert sorted(map(repr, await stream.collect())) == expected
        if shape in ("running count", "window"):
            assert sorted(map(repr, await stream.collect(workers=2))) == expected
        if shape != "stateless":
            assert "event time by split, columns" in stream.explain()


async def test_a_function_gets_records_of_the_type(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    source = af.io.jsonl(tmp_path / "events.jsonl", Event)
    flow = af.Flow("typed")
    events = flow.source(source, watermarks=TIMES)
    assert ", rows: for 'map', " in events.filter(e.flag).map(lambda event: event).explain(), (
        "rows are best made at once"
    )
    assert list(map(astuple, await events.filter(e.flag).collect())) == [
        tuple(row.values()) for row in ROWS if row["flag"]
    ]


@pytest.mark.parametrize("kind", ["arrow", "parquet", "jsonl", "jsonl of a type"])
async def test_a_stream_that_is_subscribed_to_has_whole_records(kind: str, tmp_path: Path) -> None:
    """Holds also where the flow itself reads few of their fields."""
    of_type = kind == "jsonl of a type"
    source = sources(tmp_path)["jsonl" if of_type else kind]
    flow = af.Flow("watched")
    read = flow.source(
        af.io.jsonl(tmp_path / "events.jsonl", Event) if of_type else source, watermarks=TIMES
    )
    kept = read.filter(e.user > 0)
    kept.filter(e.flag).select(key=e.user).key_by(e.key).count().sink(af.io.blackhole())
    async with flow.run(subscribe=[kept]) as job, job.subscribe(kept, buffer=COUNT) as rows:
        seen = [row async for row in rows]
    assert seen == [Event(**row) if of_type else row for row in ROWS if row["user"] > 0]


@pytest.mark.parametrize("kind", ["arrow", "parquet", "jsonl", "csv"])
async def test_a_stream_of_which_fields_are_left_out_is_not_subscribed_to_unawares(
    kind: str, tmp_path: Path
) -> None:
    """Streams of whole records can be: of a format that leaves out nothing, after a select, and the
    results of an aggregate.
    """
    (tmp_path / "events.csv").write_text("user,word\n1,a\n2,b\n")
    flow = af.Flow("watched")
    read = flow.source(
        af.io.csv(tmp_path / "events.csv") if kind == "csv" else sources(tmp_path)[kind],
        name="read",
    )
    kept = read.filter(~e.user.is_null(), name="kept")
    chosen = kept.select(key=e.user)
    counts = chosen.key_by(e.key).count()
    async with flow.run() as job:
        for stream, name in ((read, "read"), (kept, "kept")):
            if kind == "csv":
                job.subscribe(stream).close()
                continue
            with pytest.raises(
                af.GraphError,
                match=rf"\({name}\) comes as columns, and only what .* read: user\. .*subscribe=",
            ):
                job.subscribe(stream)
        job.subscribe(chosen).close()
        job.subscribe(counts).close()
        await job.cancel()


async def test_late_elements_that_came_as_columns_are_whole_or_refused() -> None:
    rows = [{"user": 1, "ts": ts, "more": ts} for ts in (1_000, 9_000, 2_000)]
    flow = af.Flow("late")
    read = flow.source(
        af.io.arrow(pa.Table.from_pylist(rows)),
        watermarks=af.WatermarkStrategy.monotonous_timestamps(timestamp=e.ts),
    )
    windows = read.key_by(e.user).window(af.tumbling("1s")).aggregate(af.count())
    async with flow.run(subscribe=[windows.late]) as job, job.subscribe(windows.late) as late:
        assert [row async for row in late] == [rows[2]]
    async with flow.run() as job:
        with pytest.raises(
            af.GraphError, match="only what the flow reads of it was read: ts, user"
        ):
            job.subscribe(windows.late)
        job.subscribe(windows).close()
        await job.cancel()


def test_a_batch_of_columns_reads_like_one_of_rows() -> None:
    from aioflow.columns.arrow import ArrowPages

    pages = ArrowPages()
    rows = pages.settle(pages.read(table()))
    batch = RecordBatch(rows, list(range(COUNT)))  # type: ignore[arg-type]
    assert list(batch.values) == ROWS
    assert list(batch.slice(10, 20).values) == ROWS[10:20]
    assert batch.values[7] == ROWS[7]
    assert batch.select([1, 3], [batch.values[1], batch.values[3]]).timestamps == [1, 3]


def explained(stream: Any) -> dict[str, str]:
    """Returns the explanation of each operator, by its name."""
    lines = [
        line.strip()
        for line in stream.explain().splitlines()
        if line.startswith("  ") and "<-" not in line
    ]
    return dict(line.split(": ", 1) for line in lines)


def test_explain_tells_what_runs_on_columns_and_why_not(tmp_path: Path) -> None:
    flow = af.Flow("explained", parallelism=2)
    source = flow.source(af.io.arrow(table()), name="in", watermarks=TIMES)
    chosen = source.filter(e.value > 0, name="chosen").select(
        user=e.user, value=e.value, name="fields"
    )
    counts = chosen.key_by(e.user).count(name="counts")
    windows = (
        chosen.key_by(e.user)
        .window(af.tumbling("2s"))
        .aggregate(af.agg(n=af.count(), s=af.sum(e.value)), name="windows")
    )
    said = explained(windows)
    assert said["in"].endswith("columns")
    assert said["chosen"] == "on columns"
    assert said["fields"] == "on columns, fused with the one before"
    assert said["windows"].endswith("on columns, keyed state")
    assert explained(counts)["counts"] == "on columns, keyed state"
    called = explained(chosen.map(lambda row: row, name="called").filter(e.user > 0, name="behind"))
    of_map = "map calls a function: select(<name>=af.col.<field>, ...) computes on columns"
    assert called["called"] == f"on rows: {of_map}, fused with the one before"
    assert called["behind"] == "on rows: the step before gives rows, fused with the one before"
    kept = (
        chosen.filter(lambda row: row["value"] > 1, name="kept")
        .select(user=e.user, name="few")
        .key_by(e.user)
        .count(name="counts")
    )
    of_filter = (
        "filter calls a function: an expression, as filter(af.col.<field> > 0), computes on columns"
    )
    assert explained(kept)["kept"] == f"on rows: {of_filter}, fused with the one before"
    assert (
        explained(kept)["few"] == "on rows: the step before gives rows, fused with the one before"
    )
    assert explained(kept)["counts"] == "on rows: the step before gives rows, keyed state"
    shuffled = chosen.shuffle().filter(e.value > 2, name="few").filter(e.value > 3, name="fewer")
    one_by_one = "the exchange deals records out one by one: rebalance() or rescale() keep columns"
    assert explained(shuffled)["few"] == f"on rows: {one_by_one}"
    assert (
        explained(shuffled)["fewer"]
        == "on rows: the step before gives rows, fused with the one before"
    )
    by_function = chosen.key_by(lambda row: row["user"]).count(name="counts")
    by_keys = (
        "the keys are given by a function: key_by(af.col.<field>), or another expression, keeps "
        "columns"
    )
    assert explained(by_function)["counts"] == f"on rows: {by_keys}, keyed state"
    tops = (
        chosen.key_by(e.user).window(af.tumbling("2s")).aggregate(af.top(1, e.value), name="tops")
    )
    assert "on rows" in explained(tops)["tops"]
    of_function = chosen.key_by(e.user).sum(lambda row: row["value"], name="sums")
    of_sum = "sum is of a function: sum(af.col.<field>), or of another expression, works on columns"
    assert explained(of_function)["sums"] == f"on rows: {of_sum}, keyed state"
    written = chosen.sink(af.io.parquet(tmp_path), name="out")
    plain = explained(flow.source([1], name="list").filter(e.x > 1, name="rows"))
    assert plain["rows"] == "on rows: the step before gives rows"
    assert written is chosen


def keyed_by_function(stream: Any) -> Any:
    return stream.key_by(lambda row: row["user"]).count(name="it")


REASONS: dict[str, tuple[Any, str]] = {
    "a lambda of map": (
        lambda s: s.map(lambda row: row, name="it"),
        "for 'it', map calls a function: select(",
    ),
    "a lambda of filter": (
        lambda s: s.filter(lambda row: True, name="it").key_by(e.user).count(),
        "for 'it', filter calls a function: an",
    ),
    "flat_map": (
        lambda s: s.flat_map(lambda row: [row], name="it"),
        "for 'it', flat_map gives any number of records: a union",
    ),
    "values": (
        lambda s: s.map(e.user, name="it"),
        "for 'it', map by an expression gives values, not records: select(",
    ),
    "keys": (
        keyed_by_function,
        "for 'it', the keys are given by a function: key_by(af.col.<field>)",
    ),
    "an aggregate": (
        lambda s: s.key_by(e.user).sum(len, name="it"),
        "for 'it', sum is of a function: sum(af.col.<field>)",
    ),
    "a list": (
        lambda s: s.key_by(e.user).aggregate(af.collect(e.word), name="it"),
        "for 'it', collect(col.word) works on Python values: ",
    ),
    "sessions": (
        lambda s: s.key_by(e.user).window(af.session("1s")).aggregate(af.count(), name="it"),
        "for 'it', sessions have no ",
    ),
    "the clock": (
        lambda s: (
            s.key_by(e.user)
            .window(af.tumbling("1s", time="processing"))
            .aggregate(af.count(), name="it")
        ),
        "for 'it', windows of processing time have no columnar form: those of event time",
    ),
    "a step behind": (
        lambda s: s.filter(e.flag).map(len, name="it"),
        "for 'it', map calls a function",
    ),
    "shuffle": (
        lambda s: s.shuffle().filter(e.flag, name="it").key_by(e.user).count(),
        "for 'it', the exchange deals records out one ",
    ),
    "nothing": (
        lambda s: s.filter(e.flag),
        "nothing puts columns to use: an aggregate, a window or a sink",
    ),
}


@pytest.mark.parametrize("shape", REASONS)
def test_explain_tells_which_step_makes_a_source_give_rows_and_what_to_write_instead(
    shape: str, tmp_path: Path
) -> None:
    build, reason = REASONS[shape]
    source = af.Flow("explained").source(af.io.jsonl(tmp_path), name="in", watermarks=TIMES)
    assert f"event time by split, rows: {reason}" in explained(build(source))["in"]


def test_explain_tells_what_about_a_source_is_in_the_way(tmp_path: Path) -> None:
    by_function: Any = af.WatermarkStrategy.bounded_out_of_orderness(
        "1s", timestamp=lambda row: row["ts"]
    )
    expected = [
        (
            af.io.jsonl(tmp_path, follow=True),
            TIMES,
            "rows: follow=True takes lines as they are written: without it, or",
        ),
        (
            af.io.jsonl(tmp_path, list),
            TIMES,
            "rows: jsonl has no columns for <class 'list'>: a dataclass, NamedTuple or Struct",
        ),
        (
            af.io.csv(tmp_path, encoding="latin-1"),
            TIMES,
            "rows: csv has no columns for these arguments: a header or columns=, UTF-8",
        ),
        (
            af.io.lines(tmp_path),
            TIMES,
            "rows: lines has no columns for texts without fields: jsonl and csv have them",
        ),
        (
            af.io.datagen(lambda i: {"ts": i}, count=1),
            TIMES,
            "rows: datagen calls a function: expressions by name",
        ),
        (
            ROWS,
            TIMES,
            "rows: its elements are Python values, and those of parquet, arrow, jsonl, csv",
        ),
        (
            af.io.jsonl(tmp_path),
            by_function,
            "rows: timestamp= is a function: an expression, as af.col.<field>, reads columns",
        ),
        (
            af.io.arrow(table()),
            by_function,
            "columns, of which rows are made for their times: timestamp= is a function",
        ),
    ]
    for source, times, reason in expected:
        counts = (
            af.Flow("explained")
            .source(source, name="in", watermarks=times)
            .key_by(e.user)
            .count(name="counts")
        )
        said = explained(counts)
        assert f", event time by split, {reason}" in said["in"]
        assert ("on columns" in said["counts"]) == reason.startswith("columns")
        if source is not ROWS and not reason.startswith("columns"):
            assert said["counts"] == "on rows: the step before gives rows, keyed state"


def test_explain_advises_no_columns_where_the_source_has_none() -> None:
    lengths = af.Flow("plain").source(["a", "b"], name="in").map(len, name="lengths")
    assert explained(lengths) == {
        "in": "source, bounded, no event time, rows",
        "lengths": "on rows: the source gives rows",
    }


COMPOSITE = (e.user % 7, e.word, e.flag)
"""A key of three parts, one of which is None in some records."""


def key_of_parts(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["user"] % 7, row["word"], row["flag"]


@pytest.mark.parametrize("parallelism", [1, 3])
@pytest.mark.parametrize("state", ["heap", "rocksdb"])
async def test_a_key_of_several_parts_is_the_tuple_that_a_function_gives(
    parallelism: int, state: str
) -> None:
    def totals(source: Any, key: Any) -> Any:
        flow = af.Flow("parts", parallelism=parallelism)
        window = flow.source(source, watermarks=TIMES).key_by(key).window(af.tumbling("1s"))
        return window.aggregate(af.agg(n=af.count(), total=af.sum(e.value)))

    on_columns = totals(af.io.arrow(table()), COMPOSITE)
    assert "on columns" in on_columns.explain().splitlines()[-1]
    expected = await totals(ROWS, key_of_parts).collect(state=state)
    assert any(result.key[1] is None for result in expected)
    for stream in (on_columns, totals(ROWS, COMPOSITE)):
        assert sorted(map(repr, await stream.collect(state=state))) == sorted(map(repr, expected))


async def test_the_parts_of_a_key_can_be_read_on_columns() -> None:
    counts = af.Flow("parts").source(af.io.arrow(table())).key_by((e.word, e.flag)).count()
    rows = await counts.select(word=e[0][0], flag=e[0][1], n=e[1]).collect()
    last = {(row["word"], row["flag"]): row["n"] for row in rows}
    assert last == Counter((row["word"], row["flag"]) for row in ROWS)


async def test_a_key_of_one_part_groups_the_records_without_a_value() -> None:
    for source in (ROWS, af.io.arrow(table())):
        counts = await af.Flow("one").source(source).key_by((e.word,)).count().collect()
        assert dict(counts)[None,] == COUNT // 50


async def test_both_sides_of_a_join_and_of_connected_streams_take_keys_of_several_parts() -> None:
    flow = af.Flow("two")
    left, right = flow.source(ROWS, watermarks=TIMES), flow.source(ROWS, watermarks=TIMES)
    keys = (e.user, e.word)
    windowed = left.join(right).where(keys).equal_to(keys).window(af.tumbling("1s")).pairs()
    keyed = left.connect(right).key_by(keys, keys).process(Sides)
    pairs, sides = await flow.collect(windowed, keyed)
    assert pairs and all(one.left["word"] == one.right["word"] for one in pairs)
    assert set(sides) == {((row["user"], row["word"]), n) for row in ROWS for n in (1, 2)}


class Sides(af.KeyedCoProcessFunction[Any, Any, Any, Any]):
    """Emits the key of each element, with the number of its side."""

    def process_element1(self, value: Any, ctx: af.ProcessContext) -> list[Any]:
        return [(ctx.current_key, 1)]

    def process_element2(self, value: Any, ctx: af.ProcessContext) -> list[Any]:
        return [(ctx.current_key, 2)]


async def test_a_part_that_is_nan_or_a_list_is_refused_at_its_record() -> None:
    wrong = [{"a": 1, "b": 2.0}, {"a": 1, "b": float("nan")}]
    for source in (wrong, af.io.arrow(pa.Table.from_pylist(wrong))):
        with pytest.raises(af.TypeNotSupported, match="NaN") as caught:
            await af.Flow("nan").source(source).key_by((e.a, e.b)).count().collect()
        assert "at record {'a': 1, 'b': nan}" in caught.value.__notes__[0]
    lists = af.Flow("lists").source([{"a": 1, "b": [2]}]).key_by((e.a, e.b)).count()
    with pytest.raises(af.TypeNotSupported, match="tuple"):
        await lists.collect()
