"""The interface of a source: the coordinator finds splits, and readers in the subtasks read them.
The design follows Flink's FLIP-27, adapted to asyncio.

The engine calls `poll_batch` on its hot path: it is synchronous and never blocks. A reader without
records returns None and is polled again once `wait()` has completed. When a reader has read all its
splits, `finished` becomes True and `poll_batch` always returns None. An unbounded reader's
`finished` stays False.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeGuard, TypeVar, runtime_checkable

from aioflow.core.elements import MIN_WATERMARK
from aioflow.core.errors import describe_record
from aioflow.core.signatures import call_with
from aioflow.core.timeunits import to_seconds

if TYPE_CHECKING:
    import asyncio

    from aioflow.core.functions import OutputTag, RuntimeContext
    from aioflow.core.host import Host
    from aioflow.core.signatures import Resource
    from aioflow.core.timeunits import Duration

__all__ = [
    "BaseReader",
    "BaseSource",
    "Source",
    "SourceContext",
    "SourceReader",
    "Split",
    "SplitFinder",
    "as_reader",
    "completed",
    "discover_splits",
    "discovery_interval_s",
]

T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Split:
    """A part of a source that one reader reads on its own.

    `id` is unique within the source and stable over restarts. `position` is where to start reading,
    in the source's own terms; None means the beginning. `payload` is plain data that the reader
    needs.
    """

    id: str
    position: Any = None
    payload: Any = None
    watermark: int = MIN_WATERMARK
    """Event time that was reached at `position`, from which the task continues.

    Readers can ignore this attribute.
    """
    finished: bool = False
    """Whether the split was read to its end before a restore. Such a split stays known, but is not
    read.
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

        The source must then keep all elements that it has accepted.
        """

    @property
    def checkpointing(self) -> bool:
        """Whether the job takes checkpoints. Without checkpoints `checkpoint_completed` is never
        called.
        """

    async def resource(self, resource: Resource) -> Any:
        """Returns the worker's instance of `resource`, which the first task to request it opens."""

    async def end(self, task: asyncio.Task[Any]) -> None:
        """Cancels the asyncio task `task`, in which user code runs, and waits for its end.

        The job's option `cancellation_timeout` limits the wait.
        """

    def side_output(self, tag: OutputTag[Any], value: Any) -> None:
        """Sends a malformed element to the side output that `on_error=` names."""


class SourceReader(Protocol[T_co]):
    """The interface of an object that reads the splits of one subtask.

    The further members of `BaseReader` are optional.
    """

    async def open(self, splits: Sequence[Split]) -> None:
        """Starts reading `splits` at their positions.

        Called once, and again with more splits if splits are discovered later.
        """

    def poll_batch(self, max_records: int) -> Sequence[T_co] | None:
        """Returns up to `max_records` records (at least one), or None if there are none now.

        Never blocks. The caller may change a returned list.
        """

    async def wait(self) -> None:
        """Returns once `poll_batch` may have records, or the reader has finished."""

    @property
    def finished(self) -> bool:
        """Whether all splits opened so far were read to their end; False again after the next
        `open`.

        A reader of an unbounded source may lack this property, unless it has the method `stop`.
        """

    def position(self, split_id: str, /) -> Any:
        """Returns the position of split `split_id` after the last record that `poll_batch`
        returned.
        """

    async def close(self) -> None:
        """Releases all resources. Called once, also after a failure."""


