"""Pages and reference-counted buffers: checked access, freed once, returned once."""

from __future__ import annotations

import pytest

from aioflow.core.errors import Closed
from aioflow.network.buffers import SEGMENT_BYTES, Buffer, MemorySegment, NetworkBufferPool


@pytest.mark.parametrize("offset, length", [(0, 9), (8, 1), (-1, 2), (4, 5), (0, -1)])
def test_access_beyond_the_page_is_an_error(offset: int, length: int) -> None:
    """D1.1"""
    segment = MemorySegment(8)
    with pytest.raises(IndexError, match="outside of a segment of 8 bytes"):
        segment.get(offset, length)
    if length > 0:
        with pytest.raises(IndexError):
            segment.put(offset, b"x" * length)
    with pytest.raises(IndexError):
        segment.view(offset, offset + length)
    assert segment.get(0, 8) == bytes(8)


def test_put_data_is_read_back() -> None:
    segment = MemorySegment(8)
    segment.put(2, b"abc")
    assert segment.get(2, 3) == b"abc"
    assert bytes(segment.view(2, 5)) == b"abc"
    assert bytes(segment.view()) == b"\0\0abc\0\0\0"


def test_access_after_free_and_a_second_free_are_errors() -> None:
    """D1.2"""
    segment = MemorySegment(8)
    segment.free()
    assert segment.is_freed
    for use in (
        lambda: segment.get(0, 1),
        lambda: segment.put(0, b"x"),
        lambda: segment.view(),
        segment.free,
    ):
        with pytest.raises(Closed):
            use()


def test_buffers_of_one_pool_have_equal_pages_and_disjoint_memory() -> None:
    """D1.3"""
    pool = NetworkBufferPool(3).create_buffer_pool(3)
    buffers = [pool.request_buffer() for _ in range(3)]
    for number, buffer in enumerate(buffers):
        assert buffer is not None
        buffer.segment.put(0, bytes([number]) * SEGMENT_BYTES)
    for number, buffer in enumerate(buffers):
        assert buffer is not None
        assert buffer.segment.get(0, buffer.segment.size) == bytes([number]) * SEGMENT_BYTES


def test_a_buffer_is_returned_once_when_its_last_holder_recycles_it() -> None:
    """D2.1"""
    returned: list[MemorySegment] = []
    segment = MemorySegment(8)
    buffer = Buffer(segment, returned.append, 3)
    assert buffer.retain() is buffer
    buffer.recycle()
    assert (returned, buffer.references) == ([], 1)
    buffer.recycle()
    assert returned == [segment]
    assert buffer.is_recycled
    with pytest.raises(Closed):
        buffer.recycle()
    assert returned == [segment]


def test_a_recycled_buffer_cannot_be_used() -> None:
    buffer = Buffer(MemorySegment(8), lambda segment: None)
    buffer.recycle()
    for use in (buffer.retain, buffer.view, lambda: buffer.segment):
        with pytest.raises(Closed, match="after its last holder"):
            use()


def test_the_view_of_a_buffer_is_its_filled_part_and_read_only() -> None:
    buffer = Buffer(MemorySegment(8), lambda segment: None, 3)
    buffer.segment.put(0, b"abcd")
    view = buffer.view()
    assert bytes(view) == b"abc"
    assert view.readonly


def test_a_page_is_used_again_and_never_more_than_the_total_exist() -> None:
    pool = NetworkBufferPool(2).create_buffer_pool(1, max_overdraft=0)
    pages: set[int] = set()
    kept = []
    for _ in range(5):
        first, second = pool.request_buffer(), pool.request_buffer()
        assert first is not None
        assert second is not None
        assert pool.request_buffer() is None
        kept += [first.segment, second.segment]
        pages |= {id(first.segment), id(second.segment)}
        first.recycle()
        second.recycle()
    assert len(pages) == 2
