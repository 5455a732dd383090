"""Who leads: one of several candidates that share nothing but a store, and for how long.

The lease is a sequence of numbered objects that are created once and never changed. Whoever creates number n+1 after n has the lease: the
holder to renew it, another to take it over. Creation is the only thing that must be atomic, so a local directory or an object store with
conditional puts will do. The number of a take-over is the fencing token of that leader: of two, the larger is the newer.

Why two never act at once. A holder acts until `lease_s` after the moment *before* it began to create its newest number. A candidate takes
over when it has seen the same newest number for `lease_s`, stretched by twice the drift that clocks may have; it cannot have seen the
number before it was created. So no wall clock is compared, and however long a write, a read or a process hangs, the old leader's time is up
first. What it has sent before is fenced by its token. A holder that could not renew is told to stop `stop_s` before its time is up.

Old numbers are deleted, a good while later. A candidate that slept may therefore create one of them again: nobody holds the lease before
it has looked and found its own number to be the newest.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import msgpack

from aioflow.cluster.fencing import StaleLeader
from aioflow.core.aio import cancel_and_wait, wait_first
from aioflow.core.errors import RestoreError

if TYPE_CHECKING:
    from aioflow.core.host import Host

__all__ = ["DirectoryLeases", "LeaderElection", "LeaderInfo", "Leadership", "LeaseOptions", "LeaseStore", "current_leader"]

logger = logging.getLogger(__name__)

KEPT = 16
"""Newest numbers that are not deleted: a listing that races with deletions still shows one that matters."""

FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseOptions:
    """Times in seconds."""

    lease_s: float = 10.0
    """How long a leader acts on one renewal, and a dead one is waited for."""
    renew_s: float = 2.0
    """Between renewals."""
    stop_s: float = 2.0
    """A leader that could not renew is cancelled so long before its lease ends."""
    clock_drift: float = 0.01
    """How much faster or slower than time a machine's monotonic clock may run, as a share."""

    def __post_init__(self) -> None:
        if not 0 < self.renew_s < self.lease_s - self.stop_s or self.stop_s < 0:
            raise ValueError(
                f"renew_s is {self.renew_s}, stop_s {self.stop_s}, lease_s {self.lease_s}: expected 0 < renew_s < lease_s - stop_s"
            )
        if not 0 <= self.clock_drift < 0.5:
            raise ValueError(f"clock_drift is {self.clock_drift}, expected a share from 0 to below 0.5")

    @property
    def take_over_s(self) -> float:
        """How long a candidate must have seen the same number."""
        return self.lease_s * (1 + self.clock_drift) / (1 - self.clock_drift)


class LeaseStore(Protocol):
    """Numbered objects. Listing shows what was created before it began and not deleted. Errors of the world are OSError."""

    async def numbers(self) -> list[int]:
        """Numbers there are, ascending."""

    async def read(self, number: int) -> bytes | None:
        """Content of one, None if it is gone."""

    async def create(self, number: int, data: bytes) -> bool:
        """Make it, durably and whole; False if it exists. After an error it may exist or not."""

    async def delete(self, number: int) -> None:
        """Remove it, if it exists."""


@dataclass(frozen=True, slots=True)
class LeaderInfo:
    """One number of the lease. `address` is where others reach the leader; None once it has resigned."""

    number: int
    token: int
    holder: str
    address: str | None

    def encode(self) -> bytes:
        return msgpack.packb([FORMAT, self.token, self.holder, self.address])  # type: ignore[no-any-return]  # msgpack has no types.

    @staticmethod
    def decode(number: int, data: bytes) -> LeaderInfo:
        try:
            version, token, holder, address = msgpack.unpackb(data)
            if version == FORMAT and type(token) is int and type(holder) is str and (address is None or type(address) is str):
                return LeaderInfo(number, token, holder, address)
        except (ValueError, TypeError, msgpack.UnpackException):
            pass
        raise RestoreError(f"lease {number} cannot be read ({len(data)} bytes), expected format {FORMAT}: delete it if no leader is alive")


