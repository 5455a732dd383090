"""The checkpoint options of the commands `run` and `submit`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from aioflow.api.options import parse_options
from aioflow.cli.flags import in_flags
from aioflow.cli.target import UsageError

__all__ = ["add_checkpoint_options", "checkpoint_options"]


def add_checkpoint_options(parser: argparse.ArgumentParser) -> None:
    """Adds the checkpoint options to a command."""
    parser.add_argument(
        "--checkpoints",
        metavar="URL",
        help="keep state there (a directory, file:// s3:// gs:// az://), go on from it",
    )
    parser.add_argument("--every", metavar="TIME", help="between two checkpoints (10s)")
    parser.add_argument(
        "--restore",
        metavar="PATH",
        help="begin with this savepoint, not with the newest state in the store",
    )
    parser.add_argument(
        "--checkpoint-key-file",
        metavar="FILE",
        help="secret: restore only what was written with it",
    )
    parser.add_argument(
        "--fresh", action="store_true", help="begin without state, even if the store holds some"
    )
    parser.add_argument(
        "--allow-non-restored",
        action="store_true",
        help="drop state of operators that the flow has no more",
    )


def checkpoint_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the given options as options of `flow.run`. Raises UsageError for invalid ones."""
    if arguments.fresh and arguments.restore is not None:
        raise UsageError("--fresh begins without state, --restore with some: give one of them")
    given = {
        name: getattr(arguments, name)
        for name in ("checkpoints", "every", "restore")
        if getattr(arguments, name) is not None
    }
    if arguments.checkpoint_key_file is not None:
        given["checkpoint_key"] = Path(arguments.checkpoint_key_file)
    if arguments.fresh:
        given |= {"restore": None, "fresh": True}
    if arguments.allow_non_restored:
        given["allow_non_restored"] = True
    try:
        parse_options(given)
    except (ValueError, TypeError) as error:
        raise UsageError(in_flags(str(error))) from error
    return given
