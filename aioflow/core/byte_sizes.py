"""Parses sizes in bytes as users write them: a number of bytes, or a text such as "64MiB"."""

from __future__ import annotations

import re

__all__ = ["to_bytes"]

_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_TEXT = re.compile(r"\s*([0-9]+)\s*(B|KiB|MiB|GiB)\s*", re.ASCII)


def to_bytes(size: int | str, name: str = "size") -> int:
    """Returns `size` in bytes; `name` is the parameter in errors.

    Raises TypeError for a value of another type, ValueError for a text that is no size.
    """
    if isinstance(size, int) and not isinstance(size, bool):
        return size
    expected = "a number of bytes, or a text such as '512KiB', '64MiB' or '2GiB'"
    if not isinstance(size, str):
        raise TypeError(f"{name} is {size!r} of type {type(size).__name__}, expected {expected}")
    match = _TEXT.fullmatch(size)
    if match is None:
        raise ValueError(f"{name} is {size!r}, expected {expected}")
    return int(match[1]) * _UNITS[match[2]]
