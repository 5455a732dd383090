"""The generators behind the watermark strategies. They process a batch at a time: timestamps in,
watermarks out.

A generator carries its state from batch to batch, so the borders of batches make no difference. A
watermark never falls.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from datetime import datetime
from operator import length_hint
from typing import Any, NoReturn, Protocol

from aioflow.core.column_batch import NumberColumn
from aioflow.core.elements import MAX_WATERMARK, MIN_WATERMARK
from aioflow.expressions.nodes import is_expression
from aioflow.expressions.rows import RowFunction, compile_row
from aioflow.operators.inlining import as_getter, failure_of

__all__ = [
    "BoundedGenerator",
    "IngestionGenerator",
    "PunctuatedGenerator",
    "SilentGenerator",
    "WatermarkGenerator",
    "custom_generator",
    "timestamp_extractor",
    "with_timestamp",
]

Extractor = Callable[[Any], Any]
"""Returns the timestamp of an element, which is not checked yet."""


class WatermarkGenerator(Protocol):
    """The interface of an object that computes the timestamps and watermarks of one sequence of
    records, batch by batch.
    """

    current: int
    """The watermark after the last record."""
    failed_at: int | None
    """Index of the record at which the last `apply` failed, None if no record failed."""

    def apply(
        self, values: list[Any], timestamps: list[int] | None
    ) -> tuple[list[int] | None, list[int] | None, int]:
        """Processes the next records. `timestamps` are the timestamps that they have already, None
        if they have none. Returns

        * the timestamps of the records, None without event time;
        * the watermark in force before each record, None if all have the same;
        * the watermark after the last record.

        Raises TypeError or ValueError, which names the value, for an invalid timestamp.
        """

    def restore(self, watermark: int) -> None:
        """Continues from `watermark`, which the earlier records had reached."""


class _Stamping:
    """The common base of the generators that extract timestamps from the records."""

    __slots__ = ("_extract", "_getter", "_on_columns", "current", "failed_at")

    def __init__(self, extract: Extractor | None) -> None:
        self.current = MIN_WATERMARK
        self.failed_at: int | None = None
        self._extract = extract
        self._getter = None if extract is None else as_getter(extract)
        self._on_columns: Callable[[Any], NumberColumn | None] | None = None

    def _column_times(self, values: Any, timestamps: Any) -> NumberColumn | None:
        """Returns the timestamps of a column batch as a column, or None if each has to be checked
        separately.
        """
        if self._extract is None:
            return timestamps if isinstance(timestamps, NumberColumn) else None
        if not isinstance(self._extract, RowFunction):
            return None
        if self._on_columns is None:
            from aioflow.columns.expressions import TimesOf

            self._on_columns = TimesOf(*self._extract.expressions)
        return self._on_columns(values)

    def _times(self, values: list[Any], timestamps: list[int] | None) -> list[int]:
        """Returns the timestamps of `values`, after checking them.

        Checks the type of every timestamp, in fast passes over the whole list. Otherwise a float
        would be noticed only when a checkpoint encodes it.
        """
        extract, getter = self._extract, self._getter
        if (
            type(values) is not list
            and (column := self._column_times(values, timestamps)) is not None
        ):
            return column  # type: ignore[return-value]  # It reads like a list.
        if extract is not None and getter is not None:
            source = iter(values)
            if isinstance(getter, RowFunction) and values:
                getter = getter.of(values[0])
            try:
                times: list[int] = list(map(getter, source))
            except Exception as error:
                self.failed_at = len(values) - length_hint(source) - 1
                if getter is not extract and not isinstance(extract, RowFunction):
                    raise failure_of(extract, values[self.failed_at], error) from None
                raise
            if len(times) < len(values):  # `map` treated a StopIteration as its own end.
                self.failed_at = len(times)
                raise RuntimeError(
                    "the timestamp function raised StopIteration, which is no failure it may use"
                )
        elif timestamps is None:
            if values:
                raise TypeError(
                    "the records have no timestamps: give the watermark strategy timestamp=, a "
                    "function or expression of the element"
                )
            times = []
        else:
            times = timestamps
        if list(map(type, times)).count(int) != len(times):
            self.failed_at = next(i for i, time in enumerate(times) if type(time) is not int)
            expression = extract.expressions[0] if isinstance(extract, RowFunction) else None
            _refuse(times[self.failed_at], expression)
        return times


class BoundedGenerator(_Stamping):
    """A generator whose watermark is the highest timestamp so far, minus the delay, minus 1."""

    __slots__ = ("_highest", "_lag")

    def __init__(self, extract: Extractor | None, delay_ms: int) -> None:
        super().__init__(extract)
        self._lag = lag = delay_ms + 1
        self._highest = MIN_WATERMARK + lag

    def apply(
        self, values: list[Any], timestamps: list[int] | None
    ) -> tuple[list[int] | None, list[int] | None, int]:
        times = self._times(values, timestamps)
        if not times:
            return times, None, self.current
        if isinstance(times, NumberColumn) and self._highest <= MAX_WATERMARK:
            from aioflow.columns.expressions import bounded

            marks, self._highest = bounded(times, self._highest, self._lag)
            self.current = self._highest - self._lag
            return times, marks, self.current  # type: ignore[return-value]  # They read like lists.
        # A plain loop: it subtracts only where the maximum moves, and beats
        # itertools.accumulate(times, max) by two to one.
        highest, watermark, lag = self._highest, self.current, self._lag
        before = watermark
        watermarks: list[int] = []
        for time in times:
            watermarks.append(watermark)
            if time > highest:
                highest = time
                watermark = time - lag
        if highest > MAX_WATERMARK:
            self.failed_at = times.index(highest)
            raise ValueError(
                f"timestamp is {highest}, expected 64-bit milliseconds since the epoch (at most "
                f"{MAX_WATERMARK})"
            )
        self._highest, self.current = highest, watermark
        return times, None if watermarks[-1] == before else watermarks, watermark

    def restore(self, watermark: int) -> None:
        self.current = watermark
        self._highest = watermark + self._lag


class PunctuatedGenerator(_Stamping):
    """A generator that calls a function of the application after each record, which returns the
    watermark.
    """

    __slots__ = ("_on_event", "_what")

    def __init__(
        self, extract: Extractor | None, on_event: Callable[[Any, int], int | None], what: str
    ) -> None:
        super().__init__(extract)
        self._on_event = on_event
        self._what = what

    def apply(
        self, values: list[Any], timestamps: list[int] | None
    ) -> tuple[list[int] | None, list[int] | None, int]:
        times = self._times(values, timestamps)
        on_event, current = self._on_event, self.current
        before = current
        watermarks: list[int] = []
        try:
            for value, timestamp in zip(values, times, strict=True):
                watermarks.append(current)
                new = on_event(value, timestamp)
                if new is not None:
                    if type(new) is not int:
                        raise TypeError(
                            f"{self._what} gave {_spell(new)}, expected int milliseconds since "
                            "the epoch, or None"
                        )
                    if new > current:
                        current = new
        except BaseException:
            self.failed_at = len(watermarks) - 1
            raise
        self.current = current
        if not watermarks or watermarks[-1] == before:
            return times, None, current
        return times, watermarks, current

    def restore(self, watermark: int) -> None:
        self.current = watermark


class SilentGenerator(_Stamping):
    """A generator that assigns timestamps and no watermarks."""

    __slots__ = ()

    def apply(
        self, values: list[Any], timestamps: list[int] | None
    ) -> tuple[list[int] | None, list[int] | None, int]:
        if self._extract is None:
            return timestamps, None, MIN_WATERMARK
        return self._times(values, None), None, MIN_WATERMARK

    def restore(self, watermark: int) -> None:
        """Does nothing, because this generator emits no watermarks."""


class IngestionGenerator:
    """A generator that assigns the time of arrival as timestamp. Event time does not fall when the
    clock is set back.
    """

    __slots__ = ("_now_ms", "current", "failed_at")

    def __init__(self, now_ms: Callable[[], int]) -> None:
        self.failed_at: int | None = None
        self.current = MIN_WATERMARK
        self._now_ms = now_ms

    def apply(
        self, values: list[Any], timestamps: list[int] | None
    ) -> tuple[list[int] | None, list[int] | None, int]:
        # The watermark is one below the last timestamp, which all records of a batch share.
        now = max(self._now_ms(), self.current + 1)
        if not values:
            return [], None, self.current
        before, self.current = self.current, now - 1
        if len(values) == 1 or before == now - 1:
            return [now] * len(values), None, now - 1
        return [now] * len(values), [before] + [now - 1] * (len(values) - 1), now - 1

    def restore(self, watermark: int) -> None:
        self.current = watermark


def _refuse(timestamp: object, expression: Any) -> NoReturn:
    """Raises TypeError for `timestamp`, which is not an int. The message suggests a remedy.

    `expression` is the expression that returned the timestamp, None if a function returned it.
    """
    if timestamp is None:
        remedy = "does every record have the field?"
    elif isinstance(timestamp, datetime) and timestamp.tzinfo is None:
        remedy = "without a time zone; if UTC, use int(t.replace(tzinfo=UTC).timestamp() * 1000)"
    elif hasattr(timestamp, "timestamp") and expression is not None:
        remedy = f"use {expression.dt.epoch_ms!r}"
    elif hasattr(timestamp, "timestamp"):
        remedy = "use int(t.timestamp() * 1000)"
    elif isinstance(timestamp, str):
        remedy = (
            "parse it first"
            if expression is None
            else f"use {expression.cast(int)!r} if it is a number, or parse it first"
        )
    else:
        remedy = "use int(...), and milliseconds"
    raise TypeError(
        f"timestamp is {_spell(timestamp)}, expected int milliseconds since the epoch; {remedy}"
    )


def _spell(value: object) -> str:
    return f"{value!r:.100} of type {type(value).__name__}"


def timestamp_extractor(timestamp: Any) -> Extractor | None:
    """Returns `timestamp`, a function or an expression, as a function of the element. Returns None
    for None.
    """
    if timestamp is None or inspect.isroutine(timestamp):
        return timestamp
    if is_expression(timestamp):
        return compile_row(timestamp)
    if not callable(timestamp):
        raise TypeError(
            f"timestamp= is {_spell(timestamp)}, expected a function of the element or an "
            "expression"
        )
    return timestamp  # type: ignore[no-any-return]


def with_timestamp(fn: Callable[..., int | None]) -> Callable[[Any, int], int | None]:
    """Returns `fn`, which may take one or two arguments, as a function of (value, timestamp)."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except ValueError:  # Some builtins have no signature. They are called with the value.
        return lambda value, _: fn(value)
    positional = [
        p
        for p in parameters
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty
    ]
    if len(positional) == 1 and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return lambda value, _: fn(value)
    return fn


def custom_generator(generator: Any) -> Any:
    """Returns an object with the method `on_event` for one subtask: a copy of `generator` if it has
    this method, otherwise the result of calling `generator`.
    """
    made = (
        copy.deepcopy(generator)
        if hasattr(generator, "on_event") and not isinstance(generator, type)
        else generator()
    )
    if not hasattr(made, "on_event"):
        raise TypeError(
            f"custom watermark generator is {_spell(made)}, expected an object with "
            "on_event(value, timestamp)"
        )
    return made
