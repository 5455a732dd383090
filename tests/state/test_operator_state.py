"""Operator state: list, union list and broadcast, and how they are spread when the parallelism
changes.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioflow.core.errors import RestoreError, StateError, TypeNotSupported
from aioflow.core.states import ListStateDescriptor, MapStateDescriptor
from aioflow.core.wire.serializers import Codec
from aioflow.core.wire.types import TypeRegistry
from aioflow.state import operator_state
from aioflow.state.operator_state import (
    HeapOperatorStateBackend,
    decode_operator_state,
    encode_in_parts,
    encode_operator_state,
    redistribute,
)
from aioflow.state.snapshot import OperatorSnapshot


def split(*subtasks: list[Any]) -> list[OperatorSnapshot]:
    return [OperatorSnapshot(split={"s": elements}) for elements in subtasks]


@pytest.mark.parametrize(
    ("parallelism", "expected"),
    [
        (2, [["a0", "a1", "b0"], ["b1", "b2", "c0"]]),
        (4, [["a0", "a1"], ["b0", "b1"], ["b2"], ["c0"]]),
        (3, [["a0", "a1"], ["b0", "b1", "b2"], ["c0"]]),
        (8, [["a0"], ["a1"], ["b0"], ["b1"], ["b2"], ["c0"], [], []]),
    ],
)
def test_list_state_is_cut_into_contiguous_even_chunks(
    parallelism: int, expected: list[list[str]]
) -> None:
    """H5.1; with an unchanged parallelism elements stay with their owner."""
    new = redistribute(split(["a0", "a1"], ["b0", "b1", "b2"], ["c0"]), parallelism)
    assert [snapshot.split["s"] for snapshot in new] == expected


def test_next_list_state_begins_where_the_larger_chunks_ended() -> None:
    """H5.2"""
    old = OperatorSnapshot(split={"x": [1, 2, 3, 4], "y": [5, 6], "z": [7, 8, 9]})
    new = redistribute([old], 3)
    assert [snapshot.split for snapshot in new] == [
        {"x": [1, 2], "y": [], "z": [7]},
        {"x": [3], "y": [5], "z": [8]},
        {"x": [4], "y": [6], "z": [9]},
    ]


@pytest.mark.parametrize("parallelism", [1, 3, 5])
def test_union_state_goes_to_everybody_in_old_order(parallelism: int) -> None:
    """H5.3"""
    old = [OperatorSnapshot(union={"u": [i, i * 10]}) for i in range(3)]
    assert [snapshot.union["u"] for snapshot in redistribute(old, parallelism)] == [
        [0, 0, 1, 10, 2, 20]
    ] * parallelism


def test_broadcast_state_is_copied_round_robin() -> None:
    """H5.4"""
    old = [OperatorSnapshot(broadcast={"b": {"copy": i}}) for i in range(2)]
    assert [snapshot.broadcast["b"]["copy"] for snapshot in redistribute(old, 5)] == [0, 1, 0, 1, 0]


def test_nothing_to_redistribute_gives_empty_snapshots() -> None:
    assert redistribute([], 2) == [OperatorSnapshot(), OperatorSnapshot()]
    with pytest.raises(ValueError, match="parallelism is 0"):
        redistribute([], 0)


@given(
    names=st.lists(
        st.lists(st.lists(st.integers(), max_size=9), min_size=3, max_size=3), max_size=5
    ),
    parallelism=st.integers(1, 8),
)
def test_redistribution_keeps_every_element_once_and_in_order_and_is_fair(
    names: list[list[list[int]]], parallelism: int
) -> None:
    """H5"""
    old = [
        OperatorSnapshot(split={f"s{n}": states[i] for n, states in enumerate(names)})
        for i in range(3)
    ]
    new = redistribute(old, parallelism)
    for n, states in enumerate(names):
        everything = [element for elements in states for element in elements]
        assert sorted(e for s in new for e in s.split[f"s{n}"]) == sorted(everything)
    if parallelism != 3:
        loads = [sum(len(elements) for elements in s.split.values()) for s in new]
        assert max(loads) - min(loads) <= 1
    else:
        assert new == old


def test_list_state_of_an_operator_survives_snapshot_and_restore() -> None:
    """H6"""
    backend = HeapOperatorStateBackend()
    positions = backend.get_list_state(ListStateDescriptor("positions"))
    positions.add({"split": 1})
    positions.add_all([{"split": 2}])
    everybody = backend.get_union_list_state("everybody")
    everybody.update([1, 2])
    rules = backend.get_broadcast_state(MapStateDescriptor("rules"))
    rules.put_all({"r": [1]})
    snapshot = backend.snapshot()
    rules.get("r").append(2)
    positions.clear()
    new = HeapOperatorStateBackend()
    assert not new.is_restored
    new.restore(snapshot)
    assert new.is_restored
    assert new.get_list_state("positions").get() == [{"split": 1}, {"split": 2}]
    assert new.get_union_list_state("everybody").get() == [1, 2]
    assert new.get_broadcast_state("rules").items() == [("r", [1])]


def test_state_without_elements_is_in_the_snapshot() -> None:
    """H6: every subtask tells its state, also an empty one."""
    backend = HeapOperatorStateBackend()
    backend.get_list_state("empty")
    assert backend.snapshot().split == {"empty": []}


def test_the_same_name_is_the_same_state_and_not_one_of_another_kind() -> None:
    """H2.4"""
    backend = HeapOperatorStateBackend()
    backend.get_list_state("x").add(1)
    assert backend.get_list_state("x").get() == [1]
    with pytest.raises(
        StateError, match="'x' is asked for as union list state, but it is list state"
    ):
        backend.get_union_list_state("x")
    with pytest.raises(StateError, match="not empty"):
        backend.get_broadcast_state("")


def test_none_is_no_element() -> None:
    state = HeapOperatorStateBackend().get_list_state("x")
    state.add(1)
    for write in (lambda: state.add(None), lambda: state.update([2, None])):
        with pytest.raises(StateError, match="'x' was given None"):
            write()
    assert state.get() == [1]


def test_broadcast_state_is_a_map_and_read_only_on_the_other_side() -> None:
    rules = HeapOperatorStateBackend().get_broadcast_state("rules")
    seen = rules.read_only()
    assert seen.is_empty()
    rules.put("a", 1)
    rules.put_all({"b": 2, "c": 3})
    rules.remove("c")
    rules.remove("nothing")
    assert (seen.get("a"), seen.get("z", 0), seen.contains("b"), seen.contains("c")) == (
        1,
        0,
        True,
        False,
    )
    assert (seen.keys(), seen.values(), seen.items()) == (["a", "b"], [1, 2], [("a", 1), ("b", 2)])
    for write in (
        lambda: seen.put("x", 1),
        lambda: seen.put_all({"x": 1}),
        lambda: seen.remove("a"),
        seen.clear,
    ):
        with pytest.raises(StateError, match=r"'rules' .*read-only"):
            write()
    assert rules.keys() == ["a", "b"]
    rules.clear()
    assert seen.is_empty()


# As bytes.


def test_operator_state_comes_back_from_its_bytes_type_for_type() -> None:
    snapshot = OperatorSnapshot(
        {"s": [(1, "a"), [2], {3}], "none": []}, {"u": [b"x"]}, {"b": {("k", 1): [1.5], 2: None}}
    )
    content = encode_operator_state(snapshot, Codec(), "totals")
    assert decode_operator_state(content, Codec(), "totals") == snapshot


def test_large_operator_state_is_encoded_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator_state, "ENCODED_AT_ONCE", 10)
    state = OperatorSnapshot(
        split={"s": list(range(95)), "empty": []},
        union={"u": [1]},
        broadcast={"b": {key: str(key) for key in range(40)}},
    )

    turns, encoding = 0, encode_in_parts(state, Codec(), "rules")
    with pytest.raises(StopIteration) as end:
        while True:
            next(encoding)
            turns += 1

    assert turns == 9 + 3 + 3
    assert end.value.value == encode_operator_state(state, Codec(), "rules")
    assert decode_operator_state(end.value.value, Codec(), "rules") == state


def test_bytes_of_operator_state_that_are_not_whole_are_refused_naming_the_operator() -> None:
    content = encode_operator_state(
        OperatorSnapshot({"s": [1, "a"]}, {"u": [2]}, {"b": {"k": [3]}}), Codec(), "totals"
    )
    for end in range(len(content)):
        with pytest.raises(RestoreError, match="'totals'"):
            decode_operator_state(content[:end], Codec(), "totals")
    for place in range(len(content)):
        changed = bytearray(content)
        changed[place] ^= 0xFF
        try:
            decode_operator_state(bytes(changed), Codec(), "totals")
        except RestoreError as error:
            assert "'totals'" in str(error)  # noqa: PT017  # It may also be taken for other values.


def test_operator_state_that_cannot_be_encoded_is_named() -> None:
    class Local:
        pass

    with pytest.raises(TypeNotSupported, match=r"operator 'totals', operator state 's'.*Local"):
        encode_operator_state(OperatorSnapshot({"s": [Local()]}), Codec(), "totals")


class Uncopied:
    """Cannot be copied."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("there is one of it")


