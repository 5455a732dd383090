"""Plots as SVG, by hand: bars with their spread, and curves.

Nothing to install, and readable as text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from math import log10

__all__ = ["bars", "curve", "series"]

INK, FAINT = "#333", "#ddd"
COLOURS = ("#3b6ea5", "#c46a2b", "#4f8f4f", "#8a5ca0", "#a04848")
WIDTH, ROW, LEFT, RIGHT, TOP = 760, 22, 190, 120, 40


def bars(title: str, rows: Sequence[tuple[str, float, float, float]], unit: str) -> str:
    """One bar for each (name, median, least, greatest)."""
    height = TOP + ROW * len(rows) + 12
    widest = max([greatest for *_, greatest in rows] or [1.0]) or 1.0
    scale = (WIDTH - LEFT - RIGHT) / widest
    parts = [_text(12, 22, title, size=14)]
    for i, (name, middle, least, greatest) in enumerate(rows):
        y = TOP + ROW * i
        parts.append(_text(LEFT - 8, y + 13, name, anchor="end"))
        parts.append(
            f'<rect x="{LEFT}" y="{y + 2}" width="{middle * scale:.1f}" height="{ROW - 8}" '
            f'fill="{COLOURS[0]}"/>'
        )
        parts.append(_line(LEFT + least * scale, y + 9, LEFT + greatest * scale, y + 9, INK))
        parts.append(_text(LEFT + greatest * scale + 6, y + 13, f"{_short(middle)} {unit}"))
    return _svg(height, parts)


def curve(
    title: str, lines: Mapping[str, Sequence[tuple[float, float]]], across: str, up: str
) -> str:
    """Lines of (x, y) points, x and y on logarithmic scales."""
    height, bottom = 360, 310
    points = [point for line in lines.values() for point in line]
    left, right = _decades([x for x, _ in points])
    low, high = _decades([y for _, y in points])

    def at(x: float, y: float) -> tuple[float, float]:
        return (
            70 + (log10(x) - left) / max(right - left, 1) * (WIDTH - 70 - 150),
            bottom - (log10(y) - low) / max(high - low, 1) * (bottom - TOP),
        )

    parts = [_text(12, 22, title, size=14), _text(70, height - 12, across), _text(8, TOP - 4, up)]
    for exponent in range(low, high + 1):
        x, y = at(10**left, 10**exponent)
        parts += [
            _line(x, y, WIDTH - 150, y, FAINT),
            _text(62, y + 4, _short(10.0**exponent), anchor="end"),
        ]
    for exponent in range(left, right + 1):
        x, y = at(10**exponent, 10**low)
        parts += [
            _line(x, y, x, TOP, FAINT),
            _text(x, y + 16, _short(10.0**exponent), anchor="middle"),
        ]
    for i, (name, line) in enumerate(lines.items()):
        colour = COLOURS[i % len(COLOURS)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in line))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        x, y = at(*line[-1])
        parts.append(_text(x + 6, y + 4, name, colour=colour))
    return _svg(height, parts)


def series(
    title: str,
    points: Sequence[tuple[float, float]],
    trend: tuple[float, float],
    across: str,
    up: str,
) -> str:
    """Points of (x, y) on linear scales from 0, and a straight line: its slope, and its height
    in the middle of all x.
    """
    height, bottom, left, right = 220, 170, 70, 24
    widest = max([x for x, _ in points] or [1.0]) or 1.0
    highest = max([y for _, y in points] or [1.0]) or 1.0

    def at(x: float, y: float) -> tuple[float, float]:
        return left + x / widest * (WIDTH - left - right), bottom - min(y, highest) / highest * (
            bottom - TOP
        )

    parts = [_text(12, 22, title, size=14), _text(left, height - 12, across), _text(8, TOP - 4, up)]
    for part in (0.0, 0.5, 1.0):
        (x, y), (end, _) = at(0, highest * part), at(widest, 0)
        parts += [
            _line(x, y, end, y, FAINT),
            _text(left - 8, y + 4, _short(highest * part), anchor="end"),
        ]
        x, y = at(widest * part, 0)
        parts.append(_text(x, y + 16, _short(widest * part), anchor="middle"))
    parts += [
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="1" fill="{COLOURS[0]}"/>'
        for x, y in (at(*point) for point in points)
    ]
    slope, middle = trend
    first, last = ((x, max(0.0, middle + slope * (x - widest / 2))) for x in (0.0, widest))
    parts.append(_line(*at(*first), *at(*last), COLOURS[4]))
    return _svg(height, parts)


def _decades(values: Sequence[float]) -> tuple[int, int]:
    exponents = [log10(value) for value in values]
    return int(min(exponents) // 1), int(-(-max(exponents) // 1))


def _short(value: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", size: int = 12, colour: str = INK
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" '
        f'fill="{colour}">{escape(text)}</text>'
    )


def _line(x: float, y: float, to_x: float, to_y: float, colour: str) -> str:
    return f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}" stroke="{colour}"/>'


def _svg(height: int, parts: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        'font-family="sans-serif">'
    )
    return "\n".join(
        [head, f'<rect width="{WIDTH}" height="{height}" fill="white"/>', *parts, "</svg>", ""]
    )
