"""What the connections of a cluster's own processes need beyond the secret, once they leave the
machine: TLS, or a yes to do without.

`SecuredHost` is the host of such a process. Its listeners and dialling, those of the data plane and
of RPC, read `security_of(host)`; the connections of sources and sinks are their own business and
are not touched. Invariants:

* both sides show a certificate that the cluster's authority has signed (`CERT_REQUIRED`), over TLS
  1.3; names are not compared: who the peer is, is what the authority says, and the handshake with
  the secret still follows inside;
* nobody listens off loopback in plain text unless `allow_plaintext` says so. Then the handshake and
  a MAC over each frame keep out who does not know the secret; but who listens on the way reads
  every record.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar, TypeVarTuple

from aioflow.core.errors import NotAuthenticated

if TYPE_CHECKING:
    from aioflow.core.host import Clock, FileSystem, Host, Ids, Network, Processes, Rng

__all__ = [
    "SecuredHost",
    "Security",
    "TlsContexts",
    "TlsFiles",
    "check_listen",
    "is_loopback",
    "security_of",
]

T = TypeVar("T")
Args = TypeVarTuple("Args")


@dataclass(frozen=True, slots=True)
class TlsContexts:
    """Both sides of the same identity: a process of a cluster dials and is dialled."""

    client: ssl.SSLContext
    server: ssl.SSLContext


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """PEM files: the certificate of this process with its private key, and the authority that
    signs those of the whole cluster.
    """

    certificate: str
    key: str
    authority: str

    @staticmethod
    def of(
        certificate: str | None, key: str | None, authority: str | None, names: tuple[str, str, str]
    ) -> TlsFiles | None:
        """All three or none; `names` are those of the settings, for the error.

        Raises NotAuthenticated.
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
        """Read the files. Raises NotAuthenticated, which says which of them is wrong."""
        return TlsContexts(
            self._context(ssl.PROTOCOL_TLS_CLIENT), self._context(ssl.PROTOCOL_TLS_SERVER)
        )

    def _context(self, side: int) -> ssl.SSLContext:
        context = ssl.SSLContext(side)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        what = f"authority {self.authority}"
        try:
            context.load_verify_locations(cafile=self.authority)
            what = f"certificate {self.certificate} with key {self.key}"
            # A key that asks for a password would wait for somebody to type it.
            context.load_cert_chain(self.certificate, self.key, password=_no_password)
        except (OSError, ValueError) as error:  # SSLError is an OSError.
            raise NotAuthenticated(
                f"TLS cannot use the {what}: {_reason(error)}; expected PEM files that belong "
                "together"
            ) from error
        return context


@dataclass(frozen=True, slots=True, kw_only=True)
class Security:
    """How the connections between a cluster's processes are protected beyond the secret."""

    tls: TlsContexts | None = None
    allow_plaintext: bool = False
    """Whether to listen off loopback without TLS."""

    @staticmethod
    def of(files: TlsFiles | None, *, allow_plaintext: bool) -> Security:
        """As a user gives it.

        Reads the files: raises NotAuthenticated, which says which of them is wrong.
        """
        return Security(
            tls=None if files is None else files.load(), allow_plaintext=allow_plaintext
        )


class SecuredHost:
    """`host`, with what its cluster connections need. A Host itself."""

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
    """That of a `SecuredHost`; another one has neither TLS nor leave to do without."""
    return host.security if isinstance(host, SecuredHost) else Security()


def check_listen(host: Host, address: str) -> None:
    """Raises NotAuthenticated if others could read along at `address`, and nobody has allowed
    that.
    """
    security = security_of(host)
    if security.tls is None and not security.allow_plaintext and not is_loopback(address):
        raise NotAuthenticated(
            f"{address} can be reached from other machines, in plain text: configure TLS "
            "(--tls-cert, --tls-key, --tls-ca), "
            "or say that the network may be trusted (--allow-plaintext)"
        )


def is_loopback(address: object) -> bool:
    """Whether a socket address (or a host name) is on this machine."""
    host = address[0] if isinstance(address, tuple) else address
    return isinstance(host, str) and (host in ("localhost", "::1") or host.startswith("127."))


def _no_password() -> str:
    raise ValueError("the key is encrypted, and nobody is there to ask for the password")


def _reason(error: Exception) -> str:
    text = getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
    return str(text).lower().replace("_", " ")
