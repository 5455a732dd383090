"""Reading files: lines, JSON lines, CSV; splits, compression, malformed lines, following."""

from __future__ import annotations

import bz2
import dataclasses
import gzip
import lzma
import zipfile
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioflow.api.flow import Flow
from aioflow.core.errors import GraphError, MalformedInput
from aioflow.core.functions import OutputTag
from aioflow.core.system_host import SystemHost
from aioflow.expressions.roots import col
from aioflow.io.files.blocks import BlockFile, FilePart
from aioflow.io.files.csv_files import CsvDecoder, csv
from aioflow.io.files.file_reader import FileReader
from aioflow.io.files.json_files import jsonl
from aioflow.io.files.line_files import Files, LinesDecoder, lines
from aioflow.io.files.paths import cut
from aioflow.operators.source import Split
from tests.io.driver import Context, next_batch, read_all, system_context, take


@dataclasses.dataclass
class Trade:
    symbol: str
    price: float
    day: date | None = None
    size: int = 1


class Point(NamedTuple):
    x: int
    y: int = 0


class Reading(msgspec.Struct):
    sensor: str
    hot: bool


async def read(source: Files[Any], max_records: int = 1024) -> list[Any]:
    async with system_context() as ctx:
        return await read_all(source, ctx, max_records=max_records)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"", []),
        (b"one", ["one"]),
        (b"one\n", ["one"]),
        (b"one\ntwo\n", ["one", "two"]),
        (b"one\r\ntwo\r\n", ["one", "two"]),
        (b"\n\nx\n\n", ["", "", "x", ""]),
        (b"\xef\xbb\xbfbom\n", ["bom"]),
        ("a\x0cb\u2028c\n".encode(), ["a\x0cb\u2028c"]),
    ],
)
async def test_a_line_is_what_a_line_feed_ends(
    tmp_path: Path, text: bytes, expected: list[str]
) -> None:
    (tmp_path / "a.txt").write_bytes(text)
    assert await read(lines(tmp_path / "a.txt")) == expected


async def test_a_directory_and_a_glob_are_read_file_by_file_in_order(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", ".hidden.txt", "_marker", "c.log"):
        (tmp_path / name).write_text(f"{name}\n")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "d.txt").write_text("d.txt\n")
    (tmp_path / "_temporary").mkdir()
    (tmp_path / "_temporary" / "e.txt").write_text("e.txt\n")

    assert await read(lines(tmp_path)) == ["a.txt", "b.txt", "c.log"]
    assert await read(lines(f"{tmp_path}/*.txt")) == ["a.txt", "b.txt"]
    assert await read(lines(f"{tmp_path}/**/*.txt")) == ["a.txt", "b.txt", "d.txt"]
    assert await read(lines(f"{tmp_path}/**")) == ["a.txt", "b.txt", "c.log", "d.txt"]
    assert await read(lines(f"{tmp_path}/.*.txt")) == [".hidden.txt"]
    assert await read(lines(f"{tmp_path}/**/_temporary/**/*.txt")) == ["e.txt"]


async def test_a_glob_may_be_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("a\n")
    monkeypatch.chdir(tmp_path)
    assert await read(lines("*.txt")) == ["a"]


@pytest.mark.parametrize("name", ["absent.txt", "absent-*.txt", "."])
async def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        await lines(f"{tmp_path}/{name}").discover()
    assert str(caught.value).count(f"{tmp_path}/{name}") == 1
    assert "expected a file" in str(caught.value)


async def test_a_path_object_is_never_a_pattern(tmp_path: Path) -> None:
    (tmp_path / "a[1].txt").write_text("x\n")
    assert await read(lines(tmp_path / "a[1].txt")) == ["x"]
    with pytest.raises(FileNotFoundError):
        await lines(tmp_path / "*.txt").discover()


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zip"])
async def test_compression_is_recognised_by_the_suffix(tmp_path: Path, suffix: str) -> None:
    data = "".join(f"line {i}\n" for i in range(50_000)).encode()
    path = tmp_path / f"a.txt{suffix}"
    if suffix == ".zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("one.txt", data[:6000])
            archive.writestr("two.txt", data[6000:])
        expected = data[:6000].decode().splitlines() + data[6000:].decode().splitlines()
    else:
        path.write_bytes(
            {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}[suffix](data)
        )
        expected = data.decode().splitlines()
    source = lines(path)
    assert await read(source) == expected

    async with system_context() as ctx:
        splits = await source.discover(ctx.host)
        reader = source.reader(ctx)
        await reader.open(splits)
        first = await take(reader, 5000)
        positions = [Split(split.id, reader.position(split.id), split.payload) for split in splits]
        await reader.close()
        assert first + await read_all(source, ctx, positions) == expected


