"""A missing or misplaced part of a flow is an error or a warning that names the remedy."""

from __future__ import annotations

import asyncio
import copy
import enum
import gc
import logging
import re
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

import aioflow as af
from aioflow.api import runner


def timed() -> af.WatermarkStrategy[int]:
    return af.WatermarkStrategy.monotonous_timestamps(timestamp=lambda value: value)


def numbers(**options: Any) -> Any:
    """A stream; Any, because what follows is what a checker would refuse."""
    return af.Flow("remedies").source([1, 2], name="numbers", **options)


def keyed() -> Any:
    return numbers(watermarks=timed()).key_by(abs)


def windowed() -> Any:
    return keyed().window(af.tumbling("1s"))


def interval() -> Any:
    left = keyed()
    return left.interval_join(left, "0s", "1s")


def joined() -> Any:
    left = numbers(watermarks=timed())
    return left.join(left)


def grouped() -> Any:
    left = numbers(watermarks=timed())
    return left.co_group(left)


def connected() -> Any:
    left = numbers()
    return left.connect(left)


NO_STREAM = "it is no stream yet; end it with "
STEPS = "where(key).equal_to(key).window(assigner)"


@pytest.mark.parametrize(
    ("of", "method", "remedy"),
    [
        (
            windowed,
            "map",
            f"{NO_STREAM}reduce(fn), aggregate(agg) or process(fn), whose result has map",
        ),
        (
            windowed,
            "collect",
            f"{NO_STREAM}reduce(fn), aggregate(agg) or process(fn), whose result has collect",
        ),
        (windowed, "count", "write aggregate(af.count())"),
        (windowed, "sum", "write aggregate(af.sum(fn))"),
        (
            windowed,
            "late",
            "write window(...).aggregate(...).late: late elements are a side output of the result",
        ),
        (
            interval,
            "apply",
            "write process(fn), with fn(left, right, ctx), which gives any number of rows",
        ),
        (interval, "sink", f"{NO_STREAM}process(fn), whose result has sink"),
        (joined, "process", "write apply(fn), with fn(left, right)"),
        (
            joined,
            "collect",
            f"{NO_STREAM}{STEPS} and .apply(fn), .pairs() or .select(name=af.left.field), whose "
            "result has collect",
        ),
        (lambda: joined().where(abs), "filter", f"{NO_STREAM}{STEPS} and .apply(fn), .pairs() or "),
        (grouped, "collect", f"{NO_STREAM}{STEPS}.apply(fn), whose result has collect"),
        (grouped, "process", "write apply(fn), with fn(key, lefts, rights)"),
        (
            connected,
            "filter",
            f"{NO_STREAM}map(f1, f2), flat_map(f1, f2) or process(fn), whose result has filter",
        ),
        (
            lambda: numbers().broadcast(af.MapStateDescriptor("rules")),
            "process",
            f"{NO_STREAM}elements.connect(it).process(",
        ),
        (
            numbers,
            "late",
            "late elements are of a window; take it directly of what its reduce, aggregate or "
            "process gave",
        ),
    ],
)
def test_a_step_that_is_left_out_is_named(of: Callable[[], Any], method: str, remedy: str) -> None:
    with pytest.raises(
        AttributeError, match=rf"^'\w+' object has no attribute '{method}': {re.escape(remedy)}"
    ):
        getattr(of(), method)


@pytest.mark.parametrize(
    ("end", "said"),
    [
        (lambda join: join.apply(max), r"apply\(\.\.\.\)"),
        (lambda join: join.pairs(), r"pairs\(\)"),
        (lambda join: join.select(x=af.left.x), r"select\(\.\.\.\)"),
    ],
)
def test_a_join_without_a_window_names_the_end_that_was_written(
    end: Callable[[Any], Any], said: str
) -> None:
    with pytest.raises(
        af.GraphError,
        match=rf"^join: where\(\.\.\.\)\.equal_to\(\.\.\.\)\.window\(\.\.\.\) come before {said}$",
    ):
        end(joined().where(abs).equal_to(abs))


def test_error_for_a_misspelt_step_names_the_nearest_and_copying_finds_nothing() -> None:
    with pytest.raises(
        AttributeError,
        match=r"'WindowedStream' object has no attribute 'agregate'; did you mean 'aggregate'\?$",
    ):
        windowed().agregate
    with pytest.raises(
        AttributeError, match=r"'WindowedStream' object has no attribute '__array__'$"
    ):
        windowed().__array__


