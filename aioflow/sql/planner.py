"""Plans a query: turns a tree of sqlglot into operators of a flow, and returns the stream of the
results.

Results are appended: a row, once emitted, is never corrected. A query whose rows change is refused
at its place in the text, unless the caller asks for updates. Then its elements are `af.Upsert`.

A SELECT is planned in the order in which its clauses apply: FROM and joins, WHERE, GROUP BY with
its windows, HAVING, the list of columns. Before anything is compiled, each name is bound: it
becomes the key of a field, so that later steps compare expressions as trees.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from sqlglot import exp

from aioflow.core.errors import did_you_mean
from aioflow.expressions.nodes import Column, Expr
from aioflow.sql import joins, sources
from aioflow.sql.bound import (
    HINTS,
    Compiler,
    aggregates_in,
    by_clock,
    conjuncts,
    is_clock,
    key_column,
    mention,
    rank_limit,
    refuse_clauses,
    unused,
)
from aioflow.sql.casts import Scalar, widened
from aioflow.sql.dialect import DURATIONS, WindowTable
from aioflow.sql.errors import SqlError
from aioflow.sql.grouping import aggregate, applied, pending_windows
from aioflow.sql.ranking import framed, ranked
from aioflow.sql.relation import (
    CHANGE,
    END,
    START,
    TIME,
    WINDOW_FIELDS,
    Relation,
    duration_ms,
    refuse_updates,
)
from aioflow.sql.rewriting import HIDDEN, distinct_of, of_both_sides, rewritten
from aioflow.sql.scope import Field, Merged, Named, Scope
from aioflow.sql.types import NUMERIC, TIMESTAMP, unify

__all__ = ["Planner"]


class Created(Protocol):
    """A table or a view of a script, whose operators are made when a query reads it."""

    def relation(self) -> Relation: ...


@dataclass(frozen=True, slots=True)
class From:
    """The planned FROM clause: one relation, and the scope that resolves the names of its parts."""

    relation: Relation
    scope: Scope
    conditions: tuple[exp.Expr, ...] = ()
    """Bound conditions of WHERE that no join has used."""


class View:
    """A named query, which is planned when another query reads it.

    A view with OVER is planned once for each limit that the queries which read it set for its rank.
    """

    def __init__(self, planner: Planner, query: exp.Expr, columns: exp.TableAlias | None) -> None:
        self.planner = planner
        self.query = query
        self._columns = columns
        self._tables = dict(planner.tables)
        self._planned: dict[tuple[bool | str, tuple[str, int] | None], Relation] = {}

    @property
    def has_over(self) -> bool:
        inner = self.query.unnest()
        return isinstance(inner, exp.Select) and any(
            one.find(exp.Window) for one in inner.expressions
        )

    @property
    def some_rank(self) -> tuple[str, int] | None:
        """The name of the view's ROW_NUMBER() column and an arbitrary limit of the rank. It serves
        to plan the view only to find out its columns. None if the view has no such column.
        """
        calls = [one for one in self.query.unnest().expressions if one.find(exp.RowNumber)]
        return (calls[0].alias, 1) if self.has_over and calls else None

    def relation(self, rank: tuple[str, int] | None = None) -> Relation:
        planner = self.planner
        key = planner.compiler.updates, rank
        if key not in self._planned:
            outer, planner.tables = planner.tables, self._tables
            try:
                self._planned[key] = aliased(planner.query(self.query, rank), self._columns)
            finally:
                planner.tables = outer
        return self._planned[key]


class Planner:
    """Plans the queries of one text. `tables` maps names to the relations of streams and of bounded
    tables.
    """

    def __init__(self, tables: Mapping[str, Relation], compiler: Compiler) -> None:
        self.given = tables
        self.tables: dict[str, Relation | Created] = dict(tables)
        """The given tables, the views, and the queries of WITH, by name."""
        self.read: set[str] = set()
        """Names of the given tables that the query reads."""
        self.compiler = compiler

    def query(self, node: exp.Expr, rank: tuple[str, int] | None = None) -> Relation:
        """Returns the relation of a query. `rank` has the name of a ROW_NUMBER() column and the
        highest rank that is read; None if the rank has no limit.
        """
        outer = self.tables
        with_ = node.args.get("with_")
        if with_ is not None:
            if with_.args.get("recursive"):
                raise SqlError("WITH RECURSIVE is not supported; use process() with state", with_)
            self.tables = dict(outer)
            for cte in with_.expressions:
                self.tables[cte.alias] = self._with(cte.this, cte.args.get("alias"))
        try:
            if isinstance(node, exp.Subquery):
                refuse_clauses(node)
                return self.query(node.this, rank)
            if isinstance(node, exp.Union):
                return self._union(node)
            if isinstance(node, exp.Intersect | exp.Except):
                refuse_clauses(node)
                if not self.compiler.updates:
                    raise SqlError(
                        f"the rows of {type(node).__name__.upper()} change with the rows of both "
                        "sides; give updates=True for a stream of af.Upsert, or write WHERE "
                        "[NOT] EXISTS (SELECT 1 FROM t WHERE t.x = ...)",
                        node.expression,
                    )
                return self._select(of_both_sides(node), None)
            if isinstance(node, exp.Select):
                made = rewritten(node)
                if isinstance(made, exp.Select) and not made.args.get("qualify"):
                    return self._select(made, rank)
                return self.query(made, rank)
        finally:
            self.tables = outer
        raise SqlError(f"{type(node).__name__.upper()} is not supported; write SELECT", node)

    def _with(self, query: exp.Expr, alias: exp.TableAlias | None) -> Relation | Created:
        view = View(self, query, alias)
        return view if view.has_over else view.relation()

    def _union(self, node: exp.Union) -> Relation:
        refuse_clauses(node)
        if node.args.get("distinct"):
            together = node.copy()
            together.set("distinct", False)
            return self._select(distinct_of(together), None)
        if node.args.get("by_name"):
            raise SqlError(
                "UNION ALL BY NAME is not known; list the columns in the same order",
                node.expression,
            )
        left, right = self.query(node.left), self.query(node.right)
        if left.changes or right.changes:
            left, right = sources.changelog(left), sources.changelog(right)
        if left.is_open or right.is_open:
            raise SqlError("UNION ALL needs to know the columns; declare them with schemas=", node)
        if len(left.fields) != len(right.fields):
            raise SqlError(
                f"UNION ALL of {len(left.fields)} and {len(right.fields)} columns; both sides "
                "need the same",
                node.expression,
            )
        fields = []
        for a, b in zip(left.fields, right.fields, strict=True):
            kind = unify(a.type, b.type)
            if kind is None:
                raise SqlError(
                    f"UNION ALL of {a.name} {a.type} and {b.name} {b.type}; cast one of them",
                    node.expression,
                )
            fields.append(Field(a.name, kind, a.nullable or b.nullable, a.key))
        # Renamed in two steps, because columns in another order would overwrite each other.
        keys = dict(zip([f.key for f in right.fields], [f.key for f in fields], strict=True))
        left = _widened(left, fields).as_rows()
        right = _widened(right.renamed(keys), fields).as_rows()
        times = joins.together(left, right)
        windows = left.windows if left.windows == right.windows else None
        stream = left.stream.union(right.stream)
        return Relation(
            stream=stream,
            fields=tuple(fields),
            is_plain=True,
            times=times,
            windows=windows,
            is_changelog=left.is_changelog,
            lacks="UNION ALL can have equal rows of both sides",
        )

    def _select(self, node: exp.Select, rank: tuple[str, int] | None) -> Relation:
        refuse_clauses(node)
        source = self._from(node)
        scope, relation = source.scope, source.relation
        items = self._items(node, source)
        having = node.args.get("having")
        group = self._group(node, items, scope)
        distinct = node.args.get("distinct")
        if distinct is not None:
            if distinct.args.get("on"):
                raise SqlError("DISTINCT ON is not supported; rank with ROW_NUMBER() = 1", distinct)
            if group is None and not any(map(aggregates_in, (one for _, one in items))):
                group = [one for _, one in items]
            else:
                raise SqlError(
                    "SELECT DISTINCT cannot stand with GROUP BY; put the GROUP BY into a subquery",
                    distinct,
                )
        if relation.pending and mention(source.conditions, WINDOW_FIELDS):
            relation = applied(relation)
        relation = self._where(relation, source.conditions)
        bound_having = [] if having is None else [self._bind(having.this, scope)]
        if group is not None or any(map(aggregates_in, [one for _, one in items] + bound_having)):
            relation, items, bound_having = aggregate(
                self.compiler, relation, group or [], items, bound_having, node
            )
            relation = self._where(relation, bound_having)
        elif having is not None:
            raise SqlError("HAVING needs GROUP BY; write WHERE", having)
        return self._project(relation, items, rank)

    # Names.

    def _bind(self, node: exp.Expr, scope: Scope) -> exp.Expr:
        """Returns a copy of `node` in which each column is named by the key of its field."""

        def bound(one: exp.Expr) -> exp.Expr:
            if isinstance(one, exp.Query):
                raise SqlError(
                    "a subquery can only stand in FROM, and beside AND in WHERE as x IN (SELECT "
                    "...) or EXISTS (...); join it, or name it in WITH and join the name",
                    one,
                )
            if not isinstance(one, exp.Column) or isinstance(one.this, exp.Star):
                return one
            parts = one.parts
            aliases = {relation.alias.casefold() for relation in scope.relations}
            own = 2 if parts[0].name.casefold() in aliases else 1
            known = own == 2 or any(relation.find(parts[0].name) for relation in scope.relations)
            if len(parts) > own and known:  # Fields of a nested record: `user.address.city`.
                table = parts[0].copy() if own == 2 else None
                found = bound(exp.Column(this=parts[own - 1].copy(), table=table))
                for part in parts[own:]:
                    found = exp.Dot(this=found, expression=part.copy())
                return found
            return _merged(scope.values(one), one)

        return node.copy().transform(bound, copy=False)

    def _items(self, node: exp.Select, source: From) -> list[tuple[str, exp.Expr]]:
        """Returns the names and the bound expressions of the columns of SELECT."""
        items: list[tuple[str, exp.Expr]] = []
        for number, one in enumerate(node.expressions):
            star = one if isinstance(one, exp.Star) else one.this
            if isinstance(star, exp.Star) and isinstance(one, exp.Star | exp.Column):
                items += self._star(one, star, source.scope)
                continue
            value = one.unalias()
            name = one.alias or (value.name if isinstance(value, exp.Column | exp.Dot) else "")
            items.append((name or f"EXPR${number}", self._bind(value, source.scope)))
        further = [name for name, one in items if name != "*" and not is_clock(one)]
        if further and len(further) < len(items) and any(name == "*" for name, _ in items):
            raise SqlError(
                "* with further columns needs to know the columns; declare them with schemas=",
                node.expressions[0],
            )
        return items

    def _star(self, node: exp.Expr, star: exp.Star, scope: Scope) -> list[tuple[str, exp.Expr]]:
        """Returns the columns of `*` or `t.*`, without the columns in EXCEPT, and with the
        replacements in REPLACE.
        """
        of, merged = scope.relations, scope.merged
        if isinstance(node, exp.Column):
            of, merged = (scope.relation(node),), ()
        of = tuple(one for one in of if not one.alias.startswith(HIDDEN))
        items: list[tuple[str, exp.Expr]] = []
        if any(relation.is_open for relation in of):
            items.append(("*", star))
        items += [(m.fields[0].name, _merged(m.values, node)) for m in merged]
        items += [
            (field.name, key_column(field.key, node))
            for named in of
            for field in named.fields
            if not any(field in m.fields for m in merged)
        ]
        if star.args.get("rename"):
            raise SqlError("* RENAME is not supported; list the columns", node)
        left_out, replaced = star.args.get("except_") or (), star.args.get("replace") or ()
        if items and items[0][0] == "*" and (left_out or replaced):
            raise SqlError("* EXCEPT needs to know the columns; declare them with schemas=", node)
        values: dict[str, exp.Expr | None] = {self._of_star(one, items): None for one in left_out}
        values |= {
            self._of_star(one.args["alias"], items): self._bind(one.this, scope) for one in replaced
        }
        made = [(name, values.get(name, one)) for name, one in items]
        kept = [(name, one) for name, one in made if one is not None]
        if items and not kept:
            raise SqlError("* EXCEPT leaves out all columns; keep one", node)
        return kept

    @staticmethod
    def _of_star(node: exp.Expr, items: list[tuple[str, exp.Expr]]) -> str:
        """Returns the column of `*` that EXCEPT or REPLACE names."""
        names = [name for name, _ in items]
        alike = [one for one in names if one.casefold() == node.name.casefold()]
        if node.name not in names and len(alike) != 1:
            hint = did_you_mean(node.name, names, "{}")
            raise SqlError(f"* has no column {node.name!r}{hint}", node)
        return node.name if node.name in names else alike[0]

    def _group(
        self, node: exp.Select, items: list[tuple[str, exp.Expr]], scope: Scope
    ) -> list[exp.Expr] | None:
        """Returns the bound expressions of GROUP BY. Returns None if the query does not group."""
        group = node.args.get("group")
        if group is None:
            return None
        if group.args.get("all"):
            return [one for _, one in items if not aggregates_in(one)]
        for name in ("grouping_sets", "cube", "rollup", "totals"):
            if group.args.get(name):
                what = name.replace("_", " ").upper()
                instead = f"{what} (a, b)" if name in ("cube", "rollup") else "the columns"
                raise SqlError(f"GROUP BY with {what} is not known; write {instead}", group)
        found = []
        for one in group.expressions:
            by_name = [
                item
                for name, item in items
                if isinstance(one, exp.Column) and not one.table and name == one.name
            ]
            if isinstance(one, exp.Literal) and one.is_int:
                place = int(one.name)
                if not 1 <= place <= len(items):
                    raise SqlError(
                        f"GROUP BY {place} names a column by its position, expected 1 to "
                        f"{len(items)}",
                        one,
                    )
                found.append(items[place - 1][1])
            elif by_name and not any(relation.find(one.name) for relation in scope.relations):
                found.append(by_name[0])  # The name of a column of this SELECT.
            else:
                found.append(self._bind(one, scope))
        return found

    # FROM.

    def _from(self, node: exp.Select) -> From:
        first = node.args.get("from_")
        if first is None:
            raise SqlError(
                "the query has no FROM, which a query of a stream needs; write FROM and a table",
                node,
            )
        where = node.args.get("where")
        conditions = [] if where is None else list(conjuncts(where.this))
        entries = [first.this, *(join.this for join in node.args.get("joins") or ())]
        found: list[tuple[str, Relation]] = []
        taken: set[str] = set()
        for entry in entries:
            refuse_clauses(entry)
            rank = self._rank(entry, node.args.get("joins") or [], conditions)
            alias, relation = self._entry(entry, rank)
            if entry.args.get("version") and not isinstance(relation, sources.Table):
                raise SqlError(
                    f"FOR SYSTEM_TIME AS OF takes a bounded table, and {alias} is a stream: join "
                    "it without, or by an interval of time",
                    entry,
                )
            if alias.startswith(HIDDEN) and not relation.changes:
                joins.refuse_endless(self.compiler.flow, relation, entry)
                relation = replace(relation, stays=True)
            if isinstance(relation, sources.Table):
                relation = relation if found else relation.streamed(self.compiler.flow)
            elif len(entries) > 1:
                relation = applied(relation)
                relation = sources.changelog(relation) if relation.changes else relation
            if any(alias == other for other, _ in found):
                raise SqlError(f"{alias!r} stands twice in FROM; give each an alias", entry)
            clash = {f.key: f"{alias}.{f.key}" for f in relation.fields if f.key in taken}
            relation = relation.renamed(clash)
            taken |= {field.key for field in relation.fields}
            found.append((alias, relation))
        named = tuple(Named(alias, self._visible(one), one.is_open) for alias, one in found)
        scope = Scope(named)
        relation = found[0][1]
        if len(found) == 1:
            bound = [self._bind(one, scope) for one in conditions]
        else:
            for (alias, one), entry in zip(found, entries, strict=True):
                if one.is_open and not isinstance(one, sources.Table):
                    raise SqlError(
                        f"a join needs to know the columns of {alias}; declare them with schemas=",
                        entry,
                    )
            joined = joins.Joins([one for _, one in found], self.compiler)
            steps = []
            scope = Scope(named[:1])
            for join, right in zip(node.args["joins"], named[1:], strict=True):
                scope, on = self._bind_on(join, scope, right)
                steps.append((join, on))
            bound = [self._bind(one, scope) for one in conditions]
            relation, bound = joined.fold(steps, bound)
        return From(relation, scope, tuple(bound))

    def _bind_on(self, join: exp.Join, left: Scope, named: Named) -> tuple[Scope, list[exp.Expr]]:
        """Returns the scope with the relation `named`, and the bound conditions of ON or USING."""
        on, right = join.args.get("on"), Scope([named])
        scope = Scope((*left.relations, named), left.merged)
        found = [] if on is None else [self._bind(one, scope) for one in conjuncts(on)]
        made = list(left.merged)
        for name in join.args.get("using") or ():
            column = exp.Column(this=name.copy())
            values, other = left.values(column), right.resolve(column)
            found.append(
                exp.EQ(this=_merged(values, column), expression=key_column(other.key, column))
            )
            fields = next((one.fields for one in made if values[0] in one.fields), values)
            made = [one for one in made if one.fields != fields]
            if join.side == "RIGHT":
                values = (other,)
            elif join.side == "FULL":
                values = (*values, other)
            made.append(Merged((*fields, other), values))
        return Scope(scope.relations, made), found

    @staticmethod
    def _visible(relation: Relation) -> tuple[Field, ...]:
        return relation.fields + (WINDOW_FIELDS if relation.pending else ())

    def _entry(self, entry: exp.Expr, rank: tuple[str, int] | None) -> tuple[str, Relation]:
        """Returns a relation of FROM with its alias."""
        alias = entry.args.get("alias")
        if isinstance(entry, WindowTable):
            relation = self._window_table(entry)
            name = entry.alias or entry.this.alias_or_name or entry.args["kind"]
        elif isinstance(entry, exp.Table) and isinstance(entry.this, exp.Identifier):
            name, relation = entry.alias_or_name, self._table(entry, rank)
        elif isinstance(entry, exp.Subquery | exp.Select):
            name, relation = entry.alias or "subquery", self.query(entry, rank)
        else:
            what = type(entry).__name__.upper()
            raise SqlError(f"{what} cannot stand in FROM; name a table or a subquery", entry)
        return name, aliased(relation, alias)

    def _table(self, entry: exp.Table, rank: tuple[str, int] | None) -> Relation:
        found = self._found(entry)
        if isinstance(found, View):
            return found.relation(rank)
        return found if isinstance(found, Relation) else found.relation()

    def _found(self, entry: exp.Table) -> Relation | Created:
        """Returns the table that an entry of FROM names."""
        if entry.args.get("db"):
            raise SqlError("a table has a name without dots here: the keyword of sql()", entry)
        # The parser treats a hint after a table as a comment.
        if any(re.match(r"\s*OPTIONS\s*\(", one, re.IGNORECASE) for one in entry.comments or ()):
            raise SqlError(HINTS, entry)
        name = entry.name
        if name not in self.tables:
            folded = [n for n in self.tables if n.casefold() == entry.name.casefold()]
            if len(folded) != 1:
                raise SqlError(
                    f"no table {name!r}; there are {', '.join(self.tables) or 'none'}"
                    + (
                        did_you_mean(name, self.tables, "{}")
                        or f"; write sql(..., {name}=stream), or CREATE TABLE {name} before it"
                    ),
                    entry,
                )
            name = folded[0]
        found = self.tables[name]
        if found is self.given.get(name):
            self.read.add(name)
        return found

    def _rank(
        self, entry: exp.Expr, joined: list[exp.Join], where: list[exp.Expr]
    ) -> tuple[str, int] | None:
        """Returns the name of the ROW_NUMBER() column of an entry of FROM, and the highest rank
        that the query reads.

        Without joins, removes the condition that limits the rank from `where`, unless it also sets
        a lower bound.
        """
        inner = entry
        if isinstance(entry, exp.Table) and isinstance(entry.this, exp.Identifier):
            found = self._found(entry)
            inner = found.query if isinstance(found, View) else entry
        if not joined:
            return rank_limit(inner, where)
        # The condition also stays after the join, for rows of the other side without a partner.
        conditions, inner_alone = list(where), not any(join.side for join in joined)
        for join in joined:
            own = join.this is entry and join.side == "LEFT"
            if join.args.get("on") and (inner_alone or own):
                conditions += conjuncts(join.args["on"])
        alias = entry.alias_or_name.casefold()
        return rank_limit(
            inner,
            [
                one
                for one in conditions
                if all(column.table.casefold() == alias for column in one.find_all(exp.Column))
            ],
        )

    # Windows.

    def _window_table(self, entry: WindowTable) -> Relation:
        inner = entry.this
        _, relation = self._entry(inner, None)
        if isinstance(relation, sources.Table):
            relation = relation.streamed(self.compiler.flow)
        refuse_updates(relation, "a window", entry)
        scope = Scope([Named(inner.alias_or_name or "", relation.fields, relation.is_open)])
        keys = [scope.resolve(one).key for one in entry.args.get("partition") or ()]
        durations = {
            name: duration_ms(node, f"{name.upper()} of {entry.args['kind']}")
            for name, node in entry.args.items()
            if name.upper() in DURATIONS and node is not None
        }
        time = scope.resolve(entry.args["timecol"])
        if relation.pending or relation.windows:
            kept = tuple(f for f in relation.fields if f.name not in (START, END, TIME))
            relation = applied(relation)
            # The new windows take the names of the old ones.
            hidden = {f.key: f"{f.key}$" for f in relation.fields if f not in kept}
            if time.key in hidden:
                time = replace(time, key=hidden[time.key])
            relation = replace(relation.renamed(hidden), windows=None)
            fields = tuple(f for f in relation.fields if f in kept or f.key == time.key)
            relation = replace(relation, fields=fields)
        return pending_windows(
            relation, entry.args["kind"], durations, time, entry.args["timecol"], tuple(keys)
        )

    # WHERE, GROUP BY and columns.

    def _where(self, relation: Relation, conditions: Sequence[exp.Expr]) -> Relation:
        if not conditions:
            return relation
        relation, bound = self.compiler.awaited(relation, list(conditions))
        identity = relation.identity if relation.replaces else None
        # For one row, a condition on its identity is either always true or never.
        fixed = [
            one
            for one in bound
            if identity is None or all(c.name in identity for c in one.find_all(exp.Column))
        ]
        if fixed:
            relation = relation.filtered(self._all(fixed, relation))
        changing = [one for one in bound if one not in fixed]
        return relation.passing(self._all(changing, relation)) if changing else relation

    def _all(self, conditions: Sequence[exp.Expr], relation: Relation) -> Expr[Any]:
        whole = conditions[0]
        for one in conditions[1:]:
            whole = exp.And(this=whole, expression=one)
        return self.compiler.condition(whole, relation).expression

    def _project(
        self,
        relation: Relation,
        items: list[tuple[str, exp.Expr]],
        rank: tuple[str, int] | None,
    ) -> Relation:
        relation, items = framed(self.compiler, relation, items, rank)
        for over in [one for _, one in items if isinstance(one, exp.Window)]:
            relation, items = ranked(self.compiler, relation, items, over, rank)
        if relation.is_open and any(name == "*" for name, _ in items):
            clock = {name for name, one in items if is_clock(one)}
            extra = tuple(Field(name, TIMESTAMP, False, name) for name in clock)
            fields = (*relation.fields, *extra)
            return replace(relation, fields=fields, clock=relation.clock | clock)
        if relation.pending:
            relation = applied(relation)
        relation, nodes = self.compiler.awaited(relation, [one for _, one in items])
        plain = {one.name for one in nodes if isinstance(one, exp.Column)}
        if relation.replaces and not plain.issuperset(relation.identity or ()):
            relation = sources.changelog(relation)  # Its rows are no longer replaced by key.
        own: list[Field] = []
        reads: dict[str, Expr[Any]] = {}
        moved: dict[str, str] = {}
        clock = set()
        computed = False
        for (name, _), one in zip(items, nodes, strict=True):
            key = unused(name, reads.keys() | clock)
            if by_clock(one, relation):
                clock.add(key)
                own.append(Field(key, TIMESTAMP, False, key))
                continue
            scalar = self.compiler.compile(one, relation)
            if isinstance(one, exp.Column):
                moved.setdefault(one.name, key)
            else:
                computed = True
            own.append(Field(key, scalar.type, scalar.nullable, key))
            reads[key] = relation.read(scalar.expression)
        times = relation.times
        if times is not None or relation.windows is not None:
            times = {moved[key]: offset for key, offset in (times or {}).items() if key in moved}
            times |= {
                f.key: 0 for f, one in zip(own, nodes, strict=True) if relation.is_latest(one)
            }
        identity, lacks = self._identity(relation, moved, items, own)
        if relation.is_changelog:
            reads[CHANGE] = relation.column(CHANGE)
        result = replace(
            relation,
            fields=tuple(own),
            is_open=False,
            reads=reads,
            is_plain=False,
            times=times,
            latest=(),
            clock=frozenset(clock),
            windows=relation.windows and relation.windows.moved(moved),
            identity=identity,
            lacks=lacks,
        )
        return result.as_rows() if computed and not relation.replaces else result

    @staticmethod
    def _identity(
        relation: Relation,
        moved: Mapping[str, str],
        items: list[tuple[str, exp.Expr]],
        own: Sequence[Field],
    ) -> tuple[tuple[str, ...] | None, str]:
        """Returns the keys of the columns that identify a row, and "". Returns None and the reason
        if the rows change and no columns identify a row. An aggregate without GROUP BY has one row,
        which its constants identify.
        """
        identity = relation.identity
        missing = [
            f.name for f in relation.fields if f.key in (identity or ()) and f.key not in moved
        ]
        if identity is None or missing:
            lacks = f"the columns must have {', '.join(missing)}" if missing else relation.lacks
            if any(one.startswith(HIDDEN) for one in missing):  # The rank is from QUALIFY.
                lacks = "the columns must have the rank, as ROW_NUMBER() OVER (...) AS place"
            return None, lacks
        if identity:
            return tuple(moved[key] for key in identity), ""
        constants = (exp.Literal, exp.Boolean)
        pairs = zip(items, own, strict=True)
        return tuple(field.key for (_, one), field in pairs if isinstance(one, constants)), ""


def _widened(relation: Relation, fields: Sequence[Field]) -> Relation:
    """Returns the relation with its numbers converted to the types of `fields`."""
    reads = {
        own.key: relation.read(widened(Scalar(own.type, own.nullable, Column(own.key)), field.type))
        for own, field in zip(relation.fields, fields, strict=True)
        if own.type in NUMERIC and own.type != field.type
    }
    return replace(relation, reads={**relation.reads, **reads}) if reads else relation


def _merged(values: Sequence[Field], place: exp.Expr) -> exp.Expr:
    """Returns a bound expression with the value of the first of `values` that is not NULL."""
    first, *more = [key_column(field.key, place) for field in values]
    return exp.Coalesce(this=first, expressions=more) if more else first


def aliased(relation: Relation, alias: exp.TableAlias | None) -> Relation:
    """Returns the relation with the column names of `AS t (a, b)`."""
    columns = () if alias is None else alias.args.get("columns") or ()
    if alias is None or not columns:
        return relation
    if len(columns) != len(relation.fields):
        raise SqlError(
            f"{alias.name} has {len(relation.fields)} columns, expected {len(columns)}, as many as "
            "it has names",
            alias,
        )
    named = zip(relation.fields, columns, strict=True)
    return replace(relation, fields=tuple(replace(f, name=c.name) for f, c in named))
