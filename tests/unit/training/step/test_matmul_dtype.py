"""What a run computes its products in: chosen by what was measured, fixed for deterministic runs, said in words."""

from __future__ import annotations

import pytest
import torch

from tllm.kernels.autotune import Autotuned
from tllm.kernels.fastest import Choice
from tllm.kernels.library import library
from tllm.kernels.training import training_matmul
from tllm.model.attention import AttentionSpec
from tllm.training.attention import attention_dtype, kernel_attention
from tllm.training.attention.packed_attention import TrainAttend
from tllm.training.data.batch_tensors import Tokens
from tllm.training.step.matmul_dtype import choose_matmul_dtype

WEIGHTS = [torch.empty(rows, 512, dtype=torch.bfloat16) for rows in (256, 512)]


@pytest.fixture(autouse=True)
def _nothing_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_matmul, "choices", {})
    monkeypatch.setattr(training_matmul, "measured", Autotuned("product of training"))
    monkeypatch.setattr(attention_dtype, "_chosen", {})
    monkeypatch.setattr(attention_dtype, "measured", Autotuned("attention of training"))
    monkeypatch.setattr(kernel_attention, "_chosen", set())
    monkeypatch.setattr(kernel_attention, "choices", Autotuned("attention of training by a kernel"))


@pytest.mark.parametrize("faster", [True, False])
def test_the_report_says_what_is_computed_in_float32(monkeypatch: pytest.MonkeyPatch, faster: bool) -> None:
    monkeypatch.setattr(kernel_attention, "fastest", lambda *_, **__: Choice("torch", {"torch": 1.0, "kernel": 2.0}))
    choice = Choice("float32" if faster else "bfloat16", {"float32": 1.0, "bfloat16": 2.0})
    for module in (training_matmul, attention_dtype):
        monkeypatch.setattr(module, "wide_or_own", lambda *_: choice)
    said = choose_matmul_dtype(WEIGHTS, torch.bfloat16)
    if faster:
        wanted = "in float32, which is faster here: forward, gradient of inputs, gradient of weights, attention"
        assert said == f"bfloat16; {wanted}"
    else:
        assert said == "bfloat16, as torch computes them"
    assert choose_matmul_dtype(WEIGHTS, torch.bfloat16, fixed=True) == "bfloat16, as torch computes them"
    assert choose_matmul_dtype(WEIGHTS, torch.float32) == ""


@pytest.mark.skipif(library() is None, reason="there are no kernels")
def test_the_report_says_that_attention_is_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    by_kernel = "attention by our kernel, which is faster here"
    monkeypatch.setattr(kernel_attention, "fastest", lambda *_, **__: Choice("kernel", {"torch": 2.0, "kernel": 1.0}))
    choice = Choice("float32", {"float32": 1.0, "bfloat16": 2.0})
    for module in (training_matmul, attention_dtype):
        monkeypatch.setattr(module, "wide_or_own", lambda *_: choice)
    wide = "in float32, which is faster here: forward, gradient of inputs, gradient of weights"
    assert choose_matmul_dtype(WEIGHTS, torch.bfloat16) == f"bfloat16; {wide}; {by_kernel}"
    assert choose_matmul_dtype(WEIGHTS, torch.float32) == f"float32; {by_kernel}"
    assert choose_matmul_dtype(WEIGHTS, torch.float64) == ""
    assert choose_matmul_dtype(WEIGHTS, torch.float32, fixed=True) == ""


@pytest.mark.parametrize("within", [torch.bfloat16, torch.float32], ids=str)
def test_attention_in_either_dtype_has_the_gradients_of_float64(within: torch.dtype) -> None:
    torch.manual_seed(0)
    attention_dtype._chosen[torch.bfloat16] = within
    narrow = [torch.randn(48, heads, 16).bfloat16().requires_grad_() for heads in (4, 2, 2)]
    wide = [x.detach().double().requires_grad_() for x in narrow]
    back = torch.randn(48, 4, 16).bfloat16()
    got, want = (
        [y.detach(), *torch.autograd.grad(y, of, back.to(y.dtype))]
        for of, y in ((of, attended(*of)) for of in (narrow, wide))
    )
    for mine, exact in zip(got, want, strict=True):
        assert mine.dtype == torch.bfloat16
        assert (mine.double() - exact).norm() < 2 * torch.finfo(torch.bfloat16).eps * exact.norm()


def attended(q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor) -> torch.Tensor:
    """Over documents of 20 and 28 tokens."""
    nothing = torch.zeros(48, dtype=torch.int64)
    tokens = Tokens(nothing, nothing, nothing, [20, 28])
    return TrainAttend({0: AttentionSpec(scale=0.25)}, tokens)(0, q_TNH, k_TKH, v_TKH)
