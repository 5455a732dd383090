"""A process that has run out of descriptors: what is connected goes on, what knocks waits, and
nothing spins.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.integration.clusters import ROOT

pytestmark = [pytest.mark.timeout(120)]

PROGRAM = '''
import asyncio, json, os, resource, socket, sys

import uvloop

from aioflow.core.elements import RecordBatch
from aioflow.core.system_host import SystemHost
from tests.network.planes import Planes, Reader, until

KNOCKS = 20

async def main():
    loop = asyncio.get_running_loop()
    complaints = []
    loop.set_exception_handler(lambda loop, context: complaints.append(context["message"]))
    async with Planes(SystemHost()) as planes:
        partition = planes.partition()
        reader = Reader(planes.channel())
        partition.subpartitions[0].add(RecordBatch([0]))
        await until(lambda: reader.records == [0])
        # Sockets that will knock, made while there are descriptors for them; then the rest is used
        # up.
        knocking = [socket.socket() for _ in range(KNOCKS)]
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        hoard = []
        try:
            while True:
                hoard.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            pass
        for knock in knocking:
            knock.setblocking(False)
            knock.connect_ex(("127.0.0.1", planes.own_port))
        for n in range(1, 201):
            while not partition.availability.is_available:
                await partition.availability.get_available_future()
            partition.subpartitions[0].add(RecordBatch([n]))
            await until(lambda: len(reader.records) == n + 1)
        used = resource.getrusage(resource.RUSAGE_SELF)
        idle_from = used.ru_utime + used.ru_stime
        # Nothing to do but to wait for descriptors: a loop that spins shows in the CPU time.
        await asyncio.sleep(2)
        used = resource.getrusage(resource.RUSAGE_SELF)
        idle_s = used.ru_utime + used.ru_stime - idle_from
        for descriptor in hoard:
            os.close(descriptor)
        for knock in knocking:
            knock.close()
        # With descriptors again, a peer with the secret gets in.
        late = planes.partition("late")
        late.subpartitions[0].add(RecordBatch(["late"]))
        planes.consumer_again()
        second = Reader(planes.channel("late"))
        await until(lambda: second.records == ["late"])
        said = {"records": len(reader.records), "resets": planes.first_link.resets}
        said |= {"complaints": len(complaints), "idle_s": idle_s}
        print(json.dumps(said))
        for one in (reader, second):
            one.channel.release()
        await planes.end()

class Planes(Planes):
    def consumer_again(self):
        """Another consumer's process would dial again; here a second data plane does."""
        from aioflow.network.data_plane import DataPlane
        from tests.network.planes import SECRET, Registry
        self.first, self.first_link = self.consumer, self.link
        self.consumer = DataPlane(self.host, SECRET, self.codec, Registry())

    async def end(self):
        await self.first.close()

loop_factory = uvloop.new_event_loop if sys.argv[1] == "uvloop" else None
with asyncio.Runner(loop_factory=loop_factory) as runner:
    runner.run(main())
'''


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_without_descriptors_channels_go_on_and_the_listener_does_not_spin(loop: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, loop],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert (said["records"], said["resets"]) == (201, 0)
    # asyncio says so and stops listening for a second, uvloop turns the callers away.
    assert (said["complaints"] > 0) == (loop == "asyncio")
    # CPU time, which other processes do not add to: spinning would make it two seconds.
    assert said["idle_s"] < 1.0
