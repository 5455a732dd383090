"""The thread of a worker names what its event loop waits for."""

from __future__ import annotations

import logging
import time

import pytest

from aioflow.cluster import pulse
from aioflow.core.system_host import SystemHost
from aioflow.protocol.handshake import PeerRole


def importing_slowly(log: pytest.LogCaptureFixture) -> None:
    """Holds the loop until the log says so, as an import does."""
    until = time.monotonic() + 30.0
    while not log.messages and time.monotonic() < until:
        time.sleep(0.01)


async def test_a_slow_import_is_logged_with_its_place_while_it_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pulse, "LOADING_S", 0.05)
    monkeypatch.setattr(pulse, "LOOK_S", 0.01)
    host = SystemHost()
    beats = pulse.Pulse(host, b"", PeerRole.TASKMANAGER, ("127.0.0.1", 9), 60.0, ("w1",))
    with caplog.at_level(logging.WARNING):
        async with beats:
            with beats.loading("job j1 on taskmanager w1"):
                importing_slowly(caplog)
    (told,) = caplog.messages
    assert told.startswith("job j1 on taskmanager w1 has been importing its program for 0 s")
    assert "in importing_slowly" in told
    await host.close()
