"""Mistakes are found where they are written, and the message says what to do."""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import make_dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

import aioflow as af


class Counting(af.KeyedProcessFunction[int, int, int]):
    """Any function that wants keys."""


def numbers() -> Any:
    """A stream without keys; Any, because what follows is what a checker would refuse."""
    return af.Flow("mistakes").source([1, 2], name="numbers")


@pytest.mark.parametrize(
    "method", ["window", "count_window", "count", "sum", "reduce", "aggregate", "interval_join"]
)
def test_keyed_operations_on_an_unkeyed_stream_say_so(method: str) -> None:
    with pytest.raises(
        AttributeError, match=rf"^'DataStream' object has no attribute '{method}': it needs keys"
    ):
        getattr(numbers(), method)


def test_unknown_attribute_of_a_stream_is_a_plain_attribute_error() -> None:
    for name in ("to_the_moon", "_running", "__array__", "_mapp"):
        with pytest.raises(
            AttributeError, match=rf"^'DataStream' object has no attribute '{name}'$"
        ):
            getattr(numbers(), name)
        assert not hasattr(numbers(), name)
    assert isinstance(copy.copy(numbers()), af.DataStream)


def test_error_for_a_misspelt_method_names_the_nearest_once() -> None:
    keyed = numbers().key_by(int)
    for stream, name, near in (
        (numbers(), "mapp", "map"),
        (numbers(), "windw", "window"),
        (keyed, "agregate", "aggregate"),
    ):
        assert not hasattr(stream, name)
        with pytest.raises(
            AttributeError, match=rf"has no attribute '{name}'; did you mean '{near}'\?$"
        ) as caught:
            getattr(stream, name)
        assert caught.value.obj is None, (
            "or Python says it too, behind it, in the traceback of an uncaught error"
        )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"concurrency": 2}, "concurrency= needs an async function or blocking=True"),
        (
            {"concurrency": 2, "timeout": "1s"},
            "concurrency=, timeout= need an async function or blocking=True",
        ),
    ],
)
def test_options_of_what_waits_are_refused_where_nothing_waits(
    options: dict[str, Any], said: str
) -> None:
    with pytest.raises(af.GraphError, match=f"^map: {said}; this one runs inline$"):
        numbers().map(str, **options)


@pytest.mark.parametrize("function", [Counting, Counting()])
def test_a_keyed_process_function_is_refused_on_a_stream_without_keys(function: Any) -> None:
    with pytest.raises(
        af.GraphError,
        match=(
            r"Counting is a KeyedProcessFunction, and DataStream\(numbers\) has no keys: put "
            r"key_by"
        ),
    ):
        numbers().process(function)
    numbers().key_by(int).process(function)


@pytest.mark.parametrize(
    "run",
    [
        lambda flow, pushed, other: pushed.map(str).collect(),
        lambda flow, pushed, other: flow.collect(other, pushed),
        lambda flow, pushed, other: flow.execute(),
        lambda flow, pushed, other: anext(aiter(pushed.execute_and_collect())),
    ],
)
async def test_flow_with_pushed_input_is_not_run_without_a_handle(
    run: Callable[[Any, Any, Any], Any],
) -> None:
    flow = af.Flow("pushed")
    pushed, other = flow.source(af.io.push(), name="hits"), flow.source([1, 2])
    with pytest.raises(
        af.GraphError,
        match=r"would never end: its source 'hits' is af\.io\.push\(\).* flow\.run\(\).*job\.input",
    ):
        await asyncio.wait_for(run(flow, pushed, other), 60)
    assert await other.collect() == [1, 2], "a part without it runs"


def test_a_flow_that_is_pushed_into_is_not_run_alone() -> None:
    flow = af.Flow("pushed")
    flow.source(af.io.push(), name="hits").sink(af.io.blackhole())
    with pytest.raises(
        af.GraphError,
        match=(
            r"^af\.run\(\) of flow 'pushed' would never end: its "
            r"source 'hits' is af\.io\.push\(\)"
        ),
    ):
        af.run(flow)


