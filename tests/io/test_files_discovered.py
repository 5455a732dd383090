"""Directories that are looked into again and again: `discover_every` of file sources, over
restarts and at another parallelism.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

import aioflow as af
from aioflow.checkpoint.source_state import SplitState
from aioflow.core.errors import GraphError, RestoreError
from aioflow.operators.source import Split

pytestmark = pytest.mark.timeout(120)

EVERY = "5ms"


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


class Inbox:
    """A directory that files are moved into, and what a flow made of their lines."""

    def __init__(self, directory: Path, *, parallelism: int = 2, name: str = "inbox") -> None:
        self.directory = directory
        self.rows: list[str] = []
        self.parallelism = parallelism
        self.name = name
        self.fails_at = ""
        directory.mkdir(exist_ok=True)

    def put(self, name: str, *lines: str) -> None:
        """Written beside, and moved into place when it is complete."""
        hidden = self.directory / f".{name}"
        hidden.write_text("".join(f"{line}\n" for line in lines))
        hidden.rename(self.directory / name)

    def flow(self, **options: Any) -> af.Flow:
        flow = af.Flow(self.name, parallelism=self.parallelism)
        lines = flow.source(
            af.io.lines(self.directory, discover_every=EVERY), uid="lines", **options
        )
        lines.map(self._checked).sink(self.rows.append)
        return flow

    def _checked(self, line: str) -> str:
        if line == self.fails_at:
            self.fails_at = ""
            raise ValueError("planted")
        return line


@pytest.fixture
def inbox(tmp_path: Path) -> Inbox:
    return Inbox(tmp_path / "in")


async def test_files_that_come_while_the_flow_runs_are_read_once_each(inbox: Inbox) -> None:
    inbox.put("a", "1", "2")
    async with inbox.flow().run() as job:
        await eventually(lambda: len(inbox.rows) == 2)
        for index in range(10):
            inbox.put(f"b{index}", f"{index}/1", f"{index}/2")
        await eventually(lambda: len(inbox.rows) == 22)
        assert job.status is af.JobStatus.RUNNING, "it does not end by itself"
    assert sorted(inbox.rows) == sorted(
        ["1", "2", *(f"{index}/{line}" for index in range(10) for line in (1, 2))]
    )


async def test_an_empty_directory_and_one_that_does_not_exist_yet_are_waited_for(
    tmp_path: Path,
) -> None:
    rows: list[str] = []
    flow = af.Flow("late")
    flow.source(af.io.lines(tmp_path / "later", discover_every=EVERY)).sink(rows.append)
    async with flow.run():
        (tmp_path / "later").mkdir()
        (tmp_path / "new").write_text("1\n")
        (tmp_path / "new").rename(tmp_path / "later" / "a")
        await eventually(lambda: rows == ["1"])


@pytest.mark.parametrize("pattern", ["", "/*.csv", "/deep/*/a*"])
async def test_a_directory_that_does_not_exist_is_waited_for_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, pattern: str
) -> None:
    """Its name may be mistyped.

    Again only after it was there; an empty one is nothing to warn of.
    """
    inbox = tmp_path / "imbox" / "deep" if "deep" in pattern else tmp_path / "imbox"
    source = af.io.lines(f"{tmp_path}/imbox{pattern}", discover_every=EVERY)

    def warnings() -> list[str]:
        return [
            record.getMessage()
            for record in caplog.records
            if record.name == "aioflow.io.files.found_files"
        ]

    for _ in range(3):
        assert await source.discover() == []
    assert warnings() == [
        f"lines('{tmp_path}/imbox{pattern}'): there is no '{inbox}' yet; it is waited for, as "
        "discover_every= says"
    ]
    inbox.mkdir(parents=True)
    assert await source.discover() == []
    assert len(warnings()) == 1
    inbox.rmdir()
    for _ in range(3):
        assert await source.discover() == []
    assert len(warnings()) == 2


async def test_unfinished_file_under_a_name_with_a_dot_is_left_alone(
    inbox: Inbox,
) -> None:
    (inbox.directory / ".half").write_text("half a li")
    async with inbox.flow().run():
        inbox.put("a", "1")
        await eventually(lambda: inbox.rows == ["1"])
        (inbox.directory / ".half").write_text("half a line\n")
        (inbox.directory / ".half").rename(inbox.directory / "half")
        await eventually(lambda: len(inbox.rows) == 2)
    assert inbox.rows == ["1", "half a line"]


async def test_a_glob_finds_only_what_it_matches(inbox: Inbox) -> None:
    rows: list[Any] = []
    flow = af.Flow("glob")
    flow.source(af.io.csv(f"{inbox.directory}/*.csv", discover_every=EVERY)).sink(rows.append)
    async with flow.run():
        inbox.put("a.txt", "n", "0")
        inbox.put("a.csv", "n", "1")
        await eventually(lambda: len(rows) == 1)
        inbox.put("b.csv", "n", "2")
        await eventually(lambda: len(rows) == 2)
    assert rows == [{"n": "1"}, {"n": "2"}]


@pytest.mark.parametrize("parallelism", [1, 2, 3])
async def test_a_stopped_job_goes_on_with_what_it_has_not_read(
    inbox: Inbox, tmp_path: Path, parallelism: int
) -> None:
    """Positions, and which files are known, are in the savepoint: also at another parallelism."""
    store = tmp_path / "store"
    inbox.put("a", "1")
    async with inbox.flow().run(checkpoints=store, every="1h") as job:
        await eventually(lambda: len(inbox.rows) == 1)
        inbox.put("b", "2", "3")
        await eventually(lambda: len(inbox.rows) == 3)
        await job.stop()
    inbox.put("c", "4")
    (inbox.directory / "a").unlink()  # Read, and a savepoint says so.
    inbox.parallelism = parallelism
    async with inbox.flow().run(checkpoints=store, every="1h"):
        await eventually(lambda: len(inbox.rows) == 4)
        inbox.put("d", "5")
        await eventually(lambda: len(inbox.rows) == 5)
    async with inbox.flow().run(checkpoints=store, every="1h"):
        inbox.put("e", "6")
        await eventually(lambda: len(inbox.rows) == 6)
    assert inbox.rows == ["1", "2", "3", "4", "5", "6"]


async def test_a_file_is_the_same_however_its_path_is_spelled(
    inbox: Inbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over restarts: with dots, with a slash at its end, with a detour, as a glob, absolute, and
    back again.
    """
    monkeypatch.chdir(tmp_path)
    spellings: list[str | Path] = ["in", "./in", "in/", "in/../in", "in/*", inbox.directory]
    spellings += [f"{inbox.directory}/../in", f"../{tmp_path.name}/in", "in"]
    for number, spelling in enumerate(spellings):
        inbox.put(f"f{number}", str(number))
        flow = af.Flow("spelled", parallelism=2)
        flow.source(af.io.lines(spelling, discover_every=EVERY), uid="lines").sink(
            inbox.rows.append
        )
        async with flow.run(checkpoints=tmp_path / "store", every="1h") as job:
            await eventually(lambda number=number: str(number) in inbox.rows)  # type: ignore[misc]
            inbox.put(f"g{number}", f"late {number}")
            await eventually(
                lambda number=number: f"late {number}" in inbox.rows  # type: ignore[misc]
            )
            await job.stop()
    assert sorted(inbox.rows) == sorted(
        text for number in range(len(spellings)) for text in (str(number), f"late {number}")
    )


