from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from tllm.training.step.split_backward import input_half


class Toy(nn.Module):
    """Linears after and beside each other, a bias, a scale, a stack of which rows are used apart, and a way around."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.rand(6))
        self.stack = nn.Parameter(torch.rand(2, 6, 6))
        self.last = nn.Linear(6, 6, bias=False)
        self.to(torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        y = x + torch.tanh(self.first(x)) * self.scale
        y = y @ self.stack[0] + y @ self.stack[1]
        return self.last(torch.relu(y)) + x


def run_whole(model: Toy, x: Tensor, gradient: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    model(x).backward(gradient)
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_the_halves_together_are_the_whole_to_the_bit() -> None:
    torch.manual_seed(0)
    model, gradient = Toy(), torch.rand(5, 6, dtype=torch.float64)
    x = torch.rand(5, 6, dtype=torch.float64, requires_grad=True)
    want = run_whole(model, x, gradient)
    model.zero_grad()
    again = x.detach().requires_grad_()
    of_x, half = input_half(model(again), gradient, again)
    assert x.grad is not None and torch.equal(of_x, x.grad)
    assert all(p.grad is None for p in model.parameters()), "no weight's gradient may be worked out yet"
    half.run()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and torch.equal(parameter.grad, want[name]), name


def test_each_product_is_done_once() -> None:
    """The work of both halves is that of a whole backward pass: nothing of the first is done again in the second."""
    model, gradient = Toy(), torch.rand(5, 6, dtype=torch.float64)
    x = torch.rand(5, 6, dtype=torch.float64, requires_grad=True)
    out = model(x)
    with FlopCounterMode(display=False) as whole:
        out.backward(gradient)
    again = x.detach().requires_grad_()
    out = model(again)
    with FlopCounterMode(display=False) as first:
        _, half = input_half(out, gradient, again)
    with FlopCounterMode(display=False) as second:
        half.run()
    assert first.get_total_flops() == second.get_total_flops() > 0
    assert first.get_total_flops() + second.get_total_flops() == whole.get_total_flops()


def test_the_hooks_of_a_weight_fire_once_and_in_the_second_half() -> None:
    model, gradient = Toy(), torch.rand(5, 6, dtype=torch.float64)
    fired: list[int] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: fired.append(id(p)))
    x = torch.rand(5, 6, dtype=torch.float64, requires_grad=True)
    _, half = input_half(model(x), gradient, x)
    assert not fired
    half.run()
    assert sorted(fired) == sorted(id(p) for p in model.parameters())


def test_a_number_may_be_the_result() -> None:
    model = Toy()
    x = torch.rand(5, 6, dtype=torch.float64, requires_grad=True)
    of_x, half = input_half(model(x).square().sum(), None, x)
    half.run()
    model.first.zero_grad()
    y = x.detach().requires_grad_()
    model(y).square().sum().backward()
    assert y.grad is not None and torch.equal(of_x, y.grad)
