"""Settings that were made outside the program: with spark-submit, in spark-defaults.conf, or for a
session that is there already. Ours hold only where nothing is set.

The programs run in processes of their own, each with a Java.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from aioflow.spark.bridge.session import SparkBridge
from aioflow.spark.bridge.settings import session_config, settings_of_files
from tests.integration.clusters import ROOT
from tests.spark.brief import BRIEF

SHOWN = """
import asyncio, json, os, sys
import aioflow as af

SETTINGS = ["spark.master", "spark.app.name", "spark.sql.session.timeZone",
            "spark.sql.shuffle.partitions", "spark.sql.warehouse.dir", "spark.ui.enabled"]

def read(session):
    return {name: session.conf.get(name, None) for name in SETTINGS}

async def main():
    if "made" in sys.argv:
        from pyspark.sql import SparkSession
        mine = SparkSession.builder.master("local[1]").appName("mine")
        mine = mine.config("spark.ui.enabled", "false").config("spark.sql.shuffle.partitions", "3")
        mine = mine.config("spark.sql.session.timeZone", "Asia/Tokyo").getOrCreate()
    if "stopped" in sys.argv:
        mine.stop()
    given = {}
    if "given" in sys.argv:
        given = {"master": "local[2]", "app": "given",
                 "config": {"spark.sql.shuffle.partitions": "5"}}
    for _ in range(2):
        bridge = af.SparkBridge(**given)
        async with bridge as spark:
            master = spark.master
            session = await spark.session()
            found = await spark.call(read, session)
            found["known before"] = master == found["spark.master"] == spark.master
            flow = af.Flow("rows")
            source = af.io.spark(spark, "SELECT id FROM range(0, 10, 1, 2)")
            found["rows"] = sorted(row["id"] for row in await flow.source(source).collect())
    if "made" in sys.argv and "stopped" not in sys.argv:
        found["left"] = mine.range(3).count()
    print("FOUND", json.dumps(found))

