"""The results that a drawn program must give: each operator written plainly from the documents, one
element at a time, without the engine.

A stream is a list of elements, each with its event time and the watermark in force before it. What
the documents leave open is never judged: where an answer would depend on it, `evaluate` raises
`Undetermined`, and the program is drawn otherwise. So each rule here says when an answer is
determined:

* One split, read by one subtask, has an order and watermarks of its own. They hold as long as
  operators have one subtask. The first keyed operator behind it sees them too at any parallelism,
  as each key has one sender.
* Streams that are united or dealt out have no order any more, and their watermarks merge as they
  may. An element that is not late in its own stream is never late behind a merge, as a merged
  watermark is the lowest. So without late elements, windows, joins and timers that do not look at
  the order are determined, and nothing else.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import aioflow as af
from tests.programs import pieces
from tests.programs.pieces import n_of

if TYPE_CHECKING:
    from tests.programs.draw import Program, Step

__all__ = ["Item", "Stream", "Undetermined", "compute", "evaluate"]

FIRST, LAST = -(2**63), 2**63 - 1
"""Watermarks before the first element and at the end of the input."""

FREE_AGGREGATES = frozenset({"count", "sum", "min", "max", "mean", "distinct"})
"""Aggregates with the same result for any order of the elements."""


class Undetermined(Exception):
    """The documents leave the answer of this program open."""


class Item(NamedTuple):
    """An element, its event time, and the watermark in force before it."""

    value: Any
    time: int | None
    mark: int


@dataclass(frozen=True)
class Stream:
    """The output of an operator."""

    items: tuple[Item, ...]
    ordered: bool = True
    """Whether order and watermarks are determined.

    Otherwise every watermark stands for the lowest that may be.
    """
    on_time: bool = True
    """Whether no element is late in its own stream."""
    timed: bool = False
    """Whether event time advances in it, and the time of each element is determined."""
    known: bool = True
    """Whether it is determined which time an element has, be it none."""
    fields: bool = False
    """Whether its elements are records with the fields of `pieces.FIELDS`, and of plain types."""
    sides: dict[str, Stream] = field(default_factory=dict)

    @property
    def values(self) -> list[Any]:
        return [item.value for item in self.items]


def made(items: Iterable[Item], like: Stream, *, ordered: bool, **more: Any) -> Stream:
    """A stream of `items`, which came out of `like`."""
    found = tuple(items)
    timed = more.pop("timed", like.timed)
    on_time = like.on_time
    if like.ordered and timed:
        on_time = all(item.time is not None and item.time > item.mark for item in found)
    if not ordered:
        found = tuple(item._replace(mark=FIRST) for item in found)
    return Stream(found, ordered, on_time, timed, **{"fields": False, "known": like.known, **more})


def evaluate(program: Program) -> list[Stream]:
    """The stream of each output. Raises `Undetermined`."""
    streams: list[Stream] = []
    for step in program.steps:
        streams.append(compute(program, step, streams))
    return [streams[i] for i in program.outputs]


def compute(program: Program, step: Step, before: Sequence[Stream]) -> Stream:
    """Returns the output of `step` over the streams of all steps before it."""
    inputs = [before[i] for i in step.inputs]
    return STEPS[step.kind](program, step, *inputs)


# --------------------------------------------------------------------------------------------------
# element by element


def source(program: Program, step: Step) -> Stream:
    make = pieces.RECORDS[step.args["type"]]
    rows = [make(*row) for row in step.args["rows"]]
    delay = step.args["delay"]
    if delay is None:
        return Stream(tuple(Item(row, None, FIRST) for row in rows), fields=True)
    return stamped(
        [(row, given[2]) for row, given in zip(rows, step.args["rows"], strict=True)],
        delay,
        fields=True,
    )


def stamped(rows: list[tuple[Any, int]], delay: int, *, fields: bool) -> Stream:
    """Watermarks are the running maximum - delay - 1."""
    items, mark = [], FIRST
    for value, time in rows:
        items.append(Item(value, time, mark))
        mark = max(mark, time - delay - 1)
    return Stream(
        tuple(items), True, all(item.time > item.mark for item in items), True, fields=fields
    )  # type: ignore[operator]


def keeps_order(program: Program, step: Step, stream: Stream) -> bool:
    """Whether one subtask reads all of `stream`."""
    return stream.ordered and (not program.spread or step.args.get("parallelism") == 1)


def rows_of(kind: str, function: Callable[[Any], Any], value: Any) -> Iterable[Any]:
    if kind == "map":
        return [function(value)]
    if kind == "filter":
        return [value] if function(value) else []
    return list(function(value) or ())


def stateless(program: Program, step: Step, stream: Stream) -> Stream:
    function = getattr(pieces, step.args["fn"])
    items = [
        item._replace(value=v)
        for item in stream.items
        for v in rows_of(step.kind, function, item.value)
    ]
    ordered = keeps_order(program, step, stream) and step.args.get("ordered", True)
    fields = (
        stream.fields and (step.kind == "filter" or step.args["fn"] in ("identity", "twice"))
    ) or step.args["fn"] == "record_of"
    return made(items, stream, ordered=ordered, fields=fields)


def guarded(program: Program, step: Step, stream: Stream) -> Stream:
    good, bad = [], []
    for item in stream.items:
        try:
            good.append(item._replace(value=pieces.fragile(item.value)))
        except ValueError as error:
            failed = af.Failed(
                item.value,
                str(error),
                "ValueError",
                step.args["name"],
                item.time if stream.timed else None,
            )
            bad.append(item._replace(value=failed))
    ordered = keeps_order(program, step, stream)
    if not stream.known:
        raise Undetermined("the time of a failed element")
    return made(good, stream, ordered=ordered, sides={"aside": made(bad, stream, ordered=ordered)})


def side(program: Program, step: Step, stream: Stream) -> Stream:
    return stream.sides[step.args["tag"]]


def select(program: Program, step: Step, stream: Stream) -> Stream:
    items = [
        item._replace(value={name: value_of(e, item.value) for name, e in step.args["columns"]})
        for item in stream.items
    ]
    fields = {name for name, _ in step.args["columns"]} >= set(pieces.FIELDS)
    return made(items, stream, ordered=keeps_order(program, step, stream), fields=fields)


def where(program: Program, step: Step, stream: Stream) -> Stream:
    items = [item for item in stream.items if value_of(step.args["condition"], item.value)]
    return made(items, stream, ordered=keeps_order(program, step, stream), fields=stream.fields)


def process(program: Program, step: Step, stream: Stream) -> Stream:
    ordered = keeps_order(program, step, stream)
    good, bad = [], []
    if step.args["fn"] == "Spread":
        if not stream.known:
            raise Undetermined("ctx.timestamp")
        for item in stream.items:
            if n_of(item.value) % 3 == 0:
                bad.append(item)
            else:
                good.append(item._replace(value=(item.time, item.value)))
    else:
        if not stream.timed or not (ordered or stream.on_time):
            raise Undetermined("what is late")
        for item in stream.items:
            (bad if item.time <= item.mark else good).append(item)  # type: ignore[operator]
    fields = stream.fields and step.args["fn"] == "LatePart"
    aside = made(bad, stream, ordered=ordered, fields=stream.fields)
    return made(good, stream, ordered=ordered, fields=fields, sides={"aside": aside})


def numbered(program: Program, step: Step, stream: Stream) -> Stream:
    if not keeps_order(program, step, stream):
        raise Undetermined("which subtask counts what")
    items = [item._replace(value=(i, item.value)) for i, item in enumerate(stream.items, 1)]
    return made(items, stream, ordered=True)


def batches(program: Program, step: Step, stream: Stream) -> Stream:
    items = [item._replace(value=("b", item.value)) for item in stream.items]
    return made(items, stream, ordered=keeps_order(program, step, stream))


def union(program: Program, step: Step, *streams: Stream) -> Stream:
    first = streams[0]
    if len({stream.timed for stream in streams}) > 1 or len(step.inputs) != len(set(step.inputs)):
        raise Undetermined("whether there is event time")
    items = [item for stream in streams for item in stream.items]
    on_time = all(stream.on_time for stream in streams)
    found = tuple(item._replace(mark=FIRST) for item in items)
    known, fields = (
        all(stream.known for stream in streams),
        all(stream.fields for stream in streams),
    )
    return Stream(found, False, on_time, first.timed, known, fields)


def route(program: Program, step: Step, stream: Stream) -> Stream:
    """Dealing out changes who gets an element, and nothing of it; a broadcast gives each subtask
    all.
    """
    if step.args["how"] == "broadcast" and program.spread:
        raise Undetermined("how many subtasks there are")
    items = (
        tuple(item._replace(mark=FIRST) for item in stream.items)
        if program.spread
        else stream.items
    )
    return replace(stream, items=items, ordered=stream.ordered and not program.spread, sides={})


def timestamps(program: Program, step: Step, stream: Stream) -> Stream:
    delay, ordered = step.args["delay"], keeps_order(program, step, stream)
    rows = [(item.value, n_of(item.value) * step.args["times"]) for item in stream.items]
    if not ordered:
        times = [time for _, time in rows]
        if times and max(times) - min(times) > delay:
            raise Undetermined("what is late behind a shuffle")
    found = stamped(rows, delay, fields=stream.fields)
    if ordered:
        return found
    return replace(
        found, items=tuple(item._replace(mark=FIRST) for item in found.items), ordered=False
    )


# --------------------------------------------------------------------------------------------------
# aggregates


def is_free(spec: Sequence[Sequence[Any]]) -> bool:
    return all(kind in FREE_AGGREGATES for _, kind, _, _ in spec)


def aggregate(spec: Sequence[Sequence[Any]], values: Sequence[Any]) -> Any:
    """The result of `af.agg(...)` of `spec`, or that of one aggregate if its name is empty."""
    found = {name: one_aggregate(kind, fn, condition, values) for name, kind, fn, condition in spec}
    return found.get("", found)


def one_aggregate(kind: str, fn: Any, condition: Any, values: Sequence[Any]) -> Any:
    if condition is not None:
        values = [v for v in values if called(condition, v)]
    if kind == "count":
        return len(values)
    of = [called(fn, v) for v in values]
    if kind == "collect":
        return of
    if kind in ("first", "last"):
        return of[0 if kind == "first" else -1] if of else None
    there = [(x, v) for x, v in zip(of, values, strict=True) if x is not None]
    if kind == "sum":
        return sum(x for x, _ in there)
    if kind == "mean":
        return sum(x for x, _ in there) / len(there) if there else None
    if kind == "distinct":
        return len({x for x, _ in there})
    if kind == "top":
        return [v for _, v in sorted(there, key=lambda pair: -pair[0])[:2]]
    if not there:
        return None
    best = (min if kind.startswith("min") else max)(there, key=lambda pair: pair[0])
    return best[1] if kind.endswith("_by") else best[0]


def called(function: Any, value: Any) -> Any:
    """A function by name, or an expression."""
    return (
        getattr(pieces, function)(value) if isinstance(function, str) else value_of(function, value)
    )


# --------------------------------------------------------------------------------------------------
# keys


def by_key(step: Step, stream: Stream, key: str = "key") -> dict[Any, tuple[Any, list[Item]]]:
    """Returns for each key its first spelling, and its items."""
    found: dict[Any, tuple[Any, list[Item]]] = {}
    for item in stream.items:
        k = called(step.args[key], item.value)
        if k is None:
            raise Undetermined("None is no key")
        found.setdefault(k, (k, []))[1].append(item)
    return found


def keyed_order(program: Program, stream: Stream) -> bool:
    """Whether a keyed operator gives its answers to elements in an order."""
    return stream.ordered and not program.spread


def running(program: Program, step: Step, stream: Stream) -> Stream:
    kind = step.args["agg"]
    if not stream.ordered and kind != "count":
        raise Undetermined("running answers")
    seen: dict[Any, tuple[Any, list[Any]]] = {}
    items = []
    for item in stream.items:
        key = called(step.args["key"], item.value)
        if key is None:
            raise Undetermined("None is no key")
        shown, values = seen.setdefault(key, (key, []))
        values.append(item.value)
        if kind == "reduce":
            result = values[0]
            for value in values[1:]:
                result = pieces.bigger(result, value)
        elif kind == "count":
            result = (shown, len(values))
        else:
            result = (shown, aggregate(step.args["spec"], values))
        items.append(item._replace(value=result))
    if (
        not stream.ordered
    ):  # The times of a key's answers are those of its elements, in the order in which these came.
        return made(items, stream, ordered=False, timed=False, known=False)
    return made(items, stream, ordered=keyed_order(program, stream))


# --------------------------------------------------------------------------------------------------
# functions with state


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


def far_away(stream: Stream) -> bool:
    return any(item.time is not None and abs(item.time) > 2**60 for item in stream.items)


def keyed_process(program: Program, step: Step, stream: Stream) -> Stream:
    cls = getattr(pieces, step.args["cls"])
    if not stream.ordered and not (cls.free and (stream.on_time or not cls.timed)):
        raise Undetermined("the order of a key's elements")
    if cls.timed and (not stream.timed or far_away(stream)):
        raise Undetermined("event time")
    context, out = Plain(), []
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
        timers.fire(mark)
    timers.fire(LAST)
    timers.fire_clock()
    by_timer = cls.timed or cls is pieces.AtEnd
    ordered = keyed_order(program, stream) and not by_timer
    if cls is pieces.AtEnd:
        return made(out, stream, ordered=ordered, timed=False, known=False)
    return made(out, stream, ordered=ordered)


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


# --------------------------------------------------------------------------------------------------
# windows


class Window(NamedTuple):
    """A window of one key. `end - 1` is its last instant."""

    start: int
    end: int


def windows_of(how: dict[str, Any], time: int, value: Any) -> list[Window]:
    kind = how["kind"]
    if kind == "session":
        gap = how["gap"] if how["gap"] else 20 + 10 * (n_of(value) % 3)
        return [Window(time, time + gap)]
    size, slide, offset = how["size"], how.get("slide", how["size"]), how.get("offset", 0)
    start = (time - offset) // slide * slide + offset
    found = []
    while start > time - size:
        found.append(Window(start, start + size))
        start -= slide
    return found[::-1]


@dataclass
class Held:
    """The content of a window: elements as (value, time), and the count of its trigger."""

    elements: list[tuple[Any, int]] = field(default_factory=list)
    count: int = 0
    next_fire: int | None = None


class OneKey:
    """All windows of one key, by the rules of `how`; appends to `out` and `late`."""

    def __init__(self, step: Step, key: Any) -> None:
        self.how = step.args["window"]
        self.trigger = self.how.get("trigger")
        if self.trigger and self.trigger[0] in (
            "early",
            "watermark",
        ):  # No clock comes so far within a run.
            self.trigger = None
        self.lateness = self.how.get("lateness", 0)
        self.result = step.args["result"]
        self.key = key
        self.windows: dict[Window, Held] = {}
        self.out: list[Item] = []
        self.late: list[Item] = []
        self.mark = FIRST

    def over(self, window: Window) -> int:
        return window.end - 1 + self.lateness

    def advance(self, mark: int) -> None:
        """Everything that is due up to `mark`, in the order of its time."""
        while True:
            due = [
                (time, order, window)
                for window, held in self.windows.items()
                for time, order in self.due(window, held)
            ]
            if not due or min(due)[0] > mark:
                break
            time, order, window = min(due)
            held = self.windows[window]
            if order == 1:
                del self.windows[window]
                continue
            if self.trigger is not None and self.trigger[0] == "continuous":
                if time == window.end - 1:
                    held.next_fire = None
                else:
                    held.next_fire = min(time + self.trigger[1], window.end - 1)
            self.fire(window, held, time - 1, window.end - 1)
            if time == window.end - 1:
                self.fired.add(window)
        self.mark = max(self.mark, mark)

    def due(self, window: Window, held: Held) -> list[tuple[int, int]]:
        found = [(self.over(window), 1)]
        kind = self.trigger[0] if self.trigger else "watermark"
        if kind in ("watermark", "purging_watermark", "continuous") and window not in self.fired:
            found.append((window.end - 1, 0))
        if held.next_fire is not None and held.next_fire < window.end - 1:
            found.append((held.next_fire, 0))
        return found

    @property
    def fired(self) -> set[Window]:
        """Windows whose end has come."""
        if not hasattr(self, "_fired"):
            self._fired: set[Window] = set()
        return self._fired

    def element(self, item: Item) -> None:
        self.advance(item.mark)
        assert item.time is not None
        assigned = windows_of(self.how, item.time, item.value)
        if self.how["kind"] == "session":
            assigned = [self.merged(assigned[0])]
        there = [window for window in assigned if self.over(window) > self.mark]
        if assigned and not there:
            self.late.append(item)
        for window in there:
            held = self.windows.setdefault(window, Held())
            held.elements.append((item.value, item.time))
            self.on_element(window, held, item)

    def merged(self, window: Window) -> Window:
        """The session that `window` makes with all that it overlaps or touches."""
        touching = [
            other
            for other in self.windows
            if other.start <= window.end and window.start <= other.end
        ]
        if not touching:
            return window
        grown = Window(
            min(w.start for w in [window, *touching]), max(w.end for w in [window, *touching])
        )
        if self.over(grown) <= self.mark:
            return grown
        if self.how.get("evictor") or self.trigger:
            raise Undetermined("what merged sessions keep")
        parts = [self.windows.pop(other) for other in sorted(touching)]
        if len(parts) > 1 and not self.free:
            raise Undetermined("in which order merged sessions hold their elements")
        if any(other in self.fired for other in touching):
            self.fired.add(grown)
        if grown.end - 1 > self.mark:
            self.fired.discard(grown)
        self.windows[grown] = Held([one for part in parts for one in part.elements])
        return grown

    free = False

    def on_element(self, window: Window, held: Held, item: Item) -> None:
        kind = self.trigger[0] if self.trigger else "watermark"
        if kind in ("watermark", "purging_watermark", "continuous") and window.end - 1 <= self.mark:
            self.fired.add(window)
            self.fire(window, held, self.mark, window.end - 1)
        elif kind in ("count", "purging_count"):
            held.count += 1
            if held.count == self.trigger[1]:
                held.count = 0
                self.fire(window, held, self.mark, window.end - 1)
        elif kind == "continuous" and held.next_fire is None:
            d = self.trigger[1]
            assert item.time is not None
            held.next_fire = min(item.time // d * d + d, window.end - 1)

    def fire(self, window: Window, held: Held, mark: int, time: int) -> None:
        if not held.elements:
            return
        evict(self.how.get("evictor"), held)
        for row in results(
            self.result, self.key, window.start, window.end, [value for value, _ in held.elements]
        ):
            self.out.append(Item(row, time, max(mark, self.mark)))
        if self.trigger and self.trigger[0].startswith("purging"):
            held.elements.clear()


def evict(evictor: Any, held: Held) -> None:
    if evictor is None:
        return
    kind, n = evictor
    if kind == "last":
        held.elements[:-n] = []
    else:
        newest = max(time for _, time in held.elements)
        held.elements[:] = [one for one in held.elements if one[1] > newest - n]


def results(
    how: dict[str, Any], key: Any, start: int | None, end: int | None, values: list[Any]
) -> list[Any]:
    """Returns the results of one firing."""
    if how["kind"] == "process":
        window = type("W", (), {"start": start, "end": end})
        return list(pieces.window_rows(key, type("C", (), {"window": window}), values))
    if how["kind"] == "reduce":
        value = values[0]
        for other in values[1:]:
            value = pieces.bigger(value, other)
    else:
        value = aggregate(how["spec"], values)
    if how.get("window_fn"):
        return [("w", key, start, value)]
    return [af.WindowResult(key, start, end, value)]


def is_free_result(how: dict[str, Any]) -> bool:
    """Whether what a window gives does not depend on the order of its elements.

    `window_rows` sorts, and `bigger` is a total order.
    """
    return how["kind"] != "aggregate" or is_free(how["spec"])


def window(program: Program, step: Step, stream: Stream) -> Stream:
    how = step.args["window"]
    special = how.get("trigger") or how.get("evictor")
    if special and special[0] == "continuous" and not stream.on_time:
        raise Undetermined("when a timer that is due already fires")
    if not stream.timed or far_away(stream):
        raise Undetermined("event time")
    if not stream.ordered and (
        not stream.on_time or special or not is_free_result(step.args["result"])
    ):
        raise Undetermined("the order of a window's elements")
    if how["kind"] == "session" and not stream.ordered:
        for _, items in by_key(step, stream).values():
            check_no_touch(how, items)
    out, late = [], []
    for key, items in by_key(step, stream).values():
        one = OneKey(step, key)
        one.free = is_free_result(step.args["result"])
        for item in items:
            spelled = called(step.args["key"], item.value)
            one.advance(item.mark)
            if not one.windows and repr(spelled) != repr(key):
                raise Undetermined("how a key is spelled that state does not hold")
            one.element(item)
        one.advance(LAST)
        out += one.out
        late += one.late
    late_stream = made(late, stream, ordered=False, fields=stream.fields)
    return made(out, stream, ordered=False, sides={"late": replace(late_stream, on_time=not late)})


def check_no_touch(how: dict[str, Any], items: Iterable[Item]) -> None:
    """Sessions that only touch merge if the first has not fired yet, which depends on the
    watermark.
    """
    end = FIRST
    for item in sorted(items, key=lambda item: item.time or 0):
        (own,) = windows_of(how, item.time or 0, item.value)
        if own.start == end:
            raise Undetermined("sessions that touch")
        end = max(end, own.end)


def counted(program: Program, step: Step, stream: Stream) -> Stream:
    """Windows of numbers of elements: `count_window`, and a global window with a trigger that
    counts.
    """
    if not stream.ordered:
        raise Undetermined("the order of a window's elements")
    how, out = step.args["window"], []
    size, slide = how["size"], how.get("slide")
    held: dict[Any, tuple[Any, list[Any]]] = {}
    for item in stream.items:
        key = called(step.args["key"], item.value)
        if key is None:
            raise Undetermined("None is no key")
        shown, values = held.setdefault(key, (key, []))
        values.append(item.value)
        if how["kind"] == "count" and slide is None:
            fires, chosen = len(values) == size, list(values)
        elif how["kind"] == "count":
            fires, chosen = len(values) % slide == 0, values[-size:]
        else:
            fires, chosen = len(values) % size == 0, list(values)
        if fires:
            out += [
                item._replace(value=row)
                for row in results(step.args["result"], shown, None, None, chosen)
            ]
            if how["kind"] == "count" and slide is None:
                values.clear()
    none_late = Stream((), False, True, stream.timed, sides={})
    return made(out, stream, ordered=keyed_order(program, stream), sides={"late": none_late})


def at_end(program: Program, step: Step, stream: Stream) -> Stream:
    """Windows that fire when the input ends: global ones, and those of a clock that does not
    come so far.
    """
    how = step.args["window"]
    if not stream.ordered and not is_free_result(step.args["result"]):
        raise Undetermined("the order of a window's elements")
    start, end = (0, how["size"]) if how["kind"] == "clock" else (None, None)
    out = []
    for key, items in by_key(step, stream).values():
        out += [
            Item(row, None, FIRST)
            for row in results(step.args["result"], key, start, end, [item.value for item in items])
        ]
    return Stream(
        tuple(out),
        False,
        True,
        False,
        known=False,
        sides={"late": Stream((), False, True, False, known=False)},
    )


def any_window(program: Program, step: Step, stream: Stream) -> Stream:
    kind = step.args["window"]["kind"]
    if kind in ("count", "global_count"):
        return counted(program, step, stream)
    return (
        at_end(program, step, stream)
        if kind in ("global", "clock")
        else window(program, step, stream)
    )


# --------------------------------------------------------------------------------------------------
# joins


def sides_by_window(
    step: Step, left: Stream, right: Stream
) -> list[tuple[Any, Window, list[Any], list[Any]]]:
    """(key, window, lefts, rights) of every key and window that holds something."""
    for stream in (left, right):
        if not stream.timed or not stream.on_time or far_away(stream):
            raise Undetermined("what is late for a join")
    how = step.args["window"]
    lefts, rights = by_key(step, left), by_key(step, right, "right_key")
    found = []
    for key in dict.fromkeys([*lefts, *rights]):
        both = [(0, item) for item in lefts.get(key, (None, []))[1]] + [
            (1, item) for item in rights.get(key, (None, []))[1]
        ]
        groups: dict[Window, tuple[list[Any], list[Any]]] = {}
        if how["kind"] == "session":
            check_no_touch(how, [item for _, item in both])
            open_: Window | None = None
            for side_, item in sorted(both, key=lambda one: one[1].time or 0):
                (own,) = windows_of(how, item.time or 0, item.value)
                held: tuple[list[Any], list[Any]] = ([], [])
                if open_ is not None and own.start <= open_.end:
                    held = groups.pop(open_)
                    own = Window(open_.start, max(open_.end, own.end))
                held[side_].append(item.value)
                groups[own] = held
                open_ = own
        else:
            for side_, item in both:
                for one in windows_of(how, item.time or 0, item.value):
                    groups.setdefault(one, ([], []))[side_].append(item.value)
        found += [(key, one, *held) for one, held in groups.items()]
    return found


def join(program: Program, step: Step, left: Stream, right: Stream) -> Stream:
    items = []
    for _, one, lefts, rights in sides_by_window(step, left, right):
        for a in lefts:
            for b in rights:
                value = af.Pair(a, b) if step.args["how"] == "pairs" else pieces.paired(a, b)
                items.append(Item(value, one.end - 1, FIRST))
    return Stream(tuple(items), False, True, True)


def co_group(program: Program, step: Step, left: Stream, right: Stream) -> Stream:
    items = [
        Item(row, one.end - 1, FIRST)
        for key, one, lefts, rights in sides_by_window(step, left, right)
        for row in pieces.grouped(key, lefts, rights)
    ]
    return Stream(tuple(items), False, True, True)


def interval_join(program: Program, step: Step, left: Stream, right: Stream) -> Stream:
    for stream in (left, right):
        if not stream.timed or not stream.on_time or far_away(stream):
            raise Undetermined("what is late for a join")
    lower, upper = step.args["bounds"]
    rights = by_key(step, right, "right_key")
    items = []
    for key, (_, lefts) in by_key(step, left).items():
        for a in lefts:
            for b in rights.get(key, (None, []))[1]:
                if lower <= (b.time or 0) - (a.time or 0) <= upper:
                    time = max(a.time or 0, b.time or 0)
                    items.append(Item((n_of(a.value), n_of(b.value), time), time, FIRST))
    # A pair is made when the second of it comes, in which case neither is late.
    return Stream(tuple(items), False, True, True)


# --------------------------------------------------------------------------------------------------
# expressions


def value_of(e: Any, record: Any) -> Any:
    """The value of an expression of `record`: (operation, operands...), by the rules of
    docs/expressions.md.
    """
    op, *operands = e
    if op == "col":
        return pieces.field_of(record, operands[0])
    if op == "lit":
        return operands[0]
    if op == "when":
        condition, then, otherwise = operands
        return value_of(then if value_of(condition, record) is True else otherwise, record)
    if op == "fill_null":
        value = value_of(operands[0], record)
        return value_of(operands[1], record) if value is None else value
    if op == "is_null":
        return value_of(operands[0], record) is None
    values = [value_of(operand, record) for operand in operands]
    if op in ("&", "|"):
        a, b = values
        decisive = op == "|"
        if decisive in (a, b):
            return decisive
        return None if None in (a, b) else not decisive
    if None in values:
        return None
    if op in ("/", "//", "%") and values[1] == 0:
        return None
    return OPERATIONS[op](*values)


OPERATIONS: dict[str, Callable[..., Any]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
    "//": lambda a, b: a // b,
    "%": lambda a, b: a % b,
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
    "~": lambda a: not a,
    "abs": abs,
    "is_in": lambda a: a in (1, 2, 3, 5, 8, 13, 21),
    "float": float,
    "int": lambda a: math.trunc(a) if isinstance(a, float) else int(a),
    "str": str,
    "upper": str.upper,
    "len": len,
    "starts": lambda a: a.startswith("k"),
}

STEPS: dict[str, Callable[..., Stream]] = {
    "source": source,
    "map": stateless,
    "filter": stateless,
    "flat_map": stateless,
    "guarded": guarded,
    "side": side,
    "select": select,
    "where": where,
    "process": process,
    "numbered": numbered,
    "batches": batches,
    "union": union,
    "route": route,
    "timestamps": timestamps,
    "running": running,
    "keyed_process": keyed_process,
    "window": any_window,
    "connect": connect,
    "broadcast": broadcast,
    "join": join,
    "co_group": co_group,
    "interval_join": interval_join,
}
