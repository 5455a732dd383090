"""Joins of windows on columns in flows: over restores and rescaling, in processes, beside rows,
and what `explain()` says of them.
"""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import pyarrow as pa
import pytest

import aioflow as af
from tests.columns.test_aggregates import ROWS, Held
from tests.columns.test_flows import explained

e = af.col
TIMES = af.WatermarkStrategy.bounded_out_of_orderness("2s", timestamp=e.ts)
"""Nothing is late: which side is ahead does not matter."""


def joined(stream: Any, window: Any, other: Any = None) -> Any:
    left, right = stream.filter(e.n < 2), (stream if other is None else other).filter(e.n >= 2)
    return left.join(right).where(e.k).equal_to(e.k).window(window)


def paired(stream: Any, window: Any, other: Any = None) -> Any:
    pairs = joined(stream, window, other).pairs(uid="join")
    return pairs.filter(af.right.x > 0).select(
        k=af.left.k, a=af.left.ts, b=e.right["ts"], x=af.left.x + af.right.x
    )


def in_python(size: int, slide: int) -> list[dict[str, Any]]:
    """The same by two loops."""
    found = []
    for start in range(-size, max(row["ts"] for row in ROWS) + size, slide):
        inside = [row for row in ROWS if start <= row["ts"] < start + size]
        rights: dict[int, list[Any]] = {}
        for row in inside:
            if row["n"] >= 2 and row["x"] > 0:
                rights.setdefault(row["k"], []).append(row)
        for left in inside:
            if left["n"] < 2:
                found += [
                    {"k": left["k"], "a": left["ts"], "b": r["ts"], "x": left["x"] + r["x"]}
                    for r in rights.get(left["k"], ())
                ]
    return found


def arrow() -> Any:
    return af.io.arrow(pa.Table.from_pylist(ROWS))


@pytest.mark.parametrize("kinds", ["rows", "columns", "left rows", "right rows"])
@pytest.mark.parametrize(("size", "slide"), [(4, 4), (4, 1)])
async def test_a_join_gives_the_same_pairs_of_either_and_of_both_kinds(
    kinds: str, size: int, slide: int
) -> None:
    flow = af.Flow("kinds", parallelism=2)
    window = af.tumbling(f"{size}s") if size == slide else af.sliding(f"{size}s", f"{slide}s")
    sources = [ROWS if kinds in ("rows", side) else arrow() for side in ("left rows", "right rows")]
    left, right = (flow.source(source, watermarks=TIMES) for source in sources)
    found = await paired(left, window, right).collect()
    assert sorted(map(repr, found)) == sorted(map(repr, in_python(size * 1_000, slide * 1_000)))
    assert len(found) > 1_000


@pytest.mark.parametrize("state", ["heap", "rocksdb"])
@pytest.mark.parametrize(("size", "slide"), [(4, 4), (4, 1)])
@pytest.mark.parametrize(
    "kinds",
    [
        ("columns", "columns", "columns"),
        ("rows", "columns", "rows"),
        ("columns", "rows", "columns"),
    ],
)
async def test_a_join_goes_on_over_savepoints_and_rescaling(
    kinds: Any, size: int, slide: int, state: str, tmp_path: Any
) -> None:
    window = af.tumbling(f"{size}s") if size == slide else af.sliding(f"{size}s", f"{slide}s")
    found: list[Any] = []
    store = f"file://{tmp_path}"
    for kind, until, parallelism in zip(kinds, (2_500, 4_200, len(ROWS)), (1, 3, 2), strict=True):
        given = asyncio.Event()
        flow = af.Flow("part", parallelism=parallelism)
        stream = flow.source(Held(kind, until, given), uid="in", watermarks=TIMES)
        paired(stream, window).sink(found.append, uid="out")
        if until == len(ROWS):
            await flow.execute(checkpoints=store, every="1h", state=state)
        else:
            async with flow.run(checkpoints=store, every="1h", state=state) as job:
                await asyncio.wait_for(given.wait(), 60)
                await job.stop()
    assert sorted(map(repr, found)) == sorted(map(repr, in_python(size * 1_000, slide * 1_000)))


