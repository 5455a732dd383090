"""The check of debug mode for functions that change shared values.

Values that leave an operator are shared, not copied. So an operator must change neither its input
nor its output. Here each value of a batch gets a digest before and after each operator call. The
input and output of an operator are remembered for a while. So later changes are found too, such as
a list in state that is emitted again, or a coroutine that changes its input.

The digest is of the value's bytes in aioflow's codec, which encodes only fields. For a value that
the codec refuses, the digest is of its pickle. Values that neither accepts are not checked.
Immutable values such as numbers and strings only cost a type check. The check does not find a
generator that changes and emits one object several times during one call.

Only `CheckedOperatorChain` uses this module. Without debug mode it is not loaded.
"""

from __future__ import annotations

import pickle
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from aioflow.core.elements import RecordBatch
from aioflow.core.errors import AioflowError, describe_record
from aioflow.core.wire.serializers import Codec
from aioflow.operators.operator import Operator
from aioflow.operators.stateless import describe_place
from aioflow.state.snapshot import ATOMS
from aioflow.task.chain import OperatorChain

if TYPE_CHECKING:
    from aioflow.core.availability import Availability
    from aioflow.operators.operator import Unprocessed

__all__ = ["CheckedOperatorChain", "MutationGuard", "ValueMutated", "digest"]

REMEMBERED_VALUES = 1024
"""Number of values of input and output that are remembered for each operator.

A remembered value is checked again when the same object is emitted again.
"""

RECHECKED_VALUES = 16
"""Number of newest values that are checked at each call, even if they are not emitted again."""

Digest = tuple[int, int]

_CODEC = Codec()


class ValueMutated(AioflowError):
    """A function changed a value of its input or its earlier output.

    Other users of the value see the change. The function must copy the value first.
    """


def digest(value: Any) -> Digest | None:
    """Returns a fingerprint of `value`; None if it is immutable or cannot be checked."""
    kind = type(value)
    if kind in ATOMS or (kind is tuple and ATOMS.issuperset(map(type, value))):
        return None
    try:
        content = _CODEC.encode(value, owner="digest")
    # Any error of the codec, or of a user's encode=.
    except Exception:  # noqa: BLE001
        try:
            content = pickle.dumps(value, protocol=5)
        # A lock, a socket, a lambda: its content is opaque.
        except Exception:  # noqa: BLE001
            return None
    return zlib.crc32(content), len(content)


class MutationGuard:
    """A wrapper that checks one operator, with the operator's interface."""

    __slots__ = ("_operator", "_remembered")

    def __init__(self, operator: Operator) -> None:
        self._operator = operator
        # Keyed by identity. The value is kept, so that no other object can get the same id.
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
    def comes_to_rest(self) -> bool:
        return self._operator.comes_to_rest

    def unprocessed(self) -> Unprocessed | None:
        return self._operator.unprocessed()

    @property
    def slow_remedy(self) -> str:
        return self._operator.slow_remedy

    @property
    def keeps_input(self) -> bool:
        return self._operator.keeps_input

    def room(self) -> int:
        return self._operator.room()

    def process_batch(self, batch: RecordBatch) -> RecordBatch:
        return self._checked(batch, self._operator.process_batch, batch)

    def process_input(self, index: int, batch: RecordBatch) -> RecordBatch:
        return self._checked(batch, self._operator.process_input, index, batch)

    def resume(self, max_records: int) -> RecordBatch:
        return self._checked(None, self._operator.resume, max_records)

    def emitted(self, values: list[Any]) -> None:
        """Checks values that the operator emitted outside of a call: from a timer, a completion,
        or its end.
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

    Operators are not fused, so that the error names the right operator.
    """

    fuses = False

    def __init__(
        self, operators: Sequence[Operator], *args: Any, **options: Any
    ) -> None:  # Any: the base class declares them.
        super().__init__(operators, *args, **options)
        self.guards = [MutationGuard(operator) for operator in operators]

    def add(self, operator: Operator) -> None:
        super().add(operator)
        self.guards.append(MutationGuard(operator))

    def compile(self) -> None:
        super().compile()
        for stage in self._stages if self.guards else ():
            guard = self.guards[stage.first]
            stage.operator = guard  # type: ignore[assignment]  # A guard acts as an operator.
            stage.process = guard.process_batch if guard.inputs == 1 else None

    def emit_from(self, index: int, batch: RecordBatch) -> None:
        if batch.values and index >= 0:
            self.guards[index].emitted(batch.values)
        super().emit_from(index, batch)
