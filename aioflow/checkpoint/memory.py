"""Keeps objects in the memory of this process.

For tests, and for services that need exactly-once only across failures of their own code. The same
name refers to the same objects as long as the process lives, also for later jobs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from aioflow.checkpoint.objects import Chunks, check_name, collect

if TYPE_CHECKING:
    from aioflow.core.host import Host

__all__ = ["MemoryObjects"]

_STORES: dict[str, dict[str, tuple[bytes, int]]] = {}
"""Store -> name -> content and time of creation.

The one thing that outlives a job within a process, as a disk outlives a process.
"""


class MemoryObjects:
    """An `ObjectStore` in memory, under `name` or `name/prefix`. Other processes do not see its
    objects.
    """

    shared = False

    def __init__(self, host: Host, path: str) -> None:
        store, _, below = path.strip("/").partition("/")
        self._clock = host.clock
        self._objects = _STORES.setdefault(store, {})
        self._below = f"{below}/" if below else ""
        self.url = f"memory://{store}/{below}".rstrip("/")

    async def create(self, name: str, chunks: Chunks) -> bool:
        key = self._key(name)
        if key in self._objects:
            return False
        made = (await collect(chunks), self._clock.wall_ms())
        return self._objects.setdefault(key, made) is made

    async def read(self, name: str) -> bytes:
        return self._get(name)[0]

    async def delete(self, names: Iterable[str]) -> None:
        for name in names:
            self._objects.pop(self._key(name), None)

    async def names(self, prefix: str = "") -> list[str]:
        start = self._below + (f"{prefix.rstrip('/')}/" if prefix else "")
        return sorted(key[len(self._below) :] for key in self._objects if key.startswith(start))

    async def modified_ms(self, name: str) -> int:
        return self._get(name)[1]

    async def harden(self) -> None:
        """Does nothing: memory lasts exactly as long as the process."""

    async def sweep(self, before_ms: int) -> None:
        """Does nothing: unfinished objects are never visible."""

    def _key(self, name: str) -> str:
        return self._below + check_name(name)

    def _get(self, name: str) -> tuple[bytes, int]:
        found = self._objects.get(self._key(name))
        if found is None:
            raise FileNotFoundError(f"there is no {name} in {self.url}")
        return found
