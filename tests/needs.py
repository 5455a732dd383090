"""Programs and rights of the machine that some tests need.

Outside CI a test whose need is not met is skipped, and the end of the run says how many were and
how to get what they need. In CI it fails. `.ci/setup` installs the programs.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

import pytest

__all__ = ["missing", "program", "reason", "summary", "unreachable"]

SETUP = "run .ci/setup as root to install it"
SBIN = "/usr/sbin:/usr/local/sbin:/sbin"
"""Directories of servers that the PATH of an ordinary user often leaves out."""

_MARK = "this test needs "


def program(name: str, *patterns: str) -> str:
    """Returns the path of a program, found on the PATH, in `SBIN`, or by a glob pattern below `/`.

    Skips the test if there is none, or fails it in CI.
    """
    found = shutil.which(name) or shutil.which(name, path=SBIN)
    if found is None:
        matches = sorted(
            (path for pattern in patterns for path in Path("/").glob(pattern)), reverse=True
        )
        if not matches:
            missing(name, SETUP)
        found = str(matches[0])
    return found


def missing(need: str, remedy: str) -> NoReturn:
    """Skips the test that asks; fails it in CI."""
    message = reason(need, remedy)
    if os.environ.get("CI"):
        pytest.fail(f"CI skips nothing, and {message}", pytrace=False)
    pytest.skip(message)


def unreachable(need: str, remedy: str) -> NoReturn:
    """Skips the test that asks, in CI too: a registry of packages may be out of reach there."""
    pytest.skip(reason(need, remedy))


def reason(need: str, remedy: str) -> str:
    """Returns the reason of a test that is skipped for want of `need`, as `summary` counts it."""
    return f"{_MARK}{need}: {remedy}"


def summary(reasons: Iterable[str]) -> list[str]:
    """Returns a line for each need among the reasons of skipped tests: how many, and how to meet
    it.
    """
    counts: Counter[str] = Counter()
    remedies: dict[str, str] = {}
    for reason in reasons:
        if _MARK in reason:
            need, _, remedy = reason.partition(_MARK)[2].partition(": ")
            counts[need] += 1
            remedies.setdefault(need, remedy)
    return [
        f"{counts[need]} skipped without {need}: {remedy}"
        for need, remedy in sorted(remedies.items())
    ]
