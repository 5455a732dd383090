"""Messages about the wrong use of an expression. They show the correct way to write it.

The nodes raise errors with these messages. The functions here get plain text, so that they need not
import the nodes.
"""

from __future__ import annotations

from collections.abc import Sequence

from aioflow.core.errors import did_you_mean

__all__ = [
    "always_none",
    "no_attribute",
    "no_operation",
    "no_truth",
    "no_truth_of_chain",
    "no_truth_of_mixed",
    "no_value",
    "no_values",
]

METHODS = ("is_in", "is_null", "fill_null", "cast", "round", "abs", "str", "dt")

AGGREGATES = (
    "count",
    "sum",
    "min",
    "max",
    "mean",
    "collect",
    "top",
    "min_by",
    "max_by",
    "first",
    "last",
    "distinct",
)
"""Names of aggregates. An aggregate reads many elements, but an expression reads only one."""

ELSEWHERE = {
    "astype": "cast(type)",
    "between": "is_in(values), or two comparisons with &",
    "coalesce": "fill_null(value)",
    "endswith": "str.ends_with(text)",
    "isna": "is_null()",
    "startswith": "str.starts_with(text)",
}
"""Maps names of methods of str and of other libraries to the equivalents in expressions."""


def no_truth() -> str:
    """Returns the message that an expression has no truth value, with the correct way to write a
    condition.
    """
    return (
        "an expression has no truth value: use & | ~ instead of and, or, not, is_in instead of "
        "`in`, when(...) instead of `if`"
    )


def no_truth_of_mixed(logical: str, comparison: str, shown: str) -> str:
    """Returns advice to put comparisons in parentheses, for an expression such as `a & b > c`.
    `logical` and `comparison` are the two operators, and `shown` is a correct example.
    """
    return (
        f"{no_truth()}; {logical} binds tighter than {comparison}, so write each comparison in "
        f"parentheses, like {shown}"
    )


def no_truth_of_chain(middle: str) -> str:
    """Returns advice on how to write a chain of comparisons, such as `1 < x < 5`. `middle` is the
    expression between the two comparisons.
    """
    return (
        f"{no_truth()}; a chain like 1 < {middle} < 5 is two comparisons, ({middle} > 1) & "
        f"({middle} < 5)"
    )


def no_attribute(
    name: str, whole: str, shown: str, text: Sequence[str], time: Sequence[str]
) -> str:
    """Returns advice on what to write instead of the attribute `name`, which expressions do not
    have.

    `whole` is the text of the expression, and `shown` its text before a method, with parentheses if
    needed. `text` and `time` are the names of the operations of `.str` and `.dt`.
    """
    wrong, nested = (
        f"an expression has no method {name!r}",
        f"; if it is a nested field write {shown}[{name!r}]",
    )
    if name in text:
        return f"{wrong}; for text write {shown}.str.{name}(...){nested}"
    if name in time:
        return f"{wrong}; for a time write {shown}.dt.{name}{nested}"
    if name in AGGREGATES:
        return (
            f"{wrong}, it is of one element; for many write aggregate(af.{name}({whole})){nested}"
        )
    near = (
        f"; did you mean {shown}.{ELSEWHERE[name]}?"
        if name in ELSEWHERE
        else did_you_mean(name, METHODS, f"{shown}.{{}}")
    )
    return f"{wrong}{near}{nested}"


def no_operation(prefix: str, name: str, known: Sequence[str]) -> str:
    """Returns the message that the namespace `prefix` has no operation `name`. The message lists
    the `known` operations.
    """
    return (
        f"{prefix} has no operation {name!r}{did_you_mean(name, known, prefix + '.{}')}; it has "
        f"{', '.join(known)}"
    )


def no_value(whole: str, shown: str, asked: str, method: str) -> str:
    """Returns the message that `asked`, such as `int()`, cannot convert an expression to a plain
    value. The message names `method`, which converts the value of each element.
    """
    return (
        f"{asked} of {whole}: an expression stands for a value of each element, not known here; "
        f"write {shown}.{method}"
    )


def no_values(shown: str, others: Sequence[str]) -> str:
    """Returns the message that expressions cannot be the values of `is_in`. The message shows how
    to compare fields instead.
    """
    ways = " | ".join(f"({shown} == {other})" for other in others) or f"({shown} == col.other)"
    return (
        "is_in expects plain values, known when the flow is built; to compare with other fields "
        f"write {ways}"
    )


def always_none(shown: str, operator: str) -> str:
    """Returns the text of the warning about `e == None` and `e != None`."""
    wanted = f"{shown}.is_null()" if operator == "==" else f"~{shown}.is_null()"
    return (
        f"{shown} {operator} None is None for every element, as any operation on None, so a "
        f"filter drops them all: write {wanted}"
    )
