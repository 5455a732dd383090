"""The interface of state for operators and user functions, and the choice of a backend.

A `KeyedStateBackend` holds named tables: `namespace -> key -> value`. Plain keyed state lives in
namespace None, a window's state in the namespace of that window. The five kinds of state are views
of such tables for the current key; built-in operators read and write the raw dicts of a
`StateTable`. Keys that are equal in Python are one key.

The mapping that `StateTable.of` returns is valid for one batch, and only for the keys that were
named: so a backend knows what changes, can keep what an unfinished snapshot still needs, and can
fetch all keys of a batch at once. The state objects may be kept.

A checkpoint: `begin_snapshot` between two slices, `PendingSnapshot.write` while the job goes on,
then `checkpoint_completed` or `checkpoint_aborted`. Timers are part of it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from aioflow.core.errors import StateError, did_you_mean
from aioflow.core.keygroups import KeyGroupRange
from aioflow.core.serializers import Codec
from aioflow.core.state_descriptors import MapStateDescriptor, StateDescriptor
from aioflow.state.handles import KeyedStateHandle, StateInput, StateOutput
from aioflow.state.snapshot import OperatorSnapshot

if TYPE_CHECKING:
    from aioflow.core.host import Host
    from aioflow.state.timers import InternalTimerService

__all__ = [
    "INTERNAL_PREFIX",
    "NO_KEY",
    "KeyedStateBackend",
    "OperatorStateBackend",
    "PendingSnapshot",
    "StateBackend",
    "StateTable",
    "check_backend",
    "choose_backend",
    "create_keyed_backend",
    "require_keyed",
]

DEFAULT_BACKEND = "heap"

INTERNAL_PREFIX = "aioflow."
"""State whose name begins so is the engine's own beside the user's: part of every snapshot, and
nothing that a reader of state sees.
"""

BACKENDS = {
    "heap": ("aioflow.state.heap", "HeapKeyedStateBackend"),
    "rocksdb": ("aioflow.state.rocksdb", "RocksDB"),
}
"""Name -> (module, class), imported when the backend is asked for: an extra may be dear to load,
or absent.
"""


class _NoKey:
    """Stands for "no current key".

    Looking it up in any dict raises StateError: so the hot path needs no check of its own.
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
    """Raw storage for a built-in operator: a dict for each namespace."""

    name: str

    def of(
        self, namespace: Any = None, keys: Sequence[Any] | None = None
    ) -> MutableMapping[Any, Any]:
        """`key -> value` of `namespace`, created on demand. Ask again for each batch.

        `keys`: those that may be changed, or whose values may be changed in place; others must not
        be. Without them any may, and each access costs more.
        """

    def of_key(self, namespace: Any, key: Any) -> MutableMapping[Any, Any]:
        """`of(namespace, [key])`, cheaper."""

    def peek(self, namespace: Any = None) -> Mapping[Any, Any]:
        """Like `of`, to read only, values included: creates nothing."""

    def namespaces(self) -> list[Any]:
        """All namespaces that hold something."""

    def removed(self, namespace: Any, key: Any) -> None:
        """Note that `key` was deleted from the mapping that `of_key` gave. That mapping is not used
        for it again.

        An empty namespace other than None is dropped.
        """

    def drop(self, namespace: Any) -> None:
        """Removes `namespace` with all its keys; one that does not exist is no error."""


class PendingSnapshot(Protocol):
    """A consistent view of one backend, to be written while the job goes on."""

    async def write(self, output: StateOutput) -> KeyedStateHandle | None:
        """Writes the snapshot in slices; returns None if there is nothing to keep. Called once. It
        always releases the view, also on an error.

        Raises OSError of `output`, and TypeNotSupported naming operator, state, type and remedy.
        """

    def cancel(self) -> None:
        """Lets go of the view. Idempotent, also after `write`."""


