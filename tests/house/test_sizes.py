"""Files, functions and classes stay small enough to read."""

from __future__ import annotations

import ast

from tests.house.tree import functions, name_of, nodes, parse, sources

FILE_LINES = 500
FUNCTION_LINES = 80
PARAMETERS = 7
ATTRIBUTES = 12
RECORDS = {"NamedTuple", "Struct", "Message", "Event", "TypedDict", "Protocol"}
"""Bases of plain records and interfaces, whose fields are what they are for: a format's keys, a model's numbers."""


def test_files_are_short() -> None:
    faults = [f"{name_of(p)}: {n} lines" for p in sources() if (n := len(p.read_text().splitlines())) > FILE_LINES]
    assert not faults, f"over {FILE_LINES} lines:\n" + "\n".join(faults)


def test_functions_fit_a_screen() -> None:
    faults = [
        f"{name_of(path)}:{function.lineno}: {function.name} has {length} lines"
        for path in sources()
        for function in functions(path)
        if (length := (function.end_lineno or 0) - _first_line(function) + 1) > FUNCTION_LINES
    ]
    assert not faults, f"over {FUNCTION_LINES} lines:\n" + "\n".join(faults)


def test_functions_take_few_parameters() -> None:
    """What takes more takes a record: its name says what the values are together."""
    faults = []
    for path in sources():
        for function in functions(path):
            if _is_gpu_kernel(function):
                continue
            arguments = function.args
            names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
            count = len(names) - (names[:1] in (["self"], ["cls"]))
            if count > PARAMETERS:
                faults.append(f"{name_of(path)}:{function.lineno}: {function.name} takes {count}")
    assert not faults, f"over {PARAMETERS} parameters:\n" + "\n".join(faults)


def test_objects_hold_few_attributes() -> None:
    """A class that assigns more on `self` hides another object. Records are not counted: they only hold values."""
    faults = []
    for path in sources():
        for node in nodes(path):
            if not isinstance(node, ast.ClassDef) or _is_record(node):
                continue
            held = {
                target.attr
                for target in ast.walk(node)
                if isinstance(target, ast.Attribute) and isinstance(target.ctx, ast.Store)
                if isinstance(target.value, ast.Name) and target.value.id == "self"
            }
            if len(held) > ATTRIBUTES:
                faults.append(
                    f"{name_of(path)}:{node.lineno}: {node.name} holds {len(held)}: {', '.join(sorted(held))}"
                )
    assert not faults, f"over {ATTRIBUTES} attributes:\n" + "\n".join(faults)


def _is_gpu_kernel(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether Triton compiles it: such a function can take no record, so it takes each address, stride and size."""
    return any(ast.unparse(decorator).startswith("triton.jit") for decorator in function.decorator_list)


def _first_line(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Where it begins, or of a kernel, of whose parameters each has a line, its body."""
    return function.body[0].lineno if _is_gpu_kernel(function) else function.lineno


def _is_record(node: ast.ClassDef) -> bool:
    bases = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
    return bool(bases & RECORDS) or any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)


def test_each_file_says_what_it_is() -> None:
    faults = [name_of(p) for p in sources() if p.stat().st_size and not ast.get_docstring(parse(p))]
    assert not faults, f"no docstring in {faults}"