@pytest.mark.parametrize(
    ("target", "remedy"),
    [
        ("out.txt", "write sink(af.io.lines('out.txt'))"),
        (Path("out.csv.gz"), "write sink(af.io.csv('out.csv.gz'))"),
        ("out.tsv", r"""write sink(af.io.csv('out.tsv', delimiter="\t"))"""),
        ("out.parquet", "write sink(af.io.parquet('out.parquet'))"),
        (
            [],
            "to gather the elements use `await stream.collect()`, or give the method that takes "
            "one: rows.append",
        ),
        (asyncio.Queue(), "write sink(af.io.queue(queue))"),
        (af.io.datagen(abs, count=1), "it can only be read: it stands in flow.source(...)"),
    ],
)
def test_object_that_is_no_sink_is_refused_with_the_way_to_write_there(
    target: Any, remedy: str
) -> None:
    with pytest.raises(
        af.GraphError,
        match=(
            r"^sink\(\) takes a Sink or a function of one element, "
            rf"got .*; .*{re.escape(remedy)}$"
        ),
    ):
        numbers().sink(target)


def test_error_for_a_table_says_what_reads_its_rows() -> None:
    import pandas
    import polars

    with pytest.raises(
        af.GraphError,
        match=r"LazyFrame of polars.*: to read its rows write flow\.source\(df\.collect\(\)\)$",
    ):
        af.Flow("tables").source(polars.LazyFrame({"a": [1]}))
    # Before polars 1.3 a DataFrame had no interface of Arrow, and iterates over its columns.
    early = type("DataFrame", (list,), {"__module__": "polars.dataframe.frame"})
    with pytest.raises(af.GraphError, match=r"write flow\.source\(df\.to_arrow\(\)\)"):
        af.Flow("tables").source(early([[1], [2]]))
    assert af.Flow("tables").source(pandas.Series([1, 2])).upstreams, (
        "its elements are what it iterates over"
    )


@pytest.mark.parametrize(
    ("name", "reader"), [("a.jsonl", "af.io.jsonl('a.jsonl')"), ("a.log", "af.io.lines('a.log')")]
)
def test_error_for_the_name_of_a_file_says_what_reads_it(name: str, reader: str) -> None:
    with pytest.raises(
        af.GraphError,
        match=rf"to read a file write {re.escape(reader)}, for a single element write",
    ):
        af.Flow("files").source(name)


def forget(made: list[Any]) -> None:
    """Clears `made` and collects garbage, so that its objects are freed on any Python."""
    made.clear()
    gc.collect()


async def test_a_run_that_is_not_entered_by_async_with_says_how() -> None:
    flow = af.Flow("entered")
    flow.source([1]).sink(af.io.blackhole())
    with pytest.raises(
        TypeError,
        match=(
            r"flow\.run\(\) of 'entered' is entered by `async with flow\.run\(\) as job`, "
            r".*af\.run\(flow\)"
        ),
    ):
        with flow.run():  # type: ignore[attr-defined,unused-ignore]  # It is what is refused.
            raise AssertionError("nothing was entered")
    waited: Any = flow.run()
    with pytest.raises(TypeError, match=r"is entered, not awaited: .*`await flow\.execute\(\)`"):
        await waited
    with pytest.warns(
        RuntimeWarning, match=r"flow\.run\(\) of 'entered' was never entered, so nothing ran"
    ):
        forget([flow.run()])
    run = flow.run()
    assert repr(run) == "<run of flow 'entered', not entered: async with flow.run() as job>"
    async with run as job:
        assert (await job.wait()).status == "FINISHED"
    assert repr(run) == "<run of flow 'entered', entered>"


@pytest.mark.parametrize("name", ["input", "wait", "status", "monitor_url", "inptu"])
def test_run_that_was_not_entered_is_reported_by_its_job(name: str) -> None:
    """Told once: no warning that nothing ran comes behind it."""
    run: Any = numbers().flow.run()
    with pytest.raises(
        AttributeError,
        match=(
            rf"^flow\.run\(\) of 'remedies' has no attribute '{name}': .*`async with "
            r"flow\.run\(\) as job"
        ),
    ):
        getattr(run, name)
    assert not hasattr(run, "__array__")


