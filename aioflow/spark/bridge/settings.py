"""The configuration of a Spark session that the bridge starts.

By default the session logs little, listens on loopback, has no web interface, and keeps its files
in one scratch directory. A default applies only if the user has not set the value: in the program,
in the arguments of spark-submit, or in spark-defaults.conf. The first of these three wins, as in
Spark itself.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from aioflow.core.errors import NotAuthenticated
from aioflow.spark.bridge.connect import server_of, shown_url
from aioflow.spark.failures import SparkError

if TYPE_CHECKING:
    from aioflow.network.security import TlsFiles

__all__ = [
    "DEFAULT_APP",
    "DEFAULT_MASTER",
    "INSTEAD_OF_CONNECT",
    "Reach",
    "check_master",
    "context_config",
    "session_config",
    "settings_of_files",
    "standalone_masters",
]

DEFAULT_APP = "aioflow"

DEFAULT_MASTER = "local[*]"

_MASTERS = re.compile(
    r"local|local\[(N|\*)\]|local\[(N|\*),\s*\d+\]|local-cluster\[N,\s*N,\s*N\]|spark://[^/,"
    r":]+:\d+(,[^/,:]+:\d+)*|yarn|k8s://.+".replace("N", r"0*[1-9]\d*")
)
"""Matches valid master URLs. `N` stands for a number of at least 1: with 0, Spark would end or wait
for ever.
"""

INSTEAD_OF_CONNECT = (
    "run the flow here, without on=, with af.io.spark(bridge, ...) as its source or sink; or give "
    "a master with executors, such as spark://host:7077"
)

_LOG4J_KINDS = ("properties", "xml", "yaml", "yml", "json", "jsn")
"""Suffixes under which a user may have a log4j file in Spark's configuration directory."""

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
        """Raises NotAuthenticated if others on the network could read the rows and plain text is
        not allowed.
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


def check_master(master: str, *, connect: bool = False) -> None:
    """Raises SparkError for an invalid master URL, TypeError if it is not a str.

    Spark itself would report the URL only after Java has started. `connect` allows the address of a
    Connect server.
    """
    if not isinstance(master, str):
        raise TypeError(
            f"master is {master!r}, expected a text such as 'local[4]' or 'spark://host:7077'; a "
            "session goes into bridge="
        )
    if server_of(master) is not None:
        if connect:
            return
        raise SparkError(
            f"{shown_url(master)} is a server of Spark Connect, where a program has no executors: "
            f"{INSTEAD_OF_CONNECT}"
        )
    if not _MASTERS.fullmatch(master):
        raise SparkError(
            f"{master!r} is no master URL of Spark, expected local, local[4], local[*], "
            "local-cluster[2,1,1024], "
            "spark://host:7077, yarn, k8s://https://host:port, or sc://host:15002 for a bridge"
        )


def standalone_masters(master: str) -> list[tuple[str, int]]:
    """Returns host and port of each master of a `spark://` URL, or an empty list for other URLs."""
    if not master.startswith("spark://"):
        return []
    pairs = [address.rsplit(":", 1) for address in master.removeprefix("spark://").split(",")]
    return [(host, int(port)) for host, port in pairs]


def settings_of_files(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the settings that a Java process of PySpark finds outside the program: in
    spark-defaults.conf, and in the arguments of `PYSPARK_SUBMIT_ARGS`, which take precedence.
    """
    named: dict[str, str] = {}
    files = [os.path.join(_conf_dir(environ), "spark-defaults.conf")]
    given = shlex.split(environ.get("PYSPARK_SUBMIT_ARGS", ""))
    arguments = iter(given)
    for argument in arguments:
        option, _, value = argument.partition("=")
        if option not in ("--conf", "-c", "--master", "--name", "--remote", "--properties-file"):
            continue
        value = value or next(arguments, "")
        if option in ("--conf", "-c"):
            name, _, value = value.partition("=")
            named[name] = value
        elif option == "--properties-file":
            files = [*files[:1], value] if "--load-spark-defaults" in given else [value]
        else:
            names = {"--master": "spark.master", "--name": "spark.app.name"}
            named[names.get(option, "spark.remote")] = value
    variables = {"spark.master": "MASTER", "spark.remote": "SPARK_REMOTE"}
    found = {name: environ[one] for name, one in variables.items() if environ.get(one)}
    for file in files:
        with contextlib.suppress(OSError):
            found |= dict(_properties(Path(file).read_text(encoding="utf-8")))
    return {name: value for name, value in (found | named).items() if name.startswith("spark.")}


