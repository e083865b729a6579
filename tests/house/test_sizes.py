"""Files and functions stay small enough to read."""

from __future__ import annotations

import ast

from tests.house.tree import functions, name_of, parse, sources

FILE_LINES = 500
FUNCTION_LINES = 80


def test_files_are_short() -> None:
    faults = [f"{name_of(p)}: {n} lines" for p in sources() if (n := len(p.read_text().splitlines())) > FILE_LINES]
    assert not faults, f"over {FILE_LINES} lines:\n" + "\n".join(faults)


def test_functions_fit_a_screen() -> None:
    faults = [
        f"{name_of(path)}:{function.lineno}: {function.name} has {length} lines"
        for path in sources()
        for function in functions(path)
        if (length := (function.end_lineno or 0) - function.lineno + 1) > FUNCTION_LINES
    ]
    assert not faults, f"over {FUNCTION_LINES} lines:\n" + "\n".join(faults)


def test_each_file_says_what_it_is() -> None:
    faults = [name_of(p) for p in sources() if p.stat().st_size and not ast.get_docstring(parse(p))]
    assert not faults, f"no docstring in {faults}"
