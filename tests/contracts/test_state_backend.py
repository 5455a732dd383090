"""The contract of every keyed state backend.

A backend passes when it is added to `BACKENDS` and nothing here changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioflow.core.errors import RestoreError, StateError
from aioflow.core.keygroups import KeyGroupRange, KeyNotSupported, key_group, range_for_subtask
from aioflow.core.states import (
    AggregatingStateDescriptor,
    ListStateDescriptor,
    MapStateDescriptor,
    ReducingStateDescriptor,
    StateDescriptor,
    ValueStateDescriptor,
)
from aioflow.state.backend import (
    KeyedStateBackend,
    create_keyed_backend,
    require_keyed,
)
from tests.state.snapshots import closing_backends, made, restore, taken

BACKENDS = ["heap", "rocksdb"]
MAX_PARALLELISM = 128
ALL = KeyGroupRange(0, MAX_PARALLELISM - 1)


@dataclass
class Clock:
    """Processing time in ms, moved by hand."""

    now: int = 1_000_000

    def __call__(self) -> int:
        return self.now


@dataclass
class Bench:
    """Makes backends of one kind over one clock."""

    name: str
    clock: Clock = field(default_factory=Clock)

    def create(
        self, groups: KeyGroupRange = ALL, max_parallelism: int = MAX_PARALLELISM
    ) -> KeyedStateBackend:
        return made(
            self.name, max_parallelism=max_parallelism, key_group_range=groups, now_ms=self.clock
        )

    def rescaled(self, olds: list[KeyedStateBackend], parallelism: int) -> list[KeyedStateBackend]:
        snapshots = [taken(old) for old in olds]
        news = []
        for index in range(parallelism):
            new = self.create(range_for_subtask(index, parallelism, MAX_PARALLELISM))
            restore(new, snapshots)
            news.append(new)
        return news


@pytest.fixture(params=BACKENDS)
def bench(request: pytest.FixtureRequest) -> Bench:
    return Bench(request.param)


@pytest.fixture
def backend(bench: Bench) -> KeyedStateBackend:
    return bench.create()


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    with closing_backends():
        yield


class Mean:
    """An AggregateFunction whose accumulator is changed in place."""

    def create_accumulator(self) -> list[int]:
        return [0, 0]

    def add(self, value: int, accumulator: list[int]) -> list[int]:
        accumulator[0] += value
        accumulator[1] += 1
        return accumulator

    def get_result(self, accumulator: list[int]) -> float:
        return accumulator[0] / accumulator[1]

    def merge(self, a: list[int], b: list[int]) -> list[int]:
        return [a[0] + b[0], a[1] + b[1]]


def descriptors(ttl: str | None = None) -> list[StateDescriptor]:
    return [
        ValueStateDescriptor("v", ttl=ttl),
        ListStateDescriptor("l", ttl=ttl),
        MapStateDescriptor("m", ttl=ttl),
        ReducingStateDescriptor("r", lambda a, b: a + b, ttl=ttl),
        AggregatingStateDescriptor("a", Mean(), ttl=ttl),
    ]


def write(state: Any, value: int) -> None:
    """Writes once, to the state of the given kind."""
    if hasattr(state, "put"):
        state.put("k", value)
    elif hasattr(state, "add"):
        state.add(value)
    else:
        state.update(value)


def read(state: Any) -> Any:
    """Returns all content of the state of the given kind; None or empty without content."""
    if hasattr(state, "items"):
        return dict(state.items())
    return state.get() if hasattr(state, "get") else state.value()


# Choosing a backend.


def test_without_any_choice_the_backend_is_the_heap() -> None:
    """H1.3"""
    made = create_keyed_backend(max_parallelism=128, key_group_range=ALL, now_ms=Clock())
    assert type(made).__name__ == "HeapKeyedStateBackend"


@pytest.mark.parametrize("choice", ["heep", object()])
def test_unknown_backend_is_refused_naming_it(choice: Any) -> None:
    """H1.2"""
    with pytest.raises(StateError, match=r"heep|object.*heap") as caught:
        create_keyed_backend(choice, max_parallelism=128, key_group_range=ALL, now_ms=Clock())
    assert "heap" in str(caught.value)


def test_backend_object_of_the_application_is_configured_and_used() -> None:
    """H1.4"""

    class Mine:
        options: Any = None

        def configure(self, options: Any) -> None:
            self.options = options

        def create_keyed(self, **arguments: Any) -> KeyedStateBackend:
            assert self.options == {"dir": "x"}, "configured before it is used"
            return create_keyed_backend("heap", **arguments)

    mine = Mine()
    made = create_keyed_backend(
        mine,
        max_parallelism=8,
        key_group_range=KeyGroupRange(0, 7),
        now_ms=Clock(),
        options={"dir": "x"},
    )
    assert made.max_parallelism == 8


def test_missing_key_by_is_named_when_state_is_required() -> None:
    """H2.2"""
    with pytest.raises(StateError, match=r"'alert'.*key_by"):
        require_keyed(None, "alert")


# Kinds of state.


def test_value_is_isolated_by_key_and_cleared_for_one_key_only(backend: KeyedStateBackend) -> None:
    """H2.1"""
    state = backend.get_state(ValueStateDescriptor("v", default=7))
    backend.set_current_key("a")
    assert state.value() == 7
    state.update(1)
    backend.set_current_key("b")
    assert state.value() == 7
    state.update(2)
    state.clear()
    assert state.value() == 7
    backend.set_current_key("a")
    assert state.value() == 1
    state.update(None)
    assert state.value() == 7


def test_mutable_default_is_not_shared_between_keys(backend: KeyedStateBackend) -> None:
    state = backend.get_state(ValueStateDescriptor("v", default=[]))
    backend.set_current_key("a")
    state.value().append(1)
    assert state.value() == []


def test_list_state_appends_replaces_and_clears(backend: KeyedStateBackend) -> None:
    """H2.7: `update([])` is `clear`."""
    state = backend.get_state(ListStateDescriptor("l"))
    backend.set_current_key("a")
    assert state.get() == []
    state.add(1)
    state.add_all([2, 3])
    state.add_all([])
    assert state.get() == [1, 2, 3]
    state.update((4,))
    assert state.get() == [4]
    state.update([])
    assert state.get() == []
    assert backend.items("l") == []


@pytest.mark.parametrize(
    "write_none",
    [
        lambda s: s.add(None),
        lambda s: s.add_all([1, None]),
        lambda s: s.update([1, None]),
        lambda s: s.update(None),
    ],
)
@pytest.mark.parametrize("ttl", [None, "1h"])
def test_list_state_refuses_none_and_stays_as_it_was(
    backend: KeyedStateBackend, write_none: Callable[[Any], None], ttl: Any
) -> None:
    """H2.7"""
    state = backend.get_state(ListStateDescriptor("l", ttl=ttl))
    backend.set_current_key("a")
    state.add(0)
    with pytest.raises(StateError, match="'l' was given None"):
        write_none(state)
    assert state.get() == [0]


def test_changing_a_list_that_was_read_changes_no_state(backend: KeyedStateBackend) -> None:
    state = backend.get_state(ListStateDescriptor("l"))
    backend.set_current_key("a")
    given = [1, 2]
    state.update(given)
    given.append(3)
    state.get().append(4)
    assert state.get() == [1, 2]


def test_map_state_has_the_methods_of_a_map(backend: KeyedStateBackend) -> None:
    state = backend.get_state(MapStateDescriptor("m"))
    backend.set_current_key("a")
    assert state.is_empty()
    state.put("x", 1)
    state.put_all({"y": 2, "z": None})
    assert (state.get("x"), state.get("z", 5), state.get("q"), state.get("q", 5)) == (
        1,
        None,
        None,
        5,
    )
    assert (state.contains("z"), state.contains("q")) == (True, False)
    assert (state.keys(), state.values(), state.items()) == (
        ["x", "y", "z"],
        [1, 2, None],
        [("x", 1), ("y", 2), ("z", None)],
    )
    state.remove("q")
    backend.set_current_key("b")
    assert state.is_empty()
    assert state.keys() == []
    backend.set_current_key("a")
    assert not state.is_empty()
    state.clear()
    assert state.is_empty()


@pytest.mark.parametrize("ttl", [None, "1h"])
def test_map_state_may_be_changed_while_it_is_iterated(
    backend: KeyedStateBackend, ttl: Any
) -> None:
    """H2.7"""
    state = backend.get_state(MapStateDescriptor("m", ttl=ttl))
    backend.set_current_key("a")
    state.put_all({n: n for n in range(10)})
    for key in state.keys():  # noqa: SIM118  # MapState is no mapping.
        if key % 2:
            state.remove(key)
    assert state.keys() == [0, 2, 4, 6, 8]
    for key, _ in state.items():
        state.remove(key)
    assert state.is_empty()
    assert backend.items("m") == []


def test_reducing_and_aggregating_state_fold_what_is_added(backend: KeyedStateBackend) -> None:
    total = backend.get_state(ReducingStateDescriptor("sum", lambda a, b: a + b))
    mean = backend.get_state(AggregatingStateDescriptor("mean", Mean()))
    backend.set_current_key("a")
    assert (total.get(), mean.get()) == (None, None)
    for value in (1, 2, 6):
        total.add(value)
        mean.add(value)
    backend.set_current_key("b")
    total.add(10)
    assert (total.get(), mean.get()) == (10, None)
    backend.set_current_key("a")
    assert (total.get(), mean.get()) == (9, 3.0)
    total.clear()
    mean.clear()
    assert (total.get(), mean.get()) == (None, None)


def test_keys_equal_in_python_are_one_key(backend: KeyedStateBackend) -> None:
    state = backend.get_state(ValueStateDescriptor("v"))
    for same in ((1, 1.0, True, Decimal(1)), (0.0, -0.0, 0, False), (("a", 1), ("a", 1.0))):
        backend.set_current_key(same[0])
        state.update(same)
        for spelling in same:
            backend.set_current_key(spelling)
            assert state.value() is not None
    assert len(backend.items("v")) == 3


# Rules.


@pytest.mark.parametrize("namespace", [None, 5])
@pytest.mark.parametrize("ttl", [None, "1h"])
@pytest.mark.parametrize("index", range(5))
def test_access_without_a_current_key_is_an_error(
    backend: KeyedStateBackend, index: int, ttl: Any, namespace: Any
) -> None:
    """H2.6"""
    state = backend.get_state(descriptors(ttl)[index], namespace)
    for action in (read, lambda s: write(s, 1), lambda s: s.clear()):
        with pytest.raises(StateError, match="without a current key"):
            action(state)
    backend.set_current_key("a")
    write(state, 1)
    backend.clear_current_key()
    for action in (read, lambda s: write(s, 1), lambda s: s.clear()):
        with pytest.raises(StateError, match="without a current key"):
            action(state)
    assert len(backend.items(state.descriptor.name, namespace=namespace)) == 1


def test_same_name_declared_as_another_kind_is_an_error(backend: KeyedStateBackend) -> None:
    """H2.4"""
    backend.get_state(ValueStateDescriptor("x"))
    with pytest.raises(StateError, match=r"'x' is declared as list, but .*value"):
        backend.get_state(ListStateDescriptor("x"))
    with pytest.raises(StateError, match=r"'x' is declared as table, but it exists as value"):
        backend.table("x")
    with pytest.raises(StateError, match=r"'x' is declared with ttl '1d', but"):
        backend.get_state(ValueStateDescriptor("x", ttl="1d"))


def test_restored_state_asked_for_as_another_kind_is_an_error(
    bench: Bench, backend: KeyedStateBackend
) -> None:
    """H2.4"""
    backend.set_current_key("a")
    backend.get_state(ValueStateDescriptor("x")).update(1)
    (new,) = bench.rescaled([backend], 1)
    with pytest.raises(StateError, match="'x' is declared as map, but it exists as value"):
        new.get_state(MapStateDescriptor("x"))


def test_undeclared_state_is_refused(backend: KeyedStateBackend) -> None:
    with pytest.raises(StateError, match="'x' is declared by a StateDescriptor, expected a Value-"):
        backend.get_state(StateDescriptor("x"))
    with pytest.raises(StateError, match="not empty"):
        backend.table("")


def test_closed_backend_holds_nothing(backend: KeyedStateBackend) -> None:
    backend.table("t").of()["a"] = 1
    backend.set_current_key("a")
    backend.close()
    assert backend.names() == []
    with pytest.raises(StateError, match="without a current key"):
        hash(backend.current_key)


def test_state_declared_twice_is_one_state(backend: KeyedStateBackend) -> None:
    first, second = (backend.get_state(ValueStateDescriptor("x")) for _ in range(2))
    backend.set_current_key("a")
    first.update(1)
    assert second.value() == 1


@pytest.mark.parametrize("ttl", [None, "1h"])
@pytest.mark.parametrize("index", range(5))
def test_namespaces_isolate_and_vanish_with_their_last_key(
    backend: KeyedStateBackend, index: int, ttl: Any
) -> None:
    """H2: namespaces (windows) isolate."""
    descriptor = descriptors(ttl)[index]
    plain, first, second = (
        backend.get_state(descriptor, namespace) for namespace in (None, (0, 10), (10, 20))
    )
    backend.set_current_key("a")
    empty = read(plain)
    write(plain, 1)
    write(first, 2)
    assert [read(plain) == empty, read(first) == empty, read(second) == empty] == [
        False,
        False,
        True,
    ]
    assert read(plain) != read(first)
    assert len(backend.items(descriptor.name, namespace=(0, 10))) == 1
    first.clear()
    assert read(first) == empty
    write(first, 3)  # After its namespace vanished, the same object writes where reads find it.
    assert read(backend.get_state(descriptor, (0, 10))) == read(first) != empty


def test_table_gives_a_dict_for_each_namespace(backend: KeyedStateBackend) -> None:
    table = backend.table("counts")
    table.of()["a"] = 1
    table.of(7)["a"] = 2
    assert dict(table.peek(8)) == {}
    assert table.namespaces() == [None, 7]
    assert (dict(table.of()), dict(table.peek(7))) == ({"a": 1}, {"a": 2})
    table.drop(7)
    table.drop(9)
    assert table.namespaces() == [None]
    table.drop(None)
    assert dict(table.of()) == {}


def test_dropped_plain_namespace_is_empty_for_states_too(backend: KeyedStateBackend) -> None:
    table = backend.table("t")
    held = table.of()
    held["a"] = 1
    table.drop(None)
    table.of()["b"] = 2
    assert dict(table.of()) == {"b": 2}


# Queries.


def test_query_shows_what_the_state_shows_and_touches_no_key(backend: KeyedStateBackend) -> None:
    for descriptor in descriptors():
        state = backend.get_state(descriptor)
        backend.set_current_key("a")
        write(state, 4)
    backend.clear_current_key()
    assert [backend.query(name, "a") for name in "vlmra"] == [4, [4], {"k": 4}, 4, 4.0]
    assert [backend.query(name, "b", default="-") for name in "vlmra"] == ["-"] * 5
    assert backend.items("m") == [("a", {"k": 4})]
    backend.get_state(ValueStateDescriptor("d", default=3))
    assert backend.query("d", "a") == 3
    assert [backend.query("d", "a", default=given) for given in ("-", None)] == ["-", None]
    assert backend.query("v", "b") is None


def test_query_of_a_table_shows_its_result(backend: KeyedStateBackend) -> None:
    table = backend.table("mean", result=lambda acc: acc[0] / acc[1])
    table.of().update({n: [n, 2] for n in range(5)})
    assert backend.query("mean", 3) == 1.5
    assert backend.items("mean", limit=2) == [(0, 0.0), (1, 0.5)]


def test_query_of_unknown_state_names_what_there_is(backend: KeyedStateBackend) -> None:
    backend.table("counts")
    with pytest.raises(StateError, match="no state 'count', expected one of 'counts'"):
        backend.query("count", "a")
    with pytest.raises(StateError, match="no state 'count'"):
        backend.items("count")


# Snapshots.


def test_null_key_is_refused_at_the_snapshot(backend: KeyedStateBackend) -> None:
    """H3.5: keys are checked by the sender; one that got past it cannot be written."""
    backend.table("t").of()[None] = 1
    with pytest.raises(KeyNotSupported):
        taken(backend)


def test_snapshot_is_not_changed_by_what_happens_after_it(
    bench: Bench, backend: KeyedStateBackend
) -> None:
    states = [backend.get_state(descriptor) for descriptor in descriptors()]
    nested = backend.get_state(ValueStateDescriptor("nested"))
    backend.set_current_key("a")
    for state in states:
        write(state, 1)
    value = {"deep": [1]}
    nested.update(value)
    before = [read(state) for state in states]
    snapshot = taken(backend)
    for state in states:
        write(state, 5)
    states[2].put("other", 1)
    value["deep"].append(2)
    for _ in range(2):  # Nor does restoring from it tie it to who restores.
        new = bench.create()
        restore(new, [snapshot])
        new.set_current_key("a")
        restored = [new.get_state(descriptor) for descriptor in descriptors()]
        assert [read(state) for state in restored] == before
        assert new.get_state(ValueStateDescriptor("nested")).value() == {"deep": [1]}
        for state in restored:
            write(state, 9)


def test_restore_under_another_max_parallelism_is_refused(
    bench: Bench, backend: KeyedStateBackend
) -> None:
    backend.table("t").of()["a"] = 1
    snapshot = taken(backend)
    new = bench.create(KeyGroupRange(0, 63), max_parallelism=64)
    with pytest.raises(RestoreError, match="max_parallelism=128, but the operator has 64"):
        restore(new, [snapshot])


def test_backend_is_restored_even_if_its_share_is_empty(
    bench: Bench, backend: KeyedStateBackend
) -> None:
    """H4.5"""
    assert not backend.is_restored
    assert all(new.is_restored for new in bench.rescaled([backend], 3))


def test_restored_state_is_found_before_and_after_it_is_declared(
    bench: Bench, backend: KeyedStateBackend
) -> None:
    state = backend.get_state(ValueStateDescriptor("x"))
    backend.set_current_key("a")
    state.update(3)
    snapshot = taken(backend)
    early = bench.create()
    declared = early.get_state(ValueStateDescriptor("x"))
    restore(early, [snapshot])
    early.set_current_key("a")
    assert declared.value() == 3
    late = bench.create()
    restore(late, [snapshot])
    assert late.names() == ["x"]
    late.set_current_key("a")
    assert late.get_state(ValueStateDescriptor("x")).value() == 3


@pytest.mark.parametrize(
    "early", [False, True], ids=["declared behind the restore", "declared before it"]
)
def test_a_namespace_used_first_after_a_restore_is_none_that_was_restored(
    bench: Bench, backend: KeyedStateBackend, early: bool
) -> None:
    window = (10, 20)
    sums, values = ReducingStateDescriptor("sum", max), ValueStateDescriptor("value")

    def write(
        where: KeyedStateBackend, descriptor: StateDescriptor, key: str, namespace: Any, value: int
    ) -> None:
        where.set_current_key(key)
        state = where.get_state(descriptor, namespace)
        state.add(value) if descriptor is sums else state.update(value)

    write(backend, sums, "a", window, 1)
    write(backend, values, "b", window, 2)
    model = {("sum", window, "a"): 1, ("value", window, "b"): 2}
    for number, (descriptor, key, namespace) in enumerate(
        [(values, "c", None), (sums, "d", None), (values, "e", 7), (sums, "f", 8)], 3
    ):
        snapshot = taken(backend)
        backend = bench.create()
        if early:
            backend.get_state(values), backend.get_state(sums)
        restore(backend, [snapshot])
        write(backend, descriptor, key, namespace, number)
        model[descriptor.name, namespace, key] = number
        names, namespaces = ("sum", "value"), (None, window, 7, 8)
        found = {
            (name, ns, key): value
            for name in names
            for ns in namespaces
            for key, value in backend.items(name, namespace=ns)
        }
        assert found == model


KEYS = st.one_of(
    st.integers(-3, 3),
    st.text(max_size=2),
    st.tuples(st.integers(0, 2), st.booleans()),
    st.sampled_from([1.0, 2.5, -0.0]),
)
STEP = st.tuples(
    st.sampled_from(["value", "list", "map", "sum", "clear", "rescale"]),
    KEYS,
    st.sampled_from([None, 0, (10, 20)]),
    st.integers(0, 9),
)


@pytest.mark.parametrize("name", BACKENDS)
@settings(max_examples=60)
@given(steps=st.lists(STEP, max_size=40), parallelisms=st.lists(st.integers(1, 8), min_size=1))
def test_backend_agrees_with_plain_dicts_under_any_rescaling(
    name: str, steps: list[Any], parallelisms: list[int]
) -> None:
    """H3.1, R39: at p = 1 to 8 each key is found by the one subtask that owns it."""
    bench = Bench(name)
    backends = bench.rescaled([], parallelisms[0])
    scales = iter(parallelisms * (len(steps) + 1))
    kinds: dict[str, StateDescriptor] = {
        "value": ValueStateDescriptor("value"),
        "list": ListStateDescriptor("list"),
        "map": MapStateDescriptor("map"),
        "sum": ReducingStateDescriptor("sum", lambda a, b: a + b),
    }
    model: dict[tuple[str, Any, Any], Any] = {}
    for kind, key, namespace, number in steps:
        if kind == "rescale":
            backends = bench.rescaled(backends, next(scales))
            continue
        group = key_group(key, MAX_PARALLELISM)
        (owner,) = [backend for backend in backends if group in backend.key_group_range]
        owner.set_current_key(key)
        if kind == "clear":
            for each, descriptor in kinds.items():
                owner.get_state(descriptor, namespace).clear()
                model.pop((each, namespace, key), None)
            continue
        state = owner.get_state(kinds[kind], namespace)
        place = (kind, namespace, key)
        if kind == "value":
            assert state.value() == model.get(place)
            state.update(number)
            model[place] = number
        elif kind == "list":
            state.add(number)
            model.setdefault(place, []).append(number)
            assert state.get() == model[place]
        elif kind == "map":
            state.put(number % 3, number)
            model.setdefault(place, {})[number % 3] = number
            assert dict(state.items()) == model[place]
        else:
            state.add(number)
            model[place] = model.get(place, 0) + number
            assert state.get() == model[place]
    found = {
        (kind, namespace, key): value
        for backend in backends
        for kind in backend.names()
        for namespace in (None, 0, (10, 20))
        for key, value in backend.items(kind, namespace=namespace)
    }
    assert found == model


# Times to live.


def test_a_query_of_an_expired_value_gives_the_default_it_names_and_else_the_declared_one(
    bench: Bench, backend: KeyedStateBackend
) -> None:
    state = backend.get_state(ValueStateDescriptor("limit", default=100, ttl="10s"))
    backend.set_current_key("a")
    state.update(7)
    bench.clock.now += 10_000
    assert (backend.query("limit", "a"), backend.query("limit", "a", default=0)) == (100, 0)
    assert backend.items("limit") == []


@pytest.mark.parametrize("index", range(5))
def test_expired_state_is_never_returned(
    bench: Bench, backend: KeyedStateBackend, index: int
) -> None:
    state = backend.get_state(descriptors("10s")[index])
    backend.set_current_key("a")
    empty = read(state)
    write(state, 1)
    bench.clock.now += 9_999
    assert read(state) != empty
    bench.clock.now += 1
    assert backend.query(state.descriptor.name, "a") is None
    assert backend.query(state.descriptor.name, "a", default="-") == "-"
    assert backend.items(state.descriptor.name) == []
    assert read(state) == empty
    write(state, 2)
    assert read(state) in (2, [2], {"k": 2})


@pytest.mark.parametrize("index", [0, 3, 4])
def test_write_refreshes_and_read_does_not(
    bench: Bench, backend: KeyedStateBackend, index: int
) -> None:
    state = backend.get_state(descriptors("10s")[index])
    backend.set_current_key("a")
    write(state, 1)
    bench.clock.now += 6_000
    write(state, 1)
    bench.clock.now += 6_000
    assert read(state) is not None
    bench.clock.now += 4_000
    assert read(state) is None


def test_entries_of_maps_and_elements_of_lists_expire_one_by_one(
    bench: Bench, backend: KeyedStateBackend
) -> None:
    entries = backend.get_state(MapStateDescriptor("m", ttl="10s"))
    elements = backend.get_state(ListStateDescriptor("l", ttl="10s"))
    backend.set_current_key("a")
    for n in range(3):
        entries.put(n, n)
        elements.add(n)
        bench.clock.now += 4_000
    entries.put(1, "new")
    assert (entries.contains(0), entries.get(0, "-"), entries.get(1)) == (False, "-", "new")
    assert (entries.keys(), entries.values(), entries.is_empty()) == ([1, 2], ["new", 2], False)
    assert (elements.get(), backend.query("l", "a"), backend.query("m", "a")) == (
        [1, 2],
        [1, 2],
        {1: "new", 2: 2},
    )
    bench.clock.now += 10_000
    assert (entries.is_empty(), entries.items(), elements.get()) == (True, [], [])


def test_writes_of_other_keys_remove_what_has_expired(bench: Bench) -> None:
    backend = bench.create()
    state = backend.get_state(ValueStateDescriptor("v", ttl="10s"), (0, 10))
    for n in range(100):
        backend.set_current_key(n)
        state.update(n)
    bench.clock.now += 25_000
    table = backend._tables["v"]  # type: ignore[attr-defined]
    other = backend.get_state(ValueStateDescriptor("v", ttl="10s"))
    sizes = []
    for n in range(60):
        backend.set_current_key(n)
        other.update(n)
        sizes.append(len(table.peek((0, 10))))
    assert sizes[0] >= 90, "a few at a time"
    assert sizes[-1] == 0
    assert table.namespaces() == [None]


def test_refreshed_state_survives_the_removal_of_its_first_write(
    bench: Bench, backend: KeyedStateBackend
) -> None:
    state = backend.get_state(ValueStateDescriptor("v", ttl="10s"))
    for n in range(3):
        backend.set_current_key(n)
        state.update(n)
    bench.clock.now += 9_000
    backend.set_current_key(1)
    state.update("again")
    bench.clock.now += 5_000
    for n in range(10, 20):
        backend.set_current_key(n)
        state.update(n)
    assert [key for key, _ in backend.items("v")] == [1, *range(10, 20)]
    backend.set_current_key(1)
    assert state.value() == "again"


def test_snapshot_leaves_out_what_has_expired_and_keeps_the_age_of_the_rest(
    bench: Bench, backend: KeyedStateBackend
) -> None:
    state = backend.get_state(MapStateDescriptor("m", ttl="10s"))
    backend.set_current_key("old")
    state.put("x", 1)
    bench.clock.now += 6_000
    backend.set_current_key("new")
    state.put("y", 2)
    bench.clock.now += 5_000
    (new,) = bench.rescaled([backend], 1)
    bench.clock.now -= 5_000
    assert new.items("m") == [("new", {"y": (1_006_000, 2)})], (
        "as stored, while nothing is declared"
    )
    bench.clock.now += 5_000
    restored = new.get_state(MapStateDescriptor("m", ttl="10s"))
    new.set_current_key("new")
    assert restored.get("y") == 2
    bench.clock.now += 5_000
    assert restored.get("y") is None


@pytest.mark.parametrize("index", range(5))
def test_time_to_live_can_be_given_to_and_taken_from_restored_state(
    bench: Bench, backend: KeyedStateBackend, index: int
) -> None:
    state = backend.get_state(descriptors()[index])
    backend.set_current_key("a")
    write(state, 1)
    seen = read(state)
    (timed,) = bench.rescaled([backend], 1)
    with_ttl = timed.get_state(descriptors("10s")[index])
    timed.set_current_key("a")
    bench.clock.now += 9_000
    assert read(with_ttl) == seen, "its time begins when it is given"
    (untimed,) = bench.rescaled([timed], 1)
    without = untimed.get_state(descriptors()[index])
    untimed.set_current_key("a")
    bench.clock.now += 100_000
    assert read(without) == seen


def test_time_to_live_must_be_positive(backend: KeyedStateBackend) -> None:
    with pytest.raises(StateError, match="ttl of state 'v' is '0s'"):
        backend.get_state(ValueStateDescriptor("v", ttl="0s"))


TTL_STEP = st.tuples(
    st.sampled_from(["put", "remove", "wait", "read", "snapshot"]),
    st.integers(0, 3),
    st.integers(0, 3),
    st.integers(0, 700),
)


@pytest.mark.parametrize("name", BACKENDS)
@settings(max_examples=60)
@given(steps=st.lists(TTL_STEP, max_size=60))
def test_map_with_time_to_live_agrees_with_a_naive_model(
    name: str, steps: list[tuple[str, int, int, int]]
) -> None:
    bench = Bench(name)
    backend = bench.create()
    descriptor = MapStateDescriptor("m", ttl="1s")
    model: dict[tuple[int, int], tuple[int, int]] = {}
    for action, key, entry, number in steps:
        state = backend.get_state(descriptor, key % 2 or None)
        backend.set_current_key(key)
        now = bench.clock.now
        if action == "put":
            state.put(entry, number)
            model[key, entry] = (now, number)
        elif action == "remove":
            state.remove(entry)
            model.pop((key, entry), None)
        elif action == "wait":
            bench.clock.now += number
        elif action == "snapshot":
            (backend,) = bench.rescaled([backend], 1)
        else:
            alive = {e: n for (k, e), (t, n) in model.items() if k == key and now - t < 1_000}
            assert dict(state.items()) == alive
            assert state.get(entry) == alive.get(entry)
            assert state.is_empty() == (not alive)
