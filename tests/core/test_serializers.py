"""Decoded values equal the encoded ones, type for type, or were refused."""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import logging
import math
import os
import subprocess
import sys
import types
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from typing import Any, NamedTuple
from uuid import UUID
from zoneinfo import ZoneInfo

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioflow.core.elements import GlobalWindow, TimeWindow
from aioflow.core.errors import RemoteProtocolError, TypeNotSupported
from aioflow.core.user_code import take_back_cancellation
from aioflow.core.wire.serializers import Codec, DecodeError
from aioflow.core.wire.types import TypeRegistry
from aioflow.core.wire.values import Tagger, Untagger
from aioflow.io.brokers.kafka_client import KafkaRecord
from aioflow.io.web.http_client import ServerSentEvent

BERLIN = ZoneInfo("Europe/Berlin")


class Colour(enum.Enum):
    RED = "red"
    CRIMSON = "red"  # noqa: PIE796 - an alias is the case.
    BLUE = (1, 2)


class Level(enum.IntEnum):
    LOW = 1


class Text(enum.StrEnum):
    A = "a"


class Access(enum.Flag):
    READ = 1
    WRITE = 2


class Point(NamedTuple):
    x: Any
    y: Any = 0


class Quote(msgspec.Struct, frozen=True):
    symbol: str
    price: Any = None


class Keyword(msgspec.Struct, kw_only=True):
    a: int
    b: int = 2


class Counted(msgspec.Struct):
    n: int

    def __post_init__(self) -> None:
        self.n += 1


@dataclass
class Trade:
    symbol: str
    price: Any
    tags: list[Any] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Frozen:
    a: Any
    b: Any = field(default=1, compare=False)


@dataclass
class Normalised:
    n: int
    init_only: dataclasses.InitVar[int] = 0
    derived: int = field(init=False, default=0)

    def __post_init__(self, init_only: int) -> None:
        self.n += 1
        self.derived = self.n * 2


@dataclass
class Empty:
    pass


class Subclass(Trade):
    pass


@dataclass
class BuiltinDataclass(dict[str, int]):
    x: int = 1


class MyStr(str):
    __slots__ = ()


class MyInt(int):
    pass


class Plain:
    def __init__(self, x: int) -> None:
        self.x = x

    def __eq__(self, other: object) -> bool:
        return type(other) is Plain and other.x == self.x

    __hash__ = None  # type: ignore[assignment]


class OwnZone(tzinfo):
    def utcoffset(self, when: datetime | None) -> timedelta:
        return timedelta(0)

    def dst(self, when: datetime | None) -> None:
        return None

    def tzname(self, when: datetime | None) -> None:
        return None


def same(left: Any, right: Any) -> bool:
    """Tells whether values are equal type for type, NaN and the sign of zero included."""
    if type(left) is not type(right):
        return False
    match left:
        case float():
            signs = math.copysign(1, left) == math.copysign(1, right)
            return (math.isnan(left) and math.isnan(right)) or bool(left == right and signs)
        case Decimal():
            return bool(left.as_tuple() == right.as_tuple())
        case enum.Enum():
            return left is right
        case dict():
            return same(list(left.items()), list(right.items()))
        case list() | tuple():
            return len(left) == len(right) and all(map(same, left, right))
        case set() | frozenset():
            return len(left) == len(right) and same(sorted(left, key=repr), sorted(right, key=repr))
        case datetime() | time():
            return (
                left.replace(tzinfo=None),
                left.fold,
                left.tzname(),
                str(left.tzinfo),
                type(left.tzinfo),
            ) == (
                right.replace(tzinfo=None),
                right.fold,
                right.tzname(),
                str(right.tzinfo),
                type(right.tzinfo),
            )
        case msgspec.Struct():
            return same(msgspec.structs.astuple(left), msgspec.structs.astuple(right))
    if dataclasses.is_dataclass(left):
        return all(
            same(getattr(left, f.name), getattr(right, f.name)) for f in dataclasses.fields(left)
        )
    return bool(left == right)


def round_trip(values: list[Any], codec: Codec | None = None) -> list[Any]:
    codec = codec or Codec()
    return codec.decode_batch(codec.encode_batch(values, owner="test"))


