"""The bodies of control frames: one frozen Struct per message, as a msgpack array of fields.

A body is checked twice. First, the decoder has limits, so that a small body cannot become many
objects. Then every field is checked against the schema of its class, by exact type (True is no int)
and range. An invalid body raises RemoteProtocolError, which names the message and the field.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgpack
import msgspec

from aioflow.core.errors import RemoteProtocolError
from aioflow.protocol.framing import NO_CHANNEL, FrameEncoder, FrameType

__all__ = [
    "AckAllUserRecordsProcessed",
    "AddCredit",
    "CancelPartitionRequest",
    "CloseRequest",
    "ErrorResponse",
    "Message",
    "NewBufferSize",
    "PartitionRequest",
    "ResumeConsumption",
    "decode_message",
    "encode_message",
    "message_body",
]

CREDIT_MAX = 1 << 20
"""Maximum number of announced and filled buffers of one channel, which are 32 GiB of segments.

A larger number is invalid.
"""

SEQUENCE_MAX = 2**63 - 1
_ID_CHARS_MAX = 200
_TEXT_CHARS_MAX = 65_536
_ARGUMENT_BYTES_MAX = 65_536
_NOTES_MAX = 32


class PartitionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Requests a subpartition, from the beginning or, on a new connection, from a later frame.

    `credit` is the number of buffers that are ready now. `resume_from` is the sequence number of
    the first frame that the consumer has not received. `blocked` means that the consumer has
    received a blocking event and has not resumed yet.
    """

    partition_id: str
    subpartition_index: int
    credit: int
    resume_from: int = 0
    blocked: bool = False


class ErrorResponse(msgspec.Struct, frozen=True, kw_only=True):
    """An error as data, never as a pickle; see `protocol.errors`.

    If the frame has a channel number, the error ends this channel, otherwise all channels.
    """

    type_name: str
    """Class of the error, as `module:qualified name`."""
    message: str
    traceback_text: str = ""
    arguments: bytes | None = None
    """Arguments of the error's constructor as a batch of the codec; None if they cannot be encoded.
    """
    notes: tuple[str, ...] = ()


class CancelPartitionRequest(msgspec.Struct, frozen=True):
    """Cancels a channel. If the frame has no channel number, cancels all channels that were not
    requested on this connection.
    """


class CloseRequest(msgspec.Struct, frozen=True):
    """Announces that the sender is about to close the connection, and cancels all channels that the
    sender reads.
    """


class AddCredit(msgspec.Struct, frozen=True):
    """Announces that `credit` more buffers are ready.

    The consuming task has taken over all frames with a sequence number below `taken_over`.
    """

    credit: int
    taken_over: int


class ResumeConsumption(msgspec.Struct, frozen=True):
    """Asks the producer to continue after a blocking event."""


class AckAllUserRecordsProcessed(msgspec.Struct, frozen=True):
    """Reports that the consumer has processed every record up to EndOfData."""


class NewBufferSize(msgspec.Struct, frozen=True):
    """Asks the producer for batches of up to `records` records.

    This limits how long the consumer needs for all queued data.
    """

    records: int


Message = (
    PartitionRequest
    | ErrorResponse
    | CancelPartitionRequest
    | CloseRequest
    | AddCredit
    | ResumeConsumption
    | AckAllUserRecordsProcessed
    | NewBufferSize
)


def encode_message(encoder: FrameEncoder, message: Message, channel: int = NO_CHANNEL) -> bytes:
    """Returns `message` as a frame of `channel`."""
    return encoder.encode(_TYPE_OF[type(message)], channel, 0, message_body(message))


def message_body(message: Message) -> bytes:
    """Returns the body of `message`."""
    return _pack([getattr(message, name) for name in _NAMES_OF[type(message)]])


def decode_message(kind: FrameType, body: bytes) -> Message:
    """Returns the message of a frame of type `kind`.

    Raises RemoteProtocolError, which names the message and the field, if the body is invalid.
    """
    if kind is FrameType.ADD_CREDIT:
        # AddCredit is the only message per batch: a valid one is decoded in a fifth of the time.
        try:
            credit, taken_over = _unpack_credit(body)
        except (msgspec.MsgspecError, RecursionError):
            pass  # The general path below names the error.
        else:
            if 0 <= credit <= CREDIT_MAX and 0 <= taken_over <= SEQUENCE_MAX:
                return AddCredit(credit, taken_over)
    cls, schema = _SCHEMAS[kind]
    fields = unpack_fields(body, cls.__name__, len(schema))
    for index, (name, expected, check) in enumerate(schema):
        value = fields[index]
        if not check(value):
            raise RemoteProtocolError(
                f"{cls.__name__}.{name} is {_shown(value)}, expected {expected}"
            )
        if type(value) is list:
            fields[index] = tuple(value)
    # By name: some classes only take keywords.
    message: Message = cls(
        **{name: value for (name, _, _), value in zip(schema, fields, strict=True)}
    )
    return message


