"""The interface of state for operators and user functions, and the choice of a backend.

A `KeyedStateBackend` holds named tables, each with values by namespace and key. Plain keyed state
lives in namespace None, a window's state in the namespace of that window. The five kinds of state
are views of such tables for the current key; built-in operators read and write the raw dicts of a
`StateTable`. Keys that are equal in Python are one key.

The mapping that `StateTable.of` returns is valid for one batch, and only for the keys passed to
`of`. So the backend knows which keys change. It can keep the values that an unfinished snapshot
still needs, and can fetch all keys of a batch at once. State objects, in contrast, may be kept.

A checkpoint calls `begin_snapshot` between two batches, and `PendingSnapshot.write` while the job
continues. The backend then gets `checkpoint_completed` or `checkpoint_aborted`. Timers are part of
the snapshot.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from aioflow.core.errors import MailboxClosed, StateError, did_you_mean
from aioflow.core.keygroups import KeyGroupRange
from aioflow.core.states import MapStateDescriptor, StateDescriptor
from aioflow.core.wire.serializers import Codec
from aioflow.state.snapshot import KeyedStateHandle, OperatorSnapshot, StateInput, StateOutput

if TYPE_CHECKING:
    from aioflow.core.host import Host
    from aioflow.state.timers import InternalTimerService

__all__ = [
    "INTERNAL_PREFIX",
    "NO_KEY",
    "ExpiringBackend",
    "KeyedStateBackend",
    "OperatorStateBackend",
    "PendingSnapshot",
    "StateBackend",
    "StateTable",
    "check_backend",
    "create_keyed_backend",
    "remove_expired_state",
    "require_keyed",
]

DEFAULT_BACKEND = "heap"

INTERNAL_PREFIX = "aioflow."
"""Prefix of the names of internal state of the engine.

