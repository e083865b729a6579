"""What chooses experts: to the bit the slow twin's product, alike everywhere; scores near to those in float64."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.models.few_bits import libraries
from tllm.kernels.batch_invariant import router_matmul, sigmoid, softmax
from tllm.kernels.library import Library, using
from tllm.parallel.linear import RouterLinear

LANES = 16
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(params=libraries(), ids=lambda library: library.instruction_set.name)
def kernels(request: pytest.FixtureRequest) -> Iterator[Library]:
    with using(request.param):
        yield request.param


def slow_matmul(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    """Column k is added to sum k % 16, in float64; the sixteen sums are added by halves."""
    products = x_TD.double()[:, None] * weight_ED.double()
    columns = products.shape[-1]
    sums = F.pad(products, (0, -columns % LANES)).unflatten(-1, (-1, LANES))
    total = torch.zeros_like(sums[..., 0, :])
    for at in range(sums.shape[-2]):
        total = total + sums[..., at, :]
    while total.shape[-1] > 1:
        first, second = total.chunk(2, -1)
        total = first + second
    return total[..., 0].float()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("experts", "columns"), [(1, 2048), (7, 100), (128, 96), (5, 7)])
def test_products_have_the_bits_of_the_slow_twin(
    kernels: Library, dtype: torch.dtype, experts: int, columns: int
) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(9, columns).to(dtype), torch.randn(experts, columns).to(dtype)
    want = slow_matmul(x, weight)
    assert torch.equal(router_matmul(kernels, x, weight), want)
    for rows in (1, 2, 4, 5):
        assert torch.equal(router_matmul(kernels, x[9 - rows :], weight), want[9 - rows :])
    assert router_matmul(kernels, x[:0], weight).shape == (0, experts)


def test_products_do_not_depend_on_threads(kernels: Library) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(9, 512), torch.randn(64, 512)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(router_matmul(kernels, x, weight), slow_matmul(x, weight))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("width", [1, 2, 16, 60, 128])
def test_scores_are_near_those_in_float64_and_alike_everywhere(width: int) -> None:
    torch.manual_seed(1)
    x = torch.randn(6, width) * 5
    found = []
    for library in libraries():
        with using(library), torch.no_grad():
            found.append((softmax(x), sigmoid(x)))
            assert all(torch.equal(f(x[3:4]), y[3:4]) for f, y in zip((softmax, sigmoid), found[-1], strict=True))
    for scores in found:
        assert all(torch.equal(one, other) for one, other in zip(scores, found[0], strict=True))
    want = (x - x.amax(-1, keepdim=True)).double().softmax(-1)  # float32 rounds the difference
    assert ((found[0][0] - want).abs() / want).max() < 1e-6
    assert ((found[0][1] - x.double().sigmoid()).abs() / x.double().sigmoid()).max() < 1e-6


def test_scores_of_extreme_logits(kernels: Library) -> None:
    x = torch.tensor([[0.0, -200.0, 1e30], [math.nan, 1.0, 2.0], [-1e30, -1e30, -1e30]])
    with torch.no_grad():
        found = softmax(x)
    assert torch.equal(found[0], torch.tensor([0.0, 0.0, 1.0])) and found[1].isnan().all()
    assert torch.allclose(found[2], torch.full((3,), 1 / 3))


def test_a_router_keeps_its_gradients_and_its_bias(kernels: Library) -> None:
    torch.manual_seed(2)
    router = RouterLinear(48, "router", 6, bias=True)
    weight, bias = torch.randn(6, 48).bfloat16(), torch.randn(6).bfloat16()
    router.weight.data, router.bias.data = weight, bias
    x = torch.randn(5, 48).bfloat16()
    with torch.no_grad():
        found = router(x)
    assert found.dtype == torch.float32 and torch.equal(found, slow_matmul(x, weight) + bias)
    router.requires_grad_()
    learned = router(x)
    assert learned.requires_grad and learned.dtype == torch.bfloat16
    assert (learned.float() - found).abs().max() < 0.1
