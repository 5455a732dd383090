"""The pieces of drawn programs: kinds of records, user functions in every form, a sink that
commits.

Programs import these names, worker processes find them by module, and the model calls the same user
functions. Nothing here is under test; everything is deterministic, and no function keeps anything
outside of its state.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import zlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from datetime import date, datetime
from decimal import Decimal
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import attrs
import msgspec
import pydantic

import aioflow as af
from aioflow import StateTtl as StateTtl


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@dataclasses.dataclass(frozen=True)
class Point:
    x: Any
    y: Any = None


class Names(NamedTuple):
    first: Any
    last: Any = "\u202e\U0001f9ff"


class Struct(msgspec.Struct, frozen=True):
    a: Any
    b: Any = None


class RecordN(NamedTuple):
    key: Any
    n: int
    ts: int
    x: Any


@dataclasses.dataclass(frozen=True)
class RecordD:
    key: Any
    n: int
    ts: int
    x: Any


class RecordS(msgspec.Struct, frozen=True):
    key: Any
    n: int
    ts: int
    x: Any


@attrs.frozen
class RecordA:
    key: Any
    n: int
    ts: int
    x: Any


class RecordP(pydantic.BaseModel, frozen=True):
    key: Any
    n: int
    ts: int
    x: Any


def record_model(key: Any, n: int, ts: int, x: Any) -> RecordP:
    return RecordP(key=key, n=n, ts=ts, x=x)


def record_dict(key: Any, n: int, ts: int, x: Any) -> dict[str, Any]:
    return {"key": key, "n": n, "ts": ts, "x": x}


RECORDS: dict[str, Callable[[Any, int, int, Any], Any]] = {
    "N": RecordN,
    "D": RecordD,
    "S": RecordS,
    "A": RecordA,
    "P": record_model,
    "dict": record_dict,
}
FIELDS = ("key", "n", "ts", "x")
TAG: af.OutputTag[Any] = af.OutputTag("aside")


def plain(value: Any, *, loose: bool = False) -> str:
    """A text that is equal for equal values of equal types.

    `loose`: numbers that are equal are one, and a pair is one with or without names, as keys are.
    """
    inner = partial(plain, loose=loose)
    if (
        loose
        and isinstance(value, bool | int | float | Decimal)
        and math.isfinite(value)
        and value == int(value)
    ):
        return str(int(value))
    if loose and isinstance(value, Decimal) and value == Decimal(float(value)):
        return repr(float(value))
    if isinstance(value, Enum):
        return str(value)
    if loose and isinstance(value, Names):
        return inner(tuple(value))
    if isinstance(value, tuple):
        return f"{type(value).__name__}({', '.join(map(inner, value))})"
    if isinstance(value, list):
        return f"[{', '.join(map(inner, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{inner(k)}: {inner(v)}' for k, v in value.items())}}}"
    if isinstance(value, set | frozenset):
        return f"{type(value).__name__}{{{', '.join(sorted(map(inner, value)))}}}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        values = [getattr(value, f.name) for f in dataclasses.fields(value)]
        return f"{type(value).__name__}({', '.join(map(inner, values))})"
    if isinstance(value, msgspec.Struct):
        return f"{type(value).__name__}({', '.join(map(inner, msgspec.structs.astuple(value)))})"
    if isinstance(value, RecordA | RecordP):
        return f"{type(value).__name__}({', '.join(inner(getattr(value, f)) for f in FIELDS)})"
    return repr(value)


def is_record(value: Any) -> bool:
    if isinstance(value, dict):
        return set(FIELDS) <= set(value)
    return isinstance(value, RecordN | RecordD | RecordS | RecordA | RecordP)


def field_of(value: Any, name: str) -> Any:
    return value[name] if isinstance(value, dict) else getattr(value, name)


class Custom:
    """A generator of watermarks."""

    def __init__(self, delay_ms: int) -> None:
        self.delay_ms = delay_ms

    def on_event(self, value: Any, timestamp: int) -> int:
        return timestamp - self.delay_ms - 1


# Functions of one element.


def row_of_upsert(upsert: af.Upsert[Any]) -> tuple[Any, Any]:
    return upsert.key, upsert.row


def n_of(value: Any) -> int:
    """The number of a record, and of any other value a small one that depends on all of it."""
    if is_record(value):
        n = field_of(value, "n")
        return n if type(n) is int else zlib.crc32(repr(n).encode()) % 97
    return zlib.crc32(plain(value, loose=True).encode("utf-8", "surrogatepass")) % 97


def maybe_n(value: Any) -> int | None:
    return None if n_of(value) % 5 == 0 else n_of(value)


def float_of(value: Any) -> float:
    """Quarters, of which sums are exact."""
    return n_of(value) / 4


def identity(value: Any) -> Any:
    return value


def tagged(value: Any) -> Any:
    return ("t", value)


def doubled(value: Any) -> Any:
    return (value, n_of(value) * 2)


def constant(value: Any) -> Any:
    return "same"


def record_of(value: Any) -> RecordN:
    """A record of anything."""
    n = n_of(value)
    return RecordN(key_of(value), n, n * 10, None if n % 3 else plain(value, loose=True)[:12])


def fragile(value: Any) -> Any:
    if n_of(value) % 4 == 0:
        raise ValueError(f"no {n_of(value)}")
    return ("whole", n_of(value))


def fragile_test(value: Any) -> Any:
    return n_of(value) % 3 if fragile(value) else None


def fragile_rows(value: Any) -> list[Any]:
    return [fragile(value), n_of(value)]


def even(value: Any) -> bool:
    return n_of(value) % 2 == 0


def third(value: Any) -> Any:
    return n_of(value) % 3  # A number, of which Python says whether it is true.


def all_of(value: Any) -> bool:
    return True


def none_of(value: Any) -> Any:
    return None


def twice(value: Any) -> list[Any]:
    return [value, value]


def some(value: Any) -> tuple[Any, ...]:
    return tuple((i, value) for i in range(n_of(value) % 3))


def spread_out(value: Any) -> list[Any]:
    return [n_of(value) + i for i in range(3)]


# Keys.


def may_be_key(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(may_be_key, value))
    return isinstance(value, str | bytes | bool | int | Decimal | datetime | date | Colour) or (
        isinstance(value, float) and value == value
    )


def key_of(value: Any) -> Any:
    key = field_of(value, "key") if is_record(value) else None
    return key if key is not None and may_be_key(key) else n_of(value) % 7


def first_key(value: Any) -> Any:
    """Returns the key of a pair or of a window's result, which is its first part."""
    return (
        value[0] if isinstance(value, tuple) and value and may_be_key(value[0]) else key_of(value)
    )


