"""`stream.explain()`: how a flow will run, in the words and names of who wrote it."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest

import aioflow as af

BAD = af.OutputTag[af.Failed[int]]("bad")
TIMES = af.WatermarkStrategy.monotonous_timestamps(timestamp=af.col.ts)


def halves(value: int) -> float:
    return 1 / value


async def ticks() -> AsyncIterator[int]:
    yield 1


def test_a_flow_is_explained_task_by_task_with_names_exchanges_and_reasons() -> None:
    flow = af.Flow("shop", parallelism=2)
    orders = flow.source([{"ts": 1, "item": "tea", "cents": 1}], name="orders", watermarks=TIMES)
    dear = orders.filter(af.col.cents > 100, name="dear")
    hourly = (
        dear.key_by(af.col.item)
        .window(af.sliding("1h", "5m"))
        .aggregate(af.sum(af.col.cents), name="hourly")
    )
    assert hourly.map(str, name="shown").explain() == (
        "flow 'shop': 3 tasks, bounded\n"
        "\n"
        "task 1, parallelism 1\n"
        "  orders: source, bounded, event time by split, rows: its elements are Python values, "
        "and those of parquet, arrow, jsonl, csv and "
        "datagen of expressions can be columns\n"
        "\n"
        "task 2, parallelism 2\n"
        "  <- orders (task 1), rebalance: round robin over all subtasks\n"
        "  dear: on rows: the step before gives rows\n"
        "\n"
        "task 3, parallelism 2\n"
        "  <- dear (task 2), by key: col.item\n"
        "  hourly: slices of 5m, sliding(1h by 5m): each record is added once, on rows: the step "
        "before gives rows, keyed state\n"
        "  shown: on rows: the step before gives rows"
    )


def test_second_line_says_why_no_function_is_inlined() -> None:
    stream = af.Flow("debugged").source([1, 2], name="numbers").map(halves, name="halved")
    before = sys.gettrace()
    sys.settrace(lambda *_: None)
    try:
        lines = stream.explain().splitlines()
    finally:
        sys.settrace(before)
    assert lines[1] == (
        "functions are called, none is inlined: a debugger, a profiler or a coverage tool is active"
    )
    assert "\n".join([lines[0], *lines[2:]]) == stream.explain()


def inputs(stream: Any) -> list[str]:
    return [line.strip() for line in stream.explain().splitlines() if "<-" in line]


def test_a_side_output_and_the_inputs_of_a_join_are_named() -> None:
    flow = af.Flow("inputs", parallelism=2)
    numbers = flow.source([1, 2], name="numbers").rebalance().map(halves, on_error=BAD)
    assert inputs(numbers.side(BAD).map(str)) == [
        "<- numbers (task 1), rebalance: round robin over all subtasks",
        "<- map(halves) (task 2), side output 'bad', forward: each subtask to the one of its index",
    ]
    joined = numbers.connect(numbers.map(abs)).key_by(abs, lambda value: value).map(str, str)
    assert inputs(joined)[-2:] == [
        "<- map(halves) (task 2) as input 1, by key: abs",
        "<- map(abs) (task 3) as input 2, by key: a function",
    ]


@pytest.mark.parametrize(
    ("deal", "told"),
    [
        (lambda s: s.rebalance(), "rebalance: round robin over all subtasks"),
        (lambda s: s.rescale(), "rescale: round robin within a group of subtasks"),
        (lambda s: s.shuffle(), "shuffle: at random"),
        (lambda s: s.broadcast(), "broadcast: each record to every subtask"),
        (lambda s: s.global_(), "global: all to the first subtask"),
        (lambda s: s.partition_custom(max), "by partition_custom: max"),
        (lambda s: s.key_by(lambda value: value), "by key: a function"),
    ],
)
def test_each_way_of_dealing_out_is_said(deal: Any, told: str) -> None:
    numbers = af.Flow("dealt", parallelism=2).source([1, 2], name="numbers")
    assert inputs(deal(numbers).map(abs)) == [f"<- numbers (task 1), {told}"]


@pytest.mark.parametrize(
    ("what", "name"),
    [([1], "list"), (range(2), "range"), (ticks, "ticks"), (lambda: iter([1]), "function")],
)
def test_a_source_without_a_name_is_called_what_it_is_read_from(what: Any, name: str) -> None:
    assert (
        af.Flow("named").source(what).explain().splitlines()[-1].startswith(f"  {name}: source, ")
    )
