"""Checks the arguments of connectors when the user's program calls the connector.

Each check raises a GraphError that begins with `place`, the text of the user's call, and names the
argument. A malformed duration is a ValueError or TypeError, as in the rest of the library.

`on_error=` says how input that cannot be decoded is handled: it fails the job, is skipped, or goes
to a side output.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, KeysView, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec

from aioflow.core.errors import GraphError, MalformedInput, did_you_mean
from aioflow.core.functions import Failed, OutputTag
from aioflow.core.timeunits import to_seconds

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    from aioflow.core.timeunits import Duration
    from aioflow.operators.source import SourceContext

    T = TypeVar("T", default=Any)
else:
    from typing import TypeVar

    T = TypeVar("T")
"""Type of a connector's elements: Any, unless its call names a `type`."""

__all__ = [
    "one_or_more",
    "one_or_more_places",
    "MALFORMED",
    "Malformed",
    "OnError",
    "T",
    "check_host_and_port",
    "checked_columns",
    "checked_encoding",
    "checked_headers",
    "checked_on_error",
    "checked_options",
    "checked_seconds",
    "checked_text",
    "checked_whole",
    "require_columns",
]

PORT_MAX = 65_535


def checked_whole(
    value: Any, name: str, place: str, least: int = 1, most: int | None = None
) -> int:
    """Returns `value` if it is an int from `least` to `most`; `most` None means no maximum.
    Otherwise raises GraphError.
    """
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not is_whole or value < least or (most is not None and value > most):
        expected = (
            f"a whole number of at least {least}"
            if most is None
            else f"a whole number from {least} to {most}"
        )
        raise GraphError(f"{place}: {name} is {value!r}, expected {expected}")
    return int(value)


def checked_seconds(value: Duration, name: str, place: str, *, may_be_zero: bool = False) -> float:
    """Returns the duration `value` in seconds. Raises GraphError if it is negative, or 0 unless
    `may_be_zero`.
    """
    seconds = to_seconds(value, name)
    if seconds < 0 or (seconds == 0 and not may_be_zero):
        raise GraphError(
            f"{place}: {name} is {value!r}, expected "
            f"{'no negative time' if may_be_zero else 'more than nothing'}"
        )
    return seconds


def checked_text(value: Any, name: str, place: str) -> str:
    """Returns `value` if it is a non-empty text. Otherwise raises GraphError."""
    if not isinstance(value, str) or not value:
        raise GraphError(f"{place}: {name} is {value!r}, expected a text that is not empty")
    return value


def checked_encoding(value: Any, place: str) -> str:
    """Returns `value` if it is the name of a text encoding in which a line end is the same byte as
    in ASCII. Otherwise raises GraphError.
    """
    try:
        # utf-8-sig puts a byte order mark before a text, so only the end is compared.
        if "\r\n".encode(value).endswith(b"\r\n") and b"\r\n".decode(value) == "\r\n":
            return str(value)
        expected = "one whose line end is a single byte"
    except (LookupError, TypeError, ValueError, UnicodeError):
        expected = "one of text that Python knows"
    raise GraphError(f"{place}: encoding is {value!r}, expected {expected}")


def checked_columns(value: Sequence[str] | None, place: str) -> list[str] | None:
    """Returns a list of distinct column names, or None if `value` is None. Raises GraphError for
    any other value.
    """
    if value is None:
        return None
    given: object = value  # Callers may pass other types than the annotation says.
    if isinstance(given, KeysView):  # The keys of a dict have an order.
        given = list(given)
    if (
        isinstance(given, (str, bytes))
        or not isinstance(given, Sequence)
        or not given
        or not all(isinstance(one, str) for one in given)
    ):
        raise GraphError(f"{place}: columns is {given!r}, expected a list of names")
    names = list(given)
    twice = next((name for number, name in enumerate(names) if name in names[:number]), None)
    if twice is not None:
        raise GraphError(f"{place}: columns names {twice!r} twice, expected each column once")
    return names


def checked_options(value: Mapping[str, Any] | None, name: str, place: str) -> dict[str, Any]:
    """Returns the mapping `value` as a dict with text keys. Errors do not show its values, which
    may be secret.
    """
    given: object = {} if value is None else value
    if not isinstance(given, Mapping):
        raise GraphError(
            f"{place}: {name} is a {type(given).__name__}, expected a mapping of names to values"
        )
    if (strange := next((key for key in given if not isinstance(key, str)), None)) is not None:
        raise GraphError(
            f"{place}: the name {strange!r} in {name} is {type(strange).__name__}, expected str"
        )
    return dict(given)