def small_key(value: Any) -> int:
    return n_of(value) % 3


def const_key(value: Any) -> int:
    return 0


def text_key(value: Any) -> str:
    return f"k{n_of(value) % 11}"


def odd_key(value: Any) -> Any:
    return (
        (n_of(value) % 2, Colour.RED),
        b"\x00",
        date(2024, 2, 29),
        frozenset([1, "a"]),
        Names("a", 1),
        2**70,
        "",
    )[n_of(value) % 7]


def mixed_key(value: Any) -> Any:
    return (True, 1, 1.0, Decimal(1), 0, -0.0, False, "1")[n_of(value) % 8]


Mixed = frozenset({"mixed_key", "odd_key"})
"""Key functions that spell one key in several ways; -0.0 and a NamedTuple are shown as they were
first spelled.
"""


# Functions of several elements.


def bigger(a: Any, b: Any) -> Any:
    """Returns one of the two, by a total order: the same element remains for any order of
    arrival.
    """
    return max(a, b, key=lambda v: (n_of(v), plain(v, loose=True)))


def as_list(values: Sequence[Any]) -> list[Any]:
    return [("b", value) for value in values]


async def as_list_later(values: Sequence[Any]) -> list[Any]:
    await asyncio.sleep(0.001 * (len(values) % 3))
    return as_list(values)


def paired(left: Any, right: Any, ctx: Any = None) -> Any:
    return (n_of(left), n_of(right)) if ctx is None else [(n_of(left), n_of(right), ctx.timestamp)]


def grouped(key: Any, lefts: Sequence[Any], rights: Sequence[Any]) -> list[Any]:
    return [(key, sorted(map(n_of, lefts)), sorted(map(n_of, rights)))]


def window_fn(key: Any, window: Any, value: Any) -> Any:
    return ("w", key, window.start, value)


def gap_of(value: Any) -> int:
    return 20 + 10 * (n_of(value) % 3)


def part_of(value: Any, n: int) -> int:
    return n_of(value) % n


class WindowRows(af.ProcessWindowFunction[Any, Any, Any]):
    """Shows how often its window has fired, which state of the window keeps."""

    def process(self, key: Any, ctx: Any, elements: Sequence[Any]) -> Iterator[Any]:
        firings = ctx.window_state.get_state(FIRINGS)
        firings.update(firings.value() + 1)
        yield key, ctx.window.start, firings.value(), sorted(map(n_of, elements))

    def clear(self, ctx: Any) -> None:
        ctx.window_state.get_state(FIRINGS).clear()


FIRINGS: af.ValueStateDescriptor[int] = af.ValueStateDescriptor("firings", default=0)


class WindowValue(af.ProcessWindowFunction[Any, Any, Any]):
    """Does the same as `window_fn`."""

    def process(self, key: Any, ctx: Any, elements: Sequence[Any]) -> list[Any]:
        (value,) = elements
        return [window_fn(key, ctx.window, value)]


