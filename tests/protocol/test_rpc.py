"""Calls, and the answers that belong to them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from aioflow.core.errors import (
    LocalProtocolError,
    RemoteError,
    RemoteProtocolError,
    TypeNotSupported,
)
from aioflow.core.wire.serializers import Codec, DecodeError
from aioflow.core.wire.types import TypeRegistry
from aioflow.protocol import rpc
from aioflow.protocol.framing import (
    CONTROL_BYTES_MAX,
    CONTROL_PLANE,
    NO_CHANNEL,
    Frame,
    FrameDecoder,
    FrameEncoder,
    FrameType,
)
from aioflow.protocol.rpc import BadRequest, CallError, Notification, Reply, Request, RpcPeer

CODEC = Codec()


class Wire:
    """Two peers that hear each other."""

    def __init__(self) -> None:
        self.left = RpcPeer(CODEC, FrameEncoder())
        self.right = RpcPeer(CODEC, FrameEncoder())
        self.to_right = FrameDecoder(CONTROL_PLANE)
        self.to_left = FrameDecoder(CONTROL_PLANE)

    def right_hears(self, content: bytes) -> Any:
        return [self.right.receive(frame) for frame in self.to_right.receive(content)][-1]

    def left_hears(self, content: bytes) -> Any:
        return [self.left.receive(frame) for frame in self.to_left.receive(content)][-1]


@pytest.fixture
def wire() -> Wire:
    return Wire()


VALUES = [None, 1, True, (1, [2, {3}]), {"a": (1,)}, b"x" * 5_000_000, 2**100]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_arguments_and_result_keep_their_types(wire: Wire, value: Any) -> None:
    call_id, content = wire.left.call("echo", [value, "second"])
    request = wire.right_hears(content)
    assert request == Request(call_id, "echo", (value, "second"))
    assert type(request.args[0]) is type(value)
    reply = wire.left_hears(wire.right.reply(call_id, request.args[0]))
    assert reply == Reply(call_id, value)
    assert type(reply.value) is type(value)
    assert wire.left.open_calls == []


def test_answers_in_any_order_find_their_calls(wire: Wire) -> None:
    calls = [wire.left.call("ask", [number]) for number in range(5)]
    for _, content in calls:
        wire.right_hears(content)
    for call_id, _ in reversed(calls):
        assert wire.left_hears(wire.right.reply(call_id, f"answer {call_id}")) == Reply(
            call_id, f"answer {call_id}"
        )


def test_both_sides_may_call_with_the_same_numbers(wire: Wire) -> None:
    left_id, to_right = wire.left.call("a")
    right_id, to_left = wire.right.call("b")
    assert left_id == right_id
    assert wire.right_hears(to_right) == Request(left_id, "a", ())
    assert wire.left_hears(to_left) == Request(right_id, "b", ())
    assert wire.right_hears(wire.left.reply(right_id, "of b")) == Reply(right_id, "of b")
    assert wire.left_hears(wire.right.reply(left_id, "of a")) == Reply(left_id, "of a")


def test_an_error_comes_back_as_itself_with_its_traceback(wire: Wire) -> None:
    call_id, content = wire.left.call("divide", [1, 0])
    wire.right_hears(content)
    try:
        1 / 0
    except ZeroDivisionError as error:
        answer = wire.right.fail(call_id, error)
    received = wire.left_hears(answer)
    assert isinstance(received, CallError)
    assert received.call_id == call_id
    with pytest.raises(ZeroDivisionError, match="division by zero") as caught:
        raise received.error
    assert "1 / 0" in str(caught.value.__cause__)


def test_an_error_of_an_unknown_class_is_a_remote_error(wire: Wire) -> None:
    class Local(Exception):
        pass

    call_id, content = wire.left.call("x")
    wire.right_hears(content)
    received = wire.left_hears(wire.right.fail(call_id, Local("no")))
    assert isinstance(received.error, RemoteError)


def test_a_notification_gets_no_answer(wire: Wire) -> None:
    assert wire.right_hears(wire.left.notify("tell", [1])) == Notification("tell", (1,))
    assert wire.left.open_calls == []


def test_the_answer_to_a_call_that_was_given_up_is_dropped(wire: Wire) -> None:
    call_id, content = wire.left.call("slow")
    wire.right_hears(content)
    wire.left.give_up(call_id)
    wire.left.give_up(call_id)
    assert wire.left_hears(wire.right.reply(call_id, 1)) is None


def test_an_answer_to_a_call_that_was_never_made_is_the_peers_error(wire: Wire) -> None:
    for number in (0, 1, 2**63):
        for kind in (FrameType.RPC_REPLY, FrameType.RPC_ERROR):
            with pytest.raises(RemoteProtocolError, match="never made"):
                wire.left.receive(
                    Frame(kind, NO_CHANNEL, number, b"\x00" + CODEC.encode(1, owner=""))
                )


def test_a_second_answer_is_dropped(wire: Wire) -> None:
    call_id, content = wire.left.call("x")
    wire.right_hears(content)
    answer = wire.right.reply(call_id, 1)
    assert wire.left_hears(answer) == Reply(call_id, 1)
    assert wire.left_hears(answer) is None


def test_answering_twice_or_what_was_not_asked_is_our_own_bug(wire: Wire) -> None:
    call_id, content = wire.left.call("x")
    wire.right_hears(content)
    wire.right.reply(call_id, 1)
    for number in (call_id, 99):
        with pytest.raises(LocalProtocolError, match="answered twice, or never made"):
            wire.right.reply(number, 1)
        with pytest.raises(LocalProtocolError, match="answered twice, or never made"):
            wire.right.fail(number, ValueError())


def test_the_same_call_twice_is_the_peers_error(wire: Wire) -> None:
    _, content = wire.left.call("x")
    wire.right_hears(content)
    with pytest.raises(RemoteProtocolError, match="made twice"):
        wire.right_hears(content)


def test_value_that_cannot_travel_is_refused_by_name_and_the_call_can_still_fail(
    wire: Wire,
) -> None:
    with pytest.raises(TypeNotSupported, match="the arguments of deploy"):
        wire.left.call("deploy", [object()])
    assert wire.left.open_calls == []
    call_id, content = wire.left.call("deploy")
    wire.right_hears(content)
    with pytest.raises(TypeNotSupported, match="the result of deploy") as caught:
        wire.right.reply(call_id, object())
    received = wire.left_hears(wire.right.fail(call_id, caught.value))
    assert isinstance(received.error, TypeNotSupported)


def test_arguments_of_a_class_that_is_not_here_fail_their_call_alone(wire: Wire) -> None:
    class Unknown:
        pass

    types = TypeRegistry()
    types.register(Unknown, encode=lambda _: 1, decode=lambda _: Unknown(), name="only.there")
    there = RpcPeer(Codec(types), FrameEncoder())
    call_id, content = there.call("deploy", [Unknown()])
    request = wire.right_hears(content)
    assert isinstance(request, BadRequest)
    assert (request.call_id, request.method) == (call_id, "deploy")
    [frame] = FrameDecoder(CONTROL_PLANE).receive(wire.right.fail(call_id, request.error))
    received = there.receive(frame)
    assert isinstance(received, CallError)
    assert isinstance(received.error, DecodeError)


def test_a_long_call_is_cut_at_every_boundary_of_its_frames(wire: Wire) -> None:
    for size in range(2 * CONTROL_BYTES_MAX - 40, 2 * CONTROL_BYTES_MAX + 4, 3):
        argument = bytes(size)
        call_id, content = wire.left.call("x", [argument])
        assert wire.right_hears(content) == Request(call_id, "x", (argument,))
        wire.right.reply(call_id, None)


def test_a_call_longer_than_allowed_is_refused_on_both_sides(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, content = wire.left.call("x", [bytes(5 * CONTROL_BYTES_MAX)])
    monkeypatch.setattr(rpc, "CALL_BYTES_MAX", 2 * CONTROL_BYTES_MAX)
    with pytest.raises(LocalProtocolError, match="send less at once"):
        wire.left.call("x", [bytes(5 * CONTROL_BYTES_MAX)])
    with pytest.raises(RemoteProtocolError, match="takes more than"):
        wire.right_hears(content)


def test_another_call_in_the_middle_of_a_long_one_is_the_peers_error(wire: Wire) -> None:
    wire.right.receive(Frame(FrameType.RPC_REQUEST, NO_CHANNEL, 1, b"\x01abc"))
    with pytest.raises(
        RemoteProtocolError, match="RPC_REQUEST 2 came in the middle of RPC_REQUEST 1"
    ):
        wire.right.receive(Frame(FrameType.RPC_REQUEST, NO_CHANNEL, 2, b"\x00abc"))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x02",
        b"\x00",
        b"\x00\xc1",
        b"\x00" + msgspec.msgpack.encode(["m"]),
        b"\x00" + msgspec.msgpack.encode([1, b""]),
        b"\x00" + msgspec.msgpack.encode(["", b"\x01\x00\x90"]),
        b"\x00" + msgspec.msgpack.encode(["m" * 201, b"\x01\x00\x90"]),
        b"\x00" + msgspec.msgpack.encode(["m", "text"]),
        b"\x00" + msgspec.msgpack.encode({"m": 1}),
    ],
    ids=lambda body: body[:8].hex() or "empty",
)
def test_a_malformed_call_is_a_protocol_error(wire: Wire, body: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        wire.right.receive(Frame(FrameType.RPC_REQUEST, NO_CHANNEL, 1, body))


def test_a_frame_of_the_data_plane_is_no_part_of_a_call(wire: Wire) -> None:
    with pytest.raises(RemoteProtocolError, match="BUFFER_RESPONSE frame is no part of a call"):
        wire.right.receive(Frame(FrameType.BUFFER_RESPONSE, 1, 1, b"\x00"))
