"""Calls on files of the operating system that take more than one function of `os`. Each blocks: the host runs them on its pool."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress

__all__ = [
    "check_inside",
    "create_file",
    "delete_path",
    "fsync_path",
    "make_directories",
    "put_file",
    "remove_files",
    "rename_new",
]


def put_file(path: str, mode: str, data: bytes, sync: bool) -> None:
    """Write `data` behind or over what is there."""
    with open(path, mode) as file:
        file.write(data)
        if sync:
            file.flush()
            os.fsync(file.fileno())


def fsync_path(path: str) -> None:
    """Make a file, or the names in a directory, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename_new(source: str, target: str) -> bool:
    """Move a file to a name that nothing has; False if something has it."""
    # A link is the one portable call that makes a name only if nothing has it. A crash before the old name is gone
    # leaves two names of one whole file.
    try:
        os.link(source, target, follow_symlinks=False)
    except FileExistsError:
        return False
    os.unlink(source)
    return True


def create_file(path: str, data: bytes, aside: str, within: str) -> bool:
    """Make a file, whole and durable, by way of `aside`; False if something has its name."""
    directory = os.path.dirname(path)
    check_inside(directory, within)
    if os.path.exists(path):
        return False
    try:
        put_file(aside, "wb", data, True)
        created = rename_new(aside, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(aside)
        raise
    if created:
        fsync_path(directory)
    else:
        os.unlink(aside)
    return created


def remove_files(paths: Sequence[str], within: str) -> None:
    """Remove files and the directories that are empty then, durably."""
    emptied: dict[str, None] = {}
    for path in paths:
        directory = os.path.dirname(path)
        if directory not in emptied:
            check_inside(directory, within)
        if delete_path(path, recursive=False):
            emptied[directory] = None
    for directory in emptied:
        fsync_path(directory)
    for directory in emptied:
        with suppress(OSError):  # Something is in it.
            while directory != within:
                os.rmdir(directory)
                directory = os.path.dirname(directory)


def check_inside(path: str, within: str) -> None:
    """Refuse a path that symbolic links lead out of a directory."""
    real, root = os.path.realpath(path), os.path.realpath(within)
    if real != root and not real.startswith(root.rstrip("/") + "/"):
        raise PermissionError(f"{path} leads to {real} by a symbolic link, expected a place below {root}: remove the link")


def make_directories(path: str, mode: int) -> None:
    """Make a directory and those above it; `mode` is that of each."""
    # Not os.makedirs, whose mode is for the last directory only.
    missing = []
    while path and not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    for made in reversed(missing):
        try:
            os.mkdir(made, mode)
        except FileExistsError:
            if not os.path.isdir(made):
                raise


def delete_path(path: str, recursive: bool) -> bool:
    """Remove a file, an empty directory or a whole tree; False if nothing was there."""
    try:
        if not os.path.isdir(path) or os.path.islink(path):
            os.remove(path)
        elif recursive:
            import shutil  # Here: it loads three compressors.

            shutil.rmtree(path)
        else:
            os.rmdir(path)
    except FileNotFoundError:
        return False
    return True
