"""Formats for message bodies: Avro, Protobuf and JSON, each with a schema, and Debezium change
events in JSON.

Each function returns a `Format`, which every broker connector accepts as `format=`. Importing this
package loads no client library.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aioflow.io.formats.avro_format import avro
    from aioflow.io.formats.debezium_format import debezium_json
    from aioflow.io.formats.format import Format
    from aioflow.io.formats.json_format import json_schema
    from aioflow.io.formats.protobuf_format import protobuf

__all__ = ["Format", "avro", "debezium_json", "json_schema", "protobuf"]

_MODULES = {
    "Format": "format",
    "avro": "avro_format",
    "debezium_json": "debezium_format",
    "json_schema": "json_format",
    "protobuf": "protobuf_format",
}
"""Maps each name of this package to its module. No module has the name of a function, because
importing the module would replace the function.
"""


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        from aioflow.core.errors import did_you_mean

        hint = did_you_mean(name, __all__, "af.io.formats.{}(...)")
        raise AttributeError(
            f"aioflow.io.formats has no format {name!r}, expected avro, debezium_json, json_schema "
            f"or protobuf{hint}"
        )
    return getattr(importlib.import_module(f"aioflow.io.formats.{module}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
