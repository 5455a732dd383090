"""The guide and the README say nothing that is not so: their snippets run, and print what is
shown.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import importlib
import inspect
import io
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

import aioflow
from tests.io import lake_tables

lake_tables.start_threads()

ROOT = Path(__file__).parent.parent
FENCE = re.compile(r'^```(python|text)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
FOREIGN = re.compile(r"^```py(?: [^\n]*)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
"""Programs that a test cannot run: those of other engines, and those that need a cluster."""


class Snippet(NamedTuple):
    section: str
    line: int
    code: str
    shown: str | None
    file: str | None = None
    """Name of the file that the snippet is, given as `title=`."""


def snippets(path: Path) -> Iterator[Snippet]:
    """The Python blocks of a document, each with the text block that follows it directly."""
    text = path.read_text(encoding="utf-8")
    blocks = list(FENCE.finditer(text))
    for block, following in zip(blocks, [*blocks[1:], None], strict=False):
        if block[1] == "python":
            adjacent = (
                following is not None
                and following[1] == "text"
                and following.start() == block.end() + 1
            )
            section = re.findall(r"^#+ (.*)$", text[: block.start()], re.MULTILINE)[-1]
            yield Snippet(
                section,
                text[: block.start()].count("\n") + 2,
                block[3],
                following[3] if following and adjacent else None,
                block[2],
            )


DOCUMENTS = {
    str(path.relative_to(ROOT)): path
    for path in sorted((ROOT / "docs").rglob("*.md"))
    if path.parent.name != "decisions"
}
PAGES = {page: list(snippets(path)) for page, path in DOCUMENTS.items()}
SECTIONS = dict.fromkeys(
    (page, snippet.section) for page, found in PAGES.items() for snippet in found
)


@pytest.mark.parametrize(("page", "section"), SECTIONS)
async def test_snippets_of_the_pages_print_what_they_show(
    page: str, section: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Snippets of a section share their names. Those with a `title=` are files: the later snippets
    of the page may import them, and they run as programs if their output is shown.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    shutil.copy(ROOT / "examples" / "data" / "genesis.txt", tmp_path)
    names: dict[str, Any] = {"__name__": "guide", "af": aioflow, "asyncio": asyncio}
    for snippet in PAGES[page]:
        if snippet.file is not None:
            (tmp_path / snippet.file).write_text(snippet.code, encoding="utf-8")
            monkeypatch.delitem(sys.modules, snippet.file.removesuffix(".py"), raising=False)
            importlib.invalidate_caches()
        if snippet.section != section:
            continue
        shown = snippet.shown or ""
        # Lines are counted as in the document, so that a traceback points there.
        tree = ast.increment_lineno(ast.parse(snippet.code), snippet.line - 1)
        code = compile(tree, page, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        if snippet.file is not None:
            if snippet.shown is not None:
                ran = await asyncio.to_thread(run_file, snippet.file, tmp_path)
                assert ran == shown, f"{page}:{snippet.line}"
            continue
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            outcome = eval(code, names)
            if inspect.iscoroutine(outcome):
                await outcome
        assert printed.getvalue() == shown, f"{page}:{snippet.line}"


@pytest.mark.parametrize("page", DOCUMENTS)
def test_programs_that_are_only_shown_are_python(page: str) -> None:
    for code in FOREIGN.findall(DOCUMENTS[page].read_text(encoding="utf-8")):
        compile(code, page, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def test_the_page_on_expressions_names_every_operation() -> None:
    page = (ROOT / "docs" / "expressions.md").read_text(encoding="utf-8")
    namespaces = {"str": dir(aioflow.col.x.str), "dt": dir(aioflow.col.x.dt)}
    names = [
        *dir(aioflow.col.x),
        *(
            f"{space}.{name}"
            for space, found in namespaces.items()
            for name in found
            if name[0] != "_"
        ),
    ]
    for name in names:
        assert name.startswith("_") or f"`.{name}" in page, name


def test_the_guide_names_every_example() -> None:
    guide = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")
    for path in (ROOT / "examples").glob("*.py"):
        assert f"`{path.name}`" in guide, path.name


README = [snippet.code for snippet in snippets(ROOT / "README.md")]


def program(code: str, directory: Path, **environment: str) -> list[str]:
    """The lines that `code` prints when it is the main program, with the book at hand."""
    shutil.copy(ROOT / "examples" / "data" / "genesis.txt", directory)
    (directory / "program.py").write_text(code)
    return run_file("program.py", directory, **environment).splitlines()


def run_file(name: str, directory: Path, *arguments: str, **environment: str) -> str:
    """What the program `name` in `directory` prints."""
    done = subprocess.run(
        [sys.executable, name, *arguments],
        cwd=directory,
        env={**os.environ, "PYTHONWARNINGS": "error", "PYTHONIOENCODING": "utf-8", **environment},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_readme_gives_two_commands_and_three_programs() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"^(make \w+)", text, re.MULTILINE) == ["make demo", "make test"]
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert {"demo", "test"} <= set(targets)
    assert len(README) == 3


@pytest.mark.slow
def test_readme_programs_and_examples_please_a_strict_type_checker(tmp_path: Path) -> None:
    files = sorted((ROOT / "examples").glob("*.py"))
    for letter, code in zip("abc", README, strict=True):
        files.append(tmp_path / f"readme_{letter}.py")
        files[-1].write_text(code)
    command = [sys.executable, "-m", "mypy", "--strict", *map(str, files)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("Success"), done.stdout + done.stderr


def test_readme_a_counts_the_words_of_the_book(tmp_path: Path) -> None:
    counted = Counter(
        (ROOT / "examples" / "data" / "genesis.txt").read_text(encoding="utf-8").lower().split()
    )
    printed = [ast.literal_eval(line) for line in program(README[0], tmp_path)]
    assert len(printed) == counted.total()
    assert dict(printed) == counted


async def test_readme_b_sends_each_element_where_it_belongs(tmp_path: Path) -> None:
    """With the server that the README starts, at another port."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    server, shown = re.findall(
        r"^cat > .*?<<'END'\n(.*?)^END$.*?^```text\n(.*?)^```$", text, re.M | re.S
    )[0]
    port = free_port()
    (tmp_path / "directory.py").write_text(server.replace("port=8000", f"port={port}"))
    async with served(["directory.py"], tmp_path, port):
        url = f"http://127.0.0.1:{port}"
        lines = await asyncio.to_thread(program, README[1], tmp_path, DIRECTORY_URL=url)
    assert sorted(lines) == sorted(shown.splitlines())


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextlib.asynccontextmanager
async def served(arguments: list[str], directory: Path, port: int) -> AsyncIterator[None]:
    """Runs Python with `arguments` until it listens at `port`. Leaving kills it with -9."""
    with subprocess.Popen(
        [sys.executable, *arguments], cwd=directory, stdout=subprocess.DEVNULL
    ) as process:
        try:
            while True:
                assert process.poll() is None
                with socket.socket() as probe:
                    if probe.connect_ex(("127.0.0.1", port)) == 0:
                        break
                await asyncio.sleep(0.05)
            yield
        finally:
            process.kill()


