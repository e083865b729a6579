from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.support.layouts import in_threads
from tests.unit.train.sums import draw, parameters_of, true_sums
from tllm.comm.group import Group, local_groups, solo
from tllm.ground.errors import LinkError, PlanError
from tllm.parallel.replicas import Replicas
from tllm.train.compress import Int8
from tllm.train.delayed import Delayed
from tllm.train.gradients import Buckets
from tllm.train.reduction import Exact, GradientGroups, Reduction

SHAPES = ((6, 5), (7,), (4, 3))
Inner = Callable[[Buckets], Reduction]


class Rank:
    """Parameters whose gradients are given."""

    def __init__(self, dp: Group, inner: Inner = lambda buckets: Exact()) -> None:
        self.parameters = parameters_of(SHAPES)
        self.buckets = Buckets(self.parameters, GradientGroups(dp), Replicas(self.parameters, solo()), 0, 100)
        self.late = self.buckets.reduction = Delayed(self.buckets, inner(self.buckets))

    def step(self, gradients: list[Tensor]) -> list[Tensor]:
        """What is there to be applied after a step with these gradients."""
        self.buckets.begin(1)
        sum(((p * g).sum() for p, g in zip(self.parameters, gradients, strict=True)), torch.zeros(())).backward()
        self.buckets.finish()
        return self.held()

    def held(self) -> list[Tensor]:
        named: dict[int, Tensor] = {}
        for number, bucket in enumerate(self.buckets.buckets):
            views = bucket.views(self.buckets.held(number), self.parameters)
            named |= dict(zip(bucket.parameters, [view.clone() for view in views], strict=True))
        return [named[index] for index in range(len(self.parameters))]

    def close(self) -> None:
        self.buckets.close()
        self.late.close()


def run(ranks: int, gradients: list[list[list[Tensor]]], drains: tuple[int, ...], inner: Inner) -> list[list[Tensor]]:
    """By what was applied in turn; drained after the steps `drains`."""

    def work(dp: Group) -> list[list[Tensor]]:
        rank, applied = Rank(dp, inner), []
        for step, of_ranks in enumerate(gradients):
            some = rank.late.on_the_way
            held = rank.step(of_ranks[dp.rank])
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

    by_rank = in_threads([lambda dp=dp: work(dp) for dp in local_groups(ranks, name="dp")])
    for other in by_rank[1:]:
        assert all(torch.equal(a, b) for x, y in zip(other, by_rank[0], strict=True) for a, b in zip(x, y, strict=True))
    return by_rank[0]


@pytest.mark.parametrize("drains", [(4,), (1, 4), (0, 1, 2, 3, 4)])
def test_every_sum_comes_once_and_one_step_late(drains: tuple[int, ...]) -> None:
    gradients = draw(SHAPES, 3, 5)
    applied, want = run(3, gradients, drains, lambda buckets: Exact()), true_sums(gradients)
    assert len(applied) == len(want)
    for got, true in zip(applied, want, strict=True):
        for a, b in zip(got, true, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


def test_without_a_drain_the_last_sum_is_still_on_its_way() -> None:
    gradients = draw(SHAPES, 2, 3)
    assert len(run(2, gradients, (), lambda buckets: Exact())) == 2


def test_it_sends_by_another() -> None:
    """What it gives are the bits that int8 gives at once, a step later."""
    gradients = draw(SHAPES, 2, 4)

    def at_once(dp: Group) -> list[list[Tensor]]:
        rank = Rank(dp)
        rank.late.close()
        rank.buckets.reduction = Int8(rank.buckets)
        sums = [rank.step(of_ranks[dp.rank]) for of_ranks in gradients]
        rank.buckets.close()
        return sums

    want = in_threads([lambda dp=dp: at_once(dp) for dp in local_groups(2, name="dp")])[0]
    got = run(2, gradients, (3,), Int8)
    assert all(torch.equal(a, b) for x, y in zip(got, want, strict=True) for a, b in zip(x, y, strict=True))
    exact = run(2, gradients, (3,), lambda buckets: Exact())
    assert not torch.equal(got[0][0], exact[0][0])


def test_a_step_ends_before_the_other_rank_has_begun_it() -> None:
    """Rank 1 takes its first step only when rank 0 has ended its own: nothing waits for the link within a step."""
    gradients, ended = draw(SHAPES, 2, 2), threading.Event()

    def work(dp: Group) -> None:
        rank = Rank(dp)
        if dp.rank == 1:
            assert ended.wait(20)
        rank.step(gradients[0][dp.rank])
        ended.set()
        rank.step(gradients[1][dp.rank])
        rank.late.drain()
        rank.close()

    in_threads([lambda dp=dp: work(dp) for dp in local_groups(2, name="dp")])


def test_a_lost_link_is_raised_by_the_next_step() -> None:
    rank, gradients = Rank(local_groups(2, deadline=0.1, name="dp")[0]), draw(SHAPES, 1, 2)
    rank.step(gradients[0][0])
    with pytest.raises(LinkError):
        rank.step(gradients[1][0])
    rank.close()


def test_zero_is_refused() -> None:
    def work(dp: Group) -> None:
        parameters = parameters_of(SHAPES)
        buckets = Buckets(parameters, GradientGroups(dp), Replicas(parameters, solo()), 1)
        buckets.close()
        with pytest.raises(PlanError, match="zero=1"):
            Delayed(buckets, Exact())

    in_threads([lambda dp=dp: work(dp) for dp in local_groups(2)])
