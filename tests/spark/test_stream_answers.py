"""The answers of a flow as a query of Spark are those of an engine whose event time moves behind
each batch of Spark.

Without Java: the programs of the stages with grouping, state and timers in memory (`streamed`), so
that generated data costs milliseconds.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import aioflow as af
from aioflow.spark.streaming.run import STARTS_MAX
from tests.spark.answers import DELAY_MS, Event
from tests.spark.stream_answers import STREAM_ANSWERS, batch_time

pytest.importorskip(
    "pyspark.sql.streaming.stateful_processor", reason="streaming queries need Spark 4.1"
)
from tests.spark.streamed import streamed

BATCHES = st.lists(
    st.lists(
        st.builds(Event, st.sampled_from("abcd"), st.integers(1, 300), st.integers(0, 9)),
        max_size=15,
    ),
    max_size=5,
)


def counted(rows: tuple[list[Any], ...]) -> list[Counter[str]]:
    return [Counter(map(repr, stream)) for stream in rows]


def event_of(row: dict[str, Any]) -> Event:
    return Event(**row)


@pytest.mark.parametrize("name", STREAM_ANSWERS)
@settings(max_examples=15)
@given(batches=BATCHES)
def test_answers_are_those_of_the_engine(name: str, batches: list[list[Event]]) -> None:
    async def both() -> tuple[tuple[list[Any], ...], tuple[list[Any], ...]]:
        def there(source: Any) -> tuple[Any, ...]:
            strategy = af.WatermarkStrategy.bounded_out_of_orderness(
                f"{DELAY_MS}ms", timestamp=lambda event: event.at
            )
            return STREAM_ANSWERS[name](af.Flow(name).source(source, watermarks=strategy))

        flow = af.Flow(name)
        here = STREAM_ANSWERS[name](
            flow.source(
                [event for batch in batches for event in batch],
                watermarks=batch_time(batches, DELAY_MS),
            )
        )
        with tempfile.TemporaryDirectory() as scratch:
            rows = [[event._asdict() for event in batch] for batch in batches]
            return await streamed(Path(scratch), rows, event_of, there), await flow.collect(*here)

    there, here = asyncio.run(both())

    assert counted(there) == counted(here)


def counts(source: Any) -> tuple[Any, ...]:
    return (af.Flow("late").source(source).key_by(lambda event: event.key).count(),)


async def test_a_query_whose_python_process_comes_too_late_begins_again(tmp_path: Path) -> None:
    rows = [[Event("a", 1, 0)._asdict()], [Event("a", 2, 0)._asdict()]]

    assert await streamed(tmp_path, rows, event_of, counts, late=[2]) == ([("a", 1), ("a", 2)],)
    with pytest.raises(af.SparkError, match="Timed out while waiting for the Python worker"):
        await streamed(tmp_path, rows, event_of, counts, late=[0, STARTS_MAX])


async def test_a_long_query_may_come_too_late_as_often_as_it_likes_if_batches_get_through(
    tmp_path: Path,
) -> None:
    rows = [[Event("a", at, 0)._asdict()] for at in (1, 2, 3)]

    there = await streamed(tmp_path, rows, event_of, counts, late=[STARTS_MAX - 1] * 3)

    assert there == ([("a", 1), ("a", 2), ("a", 3)],)
