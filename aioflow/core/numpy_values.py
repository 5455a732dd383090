"""Converts arrays and scalars of numpy to plain parts, and back. numpy is optional: this module
does not import it before it meets such a value.

A value is three parts: its dtype as numpy writes it (`"<f8"`, byte order included), its shape (None
for a scalar) and its items in C order. The text of a `numpy.str_` and the bytes of a `numpy.bytes_`
have no such dtype, because a dtype of fixed width drops trailing zeros: they are `"U"` and `"S"`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from aioflow.core.errors import ValueNotSupported

__all__ = ["from_parts", "is_of_numpy", "parts"]

_KINDS = "biufcmMSU"
"""Kinds of dtype whose items are their bytes: numbers, times and text; not objects, nor records."""


def is_of_numpy(kind: type[Any]) -> bool:
    """Returns whether `kind` is the array type of numpy or one of its scalar types."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and (kind is numpy.ndarray or issubclass(kind, numpy.generic))


def parts(value: Any) -> tuple[str, list[int] | None, bytes]:
    """Returns dtype, shape and items of an array or scalar. Raises TypeNotSupported."""
    numpy = _numpy()
    kind, dtype = type(value), value.dtype
    if kind is numpy.ndarray:
        if dtype.kind not in _KINDS:
            raise ValueNotSupported(
                f"a numpy array of dtype {dtype} cannot travel: use a dtype of numbers, times or "
                "text, or array.tolist()"
            )
        return dtype.str, list(value.shape), value.tobytes()
    if kind is numpy.str_:
        return "U", None, str.encode(value, "utf-8", "surrogatepass")
    if kind is numpy.bytes_:
        return "S", None, bytes(value)
    if dtype.kind not in _KINDS or numpy.dtype(dtype.str).type is not kind:
        raise ValueNotSupported(
            f"a numpy scalar of dtype {dtype!r} cannot travel: call .item() on it"
        )
    return dtype.str, None, value.tobytes()


def from_parts(dtype_text: str, shape: list[int] | None, content: bytes) -> Any:
    """Returns the array, writable, or the scalar of `parts`.

    Raises ValueError, TypeError or ImportError.
    """
    numpy = _numpy()
    if shape is None and dtype_text == "U":
        return numpy.str_(content.decode("utf-8", "surrogatepass"))
    if shape is None and dtype_text == "S":
        return numpy.bytes_(content)
    dtype = numpy.dtype(dtype_text)
    if dtype.kind not in _KINDS or dtype.str != dtype_text:
        raise ValueError(f"dtype {dtype_text!r} is not part of the format")
    if shape is None:
        (scalar,) = numpy.frombuffer(content, dtype)
        return scalar
    if dtype.itemsize == 0 or 0 in shape:  # Nothing to read, and no memory to take.
        return numpy.empty(shape, dtype)
    return numpy.frombuffer(content, dtype).reshape(shape).copy()


def _numpy() -> ModuleType:
    # The one module that is imported for the sake of a value, by a name that is written here, not
    # in the value.
    import numpy

    return numpy
