"""The small operations of a layer against torch's, and alike to the bit under every instruction set."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.models.few_bits import libraries
from tllm.kernels.library import Library
from tllm.kernels.row_operations import TokenAttention, gated, rms_norm, rotate_in_place

DTYPES = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def check(of: Callable[[Library], Tensor], want: Tensor, dtype: torch.dtype) -> None:
    """Near to torch's in float32, and the same bits under every instruction set."""
    found = [of(library) for library in libraries()]
    assert all(torch.equal(one, found[0]) for one in found)
    torch.testing.assert_close(found[0].float(), want.float(), rtol=DTYPES[dtype], atol=DTYPES[dtype])
    assert found[0].dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(1, 2048), (3, 100), (5, 7), (40, 2048)])
@pytest.mark.parametrize("adds_one", [False, True])
def test_norm(dtype: torch.dtype, rows: int, width: int, adds_one: bool) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(rows, width).to(dtype), torch.randn(width).to(dtype)
    want = F.rms_norm(x.float(), (width,), None, 1e-5) * (w.float() + adds_one)
    check(lambda library: rms_norm(library, x, w, 1e-5, adds_one), want, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(1, 2048), (3, 100), (40, 2048)])
def test_gated_activations(dtype: torch.dtype, rows: int, width: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(rows, 2 * width).to(dtype) * 4
    gate, up = x.float().chunk(2, -1)
    check(lambda library: gated(library, x, "silu"), F.silu(gate) * up, dtype)
    check(lambda library: gated(library, x, "gelu_pytorch_tanh"), F.gelu(gate, approximate="tanh") * up, dtype)


def test_the_exponential_is_right_over_all_of_float32() -> None:
    """Through silu, whose sigmoid has it, against float64."""
    x = torch.cat((torch.linspace(-87, 88, 200_001), torch.tensor([-1e30, -200.0, 100.0, 1e30, 0.0])))[None]
    found = gated(libraries()[0], torch.cat((x, torch.ones_like(x)), 1), "silu").double()
    want = F.silu(x.double())
    near = x.abs() < 87
    assert ((found - want).abs() / want.abs().clamp_min(1e-300))[near].max() < 5e-7
    assert (found - want).abs()[~near & (x < 1e20)].max() < 1e-4 and found.isfinite().all()
    wrong = gated(libraries()[0], torch.tensor([[float("nan"), 1.0]]), "silu")
    assert wrong.isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [64, 32, 20])
def test_rotation_of_part_of_each_head(dtype: torch.dtype, dim: int) -> None:
    torch.manual_seed(0)
    wide = torch.randn(3, 9, 64).to(dtype)  # queries and keys side by side, of which the queries are turned
    cos, sin = torch.randn(3, 1, dim).to(dtype), torch.randn(3, 1, dim).to(dtype)
    part = wide[:, :5].float()
    turned = part[..., :dim] * cos.float() + part[..., :dim].roll(dim // 2, -1) * sin.float()
    want = torch.cat((torch.cat((turned, part[..., dim:]), -1), wide[:, 5:].float()), 1)

    def rotated(library: Library) -> Tensor:
        x = wide.clone()
        rotate_in_place(library, x[:, :5], cos, sin)
        return x

    check(rotated, want, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [16, 48, 64, 128, 256])
@pytest.mark.parametrize("softcap", [0.0, 1.5])
def test_attention_of_single_tokens(dtype: torch.dtype, width: int, softcap: float) -> None:
    """Of several sequences, whose keys lie in several runs; heads that share kv heads unevenly."""
    torch.manual_seed(0)
    keys, values = (torch.randn(2, 200, width).to(dtype) for _ in range(2))
    q = torch.randn(3, 8, width).to(dtype)[:, :6]
    runs = [[range(5, 6)], [range(16, 48), range(96, 130)], [range(200)]]
    first_heads, scale = [0, 2, 6], 0.2
    want = torch.empty(q.shape)
    for token, of_token in enumerate(runs):
        slots = torch.cat([torch.arange(run.start, run.stop) for run in of_token])
        for head in range(6):
            kv = int(head >= 2)
            scores = keys[kv, slots].double() @ q[token, head].double() * scale
            scores = torch.tanh(scores / softcap) * softcap if softcap else scores
            want[token, head] = scores.softmax(0) @ values[kv, slots].double()
    check(lambda library: TokenAttention(library, runs, first_heads, scale, softcap)(q, keys, values), want, dtype)


def test_bits_of_attention_do_not_depend_on_where_pages_lie_or_who_is_beside() -> None:
    torch.manual_seed(0)
    keys, values, q = torch.randn(2, 300, 64), torch.randn(2, 300, 64), torch.randn(2, 4, 64)
    library = libraries()[0]
    alone = TokenAttention(library, [[range(77)]], [0, 2, 4], 0.1, 0.0)(q[:1], keys, values)
    keys[:, 200:277], values[:, 200:277] = keys[:, :77].clone(), values[:, :77].clone()
    runs = [[range(200, 205), range(205, 240), range(240, 277)], [range(9, 150)]]
    assert torch.equal(TokenAttention(library, runs, [0, 2, 4], 0.1, 0.0)(q, keys, values)[:1], alone)
