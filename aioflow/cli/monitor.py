"""The options of the monitoring endpoint, for every command that can serve one."""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from aioflow.cli.flags import in_flags
from aioflow.cli.target import UsageError
from aioflow.core.errors import NotAuthenticated
from aioflow.monitoring.options import parse_monitor_address, served_options

__all__ = ["add_monitor_options", "monitor_arguments", "monitor_options", "served"]


def add_monitor_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the monitoring endpoint to a command."""
    parser.add_argument(
        "--monitor",
        type=_address,
        metavar="HOST:PORT",
        help="serve the dashboard, REST and /metrics there; port 0: any free one",
    )
    parser.add_argument(
        "--monitor-token-file",
        type=Path,
        metavar="FILE",
        help="its first line must be shown as a bearer token: off loopback always",
    )
    parser.add_argument(
        "--enable-control",
        action="store_true",
        help="let who knows the token stop, cancel and save jobs",
    )
    parser.add_argument(
        "--show-data", action="store_true", help="show state and records to all readers"
    )


def _address(text: str) -> str:
    try:
        parse_monitor_address(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def monitor_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the given options as keyword arguments of a run.

    Raises UsageError for options that would allow access to anyone.
    """
    if arguments.monitor is None:
        if (
            arguments.monitor_token_file is not None
            or arguments.enable_control
            or arguments.show_data
        ):
            raise UsageError(
                "--monitor-token-file, --enable-control and --show-data are about --monitor "
                "HOST:PORT, which is not given"
            )
        return {}
    given: dict[str, Any] = {
        "enable_control": arguments.enable_control,
        "show_data": arguments.show_data,
    }
    if arguments.monitor_token_file is not None:
        try:
            text = arguments.monitor_token_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"the token cannot be read: {error}") from error
        given["token"] = text.partition("\n")[0].strip()
    try:
        served_options(arguments.monitor, given)
    except NotAuthenticated as error:
        raise UsageError(in_flags(str(error))) from error
    return {"monitor": arguments.monitor, "monitor_options": given}


def monitor_arguments(arguments: argparse.Namespace) -> list[str]:
    """Returns the given options as command line arguments for another process.

    Raises UsageError as `monitor_options`.
    """
    if not monitor_options(arguments):
        return []
    token = (
        []
        if arguments.monitor_token_file is None
        else ["--monitor-token-file", str(arguments.monitor_token_file)]
    )
    flags = [
        name
        for name, given in (
            ("--enable-control", arguments.enable_control),
            ("--show-data", arguments.show_data),
        )
        if given
    ]
    return ["--monitor", arguments.monitor, *token, *flags]


@asynccontextmanager
async def served(what: Any, arguments: argparse.Namespace) -> AsyncIterator[None]:
    """Serves `what`, a job or a JobManager, inside the block if `--monitor` was given."""
    options = monitor_options(arguments)
    if not options:
        yield
        return
    from aioflow.monitoring.server import serving  # Imported late, because it imports aiohttp.

    async with AsyncExitStack() as stack:
        try:
            url = await stack.enter_async_context(
                serving(what, options["monitor"], options["monitor_options"])
            )
        except OSError as error:
            raise UsageError(in_flags(error.strerror or str(error))) from error
        print(f"dashboard at {url}", flush=True)
        yield
