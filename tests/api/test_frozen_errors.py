"""Errors whose class is a frozen dataclass arrive as they are, with the notes of the engine."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import pytest

import aioflow as af


@dataclass(frozen=True)
class Rejected(Exception):
    code: int


def reject(value: Any) -> Any:
    raise Rejected(value)


async def reject_later(value: Any) -> Any:
    raise Rejected(value)


async def one_then_reject() -> AsyncIterator[int]:
    yield 1
    raise Rejected(3)


@pytest.mark.parametrize(
    ("build", "place"),
    [
        (lambda s: s.map(reject).sink(print), "in operator 'map(reject)'"),
        (lambda s: s.map(reject_later).sink(print), "in operator 'map(reject_later)'"),
        (lambda s: s.key_by(reject).map(str).sink(print), "in key_by"),
        (lambda s: s.sink(reject), "in operator 'reject'"),
    ],
)
async def test_a_frozen_error_of_user_code_is_raised_itself(
    build: Callable[[Any], None], place: str
) -> None:
    flow = af.Flow("fails")
    build(flow.source([3]))
    with pytest.raises(Rejected) as caught:
        await flow.execute()
    assert caught.value == Rejected(3)
    assert place in caught.value.__notes__[0]


async def test_a_frozen_error_of_a_source_is_raised_itself() -> None:
    flow = af.Flow("fails")
    flow.source(one_then_reject).sink(lambda value: None)
    with pytest.raises(Rejected) as caught:
        await flow.execute()
    assert "in source 'one_then_reject'" in caught.value.__notes__[0]


async def test_a_frozen_error_counts_the_tries_and_is_retried() -> None:
    flow = af.Flow("fails")
    flow.source([3]).map(reject_later, retry=af.Retry(2, backoff="1ms")).sink(print)
    with pytest.raises(Rejected) as caught:
        await flow.execute()
    assert any("after 2 tries" in note for note in caught.value.__notes__)


async def test_a_frozen_error_in_the_block_of_a_run_passes() -> None:
    flow = af.Flow("runs")
    flow.source([1]).sink(lambda value: None)
    with pytest.raises(Rejected):
        async with flow.run():
            raise Rejected(4)


PROGRAM = """
import aioflow as af
from tests.api.test_frozen_errors import Rejected, reject

flow = af.Flow("program")
flow.source([5]).map(reject).sink(print)
try:
    af.run(flow)
except Rejected as error:
    print("rejected", error.code)
"""


def test_a_frozen_error_passes_through_af_run() -> None:
    """In a process of its own: uvloop keeps descriptors."""
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout == "rejected 5\n", done.stderr


async def test_a_frozen_error_passes_through_a_resource() -> None:
    @af.resource
    async def client() -> AsyncIterator[int]:
        yield 1

    async def ask(value: int, number: int = af.use(client)) -> int:
        raise Rejected(value)

    flow = af.Flow("resource")
    flow.source([6]).map(ask).sink(print)
    with pytest.raises(Rejected) as caught:
        await flow.execute()
    assert caught.value.code == 6
