"""The names of `aioflow.testing`, and the fixture that runs a coroutine in virtual time."""

from __future__ import annotations

import asyncio

import pytest

import aioflow.testing
from aioflow.testing.plugin import sim_loop as sim_loop
from aioflow.testing.simulation import SimLoop


@pytest.mark.parametrize("sim_loop", [0, 1, 2], indirect=True)
def test_sim_loop_runs_streams_and_sleeps_in_virtual_time(sim_loop: SimLoop) -> None:
    async def main() -> bytes:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(await reader.readline())
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 7)
        reader, writer = await asyncio.open_connection("127.0.0.1", 7)
        writer.write(b"hello\n")
        answer = await reader.read()
        writer.close()
        server.close()
        await asyncio.sleep(3600)
        return answer

    assert sim_loop.run_until_complete(main()) == b"hello\n"
    assert sim_loop.time() > 3600


def test_names_of_the_testing_package_load_on_demand() -> None:
    for name in aioflow.testing.__all__:
        assert getattr(aioflow.testing, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        aioflow.testing.nonsense
