"""Control messages: what is written is read, and anything else is refused with the name of the
field.
"""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest

from aioflow.core.errors import RemoteProtocolError
from aioflow.core.wire.serializers import Codec
from aioflow.protocol.errors import describe_error
from aioflow.protocol.framing import LENGTH_MAX, NO_CHANNEL, FrameDecoder, FrameEncoder, FrameType
from aioflow.protocol.messages import (
    AckAllUserRecordsProcessed,
    AddCredit,
    CancelPartitionRequest,
    CloseRequest,
    ErrorResponse,
    Message,
    NewBufferSize,
    PartitionRequest,
    ResumeConsumption,
    decode_message,
    encode_message,
    message_body,
)

REQUEST = PartitionRequest(
    partition_id="map-0",
    subpartition_index=3,
    credit=1,
    resume_from=2**40,
    blocked=True,
)

MESSAGES: list[Message] = [
    REQUEST,
    ErrorResponse(
        type_name="builtins:ValueError",
        message="no",
        traceback_text="at",
        arguments=b"\x01",
        notes=("a", "b"),
    ),
    ErrorResponse(type_name="x", message=""),
    CancelPartitionRequest(),
    CloseRequest(),
    AddCredit(0, 2**62),
    ResumeConsumption(),
    AckAllUserRecordsProcessed(),
    NewBufferSize(32_768),
]

REQUEST_FIELDS: list[Any] = ["map-0", 3, 1, 0, False]


def body(*fields: Any) -> bytes:
    return msgspec.msgpack.encode(fields)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_written_messages_are_read_back(message: Message) -> None:
    [frame] = FrameDecoder().receive(encode_message(FrameEncoder(), message, 5))
    assert frame.channel == 5
    assert decode_message(frame.type, frame.body) == message
    [frame] = FrameDecoder().receive(encode_message(FrameEncoder(), message))
    assert frame.channel == NO_CHANNEL


def test_every_message_is_among_those_tested() -> None:
    assert {type(message) for message in MESSAGES} == set(get_args(Message))


@pytest.mark.parametrize(
    ("index", "value", "expected"),
    [
        (0, 5, "PartitionRequest.partition_id is 5, expected a str of 1 to 200"),
        (0, "", "PartitionRequest.partition_id is a str of length 0"),
        (0, "x" * 201, "PartitionRequest.partition_id is a str of length 201"),
        (0, b"map-0", "PartitionRequest.partition_id is a bytes"),
        (1, -1, "PartitionRequest.subpartition_index is -1"),
        (1, 2**31, "PartitionRequest.subpartition_index is 2147483648"),
        (1, "3", "PartitionRequest.subpartition_index is a str"),
        (2, True, "PartitionRequest.credit is True, expected an int"),
        (2, 1.0, "PartitionRequest.credit is 1.0"),
        (2, float("nan"), "PartitionRequest.credit is nan"),
        (2, -0.0, "PartitionRequest.credit is -0.0"),
        (2, 2**64 - 1, "PartitionRequest.credit is 18446744073709551615"),
        (2, 2**31, "PartitionRequest.credit is 2147483648"),
        (2, None, "PartitionRequest.credit is None"),
        (3, [1], "PartitionRequest.resume_from is a list of length 1"),
        (3, 2**63, "PartitionRequest.resume_from is 9223372036854775808"),
        (4, 1, "PartitionRequest.blocked is 1, expected a bool"),
    ],
)
def test_a_wrong_field_is_refused_by_name(index: int, value: Any, expected: str) -> None:
    fields = list(REQUEST_FIELDS)
    fields[index] = value
    with pytest.raises(RemoteProtocolError) as caught:
        decode_message(FrameType.PARTITION_REQUEST, body(*fields))
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "fields", "expected"),
    [
        (FrameType.ADD_CREDIT, (-1, 0), "AddCredit.credit is -1"),
        (FrameType.ADD_CREDIT, (2**31, 0), "AddCredit.credit is 2147483648"),
        (FrameType.ADD_CREDIT, (1, -1), "AddCredit.taken_over is -1"),
        (FrameType.NEW_BUFFER_SIZE, (0,), "NewBufferSize.records is 0"),
        (FrameType.ERROR_RESPONSE, ("x", 1, "", None, []), "ErrorResponse.message is 1"),
        (FrameType.ERROR_RESPONSE, ("x", "", "", "", []), "ErrorResponse.arguments is a str"),
        (FrameType.ERROR_RESPONSE, ("x", "", "", None, [1]), "ErrorResponse.notes is a list"),
        (FrameType.ERROR_RESPONSE, ("x", "", "", None, "note"), "ErrorResponse.notes is a str"),
        (FrameType.ADD_CREDIT, (1,), "AddCredit has 1 fields, expected 2"),
        (FrameType.ADD_CREDIT, (1, 2, 3), "AddCredit has 3 fields, expected 2"),
        (FrameType.CLOSE_REQUEST, (1,), "CloseRequest has 1 fields, expected 0"),
    ],
)
def test_a_message_against_its_schema_is_refused(
    kind: FrameType, fields: tuple[Any, ...], expected: str
) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        decode_message(kind, body(*fields))
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xc1",
        b"\x92\x01",
        b"\x92\x01\x02\x03",
        b"\x91" * 512,
        b"\x91" * 100_000,
        b"\x80",
        b"\x05",
        b"\x81\x91\x01\x02",
        b"\x92\x80\x80",
        b"\xdc\x00\x21" + b"\x00" * 33,
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x92\xa2\xff\xfe\x00",
        b"\x92\xd6\xff\x00\x00\x00\x00\x00",
        b"\x92\xc7\x00\x05\x00",
        b"\x80" * 100_000,
    ],
    ids=lambda content: f"{content[:6].hex()} of {len(content)}",
)
def test_a_malformed_body_is_a_protocol_error_that_names_the_message(content: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="AddCredit"):
        decode_message(FrameType.ADD_CREDIT, content)


def test_a_hostile_value_is_not_repeated_in_the_message() -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        decode_message(FrameType.NEW_BUFFER_SIZE, body("x" * 1000))
    assert "xxx" not in str(caught.value)


def test_the_largest_messages_fit_their_frames() -> None:
    longest = PartitionRequest(
        partition_id="\U0001f600" * 200,
        subpartition_index=2**31 - 1,
        credit=2**20,
        resume_from=2**63 - 1,
    )
    assert len(message_body(longest)) <= LENGTH_MAX[FrameType.PARTITION_REQUEST]
    error = ValueError("\U0001f600" * 100_000, b"x" * 60_000)
    for _ in range(100):
        error.add_note("\U0001f600" * 100_000)
    response = describe_error(error, Codec())
    content = message_body(response)
    assert len(content) <= LENGTH_MAX[FrameType.ERROR_RESPONSE]
    assert decode_message(FrameType.ERROR_RESPONSE, content) == response
