"""The switch interval of the process while something runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

import aioflow as af
from aioflow.core.aio import switch_interval
from aioflow.task.chain import SLICE_NS


@pytest.fixture(autouse=True)
def usual() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.005)
    yield
    sys.setswitchinterval(before)


def test_it_is_as_before_when_the_last_leaves() -> None:
    with switch_interval(0.001):
        with switch_interval(0.0001), switch_interval(0.002):
            assert sys.getswitchinterval() == pytest.approx(0.0001)
        assert sys.getswitchinterval() == pytest.approx(0.001)
    assert sys.getswitchinterval() == pytest.approx(0.005)


def test_the_order_of_leaving_does_not_matter() -> None:
    short, long = switch_interval(0.0001), switch_interval(0.001)
    short.__enter__()
    long.__enter__()
    short.__exit__(None, None, None)
    assert sys.getswitchinterval() == pytest.approx(0.001)
    long.__exit__(None, None, None)
    assert sys.getswitchinterval() == pytest.approx(0.005)


def test_it_is_never_made_longer() -> None:
    sys.setswitchinterval(0.0005)
    with switch_interval(0.001):
        assert sys.getswitchinterval() == pytest.approx(0.0005)
    assert sys.getswitchinterval() == pytest.approx(0.0005)


def test_interval_set_by_the_program_meanwhile_stays() -> None:
    with switch_interval(0.001):
        sys.setswitchinterval(0.003)
        with switch_interval(0.0001):
            assert sys.getswitchinterval() == pytest.approx(0.003)
    assert sys.getswitchinterval() == pytest.approx(0.003)


async def test_a_running_flow_gives_threads_their_turn_within_a_slice() -> None:
    seen: list[float] = []
    flow = af.Flow("turns")
    flow.source(af.io.datagen(lambda i: i, count=3)).map(lambda _: sys.getswitchinterval()).sink(
        seen.append
    )
    await flow.execute()
    assert len(seen) == 3
    assert max(seen) < SLICE_NS / 1e9
    assert sys.getswitchinterval() == pytest.approx(0.005)
