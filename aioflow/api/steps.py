"""Incomplete steps, and their errors if they are used like streams: a window without its function,
a join without `apply`.

`window(...).map(fn)` leaves out one step, and the error names that step. Awaiting or iterating over
such a step is an error too: it has no elements, because nothing runs yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Never

from aioflow.core.errors import did_you_mean

__all__ = ["HalfStream", "nearest_method", "no_such_method"]


class HalfStream:
    """Base of incomplete steps, which are no streams yet.

    A method that a step does not have raises an AttributeError that says what to write first.
    """

    completed_by: ClassVar[str] = ""
    """Call that makes the step a stream, for error messages."""
    elsewhere: ClassVar[Mapping[str, str]] = {}
    """Advice by the name of a method that users often look for here."""

    if not TYPE_CHECKING:  # Hidden from type checkers, which know all real methods.

        def __getattr__(self, name: str) -> Any:
            from aioflow.api.keyed import KeyedStream

            if name in self.elsewhere:
                remedy = f": write {self.elsewhere[name]}"
            elif hasattr(KeyedStream, name) and not name.startswith("_"):
                remedy = (
                    f": it is no stream yet; end it with {self.completed_by}, whose result has "
                    f"{name}"
                )
            else:
                remedy = nearest_method(type(self), name)
            raise no_such_method(self, name, remedy)

        def __await__(self) -> Never:
            self._refuse("awaited")

        def __iter__(self) -> Never:
            self._refuse("iterated over")

        __aiter__ = __iter__

        def _refuse(self, what: str) -> Never:
            raise TypeError(
                f"{type(self).__name__} is {what}: it is no stream yet; end it with "
                f"{self.completed_by}, and collect() that"
            )


def nearest_method(of: type, name: str) -> str:
    """Returns the end of a message that names the public method closest to `name`.

    Returns an empty string for private names, which no user wrote.
    """
    if name.startswith("_"):  # Copying, pickling and introspection ask for these, and often.
        return ""
    return did_you_mean(name, [one for one in dir(of) if not one.startswith("_")])


def no_such_method(of: object, name: str, remedy: str = "") -> AttributeError:
    """Returns an AttributeError with Python's usual text and `remedy`."""
    words = f"{type(of).__name__!r} object has no attribute {name!r}{remedy}"
    # Python adds the most similar attribute to an error that has a name and an object, which is one
    # hint too many after a remedy. Python fills both in if they are left out, so they are None.
    return (
        AttributeError(words, name=None, obj=None)
        if remedy
        else AttributeError(words, name=name, obj=of)
    )
