"""Servers of other systems for tests: each of its own directory, on a free port of the loopback,
ended with the session.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.needs import program

PATIENCE_S = 180.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """One process that can be ended and restarted, on the same port and with the same directory."""

    def __init__(
        self,
        directory: Path,
        port: int,
        command: Sequence[str],
        answers: Callable[[int], bool],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.directory = directory
        self._environment = None if environment is None else os.environ | environment
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
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.directory,
                env=self._environment,
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


@contextmanager
def mosquitto_server(*lines: str, listener: Sequence[str] = ()) -> Iterator[Server]:
    """A server of MQTT that keeps its sessions when it is ended by SIGTERM."""
    with tempfile.TemporaryDirectory(prefix="aioflow-mqtt-") as directory:
        port, place = free_port(), Path(directory)
        options = [
            f"listener {port} 127.0.0.1",
            *listener,
            *(lines or ("allow_anonymous true",)),
            "persistence true",
            f"persistence_location {directory}/",
            "max_queued_messages 0",
            *(["user root"] if os.getuid() == 0 else []),
        ]
        (place / "mosquitto.conf").write_text("\n".join(options) + "\n")
        command = [program("mosquitto"), "-c", f"{directory}/mosquitto.conf"]
        server = Server(place, port, command, _accepts)
        server.start()
        try:
            yield server
        finally:
            server.stop()


class RabbitmqServer(Server):
    """A RabbitMQ with one user, guest, and the tools to manage it."""

    @property
    def url(self) -> str:
        return f"amqp://guest:guest@127.0.0.1:{self.port}"

    def evaluate(self, expressions: str) -> str:
        """Returns what the server says to expressions in Erlang. One call is much faster than
        several of rabbitmqctl.
        """
        done = subprocess.run(
            [rabbitmq_program("rabbitmqctl"), "eval", expressions],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert done.returncode == 0, (done.stdout + done.stderr).decode()
        return done.stdout.decode()


def rabbitmq_program(name: str) -> str:
    """Returns the path of a program of RabbitMQ. Debian's wrappers on the PATH run it as another
    user.
    """
    own = Path("/usr/lib/rabbitmq/bin", name)
    return str(own) if own.exists() else program(name)


@contextmanager
def rabbitmq_server() -> Iterator[RabbitmqServer]:
    """A RabbitMQ of its own directory, with a port mapper of its own."""
    with tempfile.TemporaryDirectory(prefix="aioflow-rabbitmq-") as directory:
        port, mapper_port, distribution = free_port(), free_port(), free_port()
        place = Path(directory)
        (place / "rabbitmq.conf").write_text(
            f"listeners.tcp.default = 127.0.0.1:{port}\n"
            "vm_memory_high_watermark.absolute = 2GB\n"
            "disk_free_limit.absolute = 50MB\n"
        )
        (place / "plugins").write_text("[].\n")
        environment = {
            "HOME": directory,
            "ERL_EPMD_PORT": str(mapper_port),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_MNESIA_BASE": f"{directory}/data",
            "RABBITMQ_LOG_BASE": f"{directory}/logs",
            "RABBITMQ_NODENAME": f"n{port}@localhost",
            "RABBITMQ_DIST_PORT": str(distribution),
            "RABBITMQ_CONFIG_FILE": f"{directory}/rabbitmq.conf",
            "RABBITMQ_ENABLED_PLUGINS_FILE": f"{directory}/plugins",
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+S 1:1 +sbwt none",
            "RUNNING_UNDER_SYSTEMD": "true",  # The script becomes the server.
        }
        mapper = Server(
            place,
            mapper_port,
            [program("epmd"), "-port", str(mapper_port), "-address", "127.0.0.1"],
            _accepts,
            environment,
        )
        command = [rabbitmq_program("rabbitmq-server")]
        answers = says(b"AMQP\0\0\x09\x01", b"\x01")
        server = RabbitmqServer(place, port, command, answers, environment)
        mapper.start()
        try:
            server.start()
            yield server
        finally:
            server.stop()
            mapper.stop()


async def rabbitmq_declared(url: str, *queues: str, stream: bool = False) -> None:
    """Make durable queues, or streams."""
    import aiormq

    connection = await aiormq.connect(url)
    channel = await connection.channel()
    arguments = {"x-queue-type": "stream"} if stream else None
    for queue in queues:
        await channel.queue_declare(queue, durable=True, arguments=arguments)
    await connection.close()


def _accepts(port: int) -> bool:
    with socket.create_connection(("127.0.0.1", port), PATIENCE_S):
        return True


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
