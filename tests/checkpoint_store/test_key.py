"""A store with a key: what was written with another one, or with none, is not restored."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

import aioflow as af
from aioflow.api.checkpoint_options import checkpoint_key
from aioflow.api.options import parse_options
from aioflow.checkpoint.metadata import decode_metadata, encode_metadata
from aioflow.cli.options import add_checkpoint_options, checkpoint_options

KEY = b"0123456789abcdef-key"

OTHER = b"fedcba9876543210-key"


def flow() -> tuple[af.Flow, Any, Any]:
    made = af.Flow("sealed")
    numbers = made.source(af.io.push(), uid="numbers")
    counts = numbers.key_by(lambda number: number).count(uid="count")
    return made, numbers, counts


async def stopped(store: Path, **options: Any) -> Path:
    """A savepoint of a job whose state is too large for the metadata."""
    made, numbers, _ = flow()
    async with made.run(checkpoints=store, every="1h", **options) as job:
        for number in range(20_000):
            await job.input(numbers).put(number, durable=False)  # The stop makes them durable.
        path = await job.stop()
    assert path is not None
    return Path(path)


async def count_after_restore(**options: Any) -> Any:
    made, _, counts = flow()
    async with made.run(**options) as job:
        return await job.state(counts).get(7)


async def test_a_job_goes_on_with_the_key_that_it_was_stopped_with(tmp_path: Path) -> None:
    path = await stopped(tmp_path / "store", checkpoint_key=KEY)
    assert await count_after_restore(restore=path, checkpoint_key=KEY) == 1
    (tmp_path / "key").write_bytes(KEY + b"\n")
    assert (
        await count_after_restore(checkpoints=tmp_path / "store", checkpoint_key=tmp_path / "key")
        == 1
    )
    async with af.Savepoint(path, key=KEY) as savepoint:
        assert savepoint.checkpoint.flow == "sealed"


@pytest.mark.parametrize("named", [True, False], ids=["restore=", "the newest"])
async def test_a_run_without_the_key_over_a_store_with_one_is_refused(
    tmp_path: Path, named: bool
) -> None:
    """It would continue without protection, and the next run with the key would refuse its
    state.
    """
    store = tmp_path / "store"
    path = await stopped(store, checkpoint_key=KEY)
    where: dict[str, Any] = {"restore": path} if named else {"checkpoints": store}
    with pytest.raises(
        af.RestoreError,
        match=r"was written with a key: give the same checkpoint_key= \(--checkpoint-key-file\); "
        r"without that key its state is lost: to begin again, give restore=None, fresh=True",
    ):
        await count_after_restore(**where)
    with pytest.raises(af.RestoreError, match="was written with a key"):
        async with af.Savepoint(path):
            pass
    # Without the key, nothing of it can be had; the store can be used again all the same.
    assert await count_after_restore(checkpoints=store, restore=None, fresh=True) is None
    assert await count_after_restore(checkpoints=store) is None
    assert await count_after_restore(restore=path, checkpoint_key=KEY) == 1


@pytest.mark.parametrize("written", [None, OTHER], ids=["no key", "another key"])
@pytest.mark.parametrize("named", [True, False], ids=["restore=", "the newest"])
async def test_store_written_without_the_key_is_refused(
    tmp_path: Path, written: bytes | None, named: bool
) -> None:
    store = tmp_path / "store"
    path = await stopped(store, checkpoint_key=written)
    where = {"restore": path} if named else {"checkpoints": store}
    with pytest.raises(
        af.RestoreError, match=r"was not written with the key of this store.*fresh=True"
    ):
        await count_after_restore(**where, checkpoint_key=KEY)


async def test_forged_metadata_is_refused_by_name(tmp_path: Path) -> None:
    path = await stopped(tmp_path / "store", checkpoint_key=KEY)
    metadata = path / "metadata"
    genuine = decode_metadata(metadata.read_bytes(), "it", KEY)
    metadata.write_bytes(encode_metadata(genuine))  # Digests fit, as those of a forger do.
    with pytest.raises(af.RestoreError, match=f"{metadata} was not written with the key"):
        await count_after_restore(restore=path, checkpoint_key=KEY)


async def test_a_forged_state_file_is_refused_by_name(tmp_path: Path) -> None:
    path = await stopped(tmp_path / "store", checkpoint_key=KEY)
    largest = max(
        (file for file in path.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size
    )
    assert largest.name != "metadata"
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    with pytest.raises(af.RestoreError, match=largest.name):
        await count_after_restore(restore=path, checkpoint_key=KEY)


async def test_metadata_of_a_store_without_a_key_says_nothing_of_keys(tmp_path: Path) -> None:
    path = await stopped(tmp_path / "store")
    assert await count_after_restore(restore=path) == 1


def test_a_key_that_cannot_be_meant_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has 5 bytes, expected at least 16"):
        parse_options({"checkpoints": tmp_path, "checkpoint_key": b"short"})
    with pytest.raises(TypeError, match="takes bytes, or Path"):
        parse_options({"checkpoints": tmp_path, "checkpoint_key": "a text that is long enough"})
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        parse_options({"checkpoints": tmp_path, "checkpoint_key": tmp_path / "none"})
    with pytest.raises(ValueError, match="there are none: give checkpoints=URL"):
        parse_options({"checkpoint_key": KEY})


def test_a_random_key_is_taken_as_it_is(tmp_path: Path) -> None:
    """White space at its ends is part of it; only the end of the last line of a file is not."""
    key = b" \t" + KEY + b"\n "
    assert checkpoint_key(key) == key
    (tmp_path / "key").write_bytes(key + b"\n")
    assert checkpoint_key(tmp_path / "key") == key


def test_the_key_is_in_no_repr(tmp_path: Path) -> None:
    options = parse_options({"checkpoints": tmp_path, "checkpoint_key": KEY})
    assert "abcdef" not in repr(options) + repr(options.checkpoint_settings())


async def test_commands_take_the_file_of_the_key(tmp_path: Path) -> None:
    path = await stopped(tmp_path / "store", checkpoint_key=KEY)
    (tmp_path / "key").write_bytes(KEY + b"\n")
    parser = argparse.ArgumentParser()
    add_checkpoint_options(parser)
    parser.set_defaults(command="run", conf=[])
    arguments = parser.parse_args(
        ["--restore", str(path), "--checkpoint-key-file", str(tmp_path / "key")]
    )
    assert await count_after_restore(**checkpoint_options(arguments)) == 1
