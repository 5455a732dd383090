"""User code as the engine sees it: what its errors mean, and which frames belong to it.

asyncio and generators use some exceptions as signals. User code may raise the same classes: it
awaits a future that another party has cancelled, or cancels its own task. It may also call
`future.result()`, or let a StopIteration out. Such an error fails the job by name, like any other.
A CancelledError is a cancellation only in a task that the engine has asked to end (`aio.end_task`).

`Task.cancelling()` does not distinguish the two: it also counts requests of user code. Inside user
code `asyncio.timeout`, task groups and cancel scopes rely on it. Therefore this module never
changes the count while user code runs.

Users see tracebacks without the frames of the engine, which lie between those of the user. The log
has the whole traceback at DEBUG. A traceback of the engine's frames alone stays as it is, except
that of a RestoreError, whose text and causes say all.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import traceback
from types import CodeType, NoneType, TracebackType
from typing import TYPE_CHECKING, Any

from aioflow.core.aio import end_task, is_asked_to_end
from aioflow.core.errors import RestoreError, message_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from aioflow.core.host import Frame

__all__ = [
    "Stack",
    "check_after_conversion",
    "check_own_task",
    "close_user_code",
    "conversion_error",
    "fold_traceback",
    "format_folded",
    "imports_library",
    "place_of",
    "spell_stack",
    "take_back_cancellation",
    "user_error",
    "unfolded",
    "user_frames",
    "whole_traceback",
]

logger = logging.getLogger(__name__)

ENGINE = os.path.dirname(os.path.dirname(__file__)) + os.sep

SIGNALS = (asyncio.CancelledError, StopIteration)


def user_error(error: BaseException) -> BaseException:
    """Returns the error to report for `error`, which user code raised, with its notes.

    Raises `error` itself if it is the cancellation that the engine requested.
    """
    if not isinstance(error, SIGNALS):
        return error
    name = type(error).__name__
    if isinstance(error, asyncio.CancelledError):
        if is_asked_to_end(_running_task()):
            raise error
        told = (
            f"user code raised {name}: it awaited something that had been cancelled, or it "
            "cancelled the task that it ran in"
        )
    else:
        told = f"user code raised {name}, which is no failure it may use"
    wrapped = RuntimeError(told)
    wrapped.__cause__ = error
    for note in getattr(error, "__notes__", ()):
        wrapped.add_note(note)
    return wrapped


def check_own_task() -> None:
    """Raises CancelledError if user code, which has just returned, has cancelled its own task."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # In a thread.
        return
    if (
        task is not None
        # Tasks in C and in Python both have this attribute.
        and task._must_cancel  # type: ignore[attr-defined]
        and not is_asked_to_end(task)
    ):
        raise asyncio.CancelledError


def conversion_error(function: Callable[[Any], Any], error: BaseException) -> RuntimeError:
    """Returns the error to raise for `error` of a function that converts values of a type.

    `function` runs wherever values are encoded or decoded, even outside of the tasks of the job. It
    awaits nothing, so even a CancelledError comes from `function` itself.
    """
    name = getattr(function, "__qualname__", repr(function))
    made = RuntimeError(f"{name} raised {type(error).__name__}: {message_of(error)}")
    made.__cause__ = error
    return made


def check_after_conversion() -> None:
    """Raises RuntimeError if functions that convert values have cancelled the running task."""
    try:
        check_own_task()
    except asyncio.CancelledError as error:
        raise RuntimeError(
            "a function of register_type() cancelled the task that it ran in"
        ) from error


async def take_back_cancellation() -> None:
    """Undoes cancellations of the running task by user code.

    Called when the task is about to end, so that its clean-up is not cut short.
    """
    task = _running_task()
    if task is None or not task.cancelling() or is_asked_to_end(task):
        return
    while task.uncancel():
        pass
    try:
        await asyncio.sleep(0)
    except asyncio.CancelledError:
        if is_asked_to_end(task):
            raise


def close_user_code(task: asyncio.Task[Any]) -> None:
    """Closes the coroutine of user code in which the cancelled `task` still waits, and wakes
    `task`.

    Of the coroutines on the stack, closes the outermost one that does not belong to the engine. So
    the coroutines of the engine unwind as usual. Python raises GeneratorExit where the closed
    coroutine waits, as in every coroutine that is dropped.
    """
    current: Any = task.get_coro()
    while inspect.iscoroutine(current) and current.cr_code.co_filename.startswith(ENGINE):
        current = current.cr_await
    # Used in place of `close`. Before Python 3.13, `close` of a step of an async generator does not
    # reach the generator.
    if hasattr(current, "throw"):
        try:
            current.throw(GeneratorExit())
        except BaseException as error:  # noqa: BLE001  # Usually the GeneratorExit itself.
            logger.debug("%r, when the code of %s was closed", error, task.get_name())
    end_task(task)


def _running_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # In a thread.
        return None


WHOLE = "__aioflow_traceback__"
"""Attribute of an error that holds its traceback before the frames of the engine were removed."""


class _Whole:
    """A holder of a traceback, stored as an attribute of an error. In a copied or pickled error it
    becomes None.
    """

    __slots__ = ("traceback",)

    def __init__(self, whole: TracebackType | None) -> None:
        self.traceback = whole

    def __reduce__(self) -> Any:
        return (NoneType, ())