def test_a_checkpoint_that_knows_a_file_twice_is_read_all_the_same() -> None:
    """Earlier runs with two spellings left such checkpoints: one entry gets the one spelling, the
    other stays beside it.
    """
    assert respelled_ids("./in/a", "in/a", "in//b", "./in/b") == [
        "./in/a",
        "in/a",
        "in/b",
        "./in/b",
    ]
    assert respelled_ids("./in/a.zip!x/../y", "./in/a@64") == ["in/a.zip!x/../y", "in/a@64"]
    assert respelled_ids("./in/a", discover_every=None) == ["./in/a"], (
        "what was there when it began stays as it was cut"
    )


def respelled_ids(*ids: str, discover_every: str | None = EVERY) -> list[str]:
    former = [SplitState(split_id, None, (split_id, 0, None, None)) for split_id in ids]
    return af.io.lines("in", discover_every=discover_every).finder.recognise(former, [])[0]


async def test_files_found_since_the_last_checkpoint_are_read_again_by_a_restart(
    inbox: Inbox, tmp_path: Path
) -> None:
    """Exactly once in the committed output, whichever subtask reads the file the second time."""
    out = tmp_path / "out"
    flow = af.Flow("restarted", parallelism=2)
    lines = flow.source(af.io.lines(inbox.directory, discover_every=EVERY), uid="lines")
    lines.map(inbox._checked).sink(af.io.lines(out), uid="out")
    seen = inbox.rows
    inbox.put("a", "1", "2")
    async with flow.run(
        checkpoints=tmp_path / "store", every="1h", restart=af.fixed_delay(1, "0s")
    ) as job:
        async with job.subscribe(lines, buffer=1000) as rows:

            async def watch() -> None:
                async for row in rows:
                    seen.append(row)

            watching = asyncio.get_running_loop().create_task(watch())
            await job.checkpoint()
            inbox.put("b", "3", "4")
            await eventually(lambda: "4" in seen)
            inbox.fails_at = "6"
            inbox.put("c", "5", "6", "7")
            await eventually(lambda: seen.count("7") >= 1 and seen.count("4") == 2)
            inbox.put("d", "8")
            await eventually(lambda: "8" in seen)
            await job.stop()
            await watching
    committed = [line for part in sorted(out.glob("part-*")) for line in part.read_text().split()]
    assert sorted(committed) == ["1", "2", "3", "4", "5", "6", "7", "8"]


