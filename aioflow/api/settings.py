"""Reads settings from the environment and from a file, for the commands and for `af.configured`.

A setting has the name of an option of the command line. `--checkpoint-key-file` is
`AIOFLOW_CHECKPOINT_KEY_FILE` in the environment, and `checkpoint-key-file` in the file. The file is
`aioflow.toml` in the current directory, otherwise the table `tool.aioflow` of `pyproject.toml`
there. `AIOFLOW_CONFIG` names another file; if it is empty, no file is read. A table with the name
of a command applies to this command only. The environment takes precedence over the file.

Options for a single start cannot be settings: a `fresh` in a file would discard the state at each
restart.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Unpack

from aioflow.api.options import POLICIES, RunArguments
from aioflow.cluster import restart
from aioflow.core.errors import did_you_mean
from aioflow.task.environment import TaskOptions

__all__ = [
    "CONFIGURATION",
    "CONFIG_VARIABLE",
    "NAMES",
    "RUN_SETTINGS",
    "TOKEN_VARIABLE",
    "Found",
    "RunSetting",
    "Settings",
    "configured",
    "parse_flag",
    "read_settings",
    "variable_of",
    "without_settings",
]

PREFIX = "AIOFLOW_"
CONFIG_VARIABLE = "AIOFLOW_CONFIG"
TOKEN_VARIABLE = "AIOFLOW_MONITOR_TOKEN"
"""Environment variable that holds the token of a monitoring endpoint. The token is a secret, so it
cannot be set in the file."""

FILE, PROJECT = "aioflow.toml", "pyproject.toml"

CONFIGURATION = ("rocksdb.path", "rocksdb.cache_entries", "rocksdb.cache_bytes")
"""Names that `--conf` takes."""

TABLES = (
    *(
        "run",
        "sql",
        "demo",
        "submit",
        "list",
        "cancel",
        "stop",
        "checkpoint",
        "savepoint",
        "rescale",
    ),
    *("jobmanager", "taskmanager", "cluster"),
)
"""Commands with settings. The file may have a table for each of them."""


def parse_flag(text: str) -> bool:
    """Returns the truth value that `text` names."""
    if text.lower() in ("true", "1", "yes", "on"):
        return True
    if text.lower() in ("false", "0", "no", "off"):
        return False
    raise ValueError(f"expected true or false, got {text!r}")


def _flag_or_text(text: str) -> bool | str:
    try:
        return parse_flag(text)
    except ValueError:
        return text


def _number(text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise ValueError(f"expected a number of at least 0, got {text!r}")
    return int(text)


_POLICY = re.compile(r"(\w+)(?:\((.*)\))?")


def _restart_policy(text: str) -> restart.RestartPolicy:
    """Returns the policy of a text such as `fixed_delay(attempts=3, delay=1s)`."""
    found = _POLICY.fullmatch(text.strip())
    if found is None or found[1] not in POLICIES:
        raise ValueError(
            "expected a policy, like fixed_delay(attempts=3, delay=1s), with one of the names "
            f"{', '.join(POLICIES)}, got {text!r}"
            f"{did_you_mean(text.partition('(')[0], POLICIES)}"
        )
    given: dict[str, Any] = {}
    for part in (found[2] or "").split(","):
        name, equals, value = (side.strip() for side in part.partition("="))
        if part.strip() and not equals:
            raise ValueError(f"expected NAME=VALUE within the brackets, got {part.strip()!r}")
        if equals:
            given[name] = int(value) if value.isdecimal() else value.strip("'\"")
    if "fatal" in given:
        raise ValueError("fatal= takes classes, which only a program can give")
    for name in ("multiplier", "jitter"):
        if name in given:
            try:
                given[name] = float(given[name])
            except ValueError:
                raise ValueError(f"{name} is {given[name]!r}, expected a number") from None
    try:
        policy: restart.RestartPolicy = getattr(restart, found[1])(**given)
    except TypeError as error:
        raise ValueError(str(error)) from error
    return policy


class RunSetting(NamedTuple):
    """A setting that is an option of `flow.run`."""

    option: str
    parse: Callable[[str], Any]
    metavar: str
    help: str
    of_cluster: bool = True
    """Whether jobs of a cluster accept the setting too."""


RUN_SETTINGS = {
    "unaligned": RunSetting(
        "unaligned", _flag_or_text, "TIME|true", "barriers overtake data in flight after this time"
    ),
    "timeout": RunSetting("timeout", str, "TIME", "maximum duration of a checkpoint (10m)"),
    "min-pause": RunSetting("min_pause", str, "TIME", "shortest pause between checkpoints (0s)"),
    "max-concurrent": RunSetting(
        "max_concurrent", _number, "N", "checkpoints that may be under way at once (1)"
    ),
    "retain": RunSetting("retain", _number, "N", "completed checkpoints that are kept (1)"),
    "tolerable-failures": RunSetting(
        "tolerable_failures", _number, "N", "failed checkpoints in a row before the job fails (any)"
    ),
    "local-recovery": RunSetting(
        "local_recovery", _flag_or_text, "DIR|true", "keep copies of state on the machine's disk"
    ),
    "state": RunSetting("state", str, "heap|rocksdb", "state backend (heap)"),
    "restart": RunSetting(
        "restart", _restart_policy, "POLICY", "when the job fails, like 'fixed_delay(attempts=3)'"
    ),
    "latency-tracking": RunSetting(
        "latency_tracking", str, "TIME", "between two latency markers of a source (none)"
    ),
    "cancellation-timeout": RunSetting(
        "cancellation_timeout", str, "TIME", "how long functions may take to end (30s)"
    ),
    "strict": RunSetting("strict", parse_flag, "", "refuse values that cannot be sent"),
    "stop-timeout": RunSetting(
        "stop_timeout", str, "TIME", "how long a graceful stop may take (30s)", of_cluster=False
    ),
    "network-memory": RunSetting(
        "network_memory", str, "SIZE", "memory for data between tasks (64MiB)", of_cluster=False
    ),
}
"""Options of `flow.run` by their name on the command line. Options with a check of their own are
only in `OF_RUN`.
"""

OF_RUN = frozenset(
    {
        *RUN_SETTINGS,
        *CONFIGURATION,
        *("checkpoints", "every", "checkpoint-key-file", "workers", "on", "log-format"),
        *("monitor", "monitor-token-file", "enable-control", "show-data"),
    }
)
"""Settings of `aioflow run`."""

NAMES = frozenset(
    {
        *OF_RUN,
        *("at", "data", "secret-file", "tls-cert", "tls-key", "tls-ca", "allow-plaintext"),
        *("port", "bind", "taskmanagers", "slots", "jobmanager", "health", "request-timeout"),
        *("restarts",),
    }
)
"""All settings."""


def variable_of(name: str) -> str:
    """Returns the environment variable of the setting `name`."""
    return PREFIX + re.sub(r"[-.]", "_", name).upper()


_GROUPS = {name.partition(".")[0] for name in CONFIGURATION}
_OF_ONE_START = ("fresh", "restore", "allow-non-restored", "quiet", "traceback")
"""Options for a single start, which are refused as settings. Silently ignoring one could cost the
state of a job.
"""

_NAME_OF = {variable_of(name): name for name in NAMES}
_OTHERS = {
    CONFIG_VARIABLE,
    TOKEN_VARIABLE,
    "AIOFLOW_SECRET_FD",
    "AIOFLOW_MAIN_THREAD_OF",
}
"""Variables with the prefix `AIOFLOW_` that are no settings. The last two are set by processes for
the processes that they start.
"""

_ONE_START = ": it belongs to one start, so give --{} on the command line"
_OPTION = "; expected the name of an option, see aioflow COMMAND --help"
_OF_KUBERNETES = re.compile(r"_SERVICE_(HOST|PORT\w*)$|_PORT_\d+_(TCP|UDP|SCTP)")
_LINK = re.compile(r"(tcp|udp|sctp)://")


class Found(NamedTuple):
    """The text of a setting, and its origin: a variable or a file."""

    text: str
    origin: str


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of an environment and a file."""

    environment: Mapping[str, Found] = field(default_factory=dict)
    general: Mapping[str, Found] = field(default_factory=dict)
    tables: Mapping[str, Mapping[str, Found]] = field(default_factory=dict)
    """Settings of the file that apply to a single command, by the name of the command."""
    file: str | None = None

    def get(self, name: str, command: str) -> Found | None:
        """Returns the setting `name` for `command`, or None."""
        for source in (self.environment, self.tables.get(command, {}), self.general):
            if name in source:
                return source[name]
        return None


