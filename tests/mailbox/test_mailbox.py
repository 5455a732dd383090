"""Order, batches, visibility and life cycle of the mailbox, without a processor."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioflow.core.errors import Closed, MailboxClosed
from aioflow.mailbox.mailbox import (
    MAX_PRIORITY,
    MIN_PRIORITY,
    Lane,
    Mail,
    MailboxState,
    MailQueue,
    TaskMailbox,
)


def mail(
    name: str, priority: int = MIN_PRIORITY, lane: Lane = Lane.NORMAL, deferrable: bool = False
) -> Mail:
    return Mail(lambda: None, priority, name, lane=lane, deferrable=deferrable)


def mailbox_of(*mails: Mail) -> TaskMailbox:
    mailbox = TaskMailbox()
    for each in mails:
        mailbox.put(each)
    return mailbox


def name(taken: Mail | None) -> str | None:
    return None if taken is None else taken.description


def names(mails: list[Mail]) -> list[str]:
    return [each.description for each in mails]


def four() -> TaskMailbox:
    return mailbox_of(mail("C", 1), mail("B", 2), mail("D", 1), mail("A", 2, Lane.URGENT))


class TestMail:
    def test_description_of_a_dropped_mail_is_formatted_and_the_mail_never_run(self) -> None:
        """A1.1"""
        ran: list[int] = []
        mailbox = mailbox_of(Mail(lambda: ran.append(1), 0, "ckpt %s", 7))

        assert names(mailbox.close()) == ["ckpt 7"]
        assert ran == []

    def test_description_that_does_not_fit_its_arguments_is_still_readable(self) -> None:
        assert Mail(lambda: None, 0, "timer %d", "x").description == "timer %d ('x',)"
        assert "timer" in repr(Mail(lambda: None, 0, "timer %d %d", 1))

    def test_description_is_not_formatted_before_it_is_read(self) -> None:
        class Dear:
            def __str__(self) -> str:
                raise AssertionError("formatted for nothing")

        mailbox = mailbox_of(Mail(lambda: None, 0, "%s", Dear()))
        taken = mailbox.try_take()
        assert taken is not None and taken.run() is None

    async def test_try_cancel_cancels_the_future_and_leaves_a_plain_action_alone(self) -> None:
        """A1.2"""
        future: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        ran: list[int] = []

        assert Mail(lambda: None, 0, "future", future=future).try_cancel()
        plain = Mail(lambda: ran.append(1), 0, "plain")
        assert not plain.try_cancel()
        plain.run()

        assert future.cancelled()
        assert ran == [1]


class TestOrder:
    async def test_ten_mails_are_taken_in_order_and_only_then_is_there_none(self) -> None:
        """A2.1"""
        mailbox = mailbox_of(*(mail(str(i)) for i in range(10)))
        taken = []
        for _ in range(10):
            assert mailbox.has_mail
            taken.append(name(await mailbox.take()))

        assert taken == [str(i) for i in range(10)]
        assert not mailbox.has_mail
        assert mailbox.taken == 10

    async def test_take_and_batch_share_one_order_and_close_returns_the_rest(self) -> None:
        """A2.2"""
        mailbox = mailbox_of(*(mail(f"m{i}") for i in range(3)))
        assert mailbox.create_batch()
        for i in range(3, 6):
            mailbox.put(mail(f"m{i}"))

        assert name(mailbox.try_take_from_batch()) == "m0"
        assert name(mailbox.try_take()) == "m1"
        assert name(await mailbox.take()) == "m2"
        assert mailbox.try_take_from_batch() is None
        assert name(mailbox.try_take()) == "m3"
        assert name(await mailbox.take()) == "m4"
        assert names(mailbox.close()) == ["m5"]

    def test_empty_mailbox_makes_no_batch(self) -> None:
        """A2.3"""
        mailbox = TaskMailbox()
        assert not mailbox.create_batch()
        assert mailbox.try_take_from_batch() is None

    def test_rest_of_a_batch_stays_in_the_next(self) -> None:
        mailbox = mailbox_of(mail("a"), mail("b"))
        mailbox.create_batch()
        assert name(mailbox.try_take_from_batch()) == "a"
        mailbox.put(mail("c"))
        mailbox.create_batch()

        assert [name(mailbox.try_take_from_batch()) for _ in range(3)] == ["b", "c", None]

    def test_drain_returns_the_batch_then_the_queue(self) -> None:
        """A2.5"""
        mailbox = mailbox_of(mail("A"))
        mailbox.create_batch()
        mailbox.put(mail("B"))

        assert mailbox.size == 2
        assert names(mailbox.drain()) == ["A", "B"]
        assert mailbox.size == 0

    async def test_priority_hides_mail_in_place_and_the_rest_keeps_its_order(self) -> None:
        """A3.1"""
        mailbox = four()
        assert [
            name(await mailbox.take(2)),
            name(await mailbox.take(2)),
            name(mailbox.try_take(2)),
        ] == ["A", "B", None]
        assert [name(await mailbox.take(1)), name(await mailbox.take(1))] == ["C", "D"]

    async def test_priority_is_not_an_order(self) -> None:
        """A3.2"""
        mailbox = four()
        assert [name(await mailbox.take(MIN_PRIORITY)) for _ in range(4)] == ["A", "C", "B", "D"]

    def test_filtered_take_out_of_the_middle_keeps_the_order_of_what_stays(self) -> None:
        mailbox = mailbox_of(*(mail(f"{i}", priority=i % 3) for i in range(30)))

        assert [name(mailbox.try_take(2)) for _ in range(10)] == [str(i) for i in range(2, 30, 3)]
        assert mailbox.try_take(2) is None
        assert names(mailbox.drain()) == [str(i) for i in range(30) if i % 3 != 2]

    def test_filtered_takes_of_a_large_mailbox_leave_it_in_order(self) -> None:
        rng = random.Random(7)
        for _ in range(20):
            mails = [
                mail(str(i), rng.randrange(4), rng.choice([Lane.URGENT, Lane.NORMAL]))
                for i in range(60)
            ]
            mailbox = mailbox_of(*mails)
            expected = sorted(mails, key=lambda each: each.lane)
            for _ in range(20):
                taken = mailbox.try_take(priority := rng.randrange(4))
                assert taken is next((each for each in expected if each.priority >= priority), None)
                if taken is not None:
                    expected.remove(taken)
            assert [mailbox.try_take() for _ in expected] == expected

    def test_urgent_mail_overtakes_the_batch_that_is_being_taken(self) -> None:
        """A4.1"""
        mailbox = mailbox_of(mail("a"), mail("b"))
        mailbox.create_batch()
        assert name(mailbox.try_take_from_batch()) == "a"
        mailbox.put(mail("c", lane=Lane.URGENT))
        mailbox.put(mail("later"))

        assert [name(mailbox.try_take_from_batch()) for _ in range(3)] == ["c", "b", None]

    def test_several_urgent_mails_keep_their_order_however_they_are_taken(self) -> None:
        for take in ("try_take", "try_take_from_batch"):
            mailbox = mailbox_of(mail("n"), *(mail(f"u{i}", lane=Lane.URGENT) for i in range(3)))
            mailbox.create_batch()
            assert [name(getattr(mailbox, take)()) for _ in range(4)] == ["u0", "u1", "u2", "n"]

    def test_normal_mail_behind_an_urgent_one_is_taken_from_the_batch(self) -> None:
        mailbox = mailbox_of(mail("n"), mail("u", lane=Lane.URGENT))
        assert mailbox.create_batch()

        assert [name(mailbox.try_take_from_batch()) for _ in range(2)] == ["u", "n"]

    def test_control_mail_goes_before_urgent_mail_and_only_it_is_taken_as_control(self) -> None:
        mailbox = mailbox_of(mail("n"), mail("u", lane=Lane.URGENT), mail("c", lane=Lane.CONTROL))

        assert mailbox.has_control_mail
        assert name(mailbox.try_take_control()) == "c"
        assert mailbox.try_take_control() is None
        assert mailbox.size == 2

    def test_deferrable_mail_is_hidden_from_its_own_priority(self) -> None:
        """A4.5"""
        mailbox = mailbox_of(mail("d", 42, deferrable=True))

        assert mailbox.try_take(42) is None
        assert mailbox.try_take(0) is None
        assert name(mailbox.try_take()) == "d"

    def test_deferrable_mail_is_seen_by_the_main_loop_in_its_place(self) -> None:
        mailbox = mailbox_of(mail("a"), mail("d", MAX_PRIORITY, deferrable=True), mail("b"))
        assert [name(mailbox.try_take()) for _ in range(3)] == ["a", "d", "b"]


class TestWaiting:
    async def test_parked_take_is_woken_only_by_mail_that_it_sees(self) -> None:
        mailbox = mailbox_of(mail("low", 0))
        parked = asyncio.create_task(mailbox.take(5))
        await asyncio.sleep(0)
        mailbox.put(mail("low too", 1))
        await asyncio.sleep(0)
        assert not parked.done()
        mailbox.put(mail("high", 7))

        assert name(await parked) == "high"
        assert names(mailbox.drain()) == ["low", "low too"]

    async def test_cancelling_a_parked_take_in_the_turn_of_a_put_loses_no_mail(self) -> None:
        mailbox = TaskMailbox()
        parked = asyncio.create_task(mailbox.take())
        await asyncio.sleep(0)
        mailbox.put(mail("m"))
        parked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await parked

        assert names(mailbox.drain()) == ["m"]

    async def test_two_puts_in_one_turn_wake_a_parked_take_once(self) -> None:
        mailbox = TaskMailbox()
        parked = asyncio.create_task(mailbox.take())
        await asyncio.sleep(0)
        mailbox.put(mail("a"))
        mailbox.put(mail("b"))

        assert name(await parked) == "a"
        assert mailbox.size == 1


class TestLifeCycle:
    async def test_quiesced_mailbox_refuses_mail_and_gives_out_what_it_has(self) -> None:
        """A5.1"""
        mailbox = mailbox_of(mail("1"), mail("2"))
        mailbox.quiesce()

        for lane in Lane:
            with pytest.raises(MailboxClosed, match="quiesced"):
                mailbox.put(mail("late", lane=lane))
        assert name(await mailbox.take()) == "1"
        assert name(mailbox.try_take()) == "2"
        assert mailbox.try_take() is None
        assert mailbox.state is MailboxState.QUIESCED

    async def test_waiting_for_mail_that_cannot_come_is_an_error_and_no_hang(self) -> None:
        """A5.5"""
        mailbox = mailbox_of(mail("low", 0))
        mailbox.quiesce()

        with pytest.raises(MailboxClosed, match="priority 1"):
            await mailbox.take(1)
        assert mailbox.size == 1

    async def test_closed_mailbox_refuses_everything_and_closes_once(self) -> None:
        """A5.2"""
        mailbox = mailbox_of(mail("1"))
        assert names(mailbox.close()) == ["1"]

        with pytest.raises(MailboxClosed):
            mailbox.try_take()
        with pytest.raises(MailboxClosed):
            await mailbox.take()
        with pytest.raises(Closed, match="2 is not run: its task ends or has ended"):
            mailbox.put(mail("2"))
        assert mailbox.close() == []
        mailbox.quiesce()
        assert mailbox.state is MailboxState.CLOSED
        assert not mailbox.has_mail

    async def test_only_the_owner_reads_quiesces_and_closes(self) -> None:
        """A2.8, A5.5"""
        mailbox = TaskMailbox()
        mailbox.bind_owner()
        mailbox.put(mail("m"))

        async def stranger() -> None:
            for operation in (
                mailbox.create_batch,
                mailbox.try_take_from_batch,
                mailbox.try_take,
                mailbox.drain,
                mailbox.quiesce,
                mailbox.close,
            ):
                with pytest.raises(RuntimeError, match="for the owner"):
                    operation()
            with pytest.raises(RuntimeError, match="for the owner"):
                await mailbox.take()
            with pytest.raises(RuntimeError, match="cannot own it"):
                mailbox.bind_owner()

        await asyncio.create_task(stranger())
        with pytest.raises(RuntimeError):
            await asyncio.to_thread(mailbox.close)

        assert mailbox.state is MailboxState.OPEN
        assert names(mailbox.drain()) == ["m"]
        await asyncio.get_running_loop().shutdown_default_executor()

    async def test_mailbox_of_an_owner_that_ended_can_be_closed_and_owned_by_another(self) -> None:
        mailbox = TaskMailbox()

        async def own() -> None:
            mailbox.bind_owner()

        await asyncio.create_task(own())
        mailbox.put(mail("m"))
        assert mailbox.is_owner()
        mailbox.bind_owner()
        assert names(mailbox.close()) == ["m"]

    def test_bind_owner_outside_of_a_task_is_an_error(self) -> None:
        with pytest.raises(RuntimeError):
            TaskMailbox().bind_owner()


@pytest.mark.parametrize("has_uvloop", [False, True])
def test_installed_asyncio_calls_the_hooks_that_the_mailbox_overrides(
    has_uvloop: bool, uvloop: Any
) -> None:
    """The mailbox stands on `_init`, `_put` and `_get`; an asyncio that stops calling them
    breaks it silently.
    """
    calls: list[str] = []

    class Spy(MailQueue):
        def _init(self, maxsize: int) -> None:
            calls.append("init")
            super()._init(maxsize)

        def _put(self, mail: Mail) -> None:
            calls.append("put")
            super()._put(mail)

        def _get(self) -> Mail:
            calls.append("get")
            return super()._get()

    async def main() -> None:
        queue = Spy()
        queue.put_nowait(mail("n"))
        queue.put_nowait(mail("u", lane=Lane.URGENT))
        assert name(queue.get_nowait()) == "u"
        assert name(await queue.get()) == "n"
        assert queue.entries == []
        mailbox = TaskMailbox()
        parked = asyncio.create_task(mailbox.take())
        await asyncio.sleep(0)
        mailbox.put(mail("m"))
        assert name(await parked) == "m"

    with asyncio.Runner(loop_factory=(uvloop if has_uvloop else asyncio).new_event_loop) as runner:
        runner.run(main())
    assert calls == ["init", "put", "put", "get", "get"]


@dataclass
class ListModel:
    """Behaves like a mailbox, as slowly and plainly as possible."""

    batch: list[Mail] = field(default_factory=list)
    queue: list[Mail] = field(default_factory=list)
    ahead: list[Mail] = field(default_factory=list)
    """Urgent and control mail, sorted by lane, oldest first."""

    def put(self, mail: Mail) -> None:
        if mail.lane is Lane.NORMAL:
            self.queue.append(mail)
        else:
            self.ahead.append(mail)
            self.ahead.sort(key=lambda each: each.lane)  # A stable sort.

    def create_batch(self) -> bool:
        self.batch += self.queue
        self.queue = []
        return bool(self.batch or self.ahead)

    def try_take_from_batch(self) -> Mail | None:
        for part in (self.ahead, self.batch):
            if part:
                return part.pop(0)
        return None

    def try_take(self, priority: int, include_control: bool) -> Mail | None:
        for part in (self.ahead, self.batch, self.queue):
            for mail in part:
                if mail.lane is Lane.CONTROL and not include_control:
                    continue
                if mail.visible_priority >= priority:
                    part.remove(mail)
                    return mail
        return None

    def drain(self) -> list[Mail]:
        everything = self.ahead + self.batch + self.queue
        self.ahead, self.batch, self.queue = [], [], []
        return everything


PRIORITIES = st.sampled_from([MIN_PRIORITY, 0, 1, 2, MAX_PRIORITY])
STEPS = st.one_of(
    st.tuples(st.just("put"), PRIORITIES, st.sampled_from(list(Lane)), st.booleans()),
    st.tuples(st.just("put"), PRIORITIES, st.just(Lane.NORMAL), st.booleans()),
    st.tuples(st.just("create_batch")),
    st.tuples(st.just("try_take_from_batch")),
    st.tuples(st.just("try_take"), PRIORITIES, st.booleans()),
    st.tuples(st.just("drain")),
)


@given(st.lists(STEPS, max_size=60))
def test_any_sequence_of_operations_agrees_with_three_plain_lists(
    steps: list[tuple[object, ...]],
) -> None:
    mailbox, model = TaskMailbox(), ListModel()
    for step in steps:
        match step:
            case ("put", int(priority), Lane() as lane, bool(deferrable)):
                new = mail("m", priority, lane, deferrable)
                mailbox.put(new)
                model.put(new)
            case ("create_batch",):
                assert mailbox.create_batch() == model.create_batch()
            case ("try_take_from_batch",):
                assert mailbox.try_take_from_batch() is model.try_take_from_batch()
            case ("try_take", int(priority), bool(control)):
                taken = mailbox.try_take(priority, include_control=control)
                assert taken is model.try_take(priority, control)
            case ("drain",):
                assert mailbox.drain() == model.drain()
        assert mailbox.size == len(model.ahead) + len(model.batch) + len(model.queue)
        assert mailbox.has_mail == bool(mailbox.size)
    assert mailbox.close() == model.drain()
