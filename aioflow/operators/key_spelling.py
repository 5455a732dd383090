"""Which spelling of a key is shown: keys that are equal in Python are one key, and the first spelling that came stands for all.

True, 1, 1.0 and Decimal(1) are one key. Where the types that were seen have one spelling for each value, as nearly always, there
is nothing to do but to look at them: about 15 ns a record. Where they have several, the first of each key is remembered for as long
as state holds the key.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

__all__ = ["KeySpelling"]

_ONE_SPELLING = frozenset((str, bytes, int, bool))
"""Types whose equal values look alike, as long as int and bool do not meet."""


REMEMBERED_MAX = 100_000
"""How many keys are remembered before those are forgotten that state holds no more; of twice as many as it held, if that is more."""


class KeySpelling:
    """Replaces keys by their first spelling."""

    __slots__ = ("_first", "_remembered_max", "_types")

    def __init__(self) -> None:
        self._types: set[type] = set()
        self._first: dict[Any, Any] | None = None
        self._remembered_max = REMEMBERED_MAX

    def is_one(self, keys: Iterable[Any]) -> bool:
        """Whether `keys`, like all before them, are shown as they are."""
        types = self._types
        types.update(map(type, keys))
        return self._first is None and types <= _ONE_SPELLING and not (int in types and bool in types)

    def shown(self, keys: list[Any], known: Iterable[Any]) -> list[Any]:
        """`keys`, each as it was first spelled. `known` gives the keys of all batches before this one, as state holds them."""
        first = self._first
        if first is None:
            types, found = self._types, list(map(type, keys))
            # Nearly always one type, and to count it is half the price of a set of all.
            if found and found.count(found[0]) == len(found):
                types.add(found[0])
            else:
                types.update(found)
            if tuple in types:
                types.discard(tuple)
                types.update(map(type, chain.from_iterable(key for key in keys if type(key) is tuple)))
            if types <= _ONE_SPELLING and not (int in types and bool in types):
                return keys
            first = self._remember(known)
        elif len(first) > self._remembered_max:
            first = self._remember(known)
        spell = first.setdefault
        return [spell(key, key) for key in keys]

    def _remember(self, known: Iterable[Any]) -> dict[Any, Any]:
        """Begin with `known`, which are spelled as they were shown."""
        first = self._first = {key: key for key in known}
        self._remembered_max = max(REMEMBERED_MAX, 2 * len(first))
        return first
