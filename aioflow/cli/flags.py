"""Translates the library's messages about arguments into messages about command line options.

A user who typed `--every` does not know `every=`.
"""

from __future__ import annotations

import re

__all__ = ["in_flags"]

FLAGS = {
    "allow_non_restored": "--allow-non-restored",
    "allow_plaintext": "--allow-plaintext",
    "checkpoint_key": "--checkpoint-key-file",
    "checkpoints": "--checkpoints",
    "enable_control": "--enable-control",
    "every": "--every",
    "fresh": "--fresh",
    "monitor": "--monitor",
    "on": "--on",
    "restore": "--restore",
    "secret": "--secret-file",
    "show_data": "--show-data",
    "token": "--monitor-token-file",
    "workers": "--workers",
}
"""Flags by the name of their argument. Other arguments have no flag, and stay as they are."""

ARGUMENT = re.compile(
    rf"(?<![\w?&-])(?P<name>{'|'.join(FLAGS)})="
    r"(?P<value>True|None|\"[^\"]*\"|'[^']*'|[A-Z]+\b|\d+\b|Path\(\.\.\.\))?"
)
SUBJECT = re.compile(rf"(?P<name>{'|'.join(FLAGS)}) (?=is ['\"])")
"""Beginning of a message such as `every is '0s', expected more than nothing`."""


def in_flags(message: str) -> str:
    """Returns `message` with command line flags in place of arguments.

    `--fresh` replaces `fresh=True` and `restore=None`; `--every 1s` replaces `every='1s'`.
    """
    message = message.replace("restore=None, fresh=True", "--fresh").replace(
        "give restore=None with it", "leave --restore out"
    )
    message = SUBJECT.sub(lambda found: f"{FLAGS[found['name']]} ", message, count=1)
    return ARGUMENT.sub(_flag, message)


def _flag(found: re.Match[str]) -> str:
    name, value = found["name"], found["value"]
    if value == "None":
        return "--fresh" if name == "restore" else f"no {FLAGS[name]}"
    if value in (None, "True"):
        return FLAGS[name]
    return f"{FLAGS[name]} {value.strip(chr(39) + chr(34)) if value != 'Path(...)' else 'FILE'}"
