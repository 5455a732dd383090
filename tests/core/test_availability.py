"""Level-triggered availability: a future exists only for a waiter, and no wake-up is lost."""

from __future__ import annotations

import asyncio
from itertools import permutations

import pytest

from aioflow.core.availability import AVAILABLE, Availability, all_of


def test_the_constant_is_available() -> None:
    """C1.1"""
    assert AVAILABLE.is_available


async def test_the_future_of_what_is_available_is_done() -> None:
    assert Availability(available=True).get_available_future().done()
    assert AVAILABLE.get_available_future().done()


async def test_a_reset_gives_a_pending_future() -> None:
    """C1.1"""
    availability = Availability(available=True)
    before = availability.get_available_future()
    availability.set_unavailable()
    future = availability.get_available_future()
    assert future is not before
    assert not future.done()
    availability.set_unavailable()
    assert not future.done()
    availability.set_available()
    assert future.done()


async def test_cancelling_one_waiter_leaves_the_others_waiting() -> None:
    availability = Availability()
    cancelled, waiting = (
        asyncio.ensure_future(asyncio.wait_for(availability.get_available_future(), 60))
        for _ in range(2)
    )
    await asyncio.sleep(0)
    cancelled.cancel()
    for _ in range(3):
        await asyncio.sleep(0)
    assert cancelled.cancelled()
    assert not waiting.done()
    availability.set_available()
    await waiting


async def test_cancelled_waiters_leave_nothing_behind() -> None:
    availability = Availability()
    for _ in range(10):
        availability.get_available_future().cancel()
    await asyncio.sleep(0)
    assert availability._callbacks == []


async def test_returned_future_completes_even_if_the_flag_falls_again_at_once() -> None:
    """C1: a spurious completion is allowed, a lost wake-up is not."""
    availability = Availability()
    future = availability.get_available_future()
    availability.set_available()
    availability.set_unavailable()
    assert future.done()
    assert not availability.get_available_future().done()


async def test_several_waiters_are_all_woken() -> None:
    availability = Availability()
    woken: list[int] = []

    async def wait(number: int) -> None:
        await availability.get_available_future()
        woken.append(number)

    tasks = [asyncio.create_task(wait(number)) for number in range(3)]
    await asyncio.sleep(0)
    availability.set_available()
    await asyncio.gather(*tasks)
    assert woken == [0, 1, 2]


async def test_a_cancelled_waiter_leaves_no_dead_future_behind() -> None:
    availability = Availability()
    availability.get_available_future().cancel()
    future = availability.get_available_future()
    assert not future.cancelled()
    availability.set_available()
    assert future.done()


async def test_raising_after_a_cancelled_waiter_is_harmless() -> None:
    availability = Availability()
    availability.get_available_future().cancel()
    availability.set_available()
    assert availability.is_available


def test_a_callback_is_made_once_when_the_flag_rises() -> None:
    availability = Availability()
    calls: list[str] = []
    availability.on_available(lambda: calls.append("risen"))
    assert calls == []
    availability.set_available()
    availability.set_unavailable()
    availability.set_available()
    assert calls == ["risen"]


def test_a_callback_on_what_is_available_is_made_at_once() -> None:
    calls: list[str] = []
    Availability(available=True).on_available(lambda: calls.append("up"))
    assert calls == ["up"]


def test_a_callback_may_register_again_without_being_called_twice() -> None:
    availability = Availability()
    calls: list[int] = []

    def again() -> None:
        calls.append(len(calls))
        availability.set_unavailable()
        availability.on_available(again)

    availability.on_available(again)
    availability.set_available()
    assert calls == [0]
    availability.set_available()
    assert calls == [0, 1]


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_the_conjunction_of_three_is_available_only_after_all_in_any_order(
    order: tuple[int, ...],
) -> None:
    """C1.3"""
    parts = [Availability() for _ in range(3)]
    combined = all_of(parts)
    for index in order[:-1]:
        parts[index].set_available()
        assert not combined.is_available
    parts[order[-1]].set_available()
    assert combined.is_available


def test_the_conjunction_of_what_is_available_is_available() -> None:
    assert all_of([]).is_available
    assert all_of([AVAILABLE, Availability(available=True)]).is_available