async def test_a_signaling_nan_as_key_is_refused_like_any_nan() -> None:
    flow = af.Flow("keys", parallelism=2)
    counts = flow.source([Decimal("sNaN")], name="prices").key_by(lambda x: x).count()
    with pytest.raises(
        af.AioflowError,
        match=r"decimal\.Decimal cannot be a key: it is NaN.*filter it out or replace it",
    ):
        await counts.collect()


async def test_a_coroutine_is_no_result_of_a_plain_function() -> None:
    """Fails with the first element; that the coroutine is closed is told by the absence of a
    warning.
    """

    async def later(x: int) -> int:
        return x

    for add in (
        lambda s: s.map(lambda x: later(x), name="lookup"),
        lambda s: s.sink(lambda x: later(x), name="lookup"),
    ):
        flow = af.Flow("mistakes")
        add(flow.source([1, 2])).sink(af.io.blackhole())
        with pytest.raises(
            TypeError,
            match=(
                r"^operator 'lookup': the function of (map|sink) "
                r"returned coroutine, .*`async def`"
            ),
        ):
            await flow.execute()
    good = af.Flow("mistakes").source([1, 2]).map(functools.partial(later))
    assert await good.collect() == [1, 2], "the remedy that it names"


@pytest.mark.parametrize("function", [lambda x: [x], lambda a, b, c: [a], str.upper, 7])
@pytest.mark.parametrize("keyed", [False, True])
def test_process_tells_what_function_it_needs(function: Any, keyed: bool) -> None:
    stream = numbers().key_by(int) if keyed else numbers()
    with pytest.raises(af.GraphError, match=r"^process needs a function of \(value, ctx\), got "):
        stream.process(function)


@af.resource
def something() -> Any:
    yield 1


@pytest.mark.parametrize(
    "function", [lambda x, ctx: [x], lambda *both: [], lambda x, ctx, s=af.use(something): [s]]
)
def test_process_takes_what_can_be_called_with_two(function: Any) -> None:
    assert numbers().process(function).upstreams


@pytest.mark.parametrize(
    "build, named",
    [
        (lambda: numbers().map(str, parallelism=0), "map"),
        (lambda: numbers().map(str, parallelism=0, name="to text"), "to text"),
        (lambda: af.Flow("mistakes").source([1], parallelism=0), "source"),
        (lambda: af.Flow("mistakes").source([1], parallelism=0, name="ones"), "ones"),
    ],
)
def test_a_parallelism_below_one_names_the_operator(build: Callable[[], Any], named: str) -> None:
    with pytest.raises(af.GraphError, match=f"^{named}: parallelism must be at least 1, got 0$"):
        build()


class Printing:
    """A sink of its own, as short as one can be."""

    name = "printing"

    def writer(self, ctx: Any) -> Any:
        raise AssertionError("nothing is written where nothing runs")

    def committer(self) -> None:
        return None


def test_the_class_of_a_sink_is_refused_where_its_instance_belongs() -> None:
    with pytest.raises(
        af.GraphError,
        match=r"got the class Printing, expected an instance: add the parentheses, Printing\(",
    ):
        numbers().sink(Printing)
    numbers().sink(Printing())


class Called:
    """Does what a function would do, with its dependency as an attribute."""

    def __init__(self, rows: list[Any] | None = None) -> None:
        self.rows = [] if rows is None else rows

    def __call__(self, value: Any) -> None:
        self.rows.append(value)


async def test_the_class_of_what_is_called_is_refused_where_its_instance_belongs() -> None:
    with pytest.raises(
        af.GraphError,
        match=r"got the class Called, expected an instance: add the parentheses, Called\(",
    ):
        numbers().sink(Called)
    rows: list[Any] = []
    stream = numbers()
    stream.sink(Called(rows))
    await stream.flow.execute()
    assert rows == [1, 2]


