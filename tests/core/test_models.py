"""Pydantic models and attrs classes come out as they went in, without validation or `__init__`."""

from __future__ import annotations

import logging
from datetime import UTC, datetime, timedelta, timezone
from typing import Any, Generic, TypeVar

import attrs
import pydantic.dataclasses
import pytest
from pydantic import BaseModel, ConfigDict, Field, HttpUrl, PrivateAttr, RootModel

from aioflow.core.errors import TypeNotSupported
from aioflow.core.wire.serializers import Codec
from aioflow.core.wire.types import TypeRegistry


class Address(BaseModel):
    street: str
    number: int | None = None


class Order(BaseModel):
    id: int
    at: datetime
    address: Address
    page: HttpUrl | None = None
    tags: list[str] = Field(default_factory=list)


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")
    id: int


class Counted(BaseModel):
    n: int
    _seen: int = PrivateAttr(default=0)

    def model_post_init(self, context: Any) -> None:
        self._seen += 1


@pydantic.dataclasses.dataclass(config=ConfigDict(extra="allow"))
class OpenRow:
    id: int
    tags: list[str] = Field(default_factory=list)


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True)
    a: int


class Aliased(BaseModel):
    user_id: int = Field(alias="userId")


class Numbers(RootModel[list[int]]):
    pass


T = TypeVar("T")


class Page(BaseModel, Generic[T]):
    items: list[T]


Pages = Page[int]


@attrs.define
class Slotted:
    a: int
    b: list[int] = attrs.field(factory=list)


@attrs.frozen(cache_hash=True)
class Hashed:
    a: int


@attrs.define(slots=False)
class Derived(Slotted):
    c: str = "c"

    def __attrs_post_init__(self) -> None:
        self.a += 1


@attrs.define
class Renamed:
    _a: int
    b: int = attrs.field(default=2, alias="bee")


CODEC = Codec()


def there_and_back(values: list[Any]) -> list[Any]:
    return CODEC.decode_batch(CODEC.encode_batch(values, owner="test"))


ORDER = '{"id": 1, "at": "2024-01-01T00:00:00Z", "address": {"street": "a"}, "page": "http://a/b"}'
EAST = '{"id": 2, "at": "2024-01-01T00:00:00+05:30", "address": {"street": "b", "number": 3}}'


@pytest.mark.parametrize("times", [1, 2, 40])
@pytest.mark.parametrize(
    "value",
    [
        Order.model_validate_json(ORDER),
        Order.model_validate_json(EAST),
        Open.model_validate({"id": 1, "other": {"a": [1]}}),
        Open(id=1),
        Counted(n=1),
        Frozen(a=1),
        Aliased(userId=7),
        Numbers([1, 2]),
        Pages(items=[1, 2]),
        Slotted(1, [2]),
        Hashed(3),
        Derived(1),
        Renamed(1, bee=3),
        {"in": [Slotted(1), Counted(n=2)]},
    ],
    ids=repr,
)
def test_a_model_comes_out_as_it_went_in(value: Any, times: int) -> None:
    batch = [value] * times
    made = there_and_back(batch)
    assert made == batch
    assert list(map(type, made)) == list(map(type, batch))
    assert repr(made) == repr(batch).replace("TzInfo(0)", repr(UTC)).replace(
        "TzInfo(19800)", repr(timezone(timedelta(seconds=19_800)))
    )


def test_fields_that_were_not_set_stay_so() -> None:
    first, second = there_and_back([Address(street="a"), Address(street="b", number=None)])
    assert first.model_dump(exclude_unset=True) == {"street": "a"}
    assert second.model_dump(exclude_unset=True) == {"street": "b", "number": None}
    (opened,) = there_and_back([Open.model_validate({"id": 1, "x": 2})])
    assert opened.model_dump(exclude_unset=True) == {"id": 1, "x": 2}
    assert opened.model_fields_set == {"id", "x"}
    partly = Open.model_construct(_fields_set={"x"}, id=1, x=2)
    copied = Address(street="a").model_copy(update={"unknown": 1})
    for value, given in ((partly, {"x"}), (copied, {"street"})):
        (made,) = there_and_back([value])
        assert made.model_fields_set == given


def test_a_model_is_made_without_running_its_own_code() -> None:
    (counted,) = there_and_back([Counted(n=1)])
    assert counted._seen == 1
    (derived,) = there_and_back([Derived(1)])
    assert derived.a == 2


def test_a_restored_model_can_be_used_as_one_that_was_made() -> None:
    order, hashed, frozen = there_and_back(
        [Order.model_validate_json(ORDER), Hashed(3), Frozen(a=1)]
    )
    order.tags.append("a")
    assert order.model_copy(update={"id": 5}).id == 5
    assert Order.model_validate_json(order.model_dump_json()) == order
    assert hash(hashed) == hash(Hashed(3))
    assert hash(frozen) == hash(Frozen(a=1))
    with pytest.raises(pydantic.ValidationError):
        frozen.a = 2


