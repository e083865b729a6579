"""Products with weights of few bits: every instruction set has the slow twin's bits, and those are right."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch

from tests.support.models.few_bits import KINDS, libraries, name_of, take, ways
from tllm.kernels.library import Library
from tllm.parallel.quantized_weight import PackedRows, QuantizedWeight
from tllm.quantization.blocks import Blocks, Scheme, dequantize
from tllm.quantization.packed_layout import pack, unpack_rows
from tllm.quantization.reference_matmul import reference_matmul, round_rows

SHAPES = [(16, 256), (37, 544), (150, 320), (5, 48)]
"""The second has more columns than a piece of codes that rows share, the third more outputs than lie side by side."""

ROWS = [1, 2, 3, 4, 8, 13, 130, 150]
"""Of the last two, rows beyond 128 fill half a tile, and more than one: tiles are configured anew on the way."""


@pytest.fixture(params=ways(), ids=name_of)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Library:
    return take(request.param, monkeypatch)


def weight_of(blocks: Blocks) -> QuantizedWeight:
    rows, columns = blocks.codes.shape
    return QuantizedWeight([PackedRows(pack(blocks), blocks.scheme, rows, columns)], columns)


def test_there_are_kernels_for_this_processor() -> None:
    assert libraries()[-1].instruction_set.name == "generic"


@pytest.mark.parametrize("kind", KINDS)
def test_bits_are_those_of_the_slow_twin(kind: str, kernels: Library) -> None:
    for outputs, columns in SHAPES:
        torch.manual_seed(outputs)
        blocks = KINDS[kind](outputs, columns)
        weight = weight_of(blocks)
        for rows in ROWS:
            x = torch.randn(rows, columns)
            x[0, :3] = 0
            for exact in (False, True):
                want = reference_matmul(x, pack(blocks), blocks.scheme, outputs, exact)
                assert torch.equal(weight.matmul(x, exact), want)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_bits_depend_neither_on_threads_nor_on_what_is_beside(kernels: Library, threads: int) -> None:
    torch.manual_seed(0)
    blocks, x = KINDS["four_bits_and_minima"](200, 512), torch.randn(150, 512)
    whole = reference_matmul(x, pack(blocks), blocks.scheme, 200)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert torch.equal(weight_of(blocks).matmul(x), whole)
        for row in range(0, 150, 8):
            assert torch.equal(weight_of(blocks).matmul(x[row : row + 1]), whole[row : row + 1])
        assert torch.equal(weight_of(blocks.narrow(-2, 50, 101)).matmul(x), whole[:, 50:101])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("kind", KINDS)
def test_the_twin_is_the_product_of_rounded_rows(kind: str) -> None:
    """In float64, of what the codes stand for: what is left is float32's rounding of sums."""
    torch.manual_seed(1)
    blocks = KINDS[kind](40, 320)
    x = torch.randn(4, 320)
    codes, scales = round_rows(x)
    rounded = codes.double() * scales.double().repeat_interleave(32, 1)
    want = rounded[:, :320] @ dequantize(blocks).double().T
    found = reference_matmul(x, pack(blocks), blocks.scheme, 40).double()
    size = (rounded[:, :320].abs() @ dequantize(blocks).double().abs().T).clamp_min(1e-30)
    # Zeros are taken from codes in float32 here, and from products there: of codes up to 15, as many times the size.
    assert ((found - want).abs() / size).max() < 2e-6
    assert (rounded[:, :320] - x).abs().max() <= (x.abs().max() / 127 / 2) * 1.001


