"""The backend "tllm" between two hosts: an open interface for those that know the secret, tuned to the link; PyTorch's
programs have the numbers that they have on gloo, and the guide's outlives a rank."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.page import Block, read
from tests.house.tree import ROOT
from tests.support.cluster.hosts import Hosts, why_not
from tests.support.comm.c10d import run_processes
from tests.support.comm.torch_programs import everything

pytestmark = [
    pytest.mark.netns,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]

SUM = """
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
EVERYTHING = """
import json, torch, torch.distributed as dist
from datetime import timedelta
import tllm.comm
from tests.support.comm.torch_programs import everything
torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)
dist.init_process_group("tllm", timeout=timedelta(seconds=60))
print("found", json.dumps(everything(dist.get_rank(), 2)), flush=True)
dist.destroy_process_group()
"""
SECRET = "0123456789abcdef" * 2
PORT = "29500"
EVERYWHERE = {"TLLM_SECRET": SECRET, "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT)))}


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Hosts(2, rate="1gbit") as two:
        yield two


def on_both(hosts: Hosts, program: str, folder: Path) -> list[str]:
    """What a program says that has a rank on each host."""
    logs = [folder / f"rank-{rank}.log" for rank in range(2)]
    where = {"MASTER_ADDR": hosts.addresses[0], "MASTER_PORT": PORT, "WORLD_SIZE": "2"}
    command = (sys.executable, "-c", program)
    processes = [
        hosts.start(rank, *command, env={**EVERYWHERE, **where, "RANK": str(rank)}, log=log)
        for rank, log in enumerate(logs)
    ]
    codes = [process.wait(150) for process in processes]
    said = [log.read_text() for log in logs]
    assert codes == [0, 0], said
    return said


def test_ranks_of_two_hosts_meet_by_the_secret_and_measure_their_link(hosts: Hosts, tmp_path: Path) -> None:
    for words in on_both(hosts, SUM, tmp_path):
        assert "sum 3.0 3.0" in words
        assert "group 0: 2 ranks on 2 machines, " in words


@pytest.mark.soak  # `test_c10d` has the same programs on one host
def test_programs_have_the_numbers_over_two_hosts_that_they_have_on_gloo(hosts: Hosts, tmp_path: Path) -> None:
    said, there = on_both(hosts, EVERYTHING, tmp_path), run_processes(everything, 2, "gloo")
    for words, expected in zip(said, there, strict=True):
        (found,) = re.findall(r"^found (.*)$", words, re.MULTILINE)
        assert json.loads(found) == json.loads(json.dumps(expected))


@pytest.mark.soak  # `test_c10d` makes a group again after a rank was lost
def test_the_guides_program_goes_on_without_a_rank_that_is_lost(hosts: Hosts, tmp_path: Path) -> None:
    blocks = [one for one in read(ROOT / "docs" / "guides" / "c10d.md") if isinstance(one, Block)]
    (program,) = (block.text for block in blocks if block.words.get("file") == "elastic.py")
    logs = [tmp_path / f"process-{number}.log" for number in range(3)]
    words = (sys.executable, "-c", program)
    processes = [
        hosts.start(int(number > 0), *words, str(number), "3", hosts.addresses[0], PORT, env=EVERYWHERE, log=log)
        for number, log in enumerate(logs)
    ]
    until_step(5, logs[2], processes)
    os.kill(processes[2].pid, signal.SIGKILL)
    codes = [process.wait(100) for process in processes]
    said = [log.read_text() for log in logs]
    assert codes == [0, 0, -signal.SIGKILL], said
    for words_of_one in said[:2]:
        steps = [(int(step), int(ranks)) for step, ranks in re.findall(r"step (\d+) .* of (\d) ranks", words_of_one)]
        assert [step for step, ranks in steps if ranks == 2][-1] == 200
        last = max(step for step, ranks in steps if ranks == 3)
        assert min(step for step, ranks in steps if ranks == 2) in (last, last + 1), "nothing was begun anew"
    assert any("rank 2 went away" in one for one in said[:2]), said


def until_step(step: int, log: Path, processes: list[subprocess.Popen[bytes]]) -> None:
    end = time.monotonic() + 60
    while f"step {step} " not in log.read_text():
        assert time.monotonic() < end and all(process.poll() is None for process in processes), log.read_text()
        time.sleep(0.02)
