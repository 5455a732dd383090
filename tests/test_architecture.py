"""The rules of the layout, held by tests: layers, the one seam, and how a module presents itself.

Ruff bans the calls it can name (`[tool.ruff.lint.flake8-tidy-imports.banned-api]`); the two
builtins it cannot name, `open` and `hash`, and what only the syntax tree shows are checked here.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest
from importlinter.cli import EXIT_STATUS_SUCCESS, lint_imports

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "aioflow"
MODULE_LINES_MAX = 800
"""A module past this holds two ideas. The median is nearer to 250."""

LONG_ALLOWED = {
    "api/streams.py": "the classes of streams return each other, so apart they are a circle"
}

DECISIONS = tuple(
    f"docs/decisions/{path.name}" for path in sorted((ROOT / "docs" / "decisions").glob("*.md"))
)
MERGE_MARK = re.compile(r"^(<{7}|>{7}) ", re.MULTILINE)

PAGES = ("CONTRIBUTING.md", "docs/architecture.md", "docs/behaviours.md", *DECISIONS)
"""Pages that send a reader to files, such as `task/chain.py`, and to names."""

FOREIGN_NAMES = {
    *("BaseException", "Queue", "TaskGroup", "__code__", "as_completed", "await"),
    *("getswitchinterval", "groupBy", "hash", "numLateRecordsDropped", "numRecordsIn"),
    *("testing", "uuid4", "NAME", "yml"),
}
"""Names in the pages that are of Python, Spark and Flink, or stand for any name."""

NAMED_MODULE = re.compile(r"`(?:aioflow\.)?([a-z]\w*(?:\.[a-z_]+)+)`")
FOREIGN_MODULES = {"api.windowing", "spark.driver.host"}
"""Names in docstrings that begin like our modules, but are of Flink and Spark."""

NAMED_FILE = re.compile(r"`([a-z]\w*(?:/[\w.*]+)+/?)`")
NAMED_OBJECT = re.compile(r"`(?:[A-Za-z_]\w*\.)*([A-Za-z_]\w+)(?:\([^`\n]*\))?=?`")

COMPOSITION_ROOTS = ("__init__.py", "__main__.py", "cli", "testing")
"""Modules that may import packages instead of modules: the places where the parts are put
together.
"""

CORE_DEPENDENCIES = frozenset({"aioflow", "msgpack", "msgspec"})
CORE_LAZY_DEPENDENCIES = frozenset({"numpy", "pyarrow"})
"""Core may reach for these inside a function: columns are an extra, and rows must work without
it.
"""

# Modules that may call a banned builtin, with the reason.
OPEN_ALLOWED = {
    "core/system_files.py": "part of SystemHost: the one place that touches the file system",
    "core/system_host.py": (
        "part of SystemHost: the pipe of a child's secret, and what the system tells of processes"
    ),
}
HASH_ALLOWED: dict[str, str] = {}

CIRCLES = ""
"""Modules that import each other, at start-up or inside functions. Only strike names out."""

CIRCLES_OF_TYPES = """
state.backend state.timers
"""
"""Modules that import each other if imports for type checkers count too. Only strike names out."""

ASKED_BY_NAME = {
    # The seams: objects of an application get the defaults of our interface here.
    "operators/source.py": (
        "checkpoint checkpoint_completed columnar current_split finished finished_splits fresh "
        "hold one_at_a_time pending_records stop timestamps",
        "an application's source or reader may lack what is optional",
    ),
    "operators/sink.py": (
        "check_sink close commits_globally full linger_ms name open parallelism_max "
        "reads_columns restored slow_remedy stays_here",
        "an application's sink, writer or committer may lack what is optional",
    ),
    "state/backend.py": ("configure needs_host", "optional for an application's state backend"),
    "task/restoring.py": ("unclaimed", "optional for an application's keyed backend"),
    "operators/aggregate/folding.py": ("mergeable", "optional for an application's aggregate"),
    "operators/process/functions.py": ("finish on_timer", "optional for an application's function"),
    # Objects of Python, the system and other libraries.
    "checkpoint/state_files.py": ("aclose", "only async generators have it"),
    "cluster/struct_classes.py": ("factory", "a default of msgspec"),
    "core/system_files.py": ("O_DSYNC", "Windows and older BSDs lack it"),
    "core/user_code.py": ("throw", "only coroutines have it"),
    "core/wire/columns.py": ("_fields", "of a NamedTuple"),
    "core/wire/kinds.py": (
        "_fields default_factory_takes_validated_data",
        "of a NamedTuple, and of pydantic since 2.10",
    ),
    "expressions/values.py": ("_fields", "of a NamedTuple"),
    "io/brokers/mqtt_client.py": (
        "MaximumPacketSize pending",
        "paho's properties have what the broker has set; sockets with TLS alone keep bytes",
    ),
    "io/bodies.py": ("_asdict tolist", "NamedTuple, numpy"),
    "io/conversion.py": ("_fields choices", "NamedTuple, pydantic"),
    "io/formats/format.py": ("tolist", "numpy"),
    "io/formats/protobuf_format.py": ("is_repeated", "protobuf before 6.31 lacks it"),
    "io/frames.py": ("columns schema", "tables of pandas, polars and Arrow"),
    "io/brokers/kafka_client.py": ("close", "the name differs by client of aiokafka"),
    "io/memory.py": ("aclose close writer", "iterators; and a misuse"),
    "io/queues.py": ("QueueShutDown", "since Python 3.13"),
    "monitoring/otel.py": ("force_flush", "the SDK of OpenTelemetry has it, its API not"),
    "network/admission.py": ("TCP_USER_TIMEOUT", "of Linux"),
    "network/batch_size.py": ("nbytes", "arrays, and what else tells its size"),
    "network/security.py": ("reason strerror", "differs by error of TLS and of sockets"),
    "operators/inlining.py": ("monitoring", "since Python 3.12"),
    "operators/results.py": ("_fields", "of a NamedTuple"),
    "operators/watermark_generators.py": ("on_event timestamp", "a datetime; a function or class"),
    "spark/bridge/connector.py": ("toDF", "of a Spark DataFrame of either kind"),
    "spark/bridge/source.py": ("_jdf", "of a DataFrame that is not Spark Connect's"),
    "spark/bridge/targets.py": (
        "org.apache.hadoop.fs.Path org.apache.spark.sql.execution.datasources.DataSource",
        "classes of the JVM",
    ),
    "spark/failures.py": (
        "_desc _message _origin _stackTrace getCondition org.apache.spark.util.Utils",
        "differs by version of PySpark",
    ),
    "spark/runner/runner.py": ("trace", "only some errors of Spark have it"),
    "spark/versions.py": ("fromDDL", "since PySpark 4.0"),
    "spark/workers/runner.py": ("args bridge", "asks connectors without loading pyarrow"),
    "task/ending.py": ("cr_frame", "only coroutines of Python have it"),
    "testing/plugin.py": ("param", "only parametrized requests of pytest have it"),
    "testing/virtual_loop.py": ("_swap_current_task", "since Python 3.12"),
    # Checks of arguments, whose type is not known before.
    "advice/hints.py": (
        "_aioflow_hint discover put_nowait write writer",
        "set on functions by a decorator; guesses what a wrong argument is",
    ),
    "api/job_streams.py": ("upstreams", "a wrong argument, before its type is imported"),
    "api/options.py": ("start upstreams", "wrong arguments, before their types are imported"),
    "api/runner.py": ("run", "a wrong argument"),
    "cli/cluster_access.py": ("allow_plaintext", "not an argument of each command"),
    "io/arguments.py": ("operator_name", "optional for the context of a test"),
    "operators/watermarks.py": ("on_event", "a wrong argument"),
    "operators/window/plan.py": ("add assign gap", "wrong arguments; windows of an application"),
}
"""Names that a module asks of an object that may not have them, with the reason.

