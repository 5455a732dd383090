"""The base class of writers to message brokers that confirm each message.

A flush publishes all messages and returns once the server has confirmed them. A checkpoint waits
for the flush, so these sinks deliver at least once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from aioflow.core.errors import describe_record
from aioflow.io.backoff import Backoff
from aioflow.operators.sink import LINGER_MS, BaseWriter

if TYPE_CHECKING:
    from aioflow.operators.operator import OperatorContext

__all__ = ["PIECE_MESSAGES", "ConfirmedWriter", "wrong_result"]

M = TypeVar("M")

PIECE_MESSAGES = 1_000
"""Number of messages at which the writer requests a flush, and maximum number of messages that wait
for their confirmation.
"""

PIECE_BYTES = 32 * 1024 * 1024
"""Total size of the message bodies at which the writer requests a flush."""


class ConfirmedWriter(BaseWriter[Any], Generic[M]):
    """A writer of messages of the type M.

    A subclass defines `write_batch`, which encodes records, appends them to `_pending`, and adds
    their size to `_bytes`.
    """

    linger_ms = LINGER_MS
    _config: Any
    """The arguments of the connector, among them `format` and `backoff`."""

    def __init__(
        self,
        ctx: OperatorContext,
        config: Any,
        is_away: Callable[[Exception], bool],
        explained: Callable[[Exception], BaseException | None],
    ) -> None:
        """Makes a writer. `is_away` and `explained` are passed to `Backoff.persistently`."""
        self._ctx = ctx
        self._config = config
        self._is_away = is_away
        self._explained = explained
        self._encode, self._head_of = config.format.encoder(repr(config), ctx.host)
        self._head = b""
        """The schema registry's bytes before each body; empty if the format has none."""
        self._pending: list[M] = []
        self._bytes = 0
        """Size of the bodies of the pending messages."""

    @property
    def full(self) -> bool:  # type: ignore[override]
        return len(self._pending) >= PIECE_MESSAGES or self._bytes >= PIECE_BYTES

    async def _learn(self, destination: str) -> None:
        """Asks the schema registry for the bytes to write before each body that goes to
        `destination`.
        """
        if self._head_of is not None:
            self._head = await self._head_of(destination)

    async def flush(self) -> None:
        """Publishes all messages. Returns once the server has confirmed them."""
        pending, self._pending, self._bytes = self._pending, [], 0
        while pending:
            await Backoff(self._ctx.host.rng, self._config.backoff).persistently(
                partial(self._publish, pending),
                self._config,
                self._is_away,
                self._explained,
                "trying again",
            )

    async def _publish(self, pending: list[M]) -> None:
        """Publishes the first messages of `pending`, and removes the confirmed messages from this
        list.
        """
        raise TypeError(f"{type(self).__name__} must define _publish(self, pending)")

    async def prepare(self, checkpoint_id: int) -> list[Any]:
        await self.flush()
        return []


def wrong_result(sink: object, argument: str, result: Any, value: Any, expected: str) -> TypeError:
    """Returns the error for a user's function that returned the invalid `result` for the record
    `value`. `argument` names the sink's argument with the function, such as `topic`.
    """
    return TypeError(
        f"sink {sink!r}: {argument}= gave {describe_record(result)} for {describe_record(value)}, "
        f"expected {expected}"
    )
