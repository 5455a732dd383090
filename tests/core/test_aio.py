"""The asyncio helpers keep the order of creation and lose neither an error nor a cancellation."""

from __future__ import annotations

import asyncio
import logging

import pytest

from aioflow.core.aio import (
    OrderedTaskGroup,
    cancel_and_wait,
    close_within,
    wait_all,
    wait_first,
)


class Boom(Exception):
    """The error of a failing child."""


async def fail(error: BaseException | None = None) -> None:
    raise Boom() if error is None else error


async def turns() -> None:
    """Enough turns of the loop for every task to come to where it waits."""
    for _ in range(10):
        await asyncio.sleep(0)


async def until_cancelled(log: list[object], name: object) -> None:
    try:
        await asyncio.get_running_loop().create_future()
    finally:
        log.append(name)


async def test_group_returns_when_every_child_has_ended() -> None:
    done: list[int] = []

    async def child(number: int) -> int:
        await asyncio.sleep(0)
        done.append(number)
        return number

    async with OrderedTaskGroup() as group:
        tasks = [group.create_task(child(number), name=f"child-{number}") for number in range(3)]
    assert done == [0, 1, 2]
    assert [task.result() for task in tasks] == [0, 1, 2]
    assert tasks[1].get_name() == "child-1"


async def test_failed_child_aborts_its_siblings_in_order_of_creation() -> None:
    log: list[object] = []
    with pytest.raises(BaseExceptionGroup) as caught:
        async with OrderedTaskGroup() as group:
            for number in range(50):
                group.create_task(until_cancelled(log, number))
            group.create_task(fail())
    assert log == list(range(50))
    assert [type(error) for error in caught.value.exceptions] == [Boom]


async def test_errors_of_several_children_are_grouped_in_order_of_occurrence() -> None:
    async def fail_when_cancelled(error: Exception) -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            raise error

    first, second = ValueError("first"), ValueError("second")
    with pytest.raises(ExceptionGroup) as caught:
        async with OrderedTaskGroup() as group:
            group.create_task(fail_when_cancelled(first))
            group.create_task(fail_when_cancelled(second))
            group.create_task(fail())
    assert [type(error) for error in caught.value.exceptions] == [Boom, ValueError, ValueError]
    assert caught.value.exceptions[1:] == (first, second)


async def test_failed_child_ends_a_waiting_body_and_its_owner_is_not_left_cancelled() -> None:
    owner = asyncio.current_task()
    assert owner is not None
    reached = False
    with pytest.raises(ExceptionGroup):
        async with OrderedTaskGroup() as group:
            group.create_task(fail())
            await asyncio.get_running_loop().create_future()
            reached = True
    assert not reached
    assert owner.cancelling() == 0
    await asyncio.sleep(0)  # Would raise if a cancellation were still pending.


async def test_error_in_the_body_cancels_the_children_and_is_grouped() -> None:
    log: list[object] = []
    with pytest.raises(ExceptionGroup) as caught:
        async with OrderedTaskGroup() as group:
            group.create_task(until_cancelled(log, "a"))
            group.create_task(until_cancelled(log, "b"))
            await asyncio.sleep(0)
            raise Boom
    assert log == ["a", "b"]
    assert [type(error) for error in caught.value.exceptions] == [Boom]


async def test_cancelling_the_owner_cancels_the_children_and_raises_cancelled() -> None:
    log: list[object] = []

    async def owner() -> None:
        async with OrderedTaskGroup() as group:
            group.create_task(until_cancelled(log, "a"))
            group.create_task(until_cancelled(log, "b"))

    task = asyncio.create_task(owner())
    await turns()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert log == ["a", "b"]
    assert task.cancelled()


async def test_cancelling_the_owner_in_its_body_cancels_the_children() -> None:
    log: list[object] = []

    async def owner() -> None:
        async with OrderedTaskGroup() as group:
            group.create_task(until_cancelled(log, "child"))
            await asyncio.get_running_loop().create_future()

    task = asyncio.create_task(owner())
    await turns()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert log == ["child"]


async def test_child_that_fails_while_the_owner_is_cancelled_wins_and_keeps_the_cancel() -> None:
    seen: list[str] = []

    async def stubborn() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            raise Boom

    async def owner() -> None:
        try:
            async with OrderedTaskGroup() as group:
                group.create_task(stubborn())
        except* Boom:
            seen.append("boom")
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    task = asyncio.create_task(owner())
    await turns()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert seen == ["boom", "cancelled"]


async def test_cancelling_again_while_children_end_does_not_leave_them_behind() -> None:
    log: list[object] = []
    gate = asyncio.Event()

    async def slow_to_end() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            await gate.wait()
            log.append("ended")

    async def owner() -> None:
        async with OrderedTaskGroup() as group:
            group.create_task(slow_to_end())

    task = asyncio.create_task(owner())
    await turns()
    task.cancel()
    await turns()
    task.cancel()
    await turns()
    assert not task.done()
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert log == ["ended"]


async def test_nested_groups_unwind_from_the_inside() -> None:
    log: list[object] = []
    with pytest.raises(ExceptionGroup) as caught:
        async with OrderedTaskGroup() as outer:
            outer.create_task(until_cancelled(log, "outer child"))
            async with OrderedTaskGroup() as inner:
                inner.create_task(until_cancelled(log, "inner child"))
                inner.create_task(fail())
    assert log == ["inner child", "outer child"]
    assert isinstance(caught.value.exceptions[0], ExceptionGroup)
    assert isinstance(caught.value.exceptions[0].exceptions[0], Boom)


