"""Rewrites clauses by other clauses: QUALIFY, WINDOW, IN and EXISTS with a query, GROUPING SETS,
INTERSECT and EXCEPT.

The tree of a query with one of these clauses becomes the tree of a query without it. Nodes keep
their places in the text. Names that the rewriting adds begin with `$`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from functools import reduce
from typing import Any

from sqlglot import exp

from aioflow.sql.aggregates import is_aggregate
from aioflow.sql.bound import aggregates_in, conjuncts
from aioflow.sql.errors import SqlError

__all__ = ["HIDDEN", "STAYS", "distinct_of", "of_both_sides", "rewritten"]

HIDDEN = "$"
"""Prefix of the names of relations whose columns `*` leaves out."""
STAYS = "stays"
"""Key in a node's `meta` that marks a query whose rows are kept without a time to live."""


def rewritten(node: exp.Select) -> exp.Query:
    """Returns an equivalent query without QUALIFY, WINDOW, IN and EXISTS with a query, and GROUPING
    SETS.

    Raises SqlError for such a clause that is invalid or not supported, for example NOT IN with a
    query.
    """
    if node.args.get("windows"):
        node = _without_windows(node)
    if node.args.get("qualify"):
        return _without_qualify(node)
    node = _without_queries(node)
    group = node.args.get("group")
    return node if group is None else _without_sets(node, group)


def distinct_of(node: exp.Query) -> exp.Select:
    """Returns the query SELECT DISTINCT * FROM `node`."""
    return _select([exp.Star()], exp.Subquery(this=node), distinct=exp.Distinct())


def of_both_sides(node: exp.SetOperation) -> exp.Select:
    """Returns an equivalent of INTERSECT or EXCEPT. It groups the rows of both sides, and selects
    the groups of equal rows by the sides on which a row occurs.

    NULLs are equal in GROUP BY, as in INTERSECT and EXCEPT.
    """
    what = type(node).__name__.upper()
    if not node.args.get("distinct"):
        raise SqlError(f"{what} ALL is not supported; write {what}", node.expression)
    side = exp.Column(this=_name(f"{HIDDEN}side"))
    sides = [
        _select(
            [exp.Star(), exp.Alias(this=exp.Literal.number(number), alias=_name(side.name))],
            exp.Subquery(this=query.copy(), alias=exp.TableAlias(this=_name("a side"))),
        )
        for number, query in enumerate((node.left, node.right))
    ]
    both = exp.Subquery(this=exp.Union(this=sides[0], expression=sides[1], distinct=False))
    first, second = (
        exp.Filter(
            this=exp.Count(this=exp.Star()),
            expression=exp.Where(this=exp.EQ(this=side, expression=exp.Literal.number(number))),
        )
        for number in range(2)
    )
    compare = exp.GT if isinstance(node, exp.Intersect) else exp.EQ
    return _select(
        [exp.Star(except_=[side])],
        both,
        group=exp.Group(all=True),
        having=exp.Having(
            this=exp.And(
                this=exp.GT(this=first, expression=exp.Literal.number(0)),
                expression=compare(this=second, expression=exp.Literal.number(0)),
            )
        ),
    )


def _select(items: Sequence[exp.Expr], source: exp.Expr, **clauses: Any) -> exp.Select:
    return exp.Select(expressions=list(items), from_=exp.From(this=source), **clauses)


def _name(name: str) -> exp.Identifier:
    return exp.Identifier(this=name, quoted=True)


# QUALIFY.


