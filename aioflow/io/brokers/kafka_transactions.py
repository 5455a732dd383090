"""The transactions of a Kafka sink: a pool of transactional ids for each subtask, and the recovery
of transactions that an earlier attempt left open.

    first record     the register records the last checkpoint, then a transaction of the pool begins
    records          go to the brokers in batches, inside the transaction
    barrier n        all records are acknowledged; the transaction is prepared and stays open
    n is complete    the transaction is committed, and its id is free again
    restore of n     prepared transactions are committed under their producer id and epoch;
                     transactions that began after the barrier of n are aborted

The register of a subtask is an offset that is committed to a consumer group of its own. The
metadata of the offset has the job, the attempt, and the checkpoint after which each transaction of
the pool began. A restore of n aborts the transactions that began after n or a later checkpoint. The
transactional id of the register fences former attempts: they can no longer begin transactions.

A transaction also commits an offset to the consumer group whose name is the transactional id. The
metadata of this offset names the last batches that were committed under the id. So a repeated
commit does nothing, and a transaction that the brokers aborted is an error, never a silent loss.
Brokers forget the offsets of a group without members after a week without commits
(`offsets.retention.minutes`).
"""

from __future__ import annotations

import asyncio
import enum
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from aioflow.core.errors import GraphError, StateError
from aioflow.core.timeunits import to_seconds
from aioflow.io.brokers.kafka_client import (
    CLOSE_TIMEOUT_S,
    client_library,
    committed_offsets,
    group_names,
    started,
    undisturbed,
)

if TYPE_CHECKING:
    from aioflow.io.brokers.kafka_client import KafkaConfig
    from aioflow.operators.operator import OperatorContext

__all__ = ["Prepared", "TransactionPool", "abort_prepared", "commit_prepared", "fenced_error"]

BATCH_BYTES = 262_144
"""Maximum size of a batch for one partition, unless options= has a `max_batch_size`."""

KNOWN_BATCHES = 64
"""Number of batch names that fit into the 4096 bytes of an offset's metadata. A writer never has
this many checkpoints that wait for their commit.
"""

PREFIX = "aioflow"

logger = logging.getLogger(__name__)


class Prepared(NamedTuple):
    """The committable of this sink: an open transaction whose records are all acknowledged."""

    id: str
    """The transactional id."""
    producer_id: int
    epoch: int
    checkpoint: int
    batch: str
    previous: str
    """The name of the last batch that was committed under this id before, or "" if there was
    none.
    """
    records: int


class State(enum.Enum):
    FREE = enum.auto()
    OPEN = enum.auto()
    PREPARED = enum.auto()
    RESERVED = enum.auto()
    """An earlier attempt has prepared the transaction, and has perhaps not committed it yet."""
    BROKEN = enum.auto()


@dataclass(slots=True, eq=False)
class Transaction:
    """One transactional id of the pool, with its producer."""

    id: str
    pool: TransactionPool
    state: State = State.FREE
    began: int = 0
    """The number of the last checkpoint before the transaction began."""
    producer: Any = None
    names: list[str] = field(default_factory=list)
    """The names of the last batches that were committed under the id, the newest at the end."""
    sequence: int = 0
    """The last offset that was committed to the consumer group whose name is this id."""
    batch: str = ""
    topic: str = ""
    """A topic that the transaction writes to. The offset whose metadata names the batches is an
    offset of this topic's first partition.
    """

    async def end(self, *, commit: bool) -> None:
        """Commits or aborts the prepared transaction. The transactional id is free afterwards."""
        self.state = State.BROKEN  # Until it has succeeded.
        await (self.producer.commit_transaction if commit else self.producer.abort_transaction)()
        self.state = State.FREE
        if commit:
            self.names = [*self.names, self.batch][-KNOWN_BATCHES:]
            self.pool.confirmed()


