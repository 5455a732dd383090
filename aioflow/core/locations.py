"""Decides whether a path or URL of the user belongs to this machine, and which path it means."""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePath
from urllib.parse import unquote

__all__ = ["local_path", "url_scheme"]

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(/*)")
"""A scheme has at least two letters: a single one is a drive of Windows."""

_STORES = frozenset(
    {
        "file",
        "ftp",
        "gs",
        "hdfs",
        "http",
        "https",
        "s3",
        "s3a",
        "s3n",
        "abfs",
        "abfss",
        "az",
        "wasb",
        "dbfs",
        "viewfs",
    }
)
"""Schemes that are recognised even if a slash is missing."""


def url_scheme(path: str | os.PathLike[str]) -> str:
    """Returns the scheme of a URL in lower case, or an empty text.

    A `Path` made of a URL also has a scheme, although it has lost a slash.
    """
    found = _SCHEME.match(os.fspath(path))
    if found is None:
        return ""
    scheme, slashes = found[1].lower(), len(found[2])
    is_url = slashes >= 2 or (slashes == 1 and (scheme in _STORES or isinstance(path, PurePath)))
    return scheme if is_url else ""


def local_path(path: str | os.PathLike[str]) -> str | PurePath:
    """Returns `path` on this machine: `file:///x` is `/x`, `~` the home directory.

    A text stays a text, since it may be a pattern. Raises TypeError for a value that is no path,
    ValueError for an empty path and for a URL of another place.
    """
    given: object = path  # Callers may pass other types than the annotation says.
    if not isinstance(given, (str, os.PathLike)) or not isinstance(os.fspath(path), str):
        raise TypeError(f"the path is {type(given).__name__}, expected a text or a Path")
    text: str = os.fspath(path)
    if not text or "\0" in text:
        raise ValueError(f"the path is {text!r}, expected one that is not empty and has no NUL")
    scheme = url_scheme(path)
    if scheme == "file":
        # Parsed by hand, since `?` and `#` belong to the path, which may be a pattern. A Path has
        # lost a slash, so file:/x is a URL too.
        rest = text.partition(":")[2]
        machine, slash, below = (
            rest[2:].partition("/") if rest.startswith("//") else ("", "/", rest[1:])
        )
        if machine not in ("", "localhost") or not slash or not below:
            raise ValueError(
                "a file URL names a place on this machine, with three slashes: file:///var/lib/app"
            )
        text = unquote(f"/{below}")
    elif scheme in ("http", "https"):
        raise ValueError(
            f"it is a URL of {scheme}, expected a path of this machine: af.io.http(...) reads and "
            "posts there"
        )
    elif scheme:
        raise ValueError(
            f"files of {scheme}:// are not read or written here, expected a path of this machine: "
            "mount the store and give the path "
            "there, copy the files, or let Spark read and write them (af.io.spark)"
        )
    if text.startswith("~"):
        text = os.path.expanduser(text)
    return text if isinstance(path, str) or not isinstance(path, PurePath) else Path(text)
