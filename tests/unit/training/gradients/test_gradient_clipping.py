"""The norm over the mesh: each element once, the same bits however they are cut, and what is said where it is none."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from tests.support.models.layouts import in_threads
from tllm.comm.collectives.group import Group, local_groups, solo
from tllm.core.errors import NonFiniteError
from tllm.parallel.replicated import ReplicatedParameters
from tllm.parallel.shard import Shard, ShardPiece, cut_parameter
from tllm.spec.plan import Zero
from tllm.training.gradients.bucket_layout import BucketLayout
from tllm.training.gradients.gradient_buckets import GradientBuckets
from tllm.training.gradients.gradient_clipping import GradientNorm, of_norms
from tllm.training.gradients.non_finite import LOSS, OWN, SUMMED, NonFiniteFound, error_of
from tllm.training.gradients.reduction import GradientGroups
from tllm.training.state.tensor_blocks import blocks_of


def named(names: list[str], shape: tuple[int, ...] = (4, 3), dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    made = []
    for name in names:
        parameter = cut_parameter(shape, Shard((ShardPiece(name),)))
        parameter.data = torch.ones(shape, dtype=dtype)
        made.append(parameter.requires_grad_())
    return made


def learn(buckets: GradientBuckets, gradients: list[Tensor]) -> None:
    """One step in which each parameter gets exactly this gradient here."""
    buckets.begin(1)
    torch.stack([(p * g).sum() for p, g in zip(buckets.layout.parameters, gradients, strict=True)]).sum().backward()
    buckets.finish()


def wild(count: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Numbers of sizes from 1e-3 to 1e3."""
    dice = torch.Generator().manual_seed(seed)
    powers = torch.randint(-10, 10, (count,), generator=dice)
    return torch.randn(count, generator=dice, dtype=dtype) * 2.0 ** powers.to(dtype)


def true_norm(gradients: list[Tensor]) -> float:
    """Correctly rounded, nearly: by fractions."""
    total = sum((Fraction(x) ** 2 for g in gradients for x in g.double().flatten().tolist()), Fraction(0))
    return math.sqrt(total)


