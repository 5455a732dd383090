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

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import aioflow as af
from tests.programs import pieces
from tests.programs.pieces import n_of
from tests.programs.plain_functions import broadcast, connect, keyed_process
from tests.programs.plain_windows import any_window, co_group, interval_join, join
from tests.programs.program import FRAGILE
from tests.programs.streams import (
    FIRST,
    Item,
    Stream,
    Undetermined,
    aggregate,
    by_key,
    called,
    keyed_order,
    made,
    value_of,
)

if TYPE_CHECKING:
    from tests.programs.program import Program, Step


__all__ = ["Item", "Stream", "Undetermined", "compute", "evaluate"]


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
        ordered = "splits" not in step.args
        return Stream(tuple(Item(row, None, FIRST) for row in rows), ordered, fields=True)
    timed = [(row, given[2]) for row, given in zip(rows, step.args["rows"], strict=True)]
    if step.args["strategy"] == "none":
        delay = None
    if splits := step.args.get("splits"):
        parts = [stamped(timed[number::splits], delay, fields=True) for number in range(splits)]
        items = [item._replace(mark=FIRST) for part in parts for item in part.items]
        return Stream(tuple(items), False, all(part.on_time for part in parts), True, fields=True)
    return stamped(timed, delay, fields=True)


def stamped(rows: list[tuple[Any, int]], delay: int | None, *, fields: bool) -> Stream:
    """Watermarks are the running maximum - delay - 1. None: there are none."""
    items, mark = [], FIRST
    for value, time in rows:
        items.append(Item(value, time, mark))
        mark = FIRST if delay is None else max(mark, time - delay - 1)
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
    if "key" in step.args:
        by_key(step, stream)
    ordered = keeps_order(program, step, stream) and step.args.get("ordered", True)
    fields = (
        stream.fields and (step.kind == "filter" or step.args["fn"] in ("identity", "twice"))
    ) or step.args["fn"] == "record_of"
    return made(items, stream, ordered=ordered, fields=fields)


def guarded(program: Program, step: Step, stream: Stream) -> Stream:
    good, bad = [], []
    op = step.args.get("op", "map")
    function = getattr(pieces, FRAGILE[op])
    for item in stream.items:
        try:
            good += [item._replace(value=v) for v in rows_of(op, function, item.value)]
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
    if "key" in step.args:
        by_key(step, stream)
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


def throttle(program: Program, step: Step, stream: Stream) -> Stream:
    return made(
        stream.items, stream, ordered=keeps_order(program, step, stream), fields=stream.fields
    )


def multiplied(program: Program, step: Step, stream: Stream) -> Stream:
    """Each of a known number of subtasks gets all elements."""
    items = [item for item in stream.items for _ in range(step.args["parallelism"])]
    ordered = stream.ordered and step.args["parallelism"] == 1
    return made(items, stream, ordered=ordered, fields=stream.fields)


def keyed_rows(program: Program, step: Step, stream: Stream) -> Stream:
    """A function of one element with state of a key."""
    if not stream.ordered:
        raise Undetermined("the order of a key's elements")
    found: dict[Any, list[Any]] = {}
    items = []
    for item in stream.items:
        key = called(step.args["key"], item.value)
        if key is None:
            raise Undetermined("None is no key")
        held = found.setdefault(key, [])
        held.append(item.value)
        if step.args["cls"] == "Counting":
            items.append(item._replace(value=(len(held), item.value)))
        elif step.args["cls"] == "EveryOther":
            items += [item] if len(held) % 2 else []
        else:
            items += [item._replace(value=value) for value in held]
            if len(held) == 3:
                held.clear()
    fields = stream.fields and step.args["cls"] != "Counting"
    return made(items, stream, ordered=keyed_order(program, stream), fields=fields)


def connect_rows(program: Program, step: Step, left: Stream, right: Stream) -> Stream:
    if left.timed != right.timed:
        raise Undetermined("whether there is event time")
    items = [item._replace(value=("left", item.value), mark=FIRST) for item in left.items]
    items += [item._replace(value=("right", item.value), mark=FIRST) for item in right.items]
    on_time, known = left.on_time and right.on_time, left.known and right.known
    return Stream(tuple(items), False, on_time, left.timed, known)


