"""A lease: the right to act, which one process at a time holds for a limited time.

The processes share only a store.

The lease is a sequence of numbered objects that are created once and never changed. The process
that created the newest number has the lease. The holder creates the next number to renew the lease.
Another process creates the next number to acquire the lease. Creation is the only thing that must
be atomic, so a local directory or an object store with conditional puts is enough. The number with
which a holder acquired the lease is its fencing token: of two holders, the one with the larger
token is newer.

Two holders never act at once, for this reason. A holder acts until `lease_s` after the moment
*before* it began to create its newest number. A candidate acquires the lease when it has seen the
same newest number for `lease_s`, stretched by twice the drift that clocks may have. The candidate
cannot have seen the number before the number was created. So no wall clock is compared. However
long a write, a read or a process hangs, the old holder's lease expires first. A candidate does not
wait for a holder whose process is known to have ended, because that holder no longer acts. Earlier
requests of that holder are fenced by its token. A holder that could not renew its lease is stopped
`stop_s` before the lease expires.

A holder whose lease has expired has not lost it yet: the holder loses it when another process
creates the next number. If a holder can delay its actions until it has created the next number
itself, it goes on (`renew_late`). If it cannot delay them, as a leader of many jobs, it stops in
time.

Old numbers are deleted much later. So a candidate that slept may create one of them again.
Therefore a candidate holds the lease only after it has found its own number to be the newest.

`FlowLease` ensures that one job at a time runs a flow of a store: the running job holds the flow's
lease, which names the job. A second job that starts finds out quickly whether the holder is alive.
The second job starts at once if the holder has resigned, or is a process of this machine that has
ended. Its start is refused if the holder renews the lease. It acquires the lease if the holder has
not renewed it for as long as a lease lasts. A holder that renews late, on a busy or suspended
machine, continues if no other job has taken the lease meanwhile. The actions that the lease guards
wait until the holder knows whether another job has taken the lease. Only a holder that has really
lost the lease must stop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Protocol, TypeVar

import msgpack
import msgspec

from aioflow.checkpoint.objects import ObjectStore
from aioflow.core.aio import cancel_and_wait
from aioflow.core.errors import CheckpointError, RestoreError
from aioflow.core.host import ProcessIdentity
from aioflow.state.snapshot import whole

if TYPE_CHECKING:
    from aioflow.core.host import Host

__all__ = [
    "KEPT",
    "FlowLease",
    "Holder",
    "Lease",
    "LeaseInfo",
    "LeaseKeeper",
    "LeaseOptions",
    "LeaseStore",
    "ObjectLeases",
    "current_holder",
]

logger = logging.getLogger(__name__)

KEPT = 16
"""How many of the newest numbers are kept. A listing that races with deletions then still shows one
of these numbers.
"""

OTHER_JOB = "another job may take it"

LATE_LEASES = 3
"""Number of lease durations for which a late holder retries a store that does not answer."""

FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseOptions:
    """Durations of a lease, in seconds."""

    lease_s: float = 10.0
    """How long a leader may act after one renewal, and how long candidates wait for a dead
    leader."""
    renew_s: float = 2.0
    """Time between two renewals."""
    stop_s: float = 2.0
    """Time between the cancellation of a leader that could not renew its lease and the end of the
    lease.
    """
    clock_drift: float = 0.01
    """Maximum drift of a machine's monotonic clock, as a share of the measured time."""

    def __post_init__(self) -> None:
        if not 0 < self.renew_s < self.lease_s - self.stop_s or self.stop_s < 0:
            raise ValueError(
                f"renew_s is {self.renew_s}, stop_s {self.stop_s}, lease_s {self.lease_s}: "
                "expected 0 < renew_s < lease_s - stop_s"
            )
        if not 0 <= self.clock_drift < 0.5:
            raise ValueError(
                f"clock_drift is {self.clock_drift}, expected a share from 0 to below 0.5"
            )

    @property
    def take_over_s(self) -> float:
        """How many seconds a candidate must see the same newest number before it may acquire the
        lease."""
        return self.lease_s * (1 + self.clock_drift) / (1 - self.clock_drift)