class Leadership:
    """The time in which one candidate may act. Ask `check` at every step that others can see."""

    def __init__(self, host: Host, info: LeaderInfo, began: float, began_wall_ms: int, lease_s: float) -> None:
        self._clock = host.clock
        self._lease_s = lease_s
        self._revoked = False
        self.token = info.token
        self.info = info
        self.valid_until = 0.0
        """On the monotonic clock."""
        self._valid_until_ms = 0
        self.extend(info, began, began_wall_ms)

    def extend(self, info: LeaderInfo, began: float, began_wall_ms: int) -> None:
        """`info` was created and is the newest; its creation began then."""
        self.info = info
        self.valid_until = began + self._lease_s
        self._valid_until_ms = began_wall_ms + int(self._lease_s * 1000)

    def revoke(self) -> None:
        """It is over, whatever the clock says."""
        self._revoked = True

    @property
    def is_valid(self) -> bool:
        # The wall clock too: the monotonic one stands still while a machine is suspended, and others do not.
        return not self._revoked and self._clock.monotonic() < self.valid_until and self._clock.wall_ms() < self._valid_until_ms

    def check(self) -> None:
        """Raise StaleLeader unless this candidate leads at this moment."""
        if not self.is_valid:
            raise StaleLeader(
                f"{self.info.holder} led with fencing token {self.token} and could not renew its lease: another may lead now, stop acting"
            )


class DirectoryLeases:
    """A LeaseStore in a directory. An object is a directory with one file in it.

    Files of a `Host` can be replaced by renaming but not created exclusively; a directory that is not empty cannot be replaced.
    """

    def __init__(self, host: Host, path: str) -> None:
        self._host = host
        self._path = path

    async def numbers(self) -> list[int]:
        try:
            names = await self._host.fs.list(self._path)
        except FileNotFoundError:
            return []
        return [int(name) for name in names if name.isdecimal()]

    async def read(self, number: int) -> bytes | None:
        try:
            return await self._host.fs.read(f"{self._object(number)}/lease")
        except FileNotFoundError:
            return None

    async def create(self, number: int, data: bytes) -> bool:
        fs, target = self._host.fs, self._object(number)
        staging = f"{self._path}/.{self._host.ids.new('lease')}"
        try:
            await fs.mkdirs(staging)
            await fs.write(f"{staging}/lease", data, sync=True)
            await fs.fsync_dir(staging)
            await fs.rename(staging, target)
        except OSError as error:
            await self._discard(staging)
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                return False
            raise
        await fs.fsync_dir(target)
        await fs.fsync_dir(self._path)
        return True

    async def delete(self, number: int) -> None:
        await self._host.fs.delete(self._object(number), recursive=True)

    async def _discard(self, staging: str) -> None:
        try:
            await self._host.fs.delete(staging, recursive=True)
        except OSError as error:
            logger.debug("%s stays behind: %s", staging, error)

    def _object(self, number: int) -> str:
        return f"{self._path}/{number:016d}"


async def current_leader(leases: LeaseStore) -> LeaderInfo | None:
    """The newest number there is. It may be of a leader that is dead: only time tells."""
    for number in reversed(await leases.numbers()):
        data = await leases.read(number)
        if data is not None:
            return LeaderInfo.decode(number, data)
    return None