@pytest.mark.parametrize(
    "use",
    [
        lambda s: s.side("bad"),
        lambda s: s.map(str, on_error="bad"),
        lambda s: s.filter(str, on_error="bad"),
    ],
)
def test_error_for_a_name_where_a_tag_belongs_names_the_tag(use: Callable[[Any], Any]) -> None:
    with pytest.raises(
        af.GraphError, match=r"takes a tag, got str: 'bad'; expected af\.OutputTag\('bad'\)"
    ):
        use(numbers())


async def test_error_for_a_number_where_a_restart_policy_belongs_names_the_policy() -> None:
    with pytest.raises(
        TypeError, match=r"restart= takes a policy, like af\.fixed_delay\(.*got int: 3"
    ):
        await numbers().collect(restart=3)


@pytest.mark.parametrize("option", ["parallelism", "max_parallelism"])
def test_a_flow_whose_parallelism_is_no_number_is_refused(option: str) -> None:
    wrong: dict[str, Any] = {option: "4"}
    with pytest.raises(
        af.GraphError, match=rf"flow 'wide': {option} must be a whole number, got str: '4'"
    ):
        af.Flow("wide", **wrong)


def test_an_operator_whose_parallelism_is_no_number_is_refused() -> None:
    wrong: Any = "4"
    with pytest.raises(
        af.GraphError, match=r"^map: parallelism must be a whole number, got str: '4'$"
    ):
        numbers().map(str, parallelism=wrong)
    with pytest.raises(
        af.GraphError, match=r"^source: parallelism must be a whole number, got str: '4'$"
    ):
        af.Flow("wide").source([1], parallelism=wrong)


async def test_error_for_a_uid_that_no_operator_has_lists_those_with_keyed_state() -> None:
    flow = af.Flow("uids")
    pushed = flow.source(af.io.push(), uid="pushed")
    pushed.key_by(lambda x: x).count(uid="counts").sink(af.io.blackhole())
    async with flow.run() as job:
        with pytest.raises(
            af.StateError,
            match=(
                r"no operator with uid 'count': keyed state is that of 'counts'; did you mean "
                r"'counts'\?$"
            ),
        ):
            job.state("count")
        with pytest.raises(af.StateError, match="operator 'push' has no keyed state"):
            job.state("pushed")
    bare = af.Flow("bare")
    bare.source(af.io.push(), uid="pushed")
    async with bare.run() as job:
        with pytest.raises(af.StateError, match=r"none of its operators has keyed state$"):
            job.state("nonsense")


async def test_a_union_is_not_pushed_into_and_has_no_state() -> None:
    flow = af.Flow("both")
    both = flow.source(af.io.push()).union(flow.source([1]))
    async with flow.run() as job:
        with pytest.raises(
            af.GraphError, match=r"a union of 2 streams cannot be pushed into: job\.input"
        ):
            job.input(both)
        with pytest.raises(
            af.GraphError,
            match="a union of 2 streams has no state of its own: read that of an operator",
        ):
            job.state(both)
        await job.cancel()


async def test_a_file_where_a_directory_of_checkpoints_belongs_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(
        af.CheckpointError,
        match=(
            f"{tmp_path}/file is a file, expected a directory: checkpoints are kept in many files"
        ),
    ):
        await numbers().collect(checkpoints=tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


async def test_a_file_where_the_directory_of_a_sink_belongs_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    flow = af.Flow("written")
    flow.source(["a"]).sink(af.io.lines(tmp_path / "file"))
    with pytest.raises(
        NotADirectoryError,
        match=f"{tmp_path}/file is a file, expected a directory, .* give another path",
    ):
        await flow.execute()
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"subscribe": 1}, r"takes a list of streams, like subscribe=\[stream\], got int: 1"),
        ({"on": "host:1"}, r"write on=af\.RemoteCluster\('host:1', secret=\.\.\.\)"),
        ({"on": "spark"}, r"write on=af\.Spark\('local\[\*\]'\)"),
        ({"monitor": 8081}, r'expected "HOST:PORT", like "127\.0\.0\.1:8081"'),
    ],
)
async def test_an_option_of_another_type_says_what_to_write(options: Any, told: str) -> None:
    flow = af.Flow("options")
    flow.source([1]).sink(af.io.blackhole())
    with pytest.raises(TypeError, match=told):
        await flow.execute(**options)


