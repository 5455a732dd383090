"""Fraud alerts: a card that pays a little and then, within a minute, a lot. After the example of
Flink's documentation.

The function remembers the small payment in keyed state and sets an event-time timer that forgets it
a minute later, so that cards that never pay again cost nothing. Time is that of the payments: the
alerts are the same live and over last year's file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import aioflow as af

SMALL, LARGE = 100, 50_000  # cents
MINUTE = 60_000


@dataclass(frozen=True, slots=True)
class Payment:
    card: str
    at: int  # ms
    cents: int


class SmallThenLarge(af.KeyedProcessFunction[str, Payment, str]):
    def open(self, ctx: af.RuntimeContext) -> None:
        self.small_at = ctx.get_state(af.ValueStateDescriptor[int]("small_at"))

    def process_element(self, value: Payment, ctx: af.ProcessContext) -> Iterator[str]:
        small_at = self.small_at.value()
        if small_at is not None:
            # A timer fires after the element that moves event time past it, so the time is compared
            # here too.
            if value.cents >= LARGE and value.at - small_at <= MINUTE:
                yield (
                    f"{value.card}: {value.cents / 100:.2f} only {(value.at - small_at) // 1000} "
                    "s after a trial payment"
                )
            self.forget(ctx, small_at)
        if value.cents <= SMALL:
            self.small_at.update(value.at)
            ctx.timer_service.register_event_time_timer(value.at + MINUTE)

    def on_timer(self, timestamp: int, ctx: af.ProcessContext) -> None:
        self.small_at.clear()  # A minute went by.

    def forget(self, ctx: af.ProcessContext, small_at: int) -> None:
        ctx.timer_service.delete_event_time_timer(small_at + MINUTE)
        self.small_at.clear()


PAYMENTS = [
    Payment("4711", 0, 50),
    Payment("1234", 5_000, 99),
    Payment("4711", 20_000, 80_000),  # 20 s after its small one: alert.
    Payment("1234", 40_000, 2_000),  # Neither small nor large: the trial is forgotten.
    Payment("1234", 50_000, 99_000),
    Payment("9999", 60_000, 10),
    Payment("9999", 120_000, 60_000),  # 60 s after is within a minute: alert.
    Payment("5555", 130_000, 10),
    Payment("5555", 200_000, 70_000),  # 70 s after: too long.
    Payment("4711", 210_000, 70_000),
]

flow = af.Flow("fraud alerts")
payments = flow.source(
    PAYMENTS,
    watermarks=af.WatermarkStrategy.monotonous_timestamps(timestamp=lambda payment: payment.at),
)
alerts = payments.key_by(lambda payment: payment.card).process(SmallThenLarge)
alerts.sink(af.io.stdout())


if __name__ == "__main__":
    af.run(flow)
