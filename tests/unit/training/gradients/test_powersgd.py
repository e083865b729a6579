from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.support.models.layouts import in_threads
from tests.unit.training.sums import buckets_of, draw, off, outstanding, sum_up, true_sums
from tllm.comm.collectives.group import solo
from tllm.training.gradients.powersgd import PowerSGD, orthonormal, product, random_columns
from tllm.training.gradients.reduction import Reduction

SHAPES = ((30, 11), (7,), (3, 16, 50), (2, 129), (5,), (30, 11))
LOW = (0, 2, 5)
"""Those of `SHAPES` in which two columns and rows are fewer numbers than all; the one with two rows is not."""


def rank_2(buckets: object) -> PowerSGD:
    return PowerSGD(buckets, 2)  # type: ignore[arg-type]


def powersgd_slowly(parts: list[Tensor], kept: list[Tensor], start: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of one matrix and the next start, by the paper's formulas with matrix products and a QR."""
    whole = [part + k for part, k in zip(parts, kept, strict=True)]
    p = torch.linalg.qr(sum((m @ start for m in whole), torch.zeros(())))[0]
    q = sum((m.T @ p for m in whole), torch.zeros(()))
    for m, k in zip(whole, kept, strict=True):
        k.copy_(m - p @ (p.T @ m))
    return p @ q.T, q


@pytest.mark.parametrize("ranks", [2, 3])
def test_it_is_what_the_slow_version_gives(ranks: int) -> None:
    shape = (30, 17)
    gradients = draw([shape], ranks, 5, torch.float64)
    done = sum_up(rank_2, [shape], gradients)[0]
    kept = [torch.zeros(shape, dtype=torch.float64) for _ in range(ranks)]
    start = random_columns(17, 2, gradients[0][0][0])
    for step, of_ranks in enumerate(gradients):
        want, start = powersgd_slowly([part[0] for part in of_ranks], kept, start)
        assert off(done.sums[step][0], want) < 1e-12


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_nothing_is_lost_for_good(ranks: int) -> None:
    gradients = draw(SHAPES, ranks, 5, torch.float64)
    done = sum_up(rank_2, SHAPES, gradients, limit=5000)
    truth, kept = true_sums(gradients), outstanding(done)
    for index in range(len(SHAPES)):
        applied = sum((sums[index] for sums in done[0].sums), torch.zeros(()))
        assert off(applied + kept[index], sum((step[index] for step in truth), torch.zeros(()))) < 1e-12
        first = off(done[0].sums[0][index], truth[0][index])
        assert first > 0.1 if index in LOW else first < 1e-12


def test_what_has_no_more_columns_arrives_whole() -> None:
    dice = torch.Generator().manual_seed(0)
    rows, columns = torch.randn(30, 2, generator=dice).double(), torch.randn(40, 2, generator=dice).double()
    parts = [[rows @ torch.randn(2, 2, generator=dice).double() @ columns.T] for _ in range(3)]
    done = sum_up(rank_2, [(30, 40)], [parts])[0]
    assert off(done.sums[0][0], true_sums([parts])[0][0]) < 1e-12


def forget(step: int, reduction: Reduction) -> None:
    assert isinstance(reduction, PowerSGD)
    reduction.residuals.of(0).zero_()


def test_each_step_begins_with_the_columns_of_the_last() -> None:
    """Of a gradient that stays, the best columns are found in a few steps: those of the singular vectors."""
    gradient = torch.randn(40, 40, generator=torch.Generator().manual_seed(2)).double()
    u, s, v = torch.linalg.svd(gradient)
    gradient = u @ torch.diag(s * torch.logspace(0, -3, 40).double()) @ v
    done = sum_up(rank_2, [(40, 40)], [[[gradient / 2], [gradient / 2]]] * 12, after=forget)[0]
    best = torch.linalg.svdvals(gradient)[2:].norm()
    missing = [float((sums[0] - gradient).norm() / best) for sums in done.sums]
    assert missing[0] > 1.2 and missing[-1] < 1.001


def test_what_was_left_of_what_now_travels_whole_is_sent_once() -> None:
    def leave(step: int, reduction: Reduction) -> None:
        assert isinstance(reduction, PowerSGD)
        if step == 0:
            reduction.residuals.of(0).fill_(3.0)

    gradients = draw([(7,)], 2, 4, torch.float64)
    done, truth = sum_up(rank_2, [(7,)], gradients, after=leave)[0], true_sums(gradients)
    for step, (sums, want) in enumerate(zip(done.sums, truth, strict=True)):
        assert off(sums[0], want[0] + (6.0 if step == 1 else 0.0)) < 1e-12


def test_with_feedback_a_gradient_that_stays_is_applied_in_full() -> None:
    steps, gradient = 60, torch.randn(24, 24, generator=torch.Generator().manual_seed(2)).double()
    gradients = [[[gradient / 2], [gradient / 2]]] * steps

    def missing(after: object) -> float:
        done = sum_up(rank_2, [(24, 24)], gradients, after=after)[0]  # type: ignore[arg-type]
        return off(sum((sums[0] for sums in done.sums), torch.zeros(())), steps * gradient)

    assert missing(lambda step, reduction: None) < 0.3 < 0.6 < missing(forget)


@pytest.mark.parametrize("ranks", [2, 3])
def test_zero_gives_the_same_bits(ranks: int) -> None:
    gradients = draw(SHAPES, ranks, 3)
    whole, cut = sum_up(rank_2, SHAPES, gradients)[0], sum_up(rank_2, SHAPES, gradients, cut=True)[0]
    for a, b in zip(whole.sums, cut.sums, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_zeros_do_not_stay_zeros() -> None:
    """An expert without tokens has no gradient for a while."""
    shapes = ((30, 20),)
    gradients = draw(shapes, 2, 4)
    for step in (0, 1):
        gradients[step] = [[torch.zeros(30, 20)], [torch.zeros(30, 20)]]
    done = sum_up(rank_2, shapes, gradients)[0]
    assert not done.sums[0][0].any() and not done.sums[1][0].any()
    assert float(done.sums[2][0].norm()) > 0.1 * float(true_sums(gradients)[2][0].norm())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_number_that_is_none_stays_one_and_in_its_parameter(bad: float) -> None:
    gradients = draw(SHAPES, 2, 1)
    gradients[0][1][2][0, 0, 3] = bad
    for sums in (one.sums[0] for one in sum_up(rank_2, SHAPES, gradients)):
        assert not torch.isfinite(sums[2]).all()
        assert all(torch.isfinite(sums[index]).all() for index in (0, 1, 3, 4, 5))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_bytes_are_those_of_the_formula(ranks: int) -> None:
    """One-shot sums of short messages send n - 1 times what they hold."""
    done = sum_up(rank_2, SHAPES, draw(SHAPES, ranks, 2))
    low = 2 * 2 * (30 + 11) + 3 * 2 * (16 + 50)
    assert all(one.sent == [4 * (ranks - 1) * (low + 7 + 2 * 129 + 5)] * 2 for one in done)


def test_before_a_save_what_is_kept_moves_and_columns_begin_anew() -> None:
    gradients = draw(SHAPES, 3, 3, torch.float64)
    done = sum_up(rank_2, SHAPES, gradients)
    before = outstanding(done)
    in_threads([lambda one=one: one.reduction.consolidate() for one in done])
    assert all(off(a, b) < 1e-12 for a, b in zip(outstanding(done), before, strict=True) if b.any())
    fresh = PowerSGD(done[0].buckets, 2)
    assert all(torch.equal(done[0].reduction._start(i), fresh._start(i)) for i in LOW)


def test_of_one_rank_it_does_nothing() -> None:
    buckets = buckets_of(SHAPES, solo())
    run = torch.randn(buckets.layout.buckets[0].size)
    assert torch.equal(PowerSGD(buckets, 2).all_reduce(0, run.clone(), solo()), run)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rows", [5, 64, 1000])
def test_columns_are_orthonormal_and_span_what_was_given(rows: int, dtype: torch.dtype) -> None:
    dice = torch.Generator().manual_seed(rows)
    p = torch.randn(3, rows, 4, generator=dice).to(dtype)
    p[0, :, 2] = p[0, :, 0] * 3 + p[0, :, 1]  # adds nothing but rounding
    p[1, :, 1] = 0
    p[2] *= 1e-20
    q, p = orthonormal(p).double(), p.double()
    close = {"rtol": 0, "atol": 5e-7 if dtype == torch.float32 else 1e-12}
    torch.testing.assert_close(q.mT @ q, torch.eye(4).double().expand(3, 4, 4), **close)
    within = q @ (q.mT @ p)
    torch.testing.assert_close(within / p.norm(), p / p.norm(), **close)
    torch.testing.assert_close(within[2] / p[2].norm(), p[2] / p[2].norm(), **close)


def test_a_product_of_columns_and_rows() -> None:
    dice = torch.Generator().manual_seed(0)
    p, q = torch.randn(2, 9, 3, generator=dice).double(), torch.randn(2, 7, 3, generator=dice).double()
    torch.testing.assert_close(product(p, q), p @ q.mT, rtol=1e-14, atol=1e-14)
