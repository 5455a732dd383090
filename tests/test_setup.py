"""`.ci/setup` on machines where programs are missing, and what becomes of the tests that need
them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests import needs

SETUP = Path(__file__).parents[1] / ".ci" / "setup"

APT = """#!/bin/sh
echo "$*" >> "$LOG"
for word; do test "$word" != "$LACKING" || exit 100; done
for word; do
    case $word in redis-server|chromium)
        printf '#!/bin/sh\\n' > "$BIN/$word" && chmod +x "$BIN/$word";;
    esac
done
"""


class Machine:
    """A PATH that holds what the script itself uses, and all that it looks for but redis-server
    and chromium.
    """

    def __init__(self, directory: Path, user: int, lacking: str = "") -> None:
        self.bin = directory / "bin"
        self.bin.mkdir()
        self.log = directory / "log"
        self.log.touch()
        for name in ("sh", "bash", "env", "chmod"):
            found = shutil.which(name)
            assert found is not None
            (self.bin / name).symlink_to(found)
        for name in (
            "make",
            "gcc",
            "ip",
            "initdb",
            "nats-server",
            "java",
            "mvn",
            "promtool",
            "systemd-analyze",
        ):
            self.add(name, "#!/bin/sh\n")
        self.add("id", f"#!/bin/sh\necho {user}\n")
        self.add("apt-get", APT)
        self._environ = {
            "PATH": str(self.bin),
            "LOG": str(self.log),
            "BIN": str(self.bin),
            "LACKING": lacking,
        }

    def add(self, name: str, text: str) -> None:
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def run(self, what: str = "tests", **environ: str) -> subprocess.CompletedProcess[str]:
        command = [str(self.bin / "bash"), str(SETUP), what]
        return subprocess.run(
            command,
            env=self._environ | environ,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )


def test_root_with_apt_installs_what_is_missing_and_nothing_the_next_time(tmp_path: Path) -> None:
    machine = Machine(tmp_path, user=0)

    assert machine.run(CI="true").returncode == 0
    asked = machine.log.read_text().splitlines()
    assert asked[0].endswith("update")
    assert asked[1].endswith("redis-server chromium"), asked
    assert machine.run(CI="true").returncode == 0
    assert machine.log.read_text().splitlines() == asked


def test_a_package_that_cannot_be_had_does_not_keep_the_others_away(tmp_path: Path) -> None:
    machine = Machine(tmp_path, user=0, lacking="chromium")

    done = machine.run()

    assert (machine.bin / "redis-server").exists()
    assert done.returncode == 0, done.stderr
    assert "missing, and not installed: chromium;" in done.stderr
    assert machine.run(CI="true").returncode == 1


def test_without_root_nothing_is_installed_and_ci_fails(tmp_path: Path) -> None:
    machine = Machine(tmp_path, user=1000)

    done = machine.run()

    assert machine.log.read_text() == ""
    assert done.returncode == 0, done.stderr
    assert "missing, and not installed: redis-server chromium;" in done.stderr
    assert machine.run(CI="true").returncode == 1


def test_without_a_python_that_will_do_setup_fails_and_says_how_to_name_another(
    tmp_path: Path,
) -> None:
    machine = Machine(tmp_path, user=1000)

    done = machine.run("python", PYTHON="python-of-old")

    assert done.returncode == 1
    assert "PYTHON=/path/to/python" in done.stderr


def test_a_program_that_is_missing_skips_the_test_and_fails_it_in_ci(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(
        pytest.skip.Exception, match=r"needs no-such-server: run \.ci/setup as root"
    ):
        needs.program("no-such-server", "nowhere/*/no-such-server")
    monkeypatch.setenv("CI", "true")
    with pytest.raises(
        pytest.fail.Exception, match="CI skips nothing, and this test needs no-such-server"
    ):
        needs.program("no-such-server")


def test_a_program_is_found_by_path_and_by_pattern(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in ("15", "17"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "a-server").touch()
    relative = str(tmp_path).lstrip(os.sep)

    assert needs.program("a-server", f"{relative}/*/a-server") == str(tmp_path / "17" / "a-server")
    (tmp_path / "a-server").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert needs.program("a-server", f"{relative}/*/a-server") == str(tmp_path / "a-server")


def test_a_run_says_at_its_end_how_many_were_skipped_and_how_to_get_what_they_need(
    pytester: pytest.Pytester,
) -> None:
    pytester.makeconftest("from tests.conftest import pytest_terminal_summary")
    pytester.makepyfile("""
        import pytest
        from tests import needs

        @pytest.mark.parametrize("n", range(3))
        def test_of_a_server(n, monkeypatch):
            monkeypatch.delenv("CI", raising=False)
            needs.program("no-such-server")

        def test_of_rights(monkeypatch):
            monkeypatch.delenv("CI", raising=False)
            needs.missing("network namespaces", "run it as root (no such right: afn1)")

        def test_other():
            pytest.skip("of its own")
    """)

    done = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-p", "no:asyncio")

    done.assert_outcomes(skipped=5)
    lines = done.outlines
    assert "3 skipped without no-such-server: run .ci/setup as root to install it" in lines
    assert "1 skipped without network namespaces: run it as root (no such right: afn1)" in lines
    assert lines[-1].startswith("=") and "5 skipped" in lines[-1]
