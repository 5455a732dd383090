"""Brokers of Apache Kafka for tests: its own jars from Maven Central, in KRaft mode, each broker on
free ports of the loopback and in its own directory.

`python -m tests.io.kafka.brokers` starts one by hand, and prints its address.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.io.servers import PATIENCE_S, Server, free_port
from tests.needs import program, unreachable

POM = Path(__file__).with_name("pom.xml")
JARS = Path(__file__).parents[3] / "build" / "kafka"
FETCH_TIMEOUT_S = 300.0
BROKERS_REMEDY = "let Maven reach Maven Central, which has the jars"
CLUSTER_ID = "aioflow-tests-kafka0A"
"""16 bytes in base64, as the storage of KRaft asks."""

SETTINGS = """
process.roles=broker,controller
node.id={node}
controller.quorum.voters={voters}
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=PLAINTEXT://127.0.0.1:{port}
controller.listener.names=CONTROLLER
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT
log.dirs={directory}/logs
num.partitions=4
default.replication.factor={copies}
offsets.topic.num.partitions=4
offsets.topic.replication.factor={copies}
transaction.state.log.num.partitions=4
transaction.state.log.replication.factor={copies}
transaction.state.log.min.isr={least}
min.insync.replicas={least}
group.initial.rebalance.delay.ms=0
transaction.abort.timed.out.transaction.cleanup.interval.ms=500
"""


def jars() -> Path:
    """Returns the folder of Kafka's jars. Fetches them once with Maven.

    Skips the test where they cannot be fetched.
    """
    maven = program("mvn")
    JARS.parent.mkdir(exist_ok=True)
    with (JARS.parent / "kafka.lock").open("w") as lock:  # Several processes run tests at a time.
        fcntl.flock(lock, fcntl.LOCK_EX)
        made_from = JARS / "pom.xml"
        if not made_from.exists() or made_from.read_bytes() != POM.read_bytes():
            shutil.rmtree(JARS, ignore_errors=True)
            command = [maven, "-q", "-B", "-f", str(POM), "dependency:copy-dependencies"]
            fetched = subprocess.run(
                [*command, "-DincludeScope=runtime", f"-DoutputDirectory={JARS}"],
                capture_output=True,
                text=True,
                timeout=FETCH_TIMEOUT_S,
                check=False,
            )
            if fetched.returncode:
                print(fetched.stdout, fetched.stderr, file=sys.stderr)
                unreachable("brokers of Kafka", BROKERS_REMEDY)
            made_from.write_bytes(POM.read_bytes())
    return JARS


class Brokers:
    """A cluster of one or more brokers, each of which also votes as a controller."""

    def __init__(self, servers: list[Server]) -> None:
        self.servers = servers
        self.bootstrap = ",".join(f"127.0.0.1:{server.port}" for server in servers)

    def pause(self) -> None:
        """Stops answering."""
        for server in self.servers:
            server.pause()

    def resume(self) -> None:
        for server in self.servers:
            server.resume()

    def kill(self, number: int = 0) -> None:
        self.servers[number].stop()

    def restart(self, number: int = 0) -> None:
        self.servers[number].start()


@contextmanager
def kafka_brokers(count: int = 1, *, is_open: bool = True, **settings: str) -> Iterator[Brokers]:
    """Starts `count` brokers with further `settings` (`_` for `.`), and ends them at the end.

    `is_open` says that they accept clients without a user.
    """
    java, folder = program("java"), jars()
    with tempfile.TemporaryDirectory(prefix="aioflow-kafka-") as directory, ExitStack() as stack:
        ports, controllers = ([free_port() for _ in range(count)] for _ in range(2))
        voters = ",".join(f"{node}@127.0.0.1:{port}" for node, port in enumerate(controllers))
        servers = []
        for node in range(count):
            home = Path(directory) / str(node)
            home.mkdir()
            text = SETTINGS.format(
                node=node,
                voters=voters,
                port=ports[node],
                controller=controllers[node],
                directory=home,
                copies=count,
                least=min(count, 2),
            )
            further = (f"{name.replace('_', '.')}={value}\n" for name, value in settings.items())
            (home / "server.properties").write_text(text + "".join(further))
            run = [java, "-Xmx384m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"]
            run += ["-Dorg.slf4j.simpleLogger.defaultLogLevel=warn", "-cp", f"{folder}/*"]
            storage = ["kafka.tools.StorageTool", "format", "-t", CLUSTER_ID]
            subprocess.run(
                [*run, *storage, "-c", str(home / "server.properties")],
                check=True,
                capture_output=True,
            )
            command = [*run, "kafka.Kafka", str(home / "server.properties")]
            servers.append(Server(home, ports[node], command, _accepts))
        for server in servers:  # The first answers only once a majority votes.
            server.begin()
            stack.callback(server.stop)
        for server in servers:
            server.wait()
        brokers = Brokers(servers)
        if is_open:
            asyncio.run(_coordinated(brokers.bootstrap))
        yield brokers


def _accepts(port: int) -> bool:
    """Returns whether a broker answers requests on `port`: ApiVersions, version 0."""
    request = bytes.fromhex("0012 0000 0000 0001 0004") + b"test"
    with socket.create_connection(("127.0.0.1", port), 5.0) as connection:
        connection.sendall(len(request).to_bytes(4, "big") + request)
        return len(connection.recv(4)) == 4


MOCK_CLUSTER = """
import signal
from pathlib import Path
from confluent_kafka import Producer

