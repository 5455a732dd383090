"""Warnings about a running flow: about things that are no errors, but probably mistakes.

* A join of numbers on one side with text on the other silently has no results. So the first key of
  each side is checked, and no other. Later keys may have other types.
* Timestamps in seconds that are taken for milliseconds are in January 1970. A whole day then falls
  into one window of a minute and a half. So the first timestamp of each source is checked. This
  needs no clock, because present times in seconds, in any decade, are very different numbers from
  those in milliseconds.
* If the default of a state, such as `[]`, is changed in place, the change is lost unless it is
  written back. So code is reported that changes the default and never updates the state.
* Only a function knows its side outputs, so reading a misspelt tag results in an empty stream. An
  empty side output alone means nothing, since most side outputs are for exceptional records. So at
  the end of a task, the side outputs that are read are compared with those that got records.
* A job with checkpoints restarts without a limit, so a mistake in a function repeats itself. The
  third failure in a row at one place is logged with the options that end this.
* A task passes the state of its inputs and calls to `TaskAdvice` every few seconds, with the time.
  `TaskAdvice` warns of inputs that stay silent, and of elements that wait because too few calls run
  at once. Each warning is logged once per job in a process. This module reads no clock.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID

from aioflow.core.elements import MAX_WATERMARK, MIN_WATERMARK
from aioflow.core.errors import describe_record, did_you_mean, message_of, place_note
from aioflow.core.scope import current_scope

if TYPE_CHECKING:
    from aioflow.core.functions import OutputTag

__all__ = [
    "CallsSeen",
    "ForgottenDefault",
    "InputSeen",
    "KeysMet",
    "RepeatedFailure",
    "TaskAdvice",
    "tell_unread_sides",
    "warn_of_nones",
    "warn_of_unit",
]

logger = logging.getLogger(__name__)

KINDS: dict[type, str] = {
    str: "text",
    bytes: "bytes",
    **dict.fromkeys((bool, int, float, Decimal), "a number"),
    datetime: "a datetime",
    date: "a date",
    timedelta: "a timedelta",
    UUID: "a UUID",
}
"""Maps a type of keys to the name of its kind.

Values of two different kinds are never equal. Values of types that are not listed, such as classes
of the user, may equal anything.
"""


class KeysMet:
    """Checks the first key of each side of a join, in one subtask.

    `is_open` is True until both keys are known. Callers check it before each batch, to save the
    call of `see`.
    """

    __slots__ = ("_first", "is_open")

    def __init__(self) -> None:
        self.is_open = True
        self._first: list[tuple[Any, ...]] = [(), ()]

    def see(self, side: int, keys: Sequence[Any] | None, operator: str) -> None:
        """Notes the first key that arrives on `side`, 0 or 1. Once both sides have a key, logs a
        warning if keys of these kinds can never be equal.
        """
        if keys is None or not len(keys) or self._first[side]:
            return
        self._first[side] = (keys[0],)
        if not all(self._first):
            return
        self.is_open = False
        ((left,), (right,)) = self._first
        found = _difference(left, right)
        if found is not None:
            logger.warning(
                "operator %r: nothing may ever meet: the first key of the left, %s, is %s, and "
                "that of the right, %s, is %s; make them "
                "alike, as with af.col.user.cast(str) or str(row.user)",
                operator,
                describe_record(left),
                found[0],
                describe_record(right),
                found[1],
            )


def _difference(left: Any, right: Any) -> tuple[str, str] | None:
    """Returns the names of the kinds of both keys if they differ. Returns None if the kinds are
    equal or unknown.
    """
    if isinstance(left, tuple) and isinstance(right, tuple):
        if len(left) != len(right):
            return f"a tuple of {len(left)}", f"one of {len(right)}"
        return next(
            (
                found
                for pair in zip(left, right, strict=True)
                if (found := _difference(*pair)) is not None
            ),
            None,
        )
    kinds = ["a tuple" if isinstance(one, tuple) else KINDS.get(type(one)) for one in (left, right)]
    return (kinds[0], kinds[1]) if kinds[0] and kinds[1] and kinds[0] != kinds[1] else None


TODAY_S = range(1_000_000_000, 2_500_000_000)
"""Numbers of seconds since 1970 that are probably a present time: from 2001 to 2049."""
YEAR_S = 31_556_952

UNITS = (
    ("seconds", 1, "* 1000"),
    ("microseconds", 1_000_000, "// 1000"),
    ("nanoseconds", 1_000_000_000, "// 1_000_000"),
)
"""Units of time: the name, the number of units per second, and the conversion to milliseconds as
text.
"""


def warn_of_unit(timestamp: int) -> None:
    """Logs a warning if `timestamp` is probably not in milliseconds.

    `timestamp` is the first timestamp of the operator in whose scope the function is called.
    """
    for unit, per_second, remedy in UNITS:
        if timestamp // per_second in TODAY_S:
            scope = current_scope()
            logger.warning(
                "the first timestamp of operator %r is %d: in milliseconds that is in the year "
                "%d, in %s it is in %d; event time is "
                "milliseconds since the epoch, so give what timestamp= gives %s",
                None if scope is None else scope.operator,
                timestamp,
                _year(timestamp // 1000),
                unit,
                _year(timestamp // per_second),
                remedy,
            )


def warn_of_nones(what: str, count: int) -> None:
    """Logs a warning for a filter whose function has returned None for all `count` elements, so
    that it drops them.

    `what` names the operator and the function.
    """
    logger.warning(
        "%s returned None for all %d elements so far, which drops them: return True for those to "
        "keep; is a return missing?",
        what,
        count,
    )


def _year(seconds: int) -> int:
    return 1970 + seconds // YEAR_S


FORGOTTEN_MAX = 2
"""Number of changed copies of a state's default after which a warning is logged."""


