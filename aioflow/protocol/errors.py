"""Errors of the data plane, and the transfer of any error as data.

An error is sent as class name, arguments, message, traceback text and notes. Nothing is pickled and
nothing is imported. The receiver rebuilds the error only if its class is loaded there already, is
an Exception, and the rebuilt error has the original message. Otherwise a RemoteError carries the
same facts. Either way the remote traceback is the `__cause__` of the error.

Long content is shortened, but an error keeps its class. A message keeps its beginning, a text with
a decoding error the part around that error, a group the members that fit. Message and arguments of
one error together, for a group including all its members, take at most 64 KiB.
"""

from __future__ import annotations

import sys
from json import JSONDecodeError
from typing import Any

from aioflow.core.errors import (
    AioflowError,
    Broken,
    RemoteError,
    RemoteProtocolError,
    TypeNotSupported,
    add_note,
    message_of,
)
from aioflow.core.user_code import format_folded
from aioflow.core.wire.serializers import Codec, DecodeError
from aioflow.protocol.framing import FrameType
from aioflow.protocol.messages import ErrorResponse, decode_message, message_body

__all__ = [
    "BufferReordering",
    "PartitionNotFound",
    "RemoteTraceback",
    "describe_error",
    "rebuild_error",
]

_MESSAGE_CHARS_MAX = 16_384
_TRACEBACK_CHARS_MAX = 32_768
_CONTENT_BYTES_MAX = 65_536
_NOTES_MAX = 16
_NOTE_CHARS_MAX = 4_096
_TYPE_NAME_CHARS_MAX = 200
_SUBJECT_MAX = 8_192
"""Number of characters or bytes that are kept of a text that an error is about.

They fit into the limit of an error's size, however they are encoded.
"""
_MEMBER_BYTES = 1_024
"""Number of bytes by which each level of a group reduces the room for its members.

This limits how deeply groups are nested.
"""
_MEMBER_HEADER_BYTES = 8
"""Maximum overhead of the codec per member."""


class PartitionNotFound(Broken):
    """The producer does not have the partition, at least not yet. The consumer asks again after the
    back-off.
    """


class BufferReordering(RemoteProtocolError):
    """Elements of a channel arrived out of order, or some are missing."""


class RemoteTraceback(AioflowError):
    """Traceback of an error in another process, as text.

    It is only used as the `__cause__` of that error.
    """

    def __str__(self) -> str:
        return "\n" + "".join(map(str, self.args))


def describe_error(error: BaseException, codec: Codec) -> ErrorResponse:
    """Returns `error` as data.

    Never raises: parts that cannot be encoded are left out, long ones are cut.
    """
    if isinstance(error, RemoteError):
        text = error.traceback_text
    else:
        try:
            text = format_folded(error)
        except Exception:  # noqa: BLE001 - the __str__ of a user's error may do anything.
            text = ""
    return _described(error, codec, _cut_front(text, _TRACEBACK_CHARS_MAX), _CONTENT_BYTES_MAX)


def _described(error: BaseException, codec: Codec, traceback_text: str, room: int) -> ErrorResponse:
    """Returns the description of `error` to send. `room` limits the size of its message and
    arguments together, in bytes.
    """
    notes = getattr(error, "__notes__", ())
    if isinstance(error, RemoteError):  # From a third process: it keeps its description.
        return ErrorResponse(
            type_name=_cut(error.type_name, _TYPE_NAME_CHARS_MAX) or "RemoteError",
            message=_cut(
                message_of(error).removeprefix(f"{error.type_name}: "), _MESSAGE_CHARS_MAX
            ),
            traceback_text=traceback_text,
            notes=_notes(notes),
        )
    kind = type(error)
    if isinstance(error, BaseExceptionGroup):
        message = _cut(message_of(error), _MESSAGE_CHARS_MAX)
        arguments, remark = _encoded_group(error, codec, room - len(message.encode()))
    else:
        error, remark = _around_the_place(error)
        message = _cut(message_of(error), _MESSAGE_CHARS_MAX)
        arguments = _encoded_arguments(error, codec, room - len(message.encode()))
    return ErrorResponse(
        type_name=_cut(f"{kind.__module__}:{kind.__qualname__}", _TYPE_NAME_CHARS_MAX),
        message=message,
        traceback_text=traceback_text,
        arguments=arguments,
        notes=_notes((*remark, *_notes(notes))),
    )


def _encoded_group(
    group: BaseExceptionGroup[Any], codec: Codec, room: int
) -> tuple[bytes | None, tuple[str, ...]]:
    """Encodes the group's message and its first members. A note says if there are more.

    Each member is encoded as an error of its own, without a traceback, because the traceback of the
    group contains it.
    """
    message = _cut(group.message, _MESSAGE_CHARS_MAX)
    left = room - _MEMBER_BYTES - len(message.encode())
    bodies: list[bytes] = []
    for member in group.exceptions:
        body = message_body(_described(member, codec, "", left))
        left -= len(body) + _MEMBER_HEADER_BYTES
        if left < 0:
            break
        bodies.append(body)
    encoded = codec.encode_batch([message, *bodies], owner="an error group") if bodies else None
    missing = len(group.exceptions) - len(bodies)
    return encoded, (
        f"{missing} of its {len(group.exceptions)} errors are left out here: they take too much",
    ) if missing else ()


