"""Keys that are equal are one key; the key group of a key never changes."""

from __future__ import annotations

import enum
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from itertools import pairwise
from typing import Any, NamedTuple
from uuid import UUID
from zoneinfo import ZoneInfo

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from aioflow.core.errors import GraphError, TypeNotSupported
from aioflow.core.keygroups import (
    CACHED_MIN,
    SAMPLED,
    KeyGroupRange,
    KeyNotSupported,
    SubtaskCache,
    canonical_key,
    key_group,
    key_groups,
    range_for_subtask,
    subtask_for_group,
)

BERLIN = ZoneInfo("Europe/Berlin")


class Point(NamedTuple):
    x: Any
    y: Any


class Number(enum.IntEnum):
    ONE = 1


class Colour(enum.Enum):
    RED = "red"
    CRIMSON = "red"  # noqa: PIE796 - an alias is the case.
    BLUE = "blue"


class Text(enum.StrEnum):
    RED = "red"


class Flags(enum.Flag):
    A = 1
    B = 2


@dataclass(frozen=True)
class Account:
    bank: str
    number: Any
    label: str = field(default="", compare=False)


@dataclass(frozen=True)
class OtherAccount:
    bank: str
    number: Any


@dataclass
class Mutable:
    x: int

    __hash__ = object.__hash__


@dataclass(frozen=True, eq=False)
class ByIdentity:
    x: int


@dataclass(frozen=True)
class OwnEquality:
    x: str

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OwnEquality) and self.x.lower() == other.x.lower()

    def __hash__(self) -> int:
        return hash(self.x.lower())


class Caseless(str):
    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and self.lower() == other.lower()

    def __hash__(self) -> int:
        return hash(self.lower())


# A promise of the savepoint format: these lines never change.
GOLDEN: list[tuple[Any, str, int, int]] = [
    ("", "73", 11, 20235),
    ((None,), "74000000016e", 106, 4970),
    ((1, None), "74000000026901000000016e", 20, 23572),
    ("hello", "7368656c6c6f", 87, 3927),
    ("ünï", "73c3bc6ec3af", 59, 24891),
    (b"hello", "6268656c6c6f", 105, 24169),
    (0, "6900", 17, 16913),
    (1, "6901", 7, 29319),
    (-1, "69ff", 28, 11676),
    (128, "690080", 29, 10909),
    (2**70, "69400000000000000000", 75, 17611),
    (-(2**70), "69c00000000000000000", 4, 17540),
    (1.5, "663ff8000000000000", 111, 23023),
    (float("inf"), "667ff0000000000000", 101, 21861),
    (Decimal("0.5"), "663fe0000000000000", 70, 2886),
    (Decimal("0.1"), "7131652d31", 56, 29368),
    (("a", 1), "74000000027361000000026901", 34, 7458),
    (frozenset({1, 2, 3}), "7a000000026901000000026902000000026903", 85, 15445),
    (date(2024, 2, 29), "44690b4681", 73, 1481),
    (datetime(2024, 2, 29, 12), "4e69061283ffaff000", 82, 22098),
    (datetime(2024, 2, 29, 12, tzinfo=UTC), "5469061283ffaff000", 61, 7869),
    (timedelta(seconds=1.5), "646916e360", 44, 172),
    (UUID(int=7), "7500000000000000000000000000000007", 97, 18145),
    (((1, (2,)), "x"), "7400000012740000000269010000000774000000026902000000027378", 68, 4804),
]


@pytest.mark.parametrize(("key", "canonical", "group_of_128", "group_of_32768"), GOLDEN)
def test_canonical_bytes_and_key_groups_are_the_promised_ones(
    key: Any, canonical: str, group_of_128: int, group_of_32768: int
) -> None:
    assert canonical_key(key).hex() == canonical
    assert (key_group(key, 128), key_group(key, 32768)) == (group_of_128, group_of_32768)


