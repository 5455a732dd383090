"""Event time moves while a file of several splits is read, and while many files are."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import aioflow as af
from aioflow.io.files import column_files, merged_splits
from aioflow.io.files.blocks import Block

BY_TIME = af.WatermarkStrategy.bounded_out_of_orderness("1s", timestamp=lambda e: e["ts"])
BY_COLUMN = af.WatermarkStrategy.bounded_out_of_orderness("1s", timestamp=af.col.ts)
RECORDS = 60_000


def records(count: int = RECORDS) -> list[dict[str, int]]:
    """Records in order of time, but for half a second: 1,000 in each second of event time."""
    rng = random.Random(3)
    return [{"i": i, "ts": i + rng.randrange(500), "user": i % 3} for i in range(count)]


def lines_of(rows: list[dict[str, int]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def expected(rows: list[dict[str, int]], size_ms: int = 2_000) -> dict[tuple[int, int], int]:
    counts: dict[tuple[int, int], int] = {}
    for row in rows:
        window = row["ts"] // size_ms * size_ms
        counts[row["user"], window] = counts.get((row["user"], window), 0) + 1
    return counts


class Seen(NamedTuple):
    """A result, and how many records the sources had given before."""

    key: int
    start: int
    count: int
    read: int


async def results(source: Any, strategy: Any = BY_TIME, parallelism: int = 1) -> list[Seen]:
    """Returns the results of windows of two seconds."""
    read = 0
    seen: list[Seen] = []

    def note(row: dict[str, int]) -> dict[str, int]:
        nonlocal read
        read += 1
        return row

    flow = af.Flow("merged", parallelism=parallelism)
    rows = flow.source(source, watermarks=strategy).map(note)
    windows = rows.key_by(lambda e: e["user"]).window(af.tumbling("2s")).aggregate(af.count())
    windows.sink(lambda row: seen.append(Seen(row.key, row.start, row.value, read)))
    await flow.execute()
    return seen


def check(seen: list[Seen], rows: list[dict[str, int]]) -> None:
    assert {(one.key, one.start): one.count for one in seen} == expected(rows)
    assert len(seen) == len(expected(rows)), "each window gives one result"


def lag_max(seen: list[Seen], rows: list[dict[str, int]]) -> int:
    """Returns by how many records a result came after the last record of its window at most."""
    last = {row["ts"] // 2_000 * 2_000: i for i, row in enumerate(rows)}
    return max(one.read - last[one.start] for one in seen)


@pytest.mark.parametrize("parallelism", [1, 2])
async def test_results_come_while_a_file_of_several_splits_is_read(
    tmp_path: Path, parallelism: int
) -> None:
    rows = records()
    path = tmp_path / "a.jsonl"
    path.write_text(lines_of(rows))
    split_bytes = path.stat().st_size // 8
    seen = await results(af.io.jsonl(path, split_bytes=split_bytes), parallelism=parallelism)
    check(seen, rows)
    # Of two subtasks, one may be some splits ahead, and batches wait between the tasks.
    # Without the merge, event time stands still until an eighth is left.
    part = RECORDS // 2 if parallelism == 1 else RECORDS * 3 // 4
    early = sum(one.read < part for one in seen)
    assert early >= (len(seen) // 4 if parallelism == 1 else 1)


@pytest.mark.parametrize("parallelism", [1, 2])
async def test_results_come_while_files_of_the_same_time_are_read(
    tmp_path: Path, parallelism: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = records()
    for number in range(8):
        (tmp_path / f"{number}.jsonl").write_text(lines_of(rows[number::8]))
    monkeypatch.setattr(merged_splits, "FIRST_BYTES", 64)
    source = af.io.jsonl(tmp_path)
    source._block_bytes = 8_192  # Blocks of about 200 records.
    seen = await results(source, parallelism=parallelism)
    check(seen, rows)
    assert lag_max(seen, rows) < RECORDS // 2


async def test_more_files_than_may_be_open_are_read_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = records()
    for number in range(12):
        (tmp_path / f"{number:02}.jsonl").write_text(lines_of(rows[number::12]))
    monkeypatch.setattr(merged_splits, "OPEN_MAX", 3)
    source = af.io.jsonl(tmp_path)
    source._block_bytes = 8_192
    check(await results(source), rows)


async def test_files_that_follow_each_other_are_read_in_order_of_time(tmp_path: Path) -> None:
    rows = records()
    for number in range(6):
        part = rows[number * 10_000 : (number + 1) * 10_000]
        (tmp_path / f"{5 - number}.jsonl").write_text(lines_of(part))
    seen = await results(af.io.jsonl(tmp_path))
    check(seen, rows)
    assert lag_max(seen, rows) < RECORDS // 2


def written(path: Path, kind: str, rows: list[dict[str, int]], page: int = 500) -> None:
    """Writes a file of columns with pages of `page` rows."""
    table = pa.Table.from_pylist(rows or [{"i": 0, "ts": 0, "user": 0}]).slice(0, len(rows))
    if kind == "parquet":
        pq.write_table(table, path, row_group_size=page)
        return
    with pa.ipc.new_file(path, table.schema) as file:
        file.write_table(table, max_chunksize=page)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(column_files, "FIRST_ROWS", 3)
    monkeypatch.setattr(column_files, "PART_ROWS", 200)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("strategy", [BY_TIME, BY_COLUMN])
@pytest.mark.parametrize("kind", ["parquet", "arrow"])
async def test_results_come_while_files_of_columns_of_the_same_time_are_read(
    tmp_path: Path, kind: str, strategy: Any
) -> None:
    rows = records()
    for number in range(8):
        written(tmp_path / f"{number}.{kind}", kind, rows[number::8])
    written(tmp_path / f"9.{kind}", kind, [])
    seen = await results(getattr(af.io, kind)(tmp_path), strategy)
    check(seen, rows)
    assert lag_max(seen, rows) < RECORDS // 2


@pytest.mark.usefixtures("small_parts")
async def test_results_come_while_a_parquet_file_of_several_splits_is_read(tmp_path: Path) -> None:
    rows = records()
    written(tmp_path / "a.parquet", "parquet", rows)
    source = af.io.parquet(tmp_path, split_bytes=(tmp_path / "a.parquet").stat().st_size // 8)
    assert len(await source.discover()) > 4
    seen = await results(source)
    check(seen, rows)
    assert lag_max(seen, rows) < RECORDS // 2


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("kind", ["parquet", "arrow"])
async def test_more_files_of_columns_than_may_be_open_are_read_side_by_side(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = records()
    for number in range(12):
        written(tmp_path / f"{number:02}.{kind}", kind, rows[number::12], page=2_000)
    monkeypatch.setattr(merged_splits, "OPEN_MAX", 3)
    check(await results(getattr(af.io, kind)(tmp_path)), rows)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("kind", ["parquet", "arrow"])
async def test_files_of_columns_go_on_at_their_positions_after_a_failure(
    tmp_path: Path, kind: str
) -> None:
    rows = records(6_000)
    for number in range(4):
        written(tmp_path / f"{number}.{kind}", kind, rows[number::4])
    calls = 0
    failures = (1_500, 4_000, 5_500)
    """Calls that come in any case: records that are read again add calls."""

    def failing(row: dict[str, int]) -> dict[str, int]:
        nonlocal calls
        calls += 1
        if calls in failures:
            raise ConnectionError("try again")
        return row

    flow = af.Flow("restored")
    source = flow.source(getattr(af.io, kind)(tmp_path), watermarks=BY_TIME)
    counts: dict[tuple[int, int], int] = {}
    keyed = source.throttle(1_000, "50ms").map(failing).key_by(lambda e: e["user"])
    keyed.window(af.tumbling("2s")).aggregate(af.count()).sink(
        lambda row: counts.update({(row.key, row.start): row.value})
    )
    await flow.execute(
        checkpoints=tmp_path / "checkpoints",
        every="10ms",
        restart=af.fixed_delay(attempts=5, delay="1ms"),
    )
    assert calls > max(failures)
    assert counts == expected(rows)


async def test_without_event_time_files_are_read_in_order_of_their_names(tmp_path: Path) -> None:
    rows = records(500)
    for number in range(5):
        (tmp_path / f"{number}.jsonl").write_text(lines_of(rows[number::5]))
    read = await af.Flow("plain").source(af.io.jsonl(tmp_path)).map(lambda e: e["i"]).collect()
    assert read == [row["i"] for number in range(5) for row in rows[number::5]]


async def test_files_without_records_do_not_hold_event_time_back(tmp_path: Path) -> None:
    rows = records()
    for number in range(6):
        (tmp_path / f"{number}a.jsonl").write_text(lines_of(rows[number::6]))
        (tmp_path / f"{number}b.jsonl").write_text("" if number % 2 else "\n\n")
    seen = await results(af.io.jsonl(tmp_path))
    check(seen, rows)


class End:
    """A file of one block."""

    def close(self) -> None:
        pass


def looks(count: int) -> int:
    """Returns how often event times were looked up to read `count` files of one block each."""
    times: dict[str, int] = {}
    looked = 0

    def event_time(split_id: str) -> int:
        nonlocal looked
        looked += 1
        return times.get(split_id, -1)

    merged = merged_splits.MergedSplits(event_time)
    for number in range(count):
        merged.add(af.Split(str(number), None, []))
    taken: list[str] = []
    while merged:
        while (split := merged.next_to_read()) is not None:
            merged.use(split.id, End(), None)  # type: ignore[arg-type]
            merged.add_block(split.id, Block(b"", 0, None, True))
        block = merged.take()
        assert block is not None
        taken.append(block[0].id)
        times[taken[-1]] = len(taken)
        merged.remove(taken[-1])
    assert sorted(taken, key=int) == [str(number) for number in range(count)]
    return looked


def test_the_next_split_is_found_without_looking_at_all_of_them() -> None:
    assert looks(2_000) < 2.5 * looks(1_000)
