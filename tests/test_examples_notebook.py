"""The notebook of the examples, run from its first cell to its last."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).parents[1] / "examples" / "notebook.ipynb"

# In a process of its own: the client and its kernel have loops, threads and sockets.
RUN = """
import json, sys
import nbformat
from nbclient import NotebookClient

notebook = nbformat.read(sys.argv[1], as_version=4)
NotebookClient(notebook, kernel_name="python3", timeout=120).execute()
print(json.dumps([cell.outputs for cell in notebook.cells if cell.cell_type == "code"]))
"""


def test_notebook_runs_and_shows_frames_graph_and_numbers() -> None:
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(NOTEBOOK)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    outputs: list[list[dict[str, Any]]] = json.loads(done.stdout.splitlines()[-1])
    _, stream, frame, graph, job, ended = outputs
    assert "<td>minutes</td><td>int64</td>" in stream[0]["data"]["text/html"]
    assert "Oslo" in frame[0]["data"]["text/html"]
    assert graph[0]["data"]["image/svg+xml"].startswith("<svg")
    assert job[0]["text"] == "('a', 1) ('b', 1) ('a', 2)\n"
    assert "RUNNING" in job[1]["data"]["text/html"]
    assert ended[0]["data"]["text/plain"] == "'FINISHED'"


def test_notebook_is_kept_without_outputs() -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert all(not cell["outputs"] for cell in cells if cell["cell_type"] == "code")
