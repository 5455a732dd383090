"""Servers of other systems for tests: each of its own directory, on a free port of the loopback,
ended with the session.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.needs import program

PATIENCE_S = 60.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """One process that can be ended and restarted, on the same port and with the same directory."""

    def __init__(
        self, directory: Path, port: int, command: Sequence[str], answers: Callable[[int], bool]
    ) -> None:
        self.directory = directory
        self.port = port
        self._command = command
        self._answers = answers
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns once it answers."""
        self.begin()
        self.wait()

    def begin(self) -> None:
        """Starts the process, and does not wait until it answers."""
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.directory
            )

    def wait(self) -> None:
        """Returns once it answers."""
        assert self._process is not None
        until = time.monotonic() + PATIENCE_S
        while not self._ready():
            assert self._process.poll() is None, (self.directory / "log").read_text()
            assert time.monotonic() < until, f"{self._command[0]} does not answer"
            time.sleep(0.02)

    def _ready(self) -> bool:
        try:
            return self._answers(self.port)
        except OSError:
            return False

    def restart_without(self, *options: str) -> None:
        """Once more, without these options and what follows each that takes something."""
        self.stop()
        kept, skip = [], False
        for word in self._command:
            skip = word in options or (skip and not word.startswith("-"))
            if not skip:
                kept.append(word)
        self._command = kept
        self.start()

    def pause(self) -> None:
        """Stops answering."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def send(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def ask(self, line: str) -> str:
        """Returns the answer of a server of lines of text."""
        with socket.create_connection(("127.0.0.1", self.port), PATIENCE_S) as connection:
            connection.sendall(line.encode() + b"\r\n")
            return connection.recv(65536).decode()

    def stop(self, number: int = signal.SIGKILL) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(number)
            process.wait(PATIENCE_S)


def says(request: bytes, answer: bytes) -> Callable[[int], bool]:
    """Whether a server on a port answers to `request` with something that begins with `answer`."""

    def ask(port: int) -> bool:
        with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as connection:
            connection.sendall(request)
            return connection.recv(64).startswith(answer)

    return ask


@contextmanager
def redis_server(*options: str) -> Iterator[Server]:
    """A Redis that keeps what it said it has, also when it is killed."""
    with tempfile.TemporaryDirectory(prefix="aioflow-redis-") as directory:
        port = free_port()
        command = [
            program("redis-server"),
            "--bind",
            "127.0.0.1",
            "--port",
            str(port),
            "--dir",
            directory,
            "--save",
            "",
        ]
        command += ["--appendonly", "yes", "--appendfsync", "always", *options]
        server = Server(
            Path(directory),
            port,
            command,
            says(b"PING\r\n", b"-NOAUTH" if "--requirepass" in options else b"+PONG"),
        )
        server.start()
        try:
            yield server
        finally:
            server.stop()


@contextmanager
def nats_server(*options: str) -> Iterator[Server]:
    """A NATS with JetStream, which keeps what it acknowledged when it is killed."""
    with tempfile.TemporaryDirectory(prefix="aioflow-nats-") as directory:
        port = free_port()
        command = [
            program("nats-server"),
            "-a",
            "127.0.0.1",
            "-p",
            str(port),
            "-js",
            "-sd",
            directory,
            *options,
        ]
        server = Server(Path(directory), port, command, says(b"", b"INFO"))
        server.start()
        try:
            yield server
        finally:
            server.stop()


BUCKET = "checkpoints"

S3_SERVER = """
import signal, sys, threading, time
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server
# One request at a time: this one looks whether a name is free and takes it in two steps.
application = DomainDispatcherApplication(create_backend_app)
away = threading.Event()
signal.signal(signal.SIGUSR1, lambda number, frame: away.set())
while True:
    server = make_server("127.0.0.1", int(sys.argv[1]), application, threaded=False)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    while not away.wait(0.05):
        pass
    server.shutdown()
    server.server_close()
    time.sleep(1.5)
    away.clear()
"""


@contextmanager
def s3_server() -> Iterator[Server]:
    """A server that speaks the S3 protocol, with an empty bucket `BUCKET`.

    It keeps objects in memory. At SIGUSR1 it refuses connections for 1.5 s, and has its objects
    again afterwards, as a store that is restarted.
    """
    with tempfile.TemporaryDirectory(prefix="aioflow-s3-") as directory:
        port = free_port()
        server = Server(
            Path(directory), port, [sys.executable, "-c", S3_SERVER, str(port)], _makes_bucket
        )
        server.start()
        try:
            yield server
        finally:
            server.stop()


def _makes_bucket(port: int) -> bool:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/{BUCKET}", method="PUT")
    urllib.request.urlopen(request, timeout=PATIENCE_S).close()
    return True


def s3_environment(port: int) -> dict[str, str]:
    """Environment variables with which `s3://` URLs lead to a server on a port of this machine."""
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
    }


async def published(server: Server, stream: str, bodies: Sequence[bytes] = ()) -> None:
    """Make a stream of this name that takes the subject of this name, if there is none, and fill
    it.
    """
    import nats

    client = await nats.connect(f"nats://127.0.0.1:{server.port}")
    jetstream = client.jetstream()
    await jetstream.add_stream(name=stream, subjects=[stream])
    for body in bodies:
        await jetstream.publish(stream, body)
    await client.close()
