"""Raw keyed state: bytes for each key group, which a function writes and reads by itself.

A function may keep its data in a form of its own, such as an index, a model or a sketch. It writes
the data in `snapshot_state` and reads them in `initialize_state`. The engine stores the bytes, and
gives each key group to the subtask that has it after the restore, at any parallelism.

The bytes are in a table of the operator's keyed state, under one key of each group. So they are
part of checkpoints and savepoints like any other state, and only changed groups are written again.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from itertools import count

from aioflow.core.errors import StateError
from aioflow.core.keygroups import key_group
from aioflow.state.backend import INTERNAL_PREFIX, KeyedStateBackend

__all__ = ["RawKeyedView"]

TABLE = f"{INTERNAL_PREFIX}raw-keyed"


class RawKeyedView:
    """The raw state of the key groups of one subtask of an operator. A `RawKeyedState`."""

    def __init__(self, backend: KeyedStateBackend, operator: str) -> None:
        self._operator = operator
        self._groups = backend.key_group_range
        self._max_parallelism = backend.max_parallelism
        self._table = backend.table(TABLE)
        self._keys: dict[int, int] = {}
        """Key group -> the key under which its bytes are stored: the least int of the group."""

    @property
    def key_groups(self) -> range:
        """The key groups of this subtask."""
        return range(self._groups.start, self._groups.end + 1)

    def group_of(self, key: Hashable) -> int:
        """Returns the key group of a key."""
        return key_group(key, self._max_parallelism)

    def get(self) -> dict[int, bytes]:
        """Returns the bytes of each key group that has some."""
        return {self.group_of(key): content for key, content in self._table.peek().items()}

    def update(self, contents: Mapping[int, bytes]) -> None:
        """Replaces the bytes of all key groups; a group that is left out has none.

        Raises StateError for a group of another subtask, and for anything but bytes.
        """
        if not isinstance(contents, Mapping):
            raise StateError(
                f"operator {self._operator!r}: raw keyed state was given "
                f"{type(contents).__name__} {contents!r:.60}, expected a dict of key groups and "
                "their bytes, as get() returns"
            )
        for group, content in contents.items():
            if type(group) is not int or group not in self.key_groups or type(content) is not bytes:
                raise StateError(
                    f"operator {self._operator!r}: raw keyed state was given "
                    f"{type(content).__name__} for key group {group!r}, expected bytes for some of "
                    f"the groups {self._groups.start} to {self._groups.end}"
                )
        before = self.get()
        for group in before.keys() - contents.keys():
            key = self._key_of(group)
            del self._table.of_key(None, key)[key]
            self._table.removed(None, key)
        for group, content in contents.items():
            if before.get(group) != content:
                key = self._key_of(group)
                self._table.of_key(None, key)[key] = content

    def _key_of(self, group: int) -> int:
        if not self._keys:
            for key in count():
                self._keys.setdefault(self.group_of(key), key)
                if len(self._keys) == self._max_parallelism:
                    break
        return self._keys[group]