@pytest.mark.parametrize(
    ("of", "remedy"),
    [
        (
            numbers,
            "`await stream.collect()` for its elements, `await flow.execute()` to run the flow",
        ),
        (lambda: numbers().sink(af.io.blackhole()), "`await flow.execute()` to run the flow"),
        (keyed, "`await stream.collect()`"),
        (
            windowed,
            "WindowedStream is awaited: it is no stream yet; end it with reduce(fn), "
            "aggregate(agg) or process(fn), and collect()",
        ),
        (joined, f"JoinedStreams is awaited: it is no stream yet; end it with {STEPS}"),
        (lambda: numbers().flow, "flow 'remedies' is not awaited itself: `await flow.execute()`"),
        (lambda: numbers().execute_and_collect(), "all at once: `await stream.collect()`"),
    ],
)
async def test_missing_await_names_the_remedy(of: Callable[[], Any], remedy: str) -> None:
    with pytest.raises(TypeError, match=re.escape(remedy)):
        await of()


async def test_awaiting_the_handle_of_a_job_is_refused() -> None:
    flow = af.Flow("handles")
    pushed = flow.source(af.io.push())
    counts = pushed.key_by(lambda x: x).count(uid="counts")
    async with flow.run() as job:
        made: list[tuple[Any, str]] = [
            (job.input(pushed), "await job.input(stream).put(value)"),
            (job.state(counts), "await job.state(stream).get(key)"),
            (job.subscribe(pushed), "async with job.subscribe(stream) as rows"),
        ]
        for handle, remedy in made:
            with pytest.raises(TypeError, match=re.escape(remedy)):
                await handle


@pytest.mark.parametrize("half", [windowed, interval, joined, grouped, connected])
async def test_half_a_stream_is_not_iterated_over(half: Callable[[], Any]) -> None:
    for use in (lambda: list(half()), lambda: anext(aiter(half()))):
        with pytest.raises(
            TypeError, match=r"\w+ is iterated over: it is no stream yet; end it with "
        ):
            use()


@pytest.mark.parametrize(
    ("method", "remedy"),
    [
        ("map", "it is of a stream; flow.source(...).map"),
        ("window", "it is of a stream; flow.source(...).window"),
        (
            "input",
            "it is of a job; `async with flow.run() as job:`, and job.input within the block",
        ),
        ("excute", "; did you mean 'execute'?"),
    ],
)
def test_a_flow_says_whose_method_was_meant(method: str, remedy: str) -> None:
    with pytest.raises(AttributeError, match=re.escape(remedy)):
        getattr(af.Flow("whose"), method)
    with pytest.raises(AttributeError, match=r"^'Flow' object has no attribute '_rows'$"):
        af.Flow("whose")._rows  # type: ignore[attr-defined,unused-ignore]
    assert copy.copy(af.Flow("whose")).name == "whose"


async def test_a_flow_is_entered_by_its_run() -> None:
    flow: Any = af.Flow("entered")
    with pytest.raises(
        TypeError, match=r"flow 'entered' is not entered itself: `async with flow\.run\(\) as job`"
    ):
        async with flow:
            raise AssertionError("nothing was entered")


@pytest.mark.parametrize("method", ["run", "execute"])
def test_a_stream_is_run_by_its_flow(method: str) -> None:
    with pytest.raises(
        AttributeError, match=rf"it is of the flow, flow\.{method}\(\).*`await stream\.collect\(\)`"
    ):
        getattr(numbers(), method)


@pytest.mark.parametrize("given", [lambda: numbers().flow.execute(), numbers, lambda: None])
def test_object_that_is_no_flow_is_not_run(given: Callable[[], Any]) -> None:
    with pytest.raises(
        TypeError,
        match=r"^af\.run\(\) takes a flow and runs it by itself, as in af\.run\(flow\); got ",
    ):
        af.run(given())


@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        ([af.col.user, af.col.item], "expressions is a tuple: key_by((col.user, col.item))"),
        (
            ("user", "item"),
            "fields is a tuple that a function gives: key_by(lambda e: (e.user, e.item)), or e[",
        ),
        (["user", "unit price", 3], "key_by(lambda e: (e.user, e['unit price'], e[3]))"),
        ((af.col.user, "n"), "key_by(lambda e: (e.user, e.n))"),
    ],
)
def test_error_for_a_key_of_several_fields_names_the_function(given: Any, remedy: str) -> None:
    with pytest.raises(
        af.GraphError,
        match=rf"^key_by needs a function or an expression, got .*{re.escape(remedy)}",
    ):
        numbers().key_by(given)


