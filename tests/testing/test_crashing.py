"""`crash_and_restore`: a kill here, a restart, and the same rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy
import pytest

import aioflow as af
from aioflow.testing import crash_and_restore

WORDS = ["a", "b", "a", "c", "a", "b", "a", "b", "c", "a", "a", "b"]


def counted() -> Any:
    return af.Flow("words").source(WORDS).key_by(str).count(uid="counts")


@pytest.mark.parametrize("here", [1, 5, 12, lambda row: row == ("b", 3)])
@pytest.mark.parametrize("seed", [0, 1])
def test_state_survives_a_kill(here: Any, seed: int) -> None:
    run = crash_and_restore(counted(), here=here, seed=seed)
    assert run.rows == run.expected
    assert sorted(run.rows)[-1] == ("c", 2)
    assert len(run.rows) == len(WORDS)


def test_kill_strikes_between_checkpoints() -> None:
    run = crash_and_restore(counted(), here=9)
    assert 0 < run.committed < 9
    assert run.again > 0


class Forgets(af.KeyedProcessFunction[str, str, tuple[str, int]]):
    """Counts in a variable of its own, which is not in the checkpoint."""

    def open(self, ctx: Any) -> None:
        self.counts: dict[str, int] = {}

    def process_element(self, value: str, ctx: Any) -> Iterator[tuple[str, int]]:
        self.counts[value] = self.counts.get(value, 0) + 1
        yield value, self.counts[value]


def test_state_outside_of_checkpoints_is_found() -> None:
    forgetful = af.Flow("words").source(WORDS).key_by(str).process(Forgets())
    with pytest.raises(AssertionError, match=r"after a kill and a restart .* missing: .*different"):
        crash_and_restore(forgetful, here=9)


def test_kill_that_never_comes_is_refused() -> None:
    with pytest.raises(ValueError, match="gave 12 rows and never came to here=13"):
        crash_and_restore(counted(), here=13)
    with pytest.raises(ValueError, match="at least 1"):
        crash_and_restore(counted(), here=0)


def test_pushed_elements_are_refused() -> None:
    flow = af.Flow("pushed")
    with pytest.raises(af.GraphError, match="would never end"):
        crash_and_restore(flow.source(af.io.push()), here=1)


async def test_runs_while_a_loop_runs() -> None:
    assert len(crash_and_restore(counted(), here=3).rows) == len(WORDS)


def test_windows_timers_and_async_calls_survive_a_kill() -> None:
    async def enrich(value: int) -> int:
        return value

    flow = af.Flow("windows")
    numbers = flow.source(
        range(0, 4_000, 100),
        watermarks=af.WatermarkStrategy.monotonous_timestamps(timestamp=lambda value: value),
    ).map(enrich, concurrency=4)
    sums = numbers.key_by(lambda value: value % 3).window(af.tumbling("1s")).aggregate(af.count())
    run = crash_and_restore(sums, here=5)
    assert run.committed < 5
    assert sum(row.value for row in run.rows) == 40


def test_error_of_the_flow_is_raised_instead_of_restarts_for_ever() -> None:
    with pytest.raises(ZeroDivisionError):
        crash_and_restore(af.Flow("zero").source([1]).map(lambda n: 1 / (n - 1)), here=1)


@pytest.mark.parametrize("make", [lambda n: (n, float("nan")), lambda n: numpy.array([n, 1])])
def test_rows_that_do_not_equal_themselves_are_compared(make: Any) -> None:
    run = crash_and_restore(af.Flow("rows").source(range(6)).map(make), here=4)
    assert len(run.rows) == len(run.expected) == 6


@pytest.mark.parametrize("here", [None, 1.5, "3", True])
def test_place_of_another_type_is_refused(here: Any) -> None:
    with pytest.raises(TypeError, match="expected a number of rows, or a function of a row"):
        crash_and_restore(counted(), here=here)


def test_workers_are_refused() -> None:
    with pytest.raises(ValueError, match="one simulated process, so leave workers= out"):
        crash_and_restore(counted(), here=1, workers=2)
