"""How Java is started. No Java here: what would start it is asked what it was given."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

import pytest

from aioflow.spark.bridge import jvm
from aioflow.spark.failures import SparkError


@pytest.mark.parametrize(
    "given", [None, "--jars mine.jar pyspark-shell"], ids=["alone", "beside arguments of the user"]
)
def test_the_configuration_is_in_no_command_line_but_in_a_file_of_the_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str | None
) -> None:
    java = tmp_path / "java" / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.touch(mode=0o755)
    monkeypatch.setenv("JAVA_HOME", str(java.parents[1]))
    monkeypatch.delenv("PYSPARK_SUBMIT_ARGS", raising=False)
    if given is not None:
        monkeypatch.setenv("PYSPARK_SUBMIT_ARGS", given)
    told: list[str] = []

    def launch(conf: Any = None, popen_kwargs: Any = None) -> None:
        """Returns the command in PySpark's form."""
        told.extend(f"{name}={value}" for name, value in (conf.getAll() if conf else ()))
        told.extend(shlex.split(os.environ.get("PYSPARK_SUBMIT_ARGS", "pyspark-shell")))
        raise OSError("no Java here")

    monkeypatch.setattr("pyspark.java_gateway.launch_gateway", launch)
    with pytest.raises(SparkError, match="no Java here"):
        settings = {"spark.master": "local[1]", "spark.authenticate.secret": " s3c\\ret\n"}
        jvm._launch(settings, {}, str(tmp_path))

    assert told[-1] == "pyspark-shell" and ("mine.jar" in told) is (given is not None)
    assert not any("s3c" in argument for argument in told)
    kept = Path(told[told.index("--properties-file") + 1])
    assert "\nspark.authenticate.secret=\\ s3c\\\\ret\\n\n" in kept.read_text(encoding="utf-8")
    assert kept.stat().st_mode & 0o777 == 0o600
    assert os.environ.get("PYSPARK_SUBMIT_ARGS") == given


@pytest.mark.parametrize(
    ("printed", "cause"),
    [
        (
            "Error occurred during initialization of VM\nCould not reserve enough space for "
            "object heap\n",
            "Could not reserve enough space",
        ),
        (
            "Picked up JAVA_TOOL_OPTIONS: -Dx\nInvalid maximum heap size: -Xmx9x\nError: Could "
            "not create the Java Virtual Machine.\n"
            "Error: A fatal exception has occurred. Program will exit.\n",
            "Invalid maximum heap size: -Xmx9x",
        ),
        (
            'WARNING: Using incubator modules\nException in thread "main" '
            "org.apache.spark.SparkException: When running with master "
            "'yarn' either HADOOP_CONF_DIR or YARN_CONF_DIR must be set in the environment.\n\tat "
            "org.apache.spark.Deploy(X.scala:1)\n",
            "When running with master 'yarn' either HADOOP_CONF_DIR",
        ),
        ("a\n\nkilled\n", "killed"),
        ("", ""),
    ],
    ids=["no room", "an option", "Spark refuses", "no error", "nothing"],
)
def test_error_says_in_a_line_why_java_did_not_start(
    tmp_path: Path, printed: str, cause: str
) -> None:
    log = tmp_path / "spark.log"
    log.write_text(printed)

    assert jvm._last_words(log).startswith(cause) and "\n" not in jvm._last_words(log)
