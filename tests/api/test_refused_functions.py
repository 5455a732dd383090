"""A function that does not fit its place is refused at its line, while the flow is built."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import aioflow as af


async def later(*values: Any) -> Any:
    """Is async where a plain function belongs."""


@af.resource
def anything() -> Iterator[str]:
    yield "opened"


def wants(value: Any, other: Any = None, resource: Any = af.use(anything)) -> Any:
    return resource


class Kept(af.FilterFunction[Any]):
    def filter(self, value: Any) -> bool:
        return True


class Summed(af.ProcessWindowFunction[Any, Any, Any]):
    async def process(  # type: ignore[override]
        self, key: Any, ctx: af.WindowContext, elements: Any
    ) -> Any:
        return []


def timed(flow: af.Flow) -> Any:
    """A stream with event time; Any, because what follows is what a checker would refuse."""
    return flow.source(
        [1, 2], watermarks=af.WatermarkStrategy.monotonous_timestamps(timestamp=lambda x: x)
    )


def keyed(flow: af.Flow) -> Any:
    return timed(flow).key_by(lambda x: x)


def joined(flow: af.Flow, method: str) -> Any:
    both = getattr(timed(flow), method)(timed(flow))
    return both.where(lambda x: x).equal_to(lambda x: x).window(af.tumbling("1s"))


PLACES: dict[str, Callable[[af.Flow, Any], Any]] = {
    "reduce": lambda flow, fn: keyed(flow).reduce(fn),
    "reduce of a window": lambda flow, fn: keyed(flow).window(af.tumbling("1s")).reduce(fn),
    "process of a window": lambda flow, fn: keyed(flow).window(af.session("1s")).process(fn),
    "window_fn": lambda flow, fn: keyed(flow).window(af.tumbling("1s")).aggregate(af.count(), fn),
    "join": lambda flow, fn: joined(flow, "join").apply(fn),
    "co_group": lambda flow, fn: joined(flow, "co_group").apply(fn),
    "interval_join": lambda flow, fn: (
        keyed(flow).interval_join(keyed(flow), "0s", "1s").process(fn)
    ),
    "map of connected streams": lambda flow, fn: timed(flow).connect(timed(flow)).map(str, fn),
    "flat_map of connected streams": lambda flow, fn: (
        timed(flow).connect(timed(flow)).flat_map(fn, str)
    ),
    "partition_custom": lambda flow, fn: timed(flow).partition_custom(fn),
    "key_by": lambda flow, fn: timed(flow).key_by(fn),
    "timestamp": lambda flow, fn: af.WatermarkStrategy.monotonous_timestamps(timestamp=fn),
    "punctuated": lambda flow, fn: af.WatermarkStrategy.punctuated(fn),
    "custom": lambda flow, fn: af.WatermarkStrategy.custom(fn),
}


@pytest.mark.parametrize("place", PLACES)
def test_async_function_that_would_not_be_awaited_is_refused(place: str) -> None:
    with pytest.raises(af.GraphError, match="needs a plain function"):
        PLACES[place](af.Flow("refused"), later)


@pytest.mark.parametrize("place", PLACES)
def test_uncallable_function_is_refused(place: str) -> None:
    with pytest.raises((af.GraphError, TypeError), match="a function"):
        PLACES[place](af.Flow("refused"), 5)


def test_a_window_function_of_a_class_is_plain_too() -> None:
    with pytest.raises(af.GraphError, match="process of a window needs a plain function"):
        keyed(af.Flow("refused")).window(af.tumbling("1s")).process(Summed)


def test_a_list_is_mapped_by_a_function() -> None:
    with pytest.raises(af.GraphError, match="map_batches needs a function of a list, got int: 5"):
        timed(af.Flow("refused")).map_batches(5)


@pytest.mark.parametrize(
    ("use", "told"),
    [
        (
            lambda s: s.key_by(wants),
            "key_by: its parameter 'resource' wants the resource 'anything', and is given none "
            "here",
        ),
        (lambda s: s.partition_custom(wants), "partition_custom: its parameter 'resource'"),
        (
            lambda s: af.WatermarkStrategy.no_watermarks(timestamp=wants),
            "timestamp= of a watermark",
        ),
        (lambda s: s.key_by(str).aggregate(af.sum(wants)), "sum: fn: its parameter 'resource'"),
        (
            lambda s: s.key_by(str).aggregate(af.count(where=wants)),
            "count: where: its parameter 'resource'",
        ),
    ],
)
def test_a_resource_is_not_wanted_where_none_is_given(use: Callable[[Any], Any], told: str) -> None:
    with pytest.raises(af.GraphError, match=told):
        use(timed(af.Flow("refused")))


@pytest.mark.parametrize(
    ("use", "told"),
    [
        (
            lambda s: s.map(Kept),
            "map needs a function class with a method 'map', and Kept has none",
        ),
        (
            lambda s: s.flat_map(Kept()),
            "flat_map needs a function class with a method 'flat_map', and Kept has none",
        ),
        (
            lambda s: s.process(Kept),
            "process needs a function class with a method 'process_element', and Kept has none",
        ),
        (
            lambda s: s.key_by(str).process(Kept),
            "process needs a function class with a method 'process_element'",
        ),
        (lambda s: s.key_by(str).count_window(2).process(Kept), "Kept has no method 'process'"),
    ],
)
def test_a_function_class_of_another_kind_is_refused(use: Callable[[Any], Any], told: str) -> None:
    with pytest.raises(af.GraphError, match=told):
        use(timed(af.Flow("refused")))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"concurrency": "4"}, "concurrency must be at least 1, got '4'"),
        ({"concurrency": 1.5}, "concurrency must be at least 1, got 1.5"),
        ({"concurrency": None}, "concurrency must be at least 1, got None"),
        ({"timeout": "0s"}, "timeout is '0s', expected more than 0"),
        ({"timeout": "-1s"}, "timeout is '-1s', expected more than 0"),
        ({"on_timeout": str}, "on_timeout= is given without timeout="),
    ],
)
def test_options_of_async_calls_that_cannot_be_meant_are_refused(
    options: dict[str, Any], told: str
) -> None:
    with pytest.raises(af.GraphError, match=f"^map: {told}"):
        timed(af.Flow("refused")).map(later, **options)


class Stateful(af.MapFunction[Any, Any]):
    """Has operator state."""

    def map(self, value: Any) -> Any:
        return value

    def __call__(self, *args: Any) -> Any:
        return args

    def initialize_state(self, ctx: Any) -> None: ...
    def snapshot_state(self, ctx: Any) -> None: ...


class Sums(Stateful, af.AggregateFunction[Any, Any, Any]):
    """An aggregate."""


class Fires(Stateful, af.Trigger[Any]):
    """A trigger."""


class Evicts(Stateful, af.Evictor[Any]):
    """An evictor."""


class Writes(Stateful):
    """A sink."""

    def writer(self, ctx: Any) -> None: ...
    def committer(self) -> None: ...


STATELESS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "key_by": (lambda s: s.key_by(Stateful()), "key_by: Stateful has"),
    "partition_custom": (lambda s: s.partition_custom(Stateful()), "partition_custom: Stateful"),
    "reduce of a window": (
        lambda s: s.key_by(str).count_window(2).reduce(Stateful()),
        "reduce of a window: Stateful",
    ),
    "aggregate": (lambda s: s.key_by(str).aggregate(Sums), "an aggregate: Sums"),
    "sum": (lambda s: s.key_by(str).sum(Stateful()), "sum: fn: Stateful"),
    "where": (
        lambda s: s.key_by(str).aggregate(af.count(where=Stateful())),
        "count: where: Stateful",
    ),
    "timestamp": (
        lambda s: af.WatermarkStrategy.no_watermarks(timestamp=Stateful()),
        "timestamp= of a watermark strategy: Stateful",
    ),
    "punctuated": (
        lambda s: af.WatermarkStrategy.punctuated(Stateful()),
        "the function of a watermark strategy: Stateful",
    ),
    "custom": (
        lambda s: af.WatermarkStrategy.custom(Stateful()),
        "the function of a watermark strategy: Stateful",
    ),
    "trigger": (
        lambda s: s.key_by(str).window(af.tumbling("1s"), trigger=Fires()),
        "a trigger: Fires",
    ),
    "evictor": (
        lambda s: s.key_by(str).window(af.tumbling("1s"), evictor=Evicts()),
        "an evictor: Evicts",
    ),
    "gap": (
        lambda s: s.key_by(str).window(af.session(Stateful())),
        r"gap of session\(\): Stateful",
    ),
    "on_timeout": (
        lambda s: s.map(later, timeout="1s", on_timeout=Stateful()),
        "map: on_timeout=: Stateful",
    ),
    "source": (
        lambda s: s.flow.source(Stateful()),
        "the function of a source, which has positions instead: Stateful",
    ),
    "sink": (
        lambda s: s.sink(Writes()),
        r"sink\(\): the writers of a Sink have its state: Writes has",
    ),
}


@pytest.mark.parametrize("place", STATELESS)
def test_operator_state_is_refused_where_it_would_not_be_kept(place: str) -> None:
    """The state would be lost, silently, at the first restart."""
    use, told = STATELESS[place]
    with pytest.raises(af.GraphError, match=f"^{told}"):
        use(timed(af.Flow("refused")))


def test_two_functions_of_one_operator_have_no_operator_state_each() -> None:
    """An operator has one operator state: each function would overwrite the state of the other."""
    stream = timed(af.Flow("refused"))
    with pytest.raises(
        af.GraphError, match=r"both functions have operator state.*write one CoProcessFunction"
    ):
        stream.connect(stream).map(Stateful(), Stateful)


@pytest.mark.parametrize("name", ["", None, 5])
def test_a_tag_has_a_name(name: Any) -> None:
    with pytest.raises(ValueError, match="an OutputTag needs a name that is not empty, got"):
        af.OutputTag(name)


@pytest.mark.parametrize(
    ("policy", "error", "told"),
    [
        (lambda: af.fixed_delay(1, "-1s"), ValueError, "delay is '-1s', expected 0 or more"),
        (
            lambda: af.fixed_delay("3", "1s"),  # type: ignore[arg-type]
            ValueError,
            "at least one attempt, got '3'",
        ),
        (
            lambda: af.failure_rate(1.5),  # type: ignore[arg-type]
            ValueError,
            "at least one failure, got 1.5",
        ),
        (lambda: af.failure_rate(2, "1m", "-1s"), ValueError, "delay is '-1s'"),
        (lambda: af.exponential_delay("-1s"), ValueError, "initial is '-1s'"),
        (
            lambda: af.fixed_delay(1, fatal=ValueError),
            TypeError,
            "fatal= takes a tuple of exception classes",
        ),  # type: ignore[arg-type]
        (
            lambda: af.exponential_delay(fatal=("ValueError",)),  # type: ignore[arg-type]
            TypeError,
            "fatal= takes a tuple",
        ),
    ],
)
def test_a_restart_policy_that_cannot_be_meant_is_refused(
    policy: Callable[[], Any], error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=told):
        policy()


async def test_a_job_is_asked_for_streams_and_rows_by_the_number() -> None:
    flow = af.Flow("asked")
    pushed: Any = flow.source(af.io.push())
    async with flow.run() as job:
        for ask in (job.subscribe, job.state, job.input):
            with pytest.raises(af.GraphError, match="expected a stream of its flow"):
                ask(5)  # type: ignore[operator]
        for buffer in (0, "3", 1.5, None):
            with pytest.raises(ValueError, match="buffer must be at least 1 row"):
                job.subscribe(pushed, buffer=buffer)  # type: ignore[arg-type]
    with pytest.raises(af.GraphError, match="expected a stream of its flow"):
        async with flow.run(subscribe=["pushed"]):
            pass


def test_a_program_of_its_own_does_not_run_inside_of_a_loop() -> None:
    """Nothing is left behind that was never awaited."""
    flow = af.Flow("inside")
    flow.source([1])

    async def service() -> None:
        with pytest.raises(RuntimeError, match=r"one is running here: use `await flow\.execute"):
            af.run(flow)

    asyncio.run(service())


@pytest.mark.parametrize(
    "method",
    ["rebalance", "rescale", "shuffle", "forward", "global_", "broadcast", "partition_custom"],
)
def test_repartitioning_a_keyed_stream_is_refused_by_name(method: str) -> None:
    arguments = [lambda value, n: 0] if method == "partition_custom" else []
    with pytest.raises(
        af.GraphError,
        match=rf"^key_by\(...\).{method}\(\) of .* would undo the key_by: .* then {method}\(\)$",
    ):
        getattr(keyed(af.Flow("refused")), method)(*arguments)