def test_the_norm_counts_what_two_ranks_hold_once() -> None:
    """Rank 0 holds rows 0 to 3 of a table, rank 1 rows 2 to 5, and both all of a scale."""

    def work(group: Group) -> tuple[float, float, list[float]]:
        rows = (2 * group.rank, 2 * group.rank + 4)
        table = cut_parameter((4, 3), Shard((ShardPiece("table", (rows, (0, 3))),), replicated=True))
        scale = cut_parameter((5,), Shard((ShardPiece("scale"),), replicated=True))
        parameters = [p.requires_grad_() for p in (table, scale)]
        buckets = GradientBuckets(
            BucketLayout(parameters, GradientGroups(solo())), ReplicatedParameters(parameters, group)
        )
        norm = GradientNorm(buckets)
        buckets.begin(1)
        (table.sum() * 2 + scale.sum()).backward()
        buckets.finish()
        before = norm.clip(1.0)
        return before, norm.norm(), buckets.accumulator.view(0).flatten().tolist()

    for before, after, gradient in in_threads([lambda group=group: work(group) for group in local_groups(2)]):
        assert before == pytest.approx((6 * 3 * 4 + 5) ** 0.5)
        assert after == pytest.approx(1.0)
        assert gradient == pytest.approx([2 / before] * 12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_norm_is_the_same_bits_however_cut(dtype: torch.dtype) -> None:
    shapes = [(40, 11), (7,), (301,), (16, 16)]
    gradients = [wild(math.prod(shape), dtype, seed).view(shape) for seed, shape in enumerate(shapes)]

    def work(dp: Group, zero: Zero, limit: int, gradients: list[Tensor], deterministic: bool) -> float:
        parameters = [p for number, shape in enumerate(shapes) for p in named([f"p{number}"], shape, dtype)]
        buckets = GradientBuckets(
            BucketLayout(parameters, GradientGroups(dp), zero, limit), ReplicatedParameters(parameters, solo())
        )
        learn(buckets, gradients if dp.rank == dp.size - 1 else [torch.zeros_like(g) for g in gradients])
        norm = GradientNorm(buckets, deterministic=deterministic).norm()
        buckets.close()
        return norm

    cuts: list[tuple[int, Zero, int]] = [(1, 0, 1 << 20), (2, 0, 400), (2, 1, 400), (3, 2, 1000), (8, 2, 400)]

    def norms(gradients: list[Tensor], deterministic: bool) -> set[float]:
        tasks = [
            partial(work, dp, zero, limit, gradients, deterministic)
            for size, zero, limit in cuts
            for dp in local_groups(size, name="dp")
        ]
        return set(in_threads(tasks))

    # What is added to the 1 after it is lost to rounding, on every processor; a cut decides how many that are.
    lost = (0.45 * torch.finfo(dtype).eps) ** 0.5
    uneven = [torch.full(shape, lost, dtype=dtype) for shape in shapes]
    uneven[-1][0, 0] = 1  # the first of its bucket, which begins with the last parameter
    for some in (gradients, uneven):
        (norm,) = norms(some, deterministic=True)
        assert norm == pytest.approx(true_norm(some), rel=1e-15)
    assert len(norms(uneven, deterministic=False)) > 1, "floats alone would not do"


@pytest.mark.parametrize("scale", [0.0, 1e-320, 1e-300, 1.0, 1e300, math.inf, math.nan])
def test_gradients_of_any_size_have_a_norm(scale: float) -> None:
    parameters = named(["a", "b"], dtype=torch.float64)
    buckets = GradientBuckets(
        BucketLayout(parameters, GradientGroups(solo())), ReplicatedParameters(parameters, solo())
    )
    learn(buckets, [torch.full((4, 3), scale, dtype=torch.float64) for _ in parameters])
    norm = GradientNorm(buckets, deterministic=True).norm()
    assert norm == pytest.approx(scale * math.sqrt(24), rel=1e-4 if scale == 1e-320 else 1e-15, nan_ok=True)


def test_gpus_add_up_what_the_processor_does() -> None:
    runs = [wild(count, torch.float32) for count in (1, 1000, 70_000)]
    assert math.sqrt(of_norms(runs)) == pytest.approx(true_norm(runs), rel=1e-5)


def test_one_large_element_hides_no_small_ones() -> None:
    """The bound of MeshNorm: with 2^17 elements 45 bits twice, so a millionth of the largest still counts."""
    gradient = torch.full((1 << 16, 1), 1e-6, dtype=torch.float64)
    gradient[123] = 1.0
    parameters = named(["a"], (1 << 16, 1), torch.float64)
    buckets = GradientBuckets(
        BucketLayout(parameters, GradientGroups(solo())), ReplicatedParameters(parameters, solo())
    )
    learn(buckets, [gradient])
    norm = GradientNorm(buckets, deterministic=True).norm()
    assert abs(norm - true_norm([gradient])) <= 2.0 ** (3 * 17 - 124) + math.ulp(1.0)


Gradients = Callable[[int], list[float]]
NAMES = {
    0: ["model.embed_tokens.weight", "model.layers.0.a", "model.layers.2.a"],
    1: ["model.layers.1.a", "model.layers.3.a", "lm_head.weight"],
}


def refusals(
    factors: dict[int, list[float]],
    zero: Zero = 0,
    losses: dict[int, float] | None = None,
    bad_weight: tuple[int, int] | None = None,
    deterministic: bool = False,
) -> set[str]:
    """What four ranks say, numbered replica by replica; on rank r parameter i has a gradient full of factors[r][i]."""
    replicas, dps = [local_groups(2) for _ in range(2)], [local_groups(2, name="dp") for _ in range(2)]

    def work(rank: int) -> str:
        replica, stage = divmod(rank, 2)
        parameters = named(NAMES[stage])
        groups = GradientGroups(dps[stage][replica])
        buckets = GradientBuckets(
            BucketLayout(parameters, groups, zero, 40), ReplicatedParameters(parameters, replicas[replica][stage])
        )
        norm, loss = GradientNorm(buckets, rank, deterministic), (losses or {}).get(rank, 1.0)
        learn(buckets, [torch.full((4, 3), factor) for factor in factors.get(rank, [1.0, 1.0, 1.0])])
        if bad_weight is not None and bad_weight[0] == rank:
            parameters[bad_weight[1]].data[2, 1] = math.inf
        try:
            size = norm.clip(1.0, loss)
            weights = [b for p in parameters for b in blocks_of(p.shard, p)]  # type: ignore[attr-defined]
            norm.check(7, size, loss, lambda: weights)
        except NonFiniteError as error:
            return error.message
        finally:
            buckets.close()
        return "fine"

    return set(in_threads([lambda rank=rank: work(rank) for rank in range(4)]))


@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize("deterministic", [False, True])
def test_every_rank_names_the_first_bad_gradient_and_whose_it_was(zero: Zero, deterministic: bool) -> None:
    nan = math.nan
    options = dict(zero=zero, deterministic=deterministic)
    assert refusals({}, **options) == {"fine"}
    assert refusals({3: [1.0, nan, 1.0]}, **options) == {
        "step 7 went bad: the gradient of model.layers.3.a on rank 3 is not finite"
    }
    assert refusals({2: [nan, nan, 1.0], 3: [math.inf, 1.0, 1.0]}, **options) == {
        "step 7 went bad: the gradient of model.embed_tokens.weight on rank 2 is not finite; "
        "backward came to model.layers.1.a on rank 3 first"
    }


def test_a_head_comes_after_the_layers_whatever_its_name() -> None:
    (message,) = refusals({3: [1.0, 1.0, math.nan], 2: [1.0, 1.0, math.nan]})
    assert "the gradient of model.layers.2.a on rank 2 is" in message and "came to lm_head.weight on rank 3" in message


@pytest.mark.parametrize("zero", [0, 2])
def test_a_sum_that_is_too_large_is_nobodys_own(zero: Zero) -> None:
    large = {rank: [1.0, 3e38, 1.0] for rank in (1, 3)}
    (message,) = refusals(large, zero)
    holder = 3 if zero else 1  # the second rank of dp keeps the bucket's only line
    assert f"the gradient of model.layers.3.a on rank {holder} is not finite" in message


def test_squares_that_are_too_large_are_told_apart() -> None:
    huge = {rank: [1e30, 1.0, 1.0] for rank in range(4)}
    (message,) = refusals(huge)
    assert message == "step 7 went bad: the norm of the gradient is inf, though each of its elements is finite"
    assert refusals(huge, deterministic=True) == {"fine"}


def test_a_bad_weight_is_the_cause_of_all_else() -> None:
    everything = {rank: [math.nan] * 3 for rank in range(4)}
    losses = {1: math.nan, 3: math.nan}
    assert refusals(everything, losses=losses, bad_weight=(1, 1)) == {
        "step 7 went bad: the weight model.layers.3.a on rank 1 is not finite"
    }


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_bad_loss_is_named_by_its_rank(deterministic: bool) -> None:
    assert refusals({2: [math.nan] * 3, 3: [math.nan] * 3}, losses={3: math.inf}, deterministic=deterministic) == {
        "step 7 went bad: the loss is inf on rank 3, and the gradient is not finite, "
        "first that of model.embed_tokens.weight on rank 2"
    }
    assert refusals({}, losses={3: math.nan}, deterministic=deterministic) == {
        "step 7 went bad: the loss is nan on rank 3"
    }, "a loss stops the run though every gradient is finite"


def test_a_sum_that_comes_late_is_of_the_step_that_it_was_made_in() -> None:
    """And a loss of the present one, as is what is not finite of a rank's own beside it."""
    own, summed = (NonFiniteFound(kind, (0, 0), 1, f"model.layers.{kind}.a") for kind in (OWN, SUMMED))
    loss = NonFiniteFound(LOSS, (0, 0), 0, "nan")
    assert "step 6 went bad: the gradient of model.layers.3.a on" in error_of(7, math.nan, [own, summed], 1).message
    said = error_of(7, math.nan, [loss, own, summed], 1).message
    assert said.startswith("step 7 went bad: the loss is nan on rank 0") and "first that of model.layers.2.a" in said
    assert "step 6 went bad: the norm of the gradient is inf" in error_of(7, math.inf, [], 1).message
