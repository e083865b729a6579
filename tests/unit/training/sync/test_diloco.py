from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.models.layouts import in_threads
from tests.unit.training.sums import off, parameters_of, sent_by
from tllm.comm.collectives.group import Group, local_groups, solo
from tllm.core.errors import PlanError
from tllm.parallel.replicated import ReplicatedParameters
from tllm.training.gradients.bucket_layout import BucketLayout
from tllm.training.gradients.compressed_reduction import Int8Reduction
from tllm.training.gradients.gradient_buckets import GradientBuckets
from tllm.training.gradients.reduction import GradientGroups, Reduction
from tllm.training.optim.optimizer import SGD, AdamW, Optimizer
from tllm.training.optim.sharded_update import FLOAT32_WEIGHTS, OptimizerUpdate
from tllm.training.sync.diloco import OUTER_MOMENTUM, DiLoCo

SHAPES = ((6, 5), (7,), (4, 3))
SIZE = 49


@dataclass
class Replica:
    """Learns 1/2 |w - c|^2 for its own centres c, as many times as it has tokens."""

    dp: Group
    every: int
    rate: float = 0.7
    momentum: float = 0.9
    inner: Optimizer = field(default_factory=lambda: SGD(0.0))
    dtype: torch.dtype = torch.float64
    reduction: Callable[[GradientBuckets], Reduction] | None = None

    def __post_init__(self) -> None:
        dice = torch.Generator().manual_seed(5)
        self.parameters: list[nn.Parameter] = parameters_of(SHAPES, self.dtype)
        for parameter in self.parameters:
            parameter.data = torch.randn(parameter.shape, generator=dice).to(self.dtype)
        self.buckets = GradientBuckets(
            BucketLayout(self.parameters, GradientGroups(solo()), 0, 100), ReplicatedParameters(self.parameters, solo())
        )
        self.update = OptimizerUpdate(self.buckets, self.inner)
        reduction = self.reduction(self.buckets) if self.reduction else None
        groups = GradientGroups(self.dp)
        self.local = DiLoCo(self.update, groups, self.every, self.rate, self.momentum, reduction)

    def step(self, number: int, centres: list[Tensor], rate: float) -> None:
        """One inner step on the mean over these centres, and the outer step if it is due."""
        self.buckets.begin(len(centres))
        for centre in centres:
            loss = sum(((p - c) ** 2).sum() for p, c in zip(self.parameters, split(centre.to(self.dtype)), strict=True))
            (loss / (2 * len(centres))).backward()  # type: ignore[union-attr]
        self.buckets.finish()
        self.update.apply(number, rate)
        self.local.count_step(len(centres))
        if self.local.is_due(number):
            self.local.outer_step()

    def weights(self) -> Tensor:
        return torch.cat([p.detach().flatten() for p in self.parameters]).clone()


def split(flat: Tensor) -> list[Tensor]:
    parts = flat.split([torch.Size(s).numel() for s in SHAPES])
    return [part.view(s) for part, s in zip(parts, SHAPES, strict=True)]


def centres(ranks: int, steps: int, uneven: bool = True, seed: int = 0) -> list[list[list[Tensor]]]:
    """By step and rank; with `uneven` rank r has 1 + (r + step) % 3 of them."""
    dice = torch.Generator().manual_seed(seed)
    counts = [[1 + (rank + step) % 3 if uneven else 2 for rank in range(ranks)] for step in range(steps)]
    return [[[torch.randn(SIZE, generator=dice).double() for _ in range(n)] for n in row] for row in counts]


def learn(
    ranks: int, data: list[list[list[Tensor]]], step_rate: float = 0.1, **options: Any
) -> tuple[list[Replica], list[list[Tensor]]]:
    """The replicas, and the weights of each by step. All have the same bits after an outer step."""
    replicas = [Replica(dp, **options) for dp in local_groups(ranks, name="dp")]

    def work(replica: Replica) -> list[Tensor]:
        weights = []
        for number, of_ranks in enumerate(data, 1):
            replica.step(number, of_ranks[replica.dp.rank], step_rate)
            weights.append(replica.weights())
        return weights

    weights = in_threads([lambda r=r: work(r) for r in replicas])
    for step in range(len(data)):
        if replicas[0].local.is_due(step + 1):
            assert all(torch.equal(of_rank[step], weights[0][step]) for of_rank in weights)
    return replicas, weights


