"""The secret of a cluster is in a file that only its owner can read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from aioflow.cluster.jobmanager import check_bind
from aioflow.cluster.leadership import parse_address
from aioflow.core.errors import NotAuthenticated
from aioflow.network.security import create_secret, given_secret, read_secret


def test_a_secret_is_made_once_and_only_its_owner_can_read_it(tmp_path: Path) -> None:
    path = tmp_path / "data" / "secret"
    assert create_secret(str(path), b"0123456789abcdef") == b"0123456789abcdef"
    assert path.stat().st_mode & 0o777 == 0o600
    assert create_secret(str(path), b"another one, not used") == b"0123456789abcdef"
    assert read_secret(str(path)) == b"0123456789abcdef"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o601])
def test_a_secret_that_others_can_use_is_refused_with_the_remedy(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"0123456789abcdef")
    path.chmod(mode)
    with pytest.raises(NotAuthenticated, match=f"mode {mode:o}.*chmod 600"):
        read_secret(str(path))


def test_a_secret_that_could_be_guessed_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"short\n")
    path.chmod(0o600)
    with pytest.raises(NotAuthenticated, match="has 5 bytes, expected at least 16"):
        read_secret(str(path))


def test_other_machines_are_let_in_only_with_a_secret_that_was_given() -> None:
    check_bind("127.0.0.1", secret_given=False)
    check_bind("10.0.0.7", secret_given=True)
    with pytest.raises(NotAuthenticated, match="--secret-file"):
        check_bind("10.0.0.7", secret_given=False)


@pytest.mark.parametrize("text", ["here", ":6123", "here:", "here:0", "here:65536", "here:x"])
def test_an_address_is_a_host_and_a_port(text: str) -> None:
    assert parse_address("here:6123") == ("here", 6123)
    with pytest.raises(ValueError, match="expected HOST:PORT"):
        parse_address(text)


def test_error_for_a_secret_that_does_not_exist_says_where_it_comes_from(tmp_path: Path) -> None:
    for ask in (
        lambda: read_secret(str(tmp_path / "secret")),
        lambda: given_secret(tmp_path / "secret"),
    ):
        with pytest.raises(
            NotAuthenticated,
            match=(
                f"no secret file {tmp_path}/secret: name that .* by secret=Path.*jobmanager makes "
                "it"
            ),
        ):
            ask()


def test_a_secret_that_is_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    """The pipe has no writer, and opening it would wait for one."""
    os.mkfifo(tmp_path / "secret", 0o600)
    with pytest.raises(
        NotAuthenticated, match="secret is no file, expected the secret of the cluster"
    ):
        read_secret(str(tmp_path / "secret"))


def test_a_secret_that_is_no_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        NotAuthenticated, match=f"{tmp_path} is no file, expected the secret of the cluster"
    ):
        given_secret(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(
        NotAuthenticated,
        match=f"secret file {tmp_path}/file/secret cannot be read: Not a directory",
    ):
        given_secret(tmp_path / "file" / "secret")


def test_error_for_a_path_that_is_given_as_a_text_says_how_to_give_it() -> None:
    assert (
        given_secret("0123456789abcdef") == given_secret(b"0123456789abcdef") == b"0123456789abcdef"
    )
    with pytest.raises(
        NotAuthenticated,
        match=r"secret= has 15 bytes, expected at least 16; if it is the path .*secret=Path\(",
    ):
        given_secret(".aioflow/secret")
    with pytest.raises(NotAuthenticated, match=r"secret= takes the secret .* got NoneType"):
        given_secret(None)  # type: ignore[arg-type]  # It is what is refused.
