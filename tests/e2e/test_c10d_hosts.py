"""The backend "tllm" between two hosts: an open interface for those that know the secret, tuned to the link."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.house.tree import ROOT
from tests.support.cluster.hosts import Hosts, why_not

PROGRAM = """
import logging, torch, torch.distributed as dist
from datetime import timedelta
import tllm.comm
logging.basicConfig(level=logging.INFO, format="%(message)s")
dist.init_process_group("tllm", timeout=timedelta(seconds=60))
x = torch.full((200_000,), float(dist.get_rank() + 1))
dist.all_reduce(x)
print("sum", x.min().item(), x.max().item(), flush=True)
dist.destroy_process_group()
"""
SECRET = "0123456789abcdef" * 2
PORT = 29500


@pytest.mark.netns
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ranks_of_two_hosts_meet_by_the_secret_and_measure_their_link(tmp_path: Path) -> None:
    if missing := why_not():
        pytest.skip(missing)
    with Hosts(2, rate="1gbit") as hosts:
        logs = [tmp_path / f"rank-{rank}.log" for rank in range(2)]
        processes = [
            hosts.start(
                rank,
                *(sys.executable, "-c", PROGRAM),
                env={
                    "MASTER_ADDR": hosts.addresses[0],
                    "MASTER_PORT": str(PORT),
                    "RANK": str(rank),
                    "WORLD_SIZE": "2",
                    "TLLM_SECRET": SECRET,
                    "PYTHONPATH": str(ROOT / "src"),
                },
                log=log,
            )
            for rank, log in enumerate(logs)
        ]
        codes = [process.wait(150) for process in processes]
        said = [log.read_text() for log in logs]
    assert codes == [0, 0], said
    for words in said:
        assert "sum 3.0 3.0" in words
        assert "group 0: 2 ranks on 2 machines, " in words
