"""Functions that keep rows of each key: the first one, the best ones, and what was emitted."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from aioflow.core.functions import KeyedProcessFunction, ProcessContext, RuntimeContext
from aioflow.core.states import ValueState, ValueStateDescriptor
from aioflow.io.changes import Upsert

__all__ = ["First", "Leaders", "Shown"]

Row = dict[str, Any]


@dataclass
class Leaders(KeyedProcessFunction[Any, Row, Row]):
    """Emits each of the first `n` rows of a key whose rank is new or another, with its rank."""

    name: str
    n: int
    key: Callable[[Row], Any]

    def open(self, ctx: RuntimeContext) -> None:
        self.best: ValueState[list[Row]] = ctx.get_state(ValueStateDescriptor("best"))

    def process_element(self, value: Row, ctx: ProcessContext) -> list[Row]:
        best, of_value = self.best.value() or [], self.key(value)
        if len(best) == self.n and not of_value < self.key(best[-1]):
            return []
        place = bisect_right(best, of_value, key=self.key)
        best = [*best[:place], value, *best[place:]][: self.n]
        self.best.update(best)
        return [{**row, self.name: at} for at, row in enumerate(best[place:], place + 1)]


@dataclass
class First(KeyedProcessFunction[Any, Row, Row]):
    """Emits the earliest row of each key, once event time has passed the time of the row.

    Without `by_time` it is the row that arrives first, which is emitted at once.
    """

    by_time: bool
    ttl: str | None

    def open(self, ctx: RuntimeContext) -> None:
        self.done: ValueState[bool] = ctx.get_state(ValueStateDescriptor("done", ttl=self.ttl))
        self.best: ValueState[Any] = ctx.get_state(ValueStateDescriptor("best"))
        """The earliest row so far, with its time, until it is emitted."""

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


class Shown(KeyedProcessFunction[Any, Upsert[Any], Upsert[Any]]):
    """Leaves out deletions of rows that no upsert has shown."""

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