@pytest.mark.parametrize("ranks", [2, 3])
def test_one_local_step_and_a_plain_outer_one_is_data_parallel(ranks: int) -> None:
    data = centres(ranks, 6)
    _, weights = learn(ranks, data, 0.1, every=1, rate=1.0, momentum=0.0)
    want = Replica(solo(), 1).weights()
    for step, of_ranks in enumerate(data):
        every = [centre for of_rank in of_ranks for centre in of_rank]
        want = want - 0.1 * (want - torch.stack(every).mean(0))
        assert off(weights[0][step], want) < 1e-13


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_outer_step_is_torchs_descent_with_nesterov_momentum(ranks: int) -> None:
    data, every = centres(ranks, 12), 3
    _, weights = learn(ranks, data, 0.1, every=every)
    anchor = nn.Parameter(Replica(solo(), 1).weights())
    theirs = torch.optim.SGD([anchor], lr=0.7, momentum=0.9, nesterov=True)
    own, tokens = [anchor.detach().clone() for _ in range(ranks)], [0] * ranks
    for step, of_ranks in enumerate(data, 1):
        for rank, of_rank in enumerate(of_ranks):
            own[rank] -= 0.1 * (own[rank] - torch.stack(of_rank).mean(0))
            tokens[rank] += len(of_rank)
        if step % every == 0:
            parts = [count / sum(tokens) for count in tokens]
            anchor.grad = sum((p * (anchor.detach() - w) for p, w in zip(parts, own, strict=True)), torch.zeros(()))
            theirs.step()
            own, tokens = [anchor.detach().clone() for _ in range(ranks)], [0] * ranks
            assert off(weights[0][step - 1], anchor.detach()) < 1e-13
        else:
            assert all(off(of_rank[step - 1], w) < 1e-13 for of_rank, w in zip(weights, own, strict=True))


def test_on_a_parabola_it_goes_as_can_be_written_down() -> None:
    """H inner steps at rate e take each replica the part 1 - (1 - e)^H of its way: the mean goes like one weight."""
    ranks, rounds, every, rate = 2, 15, 4, 0.05
    of_ranks = centres(ranks, 1, uneven=False)[0]
    _, weights = learn(ranks, [of_ranks] * (rounds * every), rate, every=every)
    goal = torch.stack([centre for of_rank in of_ranks for centre in of_rank]).mean(0)
    way = 1 - (1 - rate) ** every
    start = Replica(solo(), 1).weights()
    left, speed = 1.0, 0.0  # the distance to the goal as a part of what it was, and its momentum
    for number in range(rounds):
        speed = 0.9 * speed + way * left
        left -= 0.7 * (way * left + 0.9 * speed)
        assert off(weights[0][(number + 1) * every - 1], goal + left * (start - goal)) < 1e-12
    assert abs(left) < 0.2, "it comes near"


def test_small_steps_of_sixteen_bit_weights_are_not_lost() -> None:
    """Replicas go one way by less than bfloat16 can tell; the wide weights carry it, and are what is agreed on."""
    of_ranks = [[torch.full((SIZE,), 80.0)], [torch.full((SIZE,), 320.0)]]
    replicas, weights = learn(2, [of_ranks] * 40, 2e-6, every=2, dtype=torch.bfloat16, rate=1.0, momentum=0.0)
    first = Replica(solo(), 1, dtype=torch.bfloat16).weights().float()
    moved = weights[0][-1].float() - first
    assert bool((moved >= 0).all()) and 0.008 < float(moved.mean()) < 0.024
    for replica in replicas:
        for number, anchor in enumerate(replica.local.anchors):
            with replica.update.states[number] as state:
                assert anchor.dtype == torch.float32 and torch.equal(state[FLOAT32_WEIGHTS], anchor)
            assert torch.equal(replica.update.flat.mine[number], anchor.bfloat16())


@pytest.mark.parametrize("every", [1, 5])
def test_bytes_are_one_sum_in_so_many_steps(every: int) -> None:
    steps, ranks = 10, 3
    replicas, _ = learn(ranks, centres(ranks, steps), every=every)
    numbers = sum(bucket.size for bucket in replicas[0].buckets.layout.buckets)
    for replica in replicas:
        # Short messages go to every other rank at once; the count of tokens is 8 bytes more.
        assert sent_by(replica.dp) == steps // every * (ranks - 1) * 8 * (numbers + 1)