def test_uncopyable_value_is_refused_by_name_when_it_is_written() -> None:
    """Not where the view is taken: that would fail the task, which would restart for ever."""
    backend = HeapOperatorStateBackend()
    backend.get_list_state("one").update([Uncopied()])
    with pytest.raises(
        TypeNotSupported, match=r"operator 'keeps', operator state 'one': .*Uncopied cannot travel"
    ):
        encode_operator_state(backend.snapshot(), Codec(), "keeps")


class Locked:
    """Travels by functions of its own, and cannot be copied for what it holds besides."""

    def __init__(self, number: int) -> None:
        self.number, self.lock = number, threading.Lock()


@pytest.mark.parametrize("kind", ["list", "union", "broadcast"])
def test_encodable_but_uncopyable_value_is_refused_by_name(kind: str) -> None:
    """F1: the value would be written late, with the changes by elements from behind the barrier."""
    types = TypeRegistry()
    types.register(Locked, encode=lambda value: value.number, decode=Locked)
    backend = HeapOperatorStateBackend()
    one = Locked(1)
    if kind == "broadcast":
        backend.get_broadcast_state("one").put("key", one)
    else:
        (backend.get_list_state if kind == "list" else backend.get_union_list_state)("one").update(
            [one]
        )
    view = backend.snapshot()
    one.number = 2  # By the next element, while the checkpoint is written.
    with pytest.raises(
        TypeNotSupported,
        match=(
            r"operator 'keeps', operator state 'one': a value cannot be copied .*lock.* "
            r"__deepcopy__"
        ),
    ):
        encode_operator_state(view, Codec(types), "keeps")


def test_unclaimed_restored_lists_are_known() -> None:
    backend = HeapOperatorStateBackend()
    backend.restore(
        OperatorSnapshot({"a": [1], "b": [2], "empty": []}, {"c": [3]}, {"later": {"x": 1}})
    )
    assert backend.unclaimed() == ["a", "b", "c"]
    backend.get_list_state("a")
    backend.get_union_list_state("c")
    assert backend.unclaimed() == ["b"]
    backend.forget("b")
    assert "b" not in backend.snapshot().split
