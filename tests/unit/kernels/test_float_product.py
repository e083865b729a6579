"""Products with plain weights: every candidate computes the same, and the fastest one is found by timing them."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor

from tests.support.models.few_bits import libraries
from tllm.kernels import float_product
from tllm.kernels.autotune import Autotuned
from tllm.kernels.fastest import LONG
from tllm.kernels.float_product import CANDIDATES, float_matmul, measure


@pytest.fixture(autouse=True)
def _nothing_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float_product, "choices", Autotuned("product"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 64])
@pytest.mark.parametrize(("outputs", "columns"), [(33, 100), (64, 256), (3, 7)])
def test_candidates_compute_the_same(dtype: torch.dtype, rows: int, outputs: int, columns: int) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(rows, columns).to(dtype), torch.randn(outputs, columns).to(dtype)
    want = x.double() @ weight.double().T
    size = x.double().abs() @ weight.double().abs().T
    # oneDNN's own product comes to 2.7e-7 with AVX-512 on an Intel Xeon, where sums have another order.
    rounding = {torch.float32: 4e-7, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    for name, product in CANDIDATES.items():
        if name == "torch.mv" and rows > 1:
            continue
        found = product(x, weight)
        assert found.dtype == dtype and found.is_contiguous()
        assert ((found.double() - want).abs() / size).max() < rounding, name


@pytest.mark.parametrize("library", libraries(), ids=lambda library: library.instruction_set.name)
def test_the_kernel_of_each_instruction_set(library: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float_product, "library", lambda: library)
    x, weight = torch.randn(5, 90).bfloat16(), torch.randn(21, 90).bfloat16()
    torch.testing.assert_close(
        CANDIDATES["kernel"](x, weight), torch.nn.functional.linear(x, weight), rtol=2e-2, atol=0.1
    )


def test_the_fastest_is_taken_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float_product, "MEASURED_BYTES", 0)
    used: list[str] = []

    def slow(x: Tensor, weight: Tensor) -> Tensor:
        time.sleep(0.005)
        return x @ weight.T

    def fast(x: Tensor, weight: Tensor) -> Tensor:
        used.append("fast")
        return x @ weight.T

    monkeypatch.setattr(float_product, "CANDIDATES", {"linear": slow, "W x^T": fast})
    x, weight = torch.randn(3, 16), torch.randn(8, 16)
    float_matmul(x, weight)
    (kind, choice), *more = float_product.choices.known.items()
    assert not more and choice.name == "W x^T" and (kind.rows, kind.outputs, kind.columns) == (4, 8, 16)
    used.clear()
    float_matmul(torch.randn(4, 16), weight)
    assert used == ["fast"] and len(float_product.choices.known) == 1


def test_a_hopeless_candidate_is_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def slow(x: Tensor, weight: Tensor) -> Tensor:
        calls.append("slow")
        time.sleep(1.2 * LONG)
        return x @ weight.T

    monkeypatch.setattr(float_product, "CANDIDATES", {"linear": lambda x, w: x @ w.T, "W x^T": slow})
    assert measure(torch.randn(3, 16), torch.randn(8, 16)).name == "linear"
    assert len(calls) == 1


def test_small_weights_and_many_rows_are_torchs() -> None:
    float_matmul(torch.randn(3, 16), torch.randn(8, 16))
    float_matmul(torch.randn(100, 1024), torch.randn(2048, 1024))
    assert not float_product.choices.known
