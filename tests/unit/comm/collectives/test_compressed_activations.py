"""Sums and sends in fewer bytes: how far off, how many bytes, the same bits everywhere, and the error that is told."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.comm.clocked_links import clocked_groups
from tests.support.comm.ranks import run_ranks
from tllm.comm.collectives.compressed_activations import (
    BLOCK,
    ActivationFormat,
    Bf16Activations,
    CompressedGroup,
    Int8Activations,
    bound_by_rate,
)
from tllm.comm.collectives.group import Group, local_groups, solo
from tllm.comm.collectives.network_model import equal

FORMS = {"bf16": Bf16Activations(), "int8": Int8Activations()}
SHORT, LONG = 1000, 200_000


def numbers(rank: int, count: int) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(rank)) * 10 ** (rank - 1)


def plainly(form: str, x: torch.Tensor) -> torch.Tensor:
    """What a message of `x` says, block by block as it is defined."""
    if form == "bf16" or not len(x):
        return x.bfloat16().float()
    blocks = []
    for block in x.split(BLOCK):
        step = float(block.abs().max()) / 127
        blocks.append((block / step).round() * step if step else block)
    return torch.cat(blocks)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("count", [0, 1, SHORT, LONG])
def test_sums_are_those_of_the_rounded_numbers(form: str, size: int, count: int) -> None:
    given = [numbers(rank, count) for rank in range(size)]

    def work(group: Group) -> tuple[torch.Tensor, float]:
        narrow = CompressedGroup(group, FORMS[form])
        return narrow.all_reduce(given[group.rank].clone().view(-1, 1)), narrow.error

    results = run_ranks(local_groups(size, deadline=10), work)
    total = results[0][0].flatten()
    assert all(torch.equal(results[0][0], x) for x, _ in results)
    if size == 1:
        assert torch.equal(total, given[0])
        assert results[0][1] == 0
        return
    if size > 2 and count == LONG:  # two hops, in pieces: each rank's are rounded, and so are their sums
        sums = [
            sum(plainly(form, piece) for piece in of) for of in zip(*(x.tensor_split(size) for x in given), strict=True)
        ]
        exact = torch.cat([plainly(form, piece) for piece in sums])
        off = (total - exact).abs() > 1e-5 * exact.abs() + 1e-5
        assert off.float().mean() < 1e-3, "only where a sum in another order falls on the other side of a step"
        assert float((total - exact).abs().max()) <= (1 / 127 if form == "int8" else 2**-8) * float(exact.abs().max())
    else:
        exact = torch.stack([plainly(form, x).double() for x in given]).sum(0)
        torch.testing.assert_close(total.double(), exact, rtol=1e-5, atol=1e-5)
    for rank, (_, error) in enumerate(results):
        if size == 2 or count != LONG:
            x = given[rank]
            told = float((x - plainly(form, x)).double().norm() / x.double().norm()) if count else 0.0
            assert error == pytest.approx(told, rel=1e-3, abs=1e-12)
        assert 0 <= error < (0.003 if form == "bf16" else 0.02)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("count", "hops"), [(4 * BLOCK, 1), (4 * 200 * BLOCK, 2)])
def test_bytes_and_hops(form: str, count: int, hops: int) -> None:
    groups, clocks, links = clocked_groups(4)
    run_ranks(groups, lambda group: CompressedGroup(group, FORMS[form]).all_reduce(torch.ones(count)))
    sent = 2 * count if form == "bf16" else count + 4 * count // BLOCK
    each = sent if hops == 1 else 2 * sent // 4
    assert {link.bytes_moved for link in links.values()} == {each}
    assert max(clocks) == hops


def test_the_second_rounding_of_a_long_sum_is_told_too() -> None:
    given = [torch.full((LONG,), value) for value in (256.0, 1.0, 0.0)]  # 257 has a bit more than bf16

    def work(group: Group) -> float:
        narrow = CompressedGroup(group, Bf16Activations())
        narrow.all_reduce(given[group.rank].clone())
        return narrow.error

    assert min(run_ranks(local_groups(3, deadline=10), work)) > 1e-3


@pytest.mark.parametrize("form", FORMS)
def test_a_send_arrives_rounded(form: str) -> None:
    x = numbers(2, 999).view(27, 37)

    def work(group: Group) -> torch.Tensor | None:
        narrow = CompressedGroup(group, FORMS[form])
        if group.rank == 0:
            narrow.send_to(1, x.T)
            return None
        return narrow.recv_from(0, torch.empty(37, 27, dtype=torch.float64))

    got = run_ranks(local_groups(2, deadline=10), work)[1]
    assert got is not None
    torch.testing.assert_close(got.flatten().float(), plainly(form, x.T.flatten()), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("form", FORMS.values())
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_not_finite_is_seen(form: ActivationFormat, value: float) -> None:
    x = torch.ones(2 * BLOCK)
    x[3] = value
    said = form.unpack(form.pack(x), len(x))
    assert not said[3].isfinite()
    assert said[BLOCK:].isfinite().all(), "only its own block"


def test_a_group_of_one_sends_nothing() -> None:
    x = torch.tensor([1.0, 1e-9, math.pi])
    assert torch.equal(CompressedGroup(solo(), Int8Activations()).all_reduce(x.clone()), x)


def test_a_wire_is_bound_by_its_rate_or_by_its_length() -> None:
    assert bound_by_rate(equal(2, latency=1e-4, rate=12.5e6), 16 << 10)
    assert not bound_by_rate(equal(2, latency=1e-2, rate=125e6), 16 << 10)
    assert not bound_by_rate(equal(1, latency=0, rate=1), 16 << 10)
