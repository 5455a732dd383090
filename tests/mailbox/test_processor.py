"""The loop: mail first, then one default action; suspension, control, fairness, awaiting user
code.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from queue import SimpleQueue
from typing import Any

import pytest

from aioflow.core.errors import MailboxClosed
from aioflow.mailbox.mailbox import MIN_PRIORITY, Lane, Mail
from aioflow.mailbox.processor import RUNS_MAX, MailboxProcessor, Suspension


class Calls:
    """A default action that counts its calls, and completes at `stop_at` or does at the n-th
    call what `at` says.
    """

    def __init__(
        self, stop_at: int, at: dict[int, Callable[[MailboxProcessor], object]] | None = None
    ) -> None:
        self.count = 0
        self.stop_at = stop_at
        self.at = at or {}

    def __call__(self, controller: MailboxProcessor) -> None:
        self.count += 1
        if step := self.at.get(self.count):
            step(controller)
        if self.count >= self.stop_at:
            controller.suspend()


def suspend_for_ever(controller: MailboxProcessor) -> None:
    controller.suspend_default_action("input")


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("the condition did not come true within 1000 turns of the loop")


class TestLoop:
    async def test_loop_ends_after_the_default_action_that_completes_it(self) -> None:
        """A6.1"""
        action = Calls(stop_at=3)
        await MailboxProcessor(action).run_loop()
        assert action.count == 3

    async def test_mail_runs_before_the_default_action(self) -> None:
        order: list[str] = []

        def action(controller: MailboxProcessor) -> None:
            order.append("action")
            controller.suspend()

        processor = MailboxProcessor(action)
        executor = processor.executor(0)
        executor.execute(lambda: order.append("a"), "a")
        executor.execute(lambda: order.append("b"), "b")
        executor.execute(lambda: order.append("urgent"), "urgent", urgent=True)
        await processor.run_loop()

        assert order == ["urgent", "a", "b", "action"]

    async def test_mail_posted_by_a_mail_waits_for_one_default_action(self) -> None:
        """A2.6"""
        order: list[str] = []
        action = Calls(
            stop_at=2, at={1: lambda _: order.append("1"), 2: lambda _: order.append("2")}
        )
        processor = MailboxProcessor(action)
        executor = processor.executor(0)

        def first() -> None:
            order.append("first")
            executor.execute(lambda: order.append("second"), "second")

        executor.execute(first, "first")
        await processor.run_loop()
        assert order == ["first", "1", "second", "2"]

    async def test_mail_that_posts_itself_runs_once_a_default_action(self) -> None:
        """Avoid starvation: N default actions mean N runs of the mail."""
        runs = 0
        action = Calls(stop_at=100)
        processor = MailboxProcessor(action)
        executor = processor.executor(0)

        def again() -> None:
            nonlocal runs
            runs += 1
            executor.execute(again, "again")

        executor.execute(again, "again")
        await processor.run_loop()
        assert (action.count, runs) == (100, 100)

    async def test_urgent_mail_that_posts_urgent_mail_does_not_starve_the_default_action(
        self,
    ) -> None:
        action = Calls(stop_at=3)
        processor = MailboxProcessor(action)
        executor = processor.executor(0)

        def again() -> None:
            executor.execute(again, "again", urgent=True)

        executor.execute(again, "again", urgent=True)
        async with asyncio.timeout(60):
            await processor.run_loop()
        assert action.count == 3

    async def test_order_of_each_of_ten_threads_is_kept(self) -> None:
        """A2.7"""
        seen: dict[int, list[int]] = {thread: [] for thread in range(10)}
        left = 10
        processor = MailboxProcessor(suspend_for_ever)
        executor = processor.executor(0)

        def poison() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                processor.suspend()

        def write(thread: int) -> None:
            for i in range(1000):
                executor.execute_threadsafe(lambda i=i: seen[thread].append(i), "put")
            executor.execute_threadsafe(poison, "poison")

        threads = [threading.Thread(target=write, args=(thread,)) for thread in range(10)]
        for each in threads:
            each.start()
        await processor.run_loop()
        for each in threads:
            each.join()

        assert all(numbers == list(range(1000)) for numbers in seen.values())

    async def test_error_of_a_mail_leaves_the_loop_as_it_was_and_names_the_mail(self) -> None:
        """A6.3"""

        class Boom(Exception):
            pass

        def fail() -> None:
            raise Boom("from a thread")

        processor = MailboxProcessor(suspend_for_ever, name="count-1")
        executor = processor.executor(0)
        failed = []
        thread = threading.Thread(
            target=lambda: failed.append(executor.execute_threadsafe(fail, "mail %d", 7))
        )
        thread.start()
        with pytest.raises(Boom, match="from a thread") as caught:
            await processor.run_loop()
        thread.join()

        assert type(caught.value) is Boom
        assert str(caught.value) == "from a thread"
        assert "mail 7" in caught.value.__notes__[0]
        assert "count-1" in caught.value.__notes__[0]
        assert failed[0].exception() is caught.value

    async def test_error_of_the_default_action_leaves_the_loop_as_it_was(self) -> None:
        def action(_: MailboxProcessor) -> None:
            raise LookupError("no such key")

        processor = MailboxProcessor(action)
        with pytest.raises(LookupError, match=r"^'?no such key"):
            await processor.run_loop()
        assert not processor.is_running

    async def test_loop_suspended_before_it_started_runs_nothing(self) -> None:
        """A6.5"""
        action = Calls(stop_at=1)
        processor = MailboxProcessor(action)
        processor.suspend()
        await processor.run_loop()
        assert action.count == 0

    async def test_no_default_action_follows_the_mail_that_suspends_the_loop(self) -> None:
        """A6.6"""
        action = Calls(stop_at=1)
        processor = MailboxProcessor(action)
        later: list[int] = []
        processor.executor(0).execute(processor.suspend, "complete")
        processor.executor(0).execute(lambda: later.append(1), "later")
        await processor.run_loop()
        assert action.count == 0
        assert later == []

    async def test_suspended_loop_returns_and_goes_on_with_its_queue_intact(self) -> None:
        order: list[str] = []
        action = Calls(stop_at=5, at={2: lambda c: c.suspend()})
        processor = MailboxProcessor(action)
        await processor.run_loop()
        assert action.count == 2
        assert not processor.is_running

        processor.executor(0).execute(lambda: order.append(f"mail after {action.count}"), "mail")
        await processor.run_loop()
        assert action.count == 5
        assert order == ["mail after 2"]

    async def test_second_run_of_a_running_loop_is_an_error(self) -> None:
        processor = MailboxProcessor(lambda c: c.run_loop())
        with pytest.raises(RuntimeError, match="running already"):
            await processor.run_loop()

    async def test_loop_cannot_be_run_by_another_task_than_its_owner(self) -> None:
        processor = MailboxProcessor(Calls(stop_at=1))
        processor.mailbox.bind_owner()
        with pytest.raises(RuntimeError, match="cannot own it"):
            await asyncio.create_task(processor.run_loop())

    def test_processor_can_be_built_before_there_is_a_loop(self) -> None:
        action = Calls(stop_at=2)
        processor = MailboxProcessor(action)
        assert processor.time_in("input") == 0.0
        asyncio.run(processor.run_loop())
        assert action.count == 2


class TestSuspension:
    async def test_suspended_default_action_is_not_called_until_a_mail_resumes_it(self) -> None:
        """A7.1"""
        suspensions: list[Suspension] = []
        action = Calls(stop_at=6, at={3: lambda c: suspensions.append(c.suspend_default_action())})
        processor = MailboxProcessor(action)
        task = asyncio.create_task(processor.run_loop())
        await until(lambda: bool(suspensions))
        seen: list[int] = []
        for _ in range(5):
            processor.executor(0).execute(lambda: seen.append(action.count), "look")
            await asyncio.sleep(0)
        processor.executor(0).execute(suspensions[0].resume, "resume")
        await task

        assert seen == [3] * 5
        assert action.count == 6

    async def test_second_suspension_while_suspended_is_an_error(self) -> None:
        """A7.4"""

        def action(controller: MailboxProcessor) -> None:
            controller.suspend_default_action("output")
            controller.suspend_default_action("input")

        with pytest.raises(RuntimeError, match=r"for output: .*suspending for input"):
            await MailboxProcessor(action).run_loop()

    async def test_only_the_owner_suspends(self) -> None:
        processor = MailboxProcessor(suspend_for_ever)
        task = asyncio.create_task(processor.run_loop())
        await until(lambda: processor._suspension is not None)
        with pytest.raises(RuntimeError, match="for the owner"):
            processor.suspend_default_action()
        processor.suspend()
        await task

    async def test_stale_suspension_does_not_resume_the_next_one(self) -> None:
        suspensions: list[Suspension] = []
        action = Calls(
            stop_at=3,
            at={
                1: lambda c: suspensions.append(c.suspend_default_action()),
                2: lambda c: suspensions.append(c.suspend_default_action()),
            },
        )
        processor = MailboxProcessor(action)
        task = asyncio.create_task(processor.run_loop())
        await until(lambda: len(suspensions) == 1)
        suspensions[0].resume()
        suspensions[0].resume()
        await until(lambda: len(suspensions) == 2)
        suspensions[0].resume()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert action.count == 2
        assert processor._suspension is not None
        processor.resume_default_action(
            suspensions[0]
        )  # As a second thread does that raced with the first.
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert processor._suspension is not None
        suspensions[1].resume()
        await task
        assert action.count == 3

    async def test_resume_by_the_owner_takes_effect_at_once(self) -> None:
        def action(controller: MailboxProcessor) -> None:
            suspension = controller.suspend_default_action()
            suspension.resume()
            assert controller._suspension is None
            assert not controller.mailbox.has_mail
            controller.suspend()

        await MailboxProcessor(action).run_loop()

    async def test_resume_as_the_done_callback_of_a_future(self) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        action = Calls(
            stop_at=2, at={1: lambda c: future.add_done_callback(c.suspend_default_action().resume)}
        )
        task = asyncio.create_task(MailboxProcessor(action).run_loop())
        await until(lambda: action.count == 1)
        future.set_result(None)
        await task
        assert action.count == 2

    async def test_resume_from_a_thread_after_the_mailbox_closed_is_ignored(self) -> None:
        """A7.6"""
        suspensions: list[Suspension] = []

        def action(controller: MailboxProcessor) -> None:
            suspensions.append(controller.suspend_default_action())
            controller.suspend()

        processor = MailboxProcessor(action)
        await processor.run_loop()
        processor.prepare_close()
        processor.close()
        errors: list[BaseException] = []

        def resume() -> None:
            try:
                suspensions[0].resume()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=resume)
        thread.start()
        await asyncio.sleep(0)
        thread.join()
        await asyncio.sleep(0)
        assert errors == []

    async def test_resume_in_the_turn_in_which_the_mailbox_closes_is_ignored(self) -> None:
        suspensions: list[Suspension] = []

        def action(controller: MailboxProcessor) -> None:
            suspensions.append(controller.suspend_default_action())
            controller.suspend()

        processor = MailboxProcessor(action)
        await processor.run_loop()
        thread = threading.Thread(target=suspensions[0].resume)
        thread.start()
        thread.join()  # Its callback is now scheduled, and finds the mailbox closed.
        processor.close()
        await asyncio.sleep(0)
        assert not processor.mailbox.has_mail

    async def test_ten_thousand_switches_lose_no_wake_up(self) -> None:
        """Ping-pong: each default action suspends itself and is resumed from a callback of the
        loop.
        """
        loop = asyncio.get_running_loop()
        count = 0

        def action(controller: MailboxProcessor) -> None:
            nonlocal count
            count += 1
            if count == 10_000:
                controller.suspend()
            else:
                loop.call_soon(controller.suspend_default_action().resume)

        await MailboxProcessor(action).run_loop()
        assert count == 10_000

    @pytest.mark.parametrize(
        "switches",
        [2_000, pytest.param(125_000, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])],
    )
    async def test_resumes_from_eight_threads_lose_no_wake_up(self, switches: int) -> None:
        """J2.1: a million resumes in the slow variant.

        One that were lost would leave the loop suspended for ever.
        """
        count = 0
        inboxes: list[SimpleQueue[Suspension | None]] = [SimpleQueue() for _ in range(8)]

        def action(controller: MailboxProcessor) -> None:
            nonlocal count
            count += 1
            suspension = None
            if count == switches:
                controller.suspend()
            else:
                suspension = controller.suspend_default_action()
            for inbox in inboxes:
                inbox.put(suspension)

        def resume_all(inbox: SimpleQueue[Suspension | None]) -> None:
            while (suspension := inbox.get()) is not None:
                suspension.resume()

        processor = MailboxProcessor(action)
        threads = [threading.Thread(target=resume_all, args=(inbox,)) for inbox in inboxes]
        for each in threads:
            each.start()
        try:
            async with asyncio.timeout(1000):
                await processor.run_loop()
        finally:
            for inbox in inboxes:
                inbox.put(None)
            for each in threads:
                each.join()
        assert count == switches


class TestControl:
    async def test_suspending_the_loop_leaves_queued_mail_unrun_and_close_cancels_it(self) -> None:
        """A8.1"""
        ran: list[int] = []
        processor = MailboxProcessor(Calls(stop_at=1))
        futures = [
            processor.executor(0).submit(lambda i=i: ran.append(i), "%d", i) for i in range(5)
        ]
        processor.suspend()
        await processor.run_loop()
        dropped = processor.close()

        assert ran == []
        assert [mail.description for mail in dropped] == ["0", "1", "2", "3", "4"]
        assert all(future.cancelled() for future in futures)

    async def test_control_of_a_closed_mailbox_is_ignored(self) -> None:
        """A8.2"""
        processor = MailboxProcessor(Calls(stop_at=1))
        processor.close()
        processor.suspend()
        processor.report_throwable(ValueError("late"))
        assert not processor.mailbox.has_mail

    async def test_error_reported_while_suspended_ends_the_loop_promptly(self) -> None:
        """A8.3"""
        processor = MailboxProcessor(suspend_for_ever)
        task = asyncio.create_task(processor.run_loop())
        await until(lambda: processor._suspension is not None)
        error = ValueError("reported")
        processor.report_throwable(error)
        with pytest.raises(ValueError, match="reported") as caught:
            await task
        assert caught.value is error
        assert not hasattr(error, "__notes__")

    async def test_reported_error_goes_before_queued_mail(self) -> None:
        ran: list[int] = []
        processor = MailboxProcessor(Calls(stop_at=1))
        processor.executor(0).execute(lambda: ran.append(1), "mail", urgent=True)
        processor.report_throwable(ValueError("reported"))
        with pytest.raises(ValueError, match="reported"):
            await processor.run_loop()
        assert ran == []

    async def test_reported_error_that_is_no_exception_keeps_its_type(self) -> None:
        """A8.4"""

        class Stop(BaseException):
            pass

        processor = MailboxProcessor(suspend_for_ever)
        thread = threading.Thread(target=processor.report_throwable, args=(Stop("now"),))
        thread.start()
        with pytest.raises(Stop, match="now"):
            await processor.run_loop()
        thread.join()

    def test_keyboard_interrupt_out_of_a_mail_leaves_the_event_loop(self) -> None:
        """A8.4"""

        def interrupt() -> None:
            raise KeyboardInterrupt("ctrl-c")

        async def main() -> None:
            processor = MailboxProcessor(suspend_for_ever)
            processor.executor(0).execute(interrupt, "interrupt")
            await processor.run_loop()

        with pytest.raises(KeyboardInterrupt, match="ctrl-c"):
            asyncio.run(main())

    async def test_control_from_a_thread_wakes_a_parked_loop(self) -> None:
        processor = MailboxProcessor(suspend_for_ever)
        thread = threading.Thread(target=processor.suspend)
        task = asyncio.create_task(processor.run_loop())
        await until(lambda: processor._suspension is not None)
        thread.start()
        async with asyncio.timeout(60):
            await task
        thread.join()

    async def test_cancelling_the_parked_task_cancels_it_and_leaves_the_mailbox_usable(
        self,
    ) -> None:
        processor = MailboxProcessor(suspend_for_ever)
        task = asyncio.create_task(processor.run_loop())
        await until(lambda: processor._suspension is not None)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

        future = processor.executor(0).submit(lambda: 1, "after")
        assert len(processor.close()) == 1
        assert future.cancelled()

    async def test_drain_runs_what_is_queued_after_the_mailbox_was_quiesced(self) -> None:
        ran: list[str] = []
        processor = MailboxProcessor(Calls(stop_at=1))
        await processor.run_loop()
        executor = processor.executor(3)
        executor.execute(lambda: ran.append("a"), "a")
        executor.execute(lambda: ran.append("deferred"), "deferred", deferrable=True)
        executor.execute(lambda: ran.append("urgent"), "urgent", urgent=True)
        processor.prepare_close()
        with pytest.raises(MailboxClosed):
            executor.execute(lambda: None, "late")
        await processor.drain()

        assert ran == ["urgent", "a", "deferred"]
        assert processor.close() == []

    async def test_mail_behind_one_that_fails_in_a_drain_is_cancelled_by_close(self) -> None:
        def fail() -> None:
            raise ValueError("drained")

        processor = MailboxProcessor(Calls(stop_at=1))
        processor.executor(0).execute(fail, "fail")
        future = processor.executor(0).submit(lambda: 1, "behind")
        with pytest.raises(ValueError, match="drained"):
            await processor.drain()
        processor.close()
        assert future.cancelled()


class TestFairness:
    async def test_busy_default_action_gives_the_event_loop_its_turn_after_each_slice(self) -> None:
        time = [0.0]
        turns: list[int] = []
        action = Calls(stop_at=100)

        def ticking(controller: MailboxProcessor) -> None:
            time[0] += 0.001
            action(controller)

        async def other() -> None:
            while action.count < 100:
                turns.append(action.count)
                await asyncio.sleep(0)

        processor = MailboxProcessor(ticking, slice_s=0.010, now=lambda: time[0])
        others = asyncio.create_task(other())
        await processor.run_loop()
        await others
        assert turns[:5] == [10, 20, 30, 40, 50]

    @pytest.mark.parametrize(
        "work", ["default action", "mail", "awaited default action", "awaited mail"]
    )
    async def test_event_loop_gets_its_turn_also_where_the_clock_stands_still(
        self, work: str
    ) -> None:
        runs, seen = 0, []
        limit = 4 * RUNS_MAX

        async def without_waiting() -> None:
            """Behaves like user code that finds everything in its cache."""

        def step(controller: MailboxProcessor) -> Any:
            nonlocal runs
            if work.endswith("mail") and runs == 0:
                controller.suspend_default_action()
                controller.executor(0).execute(mail, "mail")
            runs += 1
            if runs == limit:
                controller.suspend()
            return without_waiting() if work.startswith("awaited") else None

        def mail() -> Any:
            awaited = step(processor)
            if runs < limit:
                processor.executor(0).execute(mail, "mail")
            return awaited

        processor = MailboxProcessor(step, now=lambda: 0.0)
        asyncio.get_running_loop().call_soon(lambda: seen.append(runs))
        await processor.run_loop()
        assert runs == limit
        assert 0 < seen[0] <= RUNS_MAX

    async def test_action_that_holds_the_loop_is_reported_with_its_name(self) -> None:
        time = [0.0]
        slow: list[tuple[str, float]] = []

        def block(seconds: float) -> None:
            time[0] += seconds

        action = Calls(stop_at=2, at={1: lambda _: block(0.25), 2: lambda _: block(0.05)})
        processor = MailboxProcessor(
            action,
            now=lambda: time[0],
            name="count-1",
            on_slow=lambda what, s: slow.append((what, round(s, 3))),
        )
        processor.executor(0).execute(lambda: block(0.2), "timer for %d", 7)
        processor.executor(0).execute(lambda: block(0.09), "quick")
        await processor.run_loop()

        assert slow == [("timer for 7", 0.2), ("count-1", 0.25)]
        assert processor.metrics.slow_actions == 2

    @pytest.mark.slow_callbacks
    async def test_slow_actions_without_a_listener_are_logged_now_and_then(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        time = [0.0]

        def block(_: MailboxProcessor) -> None:
            time[0] += 1.0

        action = Calls(stop_at=25, at=dict.fromkeys(range(1, 26), block))
        await MailboxProcessor(action, now=lambda: time[0], name="count-1").run_loop()
        assert [record.getMessage().split(",")[0] for record in caplog.records] == [
            "count-1 held the event loop for 1000 ms"
        ] * 3

    async def test_time_spent_awaiting_is_not_reported_as_holding_the_loop(self) -> None:
        time = [0.0]
        slow: list[str] = []

        async def slowly(controller: MailboxProcessor) -> None:
            await asyncio.sleep(0)
            time[0] += 5.0
            controller.suspend()

        await MailboxProcessor(
            slowly, now=lambda: time[0], on_slow=lambda what, _: slow.append(what)
        ).run_loop()
        assert slow == []


class TestAwaiting:
    async def test_awaitable_default_action_runs_in_the_owner_one_at_a_time_and_mail_waits(
        self,
    ) -> None:
        order: list[str] = []
        gate = asyncio.Event()

        async def slowly(controller: MailboxProcessor) -> None:
            assert asyncio.current_task() is task
            order.append("begin")
            await gate.wait()
            order.append("end")
            controller.suspend()

        processor = MailboxProcessor(slowly)
        task = asyncio.create_task(processor.run_loop())
        await until(lambda: order == ["begin"])
        processor.executor(0).execute(lambda: order.append("mail"), "mail")
        processor.executor(0).execute(lambda: order.append("urgent"), "urgent", urgent=True)
        for _ in range(5):
            await asyncio.sleep(0)
        assert order == ["begin"]
        gate.set()
        await task
        assert order == ["begin", "end"]
        assert processor.mailbox.size == 2

    async def test_awaitable_mail_ends_before_the_next_mail_begins(self) -> None:
        order: list[str] = []

        async def slowly() -> None:
            order.append("begin")
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            order.append("end")

        processor = MailboxProcessor(Calls(stop_at=1))
        processor.executor(0).execute(slowly, "slowly")
        processor.executor(0).execute(lambda: order.append("next"), "next")
        await processor.run_loop()
        assert order == ["begin", "end", "next"]

    async def test_error_of_an_awaited_mail_leaves_the_loop_and_names_the_mail(self) -> None:
        async def fail() -> None:
            await asyncio.sleep(0)
            raise ValueError("awaited")

        processor = MailboxProcessor(Calls(stop_at=1))
        processor.executor(0).execute(fail, "mail %d", 7)
        with pytest.raises(ValueError, match="awaited") as caught:
            await processor.run_loop()
        assert "mail 7" in caught.value.__notes__[0]

    async def test_error_reported_while_user_code_awaits_cancels_it_and_ends_the_loop(self) -> None:
        cleaned: list[str] = []

        async def for_ever() -> None:
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                cleaned.append("up")

        processor = MailboxProcessor(lambda _: for_ever())
        task = asyncio.create_task(processor.run_loop())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        processor.report_throwable(ValueError("reported"))
        with pytest.raises(ValueError, match="reported"):
            await task
        assert cleaned == ["up"]
        assert task.cancelling() == 0

    async def test_error_reported_before_the_user_code_awaits_interrupts_it_too(self) -> None:
        async def for_ever() -> None:
            await asyncio.get_running_loop().create_future()

        def action(controller: MailboxProcessor) -> Awaitable[object]:
            controller.report_throwable(ValueError("reported"))
            return for_ever()

        with pytest.raises(ValueError, match="reported"):
            await MailboxProcessor(action).run_loop()

    async def test_error_reported_to_user_code_that_swallows_its_cancellation_still_ends_the_loop(
        self,
    ) -> None:
        async def stubborn() -> None:
            try:
                await asyncio.get_running_loop().create_future()
            except asyncio.CancelledError:
                pass

        processor = MailboxProcessor(lambda _: stubborn())
        task = asyncio.create_task(processor.run_loop())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        processor.report_throwable(ValueError("reported"))
        with pytest.raises(ValueError, match="reported"):
            await task
        assert task.cancelling() == 0

    async def test_cancelling_a_task_that_awaits_user_code_wins_over_a_reported_error(self) -> None:
        async def for_ever() -> None:
            await asyncio.get_running_loop().create_future()

        processor = MailboxProcessor(lambda _: for_ever())
        task = asyncio.create_task(processor.run_loop())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        processor.report_throwable(ValueError("reported"))
        asyncio.get_running_loop().call_soon(task.cancel)
        with pytest.raises(asyncio.CancelledError):
            await task

    async def test_completing_the_loop_while_user_code_awaits_takes_effect_when_it_ends(
        self,
    ) -> None:
        gate = asyncio.Event()
        calls = 0

        async def slowly() -> None:
            nonlocal calls
            calls += 1
            await gate.wait()

        processor = MailboxProcessor(lambda _: slowly())
        task = asyncio.create_task(processor.run_loop())
        await until(lambda: calls == 1)
        processor.suspend()
        await asyncio.sleep(0)
        assert not task.done()
        gate.set()
        await task
        assert calls == 1

    async def test_user_code_that_yields_runs_mail_of_its_priority_inside_its_own_await(
        self,
    ) -> None:
        order: list[str] = []

        async def yielding(controller: MailboxProcessor) -> None:
            order.append("begin")
            await executor.yield_()
            order.append("end")
            controller.suspend()

        processor = MailboxProcessor(yielding)
        executor = processor.executor(1)
        task = asyncio.create_task(processor.run_loop())
        await until(lambda: order == ["begin"])
        processor.executor(0).execute(lambda: order.append("upstream"), "upstream")
        executor.execute(lambda: order.append("own"), "own")
        await task
        assert order == ["begin", "own", "end"]
        assert [mail.description for mail in processor.close()] == ["upstream"]

    async def test_mail_put_directly_takes_part(self) -> None:
        ran: list[Lane] = []
        processor = MailboxProcessor(Calls(stop_at=1))
        for lane in (Lane.NORMAL, Lane.URGENT, Lane.CONTROL):
            processor.mailbox.put(
                Mail(lambda lane=lane: ran.append(lane), MIN_PRIORITY, "direct", lane=lane)
            )
        await processor.run_loop()
        assert ran == [Lane.CONTROL, Lane.URGENT, Lane.NORMAL]
