"""Kernels are compiled once for all checkouts of the same sources."""

from __future__ import annotations

import runpy
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.house.tree import ROOT
from tllm.kernels.instruction_sets import FOLDER


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What is run in place of the compiler: each writes its own number where the compiler would write its output."""
    found: list[list[str]] = []

    def run(command: list[str], **settings: Any) -> None:
        found.append(command)
        Path(command[-1]).write_text(str(len(found)))

    monkeypatch.setattr(subprocess, "run", run)
    return found


def checkout(folder: Path) -> Path:
    (folder / "src" / "tllm").mkdir(parents=True)
    shutil.copy(ROOT / "setup.py", folder)
    shutil.copytree(ROOT / "src/tllm/kernels", folder / "src/tllm/kernels", ignore=shutil.ignore_patterns(FOLDER))
    return folder


def compiled(folder: Path) -> dict[str, str]:
    runpy.run_path(str(folder / "setup.py"))["compile_kernels"]("aarch64")
    return {path.name: path.read_text() for path in (folder / "src/tllm/kernels" / FOLDER).iterdir()}


def test_a_second_checkout_compiles_nothing(tmp_path: Path, commands: list[list[str]]) -> None:
    first = compiled(checkout(tmp_path / "one"))
    assert len(first) == 2 and len(commands) == 4, "each is compiled and linked"
    assert compiled(checkout(tmp_path / "two")) == first and len(commands) == 4


def test_other_sources_are_compiled(tmp_path: Path, commands: list[list[str]]) -> None:
    first, other = compiled(checkout(tmp_path / "one")), checkout(tmp_path / "two")
    (other / "src/tllm/kernels/csrc/registers.h").write_text("// another\n")
    assert compiled(other) != first and len(commands) == 8


def test_libraries_that_are_older_than_what_they_are_compiled_for_are_compiled_again(
    tmp_path: Path, commands: list[list[str]]
) -> None:
    """In the same checkout, where they lie; `instruction_sets.py` says what they are compiled for."""
    first, table = compiled(checkout(tmp_path)), tmp_path / "src/tllm/kernels/instruction_sets.py"
    table.write_text(table.read_text().replace('"generic+dotprod"', '"generic+dotprod+i8mm"'))
    assert compiled(tmp_path) != first
    assert any("-mcpu=generic+dotprod+i8mm" in words for words in commands[4:])


def test_a_cache_that_cannot_be_written_is_done_without(
    tmp_path: Path, commands: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert compiled(checkout(tmp_path / "one")) != compiled(checkout(tmp_path / "two")) and len(commands) == 8


def test_the_oldest_are_forgotten(tmp_path: Path, commands: list[list[str]]) -> None:
    for number in range(8):
        folder = checkout(tmp_path / str(number))
        (folder / "src/tllm/kernels/csrc/another.h").write_text(str(number))
        compiled(folder)
    assert len(list((tmp_path / "cache" / "tllm" / "compiled").iterdir())) == 6


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
