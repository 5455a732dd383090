"""Connectors: one function for each system, loaded on demand.

If a system can be both read and written, the object that the function returns can be passed to
`flow.source(...)` and to `.sink(...)`. Importing this package loads no connector and no client
library.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aioflow.io import formats
    from aioflow.io.brokers.kafka_topics import kafka
    from aioflow.io.brokers.mqtt_topics import mqtt
    from aioflow.io.brokers.nats_streams import nats
    from aioflow.io.brokers.rabbitmq_queues import rabbitmq
    from aioflow.io.brokers.redis_streams import redis
    from aioflow.io.capture.mysql_change_source import mysql_changes
    from aioflow.io.capture.postgres_catalog import drop_postgres_slot
    from aioflow.io.capture.postgres_change_source import postgres_changes
    from aioflow.io.files.arrow_files import arrow, parquet
    from aioflow.io.files.csv_files import csv
    from aioflow.io.files.json_files import jsonl
    from aioflow.io.files.line_files import lines
    from aioflow.io.files.parts import RollPolicy
    from aioflow.io.formats.registry import SchemaRegistry
    from aioflow.io.generating import datagen
    from aioflow.io.hybrid_source import HybridEnd, hybrid
    from aioflow.io.lakes.delta_tables import delta
    from aioflow.io.lakes.iceberg_tables import iceberg
    from aioflow.io.pushing import push
    from aioflow.io.queues import queue
    from aioflow.io.sockets import socket
    from aioflow.io.standard_output import blackhole, stdout
    from aioflow.io.tables.mysql_tables import mysql
    from aioflow.io.tables.postgres_tables import postgres
    from aioflow.io.tables.sqlite_tables import sqlite
    from aioflow.io.web.http_client import http, sse
    from aioflow.io.web.webhooks import webhook
    from aioflow.io.web.websockets import websocket
    from aioflow.spark.bridge.connector import spark

__all__ = [
    "HybridEnd",
    "RollPolicy",
    "SchemaRegistry",
    "arrow",
    "blackhole",
    "csv",
    "datagen",
    "delta",
    "drop_postgres_slot",
    "formats",
    "http",
    "hybrid",
    "iceberg",
    "jsonl",
    "kafka",
    "lines",
    "mqtt",
    "mysql",
    "mysql_changes",
    "nats",
    "parquet",
    "postgres",
    "postgres_changes",
    "push",
    "queue",
    "rabbitmq",
    "redis",
    "socket",
    "spark",
    "sqlite",
    "sse",
    "stdout",
    "webhook",
    "websocket",
]

_MODULES = {
    "arrow": "files.arrow_files",
    "blackhole": "standard_output",
    "csv": "files.csv_files",
    "datagen": "generating",
    "delta": "lakes.delta_tables",
    "drop_postgres_slot": "capture.postgres_catalog",
    "http": "web.http_client",
    "hybrid": "hybrid_source",
    "iceberg": "lakes.iceberg_tables",
    "jsonl": "files.json_files",
    "kafka": "brokers.kafka_topics",
    "lines": "files.line_files",
    "mqtt": "brokers.mqtt_topics",
    "mysql": "tables.mysql_tables",
    "mysql_changes": "capture.mysql_change_source",
    "nats": "brokers.nats_streams",
    "parquet": "files.arrow_files",
    "postgres": "tables.postgres_tables",
    "postgres_changes": "capture.postgres_change_source",
    "push": "pushing",
    "queue": "queues",
    "rabbitmq": "brokers.rabbitmq_queues",
    "redis": "brokers.redis_streams",
    "socket": "sockets",
    "spark": "aioflow.spark.bridge.connector",
    "sqlite": "tables.sqlite_tables",
    "sse": "web.http_client",
    "stdout": "standard_output",
    "webhook": "web.webhooks",
    "websocket": "web.websockets",
    "HybridEnd": "hybrid_source",
    "RollPolicy": "files.parts",
    "SchemaRegistry": "formats.registry",
}
"""Maps each connector function, and each class for `roll=` and `registry=`, to its module.

No module has the name of a function, because importing the module would replace the function.
`spark` is in a higher layer, beside the Spark session that it needs. This package imports that
module only when a program uses the connector.
"""


def __getattr__(name: str) -> Any:
    if name == "formats":  # A package, not a function in one.
        return importlib.import_module("aioflow.io.formats")
    module = _MODULES.get(name)
    if module is None:
        from aioflow.core.errors import did_you_mean

        hint = did_you_mean(name, __all__, "af.io.{}(...)")
        connectors = ", ".join(one for one in _MODULES if one.islower())
        raise AttributeError(
            f"aioflow.io has no connector {name!r}, expected one of {connectors}{hint}"
        )
    path = module if module.startswith("aioflow.") else f"aioflow.io.{module}"
    return getattr(importlib.import_module(path), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
