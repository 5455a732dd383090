"""Async enrichment: each trade asks a web service, many requests at a time, with a time limit,
retries and a way out for what fails.

`http` is a resource: one client session for the job, opened before the first element and closed
after the last. The service runs in this process too, so that there is something real to ask: it is
slow, it fails now and then, and one symbol it does not know.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import aiohttp
from aiohttp import web

import aioflow as af

NAMES = {"AAPL": "Apple", "MSFT": "Microsoft", "NVDA": "Nvidia"}
TRADES = [(symbol, size) for size in range(1, 41) for symbol in ("AAPL", "MSFT", "NVDA", "????")]
CONCURRENCY = 16


class Directory:
    """The web service: names of companies.

    Notes how often it was asked, and how many requests it had at once.
    """

    def __init__(self) -> None:
        self.url = ""
        self.asked: Counter[str] = Counter()
        self.open = self.most_open = 0

    async def name(self, request: web.Request) -> web.Response:
        symbol = request.match_info["symbol"]
        self.asked[request.path_qs] += 1
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            await asyncio.sleep(0.02)
            if symbol == "NVDA" and self.asked[request.path_qs] == 1:
                return web.Response(status=503)  # The first time; the next try succeeds.
            if symbol not in NAMES:
                return web.Response(status=404)
            return web.json_response(NAMES[symbol])
        finally:
            self.open -= 1

    @asynccontextmanager
    async def served(self) -> AsyncGenerator[None]:
        app = web.Application()
        app.add_routes([web.get("/names/{symbol}", self.name)])
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        try:
            yield
        finally:
            await runner.cleanup()


directory = Directory()


class Unavailable(Exception):
    """The service asks to try again."""


@af.resource
async def http() -> AsyncGenerator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def with_name(
    trade: tuple[str, int], session: aiohttp.ClientSession = af.use(http)
) -> tuple[str, int]:
    symbol, size = trade
    async with session.get(f"{directory.url}/names/{symbol}?size={size}") as response:
        if response.status == 503:
            raise Unavailable
        if response.status == 404:
            raise LookupError(symbol)
        return await response.json(), size


bad = af.OutputTag[af.Failed[tuple[str, int]]]("bad")
flow = af.Flow("enrichment")
named = flow.source(TRADES).map(
    with_name,
    concurrency=CONCURRENCY,
    ordered=False,
    timeout="5s",
    retry=af.Retry(3, backoff="10ms", on=Unavailable),
    on_error=bad,
)
totals = (
    named.key_by(lambda trade: trade[0])
    .window(af.global_window(at_end=True))
    .aggregate(af.sum(lambda trade: trade[1]))
)


async def main() -> None:
    async with directory.served():
        results, failed = await flow.collect(totals, named.side(bad))
    for result in sorted(results):
        print(f"{result.key}: {result.value}")
    reasons = Counter((failure.value[0], failure.error_type) for failure in failed)
    for (symbol, reason), count in sorted(reasons.items()):
        print(f"{symbol}: {count} failed with {reason}")
    print(f"at most {CONCURRENCY} requests at once: {1 < directory.most_open <= CONCURRENCY}")


if __name__ == "__main__":
    asyncio.run(main())
