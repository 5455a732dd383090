"""Writes the Python snippets of the pages as modules that a type checker can read.

The snippets of a section share their names, so a section is one module. Snippets with a `title=`
are modules of this name. Code with `await` at the top is the body of an async function.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

from tests.test_examples_docs import DOCUMENTS, PAGES, Snippet

__all__ = ["written"]

HEAD = "import asyncio\nimport aioflow as af\n"


def written(directory: Path) -> dict[str, str]:
    """Writes the modules, a directory for each page. Returns the section of each file."""
    sections: dict[str, str] = {}
    for page in DOCUMENTS:
        folder = directory / re.sub(r"\W", "_", page.removesuffix(".md"))
        by_section: dict[str, list[Snippet]] = {}
        for snippet in PAGES[page]:
            if snippet.file is not None:
                folder.mkdir(parents=True, exist_ok=True)
                (folder / snippet.file).write_text(snippet.code, encoding="utf-8")
                sections[f"{folder.name}/{snippet.file}"] = f"{page}: {snippet.file}"
            else:
                by_section.setdefault(snippet.section, []).append(snippet)
        for number, (section, snippets) in enumerate(by_section.items()):
            folder.mkdir(parents=True, exist_ok=True)
            body = textwrap.indent("\n".join(one.code for one in snippets), "    ")
            name = f"section_{number}.py"
            (folder / name).write_text(f"{HEAD}\n\nasync def section() -> None:\n{body}")
            sections[f"{folder.name}/{name}"] = f"{page}: {section}"
    return sections
