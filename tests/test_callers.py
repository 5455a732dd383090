"""No public name of the runtime is called by tests alone.

A name counts as used if its word stands anywhere in the package as a name or an attribute, beside
its own definition. So the check finds a name that is used nowhere, and never complains of one that
is used.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "aioflow"
ROOMS = (
    *("mailbox", "network", "protocol", "task", "checkpoint", "cluster"),
    *("graph", "columns", "inspection", "advice"),
)

EXCEPTIONS = {
    "checkpoint.savepoint.Savepoint.edit": "for users: `af.Savepoint` edits savepoints",
    "checkpoint.savepoint.SavepointEdit.keep_entries": "for users",
    "checkpoint.savepoint.SavepointEdit.map_values": "for users",
    "checkpoint.savepoint.SavepointEdit.remove_operator": "for users",
    "checkpoint.savepoint.SavepointEdit.remove_state": "for users",
    "checkpoint.savepoint.SavepointEdit.rename_operator": "for users",
    "cluster.collector.tune_gc": "for users: `af.tune_gc()`",
    "cluster.restart.failure_rate": "for users: `restart=af.failure_rate(...)`",
    "cluster.scheduler.SlotScheduler.slot_of": "tests look up where a subtask runs",
    "protocol.credit.CreditReceiver.is_waiting": "tests look at a channel that waits for buffers",
    "protocol.framing.FrameDecoder.buffered_bytes": "tests bound the memory of a decoder",
    "protocol.producer.ProducerExchange.kept_frames": "tests bound the frames kept for a reset",
    "protocol.rpc.RpcPeer.open_calls": "tests look for calls without an answer",
    "task.context.SubtaskRuntimeContext.get_aggregating_state": "for users: `ctx` in `open`",
    "task.context.SubtaskRuntimeContext.get_map_state": "for users: `ctx` in `open`",
    "task.context.SubtaskRuntimeContext.get_raw_keyed_state": "for users: `ctx` in `open`",
    "task.context.SubtaskRuntimeContext.get_reducing_state": "for users: `ctx` in `open`",
}
"""Names without a caller, with the reason. This list only shrinks, but for the API of users."""


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


@cache
def words() -> frozenset[str]:
    """Returns each word that the package uses as a name or an attribute."""
    return frozenset(
        word for path in PACKAGE.rglob("*.py") for word in used(ast.parse(path.read_text("utf-8")))
    )


def used(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Name):
            yield node.id


def defined(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, str]]:
    """Yields the public classes, functions, methods and properties: (qualified name, name)."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if node.name.startswith("_"):
                continue
            yield f"{prefix}.{node.name}", node.name
            if isinstance(node, ast.ClassDef):
                yield from defined(node.body, f"{prefix}.{node.name}")


def without_a_caller() -> list[str]:
    return sorted(
        qualified
        for room in ROOMS
        for path in (PACKAGE / room).rglob("*.py")
        for qualified, name in defined(ast.parse(path.read_text("utf-8")).body, module_of(path))
        if name not in words()
    )


def test_each_public_name_of_the_runtime_has_a_caller_in_the_package() -> None:
    unused = set(without_a_caller()) - set(EXCEPTIONS)
    assert not unused, "nothing in aioflow/ uses these names: connect them, or remove them"


def test_each_exception_is_still_one() -> None:
    gone = set(EXCEPTIONS) - set(without_a_caller())
    assert not gone, "these names have callers, or are gone: strike them out of the lists above"


def test_unused_method_is_found() -> None:
    tree = ast.parse("class Box:\n    def take(self): ...\n    def put(self): self.take()\n")
    names = set(used(tree))
    assert [name for _, name in defined(tree.body, "m") if name not in names] == ["Box", "put"]
