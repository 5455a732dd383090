"""The command `sql`: runs a script, shows its plan, or reads statements from a terminal.

A SELECT in a script prints a JSON object for each row. The shell shows the rows of a bounded query
as a table, and the rows of an endless query as they arrive. The shell keeps CREATE and SET
statements for the statements that follow. Its line editor needs prompt_toolkit.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from aioflow.api.explain import explain_graph
from aioflow.api.flow import Flow
from aioflow.api.runner import new_event_loop
from aioflow.cli.options import UsageError
from aioflow.cli.targets import script_flow, script_of
from aioflow.core.errors import AioflowError, GraphError
from aioflow.io.changes import Upsert

__all__ = ["Shell", "run_sql", "table"]

HISTORY = Path("~/.aioflow_sql_history")
NAME = "sql"
STATEMENT_SET = re.compile(r"(BEGIN|EXECUTE)\s+STATEMENT\s+SET\b", re.IGNORECASE)
END_OF_SET = re.compile(r"(;|\bBEGIN)\s*END\s*;$", re.IGNORECASE)
WIDTH_MAX = 60
"""Maximum width of a column of a table, in characters."""

KEYWORDS = """
    AND AS BETWEEN BIGINT BOOLEAN BY CASE CAST CREATE CUMULATE DATE DECIMAL DESCRIBE
    DESCRIPTOR DISTINCT DOUBLE DROP ELSE END EXPLAIN FROM GROUP HAVING HOP IN INSERT
    INTERVAL INTO IS JOIN KEY LEFT LIKE NOT NULL ON OR OVER PARTITION PRIMARY SELECT SESSION
    SET SHOW STRING TABLE TABLES THEN TIMESTAMP TUMBLE UNION USING VIEW WATERMARK WHEN WHERE
    WITH
