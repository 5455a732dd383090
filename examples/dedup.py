"""Deduplication: each payment once, though the provider delivers some again.

Keyed state remembers the ids. Its time to live forgets them after a second, so that the state stays
small for ever; a real service would say "1d". What comes again after that passes, which is the
price that is chosen with the number.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import aioflow as af


class FirstOnly(af.KeyedProcessFunction[str, tuple[str, int], tuple[str, int]]):
    """Lets the first element of each key pass, the others go to `repeated`."""

    def open(self, ctx: af.RuntimeContext) -> None:
        self.seen = ctx.get_state(af.ValueStateDescriptor[bool]("seen", default=False, ttl="1s"))

    def process_element(
        self, value: tuple[str, int], ctx: af.ProcessContext
    ) -> Iterator[tuple[str, int]]:
        if self.seen.value():
            ctx.output(repeated, value)
        else:
            self.seen.update(True)
            yield value


async def payments() -> AsyncIterator[tuple[str, int]]:
    for payment in [("p1", 20), ("p2", 35), ("p1", 20), ("p3", 5), ("p2", 35), ("p2", 35)]:
        yield payment
    await asyncio.sleep(3)
    yield "p1", 20  # The provider tries once more, after its id was forgotten.


repeated = af.OutputTag[tuple[str, int]]("repeated")
flow = af.Flow("dedup")
once = flow.source(payments).key_by(lambda payment: payment[0]).process(FirstOnly)
again = once.side(repeated)


async def main() -> None:
    kept, dropped = await flow.collect(once, again)
    print("kept:   ", *(f"{name}={cents}" for name, cents in kept))
    print("dropped:", *(f"{name}={cents}" for name, cents in dropped))


if __name__ == "__main__":
    asyncio.run(main())