class LeaderElection:
    """One candidate. `address` is where others reach it once it leads."""

    def __init__(self, host: Host, leases: LeaseStore, address: str, options: LeaseOptions | None = None) -> None:
        self._host = host
        self._leases = leases
        self._address = address
        self._options = options or LeaseOptions()
        self.candidate = host.ids.new("candidate")
        """Names this life of this candidate: a restarted one is another."""
        self._store_fails = False

    async def run(self, lead: Callable[[Leadership], Coroutine[Any, Any, object]]) -> None:
        """Contend for ever; while leading, run `lead(leadership)`, cancelled when the lease is lost. Returns when `lead` returns.

        What `lead` raises comes out, after the lease was given back; but for StaleLeader, after which it contends again. `lead` has
        `stop_s` to end in once it was cancelled.
        """
        while True:
            leadership = await self._win()
            logger.info("%s leads with fencing token %d", self._address, leadership.token)
            work = asyncio.get_running_loop().create_task(lead(leadership), name=f"leader {leadership.token}")
            keeper = asyncio.get_running_loop().create_task(self._keep(leadership), name=f"lease {leadership.token}")
            errors: list[BaseException] = []
            try:
                await wait_first([work, keeper])
                over = work.done()
            finally:
                errors += await cancel_and_wait([work])
                errors += await cancel_and_wait([keeper])
                await self._resign(leadership)
            # Work that asked and heard that it leads no more has done what it should.
            errors = [error for error in errors if not isinstance(error, StaleLeader)]
            if errors:
                raise errors[0]
            if over and not work.cancelled() and work.exception() is None:
                return
            logger.warning("%s lost its lease with fencing token %d", self._address, leadership.token)

    # Winning.

    async def _win(self) -> Leadership:
        options, clock = self._options, self._host.clock
        seen, since = -1, 0.0
        while True:
            try:
                head = await current_leader(self._leases)
                now = clock.monotonic()
                if head is not None and head.number != seen:
                    seen, since = head.number, now
                if head is None or head.address is None or head.holder == self.candidate or now - since >= options.take_over_s:
                    leadership = await self._take(1 if head is None else head.number + 1)
                    if leadership is not None:
                        return leadership
                self._store_fails = False
            except OSError as error:
                self._log_failure(error)
            # Not all at the same moment.
            await asyncio.sleep(options.renew_s * self._host.rng.uniform(0.25, 0.5))

    async def _take(self, number: int) -> Leadership | None:
        began, wall = self._host.clock.monotonic(), self._host.clock.wall_ms()
        info = LeaderInfo(number, number, self.candidate, self._address)
        if not await self._create(info):
            return None
        leadership = Leadership(self._host, info, began, wall, self._options.lease_s)
        return leadership if leadership.is_valid else None

    async def _create(self, info: LeaderInfo) -> bool:
        """Whether `info` was created and is the newest."""
        if not await self._leases.create(info.number, info.encode()):
            return False
        return (await self._leases.numbers())[-1:] == [info.number]

    # Keeping.

    async def _keep(self, leadership: Leadership) -> None:
        """Renew until it fails for good: another leads, or the time to stop has come."""
        options, clock = self._options, self._host.clock
        try:
            while True:
                stop_at = leadership.valid_until - options.stop_s
                # A renewal that failed is tried again soon; one that worked, after `renew_s`.
                renew_at = leadership.valid_until - options.lease_s + options.renew_s
                await asyncio.sleep(max(options.renew_s / 8, min(renew_at, stop_at) - clock.monotonic()))
                left = stop_at - clock.monotonic()
                if left <= 0:
                    return
                async with asyncio.timeout(left):
                    if not await self._renew(leadership):
                        return
        except TimeoutError:
            return

    async def _renew(self, leadership: Leadership) -> bool:
        """False if another leads. What the world refuses changes nothing yet."""
        began, wall = self._host.clock.monotonic(), self._host.clock.wall_ms()
        try:
            head = await current_leader(self._leases)
            if head is None or head.token != leadership.token or head.holder != self.candidate:
                return False
            info = LeaderInfo(head.number + 1, leadership.token, self.candidate, self._address)
            if await self._create(info):
                leadership.extend(info, began, wall)
                await self._prune(info.number)
            self._store_fails = False
        except OSError as error:
            self._log_failure(error)
        return True

    def _log_failure(self, error: OSError) -> None:
        if not self._store_fails:
            logger.warning("%s cannot use the store of leases: %s", self._address, error)
        self._store_fails = True

    async def _prune(self, newest: int) -> None:
        for number in await self._leases.numbers():
            if number <= newest - KEPT:
                await self._leases.delete(number)

    async def _resign(self, leadership: Leadership) -> None:
        """Let the next one begin at once, if the lease is still held; else it finds out by itself."""
        was_valid = leadership.is_valid
        leadership.revoke()
        if not was_valid:
            return
        try:
            async with asyncio.timeout(self._options.renew_s):
                head = await current_leader(self._leases)
                if head is not None and head.holder == self.candidate:
                    await self._leases.create(head.number + 1, LeaderInfo(0, head.token, self.candidate, None).encode())
        except (OSError, TimeoutError) as error:
            logger.warning("%s could not give back its lease, it ends by itself: %r", self._address, error)
