"""Programs that found something, made small: what it was, the way to run it, and the program."""

from __future__ import annotations

from tests.programs.draw import Program
from tests.programs.pieces import *  # noqa: F403  # Literals of programs name anything that is there.

__all__ = ["KEPT"]

KEPT: dict[str, tuple[str, Program]] = {}
