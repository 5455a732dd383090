"""Errors of public functions that are called with arguments they do not take."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

import aioflow as af
from aioflow.advice.hints import explained, explained_methods

c: Any = af.col


def stream() -> Any:
    """Any, because what follows is what a checker would refuse."""
    return af.Flow("calls").source([{"v": 1}])


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda: af.io.jsonl("x", discover="1s"),
            r"^jsonl\(\) has no argument discover=; did you mean discover_every=\?; it takes "
            r"path, ",
        ),
        (
            lambda: af.io.csv("x", separator=";"),
            r"^csv\(\) has no argument separator=; it takes path, type, delimiter=, header=, ",
        ),
        (lambda: af.io.lines(), r"^lines\(\) needs path; it takes path, encoding=, "),
        (lambda: af.sum(field=c.v), r"^sum\(\) has no argument field=; it takes fn, where=$"),
        (
            lambda: af.top(3, c.v, c.v),
            r"^top\(\) takes at most 2 arguments without a name, got 3; it takes n, by, where=$",
        ),
        (
            lambda: af.sliding("1m"),
            r"^sliding\(\) needs slide; it takes size, slide, offset, time=$",
        ),
        (lambda: af.on_count(), r"^on_count\(\) needs n; it takes n$"),
        (
            lambda: af.no_restart(3),
            r"^no_restart\(\) takes no argument without a name, got 1; it takes nothing$",
        ),
        (
            lambda: af.Retry(3, backof="1s"),
            r"^Retry\(\) has no argument backof=; did you mean backoff=\?; it takes attempts, "
            r"backoff, ",
        ),
        (
            lambda: af.Flow("x", paralelism=4),
            r"^Flow\(\) has no argument paralelism=; did you mean parallelism=\?; it takes name, ",
        ),
        (
            lambda: af.WatermarkStrategy.bounded_out_of_orderness("5s", lambda row: row.ts),
            r"^bounded_out_of_orderness\(\) takes at most 1 argument without a name, got 2; it "
            r"takes delay, timestamp=, idle_after=$",
        ),
        (
            lambda: af.Flow("x").source([1], watermark=None),
            r"^source\(\) has no argument watermark=; did you mean watermarks=\?",
        ),
        (lambda: stream().map(), r"^map\(\) needs fn; it takes fn, \*\*options$"),
        (lambda: stream().map(name="m"), r"^map\(\) needs fn"),
        (
            lambda: stream().map(str, concurency=3),
            r"^map\(\) has no argument concurency=; did you mean concurrency=\?; it takes fn, ",
        ),
        (
            lambda: stream().key_by(c.v).count(c.v),
            r"^count\(\) takes no argument without a name, got 1; it takes name=, uid=",
        ),
        (
            lambda: stream().key_by(c.v).aggregate(n=af.count(), total=af.sum(c.v)),
            r"^aggregate\(\) has no argument n=: results by name are one aggregate, write "
            r"aggregate\(af\.agg\(n=\.\.\., total=\.\.\.\)\)$",
        ),
        (
            lambda: stream().key_by(c.v).count_window(2).aggregate(n=af.count(), uid="n"),
            r"^aggregate\(\) has no argument n=: results by name are one aggregate, write "
            r"aggregate\(af\.agg\(n=\.\.\.\)\)$",
        ),
        (
            lambda: stream().key_by(c.v).count_window(2).aggregate(af.count(), window_fm=max),
            r"^aggregate\(\) has no argument window_fm=; did you mean window_fn=\?; it takes agg, "
            r"window_fn, name=, uid=, parallelism=$",
        ),
        (
            lambda: stream().key_by(c.v).window(af.tumbling("1m"), latenes="1s"),
            r"^window\(\) has no argument latenes=; did you mean late",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_named_with_those_that_would(
    call: Callable[[], Any], said: str
) -> None:
    with pytest.raises(TypeError, match=said) as caught:
        call()
    assert (
        caught.value.__context__ is None or caught.value.__suppress_context__
    )  # Python's own words stand nowhere beside it.


def test_a_type_error_from_within_a_function_stays_as_it_is() -> None:
    @explained
    def inner(value: int) -> int:
        return value + "1"  # type: ignore[operator]

    with pytest.raises(TypeError, match=r"^unsupported operand"):
        inner(1)

    @explained
    def outer() -> int:
        return inner(1, 2)  # type: ignore[call-arg]

    with pytest.raises(
        TypeError,
        match=r"^inner\(\) takes at most 1 argument without a name, got 2; it takes value$",
    ):
        outer()


def test_errors_that_python_explains_are_left_to_python() -> None:
    @explained
    def two(a: int, b: int = 0) -> int:
        return a + b

    assert two(1, b=2) == 3
    with pytest.raises(TypeError, match="multiple values for argument 'a'"):
        two(1, a=2)


def test_an_explained_function_looks_like_itself() -> None:
    assert af.io.jsonl.__name__ == "jsonl"
    assert list(inspect.signature(af.tumbling).parameters) == ["size", "offset", "time"]


def test_public_synchronous_methods_of_a_class_are_explained() -> None:
    @explained_methods
    class Three:
        def __init__(self, a: int) -> None:
            self.a = a

        @staticmethod
        def of(a: int) -> Three:
            return Three(a)

        @classmethod
        def made(cls, a: int) -> Three:
            return cls(a)

        async def wait(self) -> None:
            """Stays a coroutine function."""

        def _own(self) -> None:
            """Is called from within, which does not concern users."""

    made: Any = Three.made(1)
    assert (Three.of(2).a, made.a) == (2, 1)
    assert inspect.iscoroutinefunction(Three.wait)
    for call, said in (
        (lambda: Three(), "Three() needs a; it takes a"),  # type: ignore[call-arg]
        (lambda: Three.of(b=1), "of() has no argument b=; it takes a"),  # type: ignore[call-arg]
        (
            lambda: Three.made(1, 2),
            "made() takes at most 1 argument without a name, got 2; it takes a",
        ),  # type: ignore[call-arg]
        (
            lambda: made._own(1),
            f"{Three._own.__qualname__}() takes 1 positional argument but 2 were given",
        ),
    ):
        with pytest.raises(TypeError) as caught:
            call()  # type: ignore[no-untyped-call]
        assert str(caught.value) == said


def test_error_for_an_unknown_connector_names_the_nearest() -> None:
    with pytest.raises(
        AttributeError,
        match=(
            r"no connector 'json', expected one of arrow, .*; did you mean "
            r"af\.io\.jsonl\(\.\.\.\)\?$"
        ),
    ):
        af.io.json
    with pytest.raises(
        AttributeError,
        match=r"no connector 'fax', expected one of arrow, blackhole, .*, websocket$",
    ):
        af.io.fax
