"""Reads and writes streams of Redis: `redis(url, stream)` reads the entries after the ids of a
checkpoint, and adds entries exactly once.

Needs the extra `aioflow[redis]` (redis-py). Each reader, writer and committer has one connection.
`redis_sink` adds the entries.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from aioflow.advice.hints import explained
from aioflow.core.errors import GraphError, StateError, did_you_mean
from aioflow.io.arguments import (
    T,
    checked_on_error,
    checked_seconds,
    checked_text,
    checked_whole,
    one_or_more,
)
from aioflow.io.backoff import Backoff, reached
from aioflow.io.brokers.readers import GroupReader, Message
from aioflow.io.brokers.redis_client import (
    RedisConfig,
    decoder_of,
    entry_decoder,
    exists,
    is_away,
    open_client,
    refusal,
)
from aioflow.io.formats.format import checked_format
from aioflow.io.web.http_client import checked_url
from aioflow.operators.sink import BaseSink
from aioflow.operators.source import BaseSource, Split

if TYPE_CHECKING:
    from aioflow.core.timeunits import Duration
    from aioflow.io.arguments import OnError
    from aioflow.io.brokers.redis_sink import RedisCommitter, RedisWriter
    from aioflow.io.formats.format import Format
    from aioflow.operators.operator import OperatorContext
    from aioflow.operators.source import SourceContext, SourceReader

__all__ = ["RedisStreams", "redis"]


PAGE_ENTRIES = 1_000
"""Maximum number of entries of each stream in one read."""

BLOCK_MS = 1_000
"""Maximum time that a read waits for entries at the server.

