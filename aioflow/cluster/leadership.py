"""Who leads: one of several candidates, for as long as it holds the lease (`checkpoint.lease`)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from aioflow.checkpoint.directory import DirectoryObjects
from aioflow.checkpoint.lease import (
    Lease,
    LeaseKeeper,
    LeaseOptions,
    LeaseStore,
    ObjectLeases,
    current_holder,
)
from aioflow.cluster.fencing import StaleLeader
from aioflow.core.aio import cancel_and_wait, wait_first

if TYPE_CHECKING:
    from aioflow.core.host import Host

__all__ = ["DirectoryLeases", "LeaderElection", "Leadership"]

logger = logging.getLogger(__name__)


class Leadership(Lease):
    """The time in which one candidate may act. Ask `check` at every step that others can see."""

    def check(self) -> None:
        """Raise StaleLeader unless this candidate leads at this moment. Then it is over: what was
        left undone needs another leader.

        A renewal that was under way may yet come true; whoever heard here that it leads no more has
        stopped all the same, for good.
        """
        if not self.is_valid:
            self.revoke()
            candidate = self.info.holder.partition("\n")[0]
            raise StaleLeader(
                f"{candidate} led with fencing token {self.token} and could not renew its lease: "
                "another may lead now, stop acting"
            )


class DirectoryLeases(ObjectLeases):
    """A LeaseStore in a directory of its own."""

    def __init__(self, host: Host, path: str) -> None:
        super().__init__(DirectoryObjects(host, path))


class LeaderElection:
    """One candidate. `address` is where others reach it once it leads."""

    def __init__(
        self, host: Host, leases: LeaseStore, address: str, options: LeaseOptions | None = None
    ) -> None:
        self._host = host
        self._leases = leases
        self._address = address
        self._options = options or LeaseOptions()
        self._keeper = LeaseKeeper(host, leases, address, address, self._options)
        self.candidate = self._keeper.candidate
        """Names this life of this candidate: a restarted one is another."""

    async def run(
        self,
        lead: Callable[[Leadership], Coroutine[Any, Any, object]],
        given_up: asyncio.Event | None = None,
    ) -> None:
        """Contend until `given_up` is set; while leading, run `lead(leadership)`, cancelled when
        the lease is lost. Returns when `lead` returns: who leads has to end that.

        What `lead` raises comes out, after the lease was given back; but for StaleLeader, after
        which it contends again. `lead` has `stop_s` to end in once it was cancelled.
        """
        given_up = given_up or asyncio.Event()
        while (leadership := await self._win(given_up)) is not None:
            logger.info("%s leads with fencing token %d", self._address, leadership.token)
            work = asyncio.get_running_loop().create_task(
                lead(leadership), name=f"leader {leadership.token}"
            )
            keeper = asyncio.get_running_loop().create_task(
                self._keeper.keep(leadership), name=f"lease {leadership.token}"
            )
            errors: list[BaseException] = []
            try:
                await wait_first([work, keeper])
                over = work.done()
            finally:
                errors += await cancel_and_wait([work])
                errors += await cancel_and_wait([keeper])
                await self._keeper.resign(leadership)
            # Work that asked and heard that it leads no more has done what it should.
            errors = [error for error in errors if not isinstance(error, StaleLeader)]
            if errors:
                raise errors[0]
            if over and not work.cancelled() and work.exception() is None:
                return
            logger.warning(
                "%s lost its lease with fencing token %d", self._address, leadership.token
            )

    async def _win(self, given_up: asyncio.Event) -> Leadership | None:
        """None: `given_up` was set before that."""
        options, clock = self._options, self._host.clock
        seen, since, before = -1, 0.0, ""
        ending = asyncio.get_running_loop().create_task(given_up.wait(), name="candidate")
        try:
            while not given_up.is_set():
                try:
                    head = await current_holder(self._leases)
                    now = clock.monotonic()
                    if head is not None and head.number != seen:
                        seen, since = head.number, now
                    is_free = (
                        head is None
                        or head.address is None
                        or head.holder == self.candidate
                        or self._keeper.has_ended(head)
                    )
                    if is_free or now - since >= options.take_over_s:
                        leadership = await self._keeper.take(
                            1 if head is None else head.number + 1, Leadership
                        )
                        if leadership is not None:
                            return leadership
                    elif head is not None and head.address is not None and head.address != before:
                        before = head.address
                        logger.info("%s stands by: %s leads", self._address, before)
                    self._keeper.works()
                except OSError as error:
                    self._keeper.failed(error)
                # Not all at the same moment.
                await wait_first(
                    [ending], timeout_s=options.renew_s * self._host.rng.uniform(0.25, 0.5)
                )
            return None
        finally:
            await cancel_and_wait([ending])
