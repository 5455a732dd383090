"""A function that changes a shared value is found and named, in the harness and in debug mode; no
other function is.
"""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

import aioflow as af
from aioflow.task.mutation import digest
from aioflow.testing import OperatorHarness, ValueMutated


@dataclasses.dataclass
class Reading:
    sensor: str
    values: list[float]


class Plain:
    """Nothing that the codec knows."""

    def __init__(self) -> None:
        self.x = 1


def change(value: Any) -> Any:
    if isinstance(value, dict):
        value["new"] = 1
    elif isinstance(value, Reading):
        value.values.append(1.0)
    elif isinstance(value, Plain):
        value.x += 1
    elif isinstance(value, set):
        value.add("new")
    else:
        value.append(1)
    return value


MUTABLE = [
    {"a": 1},
    [1],
    Reading("s", []),
    {1, 2},
    Plain(),
    bytearray(b"x"),
    {"deep": [{"x": [1]}]},
]


@pytest.mark.parametrize("value", MUTABLE, ids=lambda v: type(v).__name__)
def test_a_changed_input_is_found_and_the_operator_named(value: Any) -> None:
    with (
        OperatorHarness(change) as h,
        pytest.raises(ValueMutated, match=r"'change'.* changed its input"),
    ):
        h.push(value)


@pytest.mark.parametrize(
    "value", [*MUTABLE, 1, "a", None, (1, "a"), threading.Lock()], ids=lambda v: type(v).__name__
)
def test_a_function_that_only_looks_is_not_blamed(value: Any) -> None:
    with OperatorHarness(lambda v: (repr(v), v)) as h:
        h.push(value)
        h.push(value)
        assert [row[1] for row in h.take()] == [value, value]


def test_a_copy_may_be_changed() -> None:
    with OperatorHarness(lambda row: change(dict(row))) as h:
        h.push({"a": 1})
        assert h.take() == [{"a": 1, "new": 1}]


def test_a_value_kept_in_state_and_emitted_may_not_be_changed_afterwards() -> None:
    """F7.10"""

    class Gather(af.KeyedProcessFunction[str, str, list[str]]):
        def open(self, ctx: Any) -> None:
            self.words = ctx.get_state(af.ValueStateDescriptor("words"))

        def process_element(self, value: str, ctx: Any) -> Iterator[list[str]]:
            words = self.words.value() or []
            words.append(value)
            self.words.update(words)
            yield words

    with OperatorHarness(Gather(), key=lambda v: v[0]) as h:
        h.push("a")
        for word in (
            "bcdefghijklmnopqrstuvwxyz"
        ):  # More than are looked at each time: found because it is emitted again.
            h.push(word)
        with pytest.raises(ValueMutated, match=r"'Gather'.*emitted"):
            h.push("a")


def test_a_changed_value_is_found_although_it_is_not_emitted_again() -> None:
    kept: list[dict[str, int]] = []

    def remember(value: int) -> dict[str, int]:
        for row in kept:
            row["seen"] = value
        kept.append({"value": value})
        return kept[-1]

    with OperatorHarness(remember) as h:
        h.push(1)
        with pytest.raises(ValueMutated, match="emitted"):
            h.push(2)


def test_a_coroutine_that_changes_its_input_is_found() -> None:
    async def enrich(row: dict[str, int]) -> dict[str, int]:
        await asyncio.sleep(0.01)
        row["new"] = 1
        return row

    with OperatorHarness(enrich) as h:
        h.push({"a": 1})
        with pytest.raises(ValueMutated, match="'enrich'"):
            h.advance(10)


def test_a_value_sent_to_a_side_output_may_not_be_changed_afterwards() -> None:
    tag = af.OutputTag[Any]("side")
    row: dict[str, int] = {}

    def both(value: int, ctx: Any) -> None:
        row["last"] = value
        ctx.output(tag, row)

    with OperatorHarness(both) as h:
        h.push(1)
        with pytest.raises(ValueMutated, match="'both'"):
            h.push(2)


def tidy(row: dict[str, int]) -> dict[str, int]:
    return {**row, "tidy": 1}


def spoil(row: dict[str, int]) -> dict[str, int]:
    row["spoilt"] = 1
    return row


async def test_a_sibling_that_changes_a_shared_record_fails_the_job_by_name() -> None:
    """B4.6"""
    flow = af.Flow("siblings")
    rows = flow.source([{"a": 1}, {"a": 2}]).map(dict, name="make")
    good, bad = rows.map(tidy, name="good"), rows.map(spoil, name="bad")
    with pytest.raises(ValueMutated, match="'bad'"):
        await flow.collect(good, bad, debug=True)


async def test_a_fused_operator_is_named_by_itself() -> None:
    """B4.6"""
    rows = (
        af.Flow("fused")
        .source([{"a": 1}])
        .map(tidy, name="first")
        .map(spoil, name="second")
        .map(tidy, name="third")
    )
    with pytest.raises(ValueMutated, match="'second'"):
        await rows.collect(debug=True)


async def test_a_flow_in_debug_mode_finds_a_value_that_is_emitted_and_changed_later() -> None:
    """F7.10"""
    total: list[int] = []

    def gather(value: int) -> list[int]:
        total.append(value)
        return total

    stream = af.Flow("gather").source(range(100)).map(gather, name="gather")
    with pytest.raises(ValueMutated, match="'gather'"):
        await stream.collect(debug=True)


async def test_debug_mode_of_asyncio_turns_the_check_on() -> None:
    stream = af.Flow("debug").source([{"a": 1}]).map(spoil)
    loop = asyncio.get_running_loop()
    before = loop.get_debug()
    try:
        loop.set_debug(True)
        with pytest.raises(ValueMutated):
            await stream.collect()
        assert await stream.collect(debug=False)
        loop.set_debug(False)
        assert await stream.collect() == [{"a": 1, "spoilt": 1}]
    finally:
        loop.set_debug(before)


async def test_the_checks_change_no_result() -> None:
    def program() -> Any:
        flow = af.Flow("same")
        words = (
            flow.source(["b a", "a c", "b"] * 50)
            .flat_map(str.split)
            .filter(lambda w: w != "c")
            .key_by(str)
        )
        return words.count()

    assert await program().collect(debug=True) == await program().collect(debug=False)


def test_immutable_values_have_no_digest() -> None:
    assert [digest(value) for value in (1, "a", None, (1, "b"), b"x")] == [None] * 5
    assert digest([1]) == digest([1]) != digest([True])
    cyclic: list[Any] = []
    cyclic.append(cyclic)
    assert digest(cyclic) is not None


@pytest.mark.slow_callbacks
async def test_a_slow_operator_is_named_in_debug_mode_too(caplog: pytest.LogCaptureFixture) -> None:
    def slow(value: int) -> int:
        time.sleep(0.5)  # Holds the event loop, which the warning is about.
        return value

    flow = af.Flow("slow")
    await flow.source([1]).key_by(abs).aggregate(af.sum(slow), name="sluggish").collect(debug=True)
    assert "operator 'sluggish', subtask" in caplog.text
