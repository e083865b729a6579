"""What a process is said to have held is its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tllm.core.memory import free_bytes, group_memory, peak_bytes, private_bytes, rss_bytes, total_bytes

HELD = 256 * 2**20


@pytest.mark.skipif(sys.platform != "linux", reason="other systems say no more than `ru_maxrss`")
def test_a_peak_is_not_that_of_the_process_that_started_this_one() -> None:
    held = b"x" * HELD
    assert rss_bytes() > len(held)
    assert peak_bytes() > len(held)
    program = "from tllm.core.memory import peak_bytes; print(peak_bytes())"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=True)
    assert 0 < int(said.stdout) < HELD / 2


def test_what_is_free_is_what_the_machine_and_the_control_group_leave(tmp_path: Path) -> None:
    assert free_bytes(tmp_path) == 0, "nobody says"
    for name, text in {
        "proc/meminfo": "MemTotal: 4000 kB\nMemAvailable:    1000 kB\nHugePages_Total:  0\n",
        "proc/self/status": "Name:\ta\nVmData:\t  10 kB\nRssAnon:\t  4 kB\n",
        "sys/fs/cgroup/memory.max": "max\n",
        "sys/fs/cgroup/memory.current": "1024\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert free_bytes(tmp_path) == 1000 * 1024
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("3072\n")
    assert free_bytes(tmp_path) == 2048
    assert total_bytes(tmp_path) == 3072 and private_bytes(tmp_path) == (10 * 1024, 4 * 1024)
    (tmp_path / "sys/fs/cgroup/memory.max").unlink()
    (tmp_path / "sys/fs/cgroup/memory").mkdir()
    (tmp_path / "sys/fs/cgroup/memory/memory.limit_in_bytes").write_text("4096\n")
    (tmp_path / "sys/fs/cgroup/memory/memory.usage_in_bytes").write_text("1024\n")
    assert group_memory(tmp_path) == (4096, 1024) and free_bytes(tmp_path) == 3072
    assert free_bytes() > 0 or sys.platform != "linux"
