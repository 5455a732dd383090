"""A database beside the simulated world: transactions over a wire that loses, delays and repeats
requests and loses replies.

A request is applied at its time even if its sender has failed, so a copy may arrive after its
sender is dead and replaced. Requests are idempotent: a transaction has a name of its own, which
contains the attempt that prepared it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.simulation.oracle import Violation

if TYPE_CHECKING:
    from aioflow.operators.operator import OperatorContext
    from aioflow.testing.simulation.host import Simulation
    from aioflow.testing.simulation.process import SimProcess

__all__ = ["Database", "DatabaseSink"]

LATENCY_S = (2e-4, 3e-3)
REPLY_S = 0.1
LATE_S = (0.02, 3.0)
PREPARE_TRIES = 12


async def _nothing(_what: str) -> None: ...


@dataclass(slots=True)
class Database:
    """`lost`, `repeated`: shares of the messages; `down`: nothing is answered, what is under way
    is applied.
    """

    sim: Simulation
    on_commit: Callable[[Sequence[Any]], None]
    lost: float = 0.0
    repeated: float = 0.0
    down: bool = False
    prepared: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    committed: dict[str, None] = field(default_factory=dict)
    before_call: Callable[[str], Awaitable[None]] = _nothing
    """Called with `flush`, `prepare` or `commit` where a function of the user may raise."""
    before_write: Callable[[str], None] = lambda _what: None
    """The same of `write`, which is not asynchronous."""
    struck: Counter[str] = field(default_factory=Counter)
    """How often each of them was."""

    async def call(self, what: str, transaction: str, rows: tuple[Any, ...] = ()) -> None:
        """Sends one request and waits for its reply.

        Raises TimeoutError without a reply, whether or not the request was applied.
        """
        await self.before_call(what)
        loop, rng = self.sim.loop, self.sim.fault_rng
        sender = loop.current
        reply: asyncio.Future[None] = loop.create_future()
        now = loop.time()
        if self.down:
            pass
        elif rng.random() < self.lost:
            self.struck["lost"] += 1
        else:
            answer: tuple[SimProcess, int, asyncio.Future[None]] | None = (
                sender,
                sender.generation,
                reply,
            )
            if rng.random() < self.lost:
                self.struck["lost"] += 1
                answer = None
            loop.kernel_at(
                now + rng.uniform(*LATENCY_S), self._apply, what, transaction, rows, answer
            )
        if self.repeated and rng.random() < self.repeated:
            self.struck["repeated"] += 1
            loop.kernel_at(now + rng.uniform(*LATE_S), self._apply, what, transaction, rows, None)
        async with asyncio.timeout(REPLY_S):
            await reply

    def _apply(
        self,
        what: str,
        transaction: str,
        rows: tuple[Any, ...],
        answer: tuple[SimProcess, int, asyncio.Future[None]] | None,
    ) -> None:
        loop = self.sim.loop
        loop.note("DB", what, transaction, len(rows), answer is None)
        if what == "prepare":
            if transaction not in self.committed:
                self.prepared.setdefault(transaction, rows)
        elif transaction not in self.committed:
            if transaction not in self.prepared:
                raise Violation(f"transaction {transaction} is committed, and was never prepared")
            self.committed[transaction] = None
            self.on_commit(self.prepared.pop(transaction))
        if answer is not None:
            sender, generation, reply = answer
            if sender.generation == generation:
                loop.post_io(sender, _settle, reply)


def _settle(reply: asyncio.Future[None]) -> None:
    if not reply.done():
        reply.set_result(None)


class DatabaseSink:
    """Two phases: rows are staged under the name of a transaction, and become visible when that
    is committed.
    """

    def __init__(self, database: Callable[[], Database]) -> None:
        self._database = database

    def writer(self, ctx: OperatorContext) -> _Writer:
        return _Writer(ctx, self._database())

    def committer(self) -> _Committer:
        return _Committer(self._database())


class _Writer:
    def __init__(self, ctx: OperatorContext, database: Database) -> None:
        self._ctx = ctx
        self._database = database
        self._rows: list[Any] = []

    def write_batch(self, values: Sequence[Any], timestamps: Sequence[int] | None) -> None:
        self._database.before_write("write")
        self._rows += values

    async def flush(self) -> None:
        """Nothing goes out before it is prepared."""
        await self._database.before_call("flush")

    async def close(self) -> None:
        await self._database.before_call("close")

    async def prepare(self, checkpoint_id: int) -> list[str]:
        rows, self._rows = tuple(self._rows), []
        if not rows:
            return []
        runtime = self._ctx.runtime
        id = self._ctx.host.ids.new("transaction")[:8]
        transaction = f"{checkpoint_id}-{runtime.subtask_index}-{runtime.attempt}-{id}"
        for _ in range(PREPARE_TRIES):
            try:
                await self._database.call("prepare", transaction, rows)
                return [transaction]
            except TimeoutError:
                continue
        raise ConnectionError(f"the database does not answer to prepare {transaction}")


class _Committer:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def commit(self, committables: Sequence[Any]) -> None:
        for transaction in committables:
            await self._database.call("commit", transaction)

    async def abort(self, committables: Sequence[Any]) -> None:
        """Does nothing, because prepared and uncommitted data has no effect."""
