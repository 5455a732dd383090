"""The checkpoint options of a run, checked together: `checkpoints= every= restore=` and related
ones.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from os import PathLike, fspath
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from aioflow.cluster.checkpoint_settings import LATEST, CheckpointSettings
from aioflow.core.locations import url_scheme
from aioflow.core.timeunits import to_ms
from aioflow.inspection.redaction import redacted

__all__ = [
    "CheckpointOptions",
    "check_checkpoint_options",
    "checkpoint_key",
    "shown_path",
    "store_url",
]

NEED_CHECKPOINTS = (
    "every",
    "unaligned",
    "timeout",
    "min_pause",
    "max_concurrent",
    "retain",
    "tolerable_failures",
    "fresh",
)
"""They say how checkpoints are taken, or what becomes of those that are there."""

REMOTE = ("s3", "gs", "az")
SCHEMES = ("file", "memory", *REMOTE)

KEY_BYTES_MIN = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointOptions:
    """The options of `flow.run(**options)` about checkpoints, and about where state comes from."""

    checkpoints: str | PathLike[str] | None = None
    """URL of the store (`file://`, `s3://`, `gs://`, `az://`, `memory://`) or a local directory.

    None: state lives as long as the run.
    """
    every: str | timedelta = "10s"
    """Between two checkpoints."""
    unaligned: bool | str | timedelta = False
    """Whether barriers overtake what is in flight: from the start (True), or once one is not
    through after so long.
    """
    timeout: str | timedelta = "10m"
    """A checkpoint that takes longer is given up."""
    min_pause: str | timedelta = "0s"
    """At least so long between the end of one checkpoint and the beginning of the next."""
    max_concurrent: int = 1
    """How many checkpoints may be under way at once, savepoints included.

    With `unaligned` always one.
    """
    retain: int = 1
    """How many completed checkpoints are kept. Savepoints are never deleted."""
    tolerable_failures: int | None = None
    """How many checkpoints in a row may fail before the job does.

    None: any number, each with a warning.
    """
    restore: str | PathLike[str] | None = "latest"
    """Where state comes from: "latest" is the flow's newest checkpoint or savepoint in the store; a
    savepoint's path, which needs no store; None: nowhere."""
    fresh: bool = False
    """With `restore=None`: begin without state although the store holds that of an unfinished
    job.
    """
    allow_non_restored: bool = False
    """Begin although some state of the checkpoint belongs to no operator of this flow any more:
    it is dropped.
    """
    checkpoint_key: bytes | PathLike[str] | None = field(default=None, repr=False)
    """Secret, or the `Path` of its file: then only checkpoints and savepoints that were written
    with it are restored.
    """

    def checkpoint_settings(self) -> CheckpointSettings | None:
        """Returns the checkpoint settings, or None for a run without checkpoints."""
        return _settings(self)


def check_checkpoint_options(given: Mapping[str, Any], options: CheckpointOptions) -> None:
    """Raises TypeError or ValueError for what cannot be meant.

    `given`: the arguments as they came, without defaults.
    """
    if options.checkpoints is None:
        for name in NEED_CHECKPOINTS:
            if name in given:
                raise ValueError(
                    f"{name}= is about checkpoints, and there are none: give checkpoints=URL too, "
                    'like "file:///var/lib/app"'
                )
        if given.get("restore") == LATEST:
            raise ValueError(
                "restore='latest' looks into a store, and there is none: give checkpoints=URL "
                "too, or a savepoint's path"
            )
        if given.get("checkpoint_key") is not None and given.get("restore") is None:
            raise ValueError(
                "checkpoint_key= is about checkpoints, and there are none: give checkpoints=URL "
                "too, or restore=PATH"
            )
        if given.get("allow_non_restored") and given.get("restore") is None:
            raise ValueError(
                "allow_non_restored=True is about a savepoint, and there is none: give "
                "restore=PATH, or checkpoints=URL"
            )
    if options.fresh and options.restore is not None:
        raise ValueError(
            f"fresh=True begins without state, restore={options.restore!r} with some: give "
            "restore=None with it"
        )
    settings = options.checkpoint_settings()
    if settings is not None:
        if (
            settings.aligned_timeout_ms is not None
            and settings.aligned_timeout_ms >= settings.timeout_ms
        ):
            raise ValueError(
                f"unaligned={options.unaligned!r} lets barriers overtake after so long, but a "
                "checkpoint is given up after "
                f"timeout={options.timeout!r}: give a shorter time, or unaligned=True to overtake "
                "from the start"
            )
        for url in (settings.store, settings.restore):
            if url and url != LATEST:
                _check_extra(url)


