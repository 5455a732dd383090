"""Invariants of the output of the simulated world, at every instant and at the end.

The oracle knows the input, and nothing of the engine.

Rows are what the sinks have committed. Of the external store: `("n", key, n, record)` counts the
records of a key, `("t", key, time)` is an event-time timer that fired, `("p", key)` the one
processing-time timer of a key, `("l", key, record)` a record that came late for its window, `("r",
key, record, n)` a record that met n rules, all that were told before it, `("c", key, n)` the number
of records of a key that comes and goes, `("d", key)` its second timer. Of the files: `[key, start,
count]`, one a window.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Data", "Oracle", "Violation"]

KEYS = 24
"""Number of keys: more than key groups, so that every border between two subtasks has keys on both
sides.
"""

HOT_KEYS = 5
SPREAD = 8
"""Number of records of each split that go to all keys.

Later records go to the hot keys, so that most state is old when a checkpoint is taken.
"""

ALARM_EVERY = 4
"""Distance between two keys with an alarm."""

STEP_MS = {"a": 10, "b": 25}
"""Event time between two records of a split, by source."""

LAG_MS = 12
TIMER_MS = 37
CHURN_MS = 80
"""Two records of one key that comes and goes are nearer than that, however late the second one
is.
"""
WINDOW_MS = 100

Record = tuple[str, int, int]
"""Source, split, number within the split."""


class Violation(AssertionError):
    """A guarantee of the engine does not hold.

    As an AssertionError it ends the run wherever it is raised.
    """


def key_of(record: Record) -> int:
    source, split, i = record
    spread = i * 7 + split * 5 + ord(source) * 11
    return spread % KEYS if i < SPREAD else spread % HOT_KEYS


def time_of(record: Record) -> int:
    """Event time: out of order by less than LAG_MS."""
    source, _, i = record
    return i * STEP_MS[source] + i * 7 % LAG_MS


def churn_key_of(record: Record) -> str:
    """Two records that follow each other in their split have one key, and no others."""
    source, split, i = record
    return f"{source}{split}-{i // 2}"


def has_timer(record: Record) -> bool:
    return record[2] % 3 == 0


def has_alarm(key: int) -> bool:
    return key % ALARM_EVERY == 0


@dataclass(frozen=True, slots=True)
class Data:
    """The input: how many splits each source has, and how many records each of them.

    `bounded`: event time ends with it.
    """

    splits: dict[str, int]
    records: dict[str, int]
    bounded: bool
    may_be_late: bool = False
    """Splits that are found later hold records that are late: they are on a side output, and
    missing in their windows.
    """
    rules: int = 0
    """Number of rules that every subtask of a part gets that each record passes too; 0: the part is
    absent.
    """

    churns: bool = False
    """Whether each record is also counted under a key that comes and goes."""

    def all(self) -> Iterable[Record]:
        for source, splits in self.splits.items():
            for split in range(splits):
                for i in range(self.records[source]):
                    yield source, split, i

    @property
    def total(self) -> int:
        return sum(splits * self.records[source] for source, splits in self.splits.items())

    @property
    def final_time(self) -> float:
        """The watermark behind the last record."""
        if self.bounded:
            return float("inf")
        return (
            min(
                max(time_of((source, 0, i)) for i in range(count))
                for source, count in self.records.items()
            )
            - LAG_MS
            - 1
        )


@dataclass(slots=True)
class Oracle:
    """Takes committed rows as they come, and fails with a Violation at the first that cannot be."""

    data: Data
    in_order: bool = True
    """Whether the counts of a key appear in their order. When transactions are dealt out to other
    subtasks, those of one key may go to two, which commit beside each other, before any of them
    takes new records: the order of what is visible is no guarantee then.
    """
    counts: dict[int, set[int]] = field(default_factory=dict)
    records: set[Record] = field(default_factory=set)
    timers: Counter[tuple[int, int]] = field(default_factory=Counter)
    alarms: set[int] = field(default_factory=set)
    windows: dict[tuple[int, int], int] = field(init=False)
    due_timers: set[tuple[int, int]] = field(init=False)
    all_timers: Counter[tuple[int, int]] = field(init=False)
    """How many records set each."""
    due_windows: set[tuple[int, int]] = field(init=False)
    due_alarms: set[int] = field(init=False)
    seen_windows: dict[tuple[int, int], int] = field(default_factory=dict)
    late: dict[tuple[int, int], set[Record]] = field(default_factory=dict)
    """Late records by window."""
    ruled: set[Record] = field(default_factory=set)
    """Records that came through where the rules are."""
    churn: dict[str, int] = field(default_factory=dict)
    """Number of records of each key that comes and goes."""
    all_churn: Counter[str] = field(default_factory=Counter)
    due_churn: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        end = self.data.final_time
        windows: Counter[tuple[int, int]] = Counter()
        self.all_timers = Counter()
        keys = set()
        for record in self.data.all():
            key, time = key_of(record), time_of(record)
            keys.add(key)
            windows[key, time - time % WINDOW_MS] += 1
            if has_timer(record):
                self.all_timers[key, time + TIMER_MS] += 1
            if self.data.churns:
                self.all_churn[churn_key_of(record)] += 1
                if record[2] % 2 == 0 and time + CHURN_MS <= end:
                    self.due_churn.add(churn_key_of(record))
        self.windows = dict(windows)
        self.due_timers = {timer for timer in self.all_timers if timer[1] <= end}
        # When the input ends, processing time does.
        self.due_alarms = set() if self.data.bounded else {key for key in keys if has_alarm(key)}
        self.due_windows = {window for window in windows if window[1] + WINDOW_MS - 1 <= end}

    def committed(self, rows: Iterable[Any]) -> None:
        """A transaction became visible, its rows in this order."""
        for kind, key, *rest in rows:
            if kind == "n":
                count, record = rest[0], tuple(rest[1])
                if record in self.records:
                    raise Violation(
                        f"record {record} is committed twice, the second time as number {count} "
                        f"of key {key}"
                    )
                if key_of(record) != key:
                    raise Violation(f"record {record} is counted under key {key}")
                seen = self.counts.setdefault(key, set())
                if count in seen or (self.in_order and count != len(seen) + 1):
                    raise Violation(
                        f"key {key}: count {count} of {record} is committed after "
                        f"{sorted(seen)[-4:]}"
                    )
                seen.add(count)
                self.records.add(record)
            elif kind == "t":
                timer = (key, rest[0])
                self.timers[timer] += 1
                # Set again by a record that is late, it fires again.
                if self.timers[timer] > (
                    self.all_timers[timer] if self.data.may_be_late else timer in self.all_timers
                ):
                    set_by = f"and {self.all_timers[timer]} records set it"
                    raise Violation(
                        f"timer {timer} is committed {self.timers[timer]} times, {set_by}"
                    )
            elif kind == "c":
                if key in self.churn or rest[0] != self.all_churn[key]:
                    again = "" if key not in self.churn else " again"
                    raise Violation(
                        f"key {key} is committed{again} with {rest[0]} records, expected "
                        f"{self.all_churn[key]}"
                    )
                self.churn[key] = rest[0]
            elif kind == "d":
                if self.all_churn[key] != 1:
                    raise Violation(f"the timer of key {key} has fired that was deleted")
            elif kind == "l":
                self._late(key, tuple(rest[0]))
            elif kind == "r":
                record = tuple(rest[0])
                if (
                    record in self.ruled
                    or key_of(record) != key
                    or not 0 <= rest[1] <= self.data.rules
                ):
                    raise Violation(
                        f"record {record} is committed with {rest[1]} rules"
                        + (" again" if record in self.ruled else "")
                    )
                self.ruled.add(record)
            else:
                if key in self.alarms or not has_alarm(key):
                    raise Violation(
                        f"the alarm of key {key} is committed "
                        + ("twice" if has_alarm(key) else "and was never set")
                    )
                self.alarms.add(key)

    def _late(self, key: int, record: Record) -> None:
        time = time_of(record)
        late = self.late.setdefault((key, time - time % WINDOW_MS), set())
        if record in late or key_of(record) != key or not self.data.may_be_late:
            raise Violation(
                f"record {record} is committed as late "
                + ("twice" if record in late else f"for key {key}")
            )
        late.add(record)

    def visible(self, rows: Iterable[Any]) -> None:
        """All rows of all files that anybody may read now."""
        seen: dict[tuple[int, int], int] = {}
        for key, start, count in rows:
            window = (key, start)
            if window in seen:
                raise Violation(f"window {window} is in the files twice")
            expected = self.windows.get(window, 0)
            if not (0 < count <= expected if self.data.may_be_late else count == expected):
                raise Violation(
                    f"window {window} has {count} records in the files, expected {expected}"
                )
            seen[window] = count
        self.seen_windows = seen

    def _is_over(self, window: tuple[int, int]) -> bool:
        """Whether all of it is there, in the file or as late."""
        late = len(self.late.get(window, ()))
        there = self.seen_windows.get(window, 0) + late
        if there > self.windows[window]:
            raise Violation(
                f"window {window} has {there - late} records in the files, {late} late ones, "
                f"expected {self.windows[window]}"
            )
        return there == self.windows[window]

    @property
    def complete(self) -> bool:
        """Whether everything that must come has come."""
        if len(self.records) < self.data.total or (
            self.data.rules and len(self.ruled) < self.data.total
        ):
            return False
        for key, seen in self.counts.items():
            if max(seen) != len(seen):
                raise Violation(
                    f"key {key}: all records are committed, with the counts {sorted(seen)}"
                )
        if not self.churn.keys() >= self.due_churn:
            return False
        return (
            self.timers.keys() >= self.due_timers
            and self.alarms >= self.due_alarms
            and all(map(self._is_over, self.due_windows))
        )

    def missing(self) -> str:
        """Returns the missing output, for a message."""
        records = sorted(set(self.data.all()) - self.records)
        timers = sorted(self.due_timers - self.timers.keys())
        alarms = sorted(self.due_alarms - self.alarms)
        windows = sorted(window for window in self.due_windows if not self._is_over(window))
        ruled = sorted(set(self.data.all()) - self.ruled) if self.data.rules else []
        churn = sorted(self.due_churn - self.churn.keys())
        parts = (
            (records, "records"),
            (churn, "keys that go"),
            (ruled, "records with rules"),
            (timers, "timers"),
            (alarms, "alarms"),
            (windows, "windows"),
        )
        return ", ".join(f"{len(part)} {name} {part[:4]}" for part, name in parts)
