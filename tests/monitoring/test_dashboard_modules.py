"""Modules of the dashboard that only compute, each called in a browser with nothing around it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from playwright.async_api import Page

import aioflow
from tests.monitoring.browser import chromium, served

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

FILES = Path(aioflow.__file__).parent / "monitoring" / "dashboard"
LONG_MAX = 2**63 - 1

FORMATS = (
    ("number", "NaN", None),
    ("number", "12.5", 12.5),
    ("number", "", None),
    ("count", 1234567, "1,234,567"),
    ("count", None, "–"),
    ("short", 999.6, "1k"),
    ("short", 12345, "12.3k"),
    ("short", 0.001, "<0.01"),
    ("short", 7, "7"),
    ("rate", 1500, "1.50k/s"),
    ("bytes", 0, "0 B"),
    ("bytes", 1536, "1.50 KiB"),
    ("bytes", 5 * 2**30, "5 GiB"),
    ("bytes", -1, "–"),
    ("percent", 0.876, "88 %"),
    ("duration", 0.4, "<1 ms"),
    ("duration", 12, "12 ms"),
    ("duration", 3_400, "3.4 s"),
    ("duration", 59_600, "1 m 00 s"),
    ("duration", 3_661_000, "1 h 01 m"),
    ("duration", -1, "–"),
    ("duration", LONG_MAX, "no limit"),
    ("watermark", -LONG_MAX - 1, "–"),
    ("watermark", LONG_MAX, "end"),
    ("watermark", 42, "42"),
    ("watermark", 1_357_041_600_000, "2013-01-01 12:00:00"),
)


@asynccontextmanager
async def page() -> AsyncIterator[Page]:
    """A page of nothing, from which the modules can be imported."""
    app = web.Application()
    app.router.add_static("/dashboard", FILES)
    app.router.add_get("/", nothing)
    async with served(app) as base, chromium() as browser:
        shown = await browser.new_page()
        await shown.goto(f"{base}/")
        yield shown


async def nothing(request: web.Request) -> web.Response:
    return web.Response(text="<!doctype html><main></main>", content_type="text/html")


async def called(page: Page, module: str, function: str, *arguments: Any) -> Any:
    script = (
        "async ([module, name, given]) => (await import(`/dashboard/${module}.js`))[name](...given)"
    )
    return await page.evaluate(script, [module, function, list(arguments)])


async def test_numbers_and_times_are_written_as_people_read_them() -> None:
    async with page() as shown:
        found = [
            (name, value, await called(shown, "format", name, value)) for name, value, _ in FORMATS
        ]

    assert found == list(FORMATS)


async def test_boxes_stand_behind_their_producers_and_do_not_touch() -> None:
    """A job of 120 tasks in which every task reads some before it, and one whose answer has a
    circle in it.
    """
    nodes = [{"id": str(index)} for index in range(120)]
    edges = [
        {"source": str(target * 7 % max(target, 1)), "target": str(target)}
        for target in range(1, 120)
        if target % 5
    ]
    circle = [{"source": "0", "target": "1"}, {"source": "1", "target": "0"}]
    script = """async ([nodes, edges]) => {
        const { layout } = await import('/dashboard/layout.js');
        const sizes = {width: 200, height: 80, gap: 20, layerGap: 100, across: true};
        const found = layout(nodes, edges, sizes);
        return {at: Object.fromEntries(found.at), width: found.width, height: found.height};
    }"""
    async with page() as shown:
        found = await shown.evaluate(script, [nodes, edges])
        await shown.evaluate(script, [nodes[:2], circle])

    places = [(at["x"], at["y"]) for at in found["at"].values()]
    for index, (x, y) in enumerate(places):
        assert 0 <= x <= found["width"] - 200
        assert -0.01 <= y <= found["height"] - 79.99
        assert all(x != other_x or abs(y - other_y) >= 99.99 for other_x, other_y in places[:index])
    assert all(
        found["at"][edge["source"]]["x"] < found["at"][edge["target"]]["x"] for edge in edges
    )


async def test_a_description_changes_what_stands_there_and_keeps_the_rest() -> None:
    """The focus stays in its field, typed text stays, and rows that change places are moved, not
    created again.
    """
    script = """async () => {
        const { h, render } = await import('/dashboard/dom.js');
        const main = document.querySelector('main');
        const row = (name) => h('li', {key: name}, name);
        const said = (note) => note && h('p', {style: {color: 'red'}}, note);
        const draw = (names, note) =>
            render(main, h('input', {value: ''}), said(note), h('ul', null, names.map(row)));
        draw(['a', 'b', 'c'], 'first');
        const input = main.querySelector('input');
        input.focus();
        input.value = 'typed';
        const b = main.querySelectorAll('li')[1];
        draw(['c', 'b', 'd'], null);
        draw(['b', 'c', '<b>d</b>'], 'again');
        return {
            same: main.querySelector('input') === input && document.activeElement === input
                && input.value === 'typed',
            moved: main.querySelectorAll('li')[0] === b,
            text: [...main.querySelectorAll('li')].map((one) => one.textContent),
            bold: main.querySelectorAll('b').length,
            note: main.querySelector('p').textContent,
        };
    }"""
    async with page() as shown:
        found = await shown.evaluate(script)

    assert found == {
        "same": True,
        "moved": True,
        "text": ["b", "c", "<b>d</b>"],
        "bold": 0,
        "note": "again",
    }
