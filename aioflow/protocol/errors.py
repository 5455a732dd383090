"""Errors of the data plane, and the transfer of any error as data.

An error is sent as its class name, arguments, message, traceback as text, and notes. Nothing is
pickled or imported. The receiver rebuilds the error only if its class is loaded there already, is
an Exception, and the rebuilt error has the original message. Otherwise a RemoteError carries the
same information. Either way the remote traceback is the `__cause__` of the error.

Long content is shortened, but an error keeps its class. A message keeps its beginning, a text that
could not be decoded keeps the part around the mistake, and a group keeps the members that fit. The
message and the arguments of an error together take at most 64 KiB. For a group, this includes all
members.
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
"""Number of characters or bytes that are kept of a text to whose content an error refers.

A text of this length fits into an error's maximum size in any encoding.
"""
_MEMBER_BYTES = 1_024
"""Number of bytes by which each level of nested groups reduces the room for the members.

This limits how deeply groups can be nested.
"""
_MEMBER_HEADER_BYTES = 8
"""Maximum overhead of the codec per member of a group, in bytes."""


class PartitionNotFound(Broken):
    """The producer does not have the partition, or not yet. The consumer requests it again after a
    back-off.
    """


class BufferReordering(RemoteProtocolError):
    """Elements of a channel arrived out of order, or some are missing."""


class RemoteTraceback(AioflowError):
    """Traceback of an error in another process, as text.

    Used only as the `__cause__` of the error.
    """

    def __str__(self) -> str:
        return "\n" + "".join(map(str, self.args))


def describe_error(error: BaseException, codec: Codec) -> ErrorResponse:
    """Returns `error` as data that can be sent.

    Never raises an error. Leaves out parts that cannot be encoded, and cuts long parts.
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
    """Returns the description of `error` to send. `room` is the maximum size in bytes of its
    message and its arguments together.
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
    """Encodes the message of a group and as many members as fit into `room` bytes.

    Returns the encoded bytes, None if no member fits, and notes, which say if members are left out.

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
    """Shortens an error that refers to a position in a long text: keeps the part of the text around
    the position.

    Such errors are JSONDecodeError and UnicodeError, which contain the whole text, perhaps a whole
    file. Returns the new error, and a note that names the positions in the whole text. Returns any
    other error unchanged, without notes.
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

    Tries the arguments that pickle would use, then `args`, then `args` with long texts cut. OSError
    for files and JSONDecodeError cannot be made from their `args`. The pickle arguments of some
    other errors are valid only in their own process; these errors can be made from `args`.
    `_rebuild` checks that the message is the same.
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
    """Returns the error that `response` describes, with notes and traceback. It is an error of the
    original class or a RemoteError.
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
    """Returns the exception class with the name `type_name` if its module is loaded and contains
    it, otherwise None.

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
    """Cuts a text to its first `chars_max` characters, and replaces lone surrogates, which UTF-8
    cannot encode.
    """
    return text[:chars_max].encode("utf-8", "replace").decode()


def _cut_front(text: str, chars_max: int) -> str:
    """Cuts a traceback to its last `chars_max` characters, which are the most important, and
    replaces lone surrogates.
    """
    return text[-chars_max:].encode("utf-8", "replace").decode()