class BaseReader(SourceReader[T_co]):
    """A reader with a default for each optional member."""

    columnar: bool = False
    """Whether `poll_batch` returns batches of columns."""
    timestamps: list[int] | None = None
    """The timestamps of the records in the last polled batch; None if they have none."""
    current_split: str | None = None
    """The id of the split of the last polled batch; None means that the reader has one split."""
    finished_splits: Collection[str] = ()
    """The ids of the splits that were read to their end."""
    one_at_a_time: bool = False
    """Whether splits are read one after the other. If so, a split without records does not count as
    idle.
    """
    drains: bool = False
    """Whether the elements that the reader has accepted must be read even when the job is stopped.
    """
    holds_splits: bool = False
    """Whether the reader implements `hold`: it can leave some splits unread while it reads others.
    """

    if TYPE_CHECKING:  # An attribute, or a property of a subclass.

        @property
        def finished(self) -> bool: ...
        @property
        def pending_records(self) -> int | None:
            """The number of known records that were not read yet, for a metric."""
    else:
        finished = False
        pending_records = None

    def stop(self) -> None:
        """Stops accepting elements. If `drains` is True, the reader is then read until
        `finished`.
        """

    def hold(self, splits: Collection[str], /) -> None:
        """Makes `poll_batch` return no records of `splits` until the next call of `hold`.

        These splits are ahead of others in event time. Called only if `holds_splits`.
        """

    def read_by(self, event_time: Callable[[str], int], /) -> None:
        """Gives the reader a function that returns the event time of a split by its id.

        Called before `open`. A reader that can choose reads the split with the lowest event time
        first. Then the event time of the task advances evenly while several splits are read.
        """

    def checkpoint(self, checkpoint_id: int, /) -> None:
        """Notes that the positions for checkpoint `checkpoint_id` have been determined, between two
        polls.

        Never blocks. This method is for readers that acknowledge messages, or answer their senders,
        once a checkpoint is complete.
        """

    def checkpoint_completed(self, checkpoint_id: int, /) -> None:
        """Handles that checkpoint `checkpoint_id`, and every earlier one, is durable.

        Not called for an aborted checkpoint. `checkpoint` may have been called for later
        checkpoints before.
        """


def as_reader(reader: SourceReader[Any], *, unbounded: bool) -> BaseReader[Any]:
    """Returns `reader`, with the defaults of `BaseReader` for the optional members that it lacks.

    Raises TypeError if the reader lacks `finished` although it must have this property.
    """
    if isinstance(reader, BaseReader):
        return reader
    # Looked up without a call, since the reader is not open yet. A reader with `__getattr__`
    # delegates to another object, which may have the attribute.
    has_finished = inspect.getattr_static(reader, "finished", None) is not None
    may_end = has_finished or hasattr(type(reader), "__getattr__")
    if not may_end and (not unbounded or hasattr(reader, "stop")):
        what = (
            "has `stop`, after which it is read to its end,"
            if unbounded
            else "reads a bounded source"
        )
        raise TypeError(
            f"{type(reader).__name__} {what} and has no `finished`: add it as a property, True "
            "once all splits are read"
        )
    return _CompletedReader(reader, may_end, may_lack=unbounded and not has_finished)


class _CompletedReader(BaseReader[Any]):
    """Wraps a reader of an application, and adds defaults for optional members that it lacks."""

    def __init__(self, reader: Any, may_end: bool, *, may_lack: bool) -> None:
        """`may_end` tells whether the reader may have `finished`. `may_lack` tells whether each use
        must check for it.
        """
        self._reader = reader
        self._may_end = may_end
        self._may_lack = may_lack
        self.columnar = bool(getattr(reader, "columnar", False))
        self.one_at_a_time = bool(getattr(reader, "one_at_a_time", False))
        self.drains = hasattr(reader, "stop")
        self.holds_splits = hasattr(reader, "hold")

    async def open(self, splits: Sequence[Split]) -> None:
        await self._reader.open(splits)

    def poll_batch(self, max_records: int) -> Sequence[Any] | None:
        return self._reader.poll_batch(max_records)  # type: ignore[no-any-return]

    async def wait(self) -> None:
        await self._reader.wait()

    def position(self, split_id: str, /) -> Any:
        return self._reader.position(split_id)

    async def close(self) -> None:
        await self._reader.close()

    @property
    def finished(self) -> bool:
        if self._may_lack:
            return bool(getattr(self._reader, "finished", False))
        return self._may_end and bool(self._reader.finished)

    @property
    def timestamps(self) -> list[int] | None:  # type: ignore[override]
        return getattr(self._reader, "timestamps", None)

    @property
    def current_split(self) -> str | None:  # type: ignore[override]
        return getattr(self._reader, "current_split", None)

    @property
    def finished_splits(self) -> Collection[str]:  # type: ignore[override]
        return getattr(self._reader, "finished_splits", ())

    @property
    def pending_records(self) -> int | None:
        return getattr(self._reader, "pending_records", None)

    def stop(self) -> None:
        if self.drains:
            self._reader.stop()

    def hold(self, splits: Collection[str], /) -> None:
        self._reader.hold(splits)

    def checkpoint(self, checkpoint_id: int, /) -> None:
        if (hook := getattr(self._reader, "checkpoint", None)) is not None:
            hook(checkpoint_id)

    def checkpoint_completed(self, checkpoint_id: int, /) -> None:
        if (hook := getattr(self._reader, "checkpoint_completed", None)) is not None:
            hook(checkpoint_id)


