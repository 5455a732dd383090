"""Hints for error messages about a wrong argument: what the user probably meant to write.

Python only names the argument: "got an unexpected keyword argument 'discover'". The error of a
decorated function also lists its parameters, and names the parameter that was probably meant. A
decorated function costs one more frame per call, so only functions that build a flow are decorated,
never functions that run in it.
"""

from __future__ import annotations

import ast
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from keyword import iskeyword
from typing import Any, TypeVar

from aioflow.core.errors import did_you_mean
from aioflow.core.functions import AggregateFunction
from aioflow.expressions.nodes import Column, is_expression
from aioflow.expressions.trees import column_names

__all__ = [
    "aggregates_hint",
    "as_select",
    "explained",
    "explained_methods",
    "field_hint",
    "hint_of_table",
    "hinted",
    "idleness_hint",
    "is_table",
    "keys_hint",
    "nearest_method",
    "no_such_method",
    "place_hint",
    "reader_hint",
    "sink_hint",
    "window_time_hint",
]

BY_SUFFIX = {
    ".csv": "csv",
    ".tsv": "csv",
    ".json": "jsonl",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
}
COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zip")

TABLES = {
    ("pandas", "DataFrame"): "af.io.arrow(pyarrow.Table.from_pandas(df, preserve_index=False))",
    ("polars", "DataFrame"): "flow.source(df.to_arrow()), or take polars 1.3 or later",
    ("polars", "LazyFrame"): "flow.source(df.collect())",
    ("pyspark", "DataFrame"): "af.io.spark(bridge, df), with the af.SparkBridge that made it",
    ("duckdb", "DuckDBPyRelation"): "af.io.arrow(relation.to_arrow_table())",
    ("_duckdb", "DuckDBPyRelation"): "af.io.arrow(relation.to_arrow_table())",
}
"""Maps (package, class) of a table to the call that reads its rows.

Iterating over such a table would yield column names, or nothing.
"""

WRITTEN = (
    ast.Expression,
    ast.Compare,
    ast.BinOp,
    ast.UnaryOp,
    ast.Constant,
    ast.Name,
    ast.Load,
    ast.operator,
    ast.unaryop,
    ast.cmpop,
)
"""Kinds of syntax nodes that mean the same in a text and in an aioflow expression, unlike `and` and
`in`.
"""


def field_hint(given: Any) -> str:
    """Returns what to write if `given`, a name or a position, was meant as a field, or if a text
    was meant as an expression.

    Returns an empty string for other values.
    """
    if not isinstance(given, (str, int)):
        return ""
    written = _as_expression(given) if isinstance(given, str) else None
    return (
        f"; for the field write af.col({given!r})"
        if written is None
        else f"; a text is no expression: write {written}"
    )


def keys_hint(given: Any, method: str) -> str:
    """Returns what to pass to `method` if `given` was meant as a key of several fields.

    For other values, returns the result of `field_hint`.
    """
    if not isinstance(given, (tuple, list)) or len(given) < 2:
        return field_hint(given)
    if all(map(is_expression, given)):  # A list: a tuple of expressions is a valid key.
        return (
            f"; a key of several expressions is a tuple: {method}(({', '.join(map(repr, given))}))"
        )
    names = [column_names(one)[0] if isinstance(one, Column) else one for one in given]
    if not all(isinstance(name, (str, int)) for name in names):
        return (
            f"; a key of several values is a tuple that a function gives: {method}(lambda e: "
            "(e.user, e.item))"
        )
    fields = ", ".join(
        f"e[{name!r}]" if isinstance(name, int) or not name.isidentifier() else f"e.{name}"
        for name in names
    )
    return (
        f"; a key of several fields is a tuple that a function gives: {method}(lambda e: "
        f"({fields})), or e[...] where elements are dicts"
    )


def aggregates_hint(given: Mapping[str, Any]) -> str | None:
    """Returns a hint for aggregates that were passed by name where one aggregate is expected.

    Returns None unless all values of `given` are aggregates.
    """
    if not all(
        issubclass(one if isinstance(one, type) else type(one), AggregateFunction)
        for one in given.values()
    ):
        return None
    return (
        "results by name are one aggregate, write "
        f"aggregate(af.agg({', '.join(f'{name}=...' for name in given)}))"
    )


def window_time_hint(given: Mapping[str, Any]) -> str | None:
    """Returns what to write if `time=` was passed to `window()` instead of the window itself."""
    if "time" not in given:
        return None
    return f'it belongs to the window: window(af.session("1s", time={given["time"]!r}))'


