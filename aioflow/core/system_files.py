"""Calls on files of the operating system that take more than one function of `os`. Each blocks: the host runs them on its pool."""

from __future__ import annotations

import os
import shutil

__all__ = ["delete_path", "fsync_path", "make_directories", "put_file", "rename_new"]


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
            shutil.rmtree(path)
        else:
            os.rmdir(path)
    except FileNotFoundError:
        return False
    return True
