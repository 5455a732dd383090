"""Plans joins: of windows, within an interval of time, with a bounded table, and of whole streams.

The conditions of ON, and of WHERE for inner joins, decide the kind of the join. A result is a pair
of records, whose fields are read from both sides. NULL is not equal to anything, so records with a
NULL key have no pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from sqlglot import exp

import aioflow as af
from aioflow.api.build import OperatorOptions, Upstream, add_operator, event_time_of
from aioflow.expressions.nodes import Expr
from aioflow.expressions.rows import compile_predicate, compile_row
from aioflow.operators.join.stream_joins import make_regular_join
from aioflow.sql.bound import MIRRORED, Compiler
from aioflow.sql.casts import Scalar
from aioflow.sql.errors import SqlError
from aioflow.sql.keyed import ChangingJoin
from aioflow.sql.relation import CHANGE, Relation, Windows, duration_ms, under
from aioflow.sql.rewriting import HIDDEN
from aioflow.sql.sources import NO_KEY, Table
from aioflow.sql.types import INTERVAL, unify
from aioflow.sql.values import greatest, least
from aioflow.sql.windows import FieldWindows

__all__ = ["Joins", "key_of", "reads_of_key", "require_event_time", "require_ttl", "together"]

FRAME = "$start", "$end"
"""Names for the window fields of both sides of a join, used if the fields' own names differ."""


@dataclass(slots=True)
class Condition:
    """The condition of one join, split into its parts."""

    equal: list[tuple[exp.Expr, exp.Expr]] = field(default_factory=list)
    """Pairs of expressions that must be equal, the first of the left and the second of the right
    relation.
    """
    times: list[exp.Expr] = field(default_factory=list)
    """Comparisons of the times of both sides."""
    lower: int | None = None
    upper: int | None = None
    """`lower` and `upper` are the bounds of the right record's time minus the left record's time,
    in ms.
    """
    rest: list[exp.Expr] = field(default_factory=list)


