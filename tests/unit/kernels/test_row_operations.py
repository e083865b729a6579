"""The small operations of a layer against torch's, and alike to the bit under every instruction set."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.models.few_bits import libraries
from tllm.kernels.library import Library
from tllm.kernels.rows.processor_rows import ProcessorRowOperations

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
    check(lambda library: ProcessorRowOperations(library).rms_norm(x, w, 1e-5, adds_one), want, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(1, 2048), (3, 100), (40, 2048)])
def test_gated_activations(dtype: torch.dtype, rows: int, width: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(rows, 2 * width).to(dtype) * 4
    gate, up = x.float().chunk(2, -1)
    check(lambda library: ProcessorRowOperations(library).gated(x, "silu"), F.silu(gate) * up, dtype)
    check(
        lambda library: ProcessorRowOperations(library).gated(x, "gelu_pytorch_tanh"),
        F.gelu(gate, approximate="tanh") * up,
        dtype,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(1, 2048), (3, 100), (5, 7), (40, 2048)])
def test_clamped_activations_of_gates_and_ups_by_turns(dtype: torch.dtype, rows: int, width: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(rows, 2 * width).to(dtype) * 4
    gate, up = x.float()[:, 0::2].clamp(max=3.0), x.float()[:, 1::2].clamp(-3.0, 3.0)
    want = gate * torch.sigmoid(1.7 * gate) * (up + 1)
    check(lambda library: ProcessorRowOperations(library).clamped_swiglu(x, 3.0, 1.7), want, dtype)
    wrong = torch.tensor([[float("nan"), 1.0, 1.0, float("nan"), float("inf"), 0.5]])
    found = ProcessorRowOperations(libraries()[0]).clamped_swiglu(wrong, 3.0, 1.7)
    assert found[0, :2].isnan().all() and found[0, 2].isfinite()


def test_the_exponential_is_right_over_all_of_float32() -> None:
    """Through silu, whose sigmoid has it, against float64."""
    x = torch.cat((torch.linspace(-87, 88, 200_001), torch.tensor([-1e30, -200.0, 100.0, 1e30, 0.0])))[None]
    found = ProcessorRowOperations(libraries()[0]).gated(torch.cat((x, torch.ones_like(x)), 1), "silu").double()
    want = F.silu(x.double())
    near = x.abs() < 87
    assert ((found - want).abs() / want.abs().clamp_min(1e-300))[near].max() < 5e-7
    assert (found - want).abs()[~near & (x < 1e20)].max() < 1e-4 and found.isfinite().all()
    wrong = ProcessorRowOperations(libraries()[0]).gated(torch.tensor([[float("nan"), 1.0]]), "silu")
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
        ProcessorRowOperations(library).rotate_in_place(x[:, :5], cos, sin)
        return x

    check(rotated, want, dtype)
