"""The estimated size of values that no page can hold."""

from __future__ import annotations

import random
import sys
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass
from datetime import date
from enum import Enum
from typing import Any
from uuid import UUID

import pytest

from aioflow.core.elements import RecordBatch
from aioflow.network.batch_size import DEPTH_MAX, batch_bytes, value_size

BIG = bytes(1_000_000)


class AnyName(dict[str, Any]):
    """A dict whose entries are attributes too, and which knows no AttributeError."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class Loud:
    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)

    def __sizeof__(self) -> int:
        raise RuntimeError("no size")


class Odd:
    """A class with an attribute `nbytes` of its own meaning."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes


class Debt:
    nbytes = -1_000_000


class OneSlot:
    __slots__ = "data"

    def __init__(self, data: bytes) -> None:
        self.data = data


class Hidden:
    __slots__ = ("__data", "__unset")

    def __init__(self, data: bytes) -> None:
        self.__data = data


@dataclass(slots=True)
class Slots:
    number: int
    data: bytes


@pytest.mark.parametrize(
    "value",
    [
        (1, BIG),
        {"a": BIG},
        defaultdict(bytes, a=BIG),
        OrderedDict(a=BIG),
        deque([BIG]),
        AnyName(a=BIG),
        Slots(1, BIG),
        OneSlot(BIG),
        Hidden(BIG),
        memoryview(BIG),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_counts_with_what_it_holds(value: object) -> None:
    assert len(BIG) < value_size(value) < len(BIG) + 4096


@pytest.mark.parametrize("value", [Loud(), Debt(), Odd(-5)], ids=["error", "debt", "odd"])
def test_code_of_a_class_neither_fails_the_measurement_nor_makes_it_negative(value: object) -> None:
    assert 0 < value_size(value) < 4096


def test_a_graph_is_not_walked_along_all_of_its_paths() -> None:
    visits = 0

    class Node:
        def __init__(self) -> None:
            self.near: list[Node] = []

        def __sizeof__(self) -> int:
            nonlocal visits
            visits += 1
            return 64

    nodes = [Node() for _ in range(30)]
    for node in nodes:
        node.near = nodes
    assert value_size(nodes[0]) > 0
    assert visits <= 30 * DEPTH_MAX * 2


def tree(draw: random.Random, depth: int) -> tuple[Any, int]:
    """Returns a value like those of JSON, and its size. The items of one list are alike."""
    if depth == 0:
        leaf = draw.choice(["x" * draw.choice([1, 30, 300]), draw.randrange(10**9), 1.5])
        return leaf, sys.getsizeof(leaf)
    count = draw.choice([1, 3, 12, 40])
    item, size = tree(draw, depth - 1)
    if draw.random() < 0.5:
        names = {f"{draw.randrange(10**9)}-{number}": item for number in range(count)}
        return names, sys.getsizeof(names) + sum(map(sys.getsizeof, names)) + count * size
    return [item] * count, sys.getsizeof([item] * count) + count * size


def test_trees_count_with_about_what_they_hold() -> None:
    draw = random.Random(1)
    for _ in range(500):
        value, size = tree(draw, draw.randint(1, 5))
        if size > 2_000:
            assert size / 4 < value_size(value) < size * 2


def test_the_keys_of_a_large_dict_count() -> None:
    names = {f"{number:0100}": number for number in range(1_000)}
    size = sys.getsizeof(names) + sum(map(sys.getsizeof, (*names, *names.values())))
    assert size / 2 < value_size(names) < size * 2


class Kind(Enum):
    BUY = "buy"


@pytest.mark.parametrize(
    "shared",
    [Kind.BUY, UUID(int=7), Kind, len, value_size, sys],
    ids=lambda one: type(one).__name__,
)
def test_objects_of_the_program_do_not_count_for_each_record(shared: object) -> None:
    assert value_size((shared, 1)) < 256
    assert value_size({"shared": shared}) < 512


def test_a_batch_of_bytes_is_measured_and_one_that_begins_with_bytes_is_estimated() -> None:
    def batch(*values: Any) -> RecordBatch:
        return RecordBatch(list(values))

    assert batch_bytes(batch(b"", BIG), 10) > len(BIG)
    for other in (7, date(2024, 1, 1), BIG.decode(), [BIG]):
        assert batch_bytes(batch(b"", other), 10) == batch_bytes(batch(other, b""), 10)
