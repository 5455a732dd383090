"""Adds entries to a stream of Redis exactly once: entries are first staged in another stream, and
the commit moves them.

    flush        entries -> the staged stream of the next checkpoint's batch, numbered 0-1, 0-2 ...
    prepare(n)   the batch of n is complete; its committable is its name and its number of entries
    commit       moves entries from the staged stream to the user's stream, some at a time; with the
                 last of them, n goes into the hash of the sinks

Each step is one script, so it is atomic. If a step is sent twice because its answer was lost, its
second execution has no effect: staged entries have numbers, and moved entries are gone. If a batch
is missing, the hash must record that it was committed. Otherwise the database was restored to an
earlier state, which is an error. Every writer gets a number when it opens, its generation. The
writer removes batches that earlier writers began after the checkpoint that it was restored from.

For a stream "orders" the sink uses the keys `aioflow:{orders}:sinks` and
`aioflow:{orders}:staged:...`, which are in the stream's hash slot of a cluster. The data is as
durable as the configuration of the server makes it (`appendfsync`).

Without checkpoints entries are added to the stream at once (at-least-once).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from aioflow.core.errors import GraphError, StateError, note_once
from aioflow.io.backoff import Backoff, reached
from aioflow.io.brokers.redis_client import (
    answered,
    encoder_of,
    exists,
    is_away,
    open_client,
    refusal,
)
from aioflow.operators.sink import LINGER_MS, BaseCommitter, BaseWriter

if TYPE_CHECKING:
    from aioflow.io.brokers.redis_client import RedisConfig
    from aioflow.operators.operator import OperatorContext

__all__ = ["Prepared", "RedisCommitter", "RedisWriter"]

PIECE_ENTRIES = 1_000
"""Number of entries at which the writer requests a flush, and the maximum number that one script
stages or moves.

Redis does no other work while a script runs.
"""

REGISTER = """
local generation = redis.call('HINCRBY', KEYS[1], ARGV[1] .. ' generation', 1)
local staged = redis.call('HGETALL', KEYS[2])
for i = 1, #staged, 2 do
    local subtask, since, by = string.match(staged[i + 1], '^(%d+) (%d+) (%d+)$')
    local inherited = tonumber(subtask) % tonumber(ARGV[3]) == tonumber(ARGV[2])
    if inherited and tonumber(since) >= tonumber(ARGV[4]) and tonumber(by) < generation then
        redis.call('DEL', KEYS[2] .. ':' .. staged[i])
        redis.call('HDEL', KEYS[2], staged[i])
    end
end
return generation
"""

STAGE = """
local first = tonumber(ARGV[3])
if first == 1 then
    redis.call('HSETNX', KEYS[1], ARGV[1], ARGV[2])
elseif redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 then
    return -1
end
local have = redis.call('XLEN', KEYS[2])
if have ~= first - 1 then
    return have
end
local at = 4
while ARGV[at] do
    local count = tonumber(ARGV[at])
    have = have + 1
    redis.call('XADD', KEYS[2], '0-' .. have, unpack(ARGV, at + 1, at + count))
    at = at + 1 + count
end
return have
"""

COMMIT = """
local total, checkpoint = tonumber(ARGV[4]), tonumber(ARGV[3])
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 then
    local last = redis.call('HGET', KEYS[3], ARGV[2])
    if last and tonumber(last) >= checkpoint then
        return 0
    end
    return -1
end
local some = redis.call('XRANGE', KEYS[2], '-', '+', 'COUNT', ARGV[5])
local left = redis.call('XLEN', KEYS[2])
if left == 0 or some[1][1] ~= '0-' .. (total - left + 1) then
    return -1
end
for _, entry in ipairs(some) do
    if ARGV[6] == '' then
        redis.call('XADD', KEYS[4], '*', unpack(entry[2]))
    else
        redis.call('XADD', KEYS[4], 'MAXLEN', '~', ARGV[6], '*', unpack(entry[2]))
    end
    redis.call('XDEL', KEYS[2], entry[1])
