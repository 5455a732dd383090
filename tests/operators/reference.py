"""Windows and joins by the textbook: one record at a time, one list of elements a key and window,
no cleverness.

Each function takes records in order of arrival, each with the watermark in force before it, and
gives what must be emitted. What is compared with it was written against the same definitions, but
shares no code with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple


class Record(NamedTuple):
    """One record: `watermark` is in force before it."""

    key: Any
    value: Any
    timestamp: int
    watermark: int


class Row(NamedTuple):
    """One result of a window, with its timestamp and the watermark in force before it."""

    key: Any
    start: int
    end: int
    value: Any
    timestamp: int
    watermark: int


def windows_of(timestamp: int, size: int, slide: int, offset: int) -> list[tuple[int, int]]:
    """All windows that hold `timestamp`, found by trying every start near it."""
    starts = range(timestamp - size - slide, timestamp + slide + 1)
    return [
        (s, s + size) for s in starts if (s - offset) % slide == 0 and s <= timestamp < s + size
    ]


def sliding_windows(
    records: Iterable[Record],
    final: int,
    size: int,
    slide: int,
    offset: int = 0,
    lateness: int = 0,
    fold: Callable[[list[Any]], Any] = list,
) -> tuple[list[Row], list[Any]]:
    """(results in order, dropped values in order).

    Windows that are due together fire by end; keys of one window in any order.
    """
    contents: dict[tuple[int, int, Any], list[Any]] = {}
    fired: set[tuple[int, int, Any]] = set()
    rows: list[Row] = []
    late: list[Any] = []
    current = -(10**30)

    def advance(watermark: int) -> None:
        nonlocal current
        before = current
        for start, end, key in sorted(contents, key=lambda w: w[1]):
            if end - 1 <= watermark and (start, end, key) not in fired:
                fired.add((start, end, key))
                rows.append(
                    Row(
                        key,
                        start,
                        end,
                        fold(contents[start, end, key]),
                        end - 1,
                        max(end - 2, before),
                    )
                )
        for window in [w for w in contents if w[1] - 1 + lateness <= watermark]:
            del contents[window]
        current = max(current, watermark)

    for key, value, timestamp, watermark in records:
        advance(watermark)
        windows = windows_of(timestamp, size, slide, offset)
        open_windows = [w for w in windows if w[1] - 1 + lateness > current]
        if windows and not open_windows:
            late.append(value)
        for start, end in sorted(open_windows, key=lambda w: w[1]):
            contents.setdefault((start, end, key), []).append(value)
            if end - 1 <= current:
                fired.add((start, end, key))
                rows.append(Row(key, start, end, fold(contents[start, end, key]), end - 1, current))
    advance(final)
    return rows, late


def session_windows(
    records: Iterable[Record], final: int, gap: int, lateness: int = 0
) -> tuple[list[Row], list[Any]]:
    """Sessions of fixed `gap`: (results in order of firing, dropped values).

    Values of a result in any order.
    """
    rows: list[Row] = []
    late: list[Any] = []
    sessions: list[dict[str, Any]] = []
    current = -(10**30)

    def row(session: dict[str, Any], watermark: int) -> None:
        start, end = session["start"], session["end"]
        rows.append(Row(session["key"], start, end, sorted(session["values"]), end - 1, watermark))

    def advance(watermark: int) -> None:
        nonlocal current
        before = current
        for session in sorted(sessions, key=lambda s: s["end"]):
            if not session["fired"] and session["end"] - 1 <= watermark:
                session["fired"] = True
                row(session, max(session["end"] - 2, before))
        sessions[:] = [s for s in sessions if s["end"] - 1 + lateness > watermark]
        current = max(current, watermark)

    for key, value, timestamp, watermark in records:
        advance(watermark)
        grown = {
            "key": key,
            "start": timestamp,
            "end": timestamp + gap,
            "values": [value],
            "fired": False,
        }
        for session in [s for s in sessions if s["key"] == key]:
            if session["start"] <= timestamp + gap and timestamp <= session["end"]:
                grown["start"] = min(grown["start"], session["start"])
                grown["end"] = max(grown["end"], session["end"])
                grown["values"] += session["values"]
                sessions.remove(session)
        if grown["end"] - 1 + lateness <= current:
            late.append(value)
            continue
        sessions.append(grown)
        if grown["end"] - 1 <= current:
            grown["fired"] = True
            row(grown, current)
    advance(final)
    return rows, late


class Sided(NamedTuple):
    """One record of a join: `side` is 0 or 1."""

    side: int
    key: Any
    value: Any
    timestamp: int
    watermark: int


def co_groups(
    records: Iterable[Sided], final: int, size: int, slide: int, offset: int = 0
) -> list[tuple[Any, int, int, list[Any], list[Any]]]:
    """(key, start, end, lefts, rights) of each window that fires, without lateness, in order of
    end.
    """
    contents: dict[tuple[int, int, Any], tuple[list[Any], list[Any]]] = {}
    rows: list[tuple[Any, int, int, list[Any], list[Any]]] = []

    def advance(watermark: int) -> None:
        for start, end, key in sorted(contents, key=lambda w: w[1]):
            if end - 1 <= watermark:
                rows.append((key, start, end, *contents.pop((start, end, key))))

    for side, key, value, timestamp, watermark in records:
        advance(watermark)
        for start, end in windows_of(timestamp, size, slide, offset):
            if end - 1 > watermark:
                contents.setdefault((start, end, key), ([], []))[side].append(value)
    advance(final)
    return rows


def interval_pairs(
    records: Iterable[Sided], lower: int, upper: int
) -> tuple[list[tuple[Any, Any, int]], int]:
    """((left, right, timestamp) in order of the second of them, then of the partner's time and
    arrival; number of late).
    """
    kept: list[Sided] = []
    rows: list[tuple[Any, Any, int]] = []
    late = 0
    for record in records:
        if record.timestamp <= record.watermark:
            late += 1
            continue
        for other in sorted(
            (o for o in kept if o.side != record.side and o.key == record.key),
            key=lambda o: o.timestamp,
        ):
            left, right = (record, other) if record.side == 0 else (other, record)
            if left.timestamp + lower <= right.timestamp <= left.timestamp + upper:
                rows.append((left.value, right.value, max(left.timestamp, right.timestamp)))
        kept.append(record)
    return rows, late
