"""Writes an expression as the source of one Python expression over a row.

All generated loops contain such source. Guards handle None: the operations of a tree that give None
for None share one test of all fields that they read. An example is `None if (v0 := row['a']) is
None or (v1 := row['b']) is None else v0 * v1 + 1`. A field is read only once where Python's order
of evaluation ensures that its variable is set.

Invariant: a variable is used only where every path of evaluation has assigned it. A variable that a
branch or the right side of `&` and `|` binds is not used after it.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from itertools import count
from keyword import iskeyword
from typing import Any

import msgspec

from aioflow.expressions import nodes as ex
from aioflow.expressions.trees import Apply, Composite, Operation, is_boolean
from aioflow.expressions.values import (
    DATE_PARTS,
    cast_value,
    power,
    read_field,
    truncate,
    truth,
)

__all__ = ["Emitter", "RowKind"]


class RowKind(Enum):
    """The way in which the fields of a row are read."""

    MAPPING = "mapping"
    ATTRIBUTES = "attributes"

    @classmethod
    def of(cls, row: Any) -> RowKind:
        return cls.MAPPING if isinstance(row, Mapping) else cls.ATTRIBUTES


_Bound = dict[ex.Expr[Any] | str | int, tuple[str, bool]]
"""Maps each column that is bound to a variable at a point of the evaluation to the variable and a
flag.