def test_idleness_of_a_source_is_sent_to_its_watermark_strategy() -> None:
    with pytest.raises(TypeError, match=r"did you mean idle_after= of the watermark strategy\?"):
        af.Flow("idle").source([1], idle_after_ms=5)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    "there, told", [(False, "there is nothing"), (True, "it has no file 'metadata'")]
)
async def test_a_restore_from_nowhere_says_what_was_expected(
    tmp_path: Path, there: bool, told: str
) -> None:
    if there:
        (tmp_path / "mistyped").mkdir()
        (tmp_path / "mistyped" / "other").write_text("mine")
    with pytest.raises(
        af.RestoreError,
        match=(
            rf"mistyped is no checkpoint or savepoint: {told}; expected the directory of a "
            r"savepoint"
        ),
    ):
        await numbers().collect(checkpoints=tmp_path / "store", restore=tmp_path / "mistyped")


async def test_a_job_that_is_over_says_so_when_a_savepoint_of_it_is_wanted(tmp_path: Path) -> None:
    flow = af.Flow("over")
    flow.source([1]).sink(af.io.blackhole())
    async with flow.run(checkpoints=tmp_path, restart=af.no_restart()) as job:
        await job.wait()
        with pytest.raises(
            af.JobNotRunning, match="is over, no checkpoint or savepoint can be taken of it"
        ):
            await job.savepoint()


@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        ("user", "select(user=af.col.user)"),
        (af.col.user, "select(user=af.col.user)"),
        ("unit price", "select({'unit price': af.col('unit price')})"),
        (af.col("class"), "select({'class': af.col('class')})"),
        (af.col.n + 1, "select(value=col.n + 1)"),
        (["user"], "select(user=af.col.user)"),
    ],
)
def test_a_column_without_a_name_is_refused_with_what_to_write(given: Any, remedy: str) -> None:
    with pytest.raises(
        af.GraphError,
        match=rf"^select\(\) needs a name for each column, got .*; write {re.escape(remedy)}$",
    ):
        numbers().select(given)


@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        (("user", "value"), "select(user=af.col.user, value=af.col.value)"),
        ((af.col.user, "value"), "select(user=af.col.user, value=af.col.value)"),
        (
            ("user", "unit price"),
            "select({'user': af.col('user'), 'unit price': af.col('unit price')})",
        ),
        ((af.col.n, af.col.n + 1), "select(user=af.col.user)"),
        (({"n": af.col.n}, "user"), "select(user=af.col.user)"),
    ],
)
def test_several_columns_without_names_are_refused_with_what_to_write(
    given: Any, remedy: str
) -> None:
    with pytest.raises(
        af.GraphError,
        match=rf"^select\(\) needs a name for each column, got .*; write {re.escape(remedy)}$",
    ):
        numbers().select(*given)


def test_a_name_in_the_place_of_a_function_is_refused_with_the_expression() -> None:
    with pytest.raises(
        af.GraphError, match=r"key_by needs .*, got str: 'n'; for the field write af\.col\('n'\)$"
    ):
        numbers().key_by("n")
    with pytest.raises(
        af.GraphError, match=r"filter needs .*, got str: 'n'; for the field write af\.col\('n'\)$"
    ):
        numbers().filter("n")
    with pytest.raises(
        af.GraphError, match=r"key_by needs a function or an expression, got list: \[\]$"
    ):
        numbers().key_by([])


