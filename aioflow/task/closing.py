"""Closing what a task made, whatever happened before: user code last to first, within a time limit; the first error is kept."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from aioflow.core.errors import note_once
from aioflow.operators.stateless import describe_place
from aioflow.task.blame import uncancelled

if TYPE_CHECKING:
    from aioflow.core.scope import Scope
    from aioflow.operators.operator import Operator
    from aioflow.task.source_input import SourceInput

__all__ = ["CLEANUP_TIMEOUT_S", "close_user_code"]

CLEANUP_TIMEOUT_S = 30.0
"""How long closing user functions may take before the task gives up on them."""


async def close_user_code(
    source: SourceInput | None, source_place: str, operators: Sequence[Operator], scope: Scope, errors: list[Exception]
) -> None:
    """Close the reader and the operators, tail first; what fails goes into `errors` and does not keep the others from being closed."""
    if source is not None:
        try:
            await source.close_reader()
        except Exception as error:  # noqa: BLE001  # Closing goes on; raised by the caller.
            note_once(error, f"in close() of {source_place}")
            errors.append(error)
        except asyncio.CancelledError as cancel:
            errors.append(uncancelled(cancel))
    for operator in reversed(operators):
        scope.operator_context = operator.ctx
        try:
            await operator.close()
        except Exception as error:  # noqa: BLE001  # As above.
            note_once(error, f"in close() of {describe_place(operator.ctx)}")
            errors.append(error)
        except asyncio.CancelledError as cancel:
            errors.append(uncancelled(cancel))
            note_once(errors[-1], f"in close() of {describe_place(operator.ctx)}")