def _conf_dir(environ: Mapping[str, str]) -> str:
    """Returns the directory of Spark's configuration; "" if PySpark is not installed."""
    if directory := environ.get("SPARK_CONF_DIR"):
        return directory
    home = environ.get("SPARK_HOME")
    if not home:
        found = importlib.util.find_spec("pyspark")
        home = "" if found is None or found.origin is None else os.path.dirname(found.origin)
    return os.path.join(home, "conf") if home else ""


_PROPERTY = re.compile(
    r"(?P<name>(?:\\.|[^\\ \t\f=:])*)[ \t\f]*[=:]?[ \t\f]*(?P<value>.*)", re.DOTALL
)
_ESCAPED = re.compile(r"\\(?:u([0-9a-fA-F]{4})|(.))", re.DOTALL)
_LETTERS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f"}


def _properties(text: str) -> Iterator[tuple[str, str]]:
    """Yields the names and trimmed values in `text`, the content of a Java properties file."""

    def plain(part: str) -> str:
        return _ESCAPED.sub(
            lambda found: chr(int(found[1], 16)) if found[1] else _LETTERS.get(found[2], found[2]),
            part,
        )

    lines = (line.lstrip(" \t\f") for line in text.splitlines())
    for line in lines:
        if not line or line[0] in "#!":
            continue
        while (len(line) - len(line.rstrip("\\"))) % 2:  # The next line continues this one.
            line = line[:-1] + next(lines, "")
        match = _PROPERTY.fullmatch(line)
        assert match is not None, "it matches any text"
        yield plain(match["name"]), plain(match["value"]).strip()


def session_config(
    given: Mapping[str, str], scratch: str, environ: Mapping[str, str]
) -> tuple[dict[str, str], str]:
    """Returns the Spark settings of a Java process that the bridge starts, and its Java options.

    `given` contains the master, and overrides the defaults. The returned Java options come before
    the user's options, which override them.
    """
    master = given["spark.master"]
    ours = _of_rows(master) | {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.local.dir": os.path.join(scratch, "local"),
    }
    conf = Path(_conf_dir(environ) or scratch)
    options = [f"-Dderby.system.home={scratch}"]
    if not (conf / "hive-site.xml").exists():  # A setting would override the warehouse in it.
        ours["spark.sql.warehouse.dir"] = os.path.join(scratch, "warehouse")
    log4j = Path(scratch, "log4j2.properties")
    log4j.write_text(_LOG4J, encoding="utf-8")
    if not any(Path(conf, f"log4j2.{kind}").exists() for kind in _LOG4J_KINDS):
        options.append(f"-Dlog4j2.configurationFile={log4j.as_uri()}")
        if master.startswith("local"):
            ours["spark.executor.extraJavaOptions"] = options[-1]
    if master.startswith("local"):
        ours |= {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
    return ours | dict(given), " ".join(options)


def context_config(master: str) -> dict[str, str]:
    """Returns the defaults for a context in a Java process that others started.

    Such a process already has its directories, logs and web interface, so these have no defaults.
    """
    return _of_rows(master)


def _of_rows(master: str) -> dict[str, str]:
    """Returns aioflow's defaults for the settings that concern rows and queries."""
    ours = {
        "spark.sql.session.timeZone": "UTC",
        # No limit. Otherwise Spark adds up the size of the batch at each row, which takes as long
        # as everything else that it does for the row. Rows are limited by number, as they are for
        # toArrow(), and our tasks cut batches that are still large into pieces (`executor`).
        "spark.sql.execution.arrow.maxBytesPerBatch": str(2**31 - 1),
        "spark.sql.streaming.stateStore.providerClass": (
            "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
        ),
        # A Python worker that is asked to trace its own end prints into the user's log.
        "spark.sql.pyspark.jvmStacktrace.enabled": "false",
    }
    if master.startswith("local"):
        # On one machine a shuffle makes as many partitions as there are cores. Spark's own default
        # of 200 is for clusters.
        ours["spark.sql.shuffle.partitions"] = str(max(2, min(_cores(master), 16)))
    return ours


def _cores(master: str) -> int:
    match = re.match(r"local\[(\d+)", master)
    if match is not None:
        return int(match[1])
    return 1 if master == "local" else os.cpu_count() or 1
