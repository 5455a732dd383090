"""Entry points of SQL: `sql` returns the stream of a query, `script` executes the statements of a
script.

A script is one job. CREATE TABLE checks a table. Its source is added when a query reads the table,
and its sink after all of its INSERTs.
"""

from __future__ import annotations

import inspect
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from sqlglot import exp

from aioflow.api.explain import explain_graph
from aioflow.api.streams import DataStream
from aioflow.core.errors import GraphError
from aioflow.core.timeunits import to_ms
from aioflow.graph.stream_graph import StreamGraph
from aioflow.sql import sources
from aioflow.sql import values as v
from aioflow.sql.bound import Compiler, unused
from aioflow.sql.ddl import CreatedTable
from aioflow.sql.dialect import CreateTable, Explain, parse
from aioflow.sql.errors import SqlError
from aioflow.sql.planner import Planner, View
from aioflow.sql.relation import Relation
from aioflow.sql.scalars import Functions, UserFunction
from aioflow.sql.scope import Field, Named, Scope, type_of_hint
from aioflow.sql.types import DATE, TIMESTAMP

__all__ = ["Console", "script", "sql", "tables_of"]


Result = sources.QueryStream | sources.UpdateStream | sources.ChangeStream


P = ParamSpec("P")
T = TypeVar("T")
OfText = Callable[Concatenate[Any, str, P], T]
"""The type of functions whose first arguments are a flow and the text of a query."""


def _with_errors(call: str) -> Callable[[OfText[P, T]], OfText[P, T]]:
    """Returns a decorator that puts the text of the query into the errors of the decorated
    function. Error messages name the function `call`.
    """

    def decorated(function: OfText[P, T]) -> OfText[P, T]:
        @wraps(function)
        def checked(flow: Any, text: str, /, *args: P.args, **kwargs: P.kwargs) -> T:
            if not isinstance(text, str):
                raise GraphError(f"{call} takes the text of a query, got {type(text).__name__}")
            try:
                return function(flow, text, *args, **kwargs)
            except SqlError as error:
                error.text = error.text or text
                # The traceback of the planner is dropped: the message has the place in the query.
                raise error.with_traceback(None) from None
            except RecursionError:
                wrong = SqlError("the query is nested too deeply; move parts of it into WITH")
                wrong.text, wrong.span = text, deepest(text)
                raise wrong from None

        return checked

    return decorated


@_with_errors("sql()")
def sql(
    flow: Any,  # af.Flow, which is below this package only by its lazy import.
    text: str,
    tables: Mapping[str, Any],
    functions: Mapping[str, Callable[..., Any]] | None = None,
    schemas: Mapping[str, Any] | None = None,
    ttl: Any = None,
    updates: bool | str = False,
) -> Result:
    """Returns the stream of the query `text`. See `Flow.sql`."""
    if updates not in (False, True, "changes"):
        raise GraphError(f'updates={updates!r} of sql(), expected True, False, or "changes"')
    before, first = [*flow.graph.nodes], flow.graph.next_id()
    compiler = Compiler(flow, _functions(functions or {}), ttl, updates)
    planner = Script(_relations(flow, tables, schemas or {}), compiler)
    stream = planner.run(parse(text))
    planner.check_read()
    _prune(flow.graph, before, [one.node_id for one in stream.upstreams])
    name_states(flow.graph, first)
    return stream


@_with_errors("sql_script()")
def script(
    flow: Any,
    text: str,
    tables: Mapping[str, Any],
    functions: Mapping[str, Callable[..., Any]] | None = None,
    schemas: Mapping[str, Any] | None = None,
    ttl: Any = None,
    console: Console | None = None,
) -> Script:
    """Adds the INSERTs of a script to the flow. See `Flow.sql_script`.

    `console` receives the stream of each SELECT and the plan of each EXPLAIN. Without `console`,
    SELECT and EXPLAIN raise SqlError.
    """
    compiler = Compiler(flow, _functions(functions or {}), ttl, updates=True)
    planner = Script(_relations(flow, tables, schemas or {}), compiler)
    before = [*flow.graph.nodes]
    planner.script(parse(text), console)
    planner.check_read()
    sinks = [number for number, one in flow.graph.nodes.items() if one.sink]
    _prune(flow.graph, before, [*sinks, *planner.shown])
    return planner


