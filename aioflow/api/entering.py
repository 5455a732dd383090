"""The result of `flow.run()`: a run that begins when `async with` enters it.

Any other use raises an error that says so.
"""

from __future__ import annotations

import warnings
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Never

from aioflow.advice.hints import no_such_method
from aioflow.api.job import Job

__all__ = ["Entering"]

WITHOUT_ASYNC = (
    "is entered by `async with flow.run() as job`, in an `async def`; a program without a loop of "
    "its own calls af.run(flow)"
)
AWAITED = (
    "is entered, not awaited: `async with flow.run() as job`; to wait for the end of the flow "
    "`await flow.execute()`"
)
NO_JOB = (
    "has no attribute {name!r}: it is no job before it is entered; write `async with flow.run() "
    "as job:` and job.{name} in its block, or `await flow.execute()`, which runs to the end"
)
NEVER_ENTERED = (
    "was never entered, so nothing ran: `async with flow.run() as job`, or `await flow.execute()`"
)


class Entering(AbstractAsyncContextManager[Job]):
    """A run of `flow` that has not begun. It can be entered once."""

    _is_told = True
    """Whether the run was entered, or an error has already explained the wrong use."""

    def __init__(self, flow: str, running: AbstractAsyncContextManager[Job]) -> None:
        self._flow = flow
        self._running = running
        self._is_told = False

    def __repr__(self) -> str:
        state = "entered" if self._is_told else "not entered: async with flow.run() as job"
        return f"<run of flow {self._flow!r}, {state}>"

    async def __aenter__(self) -> Job:
        self._is_told = True
        return await self._running.__aenter__()

    async def __aexit__(self, *exc_info: Any) -> bool | None:
        return await self._running.__aexit__(*exc_info)

    def _tell(self, text: str) -> str:
        self._is_told = True
        return f"flow.run() of {self._flow!r} {text}"

    def __enter__(self) -> Never:
        raise TypeError(self._tell(WITHOUT_ASYNC))

    def __exit__(self, *exc_info: object) -> None:
        """Does nothing. Without this method, `with` would not call `__enter__`."""

    def __await__(self) -> Any:
        raise TypeError(self._tell(AWAITED))

    if not TYPE_CHECKING:  # Hidden from type checkers, which know all real methods.

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_"):  # Copying, pickling and introspection ask for these.
                raise no_such_method(self, name)
            raise AttributeError(self._tell(NO_JOB.format(name=name)), name=None, obj=None)

    def __del__(self) -> None:
        if not self._is_told:
            warnings.warn(self._tell(NEVER_ENTERED), RuntimeWarning, stacklevel=1, source=self)
