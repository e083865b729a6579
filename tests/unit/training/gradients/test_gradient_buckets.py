from __future__ import annotations

import gc
import math
import threading
import weakref
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from tests.support.models.layouts import in_threads
from tllm.comm.collectives.group import Group, local_groups, solo
from tllm.core.errors import LinkError
from tllm.parallel.replicated import ReplicatedParameters
from tllm.parallel.shard import Shard, ShardPiece, cut_parameter
from tllm.spec.plan import Zero
from tllm.training.gradients.bucket_layout import LINE, BucketLayout, lay_out
from tllm.training.gradients.gradient_buckets import PIECE, GradientBuckets, add_low_precision
from tllm.training.gradients.gradient_clipping import GradientNorm
from tllm.training.gradients.reduction import Exact, GradientGroups
from tllm.training.optim.optimizer import SGD, AdamW
from tllm.training.optim.sharded_update import FLOAT32_WEIGHTS, OptimizerUpdate


def parameters_of(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    made = []
    for number, shape in enumerate(shapes):
        parameter = cut_parameter(shape, Shard((ShardPiece(f"p{number}"),)))
        parameter.data = torch.ones(shape, dtype=dtype)
        made.append(parameter.requires_grad_())
    return made


def buckets_of(parameters: list[nn.Parameter], dp: Group, zero: Zero = 0, limit: int = 40) -> GradientBuckets:
    return GradientBuckets(
        BucketLayout(parameters, GradientGroups(dp), zero, limit), ReplicatedParameters(parameters, solo())
    )


def loss_of(parameters: list[nn.Parameter], factor: float) -> Tensor:
    """A chain in which the last parameter's gradient comes first; each gradient is `factor` times its number + 1."""
    return sum(((p.sum() * (n + 1) * factor) for n, p in enumerate(parameters)), torch.zeros(()))


def test_buckets_go_from_the_last_parameter_to_the_first_and_hold_each_once() -> None:
    parameters = parameters_of((4, 4), (4,), (4, 4), (4,), (20, 4), (4,))
    parameters[2].shard = Shard((ShardPiece("p2"),), replicated=True, gradient="partial")  # type: ignore[attr-defined]
    buckets = lay_out(parameters, limit=100)
    assert sorted(i for bucket in buckets for i in bucket.parameters) == list(range(6))
    assert buckets[0].parameters == (4,), "the largest is full at once"
    assert buckets[-1].parameters == (2,) and buckets[-1].partial, "what needs other ranks first comes last"
    assert [bucket.decays for bucket in buckets if 1 in bucket.parameters] == [False]
    for bucket in buckets:
        assert bucket.size == sum(bucket.counts(3)) and bucket.range_of(2, 3)[1] == bucket.size
        bounds = [*bucket.starts, bucket.size, *(bucket.range_of(rank, 3)[0] for rank in range(3))]
        assert all(bound % LINE == 0 for bound in bounds), "no kernel may meet a part of a line"
        assert bucket.size - sum(parameters[i].numel() for i in bucket.parameters) < LINE * len(bucket.parameters)


@pytest.mark.parametrize("shape", [(3, PIECE // 2 + 1), (PIECE + 5,), (2 * PIECE + 1, 3), (1,)])
def test_a_narrow_gradient_is_added_to_the_same_bits_without_a_wide_copy_of_all(shape: tuple[int, ...]) -> None:
    sums, gradient = torch.randn(shape), torch.randn(shape).bfloat16()
    want = sums + gradient
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as took:
        add_low_precision(sums, gradient)
    assert torch.equal(sums, want)
    assert max(event.self_cpu_memory_usage for event in took.events()) <= 5 * PIECE


def test_sums_over_microbatches_and_ranks_however_many_each_has() -> None:
    counts = [2, 0, 3]

    def work(dp: Group) -> list[Tensor]:
        parameters = parameters_of((4, 3), (5,), (2, 2))
        buckets = buckets_of(parameters, dp)
        for step in range(2):  # the second step must not see the first one's
            buckets.begin(counts[dp.rank])
            for microbatch in range(counts[dp.rank]):
                loss_of(parameters, 10.0**step * (microbatch + 1)).backward()
            buckets.finish()
        buckets.close()
        return [buckets.accumulator.view(index).clone() for index in range(3)]

    for gradients in in_threads([lambda dp=dp: work(dp) for dp in local_groups(3, name="dp")]):
        for number, gradient in enumerate(gradients):
            assert torch.equal(gradient, torch.full_like(gradient, 10.0 * (number + 1) * (1 + 2 + 1 + 2 + 3)))


def test_a_bucket_is_summed_while_backward_still_runs() -> None:
    """Rank 0's backward pass stands still before its first layer until rank 1 has summed the last one's bucket."""
    summed = threading.Event()

    def work(dp: Group) -> None:
        parameters = parameters_of((4, 4), (4, 4))
        buckets = buckets_of(parameters, dp)
        inner = dp.all_reduce

        def reduce(x: Tensor) -> Tensor:
            out = inner(x)
            summed.set()
            return out

        dp.all_reduce = reduce  # type: ignore[method-assign]
        x = torch.ones(1, 4) @ parameters[0]
        if dp.rank == 0:
            x.register_hook(lambda gradient: None if summed.wait(20) else pytest.fail("nothing was summed"))
        buckets.begin(1)
        (x @ parameters[1]).sum().backward()
        buckets.finish()
        buckets.close()

    in_threads([lambda dp=dp: work(dp) for dp in local_groups(2, name="dp")])
    assert summed.is_set()


def test_nothing_is_sent_before_the_last_microbatch() -> None:
    def work(dp: Group) -> int:
        parameters = parameters_of((4, 4))
        buckets = buckets_of(parameters, dp)
        buckets.begin(3)
        for _ in range(2):
            loss_of(parameters, 1.0).backward()
        sent = sum(link.bytes_moved for link in dp.send.values())
        loss_of(parameters, 1.0).backward()
        buckets.finish()
        buckets.close()
        return sent

    assert in_threads([lambda dp=dp: work(dp) for dp in local_groups(2, name="dp")]) == [0, 0]


def test_a_lost_link_is_raised_by_finish() -> None:
    dp = local_groups(2, deadline=0.1, name="dp")[0]
    parameters = parameters_of((4, 4))
    buckets = buckets_of(parameters, dp)
    buckets.begin(1)
    loss_of(parameters, 1.0).backward()
    with pytest.raises(LinkError):
        buckets.finish()
    buckets.close()


@pytest.mark.parametrize("zero", [1, 2])
def test_a_range_has_the_same_memory_in_every_step(zero: Zero) -> None:
    """What came anew each step would leave holes in the heap; with zero=1 it is a part of the run it was summed in."""

    def work(dp: Group) -> None:
        parameters = parameters_of((48, 11), (80, 3))
        buckets, places = buckets_of(parameters, dp, zero), list[list[int]]()
        for weight in (1.0, 2.0):
            buckets.begin(1)
            loss_of(parameters, weight).backward()
            buckets.finish()
            held = [buckets.reduced(number) for number in range(len(buckets.layout.buckets))]
            assert [one.max().item() for one in held] == [3 * weight * 2, 3 * weight], "the sums are this step's"
            places.append([one.data_ptr() for one in held])
            whole = [bucket.size for bucket in buckets.layout.buckets]
            sizes = [one.untyped_storage().nbytes() // 4 for one in held]
            assert sizes == (whole if zero == 1 else [one.numel() for one in held])
        assert places[0] == places[1]
        buckets.close()

    in_threads([lambda dp=dp: work(dp) for dp in local_groups(3, name="dp")])


@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_that_of_the_formula(zero: Zero, dtype: torch.dtype) -> None:
    ranks = 3

    def work(dp: Group) -> tuple[int, int, int]:
        parameters = parameters_of((48, 11), (16,), (80, 3), dtype=dtype)
        buckets = buckets_of(parameters, dp, zero)
        update = OptimizerUpdate(buckets, AdamW())
        buckets.begin(1)
        loss_of(parameters, 1.0).backward()
        buckets.finish()
        update.apply(1, 0.1)
        buckets.close()
        return buckets.nbytes, update.nbytes, len(buckets.layout.buckets)

    whole = 48 * 11 + 16 + 80 * 3
    state = 8 + (4 if dtype == torch.bfloat16 else 0)
    for gradients, states, count in in_threads([lambda dp=dp: work(dp) for dp in local_groups(ranks, name="dp")]):
        assert abs(gradients - 4 * whole / (ranks if zero == 2 else 1)) <= 4 * LINE * count
        assert abs(states - state * whole / (ranks if zero else 1)) <= state * LINE * count


def test_steps_too_small_for_sixteen_bits_are_not_lost() -> None:
    parameters = parameters_of((4, 4), dtype=torch.bfloat16)
    buckets = buckets_of(parameters, solo())
    update = OptimizerUpdate(buckets, SGD(momentum=0.0))
    for step in range(1, 101):
        buckets.begin(1)
        loss_of(parameters, 1.0).backward()
        buckets.finish()
        update.apply(step, 1e-4)
    torch.testing.assert_close(parameters[0].detach(), torch.full((4, 4), 0.99, dtype=torch.bfloat16), rtol=0, atol=0)
    wide = next(held for held in update.state_slices() if held.name == FLOAT32_WEIGHTS)
    torch.testing.assert_close(wide.flat, torch.full((16,), 0.99))


def test_what_is_held_covers_each_parameter_once() -> None:
    parameters = [parameters_of((5, 3), (4,), (2, 9)) for _ in range(3)]

    def work(dp: Group) -> OptimizerUpdate:
        buckets = buckets_of(parameters[dp.rank], dp, 2)
        buckets.close()
        return OptimizerUpdate(buckets, AdamW())

    updates = in_threads([lambda dp=dp: work(dp) for dp in local_groups(3, name="dp")])
    for number, whole in enumerate(parameters[0]):
        for name in AdamW.states:
            held = [
                one
                for rank, update in enumerate(updates)
                for one in update.state_slices()
                if one.parameter is parameters[rank][number] and one.name == name
            ]
            covered = sorted(i for one in held for i in range(one.start, one.start + one.flat.numel()))
            assert covered == list(range(whole.numel()))


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_spread_experts_are_summed_over_their_own_group(zero: Zero) -> None:
    """Four replicas, ep of 2: a table that all hold, and expert r % 2 on replica r, of which 1 is the larger."""
    edps = [local_groups(2, name="edp") for _ in range(2)]
    eps = [local_groups(2, name="ep") for _ in range(2)]

    def work(dp: Group) -> tuple[float, list[list[float]]]:
        groups = GradientGroups(dp, edps[dp.rank % 2][dp.rank // 2], eps[dp.rank // 2][dp.rank % 2])
        table, expert, other = parameters_of((4, 3), (3 + dp.rank % 2, 2), (7,))
        expert.shard = Shard((ShardPiece(f"expert{dp.rank % 2}"),), spread=True)  # type: ignore[attr-defined]
        parameters = [table, expert, other]
        buckets = GradientBuckets(BucketLayout(parameters, groups, zero, 40), ReplicatedParameters(parameters, solo()))
        assert [b.parameters for b in buckets.layout.buckets if b.spread] == [(1,)]
        update, norm = OptimizerUpdate(buckets, SGD(momentum=0.0)), GradientNorm(buckets)
        buckets.begin(1)
        (expert.sum() * 10.0**dp.rank + table.sum() * (dp.rank + 1) + other.sum() * 2).backward()
        buckets.finish()
        size = norm.norm()
        update.apply(1, 1.0)
        buckets.close()
        return size, [parameter.detach().flatten().unique().tolist() for parameter in parameters]

    want = math.sqrt(12 * 10**2 + 7 * 8**2 + 6 * 101**2 + 8 * 1010**2)
    for rank, (size, weights) in enumerate(in_threads([lambda dp=dp: work(dp) for dp in local_groups(4, name="dp")])):
        assert size == pytest.approx(want, rel=1e-12)
        assert weights == [[1 - 10], [1 - (1010 if rank % 2 else 101)], [1 - 8]]


def test_a_reduction_is_told_each_bucket_and_its_group() -> None:
    told: list[tuple[int, int, str]] = []

    class Halved(Exact):
        def all_reduce(self, number: int, run: Tensor, group: Group) -> Tensor:
            told.append((group.rank, number, group.name))
            return super().all_reduce(number, run.mul_(0.5), group)

    def work(dp: Group) -> list[Tensor]:
        parameters = parameters_of((20, 4), (5, 5))
        buckets = GradientBuckets(
            BucketLayout(parameters, GradientGroups(dp), 0, 40),
            ReplicatedParameters(parameters, solo()),
            reduction=Halved(),
        )
        buckets.begin(1)
        loss_of(parameters, 1.0).backward()
        buckets.finish()
        buckets.close()
        return [buckets.accumulator.view(index) for index in range(2)]

    for gradients in in_threads([lambda dp=dp: work(dp) for dp in local_groups(2, name="dp")]):
        assert [gradient.unique().tolist() for gradient in gradients] == [[1.0], [2.0]]
    assert sorted(told) == [(rank, number, "dp") for rank in range(2) for number in range(2)]


@pytest.mark.parametrize("zero", [1, 2])
def test_a_range_is_what_the_reduction_gives_wherever_it_lies(zero: Zero) -> None:
    """A lossy one sums in memory of its own."""

    class Elsewhere(Exact):
        def reduce_scatter(self, number: int, run: Tensor, counts: Sequence[int], group: Group) -> Tensor:
            return super().reduce_scatter(number, run, counts, group) * 2

    def work(dp: Group) -> float:
        parameters = parameters_of((20, 4))
        layout = BucketLayout(parameters, GradientGroups(dp), zero)
        buckets = GradientBuckets(layout, ReplicatedParameters(parameters, solo()), reduction=Elsewhere())
        buckets.begin(1)
        loss_of(parameters, 1.0).backward()
        buckets.finish()
        buckets.close()
        return buckets.reduced(0).max().item()

    assert in_threads([lambda dp=dp: work(dp) for dp in local_groups(2, name="dp")]) == [4.0, 4.0]


def test_the_thread_that_sums_has_no_helpers_and_takes_none() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        buckets = buckets_of(parameters_of((4, 4)), local_groups(2, name="dp")[0])
        assert buckets.run_in_order(torch.get_num_threads).result() == 1
        assert torch.get_num_threads() == 3
        assert in_threads([torch.get_num_threads]) == [3], "nor do threads that start later lose theirs"
        buckets.close()
    finally:
        torch.set_num_threads(before)


def test_what_went_bad_before_a_sum_is_of_this_step_only() -> None:
    def work(dp: Group) -> list[list[str]]:
        parameters = parameters_of((20, 4), (5, 5))
        buckets, seen = buckets_of(parameters, dp), []
        for bad in ((0,), (1,), (0, 1), ()):
            buckets.begin(1)
            factors = [math.nan if dp.rank == 1 and index in bad else 1.0 for index in range(2)]
            sum(p.sum() * factor for p, factor in zip(parameters, factors, strict=True)).backward()
            buckets.finish()
            seen.append(buckets.non_finite_names)
        buckets.close()
        return seen

    fine, bad = in_threads([lambda dp=dp: work(dp) for dp in local_groups(2, name="dp")])
    assert fine == [[], [], [], []] and bad == [["p0"], ["p1"], ["p1", "p0"], []], "of every bucket"


def test_the_tree_takes_a_logarithm_of_memory_and_gives_it_back() -> None:
    parameters = parameters_of((16, 4), (32,))
    buckets = GradientBuckets(
        BucketLayout(parameters, GradientGroups(solo())), ReplicatedParameters(parameters, solo()), deterministic=True
    )
    run = 4 * (16 * 4 + 32)
    buckets.begin(8)
    seen = []
    for _ in range(8):
        loss_of(parameters, 1.0).backward()
        seen.append(buckets.nbytes // run)
    assert seen == [1, 2, 2, 3, 3, 3, 3, 1], "one sum, one more for each subtree that waits, and in the end the whole"
    buckets.finish()
    assert buckets.nbytes == run


def test_closed_buckets_keep_no_parameter_alive() -> None:
    """A worker that is given another plan needs the memory of the old model."""
    parameters = parameters_of((16, 4), (32,))
    buckets = buckets_of(parameters, solo())
    buckets.begin(1)
    loss_of(parameters, 1.0).backward()
    buckets.finish()
    alive = [weakref.ref(parameter) for parameter in parameters]
    buckets.close()
    del buckets, parameters
    gc.collect()
    assert [one() for one in alive] == [None, None]
