"""Errors cross as data: rebuilt where the class is loaded and says the same, a RemoteError otherwise, never a pickle."""

from __future__ import annotations

import asyncio
import json
import pickle
import sys
import types
from typing import Any

import pytest

from aioflow.core.errors import ProducerFailed, RemoteError
from aioflow.core.serializers import Codec
from aioflow.protocol.errors import RemoteTraceback, describe_error, rebuild_error
from aioflow.protocol.framing import FrameType
from aioflow.protocol.messages import ErrorResponse, decode_message, message_body

CODEC = Codec()


class Plain(Exception):
    pass


class TwoArguments(Exception):
    def __init__(self, code: int, reason: str) -> None:
        super().__init__(code, reason)
        self.code = code

    def __str__(self) -> str:
        return f"code {self.code}"


class Rewritten(Exception):
    """`args` are not what its constructor takes."""

    def __init__(self, left: int, right: int) -> None:
        super().__init__(f"{left} is not {right}")


class Doubled(Exception):
    def __init__(self, message: str) -> None:
        super().__init__(f"<{message}>")


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")


def crossed(error: BaseException) -> Exception:
    content = message_body(describe_error(error, CODEC))
    response = decode_message(FrameType.ERROR_RESPONSE, content)
    assert isinstance(response, ErrorResponse)
    return rebuild_error(response, CODEC)


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


