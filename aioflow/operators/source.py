"""The interface of a source: the coordinator finds splits, and readers in the subtasks read them.
The design follows Flink's FLIP-27, made for asyncio.

The engine calls `poll_batch` on its hot path: it is synchronous and never blocks. A reader without
records returns None and is polled again after `wait()` completed. When a reader has read all of its
splits, `finished` becomes True and `poll_batch` always returns None. An unbounded reader's
`finished` stays False.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from aioflow.core.elements import MIN_WATERMARK
from aioflow.core.errors import describe_record
from aioflow.core.optional_arguments import call_with

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

    `id` is unique within the source and stable over restarts. `position` is the start, in the
    source's own terms; None is the beginning. `payload` is plain data that the reader needs.
    """

    id: str
    position: Any = None
    payload: Any = None
    watermark: int = MIN_WATERMARK
    """Event time that was reached at `position`; the task continues from it.

    Readers can ignore it.
    """
    finished: bool = False
    """Whether the split was read to its end before a restore. It then stays known, but has no
    reader.
    """


class SourceContext(Protocol):
    """The context that a subtask provides to its reader."""

    @property
    def runtime(self) -> RuntimeContext: ...
    @property
    def host(self) -> Host: ...
    @property
    def replays(self) -> bool:
        """Whether a reader of the same source may be reopened at an earlier position.

        Such a source must keep all elements it accepted.
        """

    @property
    def checkpointing(self) -> bool:
        """Whether the job takes checkpoints. Without checkpoints `checkpoint_completed` is never
        called.
        """

    async def resource(self, resource: Resource) -> Any:
        """Returns the worker's instance of `resource`, which the first task to request it opens."""

    async def end(self, task: asyncio.Task[Any]) -> None:
        """Cancels `task`, in which user code runs, and waits for its end.

        `cancellation_timeout` limits the wait.
        """

    def side_output(self, tag: OutputTag[Any], value: Any) -> None:
        """Sends a malformed element to the side output that `on_error=` names."""


class SourceReader(Protocol[T_co]):
    """The interface of an object that reads the splits of one subtask.

    These members are optional:

    * `timestamps`: the timestamps of the last batch polled, parallel to it, or None;
    * for several splits: `current_split`, the id of the split of the last batch polled;
      `finished_splits`, the ids of the splits that were read to their end; and `one_at_a_time`,
      true if splits are read one after the other, so that a split without records is not idle;
    * `pending_records`: the number of known records that were not read yet, for a metric;
    * `stop()`: for a reader that has promised to deliver the elements it accepted. It accepts no
      more elements, and is read until `finished` although the job stops;
    * `checkpoint(checkpoint_id)` and `checkpoint_completed(checkpoint_id)`: for a reader that holds
      elements until a checkpoint covers them, because it acknowledges messages or answers their
      senders. The first is called between two polls, when the positions for that checkpoint have
      been determined. The second is called once that checkpoint is durable. It covers every earlier
      checkpoint; it is not called for an aborted checkpoint, and may come after later calls of the
      first. Neither may block.
    """

    async def open(self, splits: Sequence[Split]) -> None:
        """Starts to read `splits` at their positions.

        Called once, and again with more splits if splits are discovered later.
        """

    def poll_batch(self, max_records: int) -> Sequence[T_co] | None:
        """Returns up to `max_records` records (at least one), or None if there are none now.

        Never blocks. The caller owns a returned list.
        """

    async def wait(self) -> None:
        """Returns once `poll_batch` may have records, or the reader has finished."""

    @property
    def finished(self) -> bool:
        """Whether all splits opened so far were read to their end; False again after the next
        `open`.

        A reader of an unbounded source may omit it, unless it has `stop`.
        """

    def position(self, split_id: str, /) -> Any:
        """Returns the position of the split after the last record that `poll_batch` returned."""

    async def close(self) -> None:
        """Releases all resources. Called once, also after a failure."""


@runtime_checkable
class Source(Protocol[T_co]):
    """An origin of records. A source is pure data: it opens nothing until a job runs.

    The optional attribute `finder` is for sources whose ids alone do not identify known splits:
    `finder.forget()` is called when a job begins, and after each restore `finder.recognise(former,
    found)` with the splits of the checkpoint and the splits found so far. It returns the ids of
    `former` as `discover` spells them now, and the splits of `found` that are not yet part of them.
    `finder.fresh()` returns a new finder for a source that is read twice in a flow, or by two runs
    at once.

    The optional attribute `per_run` is true if the program passes elements to each run. Then the
    end of the source in one run does not affect the next run. Every other source that was read to
    its end stays finished.
    """

    @property
    def bounded(self) -> bool:
        """Whether the source ends by itself."""

    async def discover(self) -> list[Split]:
        """Returns the present splits. Runs on the coordinator.

        It is repeated every `discover_every` (an optional attribute) if the source is unbounded. A
        split that is found again has the same id; a split that is not found any more is still read.
        A `discover(host)` gets the coordinator's host, and must use it for all access to files and
        the network.
        """

    def reader(self, ctx: SourceContext) -> SourceReader[T_co]:
        """Returns a reader for one subtask."""


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