class SplitFinder(Protocol):
    """Recognises known splits of a source, such as files, whose ids alone do not identify them."""

    def forget(self) -> None:
        """Forgets all splits found so far. Called when a job begins."""

    def recognise(
        self, former: Sequence[Any], found: Sequence[Split], /
    ) -> tuple[Sequence[str], Sequence[Split]]:
        """Finds the splits of a checkpoint among those that `discover` has found.

        Called after each restore. `former` are the splits in the checkpoint, `found` those that
        `discover` has found. Returns the present id of each split in `former`, and the splits in
        `found` that are new.
        """

    def fresh(self) -> Self:
        """Returns a new, empty finder, because a source may be read twice in a flow, or by two runs
        at once.
        """


@runtime_checkable
class Source(Protocol[T_co]):
    """An origin of records. A source is pure data: it opens nothing until a job runs.

    The further attributes of `BaseSource` are optional.
    """

    @property
    def bounded(self) -> bool:
        """Whether the source ends by itself."""

    async def discover(self) -> list[Split]:
        """Returns the splits that exist now. Runs on the coordinator.

        If the source is unbounded, the call is repeated at the interval `discover_every` (an
        optional attribute). A split that is found again must have the same id. A split that is not
        found any more is still read.

        The method may have a parameter `host`. Then it gets the coordinator's host, and must use it
        for all access to files and the network.
        """

    def reader(self, ctx: SourceContext) -> SourceReader[T_co]:
        """Returns a reader for one subtask."""


def is_source(what: object) -> TypeGuard[Source[Any]]:
    """Returns whether `what` has the members of a Source.

    From Python 3.12 on, `isinstance` does not find members that `__getattr__` provides.
    """
    return all(hasattr(what, name) for name in ("bounded", "discover", "reader"))