class Joins:
    """Joins the relations of one FROM, from left to right."""

    def __init__(self, relations: Sequence[Relation], compiler: Compiler) -> None:
        self._relations = relations
        self._compile = compiler.compile
        self._ttl = compiler.ttl
        self._flow = compiler.flow
        self._updates = compiler.updates

    def fold(
        self,
        steps: Sequence[tuple[exp.Join, list[exp.Expr]]],
        where: list[exp.Expr],
    ) -> tuple[Relation, list[exp.Expr]]:
        """Returns the relation of all joins, and the conditions of WHERE that no join has used."""
        left = self._relations[0]
        inner = not any(join.side for join, _ in steps)
        for right, (join, on) in zip(self._relations[1:], steps, strict=True):
            _check(join)
            if not inner:
                left = self._one(left, right, join, on)
                continue
            # For inner joins, a condition in ON and the same condition in WHERE are equivalent.
            both = _keys(left) | _keys(right)
            conditions = [*on, *(one for one in where if _read(one) <= both)]
            where = [one for one in where if not _read(one) <= both]
            left, conditions = self._pushed(left, conditions)
            if not isinstance(right, Table):
                right, conditions = self._pushed(right, conditions)
            left = self._one(left, right, join, conditions)
        return left, where

    def _pushed(
        self, relation: Relation, conditions: list[exp.Expr]
    ) -> tuple[Relation, list[exp.Expr]]:
        """Filters a side of a join by the conditions that read only this side. Returns the
        filtered side and the other conditions.
        """
        own = [one for one in conditions if _read(one) <= _keys(relation)]
        return self._rest(relation, own), [one for one in conditions if one not in own]

    def _one(
        self,
        left: Relation,
        right: Relation,
        join: exp.Join,
        conditions: list[exp.Expr],
    ) -> Relation:
        split = _split(left, right, conditions)
        by_window = _window_pairs(left.windows, right.windows, split)
        if isinstance(right, Table):
            return self._lookup(left, right, join, split)
        if by_window:
            return self._windows(left, right, join, split, by_window)
        changes = left.changes or right.changes
        if join.side and not changes and not self._updates:
            if join.this.alias_or_name.startswith(HIDDEN):
                raise SqlError(
                    "rows of NOT EXISTS change when the inner query gets a row; give "
                    'updates="changes" for a stream of the changes, or LEFT JOIN a bounded table '
                    "and write WHERE t.x IS NULL",
                    join,
                )
            raise SqlError(
                f"a {join.side} JOIN of whole streams corrects its results; give "
                'updates="changes" for a stream of the corrections, join on window_start and '
                "window_end, or join a bounded table",
                join,
            )
        if not split.equal:
            raise SqlError("a join needs an equality between both sides, such as a.id = b.id", join)
        if join.side or changes:
            return self._changing(left, right, join, split)
        if split.lower is not None and split.upper is not None:
            return self._interval(left, right, join, split)
        return self._regular(left, right, join, split)

    def _keys_of(
        self, left: Relation, right: Relation, pairs: Sequence[tuple[Any, Any]]
    ) -> tuple[list[Scalar], list[Scalar]]:
        keys = []
        for a, b in pairs:
            one, other = self._compile(a, left), self._compile(b, right)
            if unify(one.type, other.type) is None:
                raise SqlError(f"{one.type} and {other.type} are never equal; cast one of them", a)
            keys.append((one, other))
        return [one for one, _ in keys], [other for _, other in keys]

    def _met(
        self,
        left: Relation,
        right: Relation,
        stream: Any,
        times: Mapping[str, int] | None,
        windows: Windows | None = None,
    ) -> Relation:
        """Returns the relation of the pairs of a join."""
        reads = {f.key: under(left.column(f.key), "left") for f in left.fields}
        reads |= {f.key: under(right.column(f.key), "right") for f in right.fields}
        return Relation(
            stream=stream,
            fields=left.fields + right.fields,
            reads=reads,
            times=times,
            clock=left.clock,
            windows=windows,
        )

    def _rest(self, relation: Relation, conditions: Sequence[exp.Expr]) -> Relation:
        """Filters a relation by all of the conditions."""
        for one in conditions:
            relation = relation.filtered(self._compile(one, relation).expression)
        return relation

    def _predicate(self, met: Relation, rest: Sequence[exp.Expr]) -> list[Any]:
        return [compile_predicate(met.read(self._compile(one, met).expression)) for one in rest]

    def _windows(
        self,
        left: Relation,
        right: Relation,
        join: exp.Join,
        split: Condition,
        used: list[tuple[exp.Expr, exp.Expr]],
    ) -> Relation:
        one, other = left.windows, right.windows
        assert one is not None and other is not None
        for side in (left, right):
            require_event_time(side, "a join of windows", join)
        ends = [pair for pair in used if pair[0].name == one.end] or used
        pairs = [pair for pair in split.equal if pair not in used] or ends[:1]
        if one.size != other.size or one.size is None:
            pairs = list(split.equal)
        keys, others = self._keys_of(left, right, pairs)
        assigner = one.regroup
        if assigner is None or assigner != other.regroup:
            by_start = any(pair[0].name == one.start for pair in used)
            if not by_start and (one.size is None or one.size != other.size):
                raise SqlError(
                    "windows of one end can begin at different times; join on window_start, too",
                    ends[0][0],
                )
            left, right = _framed(left, join), _framed(right, join)
            assigner = FieldWindows(*FRAME)
        times: Mapping[str, int] = {one.end: 1, other.end: 1}
        after: Windows | None = one.after(one.start, one.end)
        rest = split.rest + split.times
        if not join.side:
            left, right = _not_null(left, keys), _not_null(right, others)
            joined = left.stream.join(right.stream)
            joined = joined.where(_side_key(left, keys)).equal_to(_side_key(right, others))
            return self._rest(
                self._met(left, right, joined.window(assigner).pairs(), times, after), rest
            )
        composite = len(keys) > 1 or any(key.nullable for key in keys + others)
        groups = left.stream.co_group(right.stream)
        groups = groups.where(_side_key(left, keys, composite)).equal_to(
            _side_key(right, others, composite)
        )
        met = self._met(left, right, None, times, after)
        predicate = self._predicate(met, rest)
        keeps = join.side in ("LEFT", "FULL"), join.side in ("RIGHT", "FULL")
        outer = partial(_outer, predicate, keeps, composite)
        stream = groups.window(assigner).apply(outer)
        if keeps[1]:
            times, after = {}, None  # Only the right record may have a window.
        met = replace(met, stream=stream, times=times, windows=after)
        return _nullable(met, left, right, keeps)

    def _interval(
        self, left: Relation, right: Relation, join: exp.Join, split: Condition
    ) -> Relation:
        keys, others = self._keys_of(left, right, split.equal)
        left, right = _not_null(left, keys), _not_null(right, others)
        if split.lower > split.upper:  # type: ignore[operator]
            raise SqlError(
                "the lower bound of the time is above the upper one, so this join is empty; "
                "correct the bounds",
                join,
            )
        for side in (left, right):
            require_event_time(side, "a join within an interval", join)
        joined = left.stream.key_by(_side_key(left, keys)).interval_join(
            right.stream.key_by(_side_key(right, others)), f"{split.lower}ms", f"{split.upper}ms"
        )
        one, other = (_times(side, split.times) for side in (left, right))
        times: Mapping[str, int] = {}  # The time of a pair is the later of both times.
        if split.lower >= 0:  # type: ignore[operator]
            times = other
        elif split.upper <= 0:  # type: ignore[operator]
            times = one
        latest = tuple(
            frozenset(key for key, offset in side.items() if not offset) for side in (one, other)
        )
        met = self._met(left, right, joined.process(_pair), times)
        return self._rest(replace(met, latest=latest), split.rest)

    def _regular(
        self, left: Relation, right: Relation, join: exp.Join, split: Condition
    ) -> Relation:
        require_ttl(self._ttl, self._flow, [left, right], "a join of whole streams", join)
        keys, others = self._keys_of(left, right, split.equal)
        left, right = _not_null(left, keys), _not_null(right, others)
        one = left.stream.key_by(_side_key(left, keys))
        other = right.stream.key_by(_side_key(right, others))
        node = add_operator(
            self._flow.graph,
            "join",
            [one.upstreams, other.upstreams],
            partial(make_regular_join, [self._ttl_of(left), self._ttl_of(right)]),
            OperatorOptions(),
            stateful=True,
        )
        stream: Any = af.DataStream(self._flow, [Upstream(node.id)])
        return self._rest(self._met(left, right, stream, {}), split.rest + split.times)

    def _changing(
        self, left: Relation, right: Relation, join: exp.Join, split: Condition
    ) -> Relation:
        """Joins whole streams whose rows or pairs may be deleted."""
        # Rows with a key are replaced or deleted. Only other rows would be kept for ever.
        endless = [one for one in (left, right) if one.identity is None]
        require_ttl(self._ttl, self._flow, endless, "a join of whole streams", join)
        ttls = [self._ttl_of(left), self._ttl_of(right)]
        keeps = join.side in ("LEFT", "FULL"), join.side in ("RIGHT", "FULL")
        keys, others = self._keys_of(left, right, split.equal)
        left = left if keeps[0] else _not_null(left, keys)
        right = right if keeps[1] else _not_null(right, others)
        left, right = left.as_rows(), right.as_rows()
        identity, lacks = _identity_of_pairs(left, right, split.equal, keeps)
        met = Relation(
            stream=None,  # type: ignore[arg-type]
            fields=left.fields + right.fields,
            is_plain=True,
            times={},
            clock=left.clock,
            identity=identity,
            is_changelog=True,
            lacks=lacks,
        )
        predicate = self._predicate(met, split.rest + split.times)
        both = left.stream.connect(right.stream)
        both = both.key_by(_side_key(left, keys, True), _side_key(right, others, True))
        made = both.process(
            ChangingJoin((left.names, right.names), keeps, predicate, ttls), name="join"
        )
        return _nullable(replace(met, stream=made), left, right, keeps)

    def _ttl_of(self, side: Relation) -> Any:
        """Returns the time to live of the rows of a side. None means that they are kept for ever,
        or until they are deleted.
        """
        return None if side.stays or side.identity is not None else self._ttl

    def _lookup(self, left: Relation, right: Table, join: exp.Join, split: Condition) -> Relation:
        if join.side not in ("", "LEFT"):
            raise SqlError(
                f"{join.side} JOIN of a bounded table is not supported; write LEFT", join
            )
        if not split.equal:
            raise SqlError("a join with a table needs an equality between both sides", join)
        keys, others = self._keys_of(left, right, split.equal)
        of_row = [compile_row(right.read(key.expression)) for key in others]
        index: dict[Any, list[Any]] = {}
        for row in right.rows:
            key = tuple(function(row) for function in of_row)
            if None not in key:
                index.setdefault(key, []).append(row)
        of_left = [compile_row(left.read(key.expression)) for key in keys]
        met = self._met(left, right, None, left.times, left.windows)
        if left.is_changelog:
            one = all(len(rows) == 1 for rows in index.values())
            met = replace(
                met,
                reads={**met.reads, CHANGE: under(left.column(CHANGE), "left")},
                is_changelog=True,
                identity=left.identity if one else None,
                lacks=left.lacks or "a row can have several rows of the table",
            )
        predicate = self._predicate(met, split.rest + split.times)
        outer = join.side == "LEFT"
        stream: Any = left.stream.flat_map(partial(_found, index, of_left, predicate, outer))
        return _nullable(replace(met, stream=stream), left, right, (outer, False))


