"""The stream of a job: a snapshot, then merge patches that lead from one moment to the next."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
from hypothesis import given
from hypothesis import strategies as st

import aioflow as af
from aioflow.monitoring.events import STREAMS_MAX, merge_patch
from tests.monitoring.watching import PATIENCE_S, check, watched

VALUES = st.recursive(
    st.integers() | st.text(max_size=3) | st.booleans(),
    lambda inner: st.dictionaries(st.sampled_from("abcd"), inner, max_size=4),
    max_leaves=12,
)
OBJECTS = st.dictionaries(st.sampled_from("abcd"), VALUES, max_size=4)


def patched(target: Any, patch: Any) -> Any:
    """RFC 7396, section 2, word for word."""
    if not isinstance(patch, dict):
        return patch
    target = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            target.pop(name, None)
        else:
            target[name] = patched(target.get(name), value)
    return target


@given(OBJECTS, OBJECTS)
def test_a_patch_leads_from_one_moment_to_the_next(
    old: dict[str, Any], new: dict[str, Any]
) -> None:
    assert patched(old, merge_patch(old, new)) == new


@given(OBJECTS)
def test_nothing_changed_is_an_empty_patch(body: dict[str, Any]) -> None:
    assert merge_patch(body, body) == {}


def flow() -> tuple[af.Flow, Any]:
    made = af.Flow("streamed", parallelism=2)
    events = made.source(af.io.push(), name="events")
    events.rebalance().map(abs, name="abs").sink(af.io.blackhole())
    return made, events


async def next_event(response: aiohttp.ClientResponse) -> tuple[str, Any]:
    """Name and decoded data."""
    name, data = "", ""
    async with asyncio.timeout(PATIENCE_S):
        while line := (await response.content.readline()).decode().rstrip("\n"):
            field, _, value = line.partition(": ")
            name, data = (
                (value, data)
                if field == "event"
                else (name, value)
                if field == "data"
                else (name, data)
            )
    return name, json.loads(data)


async def test_a_reader_that_applies_the_patches_knows_what_rest_says() -> None:
    made, events = flow()
    async with watched(made) as client, aiohttp.ClientSession() as session:
        async with session.get(f"{client.url}/v1{client.path}/events") as response:
            assert response.headers["Content-Type"].startswith("text/event-stream")
            name, state = await next_event(response)
            assert name == "snapshot"
            await client.job.input(events).put_many(range(500))
            last = list((await client.vertices()).values())[-1]

            def read(state: Any) -> int:
                subtasks = state["vertices"][last]["subtasks"].values()
                return sum(one["metrics"].get("numRecordsIn", 0) for one in subtasks)

            while read(state) < 500:
                name, patch = await next_event(response)
                assert name == "delta"
                state = patched(state, patch)
            assert state["job"]["state"] == "RUNNING"
            await client.job.cancel()
            while state["job"]["state"] != "CANCELED":
                state = patched(state, (await next_event(response))[1])


async def test_a_stream_too_many_is_turned_away_and_one_that_ended_makes_room() -> None:
    made, _ = flow()
    async with (
        watched(made) as client,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
    ):
        path = f"{client.url}{client.path}/events"
        opened = [await session.get(path) for _ in range(STREAMS_MAX)]
        assert [one.status for one in opened] == [200] * STREAMS_MAX
        status, body = await client.ask(f"{client.path}/events")
        assert status == 503
        check(body, "Errors")
        opened.pop().close()
        async with asyncio.timeout(PATIENCE_S):
            while True:
                response = await session.get(path)
                opened.append(response)
                if response.status == 200:
                    break
                await asyncio.sleep(0.02)
        for one in opened:
            one.close()


async def test_a_stream_has_no_head() -> None:
    made, _ = flow()
    async with watched(made) as client:
        assert (await client.ask("/jobs", "HEAD"))[0] == 200
        assert (await client.ask(f"{client.path}/events", "HEAD"))[0] == 405


async def test_streams_end_with_the_run() -> None:
    made, _ = flow()
    async with aiohttp.ClientSession() as session:
        async with watched(made) as client:
            response = await session.get(f"{client.url}{client.path}/events")
            await next_event(response)
        async with asyncio.timeout(PATIENCE_S):
            await response.read()


async def test_records_on_an_edge_are_sampled() -> None:
    made, events = flow()
    async with (
        watched(made, monitor_options={"show_data": True}) as client,
        aiohttp.ClientSession() as session,
    ):
        ids = list((await client.vertices()).values())
        for wrong in ("", "a-b", f"{ids[1]}-{ids[0]}"):
            assert (await client.ask(f"/aioflow{client.path}/tap?edge={wrong}"))[0] == 404
        async with session.get(
            f"{client.url}/aioflow{client.path}/tap?edge={ids[0]}-{ids[1]}"
        ) as response:
            assert response.status == 200
            await next_event(response)
            await client.job.input(events).put_many(range(1000))
            seen, shown = 0, []
            while seen < 1000:
                name, body = await next_event(response)
                assert name == "records"
                seen += body["seen"]
                shown += body["records"]
                assert len(body["records"]) <= 10
            assert seen == 1000
            assert {"value": "999", "timestamp": None} in shown


async def test_the_last_ten_minutes_can_be_plotted() -> None:
    made, events = flow()
    async with watched(made) as client:
        await client.job.input(events).put_many(range(10))
        path = f"/aioflow{client.path}/series"
        check(await client.get(path), "Series")

        def is_there(body: Any) -> bool:
            return any(values and values[-1] == 10 for name, values in body["series"].items())

        body = await client.until(f"{path}?metric=*.0.numRecordsIn,uptime", is_there)
        check(body, "Series")
        assert "uptime" in body["series"]
        assert all(len(values) == len(body["times"]) for values in body["series"].values())
        since = body["times"][-1]
        assert all(
            time > since
            for time in (await client.get(f"{path}?metric=uptime&since={since}"))["times"]
        )
        assert (await client.ask(f"{path}?metric=a&since=x"))[0] == 400
