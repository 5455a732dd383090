"""Options and arguments that several commands share, and the parsers of their values.

The error of a parser says which value is expected. `in_flags` replaces arguments in the library's
messages by options: a user who typed `--every` does not know `every=`. The commands `run` and
`submit` have the checkpoint options. Every command that can serve a monitoring endpoint has the
endpoint's options.
"""

from __future__ import annotations

import argparse
import os
import re
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from aioflow.api.checkpoint_options import checkpoint_key
from aioflow.api.options import parse_options
from aioflow.api.settings import CONFIGURATION, RUN_SETTINGS, TOKEN_VARIABLE, parse_flag
from aioflow.core.contexts import asynccontextmanager
from aioflow.core.errors import NotAuthenticated, StateError, did_you_mean
from aioflow.core.host import Host
from aioflow.core.timeunits import to_seconds
from aioflow.inspection.json_logs import LOG_FORMATS, TEXT
from aioflow.monitoring.options import parse_monitor_address, served_options
from aioflow.network.local_pool import network_bytes
from aioflow.task.environment import TaskOptions

__all__ = [
    "UsageError",
    "add_checkpoint_options",
    "add_configuration",
    "add_log_options",
    "add_monitor_options",
    "add_run_options",
    "bind_address",
    "checkpoint_options",
    "count",
    "duration",
    "id_beginning",
    "in_flags",
    "key_in",
    "monitor_address",
    "monitor_arguments",
    "monitor_options",
    "network_memory",
    "port",
    "positive",
    "served",
    "serving_health",
]

FLAGS = {
    **{
        setting.option: f"--{name}"
        for name, setting in RUN_SETTINGS.items()
        if name not in ("restart", "state", "timeout", "strict")  # Other calls have these, too.
    },
    "allow_non_restored": "--allow-non-restored",
    "allow_plaintext": "--allow-plaintext",
    "checkpoint_key": "--checkpoint-key-file",
    "checkpoints": "--checkpoints",
    "enable_control": "--enable-control",
    "every": "--every",
    "fresh": "--fresh",
    "monitor": "--monitor",
    "on": "--on",
    "restore": "--restore",
    "secret": "--secret-file",
    "show_data": "--show-data",
    "token": "--monitor-token-file",
    "workers": "--workers",
}
"""Maps the name of an argument to its flag. Other arguments have no flag, and stay unchanged in
messages.
"""

ARGUMENT = re.compile(
    rf"(?<![\w?&-])(?P<name>{'|'.join(FLAGS)})="
    r"(?P<value>True|None|\"[^\"]*\"|'[^']*'|[A-Z]+\b|\d+\b|Path\(\.\.\.\))?"
)
SUBJECT = re.compile(rf"(?P<name>{'|'.join(FLAGS)}) (?=is ['\"\d])")
"""Matches the argument in a message such as `every is '0s', expected more than nothing`."""


def in_flags(message: str) -> str:
    """Returns `message` with command line flags in place of arguments.

    `--fresh` replaces `fresh=True` and `restore=None`; `--every 1s` replaces `every='1s'`.
    """
    message = message.replace("restore=None, fresh=True", "--fresh").replace(
        "give restore=None with it", "leave --restore out"
    )
    message = SUBJECT.sub(lambda found: f"{FLAGS[found['name']]} ", message, count=1)
    return ARGUMENT.sub(_flag, message)


def _flag(found: re.Match[str]) -> str:
    name, value = found["name"], found["value"]
    if value == "None":
        return "--fresh" if name == "restore" else f"no {FLAGS[name]}"
    if value in (None, "True"):
        return FLAGS[name]
    return f"{FLAGS[name]} {value.strip(chr(39) + chr(34)) if value != 'Path(...)' else 'FILE'}"


PORT_MAX = 65_535


def count(text: str) -> int:
    """Parses a command line argument: an int that is at least 0."""
    return _number(text, 0, None)


def positive(text: str) -> int:
    """Parses a command line argument: an int that is at least 1."""
    return _number(text, 1, None)


