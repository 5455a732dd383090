"""Checkpoint messages from the worker as mail: triggers for sources, and notices of the result.

A trigger waits for its turn in the mailbox, unless its barrier overtakes data. Notices overtake all
other mail, and also reach operators that wait inside their own action. While the task does not run,
triggers are declined, and only notices about aborted checkpoints are remembered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from aioflow.checkpoint.instructions import CheckpointFailureReason
from aioflow.core.elements import CancelCheckpointMarker
from aioflow.core.errors import MailboxClosed
from aioflow.mailbox.mailbox import MAX_PRIORITY
from aioflow.task.ending import TaskPhase
from aioflow.task.network_input import NetworkInput

if TYPE_CHECKING:
    from aioflow.core.elements import CheckpointBarrier
    from aioflow.graph.deployment import ExecutionAttemptId
    from aioflow.task.checkpointing import SubtaskCheckpoints
    from aioflow.task.ending import TaskLife
    from aioflow.task.environment import TaskEnvironment
    from aioflow.task.output import TaskOutput
    from aioflow.task.runtime import OperatorRuntime
    from aioflow.task.source_input import SourceInput

__all__ = ["CheckpointMail"]


class CheckpointMail:
    """The checkpoint messages of one task, usable from its deployment on."""

    def __init__(
        self,
        attempt: ExecutionAttemptId,
        environment: TaskEnvironment,
        life: TaskLife,
        runtime: OperatorRuntime,
        output: TaskOutput,
    ) -> None:
        self._attempt = attempt
        self._environment = environment
        self._life = life
        self._output = output
        self._executor = runtime.processor.executor(-1)
        self._notices = runtime.processor.executor(MAX_PRIORITY)
        self._parking = runtime.parking
        self._early_aborts: list[int] = []
        """Aborted checkpoints whose notices arrived before the task ran."""
        self._checkpoints: SubtaskCheckpoints | None = None
        self._network: NetworkInput | None = None

    def open(self, checkpoints: SubtaskCheckpoints, task_input: NetworkInput | SourceInput) -> None:
        """Passes messages to these two objects from now on, beginning with the early aborts."""
        self._checkpoints = checkpoints
        self._network = task_input if isinstance(task_input, NetworkInput) else None
        for checkpoint_id in self._early_aborts:
            checkpoints.forgo(checkpoint_id)

    def trigger(self, barrier: CheckpointBarrier) -> None:
        """Begins a checkpoint in this task, because no upstream task will send its barrier."""
        if self._life.is_running:
            with suppress(MailboxClosed):
                # Urgent if it overtakes: the mail in front of it may take as long as the data in
                # flight.
                executor = self._notices if barrier.unaligned else self._executor
                trigger = partial(self._on_trigger, barrier)
                executor.execute(
                    trigger, "checkpoint %d", barrier.checkpoint_id, urgent=barrier.unaligned
                )
                return
        self._refuse(
            barrier.checkpoint_id,
            CheckpointFailureReason.TASK_NOT_READY
            if self._life.phase < TaskPhase.RUNNING
            else CheckpointFailureReason.TASK_CLOSING,
        )

    def completed(self, checkpoint_id: int) -> None:
        """Notifies the task that the checkpoint and all before it are durable."""
        self._notice(
            partial(self._on_completed, checkpoint_id), "checkpoint %d complete", checkpoint_id
        )

    def aborted(self, checkpoint_id: int, latest_completed: int | None) -> None:
        """Notifies the task that the checkpoint will not complete. `latest_completed` is the last
        completed checkpoint.
        """
        if self._life.phase < TaskPhase.RUNNING:
            if self._checkpoints is None:
                self._early_aborts.append(checkpoint_id)
            else:
                self._checkpoints.forgo(checkpoint_id)
            return
        self._notice(
            partial(self._on_aborted, checkpoint_id, latest_completed),
            "checkpoint %d aborted",
            checkpoint_id,
        )

    def phase(self, checkpoint_id: int, inputs: Sequence[str]) -> str:
        """Returns what a checkpoint waits for in this task, for the log. `inputs` are the names of
        the channels.
        """
        return self._served.phase(checkpoint_id, inputs)

    def urgently(self, action: Callable[[], None], description: str) -> None:
        """Runs `action` before all other mail."""
        with suppress(MailboxClosed):  # The task ends, so there is nothing to overtake.
            self._notices.execute(action, description, urgent=True)

    def _refuse(self, checkpoint_id: int, reason: CheckpointFailureReason) -> None:
        """Declines a checkpoint, and cancels the checkpoint downstream, so that no task waits for
        its barrier.
        """
        self._output.broadcast_event(CancelCheckpointMarker(checkpoint_id))
        if self._environment.responder is not None:
            self._environment.responder.decline_checkpoint(
                self._attempt, checkpoint_id, reason.name, None
            )

    def _notice(self, action: Callable[[], None], description: str, checkpoint_id: int) -> None:
        if self._life.is_running:
            with suppress(MailboxClosed):
                self._notices.execute(action, description, checkpoint_id, urgent=True)

    @property
    def _served(self) -> SubtaskCheckpoints:
        assert self._checkpoints is not None, "mail runs after open()"
        return self._checkpoints

    def _on_trigger(self, barrier: CheckpointBarrier) -> None:
        if self._network is not None:
            self._network.barriers.trigger(barrier)
        else:
            self._served.trigger(barrier)

    def _on_completed(self, checkpoint_id: int) -> None:
        self._served.completed(checkpoint_id)
        self._parking.resume()

    def _on_aborted(self, checkpoint_id: int, latest_completed: int | None) -> None:
        self._served.aborted(checkpoint_id, latest_completed)
        if self._network is not None:
            self._network.barriers.aborted(checkpoint_id)
        self._parking.resume()
