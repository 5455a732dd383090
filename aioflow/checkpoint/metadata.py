"""The metadata of a checkpoint and its encoding: msgpack with a version, sealed by a digest.
Metadata never contains code.

    magic (8)  digest (16)  version (1)  length of the MAC (1: 0 or 32)  MAC  body (msgpack)

The digest covers all bytes that follow it, so damage to any byte is found. The MAC is a keyed
BLAKE2b over version and body, and is present if the store has a key. A file with a MAC is read only
with its key; with a key, only files with a valid MAC are read. Magic, digest and version stay where
they are in every later version.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn, TypeVar

import msgpack

from aioflow.checkpoint.completed import (
    ChannelSide,
    ChannelStateHandle,
    CheckpointedOperator,
    CheckpointKind,
    CompletedCheckpoint,
    OperatorStateHandle,
    SubtaskState,
)
from aioflow.core.errors import RestoreError
from aioflow.state.snapshot import KeyedStateHandle, StateFile

__all__ = [
    "decode_metadata", "decode_subtask", "encode_metadata", "encode_subtask", "map_files",
    "rename_files", "seal", "shown", "unseal",
]  # fmt: skip

T = TypeVar("T")

MAGIC = b"AIOFCKPT"
VERSION = 1
DIGEST_BYTES = 16
MAC_BYTES = 32


def shown(checkpoint: CompletedCheckpoint) -> str:
    """Returns the name of the checkpoint, for log and error messages."""
    return (
        f"{'savepoint' if checkpoint.kind.is_savepoint else 'checkpoint'} "
        f"{checkpoint.checkpoint_id} of flow {checkpoint.flow!r}"
    )


def encode_metadata(checkpoint: CompletedCheckpoint, key: bytes | None = None) -> bytes:
    """Returns the content of the metadata file of `checkpoint`.

    The content does not include the checkpoint's location, because the file may be moved.
    """
    body = [
        checkpoint.checkpoint_id,
        checkpoint.kind.value,
        checkpoint.flow,
        checkpoint.job_id,
        checkpoint.triggered_ms,
        checkpoint.completed_ms,
        [
            [operator.uid, operator.name, operator.parallelism, operator.max_parallelism]
            for operator in checkpoint.operators
        ],
        [
            [uid, index, encode_subtask(state)]
            for (uid, index), state in checkpoint.subtasks.items()
        ],
    ]
    return seal(body, key)


def decode_metadata(data: bytes, where: str, key: bytes | None = None) -> CompletedCheckpoint:
    """Returns the checkpoint from the content `data` of the metadata file `where`.

    Raises RestoreError, naming the file, if `encode_metadata` did not write the content.
    """
    number, kind, flow, job_id, triggered_ms, completed_ms, operators, subtasks = _parse(
        unseal(data, where, key), where, _BODY
    )
    if kind not in list(CheckpointKind):
        _refuse(where, f"it is of the unknown kind {kind!r}")
    found = []
    for entry in operators:
        uid, name, parallelism, max_parallelism = _parse(entry, where, _OPERATOR)
        found.append(
            CheckpointedOperator(
                uid=uid, name=name, parallelism=parallelism, max_parallelism=max_parallelism
            )
        )
    return CompletedCheckpoint(
        checkpoint_id=number,
        kind=CheckpointKind(kind),
        flow=flow,
        job_id=job_id,
        triggered_ms=triggered_ms,
        completed_ms=completed_ms,
        operators=tuple(found),
        subtasks=dict(_subtask_entry(entry, where) for entry in subtasks),
    )


def encode_subtask(state: SubtaskState) -> list[Any]:
    """Returns `state` as plain data for msgpack. Metadata and acknowledgements contain it."""
    return [
        [
            [
                operator.uid,
                None if operator.keyed is None else _keyed(operator.keyed),
                _file(operator.operator),
                _file(operator.source),
            ]
            for operator in state.operators
        ],
        [
            [channel.edge_id, channel.side.value, channel.index, _file(channel.file)]
            for channel in state.channels
        ],
        state.finished,
    ]


def decode_subtask(data: Any, where: str) -> SubtaskState:
    """Returns the state from the plain data that `encode_subtask` made.

    Raises RestoreError for any other data; the error names `where`, the origin of the data.
    """
    operators, channels, finished = _parse(data, where, (list, list, bool))
    return SubtaskState(
        tuple(_operator_from(entry, where) for entry in operators),
        tuple(_channel_from(entry, where) for entry in channels),
        finished,
    )


def rename_files(
    checkpoint: CompletedCheckpoint, rename: Callable[[str], str]
) -> CompletedCheckpoint:
    """Returns the checkpoint with each file renamed by `rename`. Inline content has no name."""
    return map_files(
        checkpoint,
        lambda file: file if file.content is not None else replace(file, name=rename(file.name)),
    )


def seal(body: Any, key: bytes | None = None) -> bytes:
    """Returns plain data `body` as bytes with a digest, so that `unseal` detects damage.

    With a `key`, `unseal` also detects changes made by anyone without the key.
    """
    packed: bytes = msgpack.packb(body, unicode_errors="surrogatepass")
    version = bytes([VERSION])
    mac = b"" if key is None else _mac(version + packed, key)
    rest = version + bytes([len(mac)]) + mac + packed
    return MAGIC + _digest(rest) + rest


def unseal(data: bytes, where: str, key: bytes | None = None) -> Any:
    """Returns the plain data that `seal` encoded. Raises RestoreError for any other `data`; the
    error names `where`, the origin of `data`.
    """
    if data[: len(MAGIC)] != MAGIC:
        _refuse(where, "it does not begin as such a file does")
    digest, rest = data[len(MAGIC) : len(MAGIC) + DIGEST_BYTES], data[len(MAGIC) + DIGEST_BYTES :]
    if digest != _digest(rest) or len(rest) < 2:
        _refuse(where, f"its {len(data)} bytes do not match their digest")
    if rest[0] != VERSION:
        raise RestoreError(
            f"{where} has version {rest[0]}, this aioflow reads {VERSION}: use the one that wrote "
            "it, or a newer one"
        )
    mac, packed = rest[2 : 2 + rest[1]], rest[2 + rest[1] :]
    if key is None and mac:
        # A job with the key would refuse later files that a job without the key writes.
        raise RestoreError(
            f"{where} was written with a key: give the same checkpoint_key= "
            f"(--checkpoint-key-file); {_WITHOUT}"
        )
    if key is not None and not hmac.compare_digest(mac, _mac(rest[:1] + packed, key)):
        raise RestoreError(
            f"{where} was not written with the key of this "
            f"store{'' if mac else ', and with none'}: it is not trusted; {_WITHOUT}"
        )
    try:
        return msgpack.unpackb(packed, strict_map_key=False, unicode_errors="surrogatepass")
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as error:
        _refuse(where, f"another format: {error}")


_WITHOUT = "without that key its state is lost: to begin again, give restore=None, fresh=True"


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()


def _mac(data: bytes, key: bytes) -> bytes:
    # Hashed, because a key may be longer than the 64 bytes that BLAKE2b takes.
    return hashlib.blake2b(data, digest_size=MAC_BYTES, key=hashlib.blake2b(key).digest()).digest()


def _refuse(where: str, why: str) -> NoReturn:
    raise RestoreError(f"{where} cannot be read: {why}. It is damaged: restore it from a copy")


# To plain data.


def _file(file: StateFile | None) -> list[Any] | None:
    return None if file is None else [file.name, file.size, file.digest, file.content]


def _keyed(handle: KeyedStateHandle) -> list[Any]:
    files = [_file(file) for file in handle.files]
    return [
        handle.format,
        handle.max_parallelism,
        handle.first_group,
        handle.last_group,
        files,
        handle.meta,
    ]


# From plain data: types are checked one by one, so that any malformed content ends in the same kind
# of error.

_Shape = tuple[type | tuple[type, ...], ...]
_NONE = type(None)

_BODY: _Shape = (int, str, str, str, int, int, list, list)
_OPERATOR: _Shape = (str, str, int, int)
_FILE: _Shape = (str, int, bytes, (bytes, _NONE))
_KEYED: _Shape = (str, int, int, int, list, dict)


def _parse(data: Any, where: str, shape: _Shape) -> list[Any]:
    if type(data) is not list or len(data) != len(shape):
        _refuse(where, f"expected {len(shape)} fields, found {type(data).__name__}")
    for value, expected in zip(data, shape, strict=True):
        # By exact type: True is no number here.
        if type(value) not in (expected if isinstance(expected, tuple) else (expected,)):
            _refuse(where, f"a field is {type(value).__name__}")
        if type(value) is int and value < 0:
            _refuse(where, f"a field is {value}")
    return data


def _subtask_entry(data: Any, where: str) -> tuple[tuple[str, int], SubtaskState]:
    uid, index, state = _parse(data, where, (str, int, list))
    return (uid, index), decode_subtask(state, where)


def _operator_from(data: Any, where: str) -> OperatorStateHandle:
    uid, keyed, operator, source = _parse(
        data, where, (str, (list, _NONE), (list, _NONE), (list, _NONE))
    )
    return OperatorStateHandle(
        uid,
        None if keyed is None else _keyed_from(keyed, where),
        None if operator is None else _file_from(operator, where),
        None if source is None else _file_from(source, where),
    )


def _channel_from(data: Any, where: str) -> ChannelStateHandle:
    edge_id, side, index, file = _parse(data, where, (int, str, int, list))
    if side not in ChannelSide.__members__.values():
        _refuse(where, f"data in flight wait in the unknown place {side!r}")
    return ChannelStateHandle(edge_id, ChannelSide(side), index, _file_from(file, where))


def _keyed_from(data: list[Any], where: str) -> KeyedStateHandle:
    form, max_parallelism, first, last, files, meta = _parse(data, where, _KEYED)
    if not first <= last < max_parallelism:
        _refuse(where, f"key groups from {first} to {last} of {max_parallelism}")
    return KeyedStateHandle(
        form, max_parallelism, first, last, tuple(_file_from(file, where) for file in files), meta
    )


def _file_from(data: Any, where: str) -> StateFile:
    name, size, digest, content = _parse(data, where, _FILE)
    if len(digest) != DIGEST_BYTES or (content is not None) != (name == ""):
        _refuse(where, "a state file has neither a name nor its content")
    return StateFile(name, size, digest, content)


def map_files(
    checkpoint: CompletedCheckpoint, change: Callable[[StateFile], StateFile]
) -> CompletedCheckpoint:
    """Returns the checkpoint with each of its files replaced by `change(file)`, called in order."""

    def maybe(file: StateFile | None) -> StateFile | None:
        return None if file is None else change(file)

    def operator(handle: OperatorStateHandle) -> OperatorStateHandle:
        keyed = handle.keyed
        if keyed is not None:
            keyed = replace(keyed, files=tuple(change(file) for file in keyed.files))
        return replace(
            handle, keyed=keyed, operator=maybe(handle.operator), source=maybe(handle.source)
        )

    def subtask(state: SubtaskState) -> SubtaskState:
        channels = tuple(replace(channel, file=change(channel.file)) for channel in state.channels)
        return replace(
            state,
            operators=tuple(operator(handle) for handle in state.operators),
            channels=channels,
        )

    return replace(
        checkpoint, subtasks={place: subtask(state) for place, state in checkpoint.subtasks.items()}
    )
