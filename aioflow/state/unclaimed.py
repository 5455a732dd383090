"""Finds restored keyed state that the operator of its uid does not use, because an operator of
another kind wrote it.

Built-in operators request their raw tables when they are opened. Functions may request their states
at any time. So unclaimed state counts as orphaned only if its operator cannot claim it later.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol

from aioflow.state.backend import INTERNAL_PREFIX
from aioflow.state.named import RAW
from aioflow.state.snapshot import TableMeta

__all__ = ["Table", "find_unclaimed"]


class Table(Protocol):
    """The interface of the tables of both backends."""

    meta: TableMeta

    def namespaces(self) -> list[Any]: ...
    def drop(self, namespace: Any) -> None: ...


def find_unclaimed(
    tables: Mapping[str, Table], declared: Collection[str], raw: Mapping[str, bool]
) -> dict[str, Table]:
    """Returns the unclaimed tables by name, once the operator is open.

    `raw` contains the raw tables that the operator has requested, and whether each was restored.
    """
    own = [was_there for name, was_there in raw.items() if not name.startswith(INTERNAL_PREFIX)]
    if any(own):
        return {}
    # An operator whose raw tables were not restored is new under this uid. An operator without raw
    # tables does not use those of others.
    return {
        name: table
        for name, table in tables.items()
        if (own or table.meta.kind == RAW)
        and name not in declared
        and name not in raw
        and table.namespaces()
    }
