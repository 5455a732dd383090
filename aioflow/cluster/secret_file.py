"""The secret that the processes of a cluster share, in a file that only its owner can read."""

from __future__ import annotations

import os
import stat

from aioflow.core.errors import NotAuthenticated
from aioflow.protocol.handshake import SECRET_BYTES_MIN

__all__ = ["create_secret", "read_secret"]

FILE_MODE = 0o600


def read_secret(path: str) -> bytes:
    """The secret in a file. Raises FileNotFoundError, or NotAuthenticated if others may read it or it is too short."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        mode = os.fstat(descriptor).st_mode
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            allowed = f"mode {stat.S_IMODE(mode):o}"
            raise NotAuthenticated(f"secret file {path} can be used by others ({allowed}), expected mode 600: chmod 600 {path}")
        secret = os.read(descriptor, 4096).strip()
    finally:
        os.close(descriptor)
    if len(secret) < SECRET_BYTES_MIN:
        expected = f"expected at least {SECRET_BYTES_MIN}"
        raise NotAuthenticated(f"the secret in {path} has {len(secret)} bytes, {expected}: remove it to have one made")
    return secret


def create_secret(path: str, secret: bytes) -> bytes:
    """Write `secret` unless the file exists; returns what is in the file then."""
    os.makedirs(os.path.dirname(path) or ".", mode=0o700, exist_ok=True)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE)
    except FileExistsError:
        return read_secret(path)
    try:
        os.write(descriptor, secret)
    finally:
        os.close(descriptor)
    return secret
