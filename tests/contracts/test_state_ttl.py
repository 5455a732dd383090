"""The options of a time to live, on every backend and over a restore: a read that refreshes,
expired values that are visible until they are removed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from aioflow.core.errors import StateError
from aioflow.core.states import (
    AggregatingStateDescriptor,
    ListStateDescriptor,
    MapStateDescriptor,
    ReducingStateDescriptor,
    StateDescriptor,
    StateTtl,
    ValueStateDescriptor,
)
from aioflow.state.backend import KeyedStateBackend
from aioflow.state.rocksdb import RocksDB
from aioflow.state.rocksdb_cache import NAMED_LATELY
from aioflow.state.ttl import SLICES, SWEEP_ROWS, SWEEP_WRITES
from tests.contracts.test_state_backend import BACKENDS, Bench, Mean
from tests.state.snapshots import closing_backends, restore, taken

TTL_MS = 1_000


@pytest.fixture(params=BACKENDS)
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    with closing_backends():
        yield Bench(request.param)


def _add(state: Any) -> None:
    state.add(1)


class Kind:
    """A kind of state: how to write, how to read what was written, and what nothing looks like."""

    def __init__(
        self,
        descriptor: Callable[[StateTtl], StateDescriptor],
        write: Callable[[Any], None],
        read: Callable[[Any], Any],
        nothing: Any,
    ) -> None:
        self.descriptor = descriptor
        self.write = write
        self.read = read
        self.nothing = nothing


KINDS = {
    "value": Kind(
        lambda ttl: ValueStateDescriptor("s", ttl=ttl),
        lambda state: state.update(1),
        lambda state: state.value(),
        None,
    ),
    "list": Kind(
        lambda ttl: ListStateDescriptor("s", ttl=ttl), _add, lambda state: state.get(), []
    ),
    "map, one entry": Kind(
        lambda ttl: MapStateDescriptor("s", ttl=ttl),
        lambda state: state.put("a", 1),
        lambda state: state.get("a"),
        None,
    ),
    "map, is it there": Kind(
        lambda ttl: MapStateDescriptor("s", ttl=ttl),
        lambda state: state.put("a", 1),
        lambda state: state.contains("a"),
        False,
    ),
    "map, all": Kind(
        lambda ttl: MapStateDescriptor("s", ttl=ttl),
        lambda state: state.put("a", 1),
        lambda state: [*state.items(), *state.keys(), *state.values()],
        [],
    ),
    "reducing": Kind(
        lambda ttl: ReducingStateDescriptor("s", max, ttl=ttl),
        _add,
        lambda state: state.get(),
        None,
    ),
    "aggregating": Kind(
        lambda ttl: AggregatingStateDescriptor("s", Mean(), ttl=ttl),
        _add,
        lambda state: state.get(),
        None,
    ),
}


def opened(bench: Bench, kind: Kind, **options: bool) -> tuple[KeyedStateBackend, Any]:
    backend = bench.create()
    state = backend.get_state(kind.descriptor(StateTtl("1s", **options)))
    backend.set_current_key("k")
    return backend, state


def reopened(
    bench: Bench, backend: KeyedStateBackend, kind: Kind, **options: bool
) -> tuple[KeyedStateBackend, Any]:
    new, state = opened(bench, kind, **options)
    restore(new, [taken(backend)])
    return new, state


@pytest.mark.parametrize("name", KINDS)
def test_without_options_a_read_refreshes_nothing_and_what_expired_is_gone(
    bench: Bench, name: str
) -> None:
    kind = KINDS[name]
    _, state = opened(bench, kind)
    kind.write(state)
    bench.clock.now += TTL_MS - 1
    assert kind.read(state) != kind.nothing
    bench.clock.now += 1
    assert kind.read(state) == kind.nothing


@pytest.mark.parametrize("name", KINDS)
def test_a_read_refreshes_and_the_refreshed_time_is_restored(bench: Bench, name: str) -> None:
    kind = KINDS[name]
    backend, state = opened(bench, kind, refresh_on_read=True)
    kind.write(state)
    written = kind.read(state)
    for _ in range(3):
        bench.clock.now += TTL_MS - 1
        assert kind.read(state) == written
    backend, state = reopened(bench, backend, kind, refresh_on_read=True)
    bench.clock.now += TTL_MS - 1
    assert kind.read(state) == written
    bench.clock.now += TTL_MS
    assert kind.read(state) == kind.nothing


@pytest.mark.parametrize("name", KINDS)
def test_a_query_refreshes_nothing(bench: Bench, name: str) -> None:
    kind = KINDS[name]
    backend, state = opened(bench, kind, refresh_on_read=True)
    kind.write(state)
    bench.clock.now += TTL_MS - 1
    assert backend.query("s", "k") is not None
    bench.clock.now += 1
    assert backend.query("s", "k", default=None) is None
    assert kind.read(state) == kind.nothing


@pytest.mark.parametrize("name", KINDS)
def test_an_expired_value_is_visible_until_it_is_removed_if_it_may_be(
    bench: Bench, name: str
) -> None:
    kind = KINDS[name]
    backend, state = opened(bench, kind, return_expired=True)
    kind.write(state)
    written = kind.read(state)
    bench.clock.now += 2 * TTL_MS
    for _ in range(2):
        assert kind.read(state) == written
    assert backend.query("s", "k", default=None) is not None
    # A checkpoint leaves it out.
    _, state = reopened(bench, backend, kind, return_expired=True)
    assert kind.read(state) == kind.nothing


@pytest.mark.parametrize("name", KINDS)
def test_writes_remove_visible_expired_values_of_other_keys(bench: Bench, name: str) -> None:
    kind = KINDS[name]
    backend, state = opened(bench, kind, return_expired=True)
    kind.write(state)
    bench.clock.now += TTL_MS + TTL_MS // SLICES + 1
    for key in range(2 * SWEEP_WRITES):
        backend.set_current_key(key)
        kind.write(state)
    backend.set_current_key("k")
    assert kind.read(state) == kind.nothing


def test_a_read_does_not_refresh_what_has_expired(bench: Bench) -> None:
    backend = bench.create()
    ttl = StateTtl("1s", refresh_on_read=True, return_expired=True)
    state = backend.get_state(ListStateDescriptor("s", ttl=ttl))
    backend.set_current_key("k")
    state.add("old")
    bench.clock.now += TTL_MS
    state.add("new")
    bench.clock.now += 1
    assert state.get() == ["old", "new"]
    new = bench.create()
    state = new.get_state(ListStateDescriptor("s", ttl=ttl))
    restore(new, [taken(backend)])
    new.set_current_key("k")
    assert state.get() == ["new"]
    bench.clock.now += TTL_MS - 1
    assert state.get() == ["new"]


def test_the_options_of_one_state_are_the_same_wherever_it_is_declared(bench: Bench) -> None:
    backend = bench.create()
    backend.get_state(ValueStateDescriptor("s", ttl="1s"))
    backend.get_state(ValueStateDescriptor("s", ttl=StateTtl("1000ms")))
    with pytest.raises(StateError, match="'s' is declared with ttl StateTtl"):
        backend.get_state(ValueStateDescriptor("s", ttl=StateTtl("1s", refresh_on_read=True)))
    with pytest.raises(StateError, match=r"ttl of state 'n' is StateTtl.*expected a positive"):
        backend.get_state(ValueStateDescriptor("n", ttl=StateTtl("0s")))


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"time": 5}, "time of StateTtl is 5 of type int"),
        ({"time": "soon"}, "time of StateTtl is 'soon'"),
        ({"time": "1s", "refresh_on_read": "yes"}, "refresh_on_read of StateTtl is 'yes'"),
        ({"time": "1s", "return_expired": 1}, "return_expired of StateTtl is 1"),
    ],
)
def test_wrong_arguments_of_a_time_to_live_are_refused_at_once(
    arguments: dict[str, Any], error: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=error):
        StateTtl(**arguments)


# Removal from RocksDB.

KEYS = 8 * NAMED_LATELY


def rocksdb() -> Bench:
    return Bench(RocksDB(cache_entries=SWEEP_ROWS))  # type: ignore[arg-type]


def rows_of(backend: Any) -> int:
    return sum(len(chunk) for chunk in backend._tables["s"].chunks(SWEEP_ROWS))


@pytest.mark.parametrize("restored", [False, True])
@pytest.mark.parametrize("namespace", [None, (0, 10)])
def test_writes_remove_expired_rows_that_are_on_disk(restored: bool, namespace: Any) -> None:
    with closing_backends():
        bench = rocksdb()
        descriptor = ValueStateDescriptor[int]("s", ttl="1s")
        backend = bench.create()
        state = backend.get_state(descriptor, namespace)
        for key in range(KEYS):
            backend.set_current_key(key)
            state.update(key)
        if restored:
            old, backend = backend, bench.create()
            state = backend.get_state(descriptor, namespace)
            restore(backend, [taken(old)])
        assert rows_of(backend) == KEYS
        bench.clock.now += TTL_MS
        for count in range(KEYS // 2):
            backend.set_current_key(-1)
            state.update(count)
        assert rows_of(backend) == 1
        assert backend._tables["s"].namespaces() == [namespace]  # type: ignore[attr-defined]


def test_rows_that_have_not_expired_stay_and_are_not_loaded() -> None:
    with closing_backends():
        bench = rocksdb()
        backend: Any = bench.create()
        state = backend.get_state(ValueStateDescriptor[int]("s", ttl="1s"))
        for key in range(KEYS):
            backend.set_current_key(key)
            state.update(key)
        bench.clock.now += TTL_MS - 1
        for count in range(KEYS):
            backend.set_current_key(-1)
            state.update(count)
        assert rows_of(backend) == KEYS + 1
        assert len(list(backend._tables["s"].space(None).entries.keys_in_memory())) < KEYS // 2
        for key in range(KEYS):
            backend.set_current_key(key)
            assert state.value() == key
