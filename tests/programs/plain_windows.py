"""Windows and joins of the plain model, each key by itself."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import aioflow as af
from tests.programs import pieces
from tests.programs.pieces import n_of
from tests.programs.streams import (
    FIRST,
    LAST,
    Item,
    Stream,
    Undetermined,
    aggregate,
    by_key,
    called,
    far_away,
    is_free,
    keyed_order,
    made,
)

if TYPE_CHECKING:
    from tests.programs.program import Program, Step


__all__ = ["any_window", "co_group", "interval_join", "join"]


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
    firings: int = 0
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
        held.firings += 1
        values = [value for value, _ in held.elements]
        for row in results(self.result, self.key, window.start, window.end, values, held.firings):
            self.out.append(Item(row, time, max(mark, self.mark)))
        if self.trigger and self.trigger[0].startswith("purging"):
            held.elements.clear()


def evict(evictor: Any, held: Held) -> None:
    if evictor is None:
        return
    kind, n = evictor[:2]
    if kind == "last":
        held.elements[:-n] = []
    else:
        newest = max(time for _, time in held.elements)
        held.elements[:] = [one for one in held.elements if one[1] > newest - n]


def results(
    how: dict[str, Any],
    key: Any,
    start: int | None,
    end: int | None,
    values: list[Any],
    firings: int = 1,
) -> list[Any]:
    """Returns the results of one firing of a window, which has fired `firings` times."""
    if how.get("fn") == "WindowRows":
        return [(key, start, firings, sorted(map(n_of, values)))]
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
                if step.args["how"] == "select":
                    if not left.fields or not right.fields:
                        raise Undetermined("no fields")
                    value = {"a": pieces.field_of(a, "n"), "b": pieces.field_of(b, "n")}
                else:
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
