"""Certificates for tests: an authority, and the peers that it signs."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from aioflow.network.security import TlsFiles

__all__ = ["Authority"]


@dataclass
class Authority:
    """Writes its files, and those of `issue`, into `directory`."""

    directory: Path
    name: str = "authority"

    def __post_init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        subject = _named(self.name)
        constraints = x509.BasicConstraints(ca=True, path_length=0)
        usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
        builder = (
            _builder(subject, subject, self._key)
            .add_extension(constraints, critical=True)
            .add_extension(usage, critical=True)
        )
        self._certificate = builder.sign(self._key, hashes.SHA256())
        self.file = self.directory / f"{self.name}.pem"
        self.file.write_bytes(self._certificate.public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str, password: bytes | None = None) -> TlsFiles:
        """The files of a process called `name`; its key is encrypted with `password`."""
        key = ec.generate_private_key(ec.SECP256R1())
        authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        builder = _builder(_named(name), self._certificate.subject, key).add_extension(
            authority, critical=False
        )
        certificate = builder.sign(self._key, hashes.SHA256())
        files = self.directory / f"{name}.crt", self.directory / f"{name}.key"
        files[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        encryption = (
            serialization.NoEncryption()
            if password is None
            else serialization.BestAvailableEncryption(password)
        )
        files[1].write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption
            )
        )
        return TlsFiles(certificate=str(files[0]), key=str(files[1]), authority=str(self.file))


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
