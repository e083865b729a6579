"""Products with gradients in 16 bits: each way of each pass against float64, and the choice among them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tllm.kernels.autotune import Autotuned
from tllm.kernels.fastest import Choice
from tllm.kernels.library import library, torch_by_one_thread
from tllm.kernels.training import training_matmul
from tllm.kernels.training.training_matmul import PASSES, PassKind, choose_products, wide_or_own
from tllm.training.step.split_backward import input_half

NARROW = [torch.bfloat16, torch.float16]
WAYS = [frozenset(names) for count in range(4) for names in itertools.combinations(PASSES, count)]


@pytest.fixture(autouse=True)
def _nothing_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_matmul, "choices", {})
    monkeypatch.setattr(training_matmul, "measured", Autotuned("product of training"))


def chosen(weight: Tensor, way: frozenset[str]) -> None:
    training_matmul.choices[training_matmul._kind(weight)] = way


def made(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape).to(dtype).requires_grad_()


def gradients(product: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor, back: Tensor) -> list[Tensor]:
    y = product(x, weight)
    return [y.detach(), *torch.autograd.grad(y, (x, weight), back)]


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: "+".join(sorted(way)) or "none")
@pytest.mark.parametrize("rows", [(1,), (33,), (3, 11)], ids=str)
def test_every_way_has_the_values_and_gradients_of_float64(
    dtype: torch.dtype, way: frozenset[str], rows: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    x, weight, back = made(dtype, *rows, 40), made(dtype, 24, 40), made(dtype, *rows, 24).detach()
    chosen(weight, way)
    got = gradients(training_matmul.training_matmul, x, weight, back)
    wide_x, wide_weight = (tensor.detach().double().requires_grad_() for tensor in (x, weight))
    want = gradients(F.linear, wide_x, wide_weight, back.double())
    for mine, exact, like in zip(got, want, (back, x, weight), strict=True):
        assert mine.dtype == dtype and mine.shape == like.shape
        assert (mine.double() - exact).norm() < torch.finfo(dtype).eps * exact.norm()


@pytest.mark.skipif(library() is None, reason="there are no kernels")
@pytest.mark.parametrize("way", WAYS, ids=lambda way: "+".join(sorted(way)) or "none")
@pytest.mark.parametrize("rows", [(1,), (33,), (3, 11)], ids=str)
def test_passes_of_float32_by_the_kernel_have_the_values_and_gradients_of_float64(
    way: frozenset[str], rows: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    x, weight, back = (made(torch.float32, *shape) for shape in ((*rows, 41), (23, 41), (*rows, 23)))
    chosen(weight, way)
    got = gradients(training_matmul.training_matmul, x, weight, back.detach())
    wide_x, wide_weight = (tensor.detach().double().requires_grad_() for tensor in (x, weight))
    want = gradients(F.linear, wide_x, wide_weight, back.detach().double())
    for mine, exact, like in zip(got, want, (back, x, weight), strict=True):
        assert mine.dtype == torch.float32 and mine.shape == like.shape
        assert (mine.double() - exact).norm() < 2e-7 * exact.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", ["reproducible", "chosen"])
def test_products_of_no_rows_have_gradients_of_zeros(dtype: torch.dtype, way: str) -> None:
    """As an expert's that no token was sent to."""
    x, weight, back = (made(dtype, *shape) for shape in ((0, 41), (23, 41), (0, 23)))
    chosen(weight, frozenset(PASSES))
    with torch_by_one_thread() if way == "reproducible" else nullcontext():
        y, of_x, of_weight = gradients(training_matmul.training_matmul, x, weight, back.detach())
    assert y.shape == back.shape and of_x.shape == x.shape
    assert torch.equal(of_weight, torch.zeros_like(weight))


@pytest.mark.skipif(library() is None, reason="there are no kernels")
@pytest.mark.parametrize("faster", [True, False])
def test_the_kernel_makes_passes_of_float32_where_it_is_faster(monkeypatch: pytest.MonkeyPatch, faster: bool) -> None:
    choice = Choice("kernel" if faster else "float32", {"kernel": 1.0, "float32": 1.0})
    monkeypatch.setattr(training_matmul, "faster", lambda *_: choice)
    assert list(choose_products([torch.empty(512, 512)]).values()) == [frozenset(PASSES if faster else ())]
    assert list(choose_products([torch.empty(512, 512)], fixed=True).values()) == [frozenset()]


