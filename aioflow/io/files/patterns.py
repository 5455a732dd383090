"""The grammar of the paths of files: patterns of names, and URLs of object stores.

Names that begin with a dot or an underscore are unfinished parts and markers. They match only if
the pattern contains the dot or underscore.
"""

from __future__ import annotations

import posixpath
import re
from fnmatch import fnmatchcase
from pathlib import PurePath

__all__ = ["fixed_part", "has_pattern", "is_matched", "is_object_url"]

_MAGIC = re.compile(r"[*?\[]")


def is_object_url(path: str) -> bool:
    """Returns whether `path` is the URL of an object store whose objects are used like files."""
    return path[:5].lower() in ("s3://", "gs://", "az://")


def has_pattern(text: str) -> bool:
    """Returns whether `text` contains a sign of a glob."""
    return _MAGIC.search(text) is not None


def fixed_part(path: str | PurePath) -> str:
    """Returns the part of `path` that must exist: all, or the directory before the pattern."""
    text = str(path)
    magic = _MAGIC.search(text) if isinstance(path, str) else None
    return text if magic is None else posixpath.dirname(text[: magic.start()]) or "."


def is_matched(path: list[str], pattern: list[str]) -> bool:
    """Returns whether `find_files` finds a file by a pattern.

    Both are given as the parts between slashes.
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