def fold_traceback(error: BaseException) -> BaseException:
    """Removes the frames of the engine from `error`, which is about to be raised to the user.

    For a RestoreError, also removes such frames from its causes.
    """
    if not isinstance(error, RestoreError):
        return _fold(error, if_none_is_left=False)
    logger.debug("the whole traceback of an error of a restore", exc_info=error)
    for one in _with_causes(error):
        _fold(one, if_none_is_left=True)
    return error


def _fold(error: BaseException, *, if_none_is_left: bool) -> BaseException:
    """Removes the frames of the engine from the traceback of `error`. If no other frames are left,
    does so only with `if_none_is_left`.
    """
    whole = error.__traceback__
    places: list[TracebackType] = []
    current = whole
    while current is not None:
        places.append(current)
        current = current.tb_next
    kept = [place for place in places if not _is_internal(place.tb_frame.f_code.co_filename)]
    if len(kept) == len(places) or not (kept or if_none_is_left):
        return error
    if not if_none_is_left:
        logger.debug("the whole traceback of an error of user code", exc_info=error)
    # Not by setattr, because the class of the error may refuse it.
    if not isinstance(error.__dict__.get(WHOLE), _Whole):
        error.__dict__[WHOLE] = _Whole(whole)
    folded: TracebackType | None = None
    for place in reversed(kept):
        folded = TracebackType(folded, place.tb_frame, place.tb_lasti, place.tb_lineno)
    return error.with_traceback(folded)


def whole_traceback(error: BaseException) -> TracebackType | None:
    """Returns the traceback of `error` with the frames that `fold_traceback` removed."""
    whole = error.__dict__.get(WHOLE)
    return whole.traceback if isinstance(whole, _Whole) else error.__traceback__


def unfolded(error: BaseException) -> BaseException:
    """Gives `error` and its causes their whole tracebacks again."""
    for one in _with_causes(error):
        _ = one.with_traceback(whole_traceback(one))
    return error


def _with_causes(error: BaseException) -> Iterator[BaseException]:
    one: BaseException | None = error
    while one is not None:
        yield one
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)


def format_folded(error: BaseException) -> str:
    """Returns the traceback of `error`, and of its causes, as text without the engine's frames."""
    described = traceback.TracebackException.from_exception(error)
    waiting: list[traceback.TracebackException | None] = [described]
    while waiting:
        one = waiting.pop()
        if one is None:
            continue
        own = [frame for frame in one.stack if not _is_internal(frame.filename)]
        if own:
            one.stack = traceback.StackSummary.from_list(own)
        waiting += [one.__cause__, one.__context__, *(one.exceptions or ())]
    return "".join(described.format())


def _is_internal(file: str) -> bool:
    return file.startswith((ENGINE, "<aioflow"))


FRAMES_MAX = 12
"""Maximum number of frames of user code in a `Stack`; the innermost are kept."""

LIBRARY = os.path.dirname(os.path.dirname(asyncio.__file__)) + os.sep
LOOP_FILES = tuple(
    os.path.join(os.path.dirname(asyncio.__file__), name)
    for name in ("base_events.py", "events.py", "runners.py")
)

Stack = tuple[str, ...]
"""Texts that name stack frames, outermost first."""


def place_of(code: CodeType, line: int) -> str:
    """Returns function, file and line as text.

    Only the last two parts of the path are shown, because the machine's paths are private.
    """
    return spell_place(code.co_qualname, code.co_filename, line)


def spell_place(name: str, file: str, line: int) -> str:
    """Returns a place in code as text."""
    parts = file.replace("\\", "/").rsplit("/", 2)
    return f"{name} ({'/'.join(parts[-2:])}:{line})"


def spell_stack(stack: Stack) -> str:
    """Returns the lines of a stack for a log, innermost last; empty without frames."""
    return "".join(f"\n  at {place}" for place in stack)


def user_frames(frames: Sequence[Frame]) -> tuple[Stack, bool]:
    """Returns the frames of user code, which the engine or the loop has called, outermost first.

    Frames of libraries that user code calls are included. Also returns whether the outermost frame
    is in a file of the user, and not in a library that the engine calls or imports.
    """
    places: list[str] = []
    kept, is_own = 0, False
    for file, line, name in frames:
        if file.startswith((ENGINE, "<aioflow")) or file in LOOP_FILES:
            break
        is_library = file.startswith(LIBRARY) or "site-packages" in file
        is_own = not is_library and not file.startswith("<")
        if not file.startswith("<frozen"):
            places.append(spell_place(name, file, line))
        if is_own or "site-packages" in file:
            kept = len(places)
    return tuple(reversed(places[:kept][:FRAMES_MAX])), is_own


def imports_library(frames: Sequence[Frame]) -> bool:
    """Returns whether the engine imports a library, as a connector does at its first use.

    `frames` begin with the innermost one. The import of a user's module belongs to the user.
    """
    outermost = ""
    for file, _, _ in frames:
        if file.startswith((ENGINE, "<aioflow")) or file in LOOP_FILES:
            return outermost.startswith("<frozen importlib")
        if not file.startswith(("<", LIBRARY)) and "site-packages" not in file:
            return False
        outermost = file
    return False
