"""The journal of a push source or webhook: no acknowledged element is lost, at any crash."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from operator import le
from pathlib import Path
from typing import Any

import aiohttp
import pytest

import aioflow as af
from aioflow.core.system_host import SystemHost
from aioflow.io.journal import DIGEST_BYTES, FRAME_BYTES, FRAME_START, HEADER, Earlier, Journal
from aioflow.io.pushing import PushInlet
from aioflow.testing import simulate
from aioflow.testing.simulation import SimulatedHost
from tests.integration.clusters import ROOT
from tests.io.servers import free_port

FOLDER = "/shared/journal"


def journal(
    folder: Path | str = FOLDER, key: bytes | None = None, earlier: Earlier = Earlier.READ
) -> Journal:
    return Journal(str(folder), "push source 'hits'", key, earlier)


@pytest.mark.parametrize("frame_bytes", [FRAME_BYTES, 1], ids=["one frame", "many frames"])
@pytest.mark.parametrize("how", ["kill", "power"])
def test_no_acknowledged_element_is_lost_over_four_crashes(
    how: str, frame_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each life reads what no checkpoint covers, in order and once, then writes more of it."""
    monkeypatch.setattr("aioflow.io.journal.FRAME_BYTES", frame_bytes)
    replayed = 0
    for seed in range(25):
        accepted: list[int] = []
        """All elements so far, by number: written, and not yet acknowledged."""
        acknowledged = covered = 0

        async def life(host: SimulatedHost) -> None:
            nonlocal acknowledged, covered, replayed, accepted
            own = journal()
            start = covered
            first, elements = await own.load(host, start)
            assert first == start
            values = [value for _, value in elements]
            replayed += len(values)
            assert values == accepted[start : start + len(values)]
            assert start + len(values) >= acknowledged
            accepted = accepted[: start + len(values)]
            acknowledged = len(accepted)

            async def put_one(n: int) -> None:
                nonlocal acknowledged
                own.add([n], None)
                await own.written()
                acknowledged = max(acknowledged, n + 1)

            putting: list[asyncio.Future[None]] = []
            while True:
                for _ in range(host.rng.randrange(1, 6)):
                    accepted.append(len(accepted))
                    putting.append(asyncio.ensure_future(put_one(len(accepted) - 1)))
                await asyncio.sleep(host.rng.uniform(0.0, 0.01))
                if host.rng.random() < 0.3:
                    covered = host.rng.randrange(covered, len(accepted) + 1)
                    own.covered(covered)

        async def main(host: SimulatedHost) -> None:
            for _ in range(4):
                host.sim.spawn("program", life, machine="a")
                await asyncio.sleep(host.rng.uniform(0.05, 0.5))
                getattr(host.sim, how)("program")

        assert simulate(main, seed).errors == []
    assert replayed > 100, "nothing was read again, so the test tests nothing"


async def filled(folder: Path, count: int, key: bytes | None = None) -> Path:
    """Writes `count` elements of a run that dies. Returns the file."""
    own = journal(folder, key)
    host = SystemHost()
    await own.load(host, 0)
    for n in range(count):
        own.add([f"element {n}"], [n * 10])
        await own.written()
    await host.close()
    (file,) = folder.iterdir()
    return file


async def read(folder: Path, start: int = 0, **options: Any) -> list[Any]:
    host = SystemHost()
    own = journal(folder, **options)
    try:
        _, elements = await own.load(host, start)
        await own.close()
    finally:
        await host.close()
    return elements


async def test_elements_come_back_with_their_timestamps_from_the_restored_position_on(
    tmp_path: Path,
) -> None:
    await filled(tmp_path / "journal", 5)
    assert await read(tmp_path / "journal", 3) == [(30, "element 3"), (40, "element 4")]
    assert await read(tmp_path / "journal", 9) == []


async def test_a_frame_cut_off_by_a_crash_is_dropped_and_damage_before_it_is_refused(
    tmp_path: Path,
) -> None:
    file = await filled(tmp_path / "journal", 3)
    whole = file.read_bytes()
    size = len(whole) // 3
    for cut in range(1, size):
        file.write_bytes(whole[:-cut])
        assert len(await read(tmp_path / "journal")) == 2
        for path in (tmp_path / "journal").iterdir():
            assert path == file
    for at in range(2 * size):  # Also in a length, which then points behind the end.
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 0x40]) + whole[at + 1 :])
        with pytest.raises(af.RestoreError, match="is damaged at byte"):
            await read(tmp_path / "journal")