class ForgottenDefault:
    """Counts the copies of a state's mutable default that were changed and not written back.

    `is_open` becomes False when the state is updated or the warning is logged; nothing more is
    counted then.
    """

    __slots__ = ("_changed", "_name", "is_open")

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = 0
        self.is_open = True

    def compare(self, given: Any, default: Any) -> None:
        """Compares `given`, a copy of the state's default, with `default`. Logs a warning if copies
        were changed too often.
        """
        if not isinstance(given, list | dict | set | deque | bytearray):
            self.is_open = False  # Other types may compare at a cost, or not at all.
            return
        try:
            self._changed += given != default
        except Exception:  # noqa: BLE001  # Arrays, for example, compare by element.
            self.is_open = False
        if self._changed < FORGOTTEN_MAX:
            return
        self.is_open = False
        scope = current_scope()
        logger.warning(
            "job %r, operator %r: the value of state %r was changed in place twice and not written "
            "back, so it forgets: call update(value) after the change, or use get_list_state or "
            "get_map_state",
            None if scope is None else scope.job,
            None if scope is None else scope.operator,
            self._name,
        )


Sides = Collection[tuple[int, "OutputTag[Any]"]]
"""Side outputs of a task, each as (index of the operator in the chain, tag)."""


def tell_unread_sides(names: Sequence[str], read: Sides, sent: Sides) -> None:
    """Warns if a finished task may have sent records to the wrong side output.

    This is likely if an operator sent records to a side output without a reader, and none to a side
    output that has a reader. `names` are the names of the operators of the chain, `read` the side
    outputs with a reader, and `sent` the side outputs with records.
    """
    for index in dict.fromkeys(index for index, _ in read):
        empty = [tag.name for node, tag in read if node == index and (node, tag) not in sent]
        unread = [tag.name for node, tag in sent if node == index and (node, tag) not in read]
        if empty and unread:
            hints = [did_you_mean(name, unread) for name in empty]
            logger.log(
                logging.WARNING if any(hints) else logging.INFO,
                "operator %r sent nothing to its side output %s, which has a reader, but to %s, "
                "which has none%s",
                names[index],
                ", ".join(map(repr, empty)),
                ", ".join(map(repr, unread)),
                next(filter(None, hints), ""),
            )


LASTS_S = 30.0
"""Minimum duration in seconds of a state, such as a silent input, for which a warning is logged."""


SAME_FAILURES = 3
"""Number of failures in a row at one place after which the log says how to end them."""