def read_settings(environ: Mapping[str, str], directory: Path) -> Settings:
    """Returns the settings of a process with the environment `environ` and the current directory
    `directory`.

    A variable that resembles no setting belongs to the user's program, and is left alone. Raises
    ValueError for a variable that resembles a setting, for an unknown name in the file, and for a
    file that cannot be read.
    """
    environment: dict[str, Found] = {}
    for variable in sorted(environ):
        text = environ[variable]
        if not variable.startswith(PREFIX) or variable in _OTHERS or not text:
            continue
        if _OF_KUBERNETES.search(variable) or _LINK.match(text):
            continue  # Kubernetes sets these for a Service whose name begins with aioflow.
        name = _NAME_OF.get(variable)
        if name is None:
            for one in _OF_ONE_START:
                if variable == variable_of(one):
                    hint = _ONE_START.format(one)
                    raise ValueError(f"the environment variable {variable} is no setting{hint}")
            known = [one.removeprefix(PREFIX) for one in _NAME_OF]
            given = variable.removeprefix(PREFIX)
            if hint := did_you_mean(given, known, PREFIX + "{}", likeness=0.8):
                raise ValueError(f"the environment variable {variable} is no setting{hint}")
            continue  # It belongs to the user's program.
        environment[name] = Found(text, variable)
    shown, content = _content(environ, directory)
    general, tables = _of_file(shown or "", content)
    return Settings(environment, general, tables, shown)