def test_what_is_left_to_torch_has_its_bits() -> None:
    for dtype in (*NARROW, torch.float32, torch.float64):
        x, weight, back = made(dtype, 5, 320), made(dtype, 256, 320), made(dtype, 5, 256).detach()
        choose_products([weight], fixed=True)
        for mine, theirs in zip(
            gradients(training_matmul.training_matmul, x, weight, back),
            gradients(F.linear, x, weight, back),
            strict=True,
        ):
            assert torch.equal(mine, theirs)


def test_a_choice_is_measured_once_and_a_fixed_one_never(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[PassKind] = []
    everything = frozenset(PASSES)

    def measure(kind: PassKind) -> Choice:
        asked.append(kind)
        return Choice("float32", {"float32": 1.0, "bfloat16": 2.0})

    monkeypatch.setattr(training_matmul, "measure", measure)
    shapes = ((2048, 512), (4096, 512), (512, 512), (8, 300, 512), (64, 64), (100_000,))
    weights = [torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes]
    weights.append(torch.empty(512, 512, dtype=torch.float64))
    assert set(choose_products(weights, fixed=True).values()) == {frozenset()} and not asked
    assert set(choose_products(weights).values()) == {everything}
    threads = torch.get_num_threads()
    wanted = {PassKind(rows, 512, torch.bfloat16, threads, one) for rows in (300, 512, 1024) for one in PASSES}
    assert set(asked) == wanted, "large ones are alike, small ones and float64 have no choice"
    choose_products(weights)
    assert len(asked) == 9
    assert set(choose_products(weights, fixed=True).values()) == {frozenset()}, "though it is known by now"


class Clock:
    """A clock that moves only while something runs."""

    def __init__(self) -> None:
        self.now = 0.0
        self.runs: list[float] = []

    def takes(self, *seconds: float) -> Callable[[], Tensor]:
        """What takes each of these times in turn, and the last ever after."""
        left = list(seconds)

        def run() -> Tensor:
            taken = left.pop(0) if len(left) > 1 else left[0]
            self.now += taken
            self.runs.append(taken)
            return torch.empty(0)

        return run


@pytest.mark.parametrize(
    ("first", "second", "faster"),
    [
        ((1.0,), (2.0,), True),
        ((1.0,), (1.4,), False),
        ((9.0, 1.0), (2.0,), True),
        ((0.001, 0.001), (0.003, 0.04, 0.0011), False),
        ((0.001, 0.001), (0.003, 0.04), True),
    ],
    ids=["twice", "nearly equal", "the first run counts nothing", "interrupted", "slow"],
)
def test_the_best_times_are_held_against_each_other(
    monkeypatch: pytest.MonkeyPatch, first: tuple[float, ...], second: tuple[float, ...], faster: bool
) -> None:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    choice = wide_or_own(clock.takes(*first), clock.takes(*second), torch.bfloat16)
    assert choice.name == ("float32" if faster else "bfloat16")


def test_what_is_hopeless_is_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    assert wide_or_own(clock.takes(0.01), clock.takes(0.3), torch.bfloat16).name == "float32"
    assert clock.runs.count(0.3) == 2


def test_a_backward_pass_in_halves_computes_each_gradient_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def watch(name: str) -> None:
        way = getattr(training_matmul, name)

        def run(*arguments: Any, **named: Any) -> Any:
            ran.append(name)
            return way(*arguments, **named)

        monkeypatch.setattr(training_matmul, name, run)

    watch("input_gradient")
    watch("weight_gradient")
    x, weight = made(torch.bfloat16, 4, 40), made(torch.bfloat16, 24, 40)
    chosen(weight, frozenset(PASSES))
    out = training_matmul.training_matmul(x, weight)
    of_x, rest = input_half(out, torch.ones_like(out), x)
    assert ran == ["input_gradient"] and weight.grad is None
    rest.run()
    assert ran == ["input_gradient", "weight_gradient"]
    want = gradients(F.linear, x, weight, torch.ones_like(out))
    torch.testing.assert_close([of_x, weight.grad], want[1:])