Optional parts of our own interfaces are members of a base class with a default. Only strike out.
Dunder names and names in variables do not count.
"""

MODULES = sorted(PACKAGE.rglob("*.py"))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@cache
def trees() -> dict[str, ast.Module]:
    """The tree of each module of the package, by its name."""
    return {name_of(path): tree_of(path) for path in MODULES}


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def is_public(path: Path) -> bool:
    """True unless a part of the path begins with one underscore; `__init__` counts, `__main__`
    offers no names.
    """
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[-1] != "__main__" and not any(
        part.startswith("_") and not part.startswith("__") for part in parts
    )


def calls_of(tree: ast.Module, builtin: str) -> Iterator[int]:
    """Yields the lines that call a builtin by its bare name, leaving out `__hash__`, which is
    what `hash` is for.
    """
    stack: list[ast.AST] = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.FunctionDef) and node.name == "__hash__" and builtin == "hash":
            continue
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == builtin
        ):
            yield node.lineno
        stack.extend(ast.iter_child_nodes(node))


def package_imports(tree: ast.Module, path: Path) -> Iterator[tuple[int, str]]:
    """Yields the imports that take a name from one of our packages where a module was meant."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom):
            continue
        module = absolute_name(node, path)
        if not module.startswith("aioflow"):
            continue
        target = ROOT / Path(*module.split("."))
        if not target.is_dir():
            continue
        for alias in node.names:
            if not (target / f"{alias.name}.py").exists() and not (target / alias.name).is_dir():
                yield node.lineno, f"from {module} import {alias.name}"


