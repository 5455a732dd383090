"""Flows that cannot run are refused at the line that builds them, before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import aioflow as af


def numbers(flow: af.Flow) -> af.DataStream[int]:
    return flow.source([1, 2, 3], uid="numbers")


@pytest.mark.parametrize(
    ("build", "told"),
    [
        (
            lambda f: numbers(f).map(str, uid="same").map(len, uid="same"),
            r"two operators have uid 'same', 'map\(str\)' and 'map\(len\)'",
        ),
        (
            lambda f: numbers(f).map(str, uid="numbers"),
            "two operators have uid 'numbers', 'list' and",
        ),
        (lambda f: (numbers(f), numbers(f)), "two operators have uid 'numbers'"),
        (
            lambda f: numbers(f).map(str, parallelism=129),
            r"operator 'map\(str\)' has parallelism 129; expected 1 to max_parallelism=128",
        ),
        (
            lambda f: f.source([1], parallelism=200, name="ones"),
            "operator 'ones' has parallelism 200; expected 1 to max_parallelism=128",
        ),
        (lambda f: numbers(f).throttle(0), "throttle: n is 0, expected an int of at least 1"),
        (lambda f: numbers(f).throttle(5, per="0s"), "throttle: per is '0s', expected more than 0"),
        (
            lambda f: numbers(f).map_batches(list, max_size=0),
            "map_batches: max_size is 0, expected an int of at least 1",
        ),
        (
            lambda f: numbers(f).map_batches(list, max_wait="-1s"),
            "map_batches: max_wait is '-1s', expected 0 or more",
        ),
    ],
)
def test_an_operator_that_cannot_run_is_an_error_at_its_line(
    build: Callable[[af.Flow], Any], told: str
) -> None:
    with pytest.raises(af.GraphError, match=told):
        build(af.Flow("wrong"))


async def test_refused_operator_is_not_part_of_the_flow() -> None:
    flow = af.Flow("right")
    stream = numbers(flow)
    for _ in range(2):
        with pytest.raises(af.GraphError, match="two operators have uid"):
            stream.map(str, uid="numbers")
    assert await stream.map(str, uid="texts").collect() == ["1", "2", "3"]
