"""The TLS options of every command that connects to a cluster, and the host that uses them."""

from __future__ import annotations

import argparse
from pathlib import Path

from aioflow.core.host import Host
from aioflow.core.system_host import SystemHost
from aioflow.network.security import SecuredHost, Security, TlsFiles

__all__ = ["add_tls_options", "secured_host", "tls_arguments", "tls_files"]

OPTIONS = ("--tls-cert", "--tls-key", "--tls-ca")


def add_tls_options(command: argparse.ArgumentParser) -> None:
    """Adds the TLS options to a command. The user gives all three or none."""
    group = command.add_argument_group(
        "TLS between the processes of a cluster, each of which proves itself by a certificate"
    )
    group.add_argument(
        "--tls-cert", type=Path, metavar="FILE", help="certificate of this process (PEM)"
    )
    group.add_argument(
        "--tls-key", type=Path, metavar="FILE", help="its private key (PEM, not encrypted)"
    )
    group.add_argument(
        "--tls-ca",
        type=Path,
        metavar="FILE",
        help="the authority that has signed the certificates of all (PEM)",
    )


def tls_files(arguments: argparse.Namespace) -> TlsFiles | None:
    """Returns the TLS files that the user gave, or None.

    Raises NotAuthenticated if only some are given.
    """
    certificate, key, authority = (
        None if path is None else str(path) for path in _given(arguments)
    )
    return TlsFiles.of(certificate, key, authority, OPTIONS)


def tls_arguments(arguments: argparse.Namespace) -> list[str]:
    """Returns the TLS options as command line arguments for another process."""
    return [
        text
        for name, path in zip(OPTIONS, _given(arguments), strict=True)
        if path is not None
        for text in (name, str(path))
    ]


def secured_host(arguments: argparse.Namespace) -> Host:
    """Returns a host that uses TLS for cluster connections if the options say so.

    Raises NotAuthenticated for files that cannot be used.
    """
    files = tls_files(arguments)
    allow_plaintext = getattr(arguments, "allow_plaintext", False)
    if files is None and not allow_plaintext:
        return SystemHost()
    return SecuredHost(SystemHost(), Security.of(files, allow_plaintext=allow_plaintext))


def _given(arguments: argparse.Namespace) -> tuple[Path | None, Path | None, Path | None]:
    return arguments.tls_cert, arguments.tls_key, arguments.tls_ca
