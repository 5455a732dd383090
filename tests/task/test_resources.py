"""Resources of a job: opened once, told to all who wait, closed in reverse order, each in one
task of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest

import aioflow as af
from aioflow.core.errors import GraphError
from aioflow.task.environment import ResourceScope

LOG: list[Any] = []


@pytest.fixture(autouse=True)
def empty_log() -> None:
    LOG.clear()


@af.resource
async def base() -> AsyncIterator[str]:
    LOG.append(("open base", asyncio.current_task()))
    yield "base"
    LOG.append(("close base", asyncio.current_task()))


@af.resource
async def upper(below: str = af.use(base)) -> AsyncIterator[str]:
    LOG.append(("open upper", asyncio.current_task()))
    yield f"upper on {below}"
    LOG.append(("close upper", asyncio.current_task()))


def steps() -> list[str]:
    return [name for name, _ in LOG]


async def test_a_resource_is_opened_once_and_closed_at_the_end() -> None:
    scope = ResourceScope()
    assert await asyncio.gather(*(scope.get(base) for _ in range(3))) == ["base"] * 3
    assert steps() == ["open base"]
    await scope.close()
    assert steps() == ["open base", "close base"]


async def test_dependency_of_a_resource_opens_before_it_and_closes_after_it() -> None:
    scope = ResourceScope()
    assert await scope.get(upper) == "upper on base"
    await scope.close()
    assert steps() == ["open base", "open upper", "close upper", "close base"]


async def test_each_resource_lives_in_one_task_of_its_own() -> None:
    scope = ResourceScope()
    await scope.get(upper)
    await scope.close()
    tasks = dict(LOG)
    assert tasks["open base"] is tasks["close base"]
    assert tasks["open upper"] is tasks["close upper"]
    assert len({*tasks.values(), asyncio.current_task()}) == 3


async def test_waiter_that_gives_up_does_not_end_the_opening_for_others() -> None:
    go_on = asyncio.Event()

    @af.resource
    async def slow(below: str = af.use(base)) -> AsyncIterator[int]:
        await go_on.wait()
        yield 1

    scope = ResourceScope()
    first, second = asyncio.ensure_future(scope.get(slow)), asyncio.ensure_future(scope.get(slow))
    await asyncio.sleep(0)
    first.cancel()
    go_on.set()
    assert await second == 1
    await scope.close()


async def test_an_opening_that_failed_is_reported_to_all_and_tried_again_by_the_next() -> None:
    tries = []

    @af.resource
    async def flaky() -> AsyncIterator[int]:
        tries.append(1)
        await asyncio.sleep(0)
        if len(tries) == 1:
            raise OSError("refused")
        yield 42

    scope = ResourceScope()
    outcomes = await asyncio.gather(scope.get(flaky), scope.get(flaky), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [OSError, OSError]
    notes = outcomes[0].__notes__  # type: ignore[union-attr]
    assert notes == [f"aioflow: while opening resource {flaky.name!r}"]
    assert await scope.get(flaky) == 42
    await scope.close()


async def test_a_resource_that_still_opens_at_the_end_is_cancelled() -> None:
    opening = asyncio.Event()

    @af.resource
    async def never() -> AsyncIterator[int]:
        try:
            opening.set()
            await asyncio.Event().wait()
            yield 1
        finally:
            LOG.append(("cleaned up", None))

    scope = ResourceScope()
    waiter = asyncio.ensure_future(scope.get(never))
    await opening.wait()
    waiter.cancel()
    await scope.close()
    assert steps() == ["cleaned up"]


async def test_all_are_closed_although_one_fails_and_the_first_error_comes_out() -> None:
    @af.resource
    async def sticky(below: str = af.use(base)) -> AsyncIterator[int]:
        yield 1
        raise OSError("sticky")

    scope = ResourceScope()
    await scope.get(sticky)
    with pytest.raises(OSError, match="sticky"):
        await scope.close()
    assert steps() == ["open base", "close base"]


@af.resource
def plain_generator() -> Iterator[str]:
    yield "plain"
    LOG.append(("closed", None))


@af.resource
@contextmanager
def plain_manager() -> Iterator[str]:
    yield "plain"
    LOG.append(("closed", None))


@af.resource
@asynccontextmanager
async def async_manager() -> AsyncIterator[str]:
    yield "plain"
    LOG.append(("closed", None))


@pytest.mark.parametrize(
    "resource", [plain_generator, plain_manager, async_manager], ids=lambda resource: resource.name
)
async def test_every_accepted_form_is_entered_and_left(resource: Any) -> None:
    scope = ResourceScope()
    assert await scope.get(resource) == "plain"
    await scope.close()
    assert steps() == ["closed"]


async def test_object_that_is_no_resource_is_refused_by_name() -> None:
    @af.resource
    def number() -> Any:
        return 5

    scope = ResourceScope()
    with pytest.raises(GraphError, match="number' gave int"):
        await scope.get(number)
    await scope.close()