def _prune(graph: StreamGraph, before: Sequence[int], read: Sequence[int]) -> None:
    """Removes the new nodes of `graph` that no statement reads, such as the nodes of an unread
    view.

    `before` has the ids of the nodes that the graph had before the statement, and `read` the ids of
    the nodes whose inputs are needed.
    """
    for number in {*graph.nodes} - {*before, *graph.upstream_of(read)}:
        del graph.nodes[number]
    graph.edges[:] = [one for one in graph.edges if one.target in graph.nodes]


@_with_errors("sql_script()")
def tables_of(flow: Any, text: str) -> dict[str, list[tuple[str, str]]]:
    """Returns the columns of the tables and views that a script creates, with their types."""
    made = Script({}, Compiler(flow, Functions({}), None, updates=True))
    for one in parse(text):
        if not made.defined(one):
            raise SqlError("write CREATE TABLE, CREATE VIEW or SET", one)
    found = {}
    for name, table in made.tables.items():
        if isinstance(table, View):
            table = table.relation(table.some_rank)
        fields = (table if isinstance(table, Relation) else table.relation()).fields
        found[name] = [(field.name, str(field.type)) for field in fields]
    return found


class Console(Protocol):
    """Shows the rows and plans of a script."""

    def rows(self, stream: DataStream[Any]) -> None: ...

    def plan(self, text: str) -> None: ...


class _Plan:
    """A console that keeps the plan of a SELECT as text."""

    text = ""

    def rows(self, stream: DataStream[Any]) -> None:
        self.text = stream.explain()

    def plan(self, text: str) -> None:
        self.text = text


def _relations(
    flow: Any, tables: Mapping[str, Any], schemas: Mapping[str, Any]
) -> dict[str, Relation]:
    unknown = set(schemas) - set(tables)
    if unknown:
        raise GraphError(
            f"schemas= names {', '.join(sorted(unknown))}, expected tables that sql() got"
        )
    return {
        name: sources.relation(flow, name, what, schemas.get(name)) for name, what in tables.items()
    }


def _functions(given: Mapping[str, Callable[..., Any]]) -> Functions:
    own = {}
    for name, function in given.items():
        if not callable(function):
            raise GraphError(f"functions=: {name!r} is {function!r}, expected a function")
        hint = getattr(function, "__annotations__", {}).get("return", Any)
        if isinstance(hint, str):
            try:
                hint = inspect.get_annotations(function, eval_str=True).get("return", Any)
            except Exception:  # noqa: BLE001 - Any name may be missing; the type is then not known.
                hint = Any
        kind, nullable = type_of_hint(hint)
        own[name] = UserFunction(function, kind, nullable, inspect.iscoroutinefunction(function))
    return Functions(own)


class CreatedView(View):
    """A view of a script, which several queries share."""

    def __init__(self, script: Script, name: str, query: exp.Expr, columns: Any) -> None:
        super().__init__(script, query, columns)
        self._name = name

    def relation(self, rank: tuple[str, int] | None = None) -> Relation:
        graph = self.planner.compiler.flow.graph
        before = graph.next_id()
        made = super().relation(rank)
        name_states(graph, before, f"view-{self._name}" + (f"-{rank[1]}" if rank else ""))
        return made