async def test_a_file_that_vanished_before_it_was_read_fails_the_job_by_name(inbox: Inbox) -> None:
    """No file is skipped in silence.

    With an empty file in its place the job continues without it.
    """
    for index in range(8):
        inbox.put(f"f{index}", "x")
    flow = af.Flow("vanished")
    flow.source(Vanishing(inbox.directory, "f3")).sink(inbox.rows.append)
    with pytest.raises(
        FileNotFoundError,
        match="is gone before it was read: put it back, or an empty file in its place",
    ) as caught:
        await flow.execute()
    assert str(inbox.directory / "f3") in str(caught.value)


class Vanishing:
    """Files of which one is deleted once it was found."""

    bounded = False
    discover_every = "1h"

    def __init__(self, directory: Path, victim: str) -> None:
        self._files = af.io.lines(directory, discover_every="1h")
        self._victim = directory / victim

    async def discover(self) -> list[Split]:
        found = await self._files.discover()
        self._victim.unlink()
        return found

    def reader(self, ctx: Any) -> Any:
        return self._files.reader(ctx)


async def test_a_file_that_vanished_while_it_was_read_refuses_the_restore_by_name(
    inbox: Inbox, tmp_path: Path
) -> None:
    inbox.put("a", *(str(number) for number in range(50_000)))
    source = af.io.lines(inbox.directory, discover_every=EVERY)

    def flow() -> af.Flow:
        made = af.Flow("begun")
        made.source(source, uid="lines").throttle(1000, per="100ms").sink(inbox.rows.append)
        return made

    async with flow().run(checkpoints=tmp_path / "store", every="1h") as job:
        await eventually(lambda: len(inbox.rows) > 0)
        await job.stop()
    assert len(inbox.rows) < 50_000
    (inbox.directory / "a").unlink()
    with pytest.raises(
        RestoreError, match=r"/in/a was read up to byte \d+, and is not there any more: put it back"
    ):
        async with flow().run(
            checkpoints=tmp_path / "store", every="1h", restart=af.no_restart()
        ) as job:
            await job.wait()


