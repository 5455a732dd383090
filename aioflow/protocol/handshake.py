"""The handshake of a connection: both sides prove that they know a shared secret.

No other bytes of a connection are parsed before the handshake is done. No key is sent, and nothing
is allocated.

    client -> server   4 magic | 1 version | 1 role | 32 client nonce
    server -> client   32 server nonce | 32 proof of the server
    client -> server   32 proof of the client

A proof is an HMAC-SHA256 with the secret over a label, version, role and both nonces. The server
sends its proof first, so a client never answers a stranger. The two labels differ, so a proof
cannot be sent back to its sender. Both nonces are fresh, so a proof cannot be replayed. Both sides
derive the same session key, which an eavesdropper cannot compute. Input is bounded: an invalid byte
is refused when it arrives, and no more bytes than these are kept. The caller passes the nonces, so
this module needs no randomness.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

from aioflow.core.errors import LocalProtocolError, NotAuthenticated

__all__ = [
    "NONCE_BYTES",
    "SECRET_BYTES_MIN",
    "ClientHandshake",
    "Handshaken",
    "PeerRole",
    "ServerHandshake",
    "Side",
    "direction_key",
]

NONCE_BYTES = 32
SECRET_BYTES_MIN = 16
"""Minimum length of a secret in bytes. A shorter secret could be guessed from one proof."""

_MAGIC: Final = b"aioH"
_VERSION = 1
_PROOF_BYTES = 32
_HELLO_BYTES = len(_MAGIC) + 2 + NONCE_BYTES
_ANSWER_BYTES = NONCE_BYTES + _PROOF_BYTES

_SERVER_LABEL, _CLIENT_LABEL, _SESSION_LABEL = (
    b"aioflow server proof",
    b"aioflow client proof",
    b"aioflow session key",
)


class PeerRole(IntEnum):
    """The role of a client. Each listener accepts only certain roles. The role limits what the
    client may send.
    """

    SUBMITTER = 1
    JOBMANAGER = 2
    TASKMANAGER = 4
    DATA = 5
    METRICS = 6
    EXECUTOR = 7
    """A Spark task that sends or fetches rows."""


class Side(IntEnum):
    """The two sides of a connection: the client has opened it, the server has accepted it."""

    CLIENT = 0
    SERVER = 1


@dataclass(frozen=True, slots=True)
class Handshaken:
    """The result of a handshake: both sides know the secret.

    `leftover` contains the bytes that were received after the handshake, which are the beginning of
    the first frames.
    """

    role: PeerRole
    session_key: bytes = field(repr=False)
    leftover: bytes = b""


def direction_key(session_key: bytes, sender: Side) -> bytes:
    """Returns the MAC key for frames that `sender` sends. Each direction has a key of its own."""
    return _hmac(
        session_key,
        b"aioflow frames of the client"
        if sender is Side.CLIENT
        else b"aioflow frames of the server",
    )


class ClientHandshake:
    """The client's side of a handshake, for a client with `role`.

    `start` returns the first bytes to send. `done` is None until the server has proved that it
    knows the secret.
    """

    __slots__ = ("_buffer", "_failed", "_nonce", "_role", "_secret", "done")

    def __init__(self, secret: bytes, role: PeerRole, nonce: bytes) -> None:
        _check_arguments(secret, nonce)
        self.done: Handshaken | None = None
        self._secret = secret
        self._role = role
        self._nonce = nonce
        self._buffer = b""
        self._failed = False

    def start(self) -> bytes:
        """Returns the first bytes to send."""
        return _MAGIC + bytes((_VERSION, self._role)) + self._nonce

    def receive(self, data: bytes) -> bytes:
        """Handles received bytes, and returns the bytes to send. Raises NotAuthenticated if the
        server does not know the secret.
        """
        _check_open(self.done, self._failed)
        self._buffer += data[: _ANSWER_BYTES + 1]
        if len(self._buffer) < _ANSWER_BYTES:
            return b""
        server_nonce, proof = self._buffer[:NONCE_BYTES], self._buffer[NONCE_BYTES:]
        transcript = _transcript(self._role, self._nonce, server_nonce)
        # No bytes may follow: the server has not received our proof yet.
        if not hmac.compare_digest(proof, _hmac(self._secret, _SERVER_LABEL + transcript)):
            self._failed = True
            raise NotAuthenticated(
                "the server did not prove that it knows the secret; expected the secret that this "
                "process has"
            )
        self.done = Handshaken(self._role, _hmac(self._secret, _SESSION_LABEL + transcript))
        return _hmac(self._secret, _CLIENT_LABEL + transcript)


class ServerHandshake:
    """The server's side of a handshake, for clients with one of `accepted_roles`.

    `done` is None until the client has proved that it knows the secret.
    """

    __slots__ = (
        "_accepted_roles",
        "_buffer",
        "_failed",
        "_nonce",
        "_role",
        "_secret",
        "_transcript",
        "done",
    )

    def __init__(self, secret: bytes, nonce: bytes, accepted_roles: frozenset[PeerRole]) -> None:
        _check_arguments(secret, nonce)
        self.done: Handshaken | None = None
        self._secret = secret
        self._nonce = nonce
        self._accepted_roles = accepted_roles
        self._buffer = b""
        self._failed = False
        self._role: PeerRole | None = None
        self._transcript = b""

    def receive(self, data: bytes) -> bytes:
        """Handles received bytes, and returns the bytes to send.

        Raises NotAuthenticated if the client is refused. The caller must then close the connection
        and send nothing more.
        """
        _check_open(self.done, self._failed)
        try:
            return self._receive_hello(data) if self._role is None else self._receive_proof(data)
        except NotAuthenticated:
            self._failed = True
            self._buffer = b""
            raise

    def _receive_hello(self, data: bytes) -> bytes:
        hello = self._buffer = self._buffer + data[: _HELLO_BYTES + 1]
        if hello[:4] != _MAGIC[: len(hello)]:
            raise NotAuthenticated(
                f"a connection began with {hello[:4]!r}, expected the handshake; is the peer "
                "another program?"
            )
        if len(hello) > 4 and hello[4] != _VERSION:
            raise NotAuthenticated(
                f"the client speaks version {hello[4]} of the handshake, expected {_VERSION}; run "
                "the same release"
            )
        if len(hello) > 5 and hello[5] not in self._accepted_roles:
            expected = ", ".join(role.name.lower() for role in sorted(self._accepted_roles))
            raise NotAuthenticated(
                f"the client connected as role {hello[5]}, expected {expected}; is this the right "
                "port?"
            )
        if len(hello) > _HELLO_BYTES:
            raise NotAuthenticated("the client sent more than its hello before it was answered")
        if len(hello) < _HELLO_BYTES:
            return b""
        role = self._role = PeerRole(hello[5])
        self._transcript = _transcript(role, hello[6:], self._nonce)
        self._buffer = b""
        return self._nonce + _hmac(self._secret, _SERVER_LABEL + self._transcript)

    def _receive_proof(self, data: bytes) -> bytes:
        missing = _PROOF_BYTES - len(self._buffer)
        self._buffer += data[:missing]
        if len(self._buffer) < _PROOF_BYTES:
            return b""
        if not hmac.compare_digest(
            self._buffer, _hmac(self._secret, _CLIENT_LABEL + self._transcript)
        ):
            raise NotAuthenticated(
                "the client did not prove that it knows the secret; expected the secret that this "
                "process has"
            )
        assert self._role is not None, "the hello came first"
        self.done = Handshaken(
            self._role,
            _hmac(self._secret, _SESSION_LABEL + self._transcript),
            bytes(data[missing:]),
        )
        return b""


def _transcript(role: PeerRole, client_nonce: bytes, server_nonce: bytes) -> bytes:
    """Returns the bytes that a proof covers. All parts have fixed lengths, so different arguments
    have different results.
    """
    return bytes((_VERSION, role)) + client_nonce + server_nonce


def _hmac(key: bytes, message: bytes) -> bytes:
    return hmac.digest(key, message, "sha256")


def _check_arguments(secret: bytes, nonce: bytes) -> None:
    if len(secret) < SECRET_BYTES_MIN:
        raise LocalProtocolError(
            f"the secret has {len(secret)} bytes, expected at least {SECRET_BYTES_MIN}; let it be "
            "generated"
        )
    if len(nonce) != NONCE_BYTES:
        raise LocalProtocolError(
            f"a nonce of {len(nonce)} bytes was given, expected {NONCE_BYTES} fresh random ones"
        )


def _check_open(done: Handshaken | None, failed: bool) -> None:
    if done is not None:
        raise LocalProtocolError("the handshake is over; bytes belong to the frame decoder now")
    if failed:
        raise NotAuthenticated("the handshake failed before; close the connection")