def _around_the_place(error: BaseException) -> tuple[BaseException, tuple[str, ...]]:
    """Shortens an error about a position in a long text: keeps the part of the text around the
    position.

    Returns the error and its notes. JSONDecodeError and UnicodeError contain the whole text,
    perhaps a file, and their positions refer to the whole text. Any other error is returned
    unchanged.
    """
    try:
        match error:
            case JSONDecodeError() if len(error.doc) > _SUBJECT_MAX:
                length, first = len(error.doc), max(0, error.pos - _SUBJECT_MAX // 2)
                short: BaseException = type(error)(
                    error.msg, error.doc[first : first + _SUBJECT_MAX], error.pos - first
                )
            case UnicodeDecodeError() | UnicodeEncodeError() if len(error.object) > _SUBJECT_MAX:
                length, first = len(error.object), max(0, error.start - _SUBJECT_MAX // 2)
                part: Any = error.object[first : first + _SUBJECT_MAX]
                short = type(error)(
                    error.encoding,
                    part,
                    error.start - first,
                    min(error.end - first, len(part)),
                    error.reason,
                )
            case _:
                return error, ()
    except Exception:  # noqa: BLE001 - a class derived from these has a constructor of its own.
        return error, ()
    kept = f"{first} to {min(first + _SUBJECT_MAX, length)}"
    return short, (
        f"only {kept} of the {length} that it is about came along; about all of them it says: "
        f"{message_of(error)}",
    )


def _encoded_arguments(error: BaseException, codec: Codec, room: int) -> bytes | None:
    """Encodes the constructor arguments of an error. Returns None if they cannot be encoded.

    Tries the arguments that the error gives to pickle, then `args`, then `args` with long texts
    cut. OSError for files and JSONDecodeError cannot be made from their `args`. Other errors give
    pickle arguments that are only valid in their own process, and do not need them. `_rebuild`
    checks that the message is the same.
    """
    for arguments in (_told_to_pickle, _args, _short_args):
        try:
            encoded = codec.encode_batch(list(arguments(error)), owner="an error")
        # __reduce__ and the encode= of a type are the user's; then the message must do.
        except Exception:  # noqa: BLE001
            continue
        if len(encoded) <= room:
            return encoded
    return None


def _told_to_pickle(error: BaseException) -> tuple[Any, ...]:
    made = error.__reduce__()
    return made[1] if isinstance(made, tuple) and made[0] is type(error) else error.args


def _args(error: BaseException) -> tuple[Any, ...]:
    return error.args


def _short_args(error: BaseException) -> tuple[Any, ...]:
    return tuple(
        _cut(value, _MESSAGE_CHARS_MAX) if isinstance(value, str) else value for value in error.args
    )


def rebuild_error(response: ErrorResponse, codec: Codec) -> Exception:
    """Returns the error in `response`, of its own class or a RemoteError, with notes and
    traceback.
    """
    error = _rebuild(response, codec)
    if error is None:
        name = response.type_name.removeprefix("builtins:").replace(":", ".")
        error = RemoteError(name, response.message, response.traceback_text)
    for note in response.notes:
        add_note(error, note)
    if response.traceback_text:
        # A frozen class refuses an assignment.
        object.__setattr__(error, "__cause__", RemoteTraceback(response.traceback_text))
    return error


def _rebuild(response: ErrorResponse, codec: Codec) -> Exception | None:
    cls = _loaded_class(response.type_name)
    if cls is None or response.arguments is None:
        return None
    try:
        made_of = codec.decode_batch(response.arguments)
        if issubclass(cls, ExceptionGroup):
            message, *bodies = made_of
            group = cls(message, [rebuild_error(_member(body), codec) for body in bodies])
            return group if type(group) is cls else None
        error = cls(*made_of)
        # A constructor may make its message from other values than `args`. The message would then
        # differ.
        return (
            error
            if type(error) is cls and _cut(str(error), _MESSAGE_CHARS_MAX) == response.message
            else None
        )
    except (DecodeError, TypeNotSupported):
        return None
    # The constructor is the user's; the RemoteError says all that is known.
    except Exception:  # noqa: BLE001
        return None


def _member(body: bytes) -> ErrorResponse:
    response = decode_message(FrameType.ERROR_RESPONSE, body)
    assert isinstance(response, ErrorResponse)
    return response


def _loaded_class(type_name: str) -> type[Exception] | None:
    """Returns the exception class if its module is loaded and contains it, otherwise None.

    Looks in dictionaries only, because `getattr` could import a module.
    """
    module_name, _, qualified = type_name.partition(":")
    found: Any = sys.modules.get(module_name)
    for part in qualified.split("."):
        found = getattr(found, "__dict__", {}).get(part)
    return found if isinstance(found, type) and issubclass(found, Exception) else None


def _notes(notes: Any) -> tuple[str, ...]:
    if not isinstance(notes, (list, tuple)):
        return ()
    return tuple(
        _cut(note, _NOTE_CHARS_MAX) for note in notes[:_NOTES_MAX] if isinstance(note, str)
    )


def _cut(text: str, chars_max: int) -> str:
    """Cuts a text, and replaces lone surrogates, which UTF-8 cannot encode."""
    return text[:chars_max].encode("utf-8", "replace").decode()


def _cut_front(text: str, chars_max: int) -> str:
    """Shortens a traceback to its end, which says most, and replaces lone surrogates."""
    return text[-chars_max:].encode("utf-8", "replace").decode()
