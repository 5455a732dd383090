"""Process functions that keep rows of each key: the first row, the best rows, and the emitted rows.

Functions on a changelog read insertions and deletions of rows, marked by the field CHANGE. They
emit insertions before deletions, so that a replaced row is never missing in between.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aioflow.core.functions import (
    AggregateFunction,
    KeyedCoProcessFunction,
    KeyedProcessFunction,
    ProcessContext,
    RuntimeContext,
)
from aioflow.core.states import MapState, MapStateDescriptor, ValueState, ValueStateDescriptor
from aioflow.io.changes import Upsert
from aioflow.sql.relation import CHANGE, PASSES
from aioflow.sql.retraction import retractable

__all__ = ["ChangingJoin", "First", "Groups", "Leaders", "Over", "Shown", "Versions", "as_changes"]

Row = dict[str, Any]


def _split(value: Row) -> tuple[Row, int]:
    """Returns a row of a changelog without its field CHANGE, and the value of this field."""
    row = value.copy()
    return row, row.pop(CHANGE, 1)


def _text(row: Row) -> str:
    """Returns a text that is the same for equal rows. The rows must have their fields in the same
    order, as all rows of one stream do.
    """
    return repr([*row.values()])


@dataclass
class Leaders(KeyedProcessFunction[Any, Row, Row]):
    """Keeps the first `n` rows of each key in the order of `key`. Emits a row with its rank as the
    field `name` whenever its rank is new or has changed.

    With `retracts` the input is a changelog, and the rows after the first `n` are kept too. An
    emitted row with PASSES False means that no row has this rank any more.
    """

    name: str
    n: int
    key: Callable[[Row], Any]
    retracts: bool = False

    def open(self, ctx: RuntimeContext) -> None:
        self.best: ValueState[list[Row]] = ctx.get_state(ValueStateDescriptor("best"))
        if self.retracts:
            self.others: MapState[str, tuple[Row, int]] = ctx.get_map_state(
                MapStateDescriptor("others")
            )
        """Maps the text of a row after the first `n` to the row and the number of equal rows."""

    def process_element(self, value: Row, ctx: ProcessContext) -> list[Row]:
        best = self.best.value() or []
        if self.retracts:
            value, change = _split(value)
            if change < 0:
                return self._gone(value, best)
        of_value = self.key(value)
        if len(best) == self.n and not of_value < self.key(best[-1]):
            if self.retracts:
                self._keep(value, 1)
            return []
        place = bisect_right(best, of_value, key=self.key)
        best = [*best[:place], value, *best[place:]]
        if self.retracts and len(best) > self.n:
            self._keep(best[-1], 1)
        best = best[: self.n]
        self.best.update(best)
        return self._from(place, best)

    def _from(self, place: int, best: list[Row]) -> list[Row]:
        more = {PASSES: True} if self.retracts else {}
        return [{**row, self.name: at, **more} for at, row in enumerate(best[place:], place + 1)]

    def _gone(self, value: Row, best: list[Row]) -> list[Row]:
        text = _text(value)
        place = next((n for n, row in enumerate(best) if _text(row) == text), None)
        if place is None:
            self._keep(value, -1)
            return []
        best = [*best[:place], *best[place + 1 :]]
        following = min((row for row, _ in self.others.values()), key=self.key, default=None)
        if following is not None:
            self._keep(following, -1)
            best.append(following)
        self.best.update(best or None)
        gone = [] if following else [{**value, self.name: len(best) + 1, PASSES: False}]
        return self._from(place, best) + gone

    def _keep(self, row: Row, change: int) -> None:
        text = _text(row)
        _, count = self.others.get(text) or (row, 0)
        if count + change > 0:
            self.others.put(text, (row, count + change))
        else:
            self.others.remove(text)


@dataclass
class First(KeyedProcessFunction[Any, Row, Row]):
    """Emits the earliest row of each key, once event time has passed the time of the row.

    Without `by_time`, emits the row that arrives first, at once.
    """

    by_time: bool
    ttl: str | None

    def open(self, ctx: RuntimeContext) -> None:
        self.done: ValueState[bool] = ctx.get_state(ValueStateDescriptor("done", ttl=self.ttl))
        self.best: ValueState[Any] = ctx.get_state(ValueStateDescriptor("best"))
        """The earliest row so far, with its time. Empty once this row was emitted."""

    def process_element(self, value: Row, ctx: ProcessContext) -> Iterator[Row]:
        if self.done.value():
            return
        if not self.by_time:
            self.done.update(True)
            yield value
            return
        best = self.best.value()
        if best is None or ctx.timestamp < best[0]:
            self.best.update((ctx.timestamp, value))
            ctx.timer_service.register_event_time_timer(ctx.timestamp)

    def on_timer(self, timestamp: int, ctx: ProcessContext) -> Iterator[Row]:
        best = self.best.value()
        if best is not None and best[0] <= timestamp:
            self.best.clear()
            self.done.update(True)
            yield best[1]


@dataclass
class Over(KeyedProcessFunction[Any, Row, Row]):
    """Adds to each row the aggregate of the rows of its key up to this row, in order of event time.

    A row is emitted when the watermark has reached its time. Late rows are dropped.
    """

    aggregate: AggregateFunction[Any, Any, Any]
    order: Callable[[Row], Any] | None
    """Order of rows with the same time; None means the order of arrival."""
    by_rows: bool
    """Whether each row has its own frame (ROWS). Otherwise rows with equal time and order share one
    frame (RANGE).
    """
    size: int | None
    """Length of the frame before a row, in rows or ms. None means that the frame has all rows
    before it.
    """
    name: str

    def open(self, ctx: RuntimeContext) -> None:
        self.waiting: MapState[int, list[Row]] = ctx.get_map_state(MapStateDescriptor("waiting"))
        """Lists of rows that were not emitted yet, by the time of the rows."""
        self.past: ValueState[list[tuple[int, Row]]] = ctx.get_state(ValueStateDescriptor("past"))
        """The rows of the frame with their times, if the frame has a size."""
        self.total: ValueState[Any] = ctx.get_state(ValueStateDescriptor("total"))
        """The accumulator of all rows, if the frame has no size."""

    def process_element(self, value: Row, ctx: ProcessContext) -> None:
        time, watermark = ctx.timestamp, ctx.current_watermark
        if watermark is not None and time <= watermark:
            return
        self.waiting.put(time, [*self.waiting.get(time, []), value])
        ctx.timer_service.register_event_time_timer(time)

    def on_timer(self, timestamp: int, ctx: ProcessContext) -> Iterator[Row]:
        rows = self.waiting.get(timestamp, [])
        self.waiting.remove(timestamp)
        if self.order is not None:
            rows = sorted(rows, key=self.order)
        groups: list[list[Row]] = []
        for row in rows:
            order = self.order
            is_peer = groups and (order is None or order(groups[-1][-1]) == order(row))
            if is_peer and not self.by_rows:
                groups[-1].append(row)
            else:
                groups.append([row])
        for group in groups:
            result = self._of_all(group) if self.size is None else self._of_frame(timestamp, group)
            for row in group:
                yield {**row, self.name: result}

    def _of_all(self, group: list[Row]) -> Any:
        total = self.total.value()
        if total is None:
            total = self.aggregate.create_accumulator()
        for row in group:
            total = self.aggregate.add(row, total)
        self.total.update(total)
        return self.aggregate.get_result(total)

    def _of_frame(self, time: int, group: list[Row]) -> Any:
        assert self.size is not None
        past = [*(self.past.value() or ()), *((time, row) for row in group)]
        if self.by_rows:
            past = past[-self.size - 1 :]
        else:
            past = [one for one in past if one[0] >= time - self.size]
        self.past.update(past)
        total = self.aggregate.create_accumulator()
        for _, row in past:
            total = self.aggregate.add(row, total)
        return self.aggregate.get_result(total)


class Shown(KeyedProcessFunction[Any, Upsert[Any], Upsert[Any]]):
    """Drops the deletion of a row that does not exist in the output so far."""

    def open(self, ctx: RuntimeContext) -> None:
        self.shown: ValueState[bool] = ctx.get_state(ValueStateDescriptor("shown"))

    def process_element(self, value: Upsert[Any], ctx: ProcessContext) -> tuple[Upsert[Any], ...]:
        shown = self.shown.value()
        if value.row is not None:
            if not shown:
                self.shown.update(True)
            return (value,)
        if shown:
            self.shown.clear()
            return (value,)
        return ()


@dataclass
class Versions(KeyedProcessFunction[Any, Row, Any]):
    """Keeps the rows of each key, and emits `give(before, after)` when the latest row changes.

    The rows of a changelog with a key can come from several subtasks. So a row may be inserted
    before the row that it replaces is deleted. The row that was inserted last is the latest row.
    """

    of_changelog: bool
    """Whether records are insertions and deletions, marked by CHANGE. Otherwise each record
    replaces the previous record of its key, and PASSES says whether the row still exists.
    """
    give: Callable[[Row | None, Row | None], Iterable[Any]]

    def open(self, ctx: RuntimeContext) -> None:
        self.rows: ValueState[list[Row]] = ctx.get_state(ValueStateDescriptor("rows"))

    def process_element(self, value: Row, ctx: ProcessContext) -> Iterable[Any]:
        rows = self.rows.value() or []
        before = rows[-1] if rows else None
        if self.of_changelog:
            row, change = _split(value)
            if change > 0:
                rows = [*rows, row]
            else:
                text = _text(row)
                gone = next((n for n, one in enumerate(rows) if _text(one) == text), len(rows))
                rows = [*rows[:gone], *rows[gone + 1 :]]
        else:
            row = value.copy()
            rows = [row] if row.pop(PASSES) else []
        after = rows[-1] if rows else None
        self.rows.update(rows or None)
        return () if before == after else self.give(before, after)


def as_changes(before: Row | None, after: Row | None) -> Iterator[Row]:
    """Yields the changelog rows by which `after` replaces `before`. None stands for no row."""
    if after is not None:
        yield {**after, CHANGE: 1}
    if before is not None:
        yield {**before, CHANGE: -1}


class Groups(KeyedProcessFunction[Any, Row, tuple[Any, Any, int]]):
    """Aggregates the rows of a changelog. Emits the key, the results, and the number of rows of the
    group.
    """

    def __init__(self, parts: Mapping[str, AggregateFunction[Any, Any, Any]]) -> None:
        self.names = tuple(parts)
        self.parts = [retractable(part) for part in parts.values()]

    def __repr__(self) -> str:
        return f"Groups({', '.join(self.names)})"

    def open(self, ctx: RuntimeContext) -> None:
        self.group: ValueState[tuple[int, list[Any]]] = ctx.get_state(ValueStateDescriptor("group"))
        """The number of rows, and the accumulator of each part."""
        self.values: list[Any] = [
            ctx.get_map_state(MapStateDescriptor(f"values{n}")) if part.keeps_values else None
            for n, part in enumerate(self.parts)
        ]

    def process_element(self, value: Row, ctx: ProcessContext) -> tuple[tuple[Any, Any, int], ...]:
        change = value[CHANGE]
        count, accumulators = self.group.value() or (0, [part.initial for part in self.parts])
        count += change
        accumulators = [
            part.changed(accumulator, value, change, values)
            for part, accumulator, values in zip(self.parts, accumulators, self.values, strict=True)
        ]
        self.group.update((count, accumulators) if count > 0 else None)
        found = [
            part.result(accumulator, values)
            for part, accumulator, values in zip(self.parts, accumulators, self.values, strict=True)
        ]
        results = found[0] if len(found) == 1 else dict(zip(self.names, found, strict=True))
        return ((ctx.current_key, results, count),)


class ChangingJoin(KeyedCoProcessFunction[Any, Row, Row, Row]):
    """Joins two inputs to a changelog of the pairs. An input is a changelog, or a stream of rows
    that are only inserted.

    On a side with `keeps`, a row without a partner is emitted with NULLs for the other side. A NULL
    in a key is not equal to anything. When a row expires, its pairs are not deleted.
    """

    def __init__(
        self,
        names: tuple[Sequence[str], Sequence[str]],
        keeps: tuple[bool, bool],
        predicate: Sequence[Callable[[Row], Any]],
        ttls: Sequence[Any],
    ) -> None:
        self.nulls = tuple(dict.fromkeys(one) for one in names)
        self.keeps, self.predicate, self.ttls = keeps, predicate, ttls

    def __repr__(self) -> str:
        names = [list(one) for one in self.nulls]
        return f"ChangingJoin({names}, {self.keeps}, {self.predicate})"

    def open(self, ctx: RuntimeContext) -> None:
        self.sides: list[MapState[str, tuple[Row, int, int]]] = [
            ctx.get_map_state(MapStateDescriptor(name, ttl=ttl))
            for name, ttl in zip(("left", "right"), self.ttls, strict=True)
        ]
        """For the left and the right side: maps the text of a row to the row, the number of equal
        rows, and the number of their partners. Only a side with `keeps` counts partners.
        """

    def process_element1(self, value: Row, ctx: ProcessContext) -> Iterable[Row]:
        return self._changed(0, value, ctx.current_key)

    def process_element2(self, value: Row, ctx: ProcessContext) -> Iterable[Row]:
        return self._changed(1, value, ctx.current_key)

    def _changed(self, side: int, value: Row, key: tuple[Any, ...]) -> Iterable[Row]:
        row, change = _split(value)
        other = 1 - side

        def pair(own: Row, found: Row, change: int) -> Row:
            """Returns a pair with the left row's fields before the right row's fields, an order
            that `_text` needs.
            """
            left, right = (own, found) if side == 0 else (found, own)
            return {**left, **right, CHANGE: change}

        alone = pair(row, self.nulls[other], change)
        if None in key:
            return [alone] if self.keeps[side] else []
        own, others = self.sides[side], self.sides[other]
        text = _text(row)
        entry = own.get(text)
        if entry is None and change < 0:  # The row has expired.
            return []
        met = [
            (name, found)
            for name, found in others.items()
            if all(test({**row, **found[0]}) for test in self.predicate)
        ]
        if entry is None:
            entry = row, 0, sum(count for _, (_, count, _) in met)
        _, count, partners = entry
        if count + change:
            own.put(text, (row, count + change, partners))
        else:
            own.remove(text)
        made = [pair(row, found, change) for _, (found, times, _) in met for _ in range(times)]
        if self.keeps[side] and not partners:
            made.append(alone)
        for name, (found, times, before) in met if self.keeps[other] else ():
            after = before + change
            others.put(name, (found, times, after))
            if not before or not after:
                made += [pair(self.nulls[side], found, -change) for _ in range(times)]
        return sorted(made, key=lambda one: -one[CHANGE])