class Script(Planner):
    """Executes the statements of a script, and keeps the tables and views that they define."""

    def __init__(self, tables: Mapping[str, Relation], compiler: Compiler) -> None:
        super().__init__(tables, compiler)
        self.inserts: dict[CreatedTable, list[Relation]] = {}
        """The rows of all INSERTs into each table."""
        self.shown: list[int] = []
        """Ids of the nodes that emit the rows of a SELECT for the console."""

    def run(self, statements: Sequence[exp.Expr]) -> Result:
        """Returns the stream of the last statement. The earlier statements define tables and
        views.
        """
        if not statements:
            raise SqlError("sql() got an empty text, expected a SELECT")
        *before, last = statements
        for one in before:
            if not self.defined(one):
                raise SqlError(
                    "only CREATE TABLE and CREATE VIEW may stand before the query; INSERT is for "
                    "flow.sql_script(...)",
                    one,
                )
        if isinstance(last, exp.Insert):
            raise SqlError(
                "INSERT is not supported in flow.sql; write flow.sql_script(...), or "
                ".sink(...) on the stream of the query",
                last,
            )
        if not isinstance(last, exp.Query):
            raise SqlError("this statement cannot run as a stream; write a SELECT", last)
        relation = self.query(last)
        self._refuse_clock(relation, last)
        updates = self.compiler.updates
        if relation.changes and not updates:
            raise SqlError("the rows of this query change; give updates=True", last)
        if relation.changes and updates == "changes":
            return sources.ChangeStream(relation)
        if relation.changes and relation.identity is None:
            raise SqlError(
                f"these rows change, and have no key that says which row an update replaces: "
                f'{relation.lacks}; or give updates="changes" for an af.Change of each row that '
                "comes or goes",
                last,
            )
        if relation.changes:
            return sources.UpdateStream(relation)
        if updates:
            raise SqlError("rows of this query never change; leave out updates=True", last)
        return sources.QueryStream(relation if relation.is_open else relation.as_rows())

    def script(self, statements: Sequence[exp.Expr], console: Console | None) -> None:
        """Adds the INSERTs of a script to the flow, with the tables and views that they read."""
        graph = self.compiler.flow.graph
        definitions: list[exp.Expr] = []
        for one in statements:
            before = graph.next_id()
            if self.defined(one):
                definitions.append(one)
            elif isinstance(one, exp.Insert):
                name_states(graph, before, self._insert(one))
            elif isinstance(one, Explain) and console is not None:
                console.plan(self._plan([*definitions, one.this]))
            elif isinstance(one, exp.Query) and console is not None:
                stream = self._shown(one)
                name_states(graph, before, "select")
                self.shown += [one.node_id for one in stream.upstreams]
                console.rows(stream)
            elif isinstance(one, exp.Query | Explain):
                raise SqlError(
                    "flow.sql_script() shows no rows and no plan; write INSERT INTO ... SELECT, or "
                    "take the stream of flow.sql(...), which has explain()",
                    one,
                )
            else:
                raise SqlError(
                    "a script has CREATE TABLE, CREATE VIEW, SET and INSERT INTO ... SELECT", one
                )
        before = graph.next_id()
        for table, relations in self.inserts.items():
            table.insert(relations)
            name_states(graph, before, f"insert-{table.name}")
        if not self.inserts and console is None:
            wrong = SqlError("the script writes nothing; end it with INSERT INTO ... SELECT")
            wrong.span = (0, 1)
            raise wrong

    def _shown(self, node: exp.Query) -> DataStream[Any]:
        """Returns the rows of a SELECT for the console, with times converted to texts."""
        relation = self.query(node)
        self._refuse_clock(relation, node)
        texts = {
            field.key: v.apply(
                v.date_text if field.type == DATE else v.time_text, relation.column(field.key)
            )
            for field in relation.fields
            if field.type in (TIMESTAMP, DATE)
        }
        relation = replace(relation, reads={**relation.reads, **texts}, is_plain=False)
        if relation.changes:
            return (sources.ChangeStream if relation.identity is None else sources.UpdateStream)(
                relation
            )
        return sources.QueryStream(relation if relation.is_open else relation.as_rows())

    def _plan(self, statements: Sequence[exp.Expr]) -> str:
        """Returns the plan of a flow that has only `statements`, as text."""
        flow = type(self.compiler.flow)(self.compiler.flow.name)
        compiler = Compiler(flow, self.compiler.functions, self.compiler.ttl, updates=True)
        plan = _Plan()
        Script({}, compiler).script([one.copy() for one in statements], plan)
        return plan.text or explain_graph(flow.job_graph())

    @staticmethod
    def _refuse_clock(relation: Relation, query: exp.Query) -> None:
        for field in relation.fields:
            if field.key in relation.clock:
                raise SqlError(
                    f"{field.name} is PROCTIME(), which only windows and AS OF can use; leave it "
                    "out of SELECT",
                    query,
                )

    def _insert(self, node: exp.Insert) -> str:
        """Adds an INSERT, and returns the prefix of the uids of its operators."""
        into = node.this.this if isinstance(node.this, exp.Schema) else node.this
        for clause in ("overwrite", "by_name", "where", "conflict", "returning", "partition"):
            if node.args.get(clause):
                raise SqlError(f"INSERT {clause.upper()} is not supported; write INSERT INTO", into)
        table = self._found(into)
        if not isinstance(table, CreatedTable):
            raise SqlError(
                f"{into.name} is no table of CREATE TABLE, so it cannot be written", into
            )
        query = node.expression
        if not isinstance(query, exp.Query) or isinstance(query, exp.Values):
            raise SqlError("INSERT INTO needs a SELECT", query or node)
        if node.args.get("with_"):
            query.set("with_", node.args["with_"].copy())
        self.compiler.updates = table.upserts
        try:
            self.inserts.setdefault(table, []).append(table.written(self.query(query), node))
        except SqlError as error:
            told = re.sub(
                r'give updates=(?:True|"changes")(?: for [^;,]*(?:, which replace each other)?)?',
                "INSERT INTO a table of postgres, mysql, sqlite, delta or iceberg with PRIMARY "
                "KEY, whose rows it replaces",
                error.message,
            )
            error.args, error.message = (told,), told
            raise
        finally:
            self.compiler.updates = True
        table.place = into
        return f"insert-{table.name}"

    def defined(self, node: exp.Expr) -> bool:
        """Executes a CREATE or SET. Returns False for any other statement."""
        if isinstance(node, exp.Set):
            self._set(node)
        elif isinstance(node, CreateTable):
            name = node.this.name
            if name in self.tables and not node.args.get("exists"):
                raise SqlError(f"there is a table {name} already", node.this)
            if name not in self.tables:
                self.tables[name] = CreatedTable(node, self.compiler, self._bound_alone)
        elif isinstance(node, exp.Create) and node.args.get("kind") == "VIEW":
            view, columns = node.this, None
            if isinstance(view, exp.Schema):
                view, names = view.this, view.expressions
                columns = exp.TableAlias(this=view.this.copy(), columns=names)
            if not isinstance(view, exp.Table) or node.expression is None:
                raise SqlError("write CREATE VIEW name AS SELECT ...", node)
            self.tables[view.name] = made = CreatedView(self, view.name, node.expression, columns)
            if not made.has_over:
                self._checked(made)
        else:
            return False
        return True

    def _checked(self, view: View) -> None:
        """Plans a view, so that CREATE VIEW raises the errors of its query. The rows of a view may
        change, even if the caller did not ask for updates.
        """
        outer, self.compiler.updates = self.compiler.updates, self.compiler.updates or True
        try:
            view.relation()
        finally:
            self.compiler.updates = outer

    def _set(self, node: exp.Set) -> None:
        pair = node.expressions[0].this if len(node.expressions) == 1 else None
        name = pair.this.name if isinstance(pair, exp.EQ) else ""
        if not isinstance(pair, exp.EQ) or name.lower() != "ttl":
            hint = "write SET 'ttl' = '1h', the time for which joins keep rows"
            raise SqlError(f"SET {name or '...'} is not known; {hint}", node)
        try:
            to_ms(pair.expression.name, "ttl")
        except (ValueError, TypeError) as error:
            raise SqlError(str(error), pair.expression) from None
        self.compiler.ttl = pair.expression.name

    def _bound_alone(self, node: exp.Expr, name: str, fields: tuple[Field, ...]) -> exp.Expr:
        """Returns the expression of a computed column, bound to the columns of its table."""
        return self._bind(node, Scope([Named(name, fields)]))

    def check_read(self) -> None:
        """Raises GraphError if the program has passed a table that no statement reads."""
        unread = [name for name in self.given if name not in self.read]
        if unread:
            raise GraphError(
                f"sql() got {', '.join(unread)}, which the query does not read; leave out what "
                "FROM does not name"
            )