end
left = left - #some
if left == 0 then
    redis.call('DEL', KEYS[2])
    redis.call('HDEL', KEYS[1], ARGV[1])
    local last = redis.call('HGET', KEYS[3], ARGV[2])
    if not last or tonumber(last) < checkpoint then
        redis.call('HSET', KEYS[3], ARGV[2], ARGV[3])
    end
end
return left
"""


class Prepared(NamedTuple):
    """The committable of this sink: the name and size of a complete staged batch."""

    sink: str
    """The names that identify the sink that prepared the batch: its flow and its uid."""
    subtask: int
    checkpoint: int
    batch: str
    entries: int


class _Keys(NamedTuple):
    """The names of all Redis keys that a sink uses."""

    stream: str
    sinks: str
    staged: str

    @classmethod
    def of(cls, stream: str, sink: str) -> _Keys:
        begin = stream.find("{")
        end = stream.find("}", begin + 1)
        # The part of the key from which a cluster computes the slot.
        tag = stream[begin + 1 : end] if 0 <= begin < end - 1 else stream
        return cls(stream, f"aioflow:{{{tag}}}:sinks", f"aioflow:{{{tag}}}:staged:{sink}")

    def batch(self, name: str) -> str:
        return f"{self.staged}:{name}"


class RedisWriter(BaseWriter[Any]):
    """A writer of the entries of one subtask."""

    def __init__(self, ctx: OperatorContext, config: RedisConfig) -> None:
        self._ctx = ctx
        self._config = config
        self._encode: Callable[[Any], list[bytes]]
        self._sink = f"{ctx.flow_name}/{ctx.uid}"
        self._keys = _Keys.of(config.streams[0], self._sink)
        self._client: Any = None
        self._pending: list[list[bytes]] = []
        self._restored = 0
        self._since = 0
        self._generation = 0
        self._batch = ""
        self._staged = 0
        self.full = False
        self.linger_ms = None if ctx.checkpointing else LINGER_MS

    def restored(self, checkpoint_id: int) -> None:
        """Notes that the batches staged up to `checkpoint_id` are committed, or will be, so they
        must not be removed.
        """
        self._restored = self._since = checkpoint_id

    async def open(self) -> None:
        config = self._config
        if len(config.streams) > 1:
            raise GraphError(
                f"sink {config!r} names {len(config.streams)} streams, expected the one to write to"
            )
        self._encode = await encoder_of(config, self._ctx.host)
        self._client = open_client(config)
        explained = partial(refusal, config)
        await reached(self._register, config, is_away, self._ctx.host.rng, explained)

    async def _register(self) -> None:
        """Checks the stream. With checkpoints, registers this writer, which removes batches that
        earlier writers began after the restored checkpoint.
        """
        runtime = self._ctx.runtime
        await exists(self._client, self._config, self._config.streams[0])
        if self._ctx.checkpointing:
            arguments = [self._sink, runtime.subtask_index, runtime.parallelism, self._restored]
            self._generation = int(
                await self._client.eval(
                    REGISTER, 2, self._keys.sinks, self._keys.staged, *arguments
                )
            )

    def write_batch(self, values: Sequence[Any], timestamps: Sequence[int] | None) -> None:
        self._pending += map(self._encode, values)
        self.full = len(self._pending) >= PIECE_ENTRIES

    async def flush(self) -> None:
        self.full = False
        pending, self._pending = self._pending, []
        config = self._config
        call = self._stage if self._ctx.checkpointing else self._add
        for start in range(0, len(pending), PIECE_ENTRIES):
            some = pending[start : start + PIECE_ENTRIES]
            try:
                await Backoff(self._ctx.host.rng, config.backoff).persistently(
                    partial(call, some), config, is_away, partial(refusal, config), "trying again"
                )
            except Exception as error:
                note_once(
                    error, f"in {config!r}, at {len(some)} entries of the sink {self._sink!r}"
                )
                raise

    async def _add(self, entries: list[list[bytes]]) -> None:
        """Adds entries to the stream directly, without checkpoints."""
        trimmed = [] if self._config.maxlen is None else ["MAXLEN", "~", self._config.maxlen]
        async with answered(self._config), self._client.pipeline(transaction=True) as pipeline:
            for entry in entries:
                pipeline.execute_command("XADD", self._keys.stream, *trimmed, "*", *entry)
            await pipeline.execute()

    async def _stage(self, entries: list[list[bytes]]) -> None:
        if not self._batch:
            self._batch = self._ctx.host.ids.new("batch")
        note = f"{self._ctx.runtime.subtask_index} {self._since} {self._generation}"
        arguments: list[Any] = [self._batch, note, self._staged + 1]
        for entry in entries:
            arguments += (len(entry), *entry)
        have = int(
            await self._client.eval(
                STAGE, 2, self._keys.staged, self._keys.batch(self._batch), *arguments
            )
        )
        expected = self._staged + len(entries)
        if have != expected:
            raise StateError(
                f"{self._config!r}: {have} entries are staged for the sink {self._sink!r}, "
                f"subtask {self._ctx.runtime.subtask_index}, "
                f"expected {expected}: a later attempt has removed them, or the server has lost "
                "them (it keeps what its persistence says)"
            )
        self._staged = have

    async def prepare(self, checkpoint_id: int) -> list[list[Any]]:
        """Returns the committable of the batch since the last checkpoint; an empty list if no
        record was written.
        """
        await self.flush()
        self._since = max(self._since, checkpoint_id)
        batch, self._batch = self._batch, ""
        staged, self._staged = self._staged, 0
        return (
            [
                list(
                    Prepared(
                        self._sink, self._ctx.runtime.subtask_index, checkpoint_id, batch, staged
                    )
                )
            ]
            if batch
            else []
        )

    async def close(self) -> None:
        """Closes the connection. The next writer removes staged entries that were not prepared."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()