def why(value: Any, codec: Codec | None = None) -> str:
    with pytest.raises(TypeNotSupported) as caught:
        (codec or Codec()).check(value, owner="count-1")
    assert str(caught.value).startswith("count-1: ")
    return str(caught.value)


zones = st.sampled_from(
    [
        None,
        UTC,
        BERLIN,
        timezone(timedelta(hours=-3, minutes=30)),
        timezone(timedelta(hours=1), "CET"),
    ]
)
hashables = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(allow_nan=False),
    st.text(),
    st.text(st.characters(categories=["Cs", "Ll"]), max_size=3),
    st.binary(),
    st.dates(),
    st.builds(
        lambda d, z, f: d.replace(tzinfo=z, fold=f), st.datetimes(), zones, st.integers(0, 1)
    ),
    st.builds(lambda d, z, f: d.replace(tzinfo=z, fold=f), st.times(), zones, st.integers(0, 1)),
    st.timedeltas(),
    st.decimals(allow_nan=False),
    st.uuids(),
    st.sampled_from([*Colour, *Level, *Text, Access.READ, Access.READ | Access.WRITE]),
)
keys = st.recursive(
    hashables,
    lambda inner: st.one_of(
        st.tuples(inner, inner),
        st.frozensets(inner, max_size=3),
        st.builds(Point, inner, inner),
        st.builds(Frozen, a=inner),
    ),
    max_leaves=3,
)
values = st.recursive(
    st.one_of(keys, st.floats(), st.decimals()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=3),
        st.sets(keys, max_size=3),
        st.builds(Point, inner, inner),
        st.builds(Quote, st.text(max_size=3), inner),
        st.builds(Trade, st.text(max_size=3), inner, st.lists(inner, max_size=2)),
        st.builds(Frozen, a=inner, b=inner),
    ),
    max_leaves=8,
)
batches = st.one_of(
    st.lists(values, max_size=6),
    st.lists(st.tuples(st.text(), values), max_size=6),
    st.lists(st.tuples(st.text(), st.integers(0, 9), st.floats()), max_size=40),
    st.lists(st.dictionaries(st.text(max_size=2), st.integers()), max_size=6),
    st.lists(st.builds(Trade, st.text(max_size=3), values), max_size=6),
    st.lists(st.builds(Frozen, a=st.integers(), b=values), max_size=6),
    st.lists(st.builds(Quote, st.text(max_size=3), values), max_size=6),
    st.lists(st.builds(Point, values, st.integers()), max_size=6),
)


@given(batches)
def test_a_batch_comes_out_as_it_went_in_type_for_type(batch: list[Any]) -> None:
    assert same(round_trip(batch), batch)


shapes = st.recursive(
    st.sampled_from(
        [
            st.integers(),
            st.text(max_size=2),
            st.none(),
            st.integers() | st.lists(st.text(max_size=1), max_size=2),
            values,
        ]
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda parts: st.tuples(*parts)),
        st.lists(inner, max_size=3).map(lambda parts: st.tuples(*parts).map(list)),
        st.dictionaries(
            st.text(max_size=2) | st.integers(0, 1) | st.booleans(), inner, max_size=3
        ).map(st.fixed_dictionaries),
        inner.map(lambda part: st.lists(part, max_size=3)),
        inner.map(lambda part: st.lists(part, max_size=3).map(tuple)),
    ),
    max_leaves=6,
)


@given(shapes.flatmap(lambda shape: st.lists(shape, min_size=4, max_size=9)))
def test_values_of_one_shape_are_the_same_together_and_one_after_the_other(
    batch: list[Any],
) -> None:
    types = TypeRegistry()
    together, alone = Tagger(types, careful=True), Tagger(types, careful=True)
    trees, one_by_one = list(together.tag_all(batch, 0)), [alone.tag(value) for value in batch]
    assert same([Untagger(types, together.table).untag(tree) for tree in trees], batch)
    assert same(Untagger(types, alone.table).untag_all(one_by_one), batch)
    if not alone.table:
        assert same(trees, one_by_one)


class CountedTagger(Tagger):
    calls = 0

    def tag_all(self, values: Any, depth: int) -> Any:
        self.calls += 1
        return super().tag_all(values, depth)


