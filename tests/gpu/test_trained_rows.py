"""The Triton kernels that have gradients against torch's steps: on a CUDA device, or by Triton's interpreter.

`TRITON_INTERPRET=1 python -m pytest tests/gpu/test_trained_rows.py`, where triton is installed, needs no GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not torch.cuda.is_available() and not INTERPRETED:
    pytest.skip("torch finds no CUDA device here", allow_module_level=True)
pytest.importorskip("triton")

from tllm.kernels.gpu.trained_loss import cross_entropy  # noqa: E402
from tllm.kernels.gpu.trained_rows import TrainedRowOperations  # noqa: E402

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
DTYPES = {torch.float32: 4e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
ROWS = TrainedRowOperations()


def check(
    found: Callable[..., Tensor], want: Callable[..., Tensor], *inputs: Tensor, result: torch.dtype | None = None
) -> None:
    """The result, and the gradient of each input for random gradients of it; what is wanted is made in float32."""
    limit = DTYPES[inputs[0].dtype]
    mine = [x.to(DEVICE).requires_grad_() for x in inputs]
    wide = [x.float().to(DEVICE).requires_grad_() for x in inputs]
    y, wanted = found(*mine), want(*wide)
    assert y.dtype == (result or inputs[0].dtype)
    gradient = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    gradients = torch.autograd.grad(y, mine, gradient.to(y.dtype))
    for got, other in zip(
        (y, *gradients), (wanted, *torch.autograd.grad(wanted, wide, gradient.to(y.dtype).float())), strict=True
    ):
        torch.testing.assert_close(got.float(), other, rtol=limit, atol=limit)


def numbers(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_activations(dtype: torch.dtype) -> None:
    x = 4 * numbers(3, 2 * 1100, dtype=dtype)
    for name, act in {"silu": F.silu, "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh")}.items():
        check(lambda x, name=name: ROWS.gated(x, name), lambda x, act=act: act(x[:, :1100]) * x[:, 1100:], x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("turned", [24, 10])
def test_rotation_of_all_or_some_of_a_head(dtype: torch.dtype, turned: int) -> None:
    x, half = numbers(5, 9, 24, dtype=dtype), turned // 2
    cos, sin = (numbers(5 + n, 1, turned, dtype=dtype)[:5].to(DEVICE) for n in range(2))

    def steps(x: Tensor) -> Tensor:
        x = x[:, 2:6]
        moved = x[..., :turned] * cos.float() + x[..., :turned].roll(half, -1) * sin.float()
        return torch.cat((moved, x[..., turned:]), -1)

    check(lambda x: ROWS.rotate_in_place(x[:, 2:6], cos, sin), steps, x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("adds_one", [False, True])
def test_norm(dtype: torch.dtype, adds_one: bool) -> None:
    x, w = numbers(6, 2, 100, dtype=dtype), numbers(100, dtype=dtype)
    check(
        lambda x, w: ROWS.rms_norm(x, w, 1e-5, adds_one),
        lambda x, w: F.rms_norm(x, (100,), None, 1e-5) * (w + adds_one),
        x,
        w,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [100, 9001])
def test_losses(dtype: torch.dtype, vocab: int) -> None:
    """One label is ignored; of one row a logit is far above all others, and of another all but one are hardly there."""
    x = numbers(5, vocab, dtype=dtype)
    x[1, 7], x[2, 3:] = 80.0, -200.0
    labels = torch.tensor([0, 7, 1, -100, vocab - 1], device=DEVICE)
    check(
        lambda x: cross_entropy(x * 1, labels, -100),
        lambda x: F.cross_entropy(x, labels, ignore_index=-100, reduction="none"),
        x,
        result=torch.float32,
    )


@pytest.mark.parametrize("tokens", [5, 0])
def test_a_second_backward_pass_is_refused(tokens: int) -> None:
    """The gradient lies where the logits lay."""
    leaf = torch.randn(tokens, 100, device=DEVICE).requires_grad_()
    loss = cross_entropy(leaf, torch.zeros(tokens, dtype=torch.int64, device=DEVICE), -100).sum()
    (gradient,) = torch.autograd.grad(loss, leaf, retain_graph=True)
    assert gradient.data_ptr() == leaf.data_ptr()
    with pytest.raises(RuntimeError, match="inplace operation"):
        torch.autograd.grad(loss, leaf)
