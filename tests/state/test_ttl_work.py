"""The cost of a time to live for a key with much content, as the number of comparisons of times,
and how soon the writes of other keys remove what has expired.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioflow.core.keygroups import KeyGroupRange
from aioflow.core.states import (
    ListStateDescriptor,
    MapStateDescriptor,
    ReducingStateDescriptor,
    StateDescriptor,
    ValueStateDescriptor,
)
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


WRITES = {
    "value": (ValueStateDescriptor("s", ttl="1s"), lambda state, i: state.update(i)),
    "list": (ListStateDescriptor("s", ttl="1s"), lambda state, i: state.add(i)),
    "map": (MapStateDescriptor("s", ttl="1s"), lambda state, i: state.put(i % 2, i)),
    "reducing": (ReducingStateDescriptor("s", max, ttl="1s"), lambda state, i: state.add(i)),
}


@pytest.mark.parametrize("kind", WRITES)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from("abcdefghijkl"),
            st.sampled_from((0, 1, 30, 124, 125, 126, 999, 1_000, 1_125)),
            st.integers(0, 5),
        ),
        max_size=60,
    )
)
def test_writes_of_one_key_remove_all_that_has_expired(
    kind: str, steps: list[tuple[str, int, int]]
) -> None:
    descriptor, write = WRITES[kind]
    now = 0
    backend = HeapKeyedStateBackend(
        max_parallelism=4, key_group_range=KeyGroupRange(0, 3), now_ms=lambda: now
    )
    state: Any = backend.get_state(descriptor)
    written: dict[str, int] = {}
    for i, (key, wait, removes) in enumerate(steps):
        now += wait
        backend.set_current_key(key)
        if removes == 0:
            state.clear()
            written.pop(key, None)
        else:
            write(state, i)
            written[key] = now
        held = dict(state.table.peek())
        assert (
            {key for key, last in written.items() if now - last < TTL_MS}
            <= held.keys()
            <= written.keys()
        )
    now += TTL_MS + TTL_MS // 8
    backend.set_current_key("other")
    for i in range(len(steps) + 1):
        write(state, i)
    assert set(state.table.peek()) == {"other"}
