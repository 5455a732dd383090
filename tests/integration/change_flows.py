"""A program that changes a table in transactions, and a flow that keeps a copy of the table by its
changes, for tests that kill what runs them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from random import Random
from typing import Any

import aioflow as af

__all__ = ["Writer", "copied"]

STATEMENTS = 20
"""Changes of one transaction."""


class Writer:
    """Inserts, updates, deletes and changes of the key in table `t (id, n)`, by one seed."""

    def __init__(self, execute: Callable[[list[str]], Awaitable[list[int] | None]]) -> None:
        """`execute` runs statements in one transaction. After a failure it returns the ids that the
        table has then.
        """
        self._execute = execute
        self._random = Random(7)
        self._ids: list[int] = []
        self._next = 1_000_000
        self.changes = 0

    async def run(self, total: int, pause_s: float) -> None:
        while self.changes < total:
            ids = list(self._ids)
            statements = [self._statement(ids) for _ in range(STATEMENTS)]
            if self._random.random() < 0.05:
                statements.append("ROLLBACK")
            found = await self._execute(statements)
            if found is not None:
                self._ids = found
            elif statements[-1] != "ROLLBACK":
                self._ids = ids
                self.changes += STATEMENTS
            await asyncio.sleep(pause_s)

    def _statement(self, ids: list[int]) -> str:
        kind = self._random.random() if len(ids) > 50 else 0.0
        self._next += 1
        if kind < 0.2:
            ids.append(self._next)
            return f"INSERT INTO t VALUES ({self._next}, 0)"
        place = self._random.randrange(len(ids))
        one = ids[place]
        if kind < 0.7:
            return f"UPDATE t SET n = n + 1 WHERE id = {one}"
        if kind < 0.8:
            ids[place] = self._next
            return f"UPDATE t SET id = {self._next}, n = n + 1 WHERE id = {one}"
        ids[place] = ids[-1]
        ids.pop()
        return f"DELETE FROM t WHERE id = {one}"


class Exactly(af.KeyedProcessFunction[Any, af.Upsert[dict[str, int]], af.Upsert[dict[str, int]]]):
    """Passes rows on, and fails for one that does not follow the row before it."""

    def open(self, ctx: af.RuntimeContext) -> None:
        self.last = ctx.get_state(af.ValueStateDescriptor("last"))

    def process_element(
        self, value: af.Upsert[dict[str, int]], ctx: Any
    ) -> Iterable[af.Upsert[dict[str, int]]]:
        before = self.last.value()
        if value.row is None:
            assert before is not None, f"{value} removes a row that is not there"
            self.last.clear()
        else:
            n = value.row["n"]
            assert before is None or n == before + 1, f"{value} comes after {before}"
            self.last.update(n)
        yield value


def copied(changes: Any, target: Any) -> af.Flow:
    """Writes the latest rows of table `t` into `target`."""
    flow = af.Flow("copied", parallelism=2)
    rows = flow.source(changes, uid="changes").upserts(uid="upserts")
    rows.process(Exactly, uid="exactly").sink(target, uid="copy")
    return flow
