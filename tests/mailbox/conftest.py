"""An event loop whose time stands still while anything runs, and jumps to the next timer when
nothing does.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any

import pytest


class JumpSelector(selectors.DefaultSelector):
    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            raise AssertionError(
                "nothing is ready and no timer is set: this test would wait for ever"
            )
        self.loop.now_s += max(timeout, 0.0)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """`now_s` may be advanced by hand: that is what an action that blocks looks like."""

    def __init__(self) -> None:
        self.now_s = 0.0
        selector = JumpSelector()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self.now_s


@pytest.fixture
def run_virtual() -> Callable[[Callable[[VirtualLoop], Coroutine[Any, Any, None]]], None]:
    """Runs a coroutine function, which is given its loop, in virtual time."""

    def run(main: Callable[[VirtualLoop], Coroutine[Any, Any, None]]) -> None:
        loop = VirtualLoop()
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(main(loop))

    return run