class TransactionPool:
    """The transactional ids of one subtask of a sink."""

    def __init__(self, config: KafkaConfig, sink: str, ctx: OperatorContext) -> None:
        runtime = ctx.runtime
        subtask, parallelism = runtime.subtask_index, runtime.parallelism
        self._config = config
        self._job, self._attempt = ctx.job_id, runtime.attempt
        self._prefix = f"{PREFIX}/{sink}/"
        self._id = f"{self._prefix}{subtask}"
        self._subtask = subtask
        self._parallelism = parallelism
        self._register: Any = None
        """The producer that writes the register."""
        self._sequence = 0
        self._transactions: dict[int, Transaction] = {}
        self._current: Transaction | None = None
        self.checkpoint = 0
        """The last checkpoint that was prepared or restored."""

    @property
    def register(self) -> Any:
        return self._register

    @property
    def producer(self) -> Any:
        """The producer of the open transaction, or None."""
        return None if self._current is None else self._current.producer

    async def open(self) -> None:
        """Fences former attempts, and aborts the transactions that they began after the restored
        checkpoint.

        After a restart with fewer subtasks, each subtask also does this for some of the removed
        subtasks.
        """
        await self._check_attempt(self._id)
        self._register = await self._start(self._id)
        await self._recover(self._id, own=True)
        groups = await group_names(self._config)
        numbers = {
            int(group.removeprefix(self._prefix))
            for group in groups
            if group.startswith(self._prefix) and group.removeprefix(self._prefix).isdecimal()
        }
        for number in sorted(numbers - {self._subtask}):
            if number >= self._parallelism and number % self._parallelism == self._subtask:
                id_ = f"{self._prefix}{number}"
                await self._check_attempt(id_)
                await undisturbed((await self._start(id_)).stop())
                await self._recover(id_, own=False)

    async def _check_attempt(self, register: str) -> None:
        """Raises StateError if a later attempt of this job has begun transactions.

        In that case this attempt is outdated, and must not abort any transaction. `register` is the
        transactional id of a subtask's register.
        """
        words, _ = await _newest(self._config, register)
        job, _, attempt = (words or [""])[0].partition("@")
        if job == self._job and int(attempt) > self._attempt:
            raise StateError(
                f"{self._config!r}: a later attempt of this job writes under {register!r}"
            )

    async def _recover(self, register: str, *, own: bool) -> None:
        words, sequence = await _newest(self._config, register)
        if own:
            self._sequence = sequence
        for entry in words[1:]:
            number, _, began = entry.partition(":")
            transaction = Transaction(f"{register}/{number}", self, began=int(began))
            if transaction.began < self.checkpoint:
                transaction.state = State.RESERVED
            else:
                logger.info(
                    "%r: aborts the transaction %r, if it is open: it began after the checkpoint "
                    "%d that was restored",
                    self._config,
                    transaction.id,
                    self.checkpoint,
                )
                await self._connect(transaction)
                if not own:
                    await undisturbed(transaction.producer.stop())
            if own:
                self._transactions[int(number)] = transaction

    async def begin(self, topic: str) -> None:
        """Begins a transaction. `topic` is one of the topics that the transaction will write to."""
        number, transaction = self._free()
        if transaction.producer is None:
            await self._connect(transaction)
        transaction.began, transaction.topic = self.checkpoint, topic
        self._transactions[number] = transaction
        await self._note(topic)
        await transaction.producer.begin_transaction()
        transaction.state = State.OPEN
        self._current = transaction

    def _free(self) -> tuple[int, Transaction]:
        for number, transaction in sorted(self._transactions.items()):
            if transaction.state is State.FREE:
                return number, transaction
        number = max(self._transactions, default=-1) + 1
        return number, Transaction(f"{self._id}/{number}", self)

    async def _connect(self, transaction: Transaction) -> None:
        """Connects a new producer for `transaction`. Connecting aborts an open transaction of the
        same id.
        """
        transaction.producer = await self._start(transaction.id)
        transaction.names, transaction.sequence = await _newest(self._config, transaction.id)
        transaction.state = State.FREE

    async def _start(self, id_: str) -> Any:
        from aiokafka.errors import KafkaError

        try:
            own = _own(self._config, id_)
            return await started(self._config, client_library().AIOKafkaProducer, own)
        except KafkaError as error:
            if type(error).__name__ != "InvalidTransactionTimeout":
                raise
            raise GraphError(
                f"{self._config!r}: the brokers refuse "
                f"transaction_timeout={self._config.transaction_timeout!r}: lower it, or raise "
                "transaction.max.timeout.ms of the brokers"
            ) from None

    async def _note(self, topic: str) -> None:
        """Writes the register, as an offset of the first partition of `topic`."""
        from aiokafka import TopicPartition
        from aiokafka.structs import OffsetAndMetadata

        self._sequence += 1
        begun = (f"{number}:{one.began}" for number, one in self._transactions.items())
        text = " ".join((f"{self._job}@{self._attempt}", *begun))
        await self._register.begin_transaction()
        noted = {TopicPartition(topic, 0): OffsetAndMetadata(self._sequence, text)}
        await self._register.send_offsets_to_transaction(noted, self._id)
        await self._register.commit_transaction()

    async def prepare(self, checkpoint: int, batch: str, records: int) -> list[Any]:
        """Returns the committable of the open transaction, whose records are all acknowledged.
        Returns an empty list if none is open.
        """
        from aiokafka import TopicPartition
        from aiokafka.structs import OffsetAndMetadata

        self.checkpoint = checkpoint
        transaction, self._current = self._current, None
        if transaction is None:
            return []
        transaction.sequence += 1
        names = [*transaction.names, batch][-KNOWN_BATCHES:]
        marked = TopicPartition(transaction.topic, 0)
        named = {marked: OffsetAndMetadata(transaction.sequence, " ".join(names))}
        await transaction.producer.send_offsets_to_transaction(named, transaction.id)
        transaction.state, transaction.batch = State.PREPARED, batch
        manager = transaction.producer._txn_manager  # The only access to id and epoch.
        prepared = Prepared(
            transaction.id,
            manager.producer_id,
            manager.producer_epoch,
            checkpoint,
            batch,
            transaction.names[-1] if transaction.names else "",
            records,
        )
        self._config.prepared[_place(prepared)] = transaction
        return [list(prepared)]

    def confirmed(self) -> None:
        """Notes that a checkpoint after the restored one is complete.

        All subtasks have then committed the transactions that they restored, so their ids are free.
        """
        for one in self._transactions.values():
            if one.state is State.RESERVED:
                one.state = State.FREE

    async def close(self) -> None:
        """Aborts the transaction that is not prepared yet. Prepared transactions stay open."""
        current, self._current = self._current, None
        producers = [self._register, *(one.producer for one in self._transactions.values())]
        self._register, self._transactions = None, {}
        for producer in producers:
            if producer is not None:
                _retrieve_errors(producer)
        if current is not None:
            try:
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await current.producer.abort_transaction()
            except Exception as error:  # noqa: BLE001  # The next attempt aborts it.
                logger.debug("%r: %r was not aborted: %r", self._config, current.id, error)
        for place, one in list(self._config.prepared.items()):
            if one.pool is self:
                del self._config.prepared[place]
        for producer in producers:
            if producer is not None:
                await undisturbed(producer.stop())


