"""The time of a loop by its use, the rate of mail, and the latency of mail; in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

import pytest

from aioflow.mailbox.processor import MailboxProcessor, Suspension


class Loop(Protocol):
    now_s: float

    def call_at(self, when: float, callback: Callable[..., object], /) -> object: ...


RunVirtual = Callable[[Callable[[Any], Coroutine[Any, Any, None]]], None]


def test_time_parked_is_counted_under_the_reason_of_the_suspension(run_virtual: RunVirtual) -> None:
    async def main(loop: Loop) -> None:
        seen: list[tuple[float, float]] = []
        reasons = iter(["input", "output", "input"])

        def action(controller: MailboxProcessor) -> None:
            reason = next(reasons, None)
            if reason is None:
                controller.suspend()
                return
            loop.now_s += 0.01  # Busy.
            suspension = controller.suspend_default_action(reason)
            loop.call_at(loop.now_s + (0.5 if reason == "input" else 0.2), suspension.resume)

        processor = MailboxProcessor(action, probe_interval_s=None)
        loop.call_at(
            0.25, lambda: seen.append((processor.time_in("input"), processor.time_in("output")))
        )
        await processor.run_loop()

        assert seen == [(pytest.approx(0.24), 0.0)]  # The present stay counts.
        assert processor.time_in("input") == pytest.approx(1.0)
        assert processor.time_in("output") == pytest.approx(0.2)
        assert loop.now_s == pytest.approx(1.23)
        assert processor.time_in("never given") == 0.0

    run_virtual(main)


def test_time_in_mail_that_runs_during_a_suspension_is_not_idle(run_virtual: RunVirtual) -> None:
    async def main(loop: Loop) -> None:
        def action(controller: MailboxProcessor) -> None:
            controller.suspend_default_action("input")

        def work() -> None:
            loop.now_s += 0.3

        processor = MailboxProcessor(action, probe_interval_s=None, on_slow=lambda *_: None)
        executor = processor.executor(0)
        loop.call_at(0.2, lambda: executor.execute(work, "work"))
        loop.call_at(1.0, processor.suspend)
        await processor.run_loop()
        assert processor.time_in("input") == pytest.approx(0.7)

    run_virtual(main)


def test_time_parked_is_counted_also_when_the_task_is_cancelled(run_virtual: RunVirtual) -> None:
    async def main(loop: Loop) -> None:
        processor = MailboxProcessor(
            lambda c: (c.suspend_default_action("input"), None)[1], probe_interval_s=None
        )
        task = asyncio.create_task(processor.run_loop())
        await asyncio.sleep(2.0)
        task.cancel()
        await asyncio.sleep(1.0)
        assert task.cancelled()
        assert processor.time_in("input") == pytest.approx(2.0)

    run_virtual(main)


def test_hundred_mails_in_a_second_are_a_rate_of_hundred_beside_the_queue_size(
    run_virtual: RunVirtual,
) -> None:
    """A10.1"""

    async def main(loop: Loop) -> None:
        processor = MailboxProcessor(
            lambda c: (c.suspend_default_action("input"), None)[1], probe_interval_s=None
        )
        executor = processor.executor(0)
        rates: list[float] = []
        for i in range(100):
            loop.call_at(i / 100, lambda: executor.execute(lambda: None, "mail"))
        loop.call_at(0.5, lambda: rates.append(processor.metrics.mails_per_second()))
        loop.call_at(1.0, lambda: rates.append(processor.metrics.mails_per_second()))
        loop.call_at(1.5, lambda: rates.append(processor.metrics.mails_per_second()))
        loop.call_at(3.0, lambda: rates.append(processor.metrics.mails_per_second()))
        loop.call_at(3.1, processor.suspend)
        await processor.run_loop()
        executor.execute(lambda: None, "pending")
        executor.execute(lambda: None, "pending")

        assert rates == [0.0, pytest.approx(100), pytest.approx(100), 0.0]
        assert processor.metrics.queue_size == 2
        assert processor.metrics.mails == 101  # The last was the order to stop.

    run_virtual(main)


def test_latency_of_mail_behind_a_long_default_action_is_seen(run_virtual: RunVirtual) -> None:
    """A10.3"""

    async def main(loop: Loop) -> None:
        current: list[Suspension] = []

        def action(controller: MailboxProcessor) -> None:
            if current:
                loop.now_s += 0.7  # Blocks from 0.9 to 1.6; the probe was due at 1.0.
            current[:] = [controller.suspend_default_action("input")]

        processor = MailboxProcessor(action, on_slow=lambda *_: None)
        processor.executor(0).execute(lambda: None, "the first mail starts the probe")
        loop.call_at(0.9, lambda: current[0].resume())
        loop.call_at(2.0, processor.suspend)
        await processor.run_loop()

        assert processor.metrics.latency_ms_max == pytest.approx(600)
        assert processor.metrics.latency_ms_max >= 500
        assert processor.metrics.latency_count == 1

    run_virtual(main)


def test_probe_runs_once_a_second_after_the_first_mail_that_is_no_control_mail(
    run_virtual: RunVirtual,
) -> None:
    async def main(loop: Loop) -> None:
        current: list[Suspension] = []

        def action(controller: MailboxProcessor) -> None:
            current[:] = [controller.suspend_default_action("input")]

        processor = MailboxProcessor(action)
        executor = processor.executor(0)
        counts: list[int] = []
        loop.call_at(5.0, lambda: current[0].resume())  # Control mail alone does not start it.
        loop.call_at(10.0, lambda: counts.append(processor.metrics.latency_count))
        loop.call_at(10.0, lambda: executor.execute(lambda: None, "first"))
        loop.call_at(20.5, processor.suspend)
        await processor.run_loop()
        counts.append(processor.metrics.latency_count)
        await asyncio.sleep(10)  # Nothing probes while the loop does not run.
        counts.append(processor.metrics.latency_count)
        assert not processor.mailbox.has_mail

        executor.execute(lambda: None, "first of the second run")
        loop.call_at(loop.now_s + 3.5, processor.suspend)
        await processor.run_loop()
        counts.append(processor.metrics.latency_count)
        processor.close()

        assert counts == [0, 10, 10, 13]

    run_virtual(main)


def test_probe_left_in_the_queue_neither_starts_again_after_the_loop_nor_doubles(
    run_virtual: RunVirtual,
) -> None:
    async def main(loop: Loop) -> None:
        def action(controller: MailboxProcessor) -> None:
            controller.suspend_default_action("input")

        def block() -> None:
            loop.now_s += 5.0

        processor = MailboxProcessor(action, on_slow=lambda *_: None)
        executor = processor.executor(0)
        executor.execute(lambda: None, "start the probe")
        loop.call_at(0.5, lambda: executor.execute(block, "block"))
        loop.call_at(
            0.6, lambda: executor.execute(processor.suspend, "stop before the probe is run")
        )
        await processor.run_loop()
        assert processor.mailbox.has_mail
        await processor.drain()
        await asyncio.sleep(10)
        assert processor.metrics.latency_count == 1
        assert not processor.mailbox.has_mail

    run_virtual(main)


def test_probe_left_in_the_queue_of_one_run_does_not_double_those_of_the_next(
    run_virtual: RunVirtual,
) -> None:
    async def main(loop: Loop) -> None:
        def action(controller: MailboxProcessor) -> None:
            if controller._suspension is None:
                controller.suspend_default_action("input")

        processor = MailboxProcessor(action, on_slow=lambda *_: None)
        executor = processor.executor(0)
        executor.execute(lambda: None, "start the probe")
        loop.call_at(0.5, lambda: executor.execute(lambda: setattr(loop, "now_s", 5.0), "block"))
        loop.call_at(
            0.6, lambda: executor.execute(processor.suspend, "stop before the probe is run")
        )
        await processor.run_loop()
        assert processor.mailbox.size == 1
        executor.execute(lambda: None, "start again, before the one that was left", urgent=True)
        loop.call_at(loop.now_s + 3.5, processor.suspend)
        await processor.run_loop()
        processor.close()
        assert processor.metrics.latency_count == 1 + 3

    run_virtual(main)


def test_loop_that_was_parked_runs_its_mail_and_the_default_action_in_one_turn(
    run_virtual: RunVirtual,
) -> None:
    """The time it was parked is no part of its slice."""

    async def main(loop: Any) -> None:
        order: list[str] = []
        current: list[Suspension] = []

        def action(controller: MailboxProcessor) -> None:
            order.append("action")
            if current:
                controller.suspend()
            else:
                current.append(controller.suspend_default_action("input"))

        def mail() -> None:
            order.append("mail")
            current[0].resume()

        def wake() -> None:
            processor.executor(0).execute(mail, "mail")
            loop.call_soon(order.append, "next turn")

        processor = MailboxProcessor(action, probe_interval_s=None)
        loop.call_at(10.0, wake)
        await processor.run_loop()
        await asyncio.sleep(0)
        assert order == ["action", "mail", "action", "next turn"]

    run_virtual(main)