Every snapshot contains this state, but readers of state do not see it.
"""

BACKENDS = {
    "heap": ("aioflow.state.heap", "HeapKeyedStateBackend"),
    "rocksdb": ("aioflow.state.rocksdb", "RocksDB"),
}
"""Maps the name of a backend to its module and class. The module is imported on demand, because its
extra dependencies may be slow to import, or not installed.
"""


class _NoKey:
    """The value of "no current key".

    A lookup of this value in any dict raises StateError, so that normal accesses need no check.
    """

    __slots__ = ()

    def __hash__(self) -> int:
        raise StateError(
            "keyed state was used without a current key: it is bound to the key of the element "
            "(or timer) being "
            "processed; do not use it in open(), in close() or from a task of your own"
        )

    def __repr__(self) -> str:
        return "NO_KEY"


NO_KEY: Any = _NoKey()


class StateTable(Protocol):
    """A table of raw state for a built-in operator, with one dict for each namespace."""

    name: str

    def of(
        self, namespace: Any = None, keys: Sequence[Any] | None = None
    ) -> MutableMapping[Any, Any]:
        """Returns the mapping from key to value of `namespace`, created on demand. Call this method
        for each batch.

        Only the values of `keys` may be changed, replaced or removed through the mapping. If `keys`
        is None, every key may be changed, and each access costs more.
        """

    def of_key(self, namespace: Any, key: Any) -> MutableMapping[Any, Any]:
        """Returns the same as `of(namespace, [key])`, at a lower cost."""

    def of_replaced(self, namespace: Any, key: Any) -> MutableMapping[Any, Any]:
        """Returns the same as `of_key`, for a caller that replaces or removes the value.

        The former value never changes in place again, so no snapshot needs a copy of it.
        """

    def peek(self, namespace: Any = None) -> Mapping[Any, Any]:
        """Returns a read-only mapping of `namespace`. Does not create a missing namespace.

        The values must not be changed in place.
        """

    def namespaces(self) -> list[Any]:
        """Returns all namespaces that hold a key."""

    def removed(self, namespace: Any, key: Any) -> None:
        """Notes that the caller has deleted `key` from the mapping that `of_key` returned.

        The caller must not use this mapping for `key` again. An empty namespace other than None is
        dropped.
        """

    def drop(self, namespace: Any) -> None:
        """Removes `namespace` with all its keys. Does nothing if the namespace is missing."""


class PendingSnapshot(Protocol):
    """A consistent view of one backend, which is written while the job continues."""

    async def write(self, output: StateOutput) -> KeyedStateHandle | None:
        """Writes the snapshot in slices; returns None if there is no state to write. Called once.

        Always releases the view, also on an error. Raises the OSError of `output`. Raises
        TypeNotSupported, which names the operator, the state, the type and the remedy.
        """

    def cancel(self) -> None:
        """Releases the view. Idempotent, and harmless after `write`."""


class KeyedStateBackend(Protocol):
    """Keyed state of one operator's subtask: the keys of `key_group_range`."""

    current_key: Any
    """The key of the element that is being processed, or `NO_KEY`.

    A plain attribute, because hot loops assign it directly.
    """
    max_parallelism: int
    key_group_range: KeyGroupRange
    codec: Codec
    """The codec that encodes values."""
    is_restored: bool
    """Whether a snapshot was restored, even if this subtask's share of it was empty."""

    def set_current_key(self, key: Any) -> None: ...
    def clear_current_key(self) -> None: ...

    # Any, because the five kinds share only the method `clear`. The runtime context has their
    # types.
    def get_state(self, descriptor: StateDescriptor, namespace: Any = None) -> Any:
        """Returns the state that `descriptor` declares, for the current key in `namespace`.

        In namespace None, the same object is returned for each call with the same name; in other
        namespaces, each call makes an object. Raises StateError if the name was declared
        differently, or holds restored state of another kind.
        """

    def table(
        self, name: str, *, result: Callable[[Any], Any] | None = None, transient: bool = False
    ) -> StateTable:
        """Returns raw table `name`; `result` converts a stored value to the value that queries
        show.

        `transient` means that most keys are short-lived: each is removed soon after it was added,
        with a call of `removed`.
        """

    def query(self, name: str, key: Any, namespace: Any = None, default: Any = ...) -> Any:
        """Returns the value of state `name` for `key`.

        For a key without state, returns `default` if given, otherwise the descriptor's default or
        None. Does not change the current key. Raises StateError for an unknown name.
        """

    def items(
        self, name: str, limit: int | None = None, namespace: Any = None
    ) -> list[tuple[Any, Any]]:
        """Returns up to `limit` pairs of a key and the value that `query` returns for it."""

    def names(self) -> list[str]:
        """Returns all names that hold state, declared or restored."""

    def attach_timers(self, service: InternalTimerService) -> None:
        """Makes the timers and the event time of `service` part of every snapshot.

        Passes the restored timers to the service. The service calls this method when it is created.
        Raises StateError for a second service of the same name.
        """

    def begin_snapshot(
        self, checkpoint_id: int, *, full: bool = False, canonical: bool = False
    ) -> PendingSnapshot:
        """Returns a consistent view of all current state and timers.

        Called between two batches; the call itself is cheap. With `full` the snapshot must not
        refer to files of earlier checkpoints. With `canonical` the snapshot is for a savepoint: one
        file in the format that every backend reads. An earlier snapshot may still be unfinished.
        """

    def checkpoint_completed(self, checkpoint_id: int) -> None:
        """Records that the snapshot `checkpoint_id` belongs to a completed checkpoint.

        The next increment is relative to this checkpoint.
        """

    def checkpoint_aborted(self, checkpoint_id: int) -> None:
        """Records that checkpoint `checkpoint_id` was aborted, so that its snapshot is not
        needed.
        """

    async def restore_from(self, handles: Sequence[KeyedStateHandle], source: StateInput) -> None:
        """Restores the key groups of this backend from the state of all former subtasks.

        Called once, before any state is used. Raises RestoreError naming the file and the operator.
        """

    def close(self) -> None: ...


@runtime_checkable
class ExpiringBackend(Protocol):
    """A keyed backend that can remove expired values even if no value is written."""

    def watch_expiry(self, start: Callable[[], None]) -> None:
        """Calls `start` once, as soon as there is a state with a time to live."""

    def remove_expired(self) -> int:
        """Removes some expired values, and returns the time in ms until the next call.

        Called between two elements, once `start` has been called.
        """


class OperatorStateBackend(Protocol):
    """Operator state: state of a subtask that belongs to no key. It is always on the heap."""

    is_restored: bool
    is_lent: bool
    """Whether a function holds this backend and may request state at any time. If so, restored
    state that was not requested yet may still be requested.
    """

    def get_list_state(self, descriptor: StateDescriptor | str) -> Any: ...
    def get_union_list_state(self, descriptor: StateDescriptor | str) -> Any: ...
    def get_broadcast_state(self, descriptor: MapStateDescriptor[Any, Any] | str) -> Any: ...
    def snapshot(self) -> OperatorSnapshot: ...
    def lend(self) -> None: ...
    def unclaimed(self) -> list[str]: ...
    def forget(self, name: str) -> None: ...
    def restore(self, snapshot: OperatorSnapshot) -> None: ...


