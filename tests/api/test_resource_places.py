"""Resources reach a function wherever it stands: also one that reads, opens, finishes, or stands
in for a call that was too slow.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

import aioflow as af

opened: list[str] = []


@af.resource
def shelf() -> Iterator[list[str]]:
    opened.append("opened")
    yield ["a", "b"]
    opened.append("closed")


def read(books: list[str] = af.use(shelf)) -> Iterator[str]:
    yield from books


async def read_later(books: list[str] = af.use(shelf)) -> AsyncIterator[str]:
    for book in books:
        yield book


def read_from(position: int | None, books: list[str] = af.use(shelf)) -> Iterator[tuple[str, int]]:
    for number in range(position or 0, len(books)):
        yield books[number], number + 1


async def ask(books: list[str] = af.use(shelf)) -> list[str]:
    return books


class Opens(af.FlatMapFunction[int, str]):
    def open(self, ctx: af.RuntimeContext, books: list[str] = af.use(shelf)) -> None:
        self.books = books

    def flat_map(self, value: int) -> list[str]:
        return self.books


class Finishes(af.ProcessFunction[int, str]):
    def process_element(self, value: int, ctx: af.ProcessContext) -> None:
        """Nothing before the end."""

    def finish(self, books: list[str] = af.use(shelf)) -> list[str]:
        return books


class FinishesLater(Finishes):
    async def finish(self, books: list[str] = af.use(shelf)) -> list[str]:  # type: ignore[override]
        return books


async def never(value: int) -> list[str]:
    await asyncio.Event().wait()
    return []


def instead(value: int, books: list[str] = af.use(shelf)) -> list[str]:
    return books


PLACES: dict[str, Callable[[af.Flow], af.DataStream[Any]]] = {
    "a source function": lambda flow: flow.source(read),
    "an async source function": lambda flow: flow.source(read_later),
    "a source function with positions": lambda flow: flow.source(read_from),
    "a source function that is awaited": lambda flow: flow.source(ask),
    "open": lambda flow: flow.source([1]).flat_map(Opens),
    "finish": lambda flow: flow.source([1]).process(Finishes),
    "finish, awaited": lambda flow: flow.source([1]).process(FinishesLater),
    "on_timeout": lambda flow: flow.source([1]).flat_map(never, timeout="1ms", on_timeout=instead),
}


@pytest.mark.parametrize("place", PLACES)
async def test_a_resource_is_opened_given_and_closed(place: str) -> None:
    opened.clear()
    assert await PLACES[place](af.Flow("library")).collect() == ["a", "b"]
    assert opened == ["opened", "closed"]
