"""Extracts the body of a small user function as source, for the loops that are generated around it.

Half of what `lambda e: e.user` costs a record is the call. `body_of` gives what such a function
computes as source over any variable, if it is one expression of operators, fields, items, constants
and displays of its only parameter: no call, no name from elsewhere, no branch. So nothing can
change between two records, and nothing but its own operators is run.

The source is read off the bytecode, and believed only if compiling it gives that very bytecode and
those very constants again. So what this interpreter compiles otherwise than expected is called as
before, and nothing else depends on its version.

Where a debugger, a profiler or a coverage tool watches while the loop is made, nothing is inlined:
it would not see the function. When a loop fails in an inlined body, the function is called after
all (`failure_of`, `call_again`), so that its own frame is in the traceback.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable
from dataclasses import dataclass
from keyword import iskeyword
from operator import attrgetter, itemgetter
from types import CodeType, FunctionType
from typing import Any

__all__ = ["Body", "as_getter", "body_of", "call_again", "failure_of"]

INSTRUCTIONS_MAX = 60
"""Beyond, the call is a small part of what the function costs."""

TOOLS = 6
"""That `sys.monitoring` may have at once."""

_VARARGS = 0x04 | 0x08  # CO_VARARGS, CO_VARKEYWORDS

_BINARY = frozenset(("+", "-", "*", "/", "//", "%", "**", "<<", ">>", "&", "|", "^", "@"))
_COMPARED = frozenset(("<", "<=", "==", "!=", ">", ">="))
_UNARY = {"UNARY_NEGATIVE": "-", "UNARY_INVERT": "~", "UNARY_NOT": "not "}
_CONSTANTS = (int, float, str, bytes, bool, type(None), tuple)


@dataclass(frozen=True, slots=True)
class Body:
    """An expression over one variable.

    `over("v")` is its source, in parentheses where it needs them.
    """

    pieces: tuple[str, ...]
    """The text between the places of the variable."""
    members: tuple[Body, ...] | None = None
    """Of a tuple or list display: its elements."""

    def over(self, name: str) -> str:
        return name.join(self.pieces)

    @property
    def is_argument(self) -> bool:
        """Whether the body is the argument itself."""
        return self.pieces == ("", "")


def body_of(function: Any) -> Body | None:
    """Returns the body of `function` as an expression of its argument, or None if the function must
    be called.
    """
    if _is_watched():
        return None
    try:
        if type(function) is itemgetter or type(function) is attrgetter:
            return _getter_body(function)
        return _function_body(function) if type(function) is FunctionType else None
    except ValueError:
        return None  # An int of thousands of digits, which Python does not spell.


def as_getter(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`function`, or one in C that gives the same: for `map`, to which a function of Python is a
    frame for each element.
    """
    body = body_of(function)
    if body is None or type(function) is not FunctionType:
        return function
    code = function.__code__
    getters: list[Any] = [*map(attrgetter, code.co_names), *map(itemgetter, code.co_consts)]
    return next((getter for getter in getters if _getter_body(getter) == body), function)


def failure_of(function: Callable[[Any], Any], value: Any, error: Exception) -> Exception:
    """`error`, raised by the body of `function` in a loop, as `function` itself raises it for
    `value`; else as it is.
    """
    try:
        function(value)
    except type(error) as again:
        return again
    except Exception:  # noqa: BLE001  # Another one than what is reported.
        return error
    return error


def call_again(function: Callable[[Any], Any], value: Any) -> Any:
    """What `function` gives, or its own error, to be called where its body has failed: that
    error is not told as another one.
    """
    try:
        return function(value)
    except Exception as error:
        error.__suppress_context__ = True
        raise


def _is_watched() -> bool:
    """Whether a tool looks at what is called.

    From Python 3.12 on it may do so by `sys.monitoring`.
    """
    if sys.gettrace() is not None or sys.getprofile() is not None:
        return True
    monitoring: Any = getattr(sys, "monitoring", None)
    return monitoring is not None and any(
        monitoring.get_tool(number) is not None for number in range(TOOLS)
    )