def absolute_name(node: ast.ImportFrom, path: Path) -> str:
    if node.level == 0:
        return node.module or ""
    package = path.relative_to(ROOT).parent.parts
    base = package[: len(package) - node.level + 1]
    return ".".join((*base, *(node.module.split(".") if node.module else ())))


def imported_roots(tree: ast.Module) -> Iterator[tuple[int, str, bool]]:
    """Yields (line, top-level package, lazily) for each absolute import; lazily: in a function
    or for types only.
    """
    stack: list[tuple[ast.AST, bool]] = [(tree, False)]
    while stack:
        node, lazy = stack.pop()
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name.partition(".")[0], lazy
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.lineno, (node.module or "").partition(".")[0], lazy
        inside = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        types_only = isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        stack.extend((child, lazy or inside or types_only) for child in ast.iter_child_nodes(node))


def imported_modules(path: Path, modules: Mapping[str, Path], types: bool) -> set[str]:
    """Returns the modules of `modules` that one imports, inside functions too.

    `types`: whether imports for type checkers alone count.
    """
    found, stack = set(), list[ast.AST](tree_of(path).body)
    while stack:
        node = stack.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = absolute_name(node, path)
            named = {f"{package}.{alias.name}" for alias in node.names}
            found |= {package} if named - modules.keys() else set()
            found |= named
        elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            stack.extend(node.orelse + (node.body if types else []))
        else:
            stack.extend(ast.iter_child_nodes(node))
    return found & modules.keys()


def modules_in_circles(graph: Mapping[str, set[str]]) -> set[str]:
    """Returns the modules that reach themselves through imports."""

    def reached(module: str) -> set[str]:
        seen, stack = set[str](), [module]
        while stack:
            stack.extend(new := graph[stack.pop()] - seen)
            seen |= new
        return seen

    return {module for module in graph if module in reached(module)}


@pytest.mark.parametrize(
    ("types", "listed"), [(False, CIRCLES), (True, CIRCLES_OF_TYPES)], ids=["lazy", "types"]
)
def test_modules_do_not_import_each_other(types: bool, listed: str) -> None:
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in MODULES
    }
    graph = {name: imported_modules(path, modules, types) for name, path in modules.items()}

    found = {name.removeprefix("aioflow.") for name in modules_in_circles(graph)}

    assert not (new := sorted(found - set(listed.split()))), f"{new} import each other in a circle"
    assert not (gone := sorted(set(listed.split()) - found)), f"no circle: strike out {gone}"


