"""What a training process holds beside the tensors that live."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from tests.support.training.small_job import CONFIG
from tllm.core import memory
from tllm.planner.cost.activations import recomputed_bytes
from tllm.planner.cost.buckets import ROOM_BYTES, buckets_of, receive_bytes
from tllm.planner.cost.rank_work import TrainingFacts, rank_works
from tllm.planner.memory.heap import (
    FRAGMENTATION,
    FRAGMENTATION_16_BIT,
    LARGEST_KEPT,
    READER_BYTES,
    SYMBOLS_BYTES,
    TRAINER_BYTES,
    heap_bytes,
    heap_part,
    largest_heap_piece,
)
from tllm.planner.memory.training_memory import training_bytes
from tllm.spec.families import spec_from_config
from tllm.spec.plan import Plan

MIB = 2**20
SPEC = spec_from_config(CONFIG | dict(num_hidden_layers=4))
FACTS = TrainingFacts(64, 8)
WHOLE = training_bytes(SPEC, Plan.parse("pp=1", 4), FACTS)[0].gradients

GIVEN = """
import sys, torch
from tllm.core.memory import rss_bytes
x = torch.ones(2, requires_grad=True)
torch.autograd.backward((x * 2).sum())
assert "sympy" not in sys.modules
before = rss_bytes()
torch.autograd.backward(x * 2, torch.ones(2))
assert "sympy" in sys.modules
print(rss_bytes() - before)
"""


def test_a_piece_that_is_mapped_leaves_no_hole() -> None:
    assert LARGEST_KEPT == memory.LARGEST_TRAINED
    assert largest_heap_piece([3 * MIB, LARGEST_KEPT, LARGEST_KEPT + 1]) == LARGEST_KEPT
    assert largest_heap_piece([LARGEST_KEPT + 1]) == largest_heap_piece([]) == 0
    assert heap_bytes(300 * MIB, [5 * MIB, 7], is_16_bit=False) == int(300 * MIB * FRAGMENTATION) + 5 * MIB + 7
    assert heap_bytes(300 * MIB, [], is_16_bit=True) == 300 * MIB * FRAGMENTATION_16_BIT > 300 * MIB * FRAGMENTATION
    assert heap_part(9 * MIB, LARGEST_KEPT) == 9 * MIB and heap_part(9 * MIB, LARGEST_KEPT + 1) == 0


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
    reads = [READER_BYTES, *[0] * (len(ranks) - 1)]
    found = [TRAINER_BYTES + a + SYMBOLS_BYTES * b for a, b in zip(reads, loaded, strict=True)]
    assert [rank.runtime for rank in ranks] == found


def test_the_heap_is_of_passes_and_the_longest_piece() -> None:
    (alone,) = training_bytes(SPEC, Plan.parse("pp=1", 4), FACTS)
    table, logits = 4 * 300 * 32, 4 * 64 * 300
    beside = alone.working - 3 * table  # of either use of the tied table, and their sum
    assert alone.heap == int((alone.activations + alone.logits + beside) * FRAGMENTATION) + logits
    assert alone.total - replace(alone, heap=0).total == alone.heap


def test_what_is_mapped_leaves_nothing_in_the_heap() -> None:
    """Of a vocabulary so large that logits and gradients of tables are longer than what the heap keeps."""
    wide = spec_from_config(CONFIG | dict(num_hidden_layers=4, vocab_size=400_000))
    (alone,) = training_bytes(wide, Plan.parse("pp=1", 4), FACTS)
    table, logits = 4 * 400_000 * 32, 4 * 64 * 400_000
    assert logits > table > LARGEST_KEPT
    beside = alone.working - max(table, 3 * table - logits)
    assert 0 < beside < MIB and alone.logits > logits
    inner = 4 * 2 * 64 * 32  # the longest gradient that is not mapped
    assert alone.heap == int((alone.activations + beside) * FRAGMENTATION) + inner


@pytest.mark.parametrize("zero", [2, 3])
def test_what_is_given_back_leaves_a_hole(zero: int) -> None:
    for facts in (FACTS, replace(FACTS, bucket_bytes=50_000)):
        plan = Plan.parse(f"dp=2,zero={zero}", 4)
        kept, freed = (training_bytes(SPEC, one, facts)[0] for one in (Plan.parse("dp=2,zero=1", 4), plan))
        bucket = max(buckets_of(SPEC, plan, facts, rank_works(SPEC, plan, facts)[0], spread=False))
        unit = 4 * 300 * 32  # the embedding, longer than a layer
        assert freed.heap - kept.heap == bucket + (unit if zero == 3 else 0)


def test_a_bucket_is_received_in_one_room_for_all() -> None:
    plan = Plan.parse("dp=2", 4)
    for bucket in (MIB, 100_000, 50_000):
        facts = replace(FACTS, bucket_bytes=bucket)
        (rank, _) = training_bytes(SPEC, plan, facts)
        found = buckets_of(SPEC, plan, facts, rank_works(SPEC, plan, facts)[0], spread=False)
        assert sum(found) == WHOLE and rank.buffers == receive_bytes(found, 2)
    assert found[0] >= 50_000 and len(found) == 3


def test_a_table_of_two_stages_is_received_where_passes_left_a_hole() -> None:
    """A float32 gradient leaves one as long as the room, a bfloat16 one half of it; logits leave a longer one."""
    own = spec_from_config(CONFIG | dict(num_hidden_layers=4, tie_word_embeddings=False))
    narrow, table = replace(FACTS, dtype="bfloat16"), 4 * 300 * 32
    for plan, found in (("pp=2", [table, 0]), ("pp=4", [table, 0, 0, 0])):
        ranks = training_bytes(SPEC, Plan.parse(plan, 4), narrow)
        assert [rank.buffers for rank in ranks] == found
        for spec, facts in ((SPEC, FACTS), (own, FACTS), (own, narrow)):
            assert not any(rank.buffers for rank in training_bytes(spec, Plan.parse(plan, 4), facts))


def test_a_table_that_is_mapped_goes_back_before_its_sum() -> None:
    wide = spec_from_config(CONFIG | dict(num_hidden_layers=4, vocab_size=400_000))
    table = 4 * wide.vocab_size * wide.hidden_size
    assert table > LARGEST_KEPT
    assert [rank.buffers for rank in training_bytes(wide, Plan.parse("pp=2", 4), FACTS)] == [0, 0]


def test_a_tied_table_comes_together_when_what_was_mapped_is_gone() -> None:
    """Of rows so long that layers are mapped too, all that is left at the end are three tables."""
    wide = spec_from_config(CONFIG | dict(num_hidden_layers=4, vocab_size=400_000))
    table = 4 * 400_000 * 32
    short = replace(FACTS, seq_len=8)
    (alone,) = training_bytes(wide, Plan.parse("pp=1", 4), short)
    assert alone.logits == 0 < alone.activations and 0 < alone.working - 3 * table < MIB
    (turning,) = training_bytes(wide, Plan.parse("pp=1", 4), FACTS)
    assert turning.logits > 2 * table and 0 < turning.working - table < MIB
    long = replace(FACTS, seq_len=LARGEST_KEPT // 64)
    narrow = replace(wide, vocab_size=300)
    (mapped,) = training_bytes(narrow, Plan.parse("pp=1", 4), long)
    assert mapped.activations > 100 * MIB > mapped.heap


def test_gathered_weights_of_zero_3_go_back_before_a_tied_table_comes_together() -> None:
    wide = spec_from_config(CONFIG | dict(num_hidden_layers=4, vocab_size=400_000))
    short, table = replace(FACTS, seq_len=8), 4 * 400_000 * 32
    parts, whole = (training_bytes(wide, Plan.parse(f"dp=2,zero={zero}", 4), short)[0] for zero in (3, 1))
    assert parts.weights == pytest.approx(whole.weights / 2, rel=0.01) and parts.working > 3 * table


def test_layers_that_are_worked_out_again_leave_room_for_longer_pieces() -> None:
    """A table of 51 MiB finds at the most what passes left."""
    wide = spec_from_config(CONFIG | dict(num_hidden_layers=4, vocab_size=400_000))
    whole, less = (training_bytes(wide, Plan.parse(f"pp=1{more}", 4), FACTS)[0] for more in ("", ",recompute=layer"))
    assert whole.heap < less.heap < 4 * MIB


def test_a_long_table_is_received_in_parts() -> None:
    wide = spec_from_config(CONFIG | dict(num_hidden_layers=4, vocab_size=400_000, tie_word_embeddings=False))
    table = 4 * wide.vocab_size * wide.hidden_size
    assert table > ROOM_BYTES
    (rank, _) = training_bytes(wide, Plan.parse("dp=2", 4), FACTS)
    assert rank.buffers == pytest.approx(2 * table / 2, rel=0.01), "the room of one half, and a little longer one"


def test_a_layer_that_is_worked_out_again_leaves_its_room() -> None:
    whole, less = (training_bytes(SPEC, Plan.parse(f"pp=1{more}", 4), FACTS)[0] for more in ("", ",recompute=layer"))
    (work,) = rank_works(SPEC, Plan.parse("pp=1", 4), FACTS)
    again = recomputed_bytes(SPEC, 0, work.cut, work.batch, "layer")
    saved = whole.activations + whole.logits - less.activations - less.logits
    assert whole.heap - less.heap == pytest.approx(FRAGMENTATION * saved - again, abs=2) and again > 0


def test_each_end_of_a_pipeline_writes_some_of_their_table() -> None:
    """Tables of 400,000 words, held twice with two states each: of three that are written the first end writes two, as
    the last one has a norm beside."""
    wide = spec_from_config(CONFIG | dict(num_hidden_layers=4, vocab_size=400_000))
    table = 4 * 400_000 * 32
    first, *inner, last = training_bytes(wide, Plan.parse("pp=4", 4), FACTS)
    assert [one.saving for one in inner] == [one.weights * 3 for one in inner]
    assert first.weights < 1.1 * table and last.weights < 1.1 * table
    assert (first.saving, last.saving) == (pytest.approx(2 * table, rel=0.02), pytest.approx(table, rel=0.02))
    (alone,) = training_bytes(wide, Plan.parse("pp=1", 4), FACTS)
    assert alone.saving == 3 * alone.weights
    assert training_bytes(wide, Plan.parse("pp=1,offload=disk", 4), FACTS)[0].saving == 0


def test_replicas_deal_out_what_they_save() -> None:
    for zero in (0, 1, 3):
        ranks = training_bytes(SPEC, Plan.parse(f"dp=2,zero={zero}", 4), FACTS)
        even = 3 * WHOLE / 2
        assert all(even <= one.saving + 100 <= even + 4 * 300 * 32 / 2 + 200 for one in ranks)
