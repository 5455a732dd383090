"""A peer without the secret gets nothing, for any bytes that it sends."""

from __future__ import annotations

from random import Random

import pytest

from aioflow.core.errors import LocalProtocolError, NotAuthenticated
from aioflow.protocol.handshake import (
    ClientHandshake,
    Handshaken,
    PeerRole,
    ServerHandshake,
    Side,
    direction_key,
)

SECRET = b"s" * 32
OTHER_SECRET = b"t" * 32
CLIENT_NONCE = b"c" * 32
SERVER_NONCE = b"n" * 32
EVERY_ROLE = frozenset(PeerRole)


def pair(
    role: PeerRole = PeerRole.DATA,
    client_secret: bytes = SECRET,
    server_secret: bytes = SECRET,
    accepted: frozenset[PeerRole] = EVERY_ROLE,
    client_nonce: bytes = CLIENT_NONCE,
    server_nonce: bytes = SERVER_NONCE,
) -> tuple[ClientHandshake, ServerHandshake]:
    return ClientHandshake(client_secret, role, client_nonce), ServerHandshake(
        server_secret, server_nonce, accepted
    )


def results(client: ClientHandshake, server: ServerHandshake) -> tuple[Handshaken, Handshaken]:
    assert client.done is not None
    assert server.done is not None
    return client.done, server.done


@pytest.mark.parametrize("role", PeerRole)
def test_both_sides_that_know_the_secret_agree_on_role_and_session_key(role: PeerRole) -> None:
    client, server = pair(role)
    assert server.receive(client.receive(server.receive(client.start()))) == b""
    at_client, at_server = results(client, server)
    assert at_client == at_server == Handshaken(role, at_client.session_key)
    assert len(at_client.session_key) == 32


def test_neither_the_secret_nor_the_session_key_is_ever_sent_or_shown() -> None:
    client, server = pair()
    hello = client.start()
    answer = server.receive(hello)
    proof = client.receive(answer)
    server.receive(proof)
    key = results(client, server)[0].session_key
    for secret in (SECRET, key):
        assert secret not in hello + answer + proof
    assert repr(key) not in repr(client.done)


def test_every_conversation_and_direction_has_its_own_key() -> None:
    keys = set()
    for client_nonce in (b"1" * 32, b"2" * 32):
        for server_nonce in (b"3" * 32, b"4" * 32):
            for role in (PeerRole.DATA, PeerRole.METRICS):
                client, server = pair(role, client_nonce=client_nonce, server_nonce=server_nonce)
                server.receive(client.receive(server.receive(client.start())))
                session_key = results(client, server)[0].session_key
                keys |= {
                    session_key,
                    direction_key(session_key, Side.CLIENT),
                    direction_key(session_key, Side.SERVER),
                }
    assert len(keys) == 2 * 2 * 2 * 3


def test_the_conversation_may_be_cut_at_every_byte() -> None:
    for size in (1, 2, 5, 31, 33):
        client, server = pair()

        def in_pieces(
            to: ClientHandshake | ServerHandshake, data: bytes, size: int = size
        ) -> bytes:
            return b"".join(to.receive(data[at : at + size]) for at in range(0, len(data), size))

        in_pieces(server, in_pieces(client, in_pieces(server, client.start())))
        assert results(client, server)[0] == results(client, server)[1]


def test_handshake_truncated_at_any_byte_is_refused() -> None:
    client, server = pair()
    hello = client.start()
    answer = server.receive(hello)
    proof = client.receive(answer)
    for stop in range(len(hello)):
        waiting = pair()[1]
        assert waiting.receive(hello[:stop]) == b""
        assert waiting.done is None
    for stop in range(len(answer)):
        waiting_client = pair()[0]
        assert waiting_client.receive(answer[:stop]) == b""
        assert waiting_client.done is None
    for stop in range(len(proof)):
        waiting = pair()[1]
        waiting.receive(hello)
        assert waiting.receive(proof[:stop]) == b""
        assert waiting.done is None


def test_frames_right_behind_the_proof_are_handed_on() -> None:
    client, server = pair()
    server.receive(client.receive(server.receive(client.start())) + b"frames")
    assert results(client, server)[1].leftover == b"frames"


def test_a_server_with_another_secret_gets_no_proof_from_the_client() -> None:
    client, server = pair(server_secret=OTHER_SECRET)
    answer = server.receive(client.start())
    with pytest.raises(NotAuthenticated, match="the server did not prove"):
        client.receive(answer)
    assert client.done is None


def test_a_client_with_another_secret_is_refused() -> None:
    knowing, server = pair()
    server.receive(knowing.start())
    stranger = ClientHandshake(OTHER_SECRET, PeerRole.DATA, CLIENT_NONCE)
    with_wrong_key = stranger.receive(
        ServerHandshake(OTHER_SECRET, SERVER_NONCE, EVERY_ROLE).receive(stranger.start())
    )
    with pytest.raises(NotAuthenticated, match="the client did not prove"):
        server.receive(with_wrong_key)
    assert server.done is None