def test_check_for_circles_sees_lazy_imports_and_those_for_types(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.test_architecture.ROOT", tmp_path)
    sources = {
        "a": "def f():\n    from . import b",
        "b": "import p.c",
        "c": "if TYPE_CHECKING:\n    from p.a import A",
    }
    modules = {f"p.{name}": tmp_path / "p" / f"{name}.py" for name in sources}
    (tmp_path / "p").mkdir()
    for name, source in sources.items():
        (tmp_path / "p" / f"{name}.py").write_text(source, encoding="utf-8")

    for types, circle in ((False, set()), (True, set(modules))):
        graph = {name: imported_modules(path, modules, types) for name, path in modules.items()}
        assert modules_in_circles(graph) == circle


def test_docstrings_name_modules_that_exist() -> None:
    modules = {".".join(path.relative_to(PACKAGE).with_suffix("").parts) for path in MODULES}
    packages = {path.name for path in PACKAGE.iterdir() if path.is_dir()}

    missing = [
        f"{name_of(path)}: {name}"
        for path in MODULES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        for name in NAMED_MODULE.findall(ast.get_docstring(node) or "")
        if name.partition(".")[0] in packages
        and not any(name == module or name.startswith(f"{module}.") for module in modules)
        and not (PACKAGE / name.replace(".", "/")).is_dir()
        and name not in FOREIGN_MODULES
    ]

    assert not missing, "these modules were moved or renamed"


def test_imports_keep_the_layers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT))
    # The linter sets up logging, which would silence every logger that the tests after this one
    # listen to.
    monkeypatch.setattr("importlinter.cli.logging_config.dictConfig", lambda config: None)

    status = lint_imports(config_filename=str(ROOT / "pyproject.toml"), cache_dir=None)

    assert status == EXIT_STATUS_SUCCESS, capsys.readouterr().out


