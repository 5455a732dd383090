"""A seed becomes a program: data drawn for trouble, and a flow of operators drawn from the public
API, as plain data.

`draw(seed)` gives a `Program`. Its `text` is a Python program that builds and runs the same flow;
it is what is executed, so what is printed is what has run. A step is kept only if the model can say
what it must give (`model.Undetermined`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from random import Random
from typing import Any
from uuid import UUID

import aioflow as af
from tests.programs import model, pieces
from tests.programs.program import (
    AWAITED,
    BATCHED,
    GUARDED,
    KIND_FORMS,
    PLAIN,
    SQL,
    Program,
    Step,
)

__all__ = ["draw"]

STEPS_MAX = 7
ITEMS_MAX = 600
"""Maximum number of elements of a drawn stream."""
TRIES = 60


# --------------------------------------------------------------------------------------------------
# data

ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 2**31, 2**63, -(2**70), 0.0, -0.0, float("nan"), float("inf"), 1e-308,
    "", "\x00", "\u00e9\u0301", "\U0001f680", "\ud7ff", "a" * 300, b"", b"\xff\x00",
    Decimal("1.10"), Decimal("-0"), (), (None,), [None, [1.5]], {"a": {"b": None}, 1: "x"},
    {1, "a"}, frozenset([2]), datetime(1969, 12, 31, 23, 59, 59, 999999),
    datetime(2024, 2, 29, tzinfo=UTC), date(1, 1, 1), timedelta(-1, 5, 7), UUID(int=7),
    pieces.Colour.BLUE, pieces.Point(1, (None,)), pieces.Names("x"), pieces.Struct([1], {"k": 2.5}),
)  # fmt: skip

ODD_KEYS: tuple[Any, ...] = (
    True, 1, 1.0, 0, -0.0, "1", b"1", "", (1, "a"), (True, "a"), pieces.Names(1, "a"), 2**65,
    -(2**63), 1.5, Decimal("1.5"), Decimal(2), 2, date(2024, 1, 1), datetime(2024, 1, 1),
    datetime(2024, 1, 1, tzinfo=UTC), pieces.Colour.RED, frozenset([1, 2]), pieces.Point(1, 2),
    UUID(int=1),
)  # fmt: skip


def draw_times(rng: Random, count: int) -> list[int]:
    """Event times: steady or with jumps, with duplicates and disorder, near zero, negative or
    large.
    """
    at = rng.choice((0, 0, 1_000, -500, 1_700_000_000_000, -(2**40), 2**52))
    step = rng.choice((0, 1, 5, 10, 10, 40))
    jitter = rng.choice((0, 0, 5, 30, 30, 100, 400))
    jump = rng.choice((0.0, 0.0, 0.05))
    times = []
    for _ in range(count):
        at += rng.choice((0, step, step, 2 * step))
        if rng.random() < jump:
            at += rng.choice((1_000, 100_000))
        times.append(at + (rng.randint(-jitter, jitter) if jitter else 0))
    return times


def draw_source(rng: Random, base: int | None) -> Step:
    count = rng.choice((0, 1, 2, 5, 20, 40, 40, 60, 100, 200))
    kind = rng.choice(("N", "D", "S", "dict", "dict", "dict"))
    keys = rng.choice(("int", "int", "str", "str", "odd", "moving", "passing"))
    columnar = kind == "dict" and keys in ("int", "str", "passing") and rng.random() < 0.8
    times = draw_times(Random(base) if base is not None else rng, count)
    few = rng.choice((1, 2, 5, 20, 1_000))
    xs = rng.choice(((None,), (1.5, None, -2.0), ("a", None, ""))) if columnar else ODD
    rows = []
    for i, time in enumerate(times):
        k = min(rng.randrange(few), rng.randrange(few))  # Skewed.
        key = {
            "int": k,
            "str": f"k{k}",
            "odd": ODD_KEYS[k % len(ODD_KEYS)],
            "moving": i // 7 + k % 3,
            "passing": f"p{i // 2}",
        }[keys]
        rows.append(
            (
                key,
                rng.choice((rng.randrange(6), rng.randrange(100), -rng.randrange(30), k)),
                time,
                rng.choice(xs),
            )
        )
    delay = rng.choice((0, 0, 10, 40, 40, 1_000, 10_000_000))
    if rng.random() < 0.1:
        delay = None
    how = rng.choice(
        ("bounded", "bounded", "punctuated", "custom")
        if delay
        else ("monotonous", "bounded", "punctuated")
    )
    stamp = rng.choice(("expression", "lambda"))
    args = {
        "rows": rows,
        "type": kind,
        "keys": keys,
        "delay": delay,
        "strategy": how,
        "stamp": stamp,
        "columnar": columnar,
    }
    if not columnar and rng.random() < 0.15:
        args["splits"] = rng.choice((1, 2, 3, 4))
    return Step("source", (), args)


def draw_key(rng: Random, stream: model.Stream) -> Any:
    if stream.fields and rng.random() < 0.4:
        return rng.choice(
            (("col", "key"), ("%", ("col", "n"), ("lit", 4)), ("//", ("col", "n"), ("lit", 10)))
        )
    return rng.choice(
        (
            "key_of",
            "key_of",
            "first_key",
            "first_key",
            "small_key",
            "const_key",
            "text_key",
            "odd_key",
            "mixed_key",
        )
    )


def draw_number(rng: Random, depth: int = 0) -> Any:
    if depth > 2 or rng.random() < 0.4:
        return rng.choice(
            (("col", "n"), ("col", "n"), ("col", "ts"), ("lit", rng.choice((0, 1, -3, 7, 2**40))))
        )
    op = rng.choice(("+", "-", "*", "//", "%", "/", "abs", "when", "fill_null"))
    if op == "abs":
        return (op, draw_number(rng, depth + 1))
    if op == "when":
        return (
            op,
            draw_condition(rng, depth + 1),
            draw_number(rng, depth + 1),
            draw_number(rng, depth + 1),
        )
    return (op, draw_number(rng, depth + 1), draw_number(rng, depth + 1))


def draw_condition(rng: Random, depth: int = 0) -> Any:
    op = rng.choice(("<", "<=", ">", ">=", "==", "!=", "&", "|", "~", "is_in", "is_null"))
    if op in ("&", "|") and depth < 3:
        return (op, draw_condition(rng, depth + 1), draw_condition(rng, depth + 1))
    if op == "~" and depth < 3:
        return (op, draw_condition(rng, depth + 1))
    if op == "is_in":
        return (op, ("col", "n"))
    if op == "is_null":
        return (op, rng.choice((("col", "x"), draw_number(rng, depth + 1))))
    return (
        op if op in ("<", "<=", ">", ">=", "==", "!=") else "<",
        draw_number(rng, depth + 1),
        draw_number(rng, depth + 1),
    )


def draw_spec(
    rng: Random, stream: model.Stream, *, alone: bool = False
) -> list[tuple[str, str, Any, Any]]:
    def fn(kind: str) -> Any:
        if kind == "collect":
            return rng.choice(("n_of", "identity"))
        if stream.fields and rng.random() < 0.5:
            return rng.choice((("col", "n"), ("+", ("col", "n"), ("lit", 1))))
        return rng.choice(("n_of", "n_of", "maybe_n", "float_of"))

    def condition() -> Any:
        if rng.random() < 0.75:
            return None
        return (
            (">", ("col", "n"), ("lit", 3))
            if stream.fields and rng.random() < 0.5
            else rng.choice(("even", "third", "none_of"))
        )

    kinds = ("count", "sum", "min", "max", "mean", "distinct", "own")
    if stream.ordered:
        kinds += ("collect", "first", "last", "top", "min_by", "max_by")
    if alone or rng.random() < 0.5:
        kind = rng.choice(kinds)
        return [("", kind, fn(kind), None if kind == "own" else condition())]
    return [
        (name, kind, fn(kind), None if kind == "own" else condition())
        for name in "abc"[: rng.randint(1, 3)]
        for kind in [rng.choice(kinds)]
    ]


def draw_window(rng: Random, stream: model.Stream, *, join: bool = False) -> dict[str, Any]:
    kinds = ["tumbling", "tumbling", "sliding", "sliding", "session", "session"]
    if not join:
        kinds += ["global", "clock"] + (["count", "global_count"] if stream.ordered else [])
    if not stream.timed and not join:
        kinds = [kind for kind in kinds if kind in ("global", "clock", "count", "global_count")]
    kind = rng.choice(kinds)
    how: dict[str, Any] = {"kind": kind}
    if kind in ("count", "global_count"):
        how["size"] = rng.choice((1, 2, 3, 10))
        if kind == "count" and rng.random() < 0.4:
            how["slide"] = rng.randint(1, how["size"])
        return how
    if kind == "clock":
        return {"kind": kind, "size": 36_500 * 86_400_000}
    if kind == "global":
        return how
    how["size"] = rng.choice((1, 10, 50, 100, 1_000))
    if kind == "sliding":
        how["slide"] = rng.choice(
            [
                slide
                for slide in (1, 5, 7, 10, 25, 50, 100, 400)
                if slide <= how["size"] <= 20 * slide
            ]
        )
    if kind == "session":
        how["gap"] = rng.choice((1, 7, 33, 120, 0))
        del how["size"]
    elif rng.random() < 0.3:
        how["offset"] = rng.choice((-1, 1)) * rng.randrange(how.get("slide", how["size"]))
    if join:
        if rng.random() < 0.2:
            how["lateness"] = rng.choice((1, 100))
        return how
    if stream.ordered and rng.random() < 0.4:
        how["lateness"] = rng.choice((1, 20, 100, 1_000))
    if stream.ordered and rng.random() < 0.3 and kind != "session":
        how["trigger"] = rng.choice(
            (
                ("count", 2),
                ("purging_count", 3),
                ("purging_watermark", 0),
                ("continuous", 10),
                ("early", 0),
                ("watermark", 0),
            )
        )
    if stream.ordered and rng.random() < 0.2:
        how["evictor"] = rng.choice((("last", 1), ("last", 3), ("within", 10), ("within", 1)))
    return how


def draw_result(rng: Random, stream: model.Stream) -> dict[str, Any]:
    kind = rng.choice(("aggregate", "aggregate", "aggregate", "reduce", "process"))
    how: dict[str, Any] = {"kind": kind}
    if kind == "aggregate":
        how["spec"] = draw_spec(rng, stream)
    if kind != "process" and rng.random() < 0.3:
        how["window_fn"] = True
    return how


# --------------------------------------------------------------------------------------------------
# steps

WEIGHTS = {
    "map": 8, "filter": 4, "flat_map": 5, "guarded": 3, "select": 5, "where": 4, "process": 4,
    "numbered": 4, "batches": 2, "throttle": 1, "forward": 2, "multiplied": 1, "union": 5,
    "route": 3, "timestamps": 3, "running": 9, "keyed_rows": 4, "keyed_process": 14, "window": 22,
    "connect": 4, "connect_rows": 3, "ruled": 3, "broadcast": 3, "join": 5, "co_group": 4,
    "interval_join": 4,
}  # fmt: skip


def draw_step(rng: Random, streams: Sequence[model.Stream], spread: bool) -> Step:
    count = len(streams)

    def one() -> int:
        return count - 1 if rng.random() < 0.6 else rng.randrange(count)

    kind = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    i = one()
    stream = streams[i]
    args: dict[str, Any] = {}
    inputs: tuple[int, ...] = (i,)
    if spread and rng.random() < 0.3:
        args["parallelism"] = rng.choice((1, 1, 3))
    if kind in ("map", "filter", "flat_map"):
        functions = {
            "map": ("identity", "tagged", "doubled", "constant", "record_of", "record_of"),
            "filter": ("even", "third", "all_of", "none_of"),
            "flat_map": ("twice", "some", "spread_out"),
        }[kind]
        args |= {"fn": rng.choice(functions), "form": rng.choice(KIND_FORMS[kind])}
        if args["form"] in AWAITED and rng.random() < 0.4:
            args["ordered"] = False
        if rng.random() < 0.12:
            args |= {"key": draw_key(rng, stream), "key_form": rng.choice(PLAIN)}
        if rng.random() < 0.15:
            args["chain"] = rng.choice(
                (".start_new_chain()", ".disable_chaining()", '.slot_sharing_group("other")')
            )
    elif kind == "guarded":
        args |= {"name": f"guarded {count}", "op": rng.choice(("map", "map", "filter", "flat_map"))}
    elif kind == "select":
        if not stream.fields:
            raise model.Undetermined("no fields")
        columns = [(name, ("col", name)) for name in pieces.FIELDS if rng.random() < 0.85]
        columns += [("more", draw_number(rng))] if rng.random() < 0.7 else []
        columns += [("test", draw_condition(rng))] if rng.random() < 0.4 or not columns else []
        args["columns"] = columns
    elif kind == "where":
        if not stream.fields:
            raise model.Undetermined("no fields")
        args["condition"] = draw_condition(rng)
    elif kind == "process":
        args["fn"] = rng.choice(("Spread", "LatePart"))
        if rng.random() < 0.2:
            args |= {"key": draw_key(rng, stream), "key_form": rng.choice(PLAIN)}
    elif kind == "batches":
        args["size"] = rng.choice((1, 2, 7, 256))
    elif kind == "throttle":
        args |= {"n": rng.choice((1, 5, 50)), "per": rng.choice((1, 2))}
    elif kind == "forward":
        pass
    elif kind == "multiplied":
        args["parallelism"] = rng.choice((1, 2, 3)) if spread else 1
    elif kind == "keyed_rows":
        args |= {
            "cls": rng.choice(("Counting", "EveryOther", "Repeating")),
            "key": draw_key(rng, stream),
            "key_form": rng.choice(PLAIN),
        }
    elif kind == "union":
        inputs = (
            tuple(rng.sample(range(count), rng.randint(2, min(3, count)))) if count > 1 else (0, 0)
        )
    elif kind == "numbered":
        pass
    elif kind == "route":
        args = {
            "how": rng.choice(
                ("rebalance", "rescale", "shuffle", "global_", "broadcast", "partition_custom")
            )
        }
    elif kind == "timestamps":
        args |= {
            "delay": rng.choice((0, 30, 10_000)),
            "strategy": "bounded",
            "times": rng.choice((1, 10)),
        }
    elif kind == "running":
        agg = rng.choice(
            ("count", "count", "sum", "min", "max", "reduce", "aggregate", "aggregate")
        )
        args |= {"agg": agg, "key": draw_key(rng, stream), "key_form": rng.choice(PLAIN)}
        if agg == "aggregate":
            args["spec"] = draw_spec(rng, stream)
        elif agg in ("sum", "min", "max"):
            given = ("n_of", "maybe_n", "float_of")
            numbers = all(type(value) is int for value in stream.values)
            args["spec"] = [("", agg, None if numbers else rng.choice(given), None)]
    elif kind == "keyed_process":
        cls = rng.choice(
            (
                "Totals",
                "AwaitedTotals",
                "Once",
                "Digits",
                "Chunks",
                "Sums",
                "Buckets",
                "Buckets",
                "AwaitedBuckets",
                "Silence",
                "AwaitedSilence",
                "Passing",
                "Passing",
                "Sided",
                "Forgetful",
                "AtEnd",
                "AtEndAgain",
            )
        )
        init: dict[str, Any] = {}
        if cls in ("Buckets", "AwaitedBuckets", "Silence", "AwaitedSilence", "Passing"):
            init["ms"] = rng.choice((1, 10, 50, 300))
        if cls == "Forgetful":
            init["ttl"] = rng.choice(BRIEF)
        elif rng.random() < 0.2:
            init["ttl"] = "10d"
        args |= {
            "cls": cls,
            "init": init,
            "key": draw_key(rng, stream),
            "key_form": rng.choice(PLAIN),
        }
    elif kind == "window":
        args |= {
            "key": draw_key(rng, stream),
            "key_form": rng.choice(PLAIN),
            "window": draw_window(rng, stream),
        }
        args["result"] = draw_result(rng, stream)
        if args["result"]["kind"] == "process" and args["window"]["kind"] in (
            "tumbling",
            "sliding",
        ):
            args["result"]["fn"] = rng.choice(("window_rows", "WindowRows"))
    else:
        other = one()
        inputs = (i, other)
        if kind == "connect_rows":
            return Step(kind, inputs, {**args, "how": rng.choice(("map", "flat_map", "process"))})
        if kind == "ruled":
            return Step(kind, inputs, args)
        args |= {"key": draw_key(rng, stream), "right_key": draw_key(rng, streams[other])}
        if kind in ("join", "co_group"):
            args["window"] = draw_window(rng, stream, join=True)
            args["how"] = rng.choice(("apply", "pairs", "select")) if kind == "join" else "group"
        elif kind == "interval_join":
            lower = rng.choice((-100, -10, 0, 0, 5))
            args["bounds"] = (lower, lower + rng.choice((0, 10, 100)))
    return Step(kind, inputs, args)


BRIEF = (
    "1ms",
    af.StateTtl("1ms"),
    af.StateTtl("3ms", refresh_on_read=True),
    af.StateTtl("2ms", return_expired=True),
)
TTLS = (
    af.StateTtl("10d"),
    af.StateTtl("10d", refresh_on_read=True),
    af.StateTtl("10d", return_expired=True),
)


def varied(rng: Random, step: Step, steps: Sequence[Step]) -> Step:
    """Draws what changes no answer of `step`.

    A generator of its own draws it, so that further variations leave a seed's steps as they are.
    """
    args = dict(step.args)
    chance = rng.random()
    if step.kind == "source":
        if args["type"] != "dict" and chance < 0.4:
            args["type"] = rng.choice("AP")
        if args["delay"] is not None and rng.random() < 0.2:
            args["aligned"] = rng.choice((0, 10, 1_000))
    elif step.kind == "guarded":
        args["form"] = rng.choice(tuple(GUARDED))
    elif step.kind == "batches":
        args["form"] = rng.choice(tuple(BATCHED))
    elif step.kind == "numbered" and chance < 0.4:
        args["cls"] = "UnionNumbered"
    elif step.kind == "window":
        args["window"], args["result"] = own_window(rng, args["window"], args["result"])
    elif step.kind == "keyed_process":
        if args["cls"] == "Totals" and not args["init"] and chance < 0.4:
            args["cls"] = "RawTotals"
        elif args["init"].get("ttl") == "10d":
            args["init"] = {**args["init"], "ttl": rng.choice(TTLS)}
    elif step.kind == "connect" and chance < 0.5:
        left, right = (sources_of(i, steps) for i in step.inputs)
        if not left & right:
            args["read_first"] = rng.choice(("left", "right"))
    return Step(step.kind, step.inputs, args)


def own_window(
    rng: Random, how: dict[str, Any], result: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Draws triggers, evictors and window functions that are classes of the program."""
    how, result = dict(how), dict(result)
    for name, kinds in (("trigger", ("count", "purging_count")), ("evictor", ("last",))):
        if name in how and how[name][0] in kinds and rng.random() < 0.5:
            how[name] = (*how[name], "own")
    if how["kind"] == "clock" and rng.random() < 0.5:
        how["trigger"] = ("clock", 0)
    if result.get("window_fn") and rng.random() < 0.5:
        result["window_fn"] = "class"
    return how, result