@settings(max_examples=60)
@given(
    text=st.lists(st.text(alphabet="ab\r", max_size=7), max_size=12).map("\n".join),
    split_bytes=st.integers(1, 12),
    block_bytes=st.integers(1, 9),
)
def test_ranges_of_a_file_hold_each_line_exactly_once(
    text: str, split_bytes: int, block_bytes: int, tmp_path_factory: Any
) -> None:
    """The cuts of files and the way of reading them change nothing."""
    path = tmp_path_factory.mktemp("cut") / "a.txt"
    path.write_bytes(text.encode())
    host = SystemHost()
    size = len(text.encode())
    starts = list(range(0, size, split_bytes)) or [0]
    parts = [
        FilePart(str(path), start, start + split_bytes if start != starts[-1] else None)
        for start in starts
    ]
    raw = text.encode()
    begins = [0, *(i + 1 for i, byte in enumerate(raw[:-1]) if byte == 10)]
    whole = {begin: raw[begin:end] for begin, end in zip(begins, [*begins[1:], size], strict=True)}
    for part in parts:
        file = BlockFile(host.fs, part, None, None, block_bytes=block_bytes)
        blocks = []
        while not blocks or not blocks[-1].final:
            blocks.append(file.read())
        file.close()
        last = size if part.end is None else part.end
        assert b"".join(block.data for block in blocks) == b"".join(
            line for at, line in whole.items() if part.start <= at < last
        )
        assert all(raw[block.offset :].startswith(block.data) for block in blocks)
        assert all(block.data for block in blocks[:-1])


async def test_a_large_file_is_several_splits_a_small_or_compressed_one_is_one(
    tmp_path: Path,
) -> None:
    text = "".join(f"{i}\n" for i in range(1000))
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(text.encode()))
    source = lines(tmp_path / "a.txt", split_bytes=1000)
    async with system_context() as ctx:
        splits = await source.discover(ctx.host)
        assert len(splits) == 4
        assert len({split.id for split in splits}) == 4
        parts = [await read_all(source, ctx, [split]) for split in splits]
        assert [line for part in parts for line in part] == text.splitlines()
        assert all(parts)
        assert (
            len(
                await cut(ctx.host, str(tmp_path / "b.txt.gz"), 100, divisible=True, split_bytes=10)
            )
            == 1
        )
    assert len(await csv(tmp_path / "a.txt").discover()) == 1


