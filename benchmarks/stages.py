"""The time of a flow by stage: exclusive time, batches and records of each stage between source and
sink.

`measured()` wraps the methods that each batch passes, for the time of a `with` block. A stage's
time leaves out the stages that it called, so the times add up. Wrapping costs some 0.3 us a batch,
which the figures include: they say where, the ratios say how much.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from time import perf_counter_ns
from typing import Any

from aioflow.operators.operator import Operator
from aioflow.operators.sink import SinkOperator
from aioflow.operators.stateless import StatelessOperator
from aioflow.task import partitioners
from aioflow.task.chain import OperatorChain
from aioflow.task.network_input import NetworkInput
from aioflow.task.output import RecordWriter
from aioflow.task.source_input import SourceInput
from aioflow.task.stream_task import StreamTask

__all__ = ["Stage", "measured"]


@dataclass(slots=True)
class Stage:
    """The records that passed one stage, and their time."""

    name: str
    ns: int = 0
    calls: int = 0
    batches: int = 0
    records: int = 0

    def row(self, n: int) -> dict[str, Any]:
        """Costs by record of the workload (`n`), and the mean size of the batches that came in."""
        return {
            "stage": self.name,
            "ns_per_record": round(self.ns / n, 1),
            "batches": self.batches,
            "mean_batch": round(self.records / self.batches) if self.batches else 0,
        }


class _Recorder:
    def __init__(self) -> None:
        self.stages: dict[str, Stage] = {}
        self._inner = [0]

    def wrap(
        self, method: Callable[..., Any], name_of: Callable[[Any], str], batch_at: int | None
    ) -> Callable[..., Any]:
        inner, stages = self._inner, self.stages

        @wraps(method)
        def timed(*args: Any) -> Any:
            inner.append(0)
            begun = perf_counter_ns()
            try:
                return method(*args)
            finally:
                spent = perf_counter_ns() - begun
                own = spent - inner.pop()
                inner[-1] += spent
                name = name_of(args[0])
                stage = stages.get(name)
                if stage is None:
                    stage = stages[name] = Stage(name)
                stage.ns += own
                stage.calls += 1
                if batch_at is not None and (count := len(args[batch_at].values)):
                    stage.batches += 1
                    stage.records += count

        return timed


def _operator_name(operator: Operator) -> str:
    if isinstance(operator, StatelessOperator):
        return "+".join(step.kind.value for step in operator.steps)
    if isinstance(operator, SinkOperator):
        return "sink"
    return type(operator).__name__


def _operators(cls: type[Operator]) -> Iterator[type[Operator]]:
    for sub in cls.__subclasses__():
        yield sub
        yield from _operators(sub)


@contextmanager
def measured() -> Iterator[dict[str, Stage]]:
    """Stages by name, in the order in which they were first done; to be read after the block.

    One flow at a time.
    """
    recorder = _Recorder()
    patched: list[tuple[type, str, Any]] = []

    def patch(
        cls: type, method: str, name_of: Callable[[Any], str], batch_at: int | None = None
    ) -> None:
        if method in cls.__dict__:
            patched.append((cls, method, cls.__dict__[method]))
            setattr(cls, method, recorder.wrap(cls.__dict__[method], name_of, batch_at))

    patch(SourceInput, "emit_next", lambda _: "source")
    patch(SourceInput, "_stamp", lambda _: "source: timestamps")
    patch(NetworkInput, "emit_next", lambda _: "exchange: receive")
    for operator in dict.fromkeys(_operators(Operator)):
        patch(operator, "process_batch", _operator_name, 1)
    for cls in [
        c
        for c in vars(partitioners).values()
        if isinstance(c, type) and c.__module__ == partitioners.__name__
    ]:
        if cls is not partitioners.Partitioner:
            patch(cls, "split", lambda _: "key and route", 1)
    patch(RecordWriter, "emit", lambda _: "exchange: send", 1)
    patch(OperatorChain, "run", lambda _: "chain")
    patch(StreamTask, "_default_action", lambda _: "task loop")
    try:
        yield recorder.stages
    finally:
        for cls, method, original in reversed(patched):
            setattr(cls, method, original)
