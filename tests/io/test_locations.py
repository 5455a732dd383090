"""Locations of files: URLs and home directories keep their meaning, and places of other systems are
refused at build time.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import aioflow as af
from aioflow.api.options import parse_options
from aioflow.io.files.paths import local_path
from aioflow.io.files.patterns import url_scheme

CONNECTORS: dict[str, Callable[[Any], Any]] = {
    "lines": af.io.lines,
    "jsonl": af.io.jsonl,
    "csv": af.io.csv,
    "parquet": af.io.parquet,
    "arrow": af.io.arrow,
    "sqlite": lambda path: af.io.sqlite(path, "t"),
}

ELSEWHERE = [
    "hdfs://name/x",
    "abfss://c@a/x",
    "S3A://bucket/x",
    "odd+scheme://x",
]


@pytest.mark.parametrize("name", CONNECTORS)
@pytest.mark.parametrize("path", [*ELSEWHERE, *map(Path, ELSEWHERE)], ids=repr)
def test_a_place_of_another_system_is_refused_and_the_remedy_named(name: str, path: Any) -> None:
    with pytest.raises(
        af.GraphError,
        match="not read or written here, expected a path of this machine: mount the store",
    ):
        CONNECTORS[name](path)


@pytest.mark.parametrize("path", ["s3://bucket/x", Path("s3://bucket/x")], ids=repr)
def test_a_database_is_no_object_and_a_path_no_url(path: Any) -> None:
    with pytest.raises(af.GraphError, match="not read or written here"):
        CONNECTORS["sqlite"](path)
    if isinstance(path, Path):
        with pytest.raises(af.GraphError, match="a Path loses a slash of a URL"):
            CONNECTORS["lines"](path)


@pytest.mark.parametrize("url", ["s3://bucket/x", "gs://bucket", "AZ://container/x/"])
def test_the_url_of_an_object_store_stands_where_a_path_does(url: str) -> None:
    assert url.rstrip("/").lower() in repr(af.io.lines(url))


@pytest.mark.parametrize("name", CONNECTORS)
@pytest.mark.parametrize(
    "path",
    ["", "a\0b", "file://other/x", "file://", "file:///", "https://host/x", 7, None, b"x"],
    ids=repr,
)
def test_value_that_is_no_path_is_refused_by_the_name_of_the_function(name: str, path: Any) -> None:
    with pytest.raises(af.GraphError, match=name):
        CONNECTORS[name](path)


def test_a_path_shows_no_password() -> None:
    with pytest.raises(af.GraphError) as raised:
        af.io.lines("s3://key:hunter2@bucket/x")
    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("data/x.csv", "data/x.csv"), ("/x", "/x"), ("12:30.txt", "12:30.txt"), ("a:b/c", "a:b/c"),
        ("c:/x", "c:/x"), ("./s3:/x", "./s3:/x"), ("file:///x/y", "/x/y"), ("file:/x/y", "/x/y"),
        ("FILE://localhost/x", "/x"), ("file:///a%20b", "/a b"),
        ("file:///x/part-?.csv", "/x/part-?.csv"), ("file:///x/#1", "/x/#1"),
        (Path("file:///x/y"), Path("/x/y")), (Path("x"), Path("x")),
        ("~", "/home/me"), ("~/x/*.csv", "/home/me/x/*.csv"), (Path("~/x"), Path("/home/me/x")),
        ("x/~", "x/~"),
    ],
)  # fmt: skip
def test_a_path_of_this_machine(given: Any, meant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    found = local_path(given)
    assert (type(found), found) == (type(meant), meant)


def test_a_scheme_is_distinguished_from_a_name_with_a_colon() -> None:
    assert [url_scheme(path) for path in ("logs:/x", "logs://x", "s3:x", "s3:/x")] == [
        "",
        "logs",
        "",
        "s3",
    ]
    assert [url_scheme(Path(path)) for path in ("logs:/x", "logs:x")] == ["logs", ""]


async def test_a_sink_writes_where_a_file_url_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for place in (f"file://{tmp_path}/out", Path(f"file://{tmp_path}/other")):
        flow = af.Flow("urls")
        flow.source(["a"]).sink(af.io.lines(place))
        await flow.execute()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "out"]
    assert (tmp_path / "out" / "part-0-0.txt").read_text() == "a\n"


async def test_home_is_that_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    flow = af.Flow("home")
    flow.source(["a"]).sink(af.io.lines("~/out"))
    await flow.execute()
    flow = af.Flow("home again")
    assert await flow.source(
        af.io.lines("file://" + str(tmp_path / "me" / "out" / "part-0-?.txt"))
    ).collect() == ["a"]
    assert [path.name for path in tmp_path.iterdir()] == ["me"]


@pytest.mark.parametrize("option", ["checkpoints", "restore"])
@pytest.mark.parametrize("path", ["s3://bucket/x", "hdfs://name/x", "file:///x"])
def test_a_store_that_is_given_as_a_path_is_refused(option: str, path: str) -> None:
    with pytest.raises(ValueError, match="loses a slash of a URL, expected the URL as a text"):
        parse_options({option: Path(path)})


@pytest.mark.parametrize("option", ["checkpoints", "restore"])
@pytest.mark.parametrize("text", ["s3:/bucket/x", "gs:/bucket/x", "file:/x", "memory:x"])
def test_a_store_whose_url_lacks_a_slash_is_refused(option: str, text: str) -> None:
    scheme = text.partition(":")[0]
    with pytest.raises(ValueError, match=f"the scheme is written {scheme}://"):
        parse_options({option: text})


@pytest.mark.parametrize("option", ["checkpoints", "restore"])
def test_a_store_of_an_unknown_scheme_is_refused(option: str) -> None:
    with pytest.raises(ValueError, match="stores have the schemes"):
        parse_options({option: "hdfs://name/x"})