async def test_json_lines_become_values_of_the_type(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(
        '{"symbol": "A", "price": 1.5, "day": "2024-02-29"}\n\n{"symbol": "B", "price": 2}\n'
    )
    assert await read(jsonl(path)) == [
        {"symbol": "A", "price": 1.5, "day": "2024-02-29"},
        {"symbol": "B", "price": 2},
    ]
    assert await read(jsonl(path, Trade)) == [Trade("A", 1.5, date(2024, 2, 29)), Trade("B", 2.0)]
    path.write_text('{"x": 1}\n{"y": 3, "x": 2}\n[5, 6]\n')
    assert await read(jsonl(path, Point)) == [Point(1, 0), Point(2, 3), Point(5, 6)]
    path.write_text('{"sensor": "s", "hot": true}\n')
    assert await read(jsonl(path, Reading)) == [Reading("s", True)]


@pytest.mark.parametrize(
    ("source", "line"),
    [
        (lambda path, **options: jsonl(path, Trade, **options), b'{"symbol": "B"}'),
        (lambda path, **options: jsonl(path, **options), b'{"symbol": '),
        (lambda path, **options: jsonl(path, **options), b'{"a": 1} {"b": 2}'),
        (lambda path, **options: jsonl(path, **options), b'"\xff"'),
        (lambda path, **options: jsonl(path, Point, **options), b'{"y": 1}'),
        (lambda path, **options: lines(path, **options), b"bad \xff"),
        (
            lambda path, **options: csv(
                path, Trade, header=False, columns=["symbol", "price"], **options
            ),
            b"C,expensive",
        ),
        (
            lambda path, **options: csv(path, header=False, columns=["symbol", "price"], **options),
            b"C,1,2",
        ),
        (
            lambda path, **options: csv(path, header=False, columns=["symbol", "price"], **options),
            b"C,\xff",
        ),
        (
            lambda path, **options: csv(path, header=False, columns=["symbol", "price"], **options),
            b'C,"open',
        ),
    ],
)
@pytest.mark.parametrize("max_records", [1, 2, 100])
async def test_a_malformed_line_fails_is_skipped_or_goes_aside_by_choice(
    tmp_path: Path, source: Any, line: bytes, max_records: int, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a.data"
    good = {"jsonl": b'{"symbol": "A", "price": 1.5, "x": 1}', "lines": b"good", "csv": b"A,1.5"}[
        source(path)._function
    ]
    unclosed = line.endswith(b"open")
    after = [] if unclosed else [good, line, good]
    path.write_bytes(b"\n".join([good, good, line, *after]) + b"\n")
    count = 2 if unclosed else 4

    assert len(await read(source(path, on_error="skip"), max_records)) == count
    assert f"{path}, line 3: " in caplog.text

    tag = OutputTag[Any]("bad")
    async with system_context() as ctx:
        assert (
            len(await read_all(source(path, on_error=tag), ctx, max_records=max_records)) == count
        )
        assert [value.value for _, value in ctx.sides] == [line] * (1 if unclosed else 2)
        failed = ctx.sides[0][1]
        assert failed.error.startswith(f"{path}, line 3: ")
        assert failed.operator == "operator"
        assert all(side == tag for side, _ in ctx.sides)

        reader = source(path).reader(ctx)
        await reader.open(await source(path).discover(ctx.host))
        assert len(await take(reader, 2, max_records)) == 2
        with pytest.raises(MalformedInput, match=r"a\.data, line 3: "):
            await next_batch(reader, max_records)
        await reader.close()


@pytest.mark.parametrize("cut_at", range(7))
async def test_a_malformed_line_counts_once_wherever_the_checkpoint_was(
    tmp_path: Path, cut_at: int
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("x\n1\n2\nx\nx\n3\n\n4\n5\nx\n6\nx\n")
    tag = OutputTag[Any]("bad")
    source = jsonl(path, on_error=tag)
    async with system_context() as ctx:
        splits = await source.discover(ctx.host)
        reader = source.reader(ctx)
        await reader.open(splits)
        first = await take(reader, cut_at, 1)
        position = reader.position(splits[0].id)
        await reader.close()
        rest = await read_all(source, ctx, [Split(splits[0].id, position, splits[0].payload)])
        assert first + rest == [1, 2, 3, 4, 5, 6]
        assert [failed.error.split(":")[0].rsplit(" ")[-1] for _, failed in ctx.sides] == [
            "1",
            "4",
            "5",
            "10",
            "12",
        ]


async def test_csv_rows_are_dicts_lists_or_values_of_the_type(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("symbol,price,day,size\nA,1.5,2024-02-29,\nB,2,,7\n")
    assert await read(csv(path)) == [
        {"symbol": "A", "price": "1.5", "day": "2024-02-29", "size": ""},
        {"symbol": "B", "price": "2", "day": "", "size": "7"},
    ]
    assert await read(csv(path, Trade)) == [
        Trade("A", 1.5, date(2024, 2, 29)),
        Trade("B", 2.0, None, 7),
    ]
    assert await read(csv(path, columns=["size", "symbol"])) == [
        {"size": "", "symbol": "A"},
        {"size": "7", "symbol": "B"},
    ]
    path.write_text("1;2\n3;4\n")
    assert await read(csv(path, delimiter=";", header=False)) == [["1", "2"], ["3", "4"]]
    assert await read(csv(path, Point, delimiter=";", header=False)) == [Point(1, 2), Point(3, 4)]
    path.write_text("sensor,hot\ns,true\nt,0\n")
    assert await read(csv(path, Reading)) == [Reading("s", True), Reading("t", False)]


@pytest.mark.parametrize(("type_", "field"), [(Point, "y"), (Trade, "size")])
async def test_csv_says_which_column_is_not_of_the_type(
    type_: type[Any], field: str, tmp_path: Path
) -> None:
    (tmp_path / "a.csv").write_text("x,y,symbol,price,size\n1,2,A,1.5,3\n1,two,A,1.5,three\n")
    with pytest.raises(
        MalformedInput, match=rf"a\.csv, line 3: Expected `int`, got `str` - at `\$\.{field}`"
    ):
        await read(csv(tmp_path / "a.csv", type_))


async def test_csv_says_which_column_the_type_misses(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("symbol\nA\n")
    with pytest.raises(TypeError, match="Trade needs the column 'price', found 'symbol'"):
        await read(csv(tmp_path / "a.csv", Trade))
    with pytest.raises(GraphError, match="expected a dataclass"):
        csv("a.csv", int)


@pytest.mark.parametrize("columnar", [False, True])
async def test_a_csv_column_that_is_named_twice_is_not_lost_unsaid(
    columnar: bool, tmp_path: Path
) -> None:
    """It is refused by name, with the file, unless `columns` leaves it out."""
    path = tmp_path / "a.csv"
    path.write_text("x,y,x\n1,2,3\n")

    async def read_flow(source: Any) -> list[Any]:
        stream: Any = Flow("csv").source(source)
        return await (stream.key_by(col.y).count() if columnar else stream).collect()

    for source in (csv(path), csv(path, columns=["x"]), csv(path, Point)):
        with pytest.raises(
            ValueError, match="csv: the header names 'x' twice, among 'x', 'y', 'x'; give one of"
        ) as caught:
            await read_flow(source)
        assert f"while reading {path}" in caught.value.__notes__
    assert await read_flow(csv(path, columns=["y"])) == ([("2", 1)] if columnar else [{"y": "2"}])
    with pytest.raises(
        GraphError, match=r"csv\('a.csv'\): columns names 'x' twice, expected each column once"
    ):
        csv("a.csv", columns=["x", "y", "x"])


@pytest.mark.parametrize("columnar", [False, True])
@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (
            b"symbol,pr\rice\nA,1.5\nB,2.5\n",
            "csv: the header cannot be read: new-line character seen in unquoted field",
        ),
        (
            b"symbol,pr\rice\n",
            "csv: the header cannot be read: new-line character seen in unquoted field",
        ),
        (
            b'"symbol,price\nA,1.5\n',
            "csv: the header cannot be read: the quote that opens here is never closed",
        ),
        (
            b"symbol,price\xff\nA,1.5\n",
            "csv: the header is no text in utf-8: 'symbol', 'price.udcff'; give the encoding of "
            "the file",
        ),
    ],
)
async def test_a_csv_header_that_cannot_be_read_fails_the_file_and_no_row_takes_its_place(
    columnar: bool, content: bytes, reason: str, tmp_path: Path
) -> None:
    """Rows would get the names of another row, or none at all, and `on_error` is about rows."""
    path = tmp_path / "a.csv"
    path.write_bytes(content)
    for type_ in (None, Trade):
        stream: Any = Flow("csv").source(csv(path, type_, on_error="skip"))
        with pytest.raises(ValueError, match=reason) as caught:
            await (stream.key_by(col.symbol).count() if columnar else stream).collect()
        assert f"while reading {path}" in caught.value.__notes__


FIELDS = st.text(alphabet='ab,"\n ', max_size=6)


@settings(max_examples=80)
@given(
    rows=st.lists(st.lists(FIELDS, min_size=2, max_size=2), max_size=8),
    block=st.integers(1, 20),
    data=st.data(),
)
def test_csv_blocks_may_end_within_quotes(
    rows: list[list[str]], block: int, data: st.DataObject
) -> None:
    """Quoted line ends are handled: the records are the same wherever blocks end and wherever it
    goes on after a restart.
    """
    import csv as csv_module
    import io

    out = io.StringIO()
    csv_module.writer(out, lineterminator="\n").writerows([["x", "y"], *rows])
    text = out.getvalue().encode()
    parts = text.split(b"\n")
    pieces = [part + b"\n" for part in parts[:-1]]

    class Feed(FileReader):
        def __init__(self, position: Any) -> None:
            super().__init__(
                Context(None),
                lambda header: CsvDecoder(None, ",", True, None, "utf-8", header),
                "fail",
            )  # type: ignore[arg-type]
            self._positions["s"] = position
            self._decoders["s"] = self._make_decoder(position[2] if position else None)
            offset = position[0] if position else 0
            seen = 0
            chunks = []
            for piece in pieces:
                if seen >= offset:
                    chunks.append((seen, piece))
                seen += len(piece)
            from aioflow.io.files.blocks import Block

            for i in range(0, max(len(chunks), 1), block):
                group = chunks[i : i + block]
                at = group[0][0] if group else offset
                self._blocks.append(
                    (
                        "s",
                        "a.csv",
                        Block(b"".join(p for _, p in group), at, 0, i + block >= len(chunks)),
                    )
                )

    def drain(reader: FileReader, count: int) -> list[Any]:
        taken: list[Any] = []
        while len(taken) < count and (batch := reader.poll_batch(min(2, count - len(taken)))):
            taken.extend(batch)
        return taken

    expected = [dict(zip(("x", "y"), row, strict=True)) for row in rows]
    assert drain(Feed(None), 100) == expected
    stop = data.draw(st.integers(0, len(rows)))
    reader = Feed(None)
    first = drain(reader, stop)
    assert first + drain(Feed(reader.position("s")), 100) == expected


async def test_following_reads_new_lines_and_new_files_and_leaves_half_a_line(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.log"
    path.write_text("1\n2\nhal")
    source = lines(f"{tmp_path}/*.log", follow=True, every="1ms")
    assert not source.bounded
    async with system_context() as ctx:
        reader = source.reader(ctx)
        splits = await source.discover(ctx.host)
        await reader.open(splits)
        assert await take(reader, 2) == ["1", "2"]
        with path.open("a") as file:
            file.write("f\n3\n")
        assert await take(reader, 2) == ["half", "3"]
        (tmp_path / "b.log").write_text("4\n")
        assert await take(reader, 1) == ["4"]
        assert not reader.finished
        position = reader.position(splits[0].id)
        await reader.close()

        with path.open("a") as file:
            file.write("5\n")
        (tmp_path / "c.log").write_text("6\n")
        reader = source.reader(ctx)
        await reader.open([Split(splits[0].id, position)])
        assert await take(reader, 2) == ["5", "6"]
        path.write_text("7\n")
        assert await take(reader, 1) == ["7"]
        await reader.close()


async def test_following_waits_for_a_file_that_does_not_exist_yet(tmp_path: Path) -> None:
    source = csv(f"{tmp_path}/*.csv", follow=True, every="1ms")
    async with system_context() as ctx:
        reader = source.reader(ctx)
        await reader.open(await source.discover(ctx.host))
        assert reader.poll_batch(10) is None
        (tmp_path / "a.csv").write_text('x,y\n1,"two\n')
        (tmp_path / "b.csv").write_text("x\n3\n")
        assert await take(reader, 1) == [{"x": "3"}]
        with (tmp_path / "a.csv").open("a") as file:
            file.write('lines"\n')
        assert await take(reader, 1) == [{"x": "1", "y": "two\nlines"}]
        await reader.close()


async def test_the_reader_tells_which_split_a_batch_is_of_and_which_are_read(
    tmp_path: Path,
) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).write_text("" if name == "b" else f"{name}1\n{name}2\n")
    source = lines(tmp_path)
    async with system_context() as ctx:
        splits = await source.discover(ctx.host)
        a, b, c = (split.id for split in splits)
        reader: Any = source.reader(ctx)
        await reader.open(splits)
        assert await next_batch(reader, 1) == ["a1"]
        assert (reader.current_split, reader.finished_splits) == (a, set())
        assert await take(reader, 2, 10) == ["a2", "c1"]
        assert (reader.current_split, reader.finished_splits) == (c, {a, b})
        assert await take(reader, 9) == ["c2"]
        assert reader.finished_splits == {a, b, c}
        await reader.close()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: lines("a", on_error="ignore"), "on_error is 'ignore'"),
        (lambda: lines("a", encoding="utf-16"), "utf-16"),
        (lambda: lines("a", encoding="klingon"), "klingon"),
        (lambda: lines("a", split_bytes=0), "split_bytes is 0"),
        (lambda: csv("a", delimiter=";;"), "delimiter is ';;'"),
    ],
)
def test_wrong_options_are_build_errors(make: Any, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        make()


def test_a_lines_decoder_keeps_what_follows_a_carriage_return() -> None:
    assert LinesDecoder("utf-8").decode(b"a\rb\n", True).records == ["a\rb"]


@pytest.mark.parametrize(
    ("suffix", "compress"), [(".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress)]
)
@pytest.mark.parametrize("whole", [True, False], ids=["cut off", "of another kind"])
async def test_a_compressed_file_that_cannot_be_read_to_its_end_is_named(
    tmp_path: Path, suffix: str, compress: Callable[[bytes], bytes], whole: bool
) -> None:
    """Lines before the damage have been emitted; missing ones are an error, never an end."""
    path = tmp_path / f"log{suffix}"
    path.write_bytes(compress(b"line\n" * 100_000)[:-9] if whole else b"no such thing\n")
    async with system_context() as ctx:
        with pytest.raises(
            ValueError,
            match=rf"log\{suffix} cannot be uncompressed behind byte \d+ of its content: ",
        ):
            await read_all(lines(path), ctx)
