"""Numbers that count how often one is compared with another: a measure of work that no clock
disturbs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ClassVar

__all__ = ["Compared"]


class Compared(int):
    """An int; what is added to one is one."""

    _count: ClassVar[int] = 0

    @classmethod
    @contextmanager
    def counting(cls) -> Iterator[Callable[[], int]]:
        """Gives what tells the comparisons since."""
        before = cls._count
        yield lambda: cls._count - before

    def _noted(self) -> None:
        Compared._count += 1

    def __lt__(self, other: int) -> bool:
        self._noted()
        return int(self) < int(other)

    def __le__(self, other: int) -> bool:
        self._noted()
        return int(self) <= int(other)

    def __gt__(self, other: int) -> bool:
        self._noted()
        return int(self) > int(other)

    def __ge__(self, other: int) -> bool:
        self._noted()
        return int(self) >= int(other)

    def __eq__(self, other: object) -> bool:
        self._noted()
        return isinstance(other, int) and int(self) == int(other)

    def __hash__(self) -> int:
        return int.__hash__(self)

    def __add__(self, other: int) -> Compared:
        return Compared(int(self) + int(other))

    def __sub__(self, other: int) -> Compared:
        return Compared(int(self) - int(other))
