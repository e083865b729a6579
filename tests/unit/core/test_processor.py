"""How many threads a process has time for under its control groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from tllm.core import processor
from tllm.core.processor import group_threads


@pytest.mark.parametrize(
    ("allowed", "threads"),
    [("max 100000", None), ("800000 100000", None), ("750000 100000", 7), ("50000 100000", 1), ("", None)],
)
def test_threads_that_always_go_on(
    allowed: str, threads: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor, "processors", lambda: 8)
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "cpu.max").write_text(f"{allowed}\n")
    assert group_threads(tmp_path) == threads


def test_a_system_without_control_groups(tmp_path: Path) -> None:
    assert group_threads(tmp_path) is None
