"""The Triton kernels against torch's steps: on a CUDA device, or on the processor by Triton's interpreter.

`TRITON_INTERPRET=1 python -m pytest tests/gpu/test_kernels.py`, where triton is installed, needs no GPU.
"""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not torch.cuda.is_available() and not INTERPRETED:
    pytest.skip("torch finds no CUDA device here", allow_module_level=True)
pytest.importorskip("triton")

from tllm.engine.compute.cache_codes import FP8, INT8, numbers_of, rounded  # noqa: E402
from tllm.kernels.gpu import paged_attention  # noqa: E402
from tllm.kernels.gpu.paged_attention import GpuAttention, LayerSlots, TokenTiles  # noqa: E402
from tllm.kernels.gpu.products import GpuProducts, skinny_matmul  # noqa: E402
from tllm.kernels.gpu.row_operations import GpuRowOperations, write_slots  # noqa: E402

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
DTYPES = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
PAGE, PAGES = 16, 40
CODES = {"plain": None, "int8": INT8, "fp8": FP8}


def check(found: Tensor, want: Tensor, dtype: torch.dtype, times: float = 1.0) -> None:
    assert found.dtype == dtype
    limit = times * DTYPES[dtype]
    torch.testing.assert_close(found.float(), want.float(), rtol=limit, atol=limit)


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("adds_one", [False, True])
def test_norm(dtype: torch.dtype, adds_one: bool) -> None:
    rows = GpuRowOperations()
    shapes = [(3, 100), (1, 2048), (2, 3, 2, 16), (0, 16)]
    for x in (*(numbers(*shape, dtype=dtype) for shape in shapes), numbers(2, 5, 16, dtype=dtype)[:, 1:4]):
        w = numbers(x.shape[-1], dtype=dtype)
        want = F.rms_norm(x.float(), (x.shape[-1],), None, 1e-5) * (w.float() + adds_one)
        check(rows.rms_norm(x, w, 1e-5, adds_one), want, dtype, 2)
        if x.dim() == 2:
            y = numbers(*x.shape, dtype=dtype).flip(1)
            total, normed = rows.add_and_norm(x, y, w, 1e-5, adds_one)
            check(total, x.float() + y.float(), dtype)
            assert torch.equal(normed, rows.rms_norm(total, w, 1e-5, adds_one))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_activations(dtype: torch.dtype) -> None:
    rows, x = GpuRowOperations(), 4 * numbers(3, 2 * 1100, dtype=dtype)
    gate, up = x.float().chunk(2, -1)
    check(rows.gated(x, "silu"), F.silu(gate) * up, dtype, 4)
    check(rows.gated(x, "gelu_pytorch_tanh"), F.gelu(gate, approximate="tanh") * up, dtype, 4)
    gate, up = x.float()[:, 0::2].clamp(max=3.0), x.float()[:, 1::2].clamp(-3.0, 3.0)
    check(rows.clamped_swiglu(x, 3.0, 1.7), gate * torch.sigmoid(1.7 * gate) * (up + 1), dtype, 4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("turned", [24, 10])
def test_rotation_of_all_or_some_of_a_head(dtype: torch.dtype, turned: int) -> None:
    x = numbers(5, 9, 24, dtype=dtype)[:, 2:6]
    cos, sin = numbers(5, 1, turned, dtype=dtype), numbers(5, 1, turned + 2, dtype=dtype)[..., :turned].contiguous()
    wide = x.float()[..., :turned]
    want = x.float().clone()
    want[..., :turned] = wide * cos.float() + wide.roll(turned // 2, -1) * sin.float()
    rows = GpuRowOperations()
    check(rows.rotate_in_place(x.clone(), cos, sin), want, dtype, 2)
    first, second = rows.rotate_both(x[:, :3].clone(), x[:, 3:].clone(), cos, sin)
    assert torch.equal(torch.cat((first, second), 1), rows.rotate_in_place(x.clone(), cos, sin))


def test_rows_come_to_their_slots() -> None:
    k, v = numbers(3, 8, 20)[:, 2:6], numbers(3, 4, 20)
    places = torch.tensor([7, 49, 0], dtype=torch.int32, device=DEVICE)
    keys, values = torch.zeros(2, 4, 50, 20, device=DEVICE)
    write_slots(k, v, places, keys, values)
    for cache, x in ((keys, k), (values, v)):
        want = torch.zeros(4, 50, 20, device=DEVICE)
        want[:, places.long()] = x.transpose(0, 1)
        assert torch.equal(cache, want)


def attended(q_THD: Tensor, k_SD: Tensor, v_SD: Tensor, start: int, sinks: Tensor | None, spec: dict) -> Tensor:  # type: ignore[type-arg]
    """Softmax written out in float64: rows of one sequence from `start` on, query heads of one kv head."""
    scores = q_THD.double() @ k_SD.double().T * 0.3
    if spec["softcap"]:
        scores = torch.tanh(scores / spec["softcap"]) * spec["softcap"]
    ahead = (start + torch.arange(len(q_THD), device=DEVICE))[:, None] - torch.arange(len(k_SD), device=DEVICE)
    hidden = (ahead < 0) | (ahead >= (spec["window"] or 1 << 30))
    scores = scores.masked_fill(hidden[:, None], float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.double()[None, :, None].expand(len(q_THD), -1, 1)), -1)
    return scores.softmax(-1)[..., : len(k_SD)] @ v_SD.double()


def test_fp8_without_a_device_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """One key of every finite code, which is all that its query sees, gives what the code stands for, to the bit."""
    codes = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8, device=DEVICE)
    values, ones = codes.expand(1, PAGE, -1).contiguous(), torch.ones(1, PAGE, 1, device=DEVICE)
    slots = LayerSlots(torch.zeros_like(values), values, ones, ones)
    tiles = TokenTiles(torch.tensor([[0, 1, 0, 0]]).int().to(DEVICE), torch.zeros(1, 1).int().to(DEVICE), 1)
    q = torch.ones(1, 1, len(codes), device=DEVICE)
    for has_fp8 in (False, True) if INTERPRETED else (False,):
        monkeypatch.setattr(paged_attention, "has_fp8", lambda device, has_fp8=has_fp8: has_fp8)
        out = torch.empty_like(q)
        GpuAttention((0, 1), 1.0, None, None, PAGE, DEVICE)(tiles, q, slots, None, 1, out)
        assert torch.equal(out[0, 0], codes.view(torch.float8_e4m3fn).float())


