"""Tracks the first spelling of each key: keys that are equal in Python are one key, and results
show its first spelling.

True, 1, 1.0 and Decimal(1) are one key in different spellings. In nearly all streams, each key can
have only one spelling because of its type; checking the types costs about 15 ns a record. Otherwise
the first spelling of each key is remembered as long as state holds the key. A checkpoint records
whether keys may have several spellings, so that restored keys keep their spelling.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import TYPE_CHECKING, Any

from aioflow.core.states import ListStateDescriptor

if TYPE_CHECKING:
    from aioflow.operators.operator import OperatorContext

__all__ = ["KeySpelling"]

_ONE_SPELLING = frozenset((str, bytes, int, bool))
"""Types whose equal values have the same spelling, unless both int and bool occur."""


SEVERAL: ListStateDescriptor[bool] = ListStateDescriptor("several-key-spellings")
"""Operator state that is not empty if keys of any subtask may have several spellings.

Keys have one spelling if all of them are str, bytes or int.
"""

REMEMBERED_MAX = 100_000
"""Number of remembered spellings above which those of keys that are not in state are forgotten.

The limit is higher if the state is large: twice the number of its keys when it was last read.
"""


class KeySpelling:
    """Replaces each key by the spelling in which it first occurred."""

    __slots__ = ("_first", "_remembered_max", "_several", "_types")

    def __init__(self) -> None:
        self._types: set[type] = set()
        self._first: dict[Any, Any] | None = None
        self._remembered_max = REMEMBERED_MAX

    def restore(self, ctx: OperatorContext) -> None:
        """Reads from the restored state whether the keys in the keyed state may have several
        spellings.
        """
        self._several = ctx.operator_state.get_union_list_state(SEVERAL)
        if self._several.get():
            self._types.add(object)
        elif ctx.keyed_state is not None and ctx.keyed_state.is_restored:
            self._types.update((str, bytes, int))

    def snapshot_state(self) -> None:
        """Records in the checkpoint whether keys may have several spellings. `restore` must come
        first.
        """
        self._several.update([True] if self._first is not None or bool in self._types else [])

    def is_one(self, keys: Iterable[Any]) -> bool:
        """Returns whether the types of all keys so far, `keys` included, allow only one spelling of
        each key.
        """
        types = self._types
        types.update(map(type, keys))
        return (
            self._first is None and types <= _ONE_SPELLING and not (int in types and bool in types)
        )

    def shown(self, keys: list[Any], known: Iterable[Any]) -> list[Any]:
        """Returns `keys`, each in its first spelling.

        `known` yields the keys that state holds, in the spelling to show.
        """
        first = self._first
        if first is None:
            types, found = self._types, list(map(type, keys))
            # Nearly always there is one type, and counting it costs half as much as a set of all
            # types.
            if found and found.count(found[0]) == len(found):
                types.add(found[0])
            else:
                types.update(found)
            if tuple in types:
                types.discard(tuple)
                if found.count(tuple) == len(found):
                    parts = chain.from_iterable(keys)
                else:
                    parts = chain.from_iterable(key for key in keys if type(key) is tuple)
                types.update(map(type, parts))
            if types <= _ONE_SPELLING and not (int in types and bool in types):
                return keys
            first = self._remember(known)
        elif len(first) > self._remembered_max:
            first = self._remember(known)
        spell = first.setdefault
        return [spell(key, key) for key in keys]

    def _remember(self, known: Iterable[Any]) -> dict[Any, Any]:
        """Remembers the spellings that `known` yields, and forgets all others."""
        first = self._first = {key: key for key in known}
        self._remembered_max = max(REMEMBERED_MAX, 2 * len(first))
        return first