def _function_body(function: FunctionType) -> Body | None:
    code = function.__code__
    if (
        code.co_argcount != 1
        or code.co_nlocals != 1
        or code.co_kwonlyargcount
        or code.co_flags & _VARARGS
    ):
        return None
    body = _read(code)
    if body is None or not _same(code, body, code.co_varnames[0]):
        return None
    return body


def _read(code: CodeType) -> Body | None:
    """The expression of straight-line bytecode; None for anything else."""
    stack: list[Body] = []
    for count, instruction in enumerate(dis.get_instructions(code)):
        name, given, shown = instruction.opname, instruction.argval, instruction.argrepr
        if count > INSTRUCTIONS_MAX:
            return None
        if name == "RESUME":
            continue
        if name == "LOAD_FAST":
            made = Body(("", ""))
        elif name == "LOAD_CONST" and type(given) in _CONSTANTS:
            made = Body((repr(given) if type(given) is not int or given >= 0 else f"({given!r})",))
        elif name == "RETURN_VALUE":
            return stack[0] if len(stack) == 1 else None
        elif name in _UNARY and stack:
            made = _joined(f"({_UNARY[name]}", stack.pop(), ")")
        elif name == "LOAD_ATTR" and stack and isinstance(given, str) and given.isidentifier():
            made = _joined("", stack.pop(), f".{given}")
        elif (
            name in ("BUILD_TUPLE", "BUILD_LIST")
            # These have one always.
            and 0 < instruction.arg <= len(stack)  # type: ignore[operator]
        ):
            members = tuple(stack[-given:])
            del stack[-given:]
            made = _display(members, "(" if name == "BUILD_TUPLE" else "[")
        elif len(stack) >= 2:
            right = stack.pop()
            left = stack.pop()
            if name == "BINARY_SUBSCR":
                made = _joined("", left, "[", right, "]")
            elif (name == "BINARY_OP" and shown in _BINARY) or (
                name == "COMPARE_OP" and shown in _COMPARED
            ):
                made = _joined("(", left, f" {shown} ", right, ")")
            elif name == "IS_OP":
                made = _joined("(", left, " is not " if given else " is ", right, ")")
            elif name == "CONTAINS_OP":
                made = _joined("(", left, " not in " if given else " in ", right, ")")
            else:
                return None
        else:
            return None
        stack.append(made)
    return None


def _joined(*parts: str | Body) -> Body:
    pieces = [""]
    for part in parts:
        if isinstance(part, str):
            pieces[-1] += part
        else:
            pieces[-1] += part.pieces[0]
            pieces += part.pieces[1:]
    return Body(tuple(pieces))


def _display(members: tuple[Body, ...], opening: str) -> Body:
    parts: list[str | Body] = [opening]
    for member in members:
        parts += [member, ", "]
    return Body(_joined(*parts, ")" if opening == "(" else "]").pieces, members)


def _same(code: CodeType, body: Body, parameter: str) -> bool:
    """Whether the source of `body` compiles to what it was read off."""
    try:
        lambda_of = eval(
            compile(
                f"lambda {parameter}: {body.over(parameter)}", "<aioflow inlined body>", "eval"
            ),
            {},
        )
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    made: CodeType = lambda_of.__code__
    return (
        made.co_code == code.co_code
        and made.co_names == code.co_names
        and [(type(one), repr(one)) for one in made.co_consts]
        == [(type(one), repr(one)) for one in code.co_consts]
    )


def _getter_body(getter: Any) -> Body | None:
    """Of an `itemgetter` of one plain key, or an `attrgetter` of one name."""
    arguments = getter.__reduce__()[1]
    if len(arguments) != 1 or type(arguments[0]) not in (int, str):
        return None
    key = arguments[0]
    if isinstance(getter, itemgetter):
        return Body(("", f"[{key!r}]" if type(key) is str or key >= 0 else f"[({key!r})]"))
    return Body(("", f".{key}")) if all(map(_is_attribute, key.split("."))) else None


def _is_attribute(name: str) -> bool:
    """Whether `.name` is source for that very attribute.

    A keyword is none, and of other letters Python makes their plain forms.
    """
    return name.isascii() and name.isidentifier() and not iskeyword(name)
