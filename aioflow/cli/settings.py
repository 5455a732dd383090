"""Fills in options that the command line lacks, from the environment and the settings file.

An option that can also be set this way is called a setting. `defer_defaults` replaces the default
of each such option by a placeholder, so parsing shows which options the user gave. `fill_in` then
takes the other options from the settings, and parses their texts as on the command line. It records
the origin of each value for `aioflow config`.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aioflow.api.settings import (
    CONFIGURATION,
    NAMES,
    TOKEN_VARIABLE,
    Found,
    Settings,
    parse_flag,
    read_settings,
)
from aioflow.cli.options import UsageError
from aioflow.core.errors import did_you_mean
from aioflow.inspection.redaction import HIDDEN, redacted

__all__ = ["all_optional", "defer_defaults", "fill_in", "settings_here", "shown_settings"]

ARGUMENT, DEFAULT = "argument", "default"


@dataclass(slots=True)
class _Unset:
    """Placeholder for the value of an option that the user did not give. `fill_in` replaces it by
    the value from the environment, the settings file, or `default`.
    """

    default: Any
    actions: list[argparse.Action] = field(default_factory=list)
    """The options that set this attribute of the parsed arguments: `--secret-file` and `--data` set
    the same attribute.
    """


def defer_defaults(parser: argparse.ArgumentParser) -> None:
    """In all commands of `parser`, makes an `_Unset` the default of each setting's option."""
    for command in _leaves(parser):
        marks: dict[str, _Unset] = {}
        for action in command._actions:
            if _name(action) in NAMES:
                mark = marks.setdefault(action.dest, _Unset(action.default))
                mark.actions.append(action)
                if action.default is not argparse.SUPPRESS:
                    action.default = mark


def _leaves(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    inner = [one for one in parser._actions if isinstance(one, argparse._SubParsersAction)]
    for action in inner:
        for command in dict.fromkeys(action.choices.values()):
            yield from _leaves(command)
    if not inner:
        yield parser


def all_optional(parser: argparse.ArgumentParser) -> None:
    """Makes the positional arguments of all commands of `parser` optional, for `aioflow config`."""
    for command in _leaves(parser):
        for action in command._actions:
            if not action.option_strings:
                action.nargs, action.required = "?", False


def _name(action: argparse.Action) -> str:
    """Returns the long name of an option without its dashes, or "" if it has no long name."""
    return next((one[2:] for one in action.option_strings if one.startswith("--")), "")


def settings_here() -> Settings:
    """Returns the settings of this process. Raises UsageError for invalid settings."""
    try:
        return read_settings(os.environ, Path.cwd())
    except ValueError as error:
        raise UsageError(str(error)) from error


def fill_in(arguments: argparse.Namespace, settings: Settings) -> None:
    """Sets the options that the user did not give, and stores the origin of each value in
    `arguments.origins`.

    Raises UsageError if an option does not accept the value of its setting. Raises it too if the
    settings file has an option for a command that has no such option.
    """
    command = arguments.command
    _check_table(settings, arguments)
    origins: dict[str, tuple[str, str]] = {}
    for dest, value in list(vars(arguments).items()):
        if isinstance(value, _Unset):
            chosen, origin = _resolved(value, settings, command)
            setattr(arguments, dest, chosen)
            origins[dest] = (_shown(chosen), origin)
        else:
            origins[dest] = (_shown(value), ARGUMENT)
    if "conf" in arguments:
        given = dict(arguments.conf)
        found = {name: settings.get(name, command) for name in CONFIGURATION}
        taken = {name: one for name, one in found.items() if one is not None}
        arguments.conf = [*((name, one.text) for name, one in taken.items()), *arguments.conf]
        for name in CONFIGURATION:
            text, origin = taken.get(name, Found("", DEFAULT))
            origins[name] = (given[name], ARGUMENT) if name in given else (text, origin)
    arguments.origins = origins


def _check_table(settings: Settings, arguments: argparse.Namespace) -> None:
    marked = [value for value in vars(arguments).values() if isinstance(value, _Unset)]
    known = {_name(action) for mark in marked for action in mark.actions}
    if "conf" in arguments:
        known |= {*CONFIGURATION}
    for name, found in settings.tables.get(arguments.command, {}).items():
        given = name.replace("-", "_") in arguments  # Given as an argument, which takes precedence.
        if name not in known and not given and arguments.command != "cluster":
            raise UsageError(
                f"{found.origin}: aioflow {arguments.command} has no --{name}"
                f"{did_you_mean(name, known, '{}')}"
            )


def _resolved(mark: _Unset, settings: Settings, command: str) -> tuple[Any, str]:
    for action in mark.actions:
        found = settings.get(_name(action), command)
        if found is not None:
            return _parsed(action, found), found.origin
    default = mark.default
    if isinstance(default, str) and callable(mark.actions[0].type):
        default = mark.actions[0].type(default)
    return default, DEFAULT


def _parsed(action: argparse.Action, found: Found) -> Any:
    """Parses the text of a setting as the value of an option. Raises UsageError naming
    the origin.
    """
    try:
        if action.nargs == 0:
            return parse_flag(found.text)
        parse: Any = action.type
        value = found.text if parse is None else parse(found.text)
    except (argparse.ArgumentTypeError, ValueError, TypeError) as error:
        raise UsageError(f"{_name(action)} of {found.origin}: {error}") from error
    if action.choices is not None and value not in action.choices:
        known = ", ".join(map(str, action.choices))
        hint = did_you_mean(value, map(str, action.choices))
        raise UsageError(
            f"{_name(action)} of {found.origin} is {value!r}, expected one of {known}{hint}"
        )
    return value


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value is None else str(value)


def shown_settings(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> list[str]:
    """Returns a line for each setting of a command: its name, value and origin."""
    rows: list[tuple[str, str, str]] = []
    for action in _chosen(parser, arguments)._actions:
        name = _name(action)
        if name in NAMES and (name != "data" or action.dest == "data"):
            text, origin = arguments.origins[action.dest]
            rows.append((name, redacted(text), origin))
        if name == "monitor-token-file" and os.environ.get(TOKEN_VARIABLE):
            rows.append(("monitor-token", HIDDEN, TOKEN_VARIABLE))
    if "conf" in arguments:
        rows += [(name, *arguments.origins[name]) for name in CONFIGURATION]
    names, values = (max(len(row[place]) for row in rows) for place in (0, 1))
    return [f"  {name:{names}}  {value or '-':{values}}  {origin}" for name, value, origin in rows]


def _chosen(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace
) -> argparse.ArgumentParser:
    """Returns the parser of the command that the user gave."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            chosen = action.choices[getattr(arguments, action.dest)]
            return _chosen(chosen, arguments)
    return parser
