"""An HTTP client: a source that requests a URL repeatedly, and a sink that posts records. aiohttp
is imported only when a job runs.

`sse` is a source of server-sent events, the HTTP event stream of the HTML standard. Its position is
the id of the last event, which the source sends as `Last-Event-ID` when it reconnects.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from aioflow.advice.hints import explained
from aioflow.core.contexts import asynccontextmanager, contextmanager
from aioflow.core.errors import Broken, GraphError, did_you_mean
from aioflow.core.wire.types import register_type
from aioflow.inspection.redaction import redacted
from aioflow.io.arguments import (
    MALFORMED,
    Malformed,
    check_host_and_port,
    checked_headers,
    checked_on_error,
    checked_seconds,
    checked_whole,
)
from aioflow.io.backoff import Backoff
from aioflow.io.bodies import json_encoder
from aioflow.io.brokers.readers import BufferedReader
from aioflow.operators.sink import LINGER_MS, BaseSink, BaseWriter
from aioflow.operators.source import BaseSource, Split

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import aiohttp

    from aioflow.core.timeunits import Duration
    from aioflow.io.arguments import OnError
    from aioflow.operators.operator import OperatorContext
    from aioflow.operators.source import SourceContext, SourceReader

__all__ = [
    "DECODINGS",
    "EventParser",
    "HttpConnector",
    "ServerSentEvent",
    "SseSource",
    "checked_url",
    "client_session",
    "http",
    "http_error",
    "sse",
    "without_secrets",
]

RETRIES = 5
"""Number of consecutive failures that are retried: refused or broken connections, and answers of
429 and 5xx.
"""

BODY_BYTES_MAX = 16 * 1024 * 1024

DECODINGS = ("json", "text", "bytes")
"""Values of `decode=`: the formats of a body."""

logger = logging.getLogger(__name__)


@explained
def http(
    url: str,
    every: Duration = "1s",
    *,
    decode: str = "json",
    items: Callable[[Any], Iterable[Any]] | None = None,
    headers: Mapping[str, str] | None = None,
    timeout: Duration = "30s",
    batch: int = 1,
    backoff: Duration = "100ms",
    retries: int = RETRIES,
    on_error: OnError = "fail",
) -> HttpConnector:
    """Returns a connector that requests `url` at the interval `every`. Each answer is an element,
    or each item of `items(answer)`.

    As a sink it posts JSON to `url`. `decode` is "json", "text" or "bytes". With `batch` above 1
    the sink posts arrays of up to this many records; a record waits at most 50 ms for others.
    Requests that fail temporarily are retried `retries` times, so a record may arrive twice. The
    job fails after the last retry, and immediately for any other answer than 2xx.
    """
    checked_url(url, "http", ("http", "https"))
    place = f"http({redacted(url)!r})"
    if decode not in DECODINGS:
        hint = did_you_mean(decode, DECODINGS)
        raise GraphError(f"{place}: decode is {decode!r}, expected 'json', 'text' or 'bytes'{hint}")
    if items is not None and not callable(items):
        raise GraphError(f"{place}: items is {items!r}, expected a function of the answer")
    checked_seconds(backoff, "backoff", place, may_be_zero=True)
    return HttpConnector(
        url,
        checked_seconds(every, "every", place, may_be_zero=True),
        decode,
        items,
        checked_headers(headers, place),
        checked_seconds(timeout, "timeout", place),
        checked_whole(batch, "batch", place),
        backoff,
        checked_whole(retries, "retries", place, least=0),
        checked_on_error(on_error, place),
    )


def checked_url(url: str, connector: str, schemes: tuple[str, ...]) -> None:
    """Raises GraphError naming `connector` for a URL without a host or with a scheme not in
    `schemes`.
    """
    scheme, found, rest = str(url).partition("://")
    if not found or scheme.lower() not in schemes or not rest.strip("/"):
        expected = " or ".join(f"{known}://HOST/PATH" for known in schemes)
        # A text without a scheme may contain a password too.
        shown = redacted(str(url)) if found else redacted(f"://{url}").removeprefix("://")
        raise GraphError(f"{connector}: the URL is {shown!r}, expected {expected}")
    check_host_and_port(
        url, f"{connector}({redacted(url)!r})" if connector.isidentifier() else connector
    )


@dataclass(eq=False, repr=False)
class HttpConnector(BaseSource[Any], BaseSink[Any]):
    """A `Source` that requests a URL repeatedly, and a `Sink` that posts to it. Made by `http`.

    The source is at-most-once, because an answer cannot be requested again.
    """

    name = "http"
    bounded = False

    url: str
    every_s: float
    decode: str
    items: Callable[[Any], Iterable[Any]] | None
    headers: dict[str, str]
    timeout_s: float
    batch: int
    backoff: Duration
    retries: int
    on_error: OnError

    def __repr__(self) -> str:
        return f"http({redacted(self.url)!r})"

    async def discover(self) -> list[Split]:
        return [Split("0")]

    def reader(self, ctx: SourceContext) -> SourceReader[Any]:
        return _HttpReader(ctx, self)

    def writer(self, ctx: OperatorContext) -> HttpWriter:
        return HttpWriter(ctx, self)

    def committer(self) -> None:
        return None


@asynccontextmanager
async def client_session(
    headers: Mapping[str, str], timeout_s: float | None
) -> AsyncIterator[aiohttp.ClientSession]:
    """Yields a session that is closed after the block.

    `timeout_s` limits the time of a whole request. None means that only the time to connect is
    limited.
    """
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=30.0)
    async with aiohttp.ClientSession(headers=dict(headers), timeout=timeout) as session:
        yield session


def http_error(status: int, url: str, body: bytes) -> Broken:
    """Returns the error for an unexpected answer of a server, with the beginning of its body."""
    return Broken(
        redacted(f"{url} answered {status}, expected 2xx: {body[:200].decode(errors='replace')!r}")
    )


@contextmanager
def without_secrets(config: object) -> Iterator[None]:
    """Within the block, replaces an error of aiohttp by Broken if its message quotes a URL with a
    password or token.
    """
    import aiohttp

    try:
        yield
    except aiohttp.ClientError as error:
        shown = redacted(str(error))
        if shown == str(error):
            raise
        raise Broken(f"{config!r}: {type(error).__name__}: {shown}") from None


def _failures() -> tuple[type[Exception], ...]:
    """Returns the error classes after which a request may succeed later."""
    import aiohttp

    return aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError, Broken


def _is_final(error: Exception, status: int) -> bool:
    """Returns whether the server has refused the request for good, so that a retry would fail too.
    `status` is the HTTP status of the answer.
    """
    return isinstance(error, Broken) and status != 429 and status < 500


class _HttpReader(BufferedReader):
    at_most_once = "an answer cannot be asked for again"

    def __init__(self, ctx: SourceContext, config: HttpConnector) -> None:
        super().__init__(ctx)
        self._config = config
        self._malformed = Malformed(ctx, config.on_error)

    async def run(self, split: Split) -> None:
        with without_secrets(self._config):
            await self._ask()

    async def _ask(self) -> None:
        config = self._config
        loop = asyncio.get_running_loop()
        backoff = Backoff(self.ctx.host.rng, config.backoff)
        async with client_session(config.headers, config.timeout_s) as session:
            while True:
                asked_s, status = loop.time(), 0
                try:
                    async with session.get(config.url) as response:
                        body = await response.content.read(BODY_BYTES_MAX + 1)
                        while len(body) <= BODY_BYTES_MAX and (
                            more := await response.content.read(BODY_BYTES_MAX + 1 - len(body))
                        ):
                            body += more
                        status = response.status
                    if not 200 <= status < 300:
                        raise http_error(status, config.url, body)
                except _failures() as error:
                    if backoff.tries >= config.retries or _is_final(error, status):
                        raise
                    logger.info("%r: %s, asking again", config, redacted(str(error)))
                    await backoff.sleep()
                    continue
                backoff.reset()
                await self._hand_over(body)
                await asyncio.sleep(max(config.every_s - (loop.time() - asked_s), 0))

    async def _hand_over(self, body: bytes) -> None:
        config = self._config
        try:
            if len(body) > BODY_BYTES_MAX:
                raise ValueError(f"the answer has more than {BODY_BYTES_MAX} bytes")
            answer: Any = body
            if config.decode == "json":
                answer = msgspec.json.decode(body)
            elif config.decode == "text":
                answer = body.decode()
        except MALFORMED as error:
            self._malformed.report(body[:BODY_BYTES_MAX], f"{config!r}: {error}", error)
            return
        if config.items is None:
            await self.put(answer)
            return
        for item in config.items(answer):
            await self.put(item)


class HttpWriter(BaseWriter[Any]):
    """Posts the records of one subtask, one request after the other."""

    def __init__(self, ctx: OperatorContext, config: HttpConnector) -> None:
        self._ctx = ctx
        self._config = config
        self._pending: list[Any] = []
        self._session: aiohttp.ClientSession | None = None
        self._encode = json_encoder("http sink").encode
        self.full = False
        self.linger_ms = LINGER_MS if config.batch > 1 else None

    async def open(self) -> None:
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=self._config.timeout_s)
        self._session = aiohttp.ClientSession(headers=self._config.headers, timeout=timeout)

    def write_batch(self, values: Sequence[Any], timestamps: Sequence[int] | None) -> None:
        self._pending.extend(values)
        self.full = len(self._pending) >= self._config.batch

    async def flush(self) -> None:
        self.full = False
        pending, self._pending = self._pending, []
        size = self._config.batch
        for start in range(0, len(pending), size):
            records = pending[start : start + size]
            with without_secrets(self._config):
                await self._post(self._encode(records if size > 1 else records[0]))

    async def _post(self, body: bytes) -> None:
        assert self._session is not None, "open() comes before the first flush"
        config = self._config
        backoff = Backoff(self._ctx.host.rng, config.backoff)
        while True:
            status = 0
            try:
                async with self._session.post(
                    config.url, data=body, headers={"Content-Type": "application/json"}
                ) as response:
                    status = response.status
                    if 200 <= status < 300:
                        return
                    raise http_error(status, config.url, await response.content.read(1024))
            except _failures() as error:
                if backoff.tries >= config.retries or _is_final(error, status):
                    raise
                logger.info("%r: %s, posting again", config, redacted(str(error)))
                await backoff.sleep()

    async def prepare(self, checkpoint_id: int) -> list[Any]:
        await self.flush()
        return []

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()


EVENT_BYTES_MAX = 1024 * 1024


class ServerSentEvent(NamedTuple):
    """One event received from the server."""

    data: str
    """The data lines, joined by line feeds."""
    event: str = "message"
    """The type of the event."""
    id: str = ""
    """The last id that the server sent, with this event or an earlier one."""


@explained
def sse(
    url: str,
    *,
    headers: Mapping[str, str] | None = None,
    reconnect: bool = True,
    backoff: Duration = "100ms",
) -> SseSource:
    """Returns a source of the events that the server sends at `url`, as `ServerSentEvent`.

    Delivery over a restart is exactly once if the server sends ids and honours `Last-Event-ID`.
    With `reconnect` the source connects again when the stream ends; otherwise the source ends. An
    answer of 204 always ends the source.
    """
    checked_url(url, "sse", ("http", "https"))
    place = f"sse({redacted(url)!r})"
    checked_seconds(backoff, "backoff", place, may_be_zero=True)
    return SseSource(url, checked_headers(headers, place), reconnect, backoff)


@dataclass(eq=False, repr=False)
class SseSource(BaseSource[ServerSentEvent]):
    """A `Source` of the `ServerSentEvent` objects of one stream. Made by `sse`."""

    name = "sse"

    url: str
    headers: dict[str, str]
    reconnect: bool
    backoff: Duration

    def __repr__(self) -> str:
        return f"sse({redacted(self.url)!r})"

    @property
    def bounded(self) -> bool:
        return not self.reconnect

    async def discover(self) -> list[Split]:
        return [Split("0")]

    def reader(self, ctx: SourceContext) -> SourceReader[ServerSentEvent]:
        return _SseReader(ctx, self)


class EventParser:
    """A parser of the event stream format (HTML standard, section 9.2.6). It accepts the stream in
    pieces of any size.
    """

    def __init__(self, last_id: str = "") -> None:
        self.last_id = last_id
        self._rest = bytearray()
        self._data: list[str] = []
        self._size = 0
        self._event = ""
        self._first = True

    def feed(self, data: bytes) -> Iterator[ServerSentEvent]:
        """Parses `data`, the next piece of the stream. Yields the events that are complete now.
        Raises Broken for an event that is too large.
        """
        may_end = self._rest.endswith(b"\r") or b"\n" in data or b"\r" in data
        self._rest += data
        self._size += len(data)
        if may_end:  # Otherwise nothing is copied, because a line may arrive byte by byte.
            yield from self._events()
        if self._size > EVENT_BYTES_MAX:
            raise Broken(f"an event has more than {EVENT_BYTES_MAX} bytes")

    def _events(self) -> Iterator[ServerSentEvent]:
        rest, held = bytes(self._rest), b""
        if rest.endswith(b"\r"):  # This may be the first half of "\r\n".
            rest, held = rest[:-1], b"\r"
        lines = rest.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._rest = bytearray(lines.pop() + held)
        for line in lines:
            event = self._line(line.decode("utf-8", "replace"))
            if event is not None:
                self._size = 0
                yield event

    def _line(self, line: str) -> ServerSentEvent | None:
        if self._first:
            self._first = False
            line = line.removeprefix("\ufeff")
        if not line:
            data, event, self._data, self._event = self._data, self._event, [], ""
            return (
                ServerSentEvent("\n".join(data), event or "message", self.last_id) if data else None
            )
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            self._data.append(value)
        elif name == "event":
            self._event = value
        elif name == "id" and "\0" not in value:
            self.last_id = value
        return None


class _SseReader(BufferedReader):
    at_most_once = "a server sends again only what has an id and what it still keeps"

    def __init__(self, ctx: SourceContext, config: SseSource) -> None:
        super().__init__(ctx)
        self._config = config

    async def run(self, split: Split) -> None:
        config = self._config
        backoff = Backoff(self.ctx.host.rng, config.backoff)
        self._last_id = split.position or ""
        headers = {"Accept": "text/event-stream", "Cache-Control": "no-store"}
        with without_secrets(config):
            async with client_session({**config.headers, **headers}, None) as session:
                listen = partial(self._listen, session, backoff)
                await backoff.reconnecting(listen, config, config.reconnect, _failures())

    async def _listen(self, session: aiohttp.ClientSession, backoff: Backoff) -> bool:
        """Reads events until the stream ends. Returns whether the server has declared, by the
        status 204, that no more events will come.
        """
        url, last_id = self._config.url, self._last_id
        parser = EventParser(last_id)
        headers = {"Last-Event-ID": last_id} if last_id else {}
        async with session.get(url, headers=headers) as response:
            if response.status == 204:
                return True
            if response.status != 200:
                raise http_error(response.status, url, await response.content.read(1024))
            async for data in response.content.iter_any():
                for event in parser.feed(data):
                    backoff.reset()
                    self._last_id = event.id
                    await self.put(event, event.id)
        return False


# Savepoints contain these module names of the first release.
register_type(ServerSentEvent, name="aioflow.io.event_streams:ServerSentEvent")
