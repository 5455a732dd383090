"""A simulated network: machines, ports and links, and the faults of links.

A cut link holds packets back until it is healed or their sender gives up. A reset breaks the
connections of two machines, and a slow link multiplies its latency. `transport` implements how a
connection reacts to these faults.

Invariant: a fault affects the packets between two machines, in both directions unless a cut is
`one_way`. It affects packets inside one machine only if both given names are that machine's. Only
`part` works on a pair of processes.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Self

from aioflow.testing.simulation.loop import SimLoop
from aioflow.testing.simulation.process import SimMachine, SimProcess
from aioflow.testing.simulation.transport import (
    RETRY_FIRST_S,
    RETRY_MAX_S,
    NetworkOptions,
    SimTransport,
    os_error,
)

__all__ = ["SimListener", "SimNetwork"]

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "0.0.0.0", "::1", "::"})


class SimListener(asyncio.AbstractServer):
    """A bound port. It is also the `asyncio.Server` of the port."""

    def __init__(
        self,
        loop: SimLoop,
        process: SimProcess,
        factory: Callable[[], asyncio.BaseProtocol],
        port: int,
    ) -> None:
        self.process = process
        self.factory = factory
        self.port = port
        self._loop = loop
        self._forever: asyncio.Future[None] | None = None
        process.orphans[self] = None

    @property
    def sockets(self) -> tuple[_SocketName, ...]:
        return (_SocketName(self.process.machine.name, self.port),) if self.is_serving() else ()

    def get_loop(self) -> SimLoop:
        return self._loop

    def is_serving(self) -> bool:
        return self.process.machine.ports.get(self.port) is self

    def close(self) -> None:
        if self.is_serving():
            del self.process.machine.ports[self.port]
        self.process.orphans.pop(self, None)
        if self._forever is not None and not self._forever.done():
            self._forever.cancel()

    def process_died(self, power: bool) -> None:
        if self.is_serving():
            del self.process.machine.ports[self.port]

    async def start_serving(self) -> None:
        """Does nothing, because a port accepts connections as soon as it is made."""

    async def serve_forever(self) -> None:
        self._forever = self._loop.create_future()
        try:
            await self._forever
        finally:
            self._forever = None
            self.close()

    async def wait_closed(self) -> None:
        """Does nothing, because closing takes no time."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class _SocketName:
    """A listening socket that has only `getsockname`, because callers use nothing else."""

    machine: str
    port: int

    def getsockname(self) -> tuple[str, int]:
        return self.machine, self.port


