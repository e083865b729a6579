"""Programs of PyTorch on the backend "tllm": the numbers that they have on gloo; a rank that dies is named."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from typing import Any

import pytest
import torch

from tests.house.tree import ROOT
from tests.support.comm.c10d import run_processes
from tests.support.comm.torch_programs import PROGRAMS, everything, last_one_dies, last_one_dies_in_backward
from tests.support.commands.forked_command import ForkedCommand
from tllm.recipes.bench.processes import free_row

pytestmark = pytest.mark.timeout(300)  # eight processes at a time, on a core that may be busy


@cache
def results(backend: str, size: int) -> list[dict[str, Any]]:
    """What every program gave, by rank."""
    return run_processes(everything, size, backend)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(PROGRAMS))
def test_two_ranks_have_the_bits_that_they_have_on_gloo(name: str) -> None:
    for ours, theirs in zip(results("tllm", 2), results("gloo", 2), strict=True):
        assert ours[name] == theirs[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*PROGRAMS, "hybrid"])
def test_four_ranks_have_the_numbers_that_they_have_on_gloo(name: str) -> None:
    """Sums of four are added in other orders, so that float64 rounds otherwise, and in nothing else."""
    for ours, theirs in zip(results("tllm", 4), results("gloo", 4), strict=True):
        assert alike(ours[name], theirs[name])


def alike(ours: Any, theirs: Any) -> bool:
    if not isinstance(ours, list) or any(isinstance(one, dict | str) for one in ours):
        return bool(ours == theirs)
    try:
        a, b = torch.tensor(ours, dtype=torch.float64), torch.tensor(theirs, dtype=torch.float64)
    except (ValueError, TypeError):  # lists of different lengths or kinds
        return len(ours) == len(theirs) and all(map(alike, ours, theirs))
    return a.shape == b.shape and bool((a - b).abs().max() <= 1e-12 * max(float(b.abs().max()), 1.0))


@pytest.mark.slow
@pytest.mark.parametrize("case", [last_one_dies, last_one_dies_in_backward])
def test_a_killed_rank_is_named_to_the_others_who_go_on_without_it(case: Any) -> None:
    """In their processes, with the bits that two ranks have which never were three."""
    told = run_processes(case, 3, "tllm", dying=2)[:2]
    for rank, (words, found) in enumerate(told):
        assert f"all_reduce of rank {rank} in group" in words
        assert found == results("tllm", 2)[rank]
    assert any("rank 2 went away" in words for words, _ in told)


PROGRAM = """
import os, torch, torch.distributed as dist
import tllm.comm
dist.init_process_group("tllm")
x = torch.full((3,), float(dist.get_rank() + 1))
dist.all_reduce(x)
os.write(1, f"{dist.get_backend()} {x.tolist()}\\n".encode())
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_program_that_a_launcher_started_needs_two_lines() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    environment = {**os.environ, "TLLM_SECRET": "0123456789abcdef" * 2, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [*command, sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["tllm [3.0, 3.0, 3.0]"] * 2


def ended(program: str, size: int, **environment: str) -> tuple[list[int], list[str]]:
    """Exit code and words of each rank of a program."""
    port = free_row(1)
    processes = []
    for rank in range(size):
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(size)}
        settings = {**os.environ, **where, **environment, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
        command, pipe = [sys.executable, "-c", program], subprocess.PIPE
        processes.append(ForkedCommand(command, env=settings, stdout=pipe, stderr=subprocess.STDOUT, text=True))
    said = [process.communicate()[0] for process in processes]
    return [process.returncode for process in processes], said


LEAVING = """
import torch, torch.distributed as dist
from datetime import timedelta
import tllm.comm
from tllm.recipes.bench.processes import free_row
from tllm.core.errors import LinkError
dist.init_process_group("tllm", timeout=timedelta(seconds=900))
if dist.get_rank() == 0:
    dist.irecv(torch.ones(2), 1)
    dist.irecv(torch.ones(2), 1, tag=3)
    dist.all_reduce(torch.ones(3), async_op=True)
else:
    try:
        dist.recv(torch.ones(2), 0)
    except LinkError as error:
        print(error.message)
"""


def test_a_program_that_ends_while_it_waits_ends_at_once_and_is_missed() -> None:
    """Its deadline is five times as long as this test may take; python waits at its end for threads of its pools."""
    codes, said = ended(LEAVING, 2)
    assert codes == [0, 0], said
    assert said[0] == "" and said[1].startswith("recv of rank 1 in group 0: rank 0 went away")


COMPUTING = """
import atexit, threading, torch, torch.distributed as dist
import tllm.comm
begun, ending = threading.Event(), threading.Event()
atexit.register(ending.set)
dist.init_process_group("tllm")
def compute():
    begun.set()
    ending.wait()
    x = torch.zeros(8)
    for _ in range(200_000):
        x.add_(1)
    print(int(x[0]), flush=True)
dist.group.WORLD._group.start(compute)
begun.wait()
"""


def test_a_program_that_ends_while_its_group_computes_is_not_aborted() -> None:
    """Python ends a thread on its way out of an operation of torch, and C++ then ends the process."""
    codes, said = ended(COMPUTING, 1)
    assert (codes, said) == ([0], ["200000\n"])


SENDING = """
import torch, torch.distributed as dist
import tllm.comm
dist.init_process_group("tllm")
x = torch.ones(1 << 23)
if dist.get_rank():
    dist.recv(x, 0)
    print(int(x.sum()) == 2 * len(x))
else:
    dist.send(x.add_(1), 1)
"""


def test_what_was_sent_arrives_though_the_program_ends() -> None:
    """More than sockets hold, and so some of it leaves after `send`."""
    assert ended(SENDING, 2) == ([0, 0], ["", "True\n"])


DETAILED = """
import torch, torch.distributed as dist
import tllm.comm
dist.init_process_group("cpu:tllm")
assert dist.get_debug_level() == dist.DebugLevel.DETAIL
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
model(torch.full((1, 2), float(dist.get_rank()))).sum().backward()
dist.barrier()
print(model.module.weight.grad.tolist())
dist.destroy_process_group()
"""


def test_torch_may_look_at_every_detail() -> None:
    codes, said = ended(DETAILED, 2, TORCH_DISTRIBUTED_DEBUG="DETAIL", TORCH_CPP_LOG_LEVEL="ERROR")
    assert codes == [0, 0], said
    assert said == ["[[0.5, 0.5]]\n"] * 2
