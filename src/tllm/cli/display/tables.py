"""Plain text for people: amounts with units, and columns that line up."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby

from tllm.spec.plan import Plan


def amount(count: float) -> str:
    """Bytes with a binary unit and three digits or so: 12.3 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.{dict(B=0, GiB=2).get(unit, 1)}f} {unit}"


def span(start: int, stop: int) -> str:
    """A half-open range as it is written everywhere: [0, 11)."""
    return f"[{start}, {stop})"


def brief(plan: Plan) -> str:
    """A plan's short form with what repeats written once, as `--plan` takes it: layers=1+2*62+1."""

    def fold(found: re.Match[str]) -> str:
        runs = [(number, len(list(some))) for number, some in groupby(found[0].split("+"))]
        return "+".join(number if times < 3 else f"{number}*{times}" for number, times in runs)

    return re.sub(r"\d+(?:\+\d+){2,}", fold, str(plan))


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows in columns, the first row their titles; numbers with units line up at the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    right = [all(row[i][:1].isdigit() for row in rows[1:] if row[i]) for i in range(len(widths))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if aligned else cell.ljust(width)
            for cell, width, aligned in zip(row, widths, right, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
