"""The options of an endpoint: what it may show and do, and who may call it."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypedDict

from aioflow.core.errors import NotAuthenticated, did_you_mean

__all__ = [
    "MonitorArguments",
    "MonitorOptions",
    "is_loopback_name",
    "parse_monitor_address",
    "parse_monitor_options",
    "served_options",
]

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")

CONNECTIONS_MAX = 200
"""Maximum number of connections. A browser opens six, and a scraper opens one."""

TOKEN_CHARACTERS_MIN = 16


class MonitorArguments(TypedDict, total=False):
    """The keyword arguments of `af.monitor_app`, and the keys of `monitor_options=`, for type
    checkers and editors.
    """

    token: str | None
    enable_control: bool
    allowed_hosts: tuple[str, ...]
    open_reads: bool
    show_data: bool
    connections_max: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorOptions:
    """Options of an endpoint. By default clients can only read, under a loopback host name.

    Raises NotAuthenticated for options that would let anyone read or change something.
    """

    token: str | None = field(default=None, repr=False)
    """Token that clients send as `Authorization: Bearer <token>`. Every call that changes something
    needs it, and so does reading if other machines can reach the endpoint.
    """
    enable_control: bool = False
    """Whether jobs can be stopped, cancelled, checkpointed and rescaled. Needs a token."""
    allowed_hosts: tuple[str, ...] = ()
    """Host names without port that requests may use, besides loopback names. `"*"` allows any."""
    open_reads: bool = False
    """Whether reading needs no token. This is for a service that has checked its callers already.
    """
    show_data: bool = False
    """Whether clients that may read see keyed state and records too, even without the token."""
    connections_max: int = CONNECTIONS_MAX
    """Maximum number of connections, if the endpoint has an address of its own."""

    def __post_init__(self) -> None:
        given: object = self.token  # Callers may pass other types than the annotation says.
        if given is not None and not isinstance(given, str):
            raise TypeError(
                f"token= takes text, got {type(given).__name__}: make one with "
                "secrets.token_urlsafe()"
            )
        if self.enable_control and self.token is None:
            raise NotAuthenticated(
                "enable_control=True lets callers stop jobs, expected a token that they must "
                "know: give token="
            )
        if self.token is not None and len(self.token) < TOKEN_CHARACTERS_MIN:
            raise NotAuthenticated(
                f"token= has {len(self.token)} characters, expected at least "
                f"{TOKEN_CHARACTERS_MIN}: "
                "make one with secrets.token_urlsafe()"
            )
        if self.allowed_hosts and self.token is None and not self.open_reads:
            raise NotAuthenticated(
                f"allowed_hosts={self.allowed_hosts!r} lets other machines ask, expected a token: "
                "give token=, "
                "or open_reads=True if they are checked before they come here"
            )

    @property
    def guards_reads(self) -> bool:
        """Whether reading needs the token."""
        return bool(self.allowed_hosts) and not self.open_reads

    def allows_host(self, name: str) -> bool:
        """Whether requests may have the Host header `name`, with or without a port."""
        host = _without_port(name).lower().rstrip(".")
        return (
            "*" in self.allowed_hosts
            or host in LOOPBACK_NAMES
            or host in (each.lower() for each in self.allowed_hosts)
        )

    def accepts(self, authorization: str | None) -> bool:
        """Whether the header `authorization` has the token. The comparison takes constant time."""
        if self.token is None:
            return False
        given = (authorization or "").encode("utf-8", "surrogateescape")
        return hmac.compare_digest(given, f"Bearer {self.token}".encode())


def _without_port(name: str) -> str:
    if name.startswith("["):
        return name[: name.find("]") + 1] or name
    return name.partition(":")[0]


def is_loopback_name(host: str) -> bool:
    """Whether only this machine can reach a listener at `host`.

    False for a name that may belong to another machine.
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def parse_monitor_address(text: str) -> tuple[str, int]:
    """Splits `HOST:PORT` into host and port. If `text` has no host, the host is 127.0.0.1.

    Raises ValueError, or TypeError if `text` is not a str.
    """
    given: object = text  # Callers may pass other types than the annotation says.
    if not isinstance(given, str):
        like = f"127.0.0.1:{given}" if type(given) is int else "127.0.0.1:8081"
        raise TypeError(
            f'monitor is {type(given).__name__}: {given!r}, expected "HOST:PORT", like "{like}"'
        )
    host, _, port = text.rpartition(":")
    host = host.strip("[]") or "127.0.0.1"
    if not (port.isascii() and port.isdecimal()) or int(port) > 65_535:
        raise ValueError(
            f'monitor is {text!r}, expected "HOST:PORT", like "127.0.0.1:8081"; port 0 is any '
            "free one"
        )
    return host, int(port)


def parse_monitor_options(given: Mapping[str, Any]) -> MonitorOptions:
    """Returns `MonitorOptions` from keyword arguments.

    Raises TypeError for an unknown option, naming the most similar option. Raises NotAuthenticated
    as `MonitorOptions` does.
    """
    _check_names(given)
    return MonitorOptions(**given)


def _check_names(given: Mapping[str, Any]) -> None:
    whole: object = given  # Callers may pass other types than the annotation says.
    if not isinstance(whole, Mapping):
        raise TypeError(
            f'monitor_options= takes a mapping, like {{"token": ...}}, got {type(whole).__name__}'
        )
    known = [one.name for one in fields(MonitorOptions)]
    for name in given:
        if name not in known:
            hint = did_you_mean(name, known, "{}=") or f"; expected some of {', '.join(known)}"
            raise TypeError(f"monitor option {name}= is not known{hint}")
    if isinstance(names := given.get("allowed_hosts"), str):
        raise TypeError(
            f"allowed_hosts= takes several names, got the text {names!r}: give ({names!r},)"
        )


def served_options(address: str, given: Mapping[str, Any]) -> MonitorOptions:
    """Returns the options of an endpoint that listens at `address`.

    Raises NotAuthenticated if other machines could call it without a token.
    """
    host, _ = parse_monitor_address(address)
    _check_names(given)
    if is_loopback_name(host):
        return MonitorOptions(**given)
    options = MonitorOptions(**{**given, "allowed_hosts": ()})
    if options.token is None and not options.open_reads:
        raise NotAuthenticated(
            f"monitor={address!r} can be reached from other machines, expected a token: give "
            "token=, or listen at 127.0.0.1"
        )
    # With the token, any host name is allowed: a page of another site does not know the token.
    return replace(options, allowed_hosts=tuple(given.get("allowed_hosts") or ("*",)))
