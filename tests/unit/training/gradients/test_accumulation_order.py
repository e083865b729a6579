"""In which order gradients are added: as a tree written out, whoever adds which part of it."""

from __future__ import annotations

import math

import pytest
import torch

from tllm.core.errors import PlanError
from tllm.spec.plan import Plan
from tllm.training.gradients.accumulation_order import (
    addition,
    as_tree,
    check_deterministic,
    exact_sum,
    one_after_another,
    virtual_shards,
)


def tree(terms: list[str]) -> str:
    if len(terms) == 1:
        return terms[0]
    half = len(terms) // 2
    return f"({tree(terms[:half])}+{tree(terms[half:])})"


def chain(terms: list[str]) -> str:
    return terms[0] if len(terms) == 1 else f"({chain(terms[:-1])}+{terms[-1]})"


def added(numbers: range, length: int) -> tuple[str, int]:
    """What a rank makes of its microbatches, and the most sums that it keeps at once."""
    sums: dict[int, str] = {}
    most = 0
    for index, number in enumerate(numbers):
        level, starts, stop = addition(index, length)
        sums[level] = str(number) if starts else f"({sums[level]}+{number})"
        most = max(most, level + 1)
        for upper in range(level, stop, -1):
            sums[upper - 1] = f"({sums[upper - 1]}+{sums.pop(upper)})"
    return sums[0], most


@pytest.mark.parametrize("total", [1, 2, 3, 4, 6, 8, 12, 16, 20, 40, 64])
def test_any_number_of_ranks_makes_the_same_tree(total: int) -> None:
    shards = virtual_shards(total)
    length = total // shards
    want = tree([chain([str(shard * length + place) for place in range(length)]) for shard in range(shards)])
    for ranks in (1, 2, 4, 8, 16):
        if shards % ranks == 0:
            mine = total // ranks
            parts = [added(range(rank * mine, rank * mine + mine), as_tree(mine, ranks)) for rank in range(ranks)]
            assert tree([sum_ for sum_, _ in parts]) == want
            assert {most for _, most in parts} == {(shards // ranks).bit_length()}, "one, and log2 of the subtrees"


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 12])
def test_losses_add_up_alike_however_dealt(ranks: int) -> None:
    losses = (torch.rand(12, generator=torch.Generator().manual_seed(5)) * torch.logspace(-7, 7, 12)).tolist()
    dealt = [exact_sum(losses[rank * 12 // ranks : (rank + 1) * 12 // ranks]) for rank in range(ranks)]
    assert exact_sum([part for pair in dealt for part in pair])[0] == math.fsum(losses)


def test_a_loss_that_is_no_number_is_not_lost() -> None:
    for bad in (math.nan, math.inf):
        assert not math.isfinite(exact_sum([1.0, bad])[0])
    assert math.isnan(exact_sum([math.inf, -math.inf])[0])
    assert exact_sum([]) == (0.0, 0.0)


def test_otherwise_they_are_added_one_after_another() -> None:
    assert added(range(5), one_after_another(5, 3)) == ("((((0+1)+2)+3)+4)", 1)
    assert one_after_another(0, 3) == 1, "a rank may have none"


def test_ranks_that_are_no_subtrees_are_our_own_mistake() -> None:
    with pytest.raises(AssertionError):
        as_tree(2, 3)


@pytest.mark.parametrize(
    ("text", "microbatches", "tied", "words"),
    [
        ("tp=2", 8, False, "tp=2: the parts of a product"),
        ("cp=2", 8, False, "cp=2: attention"),
        ("dp=2,ep=2", 8, False, "ep=2: an expert"),
        ("dp=2,servers=1", 8, False, "servers=1: each server adds up"),
        ("pp=2", 8, True, "pp=2 and tied"),
        ("dp=3:1", 8, False, "unequal shares dp=3:1"),
        ("dp=4", 6, False, "dp=4, which does not divide 2: the largest power of two in the 6 microbatches"),
        ("dp=3", 9, False, "dp=3, which does not divide 1"),
    ],
)
def test_a_plan_with_other_bits_is_refused(text: str, microbatches: int, tied: bool, words: str) -> None:
    with pytest.raises(PlanError) as caught:
        check_deterministic(Plan.parse(text, 4), microbatches, tied)
    assert words in caught.value.message and caught.value.hint


@pytest.mark.parametrize("text", ["pp=1", "dp=8", "dp=4,zero=3", "dp=2,pp=2,chunks=2,schedule=interleaved", "pp=4"])
def test_a_plan_with_the_same_bits_is_not(text: str) -> None:
    check_deterministic(Plan.parse(text, 4), 8, tied=False)


def test_a_tied_model_on_one_stage_is_not_refused() -> None:
    check_deterministic(Plan.parse("dp=8", 4), 24, tied=True)
