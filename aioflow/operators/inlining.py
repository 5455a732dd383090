"""Extracts the body of a small user function as source, for the loops that are generated around it.

Half of the cost of `lambda e: e.user` for a record is the call. `body_of` returns the body of such
a function as source text, in which any variable can take the place of the parameter. The body must
be one expression of operators, fields, items, constants and displays of its only parameter, without
calls, other names or branches. So the result depends on the record alone, and the body runs no code
except the operators of the record's values.

The source is decompiled from the bytecode, with a table of the instructions of Python 3.11 to 3.15.
It is used only if compiling it results in exactly those instructions and constants. So a function
that this interpreter compiles in an unexpected way is called as before. No other code depends on
the version of the interpreter. `why_off` returns the reason if the interpreter's version, or a
tool, prevents all inlining.

No body is inlined if a debugger, a profiler or a coverage tool is active when the loop is made. The
tool would not notice the calls. When a loop fails in an inlined body, the function itself is called
(`failure_of`, `call_again`), so that its own frame is in the traceback.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable
from keyword import iskeyword
from operator import attrgetter, itemgetter
from types import CodeType, FunctionType
from typing import Any

import msgspec

__all__ = ["Body", "as_getter", "body_of", "call_again", "failure_of", "why_off"]

INSTRUCTIONS_MAX = 60
"""Maximum number of instructions of a function whose body is inlined. In longer functions the call
is a small part of the cost.
"""

TOOLS = 6
"""Maximum number of simultaneous tools of `sys.monitoring`."""

_VARARGS = 0x04 | 0x08  # CO_VARARGS, CO_VARKEYWORDS

_BINARY = frozenset(("+", "-", "*", "/", "//", "%", "**", "<<", ">>", "&", "|", "^", "@"))
_COMPARED = frozenset(("<", "<=", "==", "!=", ">", ">="))
_UNARY = {"UNARY_NEGATIVE": "-", "UNARY_INVERT": "~", "UNARY_NOT": "not "}
_CONSTANTS = (int, float, str, bytes, bool, type(None), tuple)


class Body(msgspec.Struct, frozen=True):
    """The body of a function as an expression over one variable.

    `over("v")` returns the source text of the expression over variable `v`, in parentheses if
    needed.
    """

    pieces: tuple[str, ...]
    """Pieces of the source text; the variable stands between each two of them."""
    members: tuple[Body, ...] | None = None
    """The element expressions if the body is a tuple or list display, otherwise None."""

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
        return None  # An int with too many digits, which Python refuses to write as text.


def as_getter(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns `function`, or an equivalent function in C if there is one.

    A Python function that `map` calls would cost a frame for each element.
    """
    body = body_of(function)
    if body is None or type(function) is not FunctionType:
        return function
    given = [instruction.argval for instruction in dis.get_instructions(function)]
    getters: list[Any] = [*map(itemgetter, given)]
    getters += [attrgetter(name) for name in given if isinstance(name, str)]
    return next((getter for getter in getters if _getter_body(getter) == body), function)


def failure_of(function: Callable[[Any], Any], value: Any, error: Exception) -> Exception:
    """Returns the error that `function` itself raises for `value`, or `error` if it raises none.

    `error` was raised by the inlined body of `function` in a loop.
    """
    try:
        function(value)
    except type(error) as again:
        return again
    except Exception:  # noqa: BLE001  # Not the error to report.
        return error
    return error


def call_again(function: Callable[[Any], Any], value: Any) -> Any:
    """Calls `function` after its inlined body has failed; returns its result or raises its own
    error.

    The error is not chained to the error of the body.
    """
    try:
        return function(value)
    except Exception as error:
        error.__suppress_context__ = True
        raise


def why_off() -> str | None:
    """Returns why no body is inlined in this process, or None if simple bodies are inlined."""
    if _is_watched():
        return "a debugger, a profiler or a coverage tool is active"
    if body_of(_simple) is None:
        return f"the bytecode of Python {sys.version_info[0]}.{sys.version_info[1]} is not known"
    return None


def _simple(x: Any) -> Any:
    return (x[0], x.field + 1)


