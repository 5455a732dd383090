"""Files that change after they were found (`discover_every`): nothing is read twice, nothing
that was found is lost, and it is told.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import aioflow as af
from aioflow.checkpoint.source_state import SplitState
from aioflow.core.errors import GraphError, RestoreError
from aioflow.io.files.blocks import FilePart
from aioflow.io.files.found_files import FoundFiles
from aioflow.operators.source import Split
from tests.io.driver import read_all, system_context, take
from tests.io.test_files_discovered import EVERY, Inbox, eventually

pytestmark = pytest.mark.timeout(120)

SPLIT_BYTES = 8
"""Two lines of the tests are more."""


@pytest.fixture
def inbox(tmp_path: Path) -> Inbox:
    return Inbox(tmp_path / "in")


def grown(inbox: Inbox, name: str, *lines: str) -> None:
    with (inbox.directory / name).open("a") as file:
        file.write("".join(f"{line}\n" for line in lines))


def flow(inbox: Inbox, *, split_bytes: int = SPLIT_BYTES) -> af.Flow:
    made = af.Flow("grown", parallelism=2)
    source = af.io.lines(inbox.directory, discover_every=EVERY, split_bytes=split_bytes)
    made.source(source, uid="lines").sink(inbox.rows.append)
    return made


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    name = "aioflow.io.files.found_files"
    return [one.getMessage() for one in caplog.records if one.name == name]


@pytest.mark.parametrize(
    "first", [["1"], ["line 1", "line 2", "line 3"]], ids=["whole", "in parts"]
)
async def test_a_file_that_grows_after_it_was_read_is_not_read_again_and_that_is_reported(
    inbox: Inbox, caplog: pytest.LogCaptureFixture, first: list[str]
) -> None:
    inbox.put("a", *first)
    async with flow(inbox).run():
        await eventually(lambda: len(inbox.rows) == len(first))
        grown(inbox, "a", *(f"more {n}" for n in range(20)))
        await eventually(lambda: len(told(caplog)) == 1)
        grown(inbox, "a", "still more")
        inbox.put("b", "end")
        await eventually(lambda: "end" in inbox.rows)
    assert once_each(inbox.rows) == sorted([*first, "end"])
    assert len(told(caplog)) == 1, "once a file"
    assert f"{inbox.directory}/a has changed since it was found" in told(caplog)[0]
    assert "or read what is added with follow=True" in told(caplog)[0]


@pytest.mark.parametrize(
    "first", [["1"], ["line 1", "line 2", "line 3"]], ids=["whole", "in parts"]
)
@pytest.mark.parametrize("split_bytes", [SPLIT_BYTES, 3, 10_000])
async def test_a_file_that_grew_while_the_job_was_down_or_is_cut_elsewhere_is_not_read_again(
    inbox: Inbox, tmp_path: Path, first: list[str], split_bytes: int
) -> None:
    inbox.put("a", *first)
    async with flow(inbox).run(checkpoints=tmp_path / "store", every="1h") as job:
        await eventually(lambda: len(inbox.rows) == len(first))
        await job.stop()
    grown(inbox, "a", *(f"more {n}" for n in range(20)))
    inbox.put("b", "end")
    async with flow(inbox, split_bytes=split_bytes).run(
        checkpoints=tmp_path / "store", every="1h"
    ) as job:
        await eventually(lambda: "end" in inbox.rows)
        inbox.put("c", "very end")
        await eventually(lambda: "very end" in inbox.rows)
        await job.stop()
    assert once_each(inbox.rows) == sorted([*first, "end", "very end"])


@pytest.mark.parametrize("every", [EVERY, None], ids=["looked for again", "bounded"])
async def test_a_file_that_was_replaced_while_the_job_was_down_is_reported(
    inbox: Inbox, tmp_path: Path, caplog: pytest.LogCaptureFixture, every: str | None
) -> None:
    """As for a file that changes while the job runs, its old content is read, and its new content
    is not.
    """

    def made() -> tuple[af.Flow, Any]:
        flow = af.Flow("replaced")
        flow.source(af.io.lines(inbox.directory, discover_every=every), uid="lines").sink(
            inbox.rows.append
        )
        pushed = flow.source(
            af.io.push(), uid="push"
        )  # With it the job does not end with its files.
        pushed.sink(inbox.rows.append)
        return flow, pushed

    inbox.put("a", "1")
    inbox.put("b", "2")
    for run in range(3):
        flow, pushed = made()
        caplog.clear()
        async with flow.run(checkpoints=tmp_path / "store", every="1h") as job:
            await job.input(pushed).put(f"run {run}")
            # Awaited in this turn.
            await eventually(lambda: len(inbox.rows) == 3 + run)  # noqa: B023
            if run == 0:
                await eventually(lambda: {"1", "2"} <= set(inbox.rows))
            await job.stop()
        assert len(told(caplog)) == (run == 2)
        if run == 1:
            inbox.put("a", "something else")
    assert (
        f"{inbox.directory}/a, read to the end before the checkpoint, is not what it was"
        in told(caplog)[0]
    )
    assert sorted(inbox.rows) == ["1", "2", "run 0", "run 1", "run 2"]


async def test_one_source_in_two_places_of_a_flow_keeps_their_files_apart(
    inbox: Inbox, tmp_path: Path
) -> None:
    """The knowledge of a checkpoint about a file in one place, and about its cuts, says nothing
    about the other place.
    """

    def twice(first: Any, second: Any) -> af.Flow:
        made = af.Flow("twice")
        for uid, source in (("first", first), ("second", second)):
            made.source(source, uid=uid).map(lambda line, uid=uid: f"{uid} {line}").sink(
                inbox.rows.append
            )
        return made

    def source(directory: Path, split_bytes: int) -> Any:
        return af.io.lines(directory, discover_every=EVERY, split_bytes=split_bytes)

    lines = [f"line {n}" for n in range(6)]
    inbox.put("a", *lines)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "z").write_text("z\n")
    async with twice(source(inbox.directory, 10), source(elsewhere, 10)).run(
        checkpoints=tmp_path / "store", every="1h"
    ) as job:
        await eventually(lambda: len(inbox.rows) == len(lines) + 1)
        await job.stop()
    inbox.rows.remove("second z")
    both = source(inbox.directory, SPLIT_BYTES)
    async with twice(both, both).run(checkpoints=tmp_path / "store", every="1h") as job:
        for n in range(3):
            inbox.put(f"b{n}", f"end {n}")
            # Awaited in this turn.
            ends = {f"first end {n}", f"second end {n}"}
            await eventually(lambda: ends <= set(inbox.rows))  # noqa: B023
        await job.stop()
    assert sorted(inbox.rows) == sorted(
        f"{uid} {line}"
        for uid in ("first", "second")
        for line in [*lines, "end 0", "end 1", "end 2"]
    )


async def test_two_runs_of_a_flow_at_once_find_the_same_files_each(inbox: Inbox) -> None:
    """A run that begins forgets nothing for another, and each finds all."""
    made = flow(inbox)
    inbox.put("a", "1")
    async with made.run():
        await eventually(lambda: len(inbox.rows) == 1)
        async with made.run():
            await eventually(lambda: len(inbox.rows) == 2)
            inbox.put("b", "2")
            await eventually(lambda: len(inbox.rows) == 4)
    assert inbox.rows == ["1", "1", "2", "2"]


def once_each(rows: list[str]) -> list[str]:
    """Returns the rows that existed before the file grew, and checks that no row is repeated.

    What was added is read by a last part whose turn had not come yet, and not by others.
    """
    assert len(set(rows)) == len(rows)
    return sorted(row for row in rows if "more" not in row)


@given(
    size=st.integers(0, 60),
    split_bytes=st.integers(1, 20),
    grows_by=st.integers(0, 40),
    later_split_bytes=st.integers(1, 20),
    data=st.data(),
)
def test_rest_of_a_file_is_read_once_for_any_parts_in_a_checkpoint(
    size: int, split_bytes: int, grows_by: int, later_split_bytes: int, data: st.DataObject
) -> None:
    """Some of the parts may have reached no subtask when it was taken: of a file that was dealt
    to several.
    """
    before = parts_of(size, split_bytes)
    known = data.draw(st.lists(st.sampled_from(before), unique=True))
    finder = finder_of(parts_of(size + grows_by, later_split_bytes))
    old_release = data.draw(st.booleans())
    former = [
        SplitState(part.id, None, tuple(part)[: 4 if old_release else None]) for part in known
    ]
    _, left = finder.recognise(former, [])
    given_ids = {split.id for split in former}
    later = [FilePart(*split.payload) for split in left if split.id not in given_ids]
    assert len({split.id for split in left}) == len(left)
    reached = 0
    for start, end in sorted((part.start, part.end) for part in [*known, *later]):
        assert start == reached, "no gap, no overlap"
        reached = -1 if end is None else end
    assert reached == -1, "to the end of the file"


def parts_of(size: int, split_bytes: int) -> list[FilePart]:
    starts = range(0, size, split_bytes)
    if len(starts) < 2:
        return [FilePart("a")]
    return [
        FilePart("a", start, None if start == starts[-1] else start + split_bytes)
        for start in starts
    ]


def finder_of(parts: Sequence[FilePart]) -> FoundFiles:
    """Returns a finder that has found a file "a" and cut it into `parts`."""
    finder = FoundFiles(
        "a",
        lambda host, path, size: None,  # type: ignore[arg-type, return-value]
        what="lines('a')",
        discover_every="1s",
    )
    finder._keep("a", (0, 0), parts)
    return finder


async def test_a_literal_name_that_looks_like_a_part_is_a_file_of_its_own(
    inbox: Inbox, tmp_path: Path
) -> None:
    inbox.put("a", "1")
    inbox.put("a@8", "2")
    async with flow(inbox).run(checkpoints=tmp_path / "store", every="1h") as job:
        await eventually(lambda: len(inbox.rows) == 2)
        await job.stop()
    inbox.put("b@8", "3")
    async with flow(inbox).run(checkpoints=tmp_path / "store", every="1h"):
        inbox.put("b", "4")
        await eventually(lambda: len(inbox.rows) == 4)
    assert sorted(inbox.rows) == ["1", "2", "3", "4"]


FOLLOWS, DISCOVERS, ENDS = (
    {"follow": True, "every": EVERY},
    {"discover_every": EVERY},
    dict[str, Any](),
)


@pytest.mark.parametrize(
    "before, after", [(FOLLOWS, DISCOVERS), (FOLLOWS, ENDS), (DISCOVERS, FOLLOWS)], ids=str
)
async def test_a_source_that_follows_now_or_does_not_any_more_is_refused_by_name(
    inbox: Inbox, tmp_path: Path, before: dict[str, Any], after: dict[str, Any]
) -> None:
    def made(options: dict[str, Any]) -> af.Flow:
        one = af.Flow("changed")
        one.source(af.io.lines(inbox.directory, **options), uid="lines").sink(inbox.rows.append)
        return one

    inbox.put("a", "1")
    async with made(before).run(checkpoints=tmp_path / "store", every="1h") as job:
        await eventually(lambda: inbox.rows == ["1"])
        inbox.put("b", "2")
        await eventually(lambda: inbox.rows == ["1", "2"])
        await job.stop()
    how = "with" if before is FOLLOWS else "without"
    with pytest.raises(
        RestoreError,
        match=f"the checkpoint was taken {how} follow=True, which keeps other positions",
    ):
        async with made(after).run(
            checkpoints=tmp_path / "store", every="1h", restart=af.no_restart()
        ) as job:
            await job.wait()


# Parquet and Arrow.


def write_parquet(path: Path, numbers: Sequence[int]) -> None:
    pq.write_table(pa.table({"n": numbers}), path, row_group_size=2)


def write_arrow(path: Path, numbers: Sequence[int]) -> None:
    table = pa.table({"n": numbers})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)


FORMATS = pytest.mark.parametrize(
    "make, write",
    [(af.io.parquet, write_parquet), (af.io.arrow, write_arrow)],
    ids=["parquet", "arrow"],
)
Make = Callable[..., Any]
Write = Callable[[Path, Sequence[int]], None]


@FORMATS
@pytest.mark.parametrize("parallelism", [1, 3])
async def test_parquet_and_arrow_files_that_come_later_are_read_once_each_over_restarts(
    tmp_path: Path, make: Make, write: Write, parallelism: int
) -> None:
    inbox, rows = tmp_path / "in", list[int]()
    inbox.mkdir()

    def put(name: str, *numbers: int) -> None:
        write(inbox / f".{name}", numbers)
        (inbox / f".{name}").rename(inbox / name)

    def made(parallelism: int) -> af.Flow:
        one = af.Flow("columns", parallelism=parallelism)
        one.source(make(inbox, discover_every=EVERY), uid="in").map(lambda row: row["n"]).sink(
            rows.append
        )
        return one

    put("a", 0, 1, 2, 3, 4)
    async with made(2).run(checkpoints=tmp_path / "store", every="1h") as job:
        await eventually(lambda: len(rows) == 5)
        put("b", 5, 6, 7)
        put("none")
        await eventually(lambda: len(rows) == 8)
        await job.stop()
    put("c", 8)
    async with made(parallelism).run(checkpoints=tmp_path / "store", every="1h"):
        await eventually(lambda: len(rows) == 9)
        put("d", 9, 10)
        await eventually(lambda: len(rows) == 11)
    assert sorted(rows) == list(range(11))


@FORMATS
async def test_a_file_that_is_not_complete_keeps_no_other_from_being_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, make: Make, write: Write
) -> None:
    """It is tried again at every look, and reported when it has changed."""
    inbox, rows = tmp_path / "in", list[int]()
    inbox.mkdir()
    write(tmp_path / "whole", [1, 2, 3])
    content = (tmp_path / "whole").read_bytes()
    (inbox / "a").write_bytes(content[:-8])
    flow = af.Flow("columns")
    flow.source(make(inbox, discover_every=EVERY)).map(lambda row: row["n"]).sink(rows.append)
    async with flow.run():
        write(inbox / ".b", [4])
        (inbox / ".b").rename(inbox / "b")
        await eventually(lambda: rows == [4])
        assert len(told(caplog)) == 1
        assert (
            f"{inbox}/a cannot be opened now, and is tried again: MalformedInput("
            in told(caplog)[0]
        )
        (inbox / "a").write_bytes(content)
        await eventually(lambda: len(rows) == 4)
    assert rows == [4, 1, 2, 3]


@FORMATS
@pytest.mark.parametrize("how", ["replaced", "gone"])
async def test_a_file_of_columns_that_was_replaced_or_is_gone_is_refused(
    tmp_path: Path, make: Make, write: Write, how: str
) -> None:
    path = tmp_path / "a"
    write(path, range(20))
    source = make(path)
    async with system_context() as ctx:
        (split,) = await source.discover(ctx.host)
        reader = source.reader(ctx)
        await reader.open([split])
        assert len(await take(reader, 3)) == 3
        restored = Split(split.id, reader.position(split.id), split.payload)
        await reader.close()
        assert len(await read_all(source, ctx, [restored])) == 17
        path.unlink()
        if how == "replaced":
            write(path, range(100, 122))
        message = (
            "another one has its name now"
            if how == "replaced"
            else "is not there any more: put it back"
        )
        with pytest.raises(RestoreError, match=f"{path} was begun, and {message}"):
            await read_all(source, ctx, [restored])


@FORMATS
async def test_a_file_of_columns_that_was_replaced_before_it_was_begun_is_read_to_its_own_end(
    tmp_path: Path, make: Make, write: Write
) -> None:
    """The same holds for a file of lines. This one has more pages than the one that was found."""
    path = tmp_path / "a"
    write(path, range(3))
    source = make(path)
    async with system_context() as ctx:
        splits = await source.discover(ctx.host)
        path.unlink()
        write(path, range(100, 300))
        assert len(await read_all(source, ctx, splits)) == 200


async def test_a_part_of_a_parquet_file_that_was_replaced_before_it_was_begun_is_refused(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a"
    pq.write_table(pa.table({"n": list(range(20))}), path, row_group_size=5)
    source = af.io.parquet(path, split_bytes=1)
    async with system_context() as ctx:
        splits = await source.discover(ctx.host)
        assert len(splits) == 4
        assert len(await read_all(source, ctx, splits[2:])) == 10
        pq.write_table(pa.table({"n": list(range(100, 130))}), path, row_group_size=5)
        with pytest.raises(RestoreError, match=f"{path} was cut, and another one has its name now"):
            await read_all(source, ctx, splits[2:])
        earlier = [Split(split.id, None, tuple(split.payload)[:3]) for split in splits]
        assert len(await read_all(source, ctx, earlier)) == 20, (
            "of an earlier release, which knew no more"
        )


async def test_an_archive_that_was_emptied_while_the_job_was_down_is_known_all_the_same(
    inbox: Inbox, tmp_path: Path
) -> None:
    with zipfile.ZipFile(inbox.directory / "a.zip", "w") as archive:
        archive.writestr("one", "1\n")
    store = f"file://{tmp_path}/store"
    async with flow(inbox).run(checkpoints=store) as job:
        await eventually(lambda: inbox.rows == ["1"])
        await job.stop()
    with zipfile.ZipFile(inbox.directory / "a.zip", "w"):
        pass
    inbox.put("b", "2")
    async with flow(inbox).run(checkpoints=store):
        await eventually(lambda: inbox.rows == ["1", "2"])


async def test_an_archive_that_is_not_complete_keeps_no_other_from_being_read(inbox: Inbox) -> None:
    with zipfile.ZipFile(inbox.directory / ".a", "w") as archive:
        archive.writestr("one", "1\n")
        archive.writestr("two", "2\n")
    content = (inbox.directory / ".a").read_bytes()
    (inbox.directory / "a.zip").write_bytes(content[:-10])
    async with flow(inbox).run():
        inbox.put("b", "3")
        await eventually(lambda: inbox.rows == ["3"])
        (inbox.directory / "a.zip").write_bytes(content)
        await eventually(lambda: len(inbox.rows) == 3)
    assert sorted(inbox.rows) == ["1", "2", "3"]


@FORMATS
def test_options_for_reading_are_refused_where_they_mean_nothing(make: Make, write: Write) -> None:
    with pytest.raises(GraphError, match="discover_every is '0s', expected more than nothing"):
        make("in", discover_every="0s")
    rows = af.Flow("f").source(make("in", discover_every="1s"))
    with pytest.raises(
        GraphError, match=r"'in/'\) writes into the directory that (parquet|arrow)\('in'\) reads"
    ):
        rows.sink(make("in/"))
    with pytest.raises(GraphError, match="discover_every= is for files, and a table was given"):
        af.io.arrow(pa.table({"n": [1]}), discover_every="1s")


@pytest.mark.parametrize(
    "sink, option",
    [
        (af.io.lines("out", follow=True), "follow="),
        (af.io.jsonl("out", discover_every="1s"), "discover_every="),
        (af.io.csv("out", discover_every="1s"), "discover_every="),
        (af.io.parquet("out", discover_every="1s"), "discover_every="),
        (af.io.arrow("out", discover_every="1s"), "discover_every="),
    ],
    ids=str,
)
def test_a_sink_with_an_option_of_reading_is_refused(sink: Any, option: str) -> None:
    with pytest.raises(
        GraphError,
        match=rf"\('out'\) stands as a sink, and {option} is about reading: leave it out",
    ):
        af.Flow("f").source([1]).sink(sink)