@pytest.mark.parametrize(
    "error",
    [
        ValueError("no"),
        ValueError(),
        KeyError("x"),
        OSError(2, "not here"),
        FileNotFoundError(2, "not here", "a.txt"),
        FileExistsError(17, "there", "a.txt", None, "b.txt"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
        ZeroDivisionError("division by zero"),
        Plain(1, "two", (3, None)),
        TwoArguments(7, "because"),
        ProducerFailed("gone"),
        json.JSONDecodeError("bad", "doc", 1),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_whose_class_is_loaded_is_rebuilt(error: Exception) -> None:
    rebuilt = crossed(error)
    assert type(rebuilt) is type(error)
    assert rebuilt.args == error.args
    assert str(rebuilt) == str(error)


def test_what_an_error_keeps_beside_its_args_comes_along() -> None:
    """`open` and `json.loads` in a function raise what their callers look for: a class, and where it was."""
    missing = crossed(FileNotFoundError(2, "not here", "a.txt"))
    assert isinstance(missing, FileNotFoundError)
    assert (missing.filename, missing.filename2) == ("a.txt", None)
    moved = crossed(FileExistsError(17, "there", "a.txt", None, "b.txt"))
    assert isinstance(moved, FileExistsError)
    assert (moved.filename, moved.filename2) == ("a.txt", "b.txt")
    malformed = crossed(json.JSONDecodeError("bad", "doc", 1))
    assert isinstance(malformed, json.JSONDecodeError)
    assert (malformed.doc, malformed.pos) == ("doc", 1)


class ByHandle(Exception):
    """Tells pickle of what it holds."""

    def __init__(self, text: str, handle: Any = None) -> None:
        super().__init__(text)
        self.handle = handle

    def __reduce__(self) -> tuple[Any, ...]:
        return ByHandle, (self.args[0], self.handle)


class NotForPickle(Exception):
    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("not for pickle")


@pytest.mark.parametrize(
    "error",
    [ByHandle("refused", object()), ByHandle("refused", "x" * 100_000), NotForPickle("refused")],
    ids=["what no codec knows", "too much", "nothing"],
)
def test_an_error_that_tells_pickle_what_cannot_travel_is_rebuilt_of_its_args(error: Exception) -> None:
    rebuilt = crossed(error)
    assert type(rebuilt) is type(error)
    assert rebuilt.args == ("refused",)


def test_the_remote_traceback_and_the_notes_come_along() -> None:
    error = raised(ValueError("no"))
    error.add_note("aioflow: in operator count-1")
    rebuilt = crossed(error)
    assert rebuilt.__notes__ == ["aioflow: in operator count-1"]
    assert isinstance(rebuilt.__cause__, RemoteTraceback)
    assert "in raised" in str(rebuilt.__cause__)
    assert "ValueError: no" in str(rebuilt.__cause__)


@pytest.mark.parametrize("error", [Rewritten(1, 2), Doubled("x")], ids=lambda error: type(error).__name__)
def test_an_error_that_would_say_something_else_is_a_remote_error(error: Exception) -> None:
    rebuilt = crossed(error)
    assert isinstance(rebuilt, RemoteError)
    assert rebuilt.type_name.endswith(type(error).__qualname__)
    assert str(rebuilt).endswith(f": {error}")


def test_a_class_that_is_not_loaded_is_a_remote_error_and_nothing_is_imported() -> None:
    name = "this_module_is_nowhere"
    arguments = CODEC.encode_batch(["no"], owner="")
    response = ErrorResponse(type_name=f"{name}:Oops", message="no", traceback_text="File x", arguments=arguments)
    before = set(sys.modules)
    rebuilt = rebuild_error(response, CODEC)
    assert isinstance(rebuilt, RemoteError)
    assert str(rebuilt) == f"{name}.Oops: no"
    assert rebuilt.traceback_text == "File x"
    assert set(sys.modules) == before


def test_a_module_that_imports_lazily_is_not_made_to() -> None:
    module = types.ModuleType("lazy_module_of_this_test")
    asked: list[str] = []
    module.__getattr__ = lambda name: asked.append(name)  # type: ignore[method-assign]
    sys.modules[module.__name__] = module
    try:
        rebuilt = rebuild_error(ErrorResponse(type_name=f"{module.__name__}:Oops", message="", arguments=b"\x01\x00\x90"), CODEC)
    finally:
        del sys.modules[module.__name__]
    assert isinstance(rebuilt, RemoteError)
    assert asked == []


@pytest.mark.parametrize(
    "type_name",
    [
        "builtins:SystemExit",
        "builtins:KeyboardInterrupt",
        "asyncio.exceptions:CancelledError",
        "builtins:eval",
        "os:system",
        "builtins:int",
        ":",
        "x",
    ],
)
def test_only_exceptions_are_ever_called(type_name: str) -> None:
    response = ErrorResponse(type_name=type_name, message="0", arguments=CODEC.encode_batch(["0"], owner=""))
    assert isinstance(rebuild_error(response, CODEC), RemoteError)


def test_a_cancellation_of_another_process_does_not_cancel_here() -> None:
    rebuilt = crossed(asyncio.CancelledError())
    assert isinstance(rebuilt, RemoteError)
    assert rebuilt.type_name == "asyncio.exceptions.CancelledError"


def test_an_error_over_two_hops_stays_what_it_was() -> None:
    class Local(Exception):
        pass

    once = crossed(raised(Local("no")))
    twice = crossed(once)
    assert isinstance(once, RemoteError)
    assert isinstance(twice, RemoteError)
    assert (twice.type_name, str(twice), twice.traceback_text) == (once.type_name, str(once), once.traceback_text)


@pytest.mark.parametrize(
    "error",
    [
        Unprintable("x"),
        Plain(object()),
        Plain("\ud800"),
        ExceptionGroup("many", [ValueError("a"), KeyError("b")]),
        Plain("x" * 1_000_000),
    ],
    ids=["unprintable", "cannot travel", "surrogate", "group", "long"],
)
def test_describing_an_error_never_fails(error: Exception) -> None:
    error.__notes__ = "not a list"  # type: ignore[attr-defined]
    rebuilt = crossed(raised(error))
    assert isinstance(rebuilt, Exception)
    assert len(str(rebuilt)) < 70_000


def test_nothing_is_unpickled(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("unpickled")

    monkeypatch.setattr(pickle, "loads", refuse)
    payload = pickle.dumps(ValueError("x"))
    rebuilt = rebuild_error(ErrorResponse(type_name="builtins:ValueError", message="x", arguments=payload), CODEC)
    assert isinstance(rebuilt, RemoteError)
