"""aioflow as one file for executors: all of it imports from there, and what it needs to ask
first needs no library at all.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from aioflow.spark.package import ship_aioflow, write_package

FIRST = """
import sys
import aioflow.spark.workers.worker as worker
print(worker.__file__)
print([name for name in worker.NEEDED if name in sys.modules])
import aioflow.cluster.taskmanager, aioflow.cluster.shipping
ours = [module for name, module in list(sys.modules.items()) if name.startswith("aioflow")]
print({module.__file__.partition(".zip")[0] for module in ours})
"""


def test_a_worker_imports_from_it_what_it_runs(tmp_path: Path) -> None:
    package = tmp_path / "aioflow.zip"
    write_package(package)

    environ = {**os.environ, "PYTHONPATH": str(package)}
    said = subprocess.run(
        [sys.executable, "-c", FIRST],
        capture_output=True,
        text=True,
        env=environ,
        cwd=tmp_path,
        check=False,
    )

    assert said.stdout.splitlines() == [
        f"{package}/aioflow/spark/workers/worker.pyc",
        "[]",
        f"{{'{tmp_path}/aioflow'}}",
    ], said.stderr


def test_it_is_given_to_a_context_once(tmp_path: Path) -> None:
    class Context:
        _temp_dir = str(tmp_path)

        def __init__(self) -> None:
            self.files: list[str] = []

        def addPyFile(self, path: str) -> None:
            self.files.append(path)
            sys.path.insert(1, f"/of/spark/{Path(path).name}")  # As PySpark does.

    context = Context()
    ship_aioflow(context)
    ship_aioflow(context)
    assert context.files == [str(tmp_path / "aioflow.zip")]
    assert not [entry for entry in sys.path if entry.endswith("aioflow.zip")], (
        "a reader of the path would keep it open"
    )