@pytest.mark.parametrize(
    "batch, calls",
    [
        ([[0.5] * 768] * 64, 2),
        ([(n, [0.5] * 768) for n in range(64)], 4),
        ([{str(n): n for n in range(768)}] * 64, 65),
        ([(n, "a", [n]) for n in range(64)], 5),
    ],
    ids=["vectors", "records of vectors", "dicts", "rows"],
)
def test_long_value_is_not_examined_item_by_item(batch: list[Any], calls: int) -> None:
    tagger = CountedTagger(TypeRegistry())
    trees = list(tagger.tag_all(batch, 0))
    assert tagger.calls == calls
    assert same(Untagger(TypeRegistry(), tagger.table).untag_all(trees), batch)


@given(values)
def test_one_value_comes_out_as_it_went_in_type_for_type(value: Any) -> None:
    codec = Codec()
    assert same(codec.decode(codec.encode(value, owner="test")), value)


@pytest.mark.parametrize(
    "value",
    [
        *(
            None,
            True,
            0,
            2**63,
            -(2**63),
            2**64 - 1,
            2**64,
            -(2**63) - 1,
            10**400,
            "",
            "\ud800",
            "a\0",
            b"\xff",
        ),
        *(
            -0.0,
            float("nan"),
            float("inf"),
            Decimal("sNaN12"),
            Decimal("-0.00"),
            Decimal("1E+999999"),
        ),
        *(
            [],
            (),
            {},
            set(),
            frozenset(),
            [[]],
            ((),),
            [()],
            ([],),
            {(): {}},
            {(1, (2,)): {"x"}},
            {1: "a", None: "b"},
        ),
        *({2**70: 1}, {"\ud800": ["\ud800"]}, {float("inf"): (1,)}, {b"k": {"k": b"v"}}),
        *(
            datetime.min,
            datetime.max,
            datetime.max.replace(tzinfo=BERLIN),
            date.min,
            date.max,
            time.max,
        ),
        *(timedelta.min, timedelta.max, timedelta.resolution, UUID(int=2**128 - 1)),
        datetime(2024, 10, 27, 2, 30, tzinfo=BERLIN, fold=1),
        time(12, tzinfo=timezone(timedelta(hours=2), "X")),
        *(Colour.CRIMSON, Colour.BLUE, Access(0), Access.READ | Access.WRITE, Level.LOW, Text.A),
        *(Empty(), Point(1, (2,)), Keyword(a=1), Quote("a", {1: {2}}), Frozen(a=(1,), b=[2])),
    ],
)
def test_the_edges_of_every_type_are_kept(value: Any) -> None:
    for batch in (
        [value],
        [value] * 3,
        [value, "other"],
        [(value, 1), (value, 2)],
        [Trade("a", value)] * 20,
    ):
        assert same(round_trip(batch), batch)


@pytest.mark.parametrize("count", [0, 1, 2, 15, 16, 17, 9_000])
@pytest.mark.parametrize(
    "make",
    [
        str,
        lambda i: (i, str(i), i / 2),
        lambda i: (i, (i, [i])),
        lambda i: {"a": i, "b": None},
        lambda i: [i] * (i % 3),
        lambda i: (i,) * (i % 3),
        lambda i: ((i,),) * (i % 3),
        lambda i: Trade(str(i), i),
        lambda i: Point(i),
        lambda i: Quote(str(i), (i,)),
        lambda i: Empty(),
        lambda i: (),
        lambda i: datetime(2024, 1, 1) + timedelta(seconds=i),
    ],
)
def test_batches_of_every_size_and_shape_come_out_as_they_went_in(make: Any, count: int) -> None:
    batch = [make(i) for i in range(count)]
    assert same(round_trip(batch), batch)


def test_an_instance_is_restored_without_running_its_initialiser_again() -> None:
    for make in (lambda: Normalised(1, 5), lambda: Counted(1)):
        assert round_trip([make()]) == [make()]
        assert round_trip([make()] * 3) == [make()] * 3