class RedisCommitter(BaseCommitter):
    """Moves staged batches into the stream.

    It connects when the first batch arrives. The operator retries failed commits.
    """

    def __init__(self, config: RedisConfig) -> None:
        self._config = config
        self._client: Any = None

    async def commit(self, committables: Sequence[Any]) -> None:
        config, client = self._config, self._connected()
        for committable in committables:
            prepared = Prepared(*committable)
            keys = _Keys.of(config.streams[0], prepared.sink)
            names = (keys.staged, keys.batch(prepared.batch), keys.sinks, keys.stream)
            by = f"{prepared.sink} {prepared.subtask}"
            left = 1
            while left > 0:
                left = int(
                    await client.eval(
                        COMMIT,
                        4,
                        *names,
                        prepared.batch,
                        by,
                        prepared.checkpoint,
                        prepared.entries,
                        PIECE_ENTRIES,
                        config.maxlen or "",
                    )
                )
            if left < 0:
                raise StateError(
                    f"{config!r}: what {prepared.sink!r}, subtask {prepared.subtask}, staged for "
                    f"checkpoint {prepared.checkpoint} "
                    f"({prepared.entries} entries) is not there, and {keys.sinks!r} tells of no "
                    "commit of that checkpoint: the "
                    "database was set back or emptied since; restore it too, or start with "
                    "restore=None, fresh=True"
                )

    async def abort(self, committables: Sequence[Any]) -> None:
        """Removes the staged entries of `committables`. Committed entries stay."""
        client = self._connected()
        for committable in committables:
            prepared = Prepared(*committable)
            keys = _Keys.of(self._config.streams[0], prepared.sink)
            async with answered(self._config), client.pipeline(transaction=True) as pipeline:
                pipeline.delete(keys.batch(prepared.batch))
                pipeline.hdel(keys.staged, prepared.batch)
                await pipeline.execute()

    def _connected(self) -> Any:
        if self._client is None:
            self._client = open_client(self._config)
        return self._client

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()
