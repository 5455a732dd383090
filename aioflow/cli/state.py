"""The command `aioflow state show PATH`, which prints the contents of a savepoint or checkpoint."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from aioflow.checkpoint.savepoint import OperatorSummary, Savepoint
from aioflow.cli.options import key_in
from aioflow.core.errors import CheckpointError, RestoreError

__all__ = ["add_commands"]

FINISHED, FAILED = 0, 1


def add_commands(commands: Any) -> None:
    """Adds the commands to an argparse subparsers object."""
    state = commands.add_parser("state", help="look into savepoints and checkpoints")
    actions = state.add_subparsers(dest="action", metavar="ACTION", required=True)
    show = actions.add_parser(
        "show",
        help="show the contents of a savepoint or checkpoint",
        description="Show the operators of the saved job, and their state.",
    )
    show.add_argument(
        "path",
        metavar="PATH",
        help="directory or URL of a savepoint or checkpoint, with the file `metadata`",
    )
    show.add_argument("--json", action="store_true", help="print JSON, for programs")
    show.add_argument(
        "--key-file", metavar="FILE", help="file with the key that the state was written with"
    )
    show.set_defaults(carry_out=_show)


def _show(arguments: argparse.Namespace) -> int:
    try:
        summary, operators = asyncio.run(_read(arguments.path, key_in(arguments.key_file)))
    except (CheckpointError, RestoreError) as error:
        print(f"aioflow state show: {error}", file=sys.stderr)
        return FAILED
    if arguments.json:
        print(
            json.dumps(
                {**summary, "operators": [asdict(operator) for operator in operators]}, indent=2
            )
        )
    else:
        print("\n".join(_lines(summary, operators)))
    return FINISHED


async def _read(path: str, key: bytes | None) -> tuple[dict[str, Any], tuple[OperatorSummary, ...]]:
    async with Savepoint(path, key=key) as savepoint:
        found = savepoint.checkpoint
        summary = {
            "path": found.location,
            "kind": found.kind.value,
            "number": found.checkpoint_id,
            "flow": found.flow,
            "job_id": found.job_id,
            "completed_ms": found.completed_ms,
            "size": sum(operator.size for operator in savepoint.operators),
        }
        return summary, savepoint.operators


def _lines(summary: dict[str, Any], operators: tuple[OperatorSummary, ...]) -> list[str]:
    taken = datetime.fromtimestamp(summary["completed_ms"] / 1000, UTC).strftime(
        "%Y-%m-%d %H:%M:%S"
    )
    kind = "checkpoint" if summary["kind"] == "CHECKPOINT" else "savepoint"
    lines = [
        f"{kind} {summary['number']} of flow {summary['flow']!r}, completed {taken} UTC, "
        f"{_size(summary['size'])}",
        f"job {summary['job_id']}, at {summary['path']}",
    ]
    for operator in operators:
        scale = f"parallelism {operator.parallelism} of {operator.max_parallelism}"
        lines += ["", f"{operator.name}  uid {operator.uid!r}, {scale}, {_size(operator.size)}"]
        if operator.splits:
            lines.append(f"  {_count(operator.splits, 'split')} with positions")
        for state in operator.states:
            what = {
                "timers": "timer",
                "split": "element",
                "union": "element",
                "broadcast": "entry",
            }.get(state.kind, "key")
            lines.append(f"  {state.name}  {state.kind}, {_count(state.entries, what)}")
    return lines


def _count(number: int, what: str) -> str:
    if number == 1:
        return f"1 {what}"
    return f"{number:,} {what.removesuffix('y') + 'ies' if what == 'entry' else what + 's'}"


def _size(size: int) -> str:
    if size < 1024:
        return f"{size} bytes"
    units = [(size / 1024**power, unit) for power, unit in ((1, "KiB"), (2, "MiB"), (3, "GiB"))]
    number, unit = next((pair for pair in units if pair[0] < 1024), units[-1])
    return f"{number:.1f} {unit}"