# Conditions.


def _split(left: Relation, right: Relation, conditions: Sequence[exp.Expr]) -> Condition:
    split = Condition()
    for one in conditions:
        parts: list[exp.Expr] = [one]
        if isinstance(one, exp.Between) and not one.args.get("symmetric"):
            parts = [
                exp.GTE(this=one.this, expression=one.args["low"]),
                exp.LTE(this=one.this, expression=one.args["high"]),
            ]
        for part in parts:
            turned = _turned(part, left, right)
            bound = None if turned is None else _time_bound(turned, left, right)
            if bound is not None:
                split.times.append(part)
                lower, upper = bound
                split.lower = greatest(split.lower, lower)
                split.upper = least(split.upper, upper)
            if isinstance(turned, exp.EQ):
                split.equal.append((turned.this, turned.expression))
            elif bound is None:
                split.rest.append(part)
    return split


def _turned(node: exp.Expr, left: Relation, right: Relation) -> Any:
    """Returns the comparison with the left relation's expression as its left operand. Returns None
    if the operands do not each read one relation.
    """
    mirrored = MIRRORED.get(type(node))
    if mirrored is None:
        return None
    a, b = _read(node.this), _read(node.expression)
    if a and b and a <= _keys(left) and b <= _keys(right):
        return node
    if a and b and a <= _keys(right) and b <= _keys(left):
        return mirrored(this=node.expression, expression=node.this)
    return None


