"""Process functions of the plain model: state, timers and contexts that are dicts and lists."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from tests.programs import functions
from tests.programs.pieces import n_of
from tests.programs.streams import (
    FIRST,
    LAST,
    Item,
    Stream,
    Undetermined,
    by_key,
    called,
    far_away,
    keyed_order,
    made,
)

if TYPE_CHECKING:
    from tests.programs.program import Program, Step


__all__ = ["broadcast", "connect", "keyed_process"]


class Plain:
    """State, timers and context of a keyed process function."""

    def __init__(self) -> None:
        self.current_key: Any = None
        self.states: dict[tuple[Any, str], Any] = {}
        self.timers: list[tuple[int, int, Any]] = []
        self.clock_timers: list[Any] = []
        self.timestamp: int | None = None
        self.current_watermark: int | None = None
        self.current_processing_time = 0
        self.rules: dict[Any, Any] = {}
        self.aside: list[Any] = []
        self._registered = 0

    @property
    def timer_service(self) -> Plain:
        return self

    def register_event_time_timer(self, timestamp: int) -> None:
        if not any(timer[0] == timestamp and timer[2] == self.current_key for timer in self.timers):
            self._registered += 1
            insort(self.timers, (timestamp, self._registered, self.current_key))

    def delete_event_time_timer(self, timestamp: int) -> None:
        self.timers = [
            timer for timer in self.timers if timer[0] != timestamp or timer[2] != self.current_key
        ]

    def register_processing_time_timer(self, timestamp: int) -> None:
        if self.current_key not in self.clock_timers:
            self.clock_timers.append(self.current_key)

    def delete_processing_time_timer(self, timestamp: int) -> None:
        if self.current_key in self.clock_timers:
            self.clock_timers.remove(self.current_key)

    def output(self, tag: Any, value: Any) -> None:
        self.aside.append(value)

    def get_state(self, descriptor: Any) -> Any:
        return PlainState(self, descriptor)

    get_list_state = get_map_state = get_reducing_state = get_aggregating_state = get_state

    def get_raw_keyed_state(self) -> Plain:
        return self

    def get(self) -> dict[int, bytes]:
        return {}

    def get_broadcast_state(self, descriptor: Any) -> Any:
        return PlainMap(self.rules)


class PlainMap:
    def __init__(self, entries: dict[Any, Any]) -> None:
        self.entries = entries

    def get(self, key: Any, default: Any = None) -> Any:
        return self.entries.get(key, default)

    def put(self, key: Any, value: Any) -> None:
        self.entries[key] = value

    def items(self) -> list[tuple[Any, Any]]:
        return list(self.entries.items())


class PlainState:
    """All kinds of state of one name, kept in a dict by key."""

    def __init__(self, context: Plain, descriptor: Any) -> None:
        self._context = context
        self._descriptor = descriptor

    @property
    def _at(self) -> tuple[Any, str]:
        return self._context.current_key, self._descriptor.name

    @property
    def _held(self) -> Any:
        return self._context.states.get(self._at)

    def clear(self) -> None:
        self._context.states.pop(self._at, None)

    def value(self) -> Any:
        return self._descriptor.default if self._held is None else self._held

    def update(self, value: Any) -> None:
        if value is None:
            self.clear()
        else:
            self._context.states[self._at] = (
                list(value) if self._descriptor.kind == "list" else value
            )

    def get(self, key: Any = None, default: Any = None) -> Any:
        kind, held = self._descriptor.kind, self._held
        if kind == "map":
            return (held or {}).get(key, default)
        if kind == "list":
            return list(held or [])
        if kind == "aggregating":
            return None if held is None else self._descriptor.agg.get_result(held)
        return held

    def add(self, value: Any) -> None:
        kind, held = self._descriptor.kind, self._held
        if kind == "list":
            held = [*(held or []), value]
        elif kind == "reducing":
            held = value if held is None else self._descriptor.fn(held, value)
        else:
            agg = self._descriptor.agg
            held = agg.add(value, agg.create_accumulator() if held is None else held)
        self._context.states[self._at] = held

    def add_all(self, values: Iterable[Any]) -> None:
        for value in values:
            self.add(value)

    def put(self, key: Any, value: Any) -> None:
        self._context.states[self._at] = {**(self._held or {}), key: value}

    def put_all(self, entries: dict[Any, Any]) -> None:
        for key, value in entries.items():
            self.put(key, value)

    def remove(self, key: Any) -> None:
        self._context.states[self._at] = {k: v for k, v in (self._held or {}).items() if k != key}

    def contains(self, key: Any) -> bool:
        return key in (self._held or {})

    def is_empty(self) -> bool:
        return not self._held

    def keys(self) -> list[Any]:
        return list(self._held or {})

    def values(self) -> list[Any]:
        return list((self._held or {}).values())

    def items(self) -> list[Any]:
        return list((self._held or {}).items())


def run_now(result: Any) -> Iterable[Any]:
    """Returns the result of a function; a coroutine is driven to its end, because nothing waits
    here.
    """
    if hasattr(result, "send") and hasattr(result, "cr_await"):
        try:
            while True:
                result.send(None)
        except StopIteration as end:
            result = end.value
    return list(result or ())


class PlainTimers:
    """Fires the timers of `context` up to a watermark; what they give is at their time, behind the
    watermark before it.

    Event time never goes back: a timer that was set for a time that has passed fires at the
    watermark that is there.
    """

    def __init__(self, context: Plain, function: Any, out: list[Item]) -> None:
        self._context = context
        self._function = function
        self._out = out
        self._reached = FIRST

    def fire(self, watermark: int) -> None:
        context, reached = self._context, self._reached
        while context.timers and context.timers[0][0] <= watermark:
            due, _, context.current_key = context.timers.pop(0)
            context.timestamp, context.current_watermark = (
                due,
                LAST if watermark == LAST else max(reached, due),
            )
            self._out.extend(
                Item(row, due, max(reached, due - 1))
                for row in run_now(self._function.on_timer(due, context))
            )
            reached = max(reached, due)
        self._reached = max(reached, watermark)

    def fire_clock(self) -> None:
        context = self._context
        for key in context.clock_timers:
            context.current_key = key
            self._out.extend(
                Item(row, None, FIRST) for row in run_now(self._function.on_timer(0, context))
            )


def keyed_process(program: Program, step: Step, stream: Stream) -> Stream:
    cls = getattr(functions, step.args["cls"])
    if not stream.ordered and not (cls.free and (stream.on_time or not cls.timed)):
        raise Undetermined("the order of a key's elements")
    if cls.timed and (not stream.timed or far_away(stream)):
        raise Undetermined("event time")
    context, out, aside = Plain(), [], []
    function = cls(**step.args["init"])
    if hasattr(function, "initialize_state"):
        function.initialize_state(context)
    function.open(context)
    timers = PlainTimers(context, function, out)
    mark = FIRST
    for item in stream.items:
        if item.mark > mark:
            mark = item.mark
            timers.fire(mark)
        context.current_key = called(step.args["key"], item.value)
        if context.current_key is None:
            raise Undetermined("None is no key")
        context.timestamp, context.current_watermark = item.time, mark if mark > FIRST else None
        out.extend(
            item._replace(value=row)
            for row in run_now(function.process_element(item.value, context))
        )
        aside += [item._replace(value=value) for value in context.aside]
        context.aside.clear()
        timers.fire(mark)
    timers.fire(LAST)
    timers.fire_clock()
    at_end = getattr(cls, "at_end", False)
    ordered = keyed_order(program, stream) and not cls.timed and not at_end
    first_only = cls is functions.Once and not stream.ordered
    if at_end or first_only:  # Which element of a key comes first is open, and so is its time.
        return made(out, stream, ordered=ordered, timed=False, known=False)
    sides = {"aside": made(aside, stream, ordered=ordered)} if aside else {}
    return made(out, stream, ordered=ordered, sides=sides)


def connect(program: Program, step: Step, left: Stream, right: Stream) -> Stream:
    """`PairUp`: each pair once, whichever side comes first; its time is that of the later
    arrival, which is open.
    """
    rights = by_key(step, right, "right_key")
    items = []
    for key, (_, lefts) in by_key(step, left).items():
        for item in lefts:
            items += [
                Item((n_of(item.value), n_of(other.value)), None, FIRST)
                for other in rights.get(key, (None, ()))[1]
            ]
    return Stream(tuple(items), False, True, False, known=False)


def broadcast(program: Program, step: Step, left: Stream, right: Stream) -> Stream:
    """`KeepingTotals`: at the end of event time, everything of each key beside all rules."""
    if not (left.timed and right.timed) or far_away(left):
        raise Undetermined("event time")
    rules: dict[int, int] = {}
    for value in right.values:
        rules[n_of(value) % 5] = max(n_of(value), rules.get(n_of(value) % 5, 0))
    held = [sorted(n_of(item.value) for item in items) for _, items in by_key(step, left).values()]
    return Stream(
        tuple(Item((one, sorted(rules.items())), 2**62, FIRST) for one in held),
        False,
        True,
        False,
        known=False,
    )