def _without_qualify(node: exp.Select) -> exp.Select:
    """Returns a query that has the condition of QUALIFY in WHERE. The subquery in its FROM computes
    the calls of OVER.

    The subquery also selects the columns of QUALIFY that SELECT leaves out.
    """
    inner = node.copy()
    condition = inner.args["qualify"].this
    inner.set("qualify", None)
    distinct = inner.args.get("distinct")
    inner.set("distinct", None)
    selected = {one.alias_or_name.casefold() for one in inner.expressions}
    has_star = any(one.is_star for one in inner.expressions)
    moved = list(condition.find_all(exp.Window))
    moved += [
        one
        for one in condition.find_all(exp.Column)
        if one.find_ancestor(exp.Window) is None
        and (one.table or not (has_star or one.name.casefold() in selected))
    ]
    names = []
    for number, part in enumerate(moved):
        name = f"{HIDDEN}q{number}"
        names.append(name)
        inner.append("expressions", exp.Alias(this=part.copy(), alias=_name(name)))
        column = exp.Column(this=_name(name))
        if part is condition:
            condition = column
        else:
            part.replace(column)
    star = exp.Star(except_=[exp.Column(this=_name(name)) for name in names]) if names else None
    source = exp.Subquery(this=inner, alias=exp.TableAlias(this=_name("qualified")))
    return _select([star or exp.Star()], source, where=exp.Where(this=condition), distinct=distinct)


# WINDOW.


def _without_windows(node: exp.Select) -> exp.Select:
    """Returns the query without WINDOW. Each OVER that named a definition of WINDOW contains the
    definition instead.
    """
    made = node.copy()
    defined: dict[str, exp.Expr] = {}

    def complete(over: exp.Expr) -> None:
        name = over.args.get("alias")
        if name is None:
            return
        base = defined.get(name.name.casefold())
        if base is None:
            known = ", ".join(defined) or "none"
            raise SqlError(f"WINDOW does not define {name.name!r}; there are {known}", name)
        for part in ("partition_by", "order", "spec"):
            if base.args.get(part) and not over.args.get(part):
                over.set(part, base.copy().args[part])
        over.set("alias", None)

    for one in made.args.pop("windows"):
        complete(one)
        defined[one.name.casefold()] = one
    qualify = made.args.get("qualify")
    for part in [*made.expressions, *([qualify] if qualify else [])]:
        for over in part.find_all(exp.Window):
            complete(over)
    return made


# IN and EXISTS.


def _without_queries(node: exp.Select) -> exp.Select:
    """Returns the query with joins in place of each IN and EXISTS with a query in its WHERE."""
    where = node.args.get("where")
    if where is None or not any(_query_in(one) for one in conjuncts(where.this)):
        return node
    made = node.copy()
    kept = []
    for number, one in enumerate(conjuncts(made.args["where"].this)):
        found = _query_in(one)
        if found is None:
            kept.append(one)
            continue
        call, negated = found
        name = f"{HIDDEN}in{number}"
        inner, outer = _keys(call, negated)
        keys = [f"{HIDDEN}k{n}" for n in range(len(outer))]
        items = [
            exp.Alias(this=key.copy(), alias=_name(alias))
            for key, alias in zip(inner.expressions, keys, strict=True)
        ]
        inner.set("expressions", items)
        inner.set("distinct", exp.Distinct())
        inner.meta[STAYS] = True
        columns = [exp.Column(this=_name(key), table=_name(name)) for key in keys]
        on = [
            exp.EQ(this=key.copy(), expression=column)
            for key, column in zip(outer, columns, strict=True)
        ]
        source = exp.Subquery(this=inner, alias=exp.TableAlias(this=_name(name)))
        join = exp.Join(this=source, on=_all(on), side="LEFT" if negated else None)
        made.append("joins", join)
        if negated:
            kept.append(exp.Is(this=columns[0].copy(), expression=exp.Null()))
    made.set("where", exp.Where(this=_all(kept)) if kept else None)
    return made


def _query_in(condition: exp.Expr) -> tuple[exp.Expr, bool] | None:
    """If `condition` is an IN or EXISTS with a query, returns this call and whether it is
    negated.
    """
    negated = isinstance(condition, exp.Not)
    one = condition.this.unnest() if isinstance(condition, exp.Not) else condition
    if isinstance(one, exp.Exists) or (isinstance(one, exp.In) and one.args.get("query")):
        return one, negated
    return None


