"""The code in Spark's Python processes, tested without Java."""

from __future__ import annotations

import subprocess
import sys

import pyarrow as pa

from aioflow.spark.bridge.executor import result_of


def test_a_task_tells_its_rows_in_exactly_the_types_of_the_schema() -> None:
    told = result_of(3, 2**40 + 1, 2**33)

    assert told.schema == pa.schema(
        {"partition": pa.int32(), "attempt": pa.int64(), "rows": pa.int64()}
    )
    assert told.to_pylist() == [{"partition": 3, "attempt": 2**40 + 1, "rows": 2**33}]


def test_a_task_that_pushes_loads_no_pandas() -> None:
    code = "import sys\nfrom aioflow.spark.bridge.executor import result_of\nresult_of(0, 1, 2)\n"
    code += "print('pandas' in sys.modules, 'pyarrow' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert done.stdout.split() == ["False", "True"], done.stderr