@pytest.mark.parametrize(
    ("value", "remedy"),
    [
        (MyStr("a"), "subclass of str"),
        (MyInt(1), "subclass of int"),
        (OrderedDict(a=1), "subclass of dict"),
        (defaultdict(int, a=1), "subclass of dict"),
        (Counter("a"), "subclass of dict"),
        (BuiltinDataclass(), "subclass of dict"),
        (
            bytearray(b"a"),
            "bytearray cannot travel: it could be changed while it is on its way; make it "
            "bytes(value)",
        ),
        (Plain(1), "test_serializers.Plain cannot travel: use a dataclass"),
        (Subclass("a", 1), "decorate it with @dataclass"),
        (object(), "register_type"),
        (1j, "complex"),
        (range(3), "range"),
        (print, "register_type"),
        (Trade, "type cannot travel"),
        (datetime(2024, 1, 1, tzinfo=OwnZone()), "zoneinfo"),
    ],
)
def test_value_that_would_change_on_the_way_is_refused_with_a_remedy(
    value: Any, remedy: str
) -> None:
    for wrapped in (
        value,
        [value],
        (1, value),
        {"a": value},
        Trade("a", value),
        [{(1,): (value,)}],
    ):
        assert remedy in why(wrapped)
    with pytest.raises(TypeNotSupported, match="count-1"):
        Codec().encode_batch([1, "a", value, 2], owner="count-1")
    with pytest.raises(TypeNotSupported, match="count-1"):
        Codec().encode_batch([(1, value)] * 30, owner="count-1")


def test_a_subclass_of_str_among_strings_is_refused_anywhere_in_a_batch() -> None:
    for batch in (
        ["a"] * 99 + [MyStr("b")],
        [("a", 1)] * 99 + [(MyStr("b"), 1)],
        [{"a": 1}] * 99 + [{MyStr("b"): 1}],
    ):
        with pytest.raises(TypeNotSupported, match="subclass of str"):
            Codec().encode_batch(batch, owner="test")


def test_a_class_inside_a_function_is_refused_until_it_is_registered() -> None:
    @dataclass
    class Local:
        x: int

    registry = TypeRegistry()
    assert "top level of a module" in why(Local(1), Codec(registry))
    registry.register(Local)
    assert round_trip([Local(1)], Codec(registry)) == [Local(1)]


def test_a_value_that_contains_itself_is_refused() -> None:
    cycle: list[Any] = []
    cycle.append(cycle)
    assert "contains itself" in why(cycle)
    table: dict[str, Any] = {}
    table["self"] = (table,)
    assert "contains itself" in why(table)
    wide: list[Any] = []
    wide += [wide] * 200
    assert "contains itself" in why(wide)
    with pytest.raises(TypeNotSupported, match="contains itself"):
        Codec().encode_batch([[wide, table, (cycle,)]] * 50, owner="test")


def test_nesting_is_bounded_on_both_sides_alike() -> None:
    deepest: Any = 1
    while True:
        try:
            Codec().check([deepest], owner="test")
        except TypeNotSupported:
            break
        deepest = [deepest]
        assert same(round_trip([deepest]), [deepest])
    assert "nested deeper than 100" in why([deepest])
    for content in (
        b"\x01\x00" + b"\x91" * 100_000,
        b"\x01\x03\0\0\0\x01\x90" + b"\x92\x00" * 5_000 + b"\x90",
    ):
        with pytest.raises(DecodeError):
            Codec().decode_batch(content)


def test_a_batch_above_the_limit_is_refused_on_both_sides() -> None:
    """C4.6: the limit is named, and may be configured."""
    large = Codec().encode_batch(["x" * 2_000], owner="test")
    small = Codec(bytes_max=1_000)
    with pytest.raises(
        TypeNotSupported, match=r"source-0: 1 values take 2\d+ bytes, expected up to 1000"
    ):
        small.encode_batch(["x" * 2_000], owner="source-0")
    with pytest.raises(DecodeError, match="expected up to 1000 bytes"):
        small.decode_batch(large)


def test_a_registered_type_travels_by_its_name_and_is_read_by_its_aliases() -> None:
    writer, reader, stranger = TypeRegistry(), TypeRegistry(), TypeRegistry()
    writer.register(
        Plain, "plain/1", encode=lambda p: (p.x, {"nested": Point(1)}), decode=lambda t: Plain(t[0])
    )
    reader.register(
        Plain, "plain/2", encode=lambda p: p.x, decode=lambda t: Plain(t[0]), aliases=("plain/1",)
    )
    batch = [Plain(1), [Plain(2)], {"k": Trade("a", Plain(3))}]
    content = Codec(writer).encode_batch(batch, owner="test")
    assert b"plain/1" in content
    assert same(Codec(reader).decode_batch(content), batch)
    assert same(Codec(TypeRegistry(reader)).decode_batch(content), batch)
    assert round_trip([Plain(1)] * 3, Codec(writer)) == [Plain(1)] * 3
    with pytest.raises(DecodeError, match="'plain/1' is not registered here"):
        Codec(stranger).decode_batch(content)


