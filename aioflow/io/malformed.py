"""Handles input that cannot be decoded: it fails the job, skips the input, or sends it to a side
output.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import msgspec

from aioflow.core.errors import GraphError, MalformedInput, did_you_mean
from aioflow.core.functions import Failed, OutputTag

if TYPE_CHECKING:
    from aioflow.operators.source import SourceContext

__all__ = ["MALFORMED", "Malformed", "OnError", "checked_on_error"]

OnError = str | OutputTag[Any]
"""Handling of a malformed element: "fail", "skip", or the side output that gets it as `Failed`."""

MALFORMED = (msgspec.MsgspecError, ValueError, RecursionError)
"""Errors of reading a malformed value: msgspec's errors, text of another encoding, numbers that are
too large, and values that are nested too deep."""

logger = logging.getLogger(__name__)


def checked_on_error(on_error: Any, connector: str) -> OnError:
    """Returns `on_error` if it is valid. Raises GraphError naming `connector`."""
    if isinstance(on_error, OutputTag) or (
        isinstance(on_error, str) and on_error in ("fail", "skip")
    ):
        return on_error
    hint = did_you_mean(on_error, ("fail", "skip"))
    raise GraphError(
        f"{connector}: on_error is {on_error!r}, expected 'fail', 'skip' or an OutputTag{hint}"
    )


class Malformed:
    """The handler of the malformed elements of one reader; `on_error` decides what happens to
    them.
    """

    def __init__(self, ctx: SourceContext, on_error: OnError) -> None:
        self._ctx = ctx
        self._on_error = on_error
        self._errors = ctx.runtime.metrics.counter("numRecordsInErrors")
        self.skipped = 0

    @property
    def fails(self) -> bool:
        """Whether `report` raises."""
        return self._on_error == "fail"

    def report(self, value: bytes, message: str, error: Exception) -> None:
        """Reports a malformed element; `message` names the fault and its location.

        Raises MalformedInput if the job is to fail.
        """
        if self._on_error == "fail":
            raise MalformedInput(
                f"{message}. To go on without such input give on_error='skip', or an OutputTag to "
                "collect it"
            ) from error
        self._errors.inc()
        if isinstance(self._on_error, OutputTag):
            runtime = self._ctx.runtime
            operator = getattr(runtime, "operator_name", runtime.task_name)
            self._ctx.side_output(
                self._on_error, Failed(value, message, type(error).__name__, operator, None)
            )
            return
        self.skipped += 1
        if self.skipped == 1:
            logger.warning("skipped malformed input, more is skipped in silence: %s", message)