def _retrieve_errors(producer: Any) -> None:
    """Retrieves the errors that aiokafka leaves in the futures of a fenced producer.

    Otherwise asyncio would log each as an exception that was never retrieved.
    """
    waiting = [producer._txn_manager._transaction_waiter]
    for batches in producer._message_accumulator._batches.values():
        waiting += [batch._drain_waiter for batch in batches]
    for future in waiting:
        if future is not None:
            future.add_done_callback(lambda ended: ended.cancelled() or ended.exception())


def _own(config: KafkaConfig, id_: str) -> dict[str, Any]:
    """Returns the arguments of a producer with the transactional id `id_`."""
    timeout_ms = round(to_seconds(config.transaction_timeout, "transaction_timeout") * 1000)
    own = {"transactional_id": id_, "acks": "all", "transaction_timeout_ms": timeout_ms}
    return own | batches_of(config)


def batches_of(config: KafkaConfig) -> dict[str, Any]:
    """Returns the producer argument `max_batch_size`. Returns an empty dict if the user's options
    have this argument.
    """
    return {} if "max_batch_size" in config.options else {"max_batch_size": BATCH_BYTES}


def _place(prepared: Prepared) -> tuple[Any, ...]:
    return (prepared.id, prepared.producer_id, prepared.epoch, prepared.batch)


