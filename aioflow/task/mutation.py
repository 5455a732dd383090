"""Finds whoever changes a value that others hold too: debug mode's check of every operator call.

Values that leave an operator are shared, not copied. So an operator must change neither what it was
given nor what it has emitted. Here each value of a batch gets a digest before and after the call of
each operator; and what an operator took and emitted is remembered for a while, so that a change
that comes later (a list kept in state and emitted again, a coroutine that works on its input) is
found too.

The digest is the value's bytes in our codec, which knows no attributes but fields; of what the
codec refuses, its pickle; what neither takes is not checked. Numbers, strings and what else nobody
can change costs a look at its type. Not found: a generator that changes and emits one object
several times during one call.

Only `CheckedOperatorChain` calls this; without debug mode none of it is loaded.
"""

from __future__ import annotations

import pickle
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from aioflow.core.elements import RecordBatch
from aioflow.core.errors import AioflowError
from aioflow.core.serializers import Codec
from aioflow.operators.operator import Operator
from aioflow.operators.stateless import describe_place
from aioflow.operators.userfunction import describe_record
from aioflow.state.snapshot import ATOMS
from aioflow.task.chain import OperatorChain

if TYPE_CHECKING:
    from aioflow.core.availability import Availability

__all__ = ["CheckedOperatorChain", "MutationGuard", "ValueMutated", "digest"]

REMEMBERED_VALUES = 1024
"""Values that each operator is held to after it took or emitted them; found again when the same
object is emitted again.
"""

RECHECKED_VALUES = 16
"""The newest of them are looked at in each call, whether they come again or not."""

Digest = tuple[int, int]

_CODEC = Codec()


class ValueMutated(AioflowError):
    """A function changed a value that it was given, or had emitted.

    Others see the change: copy the value first.
    """


def digest(value: Any) -> Digest | None:
    """A fingerprint of the contents of `value`; None if nobody can change it, or nothing can be
    said.
    """
    kind = type(value)
    if kind in ATOMS or (kind is tuple and ATOMS.issuperset(map(type, value))):
        return None
    try:
        content = _CODEC.encode(value, owner="digest")
    # Whatever it is that the codec, or an encode= of the user, cannot take.
    except Exception:  # noqa: BLE001
        try:
            content = pickle.dumps(value, protocol=5)
        # A lock, a socket, a lambda: its contents cannot be seen.
        except Exception:  # noqa: BLE001
            return None
    return zlib.crc32(content), len(content)


class MutationGuard:
    """Stands before one operator in its stage, and is to the chain what the operator is."""

    __slots__ = ("_operator", "_remembered")

    def __init__(self, operator: Operator) -> None:
        self._operator = operator
        # By identity; the value is held, so that no other object can take its place.
        self._remembered: OrderedDict[int, tuple[Any, Digest]] = OrderedDict()

    @property
    def inputs(self) -> int:
        return self._operator.inputs

    @property
    def ctx(self) -> Any:
        return self._operator.ctx

    @property
    def availability(self) -> Availability:
        return self._operator.availability

    @property
    def has_pending(self) -> bool:
        return self._operator.has_pending

    @property
    def slow_remedy(self) -> str:
        return self._operator.slow_remedy

    def room(self) -> int:
        return self._operator.room()

    def process_batch(self, batch: RecordBatch) -> RecordBatch:
        return self._checked(batch, self._operator.process_batch, batch)

    def process_input(self, index: int, batch: RecordBatch) -> RecordBatch:
        return self._checked(batch, self._operator.process_input, index, batch)

    def resume(self, max_records: int) -> RecordBatch:
        return self._checked(None, self._operator.resume, max_records)

    def emitted(self, values: list[Any]) -> None:
        """The operator emitted `values` outside of a call of the chain: from a timer, a
        completion, or its end.
        """
        self._recheck("between two calls")
        self._remember(values)

    def _checked(self, batch: RecordBatch | None, call: Any, *args: Any) -> RecordBatch:
        self._recheck("between two calls")
        given = [] if batch is None else batch.values
        before = list(map(digest, given))
        result: RecordBatch = call(*args)
        for value, old in zip(given, before, strict=True):
            if old is not None and digest(value) != old:
                raise self._mutated(value, "its input", "while it processed it")
        self._recheck("during this call")
        self._remember(given)
        self._remember(result.values)
        return result

    def _remember(self, values: list[Any]) -> None:
        remembered = self._remembered
        for value in values[-REMEMBERED_VALUES:]:
            known = remembered.get(id(value))
            now = digest(value)
            if now is None:
                continue
            if known is not None and known[1] != now:
                raise self._mutated(
                    value,
                    "a value that it had emitted or been given before",
                    "and emitted it again",
                )
            remembered[id(value)] = (value, now)
            remembered.move_to_end(id(value))
        while len(remembered) > REMEMBERED_VALUES:
            remembered.popitem(last=False)

    def _recheck(self, when: str) -> None:
        newest = reversed(self._remembered.values())
        for _, (value, old) in zip(range(RECHECKED_VALUES), newest, strict=False):
            if digest(value) != old:
                raise self._mutated(value, "a value that it had emitted or been given before", when)

    def _mutated(self, value: Any, what: str, when: str) -> ValueMutated:
        self._remembered.clear()
        where = describe_place(self._operator.ctx)
        doubt = (
            " (it, its coroutines or timers, or code that it handed the value to)"
            if when == "between two calls"
            else ""
        )
        return ValueMutated(
            f"{where} changed {what}, {when}{doubt}; it is now {describe_record(value)}. Values "
            "are shared between operators, not "
            "copied: change a copy (dict(value), dataclasses.replace, copy.deepcopy) and emit that"
        )


class CheckedOperatorChain(OperatorChain):
    """An `OperatorChain` with a guard before each operator.

    Operators are not fused, so that the culprit has a name.
    """

    fuses = False

    def __init__(
        self, operators: Sequence[Operator], *args: Any, **options: Any
    ) -> None:  # Any: as the base takes them.
        super().__init__(operators, *args, **options)
        self.guards = [MutationGuard(operator) for operator in operators]

    def compile(self) -> None:
        super().compile()
        for stage in self._stages if self.guards else ():
            guard = self.guards[stage.first]
            stage.operator = guard  # type: ignore[assignment]  # To a stage it is an operator.
            stage.process = guard.process_batch if guard.inputs == 1 else None

    def emit_from(self, index: int, batch: RecordBatch) -> None:
        if batch.values and index >= 0:
            self.guards[index].emitted(batch.values)
        super().emit_from(index, batch)
