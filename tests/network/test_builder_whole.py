"""A batch that is sealed whole is the batch that copying would have given."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from aioflow.core.elements import MIN_WATERMARK, RecordBatch
from aioflow.network.builder import BatchBuilder


@st.composite
def record_batches(draw: st.DrawFn) -> RecordBatch:
    """Draws one to four records; entries of `watermarks` never decrease, and `watermark` is not
    below them.
    """
    count = draw(st.integers(1, 4))
    values = list(range(count))
    watermarks = draw(
        st.none() | st.lists(st.integers(0, 9), min_size=count, max_size=count).map(sorted)
    )
    after = draw(st.just(MIN_WATERMARK) | st.integers(0, 9))
    if watermarks is not None:
        after = max(after, watermarks[-1])
    timestamps = draw(st.none() | st.just([5] * count))
    return RecordBatch(values, timestamps, draw(st.none() | st.just(values[:])), watermarks, after)


def parts(batch: RecordBatch | None) -> tuple[object, ...] | None:
    return (
        None
        if batch is None
        else (batch.values, batch.timestamps, batch.keys, batch.watermarks, batch.watermark)
    )


@given(history=st.lists(record_batches() | st.integers(0, 9), max_size=6), last=record_batches())
def test_sealing_whole_gives_what_copying_gives(
    history: list[RecordBatch | int], last: RecordBatch
) -> None:
    """Both builders have the same past: sealed batches, and watermarks without records."""
    copying, whole = BatchBuilder(), BatchBuilder()
    for step in (*history, last):
        if isinstance(step, int):
            copying.advance_watermark(step)
            whole.advance_watermark(step)
            continue
        assert copying.extend(step) == len(step.values)
        expected = copying.seal()
        given_back = whole.seal_whole(step)
        if given_back is None:
            whole.extend(step)
            given_back = whole.seal()
        assert parts(given_back) == parts(expected)
        assert (whole.told, whole.watermark, whole.values) == (copying.told, copying.watermark, [])
    assert whole.finish() == copying.finish()


def test_the_lists_themselves_are_handed_over() -> None:
    batch = RecordBatch([1, 2], [5, 6], ["a", "b"], [1, 2], 3)
    sealed = BatchBuilder().seal_whole(batch)
    assert sealed is not None
    assert (sealed.values is batch.values, sealed.timestamps is batch.timestamps) == (True, True)
    assert (sealed.keys is batch.keys, sealed.watermarks is batch.watermarks) == (True, True)


def test_nothing_is_sealed_whole_over_open_records_untold_time_or_a_closed_stream() -> None:
    batch = RecordBatch([1, 2])
    holding, untold, closed = BatchBuilder(), BatchBuilder(), BatchBuilder()
    holding.append(0)
    untold.advance_watermark(7)
    closed.finish()
    assert [builder.seal_whole(batch) for builder in (holding, untold, closed)] == [
        None,
        None,
        None,
    ]
    assert BatchBuilder().seal_whole(RecordBatch([])) is None
    assert holding.values == [0]