def _content(environ: Mapping[str, str], directory: Path) -> tuple[str | None, dict[str, Any]]:
    """Returns the name of the file and its content, or None and an empty dict if there is no
    file."""
    named = environ.get(CONFIG_VARIABLE)
    if named:
        return named, _parsed(directory / named, f"{named}, which {CONFIG_VARIABLE} names,")
    if named is not None:
        return None, {}
    if (directory / FILE).exists():
        return FILE, _parsed(directory / FILE)
    if (directory / PROJECT).exists():
        content = _parsed(directory / PROJECT)
        if "aioflow" in content:
            return PROJECT, content
    return None, {}


def _parsed(path: Path, shown: str = "") -> dict[str, Any]:
    import tomllib  # Imported late: most processes have no file.

    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ValueError(f"the settings in {shown or path} cannot be read: {reason}") from error
    if path.name != PROJECT:
        return content
    tools = content.get("tool")
    found = tools.get("aioflow") if isinstance(tools, dict) else None
    return {} if found is None else {"aioflow": found}


def _of_file(
    shown: str, content: dict[str, Any]
) -> tuple[dict[str, Found], dict[str, dict[str, Found]]]:
    whole = content.get("aioflow") if shown.endswith(PROJECT) else content
    tables: dict[str, dict[str, Found]] = {}
    general: dict[str, Any] = {}
    if not isinstance(whole, (dict, type(None))):
        raise ValueError(f"{shown}: tool.aioflow is {whole!r}, expected a table")
    for key, value in (whole or {}).items():
        if key in TABLES:
            if not isinstance(value, dict):
                raise ValueError(f"{shown}: {key} is {value!r}, expected a table, [{key}]")
            tables[key] = _of_table(f"{shown} [{key}]", value)
        elif isinstance(value, dict) and key not in NAMES | _GROUPS:
            hint = did_you_mean(key.lower(), TABLES, "[{}]")
            if key == "tool":
                hint = "; [tool.aioflow] is for pyproject.toml, so leave its line out here"
            raise ValueError(f"{shown}: no command with settings has the name {key}{hint}")
        else:
            general[key] = value
    return _of_table(shown, general), tables


