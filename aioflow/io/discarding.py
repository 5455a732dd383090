"""A sink that drops all records, for benchmarks and for flows that are only subscribed to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from aioflow.advice.calls import explained

if TYPE_CHECKING:
    from aioflow.operators.operator import OperatorContext

__all__ = ["BlackholeSink", "blackhole"]


@explained
def blackhole() -> BlackholeSink:
    """Returns a sink that drops every record."""
    return BlackholeSink()


class BlackholeSink:
    """A sink that drops all records; each call costs one attribute lookup."""

    name = "blackhole"
    reads_columns = True

    def __repr__(self) -> str:
        return "blackhole()"

    def writer(self, ctx: OperatorContext) -> BlackholeSink:
        return self

    def committer(self) -> None:
        return None

    def write_batch(self, values: Sequence[Any], timestamps: Sequence[int] | None) -> None:
        """Drops `values`."""

    async def flush(self) -> None:
        """Does nothing: no record is buffered."""

    async def prepare(self, checkpoint_id: int) -> list[Any]:
        return []
