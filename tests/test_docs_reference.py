"""The reference names everything that is public, and its tables say what the code does."""

from __future__ import annotations

import importlib
import inspect
import re
from dataclasses import MISSING, fields
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

import aioflow
import aioflow.io
import aioflow.testing
from aioflow.api.options import RunArguments, RunOptions
from aioflow.cluster.restart import RestartPolicy
from aioflow.monitoring.options import MonitorArguments, MonitorOptions
from aioflow.task.environment import TaskOptions

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "docs" / "reference"
ROW = re.compile(r"^\| `(\w+)=` \| `([^`]+)` \| `([^`]+)` \| (.+) \|$", re.MULTILINE)


def shown_default(value: Any) -> str:
    if isinstance(value, RestartPolicy):
        return "af.no_restart()"
    if isinstance(value, TaskOptions):
        return "TaskOptions()"
    return f'"{value}"' if isinstance(value, str) else repr(value)


@pytest.mark.parametrize(
    ("typed", "options"), [(RunArguments, RunOptions), (MonitorArguments, MonitorOptions)]
)
def test_table_of_options_has_the_names_types_and_defaults_of_the_code(
    typed: Any, options: Any
) -> None:
    defaults = {
        field.name: shown_default(
            field.default_factory() if field.default is MISSING else field.default
        )
        for field in fields(options)
    }
    types = {field.name: field.type for field in fields(options)}
    declared = inspect.get_annotations(typed)
    assert {name: ref.__forward_arg__ for name, ref in declared.items()} == types
    text = (REFERENCE / "options.md").read_text(encoding="utf-8").replace("\\|", "|")
    shown = {name: (kind, default) for name, kind, default, _ in ROW.findall(text) if name in types}
    assert shown == {name: (types[name], defaults[name]) for name in types}


PUBLIC = {
    "aioflow": [name for name in aioflow.__all__ if name not in ("io", "testing")]
    + ["sum", "min", "max"],
    "aioflow.io": [name for name in aioflow.io.__all__ if name != "formats"],
    "aioflow.io.formats": aioflow.io.formats.__all__,
    "aioflow.testing": aioflow.testing.__all__,
}
PAGES = {path.name: path.read_text(encoding="utf-8") for path in sorted(REFERENCE.glob("*.md"))}
ENTRIES = {
    entry: page
    for page, text in PAGES.items()
    for entry in re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE)
}
SHOWN = "\n".join(
    code
    for path in sorted((ROOT / "docs").rglob("*.md"))
    for code in re.findall(r"^```py.*?^```", path.read_text(encoding="utf-8"), re.M | re.S)
)
NAMES = [(module, name) for module, names in PUBLIC.items() for name in names]
ANY_ARGUMENTS = {"self", "args", "kwargs", "unnamed", "of"}
NOT_CONSTRUCTED = {"Job", "JobResult", "Subscription", "WatermarkStrategy"}
"""Classes that a program gets from the engine or from a method: their constructors are internal."""


def test_reference_has_an_entry_for_each_public_name_and_no_other() -> None:
    assert sorted(ENTRIES) == sorted(
        f"{module}.{name}" for module, names in PUBLIC.items() for name in names
    )


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_public_name_has_a_sentence_its_parameters_its_errors_and_an_example(
    module: str, name: str
) -> None:
    what = getattr(importlib.import_module(module), name)
    page = PAGES[ENTRIES[f"{module}.{name}"]]
    if isinstance(what, type) and issubclass(what, BaseException):
        assert inspect.getdoc(what)
        return
    assert re.search(rf"\b{name}\b", SHOWN), "no example shows it"
    assert "raise" in page, "the page says nothing of errors"
    if not (inspect.isfunction(what) or isinstance(what, type)):
        return
    said = inspect.getdoc(what) or ""
    assert said
    if name in NOT_CONSTRUCTED or (isinstance(what, type) and issubclass(what, (Enum, dict))):
        return
    source = inspect.getsource(what) if isinstance(what, type) else ""
    for parameter in inspect.signature(what).parameters:
        told = rf"\b{parameter}\b"
        field = rf'^    {parameter}\b.*\n    """'  # A docstring below the field of a class.
        assert (
            parameter in ANY_ARGUMENTS
            or parameter.startswith("_")
            or re.search(told, said)
            or re.search(f"`[^`]*{told}[^`]*`", page)
            or re.search(field, source, re.MULTILINE)
        ), parameter