def _of_table(origin: str, table: Mapping[str, Any]) -> dict[str, Found]:
    found: dict[str, Found] = {}
    for key, value in table.items():
        parts = (
            {f"{key}.{inner}": one for inner, one in value.items()}
            if isinstance(value, dict)
            else {key: value}
        )
        for name, one in parts.items():
            known = name if name in NAMES else name.replace("_", "-")
            if known not in NAMES:
                hint = did_you_mean(known, [*NAMES, *TABLES], "{}")
                if known in _OF_ONE_START:
                    hint = _ONE_START.format(known)
                if known == "monitor-token":
                    hint = f": give monitor-token-file, or {TOKEN_VARIABLE} in the environment"
                raise ValueError(f"{origin}: {name} is no setting{hint or _OPTION}")
            found[known] = Found(_text(origin, known, one), origin)
    return found


def _text(origin: str, name: str, value: Any) -> str:
    """Returns a value of the file as the text that the command line would have."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        return ",".join(value)
    if not isinstance(value, str | int | float):
        raise ValueError(f"{origin}: {name} takes a text or a number, got {value!r}")
    return str(value)


def without_settings(environ: Mapping[str, str], *kept: str) -> dict[str, str]:
    """Returns `environ` without settings, except the variables `kept`, for a command that takes all
    its options from arguments."""
    rest = {name: text for name, text in environ.items() if name in kept or name not in _NAME_OF}
    return {**rest, CONFIG_VARIABLE: ""}


def configured(**options: Unpack[RunArguments]) -> RunArguments:
    """Returns the options of a run from the environment and the file, for `flow.run(**...)`.

    `options` take precedence. The settings have the names of options of `aioflow run`:
    `AIOFLOW_EVERY`, or `every` in `aioflow.toml`, above the tables or below `[run]`. Only commands
    use `on` and `log-format`. Raises ValueError for an unknown name, and for a value that cannot be
    read.
    """
    settings = read_settings(os.environ, Path.cwd())
    for name, one in settings.tables.get("run", {}).items():
        if name not in OF_RUN:
            raise ValueError(
                f"{one.origin}: aioflow run has no --{name}{did_you_mean(name, OF_RUN, '{}')}"
            )
    found: dict[str, Any] = {}
    plain = {
        "checkpoints": RunSetting("checkpoints", str, "", ""),
        "every": RunSetting("every", str, "", ""),
        "checkpoint-key-file": RunSetting("checkpoint_key", Path, "", ""),
        "workers": RunSetting("workers", _number, "", ""),
        "monitor": RunSetting("monitor", str, "", ""),
    }
    for name, setting in {**plain, **RUN_SETTINGS}.items():
        if (given := settings.get(name, "run")) is not None:
            try:
                found[setting.option] = setting.parse(given.text)
            except ValueError as error:
                raise ValueError(f"{name} of {given.origin}: {error}") from error
    if shown := _monitor_options(settings, has_monitor="monitor" in {**found, **options}):
        found["monitor_options"] = shown
    configuration = {
        name: given.text
        for name in CONFIGURATION
        if (given := settings.get(name, "run")) is not None
    }
    if configuration:
        found["tasks"] = TaskOptions(configuration=configuration)
    merged: RunArguments = {**found, **options}  # type: ignore[typeddict-item]
    return merged


def _monitor_options(settings: Settings, *, has_monitor: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in ("enable-control", "show-data"):
        if (given := settings.get(name, "run")) is not None:
            try:
                found[name.replace("-", "_")] = parse_flag(given.text)
            except ValueError as error:
                raise ValueError(f"{name} of {given.origin}: {error}") from error
    path = settings.get("monitor-token-file", "run")
    if path is not None:
        try:
            found["token"] = Path(path.text).read_text(encoding="utf-8").partition("\n")[0].strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(
                f"the token in {path.text}, which {path.origin} names, cannot be read: "
                f"{error.strerror if isinstance(error, OSError) else error}"
            ) from error
    elif has_monitor and os.environ.get(TOKEN_VARIABLE):
        found["token"] = os.environ[TOKEN_VARIABLE]
    return found