Newly assigned streams are included from the next read on.
"""


LOOK_EVERY_S = 10.0
"""Interval at which an idle stream is checked, because it may have been replaced."""

BEGINNING = "0-0"


@explained
def redis(
    url: str,
    stream: str | Sequence[str],
    type: type[T] | None = None,
    *,
    field: str | None = None,
    format: str | Format[T] = "json",
    start: str = "earliest",
    until: str | None = None,
    group: str | None = None,
    must_exist: bool = True,
    maxlen: int | None = None,
    backoff: Duration = "100ms",
    on_error: OnError = "fail",
) -> RedisStreams[T]:
    """Returns a connector that reads the entries of one or several streams, or adds entries to one
    stream.

    `url` is "redis://[user:password@]host:port/db"; "rediss" and "unix" as in redis-py. Each
    element is a dict of the entry's fields as texts, or a `type` (dataclass, NamedTuple, Struct)
    into whose fields they are converted. With `field` the element is the value of this field.
    `format` decodes it: "json" (to plain values or a `type`), "text", "bytes", or a format of
    `af.io.formats`. `start` is "earliest", "latest", or the id after which to begin; the ids in a
    checkpoint take precedence. With `until="latest"` the source ends with the last entry that
    exists when the job begins. `group` is a consumer group to which the ids of completed
    checkpoints are committed, for monitoring. A job that starts without a checkpoint begins at the
    position of the group. With `must_exist=False` the source waits for a stream that does not exist
    yet.

    A sink writes to one stream. It accepts dicts, or objects with fields, whose values are texts,
    bytes and numbers; with `field`, values that `format` accepts. Delivery is exactly once with
    checkpoints, at least once without. With `maxlen` the sink trims the stream to about this many
    entries.
    """
    streams = one_or_more(stream)
    place = (
        f"redis(..., {', '.join(map(repr, streams))})"  # Without the URL: it may hold a password.
    )
    if not str(url).startswith("unix://"):
        try:
            checked_url(url, place, ("redis", "rediss"))
        except GraphError:
            raise GraphError(
                f"{place}: expected a URL redis://HOST:PORT/DB, rediss:// for TLS, or unix://PATH"
            ) from None
    if (
        not streams
        or not all(isinstance(name, str) and name for name in streams)
        or len(set(streams)) < len(streams)
    ):
        raise GraphError(
            f"{place}: stream is {stream!r}, expected the name of a stream, or a list of "
            "different names"
        )
    if start not in ("earliest", "latest") and not re.fullmatch(r"\d+(-\d+)?", str(start)):
        hint = did_you_mean(start, ("earliest", "latest"))
        raise GraphError(
            f"{place}: start is {start!r}, expected 'earliest', 'latest' or an id like "
            f"'1700000000000-0'{hint}"
        )
    if until not in (None, "latest"):
        raise GraphError(
            f"{place}: until is {until!r}, expected 'latest' or "
            f"None{did_you_mean(until, ('latest',))}"
        )
    if maxlen is not None:
        checked_whole(maxlen, "maxlen", place)
    if group is not None:
        checked_text(group, "group", place)
    checked_seconds(backoff, "backoff", place, may_be_zero=True)
    body: Format[Any] | None = None
    if field is not None:
        body = checked_format(format, type, f"{place}, field {field!r}")
    elif format != "json":
        raise GraphError(
            f"{place}: format is {format!r}, which says what one field holds: name it by field="
        )
    else:
        try:
            entry_decoder(type)
        except TypeError as error:
            raise GraphError(f"{place}: {error}") from None
    on_error = checked_on_error(on_error, place)
    return RedisStreams(
        url,
        streams,
        type,
        field,
        body,
        start,
        until,
        group,
        must_exist,
        maxlen,
        backoff,
        on_error,
    )


class RedisStreams(RedisConfig, BaseSource[T], BaseSink[Any]):
    """A `Source` and a `Sink` of Redis streams. Made by `redis`.

    A split is a stream; its position is the id of the last entry read.
    """

    name = "redis"

    async def discover(self) -> list[Split]:
        """Returns one split for each stream.

        A split's position is the id after which to begin. Its payload is the id of the last entry
        to read, or None.
        """
        return await reached(self._splits, self, is_away, explained=partial(refusal, self))

    async def _splits(self) -> list[Split]:
        client = open_client(self)
        try:
            return [await self._split(client, stream) for stream in self.streams]
        finally:
            await client.aclose()

    async def _split(self, client: Any, stream: str) -> Split:
        last = BEGINNING
        if await exists(client, self, stream):
            last = (await client.xinfo_stream(stream))["last-generated-id"].decode()
        elif self.must_exist:
            raise GraphError(
                f"{self!r}: there is no stream {stream!r} in this database: add an entry first, "
                "or give must_exist=False"
            )
        begin = {"earliest": BEGINNING, "latest": last}.get(self.start, self.start)
        if self.group is not None and last != BEGINNING:
            for known in await client.xinfo_groups(stream):
                if known["name"].decode() == self.group:
                    begin = known["last-delivered-id"].decode()
        return Split(stream, begin, None if self.until is None else last)

    def reader(self, ctx: SourceContext) -> SourceReader[T]:
        return _StreamsReader(ctx, self)

    def writer(self, ctx: OperatorContext) -> RedisWriter:
        from aioflow.io.brokers.redis_sink import RedisWriter

        return RedisWriter(ctx, self)

    def committer(self) -> RedisCommitter:
        from aioflow.io.brokers.redis_sink import RedisCommitter

        return RedisCommitter(self)


def order_of(entry_id: str) -> tuple[int, int]:
    """Returns the sort key of an entry id: its two numbers."""
    milliseconds, _, number = entry_id.partition("-")
    return int(milliseconds), int(number or 0)


class _StreamsReader(GroupReader):
    """A reader of all streams of a subtask over one connection."""

    def __init__(self, ctx: SourceContext, config: RedisConfig) -> None:
        decode, prepare = decoder_of(config, ctx.host)
        super().__init__(ctx, decode, config.on_error, config.group, prepare=prepare)
        self._config = config
        self._behind: dict[str, str] = {}
        """Maps a stream to the id of its last entry that was put into the buffer."""
        self._over: set[str] = set()

    def content_of(self, content: dict[bytes, bytes]) -> bytes:
        field = self._config.field
        return (
            content.get(field.encode(), b"")
            if field is not None
            else b" ".join(name + b"=" + value for name, value in content.items())
        )

    async def run(self) -> None:
        config = self._config
        backoff = Backoff(self.ctx.host.rng, config.backoff)
        explained = partial(refusal, config)
        await backoff.persistently(partial(self._attempt, backoff), config, is_away, explained)

    async def _attempt(self, backoff: Backoff) -> None:
        client = open_client(self._config)
        try:
            await self._read(client, backoff)
        finally:
            await client.aclose()

    async def _read(self, client: Any, backoff: Backoff) -> None:
        """Reads until all streams have been read to their ends."""
        bounded, monotonic = self._config.bounded, self.ctx.host.clock.monotonic
        looked = monotonic()
        while True:
            for stream, split in list(self.splits.items()):
                if stream not in self._behind:
                    await self._check(client, stream, split.position)
                    self._behind[stream] = split.position
            if self.untold:
                await self._tell(client)
            wanted = {
                stream: last for stream, last in self._behind.items() if stream not in self._over
            }
            if not wanted:
                return
            answer = await client.xread(
                wanted, count=PAGE_ENTRIES, block=None if bounded else BLOCK_MS
            )
            backoff.reset()
            came = {name.decode(): entries for name, entries in answer or ()}
            for stream in wanted:
                if stream in came or bounded:
                    await self._hand_over(stream, came.get(stream, []))
            if monotonic() - looked >= LOOK_EVERY_S:
                looked = monotonic()
                for stream, behind in wanted.items():
                    if stream not in came:
                        await self._check(client, stream, behind)

    async def _hand_over(
        self, stream: str, entries: list[tuple[bytes, dict[bytes, bytes]]]
    ) -> None:
        end = self.splits[stream].payload
        messages = []
        for raw_id, fields in entries:
            id_ = raw_id.decode()
            if end is not None and order_of(id_) > order_of(end):
                break
            messages.append(
                Message(fields, id_, order_of(id_)[0], f"redis stream {stream!r}, entry {id_}")
            )
        last = end is not None and (
            len(messages) < len(entries) or not entries or messages[-1].position == end
        )
        if messages:
            self._behind[stream] = messages[-1].position
        if last:
            self._over.add(stream)
        await self.put(stream, messages, last=last)

    async def _check(self, client: Any, stream: str, behind: str) -> None:
        """Raises StateError if the stream was replaced. Its last id is then below `behind`, the
        last id that was read.
        """
        if behind == BEGINNING or not await exists(client, self._config, stream):
            return
        found = await client.xinfo_stream(stream)
        begin, last = order_of(behind), order_of(found["last-generated-id"].decode())
        if begin > last and behind != self._config.start:
            raise StateError(
                f"{self._config!r}: {stream!r} was read up to {behind}, and its last entry ever "
                f"is {last[0]}-{last[1]}: it was "
                "recreated or set back since; restore the database too, or start with "
                "restore=None, fresh=True"
            )

    # Methods for the consumer group.

    async def _tell(self, client: Any) -> None:
        from redis.exceptions import ResponseError

        told, self.untold = self.untold, {}
        for stream, position in told.items():
            if not await exists(client, self._config, stream):
                continue  # The stream may be created later. A group needs an existing stream.
            try:
                await client.xgroup_create(stream, self._config.group, position)
            except ResponseError as error:
                if "BUSYGROUP" not in str(error):
                    raise
                await client.xgroup_setid(stream, self._config.group, position)

    async def tell_at_end(self) -> None:
        client = open_client(self._config)
        try:
            await self._tell(client)
        finally:
            await client.aclose()
