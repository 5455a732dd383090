"""Flows that the tests of clusters submit by path."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import aioflow as af


async def ticks() -> AsyncIterator[int]:
    n = 0
    while True:
        yield n
        n += 1
        await asyncio.sleep(0.01)


endless = af.Flow("endless")
endless.source(ticks).key_by(lambda n: n % 4).count().sink(af.io.blackhole())


async def some_ticks() -> AsyncIterator[int]:
    for n in range(2_000):
        yield n
        await asyncio.sleep(0.01)


ending = af.Flow("ending")
ending.source(some_ticks).key_by(lambda n: n % 4).count().sink(af.io.blackhole())


async def a_second() -> AsyncIterator[int]:
    for n in range(10):
        yield n
        await asyncio.sleep(0.1)


def short() -> af.Flow:
    flow = af.Flow("short")
    flow.source(a_second).key_by(lambda n: n % 4).count().sink(af.io.blackhole())
    return flow


endless_at_home = af.Flow("endless_at_home")
endless_at_home.source(ticks).map(lambda n: -n).sink(print)

wide = af.Flow("wide", parallelism=4)
wide.source(range(100)).key_by(lambda n: n % 16).count().sink(af.io.blackhole())

at_once = af.Flow("at_once")
at_once.source(range(100)).key_by(lambda n: n % 4).count().sink(af.io.blackhole())

at_home = af.Flow("at_home")
at_home.source([1, 2, 3]).sink(print)


async def positioned(position: int | None) -> AsyncIterator[tuple[int, int]]:
    n = position or 0
    while True:
        yield n, n + 1
        n += 1
        await asyncio.sleep(0.01)


rescaled = af.Flow("rescaled")
rescaled.source(positioned).key_by(lambda n: n % 8).count(uid="count").sink(af.io.blackhole())

two_groups = af.Flow("two_groups")
counted = two_groups.source(range(100)).slot_sharing_group("read").key_by(lambda n: n % 8).count()
counted.slot_sharing_group("count").sink(af.io.blackhole())

wide_endless = af.Flow("wide_endless", parallelism=4)
wide_endless.source(positioned).key_by(lambda n: n % 8).count().sink(af.io.blackhole())


def fail(n: int) -> int:
    raise ValueError(f"no {n}")


failing = af.Flow("failing")
failing.source([1]).map(fail).sink(af.io.blackhole())

failing_at_home = af.Flow("failing_at_home")
failing_at_home.source([1]).map(fail).sink(print)
