"""A seed becomes a program: data drawn for trouble, and a flow of operators drawn from the public
API, as plain data.

`draw(seed)` gives a `Program`. Its `text` is a Python program that builds and runs the same flow;
it is what is executed, so what is printed is what has run. A step is kept only if the model can say
what it must give (`model.Undetermined`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from random import Random
from typing import Any
from uuid import UUID

import aioflow as af
from tests.programs import model, pieces

__all__ = ["Program", "Step", "draw"]

STEPS_MAX = 7
ITEMS_MAX = 600
"""Maximum number of elements of a drawn stream."""
TRIES = 60


@dataclass(frozen=True)
class Step:
    """One operator: its kind, the numbers of the steps that it reads, and its arguments as plain
    data.
    """

    kind: str
    inputs: tuple[int, ...] = ()
    args: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Program:
    """Steps in order, and which of them are looked at."""

    seed: int
    spread: bool
    """Whether it may run at any parallelism; otherwise its answers depend on an order that only
    one subtask keeps.
    """
    steps: tuple[Step, ...]
    outputs: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"program-{self.seed}"

    @property
    def loose(self) -> bool:
        """Whether one key is spelled in several ways, of which any may be shown."""
        functions = {
            key
            for step in self.steps
            for key in (step.args.get("key"), step.args.get("right_key"))
            if isinstance(key, str)
        }
        return bool(functions & pieces.Mixed) or any(
            step.args.get("keys") == "odd" for step in self.steps
        )

    @property
    def columnar(self) -> bool:
        """Whether all of its sources could be tables."""
        return all(step.args["columnar"] for step in self.steps if step.kind == "source")

    @property
    def literal(self) -> str:
        """Python text that gives this program."""
        steps = "".join(
            f"\n        Step({step.kind!r}, {step.inputs!r}, {literal(step.args)}),"
            for step in self.steps
        )
        return (
            f"Program(\n    {self.seed},\n    {self.spread},\n    ({steps}\n    ),\n    "
            f"{self.outputs!r},\n)"
        )

    @property
    def text(self) -> str:
        """The program as a module: `build(parallelism, source)` gives the flow and the streams
        that are looked at.
        """
        lines = [*IMPORTS, "", "import aioflow as af", "from tests.programs.pieces import *", ""]
        for i, step in enumerate(self.steps):
            if step.kind == "source":
                rows = "".join(f"    {literal(tuple(row))},\n" for row in step.args["rows"])
                make = pieces.RECORDS[step.args["type"]].__name__
                lines += [f"ROWS{i} = [{make}(*row) for row in [\n{rows}]]", ""]
        lines += ["", "def build(parallelism=1, source=lambda rows, i: rows):"]
        lines += [f'    flow = af.Flow("{self.name}", parallelism=parallelism)']
        lines += [f"    s{i} = {TEXTS[step.kind](i, step)}" for i, step in enumerate(self.steps)]
        lines += [f"    return flow, [{', '.join(f's{i}' for i in self.outputs)}]", "", ""]
        lines += ['if __name__ == "__main__":', "    flow, streams = build()"]
        lines += [
            "    for rows in asyncio.run(flow.collect(*streams)):",
            "        print(*rows, sep='\\n')",
            "",
        ]
        return "\n".join(lines)


# --------------------------------------------------------------------------------------------------
# text

IMPORTS = (
    "import asyncio",
    "from datetime import UTC, date, datetime, timedelta",
    "from decimal import Decimal",
    "from functools import partial",
    "from uuid import UUID",
)


def literal(value: Any) -> str:
    """Python text that gives `value`."""
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return f'float("{value}")'
    if isinstance(value, Enum):
        return str(value)
    if isinstance(value, datetime):
        zone = ", tzinfo=UTC" if value.tzinfo else ""
        return (
            f"datetime({', '.join(str(part) for part in value.timetuple()[:6])}, "
            f"{value.microsecond}{zone})"
        )
    if isinstance(value, date):
        return f"date({value.year}, {value.month}, {value.day})"
    if isinstance(value, timedelta):
        return f"timedelta({value.days}, {value.seconds}, {value.microseconds})"
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return f"{type(value).__name__}({', '.join(map(literal, value))})"
    if isinstance(value, tuple):
        return f"({', '.join(map(literal, value))}{',' if len(value) == 1 else ''})"
    if isinstance(value, list):
        return f"[{', '.join(map(literal, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{literal(k)}: {literal(v)}' for k, v in value.items())}}}"
    if isinstance(value, set | frozenset):
        inner = f"[{', '.join(sorted(map(literal, value)))}]"
        return f"{type(value).__name__}({inner})"
    if dataclasses.is_dataclass(value):
        values = [getattr(value, f.name) for f in dataclasses.fields(value)]
        return f"{type(value).__name__}({', '.join(map(literal, values))})"
    if isinstance(value, pieces.Struct):
        return f"Struct({literal(value.a)}, {literal(value.b)})"
    return repr(value)


def expression(e: Any) -> str:
    """Text of an expression."""
    op, *operands = e
    if op == "col":
        return f"af.col.{operands[0]}"
    if op == "lit":
        return f"af.lit({literal(operands[0])})"
    given = [expression(operand) for operand in operands]
    if op == "when":
        return f"af.when({given[0]}).then({given[1]}).otherwise({given[2]})"
    if op in METHODS:
        return METHODS[op].format(*given)
    return f"({given[0]} {op} {given[1]})"


METHODS = {
    "fill_null": "{0}.fill_null({1})",
    "is_null": "{0}.is_null()",
    "~": "~({0})",
    "abs": "{0}.abs()",
    "is_in": "{0}.is_in([1, 2, 3, 5, 8, 13, 21])",
    "float": "{0}.cast(float)",
    "int": "{0}.cast(int)",
    "str": "{0}.cast(str)",
    "upper": "{0}.str.upper()",
    "len": "{0}.str.len()",
    "starts": '{0}.str.starts_with("k")',
}


def function(given: Any, form: str = "name") -> str:
    """Text of a function of one element: a name in a form, or an expression."""
    if not isinstance(given, str):
        return expression(given)
    return FORMS[form].format(given)


FORMS = {
    "name": "{0}",
    "lambda": "lambda value: {0}(value)",
    "partial": "partial(apply_to, {0})",
    "object": "Callable1({0})",
    "method": "Callable1({0}).method",
    "Mapping": "Mapping({0})",
    "Filtering": "Filtering({0})",
    "FlatMapping": "FlatMapping({0})",
    "generator": "generating({0})",
    "async": "asynchronous({0}), concurrency=4",
    "slow": "asynchronous({0}, 2), concurrency=3",
    "flaky": 'flaky({0}), retry=af.Retry(3, backoff="1ms")',
    "iterating": "async_iterating({0})",
    "blocking": "{0}, blocking=True, concurrency=2",
    "patient": 'asynchronous({0}), timeout="60s", on_timeout=identity',
}
PLAIN = ("name", "lambda", "partial", "object", "method")
AWAITED = ("async", "slow", "flaky", "patient", "blocking")
KIND_FORMS = {
    "map": (*PLAIN, "Mapping", *AWAITED),
    "filter": (*PLAIN, "Filtering", "async", "slow", "blocking"),
    "flat_map": (*PLAIN, "FlatMapping", "generator", "generator", "iterating", "async"),
}


def options(i: int, step: Step, *, more: str = "") -> str:
    own = f', uid="s{i}"{more}'
    return own + (
        f", parallelism={step.args['parallelism']}" if step.args.get("parallelism") else ""
    )


def keyed(step: Step, stream: str, key: str = "key") -> str:
    return f"{stream}.key_by({function(step.args[key], step.args.get('key_form', 'name'))})"


def strategy(args: dict[str, Any]) -> str:
    stamp = {"expression": "af.col.ts", "lambda": "lambda row: field_of(row, 'ts')"}.get(
        args["stamp"], args["stamp"]
    )
    delay = args["delay"]
    made = {
        "monotonous": "monotonous_timestamps(",
        "punctuated": f"punctuated(lambda value, time: time - {delay + 1}, ",
        "custom": f"custom(Custom({delay}), ",
        "bounded": f'bounded_out_of_orderness("{delay}ms", ',
    }[args["strategy"]]
    aligned = args.get("aligned")
    more = "" if aligned is None else f'.with_alignment("all", "{aligned}ms", every="1ms")'
    return f"af.WatermarkStrategy.{made}timestamp={stamp}){more}"


def source_text(i: int, step: Step) -> str:
    marks = "" if step.args["delay"] is None else f", watermarks={strategy(step.args)}"
    return f'flow.source(source(ROWS{i}, {i}), uid="s{i}"{marks})'


def stateless_text(i: int, step: Step) -> str:
    ordered = "" if step.args.get("ordered", True) else ", ordered=False"
    chain = step.args.get("chain", "")
    stream = f"s{step.inputs[0]}" + (keyed(step, "") if "key" in step.args else "")
    called = function(step.args["fn"], step.args["form"])
    return f"{stream}.{step.kind}({called}{ordered}{options(i, step)}){chain}"


def aggregate_text(spec: Sequence[Sequence[Any]]) -> str:
    parts = []
    for name, kind, fn, condition in spec:
        given = [] if kind == "count" else [function(fn)]
        given = ["2", *given] if kind == "top" else given
        given += [] if condition is None else [f"where={function(condition)}"]
        parts.append((name, f"af.{kind}({', '.join(given)})"))
    return (
        parts[0][1]
        if parts[0][0] == ""
        else f"af.agg({', '.join(f'{name}={text}' for name, text in parts)})"
    )


def running_text(i: int, step: Step) -> str:
    agg, stream = step.args["agg"], keyed(step, f"s{step.inputs[0]}")
    if agg == "reduce":
        return f"{stream}.reduce(bigger{options(i, step)})"
    if agg == "count":
        return f"{stream}.count({options(i, step)[2:]})"
    if agg == "aggregate":
        return f"{stream}.aggregate({aggregate_text(step.args['spec'])}{options(i, step)})"
    ((_, _, fn, _),) = step.args["spec"]
    return f"{stream}.{agg}({function(fn)}{options(i, step)})"


def assigner(how: dict[str, Any]) -> str:
    kind = how["kind"]
    offset = f', offset="{how["offset"]}ms"' if how.get("offset") else ""
    if kind == "tumbling":
        return f'af.tumbling("{how["size"]}ms"{offset})'
    if kind == "sliding":
        return f'af.sliding("{how["size"]}ms", "{how["slide"]}ms"{offset})'
    if kind == "session":
        return f'af.session("{how["gap"]}ms")' if how["gap"] else "af.session(gap_of)"
    if kind == "clock":
        return f'af.tumbling("{how["size"]}ms", time="processing")'
    return "af.global_window(at_end=True)" if kind == "global" else "af.global_window()"


def window_text(how: dict[str, Any]) -> str:
    if how["kind"] == "count":
        return f"count_window({how['size']}{', ' + str(how['slide']) if how.get('slide') else ''})"
    more = ""
    if how["kind"] == "global_count":
        more += f", trigger=af.on_count({how['size']})"
    if trigger := how.get("trigger"):
        kind = trigger[0]
        text = {
            "count": f"af.on_count({trigger[1]})",
            "purging_count": f"af.purging(af.on_count({trigger[1]}))",
            "purging_watermark": "af.purging(af.on_watermark())",
            "continuous": f'af.continuous("{trigger[1]}ms")',
            "early": 'af.early("1d")',
            "watermark": "af.on_watermark()",
        }[kind]
        more += f", trigger={text}"
    if evictor := how.get("evictor"):
        more += ", evictor=" + (
            f"af.keep_last({evictor[1]})"
            if evictor[0] == "last"
            else f'af.keep_within("{evictor[1]}ms")'
        )
    if how.get("lateness"):
        more += f', lateness="{how["lateness"]}ms"'
    return f"window({assigner(how)}{more})"


def result_text(i: int, step: Step) -> str:
    how = step.args["result"]
    if how["kind"] == "process":
        return f"process(window_rows{options(i, step)})"
    second = ", window_fn" if how.get("window_fn") else ""
    given = "bigger" if how["kind"] == "reduce" else aggregate_text(how["spec"])
    return f"{how['kind']}({given}{second}{options(i, step)})"


def windowed_text(i: int, step: Step) -> str:
    stream = keyed(step, f"s{step.inputs[0]}")
    return f"{stream}.{window_text(step.args['window'])}.{result_text(i, step)}"


def process_text(i: int, step: Step) -> str:
    given = ", ".join(f"{name}={value!r}" for name, value in step.args["init"].items())
    made = f"{step.args['cls']}({given})" if given else step.args["cls"]
    return f"{keyed(step, f's{step.inputs[0]}')}.process({made}{options(i, step)})"


def join_text(i: int, step: Step) -> str:
    left, right = step.inputs
    key, right_key = function(step.args["key"]), function(step.args["right_key"])
    where = f"where({key}).equal_to({right_key}).{window_text(step.args['window'])}"
    if step.kind == "co_group":
        return f"s{left}.co_group(s{right}).{where}.apply(grouped{options(i, step)})"
    end = (
        f"pairs({options(i, step)[2:]})"
        if step.args["how"] == "pairs"
        else f"apply(paired{options(i, step)})"
    )
    return f"s{left}.join(s{right}).{where}.{end}"


def interval_text(i: int, step: Step) -> str:
    left, right = step.inputs
    lower, upper = (f"timedelta(milliseconds={ms})" for ms in step.args["bounds"])
    other = keyed(step, f"s{right}", "right_key")
    return (
        f"{keyed(step, f's{left}')}.interval_join({other}, {lower}, "
        f"{upper}).process(paired{options(i, step)})"
    )


def connect_text(i: int, step: Step) -> str:
    left, right = step.inputs
    keys = f"{function(step.args['key'])}, {function(step.args['right_key'])}"
    first = step.args.get("read_first")
    given = "" if first is None else f", read_first={first!r}"
    return f"s{left}.connect(s{right}{given}).key_by({keys}).process(PairUp{options(i, step)})"


def broadcast_text(i: int, step: Step) -> str:
    left, right = step.inputs
    connected = f"{keyed(step, f's{left}')}.connect(s{right}.broadcast(RULES))"
    return f"{connected}.process(KeepingTotals{options(i, step)})"


def select_text(i: int, step: Step) -> str:
    columns = ", ".join(f"{name!r}: {expression(e)}" for name, e in step.args["columns"])
    return f"s{step.inputs[0]}.select({{{columns}}}{options(i, step)})"


def route_text(i: int, step: Step) -> str:
    how = step.args["how"]
    given = "lambda value, n: part_of(value, n)" if how == "partition_custom" else ""
    return f"s{step.inputs[0]}.{how}({given})"


def timestamps_text(i: int, step: Step) -> str:
    args = {**step.args, "stamp": f"lambda value: n_of(value) * {step.args['times']}"}
    return f"s{step.inputs[0]}.assign_timestamps_and_watermarks({strategy(args)}{options(i, step)})"


GUARDED = {
    "name": "fragile",
    "async": "asynchronous(fragile), concurrency=3",
    "retried": 'asynchronous(fragile), retry=af.Retry(2, backoff="1ms")',
    "timed": 'asynchronous(fragile, 1), retry=af.Retry(2, backoff="1ms"), timeout="60s"',
    "blocking": "fragile, blocking=True",
}

TEXTS: dict[str, Callable[[int, Step], str]] = {
    "source": source_text,
    "map": stateless_text,
    "filter": stateless_text,
    "flat_map": stateless_text,
    "guarded": lambda i, s: (
        f"s{s.inputs[0]}.map({GUARDED[s.args.get('form', 'name')]}, on_error=TAG, "
        f'name="{s.args["name"]}"{options(i, s)})'
    ),
    "side": lambda i, s: (
        f"s{s.inputs[0]}.late" if s.args["tag"] == "late" else f"s{s.inputs[0]}.side(TAG)"
    ),
    "select": select_text,
    "where": lambda i, s: (
        f"s{s.inputs[0]}.filter({expression(s.args['condition'])}{options(i, s)})"
    ),
    "process": lambda i, s: f"s{s.inputs[0]}.process({s.args['fn']}{options(i, s)})",
    "numbered": lambda i, s: f"s{s.inputs[0]}.map(Numbered{options(i, s)})",
    "batches": lambda i, s: (
        f"s{s.inputs[0]}.map_batches(as_list, max_size={s.args['size']}{options(i, s)})"
    ),
    "union": lambda i, s: (
        f"s{s.inputs[0]}.union({', '.join(f's{other}' for other in s.inputs[1:])})"
    ),
    "route": route_text,
    "timestamps": timestamps_text,
    "running": running_text,
    "keyed_process": process_text,
    "window": windowed_text,
    "connect": connect_text,
    "broadcast": broadcast_text,
    "join": join_text,
    "co_group": join_text,
    "interval_join": interval_text,
}


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
    keys = rng.choice(("int", "int", "str", "str", "odd", "moving"))
    columnar = kind == "dict" and keys in ("int", "str") and rng.random() < 0.8
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

    kinds = ("count", "sum", "min", "max", "mean", "distinct")
    if stream.ordered:
        kinds += ("collect", "first", "last", "top", "min_by", "max_by")
    if alone or rng.random() < 0.5:
        kind = rng.choice(kinds)
        return [("", kind, fn(kind), condition())]
    return [
        (name, kind, fn(kind), condition())
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
    "numbered": 4, "batches": 2, "union": 5, "route": 3, "timestamps": 3, "running": 9,
    "keyed_process": 12, "window": 22, "connect": 4, "broadcast": 3, "join": 5, "co_group": 4,
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
        if rng.random() < 0.15:
            args["chain"] = rng.choice(
                (".start_new_chain()", ".disable_chaining()", '.slot_sharing_group("other")')
            )
    elif kind == "guarded":
        args["name"] = f"guarded {count}"
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
    elif kind == "batches":
        args["size"] = rng.choice((1, 2, 7, 256))
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
            args["spec"] = [("", agg, rng.choice(("n_of", "maybe_n", "float_of")), None)]
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
                "Silence",
                "AtEnd",
            )
        )
        init: dict[str, Any] = (
            {"ms": rng.choice((1, 10, 50, 300))} if cls in ("Buckets", "Silence") else {}
        )
        if rng.random() < 0.2:
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
    else:
        other = one()
        inputs = (i, other)
        args |= {"key": draw_key(rng, stream), "right_key": draw_key(rng, streams[other])}
        if kind in ("join", "co_group"):
            args["window"] = draw_window(rng, stream, join=True)
            args["how"] = rng.choice(("apply", "pairs")) if kind == "join" else "group"
        elif kind == "interval_join":
            lower = rng.choice((-100, -10, 0, 0, 5))
            args["bounds"] = (lower, lower + rng.choice((0, 10, 100)))
    return Step(kind, inputs, args)


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
    elif step.kind == "keyed_process":
        if args["cls"] == "Totals" and not args["init"] and chance < 0.4:
            args["cls"] = "RawTotals"
        elif "ttl" in args["init"]:
            args["init"] = {**args["init"], "ttl": rng.choice(TTLS)}
    elif step.kind == "connect" and chance < 0.5:
        left, right = (sources_of(i, steps) for i in step.inputs)
        if not left & right:
            args["read_first"] = rng.choice(("left", "right"))
    return Step(step.kind, step.inputs, args)


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
    steps = [varied(rng, step, steps) for rng in [Random(f"variation {seed}")] for step in steps]
    read = {i for step in steps for i in step.inputs}
    leaves = [i for i, step in enumerate(steps) if i not in read]
    inner = [
        i
        for i, step in enumerate(steps)
        if i in read and step.kind != "source" and rng.random() < 0.15
    ]
    return Program(seed, spread, tuple(steps), tuple(sorted([*leaves, *inner])))
