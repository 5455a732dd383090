"""The grammar of file paths: patterns of names, and URLs of object stores.

Names that begin with a dot or an underscore belong to unfinished parts and markers. Such names
match a pattern only if the pattern contains the dot or underscore.
"""

from __future__ import annotations

import os
import posixpath
import re
from fnmatch import fnmatchcase
from pathlib import PurePath

__all__ = ["fixed_part", "has_pattern", "is_matched", "is_object_url", "url_scheme"]

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(/*)")
"""Matches the scheme of a URL. It has at least two letters, because a single letter is a Windows
drive.
"""

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
"""Schemes that are recognised even if a slash after the colon is missing."""

_MAGIC = re.compile(r"[*?\[]")


def is_object_url(path: str) -> bool:
    """Returns whether `path` is the URL of an object store whose objects are used like files."""
    return path[:5].lower() in ("s3://", "gs://", "az://")


def url_scheme(path: str | os.PathLike[str]) -> str:
    """Returns the scheme of a URL in lower case, or an empty text.

    A `Path` made from a URL also has a scheme, although it has lost a slash.
    """
    found = _SCHEME.match(os.fspath(path))
    if found is None:
        return ""
    scheme, slashes = found[1].lower(), len(found[2])
    is_url = slashes >= 2 or (slashes == 1 and (scheme in _STORES or isinstance(path, PurePath)))
    return scheme if is_url else ""


def has_pattern(text: str) -> bool:
    """Returns whether `text` contains a special character of globs."""
    return _MAGIC.search(text) is not None


def fixed_part(path: str | PurePath) -> str:
    """Returns the part of `path` that must exist: the whole path, or the directory before the
    pattern.
    """
    text = str(path)
    magic = _MAGIC.search(text) if isinstance(path, str) else None
    return text if magic is None else posixpath.dirname(text[: magic.start()]) or "."


def is_matched(path: list[str], pattern: list[str]) -> bool:
    """Returns whether `find_files` would find the file `path` by `pattern`.

    Both are lists of the parts between slashes.
    """
    if not pattern or not path:
        return not pattern and not path
    part, rest = pattern[0], pattern[1:]
    is_data = not path[0].startswith((".", "_"))
    if part == "**":
        return is_matched(path, rest) or (
            is_data and (path[1:] == rest == [] or is_matched(path[1:], pattern))
        )
    return (
        (is_data or part.startswith((".", "_")))
        and fnmatchcase(path[0], part)
        and is_matched(path[1:], rest)
    )
