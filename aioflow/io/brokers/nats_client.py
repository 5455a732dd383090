"""Connects to NATS: connected clients, and the JetStream streams that the clients use."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from aioflow.core.aio import cancel_and_wait
from aioflow.core.errors import Broken, GraphError

if TYPE_CHECKING:
    from aioflow.core.timeunits import Duration
    from aioflow.io.arguments import OnError
    from aioflow.io.formats.format import Format

__all__ = ["NatsConfig", "connect", "heeded", "is_away", "stream_of"]


R = TypeVar("R")

logger = logging.getLogger(__name__)


@dataclass(eq=False, repr=False)
class NatsConfig:
    """The checked arguments of `nats(...)`. Its repr is the user's call, for log and error
    messages.
    """

    servers: list[str]
    subject: str
    stream: str | None
    format: Format[Any]
    start: str | int
    until: str | None
    options: dict[str, Any]
    backoff: Duration
    on_error: OnError

    @property
    def bounded(self) -> bool:
        return self.until is not None

    def __repr__(self) -> str:
        return f"nats(..., {self.subject!r})"


async def heeded(call: Coroutine[Any, Any, R]) -> R:
    """Returns the result of `call`, a coroutine of nats-py. A cancellation takes effect after the
    call has ended.

    nats-py waits with asyncio.wait_for. In Python 3.11 this function loses a cancellation that
    arrives in the same turn of the event loop as the result.
    """
    task = asyncio.get_running_loop().create_task(call)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await cancel_and_wait([task])
        raise


async def connect(config: NatsConfig) -> Any:
    """Returns a connection to a server. The connection does not reconnect when it breaks.

    Raises ModuleNotFoundError naming the extra, GraphError if the server refuses, and Broken naming
    the servers if none answers.
    """
    try:
        from nats import errors
        from nats.aio.client import Client
    except ImportError:
        raise ModuleNotFoundError("af.io.nats needs nats-py: pip install 'aioflow[nats]'") from None

    refused: list[Exception] = []

    async def on_error(error: Exception) -> None:
        refused.append(error)
        logger.debug("%r: %r", config, error)

    # The caller retries at its own pace.
    own = {
        "error_cb": on_error,
        "allow_reconnect": False,
        "max_reconnect_attempts": 1,
        "reconnect_time_wait": 0,
    }
    client = Client()
    connected = False
    try:
        await heeded(client.connect(config.servers, **{**own, **config.options}))
        connected = True
        return client
    except (errors.Error, OSError, TimeoutError) as error:
        if "connect url" in str(error):
            raise GraphError(
                f"{config!r}: the URL of a server cannot be read, expected "
                "nats://USER:PASSWORD@HOST:PORT, with %40 for @ and the like"
            ) from None
        for one in (error, *refused):
            if isinstance(one, errors.AuthorizationError) or "uthorization" in str(one):
                raise GraphError(
                    f"{config!r}: the server refuses: {one}; give options={{'user': ..., "
                    f"'password': ...}} or what else it asks for"
                ) from None
        places = ", ".join(url.rpartition("://")[2].rpartition("@")[2] for url in config.servers)
        raise Broken(
            f"{config!r}: no server of NATS answers at {places} "
            f"({str(error) or type(error).__name__}): start it, "
            "or give its URL nats://HOST:PORT"
        ) from None
    except TypeError as error:
        raise GraphError(
            f"{config!r}: nats.connect does not take what options= says: {error}"
        ) from None
    finally:
        if not connected:
            try:
                await client.close()  # Otherwise the socket stays open after a refusal.
            except (AssertionError, AttributeError):
                pass  # Never connected, or nats-py before 2.15 failed to connect.


def is_away(error: BaseException) -> bool:
    """Returns whether the server or its JetStream cannot be reached, so a retry may succeed."""
    from nats import errors
    from nats.js.errors import APIError, ServiceUnavailableError

    if isinstance(error, APIError):
        return isinstance(error, ServiceUnavailableError) or (error.code or 0) >= 500
    return isinstance(error, (errors.Error, OSError, TimeoutError, Broken)) and not isinstance(
        error, errors.AuthorizationError
    )


async def stream_of(client: Any, config: NatsConfig, *, written: bool = False) -> Any:
    """Returns the server's information about the stream.

    Raises GraphError if there is no such stream. With `written`, also raises it if messages that
    are published to the subject do not go into the stream.
    """
    from nats import errors
    from nats.js.errors import NotFoundError, ServiceUnavailableError

    jetstream = client.jetstream()
    try:
        name = config.stream or await heeded(jetstream.find_stream_name_by_subject(config.subject))
        info = await heeded(jetstream.stream_info(name))
        if written and config.stream is not None:
            await _taken(jetstream, config)
        return info
    except NotFoundError:
        what = (
            f"there is no stream {config.stream!r}"
            if config.stream
            else f"no stream takes the subject {config.subject!r}"
        )
        raise GraphError(
            f"{config!r}: {what}: make one first (`nats stream add`), or name another by stream="
        ) from None
    except (ServiceUnavailableError, errors.NoRespondersError):
        raise Broken(
            f"{config!r}: the server has no JetStream now: start it with JetStream enabled "
            "(nats-server -js)"
        ) from None


async def _taken(jetstream: Any, config: NatsConfig) -> None:
    """Raises GraphError unless messages published to the subject go into the named stream."""
    from nats.js.errors import NotFoundError

    try:
        taker = await heeded(jetstream.find_stream_name_by_subject(config.subject))
    except NotFoundError:
        taker = None
    if taker != config.stream:
        where = "no stream" if taker is None else f"the stream {taker!r}"
        raise GraphError(
            f"{config!r}: {where} takes that subject, expected {config.stream!r}, which stream= "
            "names: add it to its subjects"
        )
