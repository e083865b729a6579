"""A process keeps to the memory that it was given, and says so in words when that is not enough."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tllm.core.errors import CapacityError
from tllm.core.memory import amount
from tllm.node.machine.memory_limit import out_of_memory

GIVEN = 600 * 2**20  # a process with torch at rest has a third of it

EATS = """
import sys, torch
from tllm.node.machine.memory_limit import keep_to, out_of_memory
from tllm.core.memory import peak_bytes, rss_bytes
keep_to(GIVEN)
held = []
try:
    while len(held) < 64:
        WHAT
except BaseException as error:
    told = out_of_memory(error, GIVEN)
    assert told is not None, repr(error)
    assert rss_bytes() > sum(SIZE(one) for one in held) > 0, "each was touched"
    assert peak_bytes() > sum(SIZE(one) for one in held)
    del held
    torch.ones(8).sum()
    print(told.message)
"""
TENSORS = ("held.append(torch.ones(16 * 2**20))", "SIZE = lambda one: one.nbytes")
OBJECTS = ('held.append(b"x" * 2**26)', "SIZE = len")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a process with a GPU is not held to it")
@pytest.mark.parametrize(("what", "size"), [TENSORS, OBJECTS])
def test_what_does_not_fit_is_refused_before_it_is_held(what: str, size: str) -> None:
    program = f"GIVEN = {GIVEN}\n{size}\n" + EATS.replace("WHAT", what)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=False)
    assert ended.returncode == 0, ended.stderr
    words = ended.stdout.strip()
    assert words.startswith("out of memory: it holds ") and words.endswith(f"{amount(GIVEN)} that it was given")
    assert float(words.split("(")[1].split(" MiB")[0]) < GIVEN / 2**20 + 150, "libraries' file pages do not count"


def test_only_a_lack_of_memory_is_told_as_one() -> None:
    assert out_of_memory(RuntimeError("shapes do not match"), 1) is None
    assert out_of_memory(CapacityError("the cache holds no page"), 1) is None
    found = out_of_memory(MemoryError(), None)
    assert isinstance(found, CapacityError) and found.message.endswith("did not fit the machine's memory")
