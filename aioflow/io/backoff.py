"""How long to wait before connecting again: twice as long each time, with jitter, so that many clients do not come back at once."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from aioflow.core.timeunits import to_seconds

if TYPE_CHECKING:
    from aioflow.core.host import Rng
    from aioflow.core.timeunits import Duration

__all__ = ["MAX_BACKOFF_S", "Backoff"]

MAX_BACKOFF_S = 30.0


class Backoff:
    """Delays of one connection. `reset` when it worked."""

    def __init__(self, rng: Rng, first: Duration = "100ms", max_s: float = MAX_BACKOFF_S) -> None:
        self._rng = rng
        self._first_s = to_seconds(first, "backoff")
        self._max_s = max_s
        self.tries = 0

    def reset(self) -> None:
        self.tries = 0

    async def sleep(self) -> None:
        """Wait between half and all of the current delay."""
        delay_s = min(self._first_s * 2.0 ** min(self.tries, 32), self._max_s)
        self.tries += 1
        await asyncio.sleep(delay_s * self._rng.uniform(0.5, 1.0))
