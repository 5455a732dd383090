"""The dashboard on a job whose tasks are in worker processes: who is slow, and what goes on
inside each process.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import aioflow as af
from tests.monitoring.browser import Window, chromium, serious_findings, served
from tests.monitoring.dashboard_flow import Shop

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]


async def test_tasks_and_loops_of_worker_processes_are_shown(tmp_path: Path) -> None:
    """The slow task is busy and its source back-pressured; a click on a worker shows its loop,
    its flames and its log.
    """
    async with (
        Shop(price_s=0.01).flow.run(
            checkpoints=f"file://{tmp_path}", every="3s", workers=2, stop_timeout="0s"
        ) as job,
        served(af.monitor_app(job)) as base,
        chromium() as browser,
    ):
        window = await Window.open(browser, base)
        page = window.page
        await window.show(f"jobs/{job.id}/graph", view="graph", ready="a.node")
        await page.wait_for_selector("a.node.is-busy[aria-label^='price']")
        await page.wait_for_selector("a.node.is-pressed[aria-label^='orders']")
        await page.wait_for_selector("a.node[aria-label^='revenue'] .columns-of rect")
        await page.wait_for_selector(".edge-label .size", state="attached")

        await window.show("runtime", view="runtime", ready="button.link")
        names = await page.locator(
            "table:has(caption:text-is('Processes')) tbody button"
        ).all_inner_texts()
        assert names == ["this process", "worker-1", "worker-2"]
        memory = page.locator("table:has(caption:text-is('Processes')) tbody td")
        assert await memory.filter(has_text=re.compile(r" of 64(\.0)? MiB$")).count() == 3
        await page.click("button.link:text-is('worker-2')")
        tasks = page.locator("table:has(caption:text-is('Tasks of the loop')) td")
        price = await tasks.filter(has_text=re.compile("^price-[12]$")).inner_text()
        assert await page.input_value("select") == "worker-2"
        assert await serious_findings(page) == []
        for width in (360, 1920):
            await page.set_viewport_size({"width": width, "height": 900})
            await window.redrawn()
            assert await window.overflow() <= 0, width

        await window.show("flame", view="flame", ready=".flame svg")
        flames = page.locator(f".flame svg title:text('{price}')")
        while (
            not await flames.count()
        ):  # It mostly waits: two seconds of looks may have met it never.
            await page.click("button:text-is('Look again')")
            await page.wait_for_selector("button:text-is('Look again'):enabled")
        await window.show("logs", view="logs", ready="select")
        assert await page.input_value(".headline select") == "worker-2"
        assert window.complaints == []
