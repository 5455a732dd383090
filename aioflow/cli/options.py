"""Options and arguments that several commands share, and the parsers of their values.

The error of a parser says which value is expected. `in_flags` translates the library's messages
about arguments into messages about options: a user who typed `--every` does not know `every=`. The
commands `run` and `submit` have the checkpoint options. Every command that can serve a monitoring
endpoint has the options of the endpoint.

A command names a flow by `MODULE:FLOW` or `PATH.py:FLOW`. FLOW is a Flow or a function that returns
one.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import re
import socket
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, TextIO

import msgspec

from aioflow.api.checkpoint_options import checkpoint_key
from aioflow.api.flow import Flow
from aioflow.api.options import parse_options
from aioflow.api.settings import CONFIGURATION, RUN_SETTINGS, TOKEN_VARIABLE, parse_flag
from aioflow.cli.terminal import describe
from aioflow.core.contexts import asynccontextmanager
from aioflow.core.errors import (
    GraphError,
    NotAuthenticated,
    StateError,
    did_you_mean,
    with_article,
)
from aioflow.core.host import Host
from aioflow.core.timeunits import to_seconds
from aioflow.inspection.json_logs import LOG_FORMATS, TEXT
from aioflow.io.changes import Upsert
from aioflow.monitoring.options import parse_monitor_address, served_options
from aioflow.network.local_pool import network_bytes
from aioflow.sql.errors import SqlError
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
    "load_flow",
    "monitor_address",
    "monitor_arguments",
    "monitor_options",
    "network_memory",
    "port",
    "positive",
    "script_flow",
    "script_of",
    "served",
    "serving_health",
]

FLAGS = {
    **{
        setting.option: f"--{name}"
        for name, setting in RUN_SETTINGS.items()
        if name not in ("restart", "state", "timeout", "strict")  # Other calls have these too.
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
"""Flags by the name of their argument. Other arguments have no flag, and stay as they are."""

ARGUMENT = re.compile(
    rf"(?<![\w?&-])(?P<name>{'|'.join(FLAGS)})="
    r"(?P<value>True|None|\"[^\"]*\"|'[^']*'|[A-Z]+\b|\d+\b|Path\(\.\.\.\))?"
)
SUBJECT = re.compile(rf"(?P<name>{'|'.join(FLAGS)}) (?=is ['\"\d])")
"""Beginning of a message such as `every is '0s', expected more than nothing`."""


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

    _add_settings(parser, of_cluster=True)


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of a run that jobs of a cluster do not have."""
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
    """Returns `parse` with its ValueError as the error whose text argparse shows."""

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
        help=f"a setting for what jobs leave open: {', '.join(CONFIGURATION)}",
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
    """Returns `message` with the origin of each option in it that the user did not type."""
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
    """Returns the checkpoint key in the file that `--key-file` names. Raises UsageError."""
    try:
        return None if path is None else checkpoint_key(Path(path))
    except ValueError as error:
        raise UsageError(str(error).replace("checkpoint_key=", "--key-file")) from error