def name_states(graph: StreamGraph, first: int, prefix: str = "") -> None:
    """Sets the uid of each stateful operator that a query has added.

    `first` is the number of the query's first node. A uid is made of `prefix`, the kind of the
    operator, its keys, its computation, and the stateful operators before it. Conditions, columns
    of SELECT and other queries do not change the uid.
    """
    used = {one.uid for one in graph.nodes.values()}
    meanings: dict[int, str] = {}
    for number in graph.topological():
        node = graph.nodes[number]
        inputs = graph.inputs_of(number)
        before = "|".join(meanings[edge.source] for edge in inputs)
        meanings[number] = (node.uid or "") if node.stateful else before
        if not node.stateful or node.sink or node.uid is not None or number < first:
            continue
        keys = [edge.partitioning and edge.partitioning.function for edge in inputs]
        meaning = re.sub(r" at 0x\w+|, ttl='[^']*'", "", f"{keys} {node.factory} {before}")
        base = f"{node.kind}-{zlib.crc32(meaning.encode()):08x}"
        node.uid = unused(f"{prefix}-{base}" if prefix else base, used)
        used.add(node.uid)
        meanings[number] = node.uid
        if prefix:
            node.name = f"{prefix}: {node.name}"


def deepest(text: str) -> tuple[int, int]:
    """Returns the offsets at which the most deeply nested parenthesis of the text begins and
    ends.
    """
    depth = most = place = 0
    for number, sign in enumerate(text):
        depth += (sign == "(") - (sign == ")")
        if depth > most:
            most, place = depth, number
    return place, place + 1