cluster = Producer({"bootstrap.servers": "mock", "test.mock.num.brokers": 1, "log_level": 0})
(broker,) = cluster.list_topics(timeout=60).brokers.values()
Path("new").write_text(str(broker.port))
Path("new").rename("port")
signal.pause()
"""


class MockCluster:
    """The mock cluster of librdkafka in a process of its own: Kafka's protocol over TCP, its
    records in memory, four partitions a topic.

    It is no Kafka: it neither aborts nor fences transactions. It serves where Maven Central is out
    of reach.
    """

    def __init__(self, directory: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", MOCK_CLUSTER], stdin=subprocess.DEVNULL, cwd=directory
        )
        port, until = directory / "port", time.monotonic() + PATIENCE_S
        while not port.exists():
            assert self._process.poll() is None, (
                "the mock cluster does not start: pip install confluent-kafka"
            )
            assert time.monotonic() < until, "the mock cluster does not answer"
            time.sleep(0.02)
        self.bootstrap = f"127.0.0.1:{port.read_text()}"

    def pause(self) -> None:
        """Stops answering."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        self._process.kill()
        self._process.wait(PATIENCE_S)


@contextmanager
def kafka_cluster() -> Iterator[Brokers | MockCluster]:
    """Starts a broker of Apache Kafka, or the mock cluster where its jars cannot be fetched."""
    try:
        jars()
    except pytest.skip.Exception as error:
        print(f"on the mock cluster of librdkafka: {error}", file=sys.stderr)
    else:
        with kafka_brokers() as brokers:
            yield brokers
        return
    with tempfile.TemporaryDirectory(prefix="aioflow-kafka-") as directory:
        cluster = MockCluster(Path(directory))
        try:
            yield cluster
        finally:
            cluster.stop()


PLAIN = "org.apache.kafka.common.security.plain.PlainLoginModule required"

SASL = {
    "listener_security_protocol_map": "PLAINTEXT:SASL_PLAINTEXT,CONTROLLER:PLAINTEXT",
    "inter_broker_listener_name": "PLAINTEXT",
    "sasl_mechanism_inter_broker_protocol": "PLAIN",
    "sasl_enabled_mechanisms": "PLAIN",
    "listener_name_plaintext_plain_sasl_jaas_config": (
        f'{PLAIN} username="admin" password="admin-word" user_admin="admin-word" user_me="word";'
    ),
    "authorizer_class_name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    "super_users": "User:admin;User:ANONYMOUS",
}
"""Settings of brokers with the users admin, who may do all, and me, who may do nothing."""


async def produced(
    cluster: Brokers | MockCluster, topic: str, values: Sequence[tuple[int, bytes | None]]
) -> None:
    """Values into partitions of a topic, which is made."""
    from aiokafka import AIOKafkaProducer

    producer = AIOKafkaProducer(bootstrap_servers=cluster.bootstrap)
    await producer.start()
    try:
        await producer.partitions_for(topic)
        for partition, value in values:
            await producer.send_and_wait(topic, value, key=b"k", partition=partition)
    finally:
        await producer.client.force_metadata_update()  # A stop amid one would leak its connection.
        await producer.stop()


