"""One end of a simulated TCP connection.

Bytes of a connection arrive in order and unchanged. They may be split anywhere and delayed, and at
most as many are under way as the receiver's window allows. Packets that cannot pass are sent again
with a growing pause until the sender gives up. A reset, or the death of a process, breaks the
connection.

Invariant: a connection never loses, doubles or reorders a byte that it delivers. It may only end
early.
"""

from __future__ import annotations

import asyncio
import errno
import os
import zlib
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from random import Random  # noqa: TID251  # Only its type; the streams come from the loop.
from typing import Any, Protocol

from aioflow.testing.simulation.loop import SimLoop
from aioflow.testing.simulation.process import SimMachine, SimProcess

__all__ = [
    "RETRY_FIRST_S",
    "RETRY_MAX_S",
    "Links",
    "NetworkOptions",
    "OpenPort",
    "SimTransport",
    "os_error",
]

RETRY_FIRST_S = 0.2
"""First pause before an unacknowledged packet is sent again. It doubles up to `RETRY_MAX_S`."""

RETRY_MAX_S = 1.6

_RST = "rst"
_FIN = "fin"


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkOptions:
    """The behaviour of the network without faults, and its timeouts under faults."""

    latency_s: tuple[float, float] = (1e-4, 2e-3)
    """Range of the time in seconds that a packet takes from one machine to another."""
    loopback_s: tuple[float, float] = (5e-6, 5e-5)
    """Range of the time in seconds that a packet takes between two processes of one machine."""
    window_bytes: int = 65_536
    """Maximum number of bytes that a receiver accepts before its process has read them."""
    segment_bytes_max: int = 16_384
    split_rate: float = 0.1
    """Share of the packets and of the reads that are cut at a random byte."""
    send_timeout_s: float = 6.0
    """Seconds that bytes may stay unacknowledged before their sender gets ETIMEDOUT."""
    connect_timeout_s: float = 3.0
    dead_fin_rate: float = 0.5
    """Share of the connections of a killed process that end with FIN, as if closed, rather than
    with RST.
    """


class OpenPort(Protocol):
    """The interface of a port, for the connections that the port has accepted."""

    factory: Callable[[], asyncio.BaseProtocol]

    def is_serving(self) -> bool:
        """Returns whether the port is still bound."""
        ...


class Links(Protocol):
    """The interface of the network that a transport uses."""

    loop: SimLoop
    options: NetworkOptions
    rng: Random

    def latency(self, a: SimMachine, b: SimMachine) -> float:
        """Draws the time that a packet takes from `a` to `b`."""
        ...

    def passes(self, a: SimProcess, b: SimProcess) -> bool:
        """Returns whether a packet sent now would arrive."""
        ...

    def opened(self, transport: SimTransport) -> None:
        """Registers a transport that a reset can break."""
        ...

    def closed(self, transport: SimTransport) -> None:
        """Removes a transport that has ended."""
        ...