class RepeatedFailure:
    """Notices a job that restarts and fails at the same record each time."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._last: tuple[type, str] | None = None
        self._times = 0

    def add(self, cause: BaseException) -> None:
        """Counts a failure, and logs a warning at the third one in a row of one type at one place.

        Only failures of user code count, since only they have a note with the place. The place
        includes the record. Messages are not compared, because they may contain times or ids.
        """
        place = place_note(cause)
        seen = None if place is None else (type(cause), place)
        self._times = self._times + 1 if seen == self._last else 1
        self._last = seen
        if seen is not None and self._times == SAME_FAILURES:
            logger.warning(
                "job %r failed %d times in the same way: %s: %s (%s). If the element is at fault, "
                "give the operator on_error=. To end the job instead of restarting it, give the "
                'run restart=af.no_restart() or af.fixed_delay(3, "1s")',
                self._job,
                self._times,
                type(cause).__name__,
                message_of(cause),
                place,
            )


class InputSeen(NamedTuple):
    """The present event time of one channel, or of one split of a source."""

    name: str
    """Name of the sender, such as "input 'sensors'"."""
    watermark: int
    idle: bool


class Standing(NamedTuple):
    """The state of an input that is behind others: its watermark, and since when it has this
    watermark.

    `since` is the time in seconds when the input was first seen with `watermark`.
    """

    watermark: int
    latest: int
    """The highest watermark of all inputs at the time `since`."""
    since: float


class CallsSeen(NamedTuple):
    """The present state of the concurrent calls of one operator."""

    place: str
    in_flight: int
    capacity: int
    waiting: bool
    """Whether elements wait for a call to end."""


class TaskAdvice:
    """Remembers the states of the inputs and calls of one task, and logs a warning if a bad state
    lasts too long.
    """

    def __init__(self, job: str, task: str, told: set[str]) -> None:
        """`told` contains the subjects of warnings that tasks of the job have logged already."""
        self._job = job
        self._task = task
        self._told = told
        self._since: dict[str, float] = {}
        """Maps an operator whose calls are a bottleneck to the time when this began."""
        self._standing: dict[str, Standing] = {}
        """The inputs that are behind others, by name."""

    def look(self, inputs: Iterable[InputSeen], calls: Iterable[CallsSeen], now: float) -> None:
        """Notes the present states of `inputs` and `calls` at time `now` (s). Logs a warning if a
        bad state has lasted for 30 seconds.
        """
        lasting, standing = self._since, self._standing
        self._since, self._standing = {}, {}
        inputs = list(inputs)
        # An input that has ended has the last watermark, also in a flow without event time.
        given = [one.watermark for one in inputs if one.watermark < MAX_WATERMARK]
        latest = max(given, default=MIN_WATERMARK)
        for one in inputs:
            if one.idle or one.watermark >= latest:
                continue
            state = standing.get(one.name)
            if state is None or state.watermark != one.watermark:
                state = Standing(one.watermark, latest, now)
            self._standing[one.name] = state
            # An input that fell behind stands alone only if another one has moved since.
            alone = one.watermark == MIN_WATERMARK or latest > state.latest
            if alone and now - state.since >= LASTS_S:
                self._tell_of_silence(one.name, now - state.since)
        for call in calls:
            if call.waiting and call.in_flight >= call.capacity:
                since = self._since[call.place] = lasting.get(call.place, now)
                if now - since >= LASTS_S:
                    self._tell_of_calls(call, now - since)

    def _tell_of_silence(self, name: str, seconds: float) -> None:
        if self._is_new(name):
            logger.warning(
                "job %r: %s has given no new watermark for %.0f s while others did, so event time "
                "stands still in task %r: windows and event-time timers wait. If it may be silent, "
                "give the watermark strategy of its source idle_after=, as in "
                'bounded_out_of_orderness("5s", timestamp=..., idle_after="30s")',
                self._job,
                name,
                seconds,
                self._task,
            )

    def _tell_of_calls(self, call: CallsSeen, seconds: float) -> None:
        if self._is_new(call.place):
            logger.warning(
                "job %r: %s is the bottleneck: %d of %d calls are in flight for %.0f s, and "
                "elements wait: raise concurrency= if the called service can take more",
                self._job,
                call.place,
                call.in_flight,
                call.capacity,
                seconds,
            )

    def _is_new(self, what: str) -> bool:
        if what in self._told:
            return False
        self._told.add(what)
        return True
