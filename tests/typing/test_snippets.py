"""The snippets of the guide, the how-to pages, the tutorial and the reference please mypy and
pyright in strict mode.

A snippet is partial if it leaves out annotations of its functions, to stay short, or uses a library
without types. Then errors about missing annotations, and about types that are unknown for this
reason, do not count. All others count.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from tests.typing.snippets import written

pytestmark = pytest.mark.slow

UNTYPED = {"django", "pandas", "polars", "pyarrow", "pyspark"}
"""Libraries without types, or with types that are unknown in part."""

FRAGMENT = {
    *("reportUnusedImport", "reportUnusedVariable", "reportUnusedClass", "reportUnusedFunction"),
}
"""Rules that no snippet obeys alone: a later one uses the name, or the reader."""

PARTIAL = {
    *("reportMissingParameterType", "reportUnknownParameterType", "reportUnknownArgumentType"),
    *("reportUnknownMemberType", "reportUnknownVariableType", "reportUnknownLambdaType"),
    *("reportMissingTypeArgument", "reportMissingTypeStubs"),
    *("no-untyped-def", "no-untyped-call", "type-arg", "var-annotated", "no-any-return"),
}
"""Rules about annotations that a partial snippet leaves out."""

UNKNOWN = {"reportUnknownVariableType", "reportUnknownMemberType", "reportUnknownArgumentType"}

KNOWN: dict[str, set[str]] = {
    # Mistakes on purpose, whose error the page shows.
    "docs/reference/options.md: Options of a run": {"call-arg", "reportCallIssue"},
    "docs/reference/errors.md: Errors": {"reportUnnecessaryIsInstance"},
    # Short on purpose.
    "docs/howto/tests.md: A whole flow, in virtual time": {"reportPossiblyUnboundVariable"},
    "docs/reference/expressions.md: Expressions": {"type-arg", "reportMissingTypeArgument"},
    "docs/reference/io.md: Connectors": {"var-annotated", *UNKNOWN},
    "docs/reference/testing.md: Testing kit": {
        *("type-arg", "reportMissingTypeArgument", "reportUnknownLambdaType"),
        *UNKNOWN,
    },
    # An expression such as `af.col.cents` has no type of its own, so the result is unknown.
    "docs/concepts/time.md: Watermarks": {"var-annotated", *UNKNOWN},
    "docs/howto/tuning.md: Rows and columns": {"var-annotated", *UNKNOWN},
    # Django comes without types, so its class of views is unknown.
    "docs/howto/frameworks.md: django_hits.py": {"misc"},
    # pyright reads a lambda before it knows its parameter.
    "docs/guide/event-time.md: A source that waits for a slower one": {"reportIndexIssue"},
    # pyright infers literal types of the elements, and streams are invariant.
    "docs/howto/silent-sources.md: One of several inputs is silent": {"reportArgumentType"},
    # pyright infers a tuple without elements from `default=()`.
    "docs/howto/top-n.md: Running, over all time": {"reportArgumentType"},
    # A source of its own type alternates with one of Kafka, whose elements have no type.
    "docs/migration/faust.md: shop.py": {"reportUnknownLambdaType", *UNKNOWN},
}
"""Rules that a section breaks, with the reason. This list only shrinks."""


def is_partial(code: str) -> bool:
    """Whether a function of the snippet has no annotations, or a library has no types."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            given = [one for one in node.args.args if one.arg not in ("self", "cls")]
            if node.returns is None or any(one.annotation is None for one in given):
                return True
        modules = (
            [one.name for one in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
        if UNTYPED & {name.partition(".")[0] for name in modules}:
            return True
    return False


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    directory = tmp_path_factory.mktemp("snippets")
    return directory, written(directory)


def pyright(directory: Path) -> list[tuple[str, str, str]]:
    configuration = {"typeCheckingMode": "strict", "pythonVersion": "3.11"}
    (directory / "pyrightconfig.json").write_text(json.dumps(configuration))
    command = [sys.executable, "-m", "basedpyright", "-p", str(directory), "--outputjson"]
    command += ["--pythonpath", sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = json.loads(done.stdout)
    assert found["summary"]["filesAnalyzed"] > 50, done.stderr
    return [
        (
            str(Path(one["file"]).relative_to(directory)),
            one.get("rule", "syntax"),
            f"{one['range']['start']['line'] + 1}: {one['message']}",
        )
        for one in found["generalDiagnostics"]
    ]


def mypy(directory: Path) -> list[tuple[str, str, str]]:
    files = sorted(str(path.relative_to(directory)) for path in directory.glob("*/*.py"))
    command = [sys.executable, "-m", "mypy", "--strict", "--explicit-package-bases"]
    command += ["--ignore-missing-imports", "--config-file=", *files]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
    assert "source files" in done.stdout, done.stdout + done.stderr
    line = re.compile(r"^(\S+?\.py):(\d+): error: (.*?)  \[([a-z-]+)\]$", re.MULTILINE)
    return [(name, rule, f"{at}: {text}") for name, at, text, rule in line.findall(done.stdout)]


@pytest.mark.parametrize("checker", [mypy, pyright], ids=["mypy", "pyright"])
def test_snippets_please_a_strict_type_checker(
    checker: object, pages: tuple[Path, dict[str, str]]
) -> None:
    directory, sections = pages
    assert callable(checker)
    errors: defaultdict[str, list[str]] = defaultdict(list)
    for name, rule, text in checker(directory):
        if name not in sections:
            continue
        partial = is_partial((directory / name).read_text(encoding="utf-8"))
        borne = FRAGMENT | (PARTIAL if partial else set()) | KNOWN.get(sections[name], set())
        if rule not in borne:
            errors[sections[name]].append(f"{rule} {text}")
    assert not errors, "\n".join(f"{name}\n  " + "\n  ".join(one) for name, one in errors.items())
