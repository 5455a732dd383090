"""Checkpoint messages from the worker as mail: triggers of sources, and notices of the result.

A trigger waits for its turn in the mailbox, unless its barrier overtakes. Notices overtake all
other mail, and reach operators that wait inside their own action. While the task does not run,
triggers are declined and notices dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from aioflow.checkpoint.instructions import CheckpointFailureReason
from aioflow.core.errors import MailboxClosed
from aioflow.mailbox.mailbox import MAX_PRIORITY

if TYPE_CHECKING:
    from aioflow.core.elements import CheckpointBarrier
    from aioflow.mailbox.processor import MailboxProcessor
    from aioflow.task.checkpointing import SubtaskCheckpoints
    from aioflow.task.network_input import NetworkInput

__all__ = ["CheckpointMail"]


class CheckpointMail:
    """`resume()` lets the default action see the effect of a notice."""

    def __init__(
        self,
        checkpoints: SubtaskCheckpoints,
        processor: MailboxProcessor,
        resume: Callable[[], None],
    ) -> None:
        self._checkpoints = checkpoints
        self._executor = processor.executor(-1)
        self._notices = processor.executor(MAX_PRIORITY)
        self._resume = resume
        self._network: NetworkInput | None = None
        self._is_open = self._was_opened = False

    def open(self, network: NetworkInput | None) -> None:
        """The loop begins; `network` is the input from other tasks, if there is one."""
        self._network = network
        self._is_open = self._was_opened = True

    def close(self) -> None:
        """The loop has ended, or never began."""
        self._is_open, self._was_opened = False, True

    def trigger(self, barrier: CheckpointBarrier) -> None:
        """Begins a checkpoint in this task, because no upstream task will send its barrier."""
        if self._is_open:
            with suppress(MailboxClosed):
                # Urgent if it overtakes: the mail in front of it may take as long as the data in
                # flight.
                executor = self._notices if barrier.unaligned else self._executor
                trigger = partial(self._on_trigger, barrier)
                executor.execute(
                    trigger, "checkpoint %d", barrier.checkpoint_id, urgent=barrier.unaligned
                )
                return
        reason = (
            CheckpointFailureReason.TASK_CLOSING
            if self._was_opened
            else CheckpointFailureReason.TASK_NOT_READY
        )
        self._checkpoints.refuse(barrier.checkpoint_id, reason)

    def completed(self, checkpoint_id: int) -> None:
        """The checkpoint and all before it are durable."""
        self._notice(
            partial(self._on_completed, checkpoint_id), "checkpoint %d complete", checkpoint_id
        )

    def aborted(self, checkpoint_id: int, latest_completed: int | None) -> None:
        """The checkpoint will not complete; `latest_completed` did."""
        if not self._is_open:
            self._checkpoints.forgo(checkpoint_id)
        self._notice(
            partial(self._on_aborted, checkpoint_id, latest_completed),
            "checkpoint %d aborted",
            checkpoint_id,
        )

    def urgently(self, action: Callable[[], None], description: str) -> None:
        """Runs `action` before all other mail."""
        with suppress(MailboxClosed):  # The task ends, so there is nothing to overtake.
            self._notices.execute(action, description, urgent=True)

    def _notice(self, action: Callable[[], None], description: str, checkpoint_id: int) -> None:
        if self._is_open:
            with suppress(MailboxClosed):
                self._notices.execute(action, description, checkpoint_id, urgent=True)

    def _on_trigger(self, barrier: CheckpointBarrier) -> None:
        if self._network is not None:
            self._network.barriers.trigger(barrier)
        else:
            self._checkpoints.trigger(barrier)

    def _on_completed(self, checkpoint_id: int) -> None:
        self._checkpoints.completed(checkpoint_id)
        self._resume()

    def _on_aborted(self, checkpoint_id: int, latest_completed: int | None) -> None:
        self._checkpoints.aborted(checkpoint_id, latest_completed)
        if self._network is not None:
            self._network.barriers.aborted(checkpoint_id)
        self._resume()
