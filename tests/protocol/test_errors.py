"""Errors cross as data: rebuilt where the class is loaded and says the same, a RemoteError
otherwise, never a pickle.
"""

from __future__ import annotations

import asyncio
import json
import pickle
import sys
import types
from dataclasses import dataclass
from typing import Any

import pytest

from aioflow.core.errors import ProducerFailed, RemoteError, note_once
from aioflow.core.wire.serializers import Codec
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


@dataclass(frozen=True)
class Frozen(Exception):
    code: int


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
        Frozen(7),
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


def test_a_frozen_error_is_rebuilt_with_its_notes_and_traceback() -> None:
    error = raised(Frozen(7))
    note_once(error, "in operator 'count'")
    rebuilt = crossed(error)
    assert rebuilt == Frozen(7)
    assert rebuilt.__notes__ == ["aioflow: in operator 'count'"]
    assert isinstance(rebuilt.__cause__, RemoteTraceback)


def test_attributes_of_an_error_beside_its_args_travel() -> None:
    """`open` and `json.loads` in a function raise what their callers look for: a class, and
    where it was.
    """
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
def test_an_error_that_tells_pickle_what_cannot_travel_is_rebuilt_of_its_args(
    error: Exception,
) -> None:
    rebuilt = crossed(error)
    assert type(rebuilt) is type(error)
    assert rebuilt.args == ("refused",)


def noted(error: Exception, note: str) -> Exception:
    error.add_note(note)
    return error


def test_a_group_arrives_with_its_members() -> None:
    """For example from a TaskGroup in a function: `except*` finds its members."""
    inner = ExceptionGroup("inner", [FileNotFoundError(2, "not here", "a.txt"), Plain(object())])
    group = crossed(raised(ExceptionGroup("many", [noted(ValueError("a"), "of the first"), inner])))
    assert isinstance(group, ExceptionGroup)
    assert str(group) == "many (2 sub-exceptions)"
    first, second = group.exceptions
    assert (repr(first), first.__notes__) == ("ValueError('a')", ["of the first"])
    assert isinstance(second, ExceptionGroup)
    missing, strange = second.exceptions
    assert isinstance(missing, FileNotFoundError) and missing.filename == "a.txt"
    assert isinstance(strange, RemoteError) and strange.type_name.endswith("Plain")
    assert "KeyError" not in str(group.__cause__) and "FileNotFoundError" in str(group.__cause__), (
        "the traceback shows the members"
    )


def test_a_group_of_more_than_can_travel_keeps_the_first_and_says_so() -> None:
    group = crossed(ExceptionGroup("many", [ValueError("x" * 1_000, i) for i in range(1_000)]))
    assert isinstance(group, ExceptionGroup)
    assert [error.args[1] for error in group.exceptions] == list(range(len(group.exceptions)))
    assert 10 < len(group.exceptions) < 64
    assert group.__notes__ == [
        f"{1_000 - len(group.exceptions)} of its 1000 errors are left out here: they take too much"
    ]


def nested(depth: int) -> Exception:
    error: Exception = ValueError("at the bottom")
    for _ in range(depth):
        error = ExceptionGroup("nested", [error])
    return error


@pytest.mark.parametrize(
    ("group", "arrives"),
    [
        (nested(10), True),
        (nested(400), True),
        (ExceptionGroup("one", [ValueError("x" * 60_000)]), True),
        (ExceptionGroup("x" * 60_000, [ValueError("a")]), True),
        (ExceptionGroup("x" * 60_000, [ValueError("\U0001f600" * 60_000)]), False),
        (BaseExceptionGroup("ends here", [KeyboardInterrupt()]), False),
    ],
)
def test_groups_of_any_depth_and_size_cross(group: BaseException, arrives: bool) -> None:
    rebuilt = crossed(group)
    assert isinstance(rebuilt, ExceptionGroup if arrives else RemoteError)


def test_a_group_whose_members_are_no_messages_is_a_remote_error() -> None:
    for body in (b"", b"\x00", b"\x95\x01\x02\x03\x04\x05", 7):
        response = ErrorResponse(
            type_name="builtins:ExceptionGroup",
            message="m",
            arguments=CODEC.encode_batch(["m", body], owner=""),
        )
        assert isinstance(rebuild_error(response, CODEC), RemoteError)


def malformed(document: str) -> Exception:
    with pytest.raises(json.JSONDecodeError) as caught:
        json.loads(document)
    return caught.value


