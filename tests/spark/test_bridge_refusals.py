"""Errors of a bridge before Java is started. No Java here."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest
from py4j.protocol import Py4JNetworkError

from aioflow.core.errors import Closed
from aioflow.core.host import Host
from aioflow.core.system_host import SystemHost
from aioflow.spark.bridge.calls import Call, CallThreads
from aioflow.spark.bridge.jvm import SparkProcess
from aioflow.spark.bridge.session import SparkBridge
from aioflow.spark.bridge.settings import session_config
from aioflow.spark.failures import SparkError
from tests.integration.clusters import ROOT

WITHIN_S = 30.0


@pytest.mark.parametrize(
    "master",
    ["", "localhost", "local[x]", "spark://", "spark://host", "http://host:7077", "local[2]; rm"],
)
def test_invalid_master_url_is_refused_with_the_valid_ones(master: str) -> None:
    with pytest.raises(SparkError, match=r"is no master URL of Spark, expected local, local\[4\]"):
        SparkBridge(master)


@pytest.mark.parametrize(
    "master",
    [
        "local",
        "local[2]",
        "local[*]",
        "local[2,3]",
        "local-cluster[2,1,1024]",
        "spark://a:7077,b:7077",
        "yarn",
        "k8s://https://h:1",
    ],
)
def test_master_urls_are_known(master: str) -> None:
    assert SparkBridge(master).master == master


async def test_a_master_that_does_not_answer_is_named_at_once() -> None:
    with socket.socket() as taken:
        taken.bind(
            ("127.0.0.1", 0)
        )  # Bound and not listening: connections get no answer, and no other process gets the port.
        port = taken.getsockname()[1]
        async with SparkBridge(f"spark://127.0.0.1:{port}") as bridge:
            with pytest.raises(
                SparkError,
                match=f"no Spark master answers at spark://127.0.0.1:{port} .*is it running",
            ):
                await bridge.session()


async def test_listener_that_is_no_master_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark gives up after a minute, and ends its Java while that tells why."""

    def gives_up(*_: Any) -> None:
        raise Py4JNetworkError("Answer from Java side is empty")

    monkeypatch.setattr(SparkProcess, "start", gives_up)
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, SparkBridge(f"spark://127.0.0.1:{port}") as bridge:
        with pytest.raises(
            SparkError,
            match=(
                f"registered at spark://127.0.0.1:{port}: what listens there does not answer as a "
                "master"
            ),
        ):
            await bridge.session()