class Extent(af.AggregateFunction[Any, Any, Any]):
    """An aggregate of one's own: the least, the largest and the number."""

    def create_accumulator(self) -> list[int]:
        return []

    def add(self, value: Any, accumulator: list[int]) -> list[int]:
        n = n_of(value)
        return self.merge(accumulator, [n, n, 1])

    def merge(self, a: list[int], b: list[int]) -> list[int]:
        if not a or not b:
            return [*a, *b]
        return [min(a[0], b[0]), max(a[1], b[1]), a[2] + b[2]]

    def get_result(self, accumulator: list[int]) -> tuple[int, ...]:
        return tuple(accumulator)


class OwnCount(af.Trigger[Any]):
    """Does the same as `af.on_count(n)`."""

    SEEN: af.ValueStateDescriptor[int] = af.ValueStateDescriptor("seen", default=0)

    def __init__(self, n: int) -> None:
        self.n = n

    def on_element(self, value: Any, timestamp: Any, window: Any, ctx: Any) -> af.TriggerResult:
        seen = ctx.get_partitioned_state(self.SEEN)
        if seen.value() + 1 < self.n:
            seen.update(seen.value() + 1)
            return af.TriggerResult.CONTINUE
        seen.clear()
        return af.TriggerResult.FIRE

    def clear(self, window: Any, ctx: Any) -> None:
        ctx.get_partitioned_state(self.SEEN).clear()


class OwnLast(af.Evictor[Any]):
    """Does the same as `af.keep_last(n)`."""

    def __init__(self, n: int) -> None:
        self.n = n

    def evict_before(self, elements: list[Any], window: Any, ctx: Any) -> list[Any]:
        return elements[-self.n :]


def window_rows(key: Any, ctx: Any, elements: Sequence[Any]) -> Iterator[Any]:
    yield key, ctx.window.start, len(elements)
    if len(elements) > 1:
        yield key, sorted(map(n_of, elements))


# Forms: one function, written as users write it.


def apply_to(function: Callable[[Any], Any], value: Any) -> Any:
    return function(value)


class Callable1:
    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function

    def __call__(self, value: Any) -> Any:
        return self.function(value)

    def method(self, value: Any) -> Any:
        return self.function(value)


class Mapping(af.MapFunction[Any, Any]):
    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function

    def open(self, ctx: af.RuntimeContext) -> None:
        self.opened = True

    def map(self, value: Any) -> Any:
        assert self.opened
        return self.function(value)


class Filtering(af.FilterFunction[Any]):
    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function

    def filter(self, value: Any) -> Any:
        return self.function(value)


class FlatMapping(af.FlatMapFunction[Any, Any]):
    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function

    async def open(self, ctx: af.RuntimeContext) -> None:
        await asyncio.sleep(0)

    def flat_map(self, value: Any) -> Any:
        yield from self.function(value)


def generating(function: Callable[[Any], Iterable[Any]]) -> Callable[[Any], Iterator[Any]]:
    def generate(value: Any) -> Iterator[Any]:
        yield from function(value)

    return generate


def returning_none(function: Callable[[Any], Iterable[Any]]) -> Callable[[Any], Any]:
    """Gives None instead of nothing."""

    def give(value: Any) -> Any:
        return list(function(value)) or None

    return give


def asynchronous(function: Callable[[Any], Any], pause_ms: int = 0) -> Callable[[Any], Any]:
    async def call(value: Any) -> Any:
        await asyncio.sleep(pause_ms * (n_of(value) % 3) / 1000)
        return function(value)

    return call


def async_iterating(
    function: Callable[[Any], Iterable[Any]],
) -> Callable[[Any], AsyncIterator[Any]]:
    async def generate(value: Any) -> AsyncIterator[Any]:
        for one in function(value):
            await asyncio.sleep(0)
            yield one

    return generate


def overdue(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Every third call never ends."""

    async def call(value: Any) -> Any:
        if n_of(value) % 3 == 0:
            await asyncio.get_running_loop().create_future()
        return function(value)

    return call


@af.resource
async def lent() -> AsyncIterator[list[str]]:
    is_open = ["open"]
    await asyncio.sleep(0)
    yield is_open
    is_open.clear()


def resourced(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def call(value: Any, given: list[str] = af.use(lent)) -> Any:
        assert given == ["open"]
        return function(value)

    return call


def flaky_inline(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Does the same as `flaky`, in a thread."""
    tried: set[str] = set()

    def call(value: Any) -> Any:
        if n_of(value) % 3 == 0 and (text := plain(value)) not in tried:
            tried.add(text)
            raise ConnectionError("once more")
        return function(value)

    return call


def flaky(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The first call for an element fails now and then."""
    tried: set[str] = set()

    async def call(value: Any) -> Any:
        if n_of(value) % 3 == 0 and (text := plain(value)) not in tried:
            tried.add(text)
            raise ConnectionError("once more")
        return function(value)

    return call


__all__ = sorted(
    name for name in globals() if not name.startswith("_")
)  # A program may name anything that is here.