@pytest.mark.parametrize("behind", [0, 1_000_000])
def test_an_error_about_a_long_document_keeps_what_is_around_the_place(behind: int) -> None:
    original = malformed('{"a": ' + " " * 100 + "x" * 100_000 + "y" * behind)
    rebuilt = crossed(original)
    assert isinstance(rebuilt, json.JSONDecodeError)
    assert str(rebuilt) == str(original), (
        "all that is in front of the place came along, so its position is the same"
    )
    assert rebuilt.doc[rebuilt.pos] == "x" and len(rebuilt.doc) == 8_192
    assert rebuilt.__notes__ == [
        f"only 0 to 8192 of the {100_106 + behind} that it is about came along; about all of them "
        f"it says: {original}"
    ]


def test_an_error_far_within_a_long_document_says_where_it_was() -> None:
    original = malformed("[" + "1,\n" * 50_000 + "oops" + "1,\n" * 50_000)
    rebuilt = crossed(original)
    assert isinstance(rebuilt, json.JSONDecodeError)
    assert rebuilt.doc[rebuilt.pos : rebuilt.pos + 4] == "oops"
    assert rebuilt.__notes__[0].endswith(
        "about all of them it says: Expecting value: line 50001 column 1 (char 150001)"
    )


@pytest.mark.parametrize(
    "error",
    [
        UnicodeDecodeError("utf-8", b"a" * 90_000 + b"\xff" + b"b" * 90_000, 90_000, 90_001, "bad"),
        UnicodeEncodeError("ascii", "a" * 90_000 + "\xe9" + "b" * 90_000, 90_000, 90_001, "bad"),
    ],
)
def test_an_error_about_one_byte_of_many_keeps_those_around_it(
    error: UnicodeDecodeError | UnicodeEncodeError,
) -> None:
    rebuilt = crossed(error)
    assert isinstance(rebuilt, type(error))
    assert rebuilt.object[rebuilt.start : rebuilt.end] == error.object[error.start : error.end]
    assert f"about all of them it says: {error}" in rebuilt.__notes__[0]


class Placed(json.JSONDecodeError):
    """An error with a constructor of its own."""

    def __init__(self, document: str, place: int) -> None:
        super().__init__("wrong", document, place)


def test_an_error_derived_from_one_about_a_document_that_cannot_be_cut_is_a_remote_error() -> None:
    rebuilt = crossed(Placed("x" * 100_000, 3))
    assert isinstance(rebuilt, RemoteError) and str(rebuilt).endswith(
        "wrong: line 1 column 4 (char 3)"
    )


@pytest.mark.parametrize(
    "error", [ValueError("x" * 20_000), ValueError("x" * 100_000), KeyError("x" * 100_000)]
)
def test_an_error_of_many_words_stays_of_its_class(error: Exception) -> None:
    rebuilt = crossed(error)
    assert type(rebuilt) is type(error)
    assert str(rebuilt).startswith(str(error)[:16_000])


def test_the_remote_traceback_and_the_notes_come_along() -> None:
    error = raised(ValueError("no"))
    error.add_note("aioflow: in operator count-1")
    rebuilt = crossed(error)
    assert rebuilt.__notes__ == ["aioflow: in operator count-1"]
    assert isinstance(rebuilt.__cause__, RemoteTraceback)
    assert "in raised" in str(rebuilt.__cause__)
    assert "ValueError: no" in str(rebuilt.__cause__)


@pytest.mark.parametrize(
    "error", [Rewritten(1, 2), Doubled("x")], ids=lambda error: type(error).__name__
)
def test_an_error_that_would_say_something_else_is_a_remote_error(error: Exception) -> None:
    rebuilt = crossed(error)
    assert isinstance(rebuilt, RemoteError)
    assert rebuilt.type_name.endswith(type(error).__qualname__)
    assert str(rebuilt).endswith(f": {error}")


def test_a_class_that_is_not_loaded_is_a_remote_error_and_nothing_is_imported() -> None:
    name = "this_module_is_nowhere"
    arguments = CODEC.encode_batch(["no"], owner="")
    response = ErrorResponse(
        type_name=f"{name}:Oops", message="no", traceback_text="File x", arguments=arguments
    )
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
        rebuilt = rebuild_error(
            ErrorResponse(
                type_name=f"{module.__name__}:Oops", message="", arguments=b"\x01\x00\x90"
            ),
            CODEC,
        )
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
    response = ErrorResponse(
        type_name=type_name, message="0", arguments=CODEC.encode_batch(["0"], owner="")
    )
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
    assert (twice.type_name, str(twice), twice.traceback_text) == (
        once.type_name,
        str(once),
        once.traceback_text,
    )


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
    rebuilt = rebuild_error(
        ErrorResponse(type_name="builtins:ValueError", message="x", arguments=payload), CODEC
    )
    assert isinstance(rebuilt, RemoteError)
