"""Turns errors of Spark into one short Python error with the cause, without pages of Java frames.

Py4J and PySpark raise errors whose text has several nested Java stack traces. The short error names
the innermost cause in a sentence. If a Python function failed on an executor, the sentence has the
type, the message and the source line of the function's error. The traces are kept as text.
"""

from __future__ import annotations

import re
from typing import Any

from aioflow.core.errors import AioflowError, Broken

__all__ = ["SparkError", "SparkGone", "translated"]

CAUSES_MAX = 20
"""Maximum number of causes that are followed, because a chain of causes may be cyclic."""

MESSAGE_CHARS_MAX = 2_000
"""Maximum length of a message in characters. Some messages of Spark contain a whole query plan."""

_NO_MORE = ("Driver stacktrace", "JVM stacktrace", "== SQL", "Caused by:", "'")
"""Beginnings of the lines at which a message is cut off. Stack frames, the query or the query's
plan follow from such a line on.
"""

_JAVA_CAUSE = re.compile(r"^(?:Caused by)?: ([\w.$]+): (.+)$", re.MULTILINE)
"""Pattern of the lines of a Java stack trace that name an error, with its class and message."""

_PYTHON_ERROR = re.compile(r"^([A-Za-z_][\w.]*)(?:: (.*))?$")


class SparkError(AioflowError):
    """Spark cannot start, or a call, a query or a job of Spark has failed.

    `condition` is Spark's name of the error ("TABLE_OR_VIEW_NOT_FOUND"), empty if Spark gave none.
    `trace` is the stack trace as text, of Java or of the Python function that failed on an
    executor.
    """

    def __init__(self, message: str, *, condition: str = "", trace: str = "") -> None:
        super().__init__(message)
        self.condition = condition
        self.trace = trace


class SparkGone(SparkError, Broken):
    """The Java process of Spark has ended, or can no longer be reached.

    The next call starts another Java process.
    """


def translated(error: BaseException) -> BaseException:
    """Returns a short `SparkError` for an error that comes from Spark, otherwise `error` itself.

    It must be called in a thread, because it sends requests to the JVM and blocks.
    """
    from py4j.protocol import Py4JError, Py4JJavaError, Py4JNetworkError
    from pyspark.errors import PySparkException

    if isinstance(error, AioflowError):
        return error
    if isinstance(error, Py4JNetworkError):
        return SparkGone(
            "the Java process of Spark does not answer: it ended, or was ended; the next call "
            "starts another one"
        )
    try:
        if isinstance(error, Py4JJavaError):
            return _of_java(error.java_exception)
        if isinstance(error, PySparkException):
            origin = getattr(error, "_origin", None)
            if origin is not None:
                return _of_java(origin)
            text = getattr(error, "_desc", None) or getattr(error, "_message", None) or str(error)
            condition: Any = getattr(error, "getCondition", None) or error.getErrorClass  # 3.5
            return _of_text(
                str(text), condition() or "", str(getattr(error, "_stackTrace", "") or "")
            )
        if isinstance(error, Py4JError):
            return SparkError(f"Spark: {_short(str(error))}")
    except (Py4JNetworkError, ConnectionError):
        return SparkGone(
            "the Java process of Spark ended while it told what had failed; the next call starts "
            "another one"
        )
    return error


def _of_java(throwable: Any) -> SparkError:
    """Returns an error for a Java throwable. The message is taken from the innermost cause that has
    a message.
    """
    chain = [throwable]
    while len(chain) < CAUSES_MAX:
        cause = chain[-1].getCause()
        if cause is None or cause.equals(chain[-1]):
            break
        chain.append(cause)
    trace = _trace(throwable)
    condition = _condition(chain)
    for one in chain:
        if _class(one).endswith("PythonException"):
            return _of_python(str(one.getMessage()), condition, trace)
    last = next((one for one in reversed(chain) if one.getMessage()), chain[-1])
    return _of_text(str(last.getMessage() or _class(last)), condition, trace, _class(last))


def _of_text(text: str, condition: str, trace: str, class_name: str = "") -> SparkError:
    if "Traceback (most recent call last)" in text:
        return _of_python(text, condition, trace)
    text = text.strip()  # A message about a query begins with an empty line.
    condition = condition or _condition_in(text)
    name = class_name.rpartition(".")[2]
    # Spark's own exceptions begin with their condition in brackets, which says more than their
    # class.
    prefix = (
        f"{name}: "
        if name and not text.startswith("[") and not name.startswith(("Spark", "Analysis", "Parse"))
        else ""
    )
    return SparkError(f"Spark: {prefix}{_short(text)}", condition=condition, trace=trace)


def _of_python(text: str, condition: str, trace: str) -> SparkError:
    """Returns an error for a Python function that failed on an executor. `text` contains its
    traceback.
    """
    start = text.find("Traceback (most recent call last)")
    traceback = text[start:].rstrip() if start >= 0 else ""
    what = _last_line(traceback or text)
    if "Py4JJavaError" in what and (causes := _JAVA_CAUSE.findall(traceback)):
        # The function itself called Spark, like a function for foreachBatch. Before Spark 4.0 that
        # error is the last line.
        return _of_text(causes[-1][1], condition, trace, causes[-1][0])
    return SparkError(
        f"a function failed in Spark: {_short(what)}", condition=condition, trace=traceback or trace
    )


def _last_line(traceback: str) -> str:
    """Returns the line of a traceback that names the error.

    This is the last line that is not indented and looks like an error.
    """
    lines = [line for line in traceback.splitlines() if line and not line[0].isspace()]
    for line in reversed(lines):
        if _PYTHON_ERROR.match(line):
            return line
    return lines[-1] if lines else traceback


def _short(text: str) -> str:
    """Returns the message without Java frames and query plans, at most `MESSAGE_CHARS_MAX` long."""
    kept = []
    for line in text.strip().splitlines():
        if line.lstrip().startswith(("at ", "+- ")) or line.startswith(_NO_MORE):
            break
        kept.append(line)
    short = "\n".join(kept).strip() or text.strip()
    return short if len(short) <= MESSAGE_CHARS_MAX else f"{short[:MESSAGE_CHARS_MAX]} ..."


def _class(throwable: Any) -> str:
    return str(throwable.getClass().getName())


def _condition(chain: list[Any]) -> str:
    """Returns Spark's name of the error. The name is taken from the text of the error, because not
    every throwable has a method that returns it.
    """
    return next(
        filter(None, (_condition_in(str(one.getMessage() or "")) for one in reversed(chain))), ""
    )


def _condition_in(text: str) -> str:
    match = re.match(r"\s*\[([A-Z][A-Z0-9_.]+)\]", text)
    return "" if match is None else match[1]


def _trace(throwable: Any) -> str:
    from pyspark import SparkContext

    return str(getattr(SparkContext._jvm, "org.apache.spark.util.Utils").exceptionString(throwable))
