"""The secret that the processes of a cluster share, in a file that only its owner can read."""

from __future__ import annotations

import os
import stat

from aioflow.core.errors import NotAuthenticated
from aioflow.protocol.handshake import SECRET_BYTES_MIN

__all__ = ["create_secret", "given_secret", "read_secret"]

FILE_MODE = 0o600


def read_secret(path: str, named: str = "by secret=Path(...)") -> bytes:
    """Reads the secret in a file.

    `named`: how the user names the file, for messages.
    Raises NotAuthenticated if there is no secret, other users may read it, or it is too short.
    """
    try:
        descriptor = os.open(
            path, os.O_RDONLY | os.O_NONBLOCK
        )  # A plain open of a pipe would block until a writer opens it.
    except FileNotFoundError:
        raise NotAuthenticated(
            f"there is no secret file {path}: name that of the cluster {named}. Its first "
            "jobmanager makes it, as `secret` in its "
            "directory (aioflow cluster start: .aioflow/secret); another machine needs a copy of "
            "it, of mode 600"
        ) from None
    except OSError as error:
        raise NotAuthenticated(
            f"secret file {path} cannot be read: {error.strerror}; name that of the cluster {named}"
        ) from error
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise NotAuthenticated(
                f"{path} is no file, expected the secret of the cluster: name it {named}"
            )
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            allowed = f"mode {stat.S_IMODE(mode):o}"
            raise NotAuthenticated(
                f"secret file {path} can be used by others ({allowed}), expected mode 600: chmod "
                f"600 {path}"
            )
        secret = os.read(descriptor, 4096).strip()
    finally:
        os.close(descriptor)
    if len(secret) < SECRET_BYTES_MIN:
        expected = f"expected at least {SECRET_BYTES_MIN}"
        raise NotAuthenticated(
            f"the secret in {path} has {len(secret)} bytes, {expected}: remove it to have one made"
        )
    return secret


def given_secret(secret: bytes | str | os.PathLike[str]) -> bytes:
    """Returns the secret that a program gives, directly or as a path. Raises NotAuthenticated."""
    if isinstance(secret, os.PathLike):
        return read_secret(os.fspath(secret))
    if not isinstance(secret, (bytes, str)):
        raise NotAuthenticated(
            "secret= takes the secret of the cluster, or secret=Path(...) of its file; got "
            f"{type(secret).__name__}"
        )
    encoded = (
        secret.strip().encode() if isinstance(secret, str) else secret
    )  # Stripped like the content of a file.
    if len(encoded) < SECRET_BYTES_MIN:
        raise NotAuthenticated(
            f"secret= has {len(encoded)} bytes, expected at least {SECRET_BYTES_MIN}; if it is "
            "the path of a file, give secret=Path(...)"
        )
    return encoded


def create_secret(path: str, secret: bytes) -> bytes:
    """Writes `secret` unless the file exists. Returns the content of the file."""
    os.makedirs(os.path.dirname(path) or ".", mode=0o700, exist_ok=True)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE)
    except FileExistsError:
        return read_secret(path, "with --secret-file")
    try:
        os.write(descriptor, secret)
    finally:
        os.close(descriptor)
    return secret