def windowed(time: str) -> Any:
    return numbers().key_by(abs).window(af.tumbling("1s", time=time))


async def subscribed(overflow: str) -> None:
    flow = af.Flow("subscribed")
    pushed = flow.source(af.io.push())
    async with flow.run() as job:
        # It is what is refused.
        job.subscribe(pushed, overflow=overflow)  # type: ignore[call-overload,unused-ignore]


@pytest.mark.parametrize(
    ("use", "error", "hint"),
    [
        (
            lambda: numbers().collect(restart="fixed-delay"),
            TypeError,
            "did you mean af.fixed_delay(...)?",
        ),
        (
            lambda: numbers().collect(state="rockdb"),
            af.StateError,
            "or a StateBackend object; did you mean 'rocksdb'?",
        ),
        (lambda: windowed("evnt"), af.GraphError, "did you mean 'event'?"),
        (lambda: subscribed("drop_newst"), ValueError, "did you mean 'drop_newest'?"),
        (lambda: af.io.jsonl("in", on_error="skipp"), af.GraphError, "did you mean 'skip'?"),
        (
            lambda: af.io.http("http://127.0.0.1", decode="jsn"),
            af.GraphError,
            "did you mean 'json'?",
        ),
        (lambda: af.io.webhook(decode="txt"), af.GraphError, "did you mean 'text'?"),
    ],
)
async def test_error_for_a_text_that_is_nearly_one_of_those_expected_says_which(
    use: Callable[[], Any], error: type[Exception], hint: str
) -> None:
    with pytest.raises(error) as caught:
        outcome = use()
        if inspect.isawaitable(outcome):
            await outcome
    assert str(caught.value).endswith(hint)


async def test_error_for_a_text_that_is_like_none_lists_those_expected() -> None:
    with pytest.raises(
        af.StateError,
        match=r"unknown state backend 'paper', expected heap or rocksdb or a StateBackend object$",
    ):
        await numbers().collect(state="paper")


async def test_a_savepoint_that_does_not_exist_and_nearly_called_latest_is_a_slip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for where in ({"checkpoints": "store"}, {}):
        with pytest.raises(
            af.RestoreError,
            match=r"/lates is no checkpoint or savepoint: .*; did you mean restore='latest'\?",
        ):
            await numbers().collect(restore="lates", **where)
    with pytest.raises(af.RestoreError) as caught:
        await numbers().collect(restore="friday")
    assert "did you mean" not in str(caught.value)


@pytest.mark.parametrize(
    ("use", "told"),
    [
        (
            lambda: numbers().sink(af.io.stdout),
            r"sink\(\) got the function stdout, expected what it makes: add the parentheses, "
            r"stdout\(",
        ),
        (
            lambda: af.Flow("in").source(af.io.push),
            r"flow\.source got the function push, expected what it makes: add the parentheses",
        ),
        (
            lambda: af.Flow("in").source([1], watermarks=abs),
            r"source: watermarks is builtin_function_or_method: .*timestamp=fn",
        ),
        (
            lambda: numbers().assign_timestamps_and_watermarks(abs),
            r"timestamps: watermarks is builtin_function_or_method",
        ),
        (
            lambda: af.io.http("127.0.0.1/prices"),
            r"http: the URL is '127\.0\.0\.1/prices', expected http://HOST/PATH or https:",
        ),
        (
            lambda: af.io.websocket("/prices"),
            r"websocket: the URL is '/prices', expected ws://HOST/PATH or wss://",
        ),
        (
            lambda: af.io.sse("ftp://host/prices"),
            r"sse: the URL is 'ftp://host/prices', expected http://HOST/PATH or",
        ),
        (
            lambda: af.io.datagen(abs, rate="10"),
            r"datagen: rate is '10', expected elements a second, more than 0",
        ),
    ],
)
def test_impossible_arguments_name_the_expected_ones(use: Callable[[], Any], told: str) -> None:
    with pytest.raises(af.GraphError, match=told):
        use()


