"""A folder with a program in it, as a user has one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop

PROGRAM = """
import asyncio
import itertools

import aioflow as af

doubled = af.Flow("doubled")
doubled.source(range(5)).map(lambda x: x * 2).print()

failing = af.Flow("failing")


def inverse(x):
    return 1 / (x - 3)


failing.source(range(5)).map(inverse).print()

endless = af.Flow("endless")


async def ticks(position):
    for n in itertools.count():
        yield n, n
        await asyncio.sleep(0.01)


endless.source(ticks).map(lambda n: f"tick {n}").print()

stuck = af.Flow("stuck")


async def wait(n):
    print("waiting", flush=True)
    await asyncio.sleep(3600)


stuck.source(ticks).map(wait).print()

number = 4


def make():
    return doubled


def make_number():
    return number


def make_trouble():
    raise KeyError("trouble")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with `program.py`, and `broken.py`, which cannot be imported."""
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "broken.py").write_text("import aioflow\n1 / 0\n")
    (tmp_path / "lacking.py").write_text("import no_such_library\n")
    (tmp_path / "empty.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name in ("program", "broken", "lacking", "empty"):
            del sys.modules[name]


@pytest.fixture(scope="session", autouse=True)
def warm_uvloop() -> None:
    """The first uvloop of a process opens descriptors that it keeps for all later ones."""
    uvloop.new_event_loop().close()