@pytest.mark.parametrize("given", [5, b"five", ""])
def test_a_uid_or_a_name_that_is_no_text_is_refused(given: Any) -> None:
    with pytest.raises(
        af.GraphError, match=r"operator 'map\(str\)': uid must be a text that is not empty, got "
    ):
        numbers().map(str, uid=given)
    with pytest.raises(af.GraphError, match=r"uid must be a text that is not empty, got "):
        af.Flow("named").source([1], uid=given)
    with pytest.raises(af.GraphError, match=r": name must be a text that is not empty, got "):
        numbers().map(str, name=given)


def later(value: int, ctx: af.ProcessContext) -> Iterator[int]:
    yield ctx.timestamp + value  # type: ignore[operator,unused-ignore]


async def awaiting(value: int, ctx: af.ProcessContext) -> list[int]:
    return [ctx.timestamp + value]  # type: ignore[operator,unused-ignore]


def unrelated(value: int, ctx: af.ProcessContext) -> Iterator[int]:
    yield None + value  # type: ignore[operator]


@pytest.mark.parametrize("function", [later, awaiting])
@pytest.mark.parametrize("by_key", [False, True])
async def test_error_for_a_time_that_is_none_says_that_there_is_no_strategy(
    function: Any, by_key: bool
) -> None:
    with pytest.raises(TypeError) as caught:
        await (numbers().key_by(abs) if by_key else numbers()).process(function).collect()
    said = "\n".join(caught.value.__notes__)
    assert (
        "ctx.timestamp is None where no watermark strategy stands before the operator: give the "
        "source watermarks=" in said
    )


async def test_another_none_is_not_blamed_on_time() -> None:
    with pytest.raises(TypeError) as caught:
        await numbers().process(unrelated).collect()
    assert "ctx.timestamp" not in "\n".join(caught.value.__notes__)


def test_a_union_says_which_of_its_streams_has_no_event_time() -> None:
    flow = af.Flow("union")
    both = flow.source([1], name="timed", watermarks=timed()).union(
        flow.source([2], name="plain"), flow.source([3], name="bare")
    )
    told = (
        r"of the streams in the union no watermark strategy stands before 'plain' and 'bare', "
        r"which would hold event time back: give the"
    )
    with pytest.raises(af.GraphError, match=told):
        both.key_by(abs).window(af.tumbling("1s"))
    with pytest.raises(af.GraphError, match=f"interval_join of .*{told}"):
        both.key_by(abs).interval_join(both.key_by(abs), "0s", "1s")


@pytest.mark.parametrize(
    ("left_is_timed", "joins", "said"),
    [
        (
            True,
            "join",
            "tumbling(1000 ms) after the right of the join, KeyedStream(numbers) needs event "
            "time, but no watermark strategy",
        ),
        (
            False,
            "join",
            "tumbling(1000 ms) after the left of the join, KeyedStream(numbers) needs event time, "
            "but no watermark strategy",
        ),
        (
            True,
            "co_group",
            "tumbling(1000 ms) after the right of the co_group, KeyedStream(numbers) needs event "
            "time",
        ),
        (
            True,
            "interval",
            "interval_join of KeyedStream(numbers) on the right needs event time, but no "
            "watermark strategy",
        ),
        (
            False,
            "interval",
            "interval_join of KeyedStream(numbers) on the left needs event time, but no watermark "
            "strategy",
        ),
        (
            True,
            "half_keyed",
            "interval_join needs keyed streams, got DataStream(numbers) on the right: put "
            "key_by(...)",
        ),
    ],
)
def test_a_join_names_the_side_that_lacks_event_time_or_keys(
    left_is_timed: bool, joins: str, said: str
) -> None:
    flow = af.Flow("sides")
    timed_one: Any = flow.source([1], name="numbers", watermarks=timed())
    other: Any = flow.source([1], name="numbers")
    left, right = (timed_one, other) if left_is_timed else (other, timed_one)
    with pytest.raises(af.GraphError, match=f"^{re.escape(said)}"):
        if joins in ("interval", "half_keyed"):
            left.key_by(abs).interval_join(
                right if joins == "half_keyed" else right.key_by(abs), "0s", "1s"
            )
        else:
            getattr(left, joins)(right).where(abs).equal_to(abs).window(af.tumbling("1s"))