SPECS = {
    "plain": {"softcap": None, "window": None},
    "window": {"softcap": None, "window": 37},
    "softcap": {"softcap": 2.0, "window": None},
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("codes", CODES)
def test_attention(dtype: torch.dtype, kind: str, parts: int, codes: str) -> None:
    """Tiles of a reply, of a later part of a prompt, of a sequence of one token; uneven groups of heads; sinks."""
    if INTERPRETED and dtype == torch.bfloat16:
        pytest.skip("the interpreter has no products in bfloat16")
    spec, firsts, width = SPECS[kind], (0, 3, 4), 24
    cases = [(1, 200), (20, 130), (1, 0)]  # how many rows of a sequence, from which position on
    pages = torch.randperm(PAGES, generator=torch.Generator().manual_seed(3)).view(-1, 20)[:2]
    rows = sum(count for count, _ in cases)
    tables = torch.stack((pages[0], pages[1], pages[1].flip(0))).int().to(DEVICE)
    q, slots = numbers(rows, 6, width, dtype=dtype)[:, :4], PAGES * PAGE
    keys, values = numbers(2, slots, width, dtype=dtype), -numbers(2, slots, width, dtype=dtype).flip(1)
    held, scales, coding = [keys, values], list[Tensor](), CODES[codes]
    if coding is not None:
        for number, plain in enumerate((keys, values)):
            made, scale = rounded(coding, plain.transpose(0, 1))
            held[number] = made.transpose(0, 1).contiguous()
            scales.append(scale.transpose(0, 1).contiguous())
        keys, values = (numbers_of(x, s, dtype) for x, s in zip(held, scales, strict=True))
    sinks = numbers(4) if kind == "window" else None
    tiles, row = [], 0
    for sequence, (count, start) in enumerate(cases):
        for at in range(0, count, 7):
            tiles.append((row + at, min(7, count - at), start + at, sequence))
        row += count
    attend = GpuAttention(firsts, 0.3, spec["softcap"], spec["window"], PAGE, DEVICE)
    out = torch.full((rows, 4, width), float("nan"), dtype=dtype, device=DEVICE)
    of_batch = TokenTiles(torch.tensor(tiles).int().to(DEVICE), tables, 7)
    attend(of_batch, q, LayerSlots(*held, *scales), sinks, parts, out)
    row = 0
    for sequence, (count, start) in enumerate(cases):
        seen = torch.arange(start + count, device=DEVICE)
        places = tables[sequence].long()[seen // PAGE] * PAGE + seen % PAGE
        for kv, (first, last) in enumerate(((0, 3), (3, 4))):
            of_heads = None if sinks is None else sinks[first:last]
            part = q[row : row + count, first:last]
            want = attended(part, keys[kv, places], values[kv, places], start, of_heads, spec)
            check(out[row : row + count, first:last], want, dtype, 4)
        row += count


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 3])
def test_products_of_few_rows(dtype: torch.dtype, rows: int) -> None:
    x, w = numbers(rows, 700, dtype=dtype), numbers(50, 700, dtype=dtype) / 26
    check(skinny_matmul(x, w), x.float() @ w.float().T, dtype, 4)
    products = GpuProducts()
    small = numbers(700, 50, dtype=dtype).T / 26  # of another order in memory, and rows of rows: by torch's own
    for rows_of in (x, x.view(1, rows, 700)):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("tllm.kernels.gpu.products.MEASURED_BYTES", 0)
            check(products.matmul(rows_of, small), rows_of.float() @ small.float().T, dtype, 4)
    assert not products.known
    if not INTERPRETED:
        wide = numbers(4096, 4096, dtype=dtype) / 64
        x = numbers(rows, 4096, dtype=dtype)
        check(products.matmul(x, wide), x.float() @ wide.float().T, dtype, 8)
        assert len(products.known) == 1
