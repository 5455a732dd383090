"""Sockets of the machine: a listener that is closed during a connection attempt."""

from __future__ import annotations

import asyncio
import socket

import pytest

from aioflow.core.system_host import SystemNetwork

TURNS_MAX = 8
"""Number of turns of the loop for a connection to be accepted and to get its transport."""


class Accepted(asyncio.Protocol):
    made = connected = lost = 0

    def __init__(self) -> None:
        Accepted.made += 1

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        Accepted.connected += 1
        transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        Accepted.lost += 1


@pytest.mark.parametrize("turns", range(TURNS_MAX))
async def test_connection_accepted_before_the_listener_was_closed_is_not_forgotten(
    turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for count in ("made", "connected", "lost"):
        monkeypatch.setattr(Accepted, count, 0)
    listener = await SystemNetwork().listen(Accepted, "127.0.0.1", 0)
    with socket.create_connection(("127.0.0.1", listener.port)) as client:
        for _ in range(turns):
            await asyncio.sleep(0)
        listener.close()
        listener.close()
        for _ in range(TURNS_MAX):
            await asyncio.sleep(0)

        assert Accepted.made == Accepted.connected == Accepted.lost
        # The client sees the close, whether its connection was accepted or not.
        client.settimeout(30)
        try:
            assert client.recv(1) == b""
        except ConnectionResetError:
            pass


async def test_the_port_of_a_closed_listener_is_free_at_once() -> None:
    first = await SystemNetwork().listen(Accepted, "127.0.0.1", 0)
    first.close()
    second = await SystemNetwork().listen(Accepted, "127.0.0.1", first.port)
    assert second.port == first.port
    second.close()
