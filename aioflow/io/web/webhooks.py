"""A source that is an HTTP server: each POST is an element.

A run with checkpoints puts the bodies into an inlet with a journal, as `push` does. The sender
receives 202 when its body is on disk. Without a journal the sender receives 202 when the body is in
memory. Delivery is then at most once over a restart, because the sender forgets the message.

Safe by default: the server listens on 127.0.0.1 and rejects another address without a token. It
limits the size of requests, and answers 503 when its capacity of waiting elements is used up.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Self

import msgspec

from aioflow.advice.hints import explained
from aioflow.core.errors import CheckpointError, Closed, GraphError, JobNotRunning, did_you_mean
from aioflow.core.timeunits import LogBackoff
from aioflow.inspection.tracing import RequestSpans
from aioflow.io.arguments import MALFORMED, PORT_MAX, checked_seconds, checked_text, checked_whole
from aioflow.io.brokers.readers import say_at_most_once
from aioflow.io.pushing import InletReader, InletSource, PushInlet, checked_journal
from aioflow.io.web.http_client import DECODINGS
from aioflow.network.http_limits import Door

if TYPE_CHECKING:
    from pathlib import Path

    from aiohttp import web

    from aioflow.core.timeunits import Duration
    from aioflow.io.journal import Journal
    from aioflow.operators.source import SourceContext, SourceReader, Split

__all__ = ["WebhookSource", "webhook"]

logger = logging.getLogger(__name__)

BODY_BYTES_MAX = 1024 * 1024

BODY_S = 20.0
"""Maximum time for the body of a request to arrive."""

CAPACITY = 1024

CONNECTIONS_MAX = 1024

UNCOVERED = 100_000
"""Maximum number of bodies in memory that no checkpoint covers."""


@explained
def webhook(
    host: str = "127.0.0.1",
    port: int = 8080,
    path: str = "/",
    *,
    token: str | None = None,
    decode: str = "json",
    capacity: int = CAPACITY,
    max_bytes: int = BODY_BYTES_MAX,
    patience: Duration = "5s",
    journal: str | Path | bool | None = None,
) -> WebhookSource:
    """Returns a source that serves POST `path` at `host:port`; each body is an element.

    In a job with checkpoints, the server answers when the body is in the journal, a local
    directory. The next run reads the bodies that no checkpoint covers from the journal. `journal`
    names the directory. The default is a directory below the checkpoints, if these are local and
    the job does not run `on=` a cluster. With a journal the server listens in the process of the
    program. With `journal=False` bodies that no checkpoint covers are lost over a restart.

    Requests must have `token` as `Authorization: Bearer <token>`. A token is required if `host` is
    not a loopback address. `decode` is "json", "text" or "bytes". The server answers 202 for an
    accepted body, 400 for a malformed one, and 401 without the token. It answers 408 for a body
    that takes 20 s, and 413 above `max_bytes`. It answers 503 if `capacity` elements still wait
    after `patience`, while the job ends, and if the journal cannot be written.
    """
    where = f"webhook({host!r}, {port}, {path!r})"
    checked_text(host, "host", where)
    checked_text(path, "path", where)
    checked_whole(port, "port", where, 0, PORT_MAX)
    checked_whole(capacity, "capacity", where)
    checked_whole(max_bytes, "max_bytes", where)
    if token is not None and (not isinstance(token, str) or not token):
        raise GraphError(f"{where}: token is expected to be a text that is not empty, or None")
    if not _is_loopback(host) and not token:
        raise GraphError(
            f"{where}: {host} can be reached from other machines, expected a token: give token=, "
            "or listen on 127.0.0.1"
        )
    if decode not in DECODINGS:
        raise GraphError(
            f"{where}: decode is {decode!r}, expected 'json', 'text' or "
            f"'bytes'{did_you_mean(decode, DECODINGS)}"
        )
    if not path.startswith("/") or "{" in path or "}" in path:
        raise GraphError(
            f"{where}: path is {path!r}, expected one that begins with a slash, without braces"
        )
    patience_s = checked_seconds(patience, "patience", where, may_be_zero=True)
    kept = checked_journal(journal, "webhook")
    return WebhookSource(host, port, path, token, decode, capacity, max_bytes, patience_s, kept)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # The address of a host name may change.


class WebhookSource(InletSource[Any]):
    """A `Source` that serves HTTP; each POST is an element. Made by `webhook`. It has one split, so
    there is one server.
    """

    name = "webhook"

    def __init__(
        self,
        host: str,
        port: int,
        path: str,
        token: str | None,
        decode: str,
        capacity: int,
        max_bytes: int,
        patience_s: float,
        journal: str | Path | bool | None,
    ) -> None:
        super().__init__(capacity, UNCOVERED, journal)
        self.host = host
        self.port = port
        self.path = path
        self.decode = decode
        self.capacity = capacity
        self.max_bytes = max_bytes
        self.patience_s = patience_s
        self._token = token
        self.row: Callable[[Any], Any] | None = None
        """Converts a decoded body to the element. If it raises ValueError, the sender gets 400."""

    def __repr__(self) -> str:
        return f"webhook({self.host!r}, {self.port}, {self.path!r})"

    def accepts(self, authorization: str | None) -> bool:
        """Returns whether a request with this `Authorization` header is authorized. The comparison
        takes constant time.
        """
        if self._token is None:
            return True
        return hmac.compare_digest((authorization or "").encode(), f"Bearer {self._token}".encode())

    def for_run(self, journal: Journal | None = None) -> Self:
        """Returns a copy of this source for one run. Without a journal, each reader makes its own
        inlet.
        """
        if journal is None:
            return self
        source = super().for_run(journal)
        source.stays_here = True
        return source

    def reader(self, ctx: SourceContext) -> SourceReader[Any]:
        return WebhookReader(ctx, self)


class WebhookReader(InletReader):
    """The reader that runs the server while the source runs."""

    def __init__(self, ctx: SourceContext, source: WebhookSource) -> None:
        inlet = source.inlet
        keep = inlet is not None and ctx.replays
        super().__init__(inlet or PushInlet(source.capacity), ctx, keep)
        self._ctx = ctx
        self._source = source
        self._survives = inlet is not None
        self.port = 0
        """The bound port, once the server listens."""
        self._door = Door(CONNECTIONS_MAX, repr(source))
        self._server = AsyncExitStack()
        self._log_backoff = LogBackoff()
        self._spans: RequestSpans | None = None
        """Makes the trace spans of the requests. None if the program does not trace."""

    async def open(self, splits: Sequence[Split]) -> None:
        """Starts the server. Returns once it listens, so the program may post right after the
        start.

        A port that is in use fails the start.
        """
        await super().open(splits)
        if splits:
            if not self._survives and self._ctx.replays and self._ctx.runtime.attempt == 0:
                say_at_most_once(self._ctx, "the caller has had its answer and will not call again")
            await self._listen()

    async def _listen(self) -> None:
        from aiohttp import web

        source = self._source
        self._spans = RequestSpans.of_program()
        application = web.Application(client_max_size=source.max_bytes)
        application.router.add_post(source.path, self._answer)
        runner = web.AppRunner(
            application, access_log=None, logger=self._door.complaints, handler_cancellation=True
        )
        await runner.setup()
        self._server.callback(self._door.close)
        self._server.push_async_callback(runner.cleanup)
        assert runner.server is not None
        self._door.open(runner.server)
        listener = await self._host.net.listen(self._door, source.host, source.port)
        self._server.callback(listener.close)
        self.port = listener.port

    async def close(self) -> None:
        """Ends the server. The inlet of a run stays, and a restart attaches to it again."""
        await self._server.aclose()

    async def _answer(self, request: web.Request) -> web.Response:
        with self._door.answering(request.protocol):
            if self._spans is None:
                return await self._receive(request)
            with self._spans.request(f"POST {self._source.path}", request.headers) as span:
                answer = await self._receive(request)
                span.set_attribute("http.response.status_code", answer.status)
                return answer

    async def _receive(self, request: web.Request) -> web.Response:
        from aiohttp import web

        config = self._source
        if not config.accepts(request.headers.get("Authorization")):
            return web.Response(
                status=401, text="expected Authorization: Bearer with the token of this webhook\n"
            )
        try:
            async with asyncio.timeout(BODY_S):
                body = await request.read()
        except TimeoutError:
            return web.Response(status=408, text=f"the body did not arrive within {BODY_S:g} s\n")
        try:
            value: Any = body
            if config.decode == "json":
                value = msgspec.json.decode(body)
            elif config.decode == "text":
                value = body.decode()
        except MALFORMED as error:
            return web.Response(status=400, text=f"the body is no {config.decode}: {error}\n")
        try:
            if config.row is not None:
                value = config.row(value)
        except MALFORMED as error:
            return web.Response(status=400, text=f"the body is no row of the table: {error}\n")
        try:
            async with asyncio.timeout(config.patience_s):
                await self._inlet.room()
            await self._inlet.put(value)
        except TimeoutError:
            trouble = "the job is busy"
        except (Closed, JobNotRunning):
            trouble = "the job ends"
        except CheckpointError as error:
            trouble = "the body could not be stored"
            if self._log_backoff.failed(asyncio.get_running_loop().time()) is not None:
                logger.warning("%r answers 503: %s", config, error)
        else:
            self._log_backoff.succeeded(0.0)
            return web.Response(status=202)
        return web.Response(
            status=503, headers={"Retry-After": "1"}, text=f"{trouble}, try again\n"
        )