def test_a_decode_that_gives_another_type_is_an_error() -> None:
    registry = TypeRegistry()
    registry.register(Plain, encode=lambda p: p.x, decode=lambda x: x)
    with pytest.raises(DecodeError, match=r"decode= of .*Plain returned a int"):
        round_trip([Plain(1)], Codec(registry))


def raises(error: type[BaseException]) -> Callable[[Any], Any]:
    def function(value: Any) -> Any:
        raise error("of user code")

    return function


def cancels(value: Any) -> Any:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    return Plain(1)


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (raises(asyncio.CancelledError), "raised CancelledError: of user code"),
        (raises(SystemExit), "raised SystemExit: of user code"),
        (cancels, "cancelled the task that it ran in"),
    ],
)
async def test_any_error_of_a_function_of_a_registered_type_is_an_error_of_the_value(
    function: Callable[[Any], Any], told: str
) -> None:
    """A cancellation would end the snapshot that is written, without an error, again and again."""
    encoding, decoding, right = TypeRegistry(), TypeRegistry(), TypeRegistry()
    encoding.register(Plain, encode=lambda p: function(p).x, decode=Plain)
    decoding.register(Plain, encode=lambda p: p.x, decode=function)
    right.register(Plain, encode=lambda p: p.x, decode=Plain)
    for values in ([Plain(1)], [Plain(1), Plain(2)], [(1, Plain(1))] * 9):
        content = Codec(right).encode_batch(values, owner="test")
        with pytest.raises(RuntimeError, match=told):
            Codec(encoding).encode_batch(values, owner="test")
        await take_back_cancellation()
        with pytest.raises(DecodeError, match=told):
            Codec(decoding).decode_batch(content)
        await take_back_cancellation()


def test_registrations_that_contradict_are_refused() -> None:
    registry = TypeRegistry()
    with pytest.raises(ValueError, match="expected both"):
        registry.register(Plain, encode=lambda p: p.x)
    with pytest.raises(TypeNotSupported, match="encode= and decode="):
        registry.register(Plain)
    registry.register(Trade, "t")
    with pytest.raises(ValueError, match=r"'t' is the name of .*Trade already"):
        registry.register(Point, "t")
    registry.register(Trade, "t")


@pytest.fixture
def module() -> Iterator[types.ModuleType]:
    """A module of the user, of which a test loads one version after the other."""
    made = types.ModuleType("user_module")
    sys.modules["user_module"] = made
    yield made
    del sys.modules["user_module"]


def load(module: types.ModuleType, source: str) -> Any:
    header = (
        "import dataclasses, enum, msgspec\nfrom dataclasses import dataclass, field\nfrom typing "
        "import NamedTuple, Any\n"
    )
    vars(module).pop("Event", None)
    exec(header + source, vars(module))
    return vars(module).get("Event")


VERSIONS = [
    (
        "@dataclass\nclass Event:\n a: Any\n b: Any",
        "@dataclass\nclass Event:\n c: Any = field(default_factory=list)\n a: Any = 0\n d: int = 7",
    ),
    (
        "class Event(NamedTuple):\n a: Any\n b: Any",
        "class Event(NamedTuple):\n a: Any\n c: Any = []\n d: int = 7",
    ),
    (
        "class Event(msgspec.Struct):\n a: Any\n b: Any",
        "class Event(msgspec.Struct):\n a: Any\n c: list[Any] = []\n d: int = 7",
    ),
]


@pytest.mark.parametrize(("old", "new"), VERSIONS)
@pytest.mark.parametrize("count", [1, 3])
def test_added_fields_take_their_default_and_removed_ones_are_dropped_with_one_warning(
    module: types.ModuleType, caplog: pytest.LogCaptureFixture, old: str, new: str, count: int
) -> None:
    codec = Codec(TypeRegistry())
    event = load(module, old)
    content = codec.encode_batch([event((1,), "gone")] * count, owner="test")
    event = load(module, new)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            restored = codec.decode_batch(content)
    assert restored == [event(a=(1,), c=[], d=7)] * count
    assert type(restored[0]) is event
    warnings = [record.message for record in caplog.records]
    assert warnings == ["fields b of user_module:Event are no more, their values are dropped"]