@pytest.mark.slow
async def test_service_of_the_tutorial_counts_on_after_kill_9(tmp_path: Path) -> None:
    """With the requests that the tutorial sends, at another port."""
    for snippet in PAGES["docs/tutorial.md"]:
        if snippet.file is not None:  # The last version of each file.
            (tmp_path / snippet.file).write_text(snippet.code, encoding="utf-8")
    text = DOCUMENTS["docs/tutorial.md"].read_text(encoding="utf-8")
    assert "Start it with `uvicorn service:app`" in text
    ((order, orders),) = re.findall(r"^curl --json '(.*)' http://127.0.0.1:8000(.*)$", text, re.M)
    (customer,) = re.findall(r"^curl http://127.0.0.1:8000(.*)$", text, re.M)
    port = free_port()
    command = ["-m", "uvicorn", "service:app", "--port", str(port)]
    for expected in (1, 2):
        async with (
            served(command, tmp_path, port),
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client,
        ):
            answer = await client.post(orders, json=json.loads(order))
            assert answer.status_code == 202, answer.text
            async with asyncio.timeout(60):
                while (count := (await client.get(customer)).json()) < expected:
                    await asyncio.sleep(0.05)
            assert count == expected


def test_check_of_the_installation_works() -> None:
    text = DOCUMENTS["docs/install.md"].read_text(encoding="utf-8")
    (code,) = re.findall(r"^python -c '(.*)'$", text, re.M)
    assert run_file("-c", ROOT, code) == "it works\n"


async def test_readme_c_counts_hits_inside_a_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # Where its checkpoints go.
    names: dict[str, Any] = {"__name__": "readme_c"}
    exec(compile(README[2], "README.md", "exec", dont_inherit=True), names)
    app = names["app"]
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
            async with app.state.job.subscribe(names["counts"]) as rows:
                for page in ("docs", "docs", "blog"):
                    assert (await client.put(f"/hits/{page}")).status_code == 200
                reader = aiter(rows)
                seen = [await anext(reader) for _ in range(3)]
            assert seen == [("docs", 1), ("docs", 2), ("blog", 1)]
            assert (await client.get("/hits/docs")).json() == 2
            assert (await client.get("/hits/unknown")).json() == 0
    async with app.router.lifespan_context(app):
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app=app), base_url="http://service"
        ) as client:
            assert (await client.get("/hits/docs")).json() == 2, "it goes on where it stopped"
