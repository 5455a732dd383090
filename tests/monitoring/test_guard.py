"""The permissions of callers: deny by default, over all routes and all methods."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import Mock

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

import aioflow as af
from aioflow.core.errors import NotAuthenticated
from aioflow.monitoring.app import HEADERS, guard
from aioflow.monitoring.options import MonitorOptions, parse_monitor_address, served_options
from aioflow.monitoring.routes import ROUTES
from tests.monitoring.watching import CONTROL, TOKEN, Client, check, watched

METHODS = (
    "GET",
    "HEAD",
    "POST",
    "PUT",
    "PATCH",
    "DELETE",
    "OPTIONS",
    "TRACE",
    "CONNECT",
    "PROPFIND",
    "QUERY",
)

ANYTHING = "0" * 32

ALL_PATHS = sorted(
    {route.path for route in ROUTES} | {"/", "/dashboard/{name}", "/openapi.json", "/nowhere"}
)

ALLOWED = {(route.method, route.path) for route in ROUTES}


def flow() -> af.Flow:
    made = af.Flow("guarded")
    made.source(af.io.push(), name="events").sink(af.io.blackhole())
    return made


def filled(path: str, client: Client) -> str:
    """A path of a job that is there; nothing else is."""
    names = (
        "vertexid",
        "triggerid",
        "subtaskindex",
        "attempt",
        "checkpointid",
        "taskmanagerid",
        "operator",
        "name",
    )
    return path.format(jobid=client.job.id, **dict.fromkeys(names, ANYTHING))


async def test_without_control_every_route_refuses_every_method_that_does_not_read() -> None:
    """All routes x all methods, plain and under /v1, without a token and with an unknown one."""
    async with watched(flow()) as client:
        for path in ALL_PATHS:
            for method in METHODS:
                if method in ("GET", "HEAD"):
                    continue
                for prefix, headers in (("", {}), ("/v1", {"Authorization": f"Bearer {TOKEN}"})):
                    status, body = await client.ask(
                        prefix + filled(path, client), method, headers=headers
                    )
                    assert status in (400, 403, 405), (method, path, status, body)
        assert client.job.status == "RUNNING"
        assert (await client.get(f"{client.path}/checkpoints"))["counts"]["total"] == 0


@pytest.mark.parametrize(
    "authorization",
    [
        None,
        "",
        TOKEN,
        "Bearer",
        f"Basic {TOKEN}",
        f"Bearer {TOKEN}x",
        f"Bearer {TOKEN[:-1]}",
        f"bearer {TOKEN}",
        "Bearer é",
    ],
)
async def test_with_control_every_changing_call_needs_the_token(authorization: str | None) -> None:
    headers = {} if authorization is None else {"Authorization": authorization}
    async with watched(flow(), monitor_options=CONTROL) as client:
        for path in ALL_PATHS:
            for method in ("POST", "PUT", "PATCH", "DELETE"):
                status, body = await client.ask(filled(path, client), method, headers=headers)
                assert status == 401, (method, path, status, body)
                check(body, "Errors")
        assert client.job.status == "RUNNING"


async def test_with_the_token_only_declared_changes_are_routed() -> None:
    async with watched(flow(), monitor_options=CONTROL) as client:
        for path in ALL_PATHS:
            for method in ("POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"):
                if (method, path) not in ALLOWED:
                    status, _ = await client.change(method, filled(path, client))
                    assert status in (404, 405), (method, path, status)
        assert client.job.status == "RUNNING"


async def test_every_answer_carries_the_headers_of_a_careful_site() -> None:
    async with watched(flow()) as client:
        for path in (
            "/",
            "/jobs",
            "/nowhere",
            "/dashboard/style.css",
            "/metrics",
            f"{client.path}/plan",
            "/dashboard/..%2fapp.py",
        ):
            async with client._session.get(client.url + path) as response:
                for name, value in HEADERS.items():
                    assert response.headers[name] == value, (path, name)
                assert "Access-Control-Allow-Origin" not in response.headers


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 403),
        ({"Host": "localhost.evil.example"}, 403),
        ({"Host": "127.0.0.1.evil.example:80"}, 403),
        ({"Host": ""}, 403),
        ({"Host": "localhost:1234"}, 200),
        ({"Host": "LOCALHOST."}, 200),
        ({"Host": "[::1]:80"}, 200),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Host": "localhost:1", "Origin": "http://localhost:2"}, 403),
        ({"Host": "localhost:1", "Origin": "http://localhost:1"}, 200),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}, 403),
        ({"Sec-Fetch-Site": "same-origin"}, 200),
        ({"Sec-Fetch-Site": "none"}, 200),
    ],
)
async def test_pages_of_other_sites_and_other_names_are_refused(
    headers: dict[str, str], status: int
) -> None:
    """DNS rebinding, and requests that a browser makes for a page of another site."""
    async with watched(flow()) as client:
        assert (await client.ask("/jobs", headers=headers))[0] == status
        if status == 403:
            assert (await client.ask(f"{client.path}/events", headers=headers))[0] == 403


async def test_a_link_from_elsewhere_opens_the_dashboard_and_nothing_else() -> None:
    headers = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    async with watched(flow()) as client:
        assert (await client.ask("/", headers=headers))[0] == 200
        assert (await client.ask("/overview", headers=headers))[0] == 403


@pytest.mark.parametrize(
    "name",
    [
        "../app.py",
        "..%2fapp.py",
        "%2e%2e/app.py",
        "app.py",
        "",
        ".",
        "index.html%00",
        "/etc/passwd",
        "store.js/",
    ],
)
async def test_files_are_served_by_name_alone(name: str) -> None:
    async with watched(flow()) as client:
        assert (await client.ask(f"/dashboard/{name}"))[0] in (400, 404)


# Options.


@pytest.mark.parametrize(
    "options",
    [
        {"enable_control": True},
        {"token": "short"},
        {"allowed_hosts": ("example.org",)},
        {"allowed_hosts": ("*",), "enable_control": True},
    ],
)
def test_options_that_let_anybody_in_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(NotAuthenticated, match="expected"):
        MonitorOptions(**options)


@pytest.mark.parametrize("address", ["0.0.0.0:8081", "192.0.2.1:80", "example.org:80", "[::]:80"])
def test_an_address_of_other_machines_needs_a_token(address: str) -> None:
    with pytest.raises(NotAuthenticated, match="expected a token"):
        served_options(address, {})
    options = served_options(address, {"token": TOKEN})
    assert options.guards_reads
    assert options.allows_host("anything.example")
    assert not served_options(address, {"open_reads": True}).guards_reads


@pytest.mark.parametrize(
    "address", ["127.0.0.1:0", "localhost:80", "[::1]:80", "127.8.8.8:80", ":8081"]
)
def test_loopback_needs_none(address: str) -> None:
    options = served_options(address, {})
    assert not options.guards_reads
    assert not options.allows_host("example.org")


@pytest.mark.parametrize(
    "address",
    ["", "localhost", "localhost:", "localhost:http", "localhost:70000", "localhost:-1", "a:²"],
)
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="HOST:PORT"):
        parse_monitor_address(address)


async def test_a_run_refuses_wrong_options_before_anything_starts() -> None:
    with pytest.raises(NotAuthenticated, match="other machines"):
        async with flow().run(monitor="0.0.0.0:0"):
            pass
    with pytest.raises(TypeError, match=r"monitor is int: 8081, expected \"HOST:PORT\", like"):
        async with flow().run(monitor=8081):
            pass
    with pytest.raises(
        ValueError,
        match=r"monitor_options= is about an endpoint, .* give monitor=\"HOST:PORT\" too",
    ):
        async with flow().run(monitor_options=CONTROL):
            pass


@pytest.mark.parametrize("address", ["127.0.0.1:0", "0.0.0.0:0"])
@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"tokn": TOKEN}, r"monitor option tokn= is not known; did you mean token=\?"),
        (
            {"colour": 1},
            "monitor option colour= is not known; expected some of token, enable_control, "
            "allowed_hosts, ",
        ),
        (1, "monitor_options= takes a mapping.*, got int"),
        ({"token": 5}, "token= takes text, got int"),
        (
            {"token": TOKEN, "allowed_hosts": "flow.example"},
            r"allowed_hosts= takes several names, .*: give \('flow.example',\)",
        ),
    ],
)
async def test_options_that_cannot_be_meant_are_refused_with_what_was_expected(
    address: str, given: Any, error: str
) -> None:
    with pytest.raises(TypeError, match=error):
        async with flow().run(monitor=address, monitor_options=given):
            pass
    if isinstance(given, dict):
        async with flow().run() as job:
            with pytest.raises(TypeError, match=error):
                af.monitor_app(job, **given)


def test_a_short_token_is_refused_with_the_way_to_a_long_one() -> None:
    with pytest.raises(
        NotAuthenticated,
        match=(
            r"token= has 5 characters, expected at least 16: make one with "
            r"secrets.token_urlsafe\(\)"
        ),
    ):
        served_options("127.0.0.1:0", {"token": "short"})


async def test_reading_needs_the_token_where_others_can_ask() -> None:
    options = {"token": TOKEN, "allowed_hosts": ("flow.example",)}
    async with watched(flow(), monitor_options=options) as client:
        assert (await client.ask("/jobs"))[0] == 401
        assert (await client.ask("/jobs", headers={"Host": "flow.example"}))[0] == 401
        assert (await client.ask("/"))[0] == 200
        assert (
            await client.ask(
                "/jobs", headers={"Authorization": f"Bearer {TOKEN}", "Host": "flow.example"}
            )
        )[0] == 200


async def test_records_and_state_need_the_token_or_leave() -> None:
    for options, allowed in (({}, False), ({"show_data": True}, True)):
        made = af.Flow("data")
        events = made.source(af.io.push(), name="events")
        events.key_by(lambda x: x).count(name="counts", uid="counts").sink(af.io.blackhole())
        async with watched(made, monitor_options=options) as client:
            await client.job.input(events).put_many(["a", "b", "a"])
            status, body = await client.ask(
                f"/aioflow{client.path}/state/counts/running?key=%22a%22"
            )
            assert status == (200 if allowed else 403)
            check(body, "StateValue" if allowed else "Errors")
            assert (await client.ask(f"/aioflow{client.path}/tap"))[0] == (404 if allowed else 403)


def test_the_token_is_in_no_repr() -> None:
    assert TOKEN not in repr(MonitorOptions(token=TOKEN))


async def asked_from(peer: Any, options: dict[str, Any], **headers: str) -> int:
    """The status of a reading call that comes from `peer` and names this machine: anybody may
    send any Host.
    """
    transport = Mock(asyncio.Transport)
    transport.get_extra_info.side_effect = lambda name, default=None: (
        peer if name == "peername" else default
    )
    request = make_mocked_request(
        "GET", "/jobs", headers={"Host": "localhost", **headers}, transport=transport
    )

    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response()

    response: web.StreamResponse = await guard(MonitorOptions(**options))(request, answer)
    return response.status


@pytest.mark.parametrize(
    ("peer", "options", "status"),
    [
        (("127.0.0.1", 5), {}, 200),
        (("::1", 5, 0, 0), {}, 200),
        ("", {}, 200),  # A socket of this machine's file system.
        (("203.0.113.7", 5), {}, 403),
        (("203.0.113.7", 5), {"token": TOKEN}, 401),
        (("203.0.113.7", 5), {"token": TOKEN, "show_data": True}, 401),
        (("203.0.113.7", 5), {"open_reads": True}, 200),
        (None, {}, 403),
    ],
)
async def test_service_that_listens_for_others_refuses_their_requests_to_localhost(
    peer: Any, options: dict[str, Any], status: int
) -> None:
    assert await asked_from(peer, options) == status
    if status == 401:
        assert await asked_from(peer, options, Authorization=f"Bearer {TOKEN}") == 200
