"""Context managers from generators: as those of contextlib, but no attribute of an error is set."""

from __future__ import annotations

import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from aioflow.core.contexts import asynccontextmanager, contextmanager


@dataclass(frozen=True)
class Frozen(Exception):
    code: int


def managers(body: Callable[[BaseException | None], None]) -> tuple[Any, Any]:
    @contextmanager
    def plain() -> Iterator[str]:
        error = None
        try:
            yield "made"
        except BaseException as raised:
            error = raised
            body(raised)
        if error is None:
            body(None)

    @asynccontextmanager
    async def coroutine() -> AsyncIterator[str]:
        with plain() as made:
            yield made

    return plain, coroutine


async def raise_in_both(error: BaseException, body: Callable[[BaseException | None], None]) -> None:
    plain, coroutine = managers(body)
    with plain() as made:
        assert made == "made"
        raise error
    async with coroutine() as made:
        assert made == "made"
        raise error


def raise_again(error: BaseException | None) -> None:
    if error is not None:
        raise error


@pytest.mark.parametrize("error", [Frozen(1), StopIteration(2), StopAsyncIteration(), KeyError(3)])
async def test_an_error_passes_as_it_is(error: BaseException) -> None:
    plain, coroutine = managers(raise_again)
    with pytest.raises(type(error)) as caught, plain():
        raise error
    assert caught.value is error
    frames = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    assert frames[-1] == "test_an_error_passes_as_it_is"
    assert "raise_again" not in frames
    with pytest.raises(type(error)) as caught:
        async with coroutine():
            raise error
    assert caught.value is error


async def test_the_generator_may_swallow_and_replace_errors() -> None:
    def replace(error: BaseException | None) -> None:
        raise ValueError("instead")

    await raise_in_both(Frozen(1), lambda error: None)
    with pytest.raises(ValueError, match="instead") as caught:
        await raise_in_both(Frozen(1), replace)
    assert isinstance(caught.value.__context__, Frozen)


async def test_the_generator_goes_on_after_the_block() -> None:
    seen: list[BaseException | None] = []
    plain, coroutine = managers(seen.append)
    with plain():
        pass
    async with coroutine():
        pass
    assert seen == [None, None]


async def test_a_loop_that_ends_closes_generators_in_any_order() -> None:
    async def generate() -> AsyncIterator[str]:
        yield "made"

    generator: Any = generate()
    manager = asynccontextmanager(lambda: generator)()
    await manager.__aenter__()
    await generator.aclose()
    assert not await manager.__aexit__(GeneratorExit, GeneratorExit(), None)