def _time_bound(node: Any, left: Relation, right: Relation) -> tuple[int | None, int | None] | None:
    """Returns the bounds in ms that a comparison sets for the time of the right record minus the
    time of the left record. Returns None if the comparison does not compare times.
    """
    one, other = _time(node.this, left), _time(node.expression, right)
    if one is None or other is None:
        return None
    bare = isinstance(node.this, exp.Column) and isinstance(node.expression, exp.Column)
    if isinstance(node, exp.EQ) and bare and (left.times is None or right.times is None):
        return None  # If columns only may be the time, an equality compares keys.
    difference = one - other  # left + one <= right + other
    if isinstance(node, exp.EQ):
        return difference, difference
    if isinstance(node, exp.LTE | exp.LT):
        return difference + isinstance(node, exp.LT), None
    return None, difference - isinstance(node, exp.GT)


def _time(node: Any, relation: Relation) -> int | None:
    """Returns the number of ms by which the time expression `node` is later than the record's
    event time. Returns None if `node` is not the event time plus or minus a constant.
    """
    offset = 0
    while not isinstance(node, exp.Column):
        if isinstance(node, exp.Paren):
            node = node.this
        elif isinstance(node, exp.Add | exp.Sub) and isinstance(node.expression, exp.Interval):
            ms = duration_ms(node.expression, INTERVAL.name)
            offset += ms if isinstance(node, exp.Add) else -ms
            node = node.this
        else:
            return None
    if not relation.has_time(node.name):
        return None
    return offset + (relation.times or {}).get(node.name, 0)


def _times(relation: Relation, comparisons: Sequence[exp.Expr]) -> Mapping[str, int]:
    """Returns the fields that follow event time, with their offsets as in `Relation.times`. If they
    are not known, returns the fields in `comparisons` with the offset 0.
    """
    if relation.times is not None:
        return relation.times
    return {key: 0 for one in comparisons for key in _read(one) & _keys(relation)}


