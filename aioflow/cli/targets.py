"""Loads the flow that a command names as `MODULE:FLOW`, `PATH.py:FLOW` or `PATH.sql`.

FLOW is the name of a Flow, or of a function that returns a Flow. `PATH.sql` is an SQL script.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, TextIO

import msgspec

from aioflow.api.flow import Flow
from aioflow.cli.options import UsageError
from aioflow.cli.terminal import describe
from aioflow.core.errors import GraphError, with_article
from aioflow.io.changes import Upsert
from aioflow.sql.errors import SqlError

__all__ = ["load_flow", "script_flow", "script_of"]


def load_flow(target: str) -> Flow:
    """Returns the flow that `target` names. Raises UsageError if there is none; the message
    describes what was found instead.
    """
    if target.endswith(".sql"):
        return script_flow(Path(target), None)
    place, colon, name = target.rpartition(":")
    if not colon:
        module = _load(target)
        raise UsageError(f"{target!r} names no flow, expected {target}:FLOW; {_found_in(module)}")
    if not place or not name:
        raise UsageError(f"expected MODULE:FLOW or PATH.py:FLOW, got {target!r}")
    module = _load(place)
    found: object = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is None:
        raise UsageError(f"{place} has no flow {name!r}; {_found_in(module)}")
    if callable(found):
        try:
            made = found()
        except Exception as error:  # The user's function may raise anything.
            raise UsageError(
                f"{name}() of {place} raised\n  " + "\n  ".join(describe(error))
            ) from error
        if not isinstance(made, Flow):
            raise UsageError(
                f"{name}() of {place} returned {made!r}, expected a Flow; {_found_in(module)}"
            )
        return made
    if not isinstance(found, Flow):
        kind = with_article(type(found).__name__)
        raise UsageError(
            f"{name!r} of {place} is {kind}, expected a Flow or a function that returns one; "
            f"{_found_in(module)}"
        )
    return found


def script_flow(path: Path, plans: TextIO | None) -> Flow:
    """Returns the flow of an SQL script file; "-" is standard input.

    The flow prints a JSON object for each row of a SELECT. The plans that EXPLAIN shows are written
    to `plans`.
    """
    try:
        text = sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise UsageError(f"cannot read {path}: {error}") from error
    return script_of(text, "sql" if str(path) == "-" else path.stem, _Lines(plans))


def script_of(text: str, name: str, console: Any, before: str = "") -> Flow:
    """Returns the flow of the SQL script `text`. `name` is the name of the flow, and `console`
    shows the rows and plans of the script.

    `before` has earlier statements, which are executed first. Raises UsageError, whose message
    locates the error in `text`.
    """
    flow = Flow(name)
    try:
        from aioflow.sql.script import script  # Imported late: it loads sqlglot.

        script(flow, before + text, {}, console=console)
    except ModuleNotFoundError as error:
        if error.name != "sqlglot":
            raise
        raise UsageError("SQL needs sqlglot: pip install 'aioflow[sql]'") from None
    except SqlError as error:
        if error.span is not None and error.span[0] >= len(before):
            error.text = text
            error.span = (error.span[0] - len(before), error.span[1] - len(before))
        raise UsageError(str(error)) from error
    except GraphError as error:
        raise UsageError(str(error)) from error
    return flow


class _Lines:
    """Shows the rows of a script as JSON lines."""

    def __init__(self, plans: TextIO | None) -> None:
        self._plans = plans

    def rows(self, stream: Any) -> None:
        stream.map(_line, name="rows: lines").print(name="rows")

    def plan(self, text: str) -> None:
        if self._plans is not None:
            print(text, file=self._plans, flush=True)


def _line(row: Any) -> str:
    shown = {"key": row.key, "row": row.row} if type(row) is Upsert else row
    return msgspec.json.encode(shown).decode()


def _load(place: str) -> ModuleType:
    try:
        if place.endswith(".py"):
            return _load_file(Path(place))
        if os.getcwd() not in sys.path:
            # As with `python -m`, modules of the current directory can be imported.
            sys.path.insert(0, os.getcwd())
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is not None and (place == error.name or place.startswith(f"{error.name}.")):
            hint = f"; there is a file {place}.py here" if Path(f"{place}.py").exists() else ""
            raise UsageError(
                f"there is no module {place!r}: no module {error.name!r} on the path or in "
                f"{os.getcwd()}{hint}"
            ) from error
        raise UsageError(
            f"{place} could not be imported\n  " + "\n  ".join(describe(error))
        ) from error
    except Exception as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(
            f"{place} could not be imported\n  " + "\n  ".join(describe(error))
        ) from error


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UsageError(f"there is no file {str(path)!r} (looked in {os.getcwd()})")
    # As with `python PATH.py`, modules in the same directory can be imported.
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None, "a name that ends in .py has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # Dataclasses and the codec look a class's module up by name.
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[path.stem]
        raise
    return module


def _found_in(module: ModuleType) -> str:
    """Returns the names of the flows and functions in the module, for the error message when the
    name of a flow is wrong.
    """
    flows = [name for name, value in vars(module).items() if isinstance(value, Flow)]
    functions = [
        name
        for name, value in vars(module).items()
        if isinstance(value, FunctionType)
        and value.__module__ == module.__name__
        and not name.startswith("_")
    ]
    parts = []
    if flows:
        parts.append(f"it has the flows {', '.join(flows)}")
    if functions:
        parts.append(
            f"the functions {', '.join(functions)}"
            if parts
            else f"it has no Flow, but the functions {', '.join(functions)}"
        )
    return " and ".join(parts) if parts else "it has neither a Flow nor a function"
