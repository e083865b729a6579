"""Benchmarks follow the modules of `tllm`: each can be imported, and so can those that it names in strings."""

from __future__ import annotations

import importlib

import pytest

from benchmarks.fuzz.malformed_frames import GUIDED_MODULES
from benchmarks.report.results import BENCHMARKS

MODULES = sorted(
    ".".join(path.relative_to(BENCHMARKS.parent).with_suffix("").parts)
    for path in BENCHMARKS.rglob("*.py")
    if path.name != "__init__.py"
)


@pytest.mark.parametrize("module", MODULES)
def test_each_module_can_be_imported(module: str) -> None:
    assert importlib.import_module(module).__doc__


@pytest.mark.parametrize("module", GUIDED_MODULES)
def test_modules_that_atheris_watches_are_there(module: str) -> None:
    assert importlib.import_module(module).__name__ == module
