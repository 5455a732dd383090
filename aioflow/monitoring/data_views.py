"""Shows users' data: keyed state, and samples of the records on an edge.

Access needs the token. With the option `show_data` every client that may read has access.
"""

from __future__ import annotations

import asyncio
import reprlib
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from aioflow.core.errors import AioflowError
from aioflow.core.keygroups import key_group, subtask_for_group
from aioflow.monitoring.answers import BadRequest, NotFound, Unavailable, get
from aioflow.monitoring.events import Stream
from aioflow.monitoring.monitor import Call
from aioflow.state.backend import INTERNAL_PREFIX

if TYPE_CHECKING:
    from aioflow.core.elements import RecordBatch
    from aioflow.graph.job_graph import JobEdge, JobVertex
    from aioflow.graph.stream_graph import StreamNode
    from aioflow.monitoring.view import JobView
    from aioflow.state.backend import KeyedStateBackend

__all__ = ["look_up", "overview", "tap"]

KEYS_COUNTED_MAX = 1_000
ITEMS_SHOWN = 50
TIMEOUT_S = 5.0
TAP_EVERY_S = 0.5
TAP_RECORDS = 10
"""Maximum number of records in one event. The events are a sample of the stream."""

VALUE_CHARACTERS_MAX = 500

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = VALUE_CHARACTERS_MAX
_repr.maxdict = _repr.maxlist = _repr.maxtuple = _repr.maxset = 50
_repr.maxlevel = 6


@get(
    "/aioflow/jobs/{jobid}/state", "StateOverview", "Keyed state: operators, names, numbers of keys"
)
async def overview(call: Call) -> Any:
    """Answers GET /aioflow/jobs/:jobid/state.

    The answer lists the operators with keyed state, with the number of keys and the size of each.
    """
    view = call.job
    metrics = call.monitor.metrics(view)
    operators = []
    for vertex in view.graph.vertices:
        sizes = [one.get("lastCheckpointStateSize") for one in metrics.of_vertex(vertex)]
        for node, uid in zip(vertex.nodes, vertex.uids, strict=True):
            if not node.keyed:
                continue
            subtasks = []
            for index in range(vertex.parallelism):
                try:
                    states = await _ask(view, vertex, index, node, _summary)
                except (AioflowError, Unavailable):
                    states = None
                subtasks.append(
                    {"subtask": index, "states": states, "task-checkpoint-size": sizes[index]}
                )
            place = {"operator": uid, "name": node.name, "vertex-id": view.vertex_ids[vertex.id]}
            operators.append({**place, "backend": view.state_backend, "subtasks": subtasks})
    return {"operators": operators}


@get(
    "/aioflow/jobs/{jobid}/state/{operator}/{name}",
    "StateValue",
    "The value of a key",
    "key",
    "text",
)
async def look_up(call: Call) -> Any:
    """Answers GET /aioflow/jobs/:jobid/state/:operator/:name?key=.

    The answer is the value of a key. Without a key it is some of the pairs of key and value.
    """
    call.require_data()
    view, name = call.job, call.params["name"]
    vertex, node = _keyed_operator(view, call.params["operator"])
    if "key" not in call.query and "text" not in call.query:
        pairs: list[tuple[Any, Any]] = []
        names: set[str] = set()
        for index in range(vertex.parallelism):
            if len(pairs) < ITEMS_SHOWN:
                there, found = await _ask(
                    view, vertex, index, node, partial(_items, name, ITEMS_SHOWN - len(pairs))
                )
                names.update(there)
                pairs += found
        _check_state(name, node, names)
        return {
            "name": name,
            "items": [{"key": shown(key), "value": shown(value)} for key, value in pairs],
        }
    key = _key(call)
    try:
        index = subtask_for_group(
            key_group(key, vertex.max_parallelism), vertex.parallelism, vertex.max_parallelism
        )
    except (AioflowError, TypeError) as error:
        raise BadRequest(f"no key can be like that: {error}") from error
    there, is_found, value = await _ask(view, vertex, index, node, partial(_get, name, key))
    if name not in there:  # A subtask without any key may not know the state.
        names = set(there)
        for other in range(vertex.parallelism):
            names.update(await _ask(view, vertex, other, node, _names))
        _check_state(name, node, names)
    return {
        "name": name,
        "key": shown(key),
        "subtask": index,
        "found": is_found,
        "value": shown(value) if is_found else None,
    }


def _check_state(name: str, node: StreamNode, names: set[str]) -> None:
    if name not in names:
        have = ", ".join(repr(one) for one in sorted(names)) or "none so far"
        raise NotFound(f"operator {node.name!r} has no state {name[:80]!r}; it has {have}")


def _key(call: Call) -> Any:
    """Returns the key that the query names.

    The parameter `text=` is the key itself. `key=` is JSON: a list becomes a tuple, and invalid
    JSON counts as text.
    """
    if "text" in call.query:
        return call.query["text"]
    try:
        return _hashable(msgspec.json.decode(call.query["key"].encode("utf-8", "replace")))
    except (msgspec.DecodeError, RecursionError):
        return call.query["key"]


