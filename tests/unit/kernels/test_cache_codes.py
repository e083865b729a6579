"""Keys and values in one byte each: written and read by the kernels, beside rows that numpy rounds one by one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support.models.few_bits import libraries
from tests.support.models.rounded_rows import rounded_rows
from tests.unit.kernels.test_paged_attention import single_tokens
from tllm.kernels.paged_attention import TiledAttention
from tllm.kernels.rows.processor_rows import write_codes

KINDS = {"int8": torch.int8, "fp8": torch.uint8}
DTYPES = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
RUNS = [[range(5, 6)], [range(16, 48), range(96, 130)], [range(200)]]


def written(kind: str, x_TKH: Tensor, places: list[int], slots: int) -> list[tuple[Tensor, Tensor]]:
    """Codes and scales of a cache after a write, by each instruction set."""
    found = []
    for library in libraries():
        codes = torch.zeros(x_TKH.shape[1], slots, x_TKH.shape[2], dtype=KINDS[kind])
        scales = torch.zeros(x_TKH.shape[1], slots, 1)
        write_codes(library, x_TKH, torch.tensor(places), codes, scales)
        found.append((codes, scales))
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [5, 16, 40])
def test_rows_are_rounded_as_the_twin_rounds_them(kind: str, dtype: torch.dtype, width: int) -> None:
    """Rows of every size, also smaller than any scale, zeros, and halves, which are ties."""
    torch.manual_seed(0)
    wide = torch.randn(24, 5, width) * torch.logspace(-44, 4, 24)[:, None, None]
    wide[3], wide[4], wide[5, 1] = 0, -0.0, torch.arange(width) * 0.5 - 2
    wide[6, 1], wide[6, 1, 0] = torch.arange(width) * 2.0**-10, 448
    wide[7, 1], wide[7, 1, 0] = torch.arange(width) + 0.5, 127
    wide[8, 1], wide[8, 1, 0] = torch.arange(width) * 13.0, 448
    x_TKH = wide.to(dtype)[:, 1:4]  # as the model gives them: parts of wider rows
    places = torch.randperm(40)[:24].tolist()
    codes, scales, _ = rounded_rows(kind, x_TKH)
    for got_codes, got_scales in written(kind, x_TKH, places, 40):
        assert torch.equal(got_codes[:, places].transpose(0, 1).double(), codes)
        assert torch.equal(got_scales[:, places].transpose(0, 1).double(), scales)
        others = [slot for slot in range(40) if slot not in places]
        assert not got_codes[:, others].any() and not got_scales[:, others].any()


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite_stays_so(kind: str) -> None:
    x_TKH = torch.ones(3, 2, 48)
    x_TKH[0, 1, 47], x_TKH[1, 0, 3], x_TKH[2, 1, 20] = float("nan"), float("inf"), -float("inf")
    spoilt = torch.tensor([[False, True], [True, False], [False, True]])
    for codes, scales in written(kind, x_TKH, [0, 1, 2], 3):
        assert torch.equal(scales[..., 0].isfinite().T, ~spoilt)
        assert not codes.transpose(0, 1)[spoilt].any()
        read = TiledAttention(libraries()[0], single_tokens([[range(3)]]), [0, 1, 2], 1.0)(
            torch.ones(1, 2, 48), codes, codes, scales, scales
        )
        assert read.isnan().all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [16, 48, 64, 128, 256])
@pytest.mark.parametrize("softcap", [0.0, 1.5])
def test_attention_is_that_over_the_numbers_read(kind: str, dtype: torch.dtype, width: int, softcap: float) -> None:
    """Heads that share kv heads unevenly; each row of another size, so that a neighbour's scale would show."""
    torch.manual_seed(0)
    sizes = torch.logspace(-2, 0, 200)[torch.randperm(200)][:, None, None]
    (keys, key_scales), (values, value_scales) = (
        written(kind, torch.randn(200, 2, width) * sizes, list(range(200)), 200)[0] for _ in range(2)
    )
    numbers = torch.tensor([read_byte(kind, byte) for byte in range(256)], dtype=torch.float64)
    k_KSH, v_KSH = (
        numbers[codes.view(torch.uint8).long()] * scales.double()
        for codes, scales in ((keys, key_scales), (values, value_scales))
    )
    q, first_heads, scale = torch.randn(3, 8, width).to(dtype)[:, :6], [0, 2, 6], 0.2
    want = torch.empty(q.shape)
    for token, of_token in enumerate(RUNS):
        slots = torch.cat([torch.arange(run.start, run.stop) for run in of_token])
        for head in range(6):
            kv = int(head >= 2)
            scores = k_KSH[kv, slots] @ q[token, head].double() * scale
            scores = torch.tanh(scores / softcap) * softcap if softcap else scores
            want[token, head] = scores.softmax(0) @ v_KSH[kv, slots]
    found = [
        TiledAttention(library, single_tokens(RUNS), first_heads, scale, softcap)(
            q, keys, values, key_scales, value_scales
        )
        for library in libraries()
    ]
    assert all(torch.equal(one, found[0]) for one in found) and found[0].dtype == dtype
    torch.testing.assert_close(found[0].float(), want, rtol=DTYPES[dtype], atol=DTYPES[dtype])


def read_byte(kind: str, byte: int) -> float:
    if kind == "int8":
        return float(byte - 256 * (byte > 127))
    size = byte & 127
    number = (size & 7) * 2.0**-9 if size < 8 else (8 + (size & 7)) * 2.0 ** ((size >> 3) - 10)
    return -number if byte > 127 else number


@pytest.mark.parametrize("kind", KINDS)
def test_bits_do_not_depend_on_where_pages_lie_or_who_is_beside_or_how_many_threads(kind: str) -> None:
    torch.manual_seed(0)
    x_TKH, q = torch.randn(77, 2, 64), torch.randn(2, 4, 64)
    ((alone, scales), *_) = written(kind, x_TKH, list(range(77)), 77)
    elsewhere = [*range(200, 205), *range(20, 60), *range(240, 272)]
    beside = torch.cat((torch.randn(100, 2, 64), x_TKH))
    ((among, other_scales), *_) = written(kind, beside, [*range(100, 200), *elsewhere], 300)
    assert torch.equal(among[:, elsewhere], alone) and torch.equal(other_scales[:, elsewhere], scales)
    runs = [[range(200, 205), range(20, 60), range(240, 272)], [range(100, 190)]]
    library, heads, before = libraries()[0], [0, 2, 4], torch.get_num_threads()
    want = TiledAttention(library, single_tokens([[range(77)]]), heads, 0.1)(q[:1], alone, alone, scales, scales)
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            got = TiledAttention(library, single_tokens(runs), heads, 0.1)(q, among, among, other_scales, other_scales)
            assert torch.equal(got[:1], want)
    finally:
        torch.set_num_threads(before)
