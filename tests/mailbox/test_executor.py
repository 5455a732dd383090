"""Writing mail, yielding inside an action, and the door for other threads."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Awaitable, Callable

import pytest

from aioflow.core.errors import MailboxClosed
from aioflow.mailbox.executor import MailboxError, MailboxExecutor
from aioflow.mailbox.mailbox import MIN_PRIORITY
from aioflow.mailbox.processor import MailboxProcessor


def complete(controller: MailboxProcessor) -> None:
    controller.suspend()


def suspend_for_ever(controller: MailboxProcessor) -> None:
    controller.suspend_default_action("input")


def fail() -> None:
    raise ValueError("inside")


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def in_thread(fn: Callable[[], object]) -> list[object]:
    """Returns or raises the outcome of `fn` in a thread that has ended."""
    outcome: list[object] = []

    def run() -> None:
        try:
            outcome.append(fn())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return outcome


class TestExecute:
    async def test_closing_mailbox_rejects_new_mail_and_cancels_what_was_submitted(self) -> None:
        """A9.1"""
        processor = MailboxProcessor(complete)
        executor = processor.executor(0)
        future = executor.submit(lambda: 7, "seven")
        processor.prepare_close()
        for write in (executor.execute, executor.submit):
            with pytest.raises(MailboxClosed):
                write(lambda: None, "late")  # type: ignore[operator]
        assert not future.done()
        processor.close()
        assert future.cancelled()

    async def test_submitted_action_runs_in_the_owner_and_completes_its_future(self) -> None:
        """A9.2"""
        ran_in: list[object] = []

        def seven() -> int:
            ran_in.append(asyncio.current_task())
            return 7

        processor = MailboxProcessor(complete)
        future = processor.executor(0).submit(seven, "seven")
        owner = asyncio.create_task(processor.run_loop())
        await owner
        assert await future == 7
        assert ran_in == [owner]

    async def test_error_of_a_submitted_action_goes_into_its_future_alone(self) -> None:
        """A9.4"""
        processor = MailboxProcessor(complete)
        future = processor.executor(0).submit(fail, "fail")
        await processor.run_loop()
        with pytest.raises(ValueError, match="inside"):
            await future

    async def test_error_of_an_executed_action_fails_the_loop(self) -> None:
        """A9.4"""
        processor = MailboxProcessor(complete)
        processor.executor(0).execute(fail, "fail")
        with pytest.raises(ValueError, match="inside"):
            await processor.run_loop()

    async def test_submitted_action_that_was_cancelled_does_not_run(self) -> None:
        ran: list[int] = []
        processor = MailboxProcessor(complete)
        future = processor.executor(0).submit(lambda: ran.append(1), "cancelled")
        future.cancel()
        await processor.run_loop()
        assert ran == []

    async def test_submitted_coroutine_function_is_awaited_and_its_result_returned(self) -> None:
        async def seven() -> int:
            await asyncio.sleep(0)
            return 7

        async def failing() -> int:
            await asyncio.sleep(0)
            raise ValueError("inside")

        processor = MailboxProcessor(complete)
        future = processor.executor(0).submit(seven, "seven")
        failed = processor.executor(0).submit(failing, "failing")
        await processor.run_loop()
        assert await future == 7
        with pytest.raises(ValueError, match="inside"):
            await failed

    async def test_cancelling_the_task_while_a_submitted_coroutine_awaits_cancels_its_future(
        self,
    ) -> None:
        async def for_ever() -> None:
            await asyncio.get_running_loop().create_future()

        processor = MailboxProcessor(complete)
        future = processor.executor(0).submit(for_ever, "for ever")
        task = asyncio.create_task(processor.run_loop())
        await turns()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert future.cancelled()

    async def test_submitted_action_that_raises_stop_iteration_does_not_break_the_loop(
        self,
    ) -> None:
        processor = MailboxProcessor(complete)
        future = processor.executor(0).submit(lambda: next(iter(())), "next of nothing")
        await processor.run_loop()
        with pytest.raises(RuntimeError, match="StopIteration"):
            await future

    async def test_submitted_action_that_raises_cancelled_error_cancels_its_future_alone(
        self,
    ) -> None:
        def cancelled() -> None:
            raise asyncio.CancelledError

        processor = MailboxProcessor(complete)
        future = processor.executor(0).submit(cancelled, "cancelled")
        await processor.run_loop()
        assert future.cancelled()

    async def test_submitted_action_that_raises_no_exception_but_worse_fails_the_loop_too(
        self,
    ) -> None:
        class Stop(BaseException):
            pass

        def stop() -> None:
            raise Stop

        processor = MailboxProcessor(complete)
        future = processor.executor(0).submit(stop, "stop")
        with pytest.raises(Stop):
            await processor.run_loop()
        assert future.cancelled()

    async def test_future_cancelled_by_its_own_action_stays_cancelled(self) -> None:
        async def later() -> None:
            slow.cancel()

        processor = MailboxProcessor(complete)
        quick = processor.executor(0).submit(lambda: quick.cancel(), "cancel myself")
        slow = processor.executor(0).submit(later, "cancel myself later")
        await processor.run_loop()
        assert quick.cancelled()
        assert slow.cancelled()


class TestYield:
    async def test_yield_runs_one_mail_and_leaves_mail_of_lower_priority(self) -> None:
        ran: list[str] = []
        processor = MailboxProcessor(complete)
        for priority in (0, 1, 2, 1):
            processor.executor(priority).execute(lambda p=priority: ran.append(str(p)), "mail")
        await processor.executor(1).yield_()
        assert ran == ["1"]
        await processor.executor(1).yield_()
        assert ran == ["1", "2"]
        assert processor.mailbox.size == 2

    async def test_yield_waits_for_mail_of_its_priority(self) -> None:
        ran: list[str] = []
        processor = MailboxProcessor(complete)
        waiting = asyncio.create_task(processor.executor(1).yield_())
        await turns()
        processor.executor(0).execute(lambda: ran.append("upstream"), "upstream")
        await turns()
        assert not waiting.done()
        processor.executor(1).execute(lambda: ran.append("own"), "own")
        await waiting
        assert ran == ["own"]

    async def test_error_of_a_yielded_mail_reaches_the_caller_wrapped_and_the_mailbox_stays_usable(
        self,
    ) -> None:
        """A3.5"""
        processor = MailboxProcessor(complete)
        executor = processor.executor(0)
        executor.execute(fail, "mail %d", 7)
        executor.execute(lambda: None, "next")
        with pytest.raises(
            MailboxError, match=r"'mail 7' failed inside a yield: ValueError\('inside'\)"
        ) as caught:
            await executor.yield_()
        assert isinstance(caught.value.__cause__, ValueError)
        await executor.yield_()
        assert processor.mailbox.size == 0

    async def test_error_is_wrapped_once_however_deep_the_yields_are_nested(self) -> None:
        processor = MailboxProcessor(complete)
        executor = processor.executor(0)
        executor.execute(executor.yield_, "outer")
        executor.execute(fail, "inner")
        with pytest.raises(MailboxError, match="'inner'") as caught:
            await executor.yield_()
        assert isinstance(caught.value.__cause__, ValueError)

    async def test_base_exception_of_a_yielded_mail_is_not_wrapped(self) -> None:
        class Stop(BaseException):
            pass

        def stop() -> None:
            raise Stop

        processor = MailboxProcessor(complete)
        processor.executor(0).execute(stop, "stop")
        with pytest.raises(Stop):
            await processor.executor(0).yield_()

    async def test_deferrable_mail_is_left_by_a_yield_and_run_by_the_loop(self) -> None:
        """A4.5"""
        ran: list[str] = []
        processor = MailboxProcessor(complete)
        executor = processor.executor(42)
        executor.execute(lambda: ran.append("deferred"), "deferred", deferrable=True)
        assert processor.mailbox.try_take(42) is None
        await processor.run_loop()
        assert ran == ["deferred"]

    async def test_deferrable_mail_is_run_when_an_operator_ends(self) -> None:
        ran: list[str] = []
        processor = MailboxProcessor(complete)
        processor.executor(42).execute(lambda: ran.append("deferred"), "deferred", deferrable=True)
        await processor.drain()
        assert ran == ["deferred"]

    async def test_yield_of_the_lowest_priority_sees_deferrable_mail(self) -> None:
        executor = MailboxProcessor(complete).executor(MIN_PRIORITY)
        executor.execute(lambda: None, "deferred", deferrable=True)
        async with asyncio.timeout(60):
            await executor.yield_()

    async def test_yield_does_not_extend_the_batch(self) -> None:
        """Mail that arrives while a mail yields waits for the next batch, though the yield may
        take it.
        """
        order: list[str] = []
        calls = 0

        def action(controller: MailboxProcessor) -> None:
            nonlocal calls
            calls += 1
            order.append(f"action {calls}")
            if calls == 2:
                controller.suspend()

        async def yielding() -> None:
            executor.execute(lambda: order.append("taken by the yield"), "a")
            executor.execute(lambda: order.append("left"), "b")
            await executor.yield_()

        processor = MailboxProcessor(action)
        executor = processor.executor(0)
        executor.execute(yielding, "yielding")
        await processor.run_loop()
        assert order == ["taken by the yield", "action 1", "left", "action 2"]

    async def test_awaitable_mail_is_awaited_by_yield(self) -> None:
        ran: list[str] = []

        async def slowly() -> None:
            await asyncio.sleep(0)
            ran.append("slowly")

        executor = MailboxProcessor(complete).executor(0)
        executor.execute(slowly, "slowly")
        await executor.yield_()
        assert ran == ["slowly"]

    async def test_yield_leaves_control_mail_to_the_loop(self) -> None:
        processor = MailboxProcessor(complete)
        processor.report_throwable(ValueError("reported"))
        assert processor.mailbox.try_take(include_control=False) is None
        with pytest.raises(ValueError, match="reported"):
            await processor.run_loop()

    async def test_error_reported_while_an_operator_yields_before_the_loop_interrupts_it(
        self,
    ) -> None:
        processor = MailboxProcessor(complete)
        waiting = asyncio.create_task(processor.executor(0).yield_())
        await turns()
        processor.report_throwable(ValueError("reported"))
        with pytest.raises(ValueError, match="reported"):
            await waiting

    @pytest.mark.parametrize("awaitable_mail", [False, True])
    async def test_error_reported_inside_a_nested_yield_can_neither_be_wrapped_nor_caught(
        self, awaitable_mail: bool
    ) -> None:
        caught: list[Exception] = []

        async def for_ever() -> None:
            await asyncio.get_running_loop().create_future()

        async def careless() -> None:
            try:
                await processor.executor(0).yield_()
            except Exception as error:
                caught.append(error)

        processor = MailboxProcessor(lambda _: careless())
        if awaitable_mail:
            asyncio.get_running_loop().call_soon(
                processor.executor(0).execute, for_ever, "for ever"
            )
        task = asyncio.create_task(processor.run_loop())
        await turns()
        processor.report_throwable(ValueError("reported"))
        with pytest.raises(ValueError, match="reported"):
            await task
        assert caught == []
        assert task.cancelling() == 0

    async def test_cancelling_a_yield_in_the_turn_of_a_put_loses_no_mail(self) -> None:
        processor = MailboxProcessor(complete)
        waiting = asyncio.create_task(processor.executor(0).yield_())
        await turns()
        processor.report_throwable(ValueError("reported"))
        asyncio.get_running_loop().call_soon(processor.executor(0).execute, lambda: None, "kept")
        with pytest.raises(ValueError, match="reported"):
            await waiting
        assert [mail.description for mail in processor.close()] == ["kept"]

    async def test_yield_outside_of_the_owner_is_an_error(self) -> None:
        processor = MailboxProcessor(complete)
        processor.mailbox.bind_owner()

        async def stranger() -> None:
            with pytest.raises(RuntimeError, match="for the owner"):
                await processor.executor(0).yield_()

        await asyncio.create_task(stranger())


class TestThreads:
    async def test_action_from_a_thread_runs_in_the_owner_and_tells_the_thread(self) -> None:
        ran_in: list[object] = []
        processor = MailboxProcessor(suspend_for_ever)
        executor = processor.executor(0)
        outcome: list[object] = []

        def thread_body() -> None:
            done = executor.execute_threadsafe(
                lambda: ran_in.append(asyncio.current_task()), "from a thread"
            )
            outcome.append(done.result(timeout=60))
            processor.suspend()

        thread = threading.Thread(target=thread_body)
        owner = asyncio.create_task(processor.run_loop())
        thread.start()
        await owner
        thread.join()
        assert ran_in == [owner]
        assert outcome == [None]

    async def test_urgent_action_from_a_thread_overtakes_as_one_of_the_owner_does(self) -> None:
        """A4.1"""
        order: list[str] = []
        processor = MailboxProcessor(complete)
        executor = processor.executor(0)
        executor.execute(lambda: order.append("normal"), "normal")
        done = in_thread(
            lambda: executor.execute_threadsafe(
                lambda: order.append("urgent"), "urgent", urgent=True
            )
        )
        await turns()
        await processor.run_loop()
        assert order == ["urgent", "normal"]
        assert isinstance(done[0], concurrent.futures.Future)
        assert done[0].done()

    async def test_coroutine_function_from_a_thread_is_awaited(self) -> None:
        async def slowly() -> None:
            await asyncio.sleep(0)

        processor = MailboxProcessor(complete)
        executor = processor.executor(0)
        (done,) = in_thread(lambda: executor.execute_threadsafe(slowly, "slowly"))
        await turns()
        await processor.run_loop()
        assert isinstance(done, concurrent.futures.Future)
        assert done.result(0) is None

    async def test_error_of_a_coroutine_function_from_a_thread_fails_the_loop_and_tells_the_thread(
        self,
    ) -> None:
        async def failing() -> None:
            await asyncio.sleep(0)
            raise ValueError("inside")

        processor = MailboxProcessor(complete)
        executor = processor.executor(0)
        (done,) = in_thread(lambda: executor.execute_threadsafe(failing, "failing"))
        await turns()
        with pytest.raises(ValueError, match="inside") as caught:
            await processor.run_loop()
        assert isinstance(done, concurrent.futures.Future)
        assert done.exception(0) is caught.value

    async def test_mail_that_a_thread_cancelled_does_not_run(self) -> None:
        ran: list[int] = []
        processor = MailboxProcessor(complete)
        executor = processor.executor(0)
        (done,) = in_thread(lambda: executor.execute_threadsafe(lambda: ran.append(1), "cancelled"))
        assert isinstance(done, concurrent.futures.Future)
        done.cancel()
        await turns()
        await processor.run_loop()
        assert ran == []

    async def test_put_that_arrives_after_the_mailbox_shut_fails_its_future(self) -> None:
        processor = MailboxProcessor(complete)
        executor = processor.executor(0)
        (done,) = in_thread(lambda: executor.execute_threadsafe(lambda: None, "late"))
        (cancelled,) = in_thread(
            lambda: executor.execute_threadsafe(lambda: None, "late and unwanted")
        )
        assert isinstance(done, concurrent.futures.Future)
        assert isinstance(cancelled, concurrent.futures.Future)
        cancelled.cancel()
        processor.close()
        await turns()
        assert isinstance(done.exception(0), MailboxClosed)
        assert cancelled.cancelled()

    async def test_put_to_a_mailbox_seen_to_be_shut_raises_in_the_thread(self) -> None:
        processor = MailboxProcessor(complete)
        processor.prepare_close()
        (error,) = in_thread(lambda: processor.executor(0).execute_threadsafe(lambda: None, "late"))
        assert isinstance(error, MailboxClosed)

    async def test_mail_of_a_thread_that_close_drops_is_cancelled(self) -> None:
        processor = MailboxProcessor(complete)
        (done,) = in_thread(
            lambda: processor.executor(0).execute_threadsafe(lambda: None, "dropped")
        )
        await turns()
        processor.close()
        assert isinstance(done, concurrent.futures.Future)
        assert done.cancelled()

    def test_put_from_a_thread_after_the_loop_closed_raises_and_the_thread_ends(self) -> None:
        """J2.2"""
        executors: list[MailboxExecutor] = []

        async def main() -> None:
            processor = MailboxProcessor(suspend_for_ever)
            executors.append(processor.executor(0))

        asyncio.run(main())
        (error,) = in_thread(lambda: executors[0].execute_threadsafe(lambda: None, "late"))
        assert isinstance(error, MailboxClosed)
        assert "loop of its mailbox is closed" in str(error)

    def test_put_from_a_thread_before_there_is_a_loop_raises(self) -> None:
        executor = MailboxProcessor(complete).executor(0)
        with pytest.raises(MailboxClosed, match="no loop yet"):
            executor.execute_threadsafe(lambda: None, "early")

    def test_control_from_a_thread_after_the_loop_closed_is_ignored(self) -> None:
        """J2.2"""
        processors: list[MailboxProcessor] = []

        async def main() -> None:
            processors.append(MailboxProcessor(suspend_for_ever))

        asyncio.run(main())
        assert in_thread(processors[0].suspend) == [None]


async def test_nothing_is_left_behind_by_a_hundred_tasks() -> None:
    """J3.1: no task, no timer; the leak checks of the test session see the rest."""
    baseline = asyncio.all_tasks()
    scheduled = asyncio.get_running_loop()._scheduled  # type: ignore[attr-defined]
    for _ in range(100):
        processor = MailboxProcessor(complete)
        processor.executor(0).execute(lambda: None, "mail")
        await asyncio.create_task(processor.run_loop())
        processor.prepare_close()
        await processor.drain()
        assert processor.close() == []
    assert asyncio.all_tasks() == baseline
    assert [handle for handle in scheduled if not handle.cancelled()] == []


async def test_awaitable_that_is_no_coroutine_is_awaited_too() -> None:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    seen: list[str] = []

    def action(controller: MailboxProcessor) -> Awaitable[object]:
        controller.suspend()
        seen.append("called")
        return future

    task = asyncio.create_task(MailboxProcessor(action).run_loop())
    await turns()
    assert not task.done()
    future.set_result(None)
    await task
    assert seen == ["called"]