def test_what_is_sent_may_be_compressed() -> None:
    data = centres(2, 12)
    exact, _ = learn(2, data, every=3, dtype=torch.float32)
    lossy, _ = learn(2, data, every=3, dtype=torch.float32, reduction=Int8Reduction)
    assert 1e-5 < off(lossy[0].weights(), exact[0].weights()) < 0.02
    assert lossy[0].local.reduction.residuals.nbytes > 0  # type: ignore[attr-defined]


def states(replica: Replica) -> list[Tensor]:
    made = []
    for kept in replica.update.states:
        with kept as state:
            made += [state[name].clone() for name in replica.inner.states]
    return made


def test_before_a_save_inner_states_become_their_mean_by_tokens() -> None:
    ranks = 3
    replicas, _ = learn(ranks, centres(ranks, 4), every=4, inner=AdamW())
    before = [states(replica) for replica in replicas]
    tokens = [sum(1 + (rank + step) % 3 for step in range(4)) for rank in range(ranks)]
    in_threads([lambda r=r: r.local.average_inner_states() for r in replicas])
    for index, got in enumerate(states(replicas[0])):
        want = sum((count * of[index] for count, of in zip(tokens, before, strict=True)), torch.zeros(())) / sum(tokens)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-15)
        assert all(torch.equal(states(other)[index], got) for other in replicas)
        assert not torch.equal(before[0][index], before[1][index]) or not before[0][index].any()


def test_what_a_save_keeps_is_enough_to_go_on_with_other_replicas() -> None:
    """After an outer step: weights, inner states and the momentum; the anchor is the weights."""
    replicas, _ = learn(3, centres(3, 4), every=2, inner=AdamW())
    in_threads([lambda r=r: r.local.average_inner_states() for r in replicas])
    later = centres(3, 4, seed=9)

    def go_on(replica: Replica) -> Tensor:
        for number, of_ranks in enumerate(later, 5):
            replica.step(number, of_ranks[replica.dp.rank], 0.1)
        return replica.weights()

    saved = {
        (index, held.name): held.flat.clone()
        for index, parameter in enumerate(replicas[0].parameters)
        for held in [*replicas[0].update.state_slices(), *replicas[0].local.checkpoint_slices()]
        if held.parameter is parameter and held.start == 0 and len(held.flat) == parameter.numel()
    }
    assert {name for _, name in saved} == {*AdamW.states, OUTER_MOMENTUM} and len(saved) == 9
    fresh = [Replica(dp, 2, inner=AdamW()) for dp in local_groups(3, name="dp")]
    for replica in fresh:
        for index, parameter in enumerate(replica.parameters):
            parameter.data.copy_(replicas[0].parameters[index])
            for held in [*replica.update.state_slices(), *replica.local.checkpoint_slices()]:
                if held.parameter is parameter:
                    held.flat.copy_(saved[index, held.name])
        replica.update.take_weights()
        replica.local.take_weights()
    undisturbed = in_threads([lambda r=r: go_on(r) for r in replicas])
    resumed = in_threads([lambda r=r: go_on(r) for r in fresh])
    assert all(torch.equal(a, b) for a, b in zip(undisturbed, resumed, strict=True))


def test_memory_is_that_of_anchor_and_momentum() -> None:
    local = Replica(solo(), 2, dtype=torch.bfloat16).local
    assert local.nbytes == 2 * 4 * sum(bucket.size for bucket in local.update.buckets.layout.buckets)


def test_zero_is_refused() -> None:
    def work(dp: Group) -> None:
        parameters = parameters_of(SHAPES)
        buckets = GradientBuckets(
            BucketLayout(parameters, GradientGroups(dp), 1), ReplicatedParameters(parameters, solo())
        )
        buckets.close()
        with pytest.raises(PlanError, match="weights of their own"):
            DiLoCo(OptimizerUpdate(buckets, SGD()), GradientGroups(dp), 2)

    in_threads([lambda dp=dp: work(dp) for dp in local_groups(2)])
