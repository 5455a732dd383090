"""Lets programs read state without the classes of the program that wrote it.

A stand-in replaces a class that is not imported here. It is a frozen dataclass with the name and
the fields that were written, so writing it again gives what was read.
"""

from __future__ import annotations

import keyword
from collections.abc import Sequence
from dataclasses import make_dataclass
from typing import Any

from aioflow.core.type_registry import DEFAULT_TYPES, Assembler, TypeRegistry

__all__ = ["StandInTypes"]


class StandInTypes(TypeRegistry):
    """The types of this process, plus a stand-in for each dataclass that is not imported.

    Enums and registered types get no stand-in, because their fields are unknown.
    """

    def __init__(self) -> None:
        super().__init__(DEFAULT_TYPES)

    def assembler(self, name: str, fields: Sequence[str]) -> Assembler:
        """Returns the assembler of type `name`, of a stand-in if the class is not imported.

        Raises LookupError if the class is not imported and was no plain record.
        """
        if self._resolve(name) is None and fields and all(_is_field(field) for field in fields):
            module, _, qualname = name.rpartition(":")
            label = qualname.rpartition(".")[2]
            made: type[Any] = make_dataclass(
                label if label.isidentifier() else "Record", list(fields), frozen=True
            )
            made.__module__, made.__qualname__ = module, qualname
            self.register(made, name)
        return super().assembler(name, fields)


def _is_field(name: str) -> bool:
    return name.isidentifier() and not keyword.iskeyword(name)
