"""Two streams, one keyed and one not, brought together: the records pass, and no function has keyed
state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import aioflow as af


class Tells(af.CoProcessFunction[int, int, tuple[str, int]]):
    """Names the side of each element."""

    def process_element1(self, value: int, ctx: af.ProcessContext) -> Iterator[tuple[str, int]]:
        yield "left", value

    def process_element2(self, value: int, ctx: af.ProcessContext) -> Iterator[tuple[str, int]]:
        yield "right", value


class TellsLater(Tells):
    """The same, awaited."""

    async def process_element1(  # type: ignore[override]
        self, value: int, ctx: af.ProcessContext
    ) -> list[tuple[str, int]]:
        return [("left", value)]


class CountsByKey(Tells, af.KeyedCoProcessFunction[int, int, int, tuple[str, int]]):
    """Wants keys."""


class Remembers(Tells):
    """Wants keyed state, and does not say so by its class."""

    def open(self, ctx: af.RuntimeContext) -> None:
        ctx.get_state(af.ValueStateDescriptor("last", default=0))


def itself(value: int) -> int:
    return value


def again(value: int, ctx: af.ProcessContext) -> list[int]:
    return [value]


async def again_later(value: int, ctx: af.ProcessContext) -> list[int]:
    return [value]


def both(parallelism: int = 2) -> tuple[af.KeyedStream[int, int], af.DataStream[int]]:
    flow = af.Flow("half keyed", parallelism=parallelism)
    return flow.source([1, 2]).key_by(itself), flow.source([3])


UNIONS: dict[str, Callable[[Any, Any], Any]] = {
    "keyed first": lambda keyed, plain: keyed.union(plain),
    "keyed last": lambda keyed, plain: plain.union(keyed),
    "keyed twice": lambda keyed, plain: keyed.union(plain.key_by(itself)),
}


@pytest.mark.parametrize("then", [again, again_later])
@pytest.mark.parametrize("united", UNIONS)
async def test_a_union_takes_keyed_streams_and_others(
    united: str, then: Callable[..., Any]
) -> None:
    assert sorted(await UNIONS[united](*both()).process(then).collect()) == [1, 2, 3]


@pytest.mark.parametrize("keyed_side", ["left", "right"])
@pytest.mark.parametrize("function", [Tells, TellsLater])
async def test_a_key_on_one_side_of_connected_streams_deals_out_its_elements(
    function: Any, keyed_side: str
) -> None:
    keyed, plain = both()
    connected = keyed.connect(plain) if keyed_side == "left" else plain.connect(keyed)
    expected = {
        "left": [("left", 1), ("left", 2), ("right", 3)],
        "right": [("left", 3), ("right", 1), ("right", 2)],
    }
    assert sorted(await connected.process(function).collect()) == expected[keyed_side]


@pytest.mark.parametrize("keyed_side", ["left", "right"])
def test_a_keyed_function_is_refused_unless_both_sides_have_keys(keyed_side: str) -> None:
    keyed, plain = both()
    connected = keyed.connect(plain) if keyed_side == "left" else plain.connect(keyed)
    with pytest.raises(
        af.GraphError,
        match="CountsByKey needs both streams keyed, and one of them is not: put key_by",
    ):
        connected.process(CountsByKey)


async def test_keyed_state_is_refused_where_one_side_has_no_keys() -> None:
    keyed, plain = both()
    with pytest.raises(af.StateError, match="its input is not keyed"):
        await keyed.connect(plain).process(Remembers).collect()