def _keys(call: exp.Expr, negated: bool) -> tuple[exp.Select, list[exp.Expr]]:
    """Returns the inner query of an IN or EXISTS, and the expressions of the outer query. Each
    column of the inner query must equal the expression at its position.
    """
    query = (call.args["query"] if isinstance(call, exp.In) else call.this).unnest()
    if isinstance(call, exp.In) and negated:
        raise SqlError(
            "NOT IN (SELECT ...) is never true if the query has a NULL; write NOT EXISTS (SELECT 1 "
            "FROM t WHERE t.x = ...)",
            call,
        )
    pairs: list[tuple[exp.Expr, exp.Expr]] = []
    if isinstance(query, exp.Select):
        query = query.copy()
        pairs = _correlated(query)
    if isinstance(call, exp.In):
        if isinstance(query, exp.Select) and len(query.expressions) != 1:
            raise SqlError("IN (SELECT ...) takes one column", call)
        if not pairs:  # It may be any query, also with UNION or GROUP BY.
            names = exp.TableAlias(this=_name("the query"), columns=[_name(f"{HIDDEN}v")])
            source = exp.Subquery(this=query.copy(), alias=names)
            column = exp.Column(this=_name(f"{HIDDEN}v"))
            return _select([column], source), [call.this]
        if isinstance(query.expressions[0], exp.Star):
            raise SqlError("IN (SELECT ...) takes one column", call)
        pairs.append((query.expressions[0].unalias(), call.this))
    if not pairs:
        raise SqlError(
            "EXISTS needs an equality with the outer query: EXISTS (SELECT 1 FROM t WHERE t.x = "
            "...), with the alias of each table",
            call,
        )
    for clause in ("group", "having", "limit", "offset", "qualify"):
        if query.args.get(clause):
            raise SqlError(
                f"{clause.upper()} cannot stand in a query that names the outer one; join a "
                "subquery",
                query,
            )
    for one in query.expressions:
        if aggregates := aggregates_in(one):  # An aggregate without input still gives a row.
            raise SqlError(
                "an aggregate cannot stand in a query that names the outer one; join a subquery "
                "with GROUP BY",
                aggregates[0],
            )
    query.set("expressions", [inner for inner, _ in pairs])
    return query, [outer for _, outer in pairs]


def _correlated(query: exp.Select) -> list[tuple[exp.Expr, exp.Expr]]:
    """Removes the conditions of `query` that read tables of the outer query. They must be
    equalities.

    Returns both operands of each removed equality, the operand of `query` first.
    """
    where = query.args.get("where")
    if where is None or query.args.get("from_") is None:
        return []
    own = _tables(query)
    pairs, kept = [], []
    for one in conjuncts(where.this):
        if not _outer_columns(one, own):
            kept.append(one)
            continue
        sides = (one.this, one.expression) if isinstance(one, exp.EQ) else ()
        inner = [side for side in sides if not _outer_columns(side, own)]
        outer = [side for side in sides if side not in inner]
        alone = all(
            column.table and column.table.casefold() not in own
            for side in outer
            for column in side.find_all(exp.Column)
        )
        if len(inner) != 1 or len(outer) != 1 or not alone:
            raise SqlError(
                "a query inside of a condition is compared with the outer one by = alone, as in "
                "WHERE t.x = outer.y; join it for another condition",
                one,
            )
        pairs.append((inner[0], outer[0]))
    query.set("where", exp.Where(this=_all(kept)) if kept else None)
    return pairs


def _tables(query: exp.Select) -> set[str]:
    """Returns the case-folded names of the tables in FROM of a query."""
    entries = [query.args["from_"].this, *(one.this for one in query.args.get("joins") or ())]
    return {one.alias_or_name.casefold() for one in entries}


def _outer_columns(node: exp.Expr, own: set[str]) -> list[exp.Column]:
    """Returns the columns in `node` that are qualified by a table which is neither in `own` nor in
    the FROM of a query within `node`.
    """
    within = [one for one in node.find_all(exp.Select) if one.args.get("from_")]
    known = own.union(*map(_tables, within))
    columns = node.find_all(exp.Column)
    return [one for one in columns if one.table and one.table.casefold() not in known]


def _all(conditions: Iterable[exp.Expr]) -> exp.Expr:
    return reduce(lambda a, b: exp.And(this=a, expression=b), conditions)


# GROUPING SETS, ROLLUP and CUBE.


