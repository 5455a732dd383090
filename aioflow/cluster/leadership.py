"""Leader election: one of several candidates leads while it holds the lease
(`checkpoint.lease`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from aioflow.checkpoint.lease import (
    Lease,
    LeaseKeeper,
    LeaseOptions,
    LeaseStore,
    ObjectLeases,
    current_holder,
)
from aioflow.checkpoint.objects import DirectoryObjects
from aioflow.cluster.fencing import StaleLeader
from aioflow.core.aio import cancel_and_wait, wait_first

if TYPE_CHECKING:
    from aioflow.core.host import Host

__all__ = ["DirectoryLeases", "LeaderElection", "Leadership"]

logger = logging.getLogger(__name__)


class Leadership(Lease):
    """The term of one leader. Call `check` at every step that is visible to others."""

    def check(self) -> None:
        """Raises StaleLeader unless this candidate leads at this moment.

        After that the term is over, even if a renewal in progress still succeeds: a caller that saw
        StaleLeader has stopped for good. Another leader does the remaining work.
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
    """One candidate. `address` is its published address as leader."""

    def __init__(
        self, host: Host, leases: LeaseStore, address: str, options: LeaseOptions | None = None
    ) -> None:
        self._host = host
        self._leases = leases
        self._address = address
        self._options = options or LeaseOptions()
        self._keeper = LeaseKeeper(host, leases, address, address, self._options)
        self.candidate = self._keeper.candidate
        """Identifies this run of the candidate; after a restart it is another."""

    async def run(
        self,
        lead: Callable[[Leadership], Coroutine[Any, Any, object]],
        given_up: asyncio.Event | None = None,
    ) -> None:
        """Contends for the lease until `given_up` is set, and runs `lead(leadership)` while it
        leads.

        `lead` is cancelled when the lease is lost, and then has `stop_s` to end. `run` returns when
        `lead` returns. An error of `lead` is raised after the lease was released. After StaleLeader
        it contends again.
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
            # StaleLeader means that the work noticed the lost lease and stopped as it should.
            errors = [error for error in errors if not isinstance(error, StaleLeader)]
            if errors:
                raise errors[0]
            if over and not work.cancelled() and work.exception() is None:
                return
            logger.warning(
                "%s lost its lease with fencing token %d", self._address, leadership.token
            )

    async def _win(self, given_up: asyncio.Event) -> Leadership | None:
        """Returns None if `given_up` was set first."""
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
                # Randomised, so that candidates do not all try at the same moment.
                await wait_first(
                    [ending], timeout_s=options.renew_s * self._host.rng.uniform(0.25, 0.5)
                )
            return None
        finally:
            await cancel_and_wait([ending])