The flag is true if the value is known not to be None at this point.
"""


class _Value(msgspec.Struct, frozen=True):
    """The source text of a value under construction.

    `source` may be evaluated only if no guard is None. `guards` are evaluated in order. The code of
    guards and source binds the variables of `inner` if all guards pass. It binds the variables of
    `after` in any case.
    """

    source: str
    guards: tuple[str, ...]
    nullable: bool
    inner: _Bound
    after: _Bound

    @property
    def full(self) -> str:
        """The source of the value, including the tests of its guards."""
        if not self.guards:
            return self.source
        return (
            f"(None if {' or '.join(f'{guard} is None' for guard in self.guards)} else "
            f"{self.source})"
        )

    @property
    def full_nullable(self) -> bool:
        return self.nullable or bool(self.guards)


class Emitter:
    """Writes expressions as source for one generated function.

    `names` holds the constants and helpers that the source refers to: the globals of the function.
    `row` is the name of the variable that holds the row.
    """

    def __init__(
        self, kind: RowKind, row: str = "row", names: dict[str, Any] | None = None
    ) -> None:
        self.kind = kind
        self.row = row
        self.names: dict[str, Any] = {} if names is None else names
        self._numbers = count()

    def value(self, expression: ex.Expr[Any]) -> str:
        """Returns the source of the value of `expression`."""
        return self._visit(expression, {}).full

    def condition(self, expression: ex.Expr[Any]) -> str:
        """Returns source that is truthy exactly if `expression` is True.

        It does not distinguish False and None.
        """
        return self._truth(expression, {})[0]

    def constant(self, value: Any, prefix: str = "k") -> str:
        """Returns the name of a global that holds `value`."""
        name = f"_{prefix}{next(self._numbers)}"
        self.names[name] = value
        return name

    # Translation of nodes.

    def _visit(self, e: ex.Expr[Any], bound: _Bound) -> _Value:
        match e:
            case ex.Column(_name=name):
                if name in bound:
                    variable, known = bound[name]
                    return _Value(variable, (), not known, bound, bound)
                return _Value(self._column(name), (), True, bound, bound)
            case ex.Literal(_value=value):
                return _Value(self._literal(value), (), value is None, bound, bound)
            case ex.Binary(_operator=("&" | "|") as operator):
                left, right = _balanced(operator, e)
                return self._logic(operator, left, right, bound)
            case ex.Binary(_operator=operator, _left=left, _right=right):
                return self._arithmetic(operator, left, right, bound)
            case ex.Unary(_operator=operator, _operand=operand):
                (x,), guards, inner, after = self._strict(
                    (operand,), bound, logical=operator == "~"
                )
                source = {"-": f"(-{x})", "~": f"(not {x})", "abs": f"_abs({x})"}[operator]
                self.names["_abs"] = abs
                return _Value(source, guards, False, inner, after)
            case ex.IsNull(_operand=operand):
                value = self._visit(operand, bound)
                return self._plain(f"({value.full} is None)", value.after)
            case ex.FillNull(_operand=operand, _value=default):
                return self._fill_null(operand, default, bound)
            case ex.Case(_branches=branches, _default=default):
                return self._case(branches, default, bound)
            case Apply(_operation=operation) if operation.takes_none:
                return self._apply_to_none(e, operation, bound)
            case Composite(_parts=parts):
                values = [self._visit(part, bound) for part in parts]
                source = f"({''.join(f'{value.full}, ' for value in values)})"
                return self._plain(source, values[0].after)
            case _:
                return self._function(e, bound)

    def _apply_to_none(self, e: ex.Expr[Any], operation: Operation, bound: _Bound) -> _Value:
        sources: list[str] = []
        for operand in e._children:
            value = self._visit(operand, bound)
            sources.append(value.full)
            bound = value.after
        call = f"{self.constant(operation.function)}({', '.join(sources)})"
        return _Value(call, (), operation.gives_none, bound, bound)

    def _strict(
        self, operands: tuple[ex.Expr[Any], ...], bound: _Bound, logical: bool = False
    ) -> tuple[list[str], tuple[str, ...], _Bound, _Bound]:
        """Returns the sources of `operands`, and the guards that test them for None. Also returns
        the variables that are bound if all guards pass, and those that are bound in any case.
        """
        sources: list[str] = []
        guards: tuple[str, ...] = ()
        inner = bound
        after: _Bound | None = None
        for operand in operands:
            value = self._visit(operand, inner)
            source = value.source
            if logical and not is_boolean(operand):
                source = self._checked(source)
            operand_after = value.after
            guards += value.guards
            # Later operands may use only variables that the guards bind, because a body is
            # evaluated after all guards.
            inner = value.inner if value.guards else inner
            if value.nullable:
                if source.isidentifier():
                    variable, guard = source, source
                else:
                    variable = f"v{next(self._numbers)}"
                    guard = f"({variable} := {source})"
                guards += (guard,)
                source = variable
                if isinstance(operand, ex.Column):
                    inner = inner | {operand._name: (variable, True)}
                    operand_after = operand_after | {operand._name: (variable, False)}
            sources.append(source)
            if after is None and guards:
                # Only the first guard is evaluated in any case.
                after = operand_after
        return sources, guards, inner, bound if after is None else after

    def _arithmetic(
        self, operator: str, left: ex.Expr[Any], right: ex.Expr[Any], bound: _Bound
    ) -> _Value:
        (a, b), guards, inner, after = self._strict((left, right), bound)
        if operator in ("/", "//", "%"):
            if (
                isinstance(right, ex.Literal)
                and type(right._value) in (int, float)
                and right._value
            ):
                return _Value(f"({a} {operator} {b})", guards, False, inner, after)
            if not b.isidentifier():
                # Evaluated first, once; the divisor decides.
                variable = f"v{next(self._numbers)}"
                return _Value(
                    f"({a} {operator} {variable} if ({variable} := {b}) else None)",
                    guards,
                    True,
                    inner,
                    after,
                )
            return _Value(f"({a} {operator} {b} if {b} else None)", guards, True, inner, after)
        if operator == "**":
            self.names["_power"] = power
            return _Value(f"_power({a}, {b})", guards, True, inner, after)
        if operator in ("+", "-") and isinstance(left, ex.Binary) and left._operator in ("+", "-"):
            a = a[1:-1]  # A long sum nests to the left, and Python's parser allows 200 parentheses.
        return _Value(f"({a} {operator} {b})", guards, False, inner, after)

    def _logic(
        self, operator: str, left: ex.Expr[Any], right: ex.Expr[Any], bound: _Bound
    ) -> _Value:
        """Returns the source of Kleene's `&` or `|`. The right operand is computed only if the left
        operand does not decide the result.
        """
        a, b = self._visit(left, bound), None
        b = self._visit(right, a.after)
        x, y = self._boolean(left, a), self._boolean(right, b)
        word = "and" if operator == "&" else "or"
        if not a.full_nullable:
            return _Value(f"({x} {word} {y})", (), b.full_nullable, bound, a.after)
        p, q = f"v{next(self._numbers)}", f"v{next(self._numbers)}"
        either = f"{p} is None or {q} is None" if b.full_nullable else f"{p} is None"
        if operator == "|":
            source = f"(True if ({p} := {x}) or ({q} := {y}) else None if {either} else False)"
        else:
            no_q = f"not ({q} := {y})" + (f" and {q} is not None" if b.full_nullable else "")
            source = (
                f"(False if not ({p} := {x}) and {p} is not None or {no_q} else None if {either} "
                "else True)"
            )
        return _Value(source, (), True, bound, a.after)

    def _truth(self, e: ex.Expr[Any], bound: _Bound) -> tuple[str, _Bound, _Bound]:
        """Returns source that is truthy exactly if `e` is True.

        Also returns the variables that are bound if `e` is True, and the variables that are bound
        in any case.
        """
        match e:
            case ex.Binary(_operator="&"):
                left, right = _balanced("&", e)
                x, then, after = self._truth(left, bound)
                y, then, _ = self._truth(right, then)
                return f"({x} and {y})", then, after
            case ex.Binary(_operator="|"):
                left, right = _balanced("|", e)
                x, _, after = self._truth(left, bound)
                y, _, _ = self._truth(right, after)
                return f"({x} or {y})", after, after
        value = self._visit(e, bound)
        source = value.source if is_boolean(e) else self._checked(value.source)
        if value.guards:
            checks = " and ".join(f"{guard} is not None" for guard in value.guards)
            return f"({checks} and {source})", value.inner, value.after
        return source, value.after, value.after

    def _fill_null(self, operand: ex.Expr[Any], default: ex.Expr[Any], bound: _Bound) -> _Value:
        value = self._visit(operand, bound)
        if not value.full_nullable:
            return value
        other = self._visit(default, value.after)
        variable = f"v{next(self._numbers)}"
        source = f"({other.full} if ({variable} := {value.full}) is None else {variable})"
        return _Value(source, (), other.full_nullable, bound, value.after)

    def _case(
        self,
        branches: tuple[tuple[ex.Expr[Any], ex.Expr[Any]], ...],
        default: ex.Expr[Any],
        bound: _Bound,
    ) -> _Value:
        parts: list[str] = []
        nullable = False
        known = bound
        first: _Bound | None = None
        for condition, result in branches:
            test, then, known = self._truth(condition, known)
            first = known if first is None else first
            value = self._visit(result, then)
            nullable = nullable or value.full_nullable
            parts.append(f"{value.full} if {test} else ")
        value = self._visit(default, known)
        return _Value(
            f"({''.join(parts)}{value.full})",
            (),
            nullable or value.full_nullable,
            bound,
            first or bound,
        )

    def _function(self, e: ex.Expr[Any], bound: _Bound) -> _Value:
        """Returns the source of a function of one operand, with arguments that may be expressions.

        The value is None if the operand or an argument is None.
        """
        names = self.names
        (x, *args), guards, inner, after = self._strict(e._children, bound)
        nullable = False
        match e:
            case ex.Field(_name=name):
                names["_read"] = read_field
                nullable = True
                if isinstance(name, int) or not x.isidentifier():
                    source = f"_read({x}, {name!r})"
                else:
                    source = (
                        f"({x}[{name!r}] if {x}.__class__ is dict and {name!r} in {x} else "
                        f"_read({x}, {name!r}))"
                    )
            case ex.IsIn(_values=values):
                source = f"({x} in {self.constant(_members(values))})"
            case ex.Cast(_to=to, _strict=strict):
                names["_cast"] = cast_value
                nullable = not strict
                source = f"_cast({x}, {self.constant(to)}, {strict})"
            case ex.Round(_digits=digits):
                names["_round"] = round
                source = f"_round({x}, {digits})"
            case ex.Call(_name="dt.truncate", _arguments=(every_ms,)):
                names["_truncate"] = truncate
                source = f"_truncate({x}, {every_ms})"
            case ex.Call(_name=name, _arguments=arguments) if name.startswith("dt."):
                source = f"{self.constant(DATE_PARTS[name[3:]], 'part')}({x})"
            case ex.Call(_name=name, _arguments=arguments):
                plain = [repr(a) for a in arguments if not isinstance(a, ex.Expr)]
                source = _text_function(name, x, args or plain, arguments)
                names["_len"] = len
            case Apply(_operation=operation):
                nullable = operation.gives_none
                # The source may name an operand twice, or not evaluate it.
                function = self.constant(operation.function)
                if operation.source and all(map(_is_atom, (x, *args))):
                    source = f"({operation.source.format(x, *args, f=function)})"
                else:
                    source = f"{function}({', '.join((x, *args))})"
            case _:
                raise TypeError(f"{type(e).__name__} is no expression that rows know")
        return _Value(source, guards, nullable, inner, after)

    def _plain(self, source: str, bound: _Bound) -> _Value:
        return _Value(source, (), False, bound, bound)

    def _boolean(self, e: ex.Expr[Any], value: _Value) -> str:
        return value.full if is_boolean(e) else self._checked(value.full)

    def _checked(self, source: str) -> str:
        self.names["_truth"] = truth
        return f"_truth({source})"

    def _column(self, name: str | int) -> str:
        if self.kind is RowKind.MAPPING or isinstance(name, int):
            return f"{self.row}[{name!r}]"
        if name.isidentifier() and not iskeyword(name):
            return f"{self.row}.{name}"
        self.names["_getattr"] = getattr
        return f"_getattr({self.row}, {name!r})"

    def _literal(self, value: Any) -> str:
        # Needs parentheses, because -1 ** 2 and 1.real would mean something else.
        if value is None or type(value) in (bool, str, bytes):
            return repr(value)
        if type(value) is int or (type(value) is float and value - value == 0):
            return repr(value) if repr(value)[0] != "-" else f"({value!r})"
        return self.constant(value)


def _is_atom(source: str) -> bool:
    """Returns whether `source` is a variable or a number."""
    return source.isidentifier() or source.strip("()-").replace(".", "", 1).isdigit()


def _balanced(operator: str, e: ex.Expr[Any]) -> tuple[ex.Expr[Any], ex.Expr[Any]]:
    """Returns the two halves of a chain of `&` or `|`.

    The operators are associative, so a chain can become a balanced tree. So the source of
    `reduce(or_, conditions)` is not nested deeply.
    """
    terms: list[ex.Expr[Any]] = []
    stack = [e]
    while stack:
        e = stack.pop()
        if isinstance(e, ex.Binary) and e._operator == operator:
            stack += (e._right, e._left)
        else:
            terms.append(e)
    while len(terms) > 2:
        pairs: list[ex.Expr[Any]] = [
            ex.Binary(operator, *pair) for pair in zip(terms[::2], terms[1::2], strict=False)
        ]
        terms = [*pairs, *terms[len(pairs) * 2 :]]
    return terms[0], terms[1]


def _members(values: tuple[Any, ...]) -> frozenset[Any] | tuple[Any, ...]:
    """Returns the members of `is_in` for Python's operator `in`.

    None and NaN are left out. They are equal to no value, but `in` would find the identical object.
    """
    kept = tuple(v for v in values if v is not None and not (isinstance(v, float) and v != v))
    try:
        return frozenset(kept)
    except TypeError:
        return kept


def _text_function(name: str, x: str, args: list[str], arguments: tuple[Any, ...]) -> str:
    match name:
        case "str.lower" | "str.upper":
            return f"{x}.{name[4:]}()"
        case "str.strip" | "str.lstrip" | "str.rstrip" | "str.split" | "str.replace":
            return f"{x}.{name[4:]}({', '.join(args)})"
        case "str.starts_with" | "str.ends_with":
            return f"{x}.{name[4:].replace('_', '')}({args[0]})"
        case "str.contains":
            return f"({args[0]} in {x})"
        case "str.len":
            return f"_len({x})"
        case "str.concat":
            return f"({' + '.join([x, *args])})"
        case "str.slice":
            start, length = arguments
            if length is None:
                return f"{x}[{start}:]"
            return f"{x}[{start}:{start + length}]" if start >= 0 else f"{x}[{start}:][:{length}]"
    raise TypeError(f"rows do not know the function {name}")
