"""The commands that the documentation shows are commands that there are, with options that they
take.
"""

from __future__ import annotations

import re
import shlex
from contextlib import suppress
from pathlib import Path

import pytest

from aioflow.cli.command import _parser

ROOT = Path(__file__).parents[2]
STANDS_FOR = {
    "HOST:PORT": "127.0.0.1:8081",
    "ADDRESS": "127.0.0.1",
    "JOB": "0d2c",
    "COMMAND": "run",
    "[DIR]": "DIR",
    "N": "2",
}
BLOCK = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINE = re.compile(r"^aioflow [^\n]+$", re.MULTILINE)
SPOKEN = re.compile(r"`(aioflow [^`]+)`")


def documented() -> list[tuple[str, str]]:
    """(page, command) of each, without its remark: the lines of code blocks, and code in a text."""
    found: list[tuple[str, str]] = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = page.read_text(encoding="utf-8")
        blocks = "\n".join(BLOCK.findall(text))
        found += [(page.name, line) for line in LINE.findall(blocks)]
        found += [(page.name, command) for command in SPOKEN.findall(BLOCK.sub("", text))]
    return [(page, command.partition("  #")[0].strip()) for page, command in dict.fromkeys(found)]


COMMANDS = documented()


def test_the_documentation_shows_commands() -> None:
    assert {"clusters.md", "checkpoints.md", "rest.md"} <= {page for page, _ in COMMANDS}


@pytest.mark.parametrize(("page", "command"), COMMANDS)
def test_a_command_is_shown_as_it_can_be_typed(
    page: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [STANDS_FOR.get(word, word) for word in shlex.split(command)[1:]]
    with suppress(SystemExit):
        _parser(argv[0]).parse_args(argv)
    said = capsys.readouterr().err
    # A command that is only spoken of needs no arguments.
    assert not said or "the following arguments are required" in said, f"{page}: {command}\n{said}"
