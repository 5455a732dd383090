"""Assignment of state at a restore: key groups, operator state and splits, from any parallelism to
any other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioflow.checkpoint.assignment import OperatorRestore, TaskRestore, assign_splits, plan_restore
from aioflow.checkpoint.completed import (
    HEAD_BYTES,
    ChannelSide,
    ChannelStateHandle,
    CheckpointedOperator,
    CheckpointKind,
    CompletedCheckpoint,
    OperatorStateHandle,
    SubtaskState,
)
from aioflow.checkpoint.plan import CheckpointedVertex, VertexInput
from aioflow.checkpoint.source_state import SplitState
from aioflow.core.errors import RestoreError
from aioflow.core.keygroups import KeyGroupRange, range_for_subtask
from aioflow.state.snapshot import CANONICAL, KeyedStateHandle, StateFile

MAX = 128


def keyed(index: int, parallelism: int, max_parallelism: int = MAX) -> KeyedStateHandle:
    groups = range_for_subtask(index, parallelism, max_parallelism)
    return KeyedStateHandle(
        CANONICAL, max_parallelism, groups.start, groups.end, (StateFile(f"state/{index}", 1, b""),)
    )


def blob(name: str) -> StateFile:
    return StateFile(f"state/{name}", 1, b"")


def an_operator(uid: str, parallelism: int, max_parallelism: int = MAX) -> CheckpointedOperator:
    return CheckpointedOperator(
        uid=uid, name=uid.title(), parallelism=parallelism, max_parallelism=max_parallelism
    )


def a_vertex(vertex_id: int, *operators: CheckpointedOperator) -> CheckpointedVertex:
    return CheckpointedVertex(vertex_id=vertex_id, name=operators[0].name, operators=operators)


def counted(parallelism: int, **more: Any) -> CompletedCheckpoint:
    """Checkpoint 7 of an operator `count` with keyed state in every subtask."""
    subtasks = {
        ("count", i): SubtaskState((OperatorStateHandle("count", keyed(i, parallelism)),))
        for i in range(parallelism)
    }
    return CompletedCheckpoint(
        checkpoint_id=7,
        flow="counts",
        operators=(an_operator("count", parallelism),),
        subtasks=subtasks,
        **more,
    )


GOLDEN = {
    (1, 1): [[0]],
    (1, 2): [[0], [0]],
    (1, 3): [[0], [0], [0]],
    (2, 1): [[0, 1]],
    (2, 3): [[0], [0, 1], [1]],
    (3, 2): [[0, 1], [1, 2]],
    (3, 4): [[0], [0, 1], [1, 2], [2]],
    (4, 2): [[0, 1], [2, 3]],
    (4, 3): [[0, 1], [1, 2], [2, 3]],
    (4, 8): [[0], [0], [1], [1], [2], [2], [3], [3]],
    (5, 8): [[0], [0, 1], [1], [1, 2], [2, 3], [3], [3, 4], [4]],
    (8, 1): [[0, 1, 2, 3, 4, 5, 6, 7]],
    (8, 3): [[0, 1, 2], [2, 3, 4, 5], [5, 6, 7]],
    (8, 5): [[0, 1], [1, 2, 3], [3, 4], [4, 5, 6], [6, 7]],
    (8, 8): [[0], [1], [2], [3], [4], [5], [6], [7]],
}
"""(former, new parallelism) -> the former subtasks whose files each new subtask reads."""


@pytest.mark.parametrize(("former", "new"), list(GOLDEN))
def test_new_subtask_reads_the_files_of_those_whose_key_groups_it_takes_over(
    former: int, new: int
) -> None:
    plan = plan_restore(counted(former), [a_vertex(3, an_operator("count", new))])
    read = [
        [int(k.files[0].name[6:]) for k in plan.tasks[3, i].operators["count"].keyed]
        for i in range(new)
    ]
    assert read == GOLDEN[former, new]


@pytest.mark.parametrize("max_parallelism", [8, 100, 128])
@pytest.mark.parametrize("former", range(1, 9))
@pytest.mark.parametrize("new", range(1, 9))
def test_every_key_group_goes_to_exactly_one_new_subtask(
    former: int, new: int, max_parallelism: int
) -> None:
    handles = [keyed(i, former, max_parallelism) for i in range(former)]
    subtasks = {
        ("count", i): SubtaskState((OperatorStateHandle("count", handles[i]),))
        for i in range(former)
    }
    operators = (an_operator("count", former, max_parallelism),)
    checkpoint = CompletedCheckpoint(checkpoint_id=7, operators=operators, subtasks=subtasks)
    plan = plan_restore(checkpoint, [a_vertex(0, an_operator("count", new, max_parallelism))])
    taken: Counter[int] = Counter()
    for index in range(new):
        own = range_for_subtask(index, new, max_parallelism)
        for handle in plan.tasks[0, index].operators["count"].keyed:
            met = own.intersection(KeyGroupRange(handle.first_group, handle.last_group))
            assert met is not None
            taken.update(met)
    assert taken == Counter(range(max_parallelism))


def test_operator_state_goes_to_everybody_in_the_order_of_the_former_subtasks() -> None:
    subtasks = {
        ("map", 1): SubtaskState((OperatorStateHandle("map", operator=blob("b")),)),
        ("map", 0): SubtaskState((OperatorStateHandle("map", operator=blob("a")),)),
        ("map", 2): SubtaskState((OperatorStateHandle("map"),)),
    }
    checkpoint = CompletedCheckpoint(
        checkpoint_id=7, operators=(an_operator("map", 3),), subtasks=subtasks
    )
    plan = plan_restore(checkpoint, [a_vertex(0, an_operator("map", 2))])
    expected = TaskRestore(7, {"map": OperatorRestore((), (blob("a"), blob("b"), None))})
    assert plan.tasks == {(0, 0): expected, (0, 1): expected}


def test_state_is_found_wherever_its_operator_stands_now() -> None:
    """The operator was chained behind a map.

    Now it heads a chain, and a new operator has joined.
    """
    subtasks = {
        ("map", i): SubtaskState(
            (OperatorStateHandle("map"), OperatorStateHandle("count", keyed(i, 2)))
        )
        for i in range(2)
    }
    checkpoint = CompletedCheckpoint(
        checkpoint_id=7,
        operators=(an_operator("map", 2), an_operator("count", 2)),
        subtasks=subtasks,
    )
    plan = plan_restore(
        checkpoint,
        [
            a_vertex(0, an_operator("map", 1)),
            a_vertex(1, an_operator("count", 2), an_operator("new", 2)),
        ],
    )
    assert plan.tasks[0, 0].operators == {"map": OperatorRestore()}
    assert plan.tasks[1, 1].operators == {"count": OperatorRestore((keyed(1, 2),))}


def test_subtask_without_a_share_counts_as_restored() -> None:
    """Every subtask of the job has something to restore from, if only the number of the
    checkpoint.
    """
    plan = plan_restore(CompletedCheckpoint(checkpoint_id=7), [a_vertex(0, an_operator("new", 2))])
    assert plan.tasks == {(0, 0): TaskRestore(7), (0, 1): TaskRestore(7)}


def test_state_of_an_operator_that_is_gone_refuses_the_restore() -> None:
    flow = [a_vertex(0, an_operator("other", 2))]
    with pytest.raises(RestoreError) as refused:
        plan_restore(counted(2), flow)
    assert str(refused.value) == (
        "checkpoint 7 of flow 'counts' holds state of operators that the flow does not have: "
        "'Count' (uid count); "
        "give them their uids back with uid=, or begin without that state with "
        "allow_non_restored=True"
    )
    assert plan_restore(counted(2), flow, allow_non_restored=True).tasks[0, 0] == TaskRestore(
        7, allow_non_restored=True
    )


def test_refusal_points_to_a_new_operator_of_the_same_name() -> None:
    renamed = CheckpointedOperator(uid="count-2", name="Count", parallelism=2, max_parallelism=MAX)
    with pytest.raises(
        RestoreError,
        match=r"'Count' \(uid count, the flow has a new one of that name with uid count-2\)",
    ):
        plan_restore(
            counted(2, kind=CheckpointKind.SAVEPOINT, location="file:///sp"), [a_vertex(0, renamed)]
        )


def test_stateless_operator_that_vanished_refuses_nothing() -> None:
    subtasks = {("map", 0): SubtaskState((OperatorStateHandle("map"),))}
    checkpoint = CompletedCheckpoint(
        checkpoint_id=7, operators=(an_operator("map", 1),), subtasks=subtasks
    )
    assert plan_restore(checkpoint, [a_vertex(0, an_operator("new", 1))]).tasks == {
        (0, 0): TaskRestore(7)
    }


def test_other_number_of_key_groups_is_refused() -> None:
    with pytest.raises(RestoreError) as refused:
        plan_restore(counted(2), [a_vertex(0, an_operator("count", 2, 256))])
    assert str(refused.value) == (
        "checkpoint 7 of flow 'counts': the keyed state of operator 'Count' (uid count) has 128 "
        "key groups, "
        "the flow has max_parallelism 256; the number is fixed for the life of the state: build "
        "the flow with max_parallelism=128"
    )


def test_number_of_key_groups_does_not_matter_without_keyed_state() -> None:
    subtasks = {("map", 0): SubtaskState((OperatorStateHandle("map", operator=blob("a")),))}
    checkpoint = CompletedCheckpoint(
        checkpoint_id=7, operators=(an_operator("map", 1),), subtasks=subtasks
    )
    assert plan_restore(checkpoint, [a_vertex(0, an_operator("map", 1, 256))]).tasks[
        0, 0
    ].operators["map"].operator == (blob("a"),)


@pytest.mark.parametrize(
    ("subtasks", "message"),
    [
        ({("count", 0): "count", ("elsewhere", 0): "count"}, "has two states for subtask 0"),
        ({("count", 5): "count"}, "has a subtask 5, expected 0 to 1"),
        (
            {("count", 0): "unknown"},
            "subtask 0 of count has state of an operator unknown that is not in its list of "
            "operators",
        ),
    ],
)
def test_metadata_that_contradicts_itself_is_refused(
    subtasks: dict[tuple[str, int], str], message: str
) -> None:
    states = {
        key: SubtaskState((OperatorStateHandle(uid, keyed(0, 2)),)) for key, uid in subtasks.items()
    }
    checkpoint = CompletedCheckpoint(
        checkpoint_id=7, operators=(an_operator("count", 2),), subtasks=states
    )
    with pytest.raises(RestoreError, match=message):
        plan_restore(checkpoint, [a_vertex(0, an_operator("count", 2))])


def test_key_group_in_two_subtasks_is_refused() -> None:
    states = {
        ("count", i): SubtaskState((OperatorStateHandle("count", keyed(0, 2)),)) for i in range(2)
    }
    checkpoint = CompletedCheckpoint(
        checkpoint_id=7, operators=(an_operator("count", 2),), subtasks=states
    )
    with pytest.raises(RestoreError, match="has key group 0 in two subtasks"):
        plan_restore(checkpoint, [a_vertex(0, an_operator("count", 2))])


def in_flight(parallelism: int) -> CompletedCheckpoint:
    def channels(index: int) -> tuple[ChannelStateHandle, ...]:
        """One channel of each kind: from the first producer, at the consumer, and before the
        operator.
        """
        read = ChannelStateHandle(4, ChannelSide.INPUT, 0, blob(f"input-{index}"))
        return (read, ChannelStateHandle(-1, ChannelSide.CHAIN, 0, blob(f"chain-{index}")))

    subtasks = {
        ("count", i): SubtaskState(
            (OperatorStateHandle("count", keyed(i, parallelism)),), channels(i)
        )
        for i in range(parallelism)
    }
    outputs = tuple(
        ChannelStateHandle(4, ChannelSide.OUTPUT, i, blob(f"output-{i}"))
        for i in range(parallelism)
    )
    subtasks["map", 0] = SubtaskState((OperatorStateHandle("map"),), outputs)
    operators = (an_operator("map", 1), an_operator("count", parallelism))
    return CompletedCheckpoint(
        checkpoint_id=7, flow="counts", operators=operators, subtasks=subtasks
    )


def counting(parallelism: int, *, keyed: bool = True) -> list[CheckpointedVertex]:
    """A map and, behind an exchange, a count."""
    read = VertexInput(0, edge_id=4, keyed=keyed, may_be_overtaken=True)
    return [
        a_vertex(0, an_operator("map", 1)),
        replace(a_vertex(1, an_operator("count", parallelism)), inputs=(read,)),
    ]


def names(files: Iterable[StateFile]) -> list[str]:
    return [file.name.removeprefix("state/") for file in files]


def dealt(
    parallelism: int, *, keyed: bool = True
) -> list[list[tuple[int, list[list[str]], bool, bool]]]:
    """For each new count, the shares of each former count: its files, whether only its share,
    whether also state without keys.
    """
    plan = plan_restore(in_flight(2), counting(parallelism, keyed=keyed))
    return [
        [
            (
                one.subtask,
                [*(names(c.files) for c in one.channels), names(f for _, f in one.chain)],
                one.dealt,
                one.takes_rest,
            )
            for one in plan.tasks[1, i].in_flight
        ]
        for i in range(parallelism)
    ]


def test_data_in_flight_goes_back_to_where_it_was() -> None:
    """F6: data that waited at the producer comes behind data that waited at the consumer."""
    assert dealt(2) == [
        [(0, [["input-0", "output-0"], ["chain-0"]], False, True)],
        [(1, [["input-1", "output-1"], ["chain-1"]], False, True)],
    ]


@pytest.mark.parametrize("parallelism", range(1, 5))
def test_data_in_flight_is_read_by_all_that_have_keys_of_it_and_its_rest_taken_once(
    parallelism: int,
) -> None:
    """F6: a subtask reads former ones whose key groups meet its own; without keys one subtask
    reads each.
    """
    everywhere = dealt(parallelism)
    for index, found in enumerate(everywhere):
        own = range_for_subtask(index, parallelism, 128)
        for former in range(2):
            meets = own.intersection(range_for_subtask(former, 2, 128)) is not None
            takes = [one for one in found if one[0] == former]
            assert len(takes) == 1 if meets else all(rest for _, _, _, rest in takes)
            assert all(share == (parallelism != 2) for _, _, share, _ in takes)
    for former in range(2):
        assert sum(rest for found in everywhere for one, _, _, rest in found if one == former) == 1
        without = [
            one
            for found in dealt(parallelism, keyed=False)
            for one, _, _, _ in found
            if one == former
        ]
        assert without == [former]


def test_data_in_flight_is_distributed_although_the_exchange_is_one_to_one_now() -> None:
    """F6: an exchange by turns becomes one from each to its own when both sides are as many.

    What was on its way is not lost with it.
    """
    read = VertexInput(0, ((0,),), edge_id=4)
    vertices = [
        a_vertex(0, an_operator("map", 1)),
        replace(a_vertex(1, an_operator("count", 1)), inputs=(read,)),
    ]
    found = plan_restore(in_flight(2), vertices).tasks[1, 0].in_flight
    assert [names(file for c in one.channels for file in c.files) for one in found] == [
        ["input-0", "output-0"],
        ["input-1", "output-1"],
    ]
    assert all(one.takes_rest for one in found)


def test_event_time_alone_is_no_data_in_flight() -> None:
    """F6.1: a checkpoint that was aligned in time may be restored to a flow that was changed."""
    channel = ChannelStateHandle(
        0, ChannelSide.RESTORED, 0, StateFile("", HEAD_BYTES, b"", b"x" * HEAD_BYTES)
    )
    subtasks = {("count", 0): SubtaskState((OperatorStateHandle("count"),), (channel,))}
    checkpoint = CompletedCheckpoint(
        checkpoint_id=7, operators=(an_operator("count", 1),), subtasks=subtasks
    )
    changed = [a_vertex(0, an_operator("count", 1)), a_vertex(1, an_operator("new", 1))]
    assert plan_restore(checkpoint, changed).tasks[0, 0].in_flight == ()


@pytest.mark.parametrize(
    "vertices",
    [
        [a_vertex(0, an_operator("count", 2))],
        [a_vertex(0, an_operator("map", 1)), a_vertex(1, an_operator("count", 2))],
        [a_vertex(0, an_operator("map", 2), an_operator("count", 2))],
    ],
)
def test_data_in_flight_refuses_another_shape(vertices: list[CheckpointedVertex]) -> None:
    with pytest.raises(
        RestoreError,
        match=(
            r"checkpoint 7 of flow 'counts' holds data in flight .* or restore a savepoint, "
            r"which holds none"
        ),
    ):
        plan_restore(in_flight(2), vertices)


@pytest.mark.parametrize("joined", [False, True])
def test_data_in_flight_refuses_tasks_that_depend_on_the_parallelism_and_says_what_to_do(
    joined: bool,
) -> None:
    """F6: at equal parallelism two operators share a task."""
    apart = in_flight(2)
    shared = replace(
        apart,
        operators=(an_operator("map", 2), an_operator("count", 2)),
        subtasks={
            ("map", i): replace(
                apart.subtasks["count", i],
                operators=(OperatorStateHandle("map"), OperatorStateHandle("count")),
            )
            for i in range(2)
        },
    )
    vertices = [a_vertex(0, an_operator("map", 2)), a_vertex(1, an_operator("count", 3))]
    if joined:
        vertices = [a_vertex(0, an_operator("map", 3), an_operator("count", 3))]
    tasks = ["a task of its own", "one task with the operator before it"]
    after, then = reversed(tasks) if joined else tasks
    with pytest.raises(
        RestoreError,
        match=(
            rf"at another parallelism 'Count' \(uid count\) has {after}, formerly {then}; start "
            r"at the former parallelism, where 'Count' had 2, and change it with job.rescale\(\), "
            r"which keeps the tasks, or restore a savepoint, which holds none"
        ),
    ):
        plan_restore(apart if joined else shared, vertices)


def test_data_in_flight_keeps_its_target_though_its_producer_now_reaches_another_subtask() -> None:
    """F6: each producer reached every consumer, and reaches one of its own now; what was on its
    way to the others is not lost.
    """
    outputs = [
        tuple(
            ChannelStateHandle(4, ChannelSide.OUTPUT, i, blob(f"{producer}-{i}")) for i in range(2)
        )
        for producer in range(2)
    ]
    subtasks = {
        ("map", i): SubtaskState((OperatorStateHandle("map"),), outputs[i]) for i in range(2)
    }
    subtasks |= {("count", i): SubtaskState((OperatorStateHandle("count"),)) for i in range(2)}
    operators = (an_operator("map", 2), an_operator("count", 2))
    checkpoint = CompletedCheckpoint(
        checkpoint_id=7, flow="counts", operators=operators, subtasks=subtasks
    )
    for read in (
        VertexInput(0, edge_id=4, may_be_overtaken=True),
        VertexInput(0, ((0,), (1,)), edge_id=4),
    ):
        plan = plan_restore(
            checkpoint,
            [
                a_vertex(0, an_operator("map", 2)),
                replace(a_vertex(1, an_operator("count", 2)), inputs=(read,)),
            ],
        )
        found = [
            [names(c.files) for one in plan.tasks[1, i].in_flight for c in one.channels]
            for i in range(2)
        ]
        assert found == [[["0-0"], ["1-0"]], [["0-1"], ["1-1"]]]


# Sources.


@dataclass(frozen=True)
class Found:
    id: str
    position: Any = None
    payload: Any = None


def split(
    split_id: str, position: Any = 0, *, finished: bool = False, watermark: int = 5
) -> SplitState:
    return SplitState(split_id, position, None, watermark, finished)


def ids(dealt: list[list[SplitState]]) -> list[list[str]]:
    return [[one.id for one in splits] for splits in dealt]


def test_positions_of_a_source_are_handed_out_in_the_order_of_its_subtasks() -> None:
    states = {
        ("in", i): SubtaskState(
            (OperatorStateHandle("in", source=None if i == 1 else blob(str(i))),)
        )
        for i in range(3)
    }
    checkpoint = CompletedCheckpoint(
        checkpoint_id=7, operators=(an_operator("in", 3),), subtasks=states
    )
    plan = plan_restore(
        checkpoint, [a_vertex(4, an_operator("in", 2)), a_vertex(5, an_operator("new", 2))]
    )
    assert plan.sources == {4: (blob("0"), None, blob("2"))}


def test_splits_stay_where_they_were_and_new_ones_go_where_least_is_open() -> None:
    former = [[split("a", 10), split("b", 3)], [split("c", 99, finished=True)]]
    dealt = assign_splits(
        former, [Found("a"), Found("d", payload="path"), Found("c"), Found("e")], 2
    )
    assert ids(dealt) == [["a", "b"], ["c", "d", "e"]]
    assert dealt[0][0] == split("a", 10)
    assert dealt[1][0] == split("c", 99, finished=True)
    assert dealt[1][1] == SplitState("d", None, "path")


def test_split_that_was_not_found_again_is_kept() -> None:
    """The reader says why the split is missing: skipping it would lose data."""
    assert ids(assign_splits([[split("gone", 4)]], [], 1)) == [["gone"]]


def test_splits_are_redistributed_at_another_parallelism() -> None:
    former = [
        [split("a"), split("b", finished=True), split("c")],
        [split("d", finished=True), split("e")],
    ]
    assert ids(assign_splits(former, [], 1)) == [["a", "c", "e", "b", "d"]]
    assert ids(assign_splits(former, [], 3)) == [["a", "b"], ["c", "d"], ["e"]]


def test_split_that_two_subtasks_read_is_refused() -> None:
    with pytest.raises(
        RestoreError, match="split 'a' was read by the former subtasks 0 and 1, expected by one"
    ):
        assign_splits([[split("a")], [split("a")]], [], 2)


@given(
    former=st.lists(st.lists(st.booleans(), max_size=6), min_size=1, max_size=8),
    found=st.integers(0, 40),
    steps=st.lists(st.integers(1, 8), min_size=1, max_size=4),
)
def test_no_split_is_lost_doubled_or_moved_back_however_often_the_parallelism_changes(
    former: list[list[bool]], found: int, steps: list[int]
) -> None:
    known = [
        [split(f"{i}-{n}", n, finished=done) for n, done in enumerate(splits)]
        for i, splits in enumerate(former)
    ]
    expected = {one.id: one for splits in known for one in splits}
    new = [Found(f"new-{n}") for n in range(found)] + [Found(split_id) for split_id in expected]
    expected |= {f"new-{n}": SplitState(f"new-{n}", None, None) for n in range(found)}
    for parallelism in steps:
        known = assign_splits(known, new, parallelism)
        assert len(known) == parallelism
        assert {one.id: one for splits in known for one in splits} == expected
        assert sum(map(len, known)) == len(expected)
