"""Takes secrets out of text that leaves the process: passwords, tokens and keys in URLs, settings,
headers and arguments.

Errors and log records hold text of any length from any source, and the loop that runs the jobs
shows them. So redaction takes time linear in the length of the text. Each pattern is anchored at a
literal and uses possessive quantifiers. So no pattern reads the same stretch a second time after it
failed to match. Text beyond `CHARACTERS_MAX` is cut off.

The patterns are compiled at their first use, not when a process starts, because compiling them
takes 3 ms.
"""

from __future__ import annotations

import re

__all__ = ["CHARACTERS_MAX", "HIDDEN", "hidden_in", "hide", "is_secret_name", "redacted"]

HIDDEN = "***"

CHARACTERS_MAX = 65_536
"""Number of characters of a text that are searched.

A longer text is cut, and ends with a remark that says how much is missing.
"""

_WORD = (
    r"(?:passw(?:or)?d|passphrase|pwd|(?<![a-z])pass(?![a-z])|secret|token|credential"
    r"|authorization|cookie|signature|(?<![a-z])sig(?![a-z])"
    r"|(?:api|access|account|private|encryption|checkpoint)[_-]?key)"
)
"""Part of a name that marks its value as a secret."""

_LITERALS = (
    "pass",
    "pwd",
    "secret",
    "token",
    "credential",
    "authorization",
    "cookie",
    "sig",
    "key",
)
"""Each match of `_WORD` contains one of these texts. A fast search for them rules out most
messages.
"""

_QUOTED = (
    r"(?:[bru]{0,2}(?:"
    r"\"(?:[^\"\\]|\\.)*+\"|'(?:[^'\\]|\\.)*+'"  # "..." and '...' with escapes.
    r"|\\++\"[^\"]*+\"|\\++'[^']*+'"  # \"...\", as text within text has it.
    r"|\\*+[\"'][^\n]*+))"  # Unclosed, as in a cut text: to the end of the line.
)

_VALUE = (
    r"(?:(?:(?:bearer|basic|token|apikey|negotiate)\s++)?"
    rf"(?:{_QUOTED}|[\[{{(][^\]}})]*+[\]}})]?|[^\s,;&}})\]]++))"
)
"""Pattern of a value: a quoted text, a list in brackets, or a word."""

_SCHEMES = r"(?:digest|aws4-[\w-]++)\s[^\n]*+"
"""Pattern of an authorization that consists of several settings, up to the end of the line."""

_NAMED = (
    rf"(?is)({_WORD})([\w.-]*+)"
    rf"(?:(\\*+[\"']?\s*+[:=]++>?\s*+)(?:{_SCHEMES}|{_VALUE}(?:\s*+=\s*+{_VALUE})?))?"
)
"""Pattern of a named secret: `password=...`, `"api_key": "..."`, `Authorization: Bearer ...`.

The value is optional, so that the pattern skips a name without a value as a whole, instead of
letter by letter.
"""

_COOKIES = rf"(?is)(cookie\d?+\\*+[\"']?\s*+[:=]\s*+)(?:{_QUOTED}|[^\n]*+)"
"""Pattern of a header like `Cookie: a=1; b=2`. A match extends to the end of the line."""

_ARGUMENT = rf"(?is)(?<![\w-])(--[\w.-]++)([\"']?(?:\s*+,\s*+|\s++))({_VALUE})"
"""Pattern of `--password x`, and of `'--password', 'x'` in a list of arguments."""

_QUERY_KEY = r"(?i)([?&](?:key|auth|code|access)=)[^\s&\"'#]++"
"""Pattern of a secret in the query of a URL, such as `?key=...`. Its name is an ordinary word
elsewhere."""

_SCHEME = r"(?i)\b(bearer|basic)(\s++)[\w.~+/=-]{8,}+"

_PRIVATE_KEY = r"(?s)(-----BEGIN [A-Z0-9 ]*+-----).*?(-----END|\Z)"

_URL = r"://((?:(?!://)[^\s\"<>])++)"


_hidden_values: tuple[str, ...] = ()
"""Secret values that are hidden wherever they occur in a text, such as a token in the path of a
URL.

Longer values come first, because a short value may be the beginning of a long one.
"""

_HIDDEN_CHARACTERS_MIN = 6
"""Minimum length of a value that is hidden wherever it occurs. Shorter values may be parts of
ordinary words."""


def hide(value: str) -> None:
    """Hides a value in all texts that leave this process from now on."""
    global _hidden_values
    if len(value) >= _HIDDEN_CHARACTERS_MIN:
        # A new tuple, because other threads may be reading the former one.
        _hidden_values = tuple(sorted({*_hidden_values, value}, key=len, reverse=True))


def hidden_in(content: bytes) -> tuple[str, ...]:
    """Returns the hidden values that `content` contains. The receiver of `content` has to hide them
    as well.
    """
    return tuple(one for one in _hidden_values if one.encode("utf-8", "surrogatepass") in content)


def redacted(text: str, characters_max: int = CHARACTERS_MAX) -> str:
    """Returns the first `characters_max` characters of `text`, with likely secrets hidden. A remark
    says how many characters were cut off.

    Only the values of secrets are hidden: names of settings, hosts and paths stay readable.
    """
    for value in _hidden_values:
        text = text.replace(value, HIDDEN)
    missing = len(text) - characters_max
    if missing > 0:
        text = text[:characters_max]
    folded = text.lower()
    if "://" in folded:
        text = re.sub(_QUERY_KEY, rf"\1{HIDDEN}", re.sub(_URL, _without_user, text))
    if "--" in folded:
        text = re.sub(_ARGUMENT, _without_argument, re.sub(_PRIVATE_KEY, rf"\1{HIDDEN}\2", text))
    if any(literal in folded for literal in _LITERALS):
        text = re.sub(_COOKIES, rf"\1{HIDDEN}", text)
        text = re.sub(_NAMED, _without_value, text)
    if "bearer" in folded or "basic" in folded:
        text = re.sub(_SCHEME, rf"\1\2{HIDDEN}", text)
    return text if missing <= 0 else f"{text} ... ({missing} more characters)"


def _without_value(found: re.Match[str]) -> str:
    return found[0] if found[3] is None else f"{found[1]}{found[2]}{found[3]}{HIDDEN}"


def _without_argument(found: re.Match[str]) -> str:
    return f"{found[1]}{found[2]}{HIDDEN}" if is_secret_name(found[1]) else found[0]


def _without_user(found: re.Match[str]) -> str:
    """Hides the user and password of a URL, up to the last `@`. A password may hold `@`, `/` and
    `:` that should have been escaped.
    """
    rest = found[1]
    authority = re.split(r"[/?#]", rest, maxsplit=1)[0]
    end = authority.rfind("@")
    if end < 0:
        port = (
            authority.rpartition(":")[2]
            if ":" in authority and not authority.startswith("[")
            else ""
        )
        if not port or port.isdecimal():
            return found[0]
        # Not a port: the password goes on behind a slash, or the text was cut within it.
        end = rest.rfind("@")
        if end < 0:
            return (
                found[0]
                if found.end() < len(found.string)
                else f"://{authority.partition(':')[0]}:{HIDDEN}"
            )
    user, colon, _ = rest[:end].partition(":")
    return f"://{user}:{HIDDEN}{rest[end:]}" if colon else f"://{HIDDEN}{rest[end:]}"


def is_secret_name(name: str) -> bool:
    """Whether the value of a setting of this name must not be shown."""
    return re.search(_WORD, name, re.IGNORECASE) is not None
