"""What the tests of lossy sums share: buckets summed over ranks that are threads, and the bytes that were sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tests.support.models.layouts import in_threads
from tllm.comm.collectives.group import Group, local_groups, solo
from tllm.parallel.replicated import ReplicatedParameters
from tllm.parallel.shard import Shard, ShardPiece, cut_parameter
from tllm.training.gradients.bucket_layout import BucketLayout
from tllm.training.gradients.gradient_buckets import GradientBuckets
from tllm.training.gradients.reduction import GradientGroups, Reduction

Shapes = Sequence[tuple[int, ...]]
Make = Callable[[GradientBuckets], Reduction]


def parameters_of(shapes: Shapes, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    made = []
    for number, shape in enumerate(shapes):
        parameter = cut_parameter(shape, Shard((ShardPiece(f"p{number}"),)))
        parameter.data = torch.zeros(shape, dtype=dtype)
        made.append(parameter.requires_grad_())
    return made


def buckets_of(shapes: Shapes, dp: Group, dtype: torch.dtype = torch.float32, limit: int = 1 << 20) -> GradientBuckets:
    parameters = parameters_of(shapes, dtype)
    return GradientBuckets(
        BucketLayout(parameters, GradientGroups(dp), 0, limit), ReplicatedParameters(parameters, solo())
    )


def draw(
    shapes: Shapes, ranks: int, steps: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> list[list[list[Tensor]]]:
    """Gradients by step, rank and parameter, of unlike sizes."""
    dice = torch.Generator().manual_seed(seed)
    return [
        [[torch.randn(s, generator=dice).to(dtype) * 10.0**n for n, s in enumerate(shapes)] for _ in range(ranks)]
        for _ in range(steps)
    ]


def true_sums(gradients: list[list[list[Tensor]]]) -> list[list[Tensor]]:
    """By step and parameter, in float64."""
    return [
        [sum((x.double() for x in of), torch.zeros((), dtype=torch.float64)) for of in zip(*step, strict=True)]
        for step in gradients
    ]


@dataclass
class Summed:
    """Of one rank: the sums by step and parameter, its reduction, its group and the bytes that left it in each step."""

    sums: list[list[Tensor]]
    reduction: Reduction
    buckets: GradientBuckets
    sent: list[int]


def sum_up(
    make: Make,
    shapes: Shapes,
    gradients: list[list[list[Tensor]]],
    cut: bool = False,
    after: Callable[[int, Reduction], None] = lambda step, reduction: None,
    limit: int = 1 << 20,
) -> list[Summed]:
    """Sum every step's gradients over the ranks; with `cut` each range on its own rank, put together afterwards.

    All ranks must have the same bits. `after` is called on each rank after each step.
    """
    ranks, dtype = len(gradients[0]), gradients[0][0][0].dtype

    def work(dp: Group) -> Summed:
        buckets = buckets_of(shapes, dp, dtype, limit)
        buckets.close()
        done = Summed([], make(buckets), buckets, [])
        for step, of_ranks in enumerate(gradients):
            before = sent_by(dp)
            named: dict[int, Tensor] = {}
            for number, bucket in enumerate(buckets.layout.buckets):
                run = torch.zeros(bucket.size, dtype=dtype)
                for index, view in zip(bucket.parameters, bucket.views(run, buckets.layout.parameters), strict=True):
                    view.copy_(of_ranks[dp.rank][index])
                counts = bucket.counts(dp.size)
                if cut:
                    mine = done.reduction.reduce_scatter(number, run, counts, dp)
                    run = torch.cat(dp.all_gather(mine, [(count,) for count in counts]))
                else:
                    run = done.reduction.all_reduce(number, run, dp)
                views = bucket.views(run, buckets.layout.parameters)
                named.update((i, view.clone()) for i, view in zip(bucket.parameters, views, strict=True))
            done.sums.append([named[index] for index in range(len(shapes))])
            done.sent.append(sent_by(dp) - before)
            after(step, done.reduction)
        return done

    all_done = in_threads([lambda dp=dp: work(dp) for dp in local_groups(ranks, name="dp")])
    for other in all_done[1:]:
        for step, sums in enumerate(other.sums):
            for a, b in zip(sums, all_done[0].sums[step], strict=True):
                assert torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())
    return all_done


def sent_by(dp: Group) -> int:
    return sum(link.bytes_moved for link in dp.send.values())


def outstanding(done: list[Summed]) -> list[Tensor]:
    """What all ranks have not sent, added up, by parameter, in float64."""
    total = [torch.zeros(p.shape, dtype=torch.float64) for p in done[0].buckets.layout.parameters]
    for one in done:
        for number, bucket in enumerate(one.buckets.layout.buckets):
            run = one.reduction.residuals.of(number).double()  # type: ignore[attr-defined]
            for index, view in zip(bucket.parameters, bucket.views(run, one.buckets.layout.parameters), strict=True):
                total[index] += view
    return total


def off(got: Tensor, want: Tensor) -> float:
    """The largest difference relative to the largest number."""
    return float((got.double() - want.double()).abs().max() / want.double().abs().max())
