"""Finds the files that a path refers to, and divides them into splits. The path of a source is a
file, a directory or a glob.

Files whose names begin with a dot or an underscore are ignored, because they are unfinished parts
and markers. They are found only if a pattern contains the dot or underscore.

Work outside of a task, such as finding splits and committing, needs a host (access to files and the
executor). The caller of a connector may pass its own host.

`checked_place` decides whether a path or URL belongs to this machine or to an object store.
"""

from __future__ import annotations

import errno
import os
import posixpath
from collections.abc import AsyncIterator
from fnmatch import fnmatchcase
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path, PurePath
from typing import TYPE_CHECKING
from urllib.parse import unquote

from aioflow.core.contexts import asynccontextmanager
from aioflow.core.errors import GraphError
from aioflow.core.system_host import SystemHost
from aioflow.inspection.redaction import redacted
from aioflow.io.files.blocks import FilePart, is_compressed, marks_before, zip_members
from aioflow.io.files.file_access import file_access
from aioflow.io.files.patterns import has_pattern, is_object_url, url_scheme

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aioflow.core.host import FileStat, Host

__all__ = [
    "SPLIT_BYTES",
    "checked_path",
    "checked_place",
    "cut",
    "find_files",
    "lent",
    "local_path",
    "pattern_hint",
    "respelled",
]

SPLIT_BYTES = 64 * 1024 * 1024
"""Size above which a file is divided at line ends, so that several subtasks can read it."""


def checked_path(path: str | os.PathLike[str], function: str) -> str | PurePath:
    """Returns `path` as `local_path` does: a `Path` refers to one file or directory, a text may be
    a pattern.

    Raises GraphError naming `function`.
    """
    try:
        return local_path(path)
    except (TypeError, ValueError) as error:
        shown = redacted(str(path))
        raise GraphError(f"{function}({shown!r}): {error}") from None


def checked_place(path: str | os.PathLike[str], function: str) -> str | PurePath:
    """Returns `path` as `checked_path` does, or the URL of an object store, without a slash at its
    end.

    Raises GraphError naming `function` for an invalid path, or if the extra for object stores is
    not installed.
    """
    given: object = path  # Callers may pass other types than the annotation says.
    if isinstance(given, PurePath) and is_object_url(str(given).replace(":/", "://", 1)):
        raise GraphError(
            f"{function}({str(given)!r}): a Path loses a slash of a URL, expected the URL as a text"
        )
    if not isinstance(given, str) or not is_object_url(given) or "\0" in given:
        return checked_path(path, function)
    shown = redacted(given)
    scheme, _, rest = given.partition("://")
    bucket, _, key = rest.strip("/").partition("/")
    if not bucket or "@" in bucket or has_pattern(bucket):
        raise GraphError(
            f"{function}({shown!r}): expected a URL with a bucket, as in {scheme}://bucket/prefix; "
            "credentials come from the environment"
        )
    if any(part in ("", ".", "..") for part in key.split("/")) and key:
        raise GraphError(
            f"{function}({shown!r}): the URL has an empty segment, '.' or '..', expected names "
            "joined by one slash"
        )
    if find_spec("obstore") is None:
        raise GraphError(
            f"{function}({shown!r}) needs the package obstore, which is not installed: pip install "
            "'aioflow[s3]'"
        )
    return f"{scheme.lower()}://{rest.strip('/')}"


async def find_files(
    host: Host, path: str | PurePath, *, may_be_missing: bool = False
) -> dict[str, FileStat]:
    """Returns the files that `path` refers to, sorted.

    Raises FileNotFoundError if there are none, unless `may_be_missing`. Makes few executor calls
    for any number of files, and does little work on the loop, because directories with very many
    files are listed repeatedly.
    """
    text = str(path)
    if is_object_url(text):
        return await _find_objects(host, text, may_be_missing)
    (itself,) = await host.fs.stats([text])
    if itself is not None:
        if not itself.is_dir:
            return {text: itself}
        found = await _only_files(
            host, await host.blocking(_data_in, text, await _names(host, text))
        )
        what = "the directory holds no file that is data"
    elif isinstance(path, str) and has_pattern(text):
        parts = [part for part in text.split("/") if part]
        candidates = await _expand(host, "/" if text.startswith("/") else "", parts)
        found = await _only_files(host, sorted(set(candidates)))
        what = "no file matches"
    else:
        found = {}
        what = f"there is no such file{pattern_hint(path)}"
    if not found and not may_be_missing:
        raise FileNotFoundError(
            errno.ENOENT,
            f"{what}, expected a file, a directory with files, or a glob that matches some",
            text,
        )
    return found


async def _find_objects(host: Host, url: str, may_be_missing: bool) -> dict[str, FileStat]:
    from aioflow.io.files.object_files import ObjectFiles  # Its package is an extra.

    found = await ObjectFiles(host).find(url)
    if not found and not may_be_missing:
        what = "no object matches" if has_pattern(url) else "there is no such object or prefix"
        raise FileNotFoundError(
            errno.ENOENT, f"{what}, expected an object, a prefix with objects, or a glob", url
        )
    return found