@pytest.mark.parametrize(
    ("files", "verdict"),
    [
        ({"state/heap.py": "import aioflow.core.scope", "core/scope.py": ""}, "3 kept, 0 broken"),
        (
            {
                "state/heap.py": "import aioflow.operators.window.operator",
                "operators/window/operator.py": "",
            },
            "2 kept, 1 broken",
        ),
        (
            {"mailbox/mailbox.py": "import aioflow.network.gate", "network/gate.py": ""},
            "2 kept, 1 broken",
        ),
        (
            {"core/host.py": "def f():\n    import aioflow.api.flow", "api/flow.py": ""},
            "2 kept, 1 broken",
        ),
        (
            {"task/chain.py": "import aioflow.testing.harness", "testing/harness.py": ""},
            "2 kept, 1 broken",
        ),
        ({"protocol/credit.py": "import asyncio"}, "2 kept, 1 broken"),
        (
            {"protocol/rpc.py": "from ..core.host import Host", "core/host.py": "Host = 1"},
            "2 kept, 1 broken",
        ),
        ({"checkpoint/coordinator.py": "import time"}, "2 kept, 1 broken"),
        ({"cluster/heartbeat.py": "from random import Random"}, "2 kept, 1 broken"),
        ({"core/host.py": "import aiohttp"}, "2 kept, 1 broken"),
        ({"helpers/misc.py": ""}, "2 kept, 1 broken"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else value,
)
def test_contracts_see_a_planted_import(
    files: dict[str, str], verdict: str, tmp_path: Path
) -> None:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for name in files:
        (tmp_path / "aioflow" / name).parent.mkdir(parents=True, exist_ok=True)
    for package in [tmp_path / "aioflow", *(tmp_path / "aioflow").rglob("*/")]:
        (package / "__init__.py").touch()
    for name, source in files.items():
        (tmp_path / "aioflow" / name).write_text(source, encoding="utf-8")

    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    assert f"Contracts: {verdict}" in done.stdout, done.stdout + done.stderr
    assert done.returncode == (0 if "0 broken" in verdict else 1)


def test_modules_open_no_files_of_their_own() -> None:
    found = {
        name: lines
        for name, tree in trees().items()
        if name not in OPEN_ALLOWED and (lines := list(calls_of(tree, "open")))
    }
    assert not found, "calls of open(), by line: go through Host, which simulation replaces"


def test_modules_never_decide_by_hash() -> None:
    found = {
        name: lines
        for name, tree in trees().items()
        if name not in HASH_ALLOWED and (lines := list(calls_of(tree, "hash")))
    }
    assert not found, "calls of hash(), by line: it differs by process, use core.keygroups"


def test_modules_say_what_they_are() -> None:
    lacking = [name for name, tree in trees().items() if not ast.get_docstring(tree)]
    assert not lacking, "no docstring: what is the module, and what does it keep?"


def test_public_modules_list_their_names() -> None:
    lacking = [
        name_of(path) for path in MODULES if is_public(path) and not assigns_all(tree_of(path).body)
    ]
    assert not lacking, "a public module needs __all__"


def assigns_all(body: list[ast.stmt]) -> bool:
    """Returns whether the body of a module assigns `__all__`, or only says what the module is."""
    if all(isinstance(node, ast.Expr) for node in body):
        return True
    targets = [
        target.id
        for node in body
        if isinstance(node, (ast.Assign, ast.AnnAssign))
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    ]
    return "__all__" in targets


def test_modules_hold_one_idea() -> None:
    lines = {name_of(path): path.read_text(encoding="utf-8").count("\n") for path in MODULES}
    long = {
        name: count
        for name, count in lines.items()
        if count > MODULE_LINES_MAX and name not in LONG_ALLOWED
    }
    assert not long, f"split modules with more than {MODULE_LINES_MAX} lines"


def test_modules_import_modules_not_packages() -> None:
    found = {
        name_of(path): imports
        for path in MODULES
        if path.relative_to(PACKAGE).parts[0] not in COMPOSITION_ROOTS
        and (imports := list(package_imports(tree_of(path), path)))
    }
    assert not found, "imports through a package, by line: name the module, which loads less"


def test_core_needs_nothing_but_the_standard_library_and_msgpack() -> None:
    allowed = CORE_DEPENDENCIES | sys.stdlib_module_names
    found = [
        (name, line, root)
        for name, tree in trees().items()
        if name.startswith("core/")
        for line, root, lazy in imported_roots(tree)
        if root not in allowed and not (lazy and root in CORE_LAZY_DEPENDENCIES)
    ]
    assert not found, f"core may import {sorted(CORE_DEPENDENCIES)} and the stdlib"


def names_asked(tree: ast.Module) -> set[str]:
    """Returns the names that `getattr` and `hasattr` look up, without dunder names."""
    return {
        node.args[1].value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("getattr", "hasattr", "inspect.getattr_static")
        and isinstance(node.args[1], ast.Constant)
        and not node.args[1].value.startswith("__")
    }


def test_optional_parts_have_defaults() -> None:
    asked = {name: found for name, tree in trees().items() if (found := names_asked(tree))}
    listed = {name: set(names.split()) for name, (names, _) in ASKED_BY_NAME.items()}
    assert asked == listed, (
        "names that getattr and hasattr look up: give the interface a default and call it, or "
        "list a name of another library; strike out what is gone"
    )


def test_check_for_optional_parts_sees_each_spelling() -> None:
    source = "getattr(a, 'x', 1); hasattr(a, 'y'); getattr(a, name); getattr(a, '__z__', 1)"
    assert names_asked(ast.parse(source)) == {"x", "y"}


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("x = open('f')", [1]),
        ("async def f(self):\n    await self.open()\n    host.open('f')", []),
        ("def open(self): ...", []),
        ("class A:\n    def f(self):\n        return [open(p) for p in self]", [3]),
    ],
)
def test_check_for_open_sees_bare_calls_alone(source: str, lines: list[int]) -> None:
    assert list(calls_of(ast.parse(source), "open")) == lines


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("route = hash(key) % n", [1]),
        ("class A:\n    def __hash__(self):\n        return hash(self.name)", []),
        ("class A:\n    def route(self):\n        return hash(self.name)", [3]),
    ],
)
def test_check_for_hash_leaves_dunder_hash_alone(source: str, lines: list[int]) -> None:
    assert list(calls_of(ast.parse(source), "hash")) == lines


