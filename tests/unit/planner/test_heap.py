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

GIVEN = """
import sys, torch
x = torch.ones(2, requires_grad=True)
torch.autograd.backward((x * 2).sum())
assert "sympy" not in sys.modules
torch.autograd.backward(x * 2, torch.ones(2))
assert "sympy" in sys.modules
"""


def test_a_piece_that_is_mapped_leaves_no_hole() -> None:
    assert LARGEST_KEPT == memory.LARGEST_KEPT
    assert heap_bytes(300 * MIB, [5 * MIB, 0]) == int(300 * MIB * UNFIT) + 5 * MIB
    assert heap_bytes(0, [LARGEST_KEPT, 7]) == LARGEST_KEPT + 7
    assert heap_bytes(0, [LARGEST_KEPT + 1, 7]) == 7


def test_a_backward_pass_that_is_given_a_gradient_loads_what_is_counted() -> None:
    subprocess.run([sys.executable, "-c", GIVEN], check=True)


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
    facts = replace(FACTS, bucket_bytes=MIB)
    kept, freed = (training_bytes(SPEC, Plan.parse(f"dp=2,zero={zero}", 4), facts)[0] for zero in (1, 2))
    whole = kept.gradients
    assert freed.heap - kept.heap == min(MIB, whole)
