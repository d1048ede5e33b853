"""The plot of a rehearsal as SVG: the values of both runs over the steps, and where the job was disturbed. Pure."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Final

import msgspec

_WIDTH: Final = 960
_HEIGHT: Final = 240
_LEFT: Final = 70
_GAP: Final = 48
_COLOURS: Final = {"checkpoint": "#2a7", "back": "#c33", "move": "#36c"}


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """Values over steps: those of the undisturbed run, and those of the rehearsed one."""

    title: str
    steps: tuple[int, ...]
    expected: tuple[float, ...]
    found: tuple[float, ...]
    differs: int = -1  # the step of the first difference


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """A disturbance, at the step that was reached."""

    action: str
    step: int


def svg(title: str, series: Sequence[Series], marks: Sequence[Mark]) -> str:
    """One panel for each series, one above the other."""
    height = 60 + max(1, len(series)) * (_HEIGHT + _GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" font-family="sans-serif">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        _text(_LEFT, 24, title, size=16),
        _text(_LEFT, 44, "grey: undisturbed; black: rehearsed; lines: checkpoint (green), back (red), move (blue)"),
    ]
    for number, one in enumerate(series):
        parts += _panel(one, marks, 70 + number * (_HEIGHT + _GAP))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(one: Series, marks: Sequence[Mark], top: int) -> list[str]:
    bottom, right = top + _HEIGHT - 30, _WIDTH - 20
    parts = [
        f'<rect x="{_LEFT}" y="{top}" width="{right - _LEFT}" height="{bottom - top}" fill="none" stroke="#999"/>',
        _text(_LEFT, top - 6, one.title),
    ]
    values = [value for value in (*one.expected, *one.found) if value == value and abs(value) != float("inf")]
    if not one.steps or not values:
        return [*parts, _text(_LEFT + 10, top + 20, "no numbers")]
    low, high = min(values), max(values)
    first, last = one.steps[0], one.steps[-1]
    wide, tall = (last - first) or 1, (high - low) or 1.0

    def x(step: float) -> float:
        return _LEFT + (step - first) / wide * (right - _LEFT)

    def y(value: float) -> float:
        return bottom - (value - low) / tall * (bottom - top)

    for mark in marks:
        if first <= mark.step <= last:
            at = f"{x(mark.step):.1f}"
            parts.append(
                f'<line x1="{at}" y1="{top}" x2="{at}" y2="{bottom}" stroke="{_COLOURS.get(mark.action, "#777")}"/>'
            )
    for data, colour, width in ((one.expected, "#bbb", 4), (one.found, "#000", 1)):
        points = " ".join(
            f"{x(step):.1f},{y(value):.1f}" for step, value in zip(one.steps, data, strict=False) if value == value
        )
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{width}"/>')
    if one.differs >= 0:
        where = x(one.differs)
        parts.append(f'<circle cx="{where:.1f}" cy="{top + 8}" r="5" fill="#c0c"/>')
        parts.append(_text(where + 8, top + 12, f"first difference: step {one.differs}"))
    parts += [
        _text(4, top + 10, f"{high:.5g}"),
        _text(4, bottom, f"{low:.5g}"),
        _text(_LEFT, bottom + 16, str(first)),
        _text(right - 40, bottom + 16, str(last)),
    ]
    return parts


def _text(x: float, y: float, text: str, *, size: int = 12) -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" font-size="{size}">{html.escape(text)}</text>'
