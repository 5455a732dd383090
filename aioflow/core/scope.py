"""Records where user code runs, for logs: job, operator, subtask and key, as a context variable.

A task sets one `Scope` when it starts; the coroutines and tasks that it starts inherit it. The
chain sets the operator whose user code runs next. `Scope.key` reads the key from that operator's
context, so the scope costs nothing per record. Two ids that several layers use are defined here
too: the id of an execution attempt, and `TapPlace`, the output that a tap reads.
"""

from __future__ import annotations

from contextvars import Context, ContextVar, Token
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = [
    "ExecutionAttemptId",
    "Scope",
    "ScopeOperator",
    "TapPlace",
    "current_scope",
    "enter_scope",
    "leave_scope",
    "scope_in",
]


class _KeyedState(Protocol):
    current_key: Any


class _Runtime(Protocol):
    @property
    def subtask_index(self) -> int: ...
    @property
    def parallelism(self) -> int: ...


class ScopeOperator(Protocol):
    """The attributes of an operator's context that a scope reads."""

    @property
    def name(self) -> str: ...
    @property
    def runtime(self) -> _Runtime: ...
    @property
    def keyed_state(self) -> _KeyedState | None: ...


class Scope:
    """Where the running code of a task belongs: job, operator, subtask and key.

    The task sets `operator_context`, which is None while no operator runs.
    """

    __slots__ = ("job", "operator_context")

    def __init__(self, job: str, operator_context: ScopeOperator | None = None) -> None:
        self.job = job
        self.operator_context = operator_context

    def __repr__(self) -> str:
        where = f"{self.job}/{self.operator}[{self.subtask}]"
        return where if self.key is None else f"{where} key={self.key!r}"

    @property
    def operator(self) -> str | None:
        """Name of the operator whose code runs."""
        return None if self.operator_context is None else self.operator_context.name

    @property
    def subtask(self) -> str | None:
        """The subtask and the parallelism, as in "2/4"."""
        if self.operator_context is None:
            return None
        runtime = self.operator_context.runtime
        return f"{runtime.subtask_index + 1}/{runtime.parallelism}"

    @property
    def key(self) -> Any:
        """The key of the element or timer being processed; None without a key."""
        state = None if self.operator_context is None else self.operator_context.keyed_state
        if state is None:
            return None
        key = state.current_key
        try:
            return next(iter({key}))
        # The state layer's placeholder for "no key" refuses to be hashed; keys never do.
        except Exception:  # noqa: BLE001
            return None

    def at(self, operator_context: ScopeOperator) -> Scope:
        """Returns a scope of the same job that stays at one operator, for a longer-running helper
        task.
        """
        return Scope(self.job, operator_context)


_CURRENT: ContextVar[Scope | None] = ContextVar("aioflow_scope", default=None)


def current_scope() -> Scope | None:
    """Returns the scope of the calling code, or None outside of a flow."""
    return _CURRENT.get()


def scope_in(context: Context) -> Scope | None:
    """Returns the scope of the code that runs in `context`; may be called from any thread."""
    return context.get(_CURRENT)


def enter_scope(scope: Scope | None) -> Token[Scope | None]:
    """Sets the scope of the running task and of the tasks that it starts from now on. None means
    that the code belongs to no job.
    """
    return _CURRENT.set(scope)


def leave_scope(token: Token[Scope | None]) -> None:
    """Undoes `enter_scope`, in the same context."""
    _CURRENT.reset(token)


TapPlace = int | tuple[int, str]
"""The output that a tap on a job reads: the id of the operator's node, or for a side output the id
and the name of its tag.
"""


@dataclass(frozen=True, slots=True)
class ExecutionAttemptId:
    """The id of one attempt to run one subtask. `job_id` has 32 hex digits, `attempt` counts from
    0.
    """

    job_id: str
    vertex_id: int
    subtask_index: int
    attempt: int

    def __str__(self) -> str:
        return f"{self.job_id[:8]}-{self.vertex_id}-{self.subtask_index}#{self.attempt}"