def network_memory(text: str) -> int:
    """Parses a command line argument: a size such as 64MiB, in bytes."""
    try:
        return network_bytes(int(text) if text.isdecimal() else text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def port(text: str) -> int:
    """Parses a command line argument: a port to listen at, where 0 means any free port."""
    return _number(text, 0, PORT_MAX)


def _number(text: str, least: int, most: int | None) -> int:
    expected = (
        f"expected a number of at least {least}"
        if most is None
        else f"expected a number from {least} to {most}"
    )
    if (
        not (text.isascii() and text.isdecimal())
        or int(text) < least
        or (most is not None and int(text) > most)
    ):
        raise argparse.ArgumentTypeError(f"{expected}, got {text!r}")
    return int(text)


def duration(text: str) -> str:
    """Checks a duration above 0, and returns the text, which may be passed to another process."""
    try:
        seconds = to_seconds(text, "it")
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if seconds <= 0:
        raise argparse.ArgumentTypeError(f"expected a time above 0, got {text!r}")
    return text


def id_beginning(text: str) -> str:
    """Checks that the text, a job's id or the beginning of one, is not empty."""
    if not text:
        raise argparse.ArgumentTypeError(
            "expected the id of a job, or its beginning, got nothing: see aioflow list"
        )
    return text


def bind_address(text: str) -> str:
    """Checks an address of this machine to listen at, without a port."""
    host, colon, number = text.rpartition(":")
    if colon and number.isdecimal() and ":" not in host:
        raise argparse.ArgumentTypeError(
            f"expected an address without a port, got {text!r}: the port of a jobmanager goes "
            "into --port"
        )
    try:
        socket.getaddrinfo(text, None)
    except OSError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no address of this machine: {error.strerror}"
        ) from None
    return text


