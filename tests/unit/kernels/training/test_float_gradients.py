"""Gradients of products of float32: against float64, and the same bits whatever is computed beside a number."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.support.models.few_bits import libraries
from tests.support.models.guarded_memory import GuardedMemory
from tllm.kernels.library import Library, using
from tllm.kernels.training.ordered_products import ordered_input_gradient, ordered_weight_gradient

SHAPES = [(1, 1, 1), (1, 129, 33), (3, 7, 15), (12, 128, 32), (13, 300, 31), (97, 40, 70), (500, 257, 97)]
"""Rows of x, outputs, columns."""


@pytest.fixture(autouse=True, params=libraries(), ids=lambda one: one.instruction_set.name)
def kernels(request: pytest.FixtureRequest) -> Iterator[Library]:
    with using(request.param):
        yield request.param


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def is_near(got: Tensor, left: Tensor, right: Tensor) -> bool:
    exact, bound = left.double() @ right.double(), left.double().abs() @ right.double().abs()
    return bool(((got.double() - exact).abs() <= 2e-6 * bound).all())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_they_are_those_of_float64(shape: tuple[int, int, int], threads: int) -> None:
    rows, outputs, columns = shape
    torch.manual_seed(0)
    gradient, weight, x = torch.randn(rows, outputs), torch.randn(outputs, columns), torch.randn(rows, columns)
    assert is_near(ordered_input_gradient(gradient, weight), gradient, weight)
    assert is_near(ordered_weight_gradient(gradient, x), gradient.t(), x)


def test_a_number_has_the_same_bits_whatever_is_beside_it(threads: int) -> None:
    torch.manual_seed(0)
    gradient, weight, x = torch.randn(150, 300), torch.randn(300, 90), torch.randn(150, 90)
    of_x, of_weight = ordered_input_gradient(gradient, weight), ordered_weight_gradient(gradient, x)
    for first, last in ((0, 1), (7, 12), (11, 90)):
        part = slice(first, last)
        assert torch.equal(ordered_input_gradient(gradient[part], weight), of_x[part])
        assert torch.equal(ordered_input_gradient(gradient, weight[:, part]), of_x[:, part])
        assert torch.equal(ordered_weight_gradient(gradient[:, part], x), of_weight[part])
        assert torch.equal(ordered_weight_gradient(gradient, x[:, part]), of_weight[:, part])


def test_a_sum_is_of_pieces_in_the_order_of_steps() -> None:
    """Each addition of the first piece is lost beside its first number, and so is no sum of another piece."""
    gradient = torch.full((1, 256), 2.0**-24)
    gradient[0, 0] = 1.0
    assert ordered_input_gradient(gradient, torch.ones(256, 1)).item() == 1 + 2.0**-17


def test_what_is_copied_in_turns_is_summed_in_one() -> None:
    """So many rows that a single piece of their columns is copied at a time."""
    torch.manual_seed(0)
    gradient, x = torch.randn(300, 9000), torch.randn(300, 2)
    of_weight = ordered_weight_gradient(gradient, x)
    assert is_near(of_weight, gradient.t(), x)
    assert torch.equal(of_weight[-50:], ordered_weight_gradient(gradient[:, -50:], x))
    assert is_near(ordered_input_gradient(gradient.t().contiguous(), x), gradient.t(), x)


@pytest.mark.parametrize("is_turned", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_nothing_is_read_or_written_beyond_what_is_given(
    shape: tuple[int, int, int], is_turned: bool, kernels: Library
) -> None:
    rows, steps, columns = shape
    with GuardedMemory() as memory:
        scratch = memory.copy(torch.empty(kernels.training.float_gradient_scratch(rows, steps, is_turned)))
        left, right = memory.copy(torch.ones(rows * steps)), memory.copy(torch.ones(steps, columns))
        y = memory.copy(torch.full((rows, columns), torch.nan))
        numbers = (left.data_ptr(), right.data_ptr(), rows, steps, columns, is_turned, y.data_ptr(), scratch.data_ptr())
        kernels.training.float_gradient(*numbers, 1)
        assert (y == steps).all()
