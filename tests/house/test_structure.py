"""Folders tell a story: few files each, sub-packages in floors, no circles, and a class name that exists once."""

from __future__ import annotations

import ast
import functools
from collections import defaultdict
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from tests.house.tree import FLOORS, ROOT, SOURCE, SUB_PACKAGES, imports, name_of, nodes, parse, sources

FOLDER_FILES = 15
"""Python files in a folder; an `__init__.py` without content is not counted, as there is nothing to read in it."""


@functools.cache
def modules() -> dict[str, Path]:
    """Every source file by its dotted name, but for the `__init__.py` of packages, which say nothing."""
    files = (path for path in sources() if path.name != "__init__.py")
    return {".".join(path.relative_to(SOURCE.parent).with_suffix("").parts): path for path in files}


@functools.cache
def imported_modules(path: Path) -> tuple[str, ...]:
    """Modules of the package that a file imports, be it `import a.b`, `from a.b import name` or `from a import b`."""
    known = modules()
    named = {
        f"{node.module}.{alias.name}"
        for node in nodes(path)
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    direct = (imported.module for imported in imports(path) if imported.module in known)
    return (*sorted(name for name in named if name in known), *direct)


def circle_in(graph: Mapping[str, set[str]]) -> list[str]:
    """One circle of a graph, or an empty list."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_folders_are_short_enough_to_tell_a_story() -> None:
    faults = []
    for top in ("src", "tests", "benchmarks"):
        for folder in sorted({path.parent for path in (ROOT / top).rglob("*.py") if path.stat().st_size}):
            files = [path for path in folder.glob("*.py") if path.stat().st_size]
            if len(files) > FOLDER_FILES:
                faults.append(f"{name_of(folder)}: {len(files)} files")
    assert not faults, f"over {FOLDER_FILES} files in a folder, make sub-packages by subject:\n" + "\n".join(faults)


def test_no_circle_of_modules() -> None:
    graph = {name: set(imported_modules(path)) for name, path in modules().items()}
    assert not (circle := circle_in(graph)), " imports ".join(circle)


def test_no_circle_of_sub_packages() -> None:
    """A package and its sub-packages count as neighbours: what lies in the package itself is one more room of it."""
    graph: dict[str, set[str]] = defaultdict(set)
    for name, path in modules().items():
        here = name.rpartition(".")[0]
        graph[here] |= {there for other in imported_modules(path) if (there := other.rpartition(".")[0]) != here}
    assert not (circle := circle_in(graph)), " imports ".join(circle)


def test_sub_packages_import_only_what_stands_before_them() -> None:
    """`SUB_PACKAGES` lists the sub-packages of each package from the ground up; "." is the package's own files."""
    faults = []
    for path in modules().values():
        parts = path.relative_to(SOURCE).parts
        if len(parts) < 2 or parts[0] not in SUB_PACKAGES:
            continue
        package, here = parts[0], parts[1] if len(parts) > 2 else "."
        order = SUB_PACKAGES[package]
        for imported in imports(path):
            steps = imported.module.split(".")
            if steps[:2] != ["tllm", package]:
                continue
            there = steps[2] if len(steps) > 2 and (SOURCE / package / steps[2]).is_dir() else "."
            if order.index(there) > order.index(here):
                faults.append(f"{name_of(path)}:{imported.line}: {package}/{here} imports {package}/{there}")
    assert not faults, "\n".join(faults)


def test_every_sub_package_has_its_place() -> None:
    for package in FLOORS:
        folders = {path.name for path in (SOURCE / package).iterdir() if path.is_dir() and any(path.glob("*.py"))}
        assert folders == set(SUB_PACKAGES.get(package, ())) - {"."}, (
            f"{package}: add it to SUB_PACKAGES and to HOUSE.md"
        )


def test_a_public_class_name_exists_once() -> None:
    places = defaultdict(list)
    for path in sources():
        for node in parse(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(name_of(path))
    faults = [f"{name}: {', '.join(files)}" for name, files in sorted(places.items()) if len(files) > 1]
    assert not faults, "\n".join(faults)
