"""The state machine of one execution attempt, around its StreamTask. The final state is reported
once.

    CREATED -> DEPLOYING -> INITIALIZING -> RUNNING -> FINISHED
    any of them -> CANCELING -> CANCELED, or -> FAILED

A task whose user code does not end when it is cancelled becomes FAILED: see `ending.EndWatch`.

A task that is cancelled before it runs never calls user code. An error that a cancellation causes
is logged. It is reported only if it was raised while closing. Consumers of a failed or cancelled
task see their producer fail; they end CANCELED, not FAILED, and report that error. Only the input
of the task can report a failed producer: a ProducerFailed of user code is an error like any other.
Only the engine, or a loop that shuts down, may cancel a task's asyncio task. If other code cancels
it, the task becomes FAILED, so that the job notices. After Flink's Task.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from aioflow.core.errors import Broken, ProducerFailed
from aioflow.graph.deployment import ExecutionState

if TYPE_CHECKING:
    from aioflow.graph.deployment import ExecutionAttemptId
    from aioflow.task.stream_task import StreamTask

__all__ = ["TaskExecution"]

logger = logging.getLogger(__name__)

StateReport = Callable[["ExecutionAttemptId", ExecutionState, BaseException | None], None]


class TaskExecution:
    """Runs `task` and reports to `report(attempt, state, error)`."""

    def __init__(
        self,
        task: StreamTask,
        report: StateReport,
        abandon: Callable[[asyncio.Task[None]], None] | None = None,
    ) -> None:
        """`abandon(runner)` is called so that the worker no longer waits for an asyncio task that
        does not end.
        """
        self.task = task
        self._abandon = abandon
        task.on_abandoned = self._on_abandoned
        self.attempt = task.descriptor.attempt
        self.state = ExecutionState.CREATED
        self._report = report
        self._begun = False
        self.runner: asyncio.Task[None] | None = None

    def transition(
        self, expected: ExecutionState, new: ExecutionState, error: BaseException | None = None
    ) -> bool:
        """Changes the state from `expected` to `new`, and reports the new state. Returns False,
        without a change, if the state is not `expected`.
        """
        if self.state is not expected:
            return False
        logger.debug("%s %s: %s -> %s", self.task.name, self.attempt, expected.value, new.value)
        self.state = new
        self._report(self.attempt, new, error)
        return True

    async def run(self) -> None:
        """Runs the task to its end; raises only if the worker itself is cancelled.

        A second call does nothing.
        """
        if self._begun:
            return
        self._begun = True
        if not self.transition(ExecutionState.CREATED, ExecutionState.DEPLOYING):
            self.task.abandon()
            return
        error: BaseException | None = None
        cancelled_by_stranger: asyncio.CancelledError | None = None
        try:
            await self.task.run(self._on_initializing, self._on_running)
        except asyncio.CancelledError as cancel:
            if self.state is not ExecutionState.CANCELING:
                cancelled_by_stranger = cancel
                error = Broken(
                    f"task {self.task.name} was cancelled from outside of the job; to end a job, "
                    "cancel the job"
                )
        # Reported below; SystemExit too, which is raised where the job is awaited.
        except BaseException as raised:  # noqa: BLE001
            error = raised
        self._end(error)
        if cancelled_by_stranger is not None:
            raise cancelled_by_stranger

    def cancel(self) -> None:
        """Cancels the task.

        A task in state CREATED ends at once and never runs. A call after the end has no effect. A
        task that has already failed, and is only cleaning up, still reports its error.
        """
        if self.transition(ExecutionState.CREATED, ExecutionState.CANCELED):
            return
        for state in (
            ExecutionState.DEPLOYING,
            ExecutionState.INITIALIZING,
            ExecutionState.RUNNING,
        ):
            if self.state is state and (
                self.task.failure is None or self.task.failure is self.task.failed_producer
            ):
                self.state = ExecutionState.CANCELING
                if self.runner is not None:
                    self.task.end(self.runner)
                return

    def _on_initializing(self) -> None:
        self.transition(ExecutionState.DEPLOYING, ExecutionState.INITIALIZING)

    def _on_running(self) -> None:
        self.transition(ExecutionState.INITIALIZING, ExecutionState.RUNNING)

    def _on_abandoned(self) -> None:
        """Reports the task to the job as ended, although its code cannot be stopped."""
        self._end(None)
        if self._abandon is not None and self.runner is not None:
            self._abandon(self.runner)

    def _end(self, error: BaseException | None) -> None:
        if self.state.is_terminal:  # An abandoned task has ended after all.
            return
        if self.task.stuck is not None:
            stuck = self.task.stuck
            if self.task.failure is not None and self.state is not ExecutionState.CANCELING:
                stuck.__cause__ = self.task.failure
            # RUNNING even after a cancellation, because user code did not end on it.
            error, self.state = stuck, ExecutionState.RUNNING
        producer = self.task.failed_producer
        if self.state is ExecutionState.CANCELING or (error is not None and error is producer):
            if error is not None and error is not producer:
                logger.info("%s: error while cancelling: %r", self.task.name, error)
            self.task.fail_partitions(
                error or ProducerFailed(f"task {self.task.name} was cancelled")
            )
            end, cause = ExecutionState.CANCELED, error
            if self.state is ExecutionState.CANCELING:
                cause = self.task.closing_error
        elif error is not None:
            self.task.fail_partitions(error)
            end, cause = ExecutionState.FAILED, error
        else:
            end, cause = ExecutionState.FINISHED, None
        self.state = end
        self._report(self.attempt, end, cause)