@pytest.mark.parametrize(
    "keys",
    [
        (1, 1.0, True, Decimal(1), Decimal("1.00"), Decimal("1E0"), Number.ONE),
        (0, -0.0, 0.0, False, Decimal("-0.000"), Decimal("0E+999999")),
        (0.5, Decimal("0.5"), Decimal("0.50000")),
        (float("inf"), Decimal("Infinity")),
        (float("-inf"), Decimal("-Infinity")),
        (10**30, Decimal("1E30"), Decimal(10**30)),
        (2**200, float(2**200), Decimal(2**200)),
        (Decimal("0.1"), Decimal("0.10")),
        (0.1, Decimal.from_float(0.1)),
        ("red", Text.RED),
        (Colour.RED, Colour.CRIMSON),
        (Flags.A | Flags.B, Flags.B | Flags.A),
        ((1, "a"), Point(True, "a"), (1.0, "a")),
        (frozenset({1, 2}), frozenset({2.0, True})),
        (Account("b", 1, "x"), Account("b", 1.0, "y")),
        (
            datetime(2024, 7, 1, 12, tzinfo=UTC),
            datetime(2024, 7, 1, 14, tzinfo=BERLIN),
            datetime(2024, 7, 1, 9, tzinfo=timezone(timedelta(hours=-3))),
        ),
        (
            datetime(2024, 10, 27, 2, 30, tzinfo=BERLIN),
            datetime(2024, 10, 27, 2, 30, tzinfo=BERLIN, fold=1),
        ),
        (datetime(2024, 7, 1), datetime(2024, 7, 1, fold=1)),
        (timedelta(days=1), timedelta(hours=24)),
    ],
)
def test_keys_that_are_equal_in_python_are_one_key(keys: tuple[Any, ...]) -> None:
    for left, right in pairwise(keys):
        assert left == right
        assert hash(left) == hash(right)
        assert canonical_key(left) == canonical_key(right)


def test_keys_that_differ_in_python_have_different_bytes() -> None:
    keys = [
        *(
            "1",
            b"1",
            1,
            1.5,
            Decimal("0.1"),
            0.1,
            2**53,
            2**53 + 1,
            128,
            -128,
            255,
            -1,
            256,
            "",
            b"",
            (),
            frozenset(),
        ),
        *(
            (1,),
            ((1,),),
            (1, 2),
            ("1", "2"),
            ("12",),
            ("1", ("2",)),
            frozenset({1}),
            frozenset({(1,)}),
        ),
        *(
            datetime(2024, 7, 1),
            datetime(2024, 7, 1, tzinfo=UTC),
            date(2024, 7, 1),
            timedelta(1),
            UUID(int=1),
        ),
        *(
            Colour.RED,
            Colour.BLUE,
            "red",
            Flags.A,
            Flags.A | Flags.B,
            Account("b", 1),
            OtherAccount("b", 1),
            ("b", 1),
        ),
        *(
            "\ud800\udc00",
            "\U00010000",
            float("inf"),
            float("-inf"),
            Decimal("1E-400"),
            Decimal("-1E-400"),
        ),
    ]
    assert len(set(keys)) == len(keys)
    assert len({canonical_key(key) for key in keys}) == len(keys)


numbers = st.one_of(
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.decimals(allow_nan=False),
    st.fractions(max_denominator=64).map(float),
)


def spellings(key: Any) -> Iterator[Any]:
    """Other values that may equal `key`."""
    match key:
        case bool() | int():
            yield from (int(key), Decimal(key))
            if abs(key) < 2**1000:
                yield float(key)
            if key in (0, 1):
                yield bool(key)
        case float():
            yield Decimal(key)
            if key.is_integer():
                yield int(key)
        case Decimal():
            yield key.copy_abs() * (-1 if key.is_signed() else 1)
            yield float(key) if key.is_infinite() or abs(key.adjusted()) < 300 else key
            if key.is_finite() and abs(key.adjusted()) < 300:
                yield Fraction(key).numerator
        case tuple():
            for index, part in enumerate(key):
                for other in spellings(part):
                    yield (*key[:index], other, *key[index + 1 :])
            if len(key) == 2:
                yield Point(*key)
        case frozenset():
            for part in key:
                for other in spellings(part):
                    yield (key - {part}) | {other}
        case datetime():
            yield key.replace(fold=1 - key.fold)
            if key.tzinfo and 1 < key.year < 9999:
                yield key.astimezone(BERLIN)
                yield key.astimezone(timezone(timedelta(hours=5, minutes=45)))


