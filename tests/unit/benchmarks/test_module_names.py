"""Benchmarks follow the modules of `tllm`: each can be imported, and so can those that it names in strings."""

from __future__ import annotations

import importlib
import re
import subprocess
from types import SimpleNamespace

import pytest

from benchmarks import __main__ as bench
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


NEEDS_MORE = {
    "serving.many_requests",
    "training.low_communication",
    "training.post_training",
    "devices.training",
    "faults.mixed_load_beside",
}
"""Another program, a text or a GPU."""


def test_make_bench_runs_all_that_need_nothing_else_though_some_cannot_be_run(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def run(words: list[str], **how: object) -> SimpleNamespace:
        ran.append(words[2].removeprefix("benchmarks."))
        if how["check"]:
            raise subprocess.CalledProcessError(1, words)
        return SimpleNamespace(returncode=ran[-1] == "training.slow_links")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr("sys.argv", ["benchmarks"])
    with pytest.raises(SystemExit, match=r"failed, as each says above: training\.slow_links$"):
        bench.main()
    listed = re.findall(r"^\| `([a-z_.]+)", (BENCHMARKS / "README.md").read_text(), re.MULTILINE)
    known = {name for name in listed if "." in name}
    assert set(ran) == known - NEEDS_MORE
