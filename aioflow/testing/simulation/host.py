"""The simulated counterpart of `SystemHost`, and the controls that start, kill and cut off
simulated processes.

Every simulated process gets a `SimulatedHost` of its own. All processes of a run share a
`Simulation`.

Invariant: the random numbers and ids of a process depend on the seed, the process's name and the
number of its starts. Other processes never affect them.
"""

from __future__ import annotations

import asyncio
import ssl as ssl_module
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar, TypeVarTuple

from aioflow.core.host import Frame, Listener, Process, ProcessIdentity, ProtocolFactory
from aioflow.testing.simulation.disk import SimDisk, SimFileSystem
from aioflow.testing.simulation.loop import SimLoop
from aioflow.testing.simulation.network import SimNetwork
from aioflow.testing.simulation.process import SimMachine, SimProcess
from aioflow.testing.simulation.transport import NetworkOptions

__all__ = ["ProcessMain", "SimulatedHost", "SimulatedProcess", "Simulation"]

T = TypeVar("T")
ProtocolT = TypeVar("ProtocolT", bound=asyncio.BaseProtocol)
Args = TypeVarTuple("Args")

PERF_COST_S = 1e-6
"""Virtual time that a reading of `perf_ns` takes, in seconds. So code that measures the time of its
slice sees time pass.
"""

PERF_JUMP_RATE = 1 / 32
"""Share of the readings of `perf_ns` that jump ahead, as if the measured work had taken long."""

PERF_JUMP_S_MAX = 3e-3

BUGGIFY_ENABLED = 0.25
"""Share of the points of `buggify` that a seed turns on. If all were on, they would hide each
other's effects.
"""

SIGTERM, SIGKILL = 15, 9

ProcessMain = Callable[["SimulatedHost"], Coroutine[Any, Any, object]]
"""The type of the main function of a simulated process. The process ends when the function returns.
"""

Program = Callable[["SimulatedHost", list[str]], Coroutine[Any, Any, int | None]]
"""The type of programs that `procs.exec` can start. A program takes the command line, and returns
the exit code.
"""


class Simulation:
    """The simulated world of one seed: the loop, its processes, the network and the disk.

    Methods take the name of a process, and network faults take the name of a machine. A machine has
    the name of its first process, unless `spawn` was given another name.
    """

    def __init__(self, loop: SimLoop, network: NetworkOptions | None = None) -> None:
        self.loop = loop
        self.network = SimNetwork(loop, network)
        self.disk = SimDisk(loop)
        self.fault_rng = loop.stream("fault")
        self.programs: dict[str, Program] = {}
        self._started: dict[str, SimulatedProcess] = {}
        self._pids = 1
        self.root = SimulatedHost(self, loop.root)

    def spawn(
        self, name: str, main: ProcessMain, *, machine: str | None = None
    ) -> SimulatedProcess:
        """Starts the process `name`, which must not be running, with the main function `main`. The
        process runs once the caller awaits.
        """
        return self._start(name, main, machine, {}, None)

    def restart(self, name: str) -> SimulatedProcess:
        """Starts a process again after it has ended, with the same main function."""
        last = self._started[name]
        return self._start(name, last.main, None, last.env, last.secret)

    def life(self, name: str) -> SimulatedProcess:
        """Returns the last life of a process, whether this life has ended or not."""
        return self._started[name]

    def _start(
        self,
        name: str,
        main: ProcessMain,
        machine: str | None,
        env: Mapping[str, str],
        secret: bytes | None,
    ) -> SimulatedProcess:
        self._pids += 1
        started = SimulatedProcess(
            self, self.loop.process(name, machine), main, self._pids, env, secret
        )
        self._started[name] = started
        self.loop.start(started.process, started.begin)
        return started

    def exec(
        self, parent: SimProcess, argv: Sequence[str], env: Mapping[str, str], secret: bytes | None
    ) -> Process:
        """Starts a program on the machine of `parent`. The first word of `argv` that is in
        `programs` names the program.
        """
        program = next((self.programs[word] for word in argv if word in self.programs), None)
        if program is None:
            raise FileNotFoundError(
                f"no program of the simulation is named in {list(argv)}, expected one of "
                f"{sorted(self.programs)}: "
                "register it in Simulation.programs"
            )
        chosen = program

        def main(host: SimulatedHost) -> Coroutine[Any, Any, object]:
            return chosen(host, list(argv))

        started = self._start(f"{parent.name}.{self._pids}", main, parent.machine.name, env, secret)
        started.parent = parent.name
        return started

    def is_alive(self, name: str) -> bool:
        """Returns whether a process runs or is paused."""
        process = self.loop.processes.get(name)
        return process is not None and process.alive

    def kill(self, name: str) -> None:
        """Ends a process as SIGKILL does: none of its code runs, and its connections close."""
        process = self.loop.process(name)
        if process.alive:
            self.loop.kill(process)
            self._started[name].ended(-SIGKILL, None)

    def power(self, name: str) -> None:
        """Cuts the power of a process's machine. The machine sends nothing more, and unsynced bytes
        and names may be lost or torn.
        """
        machine = self.loop.process(name).machine
        for process in list(self.loop.processes.values()):
            if process.machine is machine and process.alive:
                self.loop.kill(process, power=True)
                self._started[process.name].ended(-SIGKILL, None)
        machine.up = False
        self.disk.power_loss(machine)

    def pause(self, name: str) -> None:
        """Stops a process as SIGSTOP does: its connections stay open."""
        self.loop.pause(self.loop.process(name))

    def resume(self, name: str) -> None:
        """Continues a paused process, as SIGCONT does."""
        self.loop.resume(self.loop.process(name))