@runtime_checkable
class StateBackend(Protocol):
    """A state backend that the application provides as an object.

    An optional method `configure(options: Mapping) -> None` is called first. If the object has an
    attribute `needs_host` that is true, `create_keyed` also gets the argument `host=`: the `Host`
    of the task, or None if there is none.
    """

    def create_keyed(
        self,
        *,
        max_parallelism: int,
        key_group_range: KeyGroupRange,
        now_ms: Callable[[], int],
        codec: Codec,
        operator: str,
    ) -> KeyedStateBackend: ...


def check_backend(choice: object) -> None:
    """Raises StateError unless `choice` is the name of a backend, a StateBackend or None."""
    known = " or ".join(sorted(BACKENDS))
    if isinstance(choice, str):
        if choice not in BACKENDS:
            hint = did_you_mean(choice, BACKENDS)
            raise StateError(
                f"unknown state backend {choice!r}, expected {known} or a StateBackend object{hint}"
            )
    elif choice is not None and not isinstance(choice, StateBackend):
        raise StateError(
            f"state backend is {type(choice).__name__} object {choice!r}, expected a name "
            f"({known}) or an object with "
            "create_keyed()"
        )


def create_keyed_backend(
    choice: str | StateBackend | None = None,
    *,
    max_parallelism: int,
    key_group_range: KeyGroupRange,
    now_ms: Callable[[], int],
    options: Mapping[str, Any] | None = None,
    codec: Codec | None = None,
    operator: str = "",
    host: Host | None = None,
) -> KeyedStateBackend:
    """Creates the keyed backend of one subtask.

    `now_ms` is the processing-time clock for times to live. `codec` encodes the values that users
    keep in state; with None, it supports the types that are registered by default. Errors name
    `operator`. `host` is the machine on which the backend may keep files. `options` come from the
    cluster's configuration; they are passed to each backend that can be configured, even one that
    the application provides. Raises StateError for an unknown name, naming the known backends.
    """
    check_backend(choice)
    backend = DEFAULT_BACKEND if choice is None else choice
    if isinstance(backend, str):
        module, name = BACKENDS[backend]
        backend = getattr(importlib.import_module(module), name)
        if hasattr(backend, "configure"):
            backend = backend()  # A backend for each subtask, because `configure` may change it.
    configure = getattr(backend, "configure", None)
    if configure is not None:
        configure(options or {})
    needs_host = {"host": host} if getattr(backend, "needs_host", False) else {}
    return backend.create_keyed(
        max_parallelism=max_parallelism,
        key_group_range=key_group_range,
        now_ms=now_ms,
        codec=Codec() if codec is None else codec,
        operator=operator,
        **needs_host,
    )


def require_keyed(backend: KeyedStateBackend | None, operator: str) -> KeyedStateBackend:
    """Returns `backend`, or raises a StateError saying that `operator` lacks a `key_by`.

    Operators call this in `open`, so that the error is raised before the first element.
    """
    if backend is None:
        raise StateError(
            f"operator {operator!r} uses keyed state or timers, but its input is not keyed: put "
            "key_by(...) directly "
            "before it"
        )
    return backend


def remove_expired_state(
    backend: KeyedStateBackend,
    now_ms: Callable[[], int],
    schedule: Callable[[int, Callable[[int], None]], Any],
) -> None:
    """Has `backend` remove expired values from time to time, once it has a state with a time to
    live.

    Writes remove expired values too (`state.ttl`). But a state that is only read, or not used at
    all, would never shrink. So each subtask with such a state removes a few expired values at a
    time, several times within one time to live. `schedule(timestamp_ms, callback)` registers a
    timer of the task. Does nothing for a custom backend that is not an `ExpiringBackend`.
    """
    if not isinstance(backend, ExpiringBackend):
        return

    def wait(wait_ms: int) -> None:
        try:
            schedule(now_ms() + wait_ms, on_time)
        except MailboxClosed:
            pass  # The task has ended.

    def on_time(_timestamp_ms: int) -> None:
        wait(backend.remove_expired())

    backend.watch_expiry(lambda: wait(0))
