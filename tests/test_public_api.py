"""The public surface: which names there are, that each can be imported and says what it is, and
what importing the package costs.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import aioflow

STUB = Path(aioflow.__file__).parent / "__init__.pyi"
"""Adding a name is free; taking one away breaks programs."""

SHOWN = {
    alias.asname: node.module
    for node in ast.parse(STUB.read_text()).body
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}
"""The names of the stub, with their modules."""

SHADOWING = ["max", "min", "sum"]
"""Public as `af.sum`; a star import would replace the built-ins."""

MODULES = ["aioflow"]
"""All that `import aioflow` loads of the package; everything else comes in with the first name
that needs it.
"""

DEAR = [
    "aiohttp",
    "cloudpickle",
    "numpy",
    "pandas",
    "pyarrow",
    "uvloop",
    "msgpack",
    "asyncio",
    "aioflow.cluster",
]


def imported_by(statement: str) -> tuple[list[str], float]:
    """Modules that `statement` loads in a fresh interpreter, and how many ms it took there."""
    program = (
        "import sys, time; before = set(sys.modules); start = time.perf_counter()\n"
        f"{statement}\n"
        "print((time.perf_counter() - start) * 1000, *sorted(set(sys.modules) - before))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    took_ms, *modules = done.stdout.split()
    return modules, float(took_ms)


def test_all_lists_exactly_the_promised_names() -> None:
    assert sorted(aioflow.__all__) == sorted(set(SHOWN) - set(SHADOWING))


def test_names_that_would_hide_builtins_are_public_but_not_starred() -> None:
    assert not set(SHADOWING) & set(aioflow.__all__)
    for name in SHADOWING:
        assert getattr(aioflow, name).__module__ == "aioflow.operators.aggregate.functions"


@pytest.mark.parametrize("name", sorted(map(str, SHOWN)))
def test_every_public_name_is_importable_and_has_a_docstring(name: str) -> None:
    value = getattr(aioflow, name)
    assert name in dir(aioflow)
    if not isinstance(value, int):  # A constant says what it is beside its definition.
        assert (value.__doc__ or "").strip(), f"af.{name} has no docstring"


def test_a_name_that_does_not_exist_is_an_attribute_error_that_names_it() -> None:
    with pytest.raises(
        AttributeError, match="module 'aioflow' has no attribute 'flow_of_consciousness'"
    ):
        aioflow.flow_of_consciousness  # type: ignore[attr-defined]


def test_the_stub_shows_a_type_checker_the_names_that_are_loaded_lazily() -> None:
    homes = aioflow._HOME_OF  # type: ignore[attr-defined]
    loaded = {name: f"aioflow.{module}" for name, module in homes.items()}
    assert {**loaded, "io": "aioflow", "testing": "aioflow"} == SHOWN


def test_importing_the_package_loads_nothing_else_of_it() -> None:
    modules, took_ms = imported_by("import aioflow")
    print(f"import aioflow: {took_ms:.1f} ms")
    assert [name for name in modules if name.split(".")[0] == "aioflow"] == MODULES
    assert not [name for name in modules if name.startswith(tuple(DEAR))]


def test_building_and_running_a_flow_loads_no_optional_library() -> None:
    modules, took_ms = imported_by(
        "import asyncio, aioflow as af; asyncio.run(af.Flow('x').source([1]).map(str).collect())"
    )
    print(f"import, build and run: {took_ms:.1f} ms")
    assert "aioflow.task.stream_task" in modules
    assert not {"aiohttp", "cloudpickle", "numpy", "pandas", "pyarrow", "rocksdict"} & set(modules)
