"""The access rules of the endpoint: a middleware that lets a request through only if a rule allows
it.

Rules, in order:

* The Host header must name this endpoint, so that a page of another site cannot reach it by a host
  name of that site ("DNS rebinding").
* A request that a browser sends from another site is refused. So is an Origin that differs from the
  Host.
* Reading is GET and HEAD. It needs the token if the endpoint is for other machines. It also needs
  the token if another machine asks, since a service that mounts the endpoint may listen for all.
* Any other method needs `enable_control`, the token in a header, and a route that is declared to
  change something.

There are no cookies, so no page can act with a user's rights.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from aiohttp import web

from aioflow.monitoring.answers import error_response
from aioflow.monitoring.options import is_loopback_name

if TYPE_CHECKING:
    from aioflow.monitoring.options import MonitorOptions

__all__ = ["CHANGES", "HEADERS", "OPEN", "guard"]

logger = logging.getLogger(__name__)

READING = ("GET", "HEAD")

CHANGES: frozenset[str] = frozenset({"POST", "PATCH", "PUT", "DELETE"})

OPEN = "aioflow_open"
"""Attribute of handlers whose answer is public: the files of the dashboard, which asks for the
token.
"""

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'; "
        "object-src 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Headers of every answer."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def guard(options: MonitorOptions) -> Any:
    """Returns the middleware. A refusal states its reason, for the person who configures the
    endpoint.
    """

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        refusal = _refusal(request, handler, options)
        if refusal is not None:
            status, message = refusal
            logger.debug(
                "%s %s from %s is refused: %s",
                request.method,
                request.path,
                request.remote,
                message,
            )
            response = error_response(status, message)
            if status == 401:
                response.headers["WWW-Authenticate"] = 'Bearer realm="aioflow"'
            return response
        return await handler(request)

    return check


def _refusal(
    request: web.Request, handler: Handler, options: MonitorOptions
) -> tuple[int, str] | None:
    host = request.headers.get("Host", "")
    if not options.allows_host(host):
        return (
            403,
            f"Host {host[:100]!r} is not one of this endpoint's: ask as localhost, or list the "
            "name in allowed_hosts",
        )
    site = request.headers.get("Sec-Fetch-Site", "none")
    is_visit = (
        request.method == "GET"
        and request.headers.get("Sec-Fetch-Mode") == "navigate"
        and getattr(handler, OPEN, False)
    )
    if site not in ("same-origin", "none") and not is_visit:
        return 403, "the request comes from another site"
    origin = request.headers.get("Origin")
    if origin is not None and urlsplit(origin).netloc.lower() != host.lower():
        return 403, f"Origin {origin[:100]!r} is not this endpoint"
    if request.method not in READING:
        if request.method not in CHANGES:
            return 405, f"{request.method} is not answered here"
        if not options.enable_control:
            return 403, "this endpoint only shows; changing calls need enable_control and a token"
        if not options.accepts(request.headers.get("Authorization")):
            return 401, "expected Authorization: Bearer with the token of this endpoint"
        return None
    comes_in = options.open_reads or not (options.guards_reads or _is_from_elsewhere(request))
    if (
        comes_in
        or getattr(handler, OPEN, False)
        or options.accepts(request.headers.get("Authorization"))
    ):
        return None
    if options.token is None:
        return (
            403,
            "callers on other machines need a token: give token= and allowed_hosts=, or "
            "open_reads=True if they are checked before",
        )
    return 401, "expected Authorization: Bearer with the token of this endpoint"


def _is_from_elsewhere(request: web.Request) -> bool:
    """Whether the request may come from another machine, by the address of the client.

    The Host header does not tell that, because the client writes it.
    """
    peer = None if request.transport is None else request.transport.get_extra_info("peername")
    if isinstance(peer, tuple):
        return not is_loopback_name(str(peer[0]).removeprefix("::ffff:"))
    return not isinstance(peer, str | bytes)  # Text is the address of a Unix domain socket.