class LeaseStore(Protocol):
    """The interface of a store of numbered objects.

    A listing shows all objects that were created before the listing began and are not deleted.
    Methods raise OSError if the store fails.
    """

    async def numbers(self) -> list[int]:
        """Returns the existing numbers, ascending."""

    async def read(self, number: int) -> bytes | None:
        """Returns the content of an object; None if the object does not exist."""

    async def create(self, number: int, data: bytes) -> bool:
        """Creates an object with the content `data`, durably and as a whole. Returns False if the
        number exists.

        After an error the object may exist or not.
        """

    async def delete(self, number: int) -> None:
        """Deletes an object, if it exists."""

    def where(self, number: int) -> str:
        """Returns the path or URL of an object, for log and error messages."""


class LeaseInfo(msgspec.Struct, frozen=True):
    """The content of an object in the lease store: the holder of the lease. Each renewal or change
    of the holder adds an object with the next number.

    `address` tells other processes how to reach the holder; None if the holder has given up the
    lease.
    """

    number: int
    token: int
    holder: str
    address: str | None

    def encode(self) -> bytes:
        fields = [FORMAT, self.token, self.holder, self.address]
        # msgpack has no types.
        return msgpack.packb(fields)  # type: ignore[no-any-return]

    @staticmethod
    def decode(number: int, data: bytes, where: str) -> LeaseInfo:
        """Decodes the content of an object. Raises RestoreError, which names `where`, if the
        content is invalid.
        """
        try:
            version, token, holder, address = msgpack.unpackb(data)
            if (
                version == FORMAT
                and type(token) is int
                and type(holder) is str
                and (address is None or type(address) is str)
            ):
                return LeaseInfo(number, token, holder, address)
        except (ValueError, TypeError, msgpack.UnpackException):
            pass
        raise RestoreError(
            f"lease {where} cannot be read ({len(data)} bytes), expected format {FORMAT}: delete "
            "it if no holder is alive"
        )


class Lease:
    """The lease as its holder sees it. Check `is_valid` before every step that others can see."""

    def __init__(
        self, host: Host, info: LeaseInfo, began: float, began_wall_ms: int, lease_s: float
    ) -> None:
        self._clock = host.clock
        self._lease_s = lease_s
        self._revoked = False
        self.token = info.token
        self.info = info
        self.valid_until = 0.0
        """End of the lease on the monotonic clock, in seconds."""
        self._valid_until_ms = 0
        self.extend(info, began, began_wall_ms)

    def extend(self, info: LeaseInfo, began: float, began_wall_ms: int) -> None:
        """Extends the lease, after `info` was created as the newest object.

        `began` and `began_wall_ms` are the times when the creation of that object began.
        """
        self.info = info
        self.valid_until = began + self._lease_s
        self._valid_until_ms = began_wall_ms + int(self._lease_s * 1000)

    def revoke(self) -> None:
        """Ends the lease at once, before its time is up."""
        self._revoked = True

    @property
    def is_revoked(self) -> bool:
        """Whether `revoke` was called."""
        return self._revoked

    @property
    def is_valid(self) -> bool:
        # The wall clock is checked too, because the monotonic clock stops while the machine is
        # suspended.
        return (
            not self._revoked
            and self._clock.monotonic() < self.valid_until
            and self._clock.wall_ms() < self._valid_until_ms
        )


class ObjectLeases:
    """A LeaseStore below `prefix` of an object store, or in the whole object store if `prefix` is
    empty."""

    def __init__(self, objects: ObjectStore, prefix: str = "") -> None:
        self._objects = objects
        self._prefix = prefix

    async def numbers(self) -> list[int]:
        names = [name.rpartition("/")[2] for name in await self._objects.names(self._prefix)]
        return sorted(int(name) for name in names if name.isdecimal())

    async def read(self, number: int) -> bytes | None:
        try:
            return await self._objects.read(self._name(number))
        except FileNotFoundError:
            return None

    async def create(self, number: int, data: bytes) -> bool:
        return await self._objects.create(self._name(number), whole(data))

    async def delete(self, number: int) -> None:
        await self._objects.delete([self._name(number)])

    def where(self, number: int) -> str:
        return f"{self._objects.url}/{self._name(number)}"

    def _name(self, number: int) -> str:
        return f"{self._prefix}/{number:016d}" if self._prefix else f"{number:016d}"


