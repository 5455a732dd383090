"""Settings of a Spark session for workers: enough cores, no second attempts, and protected
secrets.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from aioflow.core.errors import NotAuthenticated
from aioflow.network.security import is_loopback
from aioflow.spark.failures import SparkError

__all__ = ["check_cores", "check_secrecy", "found_in", "worker_config"]

KEPT_FREE = 1
"""Number of cores left for other jobs of a shared session, which would wait for ever behind
tasks that do not end.
"""

_ENCRYPTION = ("spark.network.crypto.enabled", "spark.ssl.rpc.enabled")


def worker_config(given: Mapping[str, str], workers: int) -> dict[str, str]:
    """Returns the settings of a session only for workers, with `given` over the defaults."""
    ours = {
        # A worker that ends is replaced by a new one, in a process of its own.
        "spark.task.maxFailures": "1",
        "spark.python.worker.reuse": "false",
        # A standalone master gives an application all cores that it has, unless told otherwise.
        "spark.cores.max": str(workers * int(given.get("spark.task.cpus", "1"))),
    }
    return ours | dict(given)


def check_cores(
    master: str, config: Mapping[str, str], workers: int, *, shared: bool, cores: int | None = None
) -> None:
    """Raises SparkError if the session cannot hold this many workers.

    `cores` is the number of cores of a running session, if known.
    """
    if config.get("spark.speculation") == "true":
        raise SparkError(
            "spark.speculation is on: Spark would start workers a second time because they take "
            "long, and kill the first; set it to false"
        )
    each = int(config.get("spark.task.cpus", "1"))
    found = _cores_of(master, config) if cores is None else cores
    wanted = workers * each + (KEPT_FREE if shared else 0)
    if found is None or found >= wanted:
        return
    what = f"{workers} workers of {each} cores each" if each > 1 else f"{workers} workers"
    free = f" and {KEPT_FREE} must stay free for the other jobs of this session" if shared else ""
    raise SparkError(
        f"{master} has {found} cores, and {what} need {wanted}: each holds its core for as long "
        f"as the flow runs{free}; "
        "take fewer workers, or a master with more cores"
    )


def found_in(session: Any) -> tuple[int | None, dict[str, str]]:
    """Returns the number of cores of a running session, None if it may still change, and its
    settings.

    Runs in a thread of the bridge.
    """
    context = session.sparkContext
    config = dict(context.getConf().getAll())
    return (
        context.defaultParallelism if re.fullmatch(r"local(\[.*\])?", context.master) else None
    ), config


def check_secrecy(
    address: str, config: Mapping[str, str], *, has_tls: bool, allow_plaintext: bool
) -> None:
    """Raises NotAuthenticated if an eavesdropper could read the records, or the secret on its way
    to the workers.
    """
    if is_loopback(address) or allow_plaintext:
        return
    if not has_tls:
        raise NotAuthenticated(
            f"workers of Spark on other machines would connect to {address} in plain text: give "
            "tls=af.TlsFiles(...), or say that the "
            "network may be trusted with allow_plaintext=True"
        )
    if not any(config.get(name) == "true" for name in _ENCRYPTION):
        raise NotAuthenticated(
            "the secret of the workers would travel in plain text in Spark's tasks: set "
            f"{' or '.join(_ENCRYPTION)} to true in config=, or "
            "say that the network may be trusted with allow_plaintext=True"
        )


def _cores_of(master: str, config: Mapping[str, str]) -> int | None:
    """Returns the number of cores, None if it is not known before the start."""
    if master == "local":
        return 1
    if match := re.fullmatch(r"local\[(\d+|\*)(?:,\s*\d+)?\]", master):
        return (os.cpu_count() or 1) if match[1] == "*" else int(match[1])
    if match := re.fullmatch(r"local-cluster\[(\d+),\s*(\d+),\s*\d+\]", master):
        return int(match[1]) * int(match[2])
    limit = config.get("spark.cores.max")
    return None if limit is None else int(limit)
