"""Flows as jobs of a real Spark: answers, sinks, errors, and what comes back to the program."""

from __future__ import annotations

import asyncio
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import aioflow as af
from aioflow.expressions.rows import compile_predicate
from aioflow.graph.job_graph import build_job_graph
from aioflow.spark.bridge.session import SparkBridge
from aioflow.spark.runner import rdds
from aioflow.spark.runner.blocks import BlockRow
from aioflow.spark.runner.rdds import StageRdds, narrowed, predicate_of
from aioflow.spark.runner.translate import plan_flow
from tests.spark.answers import ANSWERS, Event

pytestmark = pytest.mark.timeout(
    900
)  # The first job of a Java process on a busy machine takes minutes.

EVENTS = [Event("abcd"[i * 7 % 4], i * 3 + (i * 37 % 11) * 10, i % 10) for i in range(300)]


@pytest.fixture
def on(spark: SparkBridge) -> af.Spark:
    return af.Spark(spark.master, bridge=spark)


def counted(rows: tuple[list[Any], ...]) -> list[Counter[str]]:
    return [Counter(map(repr, stream)) for stream in rows]


GENERATED = st.lists(
    st.builds(Event, st.sampled_from("abcd"), st.integers(0, 300), st.integers(0, 9)), max_size=60
)