async def test_the_time_of_a_call_counts_while_its_master_does_not_answer(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def no_answer(*args: Any, **kwargs: Any) -> Any:
        await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(type(host.net), "connect", no_answer)
    async with SparkBridge("spark://127.0.0.1:1", host=host) as bridge:
        with pytest.raises(TimeoutError, match=r"the Spark call .* took longer than 10ms"):
            await bridge.call(lambda: None, timeout="10ms")


async def test_a_bridge_that_is_closed_says_so() -> None:
    bridge = SparkBridge("local")
    await bridge.close()
    await bridge.close()
    with pytest.raises(Closed, match="call before leaving it"):
        await bridge.call(lambda: None)


def test_configuration_of_the_user_overrides_our_defaults(tmp_path: object) -> None:
    config, options = session_config(
        {
            "spark.master": "local[2]",
            "spark.ui.enabled": "true",
            "spark.driver.extraJavaOptions": "-Da=b",
        },
        str(tmp_path),
        {},
    )

    assert (
        config["spark.ui.enabled"] == "true" and config["spark.driver.bindAddress"] == "127.0.0.1"
    )
    assert config["spark.driver.extraJavaOptions"] == "-Da=b"
    assert "log4j2.configurationFile" in options
    config, _ = session_config({"spark.master": "spark://h:7077"}, str(tmp_path), {})
    assert "spark.driver.host" not in config


@pytest.fixture
async def host() -> AsyncIterator[Host]:
    machine = SystemHost()
    yield machine
    await machine.close()


class Gate:
    """A call that returns when it is told to."""

    def __init__(self) -> None:
        self.entered, self.leave = threading.Event(), threading.Event()

    def __call__(self) -> str:
        self.entered.set()
        self.leave.wait(WITHIN_S)
        return "left"


async def until(event: threading.Event) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not event.is_set():
            await asyncio.sleep(0.01)


async def test_no_more_calls_run_than_the_capacity_and_the_others_begin_in_order(
    host: Host,
) -> None:
    """J5.1: the second waits for the first."""
    threads = CallThreads(host, 1, lambda call: call.fn(), "test")
    order: list[int] = []
    gate = Gate()
    calls = [Call(gate, ""), *(Call(lambda n=n: order.append(n), "") for n in range(3))]
    for call in calls:
        threads.submit(call)
    await until(gate.entered)
    assert threads.running == 1 and not calls[1].started
    gate.leave.set()

    async with asyncio.timeout(WITHIN_S):
        for call in calls:
            await call.future
    assert order == [0, 1, 2]
    threads.close()


async def test_abandoned_call_makes_room_and_its_late_end_has_no_effect(
    host: Host,
) -> None:
    """J5.4: the late completion is ignored."""
    threads = CallThreads(host, 1, lambda call: call.fn(), "test")
    gate = Gate()
    stuck, following = Call(gate, ""), Call(lambda: "followed", "")
    threads.submit(stuck)
    await until(gate.entered)
    threads.submit(following)
    stuck.future.cancel()
    assert not threads.withdraw(stuck) and threads.abandon(stuck) and not threads.abandon(stuck)

    async with asyncio.timeout(WITHIN_S):
        assert await following.future == "followed"
        assert threads.abandoned == 1
        gate.leave.set()
        while threads.abandoned:
            await asyncio.sleep(0.01)
    threads.close()


async def test_the_place_of_a_call_that_is_given_up_goes_to_the_next_in_turn(host: Host) -> None:
    threads = CallThreads(host, 1, lambda call: call.fn(), "test")
    stuck, apart, holds = Gate(), Gate(), Gate()
    order: list[str] = []

    def hold() -> None:
        order.append("second")
        stuck()

    first, beside, second = Call(holds, ""), Call(apart, "", apart=True), Call(hold, "")
    following = [Call(partial(order.append, name), "") for name in ("a", "b")]
    for call in (first, beside, second, *following):
        threads.submit(call)
    await until(holds.entered)
    await until(apart.entered)
    beside.future.cancel()
    assert threads.abandon(beside)  # It had no place to give.
    assert threads.running == 1
    holds.leave.set()
    await until(stuck.entered)
    second.future.cancel()
    assert threads.abandon(second)

    async with asyncio.timeout(WITHIN_S):
        for call in following:
            await call.future
        assert order == ["second", "a", "b"]
        for gate in (stuck, apart):
            gate.leave.set()
        while threads.abandoned:
            await asyncio.sleep(0.01)
    threads.close()


async def test_a_call_that_is_withdrawn_in_time_never_runs(host: Host) -> None:
    threads = CallThreads(host, 1, lambda call: call.fn(), "test")
    gate, ran = Gate(), threading.Event()
    first, second, third = Call(gate, ""), Call(ran.set, ""), Call(lambda: "third", "")
    for call in (first, second, third):
        threads.submit(call)
    await until(gate.entered)
    assert threads.withdraw(second)
    gate.leave.set()

    async with asyncio.timeout(WITHIN_S):
        assert await third.future == "third"
    assert not ran.is_set()
    threads.close()


async def test_a_call_apart_does_not_wait_for_the_others(host: Host) -> None:
    threads = CallThreads(host, 1, lambda call: call.fn(), "test")
    gate = Gate()
    first, apart = Call(gate, ""), Call(lambda: "apart", "", apart=True)
    threads.submit(first)
    await until(gate.entered)
    threads.submit(apart)
    async with asyncio.timeout(WITHIN_S):
        assert await apart.future == "apart"
        gate.leave.set()
        assert await first.future == "left"
    threads.close()


async def test_calls_that_wait_when_the_bridge_closes_get_an_error(host: Host) -> None:
    threads = CallThreads(host, 1, lambda call: call.fn(), "test")
    gate = Gate()
    first, second = Call(gate, ""), Call(lambda: None, "")
    threads.submit(first)
    await until(gate.entered)
    threads.submit(second)
    threads.close()
    gate.leave.set()

    async with asyncio.timeout(WITHIN_S):
        with pytest.raises(Closed, match="before the call began"):
            await second.future
        assert await first.future == "left"
    with pytest.raises(Closed):
        threads.submit(Call(lambda: None, ""))


LOADED = """
import asyncio, sys, threading
import aioflow as af
from aioflow.spark.bridge.session import SparkBridge

on_the_loop = []

class Finder:
    "Finds nothing, and notes who asks the loop's thread for a module."
    def find_spec(self, name, path=None, target=None):
        if threading.current_thread() is threading.main_thread():
            on_the_loop.append(name)

async def main():
    async with SparkBridge("local[2]") as spark:
        sys.meta_path.insert(0, Finder())
        flow = af.Flow("first")
        flow.source(af.io.spark(spark, "SELECT 1 AS one")).key_by(str).count()
        af.io.spark(spark, into="out", schema="one int")
        rows = []
        flow = af.Flow("second")
        flow.source([1, 2]).map(abs).sink(rows.append)
        await flow.execute()
        print(rows, on_the_loop)

asyncio.run(main())
"""


def test_modules_of_the_first_flow_are_loaded_in_a_thread() -> None:
    """The imports take half a second, which would block the loop.

    (Debug mode loads more, on the loop.)
    """
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONASYNCIODEBUG"}
    done = subprocess.run(
        [sys.executable, "-c", LOADED],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=environ,
    )
    assert done.stdout == "[1, 2] []\n", done.stderr
