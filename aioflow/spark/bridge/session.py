"""The bridge: a Spark session of this service, called in threads. The event loop never waits for
Java.

    async with SparkBridge("local[4]") as spark:
        frame = await spark.sql("SELECT * FROM range(10)")
        count = await spark.call(frame.count, timeout="30s")

PySpark blocks: every call goes through a socket to the Java process, and an action returns when its
job has ended. So each call runs in one of a bounded number of threads. The partner of the thread in
the JVM has the bridge's session as its active session, and a job group for this call.

Invariants: at most `capacity` awaited calls run at a time. A caller that is cancelled or out of
time stops waiting at once. The Spark jobs of the call are cancelled, including jobs that the call
submits later. A call that still does not return is given up after `ABANDON_AFTER_S`. Then it is
counted in `abandoned`, and not towards the capacity. If the Java process dies, unfinished calls
fail, and the next call starts another process.

The bridge is for control. Rows use separate connections (`channels`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from aioflow.core.aio import close_within
from aioflow.core.errors import Closed
from aioflow.core.system_host import SystemHost
from aioflow.core.timeunits import to_seconds
from aioflow.spark.bridge.calls import Bridge, Call, CallThreads
from aioflow.spark.bridge.connect import (
    ConnectSession,
    address_toward,
    is_connect,
    server_of,
    shown_url,
)
from aioflow.spark.bridge.jvm import SparkProcess, settings_outside
from aioflow.spark.bridge.settings import (
    DEFAULT_APP,
    DEFAULT_MASTER,
    Reach,
    check_master,
    standalone_masters,
)
from aioflow.spark.failures import SparkError, SparkGone, translated

if TYPE_CHECKING:
    from aioflow.core.host import Host
    from aioflow.network.security import TlsFiles

__all__ = ["ABANDON_AFTER_S", "CAPACITY", "SparkBridge"]

T = TypeVar("T")

CAPACITY = 4
"""Default number of concurrent calls. Spark runs the jobs of several threads at the same time. More
calls would only wait for the same cores.
"""

ABANDON_AFTER_S = 10.0
"""Time in seconds that a cancelled call may take to return before its thread is given up.

