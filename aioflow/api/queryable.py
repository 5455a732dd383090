"""Reads keyed state of a running job, on the subtask that owns the key, between two slices of work.

The values are not committed: a failure may take them back.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Never

from aioflow.core.errors import Closed, JobNotRunning, StateError, did_you_mean
from aioflow.core.keygroups import key_group, range_for_subtask, subtask_for_group
from aioflow.core.timeunits import to_seconds
from aioflow.graph.deployment import ExecutionState
from aioflow.state.backend import INTERNAL_PREFIX

if TYPE_CHECKING:
    from aioflow.cluster.running_job import RunningJob
    from aioflow.graph.job_graph import JobGraph, JobVertex
    from aioflow.state.backend import KeyedStateBackend

__all__ = ["StateReader"]

RETRY_S = 0.02
"""Time between two tries of a read while the job restarts."""

DECLARED: Any = object()
"""Stands for a missing `default`, because None is a valid one."""


class StateReader:
    """Reads the keyed state of one operator.

    While the job restarts, a read waits up to `timeout`, then raises JobNotRunning. While user code
    blocks the subtask for longer, a read raises TimeoutError.
    """

    def __init__(self, cluster: RunningJob, graph: JobGraph, node_id: int) -> None:
        self._cluster = cluster
        vertex, index = graph.vertex_of_node(node_id)
        self._vertex_id = vertex.id
        self._node = vertex.nodes[index]
        if not self._node.keyed:
            raise StateError(
                f"operator {self._node.name!r} has no keyed state: only what follows key_by(...) "
                "directly has"
            )
        # Raises at once, instead of waiting for tasks that can never be asked.
        cluster.refuse_state(self._node.name)

    if not TYPE_CHECKING:  # Hidden from type checkers, which report this use themselves.

        def __await__(self) -> Never:
            raise TypeError(
                "state is read by `await job.state(stream).get(key)`, or `.items()` for all keys"
            )

    async def get(
        self,
        key: Any,
        default: Any = DECLARED,
        name: str | None = None,
        *,
        timeout: str | timedelta = "5s",
    ) -> Any:
        """Returns the value of the state for `key`.

        A key without state has the value `default`. Without `default` that is the default of the
        state's descriptor, or None. `name` is the name of the state; it may be omitted if the
        operator has only one.
        """
        given = () if default is DECLARED else (default,)
        vertex = self._vertex
        group = key_group(key, vertex.max_parallelism)
        return await self._ask(group, partial(_get, self._node.name, name, key, given), timeout)

    async def items(
        self, limit: int | None = 1000, name: str | None = None, *, timeout: str | timedelta = "5s"
    ) -> list[tuple[Any, Any]]:
        """Returns up to `limit` pairs of key and value, over all subtasks."""
        while True:
            found: list[tuple[Any, Any]] = []
            vertex = self._vertex
            for subtask in range(vertex.parallelism):
                left = None if limit is None else limit - len(found)
                if left == 0:
                    break
                own = range_for_subtask(subtask, vertex.parallelism, vertex.max_parallelism)
                query = partial(_items, self._node.name, name, left)
                found += await self._ask(own.start, query, timeout)
            if vertex.parallelism == self._vertex.parallelism:  # Otherwise keys have moved.
                return found

    @property
    def _vertex(self) -> JobVertex:
        """The vertex as it is now: its parallelism may change while the job runs."""
        return self._cluster.job_master.executions.graph.vertex(self._vertex_id)

    async def _ask(self, group: int, query: Any, timeout: str | timedelta) -> Any:
        """Returns the result of `query` on the state of the subtask that owns key group `group`.

        Waits for a restart of the subtask, at most until `timeout`.
        """
        deadline = self._cluster.host.clock.monotonic() + to_seconds(timeout)
        while True:
            master, vertex = self._cluster.job_master, self._vertex
            subtask = subtask_for_group(group, vertex.parallelism, vertex.max_parallelism)
            execution = master.executions.executions[vertex.id, subtask]
            try:
                if execution.state is ExecutionState.RUNNING:
                    async with asyncio.timeout(deadline - self._cluster.host.clock.monotonic()):
                        return await self._cluster.task_executor.query_state(
                            execution.attempt, self._node.id, query
                        )
            except TimeoutError:
                raise TimeoutError(
                    f"state of {self._node.name!r} was not read within {timeout}: its subtask "
                    f"{subtask + 1} is busy with one element; "
                    "give it more time by timeout="
                ) from None
            except (Closed, JobNotRunning, asyncio.CancelledError):
                if (task := asyncio.current_task()) is not None and task.cancelling():
                    raise
            over = master.status.is_terminal or execution.state is ExecutionState.FINISHED
            if over or self._cluster.host.clock.monotonic() >= deadline:
                raise JobNotRunning(
                    f"state of {self._node.name!r} cannot be read: job "
                    f"{master.executions.graph.name!r} is {master.status.value}, "
                    f"its subtask {subtask + 1} is {execution.state.value}"
                )
            await asyncio.sleep(RETRY_S)


# Functions of modules, because they may run in another process: they travel by name, with plain
# arguments.


def _get(
    operator: str, name: str | None, key: Any, default: tuple[Any, ...], backend: KeyedStateBackend
) -> Any:
    return backend.query(_named(operator, name, backend), key, None, *default)


def _items(
    operator: str, name: str | None, limit: int | None, backend: KeyedStateBackend
) -> list[tuple[Any, Any]]:
    return backend.items(_named(operator, name, backend), limit=limit)


def _named(operator: str, name: str | None, backend: KeyedStateBackend) -> str:
    names = [known for known in backend.names() if not known.startswith(INTERNAL_PREFIX)]
    if name is None and len(names) == 1:
        return names[0]
    if name is None or name not in names:
        have = ", ".join(repr(n) for n in names) or "none so far"
        what = (
            "name the state to read, get(key, name=...) or items(name=...)"
            if name is None
            else f"there is no state {name!r}"
        )
        raise StateError(
            f"operator {operator!r}: {what}; it has "
            f"{have}{'' if name is None else did_you_mean(name, names)}"
        )
    return name