def _without_sets(node: exp.Select, group: exp.Expr) -> exp.Query:
    """Returns the UNION ALL of a query for each grouping set, or `node` if there are no grouping
    sets.
    """
    parts = group.expressions
    if not any(isinstance(one, exp.GroupingSets | exp.Rollup | exp.Cube) for one in parts):
        return node
    sets = [
        tuple(dict.fromkeys(itertools.chain(*chosen)))
        for chosen in itertools.product(*map(_sets_of, parts))
    ]
    keys = list(dict.fromkeys(itertools.chain(*sets)))
    queries = [_of_set(node, own, keys) for own in sets]
    made: exp.Query = queries[0]
    for one in queries[1:]:
        made = exp.Union(this=made, expression=one, distinct=False)
    return made


Keys = tuple[exp.Expr, ...]


def _sets_of(node: exp.Expr) -> list[Keys]:
    """Returns the grouping sets of one item of GROUP BY."""
    given = node.expressions
    match node:
        case exp.GroupingSets():
            return [found for one in given for found in _sets_of(one)]
        case exp.Rollup():
            keys = [_sets_of(one)[0] for one in given]
            return [tuple(itertools.chain(*keys[:n])) for n in range(len(keys), -1, -1)]
        case exp.Cube():
            keys = [_sets_of(one)[0] for one in given]
            return [
                tuple(itertools.chain(*chosen))
                for n in range(len(keys), -1, -1)
                for chosen in itertools.combinations(keys, n)
            ]
        case exp.Tuple():
            return [tuple(given)]
    return [(node.unnest(),)]


def _unified(node: exp.Expr, tables: set[str]) -> exp.Expr:
    """Returns a normalized copy of an expression: two expressions that name the same columns
    differently (`t.x`, `X`) get equal copies.

    The copy omits a qualifier that is in `tables`. This set holds the case-folded name of the
    table in FROM, or is empty if the query has no FROM or has joins.
    """

    def plain(one: exp.Expr) -> exp.Expr:
        if isinstance(one, exp.Column) and len(one.parts) == 2 and one.table.casefold() in tables:
            one.set("table", None)
        if isinstance(one, exp.Identifier):
            return exp.Identifier(this=one.name if one.quoted else one.name.casefold())
        return one

    return node.copy().transform(plain, copy=False)


def _of_set(node: exp.Select, keys: Keys, all_keys: Sequence[exp.Expr]) -> exp.Select:
    """Returns the query grouped by the grouping set `keys`. The other columns of `all_keys` are
    NULL.
    """
    tables = _tables(node) if node.args.get("from_") and not node.args.get("joins") else set()
    given = [_unified(one, tables) for one in keys]
    absent = [one for one in (_unified(one, tables) for one in all_keys) if one not in given]

    def nulled(one: exp.Expr) -> exp.Expr:
        if isinstance(one, exp.Grouping | exp.GroupingId):
            bits = 0
            for key in (_unified(part, tables) for part in one.expressions):
                if key not in given and key not in absent:
                    raise SqlError("GROUPING takes columns of GROUP BY", one)
                bits = 2 * bits + (key in absent)
            return exp.Literal.number(bits)
        if _unified(one, tables) in absent:
            return exp.Null()
        if is_aggregate(one):
            return one.copy()
        made = one.copy()
        for name, value in one.args.items():
            if isinstance(value, exp.Expr):
                made.set(name, nulled(value))
            elif isinstance(value, list):
                made.set(name, [nulled(v) if isinstance(v, exp.Expr) else v for v in value])
        return made

    for one in all_keys:
        if isinstance(one, exp.Literal):
            raise SqlError("write the column itself in GROUPING SETS, not its position", one)
    made = node.copy()
    items = []
    for one in node.expressions:
        value = one.unalias()
        name = one.alias or (value.name if isinstance(value, exp.Column | exp.Dot) else "")
        own = nulled(value)
        items.append(exp.Alias(this=own, alias=_name(name)) if name else own)
    made.set("expressions", items)
    if having := node.args.get("having"):
        made.set("having", exp.Having(this=nulled(having.this)))
    made.set("group", exp.Group(expressions=[one.copy() for one in keys]) if keys else None)
    return made