async def test_subtasks_without_a_file_do_not_hold_event_time_back(inbox: Inbox) -> None:
    """Windows close although one subtask has nothing to read, and for ever will have nothing."""
    inbox.parallelism = 3
    results: list[Any] = []
    flow = af.Flow("windows", parallelism=3)
    strategy: Any = af.WatermarkStrategy.monotonous_timestamps(timestamp=int)
    lines = flow.source(af.io.lines(inbox.directory, discover_every=EVERY), watermarks=strategy)
    lines.key_by(lambda _: "all").window(af.tumbling("10ms")).aggregate(af.count()).sink(
        results.append
    )
    async with flow.run():
        inbox.put("a", "1", "2", "11")
        await eventually(lambda: len(results) == 1)
        inbox.put("b", "12", "25")
        await eventually(lambda: len(results) == 2)
    assert [(row.start, row.value) for row in results] == [(0, 2), (10, 2)]


@pytest.mark.parametrize(
    "options, message",
    [
        (
            {"follow": True, "discover_every": "1s"},
            "follow=True finds new files too: leave out discover_every=, or follow=",
        ),
        ({"discover_every": "0s"}, "discover_every is '0s', expected more than nothing"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        af.io.lines("somewhere", **options)


@pytest.mark.parametrize("target", ["in", "./in/", "x/../in", "{cwd}/in"])
def test_a_sink_into_the_directory_that_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    """The source would read the output of the sink, for ever."""
    monkeypatch.chdir(tmp_path)
    target = target.format(cwd=tmp_path)
    flow = af.Flow("circle")
    rows = flow.source(af.io.lines("in", discover_every=EVERY)).map(str.strip).key_by(len)
    with pytest.raises(
        GraphError,
        match=re.escape(f"jsonl({target!r}) writes into the directory that lines('in') reads"),
    ):
        rows.sink(af.io.jsonl(target))


def test_only_a_sink_whose_files_the_source_would_find_is_refused() -> None:
    flow = af.Flow("straight")
    rows = flow.source(af.io.lines("in", discover_every=EVERY))
    rows.sink(af.io.lines("out")).sink(af.io.lines("in/done"))
    flow.source(af.io.lines("out", discover_every=EVERY)).sink(af.io.lines("next"))
    flow.source(af.io.lines("in")).sink(af.io.lines("in"))
    flow.source(af.io.lines("in/*.csv", discover_every=EVERY)).sink(af.io.lines("in"))
    with pytest.raises(
        GraphError, match=r"lines\('in'\) writes into the directory that lines\('in/\*.txt'\) reads"
    ):
        flow.source(af.io.lines("in/*.txt", discover_every=EVERY)).sink(af.io.lines("in"))


@pytest.mark.parametrize(
    ("pattern", "directory", "is_refused"),
    [
        ("in/**/*.txt", "in/done", True),
        ("in/**/*.txt", "in", True),
        ("in/**", "in/a/b", True),
        ("*/*", "out", True),
        ("in/**/part-*", "in/a/b", True),
        ("in/**/*.txt", "out", False),
        ("in/**/*.txt", "in/_done", False),
        ("in/*/new/*.txt", "in/a", False),
        ("in/**/*.csv", "in/done", False),
    ],
)
def test_a_pattern_that_reaches_into_directories_may_reach_the_sink(
    pattern: str, directory: str, is_refused: bool
) -> None:
    rows = af.Flow("circle").source(af.io.lines(pattern, discover_every=EVERY))
    with pytest.raises(GraphError, match="read again, for ever") if is_refused else nullcontext():
        rows.sink(af.io.lines(directory))
