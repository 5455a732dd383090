"""The assignment of records to consumers: every strategy, and errors of user functions that name
the record.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from operator import itemgetter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioflow.core.elements import MIN_WATERMARK, RecordBatch
from aioflow.core.errors import TypeNotSupported
from aioflow.core.keygroups import key_group, subtask_for_group
from aioflow.graph.stream_graph import Partitioning, ShipStrategy
from aioflow.task.partitioners import Partitioner, create_partitioner


def partitioner(
    strategy: ShipStrategy,
    consumers: int,
    function: Any = None,
    *,
    subtask: int = 0,
    seed: int = 0,
    keys_alone: bool = False,
    taken: tuple[Any, ...] | None = None,
) -> Partitioner:
    return create_partitioner(
        Partitioning(strategy, function, keys_alone=keys_alone, taken=taken),
        consumers,
        max_parallelism=128,
        subtask_index=subtask,
        rng=random.Random(seed),
        place="'producer'",
    )


def stamped(values: list[Any]) -> RecordBatch:
    """Times and watermarks that tell which record they belong to."""
    return RecordBatch(
        values,
        [10 * i for i in range(len(values))],
        None,
        [10 * i - 1 for i in range(len(values))],
        10 * len(values),
    )


def got(split: list[tuple[int, RecordBatch]]) -> dict[int, list[Any]]:
    return {index: part.values for index, part in split}


@pytest.mark.parametrize(
    "strategy",
    [ShipStrategy.FORWARD, ShipStrategy.REBALANCE, ShipStrategy.SHUFFLE, ShipStrategy.BROADCAST],
)
def test_a_single_consumer_gets_the_batch_itself(strategy: ShipStrategy) -> None:
    batch = stamped([1, 2])
    ((index, part),) = partitioner(strategy, 1).split(batch)
    assert (index, part) == (0, batch)


def test_global_sends_everything_to_the_first() -> None:
    assert got(partitioner(ShipStrategy.GLOBAL, 4).split(stamped([1, 2]))) == {0: [1, 2]}


def test_broadcast_sends_everything_to_all() -> None:
    assert got(partitioner(ShipStrategy.BROADCAST, 3).split(stamped([1, 2]))) == {
        0: [1, 2],
        1: [1, 2],
        2: [1, 2],
    }


@pytest.mark.parametrize("strategy", [ShipStrategy.REBALANCE, ShipStrategy.RESCALE])
@given(
    consumers=st.integers(2, 7),
    rounds=st.integers(1, 5),
    cuts=st.lists(st.integers(1, 9), max_size=6),
)
def test_rebalance_gives_exactly_equal_shares_however_it_is_cut_into_batches(
    strategy: ShipStrategy, consumers: int, rounds: int, cuts: list[int]
) -> None:
    """C6.6."""
    one, values = partitioner(strategy, consumers), list(range(consumers * rounds))
    counts: Counter[int] = Counter()
    order: list[int] = []
    while values:
        size = cuts.pop() if cuts else len(values)
        batch, values = values[:size], values[size:]
        parts = one.split(stamped(batch))
        counts.update({index: len(part.values) for index, part in parts})
        target = {value: index for index, part in parts for value in part.values}
        order += [target[value] for value in batch]
    assert set(counts.values()) == {rounds}
    assert order == [i % consumers for i in range(len(order))]


def test_rebalance_begins_elsewhere_for_each_producer() -> None:
    """C6.6: the first channel is not always 0 across subtasks."""
    firsts = [
        partitioner(ShipStrategy.REBALANCE, 3, subtask=i).split(stamped([1]))[0][0]
        for i in range(4)
    ]
    assert firsts == [0, 1, 2, 0]


def test_shuffle_loses_nothing_and_repeats_with_its_seed() -> None:
    def run(seed: int) -> dict[int, list[Any]]:
        return got(partitioner(ShipStrategy.SHUFFLE, 3, seed=seed).split(stamped(list(range(100)))))

    assert sorted(value for part in run(1).values() for value in part) == list(range(100))
    assert run(1) == run(1)
    assert run(1) != run(2)


@given(
    st.integers(2, 6),
    st.lists(
        st.integers(0, 30) | st.text(max_size=3) | st.tuples(st.integers(0, 3), st.booleans()),
        max_size=40,
    ),
)
def test_a_key_goes_where_its_group_goes(consumers: int, keys: list[Any]) -> None:
    """C6.5."""
    parts = partitioner(ShipStrategy.HASH, consumers, lambda record: record[0]).split(
        stamped([(key, i) for i, key in enumerate(keys)])
    )
    for index, part in parts:
        assert part.keys == [record[0] for record in part.values]
        assert all(
            subtask_for_group(key_group(key, 128), consumers, 128) == index
            for key in part.keys or ()
        )
    assert sum(len(part.values) for _, part in parts) == len(keys)


STRATEGIES: list[tuple[ShipStrategy, Callable[..., Any] | None]] = [
    (ShipStrategy.REBALANCE, None),
    (ShipStrategy.SHUFFLE, None),
    (ShipStrategy.BROADCAST, None),
    (ShipStrategy.HASH, lambda x: x),
    (ShipStrategy.CUSTOM, lambda x, n: x % n),
]


@pytest.mark.parametrize(
    ("strategy", "function"), STRATEGIES, ids=lambda value: getattr(value, "name", "")
)
@pytest.mark.parametrize("consumers", [2, 3])
def test_times_and_watermarks_go_with_their_records_in_order(
    strategy: ShipStrategy, function: Any, consumers: int
) -> None:
    for _, part in partitioner(strategy, consumers, function).split(stamped(list(range(20)))):
        assert part.values == sorted(part.values)
        assert part.timestamps == [10 * value for value in part.values]
        assert part.watermarks == [10 * value - 1 for value in part.values]


@pytest.mark.parametrize(
    ("strategy", "function"), STRATEGIES, ids=lambda value: getattr(value, "name", "")
)
def test_parts_without_records_are_left_out_and_the_batch_is_not_changed(
    strategy: ShipStrategy, function: Any
) -> None:
    batch = RecordBatch([4])
    parts = partitioner(strategy, 3, function).split(batch)
    assert all(part.values for _, part in parts)
    assert (batch.values, batch.keys, batch.watermark) == ([4], None, MIN_WATERMARK)


@pytest.mark.parametrize("consumers", [1, 2, 3])
@pytest.mark.parametrize(
    "key", [lambda record: record[0], lambda record: record, str], ids=["field", "itself", "called"]
)
def test_keys_that_travel_alone_go_where_their_records_would(
    consumers: int, key: Callable[[Any], Any]
) -> None:
    batch = stamped([(i % 7, i) for i in range(40)])
    whole = partitioner(ShipStrategy.HASH, consumers, key).split(batch)
    alone = partitioner(ShipStrategy.HASH, consumers, key, keys_alone=True).split(batch)
    assert [(i, part.keys, part.timestamps, part.watermarks) for i, part in alone] == [
        (i, part.keys, part.timestamps, part.watermarks) for i, part in whole
    ]
    assert all(part.values is part.keys for _, part in alone)


@pytest.mark.parametrize("consumers", [2, 3])
@pytest.mark.parametrize(
    "take", [lambda row: row[1], lambda row: str(row[1])], ids=["a body", "a call"]
)
@pytest.mark.parametrize("carried", ["all", "nothing"])
def test_projected_values_go_where_their_records_would(
    consumers: int, take: Callable[[Any], Any], carried: str
) -> None:
    rows = [(i % 7, i) for i in range(40)]
    batch = stamped(rows) if carried == "all" else RecordBatch(rows)
    whole = partitioner(ShipStrategy.HASH, consumers, itemgetter(0)).split(batch)
    taken = partitioner(ShipStrategy.HASH, consumers, itemgetter(0), taken=(take,)).split(batch)
    nothing = partitioner(ShipStrategy.HASH, consumers, itemgetter(0), taken=()).split(batch)
    assert not any(part.taken for _, part in whole)
    for parts, values in (
        (taken, lambda part: list(map(take, part.values))),
        (nothing, lambda part: part.keys),
    ):
        assert [
            (i, part.values, part.keys, part.timestamps, part.watermarks, part.taken)
            for i, part in parts
        ] == [
            (i, values(part), part.keys, part.timestamps, part.watermarks, True)
            for i, part in whole
        ]


def test_records_that_cannot_be_projected_go_whole() -> None:
    """The consumer reports the error, or ignores it: the record may be late."""
    one = partitioner(ShipStrategy.HASH, 2, itemgetter(0), taken=(itemgetter(1),))
    rows: list[Any] = [(1, 2), (1,), (1, 3)]
    ((_, part),) = one.split(stamped(rows))
    assert (part.values, part.taken) == (rows, False)
    ((_, part),) = one.split(stamped(rows[:1]))
    assert (part.values, part.taken) == ([2], True)
    with pytest.raises(IndexError) as caught:
        one.split(stamped([()]))
    assert caught.value.__notes__ == ["aioflow: in key_by after 'producer', at record ()"]


def test_records_that_are_their_own_keys_go_whole() -> None:
    ((_, part),) = partitioner(ShipStrategy.HASH, 2, lambda x: x, taken=()).split(stamped(["a"]))
    assert (part.values, part.taken) == (["a"], False)


@pytest.mark.parametrize("consumers", [1, 2, 3])
@pytest.mark.parametrize("last", [3, 9])
def test_an_error_of_the_key_function_names_operator_and_record(consumers: int, last: int) -> None:
    def key(x: int) -> int:
        if x == 3:
            raise ValueError("no key")
        return x

    with pytest.raises(ValueError, match="no key") as caught:
        partitioner(ShipStrategy.HASH, consumers, key).split(stamped(list(range(last + 1))))
    assert caught.value.__notes__ == ["aioflow: in key_by after 'producer', at record 3"]


@pytest.mark.parametrize("consumers", [1, 2, 3])
@pytest.mark.parametrize(
    "key", [None, float("nan"), [1], {}, object()], ids=lambda key: type(key).__name__
)
def test_a_key_that_cannot_be_one_is_refused_at_its_record(consumers: int, key: object) -> None:
    with pytest.raises((TypeNotSupported, TypeError, ValueError)) as caught:
        partitioner(ShipStrategy.HASH, consumers, lambda x: key if x == 2 else x).split(
            stamped([1, 2, 3])
        )
    assert "at record 2" in caught.value.__notes__[0]


@pytest.mark.parametrize("target", [-1, 3, "x", None, 1.5, True])
def test_a_custom_target_out_of_range_is_refused_at_its_record(target: object) -> None:
    with pytest.raises(
        ValueError, match=f"partition_custom gave {target!r}, expected an int from 0 to 2"
    ) as caught:
        partitioner(ShipStrategy.CUSTOM, 3, lambda x, n: target).split(stamped([7]))
    assert caught.value.__notes__ == ["aioflow: in partition_custom after 'producer', at record 7"]


def test_custom_gets_the_value_and_the_number_of_consumers() -> None:
    seen = []

    def choose(value: int, consumers: int) -> int:
        seen.append((value, consumers))
        return value % consumers

    assert got(partitioner(ShipStrategy.CUSTOM, 2, choose).split(stamped([1, 2, 3]))) == {
        0: [2],
        1: [1, 3],
    }
    assert seen == [(1, 2), (2, 2), (3, 2)]
