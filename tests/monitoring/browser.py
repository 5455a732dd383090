"""A headless Chromium for tests: the system's own, with a profile of its own and without
anything that talks to others.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Any

from aiohttp import web
from playwright.async_api import Browser, Page, async_playwright

from tests.needs import program

__all__ = ["PATIENCE_MS", "Window", "chromium", "serious_findings", "served"]

FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
PATIENCE_MS = 60_000
"""How long a condition may take to come true on a machine that is busy with other things."""

IMPACTS = ("serious", "critical")


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """A browser that is gone when the block is left."""
    executable = program("chromium")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=executable, headless=True, args=list(FLAGS)
        )
        try:
            yield browser
        finally:
            await browser.close()


@asynccontextmanager
async def served(app: web.Application) -> AsyncIterator[str]:
    """`app` at an address of its own: `http://127.0.0.1:PORT`."""
    runner = web.AppRunner(app, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


class Window:
    """A page and all that it complained about."""

    def __init__(self, page: Page, base: str) -> None:
        self.page = page
        self.base = base
        self.complaints: list[str] = []
        page.set_default_timeout(PATIENCE_MS)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on(
            "console",
            lambda message: (
                self.complaints.append(message.text)
                if message.type in ("error", "warning")
                else None
            ),
        )

    @classmethod
    async def open(
        cls,
        browser: Browser,
        base: str,
        *,
        theme: Any = "light",
        width: int = 1440,
        height: int = 900,
    ) -> Window:
        """A window at the first page."""
        context = await browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=theme
        )
        window = cls(await context.new_page(), base)
        await window.page.goto(f"{base}/")
        return window

    async def show(self, place: str, *, view: str, ready: str) -> None:
        """Go to a view; return when it is there, and an element `ready` in it."""
        await self.page.evaluate("place => { location.hash = place }", f"#/{place}")
        await self.page.wait_for_selector(f'[data-view="{view}"] {ready}')

    async def text(self, selector: str) -> str:
        """Returns the text of an element, as soon as the element exists."""
        return await self.page.locator(selector).first.inner_text()

    async def rest(self, path: str) -> Any:
        """Returns the endpoint's answer to the browser's own address."""
        response = await self.page.request.get(f"{self.base}/{path}")
        return await response.json()

    async def redrawn(self) -> None:
        """Return when the page has been drawn at least twice from now on."""
        await self.page.evaluate(
            "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => "
            "setTimeout(done, 0))))"
        )

    async def overflow(self) -> int:
        """How many pixels the page is wider than the window."""
        found: int = await self.page.evaluate(
            "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        )
        return found


async def serious_findings(page: Page, *rules: str) -> list[str]:
    """Returns the findings of axe-core for the page in its present state; with `rules` only for
    these rules.
    """
    if not await page.evaluate("'axe' in window"):
        await page.evaluate(
            files("axe_playwright_python").joinpath("axe.min.js").read_text(encoding="utf-8")
        )
    options = {
        "resultTypes": ["violations"],
        **({"runOnly": {"type": "rule", "values": rules}} if rules else {}),
    }
    found: Any = await page.evaluate("options => axe.run(document, options)", options)
    return [
        f"{violation['id']}: {node['html'][:160]} {node.get('failureSummary', '')[:200]}"
        for violation in found["violations"]
        if violation["impact"] in IMPACTS
        for node in violation["nodes"]
    ]
