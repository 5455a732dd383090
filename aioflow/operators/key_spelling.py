"""Tracks the first spelling of each key: keys that are equal in Python are one key, and results
show its first spelling.

True, 1, 1.0 and Decimal(1) are one key. Where the types that were seen have one spelling for each
value, as nearly always, there is nothing to do but to look at them: about 15 ns a record. Where
they have several, the first of each key is remembered for as long as state holds the key. A
checkpoint says whether there were several, so that restored keys stay as they were spelled.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import TYPE_CHECKING, Any

from aioflow.core.state_descriptors import ListStateDescriptor

if TYPE_CHECKING:
    from aioflow.operators.operator import OperatorContext

__all__ = ["KeySpelling"]

_ONE_SPELLING = frozenset((str, bytes, int, bool))
"""Types whose equal values look alike, as long as int and bool do not meet."""


SEVERAL: ListStateDescriptor[bool] = ListStateDescriptor("several-key-spellings")
"""Operator state: an element of each subtask whose keys may have several spellings, as all of them
may but texts, bytes and ints."""

REMEMBERED_MAX = 100_000
"""How many keys are remembered before those are forgotten that state holds no more; of twice as
many as it held, if that is more.
"""


class KeySpelling:
    """Replaces keys by their first spelling."""

    __slots__ = ("_first", "_remembered_max", "_several", "_types")

    def __init__(self) -> None:
        self._types: set[type] = set()
        self._first: dict[Any, Any] | None = None
        self._remembered_max = REMEMBERED_MAX

    def restore(self, ctx: OperatorContext) -> None:
        """Begin with the keys that keyed state of `ctx` holds. Without it there are none."""
        self._several = ctx.operator_state.get_union_list_state(SEVERAL)
        if self._several.get():
            self._types.add(object)
        elif ctx.keyed_state is not None and ctx.keyed_state.is_restored:
            self._types.update((str, bytes, int))

    def snapshot_state(self) -> None:
        """Let the checkpoint say whether keys may have several spellings. After `restore`."""
        self._several.update([True] if self._first is not None or bool in self._types else [])

    def is_one(self, keys: Iterable[Any]) -> bool:
        """Whether `keys`, like all before them, are shown as they are."""
        types = self._types
        types.update(map(type, keys))
        return (
            self._first is None and types <= _ONE_SPELLING and not (int in types and bool in types)
        )

    def shown(self, keys: list[Any], known: Iterable[Any]) -> list[Any]:
        """`keys`, each as it was first spelled.

        `known` gives the keys of all batches before this one, as state holds them.
        """
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
                types.update(
                    map(type, chain.from_iterable(key for key in keys if type(key) is tuple))
                )
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
