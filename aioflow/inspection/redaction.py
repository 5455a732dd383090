"""Takes secrets out of text that leaves the process: what users put into URLs, headers and error messages."""

from __future__ import annotations

import re

__all__ = ["HIDDEN", "is_secret_name", "redacted"]

HIDDEN = "***"

_SECRET_WORD = r"(?:password|passwd|secret|token|api[_-]?key|access[_-]?key|credential|private[_-]?key|authorization)"

_NAMED = re.compile(rf"(?i)([\w.-]*{_SECRET_WORD}[\w.-]*[\"']?\s*[:=]\s*)(?:bearer\s+|basic\s+)?(\"[^\"]*\"|'[^']*'|[^\s,;&}})\]]+)")
"""`password=...`, `"api_key": "..."`, `Authorization: Bearer ...`: the name stays, so that the text can be understood."""

_BEARER = re.compile(r"(?i)\b(bearer|basic)\s+[\w.~+/=-]{8,}")

_IN_URL = re.compile(r"([a-zA-Z][\w+.-]*://)([^\s/@:]*):([^\s/@]+)@")


def redacted(text: str) -> str:
    """`text` without what looks like a secret."""
    text = _IN_URL.sub(rf"\1\2:{HIDDEN}@", text)
    text = _NAMED.sub(rf"\1{HIDDEN}", text)
    return _BEARER.sub(rf"\1 {HIDDEN}", text)


def is_secret_name(name: str) -> bool:
    """Whether a setting of this name must not be shown."""
    return re.search(_SECRET_WORD, name, re.IGNORECASE) is not None
