"""Packs aioflow into one zip file, for the Python processes of Spark.

So only aioflow's dependencies must be installed on Spark's machines. The file holds bytecode,
because each process would otherwise compile the modules again. Spark itself requires that its
Python processes have the same minor version of Python as this process. Building the file is a
blocking call, so it runs in a thread.
"""

from __future__ import annotations

import importlib.util
import marshal
import os
import sys
import threading
import zipfile
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

from aioflow.spark.failures import SparkError

__all__ = ["ship_aioflow", "write_package"]

_UNCHECKED = 1
"""Flags for the header of a pyc file that Python does not check against a source file."""

_SHIPPING = threading.Lock()


def ship_aioflow(context: Any) -> None:
    """Adds the zip file of aioflow to the files that executors fetch from a SparkContext.

    Has no effect if the file was added before. The file stays as long as the context, because
    executors that start later fetch it too.
    """
    with _SHIPPING:
        path = Path(context._temp_dir, "aioflow.zip")
        if not path.exists():
            whole = path.with_suffix(".part")
            write_package(whole)
            whole.replace(path)
            context.addPyFile(str(path))
            # PySpark puts the file on our own path too. A search for the metadata of packages would
            # open it there, and keep it open.
            sys.path[:] = [entry for entry in sys.path if os.path.basename(entry) != path.name]


def write_package(target: Path) -> None:
    """Writes the modules of the running aioflow to the zip file `target`.

    Raises SparkError if the modules are not in files.
    """
    root = Path(__file__).parents[1]
    if not root.is_dir():
        raise SparkError(
            f"aioflow is loaded from {root}, and only a directory of its modules can be shipped "
            "to Spark: pip install aioflow"
        )
    with zipfile.ZipFile(target, "w") as package:
        for folder, folders, files in os.walk(root):
            folders[:] = sorted(name for name in folders if name != "__pycache__")
            for name in sorted(files):
                if name.endswith(".py"):
                    source = Path(folder, name)
                    inside = source.relative_to(root.parent)
                    package.writestr(
                        inside.with_suffix(".pyc").as_posix(),
                        _compiled(source, ".".join(inside.with_suffix("").parts)),
                    )


def _compiled(source: Path, module: str) -> bytes:
    """Returns the content of a pyc file for a module. Uses Python's cached bytecode beside the
    source file if possible.
    """
    code = SourceFileLoader(module.removesuffix(".__init__"), str(source)).get_code(
        module.removesuffix(".__init__")
    )
    return (
        importlib.util.MAGIC_NUMBER
        + _UNCHECKED.to_bytes(4, "little")
        + bytes(8)
        + marshal.dumps(code)
    )