def test_an_added_field_without_a_default_is_an_error_that_names_it(
    module: types.ModuleType,
) -> None:
    codec = Codec(TypeRegistry())
    content = codec.encode(load(module, "@dataclass\nclass Event:\n a: int")(1), owner="test")
    load(module, "@dataclass\nclass Event:\n a: int\n b: int")
    with pytest.raises(
        DecodeError,
        match="user_module:Event has a field 'b' that was not written and has no default",
    ):
        codec.decode(content)


def test_a_member_that_is_no_more_is_an_error_that_names_it(module: types.ModuleType) -> None:
    codec = Codec(TypeRegistry())
    content = codec.encode(load(module, "class Event(enum.Enum):\n A = 1\n B = 2").B, owner="test")
    load(module, "class Event(enum.Enum):\n A = 1")
    with pytest.raises(DecodeError, match="has no member 'B'"):
        codec.decode(content)


def test_an_instance_of_a_class_that_was_defined_again_is_refused(module: types.ModuleType) -> None:
    codec = Codec(TypeRegistry())
    old = load(module, "@dataclass\nclass Event:\n a: int")(1)
    codec.check(old, owner="test")
    load(module, "@dataclass\nclass Event:\n a: int")
    with pytest.raises(TypeNotSupported, match="no reader could find it"):
        codec.check(old, owner="test")


def test_the_reader_never_imports_a_module() -> None:
    program = (
        "import sys\n"
        "from aioflow.core.wire.serializers import Codec, DecodeError\n"
        "assert 'tabnanny' not in sys.modules and 'tests' not in sys.modules\n"
        "before = set(sys.modules)\n"
        "for name in (b'tabnanny:NannyNag', b'concurrent.futures:ThreadPoolExecutor', "
        "b'os:system'):\n"
        "    body = b'\\x91\\x92' + bytes([0xa0 | len(name)] if len(name) < 32 else [0xd9, "
        "len(name)]) + name + b'\\x90'\n"
        "    content = b'\\x01\\x03' + len(body).to_bytes(4, 'big') + body + "
        "b'\\x91\\x92\\x0e\\x00'\n"
        "    try:\n"
        "        Codec().decode_batch(content)\n"
        "    except DecodeError as error:\n"
        "        assert 'is not registered here' in str(error), error\n"
        "    else:\n"
        "        raise SystemExit('decoded ' + name.decode())\n"
        "print(sorted(set(sys.modules) - before))"
    )
    assert _run(program, "0") == "[]\n"


def test_a_lazy_attribute_of_a_module_is_not_looked_up(module: types.ModuleType) -> None:
    codec = Codec(TypeRegistry())
    content = codec.encode(load(module, "@dataclass\nclass Event:\n a: int")(1), owner="test")
    del module.Event
    asked: list[str] = []
    module.__getattr__ = asked.append  # type: ignore[method-assign]
    with pytest.raises(DecodeError, match="not registered here"):
        codec.decode(content)
    assert asked == []


def test_bytes_do_not_depend_on_the_hash_seed() -> None:
    program = (
        "from aioflow.core.wire.serializers import Codec\n"
        "print(Codec().encode_batch([{'a', 'b', 'c', 'd'}, frozenset('hello'), {'k': {1, 2}}], "
        "owner='x').hex())"
    )
    assert len({_run(program, seed) for seed in ("0", "1", "4242")}) == 1


def _run(program: str, seed: str) -> str:
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, check=True, text=True
    ).stdout


SAMPLES = [
    ["a", "b", 1, None, 1.5],
    [(1, "a"), (2, "b")],
    [Trade("a", datetime(2024, 1, 1, tzinfo=BERLIN)), Trade("b", {1: (2, {3})})],
    [
        Point(1, Decimal("1.5")),
        Quote("a"),
        Colour.RED,
        Access.READ,
        UUID(int=1),
        2**70,
        "\ud800",
        timedelta(1),
        date.max,
    ],
    [[1, [2]], {(1,): frozenset({2})}, time(1, tzinfo=UTC)],
    [[number, ("a", None), [0.5]] for number in range(16)],
]