@pytest.mark.parametrize("kind", KINDS)
def test_exact_sums_do_not_depend_on_how_columns_are_cut(kind: str, kernels: Library) -> None:
    torch.manual_seed(6)
    blocks, x = KINDS[kind](20, 1024), torch.randn(3, 1024) * 100
    whole = weight_of(blocks).matmul(x, exact=True)

    def part(start: int, stop: int) -> torch.Tensor:
        unit = blocks.scheme.super_group or blocks.scheme.group
        first = start // unit * unit
        packed, lead = blocks.narrow(-1, first, stop), start - first
        rows = PackedRows(pack(packed), blocks.scheme, 20, stop - first, lead)
        return QuantizedWeight([rows], stop - start).matmul(x[:, start:stop], exact=True)

    for cuts in ([0, 512, 1024], [0, 256, 320, 768, 1024], [0, 32, 1024]):
        sums = [part(a, b) for a, b in itertools.pairwise(cuts)]
        assert torch.equal(torch.stack(sums[::-1]).sum(0), whole), cuts
    near = weight_of(blocks).matmul(x).double()
    assert ((near - whole).abs() / whole.abs().mean()).max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_results_are_rounded_to_the_activations_dtype(kernels: Library, dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    blocks, x = KINDS["rounded_to_4"](33, 128), torch.randn(3, 128).to(dtype)
    assert torch.equal(weight_of(blocks).matmul(x), reference_matmul(x, pack(blocks), blocks.scheme, 33).to(dtype))


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_not_lost(kernels: Library, wrong: float) -> None:
    blocks, x = KINDS["rounded_to_8"](20, 96), torch.randn(3, 96)
    x[1, 40] = wrong
    found = weight_of(blocks).matmul(x)
    assert found[1].isnan().all() and found[[0, 2]].isfinite().all()


def test_rows_of_zeros_and_of_the_least_numbers_are_zeros(kernels: Library) -> None:
    blocks = KINDS["rounded_to_8"](20, 96)
    x = torch.stack((torch.zeros(96), torch.full((96,), 1e-42)))
    assert (weight_of(blocks).matmul(x) == 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_an_embedding_reads_single_rows(kind: str) -> None:
    torch.manual_seed(3)
    blocks = KINDS[kind](50, 256)
    weight, ids = weight_of(blocks), torch.tensor([49, 0, 17, 17, 32])
    assert torch.allclose(weight.rows(ids), dequantize(blocks)[ids], rtol=1e-6, atol=1e-5)
    if blocks.zeros is None:
        found = unpack_rows(pack(blocks), blocks.scheme, ids, 256)
        assert torch.equal(found, dequantize(blocks)[ids])


def test_parts_of_several_formats_make_one_weight(kernels: Library) -> None:
    torch.manual_seed(4)
    first, plain, last = KINDS["groups_of_16"](20, 256), torch.randn(7, 256), KINDS["four_bits_and_minima"](37, 256)
    parts = [PackedRows(pack(first), first.scheme, 20, 256), plain, PackedRows(pack(last), last.scheme, 37, 256)]
    for start, stop in ((0, 64), (3, 9), (18, 30), (20, 27), (63, 64)):
        want = QuantizedWeight(parts, 256).rows(torch.arange(start, stop))
        assert torch.equal(QuantizedWeight(parts, 256).between(start, stop), want)
    x = torch.randn(5, 256)
    found = QuantizedWeight(parts, 256).matmul(x)
    wanted = torch.cat((weight_of(first).matmul(x), x @ plain.T, weight_of(last).matmul(x)), 1)
    assert torch.allclose(found, wanted) and torch.equal(found[:, 27:], wanted[:, 27:])


def test_columns_before_the_cut_meet_zeros(kernels: Library) -> None:
    torch.manual_seed(5)
    blocks, x = KINDS["zeros_of_groups"](16, 256), torch.randn(3, 100)
    lead = 40
    packed = blocks.narrow(-1, 0, lead + 100)
    weight = QuantizedWeight([PackedRows(pack(packed), packed.scheme, 16, lead + 100, lead)], 100)
    wide = torch.cat((torch.zeros(3, lead), x), 1)
    assert torch.equal(weight.matmul(x), weight_of(packed).matmul(wide))


@pytest.mark.parametrize("columns", [16, 17, 24, 31, 100])
def test_a_row_of_few_columns_has_one_scale(columns: int, kernels: Library) -> None:
    """Also where there are fewer than the 32 that a step takes, and more than half of them."""
    torch.manual_seed(9)
    integers = Scheme(8, columns, offset=128)
    for blocks in (KINDS["float8_by_row"](20, columns), replace(KINDS["scale_of_row"](20, columns), scheme=integers)):
        for rows, exact in itertools.product((1, 5), (False, True)):
            x = torch.randn(rows, columns)
            found = weight_of(blocks).matmul(x, exact)
            assert torch.equal(found, reference_matmul(x, pack(blocks), blocks.scheme, 20, exact))
            codes, scales = round_rows(x)
            rounded = (codes.double() * scales.double().repeat_interleave(32, 1))[:, :columns]
            torch.testing.assert_close(found.double(), rounded @ dequantize(blocks).double().T, rtol=1e-5, atol=1e-3)


def test_codes_that_eight_bits_with_a_sign_do_not_hold(kernels: Library) -> None:
    """As GPTQ of 8 bits with zeros: tiles take 128 from each and the rest from the sums. Some pieces may have none."""
    torch.manual_seed(7)
    codes, zeros = torch.randint(0, 256, (2, 40, 1280), dtype=torch.uint8)
    codes[:16, :512] //= 2
    codes[16:32, 512:] //= 2
    blocks = Blocks(Scheme(8, 64), codes, torch.rand(40, 20).half(), zeros=zeros[:, ::64])
    for rows, exact in itertools.product((5, 21), (False, True)):
        x = torch.randn(rows, 1280)
        want = reference_matmul(x, pack(blocks), blocks.scheme, 40, exact)
        assert torch.equal(weight_of(blocks).matmul(x, exact), want)


@pytest.mark.parametrize("rows", [72, 76, 83])
@pytest.mark.parametrize("kind", ["rounded_to_4", "four_bits_and_minima", "groups_of_16", "zeros_of_groups"])
def test_exact_sums_of_parts_of_all_sizes(kind: str, rows: int, kernels: Library) -> None:
    """Small ones may be added as whole numbers; not those from 2 on, nor what is no number.

    Rows fill the last tile by half, partly, or hardly, and the last eight by half, or by three.
    """
    torch.manual_seed(8)
    blocks, x = KINDS[kind](20, 1280), torch.randn(83, 1280) * 2e-5
    x[20, 600:] *= 1e6
    x[33, 40] = 1e9
    x[52] *= 1e10
    x[71, 1279] = math.nan
    x[[74, 81, 82], 700] *= 1e6
    x = x[:rows]
    want = reference_matmul(x, pack(blocks), blocks.scheme, 20, exact=True)
    found = weight_of(blocks).matmul(x, exact=True)
    torch.testing.assert_close(found, want, rtol=0, atol=0, equal_nan=True)


def test_scratch_memory_has_room_for_the_rows_that_a_tile_reads_behind_the_last() -> None:
    """The last row of an expert may be the first one of a tile of 16, whose codes of the last group are then read."""
    for rows in range(2, 41):
        for columns in (32, 64):
            last = (columns // 32 - 1) * rows + rows - 1
            assert libraries()[0].quantized.scratch_bytes(rows, columns) >= (last + 16) * 32
