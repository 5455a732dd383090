"""The interface of a source: the coordinator finds splits, and readers in the subtasks read them.
After Flink's FLIP-27, made for asyncio.

The engine asks `poll_batch` on its hot path: it is synchronous and never blocks. A reader that has
nothing returns None and is asked again after `wait()` completed. A reader that is through with all
of its splits raises nothing and returns None for ever after `finished` became True; an unbounded
reader's `finished` stays False.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from aioflow.core.elements import MIN_WATERMARK
from aioflow.core.optional_arguments import call_with
from aioflow.operators.userfunction import describe_record

if TYPE_CHECKING:
    import asyncio

    from aioflow.core.functions import OutputTag, RuntimeContext
    from aioflow.core.host import Host
    from aioflow.core.injection import Resource

__all__ = ["Source", "SourceContext", "SourceReader", "Split", "discover_splits"]

T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Split:
    """A part of a source that one reader reads on its own.

    `id` is unique within the source and stable over restarts. `position` is where to start, in the
    source's own terms; None is the beginning. `payload` is what the reader must know, plain data.
    """

    id: str
    position: Any = None
    payload: Any = None
    watermark: int = MIN_WATERMARK
    """Event time that was reached at `position`; the task goes on from there.

    Readers need not look at it.
    """
    finished: bool = False
    """Read to its end before a restore: no reader gets it, it only stays known."""


class SourceContext(Protocol):
    """The parts of a subtask that its reader may use."""

    @property
    def runtime(self) -> RuntimeContext: ...
    @property
    def host(self) -> Host: ...
    @property
    def replays(self) -> bool:
        """Whether a reader of the same source may be reopened at an earlier position. Then it must
        keep everything it accepted.
        """

    @property
    def checkpointing(self) -> bool:
        """Whether the job takes checkpoints: only then is `checkpoint_completed` ever called."""

    async def resource(self, resource: Resource) -> Any:
        """The worker's instance of `resource`, opened by the first task that asks."""

    async def end(self, task: asyncio.Task[Any]) -> None:
        """Cancel `task`, in which user code runs, and wait for its end; `cancellation_timeout`
        bounds that.
        """

    def side_output(self, tag: OutputTag[Any], value: Any) -> None:
        """Send a malformed element to the side output that `on_error=` names."""


class SourceReader(Protocol[T_co]):
    """Reads the splits of one subtask. Optional attribute: `timestamps` (of the batch just polled,
    parallel to it, or None).

    Of several splits: `current_split`, the id of the one that the batch just polled is of;
    `finished_splits`, the ids of those that were read to their end; `one_at_a_time`, true where
    splits are read one after the other, so that one that gives nothing is not idle.

    Optional: `pending_records`, how many records it knows of that were not read yet: a metric.

    Optional: `stop()`, for a reader that has promised to deliver what it accepted: it accepts no
    more, and is read until `finished` although the job stops.

    Optional, for a reader that holds things until a checkpoint covers them (it acknowledges
    messages, or answers their senders): `checkpoint(checkpoint_id)`, called when the positions
    for that checkpoint have been taken, between two polls, and
    `checkpoint_completed(checkpoint_id)`, called once that checkpoint is durable. The second covers
    every earlier checkpoint; it is not called for one that is aborted, and may come after later
    calls of the first. Neither may block.
    """

    async def open(self, splits: Sequence[Split]) -> None:
        """Start to read `splits` at their positions.

        Called once, and again with more splits when some were discovered later.
        """

    def poll_batch(self, max_records: int) -> Sequence[T_co] | None:
        """Up to `max_records` records (at least one), or None when there is nothing now.

        Never blocks. A list is given away for good.
        """

    async def wait(self) -> None:
        """Returns once `poll_batch` may have something, or the reader finished."""

    @property
    def finished(self) -> bool:
        """Whether all splits opened so far were read to their end; false again after the next
        `open`.

        A reader of an unbounded source may leave it out, unless it has `stop`.
        """

    def position(self, split_id: str, /) -> Any:
        """Returns the position of the split of this id behind the last record that `poll_batch`
        returned.
        """

    async def close(self) -> None:
        """Release everything. Called once, also after a failure."""


@runtime_checkable
class Source(Protocol[T_co]):
    """A place to read from. Pure data: it opens nothing until a job runs.

    Optional attribute `finder`, where ids alone do not tell what is known: `finder.forget()` is
    called when a job begins, and after each restore `finder.recognise(former, found)` with the
    splits of the checkpoint and those that were found so far. It gives the ids of `former` as
    `discover` spells them now, and what is not yet part of them among `found`. `finder.fresh()`
    gives another one for a source that is read in two places of a flow, or by two runs at once.

    Optional attribute `per_run`, true where the program gives each run its elements. That such a
    source ended in one run says nothing about the next. Every other source that was read to its end
    stays so.
    """

    @property
    def bounded(self) -> bool:
        """Whether the source ends by itself."""

    async def discover(self) -> list[Split]:
        """The splits there are now. Runs on the coordinator; again every `discover_every` (an
        optional attribute) if unbounded.

        What was found before and is found again has the same id; what is not found any more is read
        all the same. A `discover(host)` gets the coordinator's host, and must use it for all access
        to files and the network.
        """

    def reader(self, ctx: SourceContext) -> SourceReader[T_co]:
        """A reader for one subtask."""


async def discover_splits(source: Source[Any], host: Host) -> list[Split]:
    """Returns the splits of `source.discover`, which may take the host."""
    found = call_with(source.discover, host)
    what = f"discover() of {type(source).__name__}"
    if not inspect.isawaitable(found):
        raise TypeError(
            f"{what} returned {type(found).__name__} at once, expected `async def discover(self)`"
        )
    splits = await found
    if not isinstance(splits, Sequence) or not all(isinstance(split, Split) for split in splits):
        raise TypeError(
            f"{what} returned {describe_record(splits)}, expected a list of af.Split, [] for none"
        )
    if len({split.id for split in splits}) < len(splits):
        seen: set[str] = set()
        twice = next(
            split.id
            for split in splits
            if split.id in seen or seen.add(split.id)  # type: ignore[func-returns-value]
        )
        raise ValueError(
            f"{what} gave two splits the id {twice!r}, expected one for each: positions are kept "
            "under it"
        )
    return list(splits)