@pytest.mark.parametrize("batch", SAMPLES)
def test_a_batch_cut_at_any_byte_is_one_error(batch: list[Any]) -> None:
    content = Codec().encode_batch(batch, owner="test")
    for end in range(len(content)):
        with pytest.raises(DecodeError):
            Codec().decode_batch(content[:end])
    with pytest.raises(DecodeError):
        Codec().decode_batch(content + b"\0")
    assert issubclass(DecodeError, RemoteProtocolError)


@settings(max_examples=300)
@given(
    st.sampled_from(SAMPLES),
    st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.binary(max_size=3)), max_size=4),
)
def test_mutated_bytes_give_values_or_our_error_and_nothing_else(
    batch: list[Any], changes: list[tuple[float, bytes]]
) -> None:
    content = bytearray(Codec().encode_batch(batch, owner="test"))
    for where, replacement in changes:
        start = int(where * len(content))
        content[start : start + len(replacement)] = replacement
    try:
        assert isinstance(Codec().decode_batch(bytes(content)), list)
    except DecodeError:
        pass


@given(st.binary(max_size=40), st.integers(0, 4))
def test_random_bytes_give_values_or_our_error_and_nothing_else(noise: bytes, shape: int) -> None:
    for content in (noise, bytes((1, shape)) + noise, bytes((1, shape, 0, 0, 0, 1, 0x90)) + noise):
        try:
            assert isinstance(Codec().decode_batch(content), list)
        except DecodeError:
            pass


def test_another_version_of_the_format_is_an_error() -> None:
    content = Codec().encode_batch(["a"], owner="test")
    with pytest.raises(DecodeError, match="expected format version 1"):
        Codec().decode_batch(b"\x02" + content[1:])


def test_the_written_form_is_the_promised_one() -> None:
    assert Codec().encode_batch(["a", 1], owner="x").hex() == "010092a16101"
    assert Codec().encode_batch([("a", 1)], owner="x").hex() == "01019192a16101"
    assert (
        Codec().encode_batch([[(1,)], {2}], owner="x").hex() == "01030000000190929200920101920302"
    )
    name = msgspec.msgpack.encode(f"{__name__}:Text")
    members = Codec().encode_batch([Text.A, Text.A], owner="x")
    assert (
        members
        == b"\x01\x03"
        + _with_length(b"\x91\x92" + name + b"\x90")
        + b"\x92"
        + b"\x93\x0d\x00\xa1A" * 2
    )
    name = msgspec.msgpack.encode(f"{__name__}:Point")
    points = Codec().encode_batch([Point(1, 2), Point(3, (4,))], owner="x")
    header = b"\x93\x91\x92" + name + b"\x92\xa1x\xa1y\x00\x91\x01"
    assert points == b"\x01\x02" + _with_length(header) + b"\x92\x92\x01\x02\x92\x03\x92\x01\x04"


def test_accumulators_are_written_as_columns() -> None:
    content = Codec().encode_batch([[number, ("a",)] for number in range(16)], owner="x")
    assert content == b"\x01\x04" + _with_length(
        b"\x91\x93\x01\x00\x92\x02\x00"
    ) + b"\x92\xdc\x00\x10" + bytes(range(16)) + (b"\xdc\x00\x10" + b"\xa1a" * 16)


@pytest.mark.parametrize(
    "column", [[[1]] * 16, [{}] * 16, [1] * 15], ids=["a list", "a dict", "a row less"]
)
def test_columns_that_do_not_fit_are_our_error(column: list[Any]) -> None:
    body = msgspec.msgpack.encode([[1] * 16, column])
    with pytest.raises(DecodeError):
        Codec().decode_batch(b"\x01\x04" + _with_length(b"\x91\x93\x01\x00\x00") + body)


@pytest.mark.parametrize("strange", [2**64, -(2**63) - 1, "\ud800", {1}, date.max])
def test_a_row_with_what_no_column_takes_comes_out_as_it_went_in(strange: Any) -> None:
    batch = [[number, (strange if number == 7 else number,)] for number in range(20)]
    assert same(round_trip(batch), batch)


def _with_length(header: bytes) -> bytes:
    return len(header).to_bytes(4, "big") + header


def test_a_buffer_is_read_without_being_kept() -> None:
    content = bytearray(Codec().encode_batch([b"abc", b"def"], owner="test"))
    decoded = Codec().decode_batch(memoryview(content))
    content[:] = bytes(len(content))
    assert decoded == [b"abc", b"def"]
    content.append(0)  # Would raise if a view of it was left.


