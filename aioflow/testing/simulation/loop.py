"""A seeded event loop in virtual time, on which whole clusters of processes run inside one Python
process.

It is asyncio's own `BaseEventLoop` with the scheduler, the timers, the network and the executor
replaced; tasks, futures, streams, timeouts and locks are the real ones. The seed chooses only what
a real machine leaves to chance: which process runs next and for how long, how long a call or a
packet takes, and when a process is stalled.

Invariant: inside one process callbacks run in asyncio's order. A process works in iterations: first
the callbacks that `call_soon` queued, then events of the network, then the timers that are due, by
deadline and time of creation. Callbacks queued in an iteration run in the next one. So no failure
comes from an order that asyncio cannot produce.
"""

from __future__ import annotations

import asyncio
import heapq
import random  # noqa: TID251  # Every stream is seeded: this is where simulated chance comes from.
import struct
import zlib
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextvars import Context
from typing import Any, Protocol, TypeVar, TypeVarTuple
from weakref import WeakKeyDictionary

from aioflow.testing.simulation.process import (
    OWNER,
    Life,
    SimDeadlock,
    SimFenceBroken,
    SimHandle,
    SimLivelock,
    SimMachine,
    SimProcess,
)
from aioflow.testing.virtual_loop import close_chain, end_generator, settle