def _is_watched() -> bool:
    """Returns whether a tool observes function calls.

    From Python 3.12 on, such a tool may use `sys.monitoring`.
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
    """Returns the expression that straight-line bytecode computes, or None for other bytecode."""
    stack: list[Body] = []
    for count, instruction in enumerate(dis.get_instructions(code)):
        if count > INSTRUCTIONS_MAX:
            return None
        name = instruction.opname
        if name == "RESUME":
            continue
        if name != "RETURN_VALUE":
            step = _STEPS.get(name)
            made = None if step is None else step(stack, instruction)
            if made is None:
                return None
            stack.append(made)
        if name in ("RETURN_VALUE", "RETURN_CONST"):
            return stack[0] if len(stack) == 1 else None
    return None


def _load_argument(_stack: list[Body], _instruction: dis.Instruction) -> Body | None:
    return Body(("", ""))


def _load_argument_twice(stack: list[Body], _instruction: dis.Instruction) -> Body | None:
    stack.append(Body(("", "")))
    return Body(("", ""))


def _load_constant(_stack: list[Body], instruction: dis.Instruction) -> Body | None:
    given = instruction.argval
    if type(given) not in _CONSTANTS:
        return None
    return Body((repr(given) if type(given) is not int or given >= 0 else f"({given!r})",))


def _load_attribute(stack: list[Body], instruction: dis.Instruction) -> Body | None:
    given = instruction.argval
    if not stack or not isinstance(given, str) or not given.isidentifier():
        return None
    return _joined("", stack.pop(), f".{given}")


def _apply_unary(stack: list[Body], instruction: dis.Instruction) -> Body | None:
    return _joined(f"({_UNARY[instruction.opname]}", stack.pop(), ")") if stack else None


def _build(stack: list[Body], instruction: dis.Instruction) -> Body | None:
    count = instruction.arg or 0
    if not 0 < count <= len(stack):
        return None
    members = tuple(stack[-count:])
    del stack[-count:]
    return _display(members, "(" if instruction.opname == "BUILD_TUPLE" else "[")


def _keep(stack: list[Body], _instruction: dis.Instruction) -> Body | None:
    """Keeps the operand of a conversion to bool. The `not` that follows tests the truth of any
    value.
    """
    return stack.pop() if stack else None


def _take_item(stack: list[Body], _instruction: dis.Instruction) -> Body | None:
    if len(stack) < 2:
        return None
    index = stack.pop()
    return _joined("", stack.pop(), "[", index, "]")


def _apply_operator(stack: list[Body], instruction: dis.Instruction) -> Body | None:
    sign = instruction.argrepr
    if sign == "[]":
        return _take_item(stack, instruction)
    return _infix(stack, sign) if sign in _BINARY else None


def _compare(stack: list[Body], instruction: dis.Instruction) -> Body | None:
    sign = instruction.argval
    return _infix(stack, sign) if sign in _COMPARED else None


def _test_identity(stack: list[Body], instruction: dis.Instruction) -> Body | None:
    return _infix(stack, "is not" if instruction.argval else "is")


def _test_membership(stack: list[Body], instruction: dis.Instruction) -> Body | None:
    return _infix(stack, "not in" if instruction.argval else "in")


def _infix(stack: list[Body], sign: str) -> Body | None:
    """Takes the two top expressions from `stack` and returns them as one, with `sign` between
    them.
    """
    if len(stack) < 2:
        return None
    right = stack.pop()
    return _joined("(", stack.pop(), f" {sign} ", right, ")")


_STEPS: dict[str, Callable[[list[Body], dis.Instruction], Body | None]] = {
    "LOAD_FAST": _load_argument,
    "LOAD_FAST_BORROW": _load_argument,  # 3.14
    "LOAD_FAST_LOAD_FAST": _load_argument_twice,  # 3.13
    "LOAD_FAST_BORROW_LOAD_FAST_BORROW": _load_argument_twice,  # 3.14
    "LOAD_CONST": _load_constant,
    "LOAD_SMALL_INT": _load_constant,  # 3.14
    "LOAD_COMMON_CONSTANT": _load_constant,  # 3.15, for None, True, False, -1 and ""
    "RETURN_CONST": _load_constant,  # 3.12 and 3.13
    "LOAD_ATTR": _load_attribute,
    "BUILD_TUPLE": _build,
    "BUILD_LIST": _build,
    "BINARY_SUBSCR": _take_item,  # until 3.13, then BINARY_OP
    "BINARY_OP": _apply_operator,
    "COMPARE_OP": _compare,
    "IS_OP": _test_identity,
    "CONTAINS_OP": _test_membership,
    "TO_BOOL": _keep,  # 3.13
    **dict.fromkeys(_UNARY, _apply_unary),
}
"""Maps each instruction to its step: a function that takes operands from the stack and returns the
resulting expression.

A comment names the Python version that introduced an instruction, if this is later than 3.11. A
step returns None for a form that is not inlined. An instruction without a step is not inlined
either.
"""


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
    """Returns whether the source of `body` compiles to the original `code`."""
    try:
        lambda_of = eval(
            compile(
                f"lambda {parameter}: {body.over(parameter)}", "<aioflow inlined body>", "eval"
            ),
            {},
        )
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return _instructions(lambda_of.__code__) == _instructions(code)


def _instructions(code: CodeType) -> list[tuple[object, ...]]:
    """Returns the instructions of `code`, with constants by value instead of by number.

    The numbers also depend on unused constants, such as the 2 in `x + 2 * 3`, which Python computes
    as `x + 6`.
    """
    return [
        (
            one.opname,
            None if one.opcode in dis.hasconst else one.arg,
            type(one.argval),
            repr(one.argval),
        )
        for one in dis.get_instructions(code)
    ]


def _getter_body(getter: Any) -> Body | None:
    """Returns the body of an `itemgetter` of one plain key, or an `attrgetter` of one name."""
    arguments = getter.__reduce__()[1]
    if len(arguments) != 1 or type(arguments[0]) not in (int, str):
        return None
    key = arguments[0]
    if isinstance(getter, itemgetter):
        return Body(("", f"[{key!r}]" if type(key) is str or key >= 0 else f"[({key!r})]"))
    return Body(("", f".{key}")) if all(map(_is_attribute, key.split("."))) else None


def _is_attribute(name: str) -> bool:
    """Returns whether the source `.name` accesses exactly the attribute `name`.

    A keyword cannot be written as an attribute, and Python normalizes some non-ASCII letters.
    """
    return name.isascii() and name.isidentifier() and not iskeyword(name)
