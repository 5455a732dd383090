"""Opens stores by URL, and computes the place of a flow in a store.

A flow's name is any text. In its directory every character but `[A-Za-z0-9_-]` is written as a dot
and two hexadecimal digits for each byte of its UTF-8. The result is cut into segments, of which all
but the last end with `.-`. So each flow name has exactly one place, and each place belongs to one
name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from aioflow.checkpoint.objects import DirectoryObjects, MemoryObjects, ObjectStore
from aioflow.core.errors import CheckpointError
from aioflow.inspection.redaction import redacted

if TYPE_CHECKING:
    from aioflow.core.host import Host

__all__ = [
    "SCHEMES",
    "encode_flow",
    "flow_url",
    "join_url",
    "local_path",
    "open_objects",
]

REMOTE_SCHEMES = ("s3", "gs", "az")
SCHEMES = ("file", "memory", *REMOTE_SCHEMES)

PLAIN = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-")
GOES_ON = ".-"
SEGMENT_LENGTH = 62
"""Length of a segment without its mark. A segment of an object's name has at most 64 characters."""


def open_objects(url: str, host: Host) -> ObjectStore:
    """Returns the object store at a URL.

    The possible URLs are `file:///path` or just a path, `memory://name`, `s3://bucket/prefix`,
    `gs://` and `az://`. Does no I/O. Raises CheckpointError for an unknown kind of URL, or if the
    extra for it is not installed.
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        if not url:
            raise CheckpointError(
                "the URL of a store is empty, expected for example file:///var/lib/app/checkpoints"
            )
        return DirectoryObjects(host, url)
    if scheme == "file":
        path = local_path(url)
        if path is None:
            raise CheckpointError(
                f"store {url} names another machine, expected three slashes and an absolute path: "
                f"file:///{rest}"
            )
        return DirectoryObjects(host, path)
    if scheme == "memory":
        if not rest.strip("/"):
            raise CheckpointError(f"store {url} has no name, expected memory://NAME")
        return MemoryObjects(host, rest)
    if scheme in REMOTE_SCHEMES:
        try:
            from aioflow.checkpoint.cloud_objects import RemoteObjects  # Its package is an extra.
        except ModuleNotFoundError as error:
            raise CheckpointError(
                f"store {url} needs the package obstore, which is not installed: pip install "
                "'aioflow[s3]'"
            ) from error

        return RemoteObjects(host, url)
    known = ", ".join(f"{known}://" for known in SCHEMES)
    raise CheckpointError(
        f"store {redacted(url)} has the scheme {scheme!r}, expected one of {known}, or a path"
    )


def local_path(url: str) -> str | None:
    """Returns the path for a `file:` URL of this machine, and None for any other URL."""
    parts = urlsplit(url)
    if (
        parts.scheme != "file"
        or parts.netloc not in ("", "localhost")
        or not parts.path.startswith("/")
    ):
        return None
    return unquote(parts.path)


def join_url(url: str, name: str) -> str:
    """Returns the URL of `name` below `url`."""
    return f"{url.rstrip('/')}/{name}"


def flow_url(store_url: str, flow: str) -> str:
    """Returns the URL of a flow's root in a store."""
    return join_url(store_url, encode_flow(flow))


def encode_flow(flow: str) -> str:
    """Returns the place of a flow in a store, as an object name. Raises ValueError for an empty
    name.
    """
    if not flow:
        raise ValueError("the name of a flow is empty, expected a text to keep its state under")
    text = "".join(
        chr(byte) if byte in PLAIN else f".{byte:02X}"
        for byte in flow.encode("utf-8", "surrogatepass")
    )
    pieces = [text[start : start + SEGMENT_LENGTH] for start in range(0, len(text), SEGMENT_LENGTH)]
    return f"{GOES_ON}/".join(pieces)
