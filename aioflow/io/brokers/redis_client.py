"""Connects to Redis: clients, their errors, and the check of a stream.

Decodes entries of streams into values, and encodes values as entries. A value is a whole entry with
its fields, or a body in one field.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from aioflow.core.contexts import asynccontextmanager
from aioflow.core.errors import GraphError, describe_record, with_article
from aioflow.io.conversion import field_names, fields_of_value, row_converter

if TYPE_CHECKING:
    from aioflow.core.host import Host
    from aioflow.core.timeunits import Duration
    from aioflow.io.arguments import OnError
    from aioflow.io.brokers.readers import Message
    from aioflow.io.formats.format import Format

__all__ = [
    "ANSWER_TIMEOUT_S",
    "RedisConfig",
    "answered",
    "decoder_of",
    "encoder_of",
    "entry_decoder",
    "exists",
    "is_away",
    "open_client",
    "refusal",
]

ANSWER_TIMEOUT_S = 20.0
"""Time without an answer after which the server counts as unreachable."""


@dataclass(eq=False, repr=False)
class RedisConfig:
    """The checked arguments of `redis(...)`. Its repr is the user's call, for log and error
    messages.
    """

    url: str
    streams: list[str]
    type: Any
    field: str | None
    format: Format[Any] | None
    """The format of the values of the field `field`. None if whole entries are read or written."""
    start: str
    until: str | None
    group: str | None
    must_exist: bool
    maxlen: int | None
    backoff: Duration
    on_error: OnError

    @property
    def bounded(self) -> bool:
        return self.until is not None

    def __repr__(self) -> str:
        return f"redis(..., {', '.join(map(repr, self.streams))})"


def open_client(config: RedisConfig) -> Any:
    """Returns a client, which connects at its first command and never retries.

    Raises ModuleNotFoundError naming the extra.
    """
    try:
        from redis.asyncio import Redis
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff
    except ImportError:
        raise ModuleNotFoundError(
            "af.io.redis needs redis-py: pip install 'aioflow[redis]'"
        ) from None

    class Bounded(Redis):
        """A client that raises TimeoutError for any command that is not answered in time."""

        async def execute_command(self, *args: Any, **options: Any) -> Any:
            async with answered(config):
                # redis-py has no type annotations here.
                return await super().execute_command(  # type: ignore[no-untyped-call]
                    *args, **options
                )

    try:
        client = Bounded.from_url(
            config.url,
            protocol=2,  # The version of the protocol determines the form of the answers.
            decode_responses=False,
            single_connection_client=False,
            # With a timeout, redis-py calls asyncio.wait_for, which loses cancellations in 3.11.
            socket_timeout=None,
            socket_connect_timeout=ANSWER_TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),
        )
        # This checks the arguments, and does not connect yet.
        client.connection_pool.connection_class(**client.connection_pool.connection_kwargs)
        return client
    except TypeError as error:
        unknown = str(error).rpartition(" ")[2]
        raise GraphError(
            f"{config!r}: redis-py knows no option {unknown} of a URL: take it out of what "
            "follows the ?"
        ) from None
    except ValueError:  # The message may contain a part of the password.
        raise GraphError(
            f"{config!r}: the URL cannot be read, expected redis://USER:PASSWORD@HOST:PORT/DB, "
            "with %40 for @ and the like in a password"
        ) from None


@asynccontextmanager
async def answered(config: RedisConfig) -> AsyncIterator[None]:
    """Raises TimeoutError when a command within the block is not answered in time.

    The client itself limits the time of single commands, but not of pipelines.
    """
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            yield
    except TimeoutError:
        raise TimeoutError(
            f"{config!r}: the server has not answered for {ANSWER_TIMEOUT_S:g} s"
        ) from None


def is_away(error: BaseException) -> bool:
    """Returns whether the server cannot be reached or is not ready, so a retry may succeed."""
    from redis import exceptions

    if isinstance(error, (exceptions.AuthenticationError, exceptions.AuthorizationError)):
        return False
    return isinstance(
        error,
        (exceptions.ConnectionError, exceptions.TimeoutError, exceptions.ReadOnlyError, OSError),
    )


def refusal(config: RedisConfig, error: Exception) -> GraphError | None:
    """Returns a GraphError if `error` is a refusal that a retry would not change. Returns None for
    any other error.
    """
    from redis import exceptions

    if isinstance(error, exceptions.InvalidResponse):
        return GraphError(
            f"{config!r}: what answers does not speak the protocol of Redis: look at host and "
            f"port of the URL ({error})"
        )
    if isinstance(
        error, (exceptions.AuthenticationError, exceptions.NoPermissionError)
    ) or "NOAUTH" in str(error):
        return GraphError(
            f"{config!r}: the server refuses: {error}; give redis://USER:PASSWORD@HOST, of a user "
            "that may read and write it"
        )
    return None


async def exists(client: Any, config: RedisConfig, stream: str) -> bool:
    """Returns whether the stream exists. Raises GraphError if its key has another type."""
    kind = (await client.type(stream)).decode()
    if kind not in ("none", "stream"):
        raise GraphError(f"{config!r}: the key {stream!r} holds a {kind}, expected a stream")
    return bool(kind == "stream")


Entry = dict[bytes, bytes]


def decoder_of(
    config: RedisConfig, host: Host
) -> tuple[Callable[[Entry], Any], Callable[[Sequence[Message]], Awaitable[None]] | None]:
    """Returns a function that decodes an entry, and a function that fetches the schemas of
    messages. The second is None if the format needs no schemas.

    The first function raises an error of `arguments.MALFORMED` for a malformed entry.
    """
    if config.field is None or config.format is None:
        return entry_decoder(config.type), None
    field, (decode, prepare) = config.field.encode(), config.format.decoder(host)

    def make(entry: Entry) -> Any:
        if field not in entry:
            has = ", ".join(repr(name.decode(errors="replace")) for name in entry)
            raise msgspec.ValidationError(
                f"there is no field {field.decode()!r}, the entry has {has}"
            )
        return decode(entry[field])

    if prepare is None:
        return make, None

    async def fetch(messages: Sequence[Message]) -> None:
        entries = [message.content for message in messages]
        await prepare(entry[field] for entry in entries if field in entry)

    return make, fetch


def entry_decoder(type: type[Any] | None) -> Callable[[Entry], Any]:
    """Returns a function that decodes an entry into a dict of texts, or into a `type` with
    converted fields.

    Raises TypeError for a type without fields.
    """
    if type is None or type is dict:
        return lambda entry: {name.decode(): value.decode() for name, value in entry.items()}
    field_names(type)
    converters: dict[tuple[bytes, ...], Callable[[list[str]], Any]] = {}

    def make(entry: Entry) -> Any:
        names = tuple(entry)
        convert = converters.get(names)
        if convert is None:
            try:
                convert = row_converter(
                    type, [name.decode() for name in names], "field", "give it a default"
                )
            except TypeError as error:
                raise msgspec.ValidationError(str(error)) from None
            if len(converters) < 100:  # Bounded, because each entry may have other fields.
                converters[names] = convert
        return convert([value.decode() for value in entry.values()])

    return make


async def encoder_of(config: RedisConfig, host: Host) -> Callable[[Any], list[bytes]]:
    """Returns a function that encodes a value as an entry: a list of alternating field names and
    field values.

    The function raises TypeError for a value that it cannot encode.
    """
    place = repr(config)
    if config.field is not None and config.format is not None:
        field, (encode, head_of) = config.field.encode(), config.format.encoder(place, host)
        if head_of is None:
            return lambda value: [field, encode(value)]
        head = await head_of(config.streams[0])
        return lambda value: [field, head + encode(value)]

    def fields(value: Any) -> list[bytes]:
        names = fields_of_value(value)
        if not names:
            raise TypeError(
                f"sink {place} got {describe_record(value)}, expected a dict or what has fields: "
                "map it first, or name by field= the one "
                "field that is to hold it"
            )
        cells = (
            value.values() if isinstance(value, dict) else [getattr(value, name) for name in names]
        )
        entry: list[bytes] = []
        for name, cell in zip(names, cells, strict=True):
            entry += (name.encode(), _text(cell, name, value, place))
        return entry

    return fields


def _text(cell: Any, name: str, value: Any, place: str) -> bytes:
    """Returns `cell`, the value of one field, as bytes that `row_converter` can read back."""
    if isinstance(cell, str):
        return cell.encode()
    if isinstance(cell, bytes):
        return cell
    if cell is None:
        return b""
    if isinstance(cell, bool):
        return b"true" if cell else b"false"
    if isinstance(cell, (int, float)):
        return repr(cell).encode()
    raise TypeError(
        f"sink {place} got {describe_record(value)}, whose field {name!r} is "
        f"{with_article(type(cell).__qualname__)}: fields of an "
        "entry are texts, bytes and numbers; map it first, or give field= to write the whole as "
        "JSON into one field"
    )
