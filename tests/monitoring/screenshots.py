"""Pictures of each view of the dashboard, light and dark, into a folder: `python -m
tests.monitoring.screenshots FOLDER`.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

import aioflow as af
from tests.monitoring.browser import Window, chromium, served
from tests.monitoring.dashboard_flow import Shop

__all__: list[str] = []

VIEWS = {
    "jobs": ("", "jobs", "table a"),
    "graph": ("jobs/{job}/graph", "graph", "a.node.is-busy"),
    "task": ("jobs/{job}/graph/{task}", "graph", "aside.drawer table"),
    "event-time": ("jobs/{job}/watermarks", "watermarks", "table"),
    "checkpoints": ("jobs/{job}/checkpoints", "checkpoints", "table a"),
    "exceptions": ("jobs/{job}/exceptions", "exceptions", ".failure .trace"),
    "metrics": ("jobs/{job}/metrics", "metrics", ".chart path"),
    "state": ("jobs/{job}/state", "state", "table a"),
    "event-loop": ("runtime", "runtime", "table"),
    "flame-graph": ("flame", "flame", ".flame svg"),
    "log": ("logs", "logs", ".log > div"),
}
WARM_UP_S = 75.0
"""Seconds until the plots show something."""

SETTLE_S = 2.0
SIZE = (1440, 900)


async def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as state:
        async with (
            Shop(poison=2_000).flow.run(checkpoints=f"file://{state}", every="5s") as job,
            served(af.monitor_app(job)) as base,
            chromium() as browser,
        ):
            await asyncio.sleep(WARM_UP_S)
            for theme in ("light", "dark"):
                await pictures(
                    await Window.open(browser, base, theme=theme, width=SIZE[0], height=SIZE[1]),
                    job,
                    folder,
                    theme,
                )


async def pictures(window: Window, job: af.Job, folder: Path, theme: str) -> None:
    detail = await window.rest(f"jobs/{job.id}")
    task = next(vertex["id"] for vertex in detail["vertices"] if vertex["name"] == "price")
    for name, (address, view, ready) in VIEWS.items():
        await window.show(address.format(job=job.id, task=task), view=view, ready=ready)
        await asyncio.sleep(SETTLE_S)
        path = folder / f"{name}-{theme}.png"
        await window.page.screenshot(path=path)
        print(path)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