class KeyedStateBackend(Protocol):
    """Keyed state of one operator's subtask: the keys of `key_group_range`."""

    current_key: Any
    """`NO_KEY` when no element is being processed.

    A plain attribute: hot loops store to it directly.
    """
    max_parallelism: int
    key_group_range: KeyGroupRange
    codec: Codec
    """By which values are written."""
    is_restored: bool
    """Whether a snapshot was restored, even if this subtask's share of it was empty."""

    def set_current_key(self, key: Any) -> None: ...
    def clear_current_key(self) -> None: ...

    # The five kinds share no method but `clear`; the runtime context gives each its type.
    def get_state(self, descriptor: StateDescriptor, namespace: Any = None) -> Any:
        """The state that `descriptor` declares, for the current key in `namespace`.

        One object for each name in namespace None; one of another namespace is made for the
        occasion. Raises StateError when the name was declared differently, or holds restored state
        of another kind.
        """

    def table(
        self, name: str, *, result: Callable[[Any], Any] | None = None, transient: bool = False
    ) -> StateTable:
        """Raw table `name`; `result` turns a stored value into what queries show.

        `transient`: its keys are removed one by one as often as they come, each with a call of
        `removed`.
        """

    def query(self, name: str, key: Any, namespace: Any = None, default: Any = ...) -> Any:
        """Returns the value of state `name` for `key`. A key without state gives `default`; without
        one, the descriptor's default or None.

        Does not touch the current key. Raises StateError: unknown name.
        """

    def items(
        self, name: str, limit: int | None = None, namespace: Any = None
    ) -> list[tuple[Any, Any]]:
        """Up to `limit` pairs (key, what `query` gives)."""

    def names(self) -> list[str]:
        """All names that hold state, declared or restored."""

    def attach_timers(self, service: InternalTimerService) -> None:
        """Makes the timers and the event time of `service` part of every snapshot, and gives it
        those that were restored.

        The service calls it when it is made. Raises StateError for a second one of the same name.
        """

    def begin_snapshot(
        self, checkpoint_id: int, *, full: bool = False, canonical: bool = False
    ) -> PendingSnapshot:
        """A consistent view of all state and timers as they are now. Called between two slices;
        costs next to nothing.

        `full`: nothing may refer to files of earlier checkpoints. `canonical`: for a savepoint, one
        file in the format that every backend reads. Another snapshot may still be unfinished.
        """

    def checkpoint_completed(self, checkpoint_id: int) -> None:
        """Records that the snapshot of `begin_snapshot(checkpoint_id)` belongs to a completed
        checkpoint: the next increment is relative to it.
        """

    def checkpoint_aborted(self, checkpoint_id: int) -> None:
        """It is part of none, and never will be."""

    async def restore_from(self, handles: Sequence[KeyedStateHandle], source: StateInput) -> None:
        """Takes the key groups of its own range out of the state of all former subtasks. Before any
        state is used, and once.

        Raises RestoreError naming the file and the operator.
        """

    def close(self) -> None: ...


class OperatorStateBackend(Protocol):
    """State of a subtask that belongs to no key. Always on the heap."""

    is_restored: bool
    is_lent: bool
    """Whether a function may request state at any time: restored state without an owner may
    still belong to it.
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
    """A backend object that the application brings along. May have `configure(options: Mapping) ->
    None`, called first.

    With a true attribute `needs_host` it also gets `host=`: the machine that it runs on, None if it
    was made without one.
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


def choose_backend(
    application: str | StateBackend | None = None,
    job: str | StateBackend | None = None,
    cluster: str | StateBackend | None = None,
) -> str | StateBackend:
    """The application's choice wins over the job's, that over the cluster's; with none it is the
    heap.
    """
    for choice in (application, job, cluster):
        if choice is not None:
            return choice
    return DEFAULT_BACKEND


def check_backend(choice: object) -> None:
    """Raises StateError for what is neither the name of a backend, nor a StateBackend, nor None."""
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
    """Creates the keyed backend of one subtask. `now_ms` is the processing-time clock that times to
    live count by.

    `codec` encodes what users keep in state (None: the types that are registered by default);
    errors name `operator`. `host` is the machine, for a backend that keeps files on it. `options`
    (of the cluster) are handed to a backend that can be configured, also to one the application
    brought. Raises StateError for an unknown name, naming the known ones.
    """
    check_backend(choice)
    backend = DEFAULT_BACKEND if choice is None else choice
    if isinstance(backend, str):
        module, name = BACKENDS[backend]
        backend = getattr(importlib.import_module(module), name)
        if hasattr(backend, "configure"):
            backend = backend()  # Options of one subtask are not those of another.
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
    """`backend`, or StateError saying that `operator` lacks a `key_by`: raised at open, not at
    the first element.
    """
    if backend is None:
        raise StateError(
            f"operator {operator!r} uses keyed state or timers, but its input is not keyed: put "
            "key_by(...) directly "
            "before it"
        )
    return backend