class SimulatedProcess:
    """One life of a simulated process. Implements `Process`."""

    def __init__(
        self,
        sim: Simulation,
        process: SimProcess,
        main: ProcessMain,
        pid: int,
        env: Mapping[str, str],
        secret: bytes | None,
    ) -> None:
        self.process = process
        self.main = main
        self.pid = pid
        self.env = env
        self.secret = secret
        self.parent: str | None = None
        """Name of the process that started this process with `procs.exec`, or None. If it is set,
        only this parent starts the process again after a loss of power.
        """
        self.returncode: int | None = None
        self.error: BaseException | None = None
        self._sim = sim
        self._task: asyncio.Task[object] | None = None
        self._terminated = False
        self._waiters: list[tuple[SimProcess, asyncio.Future[int]]] = []

    @property
    def name(self) -> str:
        """Name of the process, the same in all its lives."""
        return self.process.name

    def begin(self) -> None:
        """Starts the main function. It is called inside the process."""
        host = SimulatedHost(self._sim, self.process, env=self.env, secret=self.secret)
        self._task = self._sim.loop.create_task(self.main(host), name=self.name)
        self._task.add_done_callback(self._main_done)
        if self._terminated:
            self._task.cancel()

    def _main_done(self, task: asyncio.Task[object]) -> None:
        error = None if task.cancelled() else task.exception()
        if task.cancelled():
            code = -SIGTERM if self._terminated else 1
        elif error is not None:
            code = 1
            self._sim.loop.errors.append(f"{self.name}: ended with {error!r}")
        else:
            result = task.result()
            code = result if isinstance(result, int) else 0
        # The kernel cleans up after an exit as it does after a kill.
        self._sim.loop.kill(self.process)
        self.ended(code, error)

    def ended(self, code: int, error: BaseException | None) -> None:
        """Notes the exit code of this process, and wakes the callers that wait for its end."""
        if self.returncode is not None:
            return
        self.returncode = code
        self.error = error
        for process, future in self._waiters:
            self._sim.loop.post_io(process, _settle, future, code)
        self._waiters.clear()

    async def wait(self) -> int:
        """Waits until this life has ended, and returns its exit code. The code is the result of
        `main` if this is an int, else 0. It is 1 for an error, and minus the number of a signal.
        """
        if self.returncode is None:
            future: asyncio.Future[int] = self._sim.loop.create_future()
            self._waiters.append((self._sim.loop.current, future))
            return await future
        return self.returncode

    def terminate(self) -> None:
        """Cancels the main function of the process, as a handler of SIGTERM would."""
        if self.returncode is None and not self._terminated:
            self._terminated = True
            if self._task is not None:
                self._sim.loop.post_io(self.process, self._task.cancel)

    def kill(self) -> None:
        """Ends the process at once, without running its `finally` blocks."""
        if self.returncode is None:
            self._sim.kill(self.name)


def _settle(future: asyncio.Future[int], code: int) -> None:
    if not future.done():
        future.set_result(code)


