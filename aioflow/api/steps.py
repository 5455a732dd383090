"""Errors about a method that a step of a flow does not have."""

from __future__ import annotations

from aioflow.core.errors import did_you_mean

__all__ = ["nearest_method", "no_such_method"]


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