def add_checkpoint_options(parser: argparse.ArgumentParser) -> None:
    """Adds the checkpoint options to a command."""
    parser.add_argument(
        "--checkpoints",
        metavar="URL",
        help="keep state in a directory, or file:// s3:// gs:// az://, and continue from it",
    )
    parser.add_argument("--every", metavar="TIME", help="time between two checkpoints (10s)")
    parser.add_argument(
        "--restore",
        metavar="PATH",
        help="begin with this savepoint, not with the newest state in the store",
    )
    parser.add_argument(
        "--checkpoint-key-file",
        metavar="FILE",
        help="file with a secret; restore only state that was written with it",
    )
    parser.add_argument(
        "--fresh", action="store_true", help="begin without state, even if the store holds some"
    )
    parser.add_argument(
        "--allow-non-restored",
        action="store_true",
        help="drop the state of operators that the flow no longer has",
    )

    _add_settings(parser, of_cluster=True)


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that apply only to runs in this process, not to jobs of a cluster."""
    _add_settings(parser, of_cluster=False)
    add_configuration(parser)


def _add_settings(parser: argparse.ArgumentParser, *, of_cluster: bool) -> None:
    for name, setting in RUN_SETTINGS.items():
        if setting.of_cluster is not of_cluster:
            continue
        if setting.parse is parse_flag:
            parser.add_argument(
                f"--{name}", action=argparse.BooleanOptionalAction, help=setting.help
            )
        else:
            parser.add_argument(
                f"--{name}",
                type=_argument(setting.parse),
                metavar=setting.metavar,
                help=setting.help,
            )


def _argument(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Wraps `parse` so that argparse shows the message of a ValueError that `parse` raises."""

    def parsed(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parsed


def add_configuration(parser: argparse.ArgumentParser) -> None:
    """Adds `--conf` to a command."""
    parser.add_argument(
        "--conf",
        type=_setting,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help=f"default for jobs that do not set it: {', '.join(CONFIGURATION)}",
    )


def _setting(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or name not in CONFIGURATION:
        raise argparse.ArgumentTypeError(
            f"expected NAME=VALUE with one of the names {', '.join(CONFIGURATION)}, got {text!r}"
            f"{'' if name in CONFIGURATION else did_you_mean(name, CONFIGURATION)}"
        )
    return name, value


def checkpoint_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the checkpoint options that were given, as options of `flow.run`. Raises UsageError
    for invalid options.
    """
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
    for name, setting in RUN_SETTINGS.items():
        value = getattr(arguments, name.replace("-", "_"), None)
        if value is not None:
            given[setting.option] = value
    if arguments.command in ("run", "sql") and arguments.conf:
        given["tasks"] = TaskOptions(configuration=dict(arguments.conf))
    try:
        parse_options(given)
    except (ValueError, TypeError, StateError) as error:
        raise UsageError(_with_origins(in_flags(str(error)), arguments)) from error
    return given


def _with_origins(message: str, arguments: argparse.Namespace) -> str:
    """Returns `message` with a note on where each option that the user did not type comes from."""
    origins: dict[str, tuple[str, str]] = vars(arguments).get("origins", {})
    found = {
        flag: origins.get(flag[2:].replace("-", "_"), ("", ""))[1]
        for flag in re.findall(r"--[a-z][a-z-]*", message)
    }
    if "state backend" in message:
        found["--state"] = origins.get("state", ("", ""))[1]
    notes = [
        f"{flag} is from {origin}"
        for flag, origin in found.items()
        if origin not in ("", "argument", "default")
    ]
    return f"{message} ({', '.join(notes)})" if notes else message


def key_in(path: str | None) -> bytes | None:
    """Returns the checkpoint key in the file `path`, the value of `--key-file`; None without a
    file.

    Raises UsageError if the file has no valid key.
    """
    try:
        return None if path is None else checkpoint_key(Path(path))
    except ValueError as error:
        raise UsageError(str(error).replace("checkpoint_key=", "--key-file")) from error


def add_log_options(parser: argparse.ArgumentParser) -> None:
    """Adds `--log-format` to a command."""
    parser.add_argument(
        "--log-format",
        type=_log_format,
        default=TEXT,
        metavar="|".join(LOG_FORMATS),
        help="format of the log on stderr (text); json: one object per line",
    )


def _log_format(text: str) -> str:
    if text not in LOG_FORMATS:
        raise argparse.ArgumentTypeError(f"expected {' or '.join(LOG_FORMATS)}, got {text!r}")
    return text


def add_monitor_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the monitoring endpoint to a command."""
    parser.add_argument(
        "--monitor",
        type=monitor_address,
        metavar="HOST:PORT",
        help="serve the dashboard, REST and /metrics at this address; port 0: any free port",
    )
    parser.add_argument(
        "--monitor-token-file",
        type=Path,
        metavar="FILE",
        help="file whose first line is the required bearer token; needed off loopback",
    )
    parser.add_argument(
        "--enable-control",
        action=argparse.BooleanOptionalAction,
        help="let clients with the token stop, cancel, save and rescale jobs",
    )
    parser.add_argument(
        "--show-data",
        action=argparse.BooleanOptionalAction,
        help="show state and records to all readers",
    )


def monitor_address(text: str) -> str:
    """Checks an address HOST:PORT to listen at."""
    try:
        parse_monitor_address(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def monitor_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the monitoring options that were given, as keyword arguments of a run.

    Raises UsageError for options that would allow access without authentication.
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
        "enable_control": bool(arguments.enable_control),
        "show_data": bool(arguments.show_data),
    }
    if arguments.monitor_token_file is not None:
        try:
            text = arguments.monitor_token_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise UsageError(
                f"--monitor-token-file names {arguments.monitor_token_file}, which cannot be read: "
                f"{reason}"
            ) from error
        given["token"] = text.partition("\n")[0].strip()
    elif token := os.environ.get(TOKEN_VARIABLE):
        given["token"] = token
    try:
        served_options(arguments.monitor, given)
    except NotAuthenticated as error:
        message = in_flags(str(error))
        if "token" in given and arguments.monitor_token_file is None:
            message = message.replace("--monitor-token-file", TOKEN_VARIABLE)
        raise UsageError(message) from error
    return {"monitor": arguments.monitor, "monitor_options": given}


def monitor_arguments(arguments: argparse.Namespace) -> list[str]:
    """Returns the monitoring options that were given, as command line arguments for another
    process.

    Raises UsageError for the same options as `monitor_options`.
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
    from aioflow.monitoring.app import serving  # Imported late, because it imports aiohttp.

    async with AsyncExitStack() as stack:
        try:
            url = await stack.enter_async_context(
                serving(what, options["monitor"], options["monitor_options"])
            )
        except OSError as error:
            raise UsageError(in_flags(error.strerror or str(error))) from error
        print(f"dashboard at {url}", flush=True)
        yield


@asynccontextmanager
async def serving_health(
    host: Host, address: str | None, unready: Callable[[], Sequence[str]]
) -> AsyncIterator[None]:
    """Serves the health probes of a process inside the block, unless `address` is None."""
    if address is None:
        yield
        return
    from aioflow.monitoring.app import serving_probes  # Imported late, because it imports aiohttp.

    async with AsyncExitStack() as stack:
        try:
            url = await stack.enter_async_context(serving_probes(host, address, unready))
        except OSError as error:
            raise UsageError(
                (error.strerror or str(error)).replace("monitor=", "--health ")
            ) from error
        print(f"probes at {url}", flush=True)
        yield


class UsageError(Exception):
    """The command line is syntactically valid, but cannot be executed."""
