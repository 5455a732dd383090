"""Parses the command line and runs the command.

`main` returns the exit code: 0 finished, 1 the job failed, 2 wrong usage, 130 ended by Ctrl-C. For
a command that runs a flow, the modules of the other commands are not imported, so that a killed
service restarts faster.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aioflow
from aioflow.cli.options import (
    UsageError,
    add_checkpoint_options,
    add_log_options,
    add_monitor_options,
    add_run_options,
    checkpoint_options,
    count,
    in_flags,
    monitor_options,
)
from aioflow.cli.progress import Watcher, run_flow, say, watcher_for
from aioflow.cli.settings import (
    all_optional,
    defer_defaults,
    fill_in,
    settings_here,
    shown_settings,
)
from aioflow.cli.targets import load_flow
from aioflow.cli.terminal import describe, reader_is_gone
from aioflow.cluster.restart import once_running
from aioflow.core.errors import AioflowError, GraphError
from aioflow.core.user_code import unfolded
from aioflow.inspection.json_logs import JSON, LOG_FORMAT_ENV, configure_logging
from aioflow.io.standard_output import ReaderGone

if TYPE_CHECKING:
    from aioflow.graph.job_graph import JobGraph

__all__ = ["main"]

logger = logging.getLogger(__name__)

FINISHED, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
TARGET_HELP = (
    "MODULE:FLOW, PATH.py:FLOW or PATH.sql, where FLOW is a Flow or a function that returns one"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv`, by default the arguments of this process. Returns the exit
    code.
    """
    argv = sys.argv[1:] if argv is None else argv
    try:
        parser = _parser(argv[0] if argv else "")
        defer_defaults(parser)
        arguments = _parsed(parser, argv)
    except SystemExit as stop:  # argparse has printed the error or the help.
        return stop.code if isinstance(stop.code, int) else FINISHED
    try:
        fill_in(arguments, settings_here())
        code = int(arguments.carry_out(arguments))
        # Flushed here, so that the code below handles a reader that has gone.
        print(end="", flush=True)
        return code
    except UsageError as error:
        print(f"aioflow {arguments.command}: {error}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        if not reader_is_gone():
            raise
        return FAILED


def _parsed(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Returns the parsed arguments.

    argparse accepts an optional positional argument only before the options. A command with
    `after_options` also accepts its last positional argument after the options.
    """
    arguments, rest = parser.parse_known_args(argv)
    given = vars(arguments)
    last: str = given.get("after_options", "")
    is_late = last and given[last] is None and len(rest) == 1
    if is_late and not rest[0].startswith("-"):
        given[last] = rest.pop()
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return arguments


def _parser(command: str) -> argparse.ArgumentParser:
    """Returns a parser that has the command `command`.

    If this module defines `command`, the modules of other commands are not imported, except for
    `config`.
    """
    parser = argparse.ArgumentParser(
        prog="aioflow", description="A stateful stream processor for asyncio."
    )
    parser.add_argument("--version", action="version", version=f"aioflow {aioflow.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _add_run(commands)
    _add_sql(commands)
    _add_graph(commands)
    demo = commands.add_parser(
        "demo",
        help="see it work on a year of flights",
        description="Replay the flights out of New York in 2013.",
    )
    _add_run_options(demo)
    demo.set_defaults(carry_out=_demo)
    _add_config(commands)
    if command == "config" or command not in commands.choices:
        from aioflow.cli import cluster, jobs, state
        from aioflow.cli.top import add_top

        cluster.add_commands(commands)
        jobs.add_commands(commands)
        state.add_commands(commands)
        add_top(commands)
    return parser


def _add_run(commands: Any) -> None:
    run = commands.add_parser(
        "run",
        help="run a flow",
        description="Run a flow to its end. Ctrl-C stops it, a second Ctrl-C ends it at once.",
    )
    run.add_argument("target", metavar="TARGET", help=TARGET_HELP)
    _add_job_options(run)
    run.set_defaults(carry_out=_run)


def _add_sql(commands: Any) -> None:
    sql = commands.add_parser(
        "sql",
        help="run a script in SQL, or type statements",
        description="Run a script in SQL as one job. Without a file, read statements from the "
        "terminal, or from standard input.",
    )
    sql.add_argument("file", metavar="FILE", nargs="?", type=Path, help="the script; -: stdin")
    sql.add_argument("--explain", action="store_true", help="show the plan, run nothing")
    _add_job_options(sql)
    sql.set_defaults(carry_out=_sql, after_options="file")


def _add_graph(commands: Any) -> None:
    graph = commands.add_parser(
        "graph",
        aliases=["info"],
        help="show how a flow will run",
        description="Show the tasks of a flow without running it.",
    )
    graph.add_argument("target", metavar="TARGET", help=TARGET_HELP)
    graph.add_argument(
        "--format",
        choices=("text", "mermaid", "svg", "json"),
        default="text",
        help="format on standard output (text); json: as /jobs/ID/plan of the REST interface",
    )
    graph.add_argument(
        "--svg", metavar="FILE", type=Path, help="write an SVG picture to FILE instead"
    )
    graph.add_argument(
        "--mermaid", metavar="FILE", type=Path, help="write a Mermaid flowchart to FILE instead"
    )
    graph.set_defaults(carry_out=_graph)


def _add_config(commands: Any) -> None:
    config = commands.add_parser(
        "config",
        help="show the settings of a command, each with its origin",
        description="Show the settings of a command from arguments, environment and settings file: "
        "aioflow config run --every 5s.",
    )
    config.add_argument(
        "of",
        nargs=argparse.REMAINDER,
        metavar="COMMAND",
        help="a command with arguments (run, jobmanager and taskmanager)",
    )
    config.set_defaults(carry_out=_config)


def _add_job_options(parser: argparse.ArgumentParser) -> None:
    _add_run_options(parser)
    parser.add_argument(
        "--on",
        type=_place,
        metavar="spark[=MASTER]",
        help="run as a job of Spark, such as spark=spark://host:7077 (without =MASTER: the "
        "master in spark-defaults.conf, or local[*])",
    )
    add_checkpoint_options(parser)
    add_run_options(parser)
    add_log_options(parser)


def _add_run_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-w",
        "--workers",
        type=count,
        default=0,
        metavar="N",
        help="run in N worker processes (0: run everything in this process)",
    )
    add_monitor_options(parser)
    parser.add_argument("-q", "--quiet", action="store_true", help="show no progress")
    parser.add_argument(
        "--traceback", action="store_true", help="show the whole traceback of an error"
    )


def _place(text: str) -> Any:
    """Parses the value of `--on`, such as "spark=MASTER", into an `aioflow.Spark`."""
    name, _, master = text.partition("=")
    if name != "spark":
        raise argparse.ArgumentTypeError(f"expected spark, or spark=MASTER, got {text!r}")
    try:
        return aioflow.Spark(master or None)
    except aioflow.AioflowError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _watcher(arguments: argparse.Namespace) -> Watcher:
    return Watcher() if arguments.quiet else watcher_for(sys.stderr)


def _sql(arguments: argparse.Namespace) -> int:
    from aioflow.cli.sql import run_sql  # Imported late: other commands do not need it.

    options = _job_options(arguments)
    return run_sql(arguments, lambda flow: _run_flow(arguments, flow, options))


def _run(arguments: argparse.Namespace) -> int:
    options = _job_options(arguments)
    return _run_flow(arguments, load_flow(arguments.target), options)


def _job_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the options for `Flow.run`. They are checked before the user's code is loaded."""
    if arguments.log_format == JSON:
        configure_logging(JSON)
    else:
        os.environ.pop(LOG_FORMAT_ENV, None)  # Workers inherit it.
    options = {**checkpoint_options(arguments), **monitor_options(arguments)}
    if "checkpoints" in options and "restart" not in options:
        # Restarts as without `restart=`, but ends if the reader of a pipe has gone.
        options["restart"] = once_running(fatal=(ReaderGone,))
    return options


def _run_flow(arguments: argparse.Namespace, flow: aioflow.Flow, options: dict[str, Any]) -> int:
    tell = logger.info if arguments.log_format == JSON else say
    try:
        result = run_flow(
            flow,
            _watcher(arguments),
            say=tell,
            workers=arguments.workers,
            on=arguments.on,
            **options,
        )
    except GraphError as error:
        raise UsageError(in_flags(str(error))) from error
    # The job may fail with any type of error.
    except Exception as error:  # noqa: BLE001
        return _failed(arguments, flow.name, error)
    if tell is not say or not arguments.quiet:
        with_savepoint = f", with savepoint {result.savepoint}" if result.savepoint else ""
        tell(f"{result.name}: {result.status} in {result.duration_ms / 1000:.1f} s{with_savepoint}")
    return FINISHED


def _graph(arguments: argparse.Namespace) -> int:
    from aioflow.api import drawing
    from aioflow.api.drawing import svg

    flow = load_flow(arguments.target)
    try:
        graph = flow.job_graph()
    except GraphError as error:
        raise UsageError(str(error)) from error
    makers = {"text": drawing.text, "mermaid": drawing.mermaid, "svg": svg, "json": _plan}
    written = False
    for kind, path in (("svg", arguments.svg), ("mermaid", arguments.mermaid)):
        if path is not None:
            try:
                path.write_text(makers[kind](graph), encoding="utf-8")
            except OSError as error:
                raise UsageError(f"cannot write {path}: {error.strerror}") from error
            written = True
    if not written:
        print(makers[arguments.format](graph))
    return FINISHED


def _plan(graph: JobGraph) -> str:
    """Returns the graph as JSON, in the format of Flink's REST API."""
    from aioflow.monitoring.rest_jobs import plan_of_graph  # Imported late: it imports aiohttp.

    return json.dumps(plan_of_graph(graph), indent=2)


def _config(arguments: argparse.Namespace) -> int:
    settings = settings_here()
    print(
        f"file: {settings.file}"
        if settings.file
        else "no file: aioflow.toml is not here, nor tool.aioflow in pyproject.toml"
    )
    for line in [arguments.of] if arguments.of else (["run"], ["jobmanager"], ["taskmanager"]):
        parser = _parser("config")
        defer_defaults(parser)
        all_optional(parser)
        try:
            asked = _parsed(parser, line)
        except SystemExit:  # argparse has printed the error.
            return USAGE
        fill_in(asked, settings)
        shown = shown_settings(asked, parser)
        if not shown:
            raise UsageError(f"aioflow {' '.join(line)} has no settings")
        print(f"\naioflow {' '.join(line)}", *shown, sep="\n")
    return FINISHED


def _demo(arguments: argparse.Namespace) -> int:
    from aioflow.cli.demo import Report, build_flow, next_lines, report_lines
    from aioflow.cli.demo_data import find_data

    try:
        folder = find_data()
    except FileNotFoundError as error:
        raise UsageError(str(error)) from error
    report, options = Report(), monitor_options(arguments)
    try:
        result = run_flow(
            build_flow(folder, report), _watcher(arguments), workers=arguments.workers, **options
        )
    except Exception as error:  # noqa: BLE001  # As for any flow.
        return _failed(arguments, "demo", error)
    if not arguments.quiet:
        print(file=sys.stderr)
    print(
        "\n".join(
            [
                *report_lines(report, result, workers=arguments.workers),
                "",
                *next_lines(_own_name()),
            ]
        )
    )
    return FINISHED


def _own_name() -> str:
    """Returns the command that started this program, for lines that users copy to a shell."""
    if Path(sys.argv[0]).stem != "aioflow":
        return f"{os.path.relpath(sys.executable)} -m aioflow"
    return "aioflow" if shutil.which("aioflow") else os.path.relpath(sys.argv[0])


def _failed(arguments: argparse.Namespace, name: str, error: Exception) -> int:
    if isinstance(error, BrokenPipeError) and reader_is_gone():
        return FAILED
    if arguments.traceback:
        traceback.print_exception(unfolded(error))
    else:
        first, *more = describe(error)
        if isinstance(error, AioflowError | OSError):  # The message is from the library.
            first = in_flags(first)
        print(f"aioflow {arguments.command}: job {name!r} failed: {first}", file=sys.stderr)
        print(
            "".join(f"  {line}\n" for line in more) + "  (--traceback shows the rest)",
            file=sys.stderr,
        )
    return FAILED