async def _newest(config: KafkaConfig, group: str) -> tuple[list[str], int]:
    """Returns the newest offset of `group`: the words in its metadata, and the offset itself."""
    offsets = (await committed_offsets(config, group, None)).values()
    newest = max(offsets, key=lambda one: one.offset, default=None)
    return ([], 0) if newest is None else (newest.metadata.split(), newest.offset)


async def commit_prepared(config: KafkaConfig, prepared: Prepared) -> None:
    """Commits `prepared`. Does nothing if it was committed before.

    Raises StateError if the brokers have aborted the transaction, because its records are lost.
    """
    transaction = config.prepared.pop(_place(prepared), None)
    if transaction is not None:
        try:
            await transaction.end(commit=True)
            return
        except Exception as error:
            if not _is_fenced(error):
                raise
    elif prepared.batch in (await _newest(config, prepared.id))[0]:
        return
    else:
        try:
            await _resumed(config, prepared, commit=True)
            return
        except Exception as error:
            if not _is_fenced(error):
                raise
    names, _ = await _newest(config, prepared.id)
    if prepared.batch in names:
        return
    if (names[-1] if names else "") != prepared.previous:
        # The id was used again after this batch. An id is reused only after its batch was
        # committed.
        logger.warning(
            "%r: the brokers do not remember whether the transaction %r of checkpoint %d was "
            "committed (offsets.retention.minutes); it is taken to be committed",
            config,
            prepared.id,
            prepared.checkpoint,
        )
        return
    raise StateError(
        f"{config!r}: the brokers have aborted the transaction {prepared.id!r} of checkpoint "
        f"{prepared.checkpoint}, and its {prepared.records:,} records are lost: it was not "
        f"committed within transaction_timeout={config.transaction_timeout!r}, or another job has "
        "the same flow name and uid; raise transaction_timeout (and transaction.max.timeout.ms of "
        "the brokers), and restore an earlier checkpoint"
    )


async def abort_prepared(config: KafkaConfig, prepared: Prepared) -> None:
    """Aborts `prepared`, unless it was committed or aborted before."""
    transaction = config.prepared.pop(_place(prepared), None)
    try:
        if transaction is not None:
            await transaction.end(commit=False)
        elif prepared.batch not in (await _newest(config, prepared.id))[0]:
            await _resumed(config, prepared, commit=False)
    except Exception as error:
        if not _is_fenced(error):
            raise


async def _resumed(config: KafkaConfig, prepared: Prepared, *, commit: bool) -> None:
    """Ends the transaction of another producer, under that producer's id and epoch.

    Flink's FlinkKafkaInternalProducer does the same, because Kafka has no call for this before
    KIP-939.
    """

    def make(**options: Any) -> Any:
        producer = client_library().AIOKafkaProducer(**options)
        producer._txn_manager.set_pid_and_epoch(prepared.producer_id, prepared.epoch)
        return producer

    producer = await started(config, make, _own(config, prepared.id))
    try:
        await producer.begin_transaction()
        # aiokafka does not end an empty transaction.
        producer._txn_manager.consumer_group_added(prepared.id)
        await (producer.commit_transaction if commit else producer.abort_transaction)()
    finally:
        await undisturbed(producer.stop())


def _is_fenced(error: BaseException | None) -> bool:
    """Returns whether `error` means that the brokers no longer have the transaction open."""
    from aiokafka.errors import InvalidProducerIdMapping, InvalidTxnState, ProducerFenced

    ended = (InvalidProducerIdMapping, InvalidTxnState, ProducerFenced)
    return isinstance(error, ended) or isinstance(getattr(error, "__cause__", None), ended)


def fenced_error(config: KafkaConfig, error: BaseException) -> StateError | None:
    """Returns a StateError that explains why the brokers have ended the transaction. Returns None
    if `error` has another cause.
    """
    if not _is_fenced(error):
        return None
    return StateError(
        f"{config!r}: the brokers have ended the transaction: another attempt, or another program, "
        "has begun transactions under its id (two jobs may not have the same flow name and uid), "
        "or no checkpoint came within "
        f"transaction_timeout={config.transaction_timeout!r}; nothing is lost if the job restarts "
        "from its last checkpoint"
    )