async def test_error_for_a_stream_that_is_read_like_an_iterator_says_how() -> None:
    with pytest.raises(
        TypeError,
        match=r"async for x in stream\.execute_and_collect\(\)`, or job\.subscribe\(stream\)",
    ):
        async for _ in numbers():
            raise AssertionError("there is nothing to read yet")


async def test_error_for_a_state_that_an_operator_does_not_have_names_the_nearest() -> None:
    flow = af.Flow("states")
    pushed = flow.source(af.io.push())
    counts = pushed.key_by(abs).count()
    async with flow.run() as job:
        await job.input(pushed).put(1)
        with pytest.raises(
            af.StateError,
            match=r"there is no state 'runing'; it has 'running'; did you mean 'running'\?",
        ):
            await job.state(counts).get(1, name="runing")


@pytest.mark.parametrize(
    ("assigner", "state"),
    [(af.tumbling("1m"), "window-slices"), (af.session("1m"), "window-contents")],
)
async def test_the_state_of_windows_is_refused_and_not_read_as_empty(
    assigner: Any, state: str
) -> None:
    flow = af.Flow("windows")
    pushed = flow.source(
        af.io.push(),
        watermarks=af.WatermarkStrategy[int].monotonous_timestamps(timestamp=lambda n: n),
    )
    counts = pushed.key_by(abs).window(assigner).aggregate(af.count())
    async with flow.run() as job:
        await job.input(pushed).put(1)
        told = "has a state for each window of a key, so it cannot be read by key"
        for name in (None, state):
            with pytest.raises(af.StateError, match=told):
                await job.state(counts).get(1, default=0, name=name)
            with pytest.raises(af.StateError, match=told):
                await job.state(counts).items(name=name)


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("cents > 1", "a text is no expression: write af.col.cents > 1"),
        ("a * (b + 1) == -2", "a text is no expression: write af.col.a * (af.col.b + 1) == -2"),
        ("1 < x < 5", "a text is no expression: write it of fields, like (af.col.cents > 1) & "),
        ("x > 1 and y", "a text is no expression: write it of fields, like (af.col.cents > 1) & "),
        ("cents", "for the field write af.col('cents')"),
        ("unit price", "for the field write af.col('unit price')"),
        ("12", "for the field write af.col('12')"),
    ],
)
def test_error_for_a_text_that_spells_an_expression_says_how_it_is_written(
    text: str, written: str
) -> None:
    said = re.escape(f"got str: {text!r}; {written}")
    for method in ("filter", "map", "key_by"):
        with pytest.raises(
            af.GraphError, match=f"^{method} needs a function or an expression, {said}"
        ):
            getattr(numbers(), method)(text)


@pytest.mark.parametrize("count", [3, 1_000])
@pytest.mark.parametrize("before", [False, True], ids=["alone", "fused"])
async def test_a_filter_that_only_returns_none_is_reported_once(
    count: int, before: bool, caplog: pytest.LogCaptureFixture
) -> None:
    stream: Any = af.Flow("dropped").source(range(count))
    stream = stream.map(abs) if before else stream
    await stream.filter(lambda n: None, name="mine").collect()
    told = [record.getMessage() for record in caplog.records if "returned None" in record.msg]
    (message,) = told
    assert message.startswith("operator 'mine': the function of filter returned None for all ")


