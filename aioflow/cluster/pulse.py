"""The heartbeat of a process whose event loop may be blocked: a thread sends it.

A function that blocks (loading a model, a `time.sleep`) stops everything on the event loop,
including its heartbeats. From outside the process looks dead. So this heartbeat comes from a thread
with its own loop and connection, and says how long the main loop has been blocked. With this
heartbeat, a process that is silent is dead, stopped or cut off. A loop that is blocked for longer
than a second is logged once, with the blocking line. While the process loads a program, a blocked
loop is logged after `LOADING_S`, and again after twice the time, because an import may hang.

Everything else in such a process still waits for its loop: nothing is deployed, cancelled or sent
meanwhile. A function that holds the interpreter lock stops the thread as well, and the process is
silent.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import threading
import traceback
from typing import TYPE_CHECKING, Any, Self

from aioflow.cluster.rpc import RpcConnection, connect_rpc
from aioflow.core.contexts import contextmanager
from aioflow.core.errors import AioflowError, Closed
from aioflow.core.wire.serializers import Codec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aioflow.core.host import Host
    from aioflow.protocol.handshake import PeerRole

__all__ = ["HELD_S", "LOADING_S", "Pulse"]

logger = logging.getLogger(__name__)

HELD_S = 1.0
"""Time without a turn of the loop after which the log says that user code blocks the loop."""

LOADING_S = 5.0
"""Time after which the log shows the place of a slow import. Imports may take seconds."""

LOOK_S = 0.25
"""How often the loop marks itself as alive, and how often the thread checks."""

ANSWER_S = 5.0
"""Timeout of an answer to a heartbeat. After the timeout the thread connects again."""


class Pulse:
    """Calls `alive(*who, held_s)` at `address` every `interval_s`, from a thread. Use it as `async
    with`.

    `who` identifies this process to the peer. `held_s` is the time for which the loop has been
    blocked.
    """

    def __init__(
        self,
        host: Host,
        secret: bytes,
        role: PeerRole,
        address: tuple[str, int],
        interval_s: float,
        who: tuple[Any, ...],
    ) -> None:
        self._host = host
        self._secret = secret
        self._role = role
        self._address = address
        self._interval_s = interval_s
        self._who = who
        self._seen_at = host.clock.monotonic()
        """When the loop last ran.

        The loop writes this time and the thread reads it. The thread writes `heard_at`, and the
        loop reads it.
        """
        self.heard_at = self._seen_at
        """When the peer last answered."""
        self._loads = ""
        """Description of the program that is being loaded; empty if there is none."""
        self._loop_thread = threading.get_ident()
        self._timer: asyncio.TimerHandle | None = None
        self._is_over = False
        self._wake: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None
        """The thread's own loop and the event that ends the thread's wait; None before the thread
        runs."""
        self._thread: asyncio.Future[None] | None = None

    async def __aenter__(self) -> Self:
        self._show()
        self._thread = self._host.blocking(self._run, dedicated=True, name="aioflow-pulse")
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        assert self._thread is not None
        if self._timer is not None:
            self._timer.cancel()
        self._is_over = True
        if self._wake is not None:
            loop, over = self._wake
            with contextlib.suppress(RuntimeError):  # The thread has just ended.
                loop.call_soon_threadsafe(over.set)
        await asyncio.shield(self._thread)

    def _show(self) -> None:
        self._seen_at = self._host.clock.monotonic()
        self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._show)

    @contextmanager
    def loading(self, what: str) -> Iterator[None]:
        """Inside the block, a blocked loop is reported as loading `what`, which may take long."""
        self._seen_at = self._host.clock.monotonic()
        self._loads = what
        try:
            yield
        finally:
            self._seen_at = self._host.clock.monotonic()
            self._loads = ""

    # In the thread.

    def _run(self) -> None:
        asyncio.run(self._live())

    async def _live(self) -> None:
        over = asyncio.Event()
        self._wake = asyncio.get_running_loop(), over
        if self._is_over:
            return
        beating = asyncio.get_running_loop().create_task(self._beat(), name="heartbeat")
        looks_held, told_s = 0, 0.0
        try:
            while not over.is_set():
                # Two checks in a row: if the machine starves this process, the thread wakes late
                # too, and the loop runs right after it.
                held_s = self._held_s()
                looks_held = looks_held + 1 if not self._loads and held_s > HELD_S else 0
                if looks_held == 2:
                    self._warn()
                told_s = told_s if self._loads else 0.0
                if self._loads and held_s > max(LOADING_S, 2 * told_s):
                    told_s = held_s
                    self._tell_loading(held_s)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S):
                        await over.wait()
        finally:
            beating.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await beating

    def _held_s(self) -> float:
        return self._host.clock.monotonic() - self._seen_at

    def _tell_loading(self, held_s: float) -> None:
        logger.warning(
            "%s has been importing its program for %.0f s. It is at\n%s",
            self._loads,
            held_s,
            self._stack(),
        )

    def _stack(self) -> str:
        frame = sys._current_frames().get(self._loop_thread)
        return "" if frame is None else "".join(traceback.format_stack(frame))

    def _warn(self) -> None:
        logger.warning(
            "the event loop has been held for %.1f s, expected less than 0.1: everything on it "
            "waits; "
            "make this function async, or blocking=True. It is at\n%s",
            self._held_s(),
            self._stack(),
        )

    async def _beat(self) -> None:
        connection: RpcConnection | None = None
        try:
            while True:
                try:
                    async with asyncio.timeout(ANSWER_S):
                        if connection is None or not connection.is_open:
                            connection = await self._connect()
                        await connection.call("alive", *self._who, self._held_s())
                    self.heard_at = self._host.clock.monotonic()
                except (AioflowError, OSError, TimeoutError) as error:
                    # The main connection decides whether this process still belongs to its peer.
                    logger.debug("a heartbeat was not heard: %r", error)
                    if connection is not None:
                        connection.abort(error)
                        connection = None
                await asyncio.sleep(self._interval_s)
        finally:
            if connection is not None:
                connection.abort(Closed("this process needs no heartbeat any more"))

    async def _connect(self) -> RpcConnection:
        return await connect_rpc(
            self._host, self._secret, Codec(), self._role, self._address, {}, lambda _: None
        )
