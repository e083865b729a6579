"""Curves as SVG, for pages whose numbers are seen rather than read: one panel beside another, one axis for all."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

PANEL, HEIGHT, MARGIN, LINE = 270, 190, 48, 16
COLOURS = ("#c1272d", "#0000a7", "#008176", "#eecc16", "#6f4fa0")

Points = Sequence[tuple[float, float]]


class Axes(NamedTuple):
    """What both axes say: a title, the lowest and highest value, and what stands at which values."""

    x_title: str
    x_range: tuple[float, float]
    x_ticks: Mapping[float, str]
    y_title: str
    y_range: tuple[float, float]
    y_ticks: Mapping[float, str]


def svg(panels: Mapping[str, Mapping[str, Points]], axes: Axes) -> str:
    """A picture of panels by their titles, each with curves by their names, which have one colour in all of them."""
    names = list(dict.fromkeys(name for curves in panels.values() for name in curves))
    colour = {name: COLOURS[place % len(COLOURS)] for place, name in enumerate(names)}
    width, height = len(panels) * (PANEL + MARGIN) + MARGIN, HEIGHT + 2 * MARGIN + LINE * (len(names) + 1)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
        f'font-size="11"><rect width="{width}" height="{height}" fill="white"/>'
    ]
    for place, (title, curves) in enumerate(panels.items()):
        left = MARGIN + place * (PANEL + MARGIN)
        parts += _frame(title, left, axes, is_first=place == 0)
        for name, points in curves.items():
            path = " ".join(f"{_x(x, left, axes):.1f},{_y(y, axes):.1f}" for x, y in points)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{colour[name]}" stroke-width="1.8"/>')
    for place, name in enumerate(names):
        y = HEIGHT + 2 * MARGIN + LINE * (place + 1)
        parts.append(f'<rect x="{MARGIN}" y="{y - 8}" width="18" height="3" fill="{colour[name]}"/>')
        parts.append(f'<text x="{MARGIN + 26}" y="{y - 2}">{name}</text>')
    return "\n".join((*parts, "</svg>")) + "\n"


def _frame(title: str, left: int, axes: Axes, is_first: bool) -> list[str]:
    bottom, middle = MARGIN + HEIGHT, left + PANEL / 2
    parts = [
        f'<rect x="{left}" y="{MARGIN}" width="{PANEL}" height="{HEIGHT}" fill="none" stroke="#888"/>',
        f'<text x="{middle}" y="{MARGIN - 10}" text-anchor="middle" font-weight="bold">{title}</text>',
        f'<text x="{middle}" y="{bottom + 32}" text-anchor="middle">{axes.x_title}</text>',
    ]
    for value, word in axes.x_ticks.items():
        x = _x(value, left, axes)
        parts.append(f'<line x1="{x:.1f}" y1="{MARGIN}" x2="{x:.1f}" y2="{bottom}" stroke="#e4e4e4"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 15}" text-anchor="middle">{word}</text>')
    if not is_first:
        return parts
    for value, word in axes.y_ticks.items():
        parts.append(f'<text x="{left - 5}" y="{_y(value, axes) + 4:.1f}" text-anchor="end">{word}</text>')
    turned = f'transform="rotate(-90 12 {MARGIN + HEIGHT / 2})"'
    return [*parts, f'<text x="12" y="{MARGIN + HEIGHT / 2}" text-anchor="middle" {turned}>{axes.y_title}</text>']


def _x(value: float, left: int, axes: Axes) -> float:
    low, high = axes.x_range
    return left + PANEL * (min(max(value, low), high) - low) / (high - low)


def _y(value: float, axes: Axes) -> float:
    low, high = axes.y_range
    return MARGIN + HEIGHT * (1 - (min(max(value, low), high) - low) / (high - low))


def axes_for(panels: Mapping[str, Mapping[str, Points]], x_title: str, y_title: str) -> Axes:
    """Axes from nothing to the end of what is drawn, with round values at some three to eight places."""
    points = [point for curves in panels.values() for line in curves.values() for point in line]
    (x_range, x_ticks), (y_range, y_ticks) = (
        _rounded(min(0.0, *(point[place] for point in points)), max(point[place] for point in points))
        for place in range(2)
    )
    return Axes(x_title, x_range, x_ticks, y_title, y_range, y_ticks)


def _rounded(low: float, high: float) -> tuple[tuple[float, float], dict[float, str]]:
    """A range that begins at one of the whole steps of 1, 2 or 5 times a power of ten, and what stands at each."""
    assert high > low, "a curve that is nothing but zeros has no axis"
    power = 10.0 ** math.floor(math.log10((high - low) / 3))
    step = max(times * power for times in (1, 2, 5) if times * power <= (high - low) / 3)
    first, last = math.floor(low / step), math.floor(high / step + 1e-9)
    places = max(0, -math.floor(math.log10(step)))
    return (first * step, high), {place * step: f"{place * step:,.{places}f}" for place in range(first, last + 1)}
