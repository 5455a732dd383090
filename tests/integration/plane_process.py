"""One side of a data plane as a process of its own, for tests that need it on another machine.

It prints each event as a line of JSON.

    python -m tests.integration.plane_process produce ADDRESS PORT COUNT
    python -m tests.integration.plane_process consume ADDRESS PORT COUNT

The producer writes the numbers below COUNT, a few at a time, as long as there is room; it ends when
its standard input does. The consumer reads them, says how far it is and each time that its link
lost a connection, and ends when it has all, or with the error.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from aioflow.core.elements import RecordBatch
from aioflow.core.system_host import SystemHost
from aioflow.core.wire.serializers import Codec
from aioflow.network.data_plane import DataPlane
from aioflow.network.security import SecuredHost, Security
from tests.network.planes import SECRET, Planes, Reader, Registry

BATCH = 50


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


async def produce(address: str, port: int, count: int) -> None:
    planes = Planes(
        SystemHost(), SecuredHost(SystemHost(), Security(allow_plaintext=True)), address
    )
    partition = planes.partition(batches=4)
    say(port=await planes.producer.listen(address, port))
    ended = asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    for start in range(0, count, BATCH):
        while not partition.availability.is_available:
            room = partition.availability.get_available_future()
            await asyncio.wait([room, ended], return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                break
        if ended.done():
            break
        partition.subpartitions[0].add(RecordBatch(list(range(start, min(count, start + BATCH)))))
        await asyncio.sleep(0.001)
    await ended
    await planes.producer.close()


async def consume(address: str, port: int, count: int) -> None:
    planes = Planes(SystemHost(), address=address)
    planes.port = port
    planes.consumer = DataPlane(SystemHost(), SECRET, Codec(), Registry())
    link, reader = planes.link, Reader(planes.channel())
    told, resets = -1, 0
    while len(reader.records) < count and reader.error is None:
        await asyncio.sleep(0.01)
        if link.resets != resets:
            resets = link.resets
            say(resets=resets)
        if len(reader.records) // 500 != told:
            told = len(reader.records) // 500
            say(records=len(reader.records))
    say(
        complete=reader.records == list(range(count)),
        resets=link.resets,
        error=None if reader.error is None else repr(reader.error),
    )
    reader.channel.release()
    await planes.consumer.close()


if __name__ == "__main__":
    role, address, port, count = sys.argv[1:]
    asyncio.run((produce if role == "produce" else consume)(address, int(port), int(count)))