keys = st.recursive(
    st.one_of(
        *(numbers, st.text(), st.binary(), st.dates(), st.datetimes(), st.timedeltas(), st.uuids()),
        st.datetimes(timezones=st.sampled_from([UTC, BERLIN, ZoneInfo("America/New_York")])),
        st.sampled_from([Number.ONE, Text.RED, Colour.RED, Flags.A]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(tuple),
        st.frozensets(inner, max_size=3),
        st.builds(Account, st.text(max_size=2), inner, st.text(max_size=2)),
        st.builds(Point, inner, inner),
    ),
    max_leaves=6,
)


@given(keys)
def test_every_equal_spelling_has_the_same_canonical_bytes(key: Any) -> None:
    try:
        canonical = canonical_key(key)
    except KeyNotSupported:
        assert "digits" in _why(key)
        return
    for other in spellings(key):
        if other == key:
            assert canonical_key(other) == canonical, (key, other)


@given(numbers, numbers)
def test_numbers_have_the_same_bytes_exactly_when_they_are_equal(left: Any, right: Any) -> None:
    assume(
        all(
            not isinstance(number, Decimal) or number.is_infinite() or number.adjusted() < 9_000
            for number in (left, right)
        )
    )
    assert (canonical_key(left) == canonical_key(right)) == (left == right)


def _why(key: Any) -> str:
    with pytest.raises(KeyNotSupported) as caught:
        canonical_key(key)
    return str(caught.value)


@pytest.mark.parametrize(
    ("key", "remedy"),
    [
        (None, "filter"),
        (frozenset({None}), "filter"),
        (float("nan"), "NaN"),
        (Decimal("NaN"), "NaN"),
        (Decimal("sNaN"), "NaN"),
        ((1, (float("nan"),)), "NaN"),
        (frozenset({float("nan")}), "NaN"),
        ([1], "tuple"),
        ((1, [2]), "tuple"),
        ({"a": 1}, "not hashable"),
        ({1}, "frozenset"),
        (bytearray(b"a"), "not hashable"),
        (Mutable(1), "frozen=True"),
        (ByIdentity(1), "frozen=True"),
        (OwnEquality("a"), "__eq__ of its own"),
        (Caseless("a"), "allowed are"),
        (object(), "allowed are"),
        (1j, "complex"),
        (Fraction(1, 2), "Fraction"),
        (time(12), "datetime.time"),
        (Decimal("1E+999999999"), "digits"),
    ],
)
def test_value_that_cannot_be_a_key_is_refused_with_a_remedy(key: Any, remedy: str) -> None:
    """H3.5: a null key is an error, and so is every value whose equality is not ours to judge."""
    assert remedy in _why(key)
    assert issubclass(KeyNotSupported, TypeNotSupported)


def test_a_numpy_scalar_is_refused_with_its_remedy() -> None:
    numpy = pytest.importorskip("numpy")
    for key in (numpy.int64(1), numpy.float64(1.5), numpy.str_("a")):
        assert ".item()" in _why(key)
        assert canonical_key(key.item())


def test_a_key_nested_too_deeply_is_refused() -> None:
    key: Any = ()
    for _ in range(100_000):
        key = (key,)
    assert "nested" in _why(key)
    while key:  # Taken apart by hand: the interpreter would recurse to free it.
        (key,) = key


def test_canonical_bytes_do_not_depend_on_the_hash_seed() -> None:
    program = (
        "from aioflow.core.keygroups import canonical_key as c\n"
        "print(c(frozenset({'a', 'b', 'c', ('d', 1.0)})).hex(), c(('x', frozenset('hello'))).hex())"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for seed in ("0", "1", "4242")
    }
    assert len(outputs) == 1


@pytest.mark.parametrize(
    ("parallelism", "ranges"),
    [
        (3, "0-42 43-85 86-127"),
        (5, "0-25 26-51 52-76 77-102 103-127"),
    ],
)
def test_ranges_of_128_key_groups_are_those_of_flink(parallelism: int, ranges: str) -> None:
    """H3.1."""
    assert (
        " ".join(str(range_for_subtask(i, parallelism, 128)) for i in range(parallelism)) == ranges
    )


@given(st.integers(1, 500).flatmap(lambda m: st.tuples(st.just(m), st.integers(1, m))))
def test_every_key_group_is_in_the_range_of_exactly_its_subtask(sizes: tuple[int, int]) -> None:
    """H3.1."""
    max_parallelism, parallelism = sizes
    owners = [
        (group, index)
        for index in range(parallelism)
        for group in range_for_subtask(index, parallelism, max_parallelism)
    ]
    assert [group for group, _ in owners] == list(range(max_parallelism))
    assert all(
        subtask_for_group(group, parallelism, max_parallelism) == index for group, index in owners
    )


def test_a_parallelism_above_max_parallelism_is_refused() -> None:
    with pytest.raises(GraphError, match="fixed for the life of the state"):
        range_for_subtask(0, 129, 128)
    with pytest.raises(GraphError, match="max_parallelism is 32769"):
        range_for_subtask(0, 1, 32769)
    with pytest.raises(ValueError, match="expected 0 to 2"):
        range_for_subtask(3, 3, 128)


def test_a_range_holds_its_ends_and_intersects() -> None:
    groups = KeyGroupRange(3, 5)
    assert list(groups) == [3, 4, 5]
    assert len(groups) == 3
    assert 5 in groups
    assert 6 not in groups
    assert groups.intersection(KeyGroupRange(5, 9)) == KeyGroupRange(5, 5)
    assert groups.intersection(KeyGroupRange(6, 9)) is None
    with pytest.raises(ValueError, match="expected 0 <= start <= end"):
        KeyGroupRange(4, 3)


@given(st.lists(keys, max_size=20))
def test_the_subtask_cache_agrees_with_the_key_group(some: list[Any]) -> None:
    cache = SubtaskCache(3, 128)
    for key in some:
        try:
            assert cache[key] == subtask_for_group(key_group(key, 128), 3, 128)
        except KeyNotSupported:
            assert key not in cache.known


def test_the_subtask_cache_is_bounded() -> None:
    cache = SubtaskCache(4, 128, limit=10)
    answers = [cache[key] for key in range(100)]
    assert len(cache.known) <= 10
    assert answers == [cache[key] for key in range(100)]


def test_keys_that_come_once_and_go_fill_no_more_than_the_least_cache() -> None:
    """A partitioner of a service that runs for days sees ever new keys."""
    cache = SubtaskCache(4, 128)
    most = 0
    for key in range(8 * CACHED_MIN):
        assert cache[key] == subtask_for_group(key_group(key, 128), 4, 128)
        most = max(most, len(cache.known))
    assert most == CACHED_MIN
    assert len(cache._sample) <= 8 * CACHED_MIN // SAMPLED * 2


def test_a_cache_grows_until_all_keys_that_come_again_are_in_it() -> None:
    cache, keys = SubtaskCache(4, 128), 4 * CACHED_MIN
    for _ in range(6):
        for key in range(keys):
            cache[key]
    assert len(cache.known) == keys
    for key in range(keys, 20 * CACHED_MIN):  # They are gone, and others come once each.
        cache[key]
    assert len(cache.known) <= CACHED_MIN


def test_the_subtask_cache_refuses_what_cannot_be_a_key_each_time() -> None:
    cache = SubtaskCache(4, 128)
    for _ in range(2):
        with pytest.raises(KeyNotSupported):
            cache[None]
    assert not cache.known


@given(
    st.lists(st.text(max_size=5) | st.integers() | st.binary(max_size=3), max_size=8)
    | st.lists(st.text(max_size=5), max_size=8)
    | st.lists(
        st.integers(0, 1 << 70) | st.sampled_from([0, 127, 128, 255, 256, 32_767, 32_768]),
        max_size=8,
    )
    | st.lists(st.integers(), max_size=8)
)
def test_the_groups_of_many_keys_are_those_of_each(keys: list[Any]) -> None:
    for together in (keys, [*keys, "\ud800"], [*keys, True], [*keys, -1]):
        assert key_groups(together, 128) == [key_group(key, 128) for key in together]
