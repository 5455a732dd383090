"""The configuration of a Spark session that the bridge starts.

By default it is quiet, listens on loopback, has no web interface, and keeps its files in one
scratch directory. The user's settings override the defaults.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from aioflow.core.errors import NotAuthenticated
from aioflow.spark.failures import SparkError

if TYPE_CHECKING:
    from aioflow.network.security import TlsFiles

__all__ = ["Reach", "check_master", "session_config", "standalone_masters"]

_MASTERS = re.compile(
    r"local|local\[(N|\*)\]|local\[(N|\*),\s*\d+\]|local-cluster\[N,\s*N,\s*N\]|spark://[^/,"
    r":]+:\d+(,[^/,:]+:\d+)*|yarn|k8s://.+".replace("N", r"0*[1-9]\d*")
)
"""`N`: a number of at least 1. With none of it Spark would end, or wait for ever."""

_LOG4J = """\
rootLogger.level = error
rootLogger.appenderRef.stderr.ref = STDERR
appender.c.type = Console
appender.c.name = STDERR
appender.c.target = SYSTEM_ERR
appender.c.layout.type = PatternLayout
appender.c.layout.pattern = %d{HH:mm:ss} %p %c{1}: %m%n%ex
"""


@dataclass(frozen=True, slots=True)
class Reach:
    """The address of this process for Spark's tasks, and how connections to it are protected."""

    address: str
    tls: TlsFiles | None = None
    allow_plaintext: bool = False

    def check(self) -> None:
        """Raises NotAuthenticated if others on the network could read the rows and that is not
        allowed.
        """
        from aioflow.network.security import is_loopback

        if self.tls is None and not self.allow_plaintext and not is_loopback(self.address):
            raise NotAuthenticated(
                f"rows between executors on other machines and {self.address} would cross the "
                "network in plain text: give the bridge "
                "tls=af.TlsFiles(...), whose files lie at the same paths there, or say that the "
                "network may be trusted with "
                "allow_plaintext=True"
            )


def check_master(master: str) -> None:
    """Raises SparkError for an invalid master URL, TypeError if it is no text.

    Spark itself would report it from Java, after it has started.
    """
    if not isinstance(master, str):
        raise TypeError(
            f"master is {master!r}, expected a text such as 'local[4]' or 'spark://host:7077'; a "
            "session goes into bridge="
        )
    if not _MASTERS.fullmatch(master):
        raise SparkError(
            f"{master!r} is no master URL of Spark, expected local, local[4], local[*], "
            "local-cluster[2,1,1024], "
            "spark://host:7077, yarn or k8s://https://host:port"
        )


def standalone_masters(master: str) -> list[tuple[str, int]]:
    """Returns host and port of each master of a `spark://` URL; empty for other URLs."""
    if not master.startswith("spark://"):
        return []
    pairs = [address.rsplit(":", 1) for address in master.removeprefix("spark://").split(",")]
    return [(host, int(port)) for host, port in pairs]


def session_config(master: str, given: Mapping[str, str], scratch: str) -> dict[str, str]:
    """Returns the whole configuration, with `given` over the defaults. Writes the log4j file."""
    log4j = Path(scratch, "log4j2.properties")
    log4j.write_text(_LOG4J, encoding="utf-8")
    logging = f"-Dlog4j2.configurationFile={log4j.as_uri()}"
    here = master.startswith("local")
    ours = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.warehouse.dir": os.path.join(scratch, "warehouse"),
        "spark.local.dir": os.path.join(scratch, "local"),
        "spark.sql.session.timeZone": "UTC",
        # No limit. Otherwise Spark adds up the size of the batch at each row, which takes as long
        # as everything else that it does for the row. Rows are limited by number, as they are for
        # toArrow(), and tasks of ours cut what is large all the same (`executor`).
        "spark.sql.execution.arrow.maxBytesPerBatch": str(2**31 - 1),
        "spark.sql.streaming.stateStore.providerClass": (
            "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
        ),
        # A Python worker that is asked to trace its own end prints into the user's log.
        "spark.sql.pyspark.jvmStacktrace.enabled": "false",
    }
    if here:
        ours |= {
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            # On one machine a shuffle makes as many partitions as there are cores. Spark's own
            # default of 200 is for clusters.
            "spark.sql.shuffle.partitions": str(max(2, min(_cores(master), 16))),
            "spark.executor.extraJavaOptions": logging,
        }
    config = ours | dict(given)
    extra = config.get("spark.driver.extraJavaOptions", "")
    config["spark.driver.extraJavaOptions"] = (
        f"{logging} -Dderby.system.home={scratch} {extra}".rstrip()
    )
    return config


def _cores(master: str) -> int:
    match = re.match(r"local\[(\d+)", master)
    if match is not None:
        return int(match[1])
    return 1 if master == "local" else os.cpu_count() or 1
