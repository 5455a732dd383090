"""Partitioners: split a batch into parts for consumer subtasks.

`split(batch)` returns `(consumer index, part)` pairs; timestamps and watermarks stay with their
records. If the strategy allows it, the parts are strided slices. For keys and user functions, a
generated loop appends the records one by one. The key function runs only once, here, and its result
is sent with the record. After Flink's StreamPartitioner family.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

from aioflow.core.elements import RecordBatch
from aioflow.core.errors import describe_record, note_once
from aioflow.core.keygroups import KeyNotSupported, SubtaskCache, canonical_key
from aioflow.expressions.nodes import is_expression
from aioflow.expressions.rows import RowFunction
from aioflow.graph.stream_graph import Partitioning, ShipStrategy
from aioflow.operators.inlining import Body, as_getter, body_of, failure_of
from aioflow.operators.results import UserFunction

if TYPE_CHECKING:
    from aioflow.columns.keys import KeyRouter
    from aioflow.core.host import Rng
    from aioflow.expressions.nodes import Expr
    from aioflow.operators.aggregate.local import LocalAggregate

__all__ = ["BroadcastPartitioner", "Partitioner", "create_partitioner"]

PLAIN_KEY_TYPES = frozenset((str, bytes, int, bool))
"""Keys of exactly these types need no check: they are never None or NaN, and always hashable."""


class Partitioner(Protocol):
    """Splits batches. A `BroadcastPartitioner` sends every record to every consumer."""

    def split(self, batch: RecordBatch) -> list[tuple[int, RecordBatch]]:
        """Returns the parts of `batch` as pairs (consumer index, part), without empty parts."""


def create_partitioner(
    partitioning: Partitioning,
    consumers: int,
    *,
    max_parallelism: int,
    subtask_index: int,
    rng: Rng,
    place: str,
) -> Partitioner:
    """Creates the partitioner of one edge.

    `consumers` is the number of subtasks to which this producer sends. `place` names the producing
    operator in errors.
    """
    strategy = partitioning.strategy
    if strategy is ShipStrategy.HASH:
        place = f"{partitioning.written} after {place}"
        key = UserFunction(partitioning.function, "key_by").call
        expression = partitioning.function if is_expression(partitioning.function) else None
        if consumers == 1:
            return _SingleKeyed(
                key,
                max_parallelism,
                place,
                expression,
                partitioning.fields,
                partitioning.keys_alone,
            )
        fields, keys_alone, taken = partitioning.fields, partitioning.keys_alone, partitioning.taken
        return _Hash(
            key,
            consumers,
            max_parallelism,
            place,
            expression,
            fields,
            keys_alone,
            taken,
            partitioning.local,
        )
    if strategy is ShipStrategy.CUSTOM:
        return _Custom(
            UserFunction(partitioning.function, "partition_custom").call, consumers, place
        )
    if consumers == 1 or strategy is ShipStrategy.GLOBAL:
        return _ToFirst()
    if strategy is ShipStrategy.BROADCAST:
        return BroadcastPartitioner(consumers)
    if strategy is ShipStrategy.SHUFFLE:
        return _Shuffle(consumers, rng)
    # Rebalance and rescale. The start differs by subtask, so that producers do not all begin with
    # the first consumer.
    return _RoundRobin(consumers, subtask_index % consumers)


class _ToFirst:
    def split(self, batch: RecordBatch) -> list[tuple[int, RecordBatch]]:
        return [(0, batch)]


class BroadcastPartitioner:
    """Sends every record to every consumer; the batch is shared, not copied."""

    def __init__(self, consumers: int) -> None:
        self._consumers = range(consumers)

    def split(self, batch: RecordBatch) -> list[tuple[int, RecordBatch]]:
        return [(consumer, batch) for consumer in self._consumers]


class _RoundRobin:
    def __init__(self, consumers: int, start: int) -> None:
        self._consumers = consumers
        self._next = start

    def split(self, batch: RecordBatch) -> list[tuple[int, RecordBatch]]:
        consumers, first = self._consumers, self._next
        self._next = (first + len(batch.values)) % consumers
        parts = []
        for offset in range(min(consumers, len(batch.values))):
            part = RecordBatch(
                batch.values[offset::consumers],
                None if batch.timestamps is None else batch.timestamps[offset::consumers],
                None,
                None if batch.watermarks is None else batch.watermarks[offset::consumers],
            )
            parts.append(((first + offset) % consumers, part))
        return parts


def _checked(target: Any, consumers: int) -> int:
    """Returns the result of a `partition_custom` function as an int. Accepts numpy integers.

    Raises ValueError for an invalid consumer.
    """
    try:
        index = operator.index(target)
    except TypeError:
        index = -1
    if type(target) is bool or not 0 <= index < consumers:
        raise ValueError(
            f"partition_custom gave {target!r}, expected an int from 0 to {consumers - 1}"
        )
    return index


def _gather(batch: RecordBatch, targets: list[list[int]]) -> list[tuple[int, RecordBatch]]:
    """Makes parts from lists of record indices, one list per consumer."""
    values = batch.values
    return [
        (i, batch.select(indices, [values[j] for j in indices]))
        for i, indices in enumerate(targets)
        if indices
    ]


class _Shuffle:
    def __init__(self, consumers: int, rng: Rng) -> None:
        self._consumers = consumers
        self._rng = rng

    def split(self, batch: RecordBatch) -> list[tuple[int, RecordBatch]]:
        targets: list[list[int]] = [[] for _ in range(self._consumers)]
        random, consumers = self._rng.random, self._consumers
        for index in range(len(batch.values)):
            targets[int(random() * consumers)].append(index)
        return _gather(batch, targets)


class _Custom:
    def __init__(self, function: Callable[[Any, int], int], consumers: int, place: str) -> None:
        self._function = function
        self._consumers = consumers
        self._place = place

    def split(self, batch: RecordBatch) -> list[tuple[int, RecordBatch]]:
        targets: list[list[int]] = [[] for _ in range(self._consumers)]
        function, consumers = self._function, self._consumers
        for index, value in enumerate(batch.values):
            try:
                target = function(value, consumers)
                if type(target) is not int or not 0 <= target < consumers:
                    target = _checked(target, consumers)
                targets[target].append(index)
            except BaseException as error:
                note_once(
                    error,
                    f"in partition_custom after {self._place}, at record {describe_record(value)}",
                )
                raise
        return _gather(batch, targets)


class _Keyed:
    """Base of the keyed partitioners, with the key function, the cache, and the errors for bad
    keys.
    """

    def __init__(
        self,
        key: Callable[[Any], Any],
        consumers: int,
        max_parallelism: int,
        place: str,
        expression: Expr[Any] | None,
        fields: tuple[str | int, ...] | None,
        keys_alone: bool,
    ) -> None:
        """`expression` computes `key` on column batches; with None, column batches are split as
        rows.

        `fields` are the fields of column batches that are sent. With `keys_alone`, rows are sent as
        their keys only.
        """
        self._key = key
        self._body = body = body_of(key)
        self._keys_are_values = body is not None and body.is_argument
        # A consumer that only counts gets the keys instead of records: half the work here, and far
        # less to encode and decode.
        self._keys_alone = self._keys_are_values or keys_alone
        self._place = place
        self._cache = SubtaskCache(consumers, max_parallelism)
        self._expression = expression
        self._fields = fields
        self._spread = (consumers, max_parallelism)
        self._router: KeyRouter | None = None

    def split_columns(self, batch: RecordBatch) -> list[tuple[int, RecordBatch]] | None:
        """Returns the parts of a column batch; None if it must be split as rows."""
        if self._expression is None:
            return None
        from aioflow.columns.expressions import NotOnColumns

        if self._router is None:
            from aioflow.columns.keys import KeyRouter

            self._router = KeyRouter(self._expression, *self._spread, self._fields)
        try:
            return self._router.split(batch)
        except NotOnColumns:
            return None

    def blame(self, error: BaseException, value: Any) -> BaseException:
        """Returns the error to raise for the key of `value`, naming the operator.

        For an unhashable key, the error also names the valid types.
        """
        if self._body is not None and isinstance(error, Exception):
            error = failure_of(self._key, value, error)
        if isinstance(error, TypeError) and (
            "unhashable" in str(error) or "Cannot hash" in str(error)
        ):
            # The second text is from Decimal.
            try:
                canonical_key(self._key(value))
            except Exception as better:  # noqa: BLE001  # Its message is better.
                error = better
        note_once(error, f"in {self._place}, at record {describe_record(value)}")
        return error


class _SingleKeyed(_Keyed):
    """Keyed partitioner for a single consumer. Computes and checks keys, but need not choose a
    consumer.
    """

    def __init__(
        self,
        key: Callable[[Any], Any],
        max_parallelism: int,
        place: str,
        expression: Expr[Any] | None = None,
        fields: tuple[str | int, ...] | None = None,
        keys_alone: bool = False,
    ) -> None:
        super().__init__(key, 1, max_parallelism, place, expression, fields, keys_alone)
        self._getter = as_getter(key)

    def split(self, batch: RecordBatch) -> list[tuple[int, RecordBatch]]:
        values = batch.values
        if type(values) is not list and (parts := self.split_columns(batch)) is not None:
            return parts
        source = iter(values)
        try:
            keys = (
                values
                if self._keys_are_values and type(values) is list
                else list(map(_variant(self._getter, values), source))
            )
            if len(keys) != len(values):
                raise RuntimeError(
                    "the key function raised StopIteration, which is no failure it may use"
                )
            types = list(map(type, keys))
            # Nearly always one type: counting it takes half as long as looking each one up in a
            # set.
            plain = types[0] in PLAIN_KEY_TYPES and types.count(types[0]) == len(types)
            if not plain and not _are_plain(keys, types):
                source, known, find = iter(values), self._cache.known, self._cache.find
                for _, key in zip(source, keys, strict=False):
                    if key not in known:
                        find(key)
        except BaseException as error:  # noqa: BLE001  # Raised again, with the record named.
            raise self.blame(
                error, values[len(values) - operator.length_hint(source) - 1]
            ) from None
        return [
            (
                0,
                RecordBatch(
                    keys if self._keys_alone else values,
                    batch.timestamps,
                    keys,
                    batch.watermarks,
                    batch.watermark,
                ),
            )
        ]


def _variant(key: Callable[[Any], Any], values: Sequence[Any]) -> Callable[[Any], Any]:
    """Returns the variant of an expression's function that suits records like `values`, or else
    `key` itself.
    """
    return key.of(values[0]) if isinstance(key, RowFunction) and len(values) else key


def _are_plain(keys: list[Any], types: list[type]) -> bool:
    """Returns whether all keys are plain values or tuples of plain values, which are always valid
    keys.
    """
    found = set(types)
    if tuple in found:
        found.discard(tuple)
        if found:
            keys = [key for key in keys if type(key) is tuple]
        found |= set(map(type, chain.from_iterable(keys))) - {type(None)}
    return found <= PLAIN_KEY_TYPES


class _Hash(_Keyed):
    """Sends each record to the subtask that owns its key's key group. A cache from key to subtask
    makes this one dict look-up per record.

    The loop is generated for the lists of the batch. If the consumer uses only one part of a
    record, only this part is sent. For a batch with few keys, one aggregated record per key may be
    sent instead.
    """

    def __init__(
        self,
        key: Callable[[Any], Any],
        consumers: int,
        max_parallelism: int,
        place: str,
        expression: Expr[Any] | None = None,
        fields: tuple[str | int, ...] | None = None,
        keys_alone: bool = False,
        taken: tuple[Callable[[Any], Any], ...] | None = None,
        local: LocalAggregate | None = None,
    ) -> None:
        super().__init__(key, consumers, max_parallelism, place, expression, fields, keys_alone)
        # The key of the first records in each batch is computed twice, which an unknown function
        # might notice.
        self._local = local if self._body is not None or expression is not None else None
        self._getter = as_getter(key)
        self._consumers = consumers
        self._loops = self._generate(alone=self._keys_alone)
        self._taking_loops: dict[tuple[bool, bool], Callable[..., None]] | None = None
        self._take = taken[0] if taken else None
        # Records that are their own keys are sent whole.
        if taken is not None and not self._keys_alone:
            self._taking_loops = self._generate(alone=not taken, taking=self._take)

    def _generate(
        self, *, alone: bool, taking: Callable[[Any], Any] | None = None
    ) -> dict[tuple[bool, bool], Callable[..., None]]:
        return {
            (times, marks): _generate_loop(
                self._consumers, self._body, times=times, marks=marks, alone=alone, taking=taking
            )
            for times in (False, True)
            for marks in (False, True)
        }

    def split(self, batch: RecordBatch) -> list[tuple[int, RecordBatch]]:
        values, timestamps, watermarks = batch.values, batch.timestamps, batch.watermarks
        if type(values) is not list and (parts := self.split_columns(batch)) is not None:
            return parts
        if self._local is not None and (parts := self._fold(self._local, batch)) is not None:
            return parts
        carried = timestamps is not None, watermarks is not None
        if self._taking_loops is not None:
            try:
                return self._deal(
                    self._taking_loops[carried],
                    iter(values),
                    batch,
                    alone=self._take is None,
                    taken=True,
                )
            # An error of the key function is raised again below. The other function is the
            # consumer's, which may never use this record.
            except Exception:  # noqa: BLE001
                pass
        source = iter(values)
        try:
            return self._deal(self._loops[carried], source, batch, alone=self._keys_alone)
        except BaseException as error:  # noqa: BLE001  # Raised again, with the record named.
            raise self.blame(
                error, values[len(values) - operator.length_hint(source) - 1]
            ) from None

    def _fold(
        self, local: LocalAggregate, batch: RecordBatch
    ) -> list[tuple[int, RecordBatch]] | None:
        """Returns the parts of a local aggregate of `batch`; None if the records themselves must be
        sent.
        """
        folded = local.fold(batch, self._getter)
        if folded is None or folded.keys is None:
            return None
        targets: list[list[int]] = [[] for _ in range(self._consumers)]
        try:
            for index, key in enumerate(folded.keys):
                targets[self._cache[key]].append(index)
        except KeyNotSupported:  # Raised again for the record itself.
            return None
        return [(i, folded.pick(indices)) for i, indices in enumerate(targets) if indices]

    def _deal(
        self,
        loop: Callable[..., None],
        source: Iterator[Any],
        batch: RecordBatch,
        *,
        alone: bool,
        taken: bool = False,
    ) -> list[tuple[int, RecordBatch]]:
        timestamps, watermarks = batch.timestamps, batch.watermarks
        consumers = range(self._consumers)
        v: list[list[Any]] = [[] for _ in consumers]
        k = v if alone else [[] for _ in consumers]
        t: list[list[int]] | None = None if timestamps is None else [[] for _ in consumers]
        w: list[list[int]] | None = None if watermarks is None else [[] for _ in consumers]
        loop(
            source,
            timestamps,
            watermarks,
            _variant(self._key, batch.values),
            self._take,
            self._cache.known,
            self._cache.find,
            v,
            k,
            t,
            w,
        )
        return [
            (
                i,
                RecordBatch(
                    v[i],
                    None if t is None else t[i],
                    k[i],
                    None if w is None else w[i],
                    taken=taken,
                ),
            )
            for i in consumers
            if v[i]
        ]


def _generate_loop(
    consumers: int,
    body: Body | None,
    *,
    times: bool,
    marks: bool,
    alone: bool,
    taking: Callable[[Any], Any] | None,
) -> Callable[..., None]:
    """Generates the loop that for each record computes key and subtask, and appends the record
    there.

    For many consumers, with `times` and `marks`, and the body `value.user` of the key function:

        def loop(values, timestamps, watermarks, key_of, take, known, find, v, k, t, w):
            for value, time, mark in zip(values, timestamps, watermarks):
                key = value.user
                try: i = known[key]
                except KeyError: i = find(key)
                v[i].append(value); k[i].append(key); t[i].append(time); w[i].append(mark)

    The variants differ in these lines:

        without times and marks     for value in values:
        without a body              key = key_of(value)
        two consumers               v0, v1 = v; ...     before the loop, and in it
                                    if i: v1.append(value); ...
                                    else: v0.append(value); ...
        `alone`                     only `k` is appended to: the keys are sent alone
        `taking`                    v[i].append(take(value)), or the body of `take`
        a record is its own key     try: i = known[value], and only `v` is appended to

    With two consumers a branch is faster than indexing a list of lists. `part.append(x)` is one
    instruction of the interpreter. Calling a stored bound method would cost twice as much, as would
    `cache.__getitem__` instead of `cache[key]`.
    """
    taken = None if taking is None else body_of(taking)
    took = "value" if taking is None else "take(value)" if taken is None else taken.over("value")
    items = {"v": took, "k": "key", "t": "time", "w": "mark"}
    same = taking is None and body is not None and body.is_argument
    columns = (
        ([] if alone and not same else ["v"])
        + ([] if same else ["k"])
        + (["t"] if times else [])
        + (["w"] if marks else [])
    )
    sources = ["values"] + (["timestamps"] if times else []) + (["watermarks"] if marks else [])
    targets = ["value"] + (["time"] if times else []) + (["mark"] if marks else [])
    lines = ["def loop(values, timestamps, watermarks, key_of, take, known, find, v, k, t, w):"]
    if consumers == 2:
        lines += [f"    {column}0, {column}1 = {column}" for column in columns]
    joined = ", ".join(sources)
    lines.append(
        f"    for {', '.join(targets)} in {joined if len(sources) == 1 else f'zip({joined})'}:"
    )
    key = "value"
    if "k" in columns:
        lines.append(f"        key = {'key_of(value)' if body is None else body.over('value')}")
        key = "key"
    lines += [f"        try: i = known[{key}]", f"        except KeyError: i = find({key})"]
    if consumers == 2:
        lines.append("        if i: " + "; ".join(f"{c}1.append({items[c]})" for c in columns))
        lines.append("        else: " + "; ".join(f"{c}0.append({items[c]})" for c in columns))
    else:
        lines.append("        " + "; ".join(f"{c}[i].append({items[c]})" for c in columns))
    namespace: dict[str, Any] = {}
    exec(compile("\n".join(lines), "<aioflow routing loop>", "exec"), namespace)
    return namespace["loop"]  # type: ignore[no-any-return]