class BaseSource(Source[T_co]):
    """A source with a default for each optional member."""

    if TYPE_CHECKING:  # An attribute, or a property of a subclass.

        @property
        def bounded(self) -> bool: ...
        @property
        def why_rows(self) -> str:
            """The reason why `with_columns` returns None, for `explain()`."""
    else:
        bounded = False
        why_rows = ""

    name: str = ""
    """The name of the source in the graph, unless the flow gives it another name."""
    parallelism_max: int | None = None
    """The largest useful number of readers; None means no limit."""
    discover_every: Duration | None = None
    """The interval between two calls of `discover` of an unbounded source; None means only one
    call.
    """
    side_outputs: tuple[OutputTag[Any], ...] | None = None
    """The side outputs that may get malformed elements; None means unknown."""
    record_type: Any = None
    """The type of the records, if it is known."""
    finder: SplitFinder | None = None
    """Recognises splits whose ids alone do not identify them; None if the ids suffice."""
    per_run: bool = False
    """Whether the program passes new elements to each run.

    Such a source is read from its beginning in the next run. Any other source stays finished once
    it was read to its end.
    """
    stays_here: bool = False
    """Whether the readers must run in the process of the program that runs the flow."""
    event_time: bool = False
    """Whether the source has event time even without a watermark strategy."""
    replayable: bool = True
    """Whether a restart continues at the positions of the splits, instead of reading from the
    beginning.
    """
    columnar: bool = False
    """Whether readers return batches of columns."""
    offers_columns: bool = False
    """Whether `with_columns` can return a source instead of None."""
    in_spark: bool = False
    """Whether Spark itself can read the source."""

    def with_columns(self) -> BaseSource[Any] | None:
        """Returns a copy of the source that produces batches of columns, or None if it cannot."""
        return None

    def with_fields(self, names: tuple[str, ...], /) -> BaseSource[Any]:
        """Returns a copy of the source that reads only the fields `names`, or itself if it reads
        all fields anyway.
        """
        return self

    def with_stand_ins(self) -> tuple[BaseSource[Any], tuple[str, ...]] | None:
        """Returns a copy of the source that produces cheaper objects, and the names of their
        fields.

        Returns None if the source cannot make them.
        """
        return None

    def refuse_sink(self, sink: object, /) -> None:
        """Raises GraphError if the source would read what `sink`, downstream of it, writes."""

    def own(self) -> BaseSource[T_co]:
        """Returns a copy for one run if the source has a `finder`, otherwise the source itself."""
        if self.finder is None:
            return self
        own = copy.copy(self)
        own.finder = self.finder.fresh()
        return own

    @property
    def given(self) -> Source[T_co]:
        """The source object that the application made."""
        return self


def completed(source: Source[T_co]) -> BaseSource[T_co]:
    """Returns `source`, with the defaults of `BaseSource` for the optional members that it
    lacks.
    """
    return source if isinstance(source, BaseSource) else _CompletedSource(source)


class _Forwarded:
    """Descriptor that reads an attribute of the application's source, or the default of
    `BaseSource`.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name
        self._default = getattr(BaseSource, name)

    def __get__(self, source: _CompletedSource | None, owner: type) -> Any:
        if source is None:
            return self._default
        return getattr(source.given, self._name, self._default)


class _CompletedSource(BaseSource[Any]):
    """Wraps a source of an application, and adds defaults for optional members that it lacks."""

    bounded: Any = _Forwarded()
    name: Any = _Forwarded()
    parallelism_max: Any = _Forwarded()
    discover_every: Any = _Forwarded()
    side_outputs: Any = _Forwarded()
    record_type: Any = _Forwarded()
    finder: Any = _Forwarded()
    per_run: Any = _Forwarded()
    stays_here: Any = _Forwarded()
    event_time: Any = _Forwarded()
    replayable: Any = _Forwarded()
    columnar: Any = _Forwarded()
    given: Any = None

    def __init__(self, source: Source[Any]) -> None:
        self.given = source

    def __repr__(self) -> str:
        return repr(self.given)

    @property
    def discover(self) -> Any:
        """The application's method `discover`, which may have a parameter for the host."""
        return self.given.discover

    def reader(self, ctx: SourceContext) -> SourceReader[Any]:
        return self.given.reader(ctx)  # type: ignore[no-any-return]

    def own(self) -> BaseSource[Any]:
        fresh = getattr(self.finder, "fresh", None)
        if fresh is None:
            return self
        own = copy.copy(self.given)
        own.finder = fresh()
        return _CompletedSource(own)


def discovery_interval_s(source: BaseSource[Any]) -> float | None:
    """Returns the interval in seconds at which an unbounded source looks for new splits.

    Returns None if the source does not look for new splits.
    """
    every = source.discover_every
    return None if source.bounded or every is None else to_seconds(every, "discover_every")


async def discover_splits(source: BaseSource[Any], host: Host) -> list[Split]:
    """Returns the result of `source.discover`, to which `host` is passed if it has a parameter for
    it.
    """
    found = call_with(source.discover, host)
    what = f"discover() of {type(source.given).__name__}"
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
