"""What `forget` keeps, how often it runs again, and that the gradients are those of a plain run to the bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from tests.support.models.live_tensors import Live
from tllm.training.step.recompute import forget
from tllm.training.step.split_backward import input_half

WIDTH, ROWS = 16, 6


class Toy(nn.Module):
    """Two linears with something kept between them; counts how often it is begun and how often it comes to its end."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.begun = self.ended = 0
        self.to(torch.float64)

    def forward(self, x: Tensor, scale: float) -> Tensor:
        self.begun += 1
        y = self.down(torch.tanh(self.up(x)) * scale) + x
        self.ended += 1
        return y


@pytest.fixture
def toy() -> Toy:
    torch.manual_seed(0)
    return Toy()


def make_x() -> Tensor:
    return torch.rand(ROWS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()


def whole(out: Tensor, x: Tensor) -> Tensor:
    out.sum().backward()
    assert x.grad is not None
    return x.grad


def halved(out: Tensor, x: Tensor) -> Tensor:
    of_x, half = input_half(out, torch.ones_like(out), x)
    half.run()
    return of_x


@pytest.mark.parametrize("backward", [whole, halved])
def test_gradients_are_the_same_and_it_runs_again_once(toy: Toy, backward: Callable[..., Tensor]) -> None:
    x = make_x()
    want = [backward(toy(x, 0.5), x), *(p.grad for p in toy.parameters())]
    toy.zero_grad()
    toy.begun = 0
    y = make_x()
    got = [backward(forget(toy, y, 0.5), y), *(p.grad for p in toy.parameters())]
    assert all(a is not None and b is not None and torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert toy.begun == 2, "however many calls of autograd the backward pass is made of"


def test_what_nothing_wants_is_not_made_again(toy: Toy) -> None:
    """The last product only adds: its result is in no gradient."""
    x = make_x()
    with FlopCounterMode(display=False) as plain:
        whole(toy(x, 0.5), x)
    with FlopCounterMode(display=False) as again:
        whole(forget(toy, x, 0.5), x)
    assert again.get_total_flops() - plain.get_total_flops() == 2 * ROWS * WIDTH * 4 * WIDTH
    assert toy.ended == 2, "one a forward pass"


def test_only_inputs_and_result_are_kept(toy: Toy) -> None:
    x = make_x()
    with Live() as live:
        out = forget(toy, x, 0.5)
        assert live.now == out.nbytes
        out.sum().backward()
        del out
        assert live.now == sum(p.nbytes for p in (x, *toy.parameters())), "gradients, and nothing that was made again"


def test_each_tensor_goes_when_its_node_is_done(toy: Toy) -> None:
    """What was made again takes no more than a plain run keeps, beside the gradients that come and go."""
    peaks = []
    for run in (toy, lambda x, scale: forget(toy, x, scale)):
        toy.zero_grad()
        with Live() as live:
            run(make_x(), 0.5).sum().backward()
        peaks.append(live.peak)
    assert peaks[1] <= peaks[0]


def test_a_kept_graph_is_run_through_twice_from_one_second_run(toy: Toy) -> None:
    x = make_x()
    out = forget(toy, x, 0.5)
    out.sum().backward(retain_graph=True)
    first = x.grad
    x.grad = None
    out.sum().backward()
    assert first is not None and x.grad is not None and torch.equal(first, x.grad) and toy.begun == 2


def test_without_gradients_it_is_the_function(toy: Toy) -> None:
    with torch.no_grad():
        assert torch.equal(forget(toy, make_x(), 0.5), toy(make_x(), 0.5))
    assert toy.begun == 2


def test_a_fault_in_the_second_run_is_raised(toy: Toy) -> None:
    out = forget(toy, make_x(), 0.5)
    toy.up.register_forward_hook(lambda *_: (_ for _ in ()).throw(OSError("gone")))
    with pytest.raises(OSError, match="gone"):
        out.sum().backward()


def test_another_second_run_is_our_mistake(toy: Toy) -> None:
    out = forget(toy, make_x(), 0.5)
    toy.down.forward = lambda x: x[:, :WIDTH]  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match="as many tensors"):
        out.sum().backward()