async def test_a_function_goes_on_with_the_savepoint_of_columns(tmp_path: Any) -> None:
    """Columns in state become rows when an `apply` replaces `pairs`."""
    found: list[Any] = []
    store = f"file://{tmp_path}"
    given = asyncio.Event()
    window = af.tumbling("4s")
    flow = af.Flow("part")
    pairs = joined(
        flow.source(Held("columns", 3_000, given), uid="in", watermarks=TIMES), window
    ).pairs(uid="join")
    pairs.select(a=af.left.ts, b=af.right.ts).sink(found.append, uid="out")
    async with flow.run(checkpoints=store, every="1h") as job:
        await asyncio.wait_for(given.wait(), 60)
        await job.stop()
    flow = af.Flow("part")
    stream = flow.source(Held("columns", len(ROWS), given), uid="in", watermarks=TIMES)
    made = joined(stream, window).apply(
        lambda left, right: {"a": left["ts"], "b": right["ts"]}, uid="join"
    )
    made.sink(found.append, uid="out")
    await flow.execute(checkpoints=store, every="1h")

    whole = joined(af.Flow("whole").source(ROWS, watermarks=TIMES), window)
    expected = await whole.apply(lambda left, right: {"a": left["ts"], "b": right["ts"]}).collect()
    assert sorted(map(repr, found)) == sorted(map(repr, expected))


async def test_pairs_cross_processes_as_columns() -> None:
    flow = af.Flow("processes", parallelism=2)
    pairs = joined(flow.source(arrow(), watermarks=TIMES), af.tumbling("4s")).pairs()
    found = (
        await pairs.rebalance()
        .filter(af.right.x > 0)
        .key_by(af.left.k)
        .sum(af.right.x)
        .collect(workers=2)
    )
    alone = joined(af.Flow("alone").source(ROWS, watermarks=TIMES), af.tumbling("4s")).pairs()
    assert len(found) == len(await alone.filter(af.right.x > 0).collect())


async def test_ints_beyond_64_bits_are_joined_as_rows() -> None:
    rows = [{"ts": i, "k": 2**70 + i % 3 if i % 7 == 0 else i % 3, "v": i} for i in range(200)]
    flow = af.Flow("big")
    columns = flow.source(
        af.io.datagen({"ts": e.index, "k": e.index % 3, "v": e.index}, count=200), watermarks=TIMES
    )
    pairs = (
        columns.join(flow.source(rows, watermarks=TIMES))
        .where(e.k)
        .equal_to(e.k)
        .window(af.tumbling("50ms"))
        .pairs()
    )
    found = await pairs.select(a=af.left.v, b=af.right.v).collect()
    expected = [
        {"a": a, "b": row["v"]}
        for a in range(200)
        for row in rows
        if a // 50 == row["ts"] // 50 and a % 3 == row["k"]
    ]
    assert sorted(map(repr, found)) == sorted(map(repr, expected))


async def test_a_select_of_the_join_is_that_of_its_pairs() -> None:
    table = pa.table({"ts": [1, 2, 3], "k": ["a", "b", "a"]})
    stream = af.Flow("select").source(af.io.arrow(table), watermarks=TIMES)
    window = stream.join(stream).where(e.k).equal_to(e.k).window(af.tumbling("1s"))
    assert await window.select(a=af.left.ts, name=af.right("k")).filter(
        e.name == "b"
    ).collect() == [{"a": 2, "name": "b"}]
    (pair,) = await window.pairs().filter(af.left["k"] == "b").collect()
    assert pair == af.Pair({"ts": 2, "k": "b"}, {"ts": 2, "k": "b"})


