"""What a training process holds beside the tensors that live."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from tests.support.small_job import CONFIG
from tllm.engine import memory
from tllm.planner.heap import LARGEST_KEPT, SYMBOLS_BYTES, UNFIT, heap_bytes
from tllm.planner.ranks import TrainingFacts
from tllm.planner.room import RUNTIME_BYTES
from tllm.planner.training import training_bytes
from tllm.spec.families import spec_from_config
from tllm.spec.plan import Plan

MIB = 2**20
SPEC = spec_from_config(CONFIG | dict(num_hidden_layers=4))
FACTS = TrainingFacts(64, 8)
WHOLE = training_bytes(SPEC, Plan.parse("pp=1", 4), FACTS)[0].gradients

GIVEN = """
import sys, torch
from tllm.ground.memory import rss_bytes
x = torch.ones(2, requires_grad=True)
torch.autograd.backward((x * 2).sum())
assert "sympy" not in sys.modules
before = rss_bytes()
torch.autograd.backward(x * 2, torch.ones(2))
assert "sympy" in sys.modules
print(rss_bytes() - before)
"""


def test_a_piece_that_is_mapped_leaves_no_hole() -> None:
    assert LARGEST_KEPT == memory.LARGEST_KEPT
    assert heap_bytes(300 * MIB, [5 * MIB, 0]) == int(300 * MIB * UNFIT) + 5 * MIB
    assert heap_bytes(0, [LARGEST_KEPT, 7]) == LARGEST_KEPT + 7
    assert heap_bytes(0, [LARGEST_KEPT + 1, 7]) == 7


def test_a_backward_pass_that_is_given_a_gradient_loads_what_is_counted() -> None:
    done = subprocess.run([sys.executable, "-c", GIVEN], check=True, capture_output=True, text=True)
    assert 0.8 * SYMBOLS_BYTES < int(done.stdout) <= SYMBOLS_BYTES


@pytest.mark.parametrize(
    ("plan", "loaded"),
    [
        ("pp=1", [False]),
        ("tp=2", [False, False]),
        ("pp=2", [True, False]),
        ("pp=2,schedule=zero_bubble", [True, True]),
        ("pp=2,schedule=interleaved,chunks=2", [True, True]),
    ],
)
def test_stages_that_are_sent_gradients(plan: str, loaded: list[bool]) -> None:
    ranks = training_bytes(SPEC, Plan.parse(plan, SPEC.num_layers), FACTS)
    assert [rank.runtime for rank in ranks] == [RUNTIME_BYTES + SYMBOLS_BYTES * one for one in loaded]


def test_the_heap_is_of_passes_and_the_longest_piece() -> None:
    (alone,) = training_bytes(SPEC, Plan.parse("pp=1", 4), FACTS)
    gradient = 4 * max(300 * 32, 2 * 64 * 32)
    logits = 4 * 64 * 300
    passes = alone.activations + alone.logits + alone.working
    assert alone.heap == int(passes * UNFIT) + max(gradient, logits)
    assert alone.total - replace(alone, heap=0).total == alone.heap


def test_a_bucket_that_is_given_back_leaves_a_hole() -> None:
    few = replace(FACTS, bucket_bytes=50_000)
    for facts, hole in ((FACTS, WHOLE), (few, 50_000)):
        kept, freed = (training_bytes(SPEC, Plan.parse(f"dp=2,zero={zero}", 4), facts)[0] for zero in (1, 2))
        assert freed.heap - kept.heap == hole


@pytest.mark.parametrize(("bucket", "buffers"), [(MIB, WHOLE), (100_000, WHOLE), (50_000, 100_000)])
def test_a_bucket_is_received_where_no_shorter_one_was(bucket: int, buffers: int) -> None:
    (rank, _) = training_bytes(SPEC, Plan.parse("dp=2", 4), replace(FACTS, bucket_bytes=bucket))
    assert rank.buffers == buffers


def test_a_room_that_is_mapped_goes_back() -> None:
    wide = spec_from_config(CONFIG | dict(num_hidden_layers=4, vocab_size=400_000, tie_word_embeddings=False))
    table = 4 * wide.vocab_size * wide.hidden_size
    assert table > LARGEST_KEPT
    assert training_bytes(wide, Plan.parse("dp=2", 4), FACTS)[0].buffers == table