@pytest.mark.parametrize("names", [(), ("ndarray",), ("generic",)])
def test_records_are_encoded_while_another_thread_imports_numpy(
    names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sink of Parquet imports numpy in a thread, and the module lacks names meanwhile."""
    partial = types.ModuleType("numpy")
    for name in names:
        setattr(partial, name, type(name, (), {}))
    monkeypatch.setitem(sys.modules, "numpy", partial)
    assert round_trip([Point(1, [2])]) == [Point(1, [2])]


def test_numpy_arrays_and_scalars_keep_their_dtype_and_shape() -> None:
    numpy = pytest.importorskip("numpy")
    arrays = [
        numpy.arange(6, dtype=">i4").reshape(2, 3),
        numpy.arange(6.0).reshape(2, 3).T,
        numpy.array(["a", "bc"]),
        numpy.array(["2024-01-01", "NaT"], dtype="M8[ns]"),
        numpy.zeros((0, 3), numpy.float32),
        numpy.array(True),
        numpy.array([1j, float("nan")]),
    ]
    for array in arrays:
        for restored in (
            *round_trip([array]),
            round_trip([(1, array)] * 2)[1][1],
            round_trip([array] * 3)[2],
        ):
            assert type(restored) is type(array)
            assert restored.dtype == array.dtype
            assert restored.shape == array.shape
            assert restored.tobytes() == array.tobytes()
            assert restored.flags.writeable
    scalars = [
        numpy.int64(1),
        numpy.float64(0.1),
        numpy.bool_(1),
        numpy.str_("a\0"),
        numpy.bytes_(b"a\0"),
        numpy.float32(1),
    ]
    scalars += [numpy.datetime64("2024-01-01", "D"), numpy.uint8(255), numpy.complex128(1j)]
    for batch in ([s, "x"] for s in scalars):
        assert [(type(v), v) for v in round_trip(batch)] == [(type(v), v) for v in batch]
    for value in (numpy.array([object()]), numpy.array([(1, 2)], dtype="i4,i4"), numpy.longlong(1)):
        assert "cannot travel" in why(value)
    assert "cannot travel" in why(numpy.ma.masked_array([1]))


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (TimeWindow(0, 5), b"aioflow.operators.windowing:TimeWindow"),
        (GlobalWindow(), b"aioflow.operators.windowing:GlobalWindow"),
        (KafkaRecord("v", None, 5, [], "t", 0, 1), b"aioflow.io.kafka_topics:KafkaRecord"),
        (ServerSentEvent("d", "e", "1"), b"aioflow.io.event_streams:ServerSentEvent"),
    ],
)
def test_values_of_ours_keep_the_names_that_older_savepoints_hold(value: Any, name: bytes) -> None:
    codec = Codec()
    content = codec.encode([value], owner="state")
    assert name in content
    assert codec.decode(content) == [value]


@pytest.mark.parametrize(
    "columns",
    [
        ([], []),
        (["a", "b"], [None, None]),
        ([1, True, 2.5], [None, (0, 10), None]),
        ([("a", 1), ("b", 2)], [(0, 10), (0, 20)]),
        ([1 << 70, 2], [None, None]),
        (["\ud800", "b"], [None, None]),
        ([UUID(int=1), UUID(int=2)], [None, None]),
    ],
    ids=repr,
)
def test_pairs_given_as_columns_are_read_as_tuples(columns: tuple[list[Any], list[Any]]) -> None:
    pairs = list(zip(*columns, strict=True))
    read = Codec().decode_batch(Codec().encode_pairs(*columns, owner="timers"))
    assert read == pairs
    assert [list(map(type, pair)) for pair in read] == [list(map(type, pair)) for pair in pairs]


def test_values_of_a_long_list_are_tagged_together() -> None:
    class Counting(Tagger):
        tagged = 0

        def tag(self, value: Any, depth: int = 0) -> Any:
            self.tagged += 1
            return super().tag(value, depth)

    tagger, long = Counting(TypeRegistry()), [(n, {"n": n, "text": "x"}) for n in range(40_000)]
    trees = tagger.tag_all(long, 1)

    assert trees == [Tagger(TypeRegistry()).tag(value, 1) for value in long]
    assert not tagger.tagged
