"""Copies that a snapshot holds: nothing in them can be changed by the job, and what cannot be
changed is shared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from aioflow.core.errors import RestoreError, TypeNotSupported
from aioflow.core.keygroups import KeyGroupRange
from aioflow.core.states import ValueStateDescriptor
from aioflow.state.snapshot import InlineState, check_max_parallelism, frozen_copy
from tests.state.snapshots import closing_backends, made, run_now


@dataclass
class Point:
    x: list[int]


@pytest.mark.parametrize("value", [None, True, 5, 2**80, 1.5, "text", b"bytes", (1, "a", None), ()])
def test_immutable_values_are_shared(value: Any) -> None:
    assert frozen_copy(value) is value


@pytest.mark.parametrize(
    "value",
    [
        [1, 2],
        {"a": 1},
        [[1], [2]],
        {"a": {"b": [1]}},
        ([1], 2),
        {1, 2},
        bytearray(b"x"),
        Point([1]),
        [Point([1])],
        (Point([1]),),
    ],
)
def test_mutable_values_are_copied_all_the_way_down(value: Any) -> None:
    copied = frozen_copy(value)
    assert copied == value
    assert type(copied) is type(value)
    assert not (set(mutables(copied)) & set(mutables(value)))


def mutables(value: Any) -> list[int]:
    """Identities of everything in `value` that can be changed."""
    if isinstance(value, tuple):
        return [i for item in value for i in mutables(item)]
    if isinstance(value, list):
        return [id(value), *(i for item in value for i in mutables(item))]
    if isinstance(value, dict):
        return [id(value), *(i for item in value.values() for i in mutables(item))]
    if isinstance(value, Point):
        return [id(value), id(value.x)]
    return [id(value)] if isinstance(value, set | bytearray) else []


def test_snapshot_of_another_max_parallelism_is_named() -> None:
    check_max_parallelism(128, 128, "keyed state")
    with pytest.raises(
        RestoreError,
        match=r"keyed state was written with max_parallelism=64, .* has 128.*set it to 64 again",
    ):
        check_max_parallelism(64, 128, "keyed state")


class Uncopyable:
    def __deepcopy__(self, memo: Any) -> Any:
        raise OSError("it holds a socket")


@pytest.mark.parametrize(
    "deed", [lambda state: state.value(), lambda state: state.update(2)], ids=["read", "write"]
)
def test_a_value_that_cannot_be_copied_stops_the_snapshot_and_not_its_function(
    deed: Any,
) -> None:
    """The function uses it while the snapshot is being written: an error there would restart the
    job for ever.
    """
    with closing_backends():
        backend = made(
            "heap",
            max_parallelism=8,
            key_group_range=KeyGroupRange(0, 7),
            now_ms=lambda: 0,
            operator="keeps",
        )
        state = backend.get_state(ValueStateDescriptor("mine"))
        backend.set_current_key("k")
        state.update(Uncopyable())
        snapshot = backend.begin_snapshot(1)
        deed(state)
        with pytest.raises(
            TypeNotSupported, match=r"state 'mine', key '?k'?.*OSError: it holds a socket"
        ):
            run_now(snapshot.write(InlineState()))