def meeting(left: Any, right: Any, method: str) -> Any:
    """Both sides use the element itself as key."""
    match method:
        case "interval_join":
            return (
                left.key_by(itself)
                .interval_join(right.key_by(itself), "0s", "1s")
                .process(lambda left, right, ctx: [left])
            )
        case "connect":
            return left.connect(right).key_by(itself, itself).map(str, str)
    keyed_both = (
        getattr(left, method)(right)
        .where(itself)
        .equal_to(itself)
        .window(af.tumbling("1s", time="processing"))
    )
    return keyed_both.apply(lambda *sides: sides)


def itself(value: Any) -> Any:
    return value


@pytest.mark.parametrize(
    ("method", "where", "equal_to"),
    [
        ("join", "where of the join", "equal_to of the join"),
        ("co_group", "where of the co_group", "equal_to of the co_group"),
        ("connect", "key_by of the left", "key_by of the right"),
    ],
)
async def test_a_wrong_key_of_two_streams_names_its_side(
    method: str, where: str, equal_to: str
) -> None:
    for values, said in (([None], [1]), where), (([1], [None]), equal_to):
        flow = af.Flow("sides")
        with pytest.raises(af.TypeNotSupported, match=r"^None cannot be a key") as caught:
            await meeting(*(flow.source(one, name="numbers") for one in values), method).collect()
        assert caught.value.__notes__ == [
            f"aioflow: in {said} after operator 'numbers', subtask 1/1, at record None"
        ]


def of_rows(flow: af.Flow, keys: list[Any]) -> Any:
    return flow.source(
        [{"k": key, "at": at} for at, key in enumerate(keys)], watermarks=at_column()
    )


def of_columns(flow: af.Flow, keys: list[Any]) -> Any:
    import pyarrow as pa

    return flow.source(
        af.io.arrow(pa.table({"k": keys, "at": list(range(len(keys)))})), watermarks=at_column()
    )


def at_column() -> Any:
    return af.WatermarkStrategy.monotonous_timestamps(timestamp=af.col.at)


def joins(left: Any, right: Any, method: str) -> Any:
    if method == "interval_join":
        return (
            left.key_by(af.col.k)
            .interval_join(right.key_by(af.col.k), "0s", "1s")
            .process(lambda left, right, ctx: [left])
        )
    window = (
        getattr(left, method)(right).where(af.col.k).equal_to(af.col.k).window(af.tumbling("1s"))
    )
    return window.pairs() if method == "join" else window.apply(lambda key, lefts, rights: [key])


async def unmet(keyed_both: Any, caplog: pytest.LogCaptureFixture) -> list[str]:
    with caplog.at_level(logging.WARNING, "aioflow.advice.runtime"):
        await keyed_both.collect()
    return caplog.messages


UNLIKE: list[tuple[list[Any], list[Any], str]] = [
    (
        ["1", "2"],
        [1, 2],
        "the first key of the left, '1', is text, and that of the right, 1, is a number; make "
        "them alike, ",
    ),
    ([2.5], [b"2"], "of the left, 2.5, is a number, and that of the right, b'2', is bytes"),
]