@pytest.mark.parametrize("results", [[None, True], [None, False], [0, None], []])
async def test_a_filter_that_also_returns_other_results_is_not_reported(
    results: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    await af.Flow("kept").source([[one] for one in results]).filter(lambda r: r[0]).collect()
    assert "returned None" not in caplog.text


def test_two_sinks_of_a_flow_that_write_to_one_directory_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stream = numbers()
    stream.sink(af.io.jsonl(tmp_path / "out"))
    stream.sink(af.io.jsonl(tmp_path / "other"))
    stream.sink(af.io.csv(tmp_path / "out"))
    assert "same directory" not in caplog.text
    stream.sink(af.io.jsonl(str(tmp_path / "out")))
    assert caplog.text.count("write to the same directory") == 1


def grown(*fields: str) -> type[Any]:
    """Makes the class `Grown` of this module again, as a new version of a program would."""
    made = make_dataclass("Grown", [(field, int) for field in fields])
    made.__module__ = __name__
    globals()["Grown"] = made
    return made


async def test_state_that_cannot_be_restored_is_named_without_frames_of_the_engine(
    tmp_path: Path,
) -> None:
    class Old(af.KeyedProcessFunction[int, int, int]):
        def open(self, ctx: Any) -> None:
            self.last = ctx.get_state(af.ValueStateDescriptor[Any]("last"))

        def process_element(self, value: int, ctx: Any) -> None:
            self.last.update(Grown(value))

    def keeping(flow: af.Flow) -> Any:
        pushed = flow.source(af.io.push(), uid="pushed")
        pushed.key_by(abs).process(Old(), uid="keep").sink(print)
        return pushed

    flow = af.Flow("grows")
    pushed = keeping(flow)
    Grown = grown("a")
    async with flow.run(checkpoints=tmp_path, restart=af.no_restart()) as job:
        await job.input(pushed).put(1)
    Grown = grown("a", "b")
    flow = af.Flow("grows")
    keeping(flow)
    told = r"cannot restore the state of operator '.*': state 'last': .* has a field 'b'"
    with pytest.raises(af.RestoreError, match=told) as raised:
        async with flow.run(checkpoints=tmp_path, restart=af.no_restart()):
            pass
    assert "uid 'keep'" in "".join(raised.value.__notes__)
    assert raised.value.__cause__ is not None
    assert raised.value.__cause__.__traceback__ is None


async def test_kafka_without_its_extra_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [one for one in sys.modules if one.split(".")[0] == "aiokafka"] + ["aiokafka"]:
        monkeypatch.setitem(sys.modules, name, None)
    flow = af.Flow("kafka")
    flow.source([1]).sink(af.io.kafka("localhost:9092", "numbers"))
    with pytest.raises(ModuleNotFoundError, match="pip install 'aioflow\\[kafka\\]'"):
        await flow.execute()


class Halves:
    """A source of two splits, whose reader names `split` as the one that it has just read."""

    bounded = True

    def __init__(self, split: str | None) -> None:
        self.current_split = split
        self.left = [1, 2]
        self.finished = False

    async def discover(self) -> list[af.Split]:
        return [af.Split("a"), af.Split("b")]

    def reader(self, ctx: af.SourceContext) -> Any:
        return self

    async def open(self, splits: Any) -> None: ...
    async def wait(self) -> None: ...
    async def close(self) -> None: ...

    def position(self, split_id: str) -> int:
        return 0

    def poll_batch(self, max_records: int) -> list[int]:
        self.finished = True
        return self.left


@pytest.mark.parametrize("split", [None, "c"])
@pytest.mark.parametrize("idle_after", [None, "1s"])
async def test_a_reader_that_does_not_name_the_split_it_read_is_told_so(
    split: str | None, idle_after: str | None
) -> None:
    strategy = af.WatermarkStrategy[int].monotonous_timestamps(
        timestamp=lambda n: n, idle_after=idle_after
    )
    source: Any = Halves(split)
    with pytest.raises(
        ValueError,
        match=rf"^current_split of the reader is {split!r} after poll_batch, expected the id of "
        "the split of that batch, one of 'a', 'b': with watermarks= each split has an event time",
    ) as raised:
        await af.Flow("halves").source(source, watermarks=strategy).collect()
    assert "in source 'Halves'" in raised.value.__notes__[0]
