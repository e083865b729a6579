"""Rows in a narrow form over one link: each by itself, in as few bytes as promised, with the error that is told."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tllm.comm.collectives import compressed_hop as hopping
from tllm.comm.collectives.compressed_activations import BLOCK
from tllm.comm.collectives.compressed_hop import CompressedHop, decide_compression, expected_error, format_for
from tllm.comm.links.link import LocalLink

WIDTHS = (1, 64, BLOCK, 300)
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def rows_of(width: int, dtype: torch.dtype, count: int = 40) -> torch.Tensor:
    x_TD = torch.randn(count, width, generator=torch.Generator().manual_seed(width), dtype=torch.float64)
    return (x_TD * 10 ** torch.linspace(-3, 3, count, dtype=torch.float64)[:, None]).to(dtype)


def crossed(x_TD: torch.Tensor, form: str) -> tuple[torch.Tensor, float, int]:
    """What arrives, the error that the sender tells, and the bytes that it sent."""
    link = LocalLink(0, 1, 5)
    here, there = CompressedHop(link, form), CompressedHop(link, form)
    here.send(x_TD)
    return there.recv(tuple(x_TD.shape), x_TD.dtype), here.error, link.bytes_moved


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_becomes_the_same_whatever_is_sent_beside_it(width: int, dtype: torch.dtype) -> None:
    """Rows differ in size by up to 10^6, so that a step shared by two of them would show."""
    x_TD = rows_of(width, dtype)
    for form in ("bf16", "int8"):
        together, _, _ = crossed(x_TD, form)
        assert together.dtype == dtype and together.shape == x_TD.shape
        for row in (0, 7, 39):
            assert torch.equal(crossed(x_TD[row : row + 1], form)[0], together[row : row + 1])
        near = 2**-8 if form == "bf16" else 1 / 254 * 1.01
        greatest = x_TD.double().abs().amax(1, keepdim=True)
        off = (together.double() - x_TD.double()).abs()
        rounding = greatest * torch.finfo(dtype).eps
        assert bool((off <= near * greatest + rounding).all())
        assert form == "bf16" or width == 1 or bool((off > 0).any())


def test_it_takes_as_many_bytes_as_promised() -> None:
    x_TD = rows_of(2 * BLOCK, torch.float32, 16)
    assert crossed(x_TD, "bf16")[2] == x_TD.nbytes // 2
    assert crossed(x_TD, "int8")[2] == 16 * 2 * (BLOCK + 4)
    assert crossed(rows_of(300, torch.float32, 16), "int8")[2] == 16 * 2 * (BLOCK + 4), "a row ends with a block"


@pytest.mark.parametrize("form", ["bf16", "int8"])
def test_the_error_told_is_that_of_what_arrived(form: str) -> None:
    x_TD = rows_of(300, torch.float32, hopping.SAMPLED_ROWS)
    got, told, _ = crossed(x_TD, form)
    true = float((got.double() - x_TD.double()).norm() / x_TD.double().norm())
    assert told == pytest.approx(true, rel=1e-5)
    assert true > 1e-4
    link = LocalLink(0, 1, 5)
    assert CompressedHop(link, form).error == 0


def test_what_to_expect_on_normal_numbers() -> None:
    """bf16: about 2^-9 / sqrt(3) times what a number may be nearer to its lower power; int8: a step is 1/127 of 3."""
    assert 1e-3 < expected_error("bf16", torch.float32, 4096) < 2**-9
    assert 4e-3 < expected_error("int8", torch.float32, 4096) < 1e-2


def test_the_form_is_what_was_asked_for_where_it_is_shorter() -> None:
    assert format_for("off", torch.float32) == ""
    assert (format_for("bf16", torch.float32), format_for("bf16", torch.bfloat16)) == ("bf16", "")
    assert (format_for("int8", torch.float32), format_for("int8", torch.float16)) == ("int8", "int8")
    assert (format_for("auto", torch.float32), format_for("auto", torch.bfloat16)) == ("bf16", "int8")


def around(size: int) -> list[tuple[bool, bool, float]]:
    """What each stage of a ring agrees on."""
    links = [LocalLink(stage, (stage + 1) % size, 20) for stage in range(size)]
    with ThreadPoolExecutor(size) as pool:
        work = [
            pool.submit(decide_compression, links[i - 1], links[i], size, 32, 512, torch.float32) for i in range(size)
        ]
        return [one.result() for one in work]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_both_ends_of_each_hop_agree(size: int) -> None:
    found = around(size)
    for stage, (_, gives, rate) in enumerate(found):
        assert gives == found[(stage + 1) % size][0] and rate > 0


@pytest.mark.parametrize("size", [2, 3])
def test_a_hop_is_narrow_where_that_spares_more_than_it_costs(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """32 rows of 512 float32 spare 32 KiB as bf16; writing and reading are said to take 1 ms: 33 MB/s is the border."""
    rates = iter([1e9, 30e6, 36e6][:size])
    given: dict[int, float] = {}

    def rate(previous: LocalLink, following: LocalLink) -> float:
        return given[following.source]

    for stage in range(size):
        given[stage] = next(rates)
    monkeypatch.setattr(hopping, "_rate", rate)
    monkeypatch.setattr(hopping, "_seconds", lambda work: 1e-3)
    found = around(size)
    assert [pays for pays, _, _ in found] == [False, True, False][:size]
    assert [gives for _, gives, _ in found] == [True, False, False][:size], "each sender knows what its receiver found"
