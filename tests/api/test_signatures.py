"""A function that takes other arguments than it will be called with is refused at its line; what
might be right is left alone.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from decimal import Decimal
from operator import add, itemgetter
from typing import Any, NamedTuple

import pytest

import aioflow as af


def numbers() -> Any:
    """A stream with event time; Any, because what follows is what a checker would refuse."""
    timed = af.WatermarkStrategy.monotonous_timestamps(  # type: ignore[var-annotated,unused-ignore]
        timestamp=lambda value: value
    )
    return af.Flow("signatures").source([1, 2], watermarks=timed)


def keyed() -> Any:
    return numbers().key_by(abs)


def windowed() -> Any:
    return keyed().window(af.tumbling("1s"))


def connected() -> Any:
    stream = numbers()
    return stream.connect(stream)


def interval() -> Any:
    stream = keyed()
    return stream.interval_join(stream, "0s", "1s")


def joining() -> Any:
    stream = numbers()
    return stream.join(stream)


def joined(method: str) -> Any:
    left = numbers()
    return getattr(left, method)(left).where(abs).equal_to(abs).window(af.tumbling("1s"))


def nothing() -> Any: ...
def one(a: Any) -> Any: ...
def two(a: Any, b: Any) -> Any: ...
def three(a: Any, b: Any, c: Any) -> Any: ...
async def later() -> Any: ...


PLACES: dict[str, tuple[Callable[[Any], Any], Callable[..., Any], str]] = {
    "map": (
        lambda fn: numbers().map(fn),
        nothing,
        "map needs a function of (value), got nothing() -> 'Any'",
    ),
    "async map": (
        lambda fn: numbers().map(fn),
        later,
        "map needs a function of (value), got later() -> 'Any'",
    ),
    "filter": (
        lambda fn: numbers().filter(fn),
        two,
        "filter needs a function of (value), got two(",
    ),
    "flat_map": (
        lambda fn: numbers().flat_map(fn),
        nothing,
        "flat_map needs a function of (value), got nothing(",
    ),
    "map_batches": (
        lambda fn: numbers().map_batches(fn),
        two,
        "map_batches needs a function of (values), got two(",
    ),
    "on_timeout": (
        lambda fn: numbers().map(int, blocking=True, timeout="1s", on_timeout=fn),
        nothing,
        "map: on_timeout= needs a function of (value), got nothing(",
    ),
    "key_by": (
        lambda fn: numbers().key_by(fn),
        two,
        "key_by needs a function of (value), got two(",
    ),
    "where": (
        lambda fn: joining().where(fn),
        two,
        "where of the join needs a function of (value), got",
    ),
    "partition_custom": (
        lambda fn: numbers().partition_custom(fn),
        one,
        "partition_custom needs a function of (value, n), got one(",
    ),
    "reduce": (lambda fn: keyed().reduce(fn), one, "reduce needs a function of (a, b), got one("),
    "reduce of a window": (
        lambda fn: windowed().reduce(fn),
        one,
        "reduce needs a function of (a, b), got one(",
    ),
    "sum": (
        lambda fn: keyed().sum(fn),
        nothing,
        "sum: fn needs a function of (value), got nothing(",
    ),
    "where=": (
        lambda fn: af.count(where=fn),
        two,
        "count: where needs a function of (value), got two(",
    ),
    "window_fn": (
        lambda fn: windowed().reduce(two, fn),
        two,
        "window_fn needs a function of (key, window, value), got two(",
    ),
    "process of a window": (
        lambda fn: windowed().process(fn),
        two,
        "process of a window needs a function of (key, ctx, elements), got",
    ),
    "gap": (af.session, two, "gap of session() needs a function of (value), got two("),
    "join": (
        lambda fn: joined("join").apply(fn),
        one,
        "apply of join needs a function of (left, right), got one(",
    ),
    "co_group": (
        lambda fn: joined("co_group").apply(fn),
        two,
        "apply of co_group needs a function of (key, lefts, rights), got two(",
    ),
    "interval_join": (
        lambda fn: interval().process(fn),
        two,
        "process of interval_join needs a function of (left, right, ctx), got two(",
    ),
    "connected": (
        lambda fn: connected().map(one, fn),
        two,
        "map of connected streams needs a function of (value), got",
    ),
    "sink": (
        lambda fn: numbers().sink(fn),
        nothing,
        "sink() needs a function of (value), got nothing(",
    ),
    "timestamp": (
        lambda fn: af.WatermarkStrategy.no_watermarks(timestamp=fn),
        nothing,
        "timestamp= of a watermark strategy needs a function of (value), got nothing(",
    ),
    "punctuated": (
        af.WatermarkStrategy.punctuated,
        three,
        "punctuated() needs a function of (value), got three(",
    ),
    "custom": (af.WatermarkStrategy.custom, one, "custom() needs a function of (), got one("),
    "datagen": (
        lambda fn: af.io.datagen(fn, count=1),
        nothing,
        "datagen needs a function of (index), got nothing(",
    ),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_function_of_other_arguments_is_refused_where_it_is_given(place: str) -> None:
    give, function, told = PLACES[place]
    with pytest.raises(af.GraphError) as caught:
        give(function)
    assert str(caught.value).startswith(told), caught.value


class Point(NamedTuple):
    x: int
    y: int = 0


class Calls:
    def __call__(self, value: Any) -> Any:
        return value

    def method(self, value: Any, more: Any = None) -> Any:
        return value

    @staticmethod
    def static(value: Any) -> Any:
        return value

    @classmethod
    def of(cls, value: Any) -> Any:
        return value


class Counted:
    """Has operator state, so that its instances are called, not the class."""

    def __call__(self, value: Any) -> Any:
        return value

    def initialize_state(self, ctx: Any) -> None: ...
    def snapshot_state(self, ctx: Any) -> None: ...


def wrapping(function: Callable[..., Any]) -> Callable[[Any], Any]:
    """Shows the parameters of what it wraps, and takes others."""

    @functools.wraps(function)
    def call(value: Any) -> Any:
        return function(value, value)

    return call


def wrapping_all(function: Callable[..., Any]) -> Callable[..., Any]:
    return functools.wraps(function)(lambda *values: function(values[0]))


def claiming(value: Any) -> Any:
    return value


claiming.__signature__ = inspect.signature(two)  # type: ignore[attr-defined]


@af.resource
def anything() -> Iterator[int]:
    yield 1


def injected(value: Any, first: Any = af.use(anything), *, second: Any = af.use(anything)) -> Any:
    return value


FLEXIBLE: dict[str, Any] = {
    "builtin": abs,
    "class without a signature": str,
    "class": Decimal,
    "NamedTuple": Point,
    "method of a class": str.upper,
    "bound method": Calls().method,
    "static method": Calls.static,
    "class method": Calls.of,
    "object": Calls(),
    "partial": functools.partial(add, 1),
    "partial by name": functools.partial(two, b=1),
    "wrapped": wrapping(two),
    "wrapped twice": functools.partial(wrapping(two)),
    "any number": lambda *values: values,
    "defaults": lambda value, more=1, *, other=2: value,
    "resources": injected,
    "cached": functools.lru_cache(one),
    "getter": itemgetter(0),
    "claims another": claiming,
    "partial of what claims another": functools.partial(claiming),
    "class with state": Counted,
}


@pytest.mark.parametrize("function", FLEXIBLE.values(), ids=FLEXIBLE)
def test_callable_or_unknown_signatures_are_not_refused(function: Any) -> None:
    assert numbers().map(function).upstreams
    if function is not Counted and function is not injected:
        assert numbers().key_by(function).upstreams


@pytest.mark.parametrize(
    "function", [lambda value, ctx: [], lambda *both: [], functools.partial(three, c=1)]
)
def test_process_takes_what_can_be_called_with_two(function: Any) -> None:
    assert numbers().process(function).upstreams


class ShortTimer(af.KeyedProcessFunction[int, int, int]):
    def process_element(self, value: int, ctx: af.ProcessContext) -> None: ...
    def on_timer(self, timestamp: int) -> None: ...  # type: ignore[override]


class ShortOpen(af.MapFunction[int, int]):
    def open(self) -> None: ...  # type: ignore[override]
    def map(self, value: int) -> int:
        return value


class LongMap(af.MapFunction[int, int]):
    def map(self, value: int, ctx: Any) -> int:  # type: ignore[override]
        return value


class ShortSecond(af.CoProcessFunction[int, int, int]):
    def process_element1(self, value: int, ctx: af.ProcessContext) -> None: ...
    async def process_element2(self, value: int) -> None: ...  # type: ignore[override]


class ShortWindow(af.ProcessWindowFunction[int, int, int]):
    def process(self, key: int, elements: Any) -> list[int]:  # type: ignore[override]
        return []


class ShortAdd(af.AggregateFunction[int, int, int]):
    def create_accumulator(self) -> int:
        return 0

    def add(self, value: int) -> int:  # type: ignore[override]
        return value


class ShortTrigger(af.Trigger[int]):
    def on_element(self, value: int, ctx: Any) -> Any: ...  # type: ignore[override]


class ShortEvictor(af.Evictor[int]):
    def evict_before(self, elements: Any) -> Any: ...  # type: ignore[override]


class ShortSnapshot(LongMap):
    def map(self, value: int) -> int:  # type: ignore[override]
        return value

    def initialize_state(self, ctx: Any) -> None: ...
    def snapshot_state(self) -> None: ...


CLASSES: list[tuple[Callable[[Any], Any], Any, str]] = [
    (
        lambda fn: keyed().process(fn),
        ShortTimer,
        "ShortTimer has on_timer(self, timestamp: 'int') -> 'None', expected on_timer(self, "
        "timestamp, ctx)",
    ),
    (
        lambda fn: numbers().map(fn),
        ShortOpen,
        "ShortOpen has open(self) -> 'None', expected open(self, ctx)",
    ),
    (lambda fn: numbers().map(fn), LongMap, "expected map(self, value)"),
    (lambda fn: keyed().map(fn), LongMap, "expected map(self, value)"),
    (
        lambda fn: connected().process(fn),
        ShortSecond,
        "expected process_element2(self, value, ctx)",
    ),
    (lambda fn: windowed().process(fn), ShortWindow, "expected process(self, key, ctx, elements)"),
    (
        lambda fn: windowed().reduce(two, fn),
        ShortWindow,
        "expected process(self, key, ctx, elements)",
    ),
    (lambda fn: windowed().aggregate(fn), ShortAdd, "expected add(self, value, accumulator)"),
    (lambda fn: keyed().aggregate(fn), ShortAdd, "expected add(self, value, accumulator)"),
    (
        lambda fn: keyed().window(af.tumbling("1s"), trigger=fn()),
        ShortTrigger,
        "expected on_element(self, value, timestamp, window, ctx)",
    ),
    (
        lambda fn: keyed().window(af.tumbling("1s"), evictor=fn()),
        ShortEvictor,
        "expected evict_before(self, elements, window, ctx)",
    ),
    (lambda fn: numbers().map(fn), ShortSnapshot, "expected snapshot_state(self, ctx)"),
]


@pytest.mark.parametrize(("give", "function", "told"), CLASSES)
def test_a_method_of_other_arguments_is_refused_where_its_class_is_given(
    give: Callable[[Any], Any], function: Any, told: str
) -> None:
    with pytest.raises(af.GraphError) as caught:
        give(function)
    assert str(caught.value).endswith(told), caught.value


def test_a_method_of_other_arguments_is_refused_where_its_object_is_given() -> None:
    with pytest.raises(
        af.GraphError,
        match=(
            r"^LongMap has map\(self, value: 'int', ctx: 'Any'\) -> 'int', expected map\(self, "
            r"value\)$"
        ),
    ):
        numbers().map(LongMap())


class Fitting(af.KeyedProcessFunction[int, int, int]):
    """Takes what it is called with, in other ways than the contract spells it."""

    def open(self, *context: Any, more: Any = af.use(anything)) -> None: ...

    @staticmethod
    def process_element(value: int, ctx: Any) -> None: ...  # type: ignore[override]

    @wrapping_all
    def on_timer(self) -> None: ...  # type: ignore[override]

    def finish(self, more: int = 0) -> None: ...


def test_methods_that_fit_in_other_ways_are_not_refused(caplog: pytest.LogCaptureFixture) -> None:
    assert keyed().process(Fitting).upstreams and keyed().process(Fitting()).upstreams
    assert not caplog.messages


class Flinkish(af.KeyedProcessFunction[int, int, int]):
    """Spells its methods as Flink does."""

    def processElement(self, value: int, ctx: af.ProcessContext) -> list[int]:
        return [value]


class FlinkishSecond(af.CoProcessFunction[int, int, int]):
    def process_element1(self, value: int, ctx: af.ProcessContext) -> None: ...
    def processElement2(self, value: int, ctx: af.ProcessContext) -> None: ...


class Adding(af.AggregateFunction[int, int, int]):
    def createAccumulator(self) -> int:
        return 0

    def add(self, value: int, accumulator: int) -> int:
        return value + accumulator


class Firing(af.Trigger[int]):
    def onElement(self, value: int, timestamp: int, window: Any, ctx: Any) -> Any: ...


@pytest.mark.parametrize(
    ("give", "told"),
    [
        (
            lambda: keyed().process(Flinkish),
            "Flinkish must define process_element(self, value, ctx); did you mean that by "
            "processElement?",
        ),
        (
            lambda: keyed().process(Flinkish()),
            "Flinkish must define process_element(self, value, ctx)",
        ),
        (
            lambda: connected().process(FlinkishSecond),
            "FlinkishSecond must define process_element2(self, value, ctx)",
        ),
        (
            lambda: keyed().aggregate(Adding),
            "Adding must define create_accumulator(self); did you mean that by createAccumulator?",
        ),
        (
            lambda: keyed().window(af.global_window(), trigger=Firing()),
            "Firing must define on_element(self, value, timestamp, window, ctx)",
        ),
    ],
)
def test_a_method_that_must_be_there_and_is_spelled_otherwise_is_refused(
    give: Callable[[], Any], told: str
) -> None:
    with pytest.raises(af.GraphError) as caught:
        give()
    assert str(caught.value).startswith(told), caught.value


class Limited(af.KeyedProcessFunction[int, int, int]):
    def __init__(self, limit: int, *, name: str, unit: str = "cents") -> None:
        self.limit = limit

    def process_element(self, value: int, ctx: af.ProcessContext) -> list[int]:
        return [value] if value < self.limit else []


def test_a_class_whose_constructor_needs_arguments_is_refused() -> None:
    with pytest.raises(af.GraphError) as caught:
        keyed().process(Limited)
    assert str(caught.value) == (
        "the class Limited needs arguments, and the engine calls it without any; pass an "
        "instance: Limited(limit=..., name=...)"
    )


async def test_an_object_of_such_a_class_is_used() -> None:
    assert await keyed().process(Limited(2, name="low")).collect() == [1]


class Adapted(af.KeyedProcessFunction[int, int, int]):
    """Objects of this class have attributes that the class lacks."""

    def __init__(self) -> None:
        self.process_element = self.processElement  # type: ignore[method-assign]

    def processElement(self, value: int, ctx: af.ProcessContext) -> list[int]:
        return [value]


async def test_a_method_that_the_constructor_brings_is_not_missed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert await keyed().process(Adapted()).collect() == [1, 2]
    assert not caplog.messages
    assert await keyed().process(Adapted).collect() == [1, 2], "no more than a warning"


def elements(value: int, ctx: Any) -> None: ...


NEARLY: dict[str, tuple[dict[str, Any], str]] = {
    "camel case": (
        {"onTimer": elements},
        "onTimer, which is never called: did you mean on_timer(self, timestamp, ctx)?",
    ),
    "underscore": ({"open_": one}, "open_, which is never called: did you mean open(self, ctx)?"),
    "plural": (
        {"on_timers": elements},
        "on_timers, which is never called: did you mean on_timer(self, timestamp, ctx)?",
    ),
    "state": (
        {"initializeState": one, "snapshot_state": two},
        "initializeState, which is never called: did you mean initialize_state(self, ctx)?",
    ),
    "half": (
        {"snapshot_state": two},
        "snapshot_state and no initialize_state: it is never called, and checkpoints keep nothing "
        "of it",
    ),
}


@pytest.mark.parametrize(("methods", "told"), NEARLY.values(), ids=NEARLY)
def test_a_method_that_is_nearly_one_that_would_be_called_is_warned_of(
    methods: dict[str, Any], told: str, caplog: pytest.LogCaptureFixture
) -> None:
    cls = type("Nearly", (af.KeyedProcessFunction,), {"process_element": three, **methods})
    with caplog.at_level(logging.WARNING):
        keyed().process(cls)
    (warned,) = caplog.messages
    assert warned.startswith("Nearly has ") and warned.endswith(told)


@pytest.mark.parametrize(
    "methods",
    [
        {"on_timer": three, "onTimer": elements},
        {"_on_timer": elements, "__opened__": one},
        {
            "closed": one,
            "opened": one,
            "finished": one,
            "timer": one,
            "process": one,
            "element": one,
            "reopen": one,
        },
        {"onTimer": 5, "Open": property(one), "onTimer2": staticmethod(one)},
        {"initialize_state": two, "snapshot_state": two},
    ],
)
def test_helper_methods_are_not_mistaken_for_uncalled_methods(
    methods: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    keyed().process(
        type("Helped", (af.KeyedProcessFunction,), {"process_element": three, **methods})
    )
    assert not caplog.messages


def test_methods_inherited_from_a_user_class_count(caplog: pytest.LogCaptureFixture) -> None:
    base = type("Base", (af.KeyedProcessFunction,), {"process_element": three, "on_timer": three})
    keyed().process(type("Derived", (base,), {"onTimer": elements, "processElement": three}))
    assert not caplog.messages