@settings(max_examples=1, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(events=GENERATED)
@example(events=EVENTS)
def test_answers_are_the_same_in_one_process_on_two_workers_and_on_spark(
    on: af.Spark, events: list[Event]
) -> None:
    """All programs run as one flow: a job of Spark costs at least a second.

    `test_runner_answers` has each alone, on more data.
    """
    flow = af.Flow("answers")
    streams = {name: program(flow, events) for name, program in ANSWERS.items()}
    every = [stream for some in streams.values() for stream in some]

    async def answers(**where: Any) -> dict[str, list[Counter[str]]]:
        rows = iter(counted(await flow.collect(*every, **where)))
        return {name: [next(rows) for _ in some] for name, some in streams.items()}

    async def everywhere() -> list[dict[str, list[Counter[str]]]]:
        return [await answers(), await answers(workers=2), await answers(on=on)]

    here, on_workers, there = asyncio.run(everywhere())
    assert on_workers == here
    assert there == here


async def test_a_stream_is_read_row_by_row(on: af.Spark) -> None:
    flow = af.Flow("rows", parallelism=2)
    squares = (
        flow.source(range(5000))
        .key_by(lambda value: value % 10)
        .process(lambda value, ctx: [value * value])
    )

    rows = [row async for row in squares.execute_and_collect(on=on)]

    assert sorted(rows) == [value * value for value in range(5000)]


async def test_much_output_comes_partition_by_partition(
    on: af.Spark, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However small Spark could make it: the program gets it as it is."""
    monkeypatch.setattr(rdds, "TAKEN_AT_ONCE_BYTES", 1 << 20)
    monkeypatch.setattr(rdds, "ROWS_AT_A_TIME", 1)
    taken: list[int] = []
    some = StageRdds.take_some

    def take_some(rdds: StageRdds) -> list[BlockRow]:
        rows = some(rdds)
        taken.append(len(rows))
        return rows

    monkeypatch.setattr(StageRdds, "take_some", take_some)
    flow = af.Flow("much", parallelism=3)
    numbered = (
        flow.source(range(3000))
        .key_by(lambda value: value % 7)
        .process(lambda value, ctx: [("x" * 1000, value)])
    )

    assert sorted(await numbered.collect(on=on)) == [("x" * 1000, value) for value in range(3000)]
    assert max(taken) == 1 and sum(taken) >= 3 and taken[-1] == 0  # A block a partition at least.


async def test_however_much_comes_out_it_is_one_job_of_spark_and_another_to_take_it(
    on: af.Spark, spark: SparkBridge
) -> None:
    session = await spark.session()
    scheduler = session.sparkContext._jsc.sc().dagScheduler()
    flow = af.Flow("many")
    streams = [
        flow.source(range(10), name=f"source {number}").key_by(lambda value: value % 3).count()
        for number in range(3)
    ]

    before = await spark.call(scheduler.numTotalJobs)
    there = await flow.collect(*streams, on=on)

    assert await spark.call(scheduler.numTotalJobs) - before == 2
    assert [len(rows) for rows in there] == [10] * 3


async def test_files_are_committed_when_the_job_is_through(on: af.Spark, tmp_path: Path) -> None:
    flow = af.Flow("files", parallelism=2)
    numbers = flow.source(range(1000)).rebalance().map(str)
    numbers.sink(af.io.lines(tmp_path / "plain"))
    numbers.key_by(len).process(lambda text, ctx: [{"text": text}]).sink(
        af.io.jsonl(tmp_path / "keyed")
    )

    result = await flow.execute(on=on)

    assert result.status == "FINISHED"
    for name in ("plain", "keyed"):
        assert all(not path.name.startswith(".") for path in (tmp_path / name).iterdir())
    lines = [line for path in (tmp_path / "plain").iterdir() for line in path.read_text().split()]
    assert sorted(map(int, lines)) == list(range(1000))
    assert len(await af.Flow("read").source(af.io.jsonl(tmp_path / "keyed")).collect()) == 1000


async def test_a_job_that_fails_shows_nothing(on: af.Spark, tmp_path: Path) -> None:
    def fails(text: str) -> str:
        if text == "999":
            raise ValueError("the last one")
        return text

    flow = af.Flow("files")
    numbers = flow.source(range(1000)).map(str)
    numbers.sink(af.io.lines(tmp_path / "plain"))
    numbers.key_by(len).process(lambda text, ctx: [fails(text)]).sink(
        af.io.lines(tmp_path / "keyed")
    )

    with pytest.raises(ValueError, match="the last one") as caught:
        await flow.execute(on=on)

    assert any("process" in note for note in caught.value.__notes__)
    assert not list(tmp_path.rglob("part-*"))


async def test_rows_of_a_table_are_there_once(on: af.Spark, tmp_path: Path) -> None:
    database = tmp_path / "rows.db"
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("CREATE TABLE numbers (n INTEGER PRIMARY KEY)")
    for start in (0, 100):  # Twice the same flow by name: the second run is another job.
        flow = af.Flow("table")
        flow.source(range(start, start + 100)).map(lambda n: {"n": n}).sink(
            af.io.sqlite(database, "numbers")
        )
        await flow.execute(on=on)

    with closing(sqlite3.connect(database)) as connection:
        assert connection.execute("SELECT count(*), min(n), max(n) FROM numbers").fetchone() == (
            200,
            0,
            199,
        )


async def test_several_files_are_read_split_by_split(on: af.Spark, tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text("".join(f"{number} {line}\n" for line in range(50)))
    flow = af.Flow("splits", parallelism=2)
    counts = (
        flow.source(af.io.lines(tmp_path))
        .flat_map(str.split)
        .key_by(str)
        .window(af.global_window(at_end=True))
        .aggregate(af.count())
    )

    assert sorted(await counts.collect(on=on)) == sorted(await counts.collect())


async def test_printed_output_appears_here(
    on: af.Spark, capsys: pytest.CaptureFixture[str]
) -> None:
    flow = af.Flow("prints", parallelism=2)
    flow.source(["b", "a", "b"]).key_by(str).count().print("> ")

    await flow.execute(on=on)

    assert sorted(capsys.readouterr().out.split("\n")) == [
        "",
        "> ('a', 1)",
        "> ('b', 1)",
        "> ('b', 2)",
    ]


async def test_a_function_as_sink_is_called_here_and_its_error_is_the_jobs(on: af.Spark) -> None:
    taken: list[int] = []
    flow = af.Flow("here")
    flow.source(range(10)).map(lambda value: value * 2).sink(taken.append)

    await flow.execute(on=on)
    assert taken == list(range(0, 20, 2))

    async def refuses(value: int) -> None:
        raise LookupError("not this one")

    flow = af.Flow("refused")
    flow.source(range(10)).sink(refuses)
    with pytest.raises(LookupError, match="not this one"):
        await flow.execute(on=on)


async def test_an_error_of_a_class_that_the_program_made_comes_with_its_record(
    on: af.Spark,
) -> None:
    class Spoiled(Exception):
        pass

    def taste(value: int) -> int:
        if value == 7:
            raise Spoiled(value)
        return value

    flow = af.Flow("spoiled")
    with pytest.raises(af.AioflowError, match="Spoiled") as caught:
        await flow.source(range(10)).map(taste).collect(on=on)
    assert any("taste" in note and "at record 7" in note for note in caught.value.__notes__)


async def test_a_cancelled_job_ends_and_leaves_the_session_to_others(
    on: af.Spark, spark: SparkBridge, tmp_path: Path
) -> None:
    begun = tmp_path / "begun"

    def stays(value: int) -> int:
        import time

        begun.touch()
        while True:
            time.sleep(0.05)

    flow = af.Flow("endless")
    stream = flow.source([1]).map(stays)
    stream.sink(af.io.blackhole())
    async with asyncio.timeout(120):
        async with flow.run(on=on) as job:
            while not begun.exists():
                await asyncio.sleep(0.02)
            await job.cancel()
            assert job.status == "CANCELED"
    assert await flow.source([1, 2]).map(abs).collect(on=on) == [1, 2]


async def test_the_handle_refuses_what_spark_cannot_tell(on: af.Spark) -> None:
    flow = af.Flow("handle")
    counts = flow.source([1, 2]).key_by(abs).count()
    counts.sink(af.io.blackhole())
    async with flow.run(on=on) as job:
        with pytest.raises(af.GraphError, match="nothing can be seen before it is through"):
            job.subscribe(counts)
        with pytest.raises(af.GraphError, match="cannot be read: job 'handle' runs on Spark"):
            job.state(counts)
        with pytest.raises(af.CheckpointError, match="where there is no savepoint"):
            await job.savepoint()
        assert (await job.wait()).status == "FINISHED"


ROWS = """
SELECT id AS n, CAST(id AS double) / 4 AS q, IF(id % 5 = 0, NULL, CONCAT('k', id % 3)) AS k,
       id % 2 = 0 AS even
FROM range(0, 200, 1, 3)
"""


async def test_a_dataframe_is_read_where_spark_has_it(on: af.Spark, spark: SparkBridge) -> None:
    flow = af.Flow("frame", parallelism=2)
    rows = flow.source(af.io.spark(spark, ROWS)).filter((af.col.n >= 20) & ~af.col.k.is_null())
    counts = (
        rows.key_by(af.col.k)
        .window(af.global_window(at_end=True))
        .aggregate(af.agg(n=af.count(), q=af.sum(af.col.q)))
    )

    assert sorted(await counts.collect(on=on)) == sorted(await counts.collect())


async def test_a_dataframe_brings_event_time_along_and_needs_its_own_session(
    on: af.Spark, spark: SparkBridge
) -> None:
    strategy = af.WatermarkStrategy.monotonous_timestamps(timestamp=af.col.n)
    flow = af.Flow("frame in order")
    rows = flow.source(
        af.io.spark(spark, "SELECT id AS n FROM range(0, 100, 1, 1)"), watermarks=strategy
    )
    odd = (
        rows.filter(af.col.n > 30)
        .key_by(lambda row: row["n"] % 2)
        .window(af.tumbling("16ms"))
        .aggregate(af.collect(af.col.n))
    )

    assert sorted(await odd.collect(on=on)) == sorted(await odd.collect())
    async with SparkBridge(spark.master) as other:
        with pytest.raises(af.GraphError, match="belongs to a session on"):
            await odd.collect(on=af.Spark(spark.master, bridge=other))


async def test_columns_that_a_select_does_not_read_stay_in_spark(
    on: af.Spark, spark: SparkBridge
) -> None:
    flow = af.Flow("columns")
    rows = (
        flow.source(af.io.spark(spark, ROWS))
        .filter(af.col.n >= 190)
        .select(k=af.col.k, twice=af.col.n * 2)
    )
    rows.sink(af.io.blackhole())
    stage = plan_flow(build_job_graph(flow.graph, apart=True)).stages[0]
    session = await spark.session()

    assert await spark.call(lambda: narrowed(session.sql(ROWS), stage).columns) == ["n", "k"]
    assert sorted(map(repr, await rows.collect(on=on))) == sorted(map(repr, await rows.collect()))


async def test_columns_whose_names_differ_in_case_alone_are_refused_with_the_remedy(
    on: af.Spark, spark: SparkBridge
) -> None:
    rows = af.Flow("case").source(
        af.io.spark(spark, "SELECT id AS n, -id AS N FROM range(0, 10, 1, 1)")
    )

    with pytest.raises(
        af.GraphError,
        match=r"has columns 'n' and 'N', which Spark takes for one: give one of them another name",
    ):
        await rows.filter(af.col.n > 3).collect(on=on)


PREDICATES = [
    (af.col.n >= 20) & (af.col.n != 33), af.lit(7) < af.col.n, af.col.n.is_in([3, 500]),
    af.col.k.is_in(["k1", "x"]), af.col.k == "k1", af.col.k < "k2",
    (af.col.k != "k1") | (af.col.n == 10), af.col.even,
    af.col.even == False,  # noqa: E712
    af.col.k.is_null(), af.col.q > 1.5, af.col.q <= 3, af.col.nan < 1.0, af.col.nan > 1.0,
    af.col.nan != 2.0, af.col.nan == 2.0, (af.col.q > 1) & (af.col.k.str.len() == 2),
    (af.col.k.str.len() == 2) & (af.col.q > 1), af.col.n > 2**70, af.col.k == 1, af.col.n == 3.5,
    ~(af.col.nan > 1.0), af.col.q == 2**60,
]  # fmt: skip


async def test_filters_in_spark_never_drop_what_a_filter_keeps(spark: SparkBridge) -> None:
    session = await spark.session()
    query = f"SELECT *, IF(n % 3 = 0, double('nan'), q) AS nan FROM ({ROWS})"

    def narrowed() -> tuple[list[dict[str, Any]], list[tuple[list[int], bool]]]:
        frame = session.sql(query)
        types = {field.name: field.dataType.simpleString() for field in frame.schema.fields}
        kept = []
        for expression in PREDICATES:
            predicate, whole = predicate_of(expression, types)
            kept.append(
                (
                    [
                        row.n
                        for row in (
                            frame if predicate is None else frame.where(predicate)
                        ).collect()
                    ],
                    whole,
                )
            )
        return [row.asDict() for row in frame.collect()], kept

    rows, kept = await spark.call(narrowed)

    translated = 0
    for expression, (numbers, whole) in zip(PREDICATES, kept, strict=True):
        condition = compile_predicate(expression)
        wanted = {row["n"] for row in rows if condition(row)}
        assert wanted <= set(numbers), expression
        translated += whole and len(numbers) < len(rows)
    assert translated >= 14, "most of them are columns of Spark"


class TakesMail(af.MapFunction[int, int]):
    def open(self, ctx: af.RuntimeContext) -> None:
        self.mailbox = ctx.mailbox

    def map(self, value: int) -> int:
        return value


async def test_mailbox_of_a_function_is_refused_by_name(on: af.Spark) -> None:
    flow = af.Flow("mailbox")
    mapped = flow.source([1, 2]).map(TakesMail(), name="takes mail")
    with pytest.raises(af.GraphError, match=r"operator 'takes mail': ctx\.mailbox .* on Spark"):
        await mapped.collect(on=on)