def idleness_hint(given: Mapping[str, Any]) -> str | None:
    """Returns a hint on where to pass `idle_after=` if this argument, or one with a similar name,
    was passed elsewhere.
    """
    name = next(iter(given))
    if name not in ("idle_after", "idle_after_ms", "idleness", "idle_timeout"):
        return None
    return (
        "did you mean idle_after= of the watermark strategy? Write "
        'watermarks=af.WatermarkStrategy.bounded_out_of_orderness("5s", idle_after="30s")'
    )


def _as_expression(text: str) -> str | None:
    """Returns `text` in the form of an expression of fields, such as `af.col.cents > 1`.

    Returns None if `text` is no expression, or only a name.
    """
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    nodes = list(ast.walk(tree))
    if isinstance(tree.body, (ast.Name, ast.Constant)) or not any(
        isinstance(node, ast.Name) for node in nodes
    ):
        return None
    if any(
        not isinstance(node, WRITTEN) or (isinstance(node, ast.Compare) and len(node.ops) > 1)
        for node in nodes
    ):
        return 'it of fields, like (af.col.cents > 1) & (af.col.user == "ann")'
    for node in nodes:
        if isinstance(node, ast.Name):
            node.id = f"af.col.{node.id}"
    return ast.unparse(tree)


def as_select(given: Sequence[Any]) -> str:
    """Returns, as text, a call of `select` with names for the columns in `given`, which were passed
    without names.
    """
    found = [column_names(one)[0] if isinstance(one, Column) else one for one in given]
    if len(given) == 1 and is_expression(found[0]):
        return f"select(value={found[0]!r})"
    names = [name for name in found if isinstance(name, str)]
    if len(names) < len(found):
        return "select(user=af.col.user)"
    if all(name.isidentifier() and not iskeyword(name) for name in names):
        return f"select({', '.join(f'{name}=af.col.{name}' for name in names)})"
    return f"select({{{', '.join(f'{name!r}: af.col({name!r})' for name in names)}}})"


def sink_hint(given: Any) -> str:
    """Returns a hint on what to pass to `sink` instead of `given`.

    The hint is empty if `given` is a sink, or if there is no good guess.
    """
    if hasattr(given, "writer"):
        return ""
    return place_hint(given)


def is_table(what: object) -> bool:
    """Returns whether `what` is a table of one of the libraries in `TABLES`."""
    return _named(what) in TABLES


def hint_of_table(what: object) -> str:
    """Returns, as text, the call that reads the rows of the table `what`."""
    return TABLES[_named(what)]


def _named(what: object) -> tuple[str, str]:
    return type(what).__module__.partition(".")[0], type(what).__name__


def reader_hint(path: str | os.PathLike[Any] | bytes) -> str:
    """Returns, as text, the call that reads or writes files, chosen by the suffix of `path`."""
    text = os.fsdecode(path)
    stem, suffix = os.path.splitext(text.lower())
    if suffix in COMPRESSED:
        suffix = os.path.splitext(stem)[1]
    more = ', delimiter="\\t"' if suffix == ".tsv" else ""
    return f"af.io.{BY_SUFFIX.get(suffix, 'lines')}({text!r}{more})"


def place_hint(given: object) -> str:
    """Returns a hint on what to pass to `sink` instead of `given`; empty if there is no good
    guess.
    """
    if isinstance(given, (str, os.PathLike)):
        return (
            f"; to write part files into a directory of that name write sink({reader_hint(given)})"
        )
    if hasattr(given, "discover"):
        return "; it can only be read: it stands in flow.source(...)"
    if isinstance(given, list):
        return (
            "; to gather the elements use `await stream.collect()`, or give the method that takes "
            "one: rows.append"
        )
    if callable(getattr(given, "put_nowait", None)):
        return "; to put the elements into a queue of asyncio write sink(af.io.queue(queue))"
    if callable(getattr(given, "write", None)):
        return (
            "; for standard output write sink(af.io.stdout()), for files "
            "sink(af.io.lines(directory))"
        )
    return ""


F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type[Any])

_BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def explained(function: F, name: str | None = None) -> F:
    """Wraps `function`, so that wrong arguments raise a more helpful TypeError.

    `name` is the name in error messages, by default the name of the function.
    """

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            # No frame is below this one, so the call itself raised the error, not the function's
            # body.
            if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                raise
            raise TypeError(
                _explanation(function, name or function.__name__, args, kwargs) or str(error)
            ) from None

    return call  # type: ignore[return-value]  # It takes what `function` takes.