async def test_failure_in_the_outer_group_cancels_the_inner_one_without_another_error() -> None:
    log: list[object] = []
    with pytest.raises(ExceptionGroup) as caught:
        async with OrderedTaskGroup() as outer:
            outer.create_task(fail())
            async with OrderedTaskGroup() as inner:
                inner.create_task(until_cancelled(log, "inner"))
    assert [type(error) for error in caught.value.exceptions] == [Boom]
    assert log == ["inner"]


async def test_children_may_start_children_until_the_group_is_empty() -> None:
    log: list[int] = []

    async with OrderedTaskGroup() as group:

        async def spawn(depth: int) -> None:
            log.append(depth)
            await asyncio.sleep(0)
            if depth:
                group.create_task(spawn(depth - 1))

        group.create_task(spawn(3))
    assert log == [3, 2, 1, 0]


async def test_group_that_is_shut_refuses_a_child_and_closes_its_coroutine() -> None:
    async with OrderedTaskGroup() as group:
        pass
    coro = fail()
    with pytest.raises(RuntimeError, match="shutting down"):
        group.create_task(coro)
    assert coro.cr_frame is None
    with pytest.raises(RuntimeError, match="not entered"):
        OrderedTaskGroup().create_task(fail())
    with pytest.raises(RuntimeError, match="already been entered"):
        await group.__aenter__()


async def test_cancelled_child_is_no_error_and_leaves_its_siblings_alone() -> None:
    async with OrderedTaskGroup() as group:
        victim = group.create_task(until_cancelled([], "victim"))
        sibling = group.create_task(asyncio.sleep(0.001, "alive"))
        await asyncio.sleep(0)
        victim.cancel()
    assert victim.cancelled()
    assert sibling.result() == "alive"


async def test_cancel_children_ends_the_block_quietly_and_in_order() -> None:
    log: list[object] = []
    async with OrderedTaskGroup() as group:
        for number in range(20):
            group.create_task(until_cancelled(log, number))
        await asyncio.sleep(0)
        group.cancel_children()
    assert log == list(range(20))


async def test_keyboard_interrupt_of_the_body_comes_out_bare() -> None:
    log: list[object] = []
    with pytest.raises(KeyboardInterrupt):
        async with OrderedTaskGroup() as group:
            group.create_task(until_cancelled(log, "child"))
            await asyncio.sleep(0)
            raise KeyboardInterrupt
    assert log == ["child"]


async def test_wait_first_returns_the_indices_of_all_that_are_done_in_order() -> None:
    loop = asyncio.get_running_loop()
    futures: list[asyncio.Future[None]] = [loop.create_future() for _ in range(4)]
    loop.call_soon(futures[3].set_result, None)
    loop.call_soon(futures[1].set_result, None)
    assert await wait_first(futures) == [1, 3]
    assert await wait_first(futures) == [1, 3]
    with pytest.raises(ValueError, match="at least one"):
        await wait_first([])


async def test_wait_first_times_out_with_nothing_and_cancels_nothing() -> None:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    assert await wait_first([future], timeout_s=0.001) == []
    assert not future.done()


async def test_wait_all_waits_for_errors_and_cancellations_alike_and_raises_none() -> None:
    good = asyncio.create_task(asyncio.sleep(0))
    bad = asyncio.create_task(fail())
    gone = asyncio.create_task(asyncio.sleep(3600))
    asyncio.get_running_loop().call_soon(gone.cancel)
    assert await wait_all([good, bad, gone])
    assert isinstance(bad.exception(), Boom)
    assert gone.cancelled()
    assert await wait_all([])


async def test_wait_all_tells_a_timeout_and_leaves_no_callback_behind() -> None:
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()
    done.set_result(None)
    future: asyncio.Future[None] = loop.create_future()
    assert not await wait_all([done, future], timeout_s=0.001)
    assert future.remove_done_callback(print) == 0
    assert not future._callbacks  # type: ignore[attr-defined]


async def test_cancel_and_wait_cancels_in_order_and_returns_the_errors() -> None:
    log: list[object] = []

    async def bad_end() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            log.append("bad")
            raise Boom

    tasks = [asyncio.create_task(until_cancelled(log, number)) for number in range(10)]
    tasks.append(asyncio.create_task(bad_end()))
    await asyncio.sleep(0)
    errors = await cancel_and_wait(reversed(tasks))
    assert log == ["bad", *reversed(range(10))]
    assert [type(error) for error in errors] == [Boom]


async def test_close_within_finishes_the_close_before_it_passes_on_a_cancellation() -> None:
    log: list[str] = []

    async def close() -> None:
        await asyncio.sleep(0.002)
        log.append("closed")

    async def owner() -> None:
        try:
            await close_within(close(), 5, what="sink")
        finally:
            log.append("owner ends")

    task = asyncio.create_task(owner())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert log == ["closed", "owner ends"]


async def test_close_within_cuts_off_a_close_that_hangs_and_says_which(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log: list[object] = []
    with caplog.at_level(logging.WARNING, logger="aioflow.core.aio"):
        assert not await close_within(until_cancelled(log, "cancelled"), 0.001, what="sink count-1")
    assert log == ["cancelled"]
    assert "closing sink count-1 took longer than 0.0 s, cancelled" in caplog.text


async def test_close_within_raises_the_error_of_the_close() -> None:
    with pytest.raises(Boom):
        await close_within(fail(), 5, what="sink")
    assert await close_within(asyncio.sleep(0), 5, what="sink")