def _settings(options: CheckpointOptions) -> CheckpointSettings | None:
    """Returns the checkpoint settings of `options`, or None for a run without checkpoints and
    restore.
    """
    if options.checkpoints is None:
        if options.restore in (
            None,
            LATEST,
        ):  # The default goes on where there is a store to look into.
            return None
        where = store_url(options.restore, "restore")
        key = checkpoint_key(options.checkpoint_key)
        return CheckpointSettings(
            store=None, restore=where, allow_non_restored=options.allow_non_restored, key=key
        )
    if not isinstance(options.retain, int) or options.retain < 1:
        raise ValueError(
            f"retain is {options.retain!r}, expected how many completed checkpoints are kept, at "
            "least 1"
        )
    if not isinstance(options.max_concurrent, int) or options.max_concurrent < 1:
        raise ValueError(
            f"max_concurrent is {options.max_concurrent!r}, expected how many checkpoints may be "
            "under way, at least 1"
        )
    if options.max_concurrent > 1 and options.unaligned is not False:
        raise ValueError(
            f"max_concurrent is {options.max_concurrent}, but unaligned checkpoints are taken one "
            "at a time: leave it out"
        )
    tolerable = options.tolerable_failures
    if tolerable is not None and (not isinstance(tolerable, int) or tolerable < 0):
        raise ValueError(
            f"tolerable_failures is {tolerable!r}, expected how many in a row are borne, or None "
            "for any number"
        )
    restore = options.restore
    aligned_timeout_ms = (
        None
        if isinstance(options.unaligned, bool)
        else _positive_ms(options.unaligned, "unaligned")
    )
    return CheckpointSettings(
        store=store_url(options.checkpoints, "checkpoints"),
        every_ms=_positive_ms(options.every, "every"),
        unaligned=options.unaligned is True,
        aligned_timeout_ms=aligned_timeout_ms,
        timeout_ms=_positive_ms(options.timeout, "timeout"),
        min_pause_ms=_ms(options.min_pause, "min_pause"),
        max_concurrent=options.max_concurrent,
        retain=options.retain,
        tolerable_failures=tolerable,
        restore=None
        if restore is None
        else LATEST
        if restore == LATEST
        else store_url(restore, "restore"),
        fresh=options.fresh,
        allow_non_restored=options.allow_non_restored,
        key=checkpoint_key(options.checkpoint_key),
    )


def checkpoint_key(given: bytes | PathLike[str] | None) -> bytes | None:
    """The key itself, or the content of its file without the end of its last line.

    Raises TypeError, or ValueError if it is too short.
    """
    if given is None:
        return None
    if isinstance(given, PathLike):
        try:
            key = Path(given).read_bytes().rstrip(b"\r\n")
        except OSError as error:
            raise ValueError(
                f"checkpoint_key= names the file {fspath(given)}, which cannot be read: "
                f"{error.strerror}"
            ) from error
    elif isinstance(given, bytes):
        key = given
    else:
        raise TypeError(
            "checkpoint_key= takes bytes, or Path(...) of a file that holds them; got "
            f"{type(given).__name__}"
        )
    if len(key) < KEY_BYTES_MIN:
        raise ValueError(
            f"checkpoint_key= has {len(key)} bytes, expected at least {KEY_BYTES_MIN}, like "
            "secrets.token_bytes(32).hex()"
        )
    return key


def store_url(where: str | PathLike[str], option: str) -> str:
    """`where` as a URL; without a scheme it is a directory of this machine.

    Raises TypeError, or ValueError for an unknown scheme.
    """
    value: object = where  # As given: the annotation is only a promise.
    if not isinstance(value, (str, PathLike)) or not fspath(value):
        raise TypeError(
            f'{option}= takes a URL like "file:///var/lib/app", or a directory; got '
            f"{type(value).__name__}: {value!r}"
        )
    text = fspath(where)
    scheme, colon, rest = text.partition("://")
    if scheme in REMOTE and "@" in rest.partition("/")[0]:
        raise ValueError(
            f"{option} is {redacted(text)!r}: the URL of a store holds no password, which comes "
            "from the environment"
        )
    if not colon:
        if url_scheme(where):
            raise ValueError(
                f"{option} is {where!r}: a Path is of this machine and loses a slash of a URL, "
                "expected the URL as a text"
            )
        named, single, _ = text.partition(":")
        if (
            single and named in SCHEMES
        ):  # A directory of that name would keep what was meant for elsewhere.
            raise ValueError(
                f"{option} is {text!r}: the scheme is written {named}://; a directory of that "
                f"name is ./{text}"
            )
        return "file://" + quote(str(Path(text).expanduser().absolute()))
    if scheme not in SCHEMES:
        known = ", ".join(f"{known}://" for known in SCHEMES)
        raise ValueError(
            f"{option} is {redacted(text)!r}: stores have the schemes {known}, or no scheme for a "
            "directory"
        )
    if scheme == "file" and not rest.startswith("/"):
        raise ValueError(
            f"{option} is {text!r}: a file URL has three slashes and a path from the root, like "
            "file:///var/lib/app"
        )
    if not rest.strip("/"):
        raise ValueError(
            f"{option} is {text!r}: a store needs a {'name' if scheme == 'memory' else 'place'} "
            "after the scheme"
        )
    return text.rstrip("/")


def shown_path(url: str) -> str:
    """A URL as users take it further: of a directory of this machine its path, otherwise the URL
    itself.
    """
    return unquote(url.removeprefix("file://")) if url.startswith("file:///") else url


def _check_extra(url: str) -> None:
    scheme = url.partition("://")[0]
    if scheme in REMOTE and importlib.util.find_spec("obstore") is None:
        raise ValueError(f"{url} needs a package that is not installed: pip install 'aioflow[s3]'")


def _positive_ms(duration: str | timedelta, name: str) -> int:
    found = _ms(duration, name)
    if found == 0:
        raise ValueError(f"{name} is {duration!r}, expected more than nothing")
    return found


def _ms(duration: str | timedelta, name: str) -> int:
    found = to_ms(duration, name)
    if found < 0:
        raise ValueError(f"{name} is {duration!r}, expected a time that is not negative")
    return found