def hinted(hint: Callable[[Mapping[str, Any]], str | None]) -> Callable[[F], F]:
    """Returns a decorator that sets the function `hint` of an `explained` function. `hint` is
    called with the unknown arguments and their values.

    The result of `hint` replaces the list of parameters in the error. None means that there is no
    hint.
    """

    def mark(function: F) -> F:
        function._aioflow_hint = hint  # type: ignore[attr-defined]
        return function

    return mark


def explained_methods(cls: C) -> C:
    """Returns `cls` with `explained` applied to its public methods and its constructor.

    Leaves `async def` methods as they are, because callers may check whether a method is `async
    def`.
    """
    for name, method in list(vars(cls).items()):
        if (
            inspect.isfunction(method)
            and (name == "__init__" or not name.startswith("_"))
            and not inspect.iscoroutinefunction(method)
        ):
            setattr(cls, name, explained(method, cls.__name__ if name == "__init__" else name))
        elif isinstance(method, (staticmethod, classmethod)) and not name.startswith("_"):
            setattr(cls, name, type(method)(explained(method.__func__)))
    return cls


def _explanation(
    function: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> str | None:
    """Returns an error message about the wrong arguments `args` and `kwargs` and the right ones.

    Returns None if Python's own message is as good.
    """
    parameters = list(inspect.signature(function).parameters.values())
    if parameters and parameters[0].name in ("self", "cls"):
        parameters, args = parameters[1:], args[1:]
    by_name = [parameter.name for parameter in parameters if parameter.kind in _BY_NAME]
    by_place = [parameter.name for parameter in parameters if parameter.kind in _BY_PLACE]
    takes = ", ".join(_shown(parameter) for parameter in parameters) or "nothing"
    kinds = {parameter.kind for parameter in parameters}
    any_name, any_number = (
        inspect.Parameter.VAR_KEYWORD in kinds,
        inspect.Parameter.VAR_POSITIONAL in kinds,
    )
    strange = (
        {}
        if any_name
        else {given: value for given, value in kwargs.items() if given not in by_name}
    )
    if strange:
        unknown = next(iter(strange))
        hint = getattr(function, "_aioflow_hint", None)
        if hint is not None and (said := hint(strange)) is not None:
            return f"{name}() has no argument {unknown}=: {said}"
        return (
            f"{name}() has no argument {unknown}={did_you_mean(unknown, by_name, '{}=') or ''}; "
            f"it takes {takes}"
        )
    if len(args) > len(by_place) and not any_number:
        most = f"at most {len(by_place)}" if by_place else "no"
        return (
            f"{name}() takes {most} argument{'s' * (len(by_place) > 1)} without a name, got "
            f"{len(args)}; it takes {takes}"
        )
    missing = [
        parameter.name
        for place, parameter in enumerate(parameters)
        if parameter.kind in (*_BY_PLACE, *_BY_NAME)
        and parameter.default is parameter.empty
        and parameter.name not in kwargs
        if parameter.name not in by_place or place >= len(args)
    ]
    return f"{name}() needs {' and '.join(missing)}; it takes {takes}" if missing else None


def _shown(parameter: inspect.Parameter) -> str:
    """Returns a parameter as it is written in a call."""
    match parameter.kind:
        case inspect.Parameter.VAR_KEYWORD:
            return f"**{parameter.name}"
        case inspect.Parameter.VAR_POSITIONAL:
            return f"*{parameter.name}"
        case inspect.Parameter.KEYWORD_ONLY:
            return f"{parameter.name}="
    return parameter.name


def nearest_method(of: type, name: str) -> str:
    """Returns the end of an error message, which names the public method of class `of` whose name
    is closest to `name`.

    Returns an empty string for private names, because users do not write these.
    """
    if name.startswith("_"):  # Copying, pickling and introspection ask for these, and often.
        return ""
    return did_you_mean(name, [one for one in dir(of) if not one.startswith("_")])


def no_such_method(of: object, name: str, remedy: str = "") -> AttributeError:
    """Returns an AttributeError for the missing attribute `name` of `of`, with Python's usual text,
    followed by `remedy`.
    """
    words = f"{type(of).__name__!r} object has no attribute {name!r}{remedy}"
    # If an error has a name and an object, Python adds the most similar attribute. After a remedy
    # that is one hint too many. Python fills in missing ones, so both are None here.
    return (
        AttributeError(words, name=None, obj=None)
        if remedy
        else AttributeError(words, name=name, obj=of)
    )
