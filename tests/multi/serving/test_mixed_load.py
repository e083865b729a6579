"""An hour of chats, tools, long prompts, clients that go away and bad requests leaves nothing behind."""

from __future__ import annotations

from copy import deepcopy

import pytest

from benchmarks.faults.mixed_load import changes, left_behind, page, run
from benchmarks.processes.python_module import ROOT

HOUR = 3600.0


@pytest.mark.soak
@pytest.mark.timeout(2 * HOUR)
def test_an_hour_of_mixed_load_leaves_nothing_behind() -> None:
    found = run(str(ROOT / "models" / "tiny"), "pp=2", HOUR)
    assert not found["faults"]
    assert not found["left"]
    assert all(seen["done"] for seen in found["seen"].values())
    assert "Nothing was left behind." in page(found).meaning


def test_what_is_left_behind_is_told() -> None:
    kinds = {"heap": 1000, "anonymous": 50000, "huge pages": 0}
    process = {"name": "tllm.cli", "rss_kib": 51000, "kinds_kib": kinds, "threads": 3, "descriptors": 9}
    rest = {"processes": [process, process], "tasks": 16.0, "running": 0.0, "waiting": 0.0, "pages": 0.0}
    assert left_behind(rest, rest) == []
    later = deepcopy(rest)
    larger = process | {"rss_kib": 52050, "kinds_kib": kinds | {"heap": 2050}, "descriptors": 10}
    later |= {"tasks": 17.0, "pages": 0.5, "processes": [process, larger]}
    assert left_behind(rest, later) == [
        "tasks: 16 before, 17 after",
        "pages: 0.5 at rest",
        "process 1 (tllm.cli): 9 descriptors before, 10 after",
        "process 1 (tllm.cli): 51000 KiB before, 52050 after (heap +1.0 MiB)",
    ]
    assert changes(rest, later) == ["process 1: heap +1.0 MiB"]
    assert left_behind(rest, rest | {"processes": [process]}) == ["2 processes before, 1 after"]