class SimTransport(asyncio.Transport):
    """One end of a connection: the send buffer, the packets under way to the peer, and the received
    bytes that the process has not read.

    The part that simulates the kernel (`_arrive`, `_pump`) works independently of the process. The
    part that calls the protocol runs as a callback of the process.
    """

    def __init__(
        self,
        network: Links,
        process: SimProcess,
        label: str,
        name: tuple[str, int],
        peer_name: tuple[str, int],
    ) -> None:
        super().__init__({"sockname": name, "peername": peer_name})
        self.network = network
        self.process = process
        self.machine = process.machine
        self.label = label
        self.peer: SimTransport
        self._loop = network.loop
        self._protocol: Any = (
            None  # Any: a Protocol, a BufferedProtocol, or something shaped like one.
        )
        # Sending.
        self._unsent = bytearray()
        self._wire: deque[tuple[float, bytes | str]] = deque()
        self._in_flight = 0  # Bytes on the wire or unread at the peer: never above the window.
        self._arrival_set = False
        self._blocked_since: float | None = None
        self._retry_s = RETRY_FIRST_S
        self._last_eta = 0.0
        self._eof_asked = False
        self._fin_sent = False
        self._high, self._low = 65_536, 16_384
        self._writing_paused = False
        # Receiving.
        self._unread = bytearray()
        self._fin_received = False
        self._rst_received = False
        self._read_set = False
        self._reading_paused = False
        # The end.
        self._closing = False
        self._gone = (
            False  # The kernel has no such connection any more: what arrives is answered with RST.
        )
        self._end_error: OSError | None = None
        process.orphans[self] = None
        network.opened(self)

    # What protocols and streams use.

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._eof_asked:
            raise RuntimeError("Cannot call write() after write_eof()")
        if self._gone or self._closing or not data:
            return
        if self._rst_received:
            self.break_off(os_error(errno.EPIPE))
            return
        self._unsent += data
        self._pump()
        if len(self._unsent) > self._high and not self._writing_paused:
            self._writing_paused = True
            self._protocol.pause_writing()

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        self.write(b"".join(list_of_data))

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        if not self._gone and not self._closing:
            self._eof_asked = True
            self._pump()

    def close(self) -> None:
        if self._closing or self._gone:
            return
        self._closing = True
        self._pump()

    def abort(self) -> None:
        if not self._gone:
            self._send(_RST)
            self._end(None)

    def is_closing(self) -> bool:
        return self._closing or self._gone

    def get_write_buffer_size(self) -> int:
        return len(self._unsent)

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self._low, self._high

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        if high is None:
            high = 65_536 if low is None else 4 * low
        if low is None:
            low = high // 4
        if not high >= low >= 0:
            raise ValueError(f"high ({high!r}) must be >= low ({low!r}) must be >= 0")
        self._high, self._low = high, low

    def pause_reading(self) -> None:
        self._reading_paused = True

    def resume_reading(self) -> None:
        self._reading_paused = False
        self._set_read()

    def is_reading(self) -> bool:
        return not self._reading_paused and not self.is_closing()

    def get_protocol(self) -> asyncio.BaseProtocol:
        protocol: asyncio.BaseProtocol = self._protocol
        return protocol

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    # Sending: the kernel's side.

    def _pump(self) -> None:
        """Sends bytes from the send buffer, as far as the peer's window allows. If the connection
        is closing, then sends the end of the stream.
        """
        options, rng, unsent = self.network.options, self.network.rng, self._unsent
        while unsent and self._in_flight < options.window_bytes and not self._gone:
            length = min(
                len(unsent), options.window_bytes - self._in_flight, options.segment_bytes_max
            )
            if length > 1 and rng.random() < options.split_rate:
                length = rng.randrange(1, length)
            self._in_flight += length
            self._send(bytes(unsent[:length]))
            del unsent[:length]
        if self._writing_paused and len(unsent) <= self._low and self._protocol is not None:
            self._writing_paused = False
            self._loop.post_io(self.process, self._resume_writing)
        if unsent or self._gone:
            return
        if self._closing and self._unread:
            self._send(_RST)  # Closing with unread bytes tells the peer that they were lost.
        elif (self._closing or self._eof_asked) and not self._fin_sent:
            self._fin_sent = True
            self._send(_FIN)
        if self._closing:
            self._end(None)

    def _resume_writing(self) -> None:
        if self._protocol is not None and not self._gone:
            self._protocol.resume_writing()

    def _send(self, item: bytes | str) -> None:
        if self._loop.finished:
            return
        eta = self._loop.time() + self.network.latency(self.machine, self.peer.machine)
        self._last_eta = max(self._last_eta, eta)  # Nothing overtakes within a connection.
        self._wire.append((self._last_eta, item))
        self._set_arrival(self._last_eta)

    def _set_arrival(self, when: float) -> None:
        if not self._arrival_set:
            self._arrival_set = True
            self._loop.kernel_at(when, self._arrive)

    def _arrive(self) -> None:
        """Delivers to the peer the packets that are due now. Holds all packets back while none can
        pass.
        """
        self._arrival_set = False
        now, wire = self._loop.time(), self._wire
        if wire and not self.network.passes(self.process, self.peer.process):
            if self._blocked_since is None:
                self._blocked_since = now
                self._retry_s = RETRY_FIRST_S
            if now - self._blocked_since >= self.network.options.send_timeout_s:
                wire.clear()
                self.break_off(os_error(errno.ETIMEDOUT))
                return
            self._set_arrival(now + self._retry_s)
            self._retry_s = min(2 * self._retry_s, RETRY_MAX_S)
            return
        self._blocked_since = None
        while wire and wire[0][0] <= now:
            item = wire.popleft()[1]
            self._loop.note(
                "RX", self.peer.label, item if isinstance(item, str) else zlib.crc32(item)
            )
            self.peer.receive(item)
        if wire:
            self._set_arrival(wire[0][0])

    def released(self, length: int) -> None:
        """Notes that the peer's process has read `length` bytes. This frees space in the window, so
        sends further bytes.
        """
        self._in_flight -= length
        self._pump()

    # Receiving.

    def receive(self, item: bytes | str) -> None:
        """Receives a packet from the network, as the kernel would."""
        if self._gone:
            if isinstance(item, bytes):
                self._send(_RST)
            return
        if isinstance(item, bytes):
            self._unread += item
        elif item == _FIN:
            self._fin_received = True
        else:
            self._rst_received = True
            if self._unsent or self._closing:
                # A pending send gets the error before any read does.
                self._end(os_error(errno.ECONNRESET))
                return
        self._set_read()

    def _set_read(self) -> None:
        readable = self._unread or self._fin_received or self._rst_received
        if readable and not self._read_set and self.is_reading() and self._protocol is not None:
            self._read_set = True
            self._loop.post_io(self.process, self._read)

    def _read(self) -> None:
        """Reads once from the received bytes, as the selector loop does for a ready socket. Leaves
        the remaining bytes to the next iteration.
        """
        self._read_set = False
        if not self.is_reading():
            return
        unread = self._unread
        if not unread:
            self._read_end()
            return
        rng = self.network.rng
        length = len(unread)
        if length > 1 and rng.random() < self.network.options.split_rate:
            length = rng.randrange(1, length)
        protocol = self._protocol
        if isinstance(protocol, asyncio.BufferedProtocol):
            buffer = memoryview(protocol.get_buffer(-1)).cast("B")
            length = min(length, len(buffer))
            buffer[:length] = unread[:length]
            self._consume(length)
            protocol.buffer_updated(length)
        else:
            data = bytes(unread[:length])
            self._consume(length)
            protocol.data_received(data)
        self._set_read()

    def _consume(self, length: int) -> None:
        del self._unread[:length]
        delay = self.network.latency(self.machine, self.peer.machine)
        self._loop.kernel_at(self._loop.time() + delay, self.peer.released, length)

    def _read_end(self) -> None:
        if self._rst_received:
            self._end(os_error(errno.ECONNRESET))
        elif self._fin_received:
            self._fin_received = False
            if not self._protocol.eof_received():
                self.close()

    # Beginning and end.

    def accept(self, listener: OpenPort) -> None:
        """Makes the server's protocol for a new connection, or resets the connection if the port
        was closed meanwhile.
        """
        if self._gone:
            return
        if listener.is_serving():
            self.begin(listener.factory())
        else:
            self._send(_RST)
            self._gone = True
            self._forget()

    def begin(self, protocol: asyncio.BaseProtocol) -> None:
        """Reports the connection to `protocol`, and then lets it read."""
        self._protocol = protocol
        protocol.connection_made(self)
        if self._gone:  # The connection broke before the process saw it.
            self._loop.call_soon(protocol.connection_lost, self._end_error)
        self._set_read()

    @property
    def is_over(self) -> bool:
        """Whether the kernel has dropped this end of the connection."""
        return self._gone

    def break_off(self, error: OSError) -> None:
        """Ends this side of the connection with `error`. Bytes that it has in flight are lost."""
        if not self._gone:
            self._wire.clear()
            self._end(error)

    def _end(self, error: OSError | None) -> None:
        if self._gone:
            return
        self._gone = True
        self._unsent.clear()
        self._unread.clear()
        self._forget()
        self._end_error = error
        if self._protocol is None:
            return
        if self._loop.current is self.process:
            self._loop.call_soon(self._protocol.connection_lost, error)
        else:
            self._loop.post_io(self.process, self._protocol.connection_lost, error)

    def _forget(self) -> None:
        self.process.orphans.pop(self, None)
        self.network.closed(self)

    def process_died(self, power: bool) -> None:
        """Closes the socket as the kernel does for a killed process. After a loss of power
        (`power`) nothing is sent, and packets under way may be lost.
        """
        if power:
            # Packets that had left the machine arrive, all others are lost. Until power is back,
            # there are no answers.
            for _ in range(self.network.rng.randrange(len(self._wire) + 1)):
                self._wire.pop()
        elif not self._gone and not self._closing:
            orderly = (
                not self._unread and self.network.rng.random() < self.network.options.dead_fin_rate
            )
            self._send(_FIN if orderly else _RST)
        self._gone = True
        self._unsent.clear()
        self._unread.clear()
        self.network.closed(self)


def os_error(number: int, subject: str | None = None) -> OSError:
    """Returns the subclass of OSError for an error number, such as ConnectionResetError."""
    text = os.strerror(number)
    return OSError(number, f"{text}: {subject}" if subject else text)