def test_the_right_key_in_the_wrong_role_is_refused_before_any_answer() -> None:
    client, server = pair(
        PeerRole.DATA, accepted=frozenset({PeerRole.SUBMITTER, PeerRole.TASKMANAGER})
    )
    with pytest.raises(NotAuthenticated, match="role 5, expected submitter, taskmanager"):
        server.receive(client.start())


@pytest.mark.parametrize("role", [0, 8, 255])
def test_a_role_that_does_not_exist_is_refused(role: int) -> None:
    client, server = pair()
    hello = client.start()
    with pytest.raises(NotAuthenticated, match=f"role {role}"):
        server.receive(hello[:5] + bytes((role,)) + hello[6:])


def test_a_role_changed_on_the_way_is_noticed_by_both_sides() -> None:
    client, server = pair(PeerRole.METRICS)
    hello = client.start()
    answer = server.receive(hello[:5] + bytes((PeerRole.SUBMITTER,)) + hello[6:])
    with pytest.raises(NotAuthenticated):
        client.receive(answer)


def test_a_server_that_sends_back_the_proof_of_a_server_is_refused() -> None:
    """Reflection: who knows no key opens a connection back to the client's process and lets it
    compute the proofs.
    """
    victim = ClientHandshake(SECRET, PeerRole.DATA, CLIENT_NONCE)
    helper = ServerHandshake(SECRET, SERVER_NONCE, EVERY_ROLE)
    # The proof of a server is no proof of a client, even with the same nonces in the same places.
    answer = helper.receive(victim.start())
    with pytest.raises(NotAuthenticated, match="the client did not prove"):
        helper.receive(answer[32:])
    # And what was sent in the role of a client is no proof of a server.
    proof = ClientHandshake(SECRET, PeerRole.DATA, CLIENT_NONCE).receive(answer)
    with pytest.raises(NotAuthenticated, match="the server did not prove"):
        victim.receive(SERVER_NONCE + proof)


def test_recorded_conversation_is_refused_a_second_time() -> None:
    client, server = pair()
    hello = client.start()
    answer = server.receive(hello)
    proof = client.receive(answer)

    later_server = ServerHandshake(SECRET, b"m" * 32, EVERY_ROLE)
    later_server.receive(hello)
    with pytest.raises(NotAuthenticated):
        later_server.receive(proof)
    later_client = ClientHandshake(SECRET, PeerRole.DATA, b"d" * 32)
    with pytest.raises(NotAuthenticated):
        later_client.receive(answer)


@pytest.mark.parametrize(
    "start", [b"GET / HTTP/1.1\r\n", b"\x16\x03\x01", b"aioF", b"SSH-2.0", b"\x00"]
)
def test_another_protocol_is_refused_at_its_first_wrong_byte(start: bytes) -> None:
    server = pair()[1]
    with pytest.raises(NotAuthenticated, match="expected the handshake"):
        for at in range(4):
            server.receive(start[at : at + 1])


def test_another_version_is_distinguished_from_a_stranger() -> None:
    with pytest.raises(NotAuthenticated, match="version 2 of the handshake, expected 1"):
        pair()[1].receive(b"aioH\x02")


def test_more_than_a_hello_is_refused_and_never_kept() -> None:
    client, server = pair()
    with pytest.raises(NotAuthenticated, match="more than its hello"):
        server.receive(client.start() + b"x" * 1_000_000)
    assert len(server._buffer) == 0


def test_a_server_that_sends_more_than_its_answer_is_refused() -> None:
    client, server = pair()
    with pytest.raises(NotAuthenticated):
        client.receive(server.receive(client.start()) + b"x")


def test_after_a_failure_nothing_helps() -> None:
    client, server = pair()
    with pytest.raises(NotAuthenticated):
        server.receive(b"x")
    with pytest.raises(NotAuthenticated, match="failed before"):
        server.receive(client.start())
    assert server.done is None


def test_changed_bytes_are_refused() -> None:
    rng = Random(11)
    for _ in range(3000):
        client, server = pair()
        where, bit = rng.randrange(3), rng.randrange(38 * 8)

        def changed(data: bytes, step: int, where: int = where, bit: int = bit) -> bytes:
            if step != where:
                return data
            mutable = bytearray(data)
            mutable[bit // 8 % len(data)] ^= 1 << bit % 8
            return bytes(mutable)

        with pytest.raises(NotAuthenticated):
            server.receive(
                changed(client.receive(changed(server.receive(changed(client.start(), 0)), 1)), 2)
            )
        assert server.done is None


@pytest.mark.parametrize(
    ("secret", "nonce"), [(b"short", CLIENT_NONCE), (SECRET, b"n" * 31), (SECRET, b"")]
)
def test_a_weak_secret_or_nonce_is_our_own_bug(secret: bytes, nonce: bytes) -> None:
    with pytest.raises(LocalProtocolError, match="expected"):
        ClientHandshake(secret, PeerRole.DATA, nonce)
    with pytest.raises(LocalProtocolError, match="expected"):
        ServerHandshake(secret, nonce, EVERY_ROLE)
