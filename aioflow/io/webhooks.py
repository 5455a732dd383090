"""A source that is an HTTP server: each POST is an element. Delivery is at most once over a
restart, because the sender has received 202 and forgets the message.

Safe by default: the server listens on 127.0.0.1 and rejects another address without a token. It
limits the size of requests, and answers 503 rather than hold more than its capacity.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from aioflow.advice.calls import explained
from aioflow.core.aio import wait_first
from aioflow.core.errors import GraphError, did_you_mean
from aioflow.io.arguments import MALFORMED, PORT_MAX, checked_seconds, checked_text, checked_whole
from aioflow.io.http_client import DECODINGS
from aioflow.io.readers import BufferedReader
from aioflow.network.http_limits import Door
from aioflow.operators.source import BaseSource, Split

if TYPE_CHECKING:
    from aiohttp import web

    from aioflow.core.timeunits import Duration
    from aioflow.operators.source import SourceContext, SourceReader

__all__ = ["WebhookSource", "webhook"]

BODY_BYTES_MAX = 1024 * 1024

BODY_S = 20.0
"""Maximum time for the body of a request to arrive."""

CAPACITY = 1024

CONNECTIONS_MAX = 1024


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
) -> WebhookSource:
    """Returns a source that serves POST `path` at `host:port`; each body is an element.

    `token` is expected as `Authorization: Bearer <token>`; it is needed on an address that is not
    loopback. `decode` is "json", "text" or "bytes". The server answers 202 for an accepted body,
    400 for a malformed one, 401 without the token, 408 for a body that takes 20 s, and 413 above
    `max_bytes`. It answers 503 if the job has not made room among `capacity` elements after
    `patience`.
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
    return WebhookSource(host, port, path, token, decode, capacity, max_bytes, patience_s)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # The address that a host name stands for may change.


class WebhookSource(BaseSource[Any]):
    """A `Source` that serves HTTP; each POST is an element. Made by `webhook`. It has one split, so
    there is one server.
    """

    name = "webhook"
    bounded = False

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
    ) -> None:
        self.host = host
        self.port = port
        self.path = path
        self.decode = decode
        self.capacity = capacity
        self.max_bytes = max_bytes
        self.patience_s = patience_s
        self._token = token

    def __repr__(self) -> str:
        return f"webhook({self.host!r}, {self.port}, {self.path!r})"

    def accepts(self, authorization: str | None) -> bool:
        """Returns whether a request with this `Authorization` header is authorized. The comparison
        takes constant time.
        """
        if self._token is None:
            return True
        return hmac.compare_digest((authorization or "").encode(), f"Bearer {self._token}".encode())

    async def discover(self) -> list[Split]:
        return [Split("0")]

    def reader(self, ctx: SourceContext) -> SourceReader[Any]:
        return WebhookReader(ctx, self)


class WebhookReader(BufferedReader):
    """The reader that runs the server while the source runs."""

    at_most_once = "the caller has had its answer and will not call again"

    def __init__(self, ctx: SourceContext, config: WebhookSource) -> None:
        super().__init__(ctx, capacity=config.capacity)
        self._config = config
        self.port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        """The bound port, once the server listens."""
        self._door = Door(CONNECTIONS_MAX, repr(config))

    async def open(self, splits: Sequence[Split]) -> None:
        """Starts the server. Returns once it listens, so the program may post right after the
        start.

        A port that is in use fails the start.
        """
        await super().open(splits)
        if self._pump is not None:
            await wait_first([self._pump, self.port])
            if self._error is not None:
                raise self._error

    async def run(self, split: Split) -> None:
        from aiohttp import web

        config = self._config
        application = web.Application(client_max_size=config.max_bytes)
        application.router.add_post(config.path, self._answer)
        runner = web.AppRunner(
            application, access_log=None, logger=self._door.complaints, handler_cancellation=True
        )
        await runner.setup()
        try:
            assert runner.server is not None
            self._door.open(runner.server)
            listener = await self.ctx.host.net.listen(self._door, config.host, config.port)
            try:
                self.port.set_result(listener.port)
                await asyncio.get_running_loop().create_future()  # Waits until close() cancels it.
            finally:
                listener.close()
        finally:
            await runner.cleanup()
            self._door.close()

    async def _answer(self, request: web.Request) -> web.Response:
        with self._door.answering(request.protocol):
            return await self._receive(request)

    async def _receive(self, request: web.Request) -> web.Response:
        from aiohttp import web

        config = self._config
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
            async with asyncio.timeout(config.patience_s):
                while len(self._values) >= self._capacity:
                    await self.room()
        except TimeoutError:
            return web.Response(
                status=503, headers={"Retry-After": "1"}, text="the job is busy, try again\n"
            )
        self.add(value)
        return web.Response(status=202)
