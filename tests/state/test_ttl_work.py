"""The cost of a time to live for a key with much content, as the number of comparisons of times."""

from __future__ import annotations

from typing import Any

from aioflow.core.keygroups import KeyGroupRange
from aioflow.core.states import ListStateDescriptor, MapStateDescriptor, StateDescriptor
from aioflow.state.heap import HeapKeyedStateBackend
from tests.operators.compared import Compared

COUNT = 2_000
TTL_MS = 1_000


class Bench:
    """State of one key by a clock that the test moves."""

    def __init__(self, descriptor: StateDescriptor) -> None:
        self.now = 0
        self.backend = HeapKeyedStateBackend(
            max_parallelism=4,
            key_group_range=KeyGroupRange(0, 3),
            now_ms=lambda: Compared(self.now),
        )
        self.state: Any = self.backend.get_state(descriptor)
        self.backend.set_current_key("k")

    @property
    def held(self) -> int:
        """Elements or entries that take memory."""
        return len(self.state._entries.get("k", ()))


def test_an_element_costs_the_same_however_long_the_list_is_that_it_is_added_to() -> None:
    bench = Bench(ListStateDescriptor("l", ttl="1s"))
    with Compared.counting() as compared:
        for i in range(COUNT):
            bench.state.add(i)
    assert compared() < 10 * COUNT
    assert bench.state.get() == list(range(COUNT))


def test_a_list_that_is_only_added_to_lets_go_of_what_has_ended() -> None:
    bench = Bench(ListStateDescriptor("l", ttl="1s"))
    with Compared.counting() as compared:
        for i in range(10 * TTL_MS):
            bench.now = i
            bench.state.add(i)
            assert bench.held <= TTL_MS + TTL_MS // 4
    assert compared() < 50 * 10 * TTL_MS
    assert bench.state.get() == list(range(9 * TTL_MS, 10 * TTL_MS))


def test_whether_a_map_is_empty_costs_the_same_however_large_it_is() -> None:
    bench = Bench(MapStateDescriptor("m", ttl="1s"))
    with Compared.counting() as compared:
        for i in range(COUNT):
            assert bench.state.is_empty() is (i == 0)
            bench.state.put(i, i)
    assert compared() < 10 * COUNT
    bench.now = TTL_MS
    assert bench.state.is_empty()
    assert bench.held == 0