def sources_of(i: int, steps: Sequence[Step]) -> set[int]:
    """The sources that step `i` reads, over others."""
    if not steps[i].inputs:
        return {i}
    return set().union(*(sources_of(other, steps) for other in steps[i].inputs))


def draw(seed: int) -> Program:
    """The program of a seed."""
    rng = Random(f"program {seed}")
    spread = rng.random() < 0.5
    base = rng.randrange(1_000)
    steps: list[Step] = [
        draw_source(rng, base if rng.random() < 0.7 else None)
        for _ in range(rng.choice((1, 1, 1, 2, 2, 3)))
    ]
    program = Program(seed, spread, tuple(steps), ())
    streams = [model.compute(program, step, []) for step in steps]
    wanted = len(steps) + rng.randint(1, STEPS_MAX)
    for _ in range(TRIES):
        if len(steps) >= wanted:
            break
        try:
            step = draw_step(rng, streams, spread)
            if step.kind == "ruled":
                left, right = (sources_of(i, steps) for i in step.inputs)
                if left & right:
                    continue
            stream = model.compute(program, step, streams)
        except model.Undetermined:
            continue
        if (
            len(stream.items) > ITEMS_MAX
            or sum(len(pieces.plain(v)) for v in stream.values[-20:]) > 10_000
        ):
            continue
        steps.append(step)
        streams.append(stream)
        for tag, side in stream.sides.items():
            steps.append(Step("side", (len(steps) - 1,), {"tag": tag}))
            streams.append(side)
            if tag != "late" and rng.random() < 0.5:
                break
    variation = Random(f"variation {seed}")
    changed = [varied(variation, step, steps) for step in steps]
    try:
        model.evaluate(replace(program, steps=tuple(changed)))
        steps = changed
    except model.Undetermined:
        pass  # A variation left open what the model must know.
    read = {i for step in steps for i in step.inputs}
    leaves = [i for i, step in enumerate(steps) if i not in read]
    inner = [
        i
        for i, step in enumerate(steps)
        if i in read and step.kind != "source" and rng.random() < 0.15
    ]
    program = Program(seed, spread, tuple(steps), tuple(sorted([*leaves, *inner])))
    program = with_other_times(Random(f"times {seed}"), program)
    return with_query(Random(f"sql {seed}"), program)


