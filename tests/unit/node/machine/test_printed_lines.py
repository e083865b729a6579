"""What a user's function prints in a worker goes to its command, a whole line at a time."""

from __future__ import annotations

import io
from contextlib import redirect_stdout

from tllm.node.machine.printed_lines import PrintedLines


def test_whole_lines_go_on_behind_a_mark() -> None:
    target = io.StringIO()
    with redirect_stdout(PrintedLines(target, 1)):
        print("one", 1.5)
        print("two", end="")
        assert target.getvalue() == "PRINTED one 1.5\n"
        print("", "three\nfour", flush=True)
    assert target.getvalue().splitlines() == ["PRINTED one 1.5", "PRINTED two three", "PRINTED four"]


def test_what_ends_no_line_goes_on_where_it_is_flushed() -> None:
    """A function that prints its progress in one line showed nothing, and the last line of all was lost."""
    target = io.StringIO()
    lines = PrintedLines(target, 1)
    with redirect_stdout(lines):
        print("one", end=" ", flush=True)
        print("two", end="")
    assert target.getvalue() == "PRINTED one \n"
    lines.flush()  # as Python does when it ends
    lines.flush()
    assert target.getvalue() == "PRINTED one \nPRINTED two\n"
