"""Broadcast state: limits that change while the flow runs, shown to every subtask that watches the
accounts.

Limits come as a stream of their own, and each subtask keeps all of them; what an account has spent
is keyed state beside them. Which of two streams is read first is not promised, so a payment waits
for its timer: it fires when the watermarks of both streams have passed, and then every limit that
was in force is there. So the answers are the same in every run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import NamedTuple

import aioflow as af


class Payment(NamedTuple):
    account: str
    at: int  # ms
    country: str
    cents: int


class Limit(NamedTuple):
    country: str
    at: int  # ms, in force from then on
    cents: int  # that one account may spend there


PAYMENTS = [
    Payment("ann", 1_000, "FR", 700),
    Payment("bob", 2_000, "FR", 300),
    Payment("ann", 3_000, "FR", 400),  # 1100 of 1000
    Payment("bob", 6_000, "FR", 300),  # 600, which was allowed until a second ago
    Payment("bob", 7_000, "US", 9_000),  # There is no limit for this country yet.
    Payment("ann", 9_000, "US", 50),
]
LIMITS = [Limit("FR", 0, 1_000), Limit("FR", 5_000, 500), Limit("US", 8_000, 40)]

KNOWN = af.MapStateDescriptor[str, dict[int, int]]("limits")  # country -> {in force from: cents}


class Watch(af.KeyedBroadcastProcessFunction[str, Payment, Limit, tuple[int, str]]):
    """Says when an account has spent more in a country than it might at that time."""

    def open(self, ctx: af.RuntimeContext) -> None:
        self.waiting = ctx.get_list_state(af.ListStateDescriptor[Payment]("waiting"))
        self.spent = ctx.get_map_state(af.MapStateDescriptor[str, int]("spent"))

    def process_element(self, value: Payment, ctx: af.ProcessContext) -> None:
        self.waiting.add(value)
        ctx.timer_service.register_event_time_timer(value.at)

    def process_broadcast_element(self, value: Limit, ctx: af.ProcessContext) -> None:
        limits = ctx.get_broadcast_state(
            KNOWN
        )  # Only here it can be changed: all subtasks must keep the same.
        limits.put(value.country, {**(limits.get(value.country) or {}), value.at: value.cents})

    def on_timer(self, timestamp: int, ctx: af.ProcessContext) -> Iterator[tuple[int, str]]:
        due = [payment for payment in self.waiting.get() if payment.at <= timestamp]
        self.waiting.update([payment for payment in self.waiting.get() if payment.at > timestamp])
        for payment in due:
            spent = (self.spent.get(payment.country) or 0) + payment.cents
            self.spent.put(payment.country, spent)
            limits: dict[int, int] = ctx.get_broadcast_state(KNOWN).get(payment.country) or {}
            in_force = max((since for since in limits if since <= timestamp), default=None)
            if in_force is not None and spent > limits[in_force]:
                yield (
                    timestamp,
                    f"{payment.account} spent {spent} in {payment.country}, allowed "
                    f"{limits[in_force]}",
                )


flow = af.Flow("rules", parallelism=2)
payments = flow.source(
    PAYMENTS,
    name="payments",
    watermarks=af.WatermarkStrategy.monotonous_timestamps(timestamp=lambda payment: payment.at),
)
limits = flow.source(
    LIMITS,
    name="limits",
    watermarks=af.WatermarkStrategy.monotonous_timestamps(timestamp=lambda limit: limit.at),
)
alerts = (
    payments.key_by(lambda payment: payment.account).connect(limits.broadcast(KNOWN)).process(Watch)
)


async def main() -> None:
    for at, alert in sorted(await alerts.collect()):
        print(f"{at // 1000} s: {alert}")


if __name__ == "__main__":
    asyncio.run(main())