class SimNetwork:
    """All links and connections, and the faults of links. Methods take the names of machines."""

    def __init__(self, loop: SimLoop, options: NetworkOptions | None = None) -> None:
        self.loop = loop
        self.options = options or NetworkOptions()
        self.rng = loop.stream("net")
        self.connections_made = 0
        # Pairs (from, to). Used only for membership tests, never iterated.
        self._cut: set[tuple[str, str]] = set()
        self._parted: set[tuple[str, str]] = set()
        """Pairs (from, to) of processes that are cut off from each other."""
        self._slow: dict[tuple[str, str], float] = {}
        self._live: dict[SimTransport, None] = {}
        loop.network = self

    # Faults.

    def cut(self, a: str, b: str, *, one_way: bool = False) -> None:
        """Holds back every packet between two machines, or with `one_way` only packets from `a` to
        `b`.
        """
        self.loop.note("CUT", a, b)
        self._cut.add((a, b))
        if not one_way:
            self._cut.add((b, a))

    def heal(self, a: str, b: str) -> None:
        """Lets packets pass again. Packets that were held back arrive when they are sent again."""
        self.loop.note("HEAL", a, b)
        self._cut -= {(a, b), (b, a)}

    def part(self, a: str, b: str, *, one_way: bool = False) -> None:
        """Holds back packets between two processes, as `cut` does between machines. Both processes
        may be on one machine.
        """
        self.loop.note("PART", a, b)
        self._parted.add((a, b))
        if not one_way:
            self._parted.add((b, a))

    def join(self, a: str, b: str) -> None:
        """Lets packets between two processes pass again."""
        self.loop.note("JOIN", a, b)
        self._parted -= {(a, b), (b, a)}

    def isolate(self, name: str) -> None:
        """Cuts a machine off from all other machines that exist now."""
        for other in self.loop.machines:
            if other != name:
                self.cut(name, other)

    def rejoin(self, name: str) -> None:
        """Heals every link of a machine."""
        for other in self.loop.machines:
            if self.is_cut(name, other):
                self.heal(name, other)

    def is_cut(self, a: str, b: str) -> bool:
        """Returns whether packets between two machines are held back, in either direction."""
        return (a, b) in self._cut or (b, a) in self._cut

    def slow(self, a: str, b: str, factor: float) -> None:
        """Multiplies the latency between two machines by `factor`; 1 restores it."""
        self.loop.note("SLOW", a, b, factor)
        self._slow[_link(a, b)] = factor

    def reset(self, a: str, b: str, among: Collection[str] | None = None) -> None:
        """Breaks connections between two machines, as a firewall that lost its state does.

        `among` limits this to connections between the processes that it names.
        """
        self.loop.note("RESET", a, b)
        for transport in list(self._live):
            peer = transport.peer
            if (transport.machine.name, peer.machine.name) == (a, b) and _is_among(
                transport, among
            ):
                transport.break_off(os_error(errno.ECONNRESET))
                peer.break_off(os_error(errno.ECONNRESET))

    def give_up(self, a: str, b: str, among: Collection[str] | None = None) -> None:
        """Ends one side of each connection between two machines with ETIMEDOUT, as a kernel does
        if no answer comes for too long. The other side notices nothing until it sends: its
        connection stays half open. The seed chooses the side. `among` is the same as in `reset`.
        """
        self.loop.note("GIVE UP", a, b)
        for transport in list(self._live):
            peer = transport.peer
            if (
                (transport.machine.name, peer.machine.name) == (a, b)
                and not peer.is_over
                and _is_among(transport, among)
            ):
                side = transport if self.rng.random() < 0.5 else peer
                side.break_off(os_error(errno.ETIMEDOUT))

    # Links.

    def latency(self, a: SimMachine, b: SimMachine) -> float:
        """Draws the time that a packet takes from `a` to `b`."""
        usual = self.options.loopback_s if a is b else self.options.latency_s
        return self.rng.uniform(*usual) * self._slow.get(_link(a.name, b.name), 1.0)

    def passes(self, a: SimProcess, b: SimProcess) -> bool:
        """Returns whether a packet sent now would arrive."""
        return self._is_open(a.machine, b.machine) and (a.name, b.name) not in self._parted

    def _is_open(self, a: SimMachine, b: SimMachine) -> bool:
        return b.up and (a.name, b.name) not in self._cut

    def _answers(self, process: SimProcess, there: SimMachine, port: int) -> bool:
        """Returns whether a request for a connection would get an answer, even if that is only a
        refusal.
        """
        listener = there.ports.get(port)
        if listener is None:
            return self._is_open(process.machine, there) and self._is_open(there, process.machine)
        return self.passes(process, listener.process) and self.passes(listener.process, process)

    # Connections.

    def listen(
        self, process: SimProcess, factory: Callable[[], asyncio.BaseProtocol], port: int
    ) -> SimListener:
        """Binds a port of the process's machine. 0 means the next free port."""
        machine = process.machine
        if port == 0:
            while machine.next_port in machine.ports:
                machine.next_port += 1
            port = machine.next_port
            machine.next_port += 1
        if port in machine.ports:
            raise OSError(
                errno.EADDRINUSE,
                f"port {port} of {machine.name} is taken by {machine.ports[port].process}",
            )
        listener = SimListener(self.loop, process, factory, port)
        machine.ports[port] = listener
        self.loop.note("LISTEN", process.name, port)
        return listener

    async def connect(
        self, process: SimProcess, factory: Callable[[], Any], host: str, port: int
    ) -> tuple[SimTransport, Any]:
        """Connects `process` to a port of machine `host`, which takes a round trip. Raises
        ConnectionRefusedError. Raises TimeoutError if for too long the link is cut or the machine
        has no power.
        """
        loop, here = self.loop, process.machine
        there = here if host in LOOPBACK_NAMES else loop.machines.get(host)
        if there is None and host in loop.processes:
            there = loop.processes[host].machine
        if there is None:
            raise socket.gaierror(
                socket.EAI_NONAME, f"no machine of the simulation is called {host}"
            )
        deadline, pause = loop.time() + self.options.connect_timeout_s, RETRY_FIRST_S
        await asyncio.sleep(self.latency(here, there))
        while not self._answers(process, there, port):
            if loop.time() + pause > deadline:
                await asyncio.sleep(deadline - loop.time())
                raise os_error(errno.ETIMEDOUT, f"{host}:{port}")
            await asyncio.sleep(pause)
            pause = min(2 * pause, RETRY_MAX_S)
        listener: SimListener | None = there.ports.get(port)
        if listener is None or not listener.process.alive:
            await asyncio.sleep(self.latency(there, here))
            raise os_error(errno.ECONNREFUSED, f"{host}:{port}")
        self.connections_made += 1
        number = self.connections_made
        client_port = here.next_port
        here.next_port += 1
        client = SimTransport(
            self, process, f"{number}c", (here.name, client_port), (there.name, port)
        )
        server = SimTransport(
            self, listener.process, f"{number}s", (there.name, port), (here.name, client_port)
        )
        client.peer, server.peer = server, client
        loop.note("CONNECT", number, process.name, listener.process.name, port)
        # The kernel completes the handshake; the server's process sees the connection in its next
        # iteration.
        loop.post_io(listener.process, server.accept, listener)
        try:
            await asyncio.sleep(self.latency(there, here))
        except BaseException:
            client.abort()  # The client has given up; the server already has a connection.
            raise
        protocol = factory()
        client.begin(protocol)
        return client, protocol

    def opened(self, transport: SimTransport) -> None:
        """Registers a transport that a fault can break."""
        self._live[transport] = None

    def closed(self, transport: SimTransport) -> None:
        """Removes a transport that has ended."""
        self._live.pop(transport, None)


def _is_among(transport: SimTransport, processes: Collection[str] | None) -> bool:
    """Whether both ends of a connection belong to `processes`. None means all processes."""
    return processes is None or {transport.process.name, transport.peer.process.name}.issubset(
        processes
    )


def _link(a: str, b: str) -> tuple[str, str]:
    return (a, b) if a < b else (b, a)
