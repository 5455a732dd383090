"""TLS between processes, and the refusal to go without it where others could read along."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from aioflow.cluster.rpc import RpcServer, connect_rpc
from aioflow.core.elements import RecordBatch
from aioflow.core.errors import NotAuthenticated
from aioflow.core.host import Host
from aioflow.core.system_host import SystemHost
from aioflow.core.wire.serializers import Codec
from aioflow.network.data_plane import DataPlane
from aioflow.network.security import SecuredHost, Security, TlsContexts, TlsFiles
from aioflow.protocol.handshake import PeerRole
from tests.network.certificates import Authority
from tests.network.planes import ADDRESS, SECRET, Planes, Reader, Registry, until

NAMES = ("--tls-cert", "--tls-key", "--tls-ca")


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def secured(files: TlsFiles) -> SecuredHost:
    return SecuredHost(SystemHost(), Security(tls=files.load()))


def test_all_three_files_or_none() -> None:
    assert TlsFiles.of(None, None, None, NAMES) is None
    assert TlsFiles.of("c", "k", "a", NAMES) == TlsFiles(certificate="c", key="k", authority="a")


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        (("c", None, None), "--tls-key and --tls-ca is missing"),
        (("c", "k", None), ": --tls-ca is missing"),
        ((None, "k", "a"), ": --tls-cert is missing"),
        (("", "k", "a"), ": --tls-cert is missing"),
    ],
)
def test_a_configuration_by_halves_is_refused_and_names_what_is_missing(
    given: tuple[str | None, ...], missing: str
) -> None:
    with pytest.raises(NotAuthenticated, match="TLS is configured by halves") as refused:
        TlsFiles.of(*given, NAMES)
    assert missing in str(refused.value)


def test_files_that_cannot_be_used_are_named_with_the_reason(
    authority: Authority, tmp_path: Path
) -> None:
    good, other = authority.issue("one"), authority.issue("two")
    locked = authority.issue("locked", password=b"secret")
    junk = tmp_path / "junk"
    junk.write_text("no certificate")
    cases = [
        (
            TlsFiles(certificate="absent", key=good.key, authority=good.authority),
            "certificate absent with key .*no such file",
        ),
        (
            TlsFiles(certificate=good.certificate, key=good.key, authority=str(junk)),
            f"authority {junk}",
        ),
        (
            TlsFiles(certificate=good.certificate, key=other.key, authority=good.authority),
            "key values mismatch",
        ),
        (
            TlsFiles(certificate=str(junk), key=good.key, authority=good.authority),
            f"certificate {junk}",
        ),
        (locked, "the key is encrypted"),
    ]
    for files, message in cases:
        with pytest.raises(NotAuthenticated, match=message):
            files.load()


def test_both_sides_demand_a_certificate_and_the_newest_protocol(authority: Authority) -> None:
    contexts = authority.issue("one").load()
    for context in (contexts.client, contexts.server):
        assert context.verify_mode is ssl.CERT_REQUIRED
        assert context.minimum_version is ssl.TLSVersion.TLSv1_3


@pytest.mark.parametrize("address", ["0.0.0.0", "192.0.2.7", "::", "example.org", ""])
async def test_nothing_listens_off_loopback_in_plain_text_unless_that_is_allowed(
    address: str,
) -> None:
    host = SystemHost()
    server = RpcServer(
        host, SECRET, Codec(), frozenset([PeerRole.SUBMITTER]), lambda peer: {}, lambda peer: None
    )
    for listening in (
        DataPlane(host, SECRET, Codec(), Registry()).listen(address),
        server.listen(address),
    ):
        with pytest.raises(
            NotAuthenticated, match=r"in plain text: configure TLS .*--allow-plaintext"
        ):
            await listening


async def test_plain_text_that_is_allowed_and_tls_both_listen_everywhere(
    authority: Authority,
) -> None:
    for host in (
        SecuredHost(SystemHost(), Security(allow_plaintext=True)),
        secured(authority.issue("one")),
    ):
        plane = DataPlane(host, SECRET, Codec(), Registry())
        assert await plane.listen("0.0.0.0") > 0
        await plane.close()


def on_tls(producer: Host, consumer: Host, main: Callable[[Planes], Awaitable[None]]) -> None:
    async def run() -> None:
        async with Planes(consumer, producer) as planes:
            await main(planes)

    asyncio.run(run())


def test_records_cross_over_tls_without_a_mac_of_their_own(authority: Authority) -> None:
    async def main(planes: Planes) -> None:
        partition = planes.partition()
        reader = Reader(planes.channel())
        for n in range(50):
            while not partition.availability.is_available:
                await partition.availability.get_available_future()
            partition.subpartitions[0].add(RecordBatch([n, "x" * 50_000]))
        await until(lambda: len(reader.records) == 100)
        assert reader.records[::2] == list(range(50))
        connection = planes.link.connection
        assert connection is not None
        transport = connection._transport
        assert transport is not None
        assert transport.get_extra_info("ssl_object").version() == "TLSv1.3"
        reader.channel.release()

    on_tls(secured(authority.issue("producer")), secured(authority.issue("consumer")), main)


def test_rpc_crosses_over_tls(authority: Authority) -> None:
    async def main() -> None:
        server_host, client_host = (
            secured(authority.issue("server")),
            secured(authority.issue("client")),
        )
        roles = frozenset([PeerRole.SUBMITTER])
        server = RpcServer(
            server_host,
            SECRET,
            Codec(),
            roles,
            lambda peer: {"double": lambda n: 2 * n},
            lambda peer: None,
        )
        port = await server.listen()
        peer = await connect_rpc(
            client_host, SECRET, Codec(), PeerRole.SUBMITTER, (ADDRESS, port), {}, lambda peer: None
        )
        assert await peer.call("double", 21) == 42
        await peer.close()
        await server.close()

    asyncio.run(main())


def old_protocol(files: TlsFiles) -> TlsContexts:
    contexts = files.load()
    contexts.client.minimum_version = ssl.TLSVersion.TLSv1_2
    contexts.client.maximum_version = ssl.TLSVersion.TLSv1_2
    return contexts


def without_certificate(files: TlsFiles) -> TlsContexts:
    contexts = files.load()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(files.authority)
    return TlsContexts(context, contexts.server)


@pytest.mark.expects_asyncio_errors
@pytest.mark.parametrize(
    "stranger", ["plain", "of another authority", "old protocol", "without certificate"]
)
def test_peer_without_a_certificate_is_refused_although_it_knows_the_secret(
    authority: Authority, tmp_path: Path, stranger: str, caplog: pytest.LogCaptureFixture
) -> None:
    good = authority.issue("stranger")
    match stranger:
        case "plain":
            security = Security()
        case "of another authority":
            (tmp_path / "other").mkdir()
            files = Authority(tmp_path / "other", "other").issue("mallory")
            # It trusts the server, so that it is the server that has to refuse.
            mixed = TlsFiles(certificate=files.certificate, key=files.key, authority=good.authority)
            security = Security(tls=mixed.load())
        case "old protocol":
            security = Security(tls=old_protocol(good))
        case _:
            security = Security(tls=without_certificate(good))

    async def main(planes: Planes) -> None:
        planes.partition()
        link = planes.link
        reader = Reader(planes.channel())
        await until(lambda: link.attempts >= 3)
        assert planes.producer.links == []
        assert not link._heard
        reader.channel.release()

    on_tls(secured(authority.issue("producer")), SecuredHost(SystemHost(), security), main)
    (logged,) = [record for record in caplog.records if record.name == "aioflow.network.security"]
    assert logged.getMessage().startswith("the listener on TLS refused a connection from a peer")


@pytest.mark.expects_asyncio_errors
def test_a_server_of_another_authority_is_refused_by_its_client(
    authority: Authority, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    impostor = Authority(tmp_path / "other", "other").issue("impostor")

    async def main(planes: Planes) -> None:
        link = planes.link
        reader = Reader(planes.channel())
        await until(lambda: link.attempts >= 3)
        assert link.connection is None
        assert planes.producer.links == []
        reader.channel.release()

    on_tls(secured(impostor), secured(authority.issue("consumer")), main)