async def current_holder(leases: LeaseStore) -> LeaseInfo | None:
    """Returns the newest object of the lease; None if there is none.

    The holder may be dead. Callers can notice that only after a while, because the object does not
    change.
    """
    for number in reversed(await leases.numbers()):
        data = await leases.read(number)
        if data is not None:
            return LeaseInfo.decode(number, data, leases.where(number))
    return None


LeaseT = TypeVar("LeaseT", bound=Lease)


class LeaseKeeper:
    """Acquires, renews and gives back a lease for one candidate.

    Every object that the keeper creates holds `address`. Log messages call the candidate `name`.
    """

    def __init__(
        self, host: Host, leases: LeaseStore, address: str, name: str, options: LeaseOptions
    ) -> None:
        self._host = host
        self._leases = leases
        self._address = address
        self._name = name
        self._options = options
        who = host.procs.identity()
        self.candidate = "\n".join(
            [host.ids.new("candidate"), who.host, str(who.pid), who.machine, who.started]
        )
        """Names this run of the candidate: a restarted candidate gets another name."""
        self._fails = False
        self.lost_why = OTHER_JOB
        """Why the lease could not be renewed, in words for an error message."""

    def has_ended(self, head: LeaseInfo) -> bool:
        """Whether the process of the holder in `head` has certainly ended.

        That process will not renew the lease, so a candidate need not wait.
        """
        match head.holder.split("\n"):
            case [_, machine_name, pid, machine, started] if pid.isdecimal():
                return self._host.procs.has_ended(
                    ProcessIdentity(machine_name, int(pid), machine, started)
                )
        return False

    async def take(
        self, number: int, make: Callable[[Host, LeaseInfo, float, int, float], LeaseT]
    ) -> LeaseT | None:
        """Tries to acquire the lease by creating the object `number`. Returns None if another
        candidate was faster.

        `make` is the class of the returned lease.
        """
        began, wall = self._host.clock.monotonic(), self._host.clock.wall_ms()
        info = LeaseInfo(number, number, self.candidate, self._address)
        if not await self._create(info):
            return None
        lease = make(self._host, info, began, wall, self._options.lease_s)
        return lease if lease.is_valid else None

    async def _create(self, info: LeaseInfo) -> bool:
        """Creates the object `info`. Returns whether this worked and `info` is now the newest
        object."""
        if not await self._leases.create(info.number, info.encode()):
            return False
        return (await self._leases.numbers())[-1:] == [info.number]

    async def keep(self, lease: Lease) -> None:
        """Renews the lease repeatedly.

        Returns when another candidate holds the lease, when the lease was revoked, or when the
        process has to stop.
        """
        options, clock = self._options, self._host.clock
        try:
            while True:
                stop_at = lease.valid_until - options.stop_s
                # A renewal that failed is tried again soon; one that worked, after `renew_s`.
                renew_at = lease.valid_until - options.lease_s + options.renew_s
                await asyncio.sleep(
                    max(options.renew_s / 8, min(renew_at, stop_at) - clock.monotonic())
                )
                left = stop_at - clock.monotonic()
                if left <= 0 or lease.is_revoked:
                    return
                async with asyncio.timeout(left):
                    if not await self._renew(lease):
                        return
        except TimeoutError:
            return

    async def renew_late(self, lease: Lease) -> bool:
        """Renews a lease whose time is over, or nearly over. Returns whether this succeeded.

        The renewal fails if another candidate has the lease, or if the store does not answer. A
        success shows that no other holder acted in between, because another holder would have
        created this number first. Until the renewal succeeds, the lease is not valid.
        """
        try:
            async with asyncio.timeout(self._options.lease_s * LATE_LEASES):
                until = lease.valid_until
                while lease.valid_until == until:
                    if lease.is_revoked or not await self._renew(lease):
                        return False
                    if lease.valid_until == until:
                        await asyncio.sleep(self._options.renew_s / 8)
        except TimeoutError:
            return False
        return True

    async def _renew(self, lease: Lease) -> bool:
        """Renews the lease once. Returns False if another candidate holds the lease.

        If the store fails, the lease stays as it is, and the result is True.
        """
        began, wall = self._host.clock.monotonic(), self._host.clock.wall_ms()
        try:
            head = await current_holder(self._leases)
            self.lost_why = (
                f"{self._leases.where(lease.info.number)} was deleted"
                if head is None
                else OTHER_JOB
            )
            if head is None or head.token != lease.token or head.holder != self.candidate:
                return False
            info = LeaseInfo(head.number + 1, lease.token, self.candidate, self._address)
            if await self._create(info):
                lease.extend(info, began, wall)
                await self._prune(info.number)
            self.works()
        except OSError as error:
            self.lost_why = f"the store has failed for too long: {error}"
            self.failed(error)
        return True

    def works(self) -> None:
        """Notes that the store has answered, which ends a series of failures."""
        self._fails = False
        self.lost_why = OTHER_JOB

    def failed(self, error: OSError) -> None:
        """Logs a failure of the store. Further failures are not logged until the store works
        again."""
        if not self._fails:
            logger.warning("%s cannot use the store of leases: %s", self._name, error)
        self._fails = True

    async def _prune(self, newest: int) -> None:
        for number in await self._leases.numbers():
            if number <= newest - KEPT:
                await self._leases.delete(number)

    async def resign(self, lease: Lease) -> None:
        """Gives up the lease, so that the next holder can begin at once.

        If the lease is not held any more, or the store fails, the next holder has to wait until the
        lease has expired.
        """
        was_valid = lease.is_valid
        lease.revoke()
        if not was_valid:
            return
        try:
            async with asyncio.timeout(self._options.renew_s):
                head = await current_holder(self._leases)
                if head is not None and head.holder == self.candidate:
                    await self._leases.create(
                        head.number + 1, LeaseInfo(0, head.token, self.candidate, None).encode()
                    )
        except (OSError, TimeoutError) as error:
            logger.warning(
                "%s could not give back its lease, it ends by itself: %r", self._name, error
            )


EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Holder(msgspec.Struct, frozen=True):
    """The process that holds a flow's lease, and since when."""

    process: ProcessIdentity
    since_ms: int

    def encode(self) -> str:
        """Returns the text that the lease stores about its holder."""
        who = self.process
        return "\n".join([who.host, str(who.pid), who.machine, who.started, str(self.since_ms)])

    @staticmethod
    def decode(text: str) -> Holder | None:
        """Returns the holder that `text`, from a lease, describes; None if it describes none."""
        match text.split("\n"):
            case [host, pid, machine, started, since_ms] if (
                pid.isdecimal() and since_ms.isdecimal()
            ):
                return Holder(ProcessIdentity(host, int(pid), machine, started), int(since_ms))
        return None

    def __str__(self) -> str:
        since = (EPOCH + timedelta(milliseconds=self.since_ms)).strftime("%Y-%m-%d %H:%M:%S")
        return f"process {self.process.pid} on {self.process.host}, since {since} UTC"


class FlowLease:
    """The lease of one flow, held from `acquire` to `release`.

    Guarded actions happen only after `confirm`, or while `check` does not raise. `on_lost` is
    called if the lease is lost.
    """

    def __init__(
        self,
        host: Host,
        leases: LeaseStore,
        what: str,
        on_lost: Callable[[CheckpointError], None],
        options: LeaseOptions | None = None,
    ) -> None:
        self._host = host
        self._leases = leases
        self._what = what
        self._on_lost = on_lost
        self._options = options or LeaseOptions()
        self.holder = Holder(host.procs.identity(), host.clock.wall_ms())
        self._keeper = LeaseKeeper(host, leases, self.holder.encode(), what, self._options)
        self._lease: Lease | None = None
        self._keeping: asyncio.Task[None] | None = None

    @property
    def token(self) -> int:
        """The fencing number, larger than those of all former holders. Valid only while the lease
        is held.
        """
        assert self._lease is not None, "the lease was not acquired"
        return self._lease.token

    @property
    def is_valid(self) -> bool:
        """Whether this job certainly holds the lease at this moment."""
        return self._lease is not None and self._lease.is_valid

    async def acquire(self) -> None:
        """Acquires the lease and starts to renew it.

        Raises CheckpointError, naming the holder, if another job has the lease.
        """
        try:
            self._lease = await self._win()
        except OSError as error:
            place = self._leases.where(0).rpartition("/lease/")[0]
            what = "is not writable" if isinstance(error, PermissionError) else "cannot be used"
            raise CheckpointError(f"the checkpoint directory {place} {what}: {error}") from error
        logger.info("%s is held with fencing token %d", self._what, self.token)
        self._keeping = asyncio.get_running_loop().create_task(
            self._keep(self._lease), name=f"lease of {self._what}"
        )

    def check(self) -> None:
        """Raises CheckpointError unless the lease is held at this moment."""
        if not self.is_valid:
            raise CheckpointError(
                f"the lease of {self._what} is not held any more: another job may have it, so "
                "this one must stop"
            )

    async def confirm(self) -> None:
        """Raises CheckpointError unless the lease is held, after trying to renew a late lease.

        A late lease can be renewed unless another job has taken it. If a call after an action does
        not raise, no other job can have begun without seeing this action.
        """
        if self._lease is not None:
            while not self._lease.is_valid and await self._keeper.renew_late(self._lease):
                logger.debug("the lease of %s was renewed late", self._what)
        self.check()

    async def release(self) -> None:
        """Gives the lease back, so that the next job can start at once. Does nothing if the lease
        is not held.

        After this call, `on_lost` is not called.
        """
        lease, keeping = self._lease, self._keeping
        if lease is None or keeping is None:
            return
        self._keeping = None
        errors = await cancel_and_wait([keeping])
        await self._keeper.resign(lease)
        if errors:
            raise errors[0]

    async def _win(self) -> Lease:
        options, clock = self._options, self._host.clock
        seen: LeaseInfo | None = None
        since = 0.0
        while True:
            head = await current_holder(self._leases)
            now = clock.monotonic()
            if (
                head is None
                or self._is_free(head)
                or (seen == head and now - since >= options.take_over_s)
            ):
                lease = await self._keeper.take(1 if head is None else head.number + 1, Lease)
                if lease is not None:
                    return lease
                seen = None
            elif seen is None:
                seen, since = head, now
                logger.info(
                    "%s has a holder, %s: waiting whether it renews its lease",
                    self._what,
                    _shown(head),
                )
            elif seen != head:
                raise CheckpointError(
                    f"{self._what} is running already: {_shown(head)}. Stop that job first, or "
                    "give this one another store or flow name. A server that starts several "
                    "processes of a service, as with --workers, has to start one"
                )
            await asyncio.sleep(options.renew_s * self._host.rng.uniform(0.1, 0.2))

    def _is_free(self, head: LeaseInfo) -> bool:
        if head.address is None:
            return True
        holder = Holder.decode(head.address)
        return holder is not None and self._host.procs.has_ended(holder.process)

    async def _keep(self, lease: Lease) -> None:
        while True:
            await self._keeper.keep(lease)
            if not await self._keeper.renew_late(lease):
                break
            logger.warning(
                "the lease of %s was renewed late, this process or its store is slow; it had not "
                "been taken",
                self._what,
            )
        lease.revoke()
        logger.error("the lease of %s is lost", self._what)
        self._on_lost(
            CheckpointError(
                f"the lease of {self._what} could not be renewed: {self._keeper.lost_why}, so this "
                "job must stop"
            )
        )


def _shown(head: LeaseInfo) -> str:
    return str((head.address and Holder.decode(head.address)) or head.holder.partition("\n")[0])
