"""The secret of a cluster is in a file that is nobody else's."""

from __future__ import annotations

from pathlib import Path

import pytest

from aioflow.cluster.jobmanager import check_bind
from aioflow.cluster.secret_file import create_secret, read_secret
from aioflow.cluster.whereabouts import parse_address
from aioflow.core.errors import NotAuthenticated


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
