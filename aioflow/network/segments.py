"""Memory pages, and reference-counted buffers over them.

Only bytes need memory: the encoded batch of a remote subpartition, or a received frame. A local
channel passes Python objects, and only takes a permit, which is a count. A page is freed once. A
buffer returns to its recycler exactly once, when its count falls to zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

from aioflow.core.errors import Closed

__all__ = ["SEGMENT_BYTES", "Buffer", "MemorySegment"]

SEGMENT_BYTES = 32768
"""Size of a page, as in Flink: large compared to a frame's header, small for a slow channel."""


class MemorySegment:
    """A page of `size` bytes.

    Every access is checked against the page; after `free` every access raises Closed.
    """

    __slots__ = ("_memory", "size")

    def __init__(self, size: int = SEGMENT_BYTES) -> None:
        self.size = size
        self._memory: bytearray | None = bytearray(size)

    def put(self, offset: int, data: bytes | bytearray | memoryview) -> None:
        """Writes all of `data` at `offset`.

        Raises IndexError if the data does not fit, where a plain bytearray would silently grow.
        """
        memory = self._checked(offset, len(data))
        memory[offset : offset + len(data)] = data

    def get(self, offset: int, length: int) -> bytes:
        """Returns a copy of `length` bytes from `offset`. Raises IndexError beyond the page."""
        return bytes(self._checked(offset, length)[offset : offset + length])

    def view(self, start: int = 0, stop: int | None = None) -> memoryview:
        """Returns the bytes [start, stop) without a copy; the view keeps the page in use."""
        end = self.size if stop is None else stop
        return memoryview(self._checked(start, end - start))[start:end]

    @property
    def is_freed(self) -> bool:
        return self._memory is None

    def free(self) -> None:
        """Frees the page. Raises Closed if it was freed before, because two owners of one page are
        a bug.
        """
        if self._memory is None:
            raise Closed("memory segment is freed already; it must be freed once, by its pool")
        self._memory = None

    def _checked(self, offset: int, length: int) -> bytearray:
        memory = self._memory
        if memory is None:
            raise Closed("memory segment was accessed after it was freed")
        if offset < 0 or length < 0 or offset + length > self.size:
            raise IndexError(
                f"bytes [{offset}, {offset + length}) are outside of a segment of {self.size} bytes"
            )
        return memory


class Buffer:
    """`length` filled bytes of a segment, shared by reference count.

    The count starts at one; at zero the recycler gets the segment.
    """

    __slots__ = ("_recycler", "_references", "_segment", "length")

    def __init__(
        self, segment: MemorySegment, recycler: Callable[[MemorySegment], None], length: int = 0
    ) -> None:
        self._segment = segment
        self._recycler = recycler
        self._references = 1
        self.length = length

    @property
    def segment(self) -> MemorySegment:
        """The page. Raises Closed after the last recycle."""
        self._check_live()
        return self._segment

    @property
    def references(self) -> int:
        return self._references

    @property
    def is_recycled(self) -> bool:
        return self._references == 0

    def view(self) -> memoryview:
        """Returns the filled bytes, read-only.

        Keep a reference (`retain`) for as long as the view is used.
        """
        self._check_live()
        return self._segment.view(0, self.length).toreadonly()

    def retain(self) -> Self:
        """Adds a holder, which must call `recycle` too."""
        self._check_live()
        self._references += 1
        return self

    def recycle(self) -> None:
        """Removes a holder; the last one returns the page. Raises Closed if there is no holder."""
        self._check_live()
        self._references -= 1
        if self._references == 0:
            self._recycler(self._segment)

    def _check_live(self) -> None:
        if self._references == 0:
            raise Closed("network buffer was used after its last holder recycled it")
