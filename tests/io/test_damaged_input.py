"""Input that is damaged, hostile or odd ends in an error that names the file and the place,
obeys `on_error`, and ends no process.
"""

from __future__ import annotations

import random
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import aioflow as af

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


class Named(NamedTuple):
    a: int
    b: str


@dataclass
class Plain:
    a: int
    b: str


GOOD = b'{"a":1,"b":"ok"}'

BAD_JSON = {
    "nested deep": b'{"a":1,"b":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "nested without end": b"[" * 200_000,
    "5,000 digits": b'{"a":' + b"9" * 5000 + b',"b":"x"}',
    "beyond floats": b'{"a":1e999,"b":"x"}',
    "NaN": b'{"a":NaN,"b":"x"}',
    "Infinity": b'{"a":-Infinity,"b":"x"}',
    "a lone surrogate": b'{"a":1,"b":"\\ud800"}',
    "a surrogate in UTF-8": b'{"a":1,"b":"\xed\xa0\x80"}',
    "a NUL": b'{"a":1,"b":"x\0y"}',
    "NULs": b"\0\0\0",
    "a BOM in the midst": b'\xef\xbb\xbf{"a":1,"b":"x"}',
    "UTF-16": '{"a":1,"b":"x"}'.encode("utf-16"),
}

TYPES: dict[str, Any] = {"no type": None, "dict": dict, "NamedTuple": Named, "dataclass": Plain}


def stream(path: Path, type: Any, columns: bool, on_error: Any) -> Any:
    read = af.Flow("damaged").source(af.io.jsonl(path, type, on_error=on_error))
    return read.select(a=af.col.a) if columns else read


@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("case", BAD_JSON)
async def test_a_line_that_is_no_json_is_named_and_may_be_passed_over(
    tmp_path: Path, case: str, type: str, columns: bool
) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(GOOD + b"\n" + BAD_JSON[case] + b"\n" + GOOD + b"\n")
    with pytest.raises(af.MalformedInput, match=r"in\.jsonl, line 2: "):
        await stream(path, TYPES[type], columns, "fail").collect()
    assert len(await stream(path, TYPES[type], columns, "skip").collect()) == 2