@pytest.mark.parametrize("method", ["join", "co_group", "interval_join"])
@pytest.mark.parametrize("kind", [of_rows, of_columns])
@pytest.mark.parametrize(("lefts", "rights", "told"), UNLIKE)
async def test_keys_of_a_join_that_can_never_be_equal_are_warned_of_once(
    lefts: list[Any],
    rights: list[Any],
    told: str,
    kind: Callable[..., Any],
    method: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    flow = af.Flow("unlike")
    (warned,) = await unmet(joins(kind(flow, lefts), kind(flow, rights), method), caplog)
    assert warned.startswith("operator '") and told in warned


@pytest.mark.parametrize(
    ("left", "right", "told"),
    [
        ((1, "a"), ("1", "a"), "is a number, and that of the right, ('1', 'a'), is text"),
        ((1, "a"), (1, "a", 0), "is a tuple of 2, and that of the right, (1, 'a', 0), is one of 3"),
        (("a",), "a", "is a tuple, and that of the right, 'a', is text"),
    ],
)
async def test_keys_of_several_values_are_compared_one_by_one(
    left: Any, right: Any, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    flow = af.Flow("unlike")
    (warned,) = await unmet(joins(of_rows(flow, [left]), of_rows(flow, [right]), "join"), caplog)
    assert told in warned


class Size(enum.IntEnum):
    SMALL = 1


@pytest.mark.parametrize(
    ("lefts", "rights"),
    [
        ([1], [2.0]),
        ([True, 5], [Decimal("1.5")]),
        (["a", 1], ["b"]),
        ([Size.SMALL], ["a"]),
        ([(1, Size.SMALL)], [(2, "a")]),
        ([af.Pair(1, 2)], [(3, 4)]),
        (["a"], []),
    ],
)
async def test_keys_that_may_be_equal_are_no_news(
    lefts: list[Any], rights: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    flow = af.Flow("alike")
    assert await unmet(joins(of_rows(flow, lefts), of_rows(flow, rights), "join"), caplog) == []


def test_a_wrong_key_function_of_two_streams_names_its_side() -> None:
    with pytest.raises(
        af.GraphError,
        match=(
            r"^where of the join needs a function or an expression, got str: 'user'; "
            r".*af\.col\('user'\)"
        ),
    ):
        joined().where("user")
    with pytest.raises(
        af.GraphError,
        match=(
            r"^equal_to of the co_group needs a function .*: equal_to\(lambda e: \(e\.user, "
            r"e\.item\)\)"
        ),
    ):
        grouped().where(itself).equal_to(["user", "item"])
    with pytest.raises(
        af.GraphError, match=r"^key_by of the right needs a function or an expression, got int: 5"
    ):
        connected().key_by(itself, 5)


def test_windows_that_leave_gaps_are_warned_of_because_size_comes_first(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        af.sliding("1h", "5m")
        af.sliding("5m", "5m")
        keyed().count_window(5, 2)
        assert not caplog.records
        af.sliding("5m", "1h")
        keyed().count_window(2, 5)
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith("sliding: size 5m is less than slide 1h") and first.endswith(
        "the size comes first: sliding('1h', '5m')"
    )
    assert second.startswith(
        "count_window: size 2 is less than slide 5, so that 3 of each 5"
    ) and second.endswith("count_window(5, 2)")


async def test_a_path_is_no_pattern_and_says_so_when_it_looks_like_one(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text("one\n")
    with pytest.raises(
        FileNotFoundError,
        match=rf"there is no such file \(a Path is no pattern: write '{tmp_path}/\*\.log'\)",
    ):
        await af.Flow("files").source(af.io.lines(tmp_path / "*.log")).collect()
    assert await af.Flow("files").source(af.io.lines(str(tmp_path / "*.log"))).collect() == [
        "one"
    ], "the remedy that it names"
    (tmp_path / "[b].log").write_text("two\n")
    assert await af.Flow("files").source(af.io.lines(tmp_path / "[b].log")).collect() == ["two"]


@pytest.mark.parametrize("options", [{"follow": True, "every": "10ms"}, {"discover_every": "10ms"}])
async def test_a_path_that_is_waited_for_is_reported_to_be_no_pattern(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, options: dict[str, Any]
) -> None:
    flow = af.Flow("waiting")
    lines = flow.source(af.io.lines(tmp_path / "*.log", **options))
    async with asyncio.timeout(60), flow.run() as job, job.subscribe(lines) as rows:
        while not caplog.records:
            await asyncio.sleep(0.01)
        (tmp_path / "*.log").write_text("it is a name after all\n")
        assert await anext(rows) == "it is a name after all"
        await job.cancel()
    (told,) = [
        record.getMessage() for record in caplog.records if "waited for" in record.getMessage()
    ]
    assert (
        f"there is no '{tmp_path}/*.log' yet (a Path is no pattern: write '{tmp_path}/*.log'); it "
        "is waited for" in told
    )


async def test_rows_that_come_while_a_flow_runs_are_read_asynchronously() -> None:
    flow = af.Flow("rows")
    pushed = flow.source(af.io.push())
    rows: Any = af.Flow("gathered").source([1]).execute_and_collect()
    with pytest.raises(
        TypeError,
        match=(
            r"`async for x in stream\.execute_and_collect\(\)`; all at once: `await "
            r"stream\.collect\(\)`"
        ),
    ):
        list(rows)
    with pytest.raises(
        TypeError, match=r"entered by `async with stream\.execute_and_collect\(\) as rows`"
    ):
        with rows:
            raise AssertionError("nothing was entered")
    async with flow.run() as job:
        seen: Any = job.subscribe(pushed)
        with pytest.raises(
            TypeError, match=r"`async for row in rows`, or one by `await anext\(rows\)`"
        ):
            list(seen)
        with pytest.raises(
            TypeError, match=r"entered by `async with job\.subscribe\(stream\) as rows`"
        ):
            with seen:
                raise AssertionError("nothing was entered")


def test_a_duration_is_no_window() -> None:
    with pytest.raises(
        af.GraphError,
        match=r"got '1m'; windows one after the other are window\(af\.tumbling\('1m'\)\)$",
    ):
        keyed().window("1m")


@pytest.mark.parametrize("workers", [0, 1])
async def test_a_select_has_a_way_out_for_what_fails(workers: int) -> None:
    """`on_error=` is of the operator where it is a tag, and a column where it is an expression."""
    bad = af.OutputTag[af.Failed[dict[str, str]]]("bad")
    flow = af.Flow("casts")
    rows = flow.source([{"a": "1"}, {"a": "x"}])
    made = rows.select(n=af.col.a.cast(int), on_error=bad)
    good, failed = await flow.collect(made, made.side(bad), workers=workers)
    assert good == [{"n": 1}]
    assert [(one.value, one.error_type, one.operator) for one in failed] == [
        ({"a": "x"}, "ValueError", "select")
    ]
    assert await rows.select(on_error=af.col.a).collect() == [{"on_error": "1"}, {"on_error": "x"}]


def test_write_only_connector_is_no_source() -> None:
    with pytest.raises(
        af.GraphError,
        match=(
            r"^flow\.source got stdout\(\), which can only be written: it stands in "
            r"\.sink\(\.\.\.\)$"
        ),
    ):
        af.Flow("written").source(af.io.stdout())


@pytest.mark.parametrize(
    ("method", "given", "told"),
    [
        (
            "get_state",
            "n",
            r"takes a ValueStateDescriptor, got str: 'n'; write "
            r"get_state\(af\.ValueStateDescriptor\('n', \.\.\.\)\)$",
        ),
        (
            "get_map_state",
            af.ValueStateDescriptor("n"),
            r"takes a MapStateDescriptor, got .*; write get_state\(\.\.\.\), which takes it$",
        ),
        (
            "get_reducing_state",
            None,
            r"got NoneType: None; write get_reducing_state\(af\.ReducingStateDescriptor\('name', "
            r"\.\.\.\)\)$",
        ),
    ],
)
async def test_state_of_another_kind_than_asked_for_is_refused(
    method: str, given: Any, told: str
) -> None:
    class Asking(af.KeyedProcessFunction[int, int, int]):
        def open(self, ctx: af.RuntimeContext) -> None:
            getattr(ctx, method)(given)

    with pytest.raises(af.StateError) as caught:
        await numbers().key_by(abs).process(Asking, name="asks").collect()
    assert re.search(told, str(caught.value)), caught.value
    assert str(caught.value).startswith(f"operator 'asks': {method}() takes")


async def test_a_json_document_over_many_lines_is_distinguished_from_lines_of_json(
    tmp_path: Path,
) -> None:
    (tmp_path / "a.json").write_text('[\n{"a": 1},\n{"a": 2}\n]\n')
    with pytest.raises(
        af.MalformedInput,
        match=(
            r"line 1: .*; each line is to hold one JSON value; a file that is one document over "
            r"many"
        ),
    ):
        await af.Flow("documents").source(af.io.jsonl(tmp_path / "a.json")).collect()


async def test_a_table_that_does_not_exist_is_named_with_its_file(tmp_path: Path) -> None:
    (tmp_path / "empty.db").touch()
    with pytest.raises(
        af.GraphError,
        match=(
            rf"SQLite file {tmp_path}/empty\.db has no table 'sales': create it before the job "
            r"starts"
        ),
    ):
        await af.Flow("tables").source(af.io.sqlite(tmp_path / "empty.db", "sales")).collect()


@pytest.mark.parametrize(
    ("method", "function"),
    [
        ("map", lambda _value: af.col.cents + 1),
        ("filter", lambda _value: af.col.cents > 1),
        ("sink", lambda _value: af.col.cents),
    ],
)
async def test_error_for_a_function_that_gives_an_expression_says_so_at_its_first_result(
    method: str, function: Callable[[Any], Any]
) -> None:
    stream = numbers()
    made = getattr(stream, method)(function)
    with pytest.raises(
        TypeError,
        match=(
            rf"the function of {method} returned the expression col\.cents.* instead of a value: "
            r"pass the"
        ),
    ):
        await (stream.flow.execute() if method == "sink" else made.collect())


@pytest.mark.parametrize("given", [None, "2", -1, True])
async def test_error_for_workers_that_are_no_number_says_that_none_is_0(given: Any) -> None:
    with pytest.raises(
        ValueError,
        match=(
            r"^workers must be a number of processes, got "
            rf"{given!r}: without .* it is workers=0$"
        ),
    ):
        await numbers().collect(workers=given)


def loose() -> af.Flow:
    """Four ends: a sink, an unread stream, a stream whose side output alone is read, and an unread
    reader of that.
    """
    flow = af.Flow("loose")
    source = flow.source([1, 2], name="numbers")
    source.sink(af.io.blackhole())
    source.map(str, name="texts")
    source.process(sided, name="sided").side(af.OutputTag("odd")).filter(bool, name="odd ones")
    return flow


def sided(value: int, ctx: Any) -> Iterator[int]:
    ctx.output(af.OutputTag("odd"), value)
    yield value


LOOSE = (
    "flow 'loose': nothing takes what 'texts' and what 'odd ones' gives: end it with .sink(...), "
    "or .sink(af.io.blackhole()) where only"
)


@pytest.mark.parametrize("run", [lambda: asyncio.run(loose().execute()), lambda: af.run(loose())])
def test_streams_without_a_sink_give_a_warning_where_no_program_can_subscribe(
    run: Callable[[], Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        runner, "new_event_loop", asyncio.new_event_loop
    )  # A uvloop leaves descriptors of its signals behind.
    with caplog.at_level(logging.WARNING, "aioflow.api"):
        run()
    (warned,) = caplog.messages
    assert warned.startswith(LOOSE)


async def test_streams_without_a_sink_give_no_warning_with_a_handle_or_if_collected(
    caplog: pytest.LogCaptureFixture,
) -> None:
    flow = loose()
    with caplog.at_level(logging.WARNING, "aioflow.api"):
        async with flow.run() as job:
            await job.wait()
        await flow.source([3]).map(str).collect()
    assert not caplog.messages


@pytest.mark.parametrize(
    ("rows", "given"), [([{"n": 1}], ()), ([{"n": "1"}], (lambda row: row["n"],))]
)
@pytest.mark.parametrize("windows", [False, True])
async def test_value_that_is_no_number_is_told_what_sum_needs(
    rows: list[dict[str, Any]], given: tuple[Any, ...], windows: bool
) -> None:
    flow = af.Flow("sums", parallelism=2)
    strategy = af.WatermarkStrategy.monotonous_timestamps(timestamp=lambda row: 0)
    stream: Any = flow.source(rows, watermarks=strategy).key_by(lambda row: 0)
    sums = (
        stream.window(af.tumbling("1s")).aggregate(af.agg(n=af.sum(*given)))
        if windows
        else stream.sum(*given)
    )
    with pytest.raises(TypeError) as caught:
        await sums.collect()
    notes = "\n".join(caught.value.__notes__)
    assert "give it a function that returns a number, as in sum(lambda row: row.price)" in notes
    assert "aioflow: in operator" in notes


@pytest.mark.parametrize("method", ["map", "sink"])
def test_resource_as_a_default_is_told_to_be_used(method: str) -> None:
    """Given to a function, the declaration itself would only fail at its first use."""

    @af.resource
    def client() -> Iterator[str]:
        yield "open"

    def call(value: int, http: Any = client) -> None:
        http.get(value)

    with pytest.raises(af.GraphError, match=r"client' itself.*write http=af.use\(...\)"):
        getattr(numbers(), method)(call)
