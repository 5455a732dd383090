"""Ensures that one job at a time runs a flow: the running job holds the flow's lease in the store.

A second job that starts finds out quickly whether the holder is alive:

* The holder has resigned, or is a process of this machine that has ended: it starts at once.
* The holder renews its lease: the start is refused.
* The holder has not renewed for as long as a lease lasts: it takes over.

A late holder, on a busy or suspended machine, goes on if the lease was not taken meanwhile. The
actions that the lease guards wait until that is known. Only a holder that has really lost the lease
must stop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from aioflow.checkpoint.lease import (
    Lease,
    LeaseInfo,
    LeaseKeeper,
    LeaseOptions,
    LeaseStore,
    current_holder,
)
from aioflow.core.aio import cancel_and_wait
from aioflow.core.errors import CheckpointError
from aioflow.core.host import ProcessIdentity

if TYPE_CHECKING:
    from aioflow.core.host import Host

__all__ = ["FlowLease", "Holder"]

logger = logging.getLogger(__name__)

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that holds a flow's lease, and since when."""

    process: ProcessIdentity
    since_ms: int

    def encode(self) -> str:
        """Returns the text that the lease stores about its holder."""
        who = self.process
        return "\n".join([who.host, str(who.pid), who.machine, who.started, str(self.since_ms)])

    @staticmethod
    def decode(text: str) -> Holder | None:
        """Returns the holder from the text in a lease, None if the text does not describe one."""
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
        """The fencing number, larger than those of all former holders. The lease must be
        acquired.
        """
        assert self._lease is not None, "the lease was not acquired"
        return self._lease.token

    @property
    def is_valid(self) -> bool:
        """Whether this job certainly holds the lease at this moment."""
        return self._lease is not None and self._lease.is_valid

    async def acquire(self) -> None:
        """Acquires the lease and starts to renew it.

        Raises CheckpointError, naming the holder, if another job has it.
        """
        try:
            self._lease = await self._win()
        except OSError as error:
            raise CheckpointError(f"the lease of {self._what} cannot be taken: {error}") from error
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

        The renewal of a late lease works unless another job has taken the lease. A call after an
        action also shows that no other job can have begun without seeing this action.
        """
        if self._lease is not None:
            while not self._lease.is_valid and await self._keeper.renew_late(self._lease):
                logger.debug("the lease of %s was renewed late", self._what)
        self.check()

    async def release(self) -> None:
        """Gives the lease back, so that the next job can start at once. Does nothing if it is not
        held.

        `on_lost` is not called after this.
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
                    "give this one another store or flow name"
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
                f"the lease of {self._what} could not be renewed: another job may take it, so "
                "this one must stop"
            )
        )


def _shown(head: LeaseInfo) -> str:
    return str((head.address and Holder.decode(head.address)) or head.holder.partition("\n")[0])