__all__ = ["SimLoop"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

START_S = 1000.0
"""First reading of the virtual clock. It is not zero, so that code which takes 0 for "never" fails.
"""

WALL_START_MS = 1_767_225_600_000
"""Wall clock when the virtual clock read 0: 2026-01-01 00:00 UTC."""

CALLBACK_COST_S = 2e-6
"""Virtual time that each callback takes, so that a busy loop reaches its timers."""

STALL_RATE = 1 / 64
"""Share of the iterations before which the machine takes the processor away from a process."""

STALL_S_MAX = 2e-3

BLOCKING_S = (1e-5, 5e-3)
"""Range of the duration of a blocking call, in seconds."""

SLICE_MAX = 8
"""Maximum number of callbacks that a process runs before another process gets its turn."""

_TURN = struct.Struct("<IId")


class Switchboard(Protocol):
    """The interface to which the loop passes connections and servers."""

    async def connect(
        self, process: SimProcess, factory: Callable[[], Any], host: str, port: int
    ) -> tuple[asyncio.Transport, Any]:
        """Connects `process` to a port of a machine."""
        ...

    def listen(
        self, process: SimProcess, factory: Callable[[], asyncio.BaseProtocol], port: int
    ) -> asyncio.AbstractServer:
        """Binds a port of the machine of `process`."""
        ...


class SimLoop(asyncio.BaseEventLoop):
    """The event loop that all simulated processes share. One seed gives one history.

    `perturb=False` switches off stalls, random time slices and random delays of blocking calls.
    Then all seeds give the same history, for tests of time alone. There are independent random
    streams (`streams.sched` and so on). So an additional draw in one place does not change the
    draws in other places.
    """

    network: Switchboard

    def __init__(
        self,
        seed: int | str,
        *,
        max_steps: int = 1_000_000,
        max_virtual_s: float = float("inf"),
        perturb: bool = True,
        keep_trace: bool = False,
    ) -> None:
        super().__init__()
        self.seed = seed
        self.max_steps = max_steps
        self.max_virtual_s = max_virtual_s
        self.perturb = perturb
        self.steps = 0
        self.crc = 0
        self.trace: list[str] | None = [] if keep_trace else None
        self.errors: list[str] = []
        self.fatal: BaseException | None = None
        self.finished = False
        self.machines: dict[str, SimMachine] = {}
        self.processes: dict[str, SimProcess] = {}
        self.sched_rng = self.stream("sched")
        self.perf_rng = self.stream("perf")
        self._now = START_S
        self._timers: list[tuple[float, int, SimHandle]] = []
        self._timers_made = 0
        self._runnable: list[SimProcess] = []
        self._graveyard: list[asyncio.Task[Any]] = []
        self._own_generators: WeakKeyDictionary[AsyncGenerator[Any, Any], None] = (
            WeakKeyDictionary()
        )
        self._stop_asked = False
        # The kernel is a process only so that its timers are like all others. Its timers run as
        # soon as they are due.
        self.kernel = SimProcess("kernel", 0, SimMachine("kernel"))
        self.root = self.process("main")
        self.root.begin_life()
        self.current = self.root
        self.set_debug(False)
        self.set_exception_handler(self._record_error)

    # Time.

    def time(self) -> float:
        """Returns the virtual time in seconds. It advances by 2 us with each callback, and jumps to
        the next timer when no callback is ready.
        """
        return self._now

    def wall_ms(self) -> int:
        """Returns the virtual wall clock, in milliseconds since 1970."""
        return WALL_START_MS + int(self._now * 1000)

    def spend(self, seconds: float) -> float:
        """Lets virtual time pass inside the running callback, and returns the new time."""
        self._now += seconds
        return self._now

    def stream(self, name: str) -> random.Random:
        """Returns a new random stream that depends on the seed and on `name` alone."""
        return random.Random(f"{self.seed}/{name}")

    # Scheduling.

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> SimHandle:
        # A future passes the context of the task that waits for it, which identifies the callback's
        # process.
        process, generation = (None if context is None else context.get(OWNER)) or (
            self.current,
            None,
        )
        handle = SimHandle(self._now, callback, args, self, context or self._context(process))
        handle.process = process
        handle.generation = process.generation if generation is None else generation
        if process.alive and handle.generation == process.generation and not self.finished:
            process.ready.append(handle)
            if not process.runnable:
                self._make_runnable(process)
        return handle

    def _context(self, process: SimProcess) -> Context | None:
        """Returns the context for a callback of `process`. Returns None if the running context
        belongs to `process`; the callback then gets a copy of it.
        """
        owner = OWNER.get()
        return None if owner is not None and owner[0] is process else process.context.copy()

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> SimHandle:
        return self.call_soon(callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> SimHandle:
        return self._set_timer(self.current, when, callback, args, context)

    def call_later(
        self,
        delay: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> SimHandle:
        return self._set_timer(self.current, self._now + delay, callback, args, context)

    def kernel_at(self, when: float, callback: Callable[[*Ts], object], *args: *Ts) -> SimHandle:
        """Runs `callback` at the time `when`, even if the current process ends before. So packets
        in flight still arrive.
        """
        return self._set_timer(self.kernel, when, callback, args, None)

    def post_io(self, process: SimProcess, callback: Callable[[*Ts], object], *args: *Ts) -> None:
        """Queues an event of the selector for `process`. Does nothing if the process is dead."""
        if process.alive and not self.finished:
            process.io.append(self._handle(process, self._now, callback, args, None))
            if not process.runnable:
                self._make_runnable(process)

    def _handle(
        self,
        process: SimProcess,
        when: float,
        callback: Callable[[*Ts], object],
        args: tuple[*Ts],
        context: Context | None,
    ) -> SimHandle:
        handle = SimHandle(when, callback, args, self, context or self._context(process))
        handle.process = process
        handle.generation = process.generation
        return handle

    def _set_timer(
        self,
        process: SimProcess,
        when: float,
        callback: Callable[[*Ts], object],
        args: tuple[*Ts],
        context: Context | None,
    ) -> SimHandle:
        handle = self._handle(process, when, callback, args, context)
        if not self.finished:
            self._timers_made += 1
            heapq.heappush(self._timers, (when, self._timers_made, handle))
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Does nothing: cancelled timers are dropped when they are due."""

    def _make_runnable(self, process: SimProcess) -> None:
        if process.life is Life.RUNNING:
            process.runnable = True
            self._runnable.append(process)

    def stop(self) -> None:
        self._stop_asked = True
        super().stop()

    def run_forever(self) -> None:
        self._stop_asked = False
        super().run_forever()

    def _run_once(self) -> None:
        timers, runnable = self._timers, self._runnable
        if not runnable:
            while timers and self._is_stale(timers[0][2]):
                heapq.heappop(timers)
            if not timers:
                raise SimDeadlock(self._describe_deadlock())
            self._now = max(self._now, timers[0][0])
        while timers and timers[0][0] <= self._now:
            handle = heapq.heappop(timers)[2]
            if self._is_stale(handle):
                continue
            process = handle.process
            if process is self.kernel:
                self._step(process, handle)
            else:
                process.due.append(handle)
                if not process.runnable:
                    self._make_runnable(process)
        if runnable:
            self._run_slice()
        if self.fatal is not None:
            raise self.fatal

    def _is_stale(self, handle: SimHandle) -> bool:
        return handle._cancelled or handle.generation != handle.process.generation

    def _run_slice(self) -> None:
        """Runs 1 to 8 callbacks of one process. The seed chooses the process and the number."""
        runnable, rng = self._runnable, self.sched_rng
        process = runnable[int(rng.random() * len(runnable)) if len(runnable) > 1 else 0]
        length = 1 + int(rng.random() * SLICE_MAX) if self.perturb else SLICE_MAX
        self.crc = zlib.crc32(_TURN.pack(process.index, self.steps, self._now), self.crc)
        ready, generation = process.ready, process.generation
        for _ in range(length):
            if process.todo == 0:
                ready.extend(process.io)
                ready.extend(process.due)
                process.io.clear()
                process.due.clear()
                process.todo = len(ready)
                if process.todo == 0:
                    break
                if self.perturb and rng.random() < STALL_RATE:
                    self._now += rng.uniform(0, STALL_S_MAX)
            handle = ready.popleft()
            process.todo -= 1
            if not handle._cancelled:
                self._now += CALLBACK_COST_S
                self._step(process, handle)
                if (
                    process.generation != generation
                    or process.life is not Life.RUNNING
                    or self._stop_asked
                ):
                    break
        if process.runnable and not (ready or process.io or process.due):
            process.runnable = False
            runnable.remove(process)

    def _step(self, process: SimProcess, handle: SimHandle) -> None:
        self.steps += 1
        if self.steps > self.max_steps or self._now - START_S > self.max_virtual_s:
            raise SimLivelock(
                f"not over after {self.steps} steps and {self._now - START_S:.3f} virtual s "
                f"(limits {self.max_steps} and {self.max_virtual_s:g}); running: {process.name} "
                f"{handle!r}"
            )
        self.current = process
        try:
            handle._run()
        finally:
            self.current = self.root

    def _describe_deadlock(self) -> str:
        waiting = [task.get_name() for process in self.processes.values() for task in process.tasks]
        shown = ", ".join(waiting[:12]) + (
            f" and {len(waiting) - 12} more" if len(waiting) > 12 else ""
        )
        return (
            f"nothing left to run at virtual {self._now - START_S:.6f} s; tasks that wait: "
            f"{shown or 'none'}"
        )

    # What happened.

    def note(self, *what: object) -> None:
        """Adds a line to the trace. Its text must not depend on addresses or hash order."""
        line = f"{self._now:.6f} {' '.join(map(str, what))}"
        self.crc = zlib.crc32(line.encode(), self.crc)
        if self.trace is not None:
            self.trace.append(line)

    def fail(self, error: BaseException) -> None:
        """Ends the run with `error` as soon as the running callback returns. Later errors are
        ignored.
        """
        if self.fatal is None and not self.finished:
            self.fatal = error

    def _record_error(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if self.finished:
            return
        error = context.get("exception")
        self.errors.append(f"{self.current.name}: {context.get('message')}: {error!r}")
        if isinstance(error, (AssertionError, SimFenceBroken)):
            self.fail(error)

    # Tasks and blocking calls.

    # asyncio itself no longer supports generators as coroutines.
    def create_task(  # type: ignore[override]
        self,
        coro: Coroutine[Any, Any, T],
        *,
        name: object = None,
        context: Context | None = None,
        **options: Any,  # Any: what later versions of asyncio add to a task.
    ) -> asyncio.Task[T]:
        process = self.current
        process.tasks_made += 1
        if name is None:
            # asyncio numbers tasks over the whole interpreter, which would differ from run to run.
            name = f"{process.name}-task-{process.tasks_made}"
        context = context or self._context(process)
        task: asyncio.Task[T] = asyncio.Task(
            coro, loop=self, name=str(name), context=context, **options
        )
        # `finish` closes tasks that are still pending.
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        if self.finished:
            close_chain(
                coro
                # Cleanup code has started a new coroutine. It will never run, and must not be
                # reported as never awaited.
            )
        elif not task.done():
            process.tasks[task] = None
            task.add_done_callback(self._look_for_bug)
            # Added last: if a process were killed between the two callbacks, an error would be
            # neither seen nor recorded.
            task.add_done_callback(process.tasks.pop)
        return task

    def _look_for_bug(self, task: asyncio.Task[Any]) -> None:
        """Fails the run with an AssertionError of `task`, even if another task awaits and handles
        the error.
        """
        if not task.cancelled() and isinstance(task.exception(), AssertionError):
            # Reading the exception marked it as retrieved. The run fails with it, so it is not
            # lost.
            self.fail(task.exception() or AssertionError())

    # The executor is never used: there are no threads here.
    def run_in_executor(  # type: ignore[override]
        self, executor: object, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """Calls `func` in the loop's thread, after a delay that the seed chooses."""
        future: asyncio.Future[T] = self.create_future()
        low, high = BLOCKING_S
        self.call_later(
            self.sched_rng.uniform(low, high) if self.perturb else low, settle, future, func, args
        )
        return future

    # Network: the real streams and protocols land here.

    async def create_connection(  # The options that have no meaning here are one dict.
        self,
        protocol_factory: Callable[[], Any],
        host: str | None = None,
        port: int | None = None,
        **options: Any,
    ) -> tuple[asyncio.Transport, Any]:
        return await self.network.connect(
            self.current, protocol_factory, host or "localhost", port or 0
        )

    # Likewise; and there is no asyncio.Server without sockets.
    async def create_server(  # type: ignore[override]
        self,
        protocol_factory: Callable[[], Any],
        host: Any = None,
        port: int | None = None,
        **options: Any,
    ) -> asyncio.AbstractServer:
        return self.network.listen(self.current, protocol_factory, port or 0)

    # Processes.

    def process(self, name: str, machine: str | None = None) -> SimProcess:
        """Returns the process of this name. The first call makes the process, without starting it.
        By default the process gets a machine of its own.
        """
        process = self.processes.get(name)
        if process is None:
            host = machine or name
            if host not in self.machines:
                self.machines[host] = SimMachine(host)
            process = SimProcess(name, len(self.processes) + 1, self.machines[host])
            self.processes[name] = process
        return process

    def start(self, process: SimProcess, callback: Callable[[*Ts], object], *args: *Ts) -> None:
        """Begins a life of `process` with one callback. Turns on the power of its machine."""
        assert not process.alive, f"{process} is started, expected it to be new or dead"
        process.begin_life()
        process.machine.up = True
        self.note("START", process.name)
        self.post_io(process, callback, *args)

    def kill(self, process: SimProcess, *, power: bool = False) -> None:
        """Ends a process as SIGKILL does: no `finally` runs, and the kernel closes its sockets.

        With `power`, the process's machine loses power instead, so its peers are not notified. The
        caller must kill the other processes of the machine too.
        """
        assert process is not self.root, (
            "the main process drives the simulation, expected another one to be killed"
        )
        if not process.alive:
            return
        self.note("POWER" if power else "KILL", process.name)
        process.life = Life.DEAD
        process.generation += 1
        process.ready.clear()
        process.io.clear()
        process.due.clear()
        process.todo = 0
        self._drop_runnable(process)
        if power:
            process.machine.up = False
        for task in process.tasks:
            if task.done() and not task.cancelled():
                task.exception()  # The code that would have retrieved the error is dead, too.
        # Kept until the end of the run: letting go of a suspended coroutine would run its
        # `finally`.
        self._graveyard.extend(process.tasks)
        process.tasks = {}
        orphans, process.orphans = list(process.orphans), {}
        for orphan in orphans:
            orphan.process_died(power)

    def pause(self, process: SimProcess) -> None:
        """Stops a process as SIGSTOP does. Its kernel still receives and acknowledges packets."""
        assert process is not self.root, (
            "the main process drives the simulation, expected another one to be paused"
        )
        if process.life is Life.RUNNING:
            self.note("PAUSE", process.name)
            process.life = Life.PAUSED
            self._drop_runnable(process)

    def resume(self, process: SimProcess) -> None:
        """Lets a paused process continue. Has no effect if the process is not paused."""
        if process.life is Life.PAUSED:
            self.note("RESUME", process.name)
            process.life = Life.RUNNING
            if process.ready or process.io or process.due:
                self._make_runnable(process)

    def _drop_runnable(self, process: SimProcess) -> None:
        if process.runnable:
            process.runnable = False
            self._runnable.remove(process)

    # The end.

    def _asyncgen_firstiter_hook(self, agen: AsyncGenerator[Any, Any]) -> None:
        # asyncio's own, which typeshed leaves out.
        super()._asyncgen_firstiter_hook(agen)  # type: ignore[misc]
        if self.current is self.root:
            self._own_generators[agen] = None

    async def close_own_generators(self) -> None:
        """Closes the async generators that the main process has left open.

        Generators of killed processes are not closed, because killed code must not run.
        """
        for agen in list(self._own_generators):
            await agen.aclose()

    def _asyncgen_finalizer_hook(self, agen: AsyncGenerator[Any, Any]) -> None:
        if not self.finished:
            self.call_soon(self.create_task, agen.aclose())
            return
        end_generator(agen)

    def finish(self) -> None:
        """Ends every process without running its pending callbacks, then closes the loop.

        Unfinished coroutines are closed, so their `finally` blocks run. The loop accepts no further
        work from these coroutines, so they cannot affect the run of the next seed.
        """
        if self.finished:
            return
        self.finished = True
        for process in self.processes.values():
            process.ready.clear()
            process.io.clear()
            process.due.clear()
            self._graveyard.extend(process.tasks)
            process.tasks = {}
            for orphan in list(process.orphans):
                # Streams that are garbage collected later check whether they were closed.
                orphan.process_died(True)
            process.orphans = {}
        self._timers.clear()
        self._runnable.clear()
        # Cleanup asks for the running loop before it finds that nothing runs.
        asyncio._set_running_loop(self)
        try:
            # Closing a coroutine that awaits an async generator does not close the generator, so
            # generators are closed first. asyncio keeps the set of them.
            for agen in list(self._asyncgens):  # type: ignore[attr-defined]
                close_chain(agen.ag_await)
            for task in self._graveyard:
                close_chain(task.get_coro())
        finally:
            asyncio._set_running_loop(None)
        self._graveyard.clear()
        self.close()
