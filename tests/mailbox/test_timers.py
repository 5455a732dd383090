"""Processing-time timers: when they fire, in which order, where, and when they do not; in
virtual time.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aioflow.core.errors import MailboxClosed
from aioflow.mailbox.processor import MailboxProcessor
from aioflow.mailbox.timers import HEAP_SLACK, ProcessingTimer, ProcessingTimeService

WALL_MS = 1_700_000_000_000
"""The wall clock at the start of virtual time."""

RunVirtual = Callable[[Callable[[Any], Coroutine[Any, Any, None]]], None]


class Task:
    """A task that does nothing but serve its mailbox, and a timer service of priority 1 in it."""

    def __init__(self, loop: Any) -> None:
        self.loop = loop
        self.wall_step_ms = 0
        self.processor = MailboxProcessor(
            self._idle, probe_interval_s=None, on_slow=lambda *_: None
        )
        self.timers = ProcessingTimeService(self.now_ms, self.processor.executor(1))
        self.fired: list[tuple[int, int]] = []
        """(time, timestamp) of each firing, in ms since the start."""
        self.owner: asyncio.Task[None] | None = None

    def _idle(self, controller: MailboxProcessor) -> None:
        controller.suspend_default_action("input")

    def now_ms(self) -> int:
        return WALL_MS + self.wall_step_ms + int(self.loop.now_s * 1000 + 1e-6)

    def fire(self, timestamp_ms: int) -> None:
        assert asyncio.current_task() is self.owner
        self.fired.append((round(self.loop.now_s * 1000), timestamp_ms - WALL_MS))

    def at(self, ms: int, callback: Callable[[int], object] | None = None) -> ProcessingTimer:
        return self.timers.register_timer(WALL_MS + ms, callback or self.fire)

    def start(self) -> None:
        self.owner = asyncio.create_task(self.processor.run_loop())

    async def stop(self) -> None:
        assert self.owner is not None
        self.processor.suspend()
        await self.owner
        self.timers.shutdown()
        self.processor.close()


@pytest.fixture
def run_task(
    run_virtual: RunVirtual,
) -> Callable[[Callable[[Task], Coroutine[Any, Any, None]]], None]:
    """Runs a coroutine function beside a running task, which is given to it."""

    def run(main: Callable[[Task], Coroutine[Any, Any, None]]) -> None:
        async def body(loop: Any) -> None:
            task = Task(loop)
            task.start()
            await asyncio.sleep(0)
            await main(task)
            await task.stop()

        run_virtual(body)

    return run


RunTask = Callable[[Callable[[Task], Coroutine[Any, Any, None]]], None]


class TestFiring:
    def test_timer_fires_in_the_owner_with_its_timestamp_one_millisecond_after_it(
        self, run_task: RunTask
    ) -> None:
        """A12.1"""

        async def main(task: Task) -> None:
            task.at(100)
            await asyncio.sleep(0.1005)
            assert task.fired == []
            assert task.timers._pending == 1
            await asyncio.sleep(1)
            assert task.fired == [(101, 100)]
            assert task.timers._pending == 0

        run_task(main)

    def test_timer_in_the_past_fires_at_once(self, run_task: RunTask) -> None:
        """A12.3"""

        async def main(task: Task) -> None:
            await asyncio.sleep(1)
            task.at(-5000)
            task.at(1000)
            await asyncio.sleep(0.01)
            assert task.fired == [(1001, -5000), (1001, 1000)]

        run_task(main)

    def test_timers_of_equal_deadline_fire_in_the_order_of_registration(
        self, run_task: RunTask
    ) -> None:
        async def main(task: Task) -> None:
            order: list[int] = []
            for i in range(50):
                task.at(100, lambda _, i=i: order.append(i))
            await asyncio.sleep(1)
            assert order == list(range(50))

        run_task(main)

    def test_timer_registered_later_for_earlier_fires_first(self, run_task: RunTask) -> None:
        async def main(task: Task) -> None:
            for ms in (300, 100, 200):
                task.at(ms)
            await asyncio.sleep(1)
            assert task.fired == [(101, 100), (201, 200), (301, 300)]

        run_task(main)

    def test_timer_has_the_priority_of_its_operator(self, run_virtual: RunVirtual) -> None:
        async def main(loop: Any) -> None:
            task = Task(loop)
            task.at(10)
            await asyncio.sleep(0.1)
            assert task.processor.mailbox.try_take(2) is None
            task.owner = asyncio.current_task()  # type: ignore[assignment]
            await task.processor.executor(1).yield_()
            assert task.fired == [(100, 10)]

        run_virtual(main)

    def test_due_timer_registered_while_opening_fires_only_when_the_loop_runs(
        self, run_virtual: RunVirtual
    ) -> None:
        """A12.7"""

        async def main(loop: Any) -> None:
            task = Task(loop)
            task.at(0)  # In open() of the first operator.
            await asyncio.sleep(0.5)  # Others take their time to open.
            assert task.fired == []
            task.start()
            await asyncio.sleep(0.001)
            assert task.fired == [(500, 0)]
            await task.stop()

        run_virtual(main)

    @pytest.mark.parametrize("step_ms", [3_600_000, -3_600_000])
    def test_step_of_the_wall_clock_neither_delays_nor_repeats_a_timer(
        self, run_task: RunTask, step_ms: int
    ) -> None:
        async def main(task: Task) -> None:
            task.at(100)
            await asyncio.sleep(0.05)
            task.wall_step_ms = step_ms
            assert task.timers.current_processing_time() == WALL_MS + 50 + step_ms
            await asyncio.sleep(10)
            assert task.fired == [(101, 100)]

        run_task(main)

    def test_cancelled_timer_does_not_fire(self, run_task: RunTask) -> None:
        async def main(task: Task) -> None:
            first, second = task.at(100), task.at(200)
            first.cancel()
            first.cancel()
            assert task.timers._pending == 1
            await asyncio.sleep(1)
            assert task.fired == [(201, 200)]
            second.cancel()
            assert task.timers._pending == 0

        run_task(main)

    def test_timer_cancelled_while_its_mail_is_queued_does_not_fire(
        self, run_virtual: RunVirtual
    ) -> None:
        async def main(loop: Any) -> None:
            task = Task(loop)
            timer = task.at(10)
            await asyncio.sleep(0.1)
            assert task.processor.mailbox.size == 1
            timer.cancel()
            task.start()
            await asyncio.sleep(0.1)
            assert task.fired == []
            await task.stop()

        run_virtual(main)

    def test_many_cancelled_timers_do_not_pile_up_behind_a_live_one(
        self, run_task: RunTask
    ) -> None:
        async def main(task: Task) -> None:
            task.at(1_000_000)
            for i in range(10 * HEAP_SLACK):
                task.at(2_000_000 + i).cancel()
            assert len(task.timers._heap) <= HEAP_SLACK + 4
            assert task.timers._pending == 1
            await asyncio.sleep(1001)
            assert task.fired == [(1_000_001, 1_000_000)]

        run_task(main)

    def test_timers_that_outlive_many_cancelled_ones_fire_in_order(self, run_task: RunTask) -> None:
        async def main(task: Task) -> None:
            rng = random.Random(7)
            timers = [(ms, task.at(ms)) for ms in rng.sample(range(10_000), 1_000)]
            for _, timer in timers[50:]:
                timer.cancel()
            await asyncio.sleep(11)
            assert task.fired == [(ms + 1, ms) for ms in sorted(ms for ms, _ in timers[:50])]

        run_task(main)

    def test_error_of_a_callback_fails_the_loop_and_names_the_timer(
        self, run_virtual: RunVirtual
    ) -> None:
        async def main(loop: Any) -> None:
            def fail(_: int) -> None:
                raise ValueError("on timer")

            task = Task(loop)
            task.at(10, fail)
            with pytest.raises(ValueError, match="on timer") as caught:
                await task.processor.run_loop()
            assert f"timer for {WALL_MS + 10}" in caught.value.__notes__[0]
            assert task.timers._pending == 0

        run_virtual(main)

    def test_awaitable_callback_is_awaited_before_the_next_timer(self, run_task: RunTask) -> None:
        async def main(task: Task) -> None:
            async def slowly(timestamp_ms: int) -> None:
                await asyncio.sleep(0.5)
                task.fire(timestamp_ms)

            task.at(10, slowly)
            task.at(20)
            await asyncio.sleep(1)
            assert task.fired == [(511, 10), (511, 20)]

        run_task(main)

    def test_timer_due_after_the_mailbox_shut_is_dropped_silently(
        self, run_virtual: RunVirtual
    ) -> None:
        async def main(loop: Any) -> None:
            task = Task(loop)
            timer = task.at(10)
            task.processor.close()
            await asyncio.sleep(0.1)
            assert task.timers._pending == 0
            timer.cancel()

        run_virtual(main)


class TestRepeating:
    def test_fixed_rate_keeps_its_grid_for_any_duration_of_the_callback(
        self, run_task: RunTask
    ) -> None:
        async def main(task: Task) -> None:
            def work(timestamp_ms: int) -> None:
                task.fire(timestamp_ms)
                task.loop.now_s += 0.030

            timer = task.timers.schedule_at_fixed_rate(work, 100, 50)
            await asyncio.sleep(0.260)
            timer.cancel()
            assert task.timers._pending == 0
            await asyncio.sleep(1)
            assert task.fired == [(101, 100), (151, 150), (201, 200), (251, 250)]

        run_task(main)

    def test_fixed_rate_makes_up_for_missed_periods_one_mail_at_a_time(
        self, run_task: RunTask
    ) -> None:
        async def main(task: Task) -> None:
            sizes: list[int] = []

            def work(timestamp_ms: int) -> None:
                sizes.append(task.processor.mailbox.size)
                task.fire(timestamp_ms)
                if len(task.fired) == 1:
                    task.loop.now_s += 0.175

            timer = task.timers.schedule_at_fixed_rate(work, 100, 50)
            await asyncio.sleep(0.310)
            timer.cancel()
            assert task.fired == [(101, 100), (276, 150), (276, 200), (276, 250), (301, 300)]
            assert max(sizes) == 0

        run_task(main)

    def test_fixed_delay_begins_the_next_period_when_the_callback_has_run(
        self, run_task: RunTask
    ) -> None:
        async def main(task: Task) -> None:
            def work(timestamp_ms: int) -> None:
                task.fire(timestamp_ms)
                task.loop.now_s += 0.030

            timer = task.timers.schedule_with_fixed_delay(work, 100, 50)
            await asyncio.sleep(0.300)
            timer.cancel()
            assert task.fired == [(101, 100), (181, 150), (261, 200)]

        run_task(main)

    def test_repeated_timer_may_cancel_itself(self, run_task: RunTask) -> None:
        async def main(task: Task) -> None:
            def once(timestamp_ms: int) -> None:
                task.fire(timestamp_ms)
                timer.cancel()

            timer = task.timers.schedule_at_fixed_rate(once, 0, 10)
            await asyncio.sleep(1)
            assert task.fired == [(1, 0)]
            assert task.timers._pending == 0

        run_task(main)

    def test_period_must_be_positive(self, run_task: RunTask) -> None:
        async def main(task: Task) -> None:
            for schedule in (
                task.timers.schedule_at_fixed_rate,
                task.timers.schedule_with_fixed_delay,
            ):
                with pytest.raises(ValueError, match="period of a repeated timer is 0 ms"):
                    schedule(task.fire, 0, 0)

        run_task(main)


class TestEnd:
    def test_quiesce_waits_for_a_running_callback_and_lets_no_timer_fire_after(
        self, run_task: RunTask
    ) -> None:
        """A12.4"""

        async def main(task: Task) -> None:
            async def slowly(timestamp_ms: int) -> None:
                await asyncio.sleep(0.5)
                task.fire(timestamp_ms)

            task.at(10, slowly)
            task.at(300)
            await asyncio.sleep(0.1)
            quiesced = asyncio.create_task(task.timers.quiesce())
            await asyncio.sleep(0.1)
            assert not quiesced.done()
            accepted = task.at(300)
            task.timers.schedule_at_fixed_rate(task.fire, 0, 10)
            assert task.timers._pending == 0
            await quiesced
            assert task.fired == [(511, 10)]
            await asyncio.sleep(10)
            assert task.fired == [(511, 10)]
            accepted.cancel()

        run_task(main)

    def test_waiter_of_quiesce_that_is_cancelled_leaves_another_waiting(
        self, run_task: RunTask
    ) -> None:
        async def main(task: Task) -> None:
            task.at(10, lambda _: asyncio.sleep(0.5))
            await asyncio.sleep(0.1)
            first = asyncio.create_task(task.timers.quiesce())
            second = asyncio.create_task(task.timers.quiesce())
            await asyncio.sleep(0.1)
            first.cancel()
            await second
            assert first.cancelled()
            assert task.loop.now_s == pytest.approx(0.511)

        run_task(main)

    def test_quiesce_by_the_owner_inside_a_callback_does_not_wait_for_itself(
        self, run_task: RunTask
    ) -> None:
        async def main(task: Task) -> None:
            async def quiesce(timestamp_ms: int) -> None:
                await task.timers.quiesce()
                task.fire(timestamp_ms)

            task.timers.schedule_at_fixed_rate(quiesce, 10, 10)
            await asyncio.sleep(1)
            assert task.fired == [(11, 10)]

        run_task(main)

    def test_mail_of_a_timer_that_is_queued_at_quiesce_still_runs(
        self, run_virtual: RunVirtual
    ) -> None:
        async def main(loop: Any) -> None:
            task = Task(loop)
            task.at(10)
            task.at(500)
            await asyncio.sleep(0.1)
            await task.timers.quiesce()
            task.start()
            await asyncio.sleep(1)
            assert task.fired == [(100, 10)]
            await task.stop()

        run_virtual(main)

    def test_shut_down_service_cancels_its_timers_and_refuses_new_ones(
        self, run_task: RunTask
    ) -> None:
        """A12.5"""

        async def main(task: Task) -> None:
            task.at(100)
            task.timers.schedule_at_fixed_rate(task.fire, 100, 100)
            assert task.timers._pending == 2
            task.timers.shutdown()
            task.timers.shutdown()
            assert task.timers._pending == 0
            with pytest.raises(MailboxClosed, match="shut down"):
                task.at(200)
            await asyncio.sleep(1)
            assert task.fired == []

        run_task(main)

    def test_repeated_timer_that_runs_during_the_shutdown_is_not_armed_again(
        self, run_task: RunTask
    ) -> None:
        async def main(task: Task) -> None:
            def work(timestamp_ms: int) -> None:
                task.fire(timestamp_ms)
                task.timers.shutdown()

            task.timers.schedule_with_fixed_delay(work, 0, 10)
            await asyncio.sleep(1)
            assert task.fired == [(1, 0)]
            assert task.timers._pending == 0

        run_task(main)


OPERATIONS = st.one_of(
    st.tuples(st.just("register"), st.integers(-50, 500)),
    st.tuples(st.just("cancel"), st.integers(0, 30)),
    st.tuples(st.just("pass"), st.integers(0, 120)),
)


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture]
)  # Each call of run_virtual has its own loop.
@given(operations=st.lists(OPERATIONS, max_size=40))
def test_any_sequence_of_registrations_and_cancellations_fires_as_a_sorted_list_says(
    run_virtual: RunVirtual, operations: list[tuple[str, int]]
) -> None:
    async def main(loop: Any) -> None:
        task = Task(loop)
        task.start()
        timers: list[ProcessingTimer] = []
        fired: list[int] = []
        waiting: dict[int, int] = {}  # Number of the timer -> the ms at which it is due.
        expected: list[int] = []
        now = 0

        def pass_time(ms: int) -> None:
            nonlocal now
            now += ms
            due = sorted((at, number) for number, at in waiting.items() if at <= now)
            for _, number in due:
                del waiting[number]
                expected.append(number)

        for operation, argument in operations:
            if operation == "register":
                number = len(timers)
                timers.append(
                    task.at(now + argument, lambda _, number=number: fired.append(number))
                )
                waiting[number] = now + max(argument, 0) + 1
            elif operation == "cancel" and argument < len(timers):
                timers[argument].cancel()
                waiting.pop(argument, None)
            elif operation == "pass":
                await asyncio.sleep(argument / 1000 + 1e-5 - (loop.now_s - now / 1000))
                for _ in range(5):
                    await asyncio.sleep(0)
                pass_time(argument)
            assert fired == expected
            assert task.timers._pending == len(waiting)
        await task.stop()

    run_virtual(main)


def test_timers_come_earlier_by_as_much_as_the_clock_has_jumped_ahead(run_task: RunTask) -> None:
    """This happens after a sleep of the machine, which the monotonic clock does not notice.

    Timers keep their order, and periods do not move.
    """

    async def main(task: Task) -> None:
        hour = 3_600_000
        task.at(2 * hour)
        task.at(hour)
        task.at(10 * hour)
        task.timers.schedule_at_fixed_rate(task.fire, 500_000, 500_000)
        await asyncio.sleep(1)
        task.wall_step_ms = 8 * hour
        await asyncio.sleep(300)
        assert [timestamp for _, timestamp in task.fired] == [hour, 2 * hour]
        await asyncio.sleep(500)
        assert [timestamp for _, timestamp in task.fired[2:]] == [500_000]
        await asyncio.sleep(2 * hour / 1000 - 800)
        assert task.fired[-1][1] == 10 * hour
        assert task.timers._pending == 1

    run_task(main)
