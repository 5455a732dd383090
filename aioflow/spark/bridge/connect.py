"""A session of Spark Connect: Spark runs in a server, and this process is only its client.

The bridge uses such a session like a session in a Java process of its own, with the same calls and
channels. There are no RDDs and no Java objects. So a DataFrame is read in one partition, and a sink
into a directory makes a subdirectory for each batch. Flows run in this process, not in Spark's
executors.

The session uploads aioflow to the server, so the server's Python needs only aioflow's dependencies.
"""

from __future__ import annotations

import contextlib
import logging
import re
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from aioflow.core.contexts import contextmanager
from aioflow.spark.failures import SparkError, SparkGone, translated
from aioflow.spark.package import write_package
from aioflow.spark.versions import Feature, check_feature, silence

__all__ = ["ConnectSession", "address_toward", "is_connect", "server_of", "shown_url"]

PORT = 15002

CANCEL_AGAIN_S = 0.2
"""Time in seconds between two attempts to interrupt the operations of a call. An attempt interrupts
only the operations that are running at this time.
"""

RETRIES_MAX = 5
"""Number of attempts to reach a server that does not answer. They take about twenty seconds. With
PySpark's default number they would take ten minutes.
"""

_URL = re.compile(r"sc://(?P<host>[^:/;]+)(?::(?P<port>\d+))?(?:/(?:;.*)?)?")

_APART = "spark.driver.host"
"""The setting with the address at which executors reach this program. It is not passed to the
server.
"""

logger = logging.getLogger(__name__)


def is_connect(master: str) -> bool:
    """Whether `master` is the address of a Connect server, such as "sc://host:15002"."""
    return master.startswith("sc://")


def server_of(url: str) -> tuple[str, int] | None:
    """Returns host and port of a Connect server; None if `url` is not the address of one."""
    match = _URL.fullmatch(url)
    return None if match is None else (match["host"], int(match["port"] or PORT))


def shown_url(url: str) -> str:
    """Returns the address without its parameters, which may contain a token."""
    return url.partition("/;")[0].rstrip("/")


def address_toward(url: str) -> str:
    """Returns the address from which this machine reaches the server at `url`. Sends nothing."""
    server = server_of(url)
    if server is not None:
        with contextlib.suppress(OSError):
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect(server)
                return str(probe.getsockname()[0])
    return "127.0.0.1"


class ConnectSession:
    """A session on a Connect server. `session` is PySpark's SparkSession."""

    def __init__(self, session: Any, url: str, *, is_ours: bool) -> None:
        self.session = session
        self.is_ours = is_ours
        """Whether this object has started the session, and therefore must end it."""
        self._url = url

    @staticmethod
    def start(url: str, given: Mapping[str, str]) -> ConnectSession:
        """Returns the program's active session if it is on the server at `url`, else a new session
        with the settings `given`.

        Raises SparkError if PySpark is too old, or if `given` has a setting of the server. Raises
        ModuleNotFoundError if a package is missing.
        """
        check_feature(Feature.CONNECT)
        try:
            from pyspark.sql.connect.client.retries import DefaultPolicy
            from pyspark.sql.connect.session import SparkSession
        except ImportError as error:  # PySpark checks for its packages itself.
            raise ModuleNotFoundError(
                f"Spark Connect needs more packages ({error}): pip install 'aioflow[spark-connect]'"
            ) from None
        silence()
        make: Any = SparkSession
        there = make.getActiveSession()
        if there is not None and there.client.host == shown_url(url).removeprefix("sc://"):
            return ConnectSession(there, url, is_ours=False)
        session = make.builder.remote(url).create()
        try:
            session.client.set_retry_policies([DefaultPolicy(max_retries=RETRIES_MAX)])
            for name, value in given.items():
                if name.startswith("spark.sql."):
                    session.conf.set(name, value)
                elif name not in (_APART, "spark.app.name", "spark.master", "spark.remote"):
                    raise SparkError(
                        f"config= has {name!r}, which belongs to the server at {shown_url(url)}: "
                        "a session of Spark Connect has only settings spark.sql.*"
                    )
            _ship_aioflow(session)
        except BaseException:
            session.stop()
            raise
        return ConnectSession(session, url, is_ours=True)

    @property
    def has_ended(self) -> bool:
        return bool(self.session.is_stopped)

    def ends_soon(self) -> bool:
        """Whether the session can no longer be used, because its server did not answer."""
        return True

    def gone(self) -> SparkGone:
        """Returns the error for a call during which the server went away."""
        return SparkGone(
            f"the Spark Connect server at {shown_url(self._url)} does not answer, or has forgotten "
            "the session; the next call starts another session"
        )

    @contextmanager
    def group(self, group: str) -> Iterator[None]:
        """Marks the operations of this thread with `group`."""
        self.session.addTag(group)
        try:
            yield
        finally:
            self.session.removeTag(group)

    def cancel_group(self, group: str, has_ended: Callable[[], bool]) -> None:
        """Interrupts the operations of `group` again and again, until `has_ended` returns True."""
        pause = threading.Event()
        while not has_ended():
            self.session.interruptTag(group)
            pause.wait(CANCEL_AGAIN_S)

    def stop(self) -> None:
        """Ends the session. Has no effect if the program itself made it."""
        if not self.is_ours:
            return
        try:
            self.session.stop()
        except Exception as error:  # noqa: BLE001  # The server forgets it after a while.
            logger.debug("the session of Spark Connect did not stop: %r", translated(error))


def _ship_aioflow(session: Any) -> None:
    """Uploads aioflow to the server, for the Python processes of this session."""
    with tempfile.TemporaryDirectory(prefix="aioflow-spark-") as scratch:
        path = Path(scratch, "aioflow.zip")
        write_package(path)
        before = list(sys.path)
        session.addArtifacts(str(path), pyfile=True)
        sys.path[:] = before