async def test_a_loss_of_power_may_leave_zeros_from_a_sector_of_the_last_frame_on(
    tmp_path: Path,
) -> None:
    file = await filled(tmp_path / "journal", 40)
    whole = file.read_bytes()
    at, within_header = 0, 0
    for number in range(40):
        head = whole[at + DIGEST_BYTES : at + FRAME_START]
        end = at + FRAME_START + HEADER.unpack_from(head)[0]
        for sector in range((at // 512 + 1) * 512, end, 512):
            file.write_bytes(whole[:sector] + bytes(end - sector))
            assert len(await read(tmp_path / "journal")) == number
            within_header += at + DIGEST_BYTES < sector < at + FRAME_START
        at = end
    assert at == len(whole)
    assert within_header, "no header crosses sectors, so the test tests less than it says"


async def test_a_missing_file_is_refused_and_names_what_is_missing(tmp_path: Path) -> None:
    folder = tmp_path / "journal"
    host = SystemHost()
    for start in (0, 2, 4):
        own = journal(folder)
        await own.load(host, 0)
        for n in (start, start + 1):
            own.add([n], None)
        await own.written()
    await host.close()
    first, second, _ = sorted(folder.iterdir())
    assert len(await read(folder)) == 6
    second.unlink()
    with pytest.raises(af.RestoreError, match="begins with element 4, expected 2"):
        await read(folder)
    first.unlink()
    assert await read(folder, 4) == [(None, 4), (None, 5)]


async def test_another_key_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "journal"
    await filled(folder, 2, b"k" * 32)
    assert len(await read(folder, key=b"k" * 32)) == 2
    for key in (None, b"x" * 32):
        with pytest.raises(af.RestoreError, match="written with another checkpoint_key"):
            await read(folder, key=key)


class FullDisk:
    """Writes half of it, then says that there is no space. Waits for `slow`, if that is cleared."""

    def __init__(self, host: SystemHost) -> None:
        self.host, self.full = host, True
        self.slow = asyncio.Event()
        self.slow.set()
        self.fs = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self.host.fs, name)

    async def append(self, path: str, data: bytes, *, sync: bool = False) -> None:
        await self.slow.wait()
        if self.full:
            await self.host.fs.append(path, data[: len(data) // 2], sync=sync)
            raise OSError(28, "No space left on device")
        await self.host.fs.append(path, data, sync=sync)


async def test_a_full_disk_fails_the_put_and_the_next_one_writes_both(tmp_path: Path) -> None:
    host = SystemHost()
    disk: Any = FullDisk(host)
    own = journal(tmp_path / "journal")
    await own.load(disk, 0)
    for n in range(2):
        own.add([n], None)
        with pytest.raises(af.CheckpointError, match=r"cannot be written: .*No space left"):
            await own.written()
    disk.full = False
    own.add([2], None)
    await own.written()
    await own.close()
    await host.close()
    assert [value for _, value in await read(tmp_path / "journal")] == [0, 1, 2]


@pytest.mark.parametrize("full", [True, False])
async def test_put_many_returns_only_with_its_elements_on_disk_after_a_failed_write(
    tmp_path: Path, full: bool
) -> None:
    host = SystemHost()
    disk: Any = FullDisk(host)
    own = journal(tmp_path / "journal")
    inlet = PushInlet[int](2, journal=own)
    await inlet.attach(None, True, True, disk)
    putting = asyncio.ensure_future(inlet.put_many([0, 1]))  # Waits for room after both.
    await asyncio.sleep(0)
    with pytest.raises(af.CheckpointError, match="No space left"):
        await own.written()
    disk.full = full
    inlet.poll(2)
    if full:
        with pytest.raises(af.CheckpointError, match="No space left"):
            await putting
    else:
        await putting
    await own.close()
    await host.close()
    assert len(await read(tmp_path / "journal")) == (0 if full else 2)


async def test_a_write_that_a_checkpoint_has_begun_again_is_waited_for(tmp_path: Path) -> None:
    host = SystemHost()
    disk: Any = FullDisk(host)
    own = journal(tmp_path / "journal")
    await own.load(disk, 0)
    own.add([0, 1], None)
    with pytest.raises(af.CheckpointError, match="No space left"):
        await own.written()
    disk.full = False
    disk.slow.clear()
    own.covered(1)  # It writes again what has failed.
    await asyncio.sleep(0)
    waiting = asyncio.ensure_future(own.written())
    await asyncio.sleep(0.01)
    assert not waiting.done()
    disk.slow.set()
    await waiting
    await own.close()
    await host.close()


async def test_files_are_removed_once_a_checkpoint_covers_their_elements(tmp_path: Path) -> None:
    folder = tmp_path / "journal"
    host, own = SystemHost(), journal(folder)
    await own.load(host, 0)
    for n in range(6):
        own.add([n], None)
        await own.written()
        if n % 2:
            own.covered(n)
    await own.close()
    assert [value for _, value in await read(folder, 5)] == [5]
    assert len(list(folder.iterdir())) <= 2
    own.covered(6)
    await own.close()
    await host.close()
    assert list(folder.iterdir()) == []


async def test_files_that_a_checkpoint_covers_during_a_removal_are_removed_too(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "journal"
    host, own = SystemHost(), journal(folder)
    await own.load(host, 0)
    for n in range(3):
        own.add([n], None)
        await own.written()
        own.covered(n)
    own.covered(2)
    await asyncio.sleep(0)  # The removal runs.
    own.covered(3)
    await own.close()
    await host.close()
    assert list(folder.iterdir()) == []


async def test_timestamps_that_differ_from_those_of_the_journal_are_refused(tmp_path: Path) -> None:
    await filled(tmp_path / "journal", 2)
    host, own = SystemHost(), journal(tmp_path / "journal")
    own.add([1], None)
    with pytest.raises(af.RestoreError, match="give all of them timestamps, or none"):
        await own.load(host, 0)
    await own.close()
    await host.close()
    assert len(await read(tmp_path / "journal")) == 2


# Through a job.

flow = af.Flow("hits")
hits = flow.source(af.io.push(), uid="hits")
counts = hits.key_by(lambda page: page).count(uid="counts")


async def counted(job: af.Job, page: str = "a") -> int:
    n: int = await job.state(counts).get(page, default=0)
    return n


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    while not await condition():
        await asyncio.sleep(0.005)


SERVICE = """
import asyncio, sys
from tests.io.test_journal import counted, flow, hits

async def main() -> None:
    async with flow.run(checkpoints=sys.argv[1], every="200ms") as job:
        async def put() -> None:
            while True:
                await job.input(hits).put("a")
                sys.stdout.buffer.write(b"1")
                sys.stdout.buffer.flush()
        await asyncio.gather(*[put() for _ in range(8)])

asyncio.run(main())
"""


@pytest.mark.slow
async def test_a_service_killed_five_times_has_counted_every_acknowledged_put_once(
    tmp_path: Path,
) -> None:
    acknowledged, unsure = 0, 0
    for life in range(5):
        process = subprocess.Popen(
            [sys.executable, "-c", SERVICE, str(tmp_path)], stdout=subprocess.PIPE, cwd=ROOT
        )
        assert process.stdout is not None
        read_so_far = len(await asyncio.to_thread(process.stdout.read, 200 + 150 * life))
        os.kill(process.pid, signal.SIGKILL)
        read_so_far += len(await asyncio.to_thread(process.stdout.read))
        process.wait()
        process.stdout.close()
        acknowledged += read_so_far
        unsure += 8  # Written to disk by a put that could not say so.
    async with flow.run(checkpoints=tmp_path, every="200ms") as job:

        async def all_there() -> bool:
            return await counted(job) >= acknowledged

        await asyncio.wait_for(until(all_there), 60)
        await asyncio.sleep(0.1)
        assert acknowledged <= await counted(job) <= acknowledged + unsure
    assert acknowledged > 2_000


async def test_a_restart_within_the_program_reads_each_element_once(tmp_path: Path) -> None:
    failed = False

    def fails_once(page: str) -> str:
        nonlocal failed
        if page == "b" and not failed:
            failed = True
            raise RuntimeError("once")
        return page

    fails = af.Flow("fails")
    source = fails.source(af.io.push(), uid="in")
    rows = source.map(fails_once).key_by(lambda page: page).count(uid="counts")
    async with fails.run(
        checkpoints=tmp_path, every="100ms", restart=af.fixed_delay(3, "10ms")
    ) as job:
        for page in "aaabaa":
            await job.input(source).put(page)

        async def all_there() -> bool:
            n: int = await job.state(rows).get("a", default=0)
            return n >= 5

        await until(all_there)
        await asyncio.sleep(0.3)
        assert await job.state(rows).get("a") == 5
    assert failed


async def test_restore_none_refuses_elements_of_an_earlier_run_and_fresh_removes_them(
    tmp_path: Path,
) -> None:
    await abandoned(tmp_path)
    with pytest.raises(af.RestoreError, match="2 elements of an earlier run are in the journal"):
        async with flow.run(checkpoints=tmp_path, restore=None):
            pass
    async with flow.run(checkpoints=tmp_path, restore=None, fresh=True) as job:
        assert await counted(job) == 0
        await job.input(hits).put("a")
    async with flow.run(checkpoints=tmp_path) as job:
        assert await counted(job) == 1


async def abandoned(store: Path) -> None:
    """Runs the flow until two elements are in the journal, and no checkpoint covers them."""
    with suppress(KeyError):
        async with flow.run(checkpoints=store) as job:
            await job.input(hits).put("a")
            await job.input(hits).put("a")
            raise KeyError


async def test_a_run_reads_what_a_cancelled_one_had_acknowledged(tmp_path: Path) -> None:
    await abandoned(tmp_path)
    async with flow.run(checkpoints=tmp_path) as job:

        async def all_there() -> bool:
            return await counted(job) == 2

        await until(all_there)
    async with flow.run(checkpoints=tmp_path) as job:
        assert await counted(job) == 2
    assert list(tmp_path.rglob("journal/*/*")) == []


async def test_elements_of_a_source_whose_uid_has_changed_are_refused_and_not_lost(
    tmp_path: Path,
) -> None:
    await abandoned(tmp_path)
    renamed = af.Flow("hits")
    renamed.source(af.io.push(), uid="renamed").key_by(str).count(uid="counts")
    for options in ({}, {"restore": None}):
        with pytest.raises(af.RestoreError, match=r"journal/hits may hold .* its former uid="):
            async with renamed.run(checkpoints=tmp_path, **options):
                pass
    async with renamed.run(checkpoints=tmp_path, allow_non_restored=True) as job:
        await job.cancel()
    assert len(list(tmp_path.rglob("journal/hits/*"))) == 1
    async with renamed.run(checkpoints=tmp_path, restore=None, fresh=True):
        pass
    assert list(tmp_path.rglob("journal/hits/*")) == []


async def test_a_source_that_was_closed_does_not_read_again_what_a_checkpoint_covers(
    tmp_path: Path,
) -> None:
    """The program dies after the checkpoint, and before it has removed the covered file."""
    with suppress(KeyError):
        async with flow.run(checkpoints=tmp_path / "store", every="1h") as job:
            await job.input(hits).put_many("aaa")
            (folder,) = tmp_path.rglob("journal")
            shutil.copytree(folder, tmp_path / "kept")
            job.input(hits).close()
            await job.wait()
            raise KeyError
    shutil.copytree(tmp_path / "kept", folder, dirs_exist_ok=True)
    for expected in (3, 4):
        async with flow.run(checkpoints=tmp_path / "store", every="1h") as job:
            await job.input(hits).caught_up()
            assert await counted(job) == expected
            await job.input(hits).put("a")


async def test_without_a_journal_elements_are_in_memory_only(tmp_path: Path) -> None:
    plain = af.Flow("hits")
    source = plain.source(af.io.push(journal=False), uid="hits")
    rows = source.key_by(lambda page: page).count(uid="counts")
    for checkpoints in (tmp_path, "memory://journal-none"):
        with suppress(KeyError):
            async with plain.run(checkpoints=checkpoints) as job:
                await job.input(source).put("a")
                raise KeyError
        async with plain.run(checkpoints=checkpoints) as job:
            assert await job.state(rows).get("a", default=0) == 0
    assert list(tmp_path.rglob("journal")) == []


async def test_a_journal_may_be_elsewhere_than_the_checkpoints(tmp_path: Path) -> None:
    far = af.Flow("hits")
    source = far.source(af.io.push(journal=tmp_path / "wal"), uid="hits")
    rows = source.key_by(lambda page: page).count(uid="counts")
    with suppress(KeyError):
        async with far.run(checkpoints="memory://journal-elsewhere") as job:
            await job.input(source).put("a")
            raise KeyError
    async with far.run(checkpoints="memory://journal-elsewhere") as job:

        async def there() -> bool:
            n: int = await job.state(rows).get("a", default=0)
            return n == 1

        await until(there)
    with pytest.raises(ValueError, match=r"of 'hits' needs checkpoints=URL"):
        async with far.run():
            pass


async def test_two_stores_do_not_share_the_journal_of_one_directory(tmp_path: Path) -> None:
    far = af.Flow("hits")
    source = far.source(af.io.push(journal=tmp_path / "wal"), uid="hits")
    rows = source.key_by(lambda page: page).count(uid="counts")
    stores = [tmp_path / "a", tmp_path / "b"]
    with suppress(KeyError):
        async with far.run(checkpoints=stores[0]) as a, far.run(checkpoints=stores[1]) as b:
            for _ in range(3):
                await a.input(source).put("a")
                await b.input(source).put("b")
            raise KeyError
    for store, expected in zip(stores, ([3, 0], [0, 3]), strict=True):
        async with far.run(checkpoints=store) as job:
            # The elements were read, and may still be on their way to the count.
            await job.input(source).caught_up()

            async def are_counted(job: af.Job = job, expected: list[int] = expected) -> bool:
                found = [await job.state(rows).get(page, default=0) for page in "ab"]
                assert all(map(le, found, expected))
                return found == expected

            await until(are_counted)


async def test_a_value_that_cannot_travel_is_refused_at_the_put(tmp_path: Path) -> None:
    async with flow.run(checkpoints=tmp_path) as job:
        with pytest.raises(af.TypeNotSupported, match="push source 'hits'"):
            await job.input(hits).put(object())
        await job.input(hits).put("a")
    async with flow.run(checkpoints=tmp_path) as job:
        assert await counted(job) == 1


@pytest.mark.parametrize("journal", [True, "", 5, "s3://bucket/wal"])
def test_a_journal_that_is_no_directory_is_refused(journal: Any) -> None:
    with pytest.raises(af.GraphError, match=r"push\(journal="):
        af.io.push(journal=journal)
    assert json.dumps(repr(af.io.push()))


async def test_a_journal_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    here = af.Flow("hits")
    here.source(af.io.push(journal=tmp_path / "file"), uid="hits").sink(af.io.blackhole())
    with pytest.raises(af.CheckpointError, match=r"the journal .*file.* cannot be opened"):
        async with here.run(checkpoints="memory://journal-unopened"):
            pass


# Through a webhook.


def posted(port: int) -> tuple[af.Flow, af.KeyedStream[Any, Any]]:
    """Returns a flow that counts the numbers posted to `port`, and the stream with its counts."""
    hook = af.Flow("hook")
    numbers = hook.source(af.io.webhook(port=port), uid="hook")
    return hook, numbers.key_by(lambda number: number).count(uid="counts")


HOOK = """
import asyncio, sys
from tests.io.test_journal import posted

async def main() -> None:
    flow, _ = posted(int(sys.argv[2]))
    async with flow.run(checkpoints=sys.argv[1], every="200ms", workers=int(sys.argv[3])) as job:
        await job.wait()

if __name__ == "__main__":
    asyncio.run(main())
"""


async def post(session: aiohttp.ClientSession, port: int, number: int) -> int:
    async with session.post(f"http://127.0.0.1:{port}/", json=number) as response:
        return response.status


async def counts_of(job: af.Job, rows: Any, numbers: Iterable[int]) -> dict[int, int]:
    return {n: await job.state(rows).get(n, default=0) for n in numbers}


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
async def test_a_webhook_killed_five_times_has_counted_every_acknowledged_body_once(
    workers: int, tmp_path: Path
) -> None:
    port = free_port()
    acknowledged, tried = set[int](), itertools.count()
    program = tmp_path / "program.py"
    program.write_text(HOOK)
    command = [sys.executable, str(program), str(tmp_path / "store"), str(port), str(workers)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    async with aiohttp.ClientSession() as session:
        for life in range(5):
            process = subprocess.Popen(command, cwd=ROOT, env=environment)
            enough = len(acknowledged) + 100 + 20 * life

            async def sends(process: Any = process, enough: int = enough) -> None:
                while process.poll() is None:
                    number = next(tried)
                    try:
                        if await post(session, port, number) == 202:
                            acknowledged.add(number)
                    except aiohttp.ClientError:
                        await asyncio.sleep(0.02)  # Not started yet, or killed.
                    if len(acknowledged) >= enough and process.poll() is None:
                        process.kill()

            try:
                async with asyncio.timeout(60):
                    await asyncio.gather(*[sends() for _ in range(8)])
            finally:
                process.kill()
                process.wait()
    hook, rows = posted(port)
    numbers = range(next(tried))
    async with hook.run(checkpoints=tmp_path / "store") as job:

        async def all_there() -> bool:
            counts = await counts_of(job, rows, numbers)
            return all(counts[number] for number in acknowledged)

        await asyncio.wait_for(until(all_there), 60)
        await asyncio.sleep(0.1)
        counts = await counts_of(job, rows, numbers)
    assert {n for n in acknowledged if counts[n] != 1} == set()
    assert {n for n, count in counts.items() if count > 1} == set()
    assert len(acknowledged) >= 700


async def test_a_webhook_answers_after_its_body_is_in_the_journal(tmp_path: Path) -> None:
    port = free_port()
    hook, rows = posted(port)
    with suppress(KeyError):
        async with (
            hook.run(checkpoints=tmp_path, every="1h") as job,
            aiohttp.ClientSession() as session,
        ):
            for number in range(3):
                assert await post(session, port, number) == 202
                (folder,) = tmp_path.rglob("journal/hook")
                shutil.copytree(folder, tmp_path / f"kept-{number}")
            raise KeyError
    for number in range(3):
        elements = await read(tmp_path / f"kept-{number}")
        assert elements == [(None, n) for n in range(number + 1)]
    async with hook.run(checkpoints=tmp_path, every="1h") as job:

        async def all_there() -> bool:
            return await counts_of(job, rows, range(3)) == {0: 1, 1: 1, 2: 1}

        await until(all_there)
    assert list(tmp_path.rglob("journal/hook/*")) == []


async def test_a_webhook_answers_503_if_its_body_cannot_be_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    port = free_port()
    hook, rows = posted(port)
    async with (
        hook.run(checkpoints=tmp_path, every="1h") as job,
        aiohttp.ClientSession() as session,
    ):
        with monkeypatch.context() as patch:
            patch.setattr("aioflow.io.journal.Journal._encoded", full_disk)
            assert [await post(session, port, 1) for _ in range(2)] == [503, 503]
        assert await post(session, port, 2) == 202
        assert await counts_of(job, rows, [2]) in ({2: 0}, {2: 1})
    (warning,) = [r.getMessage() for r in caplog.records if "answers 503" in r.getMessage()]
    assert "cannot be written: [Errno 28]" in warning


def full_disk(*_: Any) -> Any:
    raise OSError(28, "No space left on device")


async def test_without_a_journal_a_webhook_keeps_no_body_over_a_restart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = af.Flow("plain")
    port = free_port()
    source = plain.source(af.io.webhook(port=port, journal=False), uid="hook")
    rows = source.key_by(lambda number: number).count(uid="counts")
    with suppress(KeyError):
        async with (
            plain.run(checkpoints=tmp_path, every="1h"),
            aiohttp.ClientSession() as session,
        ):
            assert await post(session, port, 1) == 202
            raise KeyError
    async with plain.run(checkpoints=tmp_path, restore=None, fresh=True, every="1h") as job:
        assert await counts_of(job, rows, [1]) == {1: 0}
    assert list(tmp_path.rglob("journal")) == []
    assert "at most once" in caplog.text
