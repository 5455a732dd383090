"""Errors of the data plane, and how any error travels: as class name, arguments, message, traceback text and notes.

Nothing is pickled and nothing is imported: a class is rebuilt only if it is loaded here already, is an Exception, and the rebuilt
error says what the original said. Otherwise a RemoteError carries the same facts. Either way the remote traceback is its cause.
"""

from __future__ import annotations

import sys
import traceback
from typing import Any

from aioflow.core.errors import AioflowError, Broken, RemoteError, RemoteProtocolError, TypeNotSupported
from aioflow.core.serializers import Codec, DecodeError
from aioflow.protocol.messages import ErrorResponse

__all__ = ["BufferReordering", "PartitionNotFound", "RemoteTraceback", "describe_error", "rebuild_error"]

_MESSAGE_CHARS_MAX = 16_384
_TRACEBACK_CHARS_MAX = 32_768
_ARGUMENT_BYTES_MAX = 65_536
_NOTES_MAX = 16
_NOTE_CHARS_MAX = 4_096
_TYPE_NAME_CHARS_MAX = 200


class PartitionNotFound(Broken):
    """The producer has not registered the partition, yet or any more: ask again after the back-off."""


class BufferReordering(RemoteProtocolError):
    """Elements of a channel arrived out of order, or some are missing."""


class RemoteTraceback(AioflowError):
    """Where an error of another process was raised, as text. Only ever the `__cause__` of that error."""

    def __str__(self) -> str:
        return "\n" + "".join(map(str, self.args))


def describe_error(error: BaseException, codec: Codec) -> ErrorResponse:
    """Returns `error` as data. Never raises: what cannot travel is left out, what is long is cut."""
    notes = getattr(error, "__notes__", ())
    if isinstance(error, RemoteError):  # From further away: it stays what it was there.
        return ErrorResponse(
            type_name=_cut(error.type_name, _TYPE_NAME_CHARS_MAX) or "RemoteError",
            message=_cut(_message(error).removeprefix(f"{error.type_name}: "), _MESSAGE_CHARS_MAX),
            traceback_text=_cut_front(error.traceback_text, _TRACEBACK_CHARS_MAX),
            notes=_notes(notes),
        )
    kind = type(error)
    try:
        text = "".join(traceback.format_exception(error))
    except Exception:  # noqa: BLE001 - the __str__ of a user's error may do anything.
        text = ""
    return ErrorResponse(
        type_name=_cut(f"{kind.__module__}:{kind.__qualname__}", _TYPE_NAME_CHARS_MAX),
        message=_cut(_message(error), _MESSAGE_CHARS_MAX),
        traceback_text=_cut_front(text, _TRACEBACK_CHARS_MAX),
        arguments=_encoded_arguments(error, codec),
        notes=_notes(notes),
    )


def _encoded_arguments(error: BaseException, codec: Codec) -> bytes | None:
    """What its class makes it of: what it tells pickle or, where that cannot travel, its `args`. None when neither can.

    An OSError of a file and JSONDecodeError have `args` that their class does not make them of; others hold for pickle what is only good
    in their own process, and are themselves without it. Whether the error says the same is seen where it is rebuilt.
    """
    for arguments in (_told_to_pickle, _args):
        try:
            encoded = codec.encode_batch(list(arguments(error)), owner="an error")
        except Exception:  # noqa: BLE001 - __reduce__ and the encode= of a type are the user's; then the message must do.
            continue
        if len(encoded) <= _ARGUMENT_BYTES_MAX:
            return encoded
    return None


def _told_to_pickle(error: BaseException) -> tuple[Any, ...]:
    made = error.__reduce__()
    return made[1] if isinstance(made, tuple) and made[0] is type(error) else error.args


def _args(error: BaseException) -> tuple[Any, ...]:
    return error.args


def rebuild_error(response: ErrorResponse, codec: Codec) -> Exception:
    """Returns the error that `response` describes, of its own class or a RemoteError, with notes and remote traceback."""
    error = _rebuild(response, codec)
    if error is None:
        name = response.type_name.removeprefix("builtins:").replace(":", ".")
        error = RemoteError(name, response.message, response.traceback_text)
    for note in response.notes:
        error.add_note(note)
    if response.traceback_text:
        error.__cause__ = RemoteTraceback(response.traceback_text)
    return error


def _rebuild(response: ErrorResponse, codec: Codec) -> Exception | None:
    cls = _loaded_class(response.type_name)
    if cls is None or response.arguments is None:
        return None
    try:
        error = cls(*codec.decode_batch(response.arguments))
        # A constructor that makes its message of other things than `args` would say something else than the original.
        return error if type(error) is cls and str(error) == response.message else None
    except (DecodeError, TypeNotSupported):
        return None
    except Exception:  # noqa: BLE001 - the constructor is the user's; the RemoteError says all that is known.
        return None


def _loaded_class(type_name: str) -> type[Exception] | None:
    """Looks in dictionaries only: `getattr` could import a module lazily."""
    module_name, _, qualified = type_name.partition(":")
    found: Any = sys.modules.get(module_name)
    for part in qualified.split("."):
        found = getattr(found, "__dict__", {}).get(part)
    return found if isinstance(found, type) and issubclass(found, Exception) else None


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as failure:  # noqa: BLE001 - see above.
        return f"(its message cannot be shown: {type(failure).__name__})"


def _notes(notes: Any) -> tuple[str, ...]:
    if not isinstance(notes, (list, tuple)):
        return ()
    return tuple(_cut(note, _NOTE_CHARS_MAX) for note in notes[:_NOTES_MAX] if isinstance(note, str))


def _cut(text: str, chars_max: int) -> str:
    """Without lone surrogates, which UTF-8 cannot write."""
    return text[:chars_max].encode("utf-8", "replace").decode()


def _cut_front(text: str, chars_max: int) -> str:
    """The end of a traceback says most."""
    return text[-chars_max:].encode("utf-8", "replace").decode()