async def test_json_that_is_nested_deep_goes_to_the_side(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(BAD_JSON["nested deep"] + b"\n" + GOOD + b"\n")
    bad: af.OutputTag[Any] = af.OutputTag("bad")
    flow = af.Flow("side")
    rows = flow.source(af.io.jsonl(tmp_path / "in.jsonl", on_error=bad))
    failed: list[Any] = []
    rows.sink(af.io.blackhole())
    rows.side(bad).sink(failed.append)
    await flow.execute()
    assert [one.error_type for one in failed] == ["RecursionError"]


BAD_CSV = {
    "5,000 digits": b"9" * 5000 + b",x",
    "not UTF-8": b"1,\xff",
    "UTF-16": "1,x".encode("utf-16"),
    "too few": b"1",
    "too many": b"1,2,3",
    "no number": b"x,y",
}


@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("type", [Named, Plain])
@pytest.mark.parametrize("case", BAD_CSV)
async def test_a_csv_row_that_does_not_fit_is_named_and_may_be_passed_over(
    tmp_path: Path, case: str, type: Any, columns: bool
) -> None:
    path = tmp_path / "in.csv"
    path.write_bytes(b"a,b\n1,ok\n" + BAD_CSV[case] + b"\n1,ok\n")

    def rows(on_error: str) -> Any:
        read = af.Flow("damaged").source(af.io.csv(path, type, on_error=on_error))
        return read.select(a=af.col.a) if columns else read

    with pytest.raises(af.MalformedInput, match=r"in\.csv, line 3: "):
        await rows("fail").collect()
    assert len(await rows("skip").collect()) == 2


async def test_the_first_of_two_equal_keys_is_not_an_error(tmp_path: Path) -> None:
    """The last one counts, as in Python."""
    (tmp_path / "in.jsonl").write_bytes(b'{"a":1,"a":2}\n')
    assert await af.Flow("twice").source(af.io.jsonl(tmp_path / "in.jsonl")).collect() == [{"a": 2}]


# Files of columns.


def table(rows: int = 400) -> Any:
    numbers = range(rows)
    return pa.table(
        {
            "a": list(numbers),
            "b": [f"text {i % 37}" for i in numbers],
            "c": [i * 0.5 if i % 7 else None for i in numbers],
            "l": [[i, i + 1] for i in numbers],
            "d": pa.array([f"t{i % 9}" for i in numbers]).dictionary_encode(),
            "s": [{"x": i, "y": str(i)} for i in numbers],
        }
    )


def arrow_bytes(compression: str | None = None) -> bytes:
    target, content = BytesIO(), table()
    with pa.ipc.new_file(
        target, content.schema, options=pa.ipc.IpcWriteOptions(compression=compression)
    ) as writer:
        writer.write_table(content, max_chunksize=100)
    return target.getvalue()


def parquet_bytes() -> bytes:
    target = BytesIO()
    pq.write_table(table(), target, row_group_size=100)
    return target.getvalue()


FORMATS: dict[str, tuple[Callable[[], bytes], Callable[[Any], Any]]] = {
    "arrow": (arrow_bytes, af.io.arrow),
    "arrow lz4": (lambda: arrow_bytes("lz4"), af.io.arrow),
    "parquet": (parquet_bytes, af.io.parquet),
}


def broken_offset(content: bytes) -> bytes:
    """The first run of the offsets of `l`, 0, 2, 4, ..., with one that leads far behind the end."""
    begin = content.index(b"".join(number.to_bytes(4, "little") for number in (0, 2, 4, 6, 8)))
    return content[: begin + 8] + (0x7FFFFFF0).to_bytes(4, "little") + content[begin + 12 :]


async def test_an_arrow_file_with_an_offset_behind_its_end_is_refused_by_name_and_batch(
    tmp_path: Path,
) -> None:
    """Following the offset would end the process."""
    path = tmp_path / "in.arrow"
    path.write_bytes(broken_offset(arrow_bytes()))
    with pytest.raises(
        af.MalformedInput, match=r"in\.arrow, record batch 1 cannot be read: .*offset"
    ):
        await af.Flow("damaged").source(af.io.arrow(path)).collect()


@pytest.mark.parametrize("form", FORMATS)
async def test_any_damage_to_a_file_of_columns_is_named(tmp_path: Path, form: str) -> None:
    make, connector = FORMATS[form]
    sound, rng = make(), random.Random(form)
    refused = []
    for number in range(40):
        content = bytearray(sound)
        for _ in range(rng.choice([1, 3, 10])):
            place = rng.randrange(len(content))
            content[place] = rng.choice([0, 255, rng.randrange(256), content[place] ^ 1])
        path = tmp_path / f"{number}.damaged"
        path.write_bytes(content[: rng.randrange(len(content))] if number % 8 == 0 else content)
        try:
            await af.Flow("damaged").source(connector(path)).collect()
        except af.MalformedInput as error:
            refused.append((path.name, str(error)))
    assert len(refused) > 5
    assert all(name in message for name, message in refused)


@pytest.mark.parametrize("content", [b"", b"no archive at all", b"PK\x03\x04 and then nothing"])
async def test_a_zip_that_is_none_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "in.zip").write_bytes(content)
    with pytest.raises(af.MalformedInput, match=r"in\.zip is no zip archive, or is damaged"):
        await af.Flow("zip").source(af.io.lines(tmp_path / "in.zip")).collect()


async def test_a_zip_that_was_cut_off_is_named(tmp_path: Path) -> None:
    target = BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        archive.writestr("in.txt", "a\n" * 1000)
    (tmp_path / "in.zip").write_bytes(target.getvalue()[:-30])
    with pytest.raises(af.MalformedInput, match=r"in\.zip"):
        await af.Flow("zip").source(af.io.lines(tmp_path / "in.zip")).collect()
