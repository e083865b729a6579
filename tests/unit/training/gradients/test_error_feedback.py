"""What becomes of what lossy sums have left out when one replica is left, in whose memory it comes together."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.unit.training.sums import buckets_of, draw, outstanding, sum_up
from tllm.comm.collectives.group import solo
from tllm.training.gradients.compressed_reduction import Int8Reduction
from tllm.training.gradients.delayed_reduction import DelayedReduction
from tllm.training.gradients.gradient_buckets import GradientBuckets
from tllm.training.gradients.powersgd import PowerSGD
from tllm.training.gradients.reduction import GradientGroups

SHAPES = ((30, 11), (7,), (3, 16, 50))


def int8(buckets: GradientBuckets) -> Int8Reduction:
    return Int8Reduction(buckets)


def powersgd(buckets: GradientBuckets) -> PowerSGD:
    return PowerSGD(buckets, 2)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("make", [int8, powersgd])
def test_one_that_is_left_applies_at_once_what_was_outstanding(
    make: Callable[[GradientBuckets], Int8Reduction | PowerSGD], late: bool
) -> None:
    """Its first gradient is the whole one with what all had yet to send, and its second one the gradient alone."""
    left = outstanding(sum_up(make, SHAPES, draw(SHAPES, 2, 3, torch.float64)))
    assert any(bool(tensor.any()) for tensor in left)
    buckets = buckets_of(SHAPES, solo(), torch.float64)
    parameters, reduction = buckets.layout.parameters, make(buckets)
    buckets.reduction = DelayedReduction(buckets, reduction, GradientGroups(solo())) if late else reduction
    for held in reduction.replica_slices():
        (index,) = [number for number, parameter in enumerate(parameters) if parameter is held.parameter]
        held.flat.copy_(left[index].flatten())

    def step(gradients: list[Tensor]) -> list[Tensor]:
        buckets.begin(1)
        sum(((p * g).sum() for p, g in zip(parameters, gradients, strict=True)), torch.zeros(())).backward()
        buckets.finish()
        return [buckets.accumulator.view(index).clone() for index in range(len(parameters))]

    (first,), (second,) = draw(SHAPES, 1, 2, torch.float64, seed=1)
    wanted = [gradient + tensor for gradient, tensor in zip(first, left, strict=True)]
    assert all(torch.equal(a, b) for a, b in zip(step(first), wanted, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(step(second), second, strict=True))