asyncio.run(main())
"""


@pytest.fixture
def conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory of Spark's configuration, without the session of other tests."""
    directory = tmp_path / "conf"
    directory.mkdir()
    monkeypatch.setenv("SPARK_CONF_DIR", str(directory))
    for name in ("PYSPARK_SUBMIT_ARGS", "MASTER", "SPARK_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("aioflow.spark.bridge.jvm._java_is_there", lambda: False)
    if (pyspark := sys.modules.get("pyspark")) is not None:
        monkeypatch.setattr(pyspark.SparkContext, "_active_spark_context", None)
    return directory


def shown(tmp_path: Path, *arguments: str, submit: tuple[str, ...] | None = None) -> dict[str, str]:
    """Returns what the program finds, run by Python or by spark-submit."""
    import pyspark

    program = tmp_path / "program.py"
    program.write_text(SHOWN, encoding="utf-8")
    command = [sys.executable]
    if submit is not None:
        command = [str(Path(pyspark.__file__).parent / "bin" / "spark-submit"), *submit]
    environ = os.environ | {
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "JDK_JAVA_OPTIONS": BRIEF,
    }
    done = subprocess.run(
        [*command, str(program), *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=environ,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, done.stdout + done.stderr
    found = json.loads(lines[-1].removeprefix("FOUND "))
    assert found.pop("rows") == list(range(10)) and found.pop("known before") is True
    return dict(found)


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.usefixtures("java", "conf")
class TestPrograms:
    def test_spark_submit_decides_what_it_names(self, tmp_path: Path) -> None:
        submit = ("--master", "local[1]", "--name", "submitted")
        for setting in (
            "spark.sql.session.timeZone=Asia/Tokyo",
            "spark.sql.shuffle.partitions=7",
            f"spark.sql.warehouse.dir={tmp_path}/houses",
        ):
            submit += ("--conf", setting)

        found = shown(tmp_path, submit=submit)

        assert found["spark.master"] == "local[1]" and found["spark.app.name"] == "submitted"
        assert found["spark.sql.session.timeZone"] == "Asia/Tokyo"
        assert found["spark.sql.shuffle.partitions"] == "7"
        assert found["spark.sql.warehouse.dir"].endswith(f"{tmp_path}/houses")

    def test_the_program_is_over_spark_submit(self, tmp_path: Path) -> None:
        submit = ("--master", "local[1]", "--name", "submitted")

        found = shown(tmp_path, "given", submit=submit)

        assert found["spark.master"] == "local[2]" and found["spark.app.name"] == "given"
        assert found["spark.sql.shuffle.partitions"] == "5"
        assert found["spark.sql.session.timeZone"] == "UTC"  # It was set nowhere.

    def test_spark_defaults_conf_decides_what_it_names(self, tmp_path: Path, conf: Path) -> None:
        (conf / "spark-defaults.conf").write_text(
            "# Ours.\nspark.master local[1]\nspark.app.name=by default\n"
            f"spark.sql.session.timeZone : Asia/Tokyo\nspark.sql.warehouse.dir\t{tmp_path}/houses\n"
            "spark.driver.memory 700m\nspark.sql.shuffle.partitions 7\n"
        )

        found = shown(tmp_path)

        assert found["spark.master"] == "local[1]" and found["spark.app.name"] == "by default"
        assert found["spark.sql.session.timeZone"] == "Asia/Tokyo"
        assert found["spark.sql.shuffle.partitions"] == "7"
        assert found["spark.sql.warehouse.dir"].endswith(f"{tmp_path}/houses")
        assert found["spark.ui.enabled"] == "false"  # It was set nowhere.

    def test_a_session_that_is_there_is_used_as_it_is_and_left(self, tmp_path: Path) -> None:
        found = shown(tmp_path, "made")

        assert found["spark.master"] == "local[1]" and found["spark.app.name"] == "mine"
        assert found["spark.sql.session.timeZone"] == "Asia/Tokyo"
        assert found["spark.sql.shuffle.partitions"] == "3"
        assert found["left"] == 3

    def test_java_of_a_session_that_was_stopped_gets_the_next_context(self, tmp_path: Path) -> None:
        found = shown(tmp_path, "made", "stopped", "given")

        assert found["spark.master"] == "local[2]" and found["spark.app.name"] == "given"
        assert found["spark.sql.shuffle.partitions"] == "5"


def test_properties_are_read_as_java_reads_them(conf: Path) -> None:
    (conf / "spark-defaults.conf").write_text(
        "! A comment\n\n  spark.a = 1 \nspark.b:2\r\nspark.c 3 = 4\n"
        "spark.d\\\n   \\=x five\\\n six\n"
        "spark.e\nspark.f \\u00e9\\tt\\\\n\nother.g 7\n",
        newline="",
    )

    assert settings_of_files(os.environ) == {
        "spark.a": "1",
        "spark.b": "2",
        "spark.c": "3 = 4",
        "spark.d=x": "fivesix",
        "spark.e": "",
        "spark.f": "é\tt\\n",
    }


def test_arguments_of_pyspark_are_over_the_file(
    conf: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (conf / "spark-defaults.conf").write_text("spark.master local[3]\nspark.a 1\nspark.b 1\n")
    arguments = "--conf spark.a='2 2' --name=n --master local[4] pyspark-shell"
    monkeypatch.setenv("PYSPARK_SUBMIT_ARGS", arguments)

    found = settings_of_files(os.environ)
    assert found == {
        "spark.a": "2 2",
        "spark.b": "1",
        "spark.app.name": "n",
        "spark.master": "local[4]",
    }
    assert SparkBridge().master == "local[4]" and SparkBridge("local[1]").master == "local[1]"

    other = tmp_path / "other.conf"
    other.write_text("spark.c 3\n")
    monkeypatch.setenv("PYSPARK_SUBMIT_ARGS", f"--properties-file {other} pyspark-shell")
    assert settings_of_files(os.environ) == {"spark.c": "3"}


def test_master_is_of_this_machine_where_none_is_set(conf: Path) -> None:
    assert SparkBridge().master == "local[*]"
    assert repr(SparkBridge()) == "SparkBridge()"


def test_warehouse_and_logs_of_the_users_own_files_stay(conf: Path, tmp_path: Path) -> None:
    given = {"spark.master": "local[2]"}
    config, options = session_config(given, str(tmp_path), os.environ)
    assert "spark.sql.warehouse.dir" in config and "log4j2" in options

    (conf / "hive-site.xml").touch()
    (conf / "log4j2.properties").touch()
    config, options = session_config(given, str(tmp_path), os.environ)
    assert "spark.sql.warehouse.dir" not in config and "log4j2" not in options