def checked_headers(value: Mapping[str, str] | None, place: str) -> dict[str, str]:
    """Returns the HTTP headers `value` as a dict. Errors do not show their values, which may be
    secret.
    """
    headers = checked_options(value, "headers", place)
    for name, content in headers.items():
        if not isinstance(content, str):
            raise GraphError(
                f"{place}: the value of the header {name!r} in headers is "
                f"{type(content).__name__}, expected str"
            )
        if any(sign in name + content for sign in "\r\n\0"):
            raise GraphError(
                f"{place}: the value of the header {name!r} in headers is expected to be a text "
                "of one line"
            )
    return headers


def check_host_and_port(url: str, place: str, *, needs_host: bool = True) -> None:
    """Raises GraphError for a URL whose host or port is invalid or missing.

    The error does not show the URL, which may contain a password.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        detail = (
            "its port is no number from 1 to 65535"
            if "port" in str(error).lower()
            else "its host is malformed"
        )
        raise GraphError(f"{place}: the URL cannot be used: {detail}") from None
    if port == 0:
        raise GraphError(f"{place}: the URL cannot be used: its port is no number from 1 to 65535")
    if (needs_host and not host) or any(sign.isspace() for sign in parts.netloc):
        raise GraphError(f"{place}: the URL cannot be used: it has no host, or white space in it")


def require_columns(what: str) -> None:
    """Raises GraphError naming `what`, the connector, unless numpy and pyarrow are installed.
    Imports neither.
    """
    missing = [name for name in ("numpy", "pyarrow") if find_spec(name) is None]
    if missing:
        raise GraphError(f"{what} needs {' and '.join(missing)}: install aioflow[columns]")


OnError = str | OutputTag[Any]
"""What to do with a malformed element: "fail", "skip", or the tag of a side output, which then gets
the element as a `Failed` object.
"""

MALFORMED = (msgspec.MsgspecError, ValueError, RecursionError)
"""Errors raised for a malformed value: msgspec's errors, wrongly encoded text, numbers that are too
large, and values that are nested too deep.
"""

_BETWEEN = re.compile(r"\s*,\s*(?=\w+://|[^@]*$)")
"""Matches the commas between servers, but no comma inside a password."""

logger = logging.getLogger(__name__)


def checked_on_error(on_error: Any, connector: str) -> OnError:
    """Returns `on_error` if it is valid. Raises GraphError naming `connector`."""
    if isinstance(on_error, OutputTag) or (
        isinstance(on_error, str) and on_error in ("fail", "skip")
    ):
        return on_error
    hint = did_you_mean(on_error, ("fail", "skip"))
    raise GraphError(
        f"{connector}: on_error is {on_error!r}, expected 'fail', 'skip' or an OutputTag{hint}"
    )


class Malformed:
    """Handles the malformed elements of one reader according to `on_error`."""

    def __init__(self, ctx: SourceContext, on_error: OnError) -> None:
        self._ctx = ctx
        self._on_error = on_error
        self._errors = ctx.runtime.metrics.counter("numRecordsInErrors")
        self.skipped = 0

    @property
    def fails(self) -> bool:
        """Whether `report` raises."""
        return self._on_error == "fail"

    def report(self, value: bytes, message: str, error: Exception) -> None:
        """Reports a malformed element; `message` names the fault and its location.

        Raises MalformedInput if `on_error` is "fail".
        """
        if self._on_error == "fail":
            raise MalformedInput(
                f"{message}. To go on without such input give on_error='skip', or an OutputTag to "
                "collect it"
            ) from error
        self._errors.inc()
        if isinstance(self._on_error, OutputTag):
            runtime = self._ctx.runtime
            operator = getattr(runtime, "operator_name", runtime.task_name)
            self._ctx.side_output(
                self._on_error, Failed(value, message, type(error).__name__, operator, None)
            )
            return
        self.skipped += 1
        if self.skipped == 1:
            logger.warning("skipped malformed input, more is skipped in silence: %s", message)


def one_or_more(given: Any) -> list[Any]:
    """Returns the items of the iterable `given` as a list. If `given` is a text or is not iterable,
    it is the only item. The caller checks the types.
    """
    return list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [given]


def one_or_more_places(given: Any) -> list[Any]:
    """Returns `given` as a list of servers; a text may hold several servers, separated by commas.

    A comma before a later `@` is part of a password.
    """
    return [
        place
        for one in one_or_more(given)
        for place in (_BETWEEN.split(one) if isinstance(one, str) else [one])
    ]