def _window_pairs(
    left: Windows | None, right: Windows | None, split: Condition
) -> list[tuple[exp.Expr, exp.Expr]]:
    """Returns the equalities of the condition that compare the bounds of both sides' windows. The
    list is empty if the condition does not join the windows.
    """
    if left is None or right is None:
        return []
    ends = {(left.end, right.end), (left.start, right.start)}
    found = [(a, b) for a, b in split.equal if (a.name, b.name) in ends]
    by_end = any(a.name == left.end for a, _ in found)
    fixed = left.size is not None and left.size == right.size
    if not by_end and not (found and fixed):
        return []
    split.times = [t for t in split.times if not any(t.this is a or t.this is b for a, b in found)]
    return found


def _identity_of_pairs(
    left: Relation,
    right: Relation,
    equal: Sequence[tuple[exp.Expr, exp.Expr]],
    keeps: tuple[bool, bool],
) -> tuple[tuple[str, ...] | None, str]:
    """Returns the keys of the fields that identify a pair, and "". If no fields identify a pair,
    returns None and the reason.

    `keeps` says for each side whether rows without a partner are kept.
    """
    one, other = left.identity, right.identity
    if one is None or other is None:
        return None, (left if one is None else right).lacks or NO_KEY
    if not keeps[1] and set(other) <= {b.name for _, b in equal if isinstance(b, exp.Column)}:
        return one, ""  # A left row has at most one partner.
    if not keeps[0] and set(one) <= {a.name for a, _ in equal if isinstance(a, exp.Column)}:
        return other, ""
    return one + other, ""


def _check(join: exp.Join) -> None:
    for what in (join.method, join.kind if join.kind in ("SEMI", "ANTI") else ""):
        if what:
            raise SqlError(f"{what} JOIN is not supported; write an inner or LEFT JOIN", join)
    if join.args.get("match_condition"):
        raise SqlError("MATCH_CONDITION is not supported; write the condition in ON", join)


def _read(node: exp.Expr) -> set[str]:
    """Returns the keys of the fields that a bound expression reads."""
    return {column.name for column in node.find_all(exp.Column)}


def _keys(relation: Relation) -> set[str]:
    return {one.key for one in relation.fields}


# Keys.


def key_of(scalars: Sequence[Scalar], composite: bool | None = None) -> Any:
    """Returns the key for `key_by`. `composite` says whether the key is a tuple. By default it is a
    tuple if there are several parts, or if the only part may be NULL: a key cannot be None.
    """
    if not scalars:
        return af.lit(0)
    if composite is None:
        composite = len(scalars) > 1 or scalars[0].nullable
    return tuple(s.expression for s in scalars) if composite else scalars[0].expression


def reads_of_key(key: Expr[Any], scalars: Sequence[Scalar]) -> list[Expr[Any]]:
    """Returns the expressions that read the parts of a key that `key_of` made."""
    if len(scalars) == 1 and not scalars[0].nullable:
        return [key]
    return [key[i] for i in range(len(scalars))]


def _side_key(relation: Relation, scalars: list[Scalar], composite: bool | None = None) -> Any:
    if composite is None:
        composite = len(scalars) > 1
    own = [replace(one, expression=relation.read(one.expression)) for one in scalars]
    return key_of(own, composite)


def _not_null(relation: Relation, keys: Sequence[Scalar]) -> Relation:
    """Filters out records with a NULL in their key, because they have no pairs."""
    for key in keys:
        if key.nullable:
            relation = relation.filtered(~key.expression.is_null())
    return relation


def _framed(relation: Relation, join: exp.Join) -> Relation:
    """Returns the relation with the bounds of its windows under the names of FRAME."""
    windows = relation.windows
    if windows is None or windows.start is None:
        raise SqlError("this join needs window_start and window_end of both sides", join)
    named = {one.key: relation.column(one.key) for one in relation.fields}
    bounds = zip(FRAME, (windows.start, windows.end), strict=True)
    named |= {name: relation.column(key) for name, key in bounds}
    return replace(relation, stream=relation.stream.select(named), reads={}, is_plain=False)


def _nullable(met: Relation, left: Relation, right: Relation, keeps: tuple[bool, bool]) -> Relation:
    """Returns the relation `met`. In it, the fields of a side are nullable if the outer join may
    emit pairs without this side.
    """
    loose = (_keys(right) if keeps[0] else set()) | (_keys(left) if keeps[1] else set())
    return replace(
        met, fields=tuple(replace(f, nullable=f.nullable or f.key in loose) for f in met.fields)
    )


