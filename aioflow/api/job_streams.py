"""The streams of a flow in its running job: the operators that made them, their taps and inlets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from aioflow.core.errors import GraphError, StateError, did_you_mean
from aioflow.graph.optimize import fields_seen, is_taken_apart
from aioflow.io.pushing import InletSource, PushInlet, PushSource
from aioflow.operators.sink import commits

if TYPE_CHECKING:
    from aioflow.api.streams import DataStream
    from aioflow.core.scope import TapPlace
    from aioflow.graph.job_graph import JobGraph
    from aioflow.graph.stream_graph import StreamGraph, StreamNode

__all__ = ["JobStreams"]

T = TypeVar("T")


class JobStreams:
    """Finds the operators of a job by a stream or a uid.

    `announced` are the streams that `flow.run(subscribe=...)` named.
    """

    def __init__(
        self, graph: StreamGraph, job_graph: JobGraph, announced: Sequence[DataStream[Any]]
    ) -> None:
        self._graph = graph
        self._job_graph = job_graph
        self._name = job_graph.name
        self._announced = announced

    def inlets(self) -> list[tuple[str, PushInlet[Any]]]:
        """Returns the inlets of the job, each with the name of its source."""
        return [
            (node.name, node.source.inlet)
            for node in self._graph.nodes.values()
            if isinstance(node.source, InletSource) and node.source.inlet is not None
        ]

    def inlet(self, stream: DataStream[T]) -> PushInlet[T]:
        """Returns the inlet of the push source that made `stream`. Raises GraphError for any other
        stream.
        """
        node_id = self.one_node(
            stream,
            "cannot be pushed into: job.input(stream) takes the stream of "
            "flow.source(af.io.push())",
        )
        node = self._graph.nodes[node_id]
        inlet = node.source.inlet if isinstance(node.source, PushSource) else None
        if inlet is None:
            raise GraphError(
                f"{node.name!r} cannot be pushed into: job.input(stream) takes the stream of "
                "flow.source(af.io.push())"
            )
        return inlet

    def uid_of(self, operator: DataStream[Any] | str) -> str:
        """Returns the uid of an operator. A text counts as a uid, which is checked later."""
        if isinstance(operator, str):
            return operator
        node_id = self.one_node(operator, "is no single operator: name one of them")
        return self._graph.uids()[node_id]

    def node_with_uid(self, uid: str) -> int:
        """Returns the id of the node with this uid. Raises StateError if there is none."""
        uids = self._graph.uids()
        node_id = next((node_id for node_id, known in uids.items() if known == uid), None)
        if node_id is None:
            keyed = sorted(
                uids[node_id] for node_id, node in self._graph.nodes.items() if node.keyed
            )
            have = (
                f"keyed state is that of {', '.join(map(repr, keyed))}"
                if keyed
                else "none of its operators has keyed state"
            )
            raise StateError(
                f"job {self._name!r} has no operator with uid {uid!r}: "
                f"{have}{did_you_mean(uid, keyed)}"
            )
        return node_id

    def one_node(self, stream: DataStream[Any], otherwise: str) -> int:
        """Returns the id of the node that makes `stream`.

        Raises GraphError for a union of several streams. `otherwise` is the end of the error
        message.
        """
        node_id, *more = self.nodes(stream)
        if more:
            raise GraphError(f"a union of {len(more) + 1} streams {otherwise}")
        return node_id

    def nodes(self, stream: DataStream[Any]) -> tuple[int, ...]:
        """Returns the ids of the nodes that make `stream`. Raises GraphError if the job does not
        run them.
        """
        if not hasattr(stream, "upstreams"):
            raise GraphError(
                f"job {self._name!r} was asked for {stream!r} of type {type(stream).__name__}, "
                "expected a stream of its flow"
            )
        ids = tuple(upstream.node_id for upstream in stream.upstreams)
        running = {node.id for vertex in self._job_graph.vertices for node in vertex.nodes}
        if stream.flow.name != self._name or not running.issuperset(ids):
            raise GraphError(
                f"{stream!r} of flow {stream.flow.name!r} is no part of job {self._name!r}: take a "
                "stream that was in its flow when it began"
            )
        return ids

    def places(self, stream: DataStream[Any]) -> tuple[TapPlace, ...]:
        """Returns the places where taps can observe `stream`. Raises GraphError if the job does not
        run them.
        """
        self.nodes(stream)
        return tuple(one.place for one in stream.upstreams)

    def check_whole(self, stream: DataStream[Any], places: tuple[TapPlace, ...]) -> None:
        """Raises GraphError, with the remedy, if the records of `stream` lack fields that the flow
        does not read.
        """
        whole = [place for named in self._announced for place in self.places(named)]
        for place in places:
            seen = fields_seen(self._graph, place, whole)
            if seen is not None:
                raise GraphError(
                    f"{stream!r} comes as columns, and only what the flow reads of it was read: "
                    f"{', '.join(seen) or 'no field'}. To see "
                    "whole records, name it before: flow.run(subscribe=[stream]); or subscribe to "
                    "a select(...) of fields"
                )
            if is_taken_apart(self._graph, place, whole):
                raise GraphError(
                    f"{stream!r} are late elements, and only what the window needs of them was "
                    "sent to it. To see all of them, whole, "
                    "name it before: flow.run(subscribe=[stream])"
                )

    def with_derived_uids(self) -> list[str]:
        """Returns the quoted names of operators whose state is kept under a derived uid."""
        return [
            repr(node.name)
            for node in self._graph.nodes.values()
            if node.uid is None and (node.stateful or _commits(node))
        ]


def _commits(node: StreamNode) -> bool:
    """Returns whether a node is a sink whose prepared writes are part of a savepoint."""
    return node.traits.sink is not None and commits(node.traits.sink)
