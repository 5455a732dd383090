"""The dashboard in a real browser, on jobs that run."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

import aioflow as af
from tests.monitoring.browser import Window, chromium, serious_findings, served
from tests.monitoring.dashboard_flow import Shop

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]
"""A browser, a job and axe-core share a machine with other tests: what takes seconds alone may
take minutes.
"""

TOKEN = "a token that only this test knows"
WIDTHS = (360, 1920)
RULES_OF_COLOURS = ("color-contrast", "link-in-text-block")

NUMBERS = itertools.count()

VIEWS = (
    ("jobs/{job}/checkpoints/{checkpoint}", "checkpoints", ".phases"),
    ("", "jobs", "table a"),
    ("jobs/{job}/graph", "graph", "a.node"),
    ("jobs/{job}/graph/{task}", "graph", "aside.drawer table"),
    ("jobs/{job}/watermarks", "watermarks", "table"),
    ("jobs/{job}/checkpoints", "checkpoints", "table a"),
    ("jobs/{job}/exceptions", "exceptions", ".failure .trace"),
    ("jobs/{job}/metrics", "metrics", ".chart path"),
    ("jobs/{job}/metrics/{task}", "metrics", ".chart path"),
    ("jobs/{job}/state", "state", "table a"),
    ("jobs/{job}/tap", "tap", "select"),
    ("jobs/{job}/flame/{task}", "flame", ".flame, .flame svg"),
    ("runtime", "runtime", "table"),
    ("logs", "logs", ".log > div"),
    ("flame", "flame", ".flame svg"),
)
"""Address of each view, its name, and what is there when it is ready."""


@asynccontextmanager
async def shown(shop: Shop, store: str = "", **options: Any) -> AsyncIterator[tuple[str, af.Job]]:
    """The shop running behind its endpoint: its address, and the job."""
    store = store or f"memory://dashboard-{next(NUMBERS)}"
    async with (
        shop.flow.run(checkpoints=store, every="3s") as job,
        served(af.monitor_app(job, **options)) as base,
    ):
        yield base, job


def task_of(detail: Any, name: str) -> Any:
    return next(vertex for vertex in detail["vertices"] if vertex["name"].startswith(name))


async def test_every_view_is_accessible_and_fits() -> None:
    shop = Shop()
    async with shown(shop) as (base, job), chromium() as browser:
        window = await Window.open(browser, base)
        await through_all_views(window, shop, job)
        assert window.complaints == []


async def test_every_view_is_legible_in_the_dark() -> None:
    """The test in light mode covers everything that does not depend on colours."""
    shop = Shop()
    async with shown(shop) as (base, job), chromium() as browser:
        window = await Window.open(browser, base, theme="dark")
        await through_all_views(window, shop, job, *RULES_OF_COLOURS)
        assert window.complaints == []


async def through_all_views(window: Window, shop: Shop, job: af.Job, *rules: str) -> None:
    task = task_of(await window.rest(f"jobs/{job.id}"), "price")["id"]
    shop.fail_next()
    await window.show(f"jobs/{job.id}/exceptions", view="exceptions", ready=".failure")
    await window.page.wait_for_function(
        "() => document.querySelector('.headline .state').innerText === 'running'"
    )
    checkpoint = await job.checkpoint()
    for address, view, ready in VIEWS:
        await window.page.set_viewport_size({"width": 1440, "height": 900})
        await window.show(
            address.format(job=job.id, task=task, checkpoint=checkpoint), view=view, ready=ready
        )
        assert await serious_findings(window.page, *rules) == [], address
        for width in WIDTHS:
            await window.page.set_viewport_size({"width": width, "height": 900})
            await window.redrawn()
            assert await window.overflow() <= 0, f"{address} at {width}"


async def test_bottleneck_and_held_back_tasks_are_visible_in_the_graph() -> None:
    async with shown(Shop(price_s=0.01)) as (base, job), chromium() as browser:
        window = await Window.open(browser, base)
        await window.show(f"jobs/{job.id}/graph", view="graph", ready="a.node")

        await window.page.wait_for_selector("a.node.is-busy[aria-label^='price']")
        await window.page.wait_for_selector("a.node.is-pressed[aria-label^='orders']")

        price = task_of(await window.rest(f"jobs/{job.id}"), "price")["id"]
        pressure = await window.rest(f"jobs/{job.id}/vertices/{price}/backpressure")
        assert [one["busyRatio"] >= 0.8 for one in pressure["subtasks"]] == [True, True]


async def test_dashboard_shows_the_values_of_rest() -> None:
    async with shown(Shop()) as (base, job), chromium() as browser:
        window = await Window.open(browser, base)
        await window.show(f"jobs/{job.id}/graph", view="graph", ready="table")

        before = task_of(await window.rest(f"jobs/{job.id}"), "price")
        place = f"[data-view=graph] tr:has(a[href$='{before['id']}'])"
        # The page learns of it within a few seconds: wait for a number that is at least the one
        # before.
        await window.page.wait_for_function(
            "([place, least]) => "
            "Number(document.querySelector(place).children[6].innerText.replaceAll(',', '')) >= "
            "least",
            arg=[place, before["metrics"]["read-records"]],
        )
        cells = [
            await cell.inner_text() for cell in await window.page.locator(f"{place} > td").all()
        ]
        after = task_of(await window.rest(f"jobs/{job.id}"), "price")

        assert cells[:3] == ["price", "running", "2"]
        assert (
            before["metrics"]["read-records"]
            <= int(cells[6].replace(",", ""))
            <= after["metrics"]["read-records"]
        )
        assert window.complaints == []


async def test_a_task_is_opened_with_the_keyboard() -> None:
    async with shown(Shop()) as (base, job), chromium() as browser:
        window = await Window.open(browser, base)
        await window.show(f"jobs/{job.id}/graph", view="graph", ready="a.node")

        await window.page.focus("a.node[aria-label^='revenue']")
        await window.page.keyboard.press("Enter")
        await window.page.wait_for_selector("aside.drawer")

        assert await window.page.locator("aside.drawer tbody").first.locator("tr").count() == 4
        # The page is drawn again each second, and the focus stays where it was.
        await window.redrawn()
        assert (
            await window.page.evaluate("document.activeElement.getAttribute('aria-label')")
            is not None
        )


async def test_a_failure_and_the_restart_are_reported_with_operator_and_record() -> None:
    shop = Shop()
    async with shown(shop) as (base, job), chromium() as browser:
        window = await Window.open(browser, base)
        await window.show(
            f"jobs/{job.id}/checkpoints", view="checkpoints", ready=".state.good"
        )  # It has something to go back to.
        await window.show(f"jobs/{job.id}/exceptions", view="exceptions", ready="p.empty")

        shop.fail_next()
        text = await window.text(".failure")

        assert "has no price" in text
        assert "in operator 'price'" in text
        assert "Order(number=" in text
        assert "ValueError: order" in text
        await window.show(f"jobs/{job.id}/graph", view="graph", ready="a.node")
        await window.page.wait_for_function(
            "() => document.querySelectorAll('[data-view=graph] tbody .state.good').length === 8"
        )
        assert await window.text(".headline .state") == "running"
        assert window.complaints == []


async def test_a_job_that_is_over_is_shown_as_it_was() -> None:
    async with shown(Shop()) as (base, job), chromium() as browser:
        window = await Window.open(browser, base)
        await window.show(f"jobs/{job.id}/graph", view="graph", ready="a.node")

        await job.stop(savepoint=False)
        await window.page.wait_for_function(
            "() => document.querySelector('.headline .state').innerText === 'finished'"
        )

        assert await window.page.locator("a.node.is-done").count() == 8
        assert await window.page.locator(".headline button").count() == 0
        assert window.complaints == []


async def test_names_are_text_for_any_characters() -> None:
    name = "<img src=x onerror=document.title='owned'>"
    flow = af.Flow(name)

    async def numbers() -> AsyncIterator[int]:
        yield 1
        raise ValueError(name)

    flow.source(numbers, name=f"source {name}").key_by(lambda n: n).count(name=name).sink(
        lambda _: None, name="</script><script>alert(1)"
    )
    async with chromium() as browser:
        with pytest.raises(ValueError, match="img"):
            async with (
                flow.run(restart=af.no_restart()) as job,
                served(af.monitor_app(job)) as base,
            ):
                window = await Window.open(browser, base)
                for view, ready in (
                    ("graph", "a.node"),
                    ("exceptions", ".failure .trace"),
                    ("watermarks", "table"),
                    ("state", ".panel"),
                ):
                    await window.show(f"jobs/{job.id}/{view}", view=view, ready=ready)
                    assert await window.text("h1") == name
                    assert await window.page.locator("img, main script").count() == 0
                assert name in await window.text(".headline")
                assert window.complaints == []


async def test_a_savepoint_is_asked_for_with_the_token(tmp_path: Path) -> None:
    options = {"token": TOKEN, "enable_control": True}
    async with shown(Shop(), f"file://{tmp_path}", **options) as (base, job), chromium() as browser:
        window = await Window.open(browser, base)
        await window.show(f"jobs/{job.id}/graph", view="graph", ready="a.node")

        await window.page.click("text=Savepoint")
        assert await serious_findings(window.page) == []
        await window.page.fill("dialog input", TOKEN)
        await window.page.click("dialog button.main")
        await window.page.wait_for_selector("#notice >> text=Written to")

        where = (await window.text("#notice")).removeprefix("Written to ")
        assert where.removeprefix("file://") in await job.savepoints()
        assert window.complaints == []


async def test_a_job_is_rescaled_with_the_token(tmp_path: Path) -> None:
    options = {"token": TOKEN, "enable_control": True}
    async with shown(Shop(), f"file://{tmp_path}", **options) as (base, job), chromium() as browser:
        window = await Window.open(browser, base)
        await window.show(f"jobs/{job.id}/graph", view="graph", ready="a.node")

        await window.page.click("text=Rescale")
        assert await serious_findings(window.page) == []
        await window.page.fill("#parallelism", "3")
        await window.page.fill("#token", TOKEN)
        await window.page.click("dialog button.main")
        await window.page.wait_for_selector("#notice >> text=Done.")

        assert 3 in [vertex.parallelism for vertex in job.graph.vertices]
        assert window.complaints == []


async def test_without_control_nothing_can_be_changed() -> None:
    async with shown(Shop()) as (base, job), chromium() as browser:
        window = await Window.open(browser, base)
        await window.show(f"jobs/{job.id}/graph", view="graph", ready="a.node")
        await window.page.wait_for_function(
            "() => performance.getEntriesByType('resource').some((one) => "
            "one.name.endsWith('/config'))"
        )

        assert await window.page.locator(".headline button").count() == 0


async def test_an_endpoint_that_guards_reading_is_unlocked_once() -> None:
    async with (
        shown(Shop(), token=TOKEN, allowed_hosts=("shop.example",)) as (base, job),
        chromium() as browser,
    ):
        window = await Window.open(browser, base)
        await window.page.wait_for_selector(".unlock input")
        assert await serious_findings(window.page) == []

        await window.page.fill(".unlock input", TOKEN)
        await window.page.keyboard.press("Enter")
        await window.page.wait_for_selector("[data-view=jobs] table a")
        await window.show(f"jobs/{job.id}/graph", view="graph", ready="a.node")
        await window.page.wait_for_selector("text=busy")


async def test_state_and_records_are_shown_only_with_the_token() -> None:
    async with shown(Shop(), token=TOKEN, show_data=True) as (base, job), chromium() as browser:
        window = await Window.open(browser, base)
        await window.show(f"jobs/{job.id}/state", view="state", ready="tr:has-text('spent') a")
        await window.page.click("tr:has-text('spent') a")
        await window.page.fill("[data-view=state] form input", "ada")
        await window.page.click("text=Look up")
        await window.page.wait_for_selector("[data-view=state] code:has-text(\"'ada'\")")

        await window.show(f"jobs/{job.id}/tap", view="tap", ready="button")
        await window.page.click("text=Look at records")
        await window.page.wait_for_selector("[data-view=tap] td >> text=Order(number=")
        await window.page.click("text=Stop")
        assert window.complaints == []


async def test_the_colours_that_were_chosen_are_kept() -> None:
    async with shown(Shop()) as (base, _), chromium() as browser:
        window = await Window.open(browser, base, theme="light")
        background = "getComputedStyle(document.body).backgroundColor"
        light = await window.page.evaluate(background)

        await window.page.click("button.theme")
        await window.page.click("button.theme")
        dark = await window.page.evaluate(background)
        await window.page.reload()
        await window.page.wait_for_selector("button.theme")

        assert await window.page.evaluate(background) == dark != light


async def test_it_works_under_the_path_where_it_is_mounted() -> None:
    async with Shop().flow.run() as job:
        service = web.Application()
        service.add_subapp("/flow/", af.monitor_app(job))
        async with served(service) as base, chromium() as browser:
            window = await Window.open(browser, f"{base}/flow")
            await window.page.wait_for_selector("[data-view=jobs] table a")
            await window.show(
                f"jobs/{job.id}/graph", view="graph", ready="a.node.is-busy, a.node.is-calm"
            )
            assert window.complaints == []
