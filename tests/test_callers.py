"""No public name of the package is called by tests alone.

A name counts as used if its word stands anywhere in the package as a name or an attribute, beside
its own definition. So the check finds a name that is used nowhere, and never complains of one that
is used. In the packages that users call, a name counts too if their documents or the examples have
it. A function with a decorator that takes arguments, such as a route, is called by its registry.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "aioflow"
ROOMS = (
    *("mailbox", "network", "protocol", "task", "checkpoint", "cluster"),
    *("graph", "columns", "inspection", "advice", "monitoring", "cli"),
)
"""Packages of which users see nothing, or only what has other names."""

ROOMS_OF_USERS = (
    *("core", "expressions", "state", "operators", "io", "api", "testing", "spark", "sql"),
)
PAGES_OF_ENGINE = ("architecture.md", "behaviours.md", "decisions")
"""Pages that name parts of the engine, and so do not show that users call them."""

EXCEPTIONS = {
    "checkpoint.savepoint.Savepoint.edit": "for users: `af.Savepoint` edits savepoints",
    "checkpoint.savepoint.SavepointEdit.keep_entries": "for users",
    "checkpoint.savepoint.SavepointEdit.map_values": "for users",
    "checkpoint.savepoint.SavepointEdit.remove_operator": "for users",
    "checkpoint.savepoint.SavepointEdit.remove_state": "for users",
    "checkpoint.savepoint.SavepointEdit.rename_operator": "for users",
    "cluster.collector.tune_gc": "for users: `af.tune_gc()`",
    "cluster.restart.failure_rate": "for users: `restart=af.failure_rate(...)`",
    "api.streams.DataStream.disable_chaining": "for users",
    "cli.demo.NameAirline.process_broadcast_element": "called by the operator, as of users",
    "cli.demo.NameAirline.process_element": "called by the operator, as of users",
    "cli.demo.QuietAirport.process_element": "called by the operator, as of users",
    "core.functions.WindowContext.window_state": "for users: a window function's context",
    "core.metrics.Counter.dec": "for users: `ctx.metrics`",
    "core.states.MapState.put_all": "for users",
    "monitoring.app.monitor_app": "for users: `af.monitor_app()`",
    "monitoring.otel.OpenTelemetryExport": "for users: an exporter of `docs/rest.md`",
    "inspection.tracing.traced": "for users: spans of calls, in `docs/operations.md`",
    "monitoring.otel_traces.OpenTelemetryTraces": "for users: traces of `docs/operations.md`",
    "operators.watermarks.WatermarkStrategy.custom": "for users",
    "operators.watermarks.WatermarkStrategy.no_watermarks": "for users",
    "operators.watermarks.WatermarkStrategy.punctuated": "for users",
    "operators.window.context.BoundWindowContext.window_state": "for users",
    "spark.streaming.processor.KeyProcessor.handleExpiredTimer": "Spark calls it",
    "spark.streaming.processor.KeyProcessor.handleInputRows": "Spark calls it",
    "state.operator_state.BroadcastState.put_all": "for users",
    "state.operator_state.ReadOnlyBroadcastState.put_all": "refuses what users may try",
    "state.views.MapView.put_all": "for users",
    "testing.fault_proxy.FaultProxy.corrupt_next": "for tests of users",
    "testing.fault_proxy.FaultProxy.cut_after": "for tests of users",
    "testing.fault_proxy.FaultProxy.stall": "for tests of users",
    "testing.simulation.faults.Faults.swarm": "for tests of users",
    "testing.simulation.network.SimListener.serve_forever": "part of asyncio's server",
    "testing.simulation.network.SimListener.start_serving": "part of asyncio's server",
    "testing.simulation.network.SimListener.wait_closed": "part of asyncio's server",
    "testing.simulation.transport.SimTransport.can_write_eof": "part of asyncio's transport",
    "testing.simulation.transport.SimTransport.get_protocol": "part of asyncio's transport",
    "testing.simulation.transport.SimTransport.get_write_buffer_limits": "part of the transport",
    "testing.simulation.transport.SimTransport.writelines": "part of asyncio's transport",
    "cluster.scheduler.SlotScheduler.slot_of": "tests look up where a subtask runs",
    "protocol.credit.CreditReceiver.is_waiting": "tests look at a channel that waits for buffers",
    "protocol.framing.FrameDecoder.buffered_bytes": "tests bound the memory of a decoder",
    "protocol.producer.ProducerExchange.kept_frames": "tests bound the frames kept for a reset",
    "protocol.rpc.RpcPeer.open_calls": "tests look for calls without an answer",
    "task.context.SubtaskRuntimeContext.get_aggregating_state": "for users: `ctx` in `open`",
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


@cache
def words_of_users() -> frozenset[str]:
    """Returns each word of the documents for users and of the examples."""
    pages = [
        page
        for page in (PACKAGE.parent / "docs").rglob("*.md")
        if not set(page.parts) & set(PAGES_OF_ENGINE)
    ]
    texts = [PACKAGE.parent / "README.md", *pages, *(PACKAGE.parent / "examples").glob("*.py")]
    return frozenset(word for path in texts for word in re.findall(r"\w+", path.read_text("utf-8")))


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
            if node.name.startswith("_") or is_registered(node):
                continue
            yield f"{prefix}.{node.name}", node.name
            if isinstance(node, ast.ClassDef):
                yield from defined(node.body, f"{prefix}.{node.name}")


def is_registered(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> bool:
    """Returns whether a decorator with arguments hands the function to others, like a route."""
    return not isinstance(node, ast.ClassDef) and any(
        isinstance(decorator, ast.Call) for decorator in node.decorator_list
    )


@cache
def without_a_caller() -> list[str]:
    return sorted(
        {
            qualified
            for room in ROOMS + ROOMS_OF_USERS
            for path in (PACKAGE / room).rglob("*.py")
            for qualified, name in defined(ast.parse(path.read_text("utf-8")).body, module_of(path))
            if name not in words() and not (room in ROOMS_OF_USERS and name in words_of_users())
        }
    )


def test_each_package_is_checked() -> None:
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert packages == {*ROOMS, *ROOMS_OF_USERS}


def test_each_public_name_has_a_caller_in_the_package_or_is_for_users() -> None:
    unused = set(without_a_caller()) - set(EXCEPTIONS)
    assert not unused, "nothing in aioflow/ uses these names: connect them, or remove them"


def test_each_exception_is_still_one() -> None:
    gone = set(EXCEPTIONS) - set(without_a_caller())
    assert not gone, "these names have callers, or are gone: strike them out of the lists above"


def test_unused_method_is_found() -> None:
    tree = ast.parse("class Box:\n    def take(self): ...\n    def put(self): self.take()\n")
    names = set(used(tree))
    assert [name for _, name in defined(tree.body, "m") if name not in names] == ["Box", "put"]
