"""Protects the connections between the processes of a cluster by TLS, unless the user allows plain
text.

`SecuredHost` is the host of such a process. The listeners and connections of the data plane and of
RPC read `security_of(host)`. Connections of sources and sinks are not affected. Invariants:

* both sides show a certificate signed by the cluster's authority (`CERT_REQUIRED`), over TLS 1.3.
  Host names are not compared, because the authority vouches for the peer, and the handshake with
  the secret follows inside of the TLS connection;
* no process listens in plain text on another interface than loopback unless `allow_plaintext` is
  set. The handshake and a MAC over each frame then keep out peers without the secret. But an
  eavesdropper reads every record.

The secret is in a file that only its owner can read.
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
import stat
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar, TypeVarTuple

from aioflow.core.errors import NotAuthenticated
from aioflow.network.admission import Refusals
from aioflow.protocol.handshake import SECRET_BYTES_MIN

if TYPE_CHECKING:
    from aioflow.core.host import Clock, FileSystem, Host, Ids, Network, Processes, Rng

__all__ = [
    "SecuredHost",
    "Security",
    "TlsContexts",
    "TlsFiles",
    "check_listen",
    "create_secret",
    "given_secret",
    "is_loopback",
    "read_secret",
    "security_of",
]

T = TypeVar("T")
Args = TypeVarTuple("Args")


logger = logging.getLogger(__name__)


class _Listening(ssl.SSLContext):
    """The TLS context of a listener. It logs refused handshakes, which asyncio does not report."""

    refusals: Refusals


class _Accepted(ssl.SSLObject):
    """The listener's side of one TLS connection."""

    context: _Listening

    def do_handshake(self) -> None:
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise  # The peer has not sent all of its part yet.
        except ssl.SSLError as error:
            self.context.refusals.add("a peer that has not proved itself", _reason(error))
            raise


@dataclass(frozen=True, slots=True)
class TlsContexts:
    """The two TLS contexts of a process, for connecting (`client`) and for listening."""

    client: ssl.SSLContext
    server: ssl.SSLContext


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """PEM files: the certificate of this process, its private key, and the cluster's authority."""

    certificate: str
    key: str
    authority: str

    @staticmethod
    def of(
        certificate: str | None, key: str | None, authority: str | None, names: tuple[str, str, str]
    ) -> TlsFiles | None:
        """Returns the three files, or None if none is given.

        `names` are the names of the three settings, for the error message. Raises NotAuthenticated
        if only one or two files are given.
        """
        given = (certificate, key, authority)
        missing = [name for name, value in zip(names, given, strict=True) if not value]
        if len(missing) == len(given):
            return None
        if certificate and key and authority:
            return TlsFiles(certificate=certificate, key=key, authority=authority)
        raise NotAuthenticated(
            f"TLS is configured by halves: {' and '.join(missing)} is missing, expected "
            f"{', '.join(names)} together"
        )

    def load(self) -> TlsContexts:
        """Reads the files and returns the TLS contexts.

        Raises NotAuthenticated, which names the file, if a file cannot be read or is invalid.
        """
        listening = _Listening(ssl.PROTOCOL_TLS_SERVER)
        listening.sslobject_class = _Accepted
        listening.refusals = Refusals(logger, "the listener on TLS")
        return TlsContexts(
            self._prepared(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)), self._prepared(listening)
        )

    def _prepared(self, context: ssl.SSLContext) -> ssl.SSLContext:
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        what = f"authority {self.authority}"
        try:
            context.load_verify_locations(cafile=self.authority)
            what = f"certificate {self.certificate} with key {self.key}"
            # OpenSSL would prompt for the password of an encrypted key and wait.
            context.load_cert_chain(self.certificate, self.key, password=_no_password)
        except (OSError, ValueError) as error:  # SSLError is an OSError.
            raise NotAuthenticated(
                f"TLS cannot use the {what}: {_reason(error)}; expected PEM files that belong "
                "together"
            ) from error
        return context


@dataclass(frozen=True, slots=True, kw_only=True)
class Security:
    """Protection of the connections between a cluster's processes, in addition to the secret."""

    tls: TlsContexts | None = None
    allow_plaintext: bool = False
    """Whether processes may listen on other interfaces than loopback without TLS."""

    @staticmethod
    def of(files: TlsFiles | None, *, allow_plaintext: bool) -> Security:
        """Returns the protection that the user's settings describe, and reads the files.

        `files` is None without TLS. Raises NotAuthenticated, which names the file, if a file cannot
        be read or is invalid.
        """
        return Security(
            tls=None if files is None else files.load(), allow_plaintext=allow_plaintext
        )