"""
"""Words that the line editor completes, in addition to the names of tables, columns and
connectors.
"""

HELP = """End a statement with ;
  CREATE TABLE, CREATE VIEW, SET 'ttl' = '1h'   kept for the next statements
  SELECT ...                                    shows rows; Ctrl-C ends an endless query
  INSERT INTO t SELECT ...                      runs until its end, or Ctrl-C
  EXPLAIN ..., SHOW TABLES, DESCRIBE t, DROP TABLE t, exit"""


def run_sql(arguments: argparse.Namespace, run: Callable[[Flow], int]) -> int:
    """Runs the command `sql`, and returns its exit code. `run(flow)` runs a flow with the options
    of the command line, and returns an exit code.
    """
    path = arguments.file
    if path is None and not sys.stdin.isatty():
        path = Path("-")
    if path is None:
        if arguments.explain:
            raise UsageError("--explain needs a file")
        return _shell(run)
    flow = script_flow(path, sys.stdout)
    if not flow.graph.nodes:
        return 0  # Only EXPLAIN, whose plan is printed.
    if not arguments.explain:
        return run(flow)
    try:
        print(explain_graph(flow.job_graph()))
    except GraphError as error:
        raise UsageError(str(error)) from error
    return 0


# The shell.


def _shell(run: Callable[[Flow], int]) -> int:
    shell = Shell(run)
    print("aioflow SQL: statements end with ; and help shows them", flush=True)
    for text in _statements(shell):
        if text.rstrip("; \n").lower() in ("exit", "quit"):
            break
        try:
            shell.carry_out(text)
        except KeyboardInterrupt:
            print(flush=True)
        except (AioflowError, UsageError) as error:
            print(error, file=sys.stderr, flush=True)
        except Exception as error:  # noqa: BLE001 - A job may fail with any type of error.
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    return 0


def _statements(shell: Shell) -> Iterator[str]:
    """Yields the statements that the user types. Ctrl-C drops an unfinished statement, Ctrl-D ends
    the shell.
    """
    ask = _line_editor(shell)
    lines: list[str] = []
    while True:
        try:
            lines.append(ask("... " if lines else "sql> "))
        except KeyboardInterrupt:
            lines = []
            continue
        except EOFError:
            return
        text = "\n".join(lines).strip()
        if not text:
            lines = []
        elif _is_complete(text):
            lines = []
            yield text


def _is_complete(text: str) -> bool:
    """Returns whether `text` is a complete statement. A statement set contains other statements, so
    it is complete only after END.
    """
    if STATEMENT_SET.match(text):
        return END_OF_SET.search(text) is not None
    return text.endswith(";") or text.lower() in ("help", "exit", "quit")


def _line_editor(shell: Shell) -> Callable[[str], str]:
    """Returns a function that reads a line after a prompt. If prompt_toolkit is installed, the line
    editor has a history and completes words.
    """
    try:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import Completer, Completion
        from prompt_toolkit.history import FileHistory
    except ModuleNotFoundError:
        print("for history and completion: pip install 'aioflow[sql]'", file=sys.stderr)
        return input

    class Words(Completer):
        def get_completions(self, document: Any, complete_event: Any) -> Iterator[Completion]:
            begun = document.get_word_before_cursor()
            for word in shell.completions(begun) if begun.strip() else ():
                yield Completion(word, start_position=-len(begun))

    session: PromptSession[str] = PromptSession(
        history=FileHistory(str(HISTORY.expanduser())), completer=Words()
    )
    return session.prompt


class Shell:
    """Executes the statements of a session. Each query is a separate flow."""

    def __init__(self, run: Callable[[Flow], int]) -> None:
        self._run = run
        self._defined: dict[str, str] = {}
        """Maps the name that a CREATE or SET statement defines to the text of the statement."""
        self.tables: dict[str, list[tuple[str, str]]] = {}
        """The columns of each table and view, with their types."""

    def completions(self, begun: str) -> list[str]:
        """Returns the words that begin with `begun`: columns, tables, connectors, keywords."""
        from aioflow.sql.options import connectors

        columns = [name for columns in self.tables.values() for name, _ in columns]
        words = dict.fromkeys([*columns, *self.tables, *connectors(), *KEYWORDS.split()])
        return [word for word in words if word.lower().startswith(begun.lower())]

    def carry_out(self, text: str) -> None:
        """Executes one statement. Raises UsageError for an invalid statement, or the error of the
        statement's job.
        """
        words = text.rstrip("; \n").split()
        match [word.upper() for word in words]:
            case []:
                return
            case ["HELP"]:
                print(HELP, flush=True)
            case ["SHOW", "TABLES"]:
                print("\n".join(self.tables) or "no tables", flush=True)
            case ["DESCRIBE" | "DESC", _]:
                columns = self._table(words[1])
                print(*table(("column", "type"), columns), sep="\n", flush=True)
            case ["DROP", "TABLE" | "VIEW", _]:
                self._table(words[2])
                del self._defined[words[2]], self.tables[words[2]]
            case ["CREATE" | "SET", *_]:
                self._define(text)
            case _:
                rows = Rows()
                flow = script_of(text, NAME, rows, self._before())
                if rows.stream is not None:
                    rows.show(flow)
                elif flow.graph.nodes:
                    self._run(flow)

    def _before(self) -> str:
        return "".join(f"{one}\n" for one in self._defined.values())

    def _table(self, name: str) -> list[tuple[str, str]]:
        if name not in self.tables:
            known = ", ".join(self.tables) or "none yet, CREATE TABLE makes one"
            raise UsageError(f"there is no table {name}; there are {known}")
        return self.tables[name]

    def _define(self, text: str) -> None:
        from aioflow.sql.script import tables_of

        found = tables_of(Flow(NAME), self._before() + text)
        new = [name for name in found if name not in self.tables]
        self._defined[new[0] if new else "SET"] = text
        self.tables = found


class Rows:
    """Shows the rows of one SELECT."""

    def __init__(self) -> None:
        self.stream: Any = None

    def rows(self, stream: Any) -> None:
        self.stream = stream

    def plan(self, text: str) -> None:
        print(text, flush=True)

    def show(self, flow: Flow) -> None:
        """Runs the query. Shows its rows as a table if all sources are bounded, otherwise
        as lines.
        """
        sources = [node.source for node in flow.graph.nodes.values() if node.source]
        ends = all(source.bounded for source in sources)
        names = [field.name for field in self.stream.relation.fields]
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(self._table(names) if ends else self._lines(names))

    async def _table(self, names: list[str]) -> None:
        latest: dict[Any, Any] = {}
        for number, row in enumerate(await self.stream.collect()):
            if type(row) is not Upsert:
                latest[number] = row
            elif row.row is None:
                latest.pop(tuple(row.key.values()), None)
            else:
                latest[tuple(row.key.values())] = row.row
        cells = [[_cell(row.get(name)) for name in names or row] for row in latest.values()]
        names = names or [*next(iter(latest.values()), {})]
        lines = table(names, cells)
        print(*lines, f"{len(cells)} row{'s' * (len(cells) != 1)}", sep="\n", flush=True)

    async def _lines(self, names: list[str]) -> None:
        print("Ctrl-C ends the query", file=sys.stderr, flush=True)
        print(" | ".join(names), flush=True)
        async with self.stream.execute_and_collect() as rows:
            async for row in rows:
                shown: Any = row.row if type(row) is Upsert else row
                if shown is None:
                    print("gone: " + " | ".join(map(_cell, row.key.values())), flush=True)
                else:
                    print(" | ".join(_cell(shown[name]) for name in names or shown), flush=True)


def _cell(value: Any) -> str:
    text = "NULL" if value is None else str(value).replace("\n", " ")
    return text if len(text) <= WIDTH_MAX else f"{text[: WIDTH_MAX - 3]}..."


def table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Returns the lines of a table."""
    lines = [names, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    first, *others = (
        " | ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in lines
    )
    return [first, "-+-".join("-" * width for width in widths), *others]