def _hashable(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_hashable(one) for one in value)
    if value is None or isinstance(value, dict):
        raise BadRequest(
            "key is null or an object in JSON, expected text, a number, true, false, or a list of "
            "these"
        )
    return value


def _keyed_operator(view: JobView, wanted: str) -> tuple[JobVertex, StreamNode]:
    keyed = [
        (vertex, node, uid)
        for vertex in view.graph.vertices
        for node, uid in zip(vertex.nodes, vertex.uids, strict=True)
        if node.keyed
    ]
    for vertex, node, uid in keyed:
        if wanted in (uid, node.name):
            return vertex, node
    raise NotFound(
        f"no operator with keyed state is called {wanted[:80]!r}; there are "
        f"{', '.join(uid for *_, uid in keyed) or 'none'}"
    )


async def _ask(view: JobView, vertex: JobVertex, index: int, node: StreamNode, query: Any) -> Any:
    """Returns the result of `query` on the keyed state of one operator in a subtask.

    Raises Unavailable if the subtask is busy with one element for too long, and JobNotRunning if
    the subtask does not run.
    """
    try:
        async with asyncio.timeout(TIMEOUT_S):
            return await view.query_state(vertex, index, node.id, query)
    except TimeoutError:
        raise Unavailable(
            f"subtask {index} of {node.name!r} is busy, its state was not read within "
            f"{TIMEOUT_S:g} s"
        ) from None


# Module-level functions with plain arguments, because they may be sent to another process.


def _names(backend: KeyedStateBackend) -> list[str]:
    return [name for name in backend.names() if not name.startswith(INTERNAL_PREFIX)]


def _summary(backend: KeyedStateBackend) -> list[dict[str, Any]]:
    found = []
    for name in _names(backend):
        count = len(backend.items(name, limit=KEYS_COUNTED_MAX))
        found.append({"name": name, "keys": count, "more": count == KEYS_COUNTED_MAX})
    return found


def _items(
    name: str, limit: int, backend: KeyedStateBackend
) -> tuple[list[str], list[tuple[Any, Any]]]:
    names = _names(backend)
    return names, backend.items(name, limit=limit) if name in names else []


def _get(name: str, key: Any, backend: KeyedStateBackend) -> tuple[list[str], bool, Any]:
    names = _names(backend)
    if name not in names:
        return names, False, None
    value = backend.query(name, key, None, None)
    return names, value is not None, value


def shown(value: Any) -> str:
    """Returns the value's `repr`, shortened if it is long. If a user's `__repr__` fails, returns a
    note about this.
    """
    try:
        return _repr.repr(value)[: 2 * VALUE_CHARACTERS_MAX]
    except Exception as error:  # noqa: BLE001  # A user's `__repr__` may raise anything.
        return f"<{type(value).__name__} whose repr raised {type(error).__name__}>"


# Samples of records.


@get(
    "/aioflow/jobs/{jobid}/tap",
    "Events",
    "Some of the records on an edge (text/event-stream)",
    "edge",
)
async def tap(call: Call) -> web.StreamResponse:
    """Answers GET /aioflow/jobs/:jobid/tap?edge=SOURCE-TARGET with a stream of events `records`.

    Twice a second, an event shows a sample of the records on the edge.
    """
    call.require_data()
    view = call.job
    node = _producer(view, call.query.get("edge", ""))
    taps = view.taps
    if taps is None:
        raise NotFound("records of this job cannot be looked at here")
    newest: deque[tuple[Any, int | None]] = deque(maxlen=TAP_RECORDS)
    seen = 0

    def look(batch: RecordBatch) -> None:
        nonlocal seen
        seen += len(batch.values)
        first = max(len(batch.values) - TAP_RECORDS, 0)
        for position in range(first, len(batch.values)):
            newest.append(
                (
                    batch.values[position],
                    None if batch.timestamps is None else batch.timestamps[position],
                )
            )

    stream = Stream(call)
    async with stream:
        taps.add_tap(view.id, node.id, look)
        try:
            while call.monitor.sampler.runs and not view.status.is_terminal:
                await asyncio.sleep(TAP_EVERY_S)
                records = [
                    {"value": shown(value), "timestamp": timestamp} for value, timestamp in newest
                ]
                newest.clear()
                await stream.send("records", {"now": call.now_ms, "seen": seen, "records": records})
                seen = 0
        finally:
            taps.remove_tap(view.id, node.id, look)
    return stream.response


def _producer(view: JobView, edge: str) -> StreamNode:
    source, _, target = edge.partition("-")
    for one in view.graph.edges:
        if _is(view, one, source, target):
            return view.graph.vertex(one.source).nodes[one.operator_index]
    raise NotFound(
        f"there is no edge {edge[:80]!r}; name it by the ids of its vertices: SOURCE-TARGET"
    )


def _is(view: JobView, edge: JobEdge, source: str, target: str) -> bool:
    return view.vertex_ids[edge.source] == source and view.vertex_ids[edge.target] == target