class SimulatedHost:
    """The `Host` of one simulated process."""

    def __init__(
        self,
        sim: Simulation,
        process: SimProcess,
        *,
        env: Mapping[str, str] | None = None,
        secret: bytes | None = None,
    ) -> None:
        loop = sim.loop
        life = f"{process.name}/{process.generation}"
        self.sim = sim
        self.name = process.name
        self.env = dict(env or {})
        self.clock = _SimClock(loop, process.machine)
        self.rng = loop.stream(f"user/{life}")
        self.ids = _SimIds(loop, life)
        self.fs = SimFileSystem(sim.disk, process)
        self.net = _SimNet(sim.network, process)
        self.procs = _SimProcesses(sim, process, secret)
        self._loop = loop
        self._buggify_rng = loop.stream(f"buggify/{life}")
        self._buggify_on: dict[str, bool] = {}
        self._closed = False

    def blocking(
        self,
        fn: Callable[[*Args], T],
        *args: *Args,
        dedicated: bool = False,
        name: str | None = None,
    ) -> asyncio.Future[T]:
        """Runs `fn(*args)` in the loop's thread, after a delay that the seed chooses.

        So `fn` must not wait for the loop.
        """
        if self._closed:
            raise RuntimeError(
                f"host is closed, cannot run {name or getattr(fn, '__name__', fn)}: call before "
                "close()"
            )
        return self._loop.run_in_executor(None, fn, *args)

    def buggify(self, point: str, probability: float) -> bool:
        """Returns whether the code at `point` must take its rare branch. If the seed turns the
        point on, this is True with `probability`. Otherwise it is False.
        """
        if not self._loop.perturb:
            return False
        on = self._buggify_on.get(point)
        if on is None:
            on = self._buggify_on[point] = (
                self._loop.stream(f"buggify/{point}").random() < BUGGIFY_ENABLED
            )
        return on and self._buggify_rng.random() < probability

    async def close(self) -> None:
        """Closes the host. Later calls of `blocking` raise an error."""
        self._closed = True


class _SimClock:
    __slots__ = ("_loop", "_rng", "monotonic", "wall_ms")

    def __init__(self, loop: SimLoop, machine: SimMachine) -> None:
        self._loop = loop
        self._rng = loop.perf_rng
        self.monotonic: Callable[[], float] = loop.time
        self.wall_ms: Callable[[], int] = lambda: loop.wall_ms() + machine.clock_ms

    def perf_ns(self) -> int:
        cost = PERF_COST_S
        if self._loop.perturb and self._rng.random() < PERF_JUMP_RATE:
            cost += self._rng.uniform(0, PERF_JUMP_S_MAX)
        return int(self._loop.spend(cost) * 1e9)


class _SimIds:
    __slots__ = ("_rng",)

    def __init__(self, loop: SimLoop, life: str) -> None:
        self._rng = loop.stream(f"ids/{life}")

    def new(self, kind: str) -> str:
        return f"{self._rng.getrandbits(128):032x}"


class _SimNet:
    """The network as one process sees it.

    Simulated traffic cannot be intercepted, so a TLS context is accepted and not used.
    """

    __slots__ = ("_network", "_process")

    def __init__(self, network: SimNetwork, process: SimProcess) -> None:
        self._network = network
        self._process = process

    async def connect(
        self,
        protocol_factory: ProtocolFactory[ProtocolT],
        host: str,
        port: int,
        *,
        ssl: ssl_module.SSLContext | None = None,
        server_hostname: str | None = None,
    ) -> tuple[asyncio.Transport, ProtocolT]:
        return await self._network.connect(self._process, protocol_factory, host, port)

    async def listen(
        self,
        protocol_factory: Callable[[], asyncio.BaseProtocol],
        host: str,
        port: int,
        *,
        ssl: ssl_module.SSLContext | None = None,
    ) -> Listener:
        return self._network.listen(self._process, protocol_factory, port)


class _SimProcesses:
    __slots__ = ("_process", "_secret", "_sim")

    def __init__(self, sim: Simulation, process: SimProcess, secret: bytes | None) -> None:
        self._sim = sim
        self._process = process
        self._secret = secret

    def identity(self) -> ProcessIdentity:
        process = self._process
        return ProcessIdentity(
            process.machine.name,
            process.index,
            process.machine.name,
            f"{process.name}/{process.generation}",
        )

    def usage(self) -> tuple[float, int]:
        return 0.0, 0

    def thread_times(self) -> None:
        return None

    def thread_frames(self, thread: int) -> list[Frame]:
        return []

    def has_ended(self, process: ProcessIdentity) -> bool:
        if process.machine != self._process.machine.name:
            return False
        name, _, generation = process.started.rpartition("/")
        found = self._sim.loop.processes.get(name)
        return found is None or not found.alive or found.generation != int(generation)

    async def exec(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        secret: bytes | None = None,
    ) -> Process:
        return self._sim.exec(self._process, argv, env or {}, secret)

    def take_secret(self) -> bytes | None:
        secret, self._secret = self._secret, None
        return secret
