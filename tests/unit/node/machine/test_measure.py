"""What is measured by a clock that the test moves: medians, how often, what is left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from tllm.node.machine import measure as measure_module
from tllm.node.machine.measure import measure, measure_memory, measure_operation, measure_products, repeat


class Clock:
    """Stands still but for what work says that it takes."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def takes(self, seconds: list[float]) -> Callable[[], None]:
        left: Iterator[float] = iter(seconds)

        def work() -> None:
            self.now += next(left)

        return work


def test_each_call_but_the_first_counts_until_the_time_is_over() -> None:
    clock = Clock()
    assert repeat(clock.takes([5.0, 1.0, 2.0, 3.0, 1.0, 9.0]), 12.0, clock) == [1.0, 2.0, 3.0, 1.0]


def test_there_are_three_even_where_there_is_no_time() -> None:
    clock = Clock()
    assert repeat(clock.takes([1.0, 2.0, 3.0, 4.0]), 0.0, clock) == [2.0, 3.0, 4.0]


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A machine of 1 GFLOP/s in bfloat16 and 100 in float32, with memory of 1 GB/s."""
    clock = Clock()

    def matmul(x_TD: torch.Tensor, weight_FD: torch.Tensor) -> None:
        rate = 1e9 if x_TD.dtype == torch.bfloat16 else 1e11
        clock.now += 2 * len(x_TD) * weight_FD.numel() / rate

    monkeypatch.setattr(measure_module, "matmul", matmul)
    return clock


def test_products_are_what_the_clock_says(work: Clock) -> None:
    found = list(measure_products("float32", 0.01, 2**40, work, (64, 128)))
    assert [(one.width, one.rows) for one in found] == [(w, r) for w in (64, 128) for r in measure_module.ROWS]
    assert all(one.flops_per_second == pytest.approx(1e11) and one.repeats >= 3 for one in found)


def test_what_takes_too_long_is_left_out(work: Clock) -> None:
    """A product of 512 rows takes 16.8 ms; each of the eight shapes has 10 ms of 80."""
    found = list(measure_products("bfloat16", 0.08, 2**40, work, (128, 64)))
    assert [one.rows for one in found if one.width == 128] == [1, 8, 64]
    assert [one.rows for one in found if one.width == 64] == [1, 8, 64, 512]
    assert all(one.flops_per_second == pytest.approx(1e9) for one in found)


def test_what_does_not_fit_in_memory_is_left_out(work: Clock) -> None:
    room = (64 + 1024) * 64 * 4
    assert {one.width for one in measure_products("float32", 0.01, room, work, (64, 128))} == {64}


def test_the_speed_of_memory_counts_what_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_module, "repeat", lambda work, seconds, clock: [work() is None, 0.5, 0.5, 0.1][1:])
    speed = measure_memory(1.0, 2**20)
    assert (speed.read, speed.copy) == (2**21, 2**22)


def test_an_operation_is_a_thousandth_of_a_thousand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_module, "repeat", lambda work, seconds, clock: [2.0, 1.0, 7.0])
    assert measure_operation(1.0) == 2e-3


def test_a_real_machine_has_speeds() -> None:
    found = measure(0.4, 64 * 2**20)
    assert {product.dtype for product in found.products} >= {"float32", "bfloat16"}
    numbers = [product.flops_per_second for product in found.products]
    assert min(*numbers, found.memory.read, found.memory.copy, found.operation) > 0