async def _coordinated(bootstrap: str) -> None:
    """Returns once the brokers take transactions: they make their own topics at the first one."""
    from aiokafka import AIOKafkaProducer, TopicPartition
    from aiokafka.errors import KafkaError

    name = "coordinated"
    async with asyncio.timeout(PATIENCE_S):
        while True:
            producer = AIOKafkaProducer(bootstrap_servers=bootstrap, transactional_id=name)
            try:
                await producer.start()
                async with producer.transaction():
                    await producer.send_and_wait(name, b"")
                    await producer.send_offsets_to_transaction({TopicPartition(name, 0): 0}, name)
                return
            except KafkaError:
                await asyncio.sleep(0.1)
            finally:
                await producer.stop()


async def settled(cluster: Brokers | MockCluster, topic: str) -> None:
    """Returns once no transaction is open in a topic: a commit is answered before it is seen."""
    from aiokafka import AIOKafkaConsumer, TopicPartition

    async def ends(isolation_level: str) -> dict[TopicPartition, int]:
        consumer = AIOKafkaConsumer(
            bootstrap_servers=cluster.bootstrap, isolation_level=isolation_level
        )
        await consumer.start()
        try:
            return dict(await consumer.end_offsets([TopicPartition(topic, n) for n in range(4)]))
        finally:
            await consumer.stop()

    async with asyncio.timeout(PATIENCE_S):
        while isinstance(cluster, Brokers) and (
            await ends("read_committed") != await ends("read_uncommitted")
        ):
            await asyncio.sleep(0.02)


async def transactions(cluster: Brokers) -> dict[str, str]:
    """The states of all transactional ids, by Kafka's request ListTransactions."""
    from aiokafka.admin import AIOKafkaAdminClient
    from aiokafka.protocol.api import Request, RequestStruct, Response
    from aiokafka.protocol.types import (
        CompactArray,
        CompactString,
        Int16,
        Int32,
        Int64,
        Schema,
        TaggedFields,
    )

    class Listed(Response):
        API_KEY = 66
        API_VERSION = 0
        SCHEMA = Schema(
            ("throttle_time_ms", Int32),
            ("error_code", Int16),
            ("unknown_state_filters", CompactArray(CompactString())),
            (
                "transaction_states",
                CompactArray(
                    ("transactional_id", CompactString()),
                    ("producer_id", Int64),
                    ("transaction_state", CompactString()),
                    ("tags", TaggedFields),
                ),
            ),
            ("tags", TaggedFields),
        )

    class List(RequestStruct):
        FLEXIBLE_VERSION = True
        API_KEY = 66
        API_VERSION = 0
        RESPONSE_TYPE = Listed
        SCHEMA = Schema(
            ("state_filters", CompactArray(CompactString())),
            ("producer_id_filters", CompactArray(Int64)),
            ("tags", TaggedFields),
        )

    class ListTransactions(Request[List]):
        API_KEY = 66

        def build(self, request_struct_class: type[List]) -> List:
            return request_struct_class([], [], {})

    admin = AIOKafkaAdminClient(bootstrap_servers=cluster.bootstrap)
    await admin.start()
    try:
        brokers = (await admin.describe_cluster())["brokers"]
        answers = [
            await admin._send_request(ListTransactions(), broker["node_id"]) for broker in brokers
        ]
    finally:
        await admin.close()
    assert not any(answer.error_code for answer in answers)
    return {id_: state for answer in answers for id_, _, state, _ in answer.transaction_states}


async def ended(cluster: Brokers) -> None:
    """Returns once no commit or abort is under way: it is answered before it is seen."""
    async with asyncio.timeout(PATIENCE_S):
        while any(state.startswith("Prepare") for state in (await transactions(cluster)).values()):
            await asyncio.sleep(0.02)


if __name__ == "__main__":
    with kafka_brokers() as running:
        print(running.bootstrap, os.getpid(), flush=True)
        signal.pause()
