"""The default secret of a program for a cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

import aioflow as af


@pytest.mark.parametrize("named", [False, True], ids=["by address", "by directory"])
async def test_without_a_secret_that_of_the_directory_is_taken(
    named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    directory = Path("mine") if named else Path(".aioflow")
    on = af.RemoteCluster(directory) if named else af.RemoteCluster("127.0.0.1:1")
    stream = af.Flow("remote").source([1])
    with pytest.raises(
        af.NotAuthenticated,
        match=(
            rf"there is no secret file {directory}/secret: name that "
            r"of the cluster by secret=Path"
        ),
    ):
        await stream.collect(on=on)
    directory.mkdir()
    (directory / "secret").write_text("short")
    (directory / "secret").chmod(0o600)
    with pytest.raises(af.NotAuthenticated, match=rf"the secret in {directory}/secret has 5 bytes"):
        await stream.collect(on=on)