async def test_a_select_of_a_join_names_the_join() -> None:
    """The join has the state; an expression of that name is still a column."""
    tag = af.OutputTag[af.Failed[Any]]("bad")

    def window() -> Any:
        stream = af.Flow("named", parallelism=2).source(
            [1], watermarks=af.WatermarkStrategy.monotonous_timestamps(timestamp=abs)
        )
        return stream.join(stream).where(abs).equal_to(abs).window(af.tumbling("1s"))

    made = window().select(a=af.left.v, uid="met", name="meeting", parallelism=1, on_error=tag)
    met, chosen = list(made.flow.graph.nodes.values())[-2:]
    assert [(node.kind, node.uid, node.name, node.parallelism) for node in (met, chosen)] == [
        ("join", "met", "meeting", 1),
        ("map", None, "select", 1),
    ]
    made = window().select(uid=af.left.v, name=af.right.v, parallelism=af.right.w)
    met, chosen = list(made.flow.graph.nodes.values())[-2:]
    assert [(node.kind, node.uid, node.name, node.parallelism) for node in (met, chosen)] == [
        ("join", None, "join(Pair)", None),
        ("select", None, "select", None),
    ]
    twice = window().pairs(uid="met").select(a=af.left.v, uid="chosen")
    assert [node.uid for node in list(twice.flow.graph.nodes.values())[-2:]] == ["met", "chosen"]


@pytest.mark.parametrize(
    ("join", "reason"),
    [
        (
            lambda j: j(af.tumbling("4s")).apply(lambda a, b: a, name="join"),
            "apply calls a function: pairs(), or select(",
        ),
        (
            lambda j: j(af.session("4s")).pairs(name="join"),
            "only tumbling and sliding windows of event time join on columns",
        ),
        (
            lambda j: j(af.sliding("1s", "4s")).pairs(name="join"),
            "there is time between its windows",
        ),
        (
            lambda j: j(af.tumbling("4s"), lateness="1s").pairs(name="join"),
            "late elements may fire a window again",
        ),
        (
            lambda j: j(af.tumbling("4s"), trigger=af.on_count(3)).pairs(name="join"),
            "it has a trigger of its own",
        ),
        (
            lambda j: j(af.tumbling("4s"), evictor=af.keep_last(3)).pairs(name="join"),
            "an evictor needs the elements",
        ),
    ],
)
def test_explain_tells_why_a_join_makes_rows(join: Any, reason: str) -> None:
    stream = af.Flow("why").source(arrow(), watermarks=TIMES)
    said = explained(join(stream.join(stream).where(e.k).equal_to(e.k).window))
    assert f"on rows: {reason}" in said["join"]


def test_explain_tells_that_a_join_runs_on_columns() -> None:
    flow = af.Flow("how")
    stream = flow.source(arrow(), watermarks=TIMES)
    said = explained(paired(stream, af.tumbling("4s")))
    assert said["join(Pair)"] == "per window, tumbling(4s), on columns, keyed state"
    assert said["filter"] == "on columns"
    by_function = (
        stream.join(stream)
        .where(lambda row: row["k"])
        .equal_to(e.k)
        .window(af.tumbling("4s"))
        .pairs(name="join")
    )
    assert "on rows: the keys are given by a function" in explained(by_function)["join"]
    beside_rows = (
        stream.join(flow.source(ROWS, watermarks=TIMES))
        .where(e.k)
        .equal_to(e.k)
        .window(af.tumbling("4s"))
        .pairs(name="join")
    )
    assert "on rows: the step before gives rows" in explained(beside_rows)["join"]


def test_a_jsonl_source_gives_columns_to_a_join(tmp_path: Any) -> None:
    stream = af.Flow("lines").source(af.io.jsonl(tmp_path), name="in", watermarks=TIMES)
    assert explained(paired(stream, af.tumbling("4s")))["in"].endswith("columns")
    made = joined(stream, af.tumbling("4s")).apply(lambda a, b: a, name="it")
    assert "rows: for 'it', apply calls a function: pairs()" in explained(made)["in"]


def test_left_and_right_spell_the_field_of_a_side() -> None:
    for spelled in (af.left.price, af.left("price"), af.left["price"]):
        assert repr(spelled) == repr(e.left["price"])
    assert repr(af.right[0]) == repr(e.right[0])
    assert (repr(af.left), repr(af.right)) == ("left", "right")
    assert pickle.loads(pickle.dumps((af.left, af.right))) == (af.left, af.right)
    with pytest.raises(TypeError, match=r"left cannot be iterated: name a field, left\.price"):
        list(af.left)
    with pytest.raises(AttributeError):
        af.left.__wrapped__  # Introspection asks for it.
