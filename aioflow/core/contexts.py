"""Context managers made from generators, like those of `contextlib`, for blocks in which user code
may raise.

The invariant: an error of the block passes through, and none of the error's attributes is assigned.
`contextlib` assigns `__traceback__`, which raises another error if the error's class is a frozen
dataclass.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

__all__ = ["asynccontextmanager", "contextmanager"]

P = ParamSpec("P")
T = TypeVar("T")


class _Manager(AbstractContextManager[T]):
    def __init__(self, generator: Any) -> None:
        self._generator = generator

    def __enter__(self) -> T:
        return next(self._generator)  # type: ignore[no-any-return]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        place: TracebackType | None,
    ) -> bool:
        if error is None:
            next(self._generator, None)
            return False
        try:
            self._generator.throw(error)
        except StopIteration:
            return True
        except BaseException as raised:
            if _is_same(raised, error, place):
                return False
            raise
        raise RuntimeError("the generator of a context manager has not ended")


class _AsyncManager(AbstractAsyncContextManager[T]):
    def __init__(self, generator: Any) -> None:
        self._generator = generator

    async def __aenter__(self) -> T:
        return await anext(self._generator)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        place: TracebackType | None,
    ) -> bool:
        if error is None:
            await anext(self._generator, None)
            return False
        if isinstance(error, GeneratorExit):
            # A loop that ends closes all generators, in any order.
            await self._generator.aclose()
            return False
        try:
            await self._generator.athrow(error)
        except StopAsyncIteration:
            return True
        except BaseException as raised:
            if _is_same(raised, error, place):
                return False
            raise
        raise RuntimeError("the generator of a context manager has not ended")


def _is_same(raised: BaseException, error: BaseException, place: TracebackType | None) -> bool:
    """Returns whether a generator has let `error` through. If so, removes the generator's frames
    from the traceback of `error`.
    """
    is_signal = isinstance(error, (StopIteration, StopAsyncIteration))
    if raised is error or (is_signal and raised.__cause__ is error):
        BaseException.with_traceback(error, place)
        return True
    return False


def contextmanager(function: Callable[P, Iterator[T]]) -> Callable[P, AbstractContextManager[T]]:
    """Converts a function that returns a generator to a function that returns a context manager."""

    @functools.wraps(function)
    def make(*args: P.args, **kwargs: P.kwargs) -> AbstractContextManager[T]:
        return _Manager(function(*args, **kwargs))

    return make


def asynccontextmanager(
    function: Callable[P, AsyncIterator[T]],
) -> Callable[P, AbstractAsyncContextManager[T]]:
    """Converts a function that returns an async generator to a function that returns an async
    context manager.
    """

    @functools.wraps(function)
    def make(*args: P.args, **kwargs: P.kwargs) -> AbstractAsyncContextManager[T]:
        return _AsyncManager(function(*args, **kwargs))

    return make
