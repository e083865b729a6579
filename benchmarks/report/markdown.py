"""Tables and numbers in Markdown, as the result pages have them."""

from __future__ import annotations

from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]], left: int = 1, comment: bool = False) -> str:
    """A table whose first row holds the titles.

    The first `left` columns are words, and with `comment` the last one, too; the others line up at the right.
    """
    titles, *body = (f"| {' | '.join(row)} |" for row in rows)
    numbers = len(rows[0]) - left - comment
    return "\n".join([titles, "|---" * left + "|--:" * numbers + "|---" * comment + "|", *body])


def percent(share: float, sign: bool = False) -> str:
    """0.123 as "12.3 %", with a plus where `sign` is asked for."""
    return f"{100 * share:+.1f} %" if sign else f"{100 * share:.1f} %"
