"""Raw keyed state on every backend: a function's own bytes for each key group, at any
parallelism.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import aioflow as af
from aioflow.core.errors import StateError
from aioflow.core.keygroups import key_group
from aioflow.state.operator_state import RawKeyedView
from tests.contracts.test_state_backend import BACKENDS, MAX_PARALLELISM, Bench
from tests.integration.processes import eventually
from tests.state.snapshots import closing_backends, restore, taken


@pytest.fixture(params=BACKENDS)
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    with closing_backends():
        yield Bench(request.param)


@pytest.mark.parametrize("parallelism", [1, 2, 5, 128])
def test_each_subtask_gets_the_bytes_of_its_key_groups(bench: Bench, parallelism: int) -> None:
    """H7.4"""
    backend = bench.create()
    raw = RawKeyedView(backend, "count")
    contents = {group: b"%d" % group for group in range(0, MAX_PARALLELISM, 3)}
    raw.update({**contents, 1: b"first"})
    raw.update(contents)
    assert raw.get() == contents
    parts = [RawKeyedView(new, "count") for new in bench.rescaled([backend], parallelism)]
    found = [part.get() for part in parts]
    assert {group: one for part in found for group, one in part.items()} == contents
    for part, own in zip(parts, found, strict=True):
        assert own.keys() <= set(part.key_groups)
    assert sum(len(part.key_groups) for part in parts) == MAX_PARALLELISM


@pytest.mark.parametrize("wrong", [None, [1], b"x", {True: b"x"}, {"1": b"x"}, {1: "x"}])
def test_wrong_contents_are_refused_and_change_nothing(bench: Bench, wrong: Any) -> None:
    raw = RawKeyedView(bench.create(), "count")
    raw.update({1: b"kept"})
    with pytest.raises(StateError, match="operator 'count': raw keyed state was given"):
        raw.update(wrong)
    assert raw.get() == {1: b"kept"}


def test_a_snapshot_has_the_bytes_of_the_last_update_before_it(bench: Bench) -> None:
    backend = bench.create()
    raw = RawKeyedView(backend, "count")
    raw.update({3: b"old", 4: b"same"})
    before = taken(backend)
    raw.update({4: b"same", 5: b"new"})
    after = taken(backend)
    for snapshot, expected in (
        (before, {3: b"old", 4: b"same"}),
        (after, {4: b"same", 5: b"new"}),
    ):
        new = bench.create()
        restore(new, [snapshot])
        assert RawKeyedView(new, "count").get() == expected


@pytest.mark.parametrize("wrong", [{MAX_PARALLELISM: b""}, {-1: b""}, {0: "text"}, {0: None}])
def test_other_groups_and_other_values_are_refused(bench: Bench, wrong: Any) -> None:
    raw = RawKeyedView(bench.create(), "count")
    with pytest.raises(StateError, match=r"operator 'count': raw keyed state was given .* bytes"):
        raw.update(wrong)
    assert raw.get() == {}


class Sums(af.KeyedProcessFunction[str, str, tuple[str, int]], af.CheckpointedFunction):
    """Counts keys in a dict of its own, which it keeps as JSON for each key group."""

    def initialize_state(self, ctx: af.RuntimeContext) -> None:
        self.raw = ctx.get_raw_keyed_state()
        self.counts: dict[str, int] = {}
        for content in self.raw.get().values():
            self.counts.update(json.loads(content))

    def process_element(self, value: str, ctx: af.ProcessContext) -> Iterator[tuple[str, int]]:
        self.counts[value] = self.counts.get(value, 0) + 1
        yield value, self.counts[value]

    def snapshot_state(self, ctx: Any) -> None:
        groups: dict[int, dict[str, int]] = {}
        for key, count in self.counts.items():
            groups.setdefault(self.raw.group_of(key), {})[key] = count
        self.raw.update({group: json.dumps(one).encode() for group, one in groups.items()})


@pytest.mark.parametrize("state", BACKENDS)
async def test_a_job_keeps_it_over_a_savepoint_at_another_parallelism(
    state: str, tmp_path: Path
) -> None:
    """H7.4"""
    keys = [f"key {n}" for n in range(50)]
    rows: list[tuple[str, int]] = []
    for run, parallelism in enumerate((2, 3), 1):
        flow = af.Flow("raw", parallelism=parallelism)
        pushed = flow.source(af.io.push(), uid="keys")
        pushed.key_by(lambda key: key).process(Sums(), uid="sums").sink(rows.append)
        async with flow.run(checkpoints=tmp_path, every="1h", state=state) as job:
            await job.input(pushed).put_many(keys)
            await eventually(lambda: len(rows) == run * len(keys))  # noqa: B023
    assert sorted(rows[len(keys) :]) == sorted((key, 2) for key in keys)


async def test_it_needs_keys() -> None:
    flow: Any = af.Flow("unkeyed")
    with pytest.raises(af.StateError, match="key_by"):
        await flow.source(["a"]).map(_Asking()).collect()


class _Asking(af.MapFunction[str, str]):
    def open(self, ctx: af.RuntimeContext) -> None:
        ctx.get_raw_keyed_state()

    def map(self, value: str) -> str:
        return value


def test_a_key_is_in_the_group_in_which_its_elements_are() -> None:
    with closing_backends():
        raw = RawKeyedView(Bench("heap").create(), "count")
        assert raw.group_of("a") == key_group("a", MAX_PARALLELISM)