Spark interrupts tasks within a second or two.
"""

CONNECT_TIMEOUT_S = 5.0
"""Maximum time for a master to answer before it counts as unreachable."""

CLOSE_TIMEOUT_S = 30.0

logger = logging.getLogger(__name__)


def _load_flows() -> None:
    """Imports the modules that flows of this process need to read from Spark and write to it.

    It runs in a thread, because it would block the loop for half a second.
    """
    import aioflow.api.calls
    import aioflow.api.flow
    import aioflow.operators.sink

    with contextlib.suppress(ModuleNotFoundError):
        # `af.io.spark` names the missing package, and how to install it.
        import aioflow.spark.bridge.connector
        import aioflow.spark.bridge.sink
        import aioflow.spark.bridge.source
        import aioflow.spark.bridge.targets  # noqa: F401


class SparkBridge(Bridge):
    """One Spark session for a service. The first call starts the session.

    The bridge can be used from several loops, one after the other.
    """

    def __init__(
        self,
        master: str | None = None,
        *,
        app: str | None = None,
        config: Mapping[str, str] | None = None,
        capacity: int = CAPACITY,
        tls: TlsFiles | None = None,
        allow_plaintext: bool = False,
        host: Host | None = None,
    ) -> None:
        """Makes the bridge. The first call starts a session, or uses the existing one.

        `master` may be the address of a Connect server, "sc://host:15002". Without `master` and
        `app`, the bridge uses those of spark-submit or spark-defaults.conf, otherwise "local[*]"
        and "aioflow". `config` overrides all other settings. aioflow's own defaults (little
        logging, listening on loopback) apply only to settings that are set nowhere.

        With `tls`, rows from and to executors on other machines are sent over TLS. The certificate
        files have the same paths on these machines. With `allow_plaintext` rows may be sent
        unprotected. Raises SparkError for an invalid master URL.
        """
        self._config = dict(config or {})
        if master is None:
            master = self._config.get("spark.master")
        if master is not None:
            check_master(master, connect=True)
        if type(capacity) is not int or capacity < 1:
            raise ValueError(f"capacity is {capacity!r}, expected a number of calls of at least 1")
        self._master = master
        self._app = app
        self._tls = tls
        self._allow_plaintext = allow_plaintext
        self._host: Host = SystemHost(close_timeout_s=CLOSE_TIMEOUT_S) if host is None else host
        self._owns_host = host is None
        self._threads = CallThreads(self._host, capacity, self._run, "aioflow-spark")
        self._starting = threading.Lock()
        """Lock that is held while the session is started or ended. So there is only one session."""
        self.defaults = {"spark.master": DEFAULT_MASTER, "spark.app.name": DEFAULT_APP}
        """Settings that apply if neither the program sets them nor they are set outside of it."""
        self._outside: dict[str, str] | None = None
        self._process: SparkProcess | ConnectSession | None = None
        self._closed = False

    def __repr__(self) -> str:
        return "SparkBridge()" if self._master is None else f"SparkBridge({self.master!r})"

    async def __aenter__(self) -> Self:
        await self._host.blocking(_load_flows)
        await self._host.blocking(lambda: self.settings)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await close_within(self.close(), 2 * CLOSE_TIMEOUT_S, what="the Spark bridge")

    @property
    def master(self) -> str:
        """Master URL of Spark, or address of a Connect server. It was given to the bridge, or set
        outside the program.
        """
        return shown_url(self._url) if is_connect(self._url) else self._url

    @property
    def _url(self) -> str:
        """The master URL with its parameters, which may contain a token."""
        if self._master is not None:
            return self._master
        remote = self.settings.get("spark.remote", "")
        return remote if is_connect(remote) else self.settings["spark.master"]

    @property
    def settings(self) -> dict[str, str]:
        """The settings of the session, as far as they are known before it starts.

        Settings outside the program are read once, when they are first needed.
        """
        if self._outside is None:
            self._outside = settings_outside()
        return self.defaults | self._outside | self._config

    @property
    def started(self) -> bool:
        """Whether there is a session now."""
        return self._process is not None

    @property
    def owns_session(self) -> bool:
        """Whether this bridge started the session. A context that the program made is shared with
        others.
        """
        return self._process is not None and self._process.is_ours

    @property
    def running(self) -> int:
        """Number of unfinished calls, without those that were given up."""
        return self._threads.running

    @property
    def abandoned(self) -> int:
        """Number of calls that were cancelled and still have not returned."""
        return self._threads.abandoned

    @property
    def host(self) -> Host:
        """The host, which provides the clock, the files and the network of the machine. It is
        closed with the bridge.
        """
        return self._host

    @property
    def address(self) -> str:
        """Address of this process for Spark's tasks, which is the driver's address."""
        if self.master.startswith("local"):
            return "127.0.0.1"
        default = address_toward(self._url) if is_connect(self._url) else "127.0.0.1"
        return self.settings.get("spark.driver.host", default)

    @property
    def reach(self) -> Reach:
        """The address of this process for Spark's tasks, and how connections to it are
        protected.
        """
        return Reach(self.address, self._tls, self._allow_plaintext)

    async def session(self) -> Any:
        """Returns PySpark's SparkSession. Its methods block: use them in functions given to
        `call`.
        """
        return await self.call(self._current_session)

    async def sql(
        self,
        query: str,
        args: Mapping[str, Any] | None = None,
        *,
        timeout: str | timedelta | None = None,
    ) -> Any:
        """Returns the DataFrame of `query`. `args` are the values of the query's named parameters
        (":name").

        The DataFrame is computed when an action asks for it.
        """

        def run() -> Any:
            return self._current_session().sql(query, args=None if args is None else dict(args))

        return await self.call(run, timeout=timeout)

    async def call(
        self,
        fn: Callable[..., T],
        /,
        *args: Any,
        timeout: str | timedelta | None = None,
        **kwargs: Any,
    ) -> T:
        """Calls `fn(*args, **kwargs)` in a thread in which it may use Spark, and returns the
        result.

        Raises TimeoutError after `timeout`, which counts from now, and SparkError for failures in
        Spark; other errors of `fn` are raised as they are. After a timeout or a cancellation the
        Spark jobs of the call are cancelled too.
        """
        return await self._call(
            partial(fn, *args, **kwargs),
            getattr(fn, "__qualname__", repr(fn)),
            timeout,
            apart=False,
        )

    async def job(self, fn: Callable[[], T]) -> T:
        """Runs `fn` as `call` does, but its thread does not count towards the capacity.

        This is for a function that lasts as long as a stream.
        """
        return await self._call(fn, getattr(fn, "__qualname__", repr(fn)), None, apart=True)

    async def _call(
        self, fn: Callable[[], T], what: str, timeout: str | timedelta | None, *, apart: bool
    ) -> T:
        timeout_s = None if timeout is None else to_seconds(timeout)
        if self._closed:
            raise Closed("the Spark bridge is closed: call before leaving it")
        call = Call(fn, f"aioflow-{self._host.ids.new('spark call')}", apart=apart)
        submitted = False
        try:
            async with asyncio.timeout(timeout_s):
                await self._check_reachable()
                self._threads.submit(call)
                submitted = True
                result: T = await call.future
                return result
        except TimeoutError as error:
            if call.future.done() and not call.future.cancelled():
                raise  # The error of the function itself.
            raise TimeoutError(
                f"the Spark call {what} took longer than {timeout}, its jobs are cancelled"
            ) from error
        finally:
            if submitted and not call.ended and (not call.future.done() or call.future.cancelled()):
                self._give_up(call)

    async def close(self) -> None:
        """Ends the session, and the Java process if the bridge started it.

        Unfinished calls are cancelled. Closing again has no effect.
        """
        if self._closed:
            return
        self._closed = True
        self._threads.close()
        await self._host.blocking(self._end, dedicated=True, name="aioflow-spark-close")
        if self._owns_host:
            await self._host.close()

    # In the threads.

    def _run(self, call: Call) -> Any:
        process = self._ensure()
        try:
            with process.group(call.group):
                return call.fn()
        except Exception as error:
            better = translated(error)
            if process.has_ended or (
                isinstance(better, (SparkGone, ConnectionError)) and process.ends_soon()
            ):
                self._forget(process)
                raise process.gone() from None
            if better is error:
                raise
            raise better from None
        finally:
            del call.fn  # Objects that it refers to must not live as long as the thread.

    def _ensure(self) -> SparkProcess | ConnectSession:
        """Returns the session, and starts it if there is none. Other threads wait until it is
        started.
        """
        with self._starting:
            if self._closed:
                raise Closed("the Spark bridge was closed before the call began")
            process = self._process
            if process is not None and process.has_ended:
                process.stop()
                process = self._process = None
            if process is None:
                _load_flows()
                try:
                    process = self._process = self._start()
                    if not process.is_ours:
                        self._outside = None  # The context may be newer than the settings read.
                except (SparkError, ModuleNotFoundError):
                    raise
                except Exception as error:  # Any Java error is shortened to a sentence.
                    better = translated(error)
                    if isinstance(better, SparkGone) and standalone_masters(self.master):
                        better = SparkError(
                            f"Spark ended while it registered at {self.master}: what listens "
                            "there does not answer as a master of the same "
                            "version of Spark does (it tries for a minute); is the address right?"
                        )
                    if better is error:
                        raise
                    raise better from None
                logger.info("Spark session on %s started", self.master)
            return process

    def _start(self) -> SparkProcess | ConnectSession:
        url = self._url
        if is_connect(url):
            return ConnectSession.start(url, self._config)
        return SparkProcess.start(self._given(), self.defaults)

    def _given(self) -> dict[str, str]:
        """Returns the settings that the program gave, which take precedence over all others."""
        given = dict(self._config)
        if self._master is not None:
            given["spark.master"] = self._master
        if self._app is not None:
            given["spark.app.name"] = self._app
        return given

    def _forget(self, process: SparkProcess | ConnectSession) -> None:
        with self._starting:
            if self._process is process:
                self._process = None
                process.stop()
                logger.warning("the Java process of Spark on %s is gone", self.master)

    def _current_session(self) -> Any:
        process = self._process
        assert process is not None, "only called from within a call"
        return process.session

    def _end(self) -> None:
        with self._starting:
            process, self._process = self._process, None
            if process is not None:
                process.stop()

    # On the loop.

    async def _check_reachable(self) -> None:
        """Raises SparkError if no standalone master, or the Connect server, answers.

        Spark itself would try for a minute, and then stop its context.
        """
        if self._process is not None:
            return
        server = server_of(self.master) if is_connect(self.master) else None
        masters = standalone_masters(self.master) if server is None else [server]
        what = "Spark master" if server is None else "Spark Connect server"
        reasons = []
        for host, port in masters:
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    transport, _ = await self._host.net.connect(asyncio.Protocol, host, port)
            except (OSError, TimeoutError) as error:
                reasons.append(f"{host}:{port}: {error or 'no answer'}")
                continue
            transport.abort()
            return
        if masters:
            raise SparkError(
                f"no {what} answers at {self.master} ({'; '.join(reasons)}): is it running, "
                "and is the address right?"
            )

    def _give_up(self, call: Call) -> None:
        """Cancels `call`, whose caller no longer waits."""
        if self._threads.withdraw(call):
            return
        _ = self._host.blocking(
            self._cancel_jobs, call, dedicated=True, name="aioflow-spark-cancel"
        )
        asyncio.get_running_loop().call_later(ABANDON_AFTER_S, self._abandon, call)

    def _abandon(self, call: Call) -> None:
        if self._threads.abandon(call):
            logger.warning(
                "a cancelled Spark call did not return within %g s and is given up, with its "
                "thread",
                ABANDON_AFTER_S,
            )

    def _cancel_jobs(self, call: Call) -> None:
        """Cancels the Spark jobs of a call, including jobs that the call submits later.

        It runs in an extra thread, because all threads for calls may be in use.
        """
        process = self._process
        if process is None or process.has_ended:
            return
        try:
            process.cancel_group(call.group, lambda: call.ended or call.abandoned)
        # The process may be ending; then its jobs end too.
        except Exception as error:  # noqa: BLE001
            logger.debug("jobs of a Spark call could not be cancelled: %r", error)
