"""The reference names everything that is public, and its tables say what the code does."""

from __future__ import annotations

import inspect
import re
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest

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