class SecuredHost:
    """Wraps `host`, and adds the `Security` of connections within the cluster."""

    __slots__ = ("_host", "security")

    def __init__(self, host: Host, security: Security) -> None:
        self._host = host
        self.security = security

    @property
    def clock(self) -> Clock:
        return self._host.clock

    @property
    def rng(self) -> Rng:
        return self._host.rng

    @property
    def ids(self) -> Ids:
        return self._host.ids

    @property
    def fs(self) -> FileSystem:
        return self._host.fs

    @property
    def net(self) -> Network:
        return self._host.net

    @property
    def procs(self) -> Processes:
        return self._host.procs

    def blocking(
        self,
        fn: Callable[[*Args], T],
        *args: *Args,
        dedicated: bool = False,
        name: str | None = None,
    ) -> asyncio.Future[T]:
        return self._host.blocking(fn, *args, dedicated=dedicated, name=name)

    def buggify(self, point: str, probability: float) -> bool:
        return self._host.buggify(point, probability)

    async def close(self) -> None:
        await self._host.close()


def security_of(host: Host) -> Security:
    """Returns the security of a `SecuredHost`; any other host has no TLS and allows no plain
    text.
    """
    return host.security if isinstance(host, SecuredHost) else Security()


def check_listen(host: Host, address: str) -> None:
    """Raises NotAuthenticated if other machines could read connections to `address` in plain text.

    Does not raise it if the user has set `allow_plaintext`.
    """
    security = security_of(host)
    if security.tls is None and not security.allow_plaintext and not is_loopback(address):
        raise NotAuthenticated(
            f"{address} can be reached from other machines, in plain text: configure TLS "
            "(--tls-cert, --tls-key, --tls-ca), "
            "or say that the network may be trusted (--allow-plaintext)"
        )


def is_loopback(address: object) -> bool:
    """Returns whether a socket address or host name belongs to the loopback interface."""
    host = address[0] if isinstance(address, tuple) else address
    return isinstance(host, str) and (host in ("localhost", "::1") or host.startswith("127."))


def _no_password() -> str:
    raise ValueError("the key is encrypted, give one without a password")


def _reason(error: Exception) -> str:
    text = getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
    return str(text).lower().replace("_", " ")


FILE_MODE = 0o600


def read_secret(path: str, named: str = "by secret=Path(...)") -> bytes:
    """Reads the secret in a file.

    `named` is text for error messages that says how the user has passed the file. Raises
    NotAuthenticated if the file has no secret, if other users can access the file, or if the secret
    is too short.
    """
    try:
        # A plain open of a pipe would block until a writer opens it.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        raise NotAuthenticated(
            f"there is no secret file {path}: name that of the cluster {named}. Its first "
            "jobmanager makes it, as `secret` in its "
            "directory (aioflow cluster start: .aioflow/secret); another machine needs a copy of "
            "it, of mode 600"
        ) from None
    except OSError as error:
        raise NotAuthenticated(
            f"secret file {path} cannot be read: {error.strerror}; name that of the cluster {named}"
        ) from error
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise NotAuthenticated(
                f"{path} is no file, expected the secret of the cluster: name it {named}"
            )
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            allowed = f"mode {stat.S_IMODE(mode):o}"
            raise NotAuthenticated(
                f"secret file {path} can be used by others ({allowed}), expected mode 600: chmod "
                f"600 {path}"
            )
        secret = os.read(descriptor, 4096).strip()
    finally:
        os.close(descriptor)
    if len(secret) < SECRET_BYTES_MIN:
        expected = f"expected at least {SECRET_BYTES_MIN}"
        raise NotAuthenticated(
            f"the secret in {path} has {len(secret)} bytes, {expected}: remove it to have one made"
        )
    return secret


def given_secret(secret: bytes | str | os.PathLike[str]) -> bytes:
    """Returns a secret that was passed as an argument, directly or as the path of its file.

    Raises NotAuthenticated if there is no secret, or if the secret is too short.
    """
    if isinstance(secret, os.PathLike):
        return read_secret(os.fspath(secret))
    if not isinstance(secret, (bytes, str)):
        raise NotAuthenticated(
            "secret= takes the secret of the cluster, or secret=Path(...) of its file; got "
            f"{type(secret).__name__}"
        )
    # Stripped like the content of a file.
    encoded = secret.strip().encode() if isinstance(secret, str) else secret
    if len(encoded) < SECRET_BYTES_MIN:
        raise NotAuthenticated(
            f"secret= has {len(encoded)} bytes, expected at least {SECRET_BYTES_MIN}; if it is "
            "the path of a file, give secret=Path(...)"
        )
    return encoded


def create_secret(path: str, secret: bytes) -> bytes:
    """Writes `secret` to the file at `path`, unless the file exists. Returns the secret that the
    file contains.
    """
    os.makedirs(os.path.dirname(path) or ".", mode=0o700, exist_ok=True)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE)
    except FileExistsError:
        return read_secret(path, "with --secret-file")
    try:
        os.write(descriptor, secret)
    finally:
        os.close(descriptor)
    return secret