def together(left: Relation, right: Relation) -> Mapping[str, int] | None:
    """Returns the fields that follow event time in both relations with the same offset. If one
    relation does not know its fields, returns the fields of the other relation.
    """
    if left.times is None or right.times is None:
        return right.times if left.times is None else left.times
    return dict(left.times.items() & right.times.items())


def require_ttl(
    ttl: Any, flow: Any, relations: Sequence[Relation], what: str, place: exp.Expr
) -> None:
    """Raises SqlError if `ttl` is None and an input of `relations` is endless, so that the state of
    the operator `what` would grow for ever.
    """
    endless = [] if ttl is not None else _endless(flow, relations)
    if endless:
        raise SqlError(
            f"{what} keeps its rows for ever, and {' and '.join(endless)} "
            f"{'does' if len(endless) == 1 else 'do'} not end; say how long rows are kept: "
            "sql(..., ttl=\"1h\"), or SET 'ttl' = '1h' in a script",
            place,
        )


def refuse_endless(flow: Any, relation: Relation, place: exp.Expr) -> None:
    """Raises SqlError if the query of an IN or EXISTS appends rows for ever."""
    if endless := _endless(flow, [relation]):
        raise SqlError(
            f"IN and EXISTS take a query of bounded tables, or of rows that change, and "
            f"{' and '.join(endless)} appends rows for ever: after ttl a value would come again, "
            "and so the rows that it lets pass; write a join",
            place,
        )


def _endless(flow: Any, relations: Sequence[Relation]) -> list[str]:
    """Returns the names of the unbounded sources that the relations read."""
    ids = [up.node_id for relation in relations for up in relation.stream.upstreams]
    nodes = [flow.graph.nodes[one] for one in flow.graph.upstream_of(ids)]
    endless = [node.name for node in nodes if node.source and not node.source.bounded]
    return list(dict.fromkeys(endless))


def require_event_time(relation: Relation, what: str, place: exp.Expr | None = None) -> None:
    """Raises SqlError if the rows have no event time, which `what` needs."""
    if not event_time_of(relation.stream.flow.graph, relation.stream.upstreams):
        raise SqlError(
            f"{what} needs event time, but a source has no watermarks; write WATERMARK FOR ts AS "
            "ts - INTERVAL '5' SECOND in CREATE TABLE, flow.source(..., "
            "watermarks=af.WatermarkStrategy.bounded_out_of_orderness(...)), or for windows by "
            "the clock SELECT *, PROCTIME() AS p in a subquery, and DESCRIPTOR(p)",
            place,
        )


# Functions of records.


def _pair(left: Any, right: Any, ctx: Any) -> list[Any]:
    return [af.Pair(left, right)]


def _outer(
    predicate: list[Callable[[Any], Any]],
    keeps: tuple[bool, bool],
    composite: bool,
    key: Any,
    lefts: list[Any],
    rights: list[Any],
) -> Iterator[Any]:
    """Yields the pairs of records with the same key that meet all predicates. On a side with
    `keeps`, pairs a record without a partner with None.
    """
    met: set[int] = set()
    comparable = not composite or None not in key
    for left in lefts:
        alone = True
        for place, right in enumerate(rights if comparable else ()):
            pair = af.Pair(left, right)
            if all(test(pair) for test in predicate):
                alone = False
                met.add(place)
                yield pair
        if alone and keeps[0]:
            yield af.Pair(left, None)
    if keeps[1]:
        yield from (af.Pair(None, r) for place, r in enumerate(rights) if place not in met)


def _found(
    index: Mapping[Any, list[Any]],
    keys: Sequence[Callable[[Any], Any]],
    predicate: Sequence[Callable[[Any], Any]],
    outer: bool,
    left: Any,
) -> Iterator[Any]:
    """Yields pairs of the record `left` and each row of a table that has the same key and meets all
    predicates. With `outer`, pairs a record without such a row with None.
    """
    alone = outer
    for right in index.get(tuple(key(left) for key in keys), ()):
        pair = af.Pair(left, right)
        if all(test(pair) for test in predicate):
            alone = False
            yield pair
    if alone:
        yield af.Pair(left, None)
