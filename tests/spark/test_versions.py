"""The table of what each version of Spark can do, in docs/spark.md.

A lane of `make sparks` tests a column: "yes" by the tests of the row, which run on each version
that has the feature; anything else by the refusal here, which names the first version that will do.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import aioflow as af
from aioflow.spark import versions
from aioflow.spark.bridge.session import SparkBridge
from aioflow.spark.versions import Feature, check_feature, installed_version
from tests.integration.clusters import ROOT

VERSIONS = [(3, 5), (4, 0), (4, 1), (4, 2), (4, 3)]

ROWS: dict[str, tuple[Feature | None, str]] = {
    "calls, SQL, time-outs and cancellation": (None, "test_session.py"),
    "spark-submit, `spark-defaults.conf`, a session of the program": (
        None,
        "test_settings_outside.py",
    ),
    "a DataFrame as a source": (None, "test_source.py"),
    "a streaming query as a source": (None, "test_streaming.py"),
    "a sink into a directory or a function": (None, "test_sink.py"),
    "a sink into a table": (Feature.TABLES, "test_sink.py"),
    "a bounded flow as a job (`af.Spark`)": (None, "test_runner.py"),
    'a flow as a query (`streaming="experimental"`)': (Feature.QUERIES, "test_stream.py"),
    "workers in executors (`af.SparkWorkers`)": (None, "test_workers.py"),
    "the bridge over Spark Connect": (Feature.CONNECT, "test_connect.py"),
}
"""The rows of the table, with the feature that decides, and the tests that hold them."""


def table() -> dict[str, list[str]]:
    text = (ROOT / "docs" / "spark.md").read_text(encoding="utf-8")
    head, *lines = text.partition("\n| Spark | ")[2].partition("\n\n")[0].splitlines()
    assert head == "3.5 | 4.0 | 4.1 | 4.2 | 4.3 |"
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]
    return {row[0]: row[1:] for row in rows}


def test_the_table_of_the_documents_is_what_the_code_does() -> None:
    shown = table()

    assert list(shown) == list(ROWS)
    for name, (feature, _) in ROWS.items():
        first = (3, 5) if feature is None else feature.first
        assert shown[name] == ["yes" if one >= first else "-" for one in VERSIONS], name


@pytest.mark.parametrize("name", ROWS)
def test_each_row_has_tests(name: str) -> None:
    feature, module = ROWS[name]
    text = Path(__file__).with_name(module).read_text(encoding="utf-8")
    assert re.search(r"^(async )?def test_|^    def test_", text, re.MULTILINE)
    if feature is not None:
        assert f"since(Feature.{feature.name})" in text, "older versions leave those tests out"


@pytest.mark.parametrize("feature", Feature)
def test_feature_is_refused_by_name_with_the_first_version(
    feature: Feature, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_feature(feature) if installed_version() >= feature.first else None
    before = VERSIONS[VERSIONS.index(feature.first) - 1]
    monkeypatch.setattr(versions, "installed_version", lambda: before)
    first = ".".join(map(str, feature.first))
    says = f"needs Spark {first} or later, and PySpark is {'.'.join(map(str, before))}: pip install"
    with pytest.raises(af.SparkError, match=re.escape(says)) as caught:
        check_feature(feature)
    assert str(caught.value).startswith(feature.what)


async def test_feature_that_the_installed_version_lacks_is_refused(
    spark: SparkBridge, tmp_path: Path
) -> None:
    """Runs on each version: the parts of the code that ask for a feature, ask for it."""
    lacks = {feature for feature in Feature if installed_version() < feature.first}
    flow = af.Flow("out")
    sink = af.io.spark(spark, table="t", schema="id bigint", spool=tmp_path / "spool")
    flow.source([{"id": 1}]).sink(sink)
    says = (
        "a table as a sink" if Feature.TABLES in lacks else "would be forgotten with this session"
    )
    with pytest.raises(af.SparkError, match=says):
        await flow.execute()

    if Feature.QUERIES in lacks:
        query = af.io.spark(
            spark, lambda session: session.readStream.text("in"), checkpoint=tmp_path / "spark"
        )
        place = af.Spark(bridge=spark, streaming="experimental")
        with pytest.raises(af.SparkError, match=r"a flow as a streaming query .* needs Spark 4\.1"):
            await af.Flow("query").source(query).key_by(str).count().collect(on=place)

    if Feature.CONNECT in lacks:
        from aioflow.spark.bridge.connect import ConnectSession

        with pytest.raises(af.SparkError, match=r"a session of Spark Connect needs Spark 4\.0"):
            ConnectSession.start("sc://127.0.0.1:1", {})


def test_flows_are_jobs_on_a_version_without_stateful_processors(tmp_path: Path) -> None:
    """Spark 3.5 has no module of that name; `af.Spark` is imported there all the same."""
    hidden = "import sys; sys.modules['pyspark.sql.streaming.stateful_processor'] = None"
    program = f"{hidden}; import aioflow as af; print(af.Spark('local[1]').master)"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "local[1]\n", done.stderr


def test_a_version_that_is_too_old_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "installed_version", lambda: (3, 4))
    with pytest.raises(af.SparkError, match=r"PySpark is 3\.4, expected 3\.5 or later"):
        versions.check_version()
