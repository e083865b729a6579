"""The kernels of weights in few bits have the bits of the slow twin: on a CUDA device, or by Triton's interpreter."""

from __future__ import annotations

import math
import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not torch.cuda.is_available() and not INTERPRETED:
    pytest.skip("torch finds no CUDA device here", allow_module_level=True)
pytest.importorskip("triton")

from tests.support.models.few_bits import KINDS  # noqa: E402
from tllm.kernels.gpu import few_bits, few_bits_words  # noqa: E402
from tllm.kernels.gpu_kernels import gpu_kernels  # noqa: E402
from tllm.parallel import quantized_weight  # noqa: E402
from tllm.parallel.quantized_weight import PackedRows, QuantizedStack, QuantizedWeight  # noqa: E402
from tllm.quantization import reference_matmul as twin  # noqa: E402
from tllm.quantization.blocks import Blocks, Scheme  # noqa: E402
from tllm.quantization.packed_layout import pack  # noqa: E402
from tllm.quantization.reference_matmul import reference_matmul  # noqa: E402

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
SHAPES = [(37, 544), (5, 48)]


@pytest.fixture(autouse=True)
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the kernels of a GPU on the processor too, where they are interpreted."""
    monkeypatch.setattr(quantized_weight, "gpu_kernels", lambda kind: gpu_kernels("cuda"))
    monkeypatch.setattr(quantized_weight, "library", lambda: None)


def rows_of(blocks: Blocks, lead: int = 0) -> PackedRows:
    outputs, columns = blocks.codes.shape
    return PackedRows(pack(blocks), blocks.scheme, outputs, columns, lead)


def placed(*parts: PackedRows | torch.Tensor, columns: int) -> QuantizedWeight:
    return QuantizedWeight(parts, columns).to(DEVICE)


def check(blocks: Blocks, x: torch.Tensor, with_all: bool = False) -> None:
    """By the way that is chosen, or by each that may be too."""
    outputs, columns = blocks.codes.shape
    rows = rows_of(blocks).to(DEVICE)
    kernels = gpu_kernels("cuda")
    assert kernels is not None
    for exact in (False, True):
        want = reference_matmul(x, pack(blocks), blocks.scheme, outputs, exact)
        got = placed(rows, columns=columns).matmul(x.to(DEVICE), exact).cpu()
        assert torch.equal(got, want.to(got.dtype)), (exact, outputs, columns, len(x))
        device_weight, rounded = rows.on_device(kernels), few_bits.round_rows(x.to(DEVICE))
        for name, multiply in few_bits.CANDIDATES.items() if with_all else ():
            is_slow = INTERPRETED and name not in ("32 groups of words", "tiles of 64 x 16")  # other sizes of the same
            if not is_slow and (not device_weight.is_float8 or "tiles" in name):
                found = torch.full(want.shape, 7, dtype=want.dtype, device=DEVICE)
                multiply(rounded, device_weight, (0, len(x)), found, 0)
                assert torch.equal(found.cpu(), want), (name, exact, outputs, columns, len(x))


def test_rows_are_rounded_as_by_the_twin() -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 1100) * torch.tensor([1.0, 1e-3, 1e30, 1e-38, 0.0])[:, None]
    x[0, :64] = torch.arange(64) / 2  # ties
    x[1, 40], x[2, 3], x[3, :32] = math.nan, -math.inf, 1e-42
    got, want = few_bits.round_rows(x.to(DEVICE)), twin.round_rows(x)
    assert torch.equal(got.codes.cpu().transpose(0, 1).flatten(1).float(), want.codes)
    assert torch.equal(got.scales.cpu().T.nan_to_num(nan=-1), want.scales.nan_to_num(nan=-1))
    first, both = got.sums.cpu().float().unbind(2)
    assert torch.equal(torch.stack((first, both - first), 2).transpose(0, 1).flatten(1), _half_sums(want.codes))
    assert (got.scales[1, 1].isnan(), got.scales[0, 2].isnan(), got.scales[0, 3]) == (True, True, 0)


def _half_sums(codes: torch.Tensor) -> torch.Tensor:
    return codes.unflatten(1, (-1, 16)).sum(-1)


@pytest.mark.parametrize("kind", KINDS)
def test_bits_are_those_of_the_slow_twin(kind: str) -> None:
    torch.manual_seed(1)
    for (outputs, columns), counts in zip(SHAPES, ((1, 20), (2, 70)), strict=True):
        blocks = KINDS[kind](outputs, columns)
        for count in counts:
            x = torch.randn(count, columns)
            x[0, :3] = 0
            check(blocks, x, with_all=(outputs, count) == (5, 2))


@pytest.mark.parametrize("kind", KINDS)
def test_every_way_with_several_chunks_blocks_and_tiles(kind: str) -> None:
    """66 groups of columns: three times as many as words of 32 are read for, and a short last chunk."""
    torch.manual_seed(3)
    blocks = KINDS[kind](37, 2112)
    for count in (3,) if INTERPRETED else (3, 20, 300):
        check(blocks, torch.randn(count, 2112), with_all=True)


def test_a_wide_weight_some_blocks_after_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_bits_words, "MOST_ROOM", 1)
    torch.manual_seed(8)
    check(KINDS["four_bits_and_minima"](70, 96), torch.randn(3, 96))


def test_codes_that_eight_bits_with_a_sign_do_not_hold() -> None:
    torch.manual_seed(7)
    codes, zeros = torch.randint(0, 256, (2, 20, 256), dtype=torch.uint8)
    check(Blocks(Scheme(8, 64), codes, torch.rand(20, 4).half(), zeros=zeros[:, ::64]), torch.randn(21, 256))


def test_parts_leads_and_experts() -> None:
    torch.manual_seed(4)
    x, lead = torch.randn(6, 200), 56
    blocks = [KINDS[kind](outputs, 256) for kind, outputs in (("groups_of_16", 20), ("by_table", 37))]
    plain = torch.randn(7, 200)
    first, last = (rows_of(one, lead) for one in blocks)
    wide = torch.cat((torch.zeros(6, lead), x), 1)
    a, b = (reference_matmul(wide, pack(one), one.scheme, len(one.codes)) for one in blocks)
    found = placed(first, plain, last, columns=200).matmul(x.to(DEVICE)).cpu()
    assert torch.equal(found[:, :20], a) and torch.equal(found[:, 27:], b)
    torch.testing.assert_close(found[:, 20:27], x @ plain.T, rtol=1e-4, atol=1e-4)
    stack = QuantizedStack([placed(*parts, columns=200) for parts in ((first, last), (first, last), (last, first))])
    bounds = torch.tensor([0, 2, 2, 6], device=DEVICE)
    want = torch.cat((torch.cat((a, b), 1)[:2], torch.cat((b, a), 1)[2:]))
    assert torch.equal(stack.matmul(x.to(DEVICE), bounds).cpu(), want)
    # To float16: Triton's interpreter cuts bits off where it makes bfloat16.
    x, wide = (x / 64).half(), (wide / 64).half()
    want = reference_matmul(wide, pack(blocks[0]), blocks[0].scheme, 20).half()
    assert torch.equal(placed(first, columns=200).matmul(x.to(DEVICE)).cpu(), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_go_through_the_numbers_that_weights_stand_for(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two parts, in pieces of some outputs, whose input begins after the packed columns do."""
    if INTERPRETED and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter cuts bits off where it makes bfloat16")
    for name in ("PLAIN_AT_ONCE", "DEVICE_PLAIN_AT_ONCE"):
        monkeypatch.setattr(quantized_weight, name, 3000)
    torch.manual_seed(6)
    blocks = KINDS[kind](37, 512)
    weight = placed(rows_of(blocks, 32), torch.randn(7, 480), rows_of(blocks, 32), columns=480)
    x = torch.randn(5, 480, dtype=dtype).to(DEVICE).requires_grad_()
    given = torch.randn(5, 81, dtype=dtype).to(DEVICE)
    y = weight.matmul(x)
    y.backward(given)
    plain = weight.rows(torch.arange(81, device=DEVICE)).double()
    want = given.double() @ plain
    assert x.grad is not None and x.grad.dtype == dtype
    assert (x.grad - want).norm() < (1e-5 if dtype == torch.float32 else 1e-2) * want.norm()
    with torch.no_grad():
        assert torch.equal(weight.matmul(x), y), "a gradient changes no bit of the product"
