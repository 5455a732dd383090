"""Arguments that cannot be meant are refused at the line that gives them, not when the job runs."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import pytest

import aioflow as af
from aioflow.io.arguments import checked_encoding, one_or_more_places
from aioflow.io.files.parts import RollPolicy

io = af.io

REFUSED: list[Callable[[], Any]] = [
    lambda: io.csv("x", encoding="nonsense"),
    lambda: io.csv("x", encoding="utf-16"),
    lambda: io.csv("x", encoding=None),
    lambda: io.lines("x", encoding=None),
    lambda: io.lines("x", encoding="base64"),
    lambda: io.lines("x", encoding="rot13"),
    lambda: io.csv("x", delimiter=";;"),
    lambda: io.csv("x", delimiter='"'),
    lambda: io.csv("x", delimiter="\n"),
    lambda: io.csv("x", delimiter="\r"),
    lambda: io.csv("x", delimiter=None),
    lambda: io.csv("x", delimiter="\x00"),
    lambda: io.csv("x", columns="ab"),
    lambda: io.csv("x", columns=[]),
    lambda: io.csv("x", columns=[1, 2]),
    lambda: io.csv("x", int),
    lambda: io.lines("x", follow=True, every="0s"),
    lambda: io.lines("x", follow=True, every="-1s"),
    lambda: io.lines("x", every="soon"),
    lambda: io.lines("x", discover_every="0s"),
    lambda: io.jsonl("x", discover_every="-1s"),
    lambda: io.parquet("x", discover_every="0s"),
    lambda: io.arrow("x", discover_every="-5s"),
    lambda: io.lines("x", split_bytes=0),
    lambda: io.lines("x", split_bytes=1.5),
    lambda: io.jsonl("x", split_bytes="1MB"),
    lambda: io.parquet("x", split_bytes="1"),
    lambda: io.lines("x", roll=5),
    lambda: io.lines("x", roll=RollPolicy(size_bytes=0)),
    lambda: io.lines("x", roll=RollPolicy(age_ms=-1)),
    lambda: io.parquet("x", roll="1m"),
    lambda: io.lines("x", on_error="ignore"),
    lambda: io.jsonl("x", 5),
    lambda: io.jsonl("x", dict[int, object()]),
    lambda: io.parquet("x", columns="abc"),
    lambda: io.parquet("x", columns=[]),
    lambda: io.parquet("x", columns=["a", "a"]),
    lambda: io.sqlite("x", "t", columns=[]),
    lambda: io.sqlite("x", ""),
    lambda: io.sqlite("x", 5),
    lambda: io.postgres("postgresql://h/d", ""),
    lambda: io.postgres("postgresql://h/d", None),
    lambda: io.postgres("", "t"),
    lambda: io.postgres("mysql://h/d", "t"),
    lambda: io.postgres("postgresql://h:port/d", "t"),
    lambda: io.postgres(5, "t"),
    lambda: io.postgres("postgresql://h/d", "t", query="x"),
    lambda: io.http("h/x"),
    lambda: io.http("http://h:99999/"),
    lambda: io.http("http://h:port/"),
    lambda: io.http("http://h/", every="-1s"),
    lambda: io.http("http://h/", timeout="0s"),
    lambda: io.http("http://h/", timeout="-1s"),
    lambda: io.http("http://h/", batch=1.5),
    lambda: io.http("http://h/", retries=-1),
    lambda: io.http("http://h/", backoff="x"),
    lambda: io.http("http://h/", headers="x"),
    lambda: io.http("http://h/", headers={"a": 1}),
    lambda: io.http("http://h/", headers={"a": "b\r\nc: d"}),
    lambda: io.http("http://h/", items=5),
    lambda: io.http("http://:80/"),
    lambda: io.http("http://h h/"),
    lambda: io.http(None),
    lambda: io.sse("http://h:0x/"),
    lambda: io.sse("http://h/", backoff="-1s"),
    lambda: io.sse("http://h/", headers=[1]),
    lambda: io.websocket("ws://h/", subscribe="hello"),
    lambda: io.websocket("ws://h/", subscribe=[{"a": 1}]),
    lambda: io.websocket("ws://h/", backoff="zero"),
    lambda: io.websocket("ws://h:70000/"),
    lambda: io.webhook(port=70000),
    lambda: io.webhook(port=-1),
    lambda: io.webhook(port="80"),
    lambda: io.webhook(path="x"),
    lambda: io.webhook(path=5),
    lambda: io.webhook(capacity=0),
    lambda: io.webhook(max_bytes=0),
    lambda: io.webhook(patience="-1s"),
    lambda: io.webhook(token=5),
    lambda: io.webhook(token=""),
    lambda: io.webhook(host=""),
    lambda: io.webhook(path="/{a"),
    lambda: io.socket("h", 0),
    lambda: io.socket("h", 65536),
    lambda: io.socket("h", "80"),
    lambda: io.socket("h", 1, encoding="nonsense"),
    lambda: io.socket("h", 1, encoding="utf-16"),
    lambda: io.socket("", 1),
    lambda: io.datagen(abs, rate=-1),
    lambda: io.datagen(abs, rate=0),
    lambda: io.datagen(abs, rate=float("nan")),
    lambda: io.datagen(abs, count=-1),
    lambda: io.datagen(abs, count=1.5),
    lambda: io.datagen(abs, count="5"),
    lambda: io.datagen(abs, splits=0),
    lambda: io.datagen(abs, splits=2.5),
    lambda: io.datagen(abs, rate="5"),
    lambda: io.datagen(abs, rate=True),
    lambda: io.push(0),
    lambda: io.push("5"),
    lambda: io.push(1.5),
    lambda: io.queue([]),
    lambda: io.kafka("h:1", "t", start="first"),
    lambda: io.kafka("h:port", "t"),
    lambda: io.kafka("h:1", "t", discover_every="0s"),
    lambda: io.kafka("h:1", "t", backoff="-1s"),
    lambda: io.kafka("", "t"),
    lambda: io.kafka("h:1", ""),
    lambda: io.kafka("h:1", "t", format="xml"),
    lambda: io.kafka("h:1", "t", options=5),
    lambda: io.kafka("h:1", "t", group=""),
    lambda: io.mqtt("http://h", "t"),
    lambda: io.mqtt("mqtt://h:port", "t"),
    lambda: io.mqtt("mqtt://h/t", "t"),
    lambda: io.mqtt("mqtt://h", "a#"),
    lambda: io.mqtt("mqtt://h", "t", qos=3),
    lambda: io.mqtt("mqtt://h", "t", session_expiry="0s"),
    lambda: io.nats("", "s"),
    lambda: io.nats("nats://h:port", "s"),
    lambda: io.nats("http://h", "s"),
    lambda: io.nats("nats://h", "s", start=-1),
    lambda: io.nats("nats://h", "s", options=5),
    lambda: io.rabbitmq("amqp://h:port", "q"),
    lambda: io.rabbitmq("http://h", "q"),
    lambda: io.rabbitmq("amqp://h", "q", prefetch=70_000),
    lambda: io.rabbitmq("amqp://h", "q", options=5),
    lambda: io.rabbitmq("amqp://h", "q", start=5),
    lambda: io.redis("h", "s"),
    lambda: io.redis("redis://h:port", "s"),
    lambda: io.redis("redis://h", "s", maxlen=0),
    lambda: io.redis("redis://h", "s", maxlen="5"),
    lambda: io.redis("redis://h", "s", start="x"),
]


def call_of(make: Callable[[], Any]) -> str:
    """The line of the table."""
    return inspect.getsource(make).strip().removeprefix("lambda: ").removesuffix(",")


@pytest.mark.parametrize("make", REFUSED, ids=call_of)
def test_an_argument_that_cannot_be_meant_is_refused_where_it_is_given(
    make: Callable[[], Any],
) -> None:
    with pytest.raises((af.GraphError, ValueError, TypeError)) as raised:
        make()
    if not isinstance(
        raised.value, af.GraphError
    ):  # Durations are read by one function for the whole library.
        assert "expected a timedelta, or a number and a unit" in str(raised.value)
    assert any(word in str(raised.value) for word in ("expected", "cannot be used", "needs"))


ACCEPTED: list[Callable[[], Any]] = [
    lambda: io.csv("x", encoding="latin-1", delimiter="\t", columns=("a", "b")),
    lambda: io.csv("x", delimiter="|"),
    lambda: io.lines("x", encoding="utf-8-sig"),
    lambda: io.lines("x", encoding="cp1252", roll=RollPolicy(size_bytes=1, age_ms=1)),
    lambda: io.http("https://h:8443/x?y=1", every="0s", backoff="0s", retries=0),
    lambda: io.http("http://[::1]:80/"),
    lambda: io.sse("http://h", headers={"A": "b"}),
    lambda: io.websocket("wss://u:p@h/x", subscribe=("a", b"b")),
    lambda: io.webhook(port=0, patience="0s"),
    lambda: io.socket("::1", 65535),
    lambda: io.datagen(abs, count=0, rate=0.5),
    lambda: io.postgres("postgresql://u:p%40@h/d", "t"),
    lambda: io.postgres("postgresql:///d?host=/run", "s.t"),
    lambda: io.postgres("postgres://a:1,b:2/d", "t"),
    lambda: io.kafka(["a:1", "b"], "t"),
    lambda: io.mqtt("mqtts://u:p%40@h", ["a/+", "b/#"], client_id="c"),
    lambda: io.mqtt("mqtt://h", lambda record: "t", qos=2, retain=True),
    lambda: io.nats("h:4222", "s"),
    lambda: io.nats(["nats://t@h", "tls://h:1"], "s"),
    lambda: io.rabbitmq("amqps://u:p%40@h/v", ["q", "r"], stream=True, start=5),
    lambda: io.rabbitmq(["amqp://h", "amqp://g:1"], exchange="e"),
    lambda: io.redis("redis://:p@h:1/0", "s", maxlen=1),
    lambda: io.redis("unix:///run/redis.sock", "s"),
    lambda: io.jsonl("x", dict[str, int]),
    lambda: io.jsonl("x", list[int] | None),
    lambda: io.csv("x", columns={"a": 1, "b": 2}.keys()),
    lambda: io.lines("x", roll=io.RollPolicy(size_bytes=64 * 1024 * 1024, age_ms=60_000)),
]


@pytest.mark.parametrize("make", ACCEPTED, ids=call_of)
def test_an_argument_that_is_fine_is_taken(make: Callable[[], Any]) -> None:
    make()


@pytest.mark.parametrize(
    "encoding",
    ["utf-8", "utf8", "latin-1", "ascii", "cp437", "shift_jis", "gb18030", "utf-8-sig", "utf-7"],
)
def test_encodings_with_plain_line_ends_are_taken(encoding: str) -> None:
    assert checked_encoding(encoding, "lines('x')") == encoding


@pytest.mark.parametrize(
    "encoding", ["utf-16", "utf-16-le", "utf-32", "base64", "rot13", "zlib", "idna-x", "", None, 8]
)
def test_other_encodings_are_refused(encoding: Any) -> None:
    with pytest.raises(af.GraphError, match="encoding"):
        checked_encoding(encoding, "lines('x')")


WHY: list[tuple[Callable[[], Any], str]] = [
    (
        lambda: io.http("http://h", headers={"a": b"v"}),
        "value of the header 'a' in headers is bytes, expected str",
    ),
    (
        lambda: io.sse("http://h", headers={b"a": "v"}),
        "the name b'a' in headers is bytes, expected str",
    ),
    (
        lambda: io.jsonl("x", roll="1h"),
        r"expected a RollPolicy, as in roll=af.io.RollPolicy\(size_bytes=",
    ),
    (lambda: io.kafka("h:1,h:x", "t"), "its port is no number"),
]


@pytest.mark.parametrize(("make", "told"), WHY, ids=range(len(WHY)))
def test_invalid_argument_is_explained(make: Callable[[], Any], told: str) -> None:
    with pytest.raises(af.GraphError, match=told):
        make()


@pytest.mark.parametrize(
    ("given", "places"),
    [
        ("h1:9092,h2:9092", ["h1:9092", "h2:9092"]),
        ("h1:9092, h2", ["h1:9092", "h2"]),
        ("nats://u:p,w@h:1,tls://u:p@h2", ["nats://u:p,w@h:1", "tls://u:p@h2"]),
        (["h1", "h2,h3"], ["h1", "h2", "h3"]),
        (5, [5]),
    ],
)
def test_servers_between_commas_are_several(given: Any, places: list[Any]) -> None:
    assert one_or_more_places(given) == places


@pytest.mark.parametrize("use", ["source", "sink"])
async def test_a_database_that_cannot_be_reached_is_named(use: str) -> None:
    table = io.postgres("postgresql://me:secret@127.0.0.1:1/db", "t")
    flow = af.Flow("f")
    flow.source(table if use == "source" else [{"a": 1}]).sink(
        table if use == "sink" else io.blackhole()
    )
    with pytest.raises(
        ConnectionRefusedError,
        match=r"postgres\(..., 't'\): the server 127.0.0.1:1 cannot be reached",
    ):
        await flow.execute()


@pytest.mark.parametrize("use", ["source", "sink"])
async def test_database_without_its_package_is_told_what_to_install(
    use: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "asyncpg", None)
    table = io.postgres("postgresql://me:secret@127.0.0.1:1/db", "t")
    flow = af.Flow("f")
    flow.source(table if use == "source" else [{"a": 1}]).sink(
        table if use == "sink" else io.blackhole()
    )
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'aioflow\[postgres\]'"):
        await flow.execute()


async def test_a_directory_that_cannot_be_made_is_named_with_its_sink() -> None:
    flow = af.Flow("f")
    flow.source([{"a": 1}]).sink(io.jsonl("/proc/x"))
    with pytest.raises(
        OSError,
        match=(
            "the sink cannot make its directory /proc/x: No such file or directory; give a path "
            "where it may"
        ),
    ):
        await flow.execute()
