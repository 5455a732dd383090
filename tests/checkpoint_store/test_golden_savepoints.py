"""R40: state that an older aioflow wrote restores for ever, at any parallelism, with the results of
a run that was never stopped.
"""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest

import aioflow as af
from aioflow.core.errors import RestoreError
from tests.checkpoint_store.golden import DATA, fingerprint, fingerprint_before, flow, uninterrupted

VERSIONS = sorted(path.name for path in DATA.iterdir())


def test_there_is_one_of_each_released_format() -> None:
    assert "v1" in VERSIONS


@pytest.mark.parametrize("parallelism", [1, 2, 5])
@pytest.mark.parametrize("version", VERSIONS)
async def test_a_savepoint_of_an_older_release_restores_with_the_results_of_one_run(
    version: str, parallelism: int, tmp_path: Path
) -> None:
    """R39, R40."""
    shutil.copytree(DATA / version / "savepoint", tmp_path / "savepoint")
    rows: list[str] = []
    store = f"memory://golden-{tmp_path.name}"
    await flow(rows, parallelism=parallelism).execute(
        checkpoints=store, every="1h", restore=tmp_path / "savepoint"
    )
    whole, after = Counter(await uninterrupted()), Counter(rows)
    assert after - whole == Counter(), "these rows are wrong, or came twice"
    assert fingerprint(list((whole - after).elements())) == fingerprint_before(DATA / version)


@pytest.mark.parametrize("version", VERSIONS)
async def test_it_shows_what_is_in_it(version: str) -> None:
    async with af.Savepoint(DATA / version / "savepoint") as savepoint:
        assert savepoint.checkpoint.flow == "golden"
        kinds = {(state.name, state.kind) for state in savepoint.operator("watch").states}
        assert {
            ("last", "value"),
            ("seen", "list"),
            ("by parity", "map"),
            ("largest", "reducing"),
            ("kept", "value"),
        } <= kinds
        kept = {entry.key: entry.value async for entry in savepoint.entries("watch", "kept")}
        assert (len(kept), sum(kept.values())) == (400, 1500)
        assert [split.position for split in await savepoint.positions("readings")] == [1500]


@pytest.mark.parametrize("version", VERSIONS)
async def test_a_damaged_one_is_refused(version: str, tmp_path: Path) -> None:
    shutil.copytree(DATA / version / "savepoint", tmp_path / "savepoint")
    for file in sorted(path for path in (tmp_path / "savepoint").rglob("*") if path.is_file()):
        content = file.read_bytes()
        file.write_bytes(
            content[: len(content) // 2]
            + bytes([content[len(content) // 2] ^ 4])
            + content[len(content) // 2 + 1 :]
        )
        with pytest.raises(RestoreError, match=file.name):
            await flow([]).execute(
                checkpoints="memory://golden-damaged", every="1h", restore=tmp_path / "savepoint"
            )
        file.write_bytes(content)
