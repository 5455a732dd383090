"""The door of an HTTP server: whom it lets in, whom it sends away, and what it holds in memory."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from aioflow.network.http_limits import (
    CHECK_S,
    GRACE_S,
    INPUT_BYTES,
    PIPELINED_MAX,
    SILENCE_S,
    UNREAD_BYTES_MAX,
    Door,
)
from tests.mailbox.conftest import VirtualLoop


class Wire(asyncio.Transport):
    """The transport of one client."""

    def __init__(self, address: str) -> None:
        super().__init__({"peername": (address, 5000)})
        self.unread = 0
        self.is_cut = False
        self.written = b""

    def write(self, data: Any) -> None:
        self.written += data

    def close(self) -> None:
        pass

    def abort(self) -> None:
        self.is_cut = True

    def get_write_buffer_size(self) -> int:
        return self.unread


class Street:
    """A door with `places`, and clients that come."""

    def __init__(self, places: int) -> None:
        self.door = Door(places, "the server")
        self.servers: dict[Wire, asyncio.Protocol] = {}
        self.protocols: dict[Wire, asyncio.Protocol] = {}
        self._made: list[asyncio.Protocol] = []
        self.door.open(self._make)

    def _make(self) -> asyncio.Protocol:
        self._made.append(asyncio.Protocol())
        return self._made[-1]

    def come(self, address: str = "10.0.0.1") -> Wire:
        wire = Wire(address)
        protocol = self.protocols[wire] = self.door()
        self.servers[wire] = self._made[-1]
        protocol.connection_made(wire)
        return wire

    def answer(self, wire: Wire) -> None:
        with self.door.answering(self.servers[wire]):
            pass

    def stop_reading(self, wire: Wire, unread: int = 0) -> None:
        wire.unread = unread
        self.protocols[wire].pause_writing()


def on_street(places: int, scene: Callable[[Street], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        street = Street(places)
        try:
            await scene(street)
        finally:
            street.door.close()
            await asyncio.sleep(0)

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(main())


def test_a_new_client_takes_the_place_of_the_one_that_is_quiet_longest() -> None:
    async def scene(street: Street) -> None:
        first, second = street.come(), street.come()
        await asyncio.sleep(GRACE_S + 1)
        street.answer(first)
        third = street.come()
        assert [wire.is_cut for wire in (first, second, third)] == [False, True, False]

    on_street(2, scene)


def test_a_stalled_client_goes_before_a_quiet_one() -> None:
    async def scene(street: Street) -> None:
        quiet, stalled = street.come(), street.come()
        await asyncio.sleep(GRACE_S + 1)
        street.stop_reading(stalled)
        street.come()
        assert [quiet.is_cut, stalled.is_cut] == [False, True]

    on_street(2, scene)


def test_the_address_with_most_connections_gives_way() -> None:
    async def scene(street: Street) -> None:
        alone = street.come("10.0.0.9")
        many = [street.come("10.0.0.1") for _ in range(3)]
        await asyncio.sleep(GRACE_S + 1)
        street.come("10.0.0.2")
        assert [wire.is_cut for wire in (alone, *many)] == [False, True, False, False]

    on_street(4, scene)


def test_a_client_that_works_keeps_its_place() -> None:
    async def scene(street: Street) -> None:
        busy = street.come()
        with street.door.answering(street.servers[busy]):
            await asyncio.sleep(SILENCE_S + 2 * CHECK_S)
            late = street.come()
            assert late.written.startswith(b"HTTP/1.1 503")
        assert not busy.is_cut

    on_street(1, scene)


def test_as_many_new_clients_as_places_may_wait_for_a_moment() -> None:
    async def scene(street: Street) -> None:
        wires = [street.come() for _ in range(4)]
        assert not any(wire.is_cut for wire in wires)
        street.come()
        assert [wire.is_cut for wire in wires] == [True, False, False, False]

    on_street(2, scene)


@pytest.mark.parametrize("reads", [True, False])
def test_a_client_is_cut_off_when_it_is_silent_too_long(reads: bool) -> None:
    async def scene(street: Street) -> None:
        wire, other = street.come(), street.come()
        if not reads:
            street.stop_reading(wire)
        for _ in range(int(SILENCE_S / CHECK_S) + 2):
            await asyncio.sleep(CHECK_S)
            street.protocols[other].data_received(b"GET")
            street.answer(other)
        assert wire.is_cut
        assert not other.is_cut

    on_street(9, scene)


def test_a_client_of_a_slow_link_has_time_as_long_as_it_reads() -> None:
    async def scene(street: Street) -> None:
        wire = street.come()
        street.stop_reading(wire, 1_000_000)
        for _ in range(int(3 * SILENCE_S / CHECK_S)):
            await asyncio.sleep(CHECK_S)
            wire.unread -= 1_000
        assert not wire.is_cut
        await asyncio.sleep(SILENCE_S + 2 * CHECK_S)
        assert wire.is_cut

    on_street(9, scene)


def test_unread_output_of_clients_is_bounded() -> None:
    async def scene(street: Street) -> None:
        size = UNREAD_BYTES_MAX // 4 - INPUT_BYTES
        wires = [street.come() for _ in range(6)]
        for wire in wires:
            with street.door.answering(street.servers[wire]):
                street.stop_reading(wire, size)
        assert [wire.is_cut for wire in wires] == [True, True, False, False, False, False]

    on_street(9, scene)


def test_a_client_that_sends_many_requests_at_once_is_cut_off() -> None:
    async def scene(street: Street) -> None:
        polite, hasty = street.come(), street.come()
        for _ in range(PIPELINED_MAX + 1):
            street.protocols[polite].data_received(b"GET")
            street.answer(polite)
            street.answer(hasty)
        assert [polite.is_cut, hasty.is_cut] == [False, True]

    on_street(9, scene)


def test_a_flood_is_logged_at_once_and_then_each_minute(caplog: pytest.LogCaptureFixture) -> None:
    async def scene(street: Street) -> None:
        for _ in range(50):
            street.stop_reading(street.come(), UNREAD_BYTES_MAX)
        await asyncio.sleep(61)
        for _ in range(2):
            street.stop_reading(street.come(), UNREAD_BYTES_MAX)
        street.stop_reading(street.come(), UNREAD_BYTES_MAX)

    with caplog.at_level(logging.INFO, "aioflow"):
        on_street(99, scene)
    told = [record.message for record in caplog.records if record.name.startswith("aioflow")]
    reason = (
        "the server refused a connection from 10.0.0.1:5000: clients left more than 16777216 "
        "bytes unread"
    )
    assert told[0] == reason
    assert "more were refused since the last line" in told[1]
    assert len(told) == 3
