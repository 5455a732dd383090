"""Properties of the dashboard's files without a browser: small, offline, nothing inline, names
never read as HTML.
"""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

import aioflow

FILES = sorted((Path(aioflow.__file__).parent / "monitoring" / "dashboard").iterdir())
MODULES = [path for path in FILES if path.suffix == ".js"]
BYTES_MAX = 200_000
SVG_NAMESPACE = "http://www.w3.org/2000/svg"

HTML_FROM_TEXT = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|createContextualFragment"
    r"|DOMParser|\beval\(|new Function"
)


class Tags(HTMLParser):
    """Every tag with its attributes, and the text inside scripts and styles."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.inline = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.found and self.found[-1][0] in ("script", "style"):
            self.inline += data.strip()


def test_all_of_it_is_small() -> None:
    assert sum(path.stat().st_size for path in FILES) < BYTES_MAX


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_nothing_is_loaded_from_elsewhere(path: Path) -> None:
    text = path.read_text(encoding="utf-8").replace(SVG_NAMESPACE, "")

    assert re.findall(r"[\"'`(](?:https?:)?//.*", text) == []


def test_the_page_has_nothing_inline() -> None:
    """So the content security policy can forbid inline code."""
    tags = Tags()
    tags.feed((FILES[0].parent / "index.html").read_text(encoding="utf-8"))

    assert tags.inline == ""
    names = [name for _, attributes in tags.found for name in attributes]
    assert [name for name in names if name == "style" or name.startswith("on")] == []


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_no_text_is_read_as_html(path: Path) -> None:
    assert HTML_FROM_TEXT.findall(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_imported_modules_exist(path: Path) -> None:
    exported = {
        other.name: set(
            re.findall(
                r"^export (?:async )?(?:function\*?|const|class|let) (\w+)",
                other.read_text(encoding="utf-8"),
                re.M,
            )
        )
        for other in MODULES
    }
    text = path.read_text(encoding="utf-8")

    for names, module in re.findall(r"^import \{([^}]*)\} from \"\./([^\"]+)\"", text, re.M):
        wanted = {name.strip() for name in names.split(",") if name.strip()}
        assert wanted <= exported[module], (
            f"{path.name} imports {wanted - exported[module]} of {module}"
        )
        for name in wanted:
            assert len(re.findall(rf"\b{name}\b", text)) > 1, (
                f"{path.name} imports {name} and does not use it"
            )
