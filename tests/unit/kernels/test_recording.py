"""What is written down of a computation and played: the operations of torch that have kernels there, and the memory."""

from __future__ import annotations

import gc
import inspect
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.models.few_bits import libraries
from tllm.kernels.library import Library
from tllm.kernels.recording.held_memory import ROUNDED_TO, HeldMemory
from tllm.kernels.recording.host_steps import host_step, left_out, taken_by
from tllm.kernels.recording.recorder import Recorder, Recording
from tllm.kernels.rows.row_operations import row_operations

EACH_LIBRARY = pytest.mark.parametrize("kernels", libraries(), ids=lambda one: one.instruction_set.name)
ODD = torch.tensor([float("inf"), -float("inf"), float("nan"), 3.4e38, -1e-40, 1e-45, 65519.0, 65520.0, 0.0, -0.0])
"""Numbers that are rounded in ways of their own."""


def numbers(rows: int, width: int, dtype: torch.dtype) -> Tensor:
    x = torch.randn(rows, width, dtype=torch.float64) * 10.0 ** torch.randint(-6, 6, (rows, 1))
    x.view(-1)[: len(ODD)] = ODD.double()[: rows * width]
    return x.to(dtype)


def steps(x: Tensor, y: Tensor, bias: Tensor, sums: Tensor) -> Tensor:
    """Of operations that can all be recorded."""
    added = (x * 0.22 + y) + bias
    heads = added.unflatten(-1, (-1, 3))[:, 1:].contiguous()  # rows that lie apart, but for a single one
    rows = heads.flatten(1) + sums.to(x.dtype)
    return torch.nn.functional.pad(rows, (2, 0)).float() + torch.nn.functional.pad(rows.float(), (1, 1))


@torch.inference_mode()
def recorded(kernels: Library, memory: HeldMemory, *inputs: Tensor) -> tuple[Recording, Tensor]:
    recorder = Recorder(kernels, memory)
    with recorder.recording():
        out = steps(*inputs)
    recording = recorder.recorded()
    assert recording is not None, recorder.refused
    return recording, out


@EACH_LIBRARY
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_operations_have_the_bits_of_torch(kernels: Library, dtype: torch.dtype) -> None:
    """When they are recorded, and when they are played with other numbers."""
    for rows, width in ((1, 15), (3, 48), (4, 37 * 3)):
        inputs = [numbers(rows, width, dtype) for _ in range(2)]
        inputs += [numbers(1, width, dtype)[0], numbers(rows, width - 3, torch.float64)]
        with torch.inference_mode():
            recording, out = recorded(kernels, HeldMemory(), *inputs)
            for _ in range(2):
                torch.testing.assert_close(out, steps(*inputs), rtol=0, atol=0, equal_nan=True)
                for x in inputs:
                    x.copy_(numbers(1, x.numel(), x.dtype).view(x.shape))
                recording.play()


@EACH_LIBRARY
@torch.inference_mode()
def test_kernels_are_played(kernels: Library) -> None:
    """With what they are given when played, also where a bias and a norm lie between."""
    x, weight = torch.randn(2, 48), torch.randn(48)
    recorder = Recorder(kernels, HeldMemory())
    with recorder.recording():
        rows = row_operations(x)
        assert rows is not None
        out = rows.gated(rows.rms_norm(x, weight, 1e-5, False) + x, "silu")
    recording, first = recorder.recorded(), out.clone()
    assert recording is not None and len(recording) == 3
    x.neg_()
    recording.play()
    torch.testing.assert_close(
        out, torch.nn.functional.silu(-_normed(-x, weight)[:, :24]) * -_normed(-x, weight)[:, 24:]
    )
    x.neg_()
    recording.play()
    assert torch.equal(out, first)


