"""Reads server-sent events, the HTTP event stream of the HTML standard, as a source.

The position is the id of the last event. It is sent as `Last-Event-ID` when the source reconnects.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from aioflow.advice.calls import explained
from aioflow.core.errors import Broken
from aioflow.inspection.redaction import redacted
from aioflow.io.backoff import Backoff
from aioflow.io.buffered import BufferedReader
from aioflow.io.checks import checked_headers, checked_seconds
from aioflow.io.http_client import checked_url, client_session, http_error, without_secrets
from aioflow.operators.source import Split

if TYPE_CHECKING:
    from aioflow.core.timeunits import Duration
    from aioflow.operators.source import SourceContext, SourceReader

__all__ = ["EventParser", "ServerSentEvent", "SseSource", "sse"]

EVENT_BYTES_MAX = 1024 * 1024


class ServerSentEvent(NamedTuple):
    """One event received from the server."""

    data: str
    """The data lines, joined by line feeds."""
    event: str = "message"
    """The type of the event."""
    id: str = ""
    """The last id that the server sent, with this event or before."""


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


class SseSource:
    """A `Source` of the `ServerSentEvent` objects of one stream. Made by `sse`."""

    name = "sse"

    def __init__(
        self, url: str, headers: dict[str, str], reconnect: bool, backoff: Duration
    ) -> None:
        self.url = url
        self.headers = headers
        self.reconnect = reconnect
        self.backoff = backoff

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
        """Yields the events that `data`, the next piece of the stream, completes. Raises Broken for
        an event that is too large.
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
        with without_secrets(self._config):
            await self._listen(split)

    async def _listen(self, split: Split) -> None:
        import aiohttp

        config = self._config
        backoff = Backoff(self.ctx.host.rng, config.backoff)
        last_id = split.position or ""
        async with client_session(
            {**config.headers, "Accept": "text/event-stream", "Cache-Control": "no-store"}, None
        ) as session:
            while True:
                parser = EventParser(last_id)
                try:
                    async with session.get(
                        config.url, headers={"Last-Event-ID": last_id} if last_id else {}
                    ) as response:
                        if response.status == 204:
                            return
                        if response.status != 200:
                            raise http_error(
                                response.status, config.url, await response.content.read(1024)
                            )
                        async for data in response.content.iter_any():
                            for event in parser.feed(data):
                                backoff.reset()
                                last_id = event.id
                                await self.put(event, event.id)
                except (
                    aiohttp.ClientConnectionError,
                    aiohttp.ClientPayloadError,
                    TimeoutError,
                    Broken,
                ) as error:
                    if not config.reconnect:
                        raise
                    backoff.failed(config, error)
                else:
                    if not config.reconnect:
                        return
                    backoff.ended(config)
                await backoff.sleep()
