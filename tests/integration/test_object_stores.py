"""Files in an object store, on a server that speaks the S3 protocol: every format both ways, what
is found, what is refused, what is left behind, and kills of workers and of the server.
"""

from __future__ import annotations

import ast
import asyncio
import gzip
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import obstore
import pytest
from obstore.exceptions import PermissionDeniedError
from obstore.store import MemoryStore, from_url

import aioflow as af
from aioflow.core.errors import GraphError, RestoreError
from aioflow.io.files.object_files import UPLOAD_BYTES, ObjectFiles, StoreError
from aioflow.operators.source import Split
from tests.integration.processes import eventually, open_workers
from tests.integration.store_flows import Count, counted, mistakes
from tests.io.driver import SinkContext, read_all, take
from tests.io.servers import BUCKET, Server, s3_environment, s3_server

ROOT = Path(__file__).parents[2]

obstore.put(MemoryStore(), "first", b"")  # Its threads begin with its first call, and stay.


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with s3_server() as running:
        yield running


@pytest.fixture
def url(server: Server, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of an empty prefix."""
    for name, value in s3_environment(server.port).items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/{request.node.originalname}"


def put(url: str, data: bytes | str) -> None:
    store, _, name = url.rpartition("/")
    obstore.put(from_url(store), name, data.encode() if isinstance(data, str) else data)


def names(url: str) -> list[str]:
    return sorted(meta["path"] for meta in obstore.list(from_url(url)).collect())


def uploads(server: Server) -> list[str]:
    """The keys of unfinished uploads, which no listing of objects shows."""
    client = boto3.client(
        "s3",
        endpoint_url=f"http://127.0.0.1:{server.port}",
        region_name="us-east-1",
        aws_access_key_id="key",
        aws_secret_access_key="secret",
    )
    try:
        found = client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", [])
    finally:
        client.close()
    return [upload["Key"] for upload in found]


def answers(server: Server) -> bool:
    """Whether the server accepts connections."""
    try:
        socket.create_connection(("127.0.0.1", server.port), 5).close()
    except OSError:
        return False
    return True


FORMATS: dict[str, Callable[..., Any]] = {
    "lines": af.io.lines,
    "jsonl": af.io.jsonl,
    "csv": af.io.csv,
    "parquet": af.io.parquet,
    "arrow": af.io.arrow,
}


@pytest.mark.parametrize("name", FORMATS)
async def test_each_format_reads_what_it_wrote(url: str, name: str) -> None:
    place, make = f"{url}/{name}", FORMATS[name]
    records: list[Any] = [{"n": i, "word": f"w{i % 7}"} for i in range(5_000)]
    if name == "lines":
        records = [f"line {i}" for i in range(5_000)]
    flow = af.Flow("write", parallelism=2)
    flow.source(records).rebalance().sink(make(place))
    await flow.execute(checkpoints="memory://objects", every="50ms", restore=None, fresh=True)
    assert all(found.startswith("part-") for found in names(place))
    found = await af.Flow("read").source(make(place)).collect()
    if name == "csv":
        found = [{"n": int(row["n"]), "word": row["word"]} for row in found]
    key = str if name == "lines" else lambda row: row["n"]
    assert sorted(found, key=key) == sorted(records, key=key)  # type: ignore[arg-type]


async def test_objects_are_found_by_name_prefix_and_glob_and_hidden_ones_are_not(
    url: str, ctx: SinkContext
) -> None:
    for name in ("a.txt", "b.txt", "c.log", ".hidden", "_SUCCESS", "deep/d.txt", "deep/er/e.txt"):
        put(f"{url}/{name}", f"{name}\n")
    put(f"{url}/odd +%ü [1].txt", "odd\n")
    for path, found in (
        ("/a.txt", ["a.txt"]),
        ("", ["a.txt", "b.txt", "c.log", "odd"]),
        ("/", ["a.txt", "b.txt", "c.log", "odd"]),
        ("/[ab].txt", ["a.txt", "b.txt"]),
        ("/*/*.txt", ["deep/d.txt"]),
        ("/**/*.txt", ["a.txt", "b.txt", "deep/d.txt", "deep/er/e.txt", "odd"]),
        ("/.h*", [".hidden"]),
        ("/odd +%ü [1].txt", ["odd"]),
    ):
        assert sorted(await read_all(af.io.lines(f"{url}{path}"), ctx)) == found, path
    for path, message in (
        ("/nothing", "there is no such object or prefix"),
        ("/*.csv", "no object matches"),
    ):
        with pytest.raises(FileNotFoundError, match=message):
            await read_all(af.io.lines(f"{url}{path}"), ctx)


async def test_a_large_object_is_read_in_splits_and_from_the_position_of_each(
    url: str, ctx: SinkContext
) -> None:
    lines = [f"{i:07}" for i in range(20_000)]
    put(f"{url}/large.txt", "\n".join(lines))
    put(f"{url}/packed.txt.gz", gzip.compress(b"packed\n"))
    source = af.io.lines(url, split_bytes=30_000)
    splits = await source.discover()
    assert len(splits) == 7
    assert await read_all(source, ctx, splits) == [*lines, "packed"]
    reader = source.reader(ctx)
    await reader.open(splits[1:2])
    first = await take(reader, 100)
    position = reader.position(splits[1].id)
    await reader.close()
    rest = await read_all(source, ctx, [Split(splits[1].id, position, splits[1].payload)])
    assert first + rest == await read_all(source, ctx, splits[1:2])


async def test_an_object_that_was_replaced_is_refused(url: str, ctx: SinkContext) -> None:
    put(f"{url}/a.txt", "".join(f"{i}\n" for i in range(100_000)))
    source = af.io.lines(f"{url}/a.txt")
    (split,) = await source.discover()
    reader = source.reader(ctx)
    await reader.open([split])
    await take(reader, 10_000)
    position = reader.position(split.id)
    await reader.close()
    put(f"{url}/a.txt", "".join(f"{-i}\n" for i in range(100_000)))
    with pytest.raises(RestoreError, match="holds something else there now"):
        await read_all(source, ctx, [Split(split.id, position, split.payload)])
    opened = await ctx.host.blocking(ObjectFiles(ctx.host).open_read, f"{url}/a.txt")
    put(f"{url}/a.txt", "".join(f"{i}\n" for i in range(200_000)))
    with pytest.raises(StoreError, match="did not give the same content"):
        await ctx.host.blocking(opened.read, 10)


async def test_objects_that_come_while_the_flow_runs_are_read(url: str) -> None:
    put(f"{url}/in/1.jsonl", '{"n": 1}\n')
    flow = af.Flow("discovered", parallelism=2)
    seen: list[Any] = []
    flow.source(af.io.jsonl(f"{url}/in/*.jsonl", discover_every="50ms")).sink(seen.append)
    async with flow.run() as job:
        await eventually(lambda: len(seen) == 1)
        for i in (2, 3):
            put(f"{url}/in/{i}.jsonl", f'{{"n": {i}}}\n')
        await eventually(lambda: len(seen) == 3)
        await job.cancel()
    assert sorted(row["n"] for row in seen) == [1, 2, 3]


async def test_a_large_part_is_an_upload_that_is_aborted_unless_it_is_prepared(
    server: Server, url: str, ctx: SinkContext
) -> None:
    sink = af.io.lines(f"{url}/out")
    writer = sink.writer(ctx)
    await writer.open()
    for _ in range(3 * UPLOAD_BYTES // (1 << 20)):
        writer.write_batch(["x" * (1 << 20)], None)
        await writer.flush()
    await eventually(lambda: len(uploads(server)) == 1)
    assert names(url) == []
    prepared = await writer.prepare(1)
    assert uploads(server) == []
    for _ in range(3 * UPLOAD_BYTES // (1 << 20)):
        writer.write_batch(["y" * (1 << 20)], None)
        await writer.flush()
    await eventually(lambda: len(uploads(server)) == 1)
    await writer.close()
    assert uploads(server) == []
    await sink.committer(ctx).commit(prepared)
    (name,) = names(url)
    assert name.startswith("out/part-0-0-")
    assert len(await read_all(sink, ctx)) == 3 * UPLOAD_BYTES // (1 << 20)


async def test_nothing_is_left_of_writes_that_were_given_up_while_the_server_was_away(
    server: Server, url: str, ctx: SinkContext
) -> None:
    """The thread of a cancelled write goes on, and may reach the server after it is back."""
    writers = []
    for _ in range(8):
        writers.append(af.io.lines(f"{url}/out").writer(ctx))
        await writers[-1].open()
        writers[-1].write_batch(["x"], None)
    server.send(signal.SIGUSR1)
    await eventually(lambda: not answers(server))
    prepared = [asyncio.ensure_future(writer.prepare(1)) for writer in writers]
    await asyncio.sleep(0.1)  # The requests are being tried again.
    for one in prepared:
        one.cancel()
    await asyncio.gather(*prepared, return_exceptions=True)
    await asyncio.gather(*(writer.close() for writer in writers))
    await ctx.host.close()  # Waits for its threads.
    assert names(url) == []


async def test_parts_of_two_sinks_in_one_prefix_both_stay(url: str, ctx: SinkContext) -> None:
    sink = af.io.lines(f"{url}/out")
    writers = []
    for uid in ("one", "two"):
        ctx.uid = uid
        writers.append(sink.writer(ctx))
        await writers[-1].open()
    for number, writer in enumerate(writers):
        writer.write_batch([f"{number}"], None)
        await sink.committer(ctx).commit(await writer.prepare(1))
        await writer.close()
    assert sorted(await read_all(sink, ctx)) == ["0", "1"]


async def test_a_bucket_that_does_not_exist_is_named(url: str, ctx: SinkContext) -> None:
    with pytest.raises(StoreError, match="did not list") as caught:
        await read_all(af.io.lines("s3://absent/x"), ctx)
    assert "expected a bucket absent at the endpoint" in str(caught.value)
    assert "<?xml" not in str(caught.value)
    assert "s3://absent/x" in str(caught.value)
    writer = af.io.lines("s3://absent/x").writer(ctx)
    with pytest.raises(StoreError, match="did not list"):
        await writer.open()
    await writer.close()


async def test_credentials_without_rights_are_named(
    url: str, ctx: SinkContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server of these tests lets everyone in, so the refusal is made up."""

    def refuse(*what: object) -> None:
        raise PermissionDeniedError("the reply was 403")

    monkeypatch.setattr(obstore, "head", refuse)
    with pytest.raises(StoreError, match=r"expected credentials .* that have rights to shop"):
        await read_all(af.io.lines("s3://shop/2026"), ctx)


def test_operations_that_an_object_store_lacks_are_refused() -> None:
    for make, message in (
        (lambda: af.io.lines("s3://b/x", follow=True), "nothing is added to an object"),
        (lambda: af.io.lines("s3://"), "expected a URL with a bucket, as in s3://bucket/prefix"),
        (lambda: af.io.lines("s3://key:hunter2@b/x"), "credentials come from the environment"),
        (lambda: af.io.lines("s3://*/x"), "expected a URL with a bucket"),
        (lambda: af.io.parquet("gs://b/a//b"), "the URL has an empty segment"),
        (
            lambda: (
                af.Flow("f")
                .source([1])
                .sink(af.io.jsonl("az://b/x", roll=af.io.RollPolicy(size_bytes=5 << 30)))
            ),
            "an object store copies no larger object",
        ),
    ):
        with pytest.raises(GraphError, match=message) as refused:
            make()
        assert "hunter2" not in str(refused.value)


async def test_the_program_of_the_page_prints_the_same_in_an_object_store(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs/howto/object-stores.md").read_text()
    snippet = page.split("```python\n")[1]
    code, _, rest = snippet.partition("```\n```text\n")
    local = 'f"file://{tempfile.mkdtemp()}"'
    store = "memory://object-stores"  # The test of the page's snippets has it in this process.
    assert local in code and store in code
    code = code.replace(local, repr(url)).replace(store, f"{store}-here")
    program = compile(code, "page", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    await eval(program, {"af": af, "__name__": __name__})
    assert capsys.readouterr().out == rest.partition("```")[0]
    assert {name.partition("/")[0] for name in names(url)} == {"sales", "totals"}


async def test_kills_of_workers_and_of_the_server_leave_exact_objects_and_nothing_else(
    server: Server, url: str, tmp_path: Path
) -> None:
    total, parts = 500_000, 5
    for part in range(parts):
        put(
            f"{url}/in/{part}.jsonl",
            "".join(f'{{"n": {n}}}\n' for n in range(part, total, parts)),
        )
    target = f"{url}/out"

    def committed() -> int:
        return sum(name.startswith("part-") for name in names(target))

    async with counted(f"{url}/in", target, per_second=40_000).run(
        workers=2,
        checkpoints=tmp_path / "store",
        every="500ms",
        restart=af.fixed_delay(100, "100ms"),
    ) as job:
        for kill in range(6):
            before = committed()
            await eventually(lambda: committed() > before)  # noqa: B023  # Awaited here.
            if kill % 2:
                server.send(signal.SIGUSR1)
                await eventually(lambda: not answers(server))
                await eventually(lambda: answers(server))
            elif workers := open_workers(job):
                os.kill(workers[kill // 2 % len(workers)].pid, signal.SIGKILL)
        result = await job.wait()
    assert result.restarts >= 2
    assert all(name.startswith("part-") for name in names(target))
    assert uploads(server) == []
    rows = await af.Flow("read").source(af.io.jsonl(target, Count)).collect()
    assert mistakes(rows, total) == []


@pytest.mark.parametrize(("journal", "warns"), [(None, True), (False, False), ("wal", False)])
async def test_a_push_source_without_a_journal_is_warned_of(
    url: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    *,
    journal: str | bool | None,
    warns: bool,
) -> None:
    """The service of the README would lose acknowledged elements, with only another URL."""
    where = str(tmp_path / journal) if isinstance(journal, str) else journal
    flow = af.Flow("hits")
    hits = flow.source(af.io.push(journal=where), uid="hits")
    hits.sink(lambda page: None)
    async with flow.run(checkpoints=f"{url}/{journal}") as job:
        await job.input(hits).put("a")
    told = "push source 'hits' has no journal, because the checkpoints are in s3://"
    assert (told in caplog.text) == warns
