"""Checks the checkpoint options of a run together: `checkpoints=`, `every=`, `restore=` and related
options.
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

from aioflow.checkpoint.instructions import LATEST, CheckpointSettings
from aioflow.core.timeunits import to_ms
from aioflow.inspection.redaction import redacted
from aioflow.io.files.patterns import url_scheme

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
    "local_recovery",
)
"""Options that only make sense with `checkpoints=`."""

REMOTE = ("s3", "gs", "az")
SCHEMES = ("file", "memory", *REMOTE)

KEY_BYTES_MIN = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointOptions:
    """The options of `flow.run(**options)` about checkpoints, and about the origin of the state."""

    checkpoints: str | PathLike[str] | None = None
    """URL of the store (`file://`, `s3://`, `gs://`, `az://`, `memory://`) or a local directory.

    None: no checkpoints are taken, and the state ends with the run.
    """
    every: str | timedelta = "10s"
    """Time between two checkpoints."""
    unaligned: bool | str | timedelta = False
    """Whether barriers overtake data in flight: never (False), from the start (True), or once a
    barrier has been under way for the given time.
    """
    timeout: str | timedelta = "10m"
    """Maximum duration of a checkpoint, after which it is aborted."""
    min_pause: str | timedelta = "0s"
    """Minimum time between the end of one checkpoint and the beginning of the next."""
    max_concurrent: int = 1
    """Maximum number of concurrent checkpoints, including savepoints. With `unaligned` this must be
    1.
    """
    retain: int = 1
    """Number of completed checkpoints that are kept. Savepoints are never deleted."""
    tolerable_failures: int | None = None
    """Number of checkpoints in a row that may fail before the job fails.

    None: any number, each with a warning.
    """
    restore: str | PathLike[str] | None = "latest"
    """Origin of the state. "latest" is the flow's newest checkpoint or savepoint in the store; any
    other text is the path of a savepoint, which needs no store. None: the run begins without state.
    """
    fresh: bool = False
    """Whether a run with `restore=None` may begin although the store holds the state of an
    unfinished job.
    """
    allow_non_restored: bool = False
    """Whether to drop state of the checkpoint that belongs to no operator of this flow, instead
    of refusing to begin.
    """
    checkpoint_key: bytes | PathLike[str] | None = field(default=None, repr=False)
    """A secret, or the `Path` of a file that holds it. With a key, only checkpoints and savepoints
    that were written with the same secret are restored.
    """
    local_recovery: bool | str | PathLike[str] = False
    """Whether each process keeps copies of its state on its own disk, and reads these copies before
    the store in a restore. The value is a directory, or True for a temporary directory.
    """

    @property
    def local_directory(self) -> str | None:
        """The directory for local copies; "" for a temporary directory; None if no copies are kept
        on disk."""
        wanted = self.local_recovery
        if isinstance(wanted, bool):
            return "" if wanted else None
        return str(Path(wanted).expanduser().absolute())

    def checkpoint_settings(self) -> CheckpointSettings | None:
        """Returns the checkpoint settings, or None for a run without checkpoints."""
        return _settings(self)


def check_checkpoint_options(given: Mapping[str, Any], options: CheckpointOptions) -> None:
    """Raises TypeError or ValueError for options that contradict each other or make no sense.

    `given` are the arguments that the caller passed, without defaults.
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
    where: object = options.local_recovery  # Callers may pass other types than it says.
    if not isinstance(where, (bool, str, PathLike)) or where == "" or url_scheme(str(where)):
        raise TypeError(
            "local_recovery= takes True, or a directory of each machine; got "
            f"{type(where).__name__}: {where!r}"
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
    """Returns the checkpoint settings of `options`; None if the run neither takes checkpoints nor
    restores one.
    """
    if options.checkpoints is None:
        if options.restore in (
            None,
            LATEST,
        ):
            # The default "latest" only applies with a store.
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
            f"tolerable_failures is {tolerable!r}, expected how many checkpoints may fail in a "
            "row, or None for any number"
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
    """Returns the checkpoint key: `given` itself, or the content of the file at the path `given`
    without trailing newlines. Returns None for None.

    Raises TypeError if `given` has another type. Raises ValueError if the file cannot be read, or
    if the key is too short.
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
    """Returns `where` as a URL. A text without a scheme names a directory of this machine.

    `option` names the argument in errors. Raises TypeError if `where` is empty or neither a text
    nor a path. Raises ValueError if it is not a valid URL of a store.
    """
    value: object = where  # Callers may pass other types than the annotation says.
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
        if isinstance(where, PathLike) and url_scheme(where):
            raise ValueError(
                f"{option} is {where!r}: a Path is of this machine and loses a slash of a URL, "
                "expected the URL as a text"
            )
        named, single, _ = text.partition(":")
        if single and named in SCHEMES:
            # Otherwise a local directory of that name would be used by mistake.
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
    """Returns the path for a `file://` URL, and any other URL unchanged.

    Arguments such as `restore=` accept both forms.
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