def ruled(program: Program, step: Step, left: Stream, right: Stream) -> Stream:
    """`Ruling`: all rules are read before the first element."""
    rules: dict[int, int] = {}
    for value in right.values:
        rules[n_of(value) % 5] = max(n_of(value), rules.get(n_of(value) % 5, 0))
    items = [Item((n_of(value), sorted(rules.items())), None, FIRST) for value in left.values]
    return Stream(tuple(items), False, True, False, known=False)


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


def running(program: Program, step: Step, stream: Stream) -> Stream:
    kind = step.args["agg"]
    if not stream.ordered and kind != "count":
        raise Undetermined("running answers")
    spec = step.args.get("spec")
    itself = spec and spec[0][2] is None and kind != "aggregate"
    if itself and not all(type(value) is int for value in stream.values):
        raise Undetermined("what is no number")
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


def fields_of(value: Any) -> dict[str, Any]:
    return {name: pieces.field_of(value, name) for name in ("key", "n", "ts")}


def sql(program: Program, step: Step, left: Stream, *others: Stream) -> Stream:
    """A query of `SQL`, over records whose keys are all texts, or all numbers."""
    query, inputs = step.args["query"], (left, *others)
    kind = {"VARCHAR": str, "BIGINT": int}[step.args["type"]]
    if not all(stream.fields for stream in inputs):
        raise Undetermined("what columns there are")
    rows = [[fields_of(item.value) for item in stream.items] for stream in inputs]
    if not all(
        type(row["key"]) is kind and type(row["n"]) is int and abs(row["n"]) < 2**50
        for given in rows
        for row in given
    ):
        raise Undetermined("what type a column has")
    is_of_time = query in ("window", "interval")
    if is_of_time and any(one.args.get("strategy") == "none" for one in program.steps):
        raise Undetermined("windows without event time are refused")
    if is_of_time and not all(
        stream.timed
        and stream.on_time
        and all(
            row["ts"] == item.time and abs(row["ts"]) < 2**53
            for row, item in zip(given, stream.items, strict=True)
        )
        for stream, given in zip(inputs, rows, strict=True)
    ):
        raise Undetermined("what is late, or has another time than its own")
    if query == "filter":
        items = [
            item._replace(
                value={**{name: row[name] for name in ("key", "n", "ts")}, "more": row["n"] * 2}
            )
            for item, row in zip(left.items, rows[0], strict=True)
            if row["n"] % 3
        ]
        return made(items, left, ordered=keeps_order(program, step, left))
    if query == "group":
        if not left.ordered:
            raise Undetermined("running answers")
        items, seen = [], dict[Any, list[int]]()
        for item, row in zip(left.items, rows[0], strict=True):
            numbers = seen.setdefault(row["key"], [])
            numbers.append(row["n"])
            result = {"key": row["key"], "c": len(numbers), "s": sum(numbers)}
            items.append(item._replace(value=({"key": row["key"]}, result)))
        return made(items, left, ordered=keyed_order(program, left))
    found: list[dict[str, Any]] = []
    if query == "distinct":
        found = [{"key": key} for key in dict.fromkeys(row["key"] for row in rows[0])]
    elif query == "window":
        windows: dict[tuple[Any, int], list[int]] = {}
        for row in rows[0]:
            windows.setdefault((row["key"], row["ts"] // 100 * 100), []).append(row["n"])
        found = [
            {"key": key, "window_start": start, "c": len(numbers), "m": max(numbers)}
            for (key, start), numbers in windows.items()
        ]
    else:
        found = [
            {"k": a["key"], "l": a["n"], "r": b["n"]}
            for a in rows[0]
            for b in rows[1]
            if a["key"] == b["key"]
            and (query == "join" or a["ts"] - 100 <= b["ts"] <= a["ts"] + 20)
        ]
    return Stream(tuple(Item(row, None, FIRST) for row in found), False, True, False, known=False)


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
    "throttle": throttle,
    "forward": throttle,
    "multiplied": multiplied,
    "keyed_rows": keyed_rows,
    "connect_rows": connect_rows,
    "ruled": ruled,
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
    "sql": sql,
}