def test_check_for_package_imports_resolves_relative_names() -> None:
    source = ast.parse(
        "from .. import core\nfrom ..core import NoSuchModule\nfrom ..core.host import Host"
    )
    found = list(package_imports(source, PACKAGE / "operators" / "operator.py"))
    assert found == [(2, "from aioflow.core import NoSuchModule")]


def test_check_for_core_imports_tells_lazy_from_eager() -> None:
    source = ast.parse(
        "import numpy\ndef f():\n    import pyarrow.csv\nif TYPE_CHECKING:\n    from numpy import "
        "array"
    )
    assert sorted(imported_roots(source)) == [
        (1, "numpy", False),
        (3, "pyarrow", True),
        (5, "numpy", True),
    ]


def test_package_is_found_where_it_is_checked() -> None:
    spec = importlib.util.find_spec("aioflow")
    assert spec is not None
    assert spec.origin == str(PACKAGE / "__init__.py")


def named_files(text: str) -> list[str]:
    """Returns the files and folders of this repository that a page names, `*` included."""
    rooms = {path.name for folder in (ROOT, PACKAGE) for path in folder.iterdir() if path.is_dir()}
    return [name for name in NAMED_FILE.findall(text) if name.partition("/")[0] in rooms]


@pytest.mark.parametrize("page", PAGES)
def test_page_names_files_that_exist(page: str) -> None:
    lost = [
        name
        for name in named_files((ROOT / page).read_text(encoding="utf-8"))
        if not any([*ROOT.glob(name), *PACKAGE.glob(name)])
    ]
    assert not lost, f"{page} names files that are not there: moved, or spelled wrongly?"


def test_pages_have_no_marks_of_a_merge() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    marked = [page for page in pages if MERGE_MARK.search(page.read_text(encoding="utf-8"))]
    assert not marked, "keep one of both sides, and remove the lines with <<<<<<< and >>>>>>>"


def test_check_for_named_files_leaves_other_words_alone() -> None:
    text = "`task/chain.py`, `tests/spark`, `io/*_files.py`, but `a/b`, `/jobs/x` and `af.io.csv`"
    assert named_files(text) == ["task/chain.py", "tests/spark", "io/*_files.py"]


@cache
def defined_names() -> frozenset[str]:
    """Returns the names of the package: classes, functions, parameters, variables."""
    found = set()
    for tree in trees().values():
        for node in ast.walk(tree):
            match node:
                case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                    found.add(name)
                case ast.AsyncFunctionDef(name=name) | ast.arg(arg=name):
                    found.add(name)
                case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                    found.add(name)
                case ast.keyword(arg=str(name)):
                    found.add(name)
    return frozenset(found)


def is_of_tests(name: str) -> bool:
    """Returns whether a test defines a class, function, parameter or variable of this name."""
    defined = re.compile(rf"\b(?:(?:class|def) {name}\b|{name}\s*[:=])")
    return any(
        defined.search(path.read_text(encoding="utf-8")) for path in (ROOT / "tests").rglob("*.py")
    )


def named_objects(text: str) -> list[str]:
    """Returns the classes, functions, parameters and attributes that a page names.

    Left out are blocks of code, files, and the ids of behaviours.
    """
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    return [
        name
        for name in NAMED_OBJECT.findall(prose)
        if name not in ("py", "toml", "md", "txt") and not re.fullmatch(r"[A-Z]?\d[\d.]*", name)
    ]


@pytest.mark.parametrize("page", PAGES)
def test_page_names_objects_that_exist(page: str) -> None:
    named = set(named_objects((ROOT / page).read_text(encoding="utf-8")))

    unknown = sorted(named - defined_names() - FOREIGN_NAMES)
    lost = [name for name in unknown if not is_of_tests(name)]

    assert not lost, f"{page} names {lost}, which nothing defines: renamed, or spelled wrongly?"


def test_check_for_named_objects_leaves_other_words_alone() -> None:
    text = (
        "`Host`, `flow.run()`, `af.io.csv(path)`, `every=`, `a b`, `x.py`, `F6.1`, `task/chain.py`"
    )
    assert named_objects(text) == ["Host", "run", "csv", "every"]
