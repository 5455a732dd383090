"""The site of docs/: its links lead somewhere, and it builds without a warning.

The links are checked in the sources, which is fast. One slow test builds the site.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import cache
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


@cache
def anchors(page: Path) -> frozenset[str]:
    """The anchors of the headings of a page, as GitHub and the site make them."""
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    plain = (re.sub(r"[`*]|\]\([^)]*\)|\[", "", heading) for heading in HEADING.findall(text))
    return frozenset(
        re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip()) for heading in plain
    )


def broken_links(page: Path) -> list[str]:
    found = []
    for link in LINK.findall(FENCED.sub("", page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", link):
            continue
        target, _, anchor = link.partition("#")
        path = (page.parent / target).resolve() if target else page
        if not path.exists() or (anchor and path.suffix == ".md" and anchor not in anchors(path)):
            found.append(link)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    assert broken_links(page) == []


def test_check_of_links_sees_missing_files_and_anchors(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A `title`, here\n[x](#a-title-here) [x](#gone) [x](gone.md) [x](page.md#gone)"
    )
    assert broken_links(page) == ["#gone", "gone.md", "page.md#gone"]


class Loaded(HTMLParser):
    """Collects what a browser loads with a page: scripts, styles, pictures, frames."""

    def __init__(self) -> None:
        super().__init__()
        self.urls: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        url = given.get("href") if tag == "link" else given.get("src")
        if url and given.get("rel") not in ("canonical", "prev", "next"):
            self.urls.append(url)


@pytest.mark.slow
def test_site_builds_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    done = subprocess.run(
        [*command, "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > 50
    for page in pages:
        loaded = Loaded()
        loaded.feed(page.read_text(encoding="utf-8"))
        assert [url for url in loaded.urls if re.match(r"(https?:)?//", url)] == [], page
