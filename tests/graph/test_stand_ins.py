"""Where sources give stand-ins for their records.

They do not where a stand-in would be visible, or where more than fields is read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import aioflow as af
from aioflow.graph.job_graph import build_job_graph


class Event(NamedTuple):
    user: int
    value: float
    ts: int = 0


class Nested(NamedTuple):
    user: list[int]
    value: float
    ts: int = 0


@dataclass
class Plain:
    user: int
    value: float
    ts: int = 0


TIMES: Any = af.WatermarkStrategy.bounded_out_of_orderness("1s", timestamp=lambda e: e.ts)
TOTAL = af.agg(n=af.count(), total=af.sum(lambda e: e.value))


def gives_stand_ins(
    tmp_path: Path,
    shape: Callable[[Any], Any],
    times: Any = TIMES,
    kind: Any = Event,
    *,
    apart: bool = True,
    watched: bool = False,
) -> bool:
    (tmp_path / "events.jsonl").write_text("")
    flow = af.Flow("standing", parallelism=2)
    source = flow.source(af.io.jsonl(tmp_path / "events.jsonl", kind), watermarks=times)
    shape(source)
    whole = [source.upstreams[0].place] if watched else []
    given = flow.graph.nodes[source.upstreams[0].node_id].source
    return (
        build_job_graph(flow.graph, apart=apart, whole=whole).vertices[0].head.source is not given
    )


FIELDS: dict[str, Callable[[Any], Any]] = {
    "a count": lambda s: s.key_by(lambda e: e.user).count(),
    "a count by what is computed": lambda s: s.key_by(lambda e: (e.user % 3, e.value)).count(),
    "a window": lambda s: s.key_by(lambda e: e.user).window(af.tumbling("1s")).aggregate(TOTAL),
    "two of them": lambda s: [
        s.key_by(lambda e: e.user).count(),
        s.key_by(lambda e: e.ts).aggregate(TOTAL),
    ],
}
MORE: dict[str, Callable[[Any], Any]] = {
    "an item": lambda s: s.key_by(lambda e: e[0]).count(),
    "a method of tuples": lambda s: s.key_by(lambda e: e.count).count(),
    "the record": lambda s: s.key_by(lambda e: e).count(),
    "a call": lambda s: s.key_by(lambda e: hash(e)).count(),
    "an expression": lambda s: s.key_by(af.col.user).aggregate(TOTAL),
    "what may fail": lambda s: s.key_by(lambda e: e.user).sum(lambda e: e.value / e.user),
    "several fields": lambda s: s.key_by(lambda e: e.user).aggregate(
        af.agg(a=af.sum(lambda e: e.value), b=af.max(lambda e: e.ts))
    ),
    "a sink": lambda s: s.sink(print),
    "a step": lambda s: s.map(lambda e: e.user).key_by(lambda x: x).count(),
    "a sink beside": lambda s: [s.key_by(lambda e: e.user).count(), s.sink(print)],
    "a process": lambda s: s.key_by(lambda e: e.user).process(lambda value, ctx: None),
    "late elements": lambda s: (
        s.key_by(lambda e: e.user).window(af.tumbling("1s")).aggregate(TOTAL).late.sink(print)
    ),
}


@pytest.mark.parametrize("name", FIELDS)
def test_stand_ins_replace_records_where_only_fields_are_read(name: str, tmp_path: Path) -> None:
    assert gives_stand_ins(tmp_path, FIELDS[name])
    assert not gives_stand_ins(tmp_path, FIELDS[name], apart=False), (
        "a subscriber in this process would see them"
    )
    assert not gives_stand_ins(tmp_path, FIELDS[name], watched=True)


@pytest.mark.parametrize("name", MORE)
def test_records_are_made_where_more_than_fields_is_read(name: str, tmp_path: Path) -> None:
    assert not gives_stand_ins(tmp_path, MORE[name])


def test_times_may_look_at_records_too(tmp_path: Path) -> None:
    window, strategy = FIELDS["a window"], af.WatermarkStrategy
    assert gives_stand_ins(tmp_path, FIELDS["a count"], times=None)
    assert gives_stand_ins(tmp_path, window, times=strategy.ingestion_time())
    assert not gives_stand_ins(
        tmp_path, window, times=strategy.monotonous_timestamps(timestamp=lambda e: e[2])
    )
    assert not gives_stand_ins(
        tmp_path, window, times=strategy.punctuated(lambda e, ts: ts, timestamp=lambda e: e.ts)
    )


@pytest.mark.parametrize("kind", [None, dict, Nested, Plain])
def test_other_types_stand_for_themselves(kind: Any, tmp_path: Path) -> None:
    """A NamedTuple that holds more than scalars is made from the line, and the others cost no
    more than a stand-in.
    """
    assert not gives_stand_ins(tmp_path, FIELDS["a window"], kind=kind)
