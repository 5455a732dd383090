"""The pools of `workloads` as files, which engines in other languages read too, and the
JSON-lines files of w1json and w2json.
"""

from __future__ import annotations

import json
from array import array
from pathlib import Path

from benchmarks.workloads import MASK, Events, make_events, make_words

__all__ = ["read_events", "read_words", "write_json", "write_pools"]

COLUMNS = {"users": "i", "lateness_ms": "i", "values": "d"}
"""The events once more, column by column as the machine holds them: a Python program has them at
once.
"""


def write_pools(data: Path) -> None:
    """Writes both pools, unless they exist."""
    data.mkdir(parents=True, exist_ok=True)
    if not (data / "words.txt").exists():
        _write(data / "words.txt", [f"{word}\n" for word in make_words()])
    if not (data / "events.csv").exists():
        events = make_events()
        rows = zip(events.users, events.lateness_ms, events.values, strict=True)
        for name, kind in COLUMNS.items():
            (data / f"{name}.bin").write_bytes(array(kind, getattr(events, name)).tobytes())
        _write(
            data / "events.csv", [f"{user},{lateness},{value}\n" for user, lateness, value in rows]
        )


def write_json(data: Path, workload: str, records: int) -> Path:
    """The first `records` records of w1json or w2json as a file, unless it is there."""
    path = data / f"{workload}-{records}.jsonl"
    if not path.exists():
        if workload == "w1json":
            words = read_words(data)
            _write(path, [json.dumps({"word": words[i & MASK]}) + "\n" for i in range(records)])
        else:
            events = read_events(data)
            _write(
                path,
                [
                    json.dumps(dict(zip(("user", "value", "ts"), events[i], strict=True))) + "\n"
                    for i in range(records)
                ],
            )
    return path


def read_words(data: Path) -> list[str]:
    """The pool of words; equal words are one object."""
    known: dict[str, str] = {}
    return [
        known.setdefault(word, word) for word in (data / "words.txt").read_text().split("\n")[:-1]
    ]


def read_events(data: Path) -> Events:
    columns = []
    for name, kind in COLUMNS.items():
        column = array(kind)
        column.frombytes((data / f"{name}.bin").read_bytes())
        columns.append(column.tolist())
    return Events(*columns)


def _write(path: Path, lines: list[str]) -> None:
    part = path.with_suffix(".part")
    part.write_text("".join(lines))
    part.rename(path)