@pytest.mark.parametrize(
    "value",
    [
        Address.model_construct(number=1),
        pydantic.SecretStr("hidden"),
        pydantic.create_model("Made", a=(int, ...))(a=1),
    ],
    ids=["a field is missing", "a secret", "a class that no reader finds"],
)
def test_value_that_cannot_travel_is_refused_by_name(value: Any) -> None:
    with pytest.raises(TypeNotSupported, match="cannot travel"):
        CODEC.encode(value, owner="test")


def test_a_model_travels_after_its_fields_have_changed(caplog: pytest.LogCaptureFixture) -> None:
    class Old(BaseModel):
        a: int
        gone: str

    class New(BaseModel):
        model_config = ConfigDict(extra="allow")
        a: int
        more: list[int] = Field(default_factory=list)
        b: int = 5
        _c: int = PrivateAttr(default=9)

    written, read = TypeRegistry(), TypeRegistry()
    written.register(Old, "model")
    read.register(New, "model")
    content = Codec(written).encode_batch([Old(a=1, gone="x"), Old(a=2, gone="y")], owner="test")
    with caplog.at_level(logging.WARNING):
        first, second = Codec(read).decode_batch(content)
    assert (first, second) == (New(a=1), New(a=2))
    assert first.model_fields_set == {"a"}
    assert first.more is not second.more
    assert first._c == 9
    assert "gone" in caplog.text


def test_private_attributes_that_were_added_have_their_defaults() -> None:
    class Old(BaseModel):
        a: int

    class Middle(BaseModel):
        a: int
        _seen: int = PrivateAttr(default=0)

    class New(BaseModel):
        a: int
        _seen: int = PrivateAttr(default=0)
        _log: list[int] = PrivateAttr(default_factory=list)
        _late: int = PrivateAttr()

    read = TypeRegistry()
    read.register(New, "model")
    for old, seen in ((Old(a=1), 0), (Middle(a=1), 3)):
        if isinstance(old, Middle):
            old._seen = seen
        written = TypeRegistry()
        written.register(type(old), "model")
        content = Codec(written).encode_batch([old, old], owner="test")
        first, second = Codec(read).decode_batch(content)
        assert (first._seen, first._log) == (seen, [])
        assert first._log is not second._log
        assert not hasattr(first, "_late")


def test_extra_attributes_of_a_dataclass_of_pydantic_travel() -> None:
    rows = [OpenRow(id=1, other={"a": [1]}), OpenRow(id=2, tags=["x"])]  # type: ignore[call-arg]
    made = there_and_back(rows)
    assert list(map(vars, made)) == list(map(vars, rows))
    assert vars(made[0])["other"] == {"a": [1]}


def test_a_dataclass_of_pydantic_travels_after_its_fields_have_changed() -> None:
    @pydantic.dataclasses.dataclass
    class Old:
        a: int

    @pydantic.dataclasses.dataclass
    class New:
        a: int
        b: int = Field(default=5)
        more: list[int] = Field(default_factory=list)

    written, read = TypeRegistry(), TypeRegistry()
    written.register(Old, "record")
    read.register(New, "record")
    content = Codec(written).encode_batch([Old(1)], owner="test")
    assert Codec(read).decode_batch(content) == [New(1, 5, [])]


def test_an_attrs_class_travels_after_its_fields_have_changed() -> None:
    @attrs.define
    class Old:
        a: int

    @attrs.define
    class New:
        b: int = 5
        c: list[int] = attrs.field(factory=list)
        a: int = 0

    @attrs.define
    class Bound:
        a: int
        twice: int = attrs.field(default=attrs.Factory(lambda self: self.a * 2, takes_self=True))

    written = TypeRegistry()
    written.register(Old, "one")
    content = Codec(written).encode(Old(1), owner="test")
    read = TypeRegistry()
    read.register(New, "one")
    assert Codec(read).decode(content) == New(a=1)
    bound = TypeRegistry()
    bound.register(Bound, "one")
    with pytest.raises(Exception, match="field 'twice' that was not written and has no default"):
        Codec(bound).decode(content)


def test_an_attrs_class_with_renamed_arguments_evolves_by_its_fields() -> None:
    @attrs.define
    class Old:
        _a: int

    @attrs.define
    class New:
        _c: list[int] = attrs.field(factory=list, alias="sea")
        _a: int = 0

    written, read = TypeRegistry(), TypeRegistry()
    written.register(Old, "one")
    read.register(New, "one")
    content = Codec(written).encode(Old(a=1), owner="test")
    assert Codec(read).decode(content) == New(sea=[], a=1)
