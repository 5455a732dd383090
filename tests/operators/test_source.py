"""A reader of an application need only have what `SourceReader` asks of it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from aioflow.operators.source import BaseReader, Split, as_reader


class Bare:
    """Has the documented members, and no other."""

    async def open(self, splits: Sequence[Split]) -> None: ...

    def poll_batch(self, max_records: int) -> list[int] | None:
        return [max_records]

    async def wait(self) -> None: ...

    def position(self, split_id: str) -> int:
        return 7

    async def close(self) -> None: ...


class Whole(Bare):
    """Everything that is optional, as plain attributes."""

    columnar = True
    finished = True
    timestamps = [1, 2]
    current_split = "a"
    finished_splits = {"b"}
    one_at_a_time = True
    pending_records = 3

    def __init__(self) -> None:
        self.told: list[object] = []

    def stop(self) -> None:
        self.told.append("stop")

    def checkpoint(self, checkpoint_id: int) -> None:
        self.told.append(checkpoint_id)

    def checkpoint_completed(self, checkpoint_id: int) -> None:
        self.told.append(-checkpoint_id)


OPTIONAL = (
    "columnar",
    "finished",
    "timestamps",
    "current_split",
    "finished_splits",
    "one_at_a_time",
    "pending_records",
)


def test_reader_without_optional_members_has_their_defaults() -> None:
    reader = as_reader(Bare(), unbounded=True)  # type: ignore[arg-type]  # It has no `finished`.

    for name in OPTIONAL:
        assert getattr(reader, name) == getattr(BaseReader, name), name
    reader.stop()
    reader.checkpoint(1)
    reader.checkpoint_completed(1)
    assert not reader.drains
    assert reader.poll_batch(5) == [5] and reader.position("a") == 7


def test_reader_with_optional_members_is_asked_for_them() -> None:
    whole = Whole()
    reader = as_reader(whole, unbounded=True)

    for name in OPTIONAL:
        assert getattr(reader, name) == getattr(whole, name), name
    reader.stop()
    reader.checkpoint(1)
    reader.checkpoint_completed(1)
    assert reader.drains and whole.told == ["stop", 1, -1]


def test_reader_of_a_bounded_source_must_tell_when_it_has_finished() -> None:
    with pytest.raises(TypeError, match="Bare reads a bounded source and has no `finished`"):
        as_reader(Bare(), unbounded=False)  # type: ignore[arg-type]


def test_reader_with_all_defaults_is_used_as_it_is() -> None:
    class Own(BaseReader[int]): ...

    own = Own()
    assert as_reader(own, unbounded=False) is own
