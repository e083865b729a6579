from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.models.layouts import in_threads
from tests.unit.training.sums import (
    Make,
    Summed,
    buckets_of,
    draw,
    off,
    outstanding,
    parameters_of,
    sent_by,
    sum_up,
    true_sums,
)
from tllm.comm.collectives.group import Group, local_groups, solo
from tllm.parallel.replicated import ReplicatedParameters
from tllm.parallel.shard import Shard, ShardPiece
from tllm.training.gradients.bucket_layout import BucketLayout
from tllm.training.gradients.compressed_reduction import BLOCK, Bf16Reduction, CompressedLayout, Int8Reduction
from tllm.training.gradients.error_feedback import RESIDUAL
from tllm.training.gradients.gradient_buckets import GradientBuckets
from tllm.training.gradients.reduction import Exact, GradientGroups, Reduction

SHAPES = ((30, 11), (7,), (3, 8, 50), (2, 129), (5,))


def int8_slowly(parts: list[Tensor], kept: list[Tensor], ranges: list[tuple[int, int]]) -> Tensor:
    """The sum of one matrix that is a bucket of its own, a number after another; `kept` is updated."""

    def rounded(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        for start in range(0, len(x), BLOCK):
            block = x[start : start + BLOCK]
            scale = max(abs(float(v)) for v in block) / 127
            steps = [round(float(v) / scale) if scale else 0 for v in block]
            out[start : start + BLOCK] = torch.tensor(steps, dtype=x.dtype) * scale
        return out

    whole = torch.empty_like(parts[0])
    for owner, (start, stop) in enumerate(ranges):
        total = torch.zeros(stop - start, dtype=whole.dtype)
        for rank, part in enumerate(parts):
            x = part[start:stop] + kept[rank][start:stop]
            if rank == owner:
                total += x
            else:
                total += rounded(x)
                kept[rank][start:stop] = x - rounded(x)
        whole[start:stop] = rounded(total)
        kept[owner][start:stop] = total - rounded(total)
    return whole


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("cut", [False, True])
def test_bf16_adds_rounded_numbers_in_float32_and_rounds_the_sum(ranks: int, cut: bool) -> None:
    gradients = draw(SHAPES, ranks, 2)
    done = sum_up(lambda buckets: Bf16Reduction(), SHAPES, gradients, cut)[0]
    for step, of_ranks in enumerate(gradients):
        for index, parts in enumerate(zip(*of_ranks, strict=True)):
            want = parts[0].bfloat16().float()
            for part in parts[1:]:
                want = want + part.bfloat16().float()
            assert torch.equal(done.sums[step][index], want.bfloat16().float())
            assert done.sums[step][index].dtype == torch.float32


@pytest.mark.parametrize("ranks", [2, 3])
def test_int8_is_what_the_slow_version_gives(ranks: int) -> None:
    shape = (9, 101)
    gradients = draw([shape], ranks, 4, torch.float64)
    done = sum_up(Int8Reduction, [shape], gradients)
    size = done[0].buckets.layout.buckets[0].size
    kept = [torch.zeros(size, dtype=torch.float64) for _ in range(ranks)]
    ranges = [done[0].buckets.layout.buckets[0].range_of(rank, ranks) for rank in range(ranks)]
    for step, of_ranks in enumerate(gradients):
        parts = [F.pad(part[0].flatten(), (0, size - part[0].numel())) for part in of_ranks]
        want = int8_slowly(parts, kept, ranges)[: math.prod(shape)].view(shape)
        assert off(done[0].sums[step][0], want) < 1e-12
    assert any(bool(k.any()) for k in kept)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_int8_loses_nothing_for_good(ranks: int) -> None:
    """All that was applied and all that is kept add up to the truth; no matrix is off by more than blocks' steps."""
    gradients = draw(SHAPES, ranks, 5, torch.float64)
    done = sum_up(Int8Reduction, SHAPES, gradients, limit=5000)
    truth, kept = true_sums(gradients), outstanding(done)
    for index, shape in enumerate(SHAPES):
        applied = sum((sums[index] for sums in done[0].sums), torch.zeros(()))
        assert off(applied + kept[index], sum((step[index] for step in truth), torch.zeros(()))) < 1e-12
        first = off(done[0].sums[0][index], truth[0][index])
        assert (1e-4 < first < 0.02) if len(shape) > 1 else first < 1e-12, "vectors are sent as they are"


@pytest.mark.parametrize("ranks", [2, 3])
def test_zero_gives_the_same_bits(ranks: int) -> None:
    gradients = draw(SHAPES, ranks, 3)
    whole, cut = sum_up(Int8Reduction, SHAPES, gradients)[0], sum_up(Int8Reduction, SHAPES, gradients, cut=True)[0]
    for a, b in zip(whole.sums, cut.sums, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def forget(step: int, reduction: Reduction) -> None:
    assert isinstance(reduction, Int8Reduction)
    for number in range(len(reduction.layout.buckets)):
        reduction.residuals.of(number).zero_()


def test_without_feedback_small_numbers_never_arrive() -> None:
    """One large number in each block, the others below half a step of its scale: only what is kept brings them over."""
    steps, ranks, shape = 60, 3, (6, 256)
    gradient = torch.full(shape, 0.2 / 127)
    gradient[:, 0] = 1.0
    gradients = [[[gradient] for _ in range(ranks)] for _ in range(steps)]
    kept = sum_up(Int8Reduction, [shape], gradients)[0]
    lost = sum_up(Int8Reduction, [shape], gradients, after=forget)[0]
    want = gradient * ranks * steps

    def total(done: Summed) -> Tensor:
        return sum((sums[0] for sums in done.sums), torch.zeros(()))

    small = (total(kept) - want)[:, 1:].abs().max()
    assert float(small) <= 1.01 * (2 * (ranks - 1) + 3.2) / 127, "within the last step's rounding on both hops"
    assert float((total(lost) - want)[:, 1:].abs().min()) > 0.3 * float(want[0, 1]), "it drifts with every step"


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("of_rank", [0, 1])
def test_a_number_that_is_none_stays_one_and_in_its_parameter(bad: float, of_rank: int) -> None:
    gradients = draw(SHAPES, 2, 1)
    gradients[0][of_rank][2][0, 0, 3] = bad
    for sums in (one.sums[0] for one in sum_up(Int8Reduction, SHAPES, gradients)):
        assert not torch.isfinite(sums[2]).all()
        assert all(torch.isfinite(sums[index]).all() for index in (0, 1, 3, 4))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_bytes_are_those_of_the_formula(ranks: int) -> None:
    shapes = ((384, 256), (192,))
    size, share = 384 * 256, (ranks - 1) / ranks

    def sent(make: Make, count: int) -> list[int]:
        done = sum_up(make, shapes[:count], draw(shapes[:count], ranks, 2))
        assert len({tuple(one.sent) for one in done}) == 1, "every rank sends as much"
        return done[0].sent

    assert sent(lambda buckets: Exact(), 1) == [2 * share * 4 * size] * 2
    assert sent(lambda buckets: Bf16Reduction(), 1) == [2 * share * 2 * size] * 2
    assert sent(Int8Reduction, 2) == [2 * share * (size * (1 + 4 / BLOCK) + 4 * 192)] * 2


def test_with_zero_one_hop_is_sent() -> None:
    shape = (96, 256)

    def work(dp: Group) -> int:
        buckets = buckets_of([shape], dp)
        buckets.close()
        Int8Reduction(buckets).reduce_scatter(0, torch.randn(96 * 256), [8192] * 3, dp)
        return sent_by(dp)

    assert in_threads([lambda dp=dp: work(dp) for dp in local_groups(3)]) == [2 * (8192 + 8192 // 256 * 4)] * 3


def test_what_two_ranks_of_a_replica_hold_is_sent_as_it_is() -> None:
    """Two tp ranks hold the same table among others of unlike sizes; their two dp groups must give it the same bits."""
    dice = torch.Generator().manual_seed(1)
    table = [torch.randn(40, 30, generator=dice) for _ in range(2)]

    def work(replica: int, tp: Group, dp: Group) -> Tensor:
        parameters = parameters_of([(20 + 9 * tp.rank, 30), (40, 30), (4, 4)])
        for number, parameter in enumerate(parameters):
            name = f"p{number}" if number == 1 else f"p{number} of {tp.rank}"
            parameter.shard = Shard((ShardPiece(name),), replicated=number == 1)  # type: ignore[attr-defined]
        buckets = GradientBuckets(BucketLayout(parameters, GradientGroups(dp)), ReplicatedParameters(parameters, tp))
        buckets.close()
        run = torch.ones(buckets.layout.buckets[0].size)
        view = dict(
            zip(buckets.layout.buckets[0].parameters, buckets.layout.buckets[0].views(run, parameters), strict=True)
        )[1]
        view.copy_(table[replica])
        Int8Reduction(buckets).all_reduce(0, run, dp)
        return view

    tps, dps = [local_groups(2), local_groups(2)], [local_groups(2), local_groups(2)]
    tasks = [lambda r=r, t=t: work(r, tps[r][t], dps[t][r]) for r in range(2) for t in range(2)]
    assert all(torch.equal(view, table[0] + table[1]) for view in in_threads(tasks))


def test_what_is_kept_moves_to_its_owner_and_can_be_saved_and_dealt_to_other_ranks() -> None:
    ranks, gradients = 3, draw(SHAPES, 3, 3, torch.float64)
    done = sum_up(Int8Reduction, SHAPES, gradients)
    before = outstanding(done)
    in_threads([lambda one=one: one.reduction.residuals.consolidate() for one in done])
    assert all(off(a, b) < 1e-12 for a, b in zip(outstanding(done), before, strict=True) if b.any())
    for index, whole in enumerate(before):
        joined, covered = torch.zeros(whole.numel(), dtype=whole.dtype), 0
        for one in done:
            for held in one.reduction.residuals.checkpoint_slices():
                if held.parameter is one.buckets.layout.parameters[index]:
                    assert held.name == RESIDUAL
                    joined[held.start : held.start + len(held.flat)] = held.flat
                    covered += len(held.flat)
        assert covered == whole.numel()
        torch.testing.assert_close(joined, whole.flatten(), rtol=1e-10, atol=1e-12)
    for rank, one in enumerate(done):
        for number, bucket in enumerate(one.buckets.layout.buckets):
            start, stop = bucket.range_of(rank, ranks)
            run = one.reduction.residuals.of(number)
            assert not run[:start].any() and not run[stop:].any()
            assert bool(run[start:stop].any()) == bucket.decays, "vectors are sent as they are"


def test_of_one_rank_it_does_nothing() -> None:
    buckets = buckets_of(SHAPES, solo())
    run = torch.randn(buckets.layout.buckets[0].size)
    for reduction in (Bf16Reduction(), Int8Reduction(buckets)):
        assert torch.equal(reduction.all_reduce(0, run.clone(), solo()), run)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("blocked", [((0, 1000),), (), ((3, 5), (5, 700)), ((0, 256), (600, 1001))])
def test_a_message_says_the_range(dtype: torch.dtype, blocked: tuple[tuple[int, int], ...]) -> None:
    x = torch.randn(1001, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[300:600] *= 1e-30 if dtype == torch.float32 else 1e-300
    exact = ((256, 600),) if len(blocked) != 1 and (0, 256) in blocked else ()
    form = CompressedLayout(0, 1001, blocked, exact)
    message = form.pack(x)
    assert message.dtype == torch.uint8 and len(message) == form.nbytes(dtype)
    got, left = form.unpack(message, x), torch.ones(1001, dtype=torch.bool)
    for a, b in (*blocked, *exact):
        left[a:b] = False
    for a, b in blocked:
        for block in torch.arange(a, b).split(BLOCK):
            assert (got[block] - x[block]).abs().max() <= x[block].abs().max() / 254 * 1.001
    assert all(torch.equal(got[a:b], x[a:b]) for a, b in exact) and not got[left].any()


def test_numbers_at_the_end_of_the_range_do_not_turn_over() -> None:
    form = CompressedLayout(0, 4, ((0, 4),), ())
    for size in (1e-45, 2.66e-43, 1e-38, 3.4e38):
        x = torch.tensor([size, -size, size / 3, 0.0])
        got = form.unpack(form.pack(x), x)
        assert bool((got.sign() * x.sign() >= 0).all() and (got.abs() <= 1.01 * size + 2e-43).all()), size
