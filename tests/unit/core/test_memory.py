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


def in_groups(system: Path, files: dict[str, str]) -> tuple[int | None, int]:
    for name, text in files.items():
        (system / name).parent.mkdir(parents=True, exist_ok=True)
        (system / name).write_text(text)
    return group_memory(system)


def test_a_job_may_use_what_the_least_of_the_groups_around_it_allows(tmp_path: Path) -> None:
    """As schedulers and systemd make them: no limit stands at the root, and other programs of the job count too."""
    groups = {
        "proc/self/cgroup": "0::/slurm/job_7/step_0\n",
        "sys/fs/cgroup/slurm/memory.max": "8192",
        "sys/fs/cgroup/slurm/memory.current": "4096",
        "sys/fs/cgroup/slurm/job_7/memory.max": "2048",
        "sys/fs/cgroup/slurm/job_7/memory.current": "512",
        "sys/fs/cgroup/slurm/job_7/step_0/memory.max": "2048",
        "sys/fs/cgroup/slurm/job_7/step_0/memory.current": "256",
    }
    assert in_groups(tmp_path / "2", groups) == (2048, 512)
    assert in_groups(tmp_path / "2", {"sys/fs/cgroup/slurm/memory.current": "8092"}) == (2048, 1948), "100 are left"
    groups = {
        "proc/self/cgroup": "4:cpu,memory:/job\n0::/",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": str(2**63 - 4096),
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "9000",
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "4096",
        "sys/fs/cgroup/memory/job/memory.usage_in_bytes": "100",
    }
    assert in_groups(tmp_path / "1", groups) == (4096, 100)
    own = {"sys/fs/cgroup/memory.max": "5", "sys/fs/cgroup/memory.current": "1"}
    assert in_groups(tmp_path / "container", {"proc/self/cgroup": "0::/of/the/host", **own}) == (5, 1)


@pytest.mark.parametrize(
    ("limit", "used", "prefix"),
    [("memory.max", "memory.current", ""), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_")],
)
def test_files_in_a_groups_memory_give_way(tmp_path: Path, limit: str, used: str, prefix: str) -> None:
    """A model that was just copied fills all of a container's memory with its files, and there is still room for it."""
    groups = Path("sys/fs/cgroup")
    rows = {"anon": 210, "active_file": 5, f"{prefix}inactive_file": 500, f"{prefix}active_file": 290}
    stat = "".join(f"{name} {count}\n" for name, count in rows.items())
    files = {limit: "1000", used: "1000", str(Path(limit).parent / "memory.stat"): stat}
    assert in_groups(tmp_path, {str(groups / name): text for name, text in files.items()}) == (1000, 210)
