"""State that cannot be written ends the job by name, with operator, state and key, and no
restart is tried.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

import aioflow as af
from aioflow.core.errors import TypeNotSupported


def cyclic() -> Any:
    value: list[Any] = []
    value.append(value)
    return value


def cyclic_dict() -> Any:
    value: dict[str, Any] = {}
    value["me"] = [value]
    return value


def deep() -> Any:
    value: list[Any] = []
    for _ in range(1_000):
        value = [value]
    return value


class Refuses:
    """A type whose registered serializer raises."""


class Uncopyable:
    def __deepcopy__(self, memo: Any) -> Any:
        raise OSError("it holds a socket")


def _refuse(value: Refuses) -> Any:
    raise ValueError("of no use")


af.register_type(Refuses, encode=_refuse, decode=lambda fields: Refuses())

ALWAYS = af.exponential_delay("1ms", "2ms", fatal=(AttributeError,))
"""Options of a run that would never end, except for mistakes of the test itself."""

VALUES: dict[str, Callable[[], Any]] = {
    "a list in itself": cyclic,
    "a dict in itself": cyclic_dict,
    "a thousand levels": deep,
    "a function": lambda: len,
    "a serializer that raises": Refuses,
    "a copy that raises": Uncopyable,
}


class Keeps(af.KeyedProcessFunction[int, int, int]):
    """Keeps such a value from record 60 on, and uses it again with each record, so that
    snapshots have to copy it.
    """

    def __init__(self, make: Callable[[], Any], kind: str) -> None:
        self._make = make
        self._kind = kind
        self._made = 0

    def open(self, ctx: af.RuntimeContext) -> None:
        get = {"value": ctx.get_state, "list": ctx.get_list_state, "map": ctx.get_map_state}[
            self._kind
        ]
        descriptor = {
            "value": af.ValueStateDescriptor,
            "list": af.ListStateDescriptor,
            "map": af.MapStateDescriptor,
        }[self._kind]
        self._state: Any = get(descriptor("mine"))  # type: ignore[operator]

    def process_element(self, n: int, ctx: Any) -> None:
        if n < 60:
            value = [n]
        elif n % 2:
            value = self._make()
        else:
            value = {"n": n}
        match self._kind:
            case "value":
                _ = self._state.value
                self._state.update(value)
            case "list":
                self._state.get()
                self._state.update([value])
            case _:
                self._state.get("k")
                self._state.put("k", value)


async def numbers(position: Any) -> AsyncIterator[tuple[int, int]]:
    n = position or 0
    while True:
        yield n, n + 1
        n += 1
        await asyncio.sleep(0)


@pytest.mark.parametrize("backend", ["heap", "rocksdb"])
@pytest.mark.parametrize("kind", ["value", "list", "map"])
@pytest.mark.parametrize("name", VALUES)
async def test_keyed_state_that_cannot_be_written_ends_the_job_by_name(
    name: str, kind: str, backend: str, request: pytest.FixtureRequest
) -> None:
    flow = af.Flow("kept")
    flow.source(numbers, uid="numbers").key_by(lambda n: f"key-{n % 2}").process(
        Keeps(VALUES[name], kind), uid="keeps"
    ).sink(af.io.blackhole())
    options: dict[str, Any] = {"every": "20ms", "state": backend, "restart": ALWAYS}
    async with asyncio.timeout(30):
        with pytest.raises((af.CheckpointError, TypeNotSupported)) as raised:
            await flow.execute(checkpoints=f"memory://{request.node.name}", **options)
    message = str(raised.value)
    assert "operator 'process(Keeps)', state 'mine', key " in message
    assert "key-1" in message


class Counts(af.MapFunction[int, int], af.CheckpointedFunction):
    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    def initialize_state(self, ctx: Any) -> None:
        self._kept = ctx.operator_state.get_list_state("kept")

    def snapshot_state(self, ctx: Any) -> None:
        self._kept.update([self._make()])

    def map(self, n: int) -> int:
        return n


@pytest.mark.parametrize("name", VALUES)
async def test_operator_state_that_cannot_be_written_ends_the_job_by_name(
    name: str, request: pytest.FixtureRequest
) -> None:
    flow = af.Flow("kept")
    flow.source(numbers, uid="numbers").map(Counts(VALUES[name]), uid="counts").sink(
        af.io.blackhole()
    )
    async with asyncio.timeout(30):
        with pytest.raises(
            (af.CheckpointError, TypeNotSupported),
            match=r"operator 'counts', operator state 'kept'",
        ):
            await flow.execute(
                checkpoints=f"memory://{request.node.name}", every="20ms", restart=ALWAYS
            )


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("checkpoints", [False, True])
async def test_type_not_supported_out_of_user_code_is_tried_again(
    workers: int, checkpoints: bool, tmp_path: Path
) -> None:
    """The engine's own error is final. The same class out of user code is an error of user code."""
    seen = tmp_path / "seen"

    def flaky(n: int) -> int:
        if n == 3 and not seen.exists():
            seen.touch()
            raise af.TypeNotSupported("a service was not ready")
        return n

    flow = af.Flow("user's own")
    out: list[int] = []
    flow.source(range(6)).map(flaky).sink(out.append)
    store = {"checkpoints": tmp_path / "store"} if checkpoints else {}
    await flow.execute(workers=workers, restart=af.fixed_delay(1, "1ms"), **store)
    assert set(out) == set(range(6))