def unpack_fields(body: bytes, subject: str, count: int) -> list[Any]:
    """Returns the `count` fields of a msgpack array. The fields may have any type except map and
    extension.

    Raises RemoteProtocolError, which names `subject`, if the body is invalid.
    """
    try:
        fields = msgpack.unpackb(
            body,
            raw=False,
            strict_map_key=True,
            max_array_len=_NOTES_MAX,
            max_map_len=0,
            max_ext_len=0,
            ext_hook=_refuse_extension,
        )
    except Exception as error:  # msgpack raises seven unrelated classes for malformed bytes.
        raise RemoteProtocolError(
            f"{subject} of {len(body)} bytes is malformed: {type(error).__name__}: {error}"
        ) from error
    if type(fields) is not list or len(fields) != count:
        given = f"{len(fields)} fields" if type(fields) is list else f"a {type(fields).__name__}"
        raise RemoteProtocolError(
            f"{subject} has {given}, expected {count} fields; run the same release on both sides"
        )
    return fields


Check = Callable[[Any], bool]
_Field = tuple[str, str, Check]


def _int(name: str, low: int, high: int) -> _Field:
    return (
        name,
        f"an int from {low} to {high}",
        lambda value: type(value) is int and low <= value <= high,
    )


def _text(name: str, chars_max: int) -> _Field:
    return (
        name,
        f"a str of up to {chars_max} characters",
        lambda value: type(value) is str and len(value) <= chars_max,
    )


def _id(name: str) -> _Field:
    return (
        name,
        f"a str of 1 to {_ID_CHARS_MAX} characters",
        lambda value: type(value) is str and 0 < len(value) <= _ID_CHARS_MAX,
    )


def _flag(name: str) -> _Field:
    return name, "a bool", lambda value: type(value) is bool


def _binary_or_none(name: str) -> _Field:
    return (
        name,
        "bytes or None",
        lambda value: value is None or (type(value) is bytes and len(value) <= _ARGUMENT_BYTES_MAX),
    )


def _texts(name: str) -> _Field:
    return (
        name,
        "a list of str",
        lambda value: type(value) is list and all(type(item) is str for item in value),
    )


_ERROR_FIELDS: Final = (
    _id("type_name"),
    _text("message", _TEXT_CHARS_MAX),
    _text("traceback_text", _TEXT_CHARS_MAX),
    _binary_or_none("arguments"),
    _texts("notes"),
)

_SCHEMAS: Final[dict[FrameType, tuple[type[Any], tuple[_Field, ...]]]] = {
    FrameType.ERROR_RESPONSE: (ErrorResponse, _ERROR_FIELDS),
    FrameType.PARTITION_REQUEST: (
        PartitionRequest,
        (
            _id("partition_id"),
            _int("subpartition_index", 0, 2**31 - 1),
            _int("credit", 0, CREDIT_MAX),
            _int("resume_from", 0, SEQUENCE_MAX),
            _flag("blocked"),
        ),
    ),
    FrameType.CANCEL_PARTITION_REQUEST: (CancelPartitionRequest, ()),
    FrameType.CLOSE_REQUEST: (CloseRequest, ()),
    FrameType.ADD_CREDIT: (
        AddCredit,
        (_int("credit", 0, CREDIT_MAX), _int("taken_over", 0, SEQUENCE_MAX)),
    ),
    FrameType.RESUME_CONSUMPTION: (ResumeConsumption, ()),
    FrameType.ACK_ALL_USER_RECORDS_PROCESSED: (AckAllUserRecordsProcessed, ()),
    FrameType.NEW_BUFFER_SIZE: (NewBufferSize, (_int("records", 1, 2**31 - 1),)),
    # The error of a call has the same schema, and differs only in its frame type.
    FrameType.RPC_ERROR: (ErrorResponse, _ERROR_FIELDS),
}

_TYPE_OF: Final[dict[type, FrameType]] = {
    cls: kind for kind, (cls, _) in reversed(_SCHEMAS.items())
}
_NAMES_OF: Final[dict[type, tuple[str, ...]]] = {
    cls: tuple(name for name, _, _ in schema) for cls, schema in _SCHEMAS.values()
}


def _refuse_extension(code: int, data: bytes) -> Any:
    raise ValueError(f"extension type {code} is not part of the protocol")


def _shown(value: Any) -> str:
    """Formats a value for an error message.

    Shows numbers as they are. Shows only the type and the length of text and containers.
    """
    if type(value) in (int, float, bool, type(None)):
        return repr(value)[:40]
    return f"a {type(value).__name__}" + (
        f" of length {len(value)}" if hasattr(value, "__len__") else ""
    )


_pack: Final[Callable[[Any], bytes]] = msgspec.msgpack.Encoder().encode
_unpack_credit: Final[Callable[[bytes], tuple[int, int]]] = msgspec.msgpack.Decoder(
    tuple[int, int]
).decode
