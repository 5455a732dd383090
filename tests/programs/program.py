"""A program as plain data, and its text: a Python module that builds and runs the same flow.

The text is what is executed, so what is printed is what has run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta
from enum import Enum
from typing import Any

from tests.programs import pieces

__all__ = ["Program", "Step"]


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
    def reads_first(self) -> bool:
        """Whether a stream waits until another one is read, which a job of Spark does not do."""
        return any(step.kind == "ruled" or step.args.get("read_first") for step in self.steps)

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
        lines = [*IMPORTS, "", "import aioflow as af", "from tests.programs.pieces import *"]
        lines += ["from tests.programs.functions import *"]
        lines += ["from tests.programs.sources import Splits", ""]
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
    "blocking_patient": '{0}, blocking=True, timeout="60s"',
    "blocking_flaky": 'flaky_inline({0}), blocking=True, retry=af.Retry(3, backoff="1ms")',
    "overdue": 'overdue({0}), timeout="3ms", concurrency=5, on_timeout={0}',
    "resourced": "resourced({0})",
    "patient": 'asynchronous({0}), timeout="60s", on_timeout=identity',
}
PLAIN = ("name", "lambda", "partial", "object", "method")
AWAITED = (
    "async",
    "slow",
    "flaky",
    "patient",
    "blocking",
    "blocking_patient",
    "blocking_flaky",
    "overdue",
)
KIND_FORMS = {
    "map": (*PLAIN, "Mapping", "resourced", *AWAITED),
    "filter": (*PLAIN, "Filtering", "resourced", "async", "slow", "blocking", "overdue"),
    "flat_map": (
        *PLAIN,
        "FlatMapping",
        "resourced",
        "generator",
        "generator",
        "iterating",
        "async",
        "blocking",
        "blocking_flaky",
        "overdue",
    ),
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
        "none": "no_watermarks(",
        "monotonous": "monotonous_timestamps(",
        "punctuated": f"punctuated(lambda value, time: time - {delay + 1}, ",
        "custom": f"custom(Custom({delay}), ",
        "bounded": f'bounded_out_of_orderness("{delay}ms", ',
    }[args["strategy"]]
    aligned = args.get("aligned")
    more = "" if aligned is None else f'.with_alignment("all", "{aligned}ms", every="1ms")'
    idle, form = args.get("idle") or (None, None)
    inside = f', idle_after="{idle}"' if form == "idle_after" else ""
    more += f'.with_idleness("{idle}")' if form == "with_idleness" else ""
    return f"af.WatermarkStrategy.{made}timestamp={stamp}{inside}){more}"


def source_text(i: int, step: Step) -> str:
    marks = "" if step.args["delay"] is None else f", watermarks={strategy(step.args)}"
    splits = step.args.get("splits")
    rows = f"Splits(ROWS{i}, {splits})" if splits else f"ROWS{i}"
    return f'flow.source(source({rows}, {i}), uid="s{i}"{marks})'


def stateless_text(i: int, step: Step) -> str:
    ordered = "" if step.args.get("ordered", True) else ", ordered=False"
    chain = step.args.get("chain", "")
    stream = f"s{step.inputs[0]}" + (keyed(step, "") if "key" in step.args else "")
    called = function(step.args["fn"], step.args["form"])
    return f"{stream}.{step.kind}({called}{ordered}{options(i, step)}){chain}"


def aggregate_text(spec: Sequence[Sequence[Any]]) -> str:
    parts = []
    for name, kind, fn, condition in spec:
        if kind == "own":
            parts.append((name, "Extent()"))
            continue
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
    if fn is None:
        return f"{stream}.{agg}({options(i, step)[2:]})"
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
        counting = "OwnCount" if "own" in trigger[2:] else "af.on_count"
        text = {
            "count": f"{counting}({trigger[1]})",
            "purging_count": f"af.purging({counting}({trigger[1]}))",
            "purging_watermark": "af.purging(af.on_watermark())",
            "continuous": f'af.continuous("{trigger[1]}ms")',
            "early": 'af.early("1d")',
            "watermark": "af.on_watermark()",
            "clock": "af.on_processing_time()",
        }[kind]
        more += f", trigger={text}"
    if evictor := how.get("evictor"):
        more += ", evictor=" + (
            f"{'OwnLast' if 'own' in evictor[2:] else 'af.keep_last'}({evictor[1]})"
            if evictor[0] == "last"
            else f'af.keep_within("{evictor[1]}ms")'
        )
    if how.get("lateness"):
        more += f', lateness="{how["lateness"]}ms"'
    return f"window({assigner(how)}{more})"


def result_text(i: int, step: Step) -> str:
    how = step.args["result"]
    if how["kind"] == "process":
        return f"process({how.get('fn', 'window_rows')}{options(i, step)})"
    second = {True: ", window_fn", "class": ", WindowValue"}.get(how.get("window_fn", False), "")
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
        else f"select(a=af.left.n, b=af.right.n{options(i, step)})"
        if step.args["how"] == "select"
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


def connect_rows_text(i: int, step: Step) -> str:
    left, right = step.inputs
    given = {"map": "on_left, on_right", "flat_map": "rows_left, rows_right"}
    how = step.args["how"]
    called = f"{how}({given.get(how, 'Merging')}{options(i, step)})"
    return f"s{left}.connect(s{right}).{called}"


def ruled_text(i: int, step: Step) -> str:
    left, right = step.inputs
    rules = f's{right}.broadcast(RULES), read_first="right"'
    return f"s{left}.connect({rules}).process(Ruling{options(i, step)})"


def keyed_rows_text(i: int, step: Step) -> str:
    method = {"Counting": "map", "EveryOther": "filter", "Repeating": "flat_map"}[step.args["cls"]]
    stream = keyed(step, f"s{step.inputs[0]}")
    return f"{stream}.{method}({step.args['cls']}{options(i, step)})"


def forward_text(i: int, step: Step) -> str:
    parallelism = options(i, step).replace(f', uid="s{i}"', "")
    before = f's{step.inputs[0]}.map(identity, uid="s{i}a"{parallelism})'
    return f"{before}.forward().map(identity{options(i, step)})"


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
    "name": "{0}",
    "async": "asynchronous({0}), concurrency=3",
    "retried": 'asynchronous({0}), retry=af.Retry(2, backoff="1ms")',
    "timed": 'asynchronous({0}, 1), retry=af.Retry(2, backoff="1ms"), timeout="60s"',
    "blocking": "{0}, blocking=True",
    "blocking_retried": '{0}, blocking=True, retry=af.Retry(2, backoff="1ms"), timeout="60s"',
}
FRAGILE = {"map": "fragile", "filter": "fragile_test", "flat_map": "fragile_rows"}
BATCHED = {
    "name": "as_list",
    "async": "as_list_later",
    "blocking": "as_list, blocking=True",
    "quick": 'as_list, max_wait="1ms"',
}


def guarded_text(i: int, step: Step) -> str:
    op = step.args.get("op", "map")
    given = GUARDED[step.args.get("form", "name")].format(FRAGILE[op])
    own = f'on_error=TAG, name="{step.args["name"]}"{options(i, step)}'
    return f"s{step.inputs[0]}.{op}({given}, {own})"


SQL = {
    "filter": "SELECT key, n, ts, n * 2 AS more FROM a WHERE n % 3 <> 0",
    "distinct": "SELECT DISTINCT key FROM a",
    "group": "SELECT key, COUNT(*) AS c, SUM(n) AS s FROM a GROUP BY key",
    "window": (
        "SELECT key, window_start, COUNT(*) AS c, MAX(n) AS m FROM TUMBLE(a, ts, INTERVAL '0.1' "
        "SECOND) GROUP BY key, window_start, window_end"
    ),
    "join": "SELECT a.key AS k, a.n AS l, b.n AS r FROM a JOIN b ON a.key = b.key",
    "interval": (
        "SELECT a.key AS k, a.n AS l, b.n AS r FROM a JOIN b ON a.key = b.key AND b.ts BETWEEN "
        "a.ts - INTERVAL '0.1' SECOND AND a.ts + INTERVAL '0.02' SECOND"
    ),
}
"""Queries by name; `distinct` and `join` keep their rows for a time to live."""


def sql_text(i: int, step: Step) -> str:
    query = step.args["query"]
    tables = dict(zip("ab", step.inputs, strict=False))
    given = {"key": step.args["type"], "n": "BIGINT", "ts": "TIMESTAMP"}
    more = {"distinct": ', ttl="10d"', "join": ', ttl="10d"', "group": ", updates=True"}
    streams = ", ".join(f"{name}=s{j}" for name, j in tables.items())
    text = (
        f"flow.sql({SQL[query]!r}, {streams}, schemas=dict.fromkeys({list(tables)}, {given})"
        f"{more.get(query, '')})"
    )
    return f'{text}.map(row_of_upsert, uid="s{i}")' if query == "group" else text


TEXTS: dict[str, Callable[[int, Step], str]] = {
    "source": source_text,
    "map": stateless_text,
    "filter": stateless_text,
    "flat_map": stateless_text,
    "guarded": guarded_text,
    "side": lambda i, s: (
        f"s{s.inputs[0]}.late" if s.args["tag"] == "late" else f"s{s.inputs[0]}.side(TAG)"
    ),
    "select": select_text,
    "where": lambda i, s: (
        f"s{s.inputs[0]}.filter({expression(s.args['condition'])}{options(i, s)})"
    ),
    "process": lambda i, s: (
        f"s{s.inputs[0]}{keyed(s, '') if 'key' in s.args else ''}.process({s.args['fn']}"
        f"{options(i, s)})"
    ),
    "numbered": lambda i, s: f"s{s.inputs[0]}.map({s.args.get('cls', 'Numbered')}{options(i, s)})",
    "batches": lambda i, s: (
        f"s{s.inputs[0]}.map_batches({BATCHED[s.args.get('form', 'name')]}, "
        f"max_size={s.args['size']}{options(i, s)})"
    ),
    "throttle": lambda i, s: (
        f's{s.inputs[0]}.throttle({s.args["n"]}, "{s.args["per"]}ms"{options(i, s)})'
    ),
    "forward": forward_text,
    "multiplied": lambda i, s: f"s{s.inputs[0]}.broadcast().map(identity{options(i, s)})",
    "keyed_rows": keyed_rows_text,
    "connect_rows": connect_rows_text,
    "ruled": ruled_text,
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
    "sql": sql_text,
}
