"""Plain text for people: columns that line up, lines that end between words, JSON with a value on each line."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from collections.abc import Sequence
from itertools import groupby

import msgspec

from tllm.spec.plan import Plan


def span(start: int, stop: int) -> str:
    """A half-open range as it is written everywhere: [0, 11)."""
    return f"[{start}, {stop})"


def brief(plan: Plan) -> str:
    """A plan's short form with what repeats written once, as `--plan` takes it: layers=1+2*62+1."""

    def fold(found: re.Match[str]) -> str:
        runs = [(number, len(list(some))) for number, some in groupby(found[0].split("+"))]
        return "+".join(number if times < 3 else f"{number}*{times}" for number, times in runs)

    return re.sub(r"\d+(?:\+\d+){2,}", fold, str(plan))


def indented_json(value: object) -> str:
    """JSON of anything that msgspec encodes, indented."""
    return msgspec.json.format(msgspec.json.encode(value)).decode()


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows in columns, the first row their titles; numbers with units line up at the right. Columns for which the
    terminal has no room follow below, beside the first column once more."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    right = [all(row[i][:1].isdigit() for row in rows[1:] if row[i]) for i in range(len(widths))]
    lines: list[str] = []
    for columns in _beside_each_other(widths, terminal_width()):
        lines += [""] if lines else []
        for row in rows:
            cells = [row[i].rjust(widths[i]) if right[i] else row[i].ljust(widths[i]) for i in columns]
            lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def wrapped(text: str, width: int | None, indent: str = "  ") -> str:
    """Lines of prose that end between words where a terminal is so wide; without one they are as they were."""
    if width is None:
        return text
    return "\n".join(
        textwrap.fill(
            line,
            max(width, 20),
            subsequent_indent=re.match(" *", line)[0] + indent,  # type: ignore[index]
            break_long_words=False,
            break_on_hyphens=False,
        )
        for line in text.split("\n")
    )


def terminal_width() -> int | None:
    """Characters in a line of the terminal that is written to; None where it is none, and lines may have any length."""
    # Within a live display of rich sys.stdout is its proxy, and with older ones isatty() of that is always false.
    out = getattr(sys.stdout, "rich_proxied_file", sys.stdout)
    return shutil.get_terminal_size().columns if out.isatty() else None


def _beside_each_other(widths: Sequence[int], room: int | None) -> list[list[int]]:
    """The columns of each block of lines that has room; each block begins with column 0."""
    blocks = [[0]]
    for i in range(1, len(widths)):
        taken = sum(widths[j] + 2 for j in blocks[-1])
        if room is not None and taken + widths[i] > room and len(blocks[-1]) > 1:
            blocks.append([0])
        blocks[-1].append(i)
    return blocks
