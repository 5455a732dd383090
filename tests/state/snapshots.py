"""Snapshots for tests without a loop, and a machine without threads for the backends that need
one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, TypeVar

from aioflow.core.keygroups import KeyGroupRange, range_for_subtask
from aioflow.core.states import ValueStateDescriptor
from aioflow.core.system_host import SystemHost
from aioflow.state.backend import KeyedStateBackend, create_keyed_backend
from aioflow.state.heap import HeapKeyedStateBackend
from aioflow.state.rocksdb_cache import TimerSpace
from aioflow.state.snapshot import InlineState, KeyedStateHandle
from aioflow.state.timers import InternalTimerService

T = TypeVar("T")

TURNS = 2
"""Number of turns of the loop after which a blocking call has been made."""

_made: list[KeyedStateBackend] = []


class TurnsHost(SystemHost):
    """Makes blocking calls on the loop, some turns later: as a thread would, but the same each
    time.
    """

    def blocking(
        self, fn: Callable[..., T], *args: Any, dedicated: bool = False, name: str | None = None
    ) -> asyncio.Future[T]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def call(turns: int) -> None:
            if turns:
                loop.call_soon(call, turns - 1)
                return
            try:
                result = fn(*args)
            except Exception as error:
                if not future.done():
                    future.set_exception(error)
            else:
                if not future.done():
                    future.set_result(result)

        loop.call_soon(call, TURNS)
        return future


def made(name: Any, **arguments: Any) -> KeyedStateBackend:
    """A backend, closed with `closing_backends`."""
    backend = create_keyed_backend(name, host=TurnsHost(), **arguments)
    _made.append(backend)
    return backend


@contextmanager
def closing_backends() -> Iterator[None]:
    """Closes what was `made` inside."""
    before = len(_made)
    try:
        yield
    finally:
        while len(_made) > before:
            _made.pop().close()


def run_now(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs it on a loop of its own; called on a loop, it must await nothing but its turn, as the
    heap does.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    while True:
        try:
            coroutine.send(None)
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]


def taken(backend: KeyedStateBackend) -> KeyedStateHandle:
    """All state and timers of `backend`, inline."""

    async def take() -> KeyedStateHandle | None:
        return await backend.begin_snapshot(1, full=True).write(InlineState())

    handle = run_now(take())
    backend.checkpoint_aborted(1)
    return handle or KeyedStateHandle(
        "heap", backend.max_parallelism, 0, backend.max_parallelism - 1, ()
    )


def restore(backend: KeyedStateBackend, handles: Sequence[KeyedStateHandle]) -> None:
    """Restores `backend` from what `taken` gave."""
    run_now(backend.restore_from([handle for handle in handles if handle.files], InlineState()))


FAR = 1 << 40
"""A time that does not come."""


class Passing:
    """Values, entries of a table and timers that come and go, in a subtask that has some that
    stay.
    """

    def __init__(self, state: KeyedStateBackend) -> None:
        self.state = state
        self.value = state.get_state(ValueStateDescriptor("value"))
        self.table = state.table("table", transient=True)
        self.timers = InternalTimerService(
            "timers", state, self.fire, self.fire, lambda _timestamp, _callback: None
        )  # type: ignore[arg-type,return-value]
        self.watermark = 0

    def fire(self, timestamp: int, key: Any, namespace: Any) -> None:
        self.value.clear()
        self.leave(None, key)
        self.leave(timestamp, key)

    def leave(self, namespace: Any, key: Any) -> None:
        del self.table.of_key(namespace, key)[key]
        self.table.removed(namespace, key)

    def come(self, key: Any, timestamp: int) -> None:
        self.state.set_current_key(key)
        self.value.update(key)
        self.table.of(None, [key])[key] = [key]
        self.table.of_key(timestamp, key)[key] = [key]
        self.timers.register_event_time_timer(key, None, timestamp)
        self.timers.register_event_time_timer(key, "deleted", FAR)
        self.timers.delete_event_time_timer(key, "deleted", FAR)

    def pass_through(self, keys: range) -> None:
        """Each key stays for a while in which ten others come."""
        for key in keys:
            self.come(key, self.watermark + 10)
            self.watermark += 1
            self.timers.advance_watermark(self.watermark)

    def settle(self) -> None:
        """All are gone but those that stay."""
        self.watermark += 100
        self.timers.advance_watermark(self.watermark)


LIVE = 50
"""Number of keys of a `PassingJob` that live at a time."""
ALL = KeyGroupRange(0, 15)


class PassingJob:
    """Keys that live until `LIVE` others have come, in values, tables and timers.

    `make` returns an empty backend of some of the 16 key groups.
    """

    def __init__(
        self, make: Callable[[KeyGroupRange], Any], state: Any = None, *, count: int = 0
    ) -> None:
        self.make = make
        self.state = make(ALL) if state is None else state
        self.passing = Passing(self.state)
        self.passing.watermark = self.count = self.number = count

    def come(self, keys: int) -> None:
        for _ in range(keys):
            self.passing.come(self.count, self.passing.watermark + LIVE)
            self.passing.watermark += 1
            self.passing.timers.advance_watermark(self.passing.watermark)
            self.count += 1

    async def checkpoint(self, keys: int, *, completes: bool = True) -> KeyedStateHandle:
        """Writes a checkpoint, while `keys` keys come between any two of its slices."""
        self.number += 1
        snapshot = self.state.begin_snapshot(self.number)
        expected = seen(self.state)
        writing = asyncio.ensure_future(snapshot.write(InlineState()))
        while not writing.done():
            self.come(keys)
            await asyncio.sleep(0)
        handle: KeyedStateHandle = await writing
        if completes:
            self.state.checkpoint_completed(self.number)
        else:
            self.state.checkpoint_aborted(self.number)
        for parallelism in (1, 2):
            groups = [range_for_subtask(index, parallelism, 16) for index in range(parallelism)]
            assert await self.read(handle, groups) == expected
        return handle

    async def read(self, handle: KeyedStateHandle, groups: Iterable[KeyGroupRange] = (ALL,)) -> Any:
        """Returns the content of `handle`, restored by a backend for each range of `groups`."""
        states = [self.make(some) for some in groups]
        for state in states:
            await state.restore_from([handle], InlineState())
        return seen(*states)


def seen(*states: Any) -> Any:
    """Returns a copy of all values and timers of backends."""
    values: dict[Any, Any] = {}
    timers: list[Any] = []
    for state in states:
        for name, table in state._tables.items():
            for namespace in table.namespaces():
                values.update(
                    ((name, namespace, key), value) for key, value in table.peek(namespace).items()
                )
        for space in timer_spaces(state):
            timers += space.queue.items()
    return deepcopy(values), sorted(timers, key=repr)


def timer_spaces(state: Any) -> Iterable[Any]:
    if isinstance(state, HeapKeyedStateBackend):
        return state._log.timers
    return [space for space in state._cache.spaces.values() if isinstance(space, TimerSpace)]