def _normed(x: Tensor, weight: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(x, (x.shape[1],), weight, 1e-5) + x


@torch.inference_mode()
def test_what_the_host_does_between_kernels_is_done_again() -> None:
    """In the memory that a tensor had then, which is not kept from later ones; and only if somebody takes it."""
    x, memory = torch.randn(2, 48), HeldMemory()
    recorder = Recorder(libraries()[0], memory)
    with recorder.recording():
        out = host_step(Tensor.neg_, x + x) + x
        for _ in range(2):
            out = host_step(Tensor.neg_, out + x)
    recording = recorder.recorded()
    assert recording is not None and len(recording) == 4 and memory.nbytes == 2 * ROUNDED_TO
    x.copy_(torch.arange(96).view(2, 48))
    recording.play()
    assert torch.equal(out, -x)
    with taken_by(left_out):
        assert torch.equal(host_step(Tensor.neg_, x + 1), x + 1)
    recorder = Recorder(libraries()[0], memory)
    with recorder.recording():
        host_step(Tensor.neg_, x)
    assert "may move" in recorder.refused


@torch.inference_mode()
def test_what_has_no_kernel_is_computed_and_refused() -> None:
    x = torch.randn(2, 16)
    for compute in (torch.tanh, lambda x: x.add(x, alpha=2), lambda x: x.clone().add_(1), lambda x: x.to(torch.int64)):
        recorder = Recorder(libraries()[0], HeldMemory())
        with recorder.recording():
            found = compute(x)
        assert torch.equal(found, compute(x)) and recorder.refused and recorder.recorded() is None


def test_memory_goes_on_to_later_tensors_once_no_view_is_left() -> None:
    memory = HeldMemory()
    first = memory.empty((3, 5), torch.bfloat16)
    view, place = first[1:], first.data_ptr()
    del first
    gc.collect()
    assert memory.empty((4,), torch.float32).data_ptr() != place and memory.nbytes == 2 * ROUNDED_TO
    del view
    gc.collect()
    again = memory.empty((5, 5), torch.float32)
    assert again.data_ptr() == place and again.shape == (5, 5) and memory.nbytes == 2 * ROUNDED_TO
    assert memory.empty((ROUNDED_TO,), torch.float64).numel() == ROUNDED_TO and memory.nbytes == 10 * ROUNDED_TO


def test_a_block_that_is_given_back_meanwhile_does_not_take_the_place_of_another() -> None:
    """As when the collector comes to a tensor, or another thread lets one go, while a block is looked for."""
    memory = HeldMemory()
    held = [memory.empty((ROUNDED_TO,), torch.uint8), memory.empty((2 * ROUNDED_TO,), torch.uint8)]
    place = held.pop().data_ptr()

    class Meanwhile(list[tuple[int, int]]):
        def pop(self, *at: Any) -> tuple[int, int]:
            held.clear()
            return super().pop(*at)

        def remove(self, free: tuple[int, int]) -> None:
            held.clear()
            super().remove(free)

    memory._free = Meanwhile(memory._free)
    assert memory.empty((2 * ROUNDED_TO,), torch.uint8).data_ptr() == place and not held
    assert memory.nbytes == 3 * ROUNDED_TO


@torch.inference_mode()
def test_more_and_more_rows_are_recorded_in_the_same_blocks() -> None:
    """Also where what comes of a recording is held, as its place."""
    memory, most, found = HeldMemory(), 32, []
    weight = torch.randn(700)
    for rows in (1, 2, 3, 5, 31, 32):
        recorder = Recorder(libraries()[0], memory, Fraction(most, rows))
        x = torch.randn(rows, 700)
        with recorder.recording():
            operations = row_operations(x)
            assert operations is not None
            out = operations.gated(operations.rms_norm(x, weight, 1e-5, False) + x, "silu")
        recording, place = recorder.recorded(), memory.place_of(out)
        assert recording is not None and place is not None
        found.append((recording, x, place, out.clone(), memory.nbytes))
        del out
    for recording, _, place, want, nbytes in found:  # what a recording reads has to be there
        recording.play()
        assert torch.equal(place, want) and nbytes == found[0][-1] <= 4 * most * 700 * 3 + ROUNDED_TO


def test_torch_loads_no_compiler_for_it() -> None:
    """Torch would wrap what a mode does with an operation, and load its compiler, 800 modules, at the first one."""
    assert Recorder.__torch_dispatch__.__code__.co_filename == inspect.getsourcefile(Recorder)