JOINS = ("join", "interval")
QUERIED = 0.4
"""Share of the programs for which a query is drawn; some cannot have it."""


def with_query(rng: Random, program: Program) -> Program:
    """Adds a query in SQL over one or two of the streams, and counts its rows by key or not."""
    if rng.random() > QUERIED:
        return program
    streams: list[model.Stream] = []
    for step in program.steps:
        streams.append(model.compute(program, step, streams))
    tables = [i for i, stream in enumerate(streams) if stream.fields and stream.items]
    for _ in range(20 if tables else 0):
        query = rng.choice(tuple(SQL)[:-2] if len(tables) < 2 else (*SQL, *JOINS, *JOINS))
        inputs = tuple(rng.sample(tables, 2 if query in JOINS else 1))
        step = Step("sql", inputs, {"query": query, "type": rng.choice(("VARCHAR", "BIGINT"))})
        try:
            stream = model.compute(program, step, streams)
        except model.Undetermined:
            continue
        if not 0 < len(stream.items) <= ITEMS_MAX:
            continue
        at, outputs = len(streams), program.outputs
        return replace(program, steps=(*program.steps, step), outputs=(*outputs, at))
    return program


def with_other_times(rng: Random, program: Program) -> Program:
    """Draws idleness, which changes no answer, and sources without watermarks."""
    steps = []
    is_line = not program.spread and all(
        len(step.inputs) < 2 and "splits" not in step.args for step in program.steps
    )
    is_line = is_line and sum(step.kind == "source" for step in program.steps) == 1
    for step in program.steps:
        args = dict(step.args)
        if args.get("delay") is not None and rng.random() < 0.3:
            # Where streams meet, elements of one that was idle may be late.
            idle = rng.choice(("1ms", "1ms", "3ms")) if is_line else "10d"
            args["idle"] = idle, rng.choice(("idle_after", "with_idleness"))
        steps.append(Step(step.kind, step.inputs, args))
    idle = replace(program, steps=tuple(steps))
    timed = {"keyed_process", "broadcast", "connect", "window", "join", "co_group", "interval_join"}
    if rng.random() < 0.8 or any(step.kind in timed for step in steps):
        return idle  # A timer of event time that could never fire is refused.
    steps = [
        Step(step.kind, step.inputs, {**step.args, "strategy": "none", "idle": None})
        if step.kind == "source" and step.args["delay"] is not None and "aligned" not in step.args
        else step
        for step in idle.steps
    ]
    without = replace(program, steps=tuple(steps))
    try:
        model.evaluate(without)
    except model.Undetermined:
        return idle
    return without
