"""Timelines as pictures: each stage a line, each batch or op a box, in SVG and in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from tllm.core.errors import ConfigError
from tllm.planner.simulate.explain import StageTimeline

COLOURS = {
    "forward": "#4c78a8",
    "backward": "#59a14f",
    "backward_input": "#59a14f",
    "backward_weight": "#b6d7a8",
    "sums": "#f28e2b",
}
LETTERS = {"forward": "F", "backward": "B", "backward_input": "I", "backward_weight": "W", "sums": "S"}

NAMES = {
    "forward": "forward",
    "backward": "backward",
    "backward_weight": "gradients of weights",
    "sums": "sums of gradients",
}

WIDTH, ROW, LEFT, TOP, BELOW = 1000, 26, 160, 50, 30
TICKS = 10
MOST = 150
"""Letters of a title that have room."""


def save_svg(path: Path, lines: Sequence[StageTimeline], title: str) -> None:
    """Write the picture. ConfigError where the file cannot be written."""
    try:
        path.write_text(as_svg(lines, title), "utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}", "give --svg a file that can be written") from error


def as_svg(lines: Sequence[StageTimeline], title: str) -> str:
    """A picture that a browser shows: grey where a line waits; what a box is stands in its tooltip."""
    end = _end(lines)
    scale = WIDTH / end if end else 0.0
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 20}" '
        f'height="{TOP + ROW * len(lines) + BELOW}" font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="#fff"/>',
        f'<text x="4" y="16" font-size="13">{escape(title if len(title) <= MOST else title[:MOST] + " …")}</text>',
        *_legend(lines),
    ]
    for number, line in enumerate(lines):
        y = TOP + ROW * number
        parts.append(f'<text x="4" y="{y + 15}">{escape(line.name[:24])}</text>')
        parts.append(f'<rect x="{LEFT}" y="{y}" width="{WIDTH}" height="{ROW - 6}" fill="#eee"/>')
        for bar in line.bars:
            x, width = LEFT + bar.start * scale, max(0.5, (bar.stop - bar.start) * scale)
            parts.append(
                f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{ROW - 6}" fill="{COLOURS[bar.kind]}" '
                f'stroke="#fff" stroke-width="{min(0.5, width / 8):.2f}"><title>{escape(bar.text)}: '
                f"{1e3 * bar.start:.3f} to {1e3 * bar.stop:.3f} ms</title></rect>"
            )
    return "\n".join([*parts, *_axis(TOP + ROW * len(lines) + 12, end), "</svg>", ""])


def _legend(lines: Sequence[StageTimeline]) -> list[str]:
    """The colours that are there, in words."""
    kinds = {bar.kind for line in lines for bar in line.bars}
    shown = {NAMES.get(kind, "backward"): COLOURS[kind] for kind in COLOURS if kind in kinds}
    parts, x = list[str](), LEFT
    for name, colour in [*shown.items(), ("waiting", "#eee")]:
        parts.append(f'<rect x="{x}" y="28" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 17}" y="38">{name}</text>')
        x += 40 + 7 * len(name)
    return parts


def _axis(y: int, end: float) -> list[str]:
    """Milliseconds below the lines."""
    parts = list[str]()
    for tick in range(TICKS + 1):
        x = LEFT + WIDTH * tick / TICKS
        unit = " ms" if tick == TICKS else ""
        parts.append(f'<line x1="{x:g}" y1="{y - 12}" x2="{x:g}" y2="{y - 8}" stroke="#888"/>')
        parts.append(f'<text x="{x:g}" y="{y + 4}" text-anchor="middle">{1e3 * end * tick / TICKS:.4g}{unit}</text>')
    return parts


def as_text(lines: Sequence[StageTimeline], width: int = 72) -> str:
    """One row of letters for each stage; what it does longest in a column's time stands there, a dot where it waits."""
    end = _end(lines)
    label = max((len(line.name) for line in lines), default=0)
    rows = []
    for line in lines:
        columns = [dict[str, float]() for _ in range(width)]
        for bar in line.bars:
            first, last = bar.start / end * width, bar.stop / end * width
            for column in range(int(first), min(width, int(last) + 1)):
                covered = min(last, column + 1) - max(first, column)
                letter = LETTERS[bar.kind]
                columns[column][letter] = columns[column].get(letter, 0.0) + covered
        row = "".join(_letter(column) for column in columns)
        rows.append(f"{line.name.ljust(label)} |{row}|")
    return "\n".join([*rows, f"{' ' * label}  0{f'{1e3 * end:.4g} ms'.rjust(width - 1)}"])


def _letter(column: dict[str, float]) -> str:
    letter = max(column, key=lambda one: column[one], default=".")
    return letter if column and sum(column.values()) >= 0.5 else "."


def _end(lines: Sequence[StageTimeline]) -> float:
    return max((bar.stop for line in lines for bar in line.bars), default=0.0)