def pattern_hint(path: str | PurePath) -> str:
    """Returns advice if `path` is a `Path` that looks like a pattern, because a `Path` is never
    used as a pattern. Otherwise returns an empty text.
    """
    text = str(path)
    return (
        f" (a Path is no pattern: write {text!r})"
        if not isinstance(path, str) and has_pattern(text)
        else ""
    )


async def _names(host: Host, directory: str) -> list[str]:
    try:
        return await host.fs.list(directory)
    except (NotADirectoryError, FileNotFoundError):  # The directory was deleted meanwhile.
        return []


def _data_in(directory: str, names: list[str]) -> list[str]:
    return [posixpath.join(directory, name) for name in names if not name.startswith((".", "_"))]


async def _only_files(host: Host, paths: list[str]) -> dict[str, FileStat]:
    return await host.blocking(_files_of, paths, await host.fs.stats(paths))


def _files_of(paths: list[str], stats: list[FileStat | None]) -> dict[str, FileStat]:
    return {
        path: stat
        for path, stat in zip(paths, stats, strict=True)
        if stat is not None and not stat.is_dir
    }


async def _expand(
    host: Host, base: str, parts: list[str], above: tuple[FileStat, ...] = ()
) -> list[str]:
    """Returns the existing paths below the directory `base` that match `parts`, the names and
    patterns between slashes.

    `above` has the directories that `**` has already passed through, because links may lead back to
    them.
    """
    if not parts:
        return [base]
    part, rest = parts[0], parts[1:]
    if part != "**" and not has_pattern(part):
        path = posixpath.join(base, part)
        return await _expand(host, path, rest) if await host.fs.exists(path) else []
    names = await _names(host, base or ".")
    found: list[str] = []
    if part == "**":
        found += await _expand(host, base, rest) if rest else []
        below = _data_in(base, names)
        (itself, *stats) = await host.fs.stats([base or ".", *below])
        through = above if itself is None else (*above, itself)
        for path, stat in zip(below, stats, strict=True):
            found += [path] if not rest else []
            if (
                stat is not None
                and stat.is_dir
                and not any(stat.place == one.place is not None for one in through)
            ):
                found += await _expand(host, path, parts, through)
        return found
    for name in names:
        if fnmatchcase(name, part) and (
            part.startswith((".", "_")) or not name.startswith((".", "_"))
        ):
            found += await _expand(host, posixpath.join(base, name), rest)
    return found


async def cut(
    host: Host, path: str, size: int, *, divisible: bool, split_bytes: int
) -> list[FilePart]:
    """Returns the parts of a file of `size` bytes.

    The parts are the members of an archive, or ranges of a large file if it is `divisible`,
    otherwise the whole file.
    """
    fs = file_access(host, path)
    if path.endswith(".zip"):
        return [
            FilePart(path, member=member) for member in await host.blocking(zip_members, fs, path)
        ]
    if not divisible or is_compressed(path):
        return [FilePart(path)]
    if size <= split_bytes:
        return [FilePart(path)]
    starts = range(0, size, split_bytes)
    marks = [
        None,
        *await host.blocking(marks_before, fs, path, [start - 1 for start in starts[1:]]),
    ]
    ends = [*starts[1:], None]
    return [
        FilePart(path, start, end, mark=mark)
        for start, end, mark in zip(starts, ends, marks, strict=True)
    ]


def respelled(ids: Sequence[str], path: str) -> list[str]:
    """Returns the `ids` of parts with their paths normalised, and made absolute or relative as
    `path` is.

    An id stays unchanged if its new spelling is already in use.
    """
    if is_object_url(path):
        return list(ids)  # An object has one name.
    spell: Callable[[str], str] = os.path.abspath if os.path.isabs(path) else os.path.relpath
    # The result is cached for each directory, because each search asks for thousands of files.
    spelled = lru_cache(maxsize=64)(spell)
    taken = set(ids)
    made = []
    for part_id in ids:
        file, archive, member = part_id.partition(".zip!")
        directory, name = posixpath.split(file)
        other = (
            posixpath.normpath(posixpath.join(spelled(directory or "."), name)) + archive + member
        )
        made.append(part_id if other in taken else other)
        taken.add(other)
    return made


@asynccontextmanager
async def lent(host: Host | None) -> AsyncIterator[Host]:
    """Yields `host` and leaves it open. If `host` is None, yields a new `SystemHost` and closes it
    afterwards.
    """
    if host is not None:
        yield host
        return
    machine = SystemHost()
    try:
        yield machine
    finally:
        await machine.close()


def local_path(path: str | os.PathLike[str]) -> str | PurePath:
    """Returns `path` as a local path: `file:///x` becomes `/x`, and `~` the home directory.

    A text stays a text, because it may be a pattern. Raises TypeError for a value that is not a
    path, and ValueError for an empty path or a URL that is not local.
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
