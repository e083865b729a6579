"""Modules of `tllm` that benchmarks name in strings are there."""

from __future__ import annotations

import importlib

import pytest

from benchmarks.fuzz.malformed_frames import GUIDED_MODULES


@pytest.mark.parametrize("module", GUIDED_MODULES)
def test_modules_that_atheris_watches_are_there(module: str) -> None:
    assert importlib.import_module(module).__name__ == module