def add_log_options(parser: argparse.ArgumentParser) -> None:
    """Adds the format of the log."""
    parser.add_argument(
        "--log-format",
        type=_log_format,
        default=TEXT,
        metavar="|".join(LOG_FORMATS),
        help="of the log on stderr; json: one object per line (text)",
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
        action=argparse.BooleanOptionalAction,
        help="let who knows the token stop, cancel, save and rescale jobs",
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
    """Serves the probes of a process inside the block, unless `address` is None."""
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
    """The command line is valid, but cannot be carried out."""


def load_flow(target: str) -> Flow:
    """Returns the flow that `target` names. Raises UsageError, which says what was found
    instead.
    """
    if target.endswith(".sql"):
        return script_flow(Path(target), None)
    place, colon, name = target.rpartition(":")
    if not colon:
        module = _load(target)
        raise UsageError(f"{target!r} names no flow, expected {target}:FLOW; {_found_in(module)}")
    if not place or not name:
        raise UsageError(f"expected MODULE:FLOW or PATH.py:FLOW, got {target!r}")
    module = _load(place)
    found: object = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is None:
        raise UsageError(f"{place} has no flow {name!r}; {_found_in(module)}")
    if callable(found):
        try:
            made = found()
        except Exception as error:  # The user's function may raise anything.
            raise UsageError(
                f"{name}() of {place} raised\n  " + "\n  ".join(describe(error))
            ) from error
        if not isinstance(made, Flow):
            raise UsageError(
                f"{name}() of {place} returned {made!r}, expected a Flow; {_found_in(module)}"
            )
        return made
    if not isinstance(found, Flow):
        kind = with_article(type(found).__name__)
        raise UsageError(
            f"{name!r} of {place} is {kind}, expected a Flow or a function that returns one; "
            f"{_found_in(module)}"
        )
    return found


def script_flow(path: Path, plans: TextIO | None) -> Flow:
    """Returns the flow of a file with a script in SQL; "-" is standard input.

    The flow prints a JSON object for each row of a SELECT. `plans` gets the texts of EXPLAIN.
    """
    try:
        text = sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise UsageError(f"cannot read {path}: {error}") from error
    return script_of(text, "sql" if str(path) == "-" else path.stem, _Lines(plans))


def script_of(text: str, name: str, console: Any, before: str = "") -> Flow:
    """Returns the flow of a script, of which `console` shows rows and plans.

    `before` are statements of earlier texts. Raises UsageError, with the place in `text`.
    """
    flow = Flow(name)
    try:
        from aioflow.sql.script import script  # Imported late: it loads sqlglot.

        script(flow, before + text, {}, console=console)
    except ModuleNotFoundError as error:
        if error.name != "sqlglot":
            raise
        raise UsageError("SQL needs sqlglot: pip install 'aioflow[sql]'") from None
    except SqlError as error:
        if error.span is not None and error.span[0] >= len(before):
            error.text = text
            error.span = (error.span[0] - len(before), error.span[1] - len(before))
        raise UsageError(str(error)) from error
    except GraphError as error:
        raise UsageError(str(error)) from error
    return flow


class _Lines:
    """Shows the rows of a script as lines of JSON."""

    def __init__(self, plans: TextIO | None) -> None:
        self._plans = plans

    def rows(self, stream: Any) -> None:
        stream.map(_line, name="rows: lines").print(name="rows")

    def plan(self, text: str) -> None:
        if self._plans is not None:
            print(text, file=self._plans, flush=True)


def _line(row: Any) -> str:
    shown = {"key": row.key, "row": row.row} if type(row) is Upsert else row
    return msgspec.json.encode(shown).decode()


def _load(place: str) -> ModuleType:
    try:
        if place.endswith(".py"):
            return _load_file(Path(place))
        if os.getcwd() not in sys.path:
            sys.path.insert(
                0, os.getcwd()
            )  # As with `python -m`, modules of the current directory can be imported.
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is not None and (place == error.name or place.startswith(f"{error.name}.")):
            hint = f"; there is a file {place}.py here" if Path(f"{place}.py").exists() else ""
            raise UsageError(
                f"there is no module {place!r}: no module {error.name!r} on the path or in "
                f"{os.getcwd()}{hint}"
            ) from error
        raise UsageError(
            f"{place} could not be imported\n  " + "\n  ".join(describe(error))
        ) from error
    except Exception as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(
            f"{place} could not be imported\n  " + "\n  ".join(describe(error))
        ) from error


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UsageError(f"there is no file {str(path)!r} (looked in {os.getcwd()})")
    sys.path.insert(
        0, str(path.resolve().parent)
    )  # As with `python PATH.py`, modules in the same directory can be imported.
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None, "a name that ends in .py has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # Dataclasses and the codec look a class's module up by name.
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[path.stem]
        raise
    return module


def _found_in(module: ModuleType) -> str:
    """Returns the names of flows and functions in the module, for the message about a wrong
    name.
    """
    flows = [name for name, value in vars(module).items() if isinstance(value, Flow)]
    functions = [
        name
        for name, value in vars(module).items()
        if isinstance(value, FunctionType)
        and value.__module__ == module.__name__
        and not name.startswith("_")
    ]
    parts = []
    if flows:
        parts.append(f"it has the flows {', '.join(flows)}")
    if functions:
        parts.append(
            f"the functions {', '.join(functions)}"
            if parts
            else f"it has no Flow, but the functions {', '.join(functions)}"
        )
    return " and ".join(parts) if parts else "it has neither a Flow nor a function"
