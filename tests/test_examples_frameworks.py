"""The programs of docs/howto/frameworks.md: each is served, killed, started again, and stopped."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "howto" / "frameworks.md"
FILES = dict(
    re.findall(r'^```python title="(\w+)\.py"\n(.*?)^```$', PAGE.read_text(), re.DOTALL | re.M)
)
PROGRAMS = [name for name in FILES if name.endswith("_hits")]
PATIENCE_S = 120
CLIENTS = 20


@contextmanager
def served(program: str) -> Iterator[subprocess.Popen[bytes]]:
    """The program on the server that the page names, at the socket `socket` in this directory."""
    Path("socket").unlink(missing_ok=True)
    server = (
        ["aiohttp.web", "-U", "socket", f"{program}:main"]
        if program == "aiohttp_hits"
        else ["uvicorn", "--uds", "socket", f"{program}:app"]
    )
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with subprocess.Popen(
        [sys.executable, "-m", *server], env={**os.environ, "PYTHONPATH": path}
    ) as process:
        try:
            yield process
        finally:
            process.kill()


async def talk(path: str, process: subprocess.Popen[bytes]) -> tuple[int, int]:
    """Returns a count before and after some hits. Waits until the server listens."""
    url = f"http://127.0.0.1/{path}/docs"
    async with (
        asyncio.timeout(PATIENCE_S),
        aiohttp.ClientSession(
            raise_for_status=True, connector=aiohttp.UnixConnector("socket", limit=CLIENTS)
        ) as client,
    ):
        while True:
            try:
                async with client.get(url) as response:
                    before = await response.json()
                break
            except aiohttp.ClientConnectorError:
                assert process.poll() is None, f"the server ended with {process.returncode}"
                await asyncio.sleep(0.05)
        await asyncio.gather(*(client.put(url) for _ in range(CLIENTS)))
        async with client.get(url) as response:
            return before, await response.json()


@pytest.mark.parametrize("program", PROGRAMS)
async def test_the_service_of_a_framework_keeps_its_counts(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(program.removesuffix("_hits"))
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        Path(f"{name}.py").write_text(text, encoding="utf-8")
    with served(program) as process:
        assert await talk("hits", process) == (0, CLIENTS)
        process.kill()
    with served(program) as process:
        path = "threads" if program == "django_hits" else "hits"
        assert await talk(path, process) == (CLIENTS, 2 * CLIENTS)
        process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(process.wait, PATIENCE_S)
    assert list(tmp_path.glob("checkpoints/hits/savepoints/*"))
