from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.support.models.layouts import in_threads
from tests.unit.training.sums import draw, parameters_of, true_sums
from tllm.comm.collectives.group import Group, local_groups, solo
from tllm.comm.links.link import DEADLINE
from tllm.core.errors import LinkError
from tllm.parallel.replicated import ReplicatedParameters
from tllm.spec.plan import Zero
from tllm.training.gradients.bucket_layout import BucketLayout
from tllm.training.gradients.compressed_reduction import Int8Reduction
from tllm.training.gradients.delayed_reduction import DelayedReduction
from tllm.training.gradients.gradient_buckets import GradientBuckets
from tllm.training.gradients.reduction import Exact, GradientGroups, Reduction

SHAPES = ((6, 5), (7,), (4, 3))
Inner = Callable[[GradientBuckets], Reduction]
Pair = tuple[Group, Group]
"""The buckets' group, and the same ranks by links of their own."""


def pairs(ranks: int, deadline: float = DEADLINE) -> list[Pair]:
    return list(zip(local_groups(ranks, deadline, "dp"), local_groups(ranks, deadline, "late"), strict=True))


class Rank:
    """Parameters whose gradients are given."""

    def __init__(self, pair: Pair, inner: Inner = lambda buckets: Exact(), zero: Zero = 0) -> None:
        dp, late = (GradientGroups(group) for group in pair)
        self.parameters = parameters_of(SHAPES)
        self.buckets = GradientBuckets(
            BucketLayout(self.parameters, dp, zero, 100), ReplicatedParameters(self.parameters, solo())
        )
        self.late = self.buckets.reduction = DelayedReduction(self.buckets, inner(self.buckets), late)

    def step(self, gradients: list[Tensor]) -> list[Tensor]:
        """What is there to be applied after a step with these gradients."""
        self.buckets.begin(1)
        sum(((p * g).sum() for p, g in zip(self.parameters, gradients, strict=True)), torch.zeros(())).backward()
        self.buckets.finish()
        return self.held()

    def held(self) -> list[Tensor]:
        """Whole gradients, over the buckets' own links as they are."""
        named: dict[int, Tensor] = {}
        for number, bucket in enumerate(self.buckets.layout.buckets):
            held, dp = self.buckets.reduced(number), self.buckets.layout.groups.dp
            if self.buckets.layout.zero:
                held = torch.cat(dp.all_gather(held.clone(), [(count,) for count in bucket.counts(dp.size)]))
            views = bucket.views(held, self.parameters)
            named |= dict(zip(bucket.parameters, [view.clone() for view in views], strict=True))
        return [named[index] for index in range(len(self.parameters))]

    def close(self) -> None:
        self.buckets.close()
        self.late.close()


def run(
    ranks: int, gradients: list[list[list[Tensor]]], drains: tuple[int, ...], inner: Inner, zero: Zero = 0
) -> list[list[Tensor]]:
    """By what was applied in turn; drained after the steps `drains`."""

    def work(pair: Pair) -> list[list[Tensor]]:
        rank, applied = Rank(pair, inner, zero), []
        for step, of_ranks in enumerate(gradients):
            some = rank.late.on_the_way
            held = rank.step(of_ranks[pair[0].rank])
            if some:
                applied.append(held)
            else:
                assert not any(tensor.any() for tensor in held), "there is nothing to apply yet"
            if step in drains:
                rank.late.drain()
                applied.append(rank.held())
                assert not rank.late.on_the_way
        rank.late.drain()  # not recorded; a rank that leaves early would keep the others waiting
        rank.close()
        return applied

    by_rank = in_threads([lambda pair=pair: work(pair) for pair in pairs(ranks)])
    for other in by_rank[1:]:
        assert all(torch.equal(a, b) for x, y in zip(other, by_rank[0], strict=True) for a, b in zip(x, y, strict=True))
    return by_rank[0]


@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize("drains", [(4,), (1, 4), (0, 1, 2, 3, 4)])
def test_every_sum_comes_once_and_one_step_late(drains: tuple[int, ...], zero: Zero) -> None:
    gradients = draw(SHAPES, 3, 5)
    applied, want = run(3, gradients, drains, lambda buckets: Exact(), zero), true_sums(gradients)
    assert len(applied) == len(want)
    for got, true in zip(applied, want, strict=True):
        for a, b in zip(got, true, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


def test_without_a_drain_the_last_sum_is_still_on_its_way() -> None:
    gradients = draw(SHAPES, 2, 3)
    assert len(run(2, gradients, (), lambda buckets: Exact())) == 2


@pytest.mark.parametrize("zero", [0, 2])
def test_it_sends_by_another(zero: Zero) -> None:
    """What it gives are the bits that int8 gives at once, a step later."""
    gradients = draw(SHAPES, 2, 4)

    def at_once(pair: Pair) -> list[list[Tensor]]:
        rank = Rank(pair)
        rank.late.close()
        rank.buckets.reduction = Int8Reduction(rank.buckets)
        sums = [rank.step(of_ranks[pair[0].rank]) for of_ranks in gradients]
        rank.buckets.close()
        return sums

    want = in_threads([lambda pair=pair: at_once(pair) for pair in pairs(2)])[0]
    got = run(2, gradients, (3,), Int8Reduction, zero)
    assert all(torch.equal(a, b) for x, y in zip(got, want, strict=True) for a, b in zip(x, y, strict=True))
    exact = run(2, gradients, (3,), lambda buckets: Exact())
    assert not torch.equal(got[0][0], exact[0][0])


def test_a_step_ends_before_the_other_rank_has_begun_it() -> None:
    """Rank 1 takes its first step only when rank 0 has ended its own: nothing waits for the link within a step."""
    gradients, ended = draw(SHAPES, 2, 2), threading.Event()

    def work(pair: Pair) -> None:
        rank, number = Rank(pair), pair[0].rank
        if number == 1:
            assert ended.wait(20)
        rank.step(gradients[0][number])
        ended.set()
        rank.step(gradients[1][number])
        rank.late.drain()
        rank.close()

    in_threads([lambda pair=pair: work(pair) for pair in pairs(2)])


def test_a_lost_link_is_raised_by_the_next_step() -> None:
    rank, gradients = Rank(pairs(2, deadline=0.1)[0]), draw(SHAPES, 1, 2)
    rank.step(gradients[0][0])
    with pytest.raises(LinkError):
        rank.step(gradients[1][0])
    rank.close()


def test_it_needs_links_of_its_own() -> None:
    dp = local_groups(2)[0]
    with pytest.raises(AssertionError, match="share a group"):
        Rank((dp, dp))
